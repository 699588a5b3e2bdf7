package createos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/createos-lease/createos/internal/frame"
)

const (
	// maxFailures is how often in a row the output may break off, or not be
	// had, without anything new. Output and heartbeats are new.
	maxFailures = 5
	// askFor is how long the provider is asked to wait for the exit when the
	// output broke off. It is short: what comes meanwhile is not seen.
	askFor = 250 * time.Millisecond
	// lastWords is how long a stream is read on after its exit, if it stays open. The
	// exit should be the last event; output that comes after it is output all the
	// same.
	lastWords = 250 * time.Millisecond
)

// An ending is what is known of how a command ended.
type ending struct {
	exit exit
	// newest is the number of the last event of its output, if that was counted.
	newest  int64
	counted bool
}

// A follower reads the output of a process to its end, over as many
// connections as it takes. It runs on one goroutine, and beside it asks for
// the exit on another; the fields that are not atomic are for others once it
// is over.
type follower struct {
	x *execution
	// opened is closed when the first connection stands, or failed.
	opened chan struct{}
	once   sync.Once

	err error // why the output is not complete, or the end not known

	ending atomic.Pointer[ending] // nil while nothing is known
	// stop ends the connection that is being read; nil before the first.
	stop atomic.Pointer[context.CancelCauseFunc]

	connections int  // that stood
	fresh       bool // something new came on this connection
	broken      bool // the stream is not what it should be; no use in another
}

// A stream may hold the exit back until everything that the command left
// behind has ended as well, and a sandbox that is paused may let it stand for
// ever. So while a connection stands the exit is asked about all the same, at
// growing distances.
const (
	firstQuestion = 10 * time.Second
	maxQuestion   = 2 * time.Minute
)

func (f *follower) run(ctx context.Context) {
	defer f.open()
	asking, stop := context.WithCancel(ctx)
	var asker sync.WaitGroup
	asker.Go(func() { f.keepAsking(asking) })
	f.err = f.follow(ctx)
	stop()
	asker.Wait()
	f.x.output.flush()
}

func (f *follower) open() { f.once.Do(func() { close(f.opened) }) }

// follow reads until the exit is known and the output complete, and returns nil
// for that alone.
func (f *follower) follow(ctx context.Context) error {
	failures := 0
	for {
		f.fresh = false
		err := f.stream(ctx)
		if f.drained() || err == nil && f.connections == 1 {
			return nil
		}
		if err != nil && ctx.Err() != nil {
			return err
		}
		if err == nil || !f.broken && passing(err) {
			asked := f.ask(ctx, askFor)
			if f.drained() || err == nil && !f.counted() {
				return nil //nolint:nilerr // an exit that was read counts, whatever became of the question
			}
			if asked != nil {
				err = asked
			}
		}
		if err = f.mend(ctx, err); err != nil && (f.broken || !mayPass(err)) {
			return err
		}
		if failures++; f.fresh {
			failures = 0
		}
		if failures >= maxFailures {
			return f.giveUp(err)
		}
		if failures > 0 {
			if serr := sleep(ctx, jitter(failures)); serr != nil {
				return serr
			}
		}
	}
}

// mend does what can be done about a failure before the next try, and returns
// what is left of it. A 404 may pass, unless the sandbox is gone.
func (f *follower) mend(ctx context.Context, err error) error {
	if isConflict(err) {
		if werr := f.x.wake(ctx); werr != nil {
			return werr
		}
		return err
	}
	return f.x.d.missing(ctx, f.x.l, err)
}

// mayPass says that a failure is no reason to give a command up at once.
func mayPass(err error) bool {
	return !errors.Is(err, ErrLeaseGone) && (passing(err) || isConflict(err) || isNotFound(err))
}

// learn takes note of an ending. If nothing of the output is missing, the
// connection has served its purpose.
func (f *follower) learn(e *ending) {
	for {
		known := f.ending.Load()
		if known != nil && (known.counted || !e.counted) {
			return
		}
		if known != nil {
			e.exit = known.exit
		}
		if f.ending.CompareAndSwap(known, e) {
			break
		}
	}
	if f.drained() {
		f.interrupt(nil)
	}
}

// counted says that it is known where the output ends.
func (f *follower) counted() bool {
	e := f.ending.Load()
	return e != nil && e.counted
}

// drained says that the exit is known and all output before it was read.
func (f *follower) drained() bool {
	e := f.ending.Load()
	return e != nil && e.counted && f.x.output.after() >= e.newest
}

// interrupt ends the connection that is being read.
func (f *follower) interrupt(cause error) {
	if stop := f.stop.Load(); stop != nil {
		(*stop)(cause)
	}
}

// stream reads one connection. It returns nil for an exit, and when all output
// that is wanted was read.
func (f *follower) stream(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	f.stop.Store(&stop)
	err := f.read(ctx)
	if cause := context.Cause(ctx); err != nil && isConflict(cause) {
		return cause
	}
	return err
}

func (f *follower) read(ctx context.Context) error {
	s, err := f.x.client.connect(ctx, f.x.t.scope.id, f.x.pid, f.x.output.after())
	f.open()
	if err != nil {
		var refused *RequestError
		if errors.As(err, &refused) && refused.Status == http.StatusGone {
			return f.expired(refused.oldest)
		}
		return err
	}
	f.connections++
	defer func() { _ = s.Close() }()
	exited := false
	for !f.drained() {
		ev, err := s.Next()
		if err != nil && exited {
			return nil
		}
		if err == io.EOF {
			return errCut
		}
		if err != nil {
			f.broken = errors.Is(err, ErrInvalidResponse)
			return err
		}
		switch ev.Kind {
		case frame.Data:
			err = f.data(ev)
		case frame.Heartbeat:
			f.fresh = true
		case frame.Exit:
			f.learn(&ending{exit: exit{ev.ExitCode, ev.HasExitCode, signalName(ev.Signal)}})
			if !exited {
				exited = true
				defer time.AfterFunc(lastWords, func() { f.interrupt(nil) }).Stop()
			}
		case frame.Error:
			if exited {
				return nil
			}
			err = errCut
			if ev.Code == codeOffsetExpired {
				err = f.expired(ev.Oldest)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// errCut is a stream that ended without an exit.
var errCut error = &ConnectionError{
	Operation: OpOutputConnection, Detail: "connect to process", sent: true, cause: io.ErrUnexpectedEOF,
}

// data takes one piece of output, which must be the next one. What was taken
// before may come again after a reconnect.
func (f *follower) data(ev *frame.Event) error {
	switch cursor := f.x.output.after(); {
	case ev.Seq <= cursor:
		return nil
	case ev.Seq > cursor+1:
		return &OutputLostError{From: cursor + 1, To: ev.Seq - 1}
	}
	f.fresh = true
	f.x.output.deliver(ev)
	return nil
}

// expired is the answer that the output behind the cursor is not kept any more;
// oldest is the first that is, 0 if that was not said.
func (f *follower) expired(oldest int64) error {
	from := f.x.output.after() + 1
	if oldest > 0 && oldest <= from {
		return errCut // it is kept after all
	}
	return &OutputLostError{From: from, To: max(oldest-1, 0)}
}

// keepAsking asks for the exit while ctx lasts, beside the reading, which must
// not wait for the answer. Only one failure matters, a conflict, for it means
// that the sandbox is paused: the connection is given up, so that the follower
// wakes it.
func (f *follower) keepAsking(ctx context.Context) {
	for gap := firstQuestion; sleep(ctx, gap) == nil; gap = min(2*gap, maxQuestion) {
		err := f.ask(ctx, time.Millisecond)
		if f.counted() {
			return
		}
		if isConflict(err) {
			f.interrupt(err)
		}
	}
}

// ask asks for the exit, for at most that long. Nil means that it is known, or
// that the command runs.
func (f *follower) ask(ctx context.Context, atMost time.Duration) error {
	if f.counted() {
		return nil
	}
	ctx, cancel := lookContext(ctx, atMost+lookBound)
	defer cancel()
	p, err := f.x.client.wait(ctx, f.x.t.scope.id, f.x.pid, false, atMost)
	if errors.Is(err, errWaitTimeout) {
		return nil
	}
	if err != nil {
		return err
	}
	end := exitOf(p)
	if end == nil || !p.has.output {
		return &ResponseError{Detail: "wait for process", Status: http.StatusOK, Operation: OpLifecycle}
	}
	f.x.saw(p)
	f.learn(&ending{exit: *end, newest: p.NewestSeq, counted: true})
	return nil
}

// giveUp is the error of a follower that has tried often enough.
func (f *follower) giveUp(err error) error {
	if e := f.ending.Load(); e != nil {
		lost := &OutputLostError{From: f.x.output.after() + 1, To: e.newest}
		if err == nil {
			return lost
		}
		return fmt.Errorf("%w: %w", lost, err)
	}
	return fmt.Errorf("createos: exec: the end of the command is not known: %w", err)
}
