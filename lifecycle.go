package createos

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"
)

// destroy destroys a sandbox and returns nil only on proof. ctx is a cleanup
// context: its end is the bound. The caller settles or records the debt.
func (d *Driver) destroy(ctx context.Context, t target) error {
	_, err := d.destroyBox(ctx, t)
	return err
}

// destroyBox is destroy that also says whether the proof is that nothing of
// this id was found.
func (d *Driver) destroyBox(ctx context.Context, t target) (notFound bool, err error) {
	notFound, err = d.requestDestroy(ctx, t)
	if err == nil && !notFound && d.awaits(t.scope) {
		err = d.awaitDestroyed(ctx, t)
	}
	return notFound, err
}

// awaits says that an accepted destroy is not enough: the host said so, or it was
// accepted before, and nothing came of it.
func (d *Driver) awaits(s scope) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg.AwaitDestroyed || d.unconfirmed[debtKey{s, Stuck}] != nil
}

// awaitDestroyed waits until a sandbox whose destroy was accepted is destroyed
// or gone. A look that fails is not the sandbox's fault: only the end of the
// bound, or a refusal that will not pass, makes it stuck.
func (d *Driver) awaitDestroyed(ctx context.Context, t target) error {
	var p poll
	for d.seen(t.scope).status != stateDestroyed {
		_, err := d.read(ctx, t)
		if err != nil {
			if err = d.absent(ctx, t, err); err == nil {
				return nil
			}
			if !passing(err) && !errors.Is(err, errFoundAgain) {
				return &stuckError{err}
			}
		} else if d.seen(t.scope).status == stateDestroyed {
			return nil
		}
		if werr := p.wait(ctx); werr != nil {
			return &stuckError{&StateError{SandboxID: t.scope.id, Want: stateDestroyed, Last: stateName(d.seen(t.scope).status), Cause: errors.Join(werr, err)}}
		}
	}
	return nil
}

// A stuckError is why a sandbox whose destroy was accepted is not proven gone.
type stuckError struct{ cause error }

func (e *stuckError) Error() string { return "destroy accepted, but " + e.cause.Error() }
func (e *stuckError) Unwrap() error { return e.cause }

// destroyDebt is the entry for a destroy that is not proven.
func (t target) destroyDebt(err error) Unconfirmed {
	if errors.As(err, new(*stuckError)) {
		return t.debt(Stuck, err)
	}
	return t.debt(DestroyOwed, err)
}

// requestDestroy sends the DELETE until its effect is known.
func (d *Driver) requestDestroy(ctx context.Context, t target) (notFound bool, err error) {
	var p poll
	repeated := false
	for {
		before := d.seen(t.scope).status
		reply, err := t.client.destroy(ctx, t.scope.id)
		switch {
		case err == nil && reply.Status == stateDestroyed:
			d.saw(t.scope, stateDestroyed)
			return false, nil
		case err == nil && reply.Status == stateDestroying && wasSteady(before):
			return false, nil
		case err == nil, answered2xx(err):
			return d.settleDestroy(ctx, t)
		case isConflict(err):
			// Somebody else moves the state: wait until it stands still.
			over, serr := d.steady(ctx, t)
			if over || serr != nil {
				return over && d.seen(t.scope).status != stateDestroyed, serr
			}
			if perr := p.wait(ctx); perr != nil {
				return false, &StateError{SandboxID: t.scope.id, Want: stateDestroyed, Last: stateName(d.seen(t.scope).status), Cause: errors.Join(perr, err)}
			}
		case isNotFound(err):
			return true, d.absent(ctx, t, err)
		case unclear(err):
			// The DELETE may have worked though its answer did not come.
			box, rerr := d.read(ctx, t)
			switch {
			case rerr == nil && box.Status == stateDestroyed:
				return false, nil
			case rerr == nil && box.Status == stateDestroying && !repeated:
				repeated = true // on its way, but whose way? Ask again to be told
			case isNotFound(rerr):
				return true, d.absent(ctx, t, rerr)
			default:
				return false, err
			}
		default:
			return false, err
		}
	}
}

// wasSteady says that a sandbox seen in this state is really being destroyed
// if DELETE answers "destroying".
func wasSteady(status string) bool {
	return status == stateRunning || status == statePaused || status == stateError
}

// answered2xx says that the request was answered with success in a form that
// says nothing more.
func answered2xx(err error) bool {
	var unreadable *ResponseError
	return errors.As(err, &unreadable) && unreadable.Status >= 200 && unreadable.Status < 300
}

// settleDestroy looks for the effect of a DELETE that was accepted without
// proof. One look settles it in general; an accepted transition that still
// shows the old state is looked at until the bound.
func (d *Driver) settleDestroy(ctx context.Context, t target) (notFound bool, err error) {
	var p poll
	for {
		box, err := d.read(ctx, t)
		if err != nil {
			return true, d.absent(ctx, t, err)
		}
		switch box.Status {
		case stateDestroyed, stateDestroying:
			return false, nil
		case stateFailed:
			return false, &StateError{SandboxID: t.scope.id, Want: stateDestroyed, Last: box.Status}
		}
		if err := p.wait(ctx); err != nil {
			return false, &StateError{SandboxID: t.scope.id, Want: stateDestroyed, Last: stateName(box.Status), Cause: err}
		}
	}
}

// steady waits until a sandbox is in no transition. over is true if it is
// proven gone.
func (d *Driver) steady(ctx context.Context, t target) (over bool, err error) {
	var p poll
	for {
		box, err := d.read(ctx, t)
		if err != nil {
			if err = d.absent(ctx, t, err); err == nil {
				return true, nil
			}
			return false, err
		}
		switch box.Status {
		case stateDestroyed:
			return true, nil
		case stateRunning, statePaused, stateError, stateFailed:
			return false, nil
		}
		if err := p.wait(ctx); err != nil {
			return false, &StateError{SandboxID: t.scope.id, Want: stateDestroyed, Last: stateName(box.Status), Cause: err}
		}
	}
}

const (
	// transitionTries is how often a pause or a resume is sent at most in one
	// operation. Each repeat needs a reading which shows that the one before
	// came to nothing.
	transitionTries = 3
	// conflictTries bounds repeats after 409. A sandbox was seen to show a
	// steady state for a while before the API let go of it, so conflicts
	// clear later than other refusals do; 40 looks are a good minute.
	conflictTries = 40
	// steadyLooks is how many looks must show the old state before an
	// unclear request counts as not accepted: an accepted one may show it for
	// a moment too.
	steadyLooks = 4
	// unknownLooks bounds how long a word that we do not know is polled.
	unknownLooks = 20
)

// A transition drives a sandbox to a state by a request that must not be sent
// blindly twice. It holds what was learnt on the way.
type transition struct {
	want    string                                       // stateRunning or statePaused
	from    []string                                     // steady states from which the request is sent
	through string                                       // the state in between
	send    func(context.Context) (time.Duration, error) // the request; returns the hint for the next look
	gone    func(Sandbox) bool                           // a state that ends it well, if any

	reached bool // a request reached the provider, if only to be refused by 409
	moves   bool // a request may have been accepted: what happens then is ours

	accepted  bool // the last request was accepted
	moved     bool // the state in between was seen since
	sentFrom  string
	lastErr   error // the last refusal or unclear answer
	tries     int
	conflicts int
	same      int // looks that showed the old state since an unclear answer
	unknown   int
	strayed   bool // a 404 turned out to be none
	waited    bool // a gap lies between the last request and now
	look      bool // the next look comes without a gap
}

// run looks and sends until the wanted state is seen. box is what the caller
// last read, if it read anything.
func (d *Driver) run(ctx context.Context, t target, tr *transition, box *Sandbox) error {
	var p poll
	for {
		if box == nil {
			got, err := d.read(ctx, t)
			if err != nil {
				err = d.absentOr(ctx, t, err, tr)
			}
			if tr.stray(err) {
				continue
			}
			if err != nil || got.ID == "" {
				return err
			}
			box = &got
		}
		tr.look = false
		done, err := d.step(ctx, t, tr, &p, *box)
		if done || err != nil {
			return err
		}
		if !tr.look {
			if err := p.wait(ctx); err != nil {
				return tr.stuck(t, box.Status, err)
			}
		}
		box = nil
	}
}

// stray says that a 404 is to be passed over, as one is in a transition: routers lose
// a sandbox for a moment.
func (tr *transition) stray(err error) bool {
	stray := errors.Is(err, errFoundAgain) && !tr.strayed
	tr.strayed = tr.strayed || stray
	return stray
}

// absentOr judges a failed reading: an operation for which a sandbox that is
// gone is fine ends well.
func (d *Driver) absentOr(ctx context.Context, t target, err error, tr *transition) error {
	if !isNotFound(err) {
		return err
	}
	if why := d.absent(ctx, t, err); why != nil {
		return why
	}
	if tr.gone != nil {
		return nil
	}
	return &goneError{err}
}

// step decides what one reading means.
func (d *Driver) step(ctx context.Context, t target, tr *transition, p *poll, box Sandbox) (done bool, err error) {
	status := box.Status
	switch {
	case status == tr.want && tr.counts():
		return true, nil
	case tr.gone != nil && tr.gone(box):
		return true, nil
	case status == tr.through:
		tr.moved = true
		return false, nil
	case slices.Contains([]string{stateDestroying, stateDestroyed, stateFailed}, status):
		return false, tr.stuck(t, status, nil)
	case slices.Contains(tr.from, status) || status == tr.want:
		return d.send(ctx, t, tr, p, status)
	case status == stateError:
		return false, tr.stuck(t, status, nil)
	case status == stateName(status) && status != "":
		return false, nil // a transition of somebody else
	}
	if tr.unknown++; tr.unknown >= unknownLooks {
		return false, tr.stuck(t, status, nil)
	}
	return false, nil
}

// counts says whether a reading of the wanted state is one: "running" always
// is, "paused" only after this call's own pause reached the provider, for it
// may be a reading from before.
func (tr *transition) counts() bool { return tr.want == stateRunning || tr.reached }

// send sends the request from a steady state, unless an earlier one may still
// take effect.
func (d *Driver) send(ctx context.Context, t target, tr *transition, p *poll, status string) (done bool, err error) {
	switch {
	case tr.accepted && !tr.moved:
		if status == stateError && tr.sentFrom != stateError {
			return false, tr.stuck(t, status, nil)
		}
		return false, nil // may go on showing the old state for a moment
	case tr.accepted && status == stateError:
		return false, tr.stuck(t, status, nil)
	case tr.lastErr != nil && unclear(tr.lastErr):
		if tr.same++; tr.same < steadyLooks {
			return false, nil
		}
	}
	if tr.tries >= transitionTries || tr.conflicts >= conflictTries {
		return false, tr.stuck(t, status, tr.lastErr)
	}
	if tr.tries+tr.conflicts > 0 && !tr.waited {
		tr.waited = true
		return false, nil // look once more after a gap, then repeat
	}
	hint, err := tr.send(ctx)
	tr.accepted, tr.moved, tr.same, tr.waited = false, false, 0, false
	tr.lastErr, tr.sentFrom = err, status
	p.hint(hint)
	tr.look = hint == 0
	switch {
	case errors.As(err, new(*prepareError)):
		return false, err
	case err == nil:
		tr.accepted, tr.reached, tr.moves = true, true, true
		tr.tries++
	case isConflict(err):
		tr.reached = true
		tr.conflicts++
	case isNotFound(err):
		err = d.absentOr(ctx, t, err, tr)
		if tr.stray(err) {
			return false, nil
		}
		return err == nil, err
	case unclear(err):
		tr.reached, tr.moves = true, true
		tr.tries++
	default:
		return false, err
	}
	return false, nil
}

// stuck is the error of a transition that did not reach its end.
func (tr *transition) stuck(t target, status string, cause error) error {
	if cause != nil && tr.lastErr != nil && !errors.Is(cause, tr.lastErr) {
		cause = errors.Join(cause, tr.lastErr)
	}
	return &StateError{SandboxID: t.scope.id, Want: tr.want, Last: stateName(status), Cause: cause}
}

// A goneError is a sandbox whose absence was judged.
type goneError struct{ cause error }

func (e *goneError) Error() string   { return ErrLeaseGone.Error() }
func (e *goneError) Unwrap() []error { return []error{ErrLeaseGone, e.cause} }

// pauseBox pauses a sandbox and returns nil once it is seen paused. A sandbox
// that is gone is fine: there is nothing left to pause.
func (d *Driver) pauseBox(ctx context.Context, t target) error {
	tr := &transition{
		want: statePaused, from: []string{stateRunning}, through: statePausing,
		send: func(ctx context.Context) (time.Duration, error) {
			_, after, err := t.client.pause(ctx, t.scope.id)
			return after, err
		},
		gone: func(b Sandbox) bool { return b.Status == stateDestroyed || b.Status == stateDestroying },
	}
	// The request goes first: a release of a lease that runs needs no look.
	return d.run(ctx, t, tr, &Sandbox{ID: t.scope.id, Status: stateRunning})
}

// wakeBox brings a sandbox to running. box is what the caller last read, nil
// if nothing. prepare, if not nil, is called once before the first resume is
// sent. woke says that a resume may have been accepted.
func (d *Driver) wakeBox(ctx context.Context, t target, box *Sandbox, prepare func(context.Context) error) (woke bool, err error) {
	tr := &transition{
		want: stateRunning, from: []string{statePaused, stateError}, through: stateResuming,
		send: func(ctx context.Context) (time.Duration, error) {
			if prepare != nil {
				if err := prepare(ctx); err != nil {
					return 0, &prepareError{err}
				}
				prepare = nil
			}
			_, after, err := t.client.resume(ctx, t.scope.id)
			return after, err
		},
	}
	err = d.run(ctx, t, tr, box)
	var failed *prepareError
	if errors.As(err, &failed) {
		err = failed.cause
	}
	return tr.moves, err
}

// A prepareError keeps a failure of what goes before a resume from being
// read as an answer to the resume.
type prepareError struct{ cause error }

func (e *prepareError) Error() string { return e.cause.Error() }

// restrict sets the egress list of a sandbox and compares the reply.
func (d *Driver) restrict(ctx context.Context, t target, list []string) error {
	got, err := t.client.setEgress(ctx, t.scope.id, list)
	if err != nil {
		return err
	}
	if !sameEgress(got, list) {
		return &ResponseError{Operation: OpLifecycle, Detail: "set egress", Status: http.StatusOK}
	}
	return nil
}

// wake brings the sandbox of a lease to running in the course of a call: it
// may have been paused by its auto-pause. A restriction of its egress is set
// again before it may run.
func (d *Driver) wake(ctx context.Context, l *lessee) (woke bool, err error) {
	t := l.target()
	list, ok := l.restriction()
	if !ok {
		return false, &InputError{"Lease.Metadata.BaseEgressAllowlist", "is malformed; the egress of the lease cannot be kept"}
	}
	var prepare func(context.Context) error
	if list != nil {
		prepare = func(ctx context.Context) error { return d.restrict(ctx, t, list) }
	}
	return d.wakeBox(ctx, t, nil, prepare)
}

// judge turns a failure of a request about a lease's sandbox into what the
// host is to see: a 404 matches ErrLeaseGone or ErrUnjudged.
func (d *Driver) judge(ctx context.Context, l *lessee, err error) error {
	if !isNotFound(err) {
		return err
	}
	if why := d.absent(ctx, l.target(), err); why != nil {
		return why
	}
	return &goneError{err}
}
