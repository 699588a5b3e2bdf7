package createostest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strconv"
	"strings"
)

// handlePutFile stores a file with its missing parents.
func (s *Server) handlePutFile(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	path, m, ok := s.fileRequest(w, r, sb)
	if !ok {
		return
	}
	if r.ContentLength > s.opts.MaxFileBytes {
		s.failFileSize(w)
		return
	}
	n, err := m.put(path, http.MaxBytesReader(w, r.Body, s.opts.MaxFileBytes))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		s.failFileSize(w)
	case errors.Is(err, errBadPath):
		fail(w, http.StatusBadRequest, badField("path", "is not a path of a file"))
	case err != nil:
		failServer(w, http.StatusInternalServerError, err.Error())
	default:
		success(w, http.StatusOK, map[string]any{"bytes": n, "path": path})
	}
}

func (s *Server) failFileSize(w http.ResponseWriter) {
	fail(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("file exceeds %d bytes", s.opts.MaxFileBytes))
}

func (s *Server) handleGetFile(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	path, m, ok := s.fileRequest(w, r, sb)
	if !ok {
		return
	}
	file, size, err := m.open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		fail(w, http.StatusNotFound, badField("path", "no such file"))
		return
	case errors.Is(err, errBadPath):
		fail(w, http.StatusBadRequest, badField("path", "is not a path of a file"))
		return
	case err != nil:
		failServer(w, http.StatusInternalServerError, err.Error())
		return
	}
	defer file.Close()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	w.WriteHeader(http.StatusOK)
	io.Copy(w, file) // a short copy ends the connection: the length says so
}

// fileRequest checks what both directions have in common and counts as
// activity.
func (s *Server) fileRequest(w http.ResponseWriter, r *http.Request, sb *sandbox) (string, machine, bool) {
	path := r.URL.Query().Get("path")
	if !strings.HasPrefix(path, "/") {
		fail(w, http.StatusBadRequest, badField("path", "must be absolute"))
		return "", nil, false
	}
	m, _, ok := s.running(w, sb)
	return path, m, ok
}

// running lets through what needs a running sandbox, and counts as activity.
// The channel is closed once it leaves that state.
func (s *Server) running(w http.ResponseWriter, sb *sandbox) (m machine, left <-chan struct{}, ok bool) {
	s.mu.Lock()
	if sb.state != StateRunning {
		text := sb.notRunningLocked()
		s.mu.Unlock()
		fail(w, http.StatusConflict, text)
		return nil, nil, false
	}
	m, left = sb.machine, sb.left
	s.mu.Unlock()
	s.touch(sb)
	return m, left, true
}

func (sb *sandbox) notRunningLocked() string {
	switch sb.state {
	case StatePausing:
		return "sandbox is pausing; resume first"
	case StatePaused:
		return "sandbox is paused; resume it before accessing files"
	}
	return "sandbox is " + string(sb.state)
}

// failNotRunning answers a request that the end of the running state caught.
func (s *Server) failNotRunning(w http.ResponseWriter, sb *sandbox) {
	s.mu.Lock()
	text := sb.notRunningLocked()
	s.mu.Unlock()
	fail(w, http.StatusConflict, text)
}

// undisturbed answers 409 if the sandbox has left the running state while a
// request waited, and gives the request up if the server is closing. It comes
// before any look at what the request waited for: the end of a command by a
// destroy or a Close must not pass for the command's own.
func (s *Server) undisturbed(w http.ResponseWriter, sb *sandbox, left <-chan struct{}) bool {
	if isClosed(s.done) {
		panic(http.ErrAbortHandler)
	}
	if isClosed(left) {
		s.failNotRunning(w, sb)
		return false
	}
	return true
}
