package createos

import (
	"context"
	"errors"
	"time"
)

// Release gives a lease back. A lease that was acquired for reuse, while reuse
// is still configured, is paused; every other lease is destroyed, as by
// [Driver.Destroy].
//
// It first cancels the calls that run on the lease, which then match
// ErrLeaseClosing, and waits for them and for their own cleanup, at most for
// DriverConfig.CleanupTimeout. If some are left then, a pause is not sent and
// the error is a [*BusyError]. A lease on which a process may still run is not
// paused either: ErrPoisoned. A pause is success once the sandbox was seen
// paused after it was sent, or when the sandbox is proven gone. Otherwise the
// sandbox is listed by Unconfirmed as pause owed and the error is a
// [*CleanupError] with its cause.
//
// Release works even if ctx is already over. When ctx ends, Release returns an
// error that matches its end; the work goes on, bounded by Config.Timeout, the
// lease stays closing until then, and Shutdown waits for it.
//
// A Destroy that must not be refused because such a Release is still at work
// waits for it first, by Shutdown, or comes again.
//
// A lease with an empty id is nothing to do, as is a nil lease. ErrForeignLease
// means that nothing was done; ErrCleanupInProgress that another Release or
// Destroy is at work. Of the configuration only origin and key need be
// valid; if anything else in it is not, Release destroys. It may be called
// concurrently and again.
func (d *Driver) Release(ctx context.Context, env Environment, lease *Lease) error {
	return d.close(ctx, env, lease, false)
}

// Destroy destroys the sandbox of a lease. It is Release without the pause: it
// treats running calls, ctx, the configuration and its errors the same way,
// but when running calls do not end in time it destroys all the same.
//
// Success rests on proof: the provider said that the sandbox is destroyed, or
// accepted the destroy of one that this driver saw in a steady state
// ("destroying" is the provider's acceptance, not its completion), or a 404
// was judged as absence. It ends every entry of Unconfirmed about the sandbox,
// and it is the only cure of a poisoned lease. Without proof the sandbox is
// listed as destroy owed, the lease is poisoned, and the error is a
// [*CleanupError]; calling Destroy again is always safe.
func (d *Driver) Destroy(ctx context.Context, env Environment, lease *Lease) error {
	return d.close(ctx, env, lease, true)
}

func (d *Driver) close(ctx context.Context, env Environment, lease *Lease, destroy bool) error {
	if lease == nil || lease.ProviderLeaseID == "" {
		return nil
	}
	l, err := d.lessee(env, lease, ErrForeignLease, true)
	if err != nil {
		return err
	}
	destroy = destroy || l.bad != nil || !l.set.reuse || !lease.Metadata.ReuseLease
	kind := PauseOwed
	if destroy {
		kind = DestroyOwed
	}
	t := l.target() // now: when the work goes on without the caller, the lease is the caller's again
	if !d.closeScope(t.debt(kind, errRunning), false) {
		return ErrCleanupInProgress
	}
	return d.work(ctx, func(ctx context.Context) error {
		defer d.openScope(t.scope)
		left := d.drain(t.scope)
		ctx, cancel := cleanupContext(ctx, l.set.timeout)
		defer cancel()
		if destroy {
			return d.closeByDestroy(ctx, t)
		}
		return d.closeByPause(ctx, t, left)
	})
}

// errRunning is the cause of the entries that stand for work in progress.
var errRunning = errors.New("the cleanup is running")

// closeScope makes a scope closing, unless it is already, or, with idle, calls run on
// it. u is what is owed until the work ends.
func (d *Driver) closeScope(u Unconfirmed, idle bool) bool {
	u.Since = time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, busy := d.closing[u.scope()]; busy || idle && len(d.active[u.scope()]) > 0 {
		return false
	}
	d.closing[u.scope()] = u
	return true
}

func (d *Driver) openScope(s scope) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.closing, s)
}

// closeByDestroy destroys and settles, or records, what is owed.
func (d *Driver) closeByDestroy(ctx context.Context, t target) error {
	if err := d.destroy(ctx, t); err != nil {
		u := t.destroyDebt(err)
		d.owe(u)
		return &CleanupError{Kind: u.Kind, SandboxID: t.scope.id, SandboxName: t.name, Cause: err}
	}
	d.gone(t.scope)
	return nil
}

// closeByPause pauses, unless something may still run in the sandbox: pausing
// it would freeze a process that was to be ended, and resuming revive it.
func (d *Driver) closeByPause(ctx context.Context, t target, left int) error {
	d.mu.Lock()
	poisoned := d.poisonedLocked(t.scope)
	d.mu.Unlock()
	if poisoned {
		return ErrPoisoned
	}
	if left > 0 {
		// The caller may have left too: then only the entry says so.
		err := &BusyError{SandboxID: t.scope.id, Calls: left}
		d.owe(t.debt(PauseOwed, err))
		return err
	}
	return d.payPause(ctx, t)
}

// payPause pauses and settles, or records, what is owed.
func (d *Driver) payPause(ctx context.Context, t target) error {
	if err := d.pauseBox(ctx, t); err != nil {
		return d.owePause(t, err)
	}
	d.settle(t.scope, PauseOwed)
	return nil
}

func (d *Driver) owePause(t target, cause error) error {
	d.owe(t.debt(PauseOwed, cause))
	return &CleanupError{Kind: PauseOwed, SandboxID: t.scope.id, SandboxName: t.name, Cause: cause}
}

// differing names the fields in which a lease and a configuration differ. A
// lease of an older provider lacks what it did not know; there the
// configuration's values apply.
func (l *lessee) differing() []string {
	m, set := l.lease.Metadata, l.set
	var fields []string
	if m.Shape != set.shape {
		fields = append(fields, "shape")
	}
	if m.Rootfs != set.rootfsFor(m.AdapterType) {
		fields = append(fields, "rootfs")
	}
	if m.Region != set.region {
		fields = append(fields, "region")
	}
	if m.legacy() {
		return fields
	}
	base, _ := normalEgress(m.BaseEgressAllowlist)
	if isOpen(base) {
		base = nil
	}
	if !sameEgress(base, set.egress) {
		fields = append(fields, "baseEgressAllowlist")
	}
	if m.AutoPauseAfterSeconds != set.autoPauseSeconds {
		fields = append(fields, "autoPauseAfterSeconds")
	}
	return fields
}
