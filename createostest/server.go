package createostest

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/createos-lease/createos"
)

// Server is an emulated provider. It is made by [NewServer] or [Start]. All
// methods may be called at the same time; after Close they still answer what
// was, and change nothing.
type Server struct {
	// URL is the origin, without a slash at the end.
	URL string

	opts      Options
	tb        testing.TB // nil outside of tests
	runner    runner
	mux, byIP *http.ServeMux
	http      *http.Server
	transport *http.Transport
	budget    *createos.Budget
	log       requestLog
	faults    faultBook
	limiter   limiter

	done   chan struct{} // closed when Close begins
	served chan struct{} // closed when the listener's loop has ended
	closed chan struct{} // closed when Close has ended
	conns  sync.WaitGroup
	work   sync.WaitGroup // handlers and background work; see begin

	// mu guards what follows. It is held for look-ups and changes of state
	// only, never over a wait, a call of the runner or a write to a client:
	// a goroutine that waits for a mutex would stop a test's virtual clock.
	mu        sync.Mutex
	closing   bool
	changed   chan struct{} // closed and replaced at each change of state
	accounts  map[string]string
	poor      map[string]bool // every account; true is one without credit
	sandboxes map[string]*sandbox
	order     []*sandbox // oldest first
	ips       int        // addresses given out
}

// emulators numbers the origins of servers in memory, so that no two share
// what a client keeps by origin.
var emulators atomic.Int64

// NewServer starts a server that Close is called for when the test ends. It
// takes at most one Options; none are the zero value. If the server cannot
// start, or the options cannot be meant, the test fails at once.
func NewServer(tb testing.TB, opts ...Options) *Server {
	tb.Helper()
	if len(opts) > 1 {
		tb.Fatalf("createostest: NewServer: takes at most one Options")
		return nil // not reached, unless tb is a stand-in
	}
	var o Options
	if len(opts) > 0 {
		o = opts[0]
	}
	s, err := start(o, tb)
	if err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	tb.Cleanup(s.Close)
	return s
}

// Start starts a server for a program. The caller must Close it. Options that
// cannot be meant are an error that names the field.
func Start(opts Options) (*Server, error) { return start(opts, nil) }

func start(opts Options, tb testing.TB) (*Server, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	s := &Server{
		opts:      opts.withDefaults(),
		tb:        tb,
		done:      make(chan struct{}),
		served:    make(chan struct{}),
		closed:    make(chan struct{}),
		changed:   make(chan struct{}),
		accounts:  make(map[string]string),
		poor:      make(map[string]bool),
		sandboxes: make(map[string]*sandbox),
	}
	s.accounts[s.opts.APIKey], s.poor[s.opts.UserID] = s.opts.UserID, false
	s.limiter.perMinute = s.opts.RateLimit
	if err := s.makeRunner(); err != nil {
		return nil, fmt.Errorf("createostest: cannot start the emulator: %w", err)
	}
	listener, err := s.listen()
	if err != nil {
		return nil, fmt.Errorf("createostest: cannot start the emulator: %w", errors.Join(err, s.runner.close()))
	}
	perMinute := 1_000_000
	if s.opts.RateLimit > 0 {
		perMinute = max(1, min(280, s.opts.RateLimit))
	}
	s.budget = createos.NewBudget(perMinute)
	s.mux, s.byIP = s.routes(), s.byIPRoutes()
	s.http = &http.Server{
		Handler:   http.HandlerFunc(s.serve),
		ConnState: s.trackConn,
		ErrorLog:  log.New(io.Discard, "", 0), // aborted requests are our trade
	}
	go func() {
		defer close(s.served)
		s.http.Serve(listener) // ends with ErrServerClosed
	}()
	return s, nil
}

func (s *Server) makeRunner() (err error) {
	if s.opts.InMemory && !s.opts.RealCommands || s.opts.Commands != nil {
		s.runner = newMemoryRunner(s.opts.Commands)
		return nil
	}
	s.runner, err = newHostRunner(s.opts.Dir)
	return err
}

// listen opens the listener and fills URL and transport to go with it.
func (s *Server) listen() (net.Listener, error) {
	if s.opts.InMemory {
		l := newPipeListener()
		s.URL = fmt.Sprintf("https://emulator-%d.invalid", emulators.Add(1))
		s.transport = newTransport()
		s.transport.DialContext = l.dial
		s.transport.DialTLSContext = l.dial
		return l, nil
	}
	addr := s.opts.Addr
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	s.URL = "http://" + l.Addr().String()
	s.transport = newTransport()
	return l, nil
}

// trackConn counts connections, so that Close can wait for their goroutines.
func (s *Server) trackConn(_ net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		s.conns.Add(1)
	case http.StateClosed, http.StateHijacked:
		s.conns.Done()
	}
}

// APIKey returns the key of the first account.
func (s *Server) APIKey() string { return s.opts.APIKey }

// UserID returns the id of the first account, which is [SandboxInfo].Owner of
// its sandboxes.
func (s *Server) UserID() string { return s.opts.UserID }

// AddKey makes one more key for an account, and the account if it is new.
// Accounts see nothing of each other's sandboxes.
func (s *Server) AddKey(userID string) string {
	key := "skp_" + lowerText(24)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.accounts[key] = userID
	if _, known := s.poor[userID]; !known {
		s.poor[userID] = false
	}
	return key
}

// RevokeKey makes a key invalid; its account and sandboxes stay. It panics when
// the key is not valid: the test would not be about what it says.
func (s *Server) RevokeKey(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.accounts[key]; !known {
		panic("createostest: RevokeKey: no account has this key")
	}
	delete(s.accounts, key)
}

// SetCredit gives an account credit or takes it away: without it create,
// resume and fork are answered with 402. Accounts begin with credit. For an
// account that neither is the first nor was ever given a key by AddKey it
// panics, as RevokeKey does.
func (s *Server) SetCredit(userID string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.poor[userID]; !known {
		panic(fmt.Sprintf("createostest: SetCredit: no account %q", userID))
	}
	s.poor[userID] = !ok
}

// Config returns a valid configuration for this server: its origin, the key of
// the first account and the first shape of the catalogue.
func (s *Server) Config() createos.Config {
	cfg := createos.Config{APIURL: s.URL, APIKey: createos.NewSecret(s.opts.APIKey)}
	if len(s.opts.Shapes) > 0 {
		cfg.Shape = s.opts.Shapes[0].ID
	}
	return cfg
}

// DriverConfig returns a driver configuration with this server's transport and
// its own request budget, so that servers and tests do not slow each other
// down. The budget is 280 a minute where a rate limit is on, else very large.
func (s *Server) DriverConfig() createos.DriverConfig {
	return createos.DriverConfig{Transport: s.transport, Budget: s.budget}
}

// Transport returns the server's own transport: with InMemory the only way in.
func (s *Server) Transport() http.RoundTripper { return s.transport }

// CloseIdle closes the idle connections of Transport.
func (s *Server) CloseIdle() { s.transport.CloseIdleConnections() }

// Workspace returns a fresh absolute path that sandboxes of this server accept
// as a workspace, for [createos.AcquireOptions]. Nothing is made there yet.
// Each sandbox needs one of its own: with real processes two that have the same
// share their files, and the path goes with the sandbox that used it first.
func (s *Server) Workspace() string { return s.runner.workspace() }

// Close ends the server: streams are cut, hanging requests are dropped,
// processes killed, files removed. It returns when every goroutine of the
// server is gone. After five seconds it says what it waits for, which most
// often is a function of Options.Commands that does not heed its context.
// Calling it again only waits.
func (s *Server) Close() {
	s.mu.Lock()
	again := s.closing
	s.closing = true
	s.mu.Unlock()
	if again {
		<-s.closed
		return
	}
	defer close(s.closed)
	impatient := time.AfterFunc(5*time.Second, s.reportWaiting)
	defer impatient.Stop()

	close(s.done)
	s.closeJournals()
	if err := s.runner.close(); err != nil {
		s.complain("createostest: closing the runner: %v", err)
	}
	s.http.Close()
	<-s.served
	s.conns.Wait()
	s.work.Wait()
	s.transport.CloseIdleConnections()
}

func (s *Server) reportWaiting() {
	s.mu.Lock()
	var busy []string
	for _, sb := range s.order {
		for _, p := range sb.processes {
			if !isClosed(p.tree()) {
				busy = append(busy, fmt.Sprintf("process %s of %s (%s)", p.id, sb.id, p.cmd))
			}
		}
	}
	s.mu.Unlock()
	busy = append(busy, s.log.unfinished()...)
	if len(busy) == 0 {
		busy = []string{"connections"}
	}
	s.say("createostest: Close has waited 5 seconds for: %s", strings.Join(busy, "; "))
}

// say and complain go to the test, or to the log of a program. A complaint
// fails the test; it never stops it, as it may come from any goroutine.
func (s *Server) say(format string, args ...any) {
	if s.tb != nil {
		s.tb.Logf(format, args...)
		return
	}
	log.Printf(format, args...)
}

func (s *Server) complain(format string, args ...any) {
	if s.tb != nil {
		s.tb.Errorf(format, args...)
		return
	}
	log.Printf(format, args...)
}

// begin counts one piece of work that Close waits for; false means that the
// server is closing and the work must not be started. The lock keeps the
// counter from rising after Close has begun to wait.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.work.Add(1)
	return true
}

// spawn runs f in the background and returns a channel that is closed at its
// end, or at once when the server is closing.
func (s *Server) spawn(f func()) <-chan struct{} {
	over := make(chan struct{})
	if !s.begin() {
		close(over)
		return over
	}
	go func() {
		defer s.work.Done()
		defer close(over)
		defer func() {
			if v := recover(); v != nil {
				s.complainPanic("background work", v)
			}
		}()
		f()
	}()
	return over
}

// follow is spawn for something that must have happened when the channel is
// closed: when the server is closing it never is.
func (s *Server) follow(f func()) <-chan struct{} {
	over := make(chan struct{})
	s.spawn(func() {
		f()
		close(over)
	})
	return over
}

// complainPanic turns a panic of ours into a failure with a stack, so that it
// does not pass for an injected fault.
func (s *Server) complainPanic(where string, v any) {
	if v != http.ErrAbortHandler {
		s.complain("createostest: panic in %s: %v\n%s", where, v, debug.Stack())
	}
}

// sleep waits for d; false means that the server is closing.
func (s *Server) sleep(d time.Duration) bool {
	if d <= 0 {
		return !isClosed(s.done)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.done:
		return false
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
