package createos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"

	"github.com/google/uuid"
)

// Resume makes a lease ready for work again: one that was released by pause,
// or one that an earlier process left behind in whatever state.
//
// It checks the lease against the configuration, sets a restricted egress list
// again before the sandbox may run, brings the sandbox to running, compares
// the marker on its disk, and ends commands that a dead host left in the
// middle. It returns a copy of the lease; the sandbox id stays the same.
//
// [ErrLeaseExpired] (an [*ExpiredError]) is the verdict that the lease cannot
// be continued. Resume never destroys anything: what to do with the remains
// is the host's decision, and with the reason ExpiredSuspect it should look,
// or copy out what matters, before it calls Destroy. All other errors leave
// the lease as good as it was and may be tried again: [*RequestError] and
// [*ConnectionError] are passing trouble, [*StateError] a sandbox that did not
// get to run in time, ErrUnjudged a 404 that proves nothing, ErrCleanupFirst a
// lease that is closing, poisoned, or being resumed by another call. If ends of
// processes cannot be proven the error matches ErrTerminationUnproven and the
// lease is poisoned.
//
// The end of ctx, Config.Timeout (ErrTimeout), a Release or Destroy
// (ErrLeaseClosing) and Shutdown (ErrShutdown) cancel it. A Resume that woke
// the sandbox and then fails pauses it again, on a bound of its own, unless a
// Release or Destroy is waiting to do better; if that pause is not proven, or is not
// tried because other calls have begun to work in the sandbox, that is listed as
// pause owed, and the error says so.
//
// Resume may be called concurrently; of two on one lease the second is
// refused.
func (d *Driver) Resume(ctx context.Context, env Environment, lease *Lease) (*Lease, error) {
	l, err := d.lessee(env, lease, ErrForeignLease, false)
	if err != nil {
		return nil, err
	}
	c := &call{scope: l.scope, target: l.target(), resume: true}
	ctx, err = d.enter(ctx, c, func() error {
		if d.down {
			return ErrShutdown
		}
		_, busy := d.closing[l.scope]
		for other := range d.active[l.scope] {
			busy = busy || other.resume
		}
		if busy || d.poisonedLocked(l.scope) {
			return ErrCleanupFirst
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	defer d.leave(c)
	if err := l.expired(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, l.set.timeout, ErrTimeout)
	defer cancel()
	woke, err := d.resume(ctx, l)
	if err == nil {
		d.settle(l.scope, PauseOwed)
		return l.resumed(), nil
	}
	return nil, d.resumeFailed(ctx, l, woke, err)
}

// expired finds what can be found before any request.
func (l *lessee) expired() error {
	m := l.lease.Metadata
	e := &ExpiredError{SandboxID: l.scope.id, Remains: RemainsUnknown}
	if len(m.malformed) > 0 {
		e.Reason, e.Fields = ExpiredMetadata, m.malformed
		return e
	}
	if _, err := uuid.Parse(m.Marker); err != nil || len(m.Marker) != 36 {
		e.Reason = ExpiredMarkerInvalid
		return e
	}
	if _, err := checkWorkspace(m.RemoteCwd); err != nil || m.RemoteCwd == "" {
		e.Reason, e.Fields = ExpiredMetadata, []string{"remoteCwd"}
		return e
	}
	if _, ok := l.restriction(); !ok {
		e.Reason, e.Fields = ExpiredMetadata, []string{"effectiveEgressAllowlist"}
		return e
	}
	if e.Fields = l.differing(); len(e.Fields) > 0 {
		e.Reason = ExpiredConfigChanged
		return e
	}
	return nil
}

// resume does the work of Resume. woke says that it may have made a sandbox
// run that did not.
func (d *Driver) resume(ctx context.Context, l *lessee) (woke bool, err error) {
	t := l.target()
	box, err := d.settled(ctx, t)
	if err != nil {
		return false, expiredIfGone(l, err)
	}
	if err := l.expiredIn(box.Status); err != nil {
		return false, err
	}
	if list, _ := l.restriction(); list != nil { // expired looked whether it is sound
		if err := d.restrict(ctx, t, list); err != nil {
			return false, expiredIfGone(l, d.judge(ctx, l, err))
		}
	}
	if woke, err = d.wakeBox(ctx, t, &box, nil); err != nil {
		return woke, expiredIfGone(l, err)
	}
	if err := d.checkMarker(ctx, l); err != nil {
		return woke, err
	}
	return woke, expiredIfGone(l, d.endStrays(ctx, l))
}

// settled reads the state, and waits while the sandbox is on its way to a
// pause: neither its egress nor its state can be changed then.
func (d *Driver) settled(ctx context.Context, t target) (Sandbox, error) {
	var p poll
	for {
		box, err := d.read(ctx, t)
		if err != nil {
			if isNotFound(err) {
				if why := d.absent(ctx, t, err); why != nil {
					return box, why
				}
				err = &goneError{err}
			}
			return box, err
		}
		if box.Status != statePausing {
			return box, nil
		}
		if err := p.wait(ctx); err != nil {
			return box, &StateError{SandboxID: t.scope.id, Want: stateRunning, Last: box.Status, Cause: err}
		}
	}
}

func (l *lessee) expiredAs(reason ExpiredReason, remains Remains) error {
	return &ExpiredError{SandboxID: l.scope.id, Reason: reason, Remains: remains}
}

// expiredIn is the verdict on a state from which nothing comes back.
func (l *lessee) expiredIn(state string) error {
	switch state {
	case stateDestroyed:
		return l.expiredAs(ExpiredSandboxGone, RemainsGone)
	case stateDestroying:
		return l.expiredAs(ExpiredSandboxGone, RemainsExists)
	case stateFailed:
		return l.expiredAs(ExpiredSandboxFailed, RemainsExists)
	}
	return nil
}

// expiredIfGone makes a proven absence, and states from which nothing comes
// back, the verdict that they are.
func expiredIfGone(l *lessee, err error) error {
	var state *StateError
	if errors.Is(err, ErrLeaseGone) {
		return l.expiredAs(ExpiredSandboxGone, RemainsGone)
	}
	if errors.As(err, &state) {
		if verdict := l.expiredIn(state.Last); verdict != nil {
			return verdict
		}
	}
	return err
}

// checkMarker proves that the disk is the one that Acquire wrote to.
func (d *Driver) checkMarker(ctx context.Context, l *lessee) error {
	m := l.lease.Metadata
	got, err := readMarker(ctx, l.client, l.scope.id, path.Join(m.RemoteCwd, markerFile))
	switch {
	case isNotFound(err) && !saidByAPI(err):
		return fmt.Errorf("%w: %w", ErrUnjudged, err)
	case isNotFound(err):
		return d.markerMissing(ctx, l)
	case err != nil:
		return err
	case got != m.Marker:
		return l.expiredAs(ExpiredMarkerDiffers, RemainsExists)
	}
	return nil
}

// readMarker reads no more than can matter: a file longer than a marker is
// not one.
func readMarker(ctx context.Context, c *Client, id, file string) (string, error) {
	body, _, err := c.download(ctx, id, file)
	if err != nil {
		return "", err
	}
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, 64))
	return string(b), err
}

// markerMissing tells a sandbox that lost its disk from one whose user
// cleaned the workspace, and both from a sandbox that is gone: the API answers
// 404 to a missing file and to a missing sandbox.
func (d *Driver) markerMissing(ctx context.Context, l *lessee) error {
	box, err := d.read(ctx, l.target())
	if err != nil {
		return expiredIfGone(l, d.judge(ctx, l, err))
	}
	if err := l.expiredIn(box.Status); err != nil {
		return err
	}
	if key := l.lease.Metadata.LeaseKey; key != "" && slices.Contains(box.EnvNames, key) {
		return l.expiredAs(ExpiredSuspect, RemainsExists)
	}
	return l.expiredAs(ExpiredMarkerMissing, RemainsExists)
}

// resumeFailed puts a sandbox that was woken in vain back to sleep, and names
// the reason why ctx ended, if it has.
func (d *Driver) resumeFailed(ctx context.Context, l *lessee, woke bool, err error) error {
	var verdict *ExpiredError
	if !errors.As(err, &verdict) {
		err = because(ctx, "resume", err)
	}
	if verdict != nil && verdict.Remains == RemainsGone {
		d.gone(l.scope)
		return err
	}
	d.mu.Lock()
	_, closing := d.closing[l.scope]
	others := len(d.active[l.scope]) - 1
	d.mu.Unlock()
	if !woke || closing {
		return err
	}
	var perr error
	if others > 0 { // a pause would stop them in the middle; RetryCleanup comes when they are over
		perr = d.owePause(l.target(), errInUse)
	} else {
		clean, cancel := cleanupContext(ctx, d.cfg.CleanupTimeout)
		defer cancel()
		perr = d.payPause(clean, l.target())
	}
	switch {
	case perr == nil:
		return err
	case verdict != nil:
		verdict.Cleanup = perr
		return verdict
	}
	return fmt.Errorf("%w; %w", err, perr)
}

// errInUse is why a sandbox that was woken in vain stays awake.
var errInUse = errors.New("other calls are at work in the sandbox")

// resumed is the lease as it is after a Resume.
func (l *lessee) resumed() *Lease {
	lease := l.lease.clone()
	lease.Metadata.ResumedLease = true
	return lease
}

// restriction is the egress list that must be in force before the sandbox may
// run, nil for none. ok is false if the record of the lease cannot be relied
// on. A lease of an older provider has none; the configuration's applies.
func (l *lessee) restriction() (list []string, ok bool) {
	if l.lease.Metadata.legacy() {
		return l.set.egress, true
	}
	return l.lease.Metadata.restriction()
}
