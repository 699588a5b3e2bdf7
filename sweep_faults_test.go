package createos_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/createos-lease/createos/createostest"
)

// A trouble is one way in which a request goes wrong, or in which its caller
// does: exactly one of the fields but the name is set.
type trouble struct {
	name string
	// served is injected into the emulator.
	served createostest.Fault
	// wired acts on the connection of the request, or in place of one.
	wired func(dial dialer) dialer
	// sticks leaves the sandbox in the state that the request leads through.
	sticks bool
	// leaves is when the caller's context ends.
	leaves moment
}

type dialer func(ctx context.Context, network, addr string) (net.Conn, error)

type moment int

const (
	stays        moment = iota
	beforeEffect        // the request has arrived
	afterEffect         // it has been done, and not answered
	atAnswer            // the header of the answer is there
)

// leaving says that a trouble can happen once only.
func (tr trouble) leaving() bool { return tr.leaves != stays }

// troubles are what may happen to every request. The texts of answers hold a
// canary that must not turn up anywhere.
var troubles = func() []trouble {
	all := []trouble{
		{name: "refused", wired: refused},
		{name: "head cut", wired: headCut},
		{name: "reset before", served: createostest.Fault{Refuse: true}},
		{name: "reset after", served: createostest.Fault{DropReply: true}},
		{name: "hangs before", served: createostest.Fault{Hang: true}},
		{name: "hangs after", served: createostest.Fault{Hang: true, Effect: true}},
		{name: "no body", served: createostest.Fault{CutAfterBytes: -1}},
		{name: "body cut", served: createostest.Fault{CutAfterBytes: 7}},
		{name: "body ends early", served: createostest.Fault{CutAfterBytes: 7, CutClean: true}},
		{name: "body empty", served: createostest.Fault{CutAfterBytes: -1, CutClean: true}},
		{name: "HTML", served: createostest.Fault{Status: 200, Body: canaryPage, Effect: true, Header: http.Header{"Content-Type": {"text/html"}}}},
		{name: "404 HTML", served: createostest.Fault{Status: 404, Body: canaryPage, Header: http.Header{"Content-Type": {"text/html"}}}},
		{name: "other JSON", served: createostest.Fault{Status: 200, Body: `[{"provider-canary":1}]`, Effect: true}},
		{name: "data null", served: createostest.Fault{Status: 200, Body: `{"status":"success","data":null}`, Effect: true}},
		{name: "data odd", served: createostest.Fault{Status: 200, Body: `{"status":"success","data":["provider-canary"]}`, Effect: true}},
		{name: "fail in 200", served: createostest.Fault{Status: 200, Body: canaryFail}},
		{name: "fail in 200 after", served: createostest.Fault{Status: 200, Body: canaryFail, Effect: true}},
		{name: "wrong id", served: createostest.Fault{WrongID: true}},
		{name: "odd state", served: createostest.Fault{Reply: oddState, Frames: oddFrame}},
		{name: "sticks", sticks: true},
		{name: "redirect", served: createostest.Fault{Redirect: "https://elsewhere-canary.invalid/"}},
		{name: "429 for 7s", served: createostest.Fault{RetryAfter: 7 * time.Second}},
		{name: "503 for 2s", served: createostest.Fault{Status: 503, RetryAfter: 2 * time.Second}},
		{name: "leaves before", leaves: beforeEffect},
		{name: "leaves after", leaves: afterEffect},
		{name: "leaves at answer", leaves: atAnswer},
	}
	for _, status := range []int{400, 401, 402, 403, 404, 405, 408, 409, 410, 413, 422, 429, 500, 502, 503, 504} {
		all = append(all, trouble{name: fmt.Sprint(status), served: createostest.Fault{Status: status, Body: canaryFail}})
		if status >= 500 || status == 408 || status == 409 { // the others are known to have had no effect
			all = append(all, trouble{name: fmt.Sprintf("%d after", status), served: createostest.Fault{Status: status, Body: canaryFail, Effect: true}})
		}
	}
	return all
}()

const (
	canaryPage = "<html>provider-canary</html>"
	canaryFail = `{"status":"fail","data":"provider-canary"}`
)

// oddState puts a word that nobody knows in the place of each state.
func oddState(status int, body []byte) (int, []byte) {
	for _, state := range []string{"creating", "running", "pausing", "paused", "resuming", "destroying", "destroyed", "exited"} {
		body = bytes.ReplaceAll(body, []byte(`:"`+state+`"`), []byte(`:"state-canary"`))
	}
	return status, body
}

// oddFrame makes an exit that does not say how the command ended, and says
// everything else twice, as it may come after a reconnect.
func oddFrame(_ int, line []byte) []byte {
	if bytes.Contains(line, []byte(`"exit"`)) {
		return []byte(`{"type":"exit","exit_code":null}` + "\n")
	}
	return append(line, line...)
}

// refused is a connection that is never there.
func refused(dialer) dialer {
	return func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
}

// headCut is a connection that breaks in the middle of the header.
func headCut(dial dialer) dialer {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &shortConn{Conn: conn, left: len("HTTP/1.1 20")}, nil
	}
}

// A shortConn lets so many bytes be read, and then the other side is gone. One
// goroutine reads.
type shortConn struct {
	net.Conn
	left int
}

func (c *shortConn) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

// A spot is a request of an operation: the nth of its route.
type spot struct {
	route string // as the emulator names it
	nth   int
}

func (s spot) String() string { return fmt.Sprintf("%s #%d", s.route, s.nth) }

// An incident is a trouble at a spot.
type incident struct {
	spot
	trouble
	lasts bool // it happens to all later requests of the route too
}

func (i incident) String() string {
	once := ""
	if i.lasts {
		once = " and ever after"
	}
	return fmt.Sprintf("%s at %s%s", i.trouble.name, i.spot, once)
}

// hits says whether the incident is what happens to the nth request.
func (i incident) hits(n int) bool { return n == i.nth || i.lasts && n > i.nth }

// lie says that the provider claims what is not so in the form in which it says
// what is: no client can tell, and no law holds against it. Absence that two
// requests agree on is absence, and a 409 says that no process was created.
func lie(incidents []incident) bool {
	absent := 0
	for _, i := range incidents {
		route := shapeOf(i.route)
		switch {
		case i.trouble.name == "409 after" && route == "POST /v1/sandboxes/*/processes":
			return true
		case i.trouble.name != "404":
		case i.lasts && route == "GET /v1/sandboxes/*":
			return true
		default:
			absent++
		}
	}
	return absent > 1
}

// A wire stands between a driver and an emulator, and makes happen what the
// emulator cannot.
type wire struct {
	base *http.Transport

	// sends is called for each request that is about to be sent.
	sends func(route, id string)

	mu        sync.Mutex
	armed     bool
	seen      map[string]int // requests of each route
	incidents []incident
	leave     context.CancelFunc
}

func newWire(base http.RoundTripper) *wire {
	return &wire{base: base.(*http.Transport), seen: make(map[string]int)}
}

// arm begins to count.
func (w *wire) arm(leave context.CancelFunc, incidents []incident) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed, w.leave, w.incidents = true, leave, incidents
}

func (w *wire) disarm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed = false
}

// at counts a request and says what happens to it.
func (w *wire) at(route string) (hit incident, leave context.CancelFunc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.armed {
		return incident{}, nil
	}
	w.seen[route]++
	for _, i := range w.incidents {
		if shapeOf(i.route) == route && i.hits(w.seen[route]) {
			return i, w.leave
		}
	}
	return incident{}, nil
}

// shapeOf takes the ids out of a path, or their names out of a route.
func shapeOf(route string) string {
	method, path, _ := strings.Cut(route, " ")
	parts := strings.Split(path, "/")
	for _, i := range []int{3, 5} { // /v1/sandboxes/id/processes/id
		if i < len(parts) {
			parts[i] = "*"
		}
	}
	return method + " " + strings.Join(parts, "/")
}

func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	route := shapeOf(req.Method + " " + req.URL.Path)
	if w.sends != nil {
		id := ""
		if parts := strings.Split(req.URL.Path, "/"); len(parts) > 3 {
			id = parts[3]
		}
		w.sends(route, id)
	}
	hit, leave := w.at(route)
	switch {
	case hit.wired != nil:
		bad := w.base.Clone() // a connection of its own, so that it is dialled
		bad.DisableKeepAlives = true
		bad.DialTLSContext = hit.wired(dialer(w.base.DialTLSContext))
		return bad.RoundTrip(req)
	case hit.leaves == atAnswer:
		defer leave()
	}
	return w.base.RoundTrip(req)
}

// unstick lets go of what an incident keeps in a transition. A transition that
// takes its time is cut short by it too.
func unstick(srv *createostest.Server) {
	for _, box := range srv.Sandboxes() {
		switch box.State {
		case createostest.StateDestroying:
			_ = srv.SetState(box.ID, createostest.StateDestroyed) // or it is over by itself
		case createostest.StateCreating, createostest.StatePausing, createostest.StateResuming:
			_ = srv.SetState(box.ID, createostest.StateRunning)
		}
	}
}

// inject makes an incident happen that the emulator brings about.
func inject(srv *createostest.Server, i incident, leave context.CancelFunc) {
	f := i.served
	switch {
	case i.wired != nil, i.leaves == atAnswer:
		return
	case i.sticks:
		f = createostest.Fault{StuckState: map[string]createostest.State{
			"POST /v1/sandboxes": createostest.StateCreating, "DELETE /v1/sandboxes/{id}": createostest.StateDestroying,
			"POST /v1/sandboxes/{id}/pause": createostest.StatePausing, "POST /v1/sandboxes/{id}/resume": createostest.StateResuming,
		}[i.route]}
		if f.StuckState == "" {
			return // the request leads through no state
		}
	case i.leaves == beforeEffect:
		f = createostest.Fault{Before: leave}
	case i.leaves == afterEffect && strings.HasSuffix(i.route, "/connect"):
		f = createostest.Fault{Frames: func(_ int, line []byte) []byte { leave(); return line }}
	case i.leaves == afterEffect:
		f = createostest.Fault{After: leave}
	}
	if f.Reply != nil && f.Frames != nil { // streams are changed line by line, all else as a whole
		if strings.HasSuffix(i.route, "/connect") {
			f.Reply = nil
		} else {
			f.Frames = nil
		}
	}
	f.Route, f.Nth, f.Times = i.route, i.nth, 1
	if i.lasts {
		f.Times = 1 << 30
	}
	srv.Fail(f)
}
