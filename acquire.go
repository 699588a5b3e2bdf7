package createos

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
)

// DefaultWorkspace is the workspace of a lease unless AcquireOptions names
// another. Leases of the TypeScript provider always use it.
const DefaultWorkspace = "/paperclip-workspace"

// markerFile is where the marker lies in a workspace. The name is shared with
// the TypeScript provider, so that each can resume the other's leases.
const markerFile = ".paperclip-runtime/.paperclip-createos-lease"

// searchBound is how long Acquire looks for the sandbox of a create whose
// outcome is unknown, and searchGaps are the pauses between the looks.
const searchBound = 15 * time.Second

var searchGaps = []time.Duration{0, 2 * time.Second, 4 * time.Second, 8 * time.Second}

// AcquireOptions are the options of [Driver.Acquire]. The zero value is
// useful.
type AcquireOptions struct {
	// Workspace is the directory that commands run in and the marker lies in:
	// absolute, clean, not the root, UTF-8 without NUL, at most 3000 bytes. Empty
	// means DefaultWorkspace. It is recorded in the lease and cannot change
	// later.
	Workspace string
	// AdapterType names the adapter that the sandbox is for. It chooses the
	// image by Config.RootfsByAdapter and is recorded in the lease. UTF-8 without
	// NUL; may be empty.
	AdapterType string
	// BeforeCreate, if not nil, is called once, right before the create request
	// is sent. A host that must find its sandboxes again after a crash writes
	// the intent to its journal here. If it returns an error, nothing is
	// sent, and Acquire returns an error that wraps it. It gets the context of
	// the Acquire and must obey it.
	BeforeCreate func(context.Context, Intent) error
}

// An Intent is what a create is about to carry: enough to recognise its
// sandbox among all others of the account.
type Intent struct {
	CompanyID     string `json:"companyId"`
	EnvironmentID string `json:"environmentId"`
	// APIURL is the normalised origin; an id or a name means nothing at
	// another.
	APIURL string `json:"apiUrl"`
	// Region as configured; empty means the provider's default.
	Region string `json:"region,omitempty"`
	// SandboxName is the name that the sandbox will have.
	SandboxName string `json:"sandboxName"`
	// LeaseKey and OwnerKey are names of environment variables that the
	// sandbox will show: the first of this lease alone, the second of the
	// environment and deployment. A name without the lease key proves nothing.
	LeaseKey string `json:"leaseKey"`
	OwnerKey string `json:"ownerKey"`
	// AccountID is the account of the key, if the provider told it.
	AccountID string `json:"accountId,omitempty"`
}

// Unconfirmed is the intent as an entry for [DriverConfig.Unconfirmed]: a host
// that finds an intent in its journal without a lease hands it to its new
// driver in this form, and RetryCleanup finds out what became of it. since is
// when the intent was written.
func (i Intent) Unconfirmed(since time.Time) Unconfirmed {
	return Unconfirmed{
		Kind: CreateUnknown, CompanyID: i.CompanyID, EnvironmentID: i.EnvironmentID, APIURL: i.APIURL,
		SandboxName: i.SandboxName, LeaseKey: i.LeaseKey, AccountID: i.AccountID,
		Cause: "the process that sent the create is gone", Since: since,
	}
}

// An acquisition is one running Acquire. Driver.mu guards begun and entry;
// the rest belongs to the call.
type acquisition struct {
	begun bool // a create may have reached the provider
	entry Unconfirmed

	env       Environment
	opts      AcquireOptions
	set       settings
	marks     marks
	tenant    tenant
	client    *Client
	account   string
	workspace string
	closed    bool   // the outcome is recorded elsewhere, or there is none
	marker    string // proves at resume that the disk is the same
}

// Acquire creates a sandbox, makes it ready for work and returns it as a
// lease.
//
// It checks the configuration, sends one create, waits until the sandbox
// runs, makes the workspace in it and writes the marker there. On a provider
// whose create answers "running" that is three requests, and once for each key
// and driver a whoami.
//
// The end of ctx, Config.Timeout (matched by ErrTimeout), and Shutdown
// (ErrShutdown) end the wait, not the duty: a create that was sent is followed
// for half of DriverConfig.CleanupTimeout more, and its sandbox is destroyed before
// Acquire returns, within another such bound. Once the marker is written the
// lease is returned even if ctx has ended.
//
// If it fails, the sandbox either never existed, or is proven destroyed, or is
// listed by Unconfirmed, and the error says which: a [*SetupError] names a
// sandbox that is not proven destroyed, a [*CreateUnknownError] a name under
// which one may exist. All other errors mean that nothing is left. Among them
// are [*ConfigError] and [*InputError] (nothing was sent), [*RequestError] with
// its classes, [*StateError] and [*WorkspaceError]. Trying again is always
// safe, and makes another sandbox.
//
// Acquire may be called concurrently.
func (d *Driver) Acquire(ctx context.Context, env Environment, opts AcquireOptions) (*Lease, error) {
	a, err := d.plan(env, opts)
	if err != nil {
		return nil, err
	}
	ctx, leave, err := d.enterAcquire(ctx, a)
	if err != nil {
		return nil, err
	}
	defer leave()
	return d.acquire(ctx, a)
}

// enterAcquire registers an acquire, which stays listed, once its create was
// sent, until leave is called.
func (d *Driver) enterAcquire(ctx context.Context, a *acquisition) (_ context.Context, leave func(), err error) {
	c := &call{scope: scope{a.tenant, a.marks.name}}
	ctx, err = d.enter(ctx, c, func() error {
		if d.down {
			return ErrShutdown
		}
		d.acquiring[a] = struct{}{}
		return nil
	})
	return ctx, func() {
		d.finish(a)
		d.leave(c)
	}, err
}

// plan checks everything that can be checked without a request.
func (d *Driver) plan(env Environment, opts AcquireOptions) (*acquisition, error) {
	if err := env.check(); err != nil {
		return nil, err
	}
	set, bad := env.Config.settings(d.fallback)
	if bad != nil {
		return nil, bad
	}
	workspace, err := checkWorkspace(opts.Workspace)
	if err != nil {
		return nil, err
	}
	if err := checkPlain("AcquireOptions.AdapterType", opts.AdapterType); err != nil {
		return nil, err
	}
	t := env.tenant(set.origin)
	d.useKey(t, set.key)
	return &acquisition{
		env: env, opts: opts, set: set, tenant: t, workspace: workspace, marker: uuid.NewString(),
		marks: newMarks(d.cfg.Deployment, t), client: d.client(t, set.key),
	}, nil
}

// checkWorkspace returns the workspace to use, or what is wrong with it.
func checkWorkspace(ws string) (string, error) {
	const field = "AcquireOptions.Workspace"
	switch err := checkPlain(field, ws); {
	case err != nil:
		return "", err
	case ws == "":
		return DefaultWorkspace, nil
	case !path.IsAbs(ws) || path.Clean(ws) != ws:
		return "", &InputError{field, "is not an absolute, clean path"}
	case ws == "/":
		return "", &InputError{field, "is the root directory"}
	case len(ws) > 3000: // PATH_MAX is 4096, and paths in the workspace need room
		return "", &InputError{field, "is longer than 3000 bytes"}
	}
	return ws, nil
}

// acquire does the work of Acquire.
func (d *Driver) acquire(ctx context.Context, a *acquisition) (*Lease, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, a.set.timeout, ErrTimeout)
	defer cancel()
	var err error
	if a.account, err = d.account(ctx, a.client, a.tenant.origin, a.set.key); err != nil {
		return nil, acquireFailed(ctx, err)
	}
	if a.opts.BeforeCreate != nil {
		if err := a.opts.BeforeCreate(ctx, a.intent()); err != nil {
			return nil, fmt.Errorf("createos: acquire: before create: %w", err)
		}
	}
	if err := ended(ctx); err != nil {
		return nil, acquireFailed(ctx, err)
	}
	d.begin(a)
	box, err := a.client.create(ctx, a.request())
	switch {
	case err == nil:
	case notCreated(err):
		a.closed = true
		return nil, acquireFailed(ctx, err)
	default:
		if box, err = d.recoverCreate(ctx, a, err, true); err != nil {
			return nil, err
		}
	}
	t := d.identify(a, box)
	if err := d.setUp(ctx, a, t, box); err != nil {
		return nil, d.giveUp(ctx, a, t, acquireFailed(ctx, err))
	}
	a.closed = true
	return a.lease(t), nil
}

func acquireFailed(ctx context.Context, err error) error { return because(ctx, "acquire", err) }

func (a *acquisition) intent() Intent {
	return Intent{
		CompanyID: a.env.CompanyID, EnvironmentID: a.env.EnvironmentID, APIURL: a.tenant.origin, Region: a.set.region,
		SandboxName: a.marks.name, LeaseKey: a.marks.leaseKey, OwnerKey: a.marks.owner, AccountID: a.account,
	}
}

func (a *acquisition) request() createRequest {
	return createRequest{
		Name: a.marks.name, Shape: a.set.shape, Rootfs: a.set.rootfsFor(a.opts.AdapterType), Region: a.set.region,
		Egress: a.set.egress, AutoPauseSeconds: a.set.autoPauseSeconds, Envs: a.marks.envs(),
	}
}

func (a *acquisition) target(id string) target {
	return target{
		scope: scope{a.tenant, id}, client: a.client, key: a.set.key,
		name: a.marks.name, leaseKey: a.marks.leaseKey, account: a.account,
	}
}

// begin lists the acquire, before the first byte of the create is written.
func (d *Driver) begin(a *acquisition) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	a.begun = true
	a.entry = Unconfirmed{
		Kind: Acquiring, CompanyID: a.env.CompanyID, EnvironmentID: a.env.EnvironmentID, APIURL: a.tenant.origin,
		SandboxName: a.marks.name, LeaseKey: a.marks.leaseKey, AccountID: a.account,
		Cause: "an acquire is running", Since: now, EndedAt: now,
	}
}

// identify records the id of the sandbox as soon as it is known.
func (d *Driver) identify(a *acquisition, box Sandbox) target {
	t := a.target(box.ID)
	d.owned(t.scope, a.set.key, a.account)
	d.saw(t.scope, box.Status)
	d.mu.Lock()
	defer d.mu.Unlock()
	a.entry.SandboxID = box.ID
	return t
}

// finish takes a finished acquire off the list. If it ends without an outcome,
// as by a panic of a transport, what may be left becomes a debt first.
func (d *Driver) finish(a *acquisition) {
	d.mu.Lock()
	begun, u := a.begun, a.entry
	d.mu.Unlock()
	if begun && !a.closed {
		u.Kind, u.Cause = CreateUnknown, "the acquire ended without an outcome"
		if u.SandboxID != "" {
			u.Kind = DestroyOwed
		}
		u.EndedAt = time.Now()
		d.owe(u)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.acquiring, a)
}

// notCreated says that a failed create is known to have made nothing.
func notCreated(err error) bool {
	var refused *RequestError
	if errors.As(err, &refused) {
		switch refused.Status {
		case http.StatusBadRequest, http.StatusUnauthorized, http.StatusPaymentRequired, http.StatusForbidden,
			http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusRequestEntityTooLarge,
			http.StatusUnprocessableEntity, http.StatusTooManyRequests:
			return true
		}
		return false
	}
	return notSent(err)
}

// setUp makes a fresh sandbox ready for work.
func (d *Driver) setUp(ctx context.Context, a *acquisition, t target, box Sandbox) error {
	if a.set.egress != nil && box.Egress != nil && !sameEgress(box.Egress, a.set.egress) {
		return &ResponseError{Operation: OpLifecycle, Detail: "create sandbox", Status: http.StatusOK}
	}
	if box.Status != stateRunning {
		if _, err := d.wakeBox(ctx, t, nil, nil); err != nil {
			return err
		}
	}
	if err := d.makeWorkspace(ctx, a, t); err != nil {
		return err
	}
	d.sawByID(t.scope)
	marker := strings.NewReader(a.marker)
	return t.client.upload(ctx, t.scope.id, path.Join(a.workspace, markerFile), marker, marker.Size())
}

// workspaceTries bounds how often the workspace command is sent while the
// agent of a fresh sandbox is not up (503). Making a directory twice is
// harmless, unlike the commands of a host.
const workspaceTries = 5

func (d *Driver) makeWorkspace(ctx context.Context, a *acquisition, t target) error {
	quoted, err := shellQuote(a.workspace)
	if err != nil {
		return err
	}
	var p poll
	for try := 1; ; try++ {
		res, err := t.client.exec(ctx, t.scope.id, "/bin/bash", []string{"-lc", "mkdir -p -- " + quoted})
		var refused *RequestError
		switch {
		case err == nil && res.ExitCode == nil && !res.Failed:
			return &ResponseError{Operation: OpWorkspaceCommand, Detail: "prepare workspace", Status: http.StatusOK}
		case err == nil && res.Failed: // whatever the exit code says
			return &WorkspaceError{SandboxID: t.scope.id, ExitCode: -1}
		case err == nil && *res.ExitCode != 0:
			return &WorkspaceError{SandboxID: t.scope.id, ExitCode: *res.ExitCode}
		case err == nil:
			return nil
		case try < workspaceTries && errors.As(err, &refused) && refused.Status == http.StatusServiceUnavailable:
			if werr := p.wait(ctx); werr != nil {
				return err
			}
		default:
			return err
		}
	}
}

// lease is the acquired sandbox as the host gets it.
func (a *acquisition) lease(t target) *Lease {
	egress := a.set.egress
	if egress == nil {
		egress = []string{}
	}
	return &Lease{
		ProviderLeaseID: t.scope.id,
		Metadata: Metadata{
			Provider: providerName, APIURL: a.tenant.origin, CompanyID: a.env.CompanyID, EnvironmentID: a.env.EnvironmentID,
			RemoteCwd: a.workspace, ShellCommand: "bash", Marker: a.marker,
			Shape: a.set.shape, Rootfs: a.set.rootfsFor(a.opts.AdapterType), Region: a.set.region,
			ReuseLease: a.set.reuse, AdapterType: a.opts.AdapterType,
			BaseEgressAllowlist: slices.Clone(egress), EffectiveEgressAllowlist: slices.Clone(egress),
			AutoPauseAfterSeconds: a.set.autoPauseSeconds,
			LeaseKey:              a.marks.leaseKey, SandboxName: a.marks.name, AccountID: a.account,
		},
	}
}

// giveUp rolls an acquire back. If the id of the create's reply turns out to
// name nothing, the reply may have been garbled on its way, and the sandbox
// exist under another id: then it is looked for by its marks.
func (d *Driver) giveUp(ctx context.Context, a *acquisition, t target, setup error) error {
	clean, cancel := cleanupContext(ctx, d.cfg.CleanupTimeout)
	defer cancel()
	notFound, err := d.destroyBox(clean, t)
	switch {
	case err != nil:
		d.owe(t.destroyDebt(err))
		a.closed = true
		return &SetupError{SandboxID: t.scope.id, Setup: setup, Destroy: err}
	case notFound && !d.seen(t.scope).byID:
		d.forget(t.scope)
		_, err := d.recoverCreate(context.WithoutCancel(ctx), a, setup, false)
		return err
	}
	a.closed = true
	d.gone(t.scope)
	return setup
}

// rollBack destroys a sandbox that could not be made ready, and returns what
// the caller is to see.
func (d *Driver) rollBack(ctx context.Context, t target, setup error) error {
	ctx, cancel := cleanupContext(ctx, d.cfg.CleanupTimeout)
	defer cancel()
	if err := d.destroy(ctx, t); err != nil {
		d.owe(t.destroyDebt(err))
		return &SetupError{SandboxID: t.scope.id, Setup: setup, Destroy: err}
	}
	d.gone(t.scope)
	return setup
}

// recoverCreate finds out what became of a create whose outcome is unknown. With
// adopt it returns the sandbox if there is one that fits and the caller still
// waits; all others are destroyed.
func (d *Driver) recoverCreate(ctx context.Context, a *acquisition, cause error, adopt bool) (Sandbox, error) {
	clean, cancel := cleanupContext(ctx, searchBound)
	defer cancel()
	look := d.search(searchContext(clean), a.client, a.marks.name, a.marks.leaseKey)
	if len(look.live) == 0 {
		a.closed = true
		if look.ended && look.whole {
			return Sandbox{}, acquireFailed(ctx, cause) // it was made, and is proven gone
		}
		return Sandbox{}, d.oweName(ctx, a, cause)
	}
	kept := -1
	if adopt && ctx.Err() == nil && look.whole {
		kept = slices.IndexFunc(look.live, a.fits)
	}
	if kept >= 0 {
		d.identify(a, look.live[kept])
	}
	var extra []target
	for i, box := range look.live {
		if i == kept {
			continue
		}
		t := a.target(box.ID)
		d.owned(t.scope, a.set.key, a.account)
		d.saw(t.scope, box.Status)
		d.owe(t.debt(DestroyOwed, cause)) // before the first destroy: none may be lost on the way
		extra = append(extra, t)
	}
	var unknown error
	if kept < 0 {
		if !look.whole { // a row that could not be read may be ours as well
			unknown = d.oweName(ctx, a, cause)
		}
		a.closed = true
	}
	var failed []error
	for _, t := range extra {
		failed = append(failed, d.rollBack(ctx, t, acquireFailed(ctx, cause)))
	}
	if kept >= 0 {
		return look.live[kept], nil
	}
	if unknown != nil {
		return Sandbox{}, unknown
	}
	for _, err := range failed {
		if errors.As(err, new(*SetupError)) {
			return Sandbox{}, err
		}
	}
	return Sandbox{}, acquireFailed(ctx, cause)
}

// oweName lists a create of which it is not known what became.
func (d *Driver) oweName(ctx context.Context, a *acquisition, cause error) error {
	u := a.target("").debt(CreateUnknown, cause)
	u.EndedAt = time.Now()
	d.owned(u.scope(), a.set.key, a.account)
	d.owe(u)
	return &CreateUnknownError{SandboxName: a.marks.name, Cause: acquireFailed(ctx, cause)}
}

// fits says whether a sandbox that was found is what this acquire asked for. A
// field that was left to the provider's default is not compared.
func (a *acquisition) fits(box Sandbox) bool {
	want := a.request()
	switch {
	case slices.Contains([]string{stateDestroying, stateFailed}, box.Status),
		box.Shape != want.Shape,
		want.Rootfs != "" && box.Rootfs != want.Rootfs,
		want.Region != "" && box.Region != want.Region,
		box.Ingress:
		return false
	case want.Egress == nil:
		return len(box.Egress) == 0 || sameEgress(box.Egress, []string{"*"})
	}
	return sameEgress(box.Egress, want.Egress)
}

// A search is what looking for a name and lease key found.
type search struct {
	live  []Sandbox // ours, and not proven gone
	ended bool      // ours was there and is proven gone
	whole bool      // the last listing was read whole, and so were doubtful rows
	err   error     // why it was not
}

// search looks a few times within the bound of ctx. It stops at the first find, if
// everything that could be another was read.
func (d *Driver) search(ctx context.Context, c *Client, name, leaseKey string) search {
	var last search
	for _, gap := range searchGaps {
		if err := sleep(ctx, gap); err != nil {
			return last
		}
		boxes, err := c.list(ctx)
		if err != nil {
			last = search{err: err}
			continue
		}
		last = d.match(ctx, c, boxes, name, leaseKey)
		if last.whole && (len(last.live) > 0 || last.ended) {
			return last
		}
	}
	return last
}

// match picks from a whole listing what is ours: the name alone is never
// proof. Rows that do not show their environment are read one by one.
func (d *Driver) match(ctx context.Context, c *Client, boxes []Sandbox, name, leaseKey string) search {
	found := search{whole: true}
	for _, box := range boxes {
		if box.Name != name {
			continue
		}
		if len(box.EnvNames) == 0 {
			full, err := c.get(ctx, box.ID)
			if err != nil {
				if box.Status != stateDestroyed {
					found.whole, found.err = false, err
				}
				continue
			}
			box = full
		}
		switch {
		case len(box.EnvNames) == 0 && box.Status != stateDestroyed:
			found.whole, found.err = false, errors.New("createos: a sandbox of this name does not show its environment")
		case !slices.Contains(box.EnvNames, leaseKey):
		case box.Status == stateDestroyed:
			found.ended = true
		default:
			found.live = append(found.live, box)
		}
	}
	return found
}
