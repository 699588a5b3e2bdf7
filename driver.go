package createos

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/createos-lease/createos/internal/keylock"
)

// An Environment is on whose behalf a call is made.
type Environment struct {
	// CompanyID and EnvironmentID are the host's own ids. Both are required,
	// are UTF-8 without NUL, and are recorded in the lease: only a call with the same
	// two and the same API origin may use it.
	CompanyID     string
	EnvironmentID string
	// Config is the provider configuration of the environment.
	Config Config
}

// Defaults of [DriverConfig].
const (
	DefaultCleanupTimeout = 30 * time.Second
	DefaultSettleTime     = 10 * time.Minute
)

// A DriverConfig configures a [Driver]. The zero value is ready for use.
type DriverConfig struct {
	// Transport sends the requests; tests and tracing go here. The key is set
	// on the request before it gets here, and redirects are not followed,
	// whatever the transport. Nil means a clone of http.DefaultTransport with
	// enough idle connections for one host, shared by all drivers of the
	// process. It should support net/http/httptrace, as http.Transport does:
	// without, a request that never left cannot be told from one that may
	// have arrived, and is settled by searching.
	Transport http.RoundTripper
	// Budget bounds the rate of requests. Nil means the budget of the
	// origin that all drivers of this process share; see [Budget].
	Budget *Budget
	// Logger receives one record for each request (debug), for each throttle
	// and each entry of Unconfirmed (warn). Records hold no secret and no
	// text of the provider. Nil discards.
	Logger *slog.Logger
	// OnEvent, if not nil, is called for each request and each change of
	// Unconfirmed, possibly concurrently; see [Event]. It must return quickly
	// and must not call the driver.
	OnEvent func(Event)
	// Deployment separates installations that share an account: it is part of
	// the owner mark of every sandbox. It must hold no NUL. Default empty.
	Deployment string
	// DisableFallbackKey ignores the variable CREATEOS_API_KEY. Otherwise it is
	// read once, in NewDriver, and serves configurations without a key whose
	// origin is one of the provider's official three.
	DisableFallbackKey bool
	// CleanupTimeout bounds each cleanup that a call does on its own: the
	// destroy of a failed Acquire, the end of a command, the pause after a
	// failed Resume, and the wait for calls that a Release cancels. It counts
	// from the first request that is sent (for the destroy of a Probe, from when
	// it is called for). 0 means DefaultCleanupTimeout. Too
	// short, and slow destroys end up in Unconfirmed; too long, and a
	// cancelled call holds its caller for that long.
	CleanupTimeout time.Duration
	// SettleTime is how long after a create of unknown outcome its sandbox may
	// still appear, because creates can queue at the provider. Only after it
	// may RetryCleanup presume absence. 0 means DefaultSettleTime.
	SettleTime time.Duration
	// AwaitDestroyed makes every destroy wait, within the same bounds, until
	// the provider shows the sandbox destroyed or gone, and not only until it
	// has accepted the destroy. A sandbox that is accepted and does not go away
	// is listed as Stuck. It costs a request or more for each destroy, unless
	// the first answer says that it is over, and the time that the provider
	// takes. An entry that is Stuck is waited for in any case.
	AwaitDestroyed bool
	// Unconfirmed are the entries of an earlier driver, from its Unconfirmed:
	// they poison their leases and are retried here as they would be there.
	// Entries of kind Acquiring become CreateUnknown, or DestroyOwed if they
	// have an id: the Acquire that made them is no more. So give it what the
	// earlier driver listed in the end: an older copy may hold an Acquire that has
	// succeeded since, and its sandbox would be destroyed.
	Unconfirmed []Unconfirmed
}

// A Driver acquires sandboxes as leases and keeps account of everything that
// may run or cost money on its behalf.
//
// Its law: from the moment a create request may have reached the provider,
// the sandbox is in a running Acquire, or handed to the host as a lease, or
// in Unconfirmed, until it is proven gone. A scope is in at most one of
// "closing" and "open for calls": while it is closing nothing else starts on it.
//
// All methods may be called concurrently. Make one Driver per process, with
// [NewDriver], and call [Driver.Shutdown] before the process ends. The driver starts no
// goroutine of its own outside of calls, except to finish a cleanup whose
// caller has left; Shutdown waits for those.
type Driver struct {
	// Never changed after NewDriver.
	cfg      DriverConfig
	fallback Secret
	log      *slog.Logger
	accounts accountCache // has its own lock
	commits  keylock.Lock // of syncs, by sandbox; has its own lock

	// mu guards everything below. It is never held over a request, a
	// callback or a wait.
	mu sync.Mutex
	// down is set by Shutdown and never cleared.
	down bool
	// active holds the calls that run on a scope. Each can be cancelled, and
	// waited for. Acquires are here under the scope of their name.
	active map[scope]map[*call]struct{}
	// acquiring holds the running acquires; a subset of active with what is
	// known of their sandboxes.
	acquiring map[*acquisition]struct{}
	// closing holds the scopes that are being released or destroyed, with what
	// is owed until that ends.
	closing map[scope]Unconfirmed
	// unconfirmed holds what is owed. DestroyOwed, Stuck and ProcessUnproven
	// poison their scope.
	unconfirmed map[debtKey]*debt
	// changes are the events about unconfirmed that are still to be told, in
	// their order; telling says that a goroutine is at it.
	changes []Event
	telling bool
	// sightings holds what was last seen of sandboxes; losing one costs a
	// request, never a wrong verdict.
	sightings map[scope]*sighting
	// keys holds the newest key that a call of each tenant used.
	keys map[tenant]Secret
	// scratch holds the ids of the scratch directories that syncs could not
	// remove; the next sync does. Losing one costs disk space in a sandbox.
	scratch map[scope][]string
	// works holds the cleanups that run on their own bound.
	works map[chan struct{}]struct{}
}

// NewDriver makes a Driver. It sends nothing. It fails with an [InputError] if
// a field of the configuration or an entry to take over is malformed.
func NewDriver(cfg DriverConfig) (*Driver, error) {
	if strings.ContainsRune(cfg.Deployment, 0) {
		return nil, &InputError{"DriverConfig.Deployment", "holds a NUL"}
	}
	if cfg.Budget != nil && cfg.Budget.b == nil {
		return nil, &InputError{"DriverConfig.Budget", "was not made by NewBudget"}
	}
	if cfg.CleanupTimeout < 0 {
		return nil, &InputError{"DriverConfig.CleanupTimeout", "is negative"}
	}
	if cfg.SettleTime < 0 {
		return nil, &InputError{"DriverConfig.SettleTime", "is negative"}
	}
	if cfg.CleanupTimeout == 0 {
		cfg.CleanupTimeout = DefaultCleanupTimeout
	}
	if cfg.SettleTime == 0 {
		cfg.SettleTime = DefaultSettleTime
	}
	d := &Driver{
		cfg:         cfg,
		log:         cfg.Logger,
		active:      make(map[scope]map[*call]struct{}),
		acquiring:   make(map[*acquisition]struct{}),
		closing:     make(map[scope]Unconfirmed),
		unconfirmed: make(map[debtKey]*debt),
		sightings:   make(map[scope]*sighting),
		keys:        make(map[tenant]Secret),
		scratch:     make(map[scope][]string),
		works:       make(map[chan struct{}]struct{}),
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if !cfg.DisableFallbackKey {
		d.fallback = NewSecret(strings.TrimSpace(os.Getenv("CREATEOS_API_KEY")))
	}
	for i, u := range cfg.Unconfirmed {
		if err := d.takeOver(u); err != nil {
			return nil, &InputError{fmt.Sprintf("DriverConfig.Unconfirmed[%d]", i), err.Error()}
		}
	}
	d.cfg.Unconfirmed = nil
	return d, nil
}

// String names the type only: a driver knows keys.
func (d *Driver) String() string { return "createos.Driver" }

// GoString is as String.
func (d *Driver) GoString() string { return d.String() }

// LogValue is as String.
func (d *Driver) LogValue() slog.Value { return slog.StringValue(d.String()) }

// Client gives read access to the provider with the key and the origin of the
// environment, under the driver's budget and transport. It fails with a
// [ConfigError] if these two are not valid.
func (d *Driver) Client(env Environment) (*Client, error) {
	set, bad := env.Config.settings(d.fallback)
	if bad := bad.forCleanup(); bad != nil {
		return nil, bad
	}
	return d.client(env.tenant(set.origin), set.key), nil
}

func (e Environment) tenant(origin string) tenant {
	return tenant{e.CompanyID, e.EnvironmentID, origin}
}

// check finds what no environment may lack.
func (e Environment) check() error {
	for _, f := range []struct{ name, value string }{
		{"Environment.CompanyID", e.CompanyID},
		{"Environment.EnvironmentID", e.EnvironmentID},
	} {
		if f.value == "" {
			return &InputError{f.name, "is empty"}
		}
		if err := checkPlain(f.name, f.value); err != nil {
			return err
		}
	}
	return nil
}

// checkPlain refuses a string that would not come back from JSON as it went: it would
// have other bytes in the place of those that are not UTF-8, and a lease, or an entry of
// Unconfirmed, would not be recognised any more.
func checkPlain(field, value string) error {
	switch {
	case strings.ContainsRune(value, 0):
		return &InputError{field, "holds a NUL"}
	case !utf8.ValidString(value):
		return &InputError{field, "is not UTF-8"}
	}
	return nil
}

// client makes a client for requests of a tenant. The client is cheap: what
// lasts (connections, budget) is shared.
func (d *Driver) client(t tenant, key Secret) *Client {
	b := d.cfg.Budget
	if b == nil {
		b = originBudget(t.origin)
	}
	return newClient(clientConfig{
		origin:    t.origin,
		key:       key,
		transport: d.cfg.Transport,
		budget:    b,
		log:       d.log,
		// Half, so that a call which a Release cancels can await its reply and
		// still end what it started before the Release gives it up.
		replyGrace: d.cfg.CleanupTimeout / 2,
		hook: func(e Event) {
			if e.SandboxID != "" && e.Err == nil {
				d.sawAlive(scope{t, e.SandboxID})
			}
			d.emit(e)
		},
	})
}

func (d *Driver) emit(e Event) {
	if d.cfg.OnEvent != nil {
		d.cfg.OnEvent(e)
	}
}

// A call is one call that runs on a scope.
type call struct {
	scope   scope
	resume  bool
	cleanup bool // goes on in a Shutdown
	// target is the sandbox that the call works on; its id is empty for an
	// acquire.
	target target
	// execID, if not empty, marks the process that this call runs: a Resume
	// beside it must not take it for the remains of a dead host.
	execID string
	cancel context.CancelCauseFunc
	done   chan struct{}
	// gone is set when the sandbox was proven destroyed under the call: what
	// the call cannot prove any more is owed by nobody. Driver.mu guards it.
	gone bool
}

// enter registers a call on a scope, unless admit refuses. admit is called
// with the lock held. The context it returns is ended by Release, Destroy and
// Shutdown with their reason as its cause.
func (d *Driver) enter(ctx context.Context, c *call, admit func() error) (context.Context, error) {
	ctx, c.cancel = context.WithCancelCause(ctx)
	c.done = make(chan struct{})
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := admit(); err != nil {
		c.cancel(err)
		return nil, err
	}
	if d.active[c.scope] == nil {
		d.active[c.scope] = make(map[*call]struct{})
	}
	d.active[c.scope][c] = struct{}{}
	return ctx, nil
}

// leave is the end of a call: of its requests and of its own cleanup.
func (d *Driver) leave(c *call) {
	d.mu.Lock()
	delete(d.active[c.scope], c)
	if len(d.active[c.scope]) == 0 {
		delete(d.active, c.scope)
	}
	d.mu.Unlock()
	c.cancel(nil)
	close(c.done)
}

// drain cancels the calls of a closing scope and waits for their end, at most
// for the cleanup bound. It returns how many are left.
func (d *Driver) drain(s scope) int {
	d.mu.Lock()
	calls := make([]*call, 0, len(d.active[s]))
	for c := range d.active[s] {
		calls = append(calls, c)
	}
	d.mu.Unlock()
	for _, c := range calls {
		c.cancel(ErrLeaseClosing)
	}
	bound := time.NewTimer(d.cfg.CleanupTimeout)
	defer bound.Stop()
	for i, c := range calls {
		select {
		case <-c.done:
		case <-bound.C:
			left := 0
			for _, c := range calls[i:] {
				select {
				case <-c.done:
				default:
					left++
				}
			}
			return left
		}
	}
	return 0
}

// work runs f on its own goroutine, detached from the end of ctx, and waits
// for it or for the end of ctx, whichever comes first. The result counts if
// both are there. Shutdown waits for f.
func (d *Driver) work(ctx context.Context, f func(context.Context) error) error {
	done := make(chan struct{})
	d.mu.Lock()
	d.works[done] = struct{}{}
	d.mu.Unlock()
	var err error
	go func() {
		defer func() {
			d.mu.Lock()
			delete(d.works, done)
			d.mu.Unlock()
			close(done)
		}()
		err = f(context.WithoutCancel(ctx))
	}()
	select {
	case <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case <-done:
		return err
	default:
		return fmt.Errorf("createos: cleanup goes on without its caller: %w", ended(ctx))
	}
}

// poisonedLocked says whether something may run, or is to be destroyed, in a
// scope.
func (d *Driver) poisonedLocked(s scope) bool {
	for _, kind := range []DebtKind{DestroyOwed, Stuck, ProcessUnproven} {
		if d.unconfirmed[debtKey{s, kind}] != nil {
			return true
		}
	}
	return false
}

// A lessee is what a call on an existing lease works with.
type lessee struct {
	lease  *Lease
	scope  scope
	set    settings
	bad    *ConfigError // what is wrong with the configuration, if the call can do without
	client *Client
}

// lessee checks, before any request and before any change of state, that a
// lease belongs to the environment of the call; foreign is the error if it
// does not. Then it checks what the call needs: with cleanup, origin and key
// of the configuration are enough.
func (d *Driver) lessee(env Environment, lease *Lease, foreign error, cleanup bool) (*lessee, error) {
	set, bad := env.Config.settings(d.fallback)
	blocks := bad
	if cleanup {
		blocks = bad.forCleanup()
	}
	if set.origin == "" {
		return nil, blocks
	}
	if lease == nil || !lease.Metadata.belongsTo(env.CompanyID, env.EnvironmentID, set.origin) {
		return nil, foreign
	}
	if !validID(lease.ProviderLeaseID) {
		return nil, &InputError{"Lease.ProviderLeaseID", "is no sandbox id"}
	}
	if blocks != nil {
		return nil, blocks
	}
	t := env.tenant(set.origin)
	d.useKey(t, set.key)
	s := scope{t, lease.ProviderLeaseID}
	d.track(s)
	return &lessee{lease: lease, scope: s, set: set, bad: bad, client: d.client(t, set.key)}, nil
}

// useKey records the newest key of a tenant, for cleanup that outlives the
// call.
func (d *Driver) useKey(t tenant, key Secret) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.keys[t] = key
}
