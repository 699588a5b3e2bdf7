package createostest

import (
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Fault is something that goes wrong. The first group of fields says at which
// requests, the second how. A fault with Refuse, or with Status, Body, Garbage,
// RetryAfter, Redirect or Hang and without Effect, keeps the request from being
// handled; all other faults let the work be done and spoil the answer.
type Fault struct {
	// Method and Route choose the requests. Method is one of GET, POST, PUT,
	// PATCH and DELETE. Route is a path of the API with or without a method in
	// front, such as "POST /v1/sandboxes" or "/v1/sandboxes/{id}/pause"; a
	// segment in braces, whatever the name, stands for any one. Empty fields
	// match everything.
	Method, Route string
	// When, if set, must hold too. It sees the request as the log has it, with
	// neither body nor account known yet, and must not call the Server.
	When func(Request) bool
	// Nth is the first matching request to be hit, counted from 1 since the
	// fault was injected. 0 begins with the next one.
	Nth int
	// Times is how many requests are hit. 0 is one if Nth is set, else all.
	Times int

	// Status, from 100 to 599, Body and Header are the answer. A Status without
	// a Body has a JSend body that fits; a Body without a Status has status
	// 200. Header also goes with RetryAfter, Redirect, Garbage, Reply, WrongID,
	// DelayReply and After.
	Status int
	Body   string
	Header http.Header
	// RetryAfter is sent in whole seconds, rounded up; with it a zero Status
	// is 429.
	RetryAfter time.Duration
	// Redirect is sent as Location; with it a zero Status is 307.
	Redirect string
	// Effect lets the request do its work before Status, Body, Garbage or Hang
	// answer it.
	Effect bool
	// Garbage answers with something that is not JSON.
	Garbage bool
	// Hang gives no answer until the client leaves or the server closes.
	Hang bool
	// Refuse closes the connection before the body is read; nothing is done.
	Refuse bool
	// DropReply does the work, then closes the connection without a byte. Note
	// that net/http's transport repeats a GET of its own accord when a reused
	// connection ends like that.
	DropReply bool
	// Delay is waited before anything is done, DelayReply between the work and
	// the answer.
	Delay, DelayReply time.Duration
	// Before and After, if set, are called at those two points, ahead of the
	// delay, and may use the Server: a test cancels a context there, or pulls a
	// sandbox away. DelayReply and After are not for streams, which they would
	// hold back to their end.
	Before, After func()

	// CutAfterBytes and CutAfterFrames let that much of the body pass, the
	// latter counted in lines, and then close the connection hard. A negative
	// number cuts after the header. A body that is shorter arrives whole.
	CutAfterBytes, CutAfterFrames int
	// CutClean ends the body in an orderly way instead, as if it were over:
	// a stream without its exit. It needs one of the two.
	CutClean bool
	// Frames, if set, is called with the number, from 1, and text of each line
	// of a stream, newline included, and returns what is sent in its place.
	Frames func(n int, frame []byte) []byte
	// Reply, if set, may replace the whole answer. Not for streams.
	Reply func(status int, body []byte) (int, []byte)
	// WrongID puts another id into the answer, well-formed and unknown.
	WrongID bool

	// StuckState makes the sandbox enter this state and stay there in place of
	// what a create, pause, resume, fork or delete would have led to; other
	// requests change no state. Server.SetState ends it.
	StuckState State
}

// Injection is a fault that was injected.
type Injection struct {
	book  *faultBook
	fault Fault
	seen  int
	hits  int
}

// Hits returns how many requests the fault has hit, so that a test can prove
// that it happened.
func (i *Injection) Hits() int {
	i.book.mu.Lock()
	defer i.book.mu.Unlock()
	return i.hits
}

// Remove ends the fault; requests that it has hit stay hit.
func (i *Injection) Remove() {
	i.book.mu.Lock()
	defer i.book.mu.Unlock()
	i.book.list = slices.DeleteFunc(i.book.list, func(o *Injection) bool { return o == i })
}

// faultBook holds the injected faults in order.
type faultBook struct {
	mu   sync.Mutex
	list []*Injection
}

// Fail injects a fault. Of several that match a request the oldest acts, and
// all of them count it.
//
// Fail panics, with a message that names the field, when the fault could never
// do what it says: a fault that cannot happen would make a test that cannot
// fail. What it refuses is a Method or Route that no request has, or that
// contradict each other; negative numbers, other than those that cut; a Status
// outside of 100 to 599; a StuckState that is none of the states, or where no
// state changes; CutClean without a cut; Effect and Header without an answer
// that they belong to; a field that another keeps from acting, such as Before
// next to Refuse; and a fault that does nothing at all, unless it has a When,
// which may be there to look on or, with Hits, to count.
func (s *Server) Fail(f Fault) *Injection {
	if err := s.checkFault(&f); err != nil {
		panic(err.Error())
	}
	i := &Injection{book: &s.faults, fault: f}
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.list = append(s.faults.list, i)
	return i
}

// ClearFaults removes every fault. Requests that hang go on hanging.
func (s *Server) ClearFaults() {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.list = nil
}

// match counts a request against every fault and returns the one that acts.
// The entry is the caller's own until it is read.
func (b *faultBook) match(r Request) *Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	var acting *Fault
	for _, i := range b.list {
		if !i.fault.matches(r) {
			continue
		}
		i.seen++
		if acting == nil && i.fault.hits(i.seen) {
			i.hits++
			acting = &i.fault
		}
	}
	return acting
}

func (f *Fault) matches(r Request) bool {
	method, path := splitRoute(f.Route)
	_, pattern := splitRoute(r.Route)
	switch {
	case f.Method != "" && f.Method != r.Method, method != "" && method != r.Method:
		return false
	case path != "" && path != pattern && !fitsPath(path, r.Path):
		return false
	}
	return f.When == nil || f.When(r)
}

// hits tells whether the n-th matching request is one of those.
func (f *Fault) hits(n int) bool {
	first, times := max(f.Nth, 1), f.Times
	if times == 0 && f.Nth > 0 {
		times = 1
	}
	return n >= first && (times == 0 || n < first+times)
}

// status is the status that the fault answers with, 0 for the handler's own.
func (f *Fault) status() int {
	switch {
	case f.Status != 0:
		return f.Status
	case f.RetryAfter > 0:
		return http.StatusTooManyRequests
	case f.Redirect != "":
		return http.StatusTemporaryRedirect
	case f.Garbage, f.Body != "":
		return http.StatusOK
	}
	return 0
}

// wholeSeconds renders a duration for Retry-After; never less than it is.
func wholeSeconds(d time.Duration) string {
	return strconv.Itoa(int((d + time.Second - 1) / time.Second))
}
