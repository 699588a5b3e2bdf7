package createos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// retryWorkers bounds how many entries RetryCleanup works on at once.
const retryWorkers = 8

// listingGap is the least distance between the two listings that must both not
// show a sandbox before it is presumed absent.
const listingGap = 10 * time.Second

var errNoKey = errors.New("no key is known for its environment; hand one to RetryCleanup")

// RetryCleanup tries again what was already asked for: each entry of
// Unconfirmed once, several at a time, those of different environments in
// turn. It destroys what is to be destroyed, pauses what is to be paused,
// and looks by name and lease key for what an unclear create may have made,
// to destroy that. It never destroys a lease that the host holds: of an entry
// about a process it only repeats the termination, and notes the proof if it
// gets one; such an entry ends with the host's own Destroy.
//
// An entry is tried with the newest key that a call of its environment used.
// envs hands in newer ones, or those for entries of an earlier driver; of
// each only origin and key need be valid, else RetryCleanup fails with a
// [*ConfigError] before anything is sent.
//
// A create of unknown outcome is presumed absent once DriverConfig.SettleTime
// has passed since its request ended and two complete listings, at least ten
// seconds apart, do not show it. RetryCleanup waits for the second if it
// must, once for all such entries.
//
// It returns nil if nothing is owed any more, else an [*UnconfirmedError] with
// what is left. When ctx ends no further entry is begun and the error matches
// its end; what was begun ends on its own bound, and Shutdown waits for
// it. It may be called at any time, also concurrently and after Shutdown;
// entries that another call is working on are left to that call.
func (d *Driver) RetryCleanup(ctx context.Context, envs ...Environment) error {
	for _, env := range envs {
		set, bad := env.Config.settings(d.fallback)
		if bad := bad.forCleanup(); bad != nil {
			return bad
		}
		if err := env.check(); err != nil {
			return err
		}
		d.useKey(env.tenant(set.origin), set.key)
	}
	err := d.payAll(ctx, DestroyOwed, Stuck, PauseOwed, ProcessUnproven, CreateUnknown)
	d.mu.Lock()
	left := d.debtsLocked()
	d.mu.Unlock()
	if len(left) == 0 && err == nil {
		return nil
	}
	sortEntries(left)
	return &UnconfirmedError{Entries: left, Cause: err}
}

// payAll works once on each entry of the given kinds. Its error is the end of
// ctx, if that came first.
func (d *Driver) payAll(ctx context.Context, kinds ...DebtKind) error {
	byTenant := make(map[tenant][][]Unconfirmed)
	names := make(map[tenant][]Unconfirmed)
	d.mu.Lock()
	debts := d.debtsLocked()
	d.mu.Unlock()
	sortEntries(debts)
	for _, u := range debts {
		t := u.scope().tenant
		switch {
		case !slices.Contains(kinds, u.Kind):
		case u.Kind == CreateUnknown:
			names[t] = append(names[t], u)
		default:
			byTenant[t] = withScope(byTenant[t], u)
		}
	}
	if len(byTenant)+len(names) == 0 {
		return nil
	}
	return d.work(ctx, func(detached context.Context) error {
		d.each(ctx, inTurn(byTenant), func(u Unconfirmed) { d.pay(detached, u) })
		d.payNames(ctx, detached, names)
		return ended(ctx)
	})
}

// withScope adds an entry to a list in which those of one scope are together:
// they are worked on one after the other, or the second would find the scope
// busy with the first. A destroy goes first, because it may end all of them.
func withScope(list [][]Unconfirmed, u Unconfirmed) [][]Unconfirmed {
	for i, group := range list {
		if group[0].scope() != u.scope() {
			continue
		}
		if u.Kind == DestroyOwed || u.Kind == Stuck {
			list[i] = slices.Insert(group, 0, u)
		} else {
			list[i] = append(group, u)
		}
		return list
	}
	return append(list, []Unconfirmed{u})
}

// inTurn deals scopes out tenant by tenant, so that one with many does not
// stand before those with few.
func inTurn(byTenant map[tenant][][]Unconfirmed) [][]Unconfirmed {
	var order [][]Unconfirmed
	for i := 0; ; i++ {
		more := false
		for _, list := range byTenant {
			if i < len(list) {
				order = append(order, list[i])
				more = true
			}
		}
		if !more {
			return order
		}
	}
}

// each calls f for each entry, a few scopes at once, and begins none after ctx
// ended.
func (d *Driver) each(ctx context.Context, list [][]Unconfirmed, f func(Unconfirmed)) {
	next := make(chan []Unconfirmed)
	var workers sync.WaitGroup
	for range min(retryWorkers, len(list)) {
		workers.Go(func() {
			for group := range next {
				for _, u := range group {
					if ctx.Err() == nil {
						f(u)
					}
				}
			}
		})
	}
	for _, group := range list {
		if ctx.Err() != nil {
			break
		}
		select {
		case next <- group:
		case <-ctx.Done():
		}
	}
	close(next)
	workers.Wait()
}

// targetOf is what an entry is about, as seen with the newest key.
func (d *Driver) targetOf(u Unconfirmed) (target, bool) {
	s := u.scope()
	d.mu.Lock()
	key := d.keys[s.tenant]
	d.mu.Unlock()
	if key.IsZero() {
		return target{}, false
	}
	return target{
		scope: s, client: d.client(s.tenant, key), key: key,
		name: u.SandboxName, leaseKey: u.LeaseKey, account: u.AccountID,
	}, true
}

// failed records the outcome of a try that did not end an entry. The entry may
// have ended by another hand meanwhile; then it stays so.
func (d *Driver) failed(u Unconfirmed, err error) {
	d.mu.Lock()
	if held := d.unconfirmed[debtKey{u.scope(), u.Kind}]; held != nil {
		held.Attempts++
		if held.Cause != err.Error() {
			held.Cause = err.Error()
			d.changedLocked(EventOwed, held)
		}
	}
	d.mu.Unlock()
	d.tell()
}

// pay works once on an entry that has an id.
func (d *Driver) pay(ctx context.Context, u Unconfirmed) {
	t, ok := d.targetOf(u)
	if !ok {
		d.failed(u, errNoKey)
		return
	}
	if u.Kind == ProcessUnproven {
		d.payProcess(ctx, t, u)
		return
	}
	if !d.closeIdle(u) {
		return
	}
	defer d.openScope(t.scope)
	d.track(t.scope)
	ctx, cancel := cleanupContext(ctx, d.cfg.CleanupTimeout)
	defer cancel()
	var err error
	if u.Kind == PauseOwed {
		if err = d.pauseBox(ctx, t); err == nil {
			d.settle(t.scope, PauseOwed)
		}
	} else if err = d.payDestroy(ctx, t, u); err == nil {
		d.gone(t.scope)
	}
	switch {
	case err == nil:
	case u.Kind == DestroyOwed && t.destroyDebt(err).Kind == Stuck:
		u.Kind, u.Cause = Stuck, err.Error()
		d.owe(u)
	default:
		d.failed(u, err)
	}
}

// payDestroy destroys. The id of an entry is what the answer to a create said: if
// it names nothing, and never answered here, that answer may have been garbled,
// and the sandbox exist under another id. Then the marks decide.
func (d *Driver) payDestroy(ctx context.Context, t target, u Unconfirmed) error {
	known := d.seen(t.scope).byID
	notFound, err := d.destroyBox(ctx, t)
	if err != nil || !notFound || known || u.SandboxName == "" || u.LeaseKey == "" {
		return err
	}
	ctx = searchContext(ctx)
	boxes, err := t.client.list(ctx)
	if err != nil {
		return err
	}
	found := d.match(ctx, t.client, boxes, u.SandboxName, u.LeaseKey)
	switch {
	case slices.ContainsFunc(found.live, func(b Sandbox) bool { return b.ID == t.scope.id }):
		return fmt.Errorf("%w: %w", ErrUnjudged, errFoundAgain)
	case len(found.live) > 0:
		for _, o := range d.oweFound(u, t.key, found.live) {
			d.pay(ctx, o)
		}
	}
	return found.err // a row that could not be read may be ours as well
}

// closeIdle makes the scope of an entry closing if the entry is still owed and
// nobody is at work there. A pause is not sent to a poisoned scope.
func (d *Driver) closeIdle(u Unconfirmed) bool {
	s := u.scope()
	d.mu.Lock()
	defer d.mu.Unlock()
	_, busy := d.closing[s]
	if busy || len(d.active[s]) > 0 || d.unconfirmed[debtKey{s, u.Kind}] == nil {
		return false
	}
	if u.Kind == PauseOwed && d.poisonedLocked(s) {
		return false
	}
	d.closing[s] = u
	return true
}

// payProcess repeats the terminations of an entry about processes. Proof is
// noted and does not cure: between the failure and the proof the process may
// have done anything.
func (d *Driver) payProcess(ctx context.Context, t target, u Unconfirmed) {
	c := &call{scope: t.scope, cleanup: true}
	ctx, err := d.enter(ctx, c, func() error {
		if _, busy := d.closing[t.scope]; busy || d.unconfirmed[debtKey{t.scope, ProcessUnproven}] == nil {
			return ErrCleanupInProgress
		}
		return nil
	})
	if err != nil {
		return
	}
	defer d.leave(c)
	clean, cancel := cleanupContext(ctx, d.cfg.CleanupTimeout)
	defer cancel()
	clean, leave := context.WithCancelCause(clean)
	stop := context.AfterFunc(ctx, func() { leave(context.Cause(ctx)) }) // a Destroy does better than this
	defer stop()
	if err := d.endProcesses(clean, t, u.Processes); err != nil {
		d.failed(u, err)
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if held := d.unconfirmed[debtKey{t.scope, ProcessUnproven}]; held != nil {
		held.Attempts++
		held.Note = "terminated with proof at " + time.Now().UTC().Format(time.RFC3339)
	}
}

// payNames works on the creates of unknown outcome. Those of one tenant share
// their listings, and all share the wait between two.
func (d *Driver) payNames(ctx, detached context.Context, names map[tenant][]Unconfirmed) {
	again := make(map[tenant][]Unconfirmed)
	for t, list := range names {
		if ctx.Err() != nil {
			return
		}
		var mine []Unconfirmed
		for _, u := range list {
			if d.closeIdle(u) {
				mine = append(mine, u)
				defer d.openScope(u.scope())
			}
		}
		if len(mine) > 0 {
			if left := d.lookForNames(detached, mine); len(left) > 0 {
				again[t] = left
			}
		}
	}
	if len(again) == 0 || sleep(ctx, listingGap) != nil {
		return
	}
	for _, list := range again {
		if ctx.Err() == nil {
			d.lookForNames(detached, list)
		}
	}
}

// lookForNames lists once, destroys what it finds, and returns the entries that
// need one more listing to be presumed absent.
func (d *Driver) lookForNames(ctx context.Context, list []Unconfirmed) (again []Unconfirmed) {
	t, ok := d.targetOf(list[0])
	if !ok {
		for _, u := range list {
			d.failed(u, errNoKey)
		}
		return nil
	}
	look, cancel := cleanupContext(ctx, d.cfg.CleanupTimeout)
	defer cancel()
	look = searchContext(look)
	boxes, err := t.client.list(look)
	for _, u := range list {
		if err != nil {
			d.failed(u, err)
			continue
		}
		found := d.match(look, t.client, boxes, u.SandboxName, u.LeaseKey)
		switch {
		case len(found.live) > 0:
			owed := d.oweFound(u, t.key, found.live)
			if found.whole {
				d.settleName(u)
			} else { // a row that could not be read may be ours as well
				d.failed(u, found.err)
			}
			for _, o := range owed {
				d.pay(ctx, o)
			}
		case !found.whole:
			d.failed(u, found.err)
		case found.ended:
			d.settleName(u)
		default:
			// To the key of another account every sandbox is absent.
			mine := target{scope: u.scope(), client: t.client, key: t.key, account: u.AccountID}
			if why := d.foreignKey(look, mine, d.seen(mine.scope)); why != nil {
				d.failed(u, why)
			} else if d.missed(u) {
				again = append(again, u)
			}
		}
	}
	return again
}

// oweFound makes entries of what a name turned out to be. key is the one that it was
// shown to.
func (d *Driver) oweFound(u Unconfirmed, key Secret, live []Sandbox) (owed []Unconfirmed) {
	for _, box := range live {
		o := u
		o.Kind, o.SandboxID, o.Cause = DestroyOwed, box.ID, "found by its name and lease key"
		o.Note, o.EndedAt, o.Attempts = "", time.Time{}, 0 // of the search that is over
		d.owned(o.scope(), key, o.AccountID)
		d.owe(o)
		owed = append(owed, o)
	}
	return owed
}

// missed records that a complete listing did not show a name. It says whether
// another listing may settle it; the one that may settle it now does so.
func (d *Driver) missed(u Unconfirmed) (again bool) {
	now := time.Now()
	d.mu.Lock()
	held := d.unconfirmed[debtKey{u.scope(), CreateUnknown}]
	if held == nil {
		d.mu.Unlock()
		return false
	}
	held.Attempts++
	absent := false
	switch {
	case now.Sub(held.EndedAt) < d.cfg.SettleTime:
		held.Note = fmt.Sprintf("not listed; may still appear until %s", held.EndedAt.Add(d.cfg.SettleTime).UTC().Format(time.RFC3339))
	case held.missed.IsZero():
		held.missed = now
		again = true
	case now.Sub(held.missed) < listingGap:
		again = true
	default:
		absent = true
	}
	d.mu.Unlock()
	if absent {
		d.log.Info("createos: presumed absent", "name", u.SandboxName)
		d.settleName(u)
	}
	return again
}

// settleName ends an entry that has only a name, and lets go of its scope: what
// it turned out to be is listed under its id, or not at all.
func (d *Driver) settleName(u Unconfirmed) {
	d.settle(u.scope(), CreateUnknown)
	d.openScope(u.scope())
	d.forget(u.scope())
}
