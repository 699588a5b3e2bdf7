package createos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

const (
	// connectHead is how long the message that starts a command waits for the
	// output connection. The connection comes first so that output is live from
	// its first byte; nothing is lost if it comes later, because the
	// provider keeps the output.
	connectHead = time.Second
	// startTries is how often that message is sent. The loader reads only one.
	startTries = 3
	// startReply is how long Exec waits, when it has all else, for the reply to
	// that message.
	startReply = time.Second
	// wakeTries is how often a request is sent that finds the sandbox paused.
	// Where no pause is to be seen, the row of the sandbox may be a moment late:
	// the tries then take some seconds.
	wakeTries = 8
	// lookBound bounds the question whether a command has ended, from the
	// moment that it is sent. A later one is as good.
	lookBound = 5 * time.Second
	// lastOutput is how long, after a process tree was ended with proof, its
	// last output is awaited.
	lastOutput = 2 * time.Second
	// letGo is how long the follower has to end when it was told to.
	letGo = time.Second
)

// Exec runs a command in the sandbox of a lease and waits for its end.
//
// It returns when the command itself has exited and its output was delivered.
// What the command left running goes on, unless Command.EndTree is set: a
// later pause freezes it, a resume revives it, and the destroy ends it. An exit
// code, an end by a signal, and a time-out are results and come without an
// error; [Result.Err] makes errors of them. The Result is never nil. Next to an
// error it holds what was received.
//
// Output is delivered while the command runs, each byte once and in its order,
// across any number of lost connections; or else the error is an
// [*OutputLostError]. A stream that ends without an exit is no end: Exec asks,
// connects again and reads on, and gives up after five failures in a row
// without anything new. The error of a writer is returned in the end, with
// the full result. While a connection stands, the exit is asked about after 10 s
// and then at distances that grow to 2 min: the provider may hold it back until
// what the command left running has ended.
//
// A sandbox that is paused, by its auto-pause for example, or was by an earlier
// Release, is resumed, with its egress list set again before, and the command goes
// on. Each time is bounded by Config.Timeout. It stays awake then, and nothing else
// of it is checked: a host that goes on with a lease it has released calls
// [Driver.Resume] first.
//
// The end of ctx, Command.Timeout, a Release or Destroy of the lease, a
// Shutdown, and any failure after the process was created end the whole process
// tree, and Exec returns when the provider has confirmed that nothing of it is
// left. That takes at most DriverConfig.CleanupTimeout, whatever becomes of
// ctx, and as much again if staged input is hard to remove; a writer that blocks
// for longer than half of it is left behind, and gets nothing more when it
// returns. The error then matches the end of ctx,
// [ErrLeaseClosing], [ErrShutdown], or the failure. Without that confirmation it
// matches [ErrTerminationUnproven] as well, and if it stayed unknown whether
// the process was created at all, [ErrProcessCreationUnknown]: then the lease
// is poisoned, which [Driver.Unconfirmed] lists and only [Driver.Destroy] cures.
//
// Neither a command nor the creation of its process is ever repeated once it
// may have happened. Trying again is the caller's decision, and after any error
// but those two it is safe as far as this call is concerned: nothing of it
// runs.
//
// Errors from before anything was sent: [*InputError], [*ConfigError],
// [ErrForeignLease] (as [ErrExecForeignLease]), and [ErrLeaseClosing] for a
// lease that is closing or poisoned and for a driver that is shut down
// ([ErrShutdown]). Later ones: [*StartError] if the command could not be started,
// [*StateError] if a paused sandbox does not get to run within Config.Timeout,
// [ErrLeaseGone] if the sandbox is proven gone, [ErrUnjudged] if it is only not
// found, [*RequestError], [ErrConnection] and [ErrInvalidResponse] as in every
// call.
//
// Any number of Execs may run on one lease. Writers and Stdin are used on other
// goroutines than the caller's, and must not call Release, Destroy or Shutdown:
// those would wait for this call.
func (d *Driver) Exec(ctx context.Context, env Environment, lease *Lease, cmd Command) (*Result, error) {
	res := &Result{ExitCode: -1}
	l, err := d.lessee(env, lease, ErrExecForeignLease, false)
	if err != nil {
		return res, err
	}
	x, err := d.newExecution(l, &cmd, res)
	if err != nil {
		return res, err
	}
	c := &call{scope: l.scope, target: x.t, execID: x.id}
	ctx, err = d.enter(ctx, c, func() error { return d.openForExecLocked(l.scope) })
	if err != nil {
		return res, err
	}
	defer d.leave(c)
	return res, x.output.close(res, x.run(ctx))
}

// openForExecLocked says why a command may not start on a scope.
func (d *Driver) openForExecLocked(s scope) error {
	if d.down {
		return errExecShutdown
	}
	if _, closing := d.closing[s]; closing || d.poisonedLocked(s) {
		return ErrLeaseClosing
	}
	return nil
}

// An execution is one run of Exec.
type execution struct {
	d       *Driver
	l       *lessee
	t       target
	client  *Client
	cmd     *Command
	res     *Result
	id      string // by which the process is found in a list
	timeout time.Duration
	output  *output

	workspace string
	spool     string // see script
	staged    bool   // the spool directory may exist in the sandbox
	late      bool   // an upload into it was sent, and has not been answered
	line      []byte // starts the command

	pid   string
	lives atomic.Bool // the tree was alive when the process was last asked about
	clock *stopwatch  // of the command

	// waking is held by whoever wakes the sandbox, and in the end by Exec itself:
	// a resume that was sent must not land after a Release has paused.
	waking chan struct{}
}

func (d *Driver) newExecution(l *lessee, cmd *Command, res *Result) (*execution, error) {
	if err := cmd.check(); err != nil {
		return nil, err
	}
	workspace, err := checkWorkspace(l.lease.Metadata.RemoteCwd)
	if err != nil {
		return nil, &InputError{"Lease.Metadata.RemoteCwd", "is no workspace"}
	}
	id := strings.ReplaceAll(uuid.NewString(), "-", "")
	x := &execution{
		d: d, l: l, t: l.target(), client: l.client, cmd: cmd, res: res, id: id,
		timeout:   cmd.Timeout,
		output:    newOutput(cmd, id),
		clock:     newStopwatch(),
		waking:    make(chan struct{}, 1),
		workspace: workspace,
	}
	x.spool = spoolPath(workspace, x.id)
	if x.timeout == 0 {
		x.timeout = l.set.timeout
	}
	return x, nil
}

// run brings the command from nothing to its end. What it returns is the error
// of Exec, but for the writers'.
func (x *execution) run(ctx context.Context) error {
	if err := ended(ctx); err != nil {
		return execError(err)
	}
	defer func() { x.waking <- struct{}{} }()
	err := x.prepare(ctx)
	if err == nil {
		err = x.create(ctx)
	}
	if err != nil {
		clean, cancel := cleanupContext(ctx, x.d.cfg.CleanupTimeout)
		defer cancel()
		x.unstage(clean)
		return err
	}
	return x.watch(ctx)
}

// create makes the process that will run the command. It is sent again only
// where it is known that the one before made nothing.
func (x *execution) create(ctx context.Context) error {
	var p Process
	err := x.awake(ctx, func() (err error) {
		p, err = x.client.createProcess(ctx, x.t.scope.id, execShell, execArgs(x.id), "")
		if err != nil && !isConflict(err) && !notCreated(err) {
			err = &doubtError{err}
		}
		return err
	})
	switch doubt := (*doubtError)(nil); {
	case err == nil:
		x.pid = p.ID
		return nil
	case errors.As(err, &doubt):
		return x.lookUp(ctx, doubt.cause)
	}
	return x.failed(ctx, err)
}

// A doubtError is a failure that leaves open whether the request had its effect.
type doubtError struct{ cause error }

func (e *doubtError) Error() string { return e.cause.Error() }
func (e *doubtError) Unwrap() error { return e.cause }

func inDoubt(err error) bool { return errors.As(err, new(*doubtError)) }

// lookUp looks for a process whose creation has an unknown outcome, and ends it:
// it waits for its command, so nothing has run. cause is why it is unknown.
func (x *execution) lookUp(ctx context.Context, cause error) error {
	clean, cancel := cleanupContext(ctx, x.d.cfg.CleanupTimeout)
	defer cancel()
	found, err := x.d.endByExecID(clean, x.t, x.id, x.wake)
	switch {
	case err == nil && found:
		return x.failed(ctx, cause)
	case errors.Is(err, ErrLeaseGone):
		return err
	case err == nil:
		err = errNotListed
	}
	debt := x.t.debt(ProcessUnproven, err)
	debt.Processes = []string{execIDEntry(x.id)}
	x.d.owe(debt)
	return fixed(ErrProcessCreationUnknown, ended(ctx), cause, err)
}

// failed is the error of an Exec whose command was not started: the end of ctx
// if there is one, and otherwise err.
func (x *execution) failed(ctx context.Context, err error) error {
	if why := ended(ctx); why != nil {
		return execError(why)
	}
	return x.d.missing(ctx, x.l, err)
}

// start sends the message that opens the gate. An error that is a conflict, or
// leaves a doubt, says nothing about the command: the output does.
func (x *execution) start(ctx context.Context, opened <-chan struct{}) error {
	head := time.NewTimer(connectHead)
	defer head.Stop()
	select {
	case <-opened:
	case <-head.C:
	case <-ctx.Done():
		return ended(ctx)
	}
	var doubt error // the latest that may have arrived
	for try := 1; ; try++ {
		err := x.awake(ctx, func() error {
			err := x.sendLine(ctx)
			if unclear(err) {
				doubt = err
			}
			return err
		})
		if err == nil {
			return nil
		}
		again := unclear(err) || errors.Is(err, ErrConnection) || isNotFound(err)
		if ctx.Err() != nil || try == startTries || !again || sleep(ctx, jitter(try)) != nil {
			if doubt != nil {
				return &doubtError{errors.Join(doubt, err)}
			}
			return err
		}
	}
}

// sendLine sends the message once. It is one line, and the loader reads only
// one, so it may be repeated. The reply of a message that was sent is awaited
// beyond the end of ctx, but nobody here needs it then: Shutdown waits for it.
func (x *execution) sendLine(ctx context.Context) error {
	t := traitsOf(ctx)
	t.onSend, t.onAnswer = x.clock.sending, x.clock.answered
	return x.d.work(ctx, func(context.Context) error {
		return x.client.input(withTraits(ctx, t), x.t.scope.id, x.pid, x.line)
	})
}

// awake does a request until no pause of the sandbox keeps it from being done:
// one that was refused with a conflict has had no effect.
func (x *execution) awake(ctx context.Context, request func() error) error {
	var p poll
	for try := 1; ; try++ {
		err := request()
		if !isConflict(err) || try == wakeTries {
			return err
		}
		woke, werr := x.rouse(ctx)
		if werr == nil && !woke {
			werr = p.wait(ctx)
		}
		if werr != nil {
			return werr
		}
	}
}

// rouse brings the sandbox back to running, if it is paused.
func (x *execution) rouse(ctx context.Context) (woke bool, err error) {
	select {
	case x.waking <- struct{}{}:
		defer func() { <-x.waking }()
	case <-ctx.Done():
		return false, ended(ctx)
	}
	return x.d.rouse(ctx, x.l)
}

// wake is rouse for those who look again themselves.
func (x *execution) wake(ctx context.Context) error {
	_, err := x.rouse(ctx)
	return err
}

// saw takes note of what an answer about the process says of its tree.
func (x *execution) saw(p Process) { x.lives.Store(p.has.treeExited && !p.TreeExited) }

// execError names the call whose end a reason was.
func execError(reason error) error { return fmt.Errorf("createos: exec: %w", reason) }

// jitter is the pause after a number of failures in a row: from 250 ms to 2 s,
// the upper half of it at random.
func jitter(failures int) time.Duration {
	pause := min(pollFirst<<min(failures-1, 3), pollMax)
	return pause - rand.N(pause/2)
}
