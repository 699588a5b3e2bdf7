package createos

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"
)

// A flight is one attempt from its turn to the end of its answer: the context
// that it runs on, the bounds that end that context, and what is known of the
// wire. Whoever holds a flight ends it.
type flight struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	// timer ends the attempt. It is set anew for each phase: headers, then
	// body, and for streams each read.
	timer *time.Timer
	// bound is the time to the headers, noBound for none.
	bound time.Duration
	// leave stops watching the caller's context.
	leave func()
	wire  wire
	// partial says that the body of an upload was not read to its end.
	partial atomic.Bool
	upload  *upload // nil for none
}

// launch begins an attempt. A request that lingers is not ended with ctx: what
// may have been sent is followed for replyGrace more.
func (c *Client) launch(ctx context.Context, r *request) *flight {
	f := &flight{bound: r.bound, leave: func() {}}
	if f.bound == 0 {
		f.bound = c.requestTimeout
	}
	parent := ctx
	if r.lingers() {
		parent = context.WithoutCancel(ctx)
	}
	parent, f.cancel = context.WithCancelCause(parent)
	f.ctx = httptrace.WithClientTrace(parent, f.wire.trace())
	f.timer = stopped(func() { f.cancel(context.DeadlineExceeded) })
	if f.bound != noBound {
		f.timer.Reset(f.bound)
	}
	f.partial.Store(r.upload != nil && r.upload.size > 0)
	if r.lingers() {
		f.linger(ctx, c.replyGrace)
	}
	return f
}

// linger ends the flight some time after the caller's context; at once if it
// still waits for a connection, because then nothing was sent, and if a file
// was sent in part, because then nothing comes of it.
func (f *flight) linger(ctx context.Context, grace time.Duration) {
	cut := stopped(func() { f.cancel(ctx.Err()) })
	unwatch := context.AfterFunc(ctx, func() {
		if f.wire.waiting() || f.partial.Load() {
			f.cancel(ctx.Err())
			return
		}
		cut.Reset(grace)
	})
	f.leave = func() {
		unwatch()
		cut.Stop()
	}
}

// stopped makes a timer that does not run yet.
func stopped(f func()) *time.Timer {
	t := time.AfterFunc(time.Hour, f)
	t.Stop()
	return t
}

// end gives up what the flight holds: a connection whose answer was not read
// to its end is closed.
func (f *flight) end() {
	f.leave()
	f.timer.Stop()
	f.cancel(nil)
}

// sent says whether a byte of the request may have left, given the error that
// ended it. Only proof counts: a transport without trace hooks gives none.
func (f *flight) sent(err error) bool {
	if f.wire.connected.Load() {
		return true
	}
	var op *net.OpError
	dialing := errors.As(err, &op) && op.Op == "dial"
	return !dialing && !f.wire.asked.Load()
}

// wire is what the transport tells of the connection of an attempt.
type wire struct{ asked, connected atomic.Bool }

func (w *wire) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GetConn: func(string) { w.asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { w.connected.Store(true) },
	}
}

func (w *wire) waiting() bool { return w.asked.Load() && !w.connected.Load() }

// A payload is the body of an upload.
type payload struct {
	from io.ReadSeeker
	size int64
}

// An upload is the body of one attempt. It is not read again after it was
// closed, so the next attempt can rewind under it, and a caller who has been
// given an error has its reader back: net/http may go on reading for a while
// after it returned.
type upload struct {
	from io.Reader
	mu   sync.Mutex // guards the fields below, and is not held while from is read
	left int64
	// reading is closed when the read that runs is over; nil if none does.
	reading chan struct{}
	closed  bool
	err     error // of from, or that it was too short
	// progress is called before each read, so that a large file is bounded
	// by standing still, not by its size; complete when all was read.
	progress, complete func()
}

var errUploadClosed = errors.New("upload is over")

// openUpload rewinds the payload for an attempt.
func (f *flight) openUpload(p *payload) (io.ReadCloser, error) {
	if _, err := p.from.Seek(0, io.SeekStart); err != nil {
		return nil, &uploadError{err}
	}
	f.upload = &upload{from: p.from, left: p.size, progress: func() { f.timer.Reset(f.bound) }, complete: func() { f.partial.Store(false) }}
	return f.upload, nil
}

// stopUpload ends the reading of the source, and returns why it could not be
// read, if so.
func (f *flight) stopUpload() error {
	if f.upload == nil {
		return nil
	}
	if err := f.upload.stop(); err != nil {
		return &uploadError{err}
	}
	return nil
}

// Read is as in io.Reader. One goroutine at a time may use it.
func (u *upload) Read(p []byte) (int, error) {
	most, err := u.begin()
	if err != nil {
		return 0, err
	}
	u.progress()
	n, err := u.from.Read(p[:min(int64(len(p)), most)])
	return n, u.end(n, err)
}

// begin says how much may be read, or why nothing.
func (u *upload) begin() (most int64, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.closed:
		return 0, errUploadClosed
	case u.err != nil:
		return 0, u.err
	case u.left == 0:
		return 0, io.EOF
	}
	u.reading = make(chan struct{})
	return u.left, nil
}

// end takes account of a read.
func (u *upload) end(n int, err error) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.left -= int64(n)
	switch {
	case u.left == 0:
		err = nil // the next read says EOF
		u.complete()
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	}
	u.err = err
	close(u.reading)
	u.reading = nil
	return err
}

// Close keeps the source from being read again.
func (u *upload) Close() error {
	_ = u.stop()
	return nil
}

// stop waits for a read that runs, so that the caller has its reader back, and
// returns what the source came to grief with.
func (u *upload) stop() error {
	u.mu.Lock()
	u.closed = true
	reading := u.reading
	u.mu.Unlock()
	if reading != nil {
		<-reading
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.err
}

// An uploadError is a source that could not be read. Its cause is the caller's
// own and can be matched, but is not part of the text: it may name a file.
type uploadError struct{ cause error }

func (e *uploadError) Error() string { return "createos: the file to upload could not be read" }
func (e *uploadError) Unwrap() error { return e.cause }
