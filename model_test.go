package createos_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// TestModel lets a few callers do random things to shared leases of two
// environments while requests go wrong, keys rotate, and one driver is shut down
// in the middle and another takes over its entries. What it knows of each lease
// says which outcomes a call may have; see held.judge. In the end the balance
// holds, and a provider that is well again lets everything be cleared.
//
// A failure is shrunk to a short script. For a long run:
//
//	go test -race -run TestModel -rapid.checks 100000
func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		// The whole script is drawn first: nothing is drawn in the bubble.
		sc := drawScript(rt)
		var broken []string
		synctest.Test(t, func(t *testing.T) {
			broken = playScript(sc)
		})
		if len(broken) > 0 {
			rt.Fatalf("%s\n\n%s", sc, strings.Join(broken, "\n"))
		}
	})
}

// An act is one call of a caller.
type act struct {
	what     string
	slot     int
	after    time.Duration // since the one before
	patience time.Duration // 0: waits for ever
	stranger bool          // of the other environment
}

func (a act) String() string {
	s := fmt.Sprintf("+%v %s %d", a.after, a.what, a.slot)
	if a.patience > 0 {
		s += fmt.Sprintf(" for %v", a.patience)
	}
	if a.stranger {
		s += " as a stranger"
	}
	return s
}

// A part is what happens to one driver, until it is shut down.
type part struct {
	callers   [][]act
	incidents []incident
	shutdown  time.Duration
}

type modelScript [2]part

func (sc modelScript) String() string {
	var b strings.Builder
	for i, p := range sc {
		fmt.Fprintf(&b, "driver %d: shutdown at %v\n", i+1, p.shutdown)
		for _, in := range p.incidents {
			fmt.Fprintf(&b, "  %v\n", in)
		}
		for j, c := range p.callers {
			fmt.Fprintf(&b, "  caller %d: %v\n", j+1, c)
		}
	}
	return b.String()
}

const modelSlots = 3

func drawScript(rt *rapid.T) (sc modelScript) {
	millis := func(most int) *rapid.Generator[time.Duration] {
		return rapid.Map(rapid.IntRange(0, most), func(n int) time.Duration { return time.Duration(n) * time.Millisecond })
	}
	acts := rapid.Custom(func(rt *rapid.T) act {
		return act{
			what: rapid.SampledFrom([]string{
				"acquire", "exec", "exec", "exec long", "exec tree", "release", "resume", "resume", "destroy", "probe", "retry", "rotate", "revoke",
			}).Draw(rt, "what"),
			slot: rapid.IntRange(0, modelSlots-1).Draw(rt, "slot"), after: millis(1500).Draw(rt, "after"),
			patience: rapid.OneOf(rapid.Just(time.Duration(0)), millis(3000)).Draw(rt, "patience"),
			stranger: rapid.IntRange(0, 19).Draw(rt, "stranger") == 19,
		}
	})
	var usable []trouble
	for _, tr := range troubles {
		if !tr.leaving() && tr.name != "409 after" { // patience does the leaving; see lie
			usable = append(usable, tr)
		}
	}
	mishaps := rapid.Custom(func(rt *rapid.T) incident {
		return incident{
			spot: spot{rapid.SampledFrom([]string{
				"POST /v1/sandboxes", "GET /v1/sandboxes", "GET /v1/sandboxes/{id}", "DELETE /v1/sandboxes/{id}",
				"POST /v1/sandboxes/{id}/pause", "POST /v1/sandboxes/{id}/resume", "POST /v1/sandboxes/{id}/exec",
				"PUT /v1/sandboxes/{id}/files", "GET /v1/sandboxes/{id}/files", "GET /v1/sandboxes/{id}/processes",
				"POST /v1/sandboxes/{id}/processes", "GET /v1/sandboxes/{id}/processes/{pid}/connect", "POST /v1/sandboxes/{id}/processes/{pid}/input",
				"GET /v1/sandboxes/{id}/processes/{pid}/wait", "DELETE /v1/sandboxes/{id}/processes/{pid}",
			}).Draw(rt, "route"), rapid.IntRange(1, 8).Draw(rt, "nth")},
			trouble: usable[rapid.IntRange(0, len(usable)-1).Draw(rt, "trouble")],
			lasts:   rapid.IntRange(0, 9).Draw(rt, "lasts") == 9,
		}
	})
	for i := range sc {
		sc[i] = part{
			callers:   rapid.SliceOfN(rapid.SliceOfN(acts, 1, 12), 1, 4).Draw(rt, "callers"),
			incidents: oneAbsence(rapid.SliceOfN(mishaps, 0, 8).Draw(rt, "incidents")),
			shutdown:  millis(20_000).Draw(rt, "shutdown"),
		}
	}
	return sc
}

// oneAbsence leaves one 404 of several, and that happens once: two that agree are
// absence.
func oneAbsence(all []incident) (some []incident) {
	had := false
	for _, i := range all {
		if i.trouble.name == "404" {
			if had {
				continue
			}
			had, i.lasts = true, false
		}
		some = append(some, i)
	}
	return some
}

// A model is the host, and what it knows.
type model struct {
	srv    *createostest.Server
	wire   *wire
	cfg    createos.DriverConfig
	driver *createos.Driver

	mu     sync.Mutex
	now    int // counts what happened
	envs   [2]createos.Environment
	slots  [modelSlots]*held
	all    []*held
	down   time.Time // when Shutdown was called
	broken []string
}

// A held is a lease of the host, with what is known for certain. Model.mu guards
// it.
type held struct {
	lease *createos.Lease
	owner int // of model.envs
	// When it was known, in counts of model.now; 0 for not known.
	gone, poisoned int
	// destroys counts the Destroys that were begun: one may succeed at any time.
	destroys int
	closing  map[int]time.Time // the closes that run, and when they began
	resuming map[int]time.Time
}

func playScript(sc modelScript) []string {
	m := new(model)
	d := new(deeds)
	srv, err := createostest.Start(createostest.Options{
		InMemory: true, Commands: d.command, UserID: "usr_model",
		PauseDelay: 310 * time.Millisecond, ResumeDelay: 270 * time.Millisecond, DestroyDelay: time.Second,
	})
	if err != nil {
		return []string{err.Error()}
	}
	defer srv.Close()
	m.srv, m.cfg = srv, srv.DriverConfig()
	for i := range m.envs {
		m.envs[i] = createos.Environment{CompanyID: "acme", EnvironmentID: fmt.Sprintf("env-%d", i), Config: srv.Config()}
		m.envs[i].Config.ReuseLease, m.envs[i].Config.Timeout = true, time.Minute
	}
	for _, p := range sc {
		m.play(p)
	}
	m.end()
	return m.broken
}

// claim says that something is not as predicted unless ok.
func (m *model) claim(ok bool, format string, args ...any) {
	if !ok {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.broken = append(m.broken, fmt.Sprintf(format, args...))
	}
}

// play makes a driver, with what the one before owed, lets the callers loose, and
// shuts it down among them.
func (m *model) play(p part) {
	cfg := m.cfg
	if m.driver != nil {
		text, err := json.Marshal(m.driver.Unconfirmed())
		m.claim(err == nil && json.Unmarshal(text, &cfg.Unconfirmed) == nil, "the entries do not survive JSON: %v", err)
	}
	m.wire = newWire(m.srv.Transport())
	cfg.Transport = m.wire
	var err error
	if m.driver, err = createos.NewDriver(cfg); err != nil {
		m.claim(false, "no driver: %v", err)
		return
	}
	m.down = time.Time{}
	for _, in := range p.incidents {
		inject(m.srv, in, func() {})
	}
	m.wire.arm(func() {}, p.incidents)
	var callers sync.WaitGroup
	for _, acts := range p.callers {
		callers.Go(func() {
			for _, a := range acts {
				time.Sleep(a.after)
				m.do(a)
			}
		})
	}
	time.Sleep(p.shutdown)
	m.mu.Lock()
	m.down = time.Now()
	m.mu.Unlock()
	if err := m.driver.Shutdown(context.Background()); err != nil {
		m.claim(errors.As(err, new(*createos.UnconfirmedError)), "shutdown: %v", err)
	}
	callers.Wait()
	m.claim(m.driver.Quiet(context.Background()) == nil, "not quiet")
	m.wire.disarm()
	m.srv.ClearFaults()
	unstick(m.srv)
	m.balance()
}

// balance checks that created = destroyed + leased + listed, and that nothing
// runs that is not listed.
func (m *model) balance() {
	state := m.driver.State()
	m.claim(state.Active+state.Acquiring+state.Closing+state.Works == 0, "the maps are not empty: %+v", state)
	for _, box := range m.srv.Sandboxes() {
		if over(box.State) {
			continue
		}
		leased := slices.ContainsFunc(m.all, func(h *held) bool { return h.lease.ProviderLeaseID == box.ID && h.gone == 0 })
		listed, poisoned := false, false
		for _, u := range state.Owed {
			mine := u.SandboxID == box.ID || u.SandboxName == box.Name
			listed = listed || mine && (u.Kind == createos.DestroyOwed || u.Kind == createos.CreateUnknown)
			poisoned = poisoned || mine && (u.Kind == createos.DestroyOwed || u.Kind == createos.ProcessUnproven)
		}
		m.claim(leased || listed, "%s is %s, and nobody knows of it", box.ID, box.State)
		for _, p := range box.Processes {
			m.claim(p.TreeExited || poisoned, "%s runs %s, and is not poisoned", box.ID, p.ID)
		}
	}
}

// end clears everything, with the last driver, on a provider that is well.
func (m *model) end() {
	ctx := context.Background()
	time.Sleep(createos.DefaultSettleTime)
	for _, h := range m.all {
		err := m.driver.Destroy(ctx, m.envs[h.owner], h.lease)
		m.claim(err == nil, "a healthy Destroy: %v", err)
	}
	err := m.driver.RetryCleanup(ctx, m.envs[:]...)
	m.claim(err == nil, "a healthy RetryCleanup: %v", err)
	m.claim(m.driver.Shutdown(ctx) == nil, "a healthy Shutdown")
	time.Sleep(time.Minute)
	for _, box := range m.srv.Leaks() {
		// A destroy that was accepted is the provider's to complete, and some
		// incidents keep it from that.
		m.claim(box.State == "destroying", "left over: %s", box)
	}
}

// do makes one call and judges its outcome.
func (m *model) do(a act) {
	ctx := context.Background()
	if a.patience > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.patience)
		defer cancel()
	}
	owner := a.slot % len(m.envs)
	m.mu.Lock()
	h, env, driver := m.slots[a.slot], m.envs[owner], m.driver
	if a.stranger && a.what != "acquire" {
		env = m.envs[1-owner]
	}
	m.mu.Unlock()
	switch a.what {
	case "rotate", "revoke":
		m.rotate(owner, a.what == "revoke")
	case "retry":
		_ = driver.RetryCleanup(ctx, env)
	case "probe":
		began := time.Now()
		res, err := driver.Probe(ctx, env, createos.AcquireOptions{Workspace: m.srv.Workspace()})
		m.claim((err != nil) != (res != nil), "a probe without outcome")
		m.claim(err == nil || errors.Is(err, createos.ErrShutdown) && m.isDown(), "probe: %v", err)
		m.claim(err != nil || !m.wasDown(began), "a probe after shutdown")
	case "acquire":
		m.acquire(ctx, a.slot, owner, env)
	default:
		if h != nil {
			m.onLease(ctx, a, h, env)
		}
	}
}

func (m *model) isDown() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.down.IsZero()
}

// wasDown says that Shutdown had been called before that time.
func (m *model) wasDown(at time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.down.IsZero() && m.down.Before(at)
}

// rotate gives an environment a new key of the same account; the old one may end.
func (m *model) rotate(owner int, revoke bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.envs[owner].Config.APIKey
	m.envs[owner].Config.APIKey = createos.NewSecret(m.srv.AddKey("usr_model"))
	if revoke && old.Reveal() != m.srv.APIKey() { // the other environment may use the first
		m.srv.RevokeKey(old.Reveal())
	}
}

func (m *model) acquire(ctx context.Context, slot, owner int, env createos.Environment) {
	began := time.Now()
	lease, err := m.driver.Acquire(ctx, env, createos.AcquireOptions{Workspace: m.srv.Workspace()})
	m.claim((lease == nil) == (err != nil), "a lease next to the error %v", err)
	m.claim(err != nil || !m.wasDown(began), "an acquire after shutdown")
	m.said("acquire", err)
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	h := &held{lease: lease, owner: owner, closing: make(map[int]time.Time), resuming: make(map[int]time.Time)}
	m.all = append(m.all, h)
	m.slots[slot] = h // the one before stays with the host
}

// said checks that an error is a documented one.
func (m *model) said(what string, err error) {
	if err == nil {
		return
	}
	m.claim(!strings.Contains(err.Error(), "canary"), "%s: a secret is said: %v", what, err)
	for _, known := range []error{
		context.Canceled, context.DeadlineExceeded, createos.ErrShutdown, createos.ErrLeaseClosing, createos.ErrCleanupInProgress,
		createos.ErrCleanupFirst, createos.ErrPoisoned, createos.ErrForeignLease, createos.ErrLeaseGone, createos.ErrUnjudged, createos.ErrLeaseExpired,
		createos.ErrConnection, createos.ErrInvalidResponse, createos.ErrTerminationUnproven, createos.ErrProcessCreationUnknown,
	} {
		if errors.Is(err, known) {
			return
		}
	}
	for _, known := range []any{
		new(*createos.RequestError), new(*createos.StateError), new(*createos.SetupError), new(*createos.CreateUnknownError),
		new(*createos.CleanupError), new(*createos.BusyError), new(*createos.OutputLostError), new(*createos.StartError), new(*createos.WorkspaceError),
	} {
		if errors.As(err, known) {
			return
		}
	}
	m.claim(false, "%s: an error that is not documented: %v", what, err)
}

// A view is what was known of a lease when a call on it began.
type view struct {
	began    time.Time
	mark     int
	gone     bool
	poisoned bool
	destroys int
}

// onLease makes a call on a lease.
func (m *model) onLease(ctx context.Context, a act, h *held, env createos.Environment) {
	kind, _, _ := strings.Cut(a.what, " ")
	m.mu.Lock()
	m.now++
	v := view{began: time.Now(), mark: m.now, gone: h.gone > 0, poisoned: h.poisoned > 0, destroys: h.destroys}
	switch {
	case a.stranger:
	case kind == "destroy":
		h.destroys++
		h.closing[v.mark] = v.began
	case kind == "release":
		h.closing[v.mark] = v.began
	case kind == "resume":
		h.resuming[v.mark] = v.began
	}
	m.mu.Unlock()
	res, err := m.call(ctx, a.what, env, h.lease)
	m.said(a.what, err)
	if a.stranger {
		m.claim(errors.Is(err, createos.ErrForeignLease), "%s by a stranger: %v", a.what, err)
		return
	}
	m.mu.Lock()
	delete(h.closing, v.mark)
	delete(h.resuming, v.mark)
	m.mu.Unlock()
	h.judge(m, kind, v, res, err)
	m.learn(h, kind, v, err)
}

func (m *model) call(ctx context.Context, what string, env createos.Environment, lease *createos.Lease) (res *createos.Result, err error) {
	switch what {
	case "release":
		return nil, m.driver.Release(ctx, env, lease)
	case "destroy":
		return nil, m.driver.Destroy(ctx, env, lease)
	case "resume":
		got, err := m.driver.Resume(ctx, env, lease)
		m.claim((got == nil) == (err != nil), "a lease next to the error %v", err)
		m.claim(got == nil || got.ProviderLeaseID == lease.ProviderLeaseID, "another lease was resumed")
		return nil, err
	}
	kind := map[string]string{"exec": "short", "exec long": "endless", "exec tree": "tree"}[what]
	s := &scene{}
	return m.driver.Exec(ctx, env, lease, s.command(kind, 0))
}

// judge compares an outcome with what is possible.
func (h *held) judge(m *model, kind string, v view, res *createos.Result, err error) {
	m.mu.Lock()
	covered := false // by a close that began before, and still runs
	for _, began := range h.closing {
		covered = covered || began.Before(v.began)
	}
	second := false
	for _, began := range h.resuming {
		second = second || began.Before(v.began)
	}
	untouched := h.destroys == v.destroys // since the call began
	m.mu.Unlock()
	refusal := map[string]error{
		"exec": createos.ErrLeaseClosing, "resume": createos.ErrCleanupFirst, "release": createos.ErrCleanupInProgress, "destroy": createos.ErrCleanupInProgress,
	}[kind]
	// A shutdown that came while the call began may be the reason as well.
	refused := errors.Is(err, refusal) || m.isDown() && errors.Is(err, createos.ErrShutdown)
	down := m.wasDown(v.began)
	switch {
	case down && (kind == "exec" || kind == "resume"):
		m.claim(errors.Is(err, createos.ErrShutdown), "%s after shutdown: %v", kind, err)
		return
	case covered:
		m.claim(refused, "%s on a lease that is closing: %v", kind, err)
		return
	}
	switch kind {
	case "exec":
		m.claim(err != nil || !v.gone, "exec on a lease that is gone")
		m.claim(err != nil || res.TimedOut || res.Success(), "exec made something else of success: %+v", res)
		m.claim(err == nil || !res.Success() || errors.Is(err, createos.ErrTerminationUnproven), "success next to the error %v", err)
		m.claim(!v.poisoned || v.gone || !untouched || refused, "exec on a poisoned lease: %v", err)
	case "resume":
		m.claim(err != nil || !v.gone, "a lease that is gone was resumed")
		m.claim(err != nil || !second, "two resumes at once")
		m.claim(!v.poisoned || v.gone || !untouched || refused, "resume of a poisoned lease: %v", err)
	case "release":
		m.claim(err != nil || !v.poisoned || v.gone || !untouched, "a poisoned lease was released")
	}
}

// learn notes what an outcome makes certain.
func (m *model) learn(h *held, kind string, v view, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now++
	unproven := errors.Is(err, createos.ErrTerminationUnproven) || errors.Is(err, createos.ErrProcessCreationUnknown)
	switch {
	case kind == "destroy" && err == nil:
		h.gone, h.poisoned = m.now, 0
	case kind == "destroy":
		h.poisoned = 0 // it may go on without its caller, or be tried again, and succeed
	case unproven && h.gone == 0 && h.destroys == v.destroys:
		// Unless a Destroy came meanwhile, which may have settled it.
		h.poisoned = m.now
	}
}
