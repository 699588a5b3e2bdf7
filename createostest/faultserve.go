package createostest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"time"
)

// garbage is what gateways answer when they have nothing better.
const garbage = "<html><body><h1>502 Bad Gateway</h1></body></html>\n"

// serveFault answers a request that a fault has hit. Refuse was dealt with
// before.
func (s *Server) serveFault(w http.ResponseWriter, r *http.Request, f *Fault) {
	if f.Before != nil {
		f.Before()
	}
	s.hold(r, f.Delay)
	status := f.status()
	switch {
	case f.Hang || f.DropReply || status != 0:
		if f.Effect || f.DropReply {
			s.route(&silentWriter{header: make(http.Header)}, r)
		} else {
			io.Copy(io.Discard, r.Body) // so that the client gets to read the answer
		}
		f.afterwards()
		s.hold(r, f.DelayReply)
		if f.Hang {
			select {
			case <-r.Context().Done():
			case <-s.done:
			}
		}
		if f.Hang || f.DropReply {
			panic(http.ErrAbortHandler)
		}
		f.answer(w, status)
	case f.Reply != nil || f.WrongID || f.DelayReply > 0 || f.After != nil:
		rec := httptest.NewRecorder()
		s.route(rec, r)
		f.afterwards()
		s.hold(r, f.DelayReply)
		f.spoil(f.cutter(w), rec)
	default:
		s.route(f.cutter(w), r)
	}
}

func (f *Fault) afterwards() {
	if f.After != nil {
		f.After()
	}
}

// hold waits, and gives the request up when its client or the server leaves.
func (s *Server) hold(r *http.Request, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return
	case <-r.Context().Done():
	case <-s.done:
	}
	panic(http.ErrAbortHandler)
}

func (f *Fault) decorate(h http.Header) {
	for name, values := range f.Header {
		h[http.CanonicalHeaderKey(name)] = values
	}
	if f.RetryAfter > 0 {
		h.Set("Retry-After", wholeSeconds(f.RetryAfter))
	}
	if f.Redirect != "" {
		h.Set("Location", f.Redirect)
	}
}

func (f *Fault) answer(w http.ResponseWriter, status int) {
	body := f.Body
	if body == "" && f.Garbage {
		w.Header().Set("Content-Type", "text/html")
		body = garbage
	}
	f.decorate(w.Header())
	w = f.cutter(w)
	if body == "" {
		answer(w, status, faultText(status))
		return
	}
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "application/json")
	}
	w.WriteHeader(status)
	io.WriteString(w, body)
}

// faultText is what the provider says with a status, where that is known.
func faultText(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return "invalid api key"
	case http.StatusPaymentRequired:
		return errNoCredit.Error()
	case http.StatusNotFound:
		return errNoSandbox.Error()
	case http.StatusTooManyRequests:
		return "rate limit exceeded"
	case http.StatusInternalServerError:
		return "internal error"
	case http.StatusServiceUnavailable:
		return "service unavailable"
	}
	return "injected fault " + strconv.Itoa(status)
}

// spoil sends a recorded answer with the changes that the fault wants.
func (f *Fault) spoil(w http.ResponseWriter, rec *httptest.ResponseRecorder) {
	status, body := rec.Code, rec.Body.Bytes()
	if f.WrongID {
		body = replaceID(body)
	}
	if f.Reply != nil {
		status, body = f.Reply(status, body)
	}
	for name, values := range rec.Header() {
		w.Header()[name] = values
	}
	w.Header().Del("Content-Length")
	f.decorate(w.Header())
	w.WriteHeader(status)
	w.Write(body)
}

// replaceID swaps every id in the payload of an answer for a fresh one.
func replaceID(body []byte) []byte {
	var envelope struct {
		Status string         `json:"status"`
		Data   map[string]any `json:"data"`
	}
	if json.Unmarshal(body, &envelope) != nil {
		return body
	}
	if _, ok := envelope.Data["id"]; ok {
		envelope.Data["id"] = "sb-" + newULID(time.Now())
	}
	if _, ok := envelope.Data["process_id"]; ok {
		envelope.Data["process_id"] = newProcessID()
	}
	changed, err := json.Marshal(envelope)
	if err != nil {
		return body
	}
	return changed
}

// silentWriter lets a handler do its work for nobody.
type silentWriter struct{ header http.Header }

func (w *silentWriter) Header() http.Header         { return w.header }
func (w *silentWriter) WriteHeader(int)             {}
func (w *silentWriter) Write(p []byte) (int, error) { return len(p), nil }
func (w *silentWriter) Flush()                      {}

// cutter wraps the writer for faults that act on the body.
func (f *Fault) cutter(w http.ResponseWriter) http.ResponseWriter {
	if f.CutAfterBytes == 0 && f.CutAfterFrames == 0 && f.Frames == nil {
		return w
	}
	return &cutWriter{ResponseWriter: w, fault: f, bytes: max(f.CutAfterBytes, 0)}
}

var errCut = errors.New("answer was cut by an injected fault")

// cutWriter counts bytes and lines of a body, changes lines, and cuts.
type cutWriter struct {
	http.ResponseWriter
	fault  *Fault
	bytes  int    // still allowed by CutAfterBytes
	frames int    // lines seen
	line   []byte // an unfinished line, kept for Frames
	over   bool
}

func (w *cutWriter) WriteHeader(status int) {
	// The length that the handler meant is no longer true, and with a length
	// net/http would hold the header back.
	w.Header().Del("Content-Length")
	w.ResponseWriter.WriteHeader(status)
	if w.fault.CutAfterBytes < 0 || w.fault.CutAfterFrames < 0 {
		w.over = true
		if !w.fault.CutClean {
			w.abort()
		}
	}
}

// abort sends what is buffered and closes the connection.
func (w *cutWriter) abort() {
	http.NewResponseController(w.ResponseWriter).Flush()
	panic(http.ErrAbortHandler)
}

func (w *cutWriter) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		if w.over {
			return len(p) - len(rest), errCut
		}
		n := bytes.IndexByte(rest, '\n') + 1
		if n == 0 {
			n = len(rest)
		}
		if err := w.writePiece(rest[:n]); err != nil {
			return len(p) - len(rest), err
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// writePiece takes at most one line, or a part of one.
func (w *cutWriter) writePiece(piece []byte) error {
	whole := piece[len(piece)-1] == '\n'
	if w.fault.Frames != nil {
		w.line = append(w.line, piece...)
		if !whole {
			return nil
		}
		piece, w.line = w.fault.Frames(w.frames+1, w.line), nil
	}
	if whole {
		w.frames++
	}
	if w.fault.CutAfterBytes > 0 && len(piece) >= w.bytes {
		piece, w.over = piece[:w.bytes], true
	}
	w.bytes -= len(piece)
	if whole && w.fault.CutAfterFrames > 0 && w.frames >= w.fault.CutAfterFrames {
		w.over = true
	}
	_, err := w.ResponseWriter.Write(piece)
	if w.over && !w.fault.CutClean {
		w.abort()
	}
	return err
}

func (w *cutWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
