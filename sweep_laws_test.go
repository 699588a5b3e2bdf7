package createos_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A scene is one schedule: an operation, on a rig of its own, with incidents.
type scene struct {
	*rig
	op        *operation
	incidents []incident
	wire      *wire
	log       *sink
	ledger    *ledger

	lease        *createos.Lease   // that the host holds, if any
	lost         []string          // sandboxes that no host holds
	foreign      string            // one of another environment
	also         []*createos.Lease // that it holds beside
	busy         bool              // a command runs aside
	shut         bool              // the driver is shut down
	onItsWay     bool              // the call returned before its cleanup
	settledAfter bool              // what the error names was settled afterwards
	res          *createos.Result
	out          sink
	deeds        deeds
	probed       *createos.ProbeResult
	reconciled   *createos.Reconciliation
	synced       synced

	asides sync.WaitGroup
	mu     sync.Mutex
	errs   []error  // of what ran aside
	broken []string // laws
}

func newScene(t testing.TB, op *operation, incidents []incident) *scene {
	s := &scene{op: op, incidents: incidents, log: new(sink), ledger: &ledger{owed: make(map[entry]bool)}}
	opts := op.opts
	opts.UserID = "usr_sweep"
	if !opts.RealCommands {
		opts.Commands = s.deeds.command
	}
	s.rig = newRig(t, opts, func(cfg *createos.DriverConfig) {
		s.wire = newWire(cfg.Transport)
		s.wire.sends = s.known
		cfg.Transport = s.wire
		cfg.Logger = slog.New(slog.NewJSONHandler(s.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		cfg.OnEvent = s.ledger.note
		if op.driver != nil {
			op.driver(cfg)
		}
	})
	return s
}

// claim says that a law was broken unless ok.
func (s *scene) claim(ok bool, format string, args ...any) {
	if ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = append(s.broken, fmt.Sprintf(format, args...))
}

// known checks the first law before a request leaves: what it may make, and the
// sandbox that it is about, are known already.
func (s *scene) known(route, id string) {
	if route != "POST /v1/sandboxes" && id == "" {
		return
	}
	known := slices.Contains(s.lost, id) || id != "" && slices.ContainsFunc(s.leases(), func(l *createos.Lease) bool { return l.ProviderLeaseID == id })
	for _, u := range s.driver.Unconfirmed() {
		known = known || id == "" && u.Kind == createos.Acquiring || id != "" && u.SandboxID == id
	}
	s.claim(known, "%s is sent, and the driver does not know of %q", route, id)
}

// aside runs a call beside the one that is swept.
func (s *scene) aside(call func() error) {
	s.busy = true
	s.asides.Go(func() {
		err := call()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.errs = append(s.errs, err)
	})
}

// An entry is an entry of Unconfirmed, without its story.
type entry struct {
	kind createos.DebtKind
	who  string // the id, or the name if there is none
}

func entryOf(u createos.Unconfirmed) entry {
	if u.SandboxID == "" {
		return entry{u.Kind, u.SandboxName}
	}
	return entry{u.Kind, u.SandboxID}
}

// A ledger keeps the entries as the events tell them.
type ledger struct {
	mu   sync.Mutex
	owed map[entry]bool
	text strings.Builder // of the errors in events
}

func (l *ledger) note(e createos.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch e.Kind {
	case createos.EventOwed:
		l.owed[entryOf(*e.Debt)] = true
	case createos.EventSettled:
		delete(l.owed, entryOf(*e.Debt))
	}
	if e.Err != nil {
		fmt.Fprintln(&l.text, e.Err)
	}
}

func (l *ledger) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.owed)
}

func (l *ledger) entries() []entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []entry
	for e := range l.owed {
		all = append(all, e)
	}
	return all
}

func sorted(list []entry) string {
	var all []string
	for _, e := range list {
		all = append(all, fmt.Sprintf("%s %s", e.kind, e.who))
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), ", ")
}

func entriesOf(list []createos.Unconfirmed) []entry {
	var all []entry
	for _, u := range list {
		all = append(all, entryOf(u))
	}
	return all
}

// laws checks what must hold once a call, and all that it left behind, is over.
func (s *scene) laws(err error, took time.Duration, left bool) {
	state := s.driver.State()
	s.claim(state.Active+state.Acquiring+state.Closing+state.Works == 0, "the maps are not empty: %+v", state)
	s.claim(took < 20*time.Minute, "it took %v", took)
	owed := entriesOf(state.Owed)
	s.claim(sorted(owed) == sorted(s.ledger.entries()), "events say %q, the map %q", sorted(s.ledger.entries()), sorted(owed))
	s.claim(sorted(owed) == sorted(entriesOf(s.driver.Unconfirmed())), "Unconfirmed is not the map")
	s.noSecret(err)
	if lie(s.incidents) {
		return
	}
	if !left {
		want := s.named(err)
		s.claim(strings.ReplaceAll(sorted(owed), string(createos.Stuck), string(createos.DestroyOwed)) == sorted(want), "owed is %q, the error names %q: %v", sorted(owed), sorted(want), err)
	}
	s.balanceHolds(state.Owed)
	s.nothingLives(err, owed)
	if s.op.truth != nil {
		s.op.truth(s, err)
	}
}

// named are the entries that a host learns of from errors.
func (s *scene) named(err error) []entry {
	var all []entry
	var walk func(error)
	walk = func(err error) {
		switch e := err.(type) {
		case *createos.SetupError:
			all = append(all, entry{createos.DestroyOwed, e.SandboxID})
		case *createos.CreateUnknownError:
			all = append(all, entry{createos.CreateUnknown, e.SandboxName})
		case *createos.CleanupError:
			kind := e.Kind
			if kind == createos.Stuck {
				kind = createos.DestroyOwed
			}
			all = append(all, entry{kind, e.SandboxID})
		case *createos.BusyError:
			all = append(all, entry{createos.PauseOwed, e.SandboxID})
		case *createos.UnconfirmedError:
			for _, u := range e.Entries {
				if u.Kind == createos.Stuck {
					u.Kind = createos.DestroyOwed
				}
				all = append(all, entryOf(u))
			}
		}
		for _, inner := range unwrap(err) {
			walk(inner)
		}
		if err == createos.ErrTerminationUnproven || err == createos.ErrProcessCreationUnknown {
			id := ""
			if s.lease != nil {
				id = s.lease.ProviderLeaseID
			} else if s.probed != nil {
				id = s.probed.SandboxID
			}
			all = append(all, entry{createos.ProcessUnproven, id})
		}
	}
	s.mu.Lock()
	errs := append([]error{err}, s.errs...)
	s.mu.Unlock()
	for _, err := range errs {
		walk(err)
	}
	// A proven destroy ends all entries of its sandbox, and so may a Shutdown
	// those that it was told of by what it cancelled.
	gone := func(e entry) bool {
		switch {
		case s.settledAfter && e.kind == createos.ProcessUnproven:
			return true
		case s.shut:
			return err == nil || !slices.Contains(entriesOf(err.(*createos.UnconfirmedError).Entries), e)
		case s.lease != nil && e.who == s.lease.ProviderLeaseID:
			return err == nil && s.op.destroys()
		}
		return false
	}
	return slices.DeleteFunc(all, gone)
}

func (op *operation) destroys() bool {
	return strings.HasPrefix(op.name, "Destroy") || op.name == "Release, destroy"
}

// cleans says that the work goes on when the caller leaves, who is not told what
// becomes of it.
func (op *operation) cleans() bool {
	kind, _, _ := strings.Cut(op.name, ",")
	return slices.Contains([]string{"Release", "Destroy", "Reconcile", "RetryCleanup", "Shutdown"}, kind)
}

func unwrap(err error) []error {
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return []error{inner}
		}
	case interface{ Unwrap() []error }:
		return e.Unwrap()
	}
	return nil
}

func (s *scene) leases() []*createos.Lease {
	all := s.also
	if s.lease != nil {
		all = append(all, s.lease)
	}
	return all
}

// balanceHolds: created = destroyed + leased + listed.
func (s *scene) balanceHolds(owed []createos.Unconfirmed) {
	for _, box := range s.srv.Sandboxes() {
		if over(box.State) {
			continue
		}
		leased := box.ID == s.foreign || slices.Contains(s.lost, box.ID) || slices.ContainsFunc(s.leases(), func(l *createos.Lease) bool { return l.ProviderLeaseID == box.ID })
		listed := slices.ContainsFunc(owed, func(u createos.Unconfirmed) bool {
			return (u.Kind == createos.DestroyOwed || u.Kind == createos.Stuck || u.Kind == createos.CreateUnknown) && (u.SandboxID == box.ID || u.SandboxName == box.Name)
		})
		s.claim(leased || listed, "%s is %s, and nobody knows of it", box.ID, box.State)
	}
}

// nothingLives: what runs without a call is on a poisoned lease, unless a
// command that exited by itself left it.
func (s *scene) nothingLives(err error, owed []entry) {
	if s.op.strays && err != nil {
		return
	}
	for _, box := range s.srv.Sandboxes() {
		if over(box.State) || slices.Contains(owed, entry{createos.ProcessUnproven, box.ID}) || slices.Contains(owed, entry{createos.DestroyOwed, box.ID}) || slices.Contains(owed, entry{createos.Stuck, box.ID}) {
			continue
		}
		for _, p := range box.Processes {
			leftOnPurpose := p.LeaderExited && p.ExitCode != nil && s.res != nil && s.res.ExitCode == *p.ExitCode
			s.claim(p.TreeExited || leftOnPurpose, "process %s of %s lives, and the lease is not poisoned: %v", p.ID, box.ID, err)
		}
	}
}

// noSecret looks for what must not be said in everything that is said.
func (s *scene) noSecret(err error) {
	var said strings.Builder
	var walk func(error)
	walk = func(err error) {
		if err == nil {
			return
		}
		fmt.Fprintf(&said, "%v\n%+v\n%#v\n", err, err, err)
		for _, inner := range unwrap(err) {
			walk(inner)
		}
	}
	walk(err)
	if s.res != nil {
		for _, w := range s.res.Warnings {
			walk(w)
		}
	}
	if s.probed != nil {
		said.WriteString(s.probed.Summary)
	}
	if s.synced.res != nil {
		for _, w := range s.synced.res.Warnings {
			walk(w)
		}
	}
	s.mu.Lock()
	for _, err := range s.errs {
		walk(err)
	}
	s.mu.Unlock()
	list, jerr := json.Marshal(s.driver.Unconfirmed())
	require.NoError(s.t, jerr)
	said.Write(list)
	said.WriteString(s.log.String())
	s.ledger.mu.Lock()
	said.WriteString(s.ledger.text.String())
	s.ledger.mu.Unlock()
	text := said.String()
	for _, secret := range []string{"canary", s.srv.APIKey(), "/workspaces/", "/workspace/", "old/a", "X-Api-Key"} {
		if i := strings.Index(text, secret); i >= 0 {
			s.claim(false, "%q is said: %s", secret, text[max(0, i-80):min(len(text), i+80)])
		}
	}
}

// afterwards checks, on a provider that is well again, that a call works or
// says what is wrong, and that everything can be cleared.
func (s *scene) afterwards() {
	ctx := context.Background()
	s.srv.ClearFaults()
	unstick(s.srv)
	fresh, err := s.driver.Acquire(ctx, s.env, s.options())
	if s.shut {
		s.claim(errors.Is(err, createos.ErrShutdown), "an Acquire after Shutdown: %v", err)
	} else {
		s.claim(err == nil, "a healthy Acquire: %v", err)
	}
	before := sorted(entriesOf(s.driver.State().Owed))
	s.env.Config.APIKey = createos.NewSecret(s.srv.AddKey("usr_sweep"))
	if s.lease != nil {
		s.healthyExec(ctx)
	}
	if s.op.after != nil {
		s.op.after(ctx, s)
	}
	s.claim(before == sorted(entriesOf(s.driver.State().Owed)), "a new key changed what is owed")
	s.healthyRetry(ctx)
	for _, l := range append(s.leases(), fresh) {
		if l != nil {
			err := s.driver.Destroy(ctx, s.env, l)
			s.claim(err == nil, "a healthy Destroy: %v", err)
		}
	}
	if s.foreign != "" {
		err := s.reconcile(ctx)
		s.claim(err == nil, "a healthy Reconcile: %v", err)
		require.NoError(s.t, s.srv.Kill(s.foreign))
	}
	err = s.driver.Shutdown(ctx)
	s.claim(err == nil, "a healthy Shutdown: %v", err)
	time.Sleep(time.Minute) // an accepted destroy takes its time
	if lie(s.incidents) {
		return
	}
	s.claim(s.srv.LeakReport() == "", "left over: %s", s.srv.LeakReport())
	state := s.driver.State()
	s.claim(state.Active+state.Acquiring+state.Closing+state.Works+len(state.Owed) == 0, "the maps are not empty in the end: %+v", state)
}

func (s *scene) healthyExec(ctx context.Context) {
	id := s.lease.ProviderLeaseID
	owed := entriesOf(s.driver.State().Owed)
	poisoned := slices.Contains(owed, entry{createos.ProcessUnproven, id}) || slices.Contains(owed, entry{createos.DestroyOwed, id}) || slices.Contains(owed, entry{createos.Stuck, id})
	gone := over(s.box(id).State)
	res, err := s.driver.Exec(ctx, s.env, s.lease, createos.Command{Name: "echo", Args: []string{"fine"}})
	switch {
	case s.shut, poisoned:
		s.claim(errors.Is(err, createos.ErrLeaseClosing), "an Exec on a lease that is poisoned: %v", err)
	case gone:
		s.claim(errors.Is(err, createos.ErrLeaseGone) || errors.Is(err, createos.ErrUnjudged) || errors.Is(err, createos.ErrConflict) || errors.As(err, new(*createos.StateError)),
			"an Exec on a sandbox that is gone: %v", err)
	default:
		s.claim(err == nil && res.Success() && string(res.Stdout) == "fine\n", "a healthy Exec: %v", err)
	}
}

// healthyRetry: a RetryCleanup on a healthy provider ends everything but what
// only the host's Destroy ends, and names before their time.
func (s *scene) healthyRetry(ctx context.Context) {
	absent := false
	for _, e := range entriesOf(s.driver.State().Owed) {
		if e.kind == createos.CreateUnknown {
			found := slices.ContainsFunc(s.srv.Sandboxes(), func(b createostest.SandboxInfo) bool { return b.Name == e.who })
			absent = absent || !found
		}
	}
	if absent && s.op.name != "RetryCleanup, absent name" {
		err := s.driver.RetryCleanup(ctx, s.env)
		s.claim(err != nil, "a name was given up before its time")
		time.Sleep(createos.DefaultSettleTime)
	}
	_ = s.driver.RetryCleanup(ctx, s.env)
	left := s.driver.Unconfirmed()
	for _, u := range left {
		// What is poisoned is not paused: both end with the host's Destroy.
		poisoned := slices.Contains(entriesOf(left), entry{createos.ProcessUnproven, u.SandboxID})
		s.claim(poisoned && (u.Kind == createos.ProcessUnproven || u.Kind == createos.PauseOwed), "a healthy RetryCleanup leaves %s %s: %s %s", u.Kind, u.SandboxID, u.Cause, u.Note)
		if s.box(u.SandboxID).State == createostest.StateRunning && !lie(s.incidents) { // in a paused one it is frozen
			s.claim(s.alive(u.SandboxID) == 0, "a healthy RetryCleanup leaves a process alive")
		}
	}
}
