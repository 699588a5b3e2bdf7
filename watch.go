package createos

import (
	"context"
	"errors"
	"time"
)

// A watch is the time from the creation of a process to the end of Exec: the
// goroutine of Exec decides, one follows the output, and one starts the command.
type watch struct {
	x        *execution
	f        *follower
	followed chan struct{} // closed when f is done
	unfollow context.CancelFunc
	// started gets one value, when it is known or given up that the command
	// was started; nil once that was taken.
	started <-chan error
	// startErr is why it is not known that the command was started.
	startErr error
}

// watch starts the command in the process that was created, and sees to its
// end.
func (x *execution) watch(ctx context.Context) error {
	w := &watch{x: x, f: &follower{x: x, opened: make(chan struct{})}, followed: make(chan struct{})}
	// The output is followed beyond the end of ctx, until the tree has ended.
	followCtx, unfollow := context.WithCancel(context.WithoutCancel(ctx))
	defer unfollow()
	w.unfollow = unfollow
	go func() { // ends with followCtx, or when a writer lets go of it
		defer close(w.followed)
		w.f.run(followCtx)
	}()
	startCtx, unstart := context.WithCancel(ctx)
	started, startDone := make(chan error, 1), make(chan struct{})
	go func() { // ends with startCtx
		defer close(startDone)
		started <- x.start(startCtx, w.f.opened)
	}()
	defer func() {
		leave := time.AfterFunc(startReply, unstart)
		defer leave.Stop()
		<-startDone
		unstart()
	}()
	w.started = started
	return w.wait(ctx)
}

// wait waits for whatever comes first. An end of the command wins over an end
// of ctx that came at the same time.
func (w *watch) wait(ctx context.Context) error {
	over := time.NewTimer(w.x.timeout)
	over.Stop()
	defer over.Stop()
	for {
		select {
		case <-w.followed:
			return w.conclude(ctx)
		default:
		}
		select {
		case <-w.followed:
		case <-w.x.clock.changed:
			over.Stop()
			if elapsed, runs := w.x.clock.elapsed(); runs {
				over.Reset(w.x.timeout - elapsed)
			}
		case err := <-w.started:
			w.started = nil
			switch {
			case ctx.Err() != nil, err == nil, isConflict(err), inDoubt(err):
				w.startErr = err
				w.x.clock.sending() // nothing more will be, and something must end it
			default: // the command cannot be started
				return w.abort(ctx, w.x.d.missing(ctx, w.x.l, err))
			}
		case <-over.C:
			return w.overtime(ctx)
		case <-ctx.Done():
			return w.abort(ctx, execError(ended(ctx)))
		}
	}
}

// conclude ends an Exec whose output has come to its end, in one way or the
// other.
func (w *watch) conclude(ctx context.Context) error {
	if w.f.err != nil {
		if isLost(w.f.err) {
			w.awaitStart()
		}
		return w.abort(ctx, errors.Join(w.f.err, w.startErr))
	}
	return w.finish(ctx)
}

// finish ends an Exec whose process has ended by itself, and all of whose output
// was received.
func (w *watch) finish(ctx context.Context) error {
	x := w.x
	if !x.output.started() {
		return w.notStarted(ctx)
	}
	w.setExit(nil)
	x.res.seen = true
	x.stopClock()
	return x.afterExit(ctx)
}

// notStarted is the end of a process that did not come to run the command: the
// exit is not the command's, whatever it is.
func (w *watch) notStarted(ctx context.Context) error {
	x := w.x
	why := x.output.startFailure(x.id)
	if why == "" {
		why = "the shell that was to start it " + w.f.ending.Load().exit.String() + "; a login profile that exits or runs another program does that"
	}
	w.awaitStart()
	x.cleanUp(ctx, x.unstage)
	return errors.Join(&StartError{Problem: why}, w.startErr)
}

// awaitStart waits a moment for what became of the message that starts the
// command: it explains a loader that had none, and without it nobody knows whose
// end was seen.
func (w *watch) awaitStart() {
	if w.started == nil {
		return
	}
	timer := time.NewTimer(startReply)
	defer timer.Stop()
	select {
	case w.startErr = <-w.started:
		w.started = nil
	case <-timer.C:
	}
}

// afterExit does what is left to do after a command that has ended by itself.
// Its result stands whatever becomes of that.
func (x *execution) afterExit(ctx context.Context) (err error) {
	if x.cmd.EndTree {
		x.cleanUp(ctx, func(ctx context.Context) {
			if err = x.endTree(ctx); err != nil {
				err = x.unproven(nil, err)
			}
		})
	}
	return err
}

func (x *execution) endTree(ctx context.Context) error {
	return x.d.endTree(ctx, x.t, x.pid, x.id, x.lives.Load(), x.wake)
}

// abort ends the process tree, with proof, and returns the reason.
func (w *watch) abort(ctx context.Context, reason error) error {
	x := w.x
	var err error
	x.cleanUp(ctx, func(clean context.Context) {
		if isLost(reason) && w.f.ending.Load() == nil {
			w.look(clean)
		}
		w.setExit(reason) // before there is one that is our doing
		err = x.endTree(clean)
		x.stopClock()
		x.cleanUp(ctx, x.unstage) // whatever time the termination took
		w.settle(clean, err == nil)
	})
	if err != nil {
		return x.unproven(reason, err)
	}
	return reason
}

// settle waits for the follower: a while for the last output of a tree that has
// ended, and then for a writer that is at work. That takes part of the cleanup
// bound, so that a Release that waits for this call can still pause.
func (w *watch) settle(ctx context.Context, proven bool) {
	if proven {
		w.follows(lastOutput)
	}
	w.unfollow()
	patience := w.x.d.cfg.CleanupTimeout / 2
	if ctx.Err() != nil {
		patience = letGo // unless a writer holds it, it ends now
	}
	w.follows(patience)
}

// follows waits for the end of the follower.
func (w *watch) follows(atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-w.followed:
	case <-timer.C:
	}
}

// overtime ends a command whose time is over, unless it has ended already and
// only its output is late, be it for the sake of a slow writer.
func (w *watch) overtime(ctx context.Context) error {
	x := w.x
	clean, cancel := cleanupContext(ctx, lookBound)
	w.look(clean)
	cancel()
	end := w.f.ending.Load()
	if end == nil && w.startErr != nil && !x.output.started() {
		return w.abort(ctx, errors.Join(errOvertime, w.startErr)) // it may never have begun
	}
	if end == nil {
		x.res.TimedOut = true
		err := w.abort(ctx, errOvertime)
		if err == errOvertime {
			return nil
		}
		return err
	}
	timer := time.NewTimer(x.d.cfg.CleanupTimeout)
	defer timer.Stop()
	select {
	case <-w.followed:
		return w.conclude(ctx)
	case <-ctx.Done():
		return w.abort(ctx, execError(ended(ctx)))
	case <-timer.C:
	}
	if w.f.drained() { // only a writer has not come to an end with it
		return w.finish(ctx)
	}
	return w.abort(ctx, &OutputLostError{From: x.output.after() + 1, To: end.newest})
}

// errOvertime is the reason of a termination after Command.Timeout.
var errOvertime = execError(ErrTimeout)

// look reads once how the command has ended, if it has, by itself.
func (w *watch) look(ctx context.Context) {
	p, err := w.x.client.process(ctx, w.x.t.scope.id, w.x.pid)
	if err != nil {
		return
	}
	w.x.saw(p)
	if end := exitOf(p); end != nil {
		w.f.learn(&ending{exit: *end, newest: p.NewestSeq, counted: p.has.output})
	}
}

// setExit fills in how the command ended, if that is known, and known to be the
// command's end: the script has acknowledged itself, or the acknowledgement
// may be among the output that is lost.
func (w *watch) setExit(reason error) {
	x, end := w.x, w.f.ending.Load()
	delivered := w.started == nil && (w.startErr == nil || inDoubt(w.startErr))
	if end == nil || !x.output.started() && !(isLost(reason) && delivered) {
		return
	}
	x.res.Signal = end.exit.signal
	if end.exit.has {
		x.res.ExitCode = end.exit.code
	}
}

func isLost(err error) bool { return errors.As(err, new(*OutputLostError)) }

func (x *execution) stopClock() {
	x.res.Duration, _ = x.clock.elapsed()
}

// cleanUp does work that must be done whatever becomes of ctx, within the bound
// for that.
func (x *execution) cleanUp(ctx context.Context, work func(context.Context)) {
	clean, cancel := cleanupContext(ctx, x.d.cfg.CleanupTimeout)
	defer cancel()
	work(clean)
}

// unproven records that something of the command may still run.
func (x *execution) unproven(reason, cause error) error {
	debt := x.t.debt(ProcessUnproven, cause)
	debt.Processes = []string{processEntry(x.id, x.pid)}
	x.d.owe(debt)
	return fixed(ErrTerminationUnproven, reason, cause)
}
