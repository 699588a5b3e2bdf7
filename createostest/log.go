package createostest

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// Request is one entry of the request log.
type Request struct {
	// Arrived is when the head of the request had been read, before any fault,
	// delay or limit.
	Arrived time.Time
	Method  string
	Path    string
	Query   url.Values
	// Route is the pattern that the request matched, such as
	// "POST /v1/sandboxes/{id}/pause"; "" for an unknown path.
	Route string
	// Header is what was sent, without the credential headers.
	Header http.Header
	// User is the account of the key; "" when there was none or a bad one.
	User string
	// Body is the body of a JSON request up to 64 KiB; the content of files is
	// not kept. BodyBytes counts what the server has read of any body.
	Body      []byte
	BodyBytes int64
	// Status is what was answered; 0 when nothing was or nothing yet.
	Status int
	// Faulted tells that an injected fault had its hand in it.
	Faulted bool
	// Done tells that the server is through with the request.
	Done bool
}

const (
	maxLoggedRequests = 100_000
	maxLoggedBody     = 64 << 10
)

// credentialHeaders never go into the log.
var credentialHeaders = []string{"X-Api-Key", "X-Access-Token", "X-Auth-Token", "Authorization", "Cookie"}

// requestLog keeps requests in order of arrival; the oldest go when there are
// too many, so that a server that runs for days does not grow.
type requestLog struct {
	mu      sync.Mutex
	entries []*Request
}

func (l *requestLog) arrive(r *http.Request, route string, now time.Time) *Request {
	header := r.Header.Clone()
	for _, name := range credentialHeaders {
		header.Del(name)
	}
	e := &Request{
		Arrived: now, Method: r.Method, Path: r.URL.Path, Query: r.URL.Query(), Route: route, Header: header,
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.entries) >= maxLoggedRequests {
		l.entries = slices.Delete(l.entries, 0, maxLoggedRequests/10)
	}
	l.entries = append(l.entries, e)
	return e
}

func (l *requestLog) update(e *Request, change func(*Request)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(e)
}

func (l *requestLog) unfinished() (list []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if !e.Done {
			list = append(list, fmt.Sprintf("%s %s", e.Method, e.Path))
		}
	}
	return list
}

// Requests returns the log in order of arrival, refused requests included. It
// holds the latest 100,000.
func (s *Server) Requests() []Request {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	out := make([]Request, len(s.log.entries))
	for i, e := range s.log.entries {
		out[i] = *e
	}
	return out
}

// ForgetRequests empties the request log.
func (s *Server) ForgetRequests() {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.log.entries = nil
}

// countingBody counts what is read of a body.
type countingBody struct {
	io.ReadCloser
	log   *requestLog
	entry *Request
}

func (b *countingBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.log.update(b.entry, func(e *Request) { e.BodyBytes += int64(n) })
	return n, err
}

// errBodyTooLarge is a JSON body beyond the limit.
var errBodyTooLarge = fmt.Errorf("request body exceeds %d bytes", maxJSONBytes)

// bufferBody reads a JSON body whole, before a fault or a handler acts. That
// is also what lets the server notice a client that leaves meanwhile: it reads
// the connection only once the body is over.
func (s *Server) bufferBody(r *http.Request, e *Request) error {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxJSONBytes+1))
	s.log.update(e, func(e *Request) {
		if isJSON := strings.Contains(e.Header.Get("Content-Type"), "json"); isJSON && len(body) <= maxLoggedBody {
			e.Body = body
		}
	})
	if err != nil {
		return err
	}
	if len(body) > maxJSONBytes {
		return errBodyTooLarge
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return nil
}
