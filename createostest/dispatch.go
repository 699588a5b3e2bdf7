package createostest

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"
)

// call is what the server knows of the request that it is serving.
type call struct {
	entry *Request
	user  string
	fault *Fault
}

type callKey struct{}

func callOf(r *http.Request) *call { return r.Context().Value(callKey{}).(*call) }
func userOf(r *http.Request) string {
	return callOf(r).user
}

// stuckState is the state in which the fault on this request, if there is one,
// wants its sandbox to stay.
func stuckState(r *http.Request) State {
	if f := callOf(r).fault; f != nil {
		return f.StuckState
	}
	return ""
}

// routes builds the route table. The patterns are also the names by which
// faults and the request log speak of routes.
func (s *Server) routes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", s.handleHealth)
	mux.HandleFunc("GET /readyz", s.handleReady)
	mux.HandleFunc("GET /v1/shapes", s.handleShapes)
	mux.HandleFunc("GET /v1/rootfs", s.handleRootfs)
	mux.HandleFunc("GET /v1/whoami", s.auth(s.handleWhoami))
	mux.HandleFunc("POST /v1/sandboxes", s.auth(s.handleCreate))
	mux.HandleFunc("GET /v1/sandboxes", s.auth(s.handleList))

	const box = "/v1/sandboxes/{id}"
	mux.HandleFunc("GET "+box, s.owned(s.handleGet))
	mux.HandleFunc("PATCH "+box, s.owned(s.handlePatch))
	mux.HandleFunc("DELETE "+box, s.owned(s.handleDelete))
	mux.HandleFunc("POST "+box+"/pause", s.owned(s.handlePause))
	mux.HandleFunc("POST "+box+"/resume", s.owned(s.handleResume))
	mux.HandleFunc("POST "+box+"/fork", s.owned(s.handleFork))
	mux.HandleFunc("POST "+box+"/resize", s.owned(s.handleResize))
	mux.HandleFunc("GET "+box+"/egress", s.owned(s.handleGetEgress))
	mux.HandleFunc("PUT "+box+"/egress", s.owned(s.handlePutEgress))
	mux.HandleFunc("POST "+box+"/exec", s.owned(s.handleExec))
	mux.HandleFunc("PUT "+box+"/files", s.owned(s.handlePutFile))
	mux.HandleFunc("GET "+box+"/files", s.owned(s.handleGetFile))

	const proc = box + "/processes/{process}"
	mux.HandleFunc("POST "+box+"/processes", s.owned(s.handleStartProcess))
	mux.HandleFunc("GET "+box+"/processes", s.owned(s.handleListProcesses))
	mux.HandleFunc("GET "+proc, s.process(s.handleGetProcess))
	mux.HandleFunc("DELETE "+proc, s.process(s.handleDeleteProcess))
	mux.HandleFunc("GET "+proc+"/connect", s.process(s.handleConnect))
	mux.HandleFunc("GET "+proc+"/wait", s.process(s.handleWait))
	mux.HandleFunc("POST "+proc+"/input", s.process(s.handleInput))
	mux.HandleFunc("POST "+proc+"/stdin/close", s.process(s.handleCloseStdin))
	mux.HandleFunc("POST "+proc+"/resize", s.process(s.handleResizePTY))
	mux.HandleFunc("POST "+proc+"/signal", s.process(s.handleSignal))

	for _, route := range []string{
		"/v1/hosts", "/v1/metrics", "/v1/metrics/timeseries", "/v1/networks", "/v1/networks/{net}", "/v1/disks",
		"/v1/disks/{disk}", "/v1/templates", "/v1/templates/{template}", box + "/access-token",
		box + "/access-token/rotate", box + "/bandwidth", box + "/bandwidth/recharge", box + "/metrics",
		box + "/ssh-pubkeys", box + "/networks", box + "/networks/{net}", box + "/disks", box + "/disks/{disk}",
		box + "/tunnel/{port}", box + "/shell", box + "/shell-ws",
	} {
		mux.HandleFunc(route, s.auth(notEmulated))
	}
	return mux
}

// byIPRoutes is a table of its own: for ServeMux its pattern and that of, say,
// a sandbox's egress are in conflict over /v1/sandboxes/by-ip/egress.
func (s *Server) byIPRoutes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+byIPPrefix+"{ip}", s.auth(s.handleByIP))
	return mux
}

const byIPPrefix = "/v1/sandboxes/by-ip/"

func (s *Server) muxOf(r *http.Request) *http.ServeMux {
	if strings.HasPrefix(r.URL.Path, byIPPrefix) {
		return s.byIP
	}
	return s.mux
}

func notEmulated(w http.ResponseWriter, r *http.Request) {
	failServer(w, http.StatusNotImplemented, "createostest does not emulate "+r.URL.Path)
}

// serve is every request's way through the server: log, rate limit, fault,
// route.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if !s.begin() {
		panic(http.ErrAbortHandler)
	}
	defer s.work.Done()
	defer func() {
		if v := recover(); v != nil {
			s.complainPanic(r.Method+" "+r.URL.Path, v)
			panic(http.ErrAbortHandler)
		}
	}()

	now := time.Now()
	_, pattern := s.muxOf(r).Handler(r)
	c := &call{entry: s.log.arrive(r, pattern, now)}
	defer s.log.update(c.entry, func(e *Request) { e.Done = true })
	r = r.WithContext(context.WithValue(r.Context(), callKey{}, c))
	r.Body = &countingBody{r.Body, &s.log, c.entry}
	out := &statusWriter{ResponseWriter: w, note: func(status int) {
		s.log.update(c.entry, func(e *Request) { e.Status = status })
	}}
	out.Header().Set("X-Request-Id", "req_"+lowerText(16))

	if retry, ok := s.limiter.allow(r.RemoteAddr, now); !ok {
		if !s.opts.OmitRetryAfter {
			out.Header().Set("Retry-After", wholeSeconds(retry))
		}
		fail(out, http.StatusTooManyRequests, "rate limit exceeded")
		return
	}
	c.fault = s.faults.match(*c.entry)
	if c.fault != nil {
		s.log.update(c.entry, func(e *Request) { e.Faulted = true })
		if c.fault.Refuse {
			panic(http.ErrAbortHandler)
		}
	}
	if !isFileUpload(pattern) {
		if err := s.bufferBody(r, c.entry); err != nil {
			status := http.StatusBadRequest
			if errors.Is(err, errBodyTooLarge) {
				status = http.StatusRequestEntityTooLarge
			}
			fail(out, status, err)
			return
		}
	}
	if c.fault != nil {
		s.serveFault(out, r, c.fault)
		return
	}
	s.route(out, r)
}

func isFileUpload(pattern string) bool { return pattern == "PUT /v1/sandboxes/{id}/files" }

// route answers without a fault. Paths and methods that the table lacks get a
// JSend body too.
func (s *Server) route(w http.ResponseWriter, r *http.Request) {
	handler, pattern := s.muxOf(r).Handler(r)
	if pattern == "" {
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, r)
		if allow := rec.Header().Get("Allow"); allow != "" {
			w.Header().Set("Allow", allow)
			fail(w, http.StatusMethodNotAllowed, "method not allowed")
			return
		}
		fail(w, http.StatusNotFound, "route not found")
		return
	}
	s.muxOf(r).ServeHTTP(w, r)
}

// auth lets only requests with a valid key through. Another credential header
// shadows the key, as it does at the provider.
func (s *Server) auth(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		user, ok := "", true
		for _, name := range []string{"X-Auth-Token", "X-Access-Token", "Authorization"} {
			ok = ok && r.Header.Get(name) == ""
		}
		if ok {
			s.mu.Lock()
			user, ok = s.accounts[r.Header.Get("X-Api-Key")]
			s.mu.Unlock()
		}
		if !ok {
			fail(w, http.StatusUnauthorized, "invalid api key")
			return
		}
		c := callOf(r)
		c.user = user
		s.log.update(c.entry, func(e *Request) { e.User = user })
		next(w, r)
	}
}

type sandboxHandler func(w http.ResponseWriter, r *http.Request, sb *sandbox)

// owned finds the sandbox of the path. One of another account is as unknown as
// one that never was.
func (s *Server) owned(next sandboxHandler) http.HandlerFunc {
	return s.auth(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		sb := s.sandboxes[r.PathValue("id")]
		known := sb != nil && sb.owner == userOf(r)
		s.mu.Unlock()
		if !known {
			fail(w, http.StatusNotFound, errNoSandbox)
			return
		}
		next(w, r, sb)
	})
}

var errNoSandbox = errors.New("sandbox not found")

// statusWriter tells the request log what was answered.
type statusWriter struct {
	http.ResponseWriter
	note  func(status int)
	wrote bool
}

func (w *statusWriter) WriteHeader(status int) {
	if !w.wrote {
		w.wrote = true
		w.note(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Write(p []byte) (int, error) {
	if !w.wrote {
		w.WriteHeader(http.StatusOK)
	}
	return w.ResponseWriter.Write(p)
}

func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// splitRoute separates the method of a pattern from its path.
func splitRoute(route string) (method, path string) {
	if before, after, ok := strings.Cut(route, " "); ok {
		return before, after
	}
	return "", route
}
