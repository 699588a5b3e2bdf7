package createos

import (
	"context"
	"errors"
	"time"
)

// Shutdown ends the driver's work: Acquire, Resume, Exec, Probe, SyncIn and
// SyncOut are refused from now on, those that run are cancelled (their errors match ErrShutdown)
// and waited for with their cleanup, cleanups that go on without their caller
// are waited for, and every destroy that is owed is tried once more.
//
// Leases that the host holds are not touched: Release, Destroy, Unconfirmed
// and RetryCleanup keep working.
//
// All of it is bounded by ctx. Shutdown returns nil if everything is over and
// nothing is owed, else an [*UnconfirmedError] that lists every sandbox that
// is not proven clean, running acquires and releases included, and matches the
// end of ctx if that came first. What runs then ends on its own bounds; a
// second Shutdown waits for it. It may be called again and concurrently.
func (d *Driver) Shutdown(ctx context.Context) error {
	d.mu.Lock()
	d.down = true
	for _, calls := range d.active {
		for c := range calls {
			if !c.cleanup {
				c.cancel(ErrShutdown)
			}
		}
	}
	d.mu.Unlock()
	err := d.quiet(ctx)
	if err == nil {
		err = d.payAll(ctx, DestroyOwed, Stuck)
	}
	if err == nil {
		// Another Shutdown or RetryCleanup may be at work on the same entries.
		err = d.quiet(ctx)
	}
	left := append(d.Unconfirmed(), d.unfinished()...)
	if err == nil && len(left) == 0 {
		return nil
	}
	return &UnconfirmedError{Entries: left, Cause: err}
}

var errUnfinished = errors.New("a call has not ended its work on the sandbox")

// unfinished lists the sandboxes of calls that were cancelled and have not
// ended: what they run is not proven to be over.
func (d *Driver) unfinished() []Unconfirmed {
	var list []Unconfirmed
	d.mu.Lock()
	defer d.mu.Unlock()
	for s, calls := range d.active {
		if d.poisonedLocked(s) {
			continue // listed already
		}
		for c := range calls {
			if c.target.scope.id == "" {
				continue
			}
			u := c.target.debt(ProcessUnproven, errUnfinished)
			u.Since = time.Now()
			list = append(list, u)
			break
		}
	}
	return list
}

// quiet waits until no call and no cleanup runs, or for the end of ctx.
func (d *Driver) quiet(ctx context.Context) error {
	for {
		next := d.running()
		if next == nil {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return ended(ctx)
		}
	}
}

// running returns the end of something that runs, nil if nothing does.
func (d *Driver) running() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, calls := range d.active {
		for c := range calls {
			return c.done
		}
	}
	for done := range d.works {
		return done
	}
	return nil
}
