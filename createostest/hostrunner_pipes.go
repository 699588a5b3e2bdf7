//go:build unix

package createostest

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	outputBuffer = 32 << 10

	// pipeLimit is more than a pipe can hold, unless root made it larger: a
	// writer that goes on writing does not make a drain endless.
	pipeLimit = 1 << 20
)

// outputPipe carries one output of a process tree to a writer, in reads as
// large as the pipe gives them.
type outputPipe struct {
	r    *os.File
	w    io.Writer
	asks chan drainAsk // room for every drain there is, so that asking never blocks
	done chan struct{}
}

type drainAsk struct {
	done chan struct{}
	last bool // stop after it
}

func newOutputPipe(r *os.File, w io.Writer) *outputPipe {
	return &outputPipe{r: r, w: w, asks: make(chan drainAsk, 2), done: make(chan struct{})}
}

// drain asks for what is in the pipe now to be delivered, without waiting for
// more as long as somebody holds the other end. The channel is closed when it is.
func (o *outputPipe) drain(last bool) <-chan struct{} {
	ask := drainAsk{done: make(chan struct{}), last: last}
	o.asks <- ask
	// Ends a read that waits for the process to write. The order matters: run
	// clears the deadline before it looks for asks.
	_ = o.r.SetReadDeadline(time.Now())
	return ask.done
}

// run copies until the last holder of the other end is gone or a last drain was
// asked for. Without a reader for the output it goes on reading all the same, as
// a full pipe would keep the process from ever ending.
func (o *outputPipe) run() {
	defer close(o.done)
	defer o.r.Close()
	buf := make([]byte, outputBuffer)
	for {
		n, err := o.r.Read(buf)
		o.deliver(buf[:n])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			_ = o.r.SetReadDeadline(time.Time{})
			err = o.answer(buf)
		}
		if err != nil {
			return // io.EOF, or EIO from a terminal without processes
		}
	}
}

func (o *outputPipe) deliver(p []byte) {
	if len(p) == 0 || o.w == nil {
		return
	}
	if _, err := o.w.Write(p); err != nil {
		o.w = nil
	}
}

// answer serves the drains that were asked for. Its error is that of the pipe,
// or io.EOF after a last drain.
func (o *outputPipe) answer(buf []byte) error {
	for {
		select {
		case ask := <-o.asks:
			err := o.empty(buf)
			close(ask.done)
			if err == nil && ask.last {
				err = io.EOF
			}
			if err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

// empty delivers what the pipe holds and does not wait for more.
func (o *outputPipe) empty(buf []byte) error {
	raw, err := o.r.SyscallConn()
	if err != nil {
		return err
	}
	for total := 0; total < pipeLimit; {
		var n int
		var readErr error
		err := raw.Read(func(fd uintptr) bool {
			n, readErr = retryEINTR(func() (int, error) { return syscall.Read(int(fd), buf) })
			return true // never wait for the poller
		})
		switch {
		case err != nil:
			return err
		case errors.Is(readErr, syscall.EAGAIN):
			return nil
		case readErr != nil:
			return readErr
		case n == 0:
			return io.EOF
		}
		o.deliver(buf[:n])
		total += n
	}
	return nil
}

// stdinPipe is standard input: a queue without a limit, so that whoever sends is
// not held up by a process that does not read.
type stdinPipe struct {
	w    *os.File
	owns bool // close w at the end; a terminal is also the output
	wake chan struct{}
	done chan struct{}

	mu     sync.Mutex // guards queue and closed
	queue  [][]byte
	closed bool
}

func newStdinPipe(w *os.File, owns bool) *stdinPipe {
	return &stdinPipe{w: w, owns: owns, wake: make(chan struct{}, 1), done: make(chan struct{})}
}

// send queues a copy of p.
func (i *stdinPipe) send(p []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return errInputClosed
	}
	i.queue = append(i.queue, append([]byte(nil), p...))
	i.poke()
	return nil
}

// finish closes the pipe after everything that was queued is written.
func (i *stdinPipe) finish() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return errInputClosed
	}
	i.closed = true
	i.poke()
	return nil
}

// abort closes the pipe now.
func (i *stdinPipe) abort() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.closed, i.queue = true, nil
	_ = i.w.SetWriteDeadline(time.Now()) // ends a write into a full pipe
	i.poke()
}

func (i *stdinPipe) poke() {
	select {
	case i.wake <- struct{}{}:
	default:
	}
}

// run writes until finish, abort, or the process has closed its end.
func (i *stdinPipe) run() {
	defer close(i.done)
	if i.owns {
		defer i.w.Close()
	}
	for range i.wake {
		queue, closed := i.take()
		for _, p := range queue {
			if _, err := i.w.Write(p); err != nil {
				i.abort()
				return
			}
		}
		if closed {
			return
		}
	}
}

func (i *stdinPipe) take() (queue [][]byte, closed bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	queue, i.queue = i.queue, nil
	return queue, i.closed
}

// retryEINTR repeats a system call that a signal interrupted, as package os does.
func retryEINTR(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, syscall.EINTR) {
			return n, err
		}
	}
}
