package createos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// DefaultReconcileGrace is how old a sandbox must be at least, by default, before
// [Driver.Reconcile] may call it a stray. It is longer than any acquire takes
// with the default timeout.
const DefaultReconcileGrace = 15 * time.Minute

// ReconcileOptions are the options of [Driver.Reconcile]. The zero value
// destroys nothing.
type ReconcileOptions struct {
	// Apply destroys the strays. Otherwise they are only reported.
	Apply bool
	// Grace spares sandboxes that are younger, by the provider's clock as the
	// Date header of the list tells it (without one, by the clock here): another
	// process may be about to hand them to its host. 0 means
	// DefaultReconcileGrace; negative is refused.
	Grace time.Duration
}

// Verdict is what Reconcile made of a sandbox.
type Verdict string

// The verdicts of Reconcile.
const (
	// VerdictKnown: the host holds a lease of it.
	VerdictKnown Verdict = "known"
	// VerdictInFlight: a call of this driver is at work on it.
	VerdictInFlight Verdict = "in flight"
	// VerdictListed: its destroy is owed by Unconfirmed, and RetryCleanup's to
	// see to.
	VerdictListed Verdict = "listed"
	// VerdictYoung: it is within the grace period, or its age is not shown.
	VerdictYoung Verdict = "young"
	// VerdictUnproven: it looks like ours, but does not carry all marks.
	VerdictUnproven Verdict = "not provably ours"
	// VerdictStray: nobody knows of it. With Apply it would be destroyed.
	VerdictStray Verdict = "stray"
	// VerdictDestroyed: it was a stray, and is proven destroyed.
	VerdictDestroyed Verdict = "destroyed"
	// VerdictOwed: it was a stray, and its destroy is not proven. It is in
	// Unconfirmed now.
	VerdictOwed Verdict = "destroy owed"
)

// A Found is one sandbox of the environment that Reconcile looked at.
type Found struct {
	SandboxID   string `json:"sandboxId"`
	SandboxName string `json:"sandboxName"`
	// LeaseKey is the mark of its lease; empty if it shows none.
	LeaseKey string `json:"leaseKey,omitempty"`
	// State is what the list showed; "unrecognised" is a word that this package
	// does not know.
	State string `json:"state"`
	// CreatedAt is by the provider's clock; zero if it was not shown.
	CreatedAt time.Time `json:"createdAt,omitzero"`
	Verdict   Verdict   `json:"verdict"`
	// Reason says in words why.
	Reason string `json:"reason"`
}

// A Reconciliation is what a Reconcile found.
type Reconciliation struct {
	// Found are the live sandboxes that carry a mark of this library for the
	// environment, oldest first.
	Found []Found `json:"found"`
	// Others counts live sandboxes of the account that do not: other
	// environments, other deployments, other programs. They are never touched.
	Others int `json:"others"`
}

// Strays returns the sandboxes that nobody knows of, whatever was done about
// them.
func (r *Reconciliation) Strays() []Found {
	var strays []Found
	for _, f := range r.Found {
		if f.Verdict == VerdictStray || f.Verdict == VerdictDestroyed || f.Verdict == VerdictOwed {
			strays = append(strays, f)
		}
	}
	return strays
}

// Reconcile looks for sandboxes of an environment that nobody knows of: what a
// host left behind that was killed without a journal. It reads the whole
// list of the account, recognises the environment's by the marks of their
// creates (of this DriverConfig.Deployment), and says of each what it is.
//
// A stray carries the owner mark of the environment and one lease key, and a
// name as this library gives it; is in none of the known leases, by id or by
// lease key; is not being worked on by this driver, nor in its Unconfirmed as one
// whose destroy RetryCleanup sees to (entries about a pause or a process wait for
// the host, and without a lease nobody would come); and is older than the grace
// period. known must be all leases of the environment
// that any host of this deployment holds: to leave one out is to call it a
// stray. A host with several processes that share an environment must
// collect them first. Leases of other environments do no harm; one that is nil, or
// has neither id nor lease key, is an [*InputError].
//
// Nothing is destroyed unless opts.Apply is set, and nothing if the list could
// not be read whole: the error is then the list's, and the result nil. Each
// stray is read once more right before its destroy. A destroy that is not
// proven does not end Reconcile; it is listed by Unconfirmed, and the error is
// an [*UnconfirmedError] with those, next to the result. A stray that could not be
// read again is left alone, and its error joined to that.
//
// Of the configuration only origin and key need be valid. It takes one request
// for each 500 sandboxes of the account, and two more for each stray that it
// destroys (and one more, once, for each key). The end of ctx ends it between two destroys; one that was begun
// ends on its own bound. It may be called concurrently and after Shutdown.
func (d *Driver) Reconcile(ctx context.Context, env Environment, known []*Lease, opts ReconcileOptions) (*Reconciliation, error) {
	if err := env.check(); err != nil {
		return nil, err
	}
	set, bad := env.Config.settings(d.fallback)
	if bad := bad.forCleanup(); bad != nil {
		return nil, bad
	}
	switch {
	case opts.Grace < 0:
		return nil, &InputError{"ReconcileOptions.Grace", "is negative"}
	case opts.Grace == 0:
		opts.Grace = DefaultReconcileGrace
	}
	t := env.tenant(set.origin)
	d.useKey(t, set.key)
	r := &reconciler{d: d, tenant: t, key: set.key, client: d.client(t, set.key), owner: ownerMark(d.cfg.Deployment, t), opts: opts}
	for i, lease := range known {
		// One that names nothing spares nothing: rather stop than destroy what
		// a damaged record stood for.
		if lease == nil || lease.ProviderLeaseID == "" && lease.Metadata.LeaseKey == "" {
			return nil, &InputError{fmt.Sprintf("known[%d]", i), "names no sandbox"}
		}
	}
	r.known = known // those of other environments do no harm
	out, err := r.survey(ctx)
	if err != nil || !opts.Apply {
		return out, err
	}
	return out, r.apply(ctx, out)
}

// A reconciler is one Reconcile.
type reconciler struct {
	d      *Driver
	tenant tenant
	key    Secret
	client *Client
	owner  string
	opts   ReconcileOptions
	known  []*Lease
	// account is whose the strays are: an entry needs it to be settled by another
	// driver or key.
	account string
}

// survey reads the list and judges every row.
func (r *reconciler) survey(ctx context.Context) (*Reconciliation, error) {
	// What is in flight is noted before the list is read: a sandbox that comes
	// to be later is not in the list, or younger than any grace period.
	busy := r.d.busy(r.tenant)
	boxes, err := r.client.list(ctx)
	if err != nil {
		return nil, err
	}
	for s, why := range r.d.busy(r.tenant) {
		busy[s] = why
	}
	out := new(Reconciliation)
	for _, box := range boxes {
		if over(box.Status) {
			continue
		}
		if box.EnvNames == nil {
			full, err := r.client.get(ctx, box.ID)
			if isNotFound(err) {
				continue
			}
			if err != nil {
				return nil, err
			}
			box = full
		}
		if !slices.Contains(box.EnvNames, r.owner) {
			out.Others++
			continue
		}
		out.Found = append(out.Found, r.judge(box, busy))
	}
	slices.SortStableFunc(out.Found, func(a, b Found) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return out, nil
}

// over says that a sandbox of this state needs nobody to destroy it.
func over(status string) bool { return status == stateDestroyed || status == stateDestroying }

// busy returns what this driver is at work on for a tenant, and what it lists,
// by id and by name.
func (d *Driver) busy(t tenant) map[string]Verdict {
	busy := make(map[string]Verdict)
	note := func(v Verdict, names ...string) {
		for _, name := range names {
			if name != "" {
				busy[name] = v
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for key, held := range d.unconfirmed {
		// RetryCleanup ends those with the sandbox. The other kinds wait for the
		// host to do so: without a lease nobody would.
		destroys := key.kind == DestroyOwed || key.kind == Stuck || key.kind == CreateUnknown
		if key.scope.tenant == t && destroys {
			note(VerdictListed, held.SandboxID, held.SandboxName)
		}
	}
	for s := range d.active {
		if s.tenant == t {
			note(VerdictInFlight, s.id)
		}
	}
	for s, u := range d.closing {
		if s.tenant == t {
			note(VerdictInFlight, s.id, u.SandboxName)
		}
	}
	for a := range d.acquiring {
		if a.tenant == t {
			note(VerdictInFlight, a.marks.name, a.entry.SandboxID)
		}
	}
	return busy
}

// judge says what a sandbox with our owner mark is.
func (r *reconciler) judge(box Sandbox, busy map[string]Verdict) Found {
	f := Found{SandboxID: box.ID, SandboxName: box.Name, State: stateName(box.Status), CreatedAt: box.CreatedAt}
	keys := leaseKeys(box)
	if len(keys) == 1 {
		f.LeaseKey = keys[0]
	}
	set := func(v Verdict, reason string) Found {
		f.Verdict, f.Reason = v, reason
		return f
	}
	if slices.ContainsFunc(r.known, func(l *Lease) bool {
		return l.ProviderLeaseID == box.ID || f.LeaseKey != "" && l.Metadata.LeaseKey == f.LeaseKey
	}) {
		return set(VerdictKnown, "the host holds a lease of it")
	}
	for _, name := range []string{box.ID, box.Name} {
		switch busy[name] {
		case VerdictInFlight:
			return set(VerdictInFlight, "a call of this driver is at work on it")
		case VerdictListed:
			return set(VerdictListed, "its destroy is in Unconfirmed, which RetryCleanup sees to")
		}
	}
	if len(keys) != 1 || !strings.HasPrefix(box.Name, namePrefix) {
		return set(VerdictUnproven, "it has the owner mark, but not one lease key and a name of ours")
	}
	now := box.shownAt
	if now.IsZero() {
		now = time.Now()
	}
	age := now.Sub(box.CreatedAt)
	switch {
	case box.CreatedAt.IsZero():
		return set(VerdictYoung, "its age is not shown")
	case age < r.opts.Grace:
		return set(VerdictYoung, fmt.Sprintf("it is younger than %v", r.opts.Grace))
	}
	return set(VerdictStray, fmt.Sprintf("no lease, no call and no entry names it, and it is %v old", age.Round(time.Second)))
}

// leaseKeys returns the marks of leases that a sandbox carries; one that was
// forked, or made by hand, may have none or several.
func leaseKeys(box Sandbox) (keys []string) {
	for _, name := range box.EnvNames {
		if strings.HasPrefix(name, leaseKeyPrefix) {
			keys = append(keys, name)
		}
	}
	return keys
}

// apply destroys the strays, one after the other.
func (r *reconciler) apply(ctx context.Context, out *Reconciliation) error {
	if len(out.Strays()) > 0 {
		var err error
		if r.account, err = r.d.account(ctx, r.client, r.tenant.origin, r.key); err != nil {
			return err
		}
	}
	var owed []Unconfirmed
	var failed []error
	for i := range out.Found {
		f := &out.Found[i]
		if f.Verdict != VerdictStray {
			continue
		}
		if ctx.Err() != nil {
			break
		}
		var after Found
		var u *Unconfirmed
		var left error
		if err := r.d.work(ctx, func(ctx context.Context) error {
			after, u, left = r.destroy(ctx, *f)
			return nil
		}); err != nil {
			f.Reason += "; its destroy goes on"
			break // and what it finds belongs to nobody
		}
		*f = after
		if u != nil {
			owed = append(owed, *u)
		}
		if left != nil {
			failed = append(failed, fmt.Errorf("createos: stray %s was left alone: %w", f.SandboxID, left))
		}
	}
	if err := ended(ctx); err != nil || len(owed) > 0 {
		failed = append(failed, &UnconfirmedError{Entries: owed, Cause: err})
	}
	if len(failed) == 1 {
		return failed[0]
	}
	return errors.Join(failed...)
}

// destroy destroys a stray, if it still is one, and records what is owed if
// that is not proven. left is why it was not touched though it is a stray.
func (r *reconciler) destroy(ctx context.Context, f Found) (after Found, owed *Unconfirmed, left error) {
	now := func(v Verdict, reason string) Found {
		f.Verdict, f.Reason = v, reason
		return f
	}
	t := target{
		scope: scope{r.tenant, f.SandboxID}, client: r.client, key: r.key,
		name: f.SandboxName, leaseKey: f.LeaseKey, account: r.account,
	}
	// A call may have begun since the survey, by a host that left its lease out of known.
	if !r.d.closeScope(t.debt(DestroyOwed, errRunning), true) {
		return now(VerdictInFlight, "a call of this driver is at work on it"), nil, nil
	}
	defer r.d.openScope(t.scope)
	r.d.owned(t.scope, t.key, t.account) // the list has shown it to this key
	ctx, cancel := cleanupContext(ctx, r.d.cfg.CleanupTimeout)
	defer cancel()
	box, err := r.d.read(ctx, t)
	switch {
	case err != nil && r.d.absent(ctx, t, err) == nil:
		return now(VerdictDestroyed, "it is gone by now"), nil, nil
	case err != nil:
		return now(VerdictStray, "it could not be read again, so it was left alone"), nil, err
	case !slices.Equal(leaseKeys(box), []string{f.LeaseKey}) || !slices.Contains(box.EnvNames, r.owner):
		return now(VerdictUnproven, "its marks changed between two looks"), nil, nil
	}
	if err := r.d.destroy(ctx, t); err != nil {
		u := t.destroyDebt(err)
		r.d.owe(u)
		return now(VerdictOwed, "its destroy is not proven"), &u, nil
	}
	r.d.gone(t.scope)
	return now(VerdictDestroyed, f.Reason), nil, nil
}
