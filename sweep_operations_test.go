package createos_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// An operation is one public call in one situation.
type operation struct {
	name string
	opts createostest.Options
	// driver changes the configuration of the driver.
	driver func(*createos.DriverConfig)
	// prepare brings the situation about, on a provider that is well.
	prepare func(s *scene)
	// call makes the call.
	call func(ctx context.Context, s *scene) error
	// truth compares what the call said with what is; nil: nothing was said
	// that the laws do not check.
	truth func(s *scene, err error)
	// healthy is what a healthy run comes to, fine if empty.
	healthy string
	// pairs asks for pairs of incidents too.
	pairs bool
	// sample, if set, is of how many troubles at a request the short form runs one.
	sample int
	// after checks, beside what is checked for all, that the provider is well
	// again.
	after func(ctx context.Context, s *scene)
	// strays says that processes of another host run: the call did not start
	// them and need not end them when it fails.
	strays bool
}

// operations are the public operations of a driver that send requests. A new
// one gets an entry here and is swept.
var operations = append(syncOperations, []operation{
	{name: "Acquire", pairs: true, call: callAcquire, truth: truthAcquire},
	{name: "Acquire, create answers creating", opts: createostest.Options{CreatingPolls: 2, ListShape: createostest.ListNamed}, call: callAcquire, truth: truthAcquire},
	{name: "Acquire, create tells no state", opts: createostest.Options{OmitCreateState: true, ForgetDestroyed: true}, pairs: true, call: callAcquire, truth: truthAcquire},
	{name: "Acquire, restricted", call: callAcquire, truth: truthAcquire, prepare: func(s *scene) {
		s.env.Config.EgressAllowlist = []string{"example.com"}
	}},
	{name: "Exec", pairs: true, prepare: hold, call: execJob("short", 0), truth: truthExec},
	{name: "Exec, exit 7", prepare: hold, call: execJob("short", 7), truth: truthExec},
	{name: "Exec, killed", prepare: hold, call: execJob("killed", 0), truth: truthExec},
	{name: "Exec, staged input", prepare: hold, call: execJob("staged", 0), truth: truthExec},
	{name: "Exec, ends its tree", prepare: hold, call: execJob("tree", 0), truth: truthExec},
	{name: "Exec, times out", pairs: true, prepare: hold, call: execJob("endless", 0), truth: truthExec},
	{name: "Exec, cancelled", healthy: failed, prepare: hold, truth: truthExec, call: func(ctx context.Context, s *scene) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		time.AfterFunc(1537*time.Millisecond, cancel)
		return execJob("endless", 0)(ctx, s)
	}},
	{name: "Exec, paused before", prepare: holdPaused, call: execJob("short", 0), truth: truthExec,
		opts: createostest.Options{ResumeDelay: 1130 * time.Millisecond}},
	{name: "Release, pause", pairs: true, prepare: hold, call: release, truth: truthPaused, opts: createostest.Options{PauseDelay: 1130 * time.Millisecond}},
	{name: "Release, destroy", pairs: true, prepare: holdOnce, call: release, truth: truthGone},
	{name: "Release, command runs", prepare: holdBusy, call: release, truth: truthPaused},
	{name: "Destroy", pairs: true, prepare: hold, call: destroy, truth: truthGone, opts: createostest.Options{ForgetDestroyed: true}},
	{name: "Destroy, paused", prepare: holdPaused, call: destroy, truth: truthGone, opts: createostest.Options{DestroyDelay: 3 * time.Second}},
	{name: "Destroy, awaited", pairs: true, prepare: hold, call: destroy, driver: awaits, opts: createostest.Options{DestroyDelay: 3 * time.Second}, truth: func(s *scene, err error) {
		state := s.box(s.lease.ProviderLeaseID).State
		s.claim(err != nil || state == createostest.StateDestroyed, "destroyed, and %s", state)
	}},
	{name: "Acquire, awaited", pairs: true, call: callAcquire, driver: awaits, opts: createostest.Options{DestroyDelay: 3 * time.Second}, truth: truthAcquire},
	{name: "Destroy, command runs", pairs: true, prepare: holdBusy, call: destroy, truth: truthGone},
	{name: "Resume", prepare: holdPaused, call: resume, truth: truthResumed, opts: createostest.Options{ResumeDelay: 1130 * time.Millisecond}},
	{name: "Resume, restricted", call: resume, truth: truthResumed, prepare: func(s *scene) {
		s.env.Config.EgressDenyAll = true
		holdPaused(s)
	}},
	{name: "Resume, after a crash", prepare: holdStray, call: resume, truth: truthResumed, strays: true},
	{name: "Reconcile", prepare: loseLeases, truth: truthReconciled, call: func(ctx context.Context, s *scene) error {
		return s.reconcile(ctx)
	}},
	{name: "Probe", call: probe, truth: truthProbe},
	{name: "RetryCleanup", healthy: owing, prepare: oweEverything, call: retry, opts: createostest.Options{ListShape: createostest.ListBare}},
	{name: "RetryCleanup, absent name", prepare: oweAbsent, call: retry},
	{name: "Shutdown", prepare: busyAndOwing, call: shutdown, truth: truthShutdown},
	{name: "Client.Account", call: read(func(ctx context.Context, s *scene, c *createos.Client) error {
		got, err := c.Account(ctx)
		s.claim(err != nil || got.UserID == s.srv.Sandboxes()[0].Owner, "the account is another one")
		return err
	}), prepare: hold},
	{name: "Client.Sandbox", call: read(func(ctx context.Context, s *scene, c *createos.Client) error {
		got, err := c.Sandbox(ctx, s.lease.ProviderLeaseID)
		s.claim(err != nil || got.ID == s.lease.ProviderLeaseID, "the sandbox is another one")
		return err
	}), prepare: hold},
	{name: "Client.Sandboxes", call: read(func(ctx context.Context, s *scene, c *createos.Client) error {
		got, err := c.Sandboxes(ctx)
		s.claim(err != nil || len(got) == 1 && got[0].ID == s.lease.ProviderLeaseID, "the list is another one")
		return err
	}), prepare: hold},
	{name: "Client.Egress", call: read(func(ctx context.Context, s *scene, c *createos.Client) error {
		got, err := c.Egress(ctx, s.lease.ProviderLeaseID)
		s.claim(err != nil || len(got) == 1 && got[0] == "example.com", "the rules are other ones")
		return err
	}), prepare: func(s *scene) {
		s.env.Config.EgressAllowlist = []string{"example.com"}
		hold(s)
	}},
}...)

func awaits(cfg *createos.DriverConfig) { cfg.AwaitDestroyed = true }

// loseLeases makes two sandboxes that no host holds, beside one that is held and
// one of another environment.
func loseLeases(s *scene) {
	hold(s)
	other := s.env
	other.EnvironmentID = "other"
	foreign, err := s.driver.Acquire(s.t.Context(), other, s.options())
	require.NoError(s.t, err)
	s.foreign = foreign.ProviderLeaseID
	s.lost = []string{s.acquire().ProviderLeaseID, s.acquire().ProviderLeaseID}
	time.Sleep(createos.DefaultReconcileGrace)
}

func (s *scene) reconcile(ctx context.Context) error {
	var err error
	s.reconciled, err = s.driver.Reconcile(ctx, s.env, s.leases(), createos.ReconcileOptions{Apply: true})
	s.claim(s.reconciled != nil || err != nil, "neither a result nor an error")
	return err
}

func truthReconciled(s *scene, _ error) {
	if s.reconciled != nil {
		for _, f := range s.reconciled.Found {
			s.claim(f.SandboxID != s.foreign, "the sandbox of another environment was found")
			s.claim(f.Verdict != createos.VerdictDestroyed || over(s.box(f.SandboxID).State), "%s is not destroyed", f.SandboxID)
		}
	}
	for _, id := range []string{s.foreign, s.lease.ProviderLeaseID} {
		s.claim(!over(s.box(id).State), "%s, which is no stray, is %s", id, s.box(id).State)
	}
}

func hold(s *scene) {
	s.env.Config.ReuseLease = true
	s.lease = s.acquire()
}

func holdOnce(s *scene) { s.lease = s.acquire() }

func holdPaused(s *scene) {
	hold(s)
	require.NoError(s.t, s.driver.Release(s.t.Context(), s.env, s.lease))
}

// holdBusy lets a command run.
func holdBusy(s *scene) {
	hold(s)
	s.aside(func() error { return execJob("endless", 0)(context.Background(), s) })
	time.Sleep(1537 * time.Millisecond)
}

// holdStray lets a host die in the middle of a command.
func holdStray(s *scene) {
	hold(s)
	dead := &wire{base: s.wire.base, seen: make(map[string]int)}
	cfg := s.cfg
	cfg.Transport = dead
	other, err := createos.NewDriver(cfg)
	require.NoError(s.t, err)
	ctx, die := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := other.Exec(ctx, s.env, s.lease, s.command("endless", 0))
		s.claim(errors.Is(err, createos.ErrTerminationUnproven), "the other host did not die: %v", err)
	}()
	time.Sleep(1537 * time.Millisecond)
	var all []incident
	for _, route := range []string{"GET /v1/sandboxes/{id}", "DELETE /v1/sandboxes/{id}/processes/{pid}", "GET /v1/sandboxes/{id}/processes/{pid}", "GET /v1/sandboxes/{id}/processes/{pid}/wait"} {
		all = append(all, incident{spot: spot{route, 1}, trouble: trouble{wired: refused}, lasts: true})
	}
	dead.arm(die, all)
	die()
	<-done
	require.NoError(s.t, other.Quiet(context.Background()))
	require.NoError(s.t, s.srv.Pause(s.lease.ProviderLeaseID))
	s.ledger.reset()
}

// oweEverything leaves an entry of each kind.
func oweEverything(s *scene) {
	s.env.Config.ReuseLease = true
	ctx := context.Background()
	destroyed, paused, running := s.acquire(), s.acquire(), s.acquire()
	s.lease = running
	s.also = append(s.also, paused)
	for _, f := range []createostest.Fault{
		{Route: "DELETE /v1/sandboxes/{id}", Status: 403}, {Route: "POST /v1/sandboxes/{id}/pause", Status: 403},
		{Route: "DELETE /v1/sandboxes/{id}/processes/{process}", Status: 403},
	} {
		s.srv.Fail(f)
	}
	require.Error(s.t, s.driver.Destroy(ctx, s.env, destroyed))
	require.Error(s.t, s.driver.Release(ctx, s.env, paused))
	_, err := s.driver.Exec(ctx, s.env, running, s.command("endless", 0))
	require.ErrorIs(s.t, err, createos.ErrTerminationUnproven)
	oweName(s, createostest.Fault{DropReply: true})
	require.Len(s.t, s.driver.Unconfirmed(), 4)
}

// oweAbsent leaves the name of a sandbox that was never made, after its settle
// time.
func oweAbsent(s *scene) {
	oweName(s, createostest.Fault{Status: 500})
	time.Sleep(createos.DefaultSettleTime)
}

func oweName(s *scene, create createostest.Fault) {
	create.Route = "POST /v1/sandboxes"
	s.srv.Fail(create)
	s.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes", Status: 403})
	_, err := s.driver.Acquire(context.Background(), s.env, s.options())
	require.ErrorAs(s.t, err, new(*createos.CreateUnknownError))
	s.srv.ClearFaults()
}

// busyAndOwing lets a command and an acquire run, beside a destroy that is owed.
func busyAndOwing(s *scene) {
	owed := s.acquire()
	holdBusy(s)
	s.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 403})
	require.Error(s.t, s.driver.Destroy(context.Background(), s.env, owed))
	s.srv.ClearFaults()
	s.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes", Nth: 1, DelayReply: 5 * time.Second})
	s.aside(func() error {
		_, err := s.driver.Acquire(context.Background(), s.env, s.options())
		s.claim(errors.Is(err, createos.ErrShutdown), "an acquire outlived the shutdown: %v", err)
		return err
	})
	time.Sleep(time.Second)
}

func callAcquire(ctx context.Context, s *scene) error {
	lease, err := s.driver.Acquire(ctx, s.env, s.options())
	s.claim((lease == nil) == (err != nil), "a lease %v next to the error %v", lease, err)
	s.lease = lease
	return err
}

func truthAcquire(s *scene, err error) {
	if err != nil {
		return
	}
	m := s.lease.Metadata
	box := s.box(s.lease.ProviderLeaseID)
	s.claim(box.State == createostest.StateRunning, "the lease is %s", box.State)
	s.claim(m.Shape == box.Shape && strings.Join(m.EffectiveEgressAllowlist, " ") == strings.Join(box.Egress, " "), "the lease is not what was asked for")
	marker, rerr := s.srv.ReadFile(box.ID, m.RemoteCwd+"/.paperclip-runtime/.paperclip-createos-lease")
	s.claim(rerr == nil && string(marker) == m.Marker, "the marker is not there: %v", rerr)
}

// deeds are what the command of a schedule really did.
type deeds struct {
	mu                      sync.Mutex
	started, ended, stopped int
	code                    int
}

// Canaries of a command.
const (
	canaryArg = "arg-canary"
	canaryEnv = "env-canary"
	canaryIn  = "stdin-canary"
)

var (
	stagedInput = strings.Repeat(canaryIn+"\n", 10_000) // more than fits in a line
	jobOutput   = func() string {
		var b strings.Builder
		for i := range 20 {
			fmt.Fprintf(&b, "line %d\n", i)
		}
		return b.String()
	}()
)

// command answers "job", which tells what it did; everything else is built in.
func (d *deeds) command(ctx context.Context, c *createostest.Command) int {
	if c.Name != "job" {
		return createostest.Builtin(ctx, c)
	}
	note := func(f func()) { d.mu.Lock(); defer d.mu.Unlock(); f() }
	note(func() { d.started++ })
	kind, code := c.Args[0], int(c.Args[2][0]-'0')
	if kind == "endless" || kind == "tree" {
		c.SpawnSession(func(ctx context.Context, _ *createostest.Command) { <-ctx.Done() })
	}
	in, err := io.ReadAll(c.Stdin)
	want := canaryIn
	if kind == "staged" {
		want = stagedInput
	}
	if err == nil && (string(in) != want || c.Args[1] != canaryArg || c.Env["SECRET"] != canaryEnv) {
		code = 99
	}
	for {
		for line := range strings.Lines(jobOutput) {
			if _, werr := io.WriteString(c.Stdout, line); err != nil || werr != nil || c.Sleep(20*time.Millisecond) != nil {
				note(func() { d.stopped++ })
				return 1
			}
		}
		if kind != "endless" {
			break
		}
		if c.Sleep(time.Hour) != nil {
			note(func() { d.stopped++ })
			return 1
		}
	}
	if kind == "killed" {
		note(func() { d.stopped++ })
		return c.KilledBy("SIGKILL")
	}
	note(func() { d.ended++; d.code = code })
	return code
}

func (s *scene) command(kind string, code int) createos.Command {
	cmd := createos.Command{
		Name: "job", Args: []string{kind, canaryArg, fmt.Sprint(code)}, Env: createos.Env(map[string]string{"SECRET": canaryEnv}),
		Stdin: strings.NewReader(canaryIn), Timeout: time.Minute, EndTree: kind == "tree",
	}
	switch kind {
	case "staged":
		cmd.Stdin = strings.NewReader(stagedInput)
	case "endless":
		cmd.Timeout = 3 * time.Second
	}
	return cmd
}

func execJob(kind string, code int) func(context.Context, *scene) error {
	return func(ctx context.Context, s *scene) error {
		cmd := s.command(kind, code)
		cmd.Stdout = &s.out
		if s.busy {
			cmd.Timeout = time.Minute
		}
		var err error
		s.res, err = s.driver.Exec(ctx, s.env, s.lease, cmd)
		return err
	}
}

func truthExec(s *scene, err error) {
	d, res, out := &s.deeds, s.res, s.out.String()
	d.mu.Lock()
	defer d.mu.Unlock()
	s.claim(d.started <= 1, "the command was started %d times", d.started)
	s.claim(strings.HasPrefix(jobOutput, out), "the output is not in order: %q", out)
	whole := out == jobOutput && string(res.Stdout) == out && !res.StdoutTruncated
	switch {
	case err == nil && res.TimedOut:
		s.claim(!res.Success(), "success in spite of a time-out")
	case err == nil && res.ExitCode >= 0:
		s.claim(d.ended == 1 && d.code == res.ExitCode, "exit code %d, but it was %d of %d", res.ExitCode, d.code, d.ended)
		s.claim(d.code != 99, "the command did not get what it was given")
		s.claim(whole, "output is missing: %q", out)
	case err == nil:
		s.claim(res.Signal != "" && d.stopped == 1, "no error, no exit, no signal")
	default:
		s.claim(!res.Success() || errors.Is(err, createos.ErrTerminationUnproven) && d.ended == 1, "success next to the error %v", err)
		s.claim(res.ExitCode < 0 || d.ended == 1 && d.code == res.ExitCode || d.stopped == 1, "exit code %d was made up", res.ExitCode)
	}
}

func release(ctx context.Context, s *scene) error { return s.driver.Release(ctx, s.env, s.lease) }
func destroy(ctx context.Context, s *scene) error { return s.driver.Destroy(ctx, s.env, s.lease) }
func retry(ctx context.Context, s *scene) error   { return s.driver.RetryCleanup(ctx, s.env) }
func shutdown(ctx context.Context, s *scene) error {
	s.shut = true
	return s.driver.Shutdown(ctx)
}

func truthPaused(s *scene, err error) {
	state := s.box(s.lease.ProviderLeaseID).State
	s.claim(err != nil || state == createostest.StatePaused || over(state), "released, and %s", state)
	s.claim(err != nil || s.alive(s.lease.ProviderLeaseID) == 0, "released, and a process was frozen")
}

func truthGone(s *scene, err error) {
	state := s.box(s.lease.ProviderLeaseID).State
	s.claim(err != nil || over(state), "destroyed, and %s", state)
}

func truthShutdown(s *scene, err error) {
	for _, box := range s.srv.Leaks() {
		s.claim(err != nil || box.ID == s.lease.ProviderLeaseID || over(box.State), "shut down, and %s is left", box.ID)
	}
}

func resume(ctx context.Context, s *scene) error {
	lease, err := s.driver.Resume(ctx, s.env, s.lease)
	s.claim((lease == nil) == (err != nil), "a lease next to the error %v", err)
	s.claim(lease == nil || lease.ProviderLeaseID == s.lease.ProviderLeaseID && lease.Metadata.ResumedLease, "another lease was resumed")
	return err
}

func truthResumed(s *scene, err error) {
	box := s.box(s.lease.ProviderLeaseID)
	s.claim(!over(box.State), "a Resume destroyed the sandbox")
	s.claim(err != nil || box.State == createostest.StateRunning, "resumed, and %s", box.State)
	s.claim(err != nil || s.alive(box.ID) == 0, "resumed, and the stray lives")
	restricted := len(s.lease.Metadata.EffectiveEgressAllowlist) == 0
	for _, r := range s.srv.Requests() {
		restricted = restricted || r.Route == "PUT /v1/sandboxes/{id}/egress"
		s.claim(restricted || !strings.HasSuffix(r.Route, "/resume"), "resumed before it was restricted")
	}
}

func probe(ctx context.Context, s *scene) error {
	res, err := s.driver.Probe(ctx, s.env, s.options())
	require.NoError(s.t, err)
	s.claim(res.OK == (res.Err == nil), "OK next to %v", res.Err)
	if res.Cleanup == nil && res.Err != nil {
		// What the command left owed went with the sandbox.
		s.claim(!errors.Is(res.Err, createos.ErrTerminationUnproven) || len(s.driver.Unconfirmed()) == 0, "an entry of a sandbox that is gone")
		s.settledAfter = true
	}
	s.probed = res
	s.onItsWay = errors.Is(res.Cleanup, createos.ErrTimeout) // the destroy goes on
	return errors.Join(res.Err, res.Cleanup)
}

func truthProbe(s *scene, err error) {
	if id := s.probed.SandboxID; id != "" && s.probed.Cleanup == nil {
		s.claim(over(s.box(id).State), "the probe is done, and its sandbox %s", s.box(id).State)
	}
}

func read(f func(context.Context, *scene, *createos.Client) error) func(context.Context, *scene) error {
	return func(ctx context.Context, s *scene) error {
		c, err := s.driver.Client(s.env)
		require.NoError(s.t, err)
		return f(ctx, s, c)
	}
}

func over(state createostest.State) bool {
	return state == createostest.StateDestroyed || state == createostest.StateDestroying
}

// box is what there is of a sandbox; one that the provider forgot is destroyed.
func (s *scene) box(id string) createostest.SandboxInfo {
	for _, box := range s.srv.Sandboxes() {
		if box.ID == id {
			return box
		}
	}
	return createostest.SandboxInfo{ID: id, State: createostest.StateDestroyed}
}

// A sink is a writer that may be written to from several goroutines.
type sink struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (w *sink) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.Write(p)
}

func (w *sink) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}
