package createos

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/createos-lease/createos/internal/frame"
	"github.com/createos-lease/createos/internal/tail"
)

// output takes the output of a command to its writers and keeps the tails. One
// goroutine delivers; close may come from another while that one is stuck in
// a writer.
type output struct {
	mu     sync.Mutex // guards all fields below, and is not held over a Write
	closed bool
	// cursor is the number of the last event that was taken.
	cursor         int64
	stdout, stderr outlet
	// ack takes the acknowledgement of the script out of standard error.
	ack ack
	// failText is the end of standard error, whatever tail is wanted.
	failText *tail.Tail
}

type outlet struct {
	name string
	w    io.Writer // nil: none, or it failed
	tail *tail.Tail
	err  error // of w
}

func newOutput(cmd *Command, id string) *output {
	return &output{
		ack:      ack{want: []byte(acknowledgement(id))},
		stdout:   outlet{name: "Stdout", w: cmd.Stdout, tail: tail.New(cmd.tailLimit())},
		stderr:   outlet{name: "Stderr", w: cmd.Stderr, tail: tail.New(cmd.tailLimit())},
		failText: tail.New(maxFailText),
	}
}

// deliver takes the event that follows the cursor.
func (o *output) deliver(ev *frame.Event) {
	to := &o.stdout
	if ev.Stream == frame.Stderr {
		to = &o.stderr
	}
	data, w := o.keep(to, ev)
	o.write(to, w, data)
}

// keep takes the event to the tails, and returns what is to be written, and the
// writer that is to have it.
func (o *output) keep(to *outlet, ev *frame.Event) ([]byte, io.Writer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return nil, nil
	}
	o.cursor = ev.Seq
	data := ev.Data
	if to == &o.stderr {
		data = o.ack.take(data)
		_, _ = o.failText.Write(data)
	}
	_, _ = to.tail.Write(data)
	return data, to.w
}

// flush delivers what was held back for the beginning of an acknowledgement and
// turned out to be none. No event comes after it.
func (o *output) flush() {
	o.mu.Lock()
	to := &o.stderr
	data, w := o.ack.rest(), to.w
	if o.closed {
		w = nil
	} else {
		_, _ = to.tail.Write(data)
	}
	o.mu.Unlock()
	o.write(to, w, data)
}

func (o *output) write(to *outlet, w io.Writer, data []byte) {
	if w == nil || len(data) == 0 {
		return
	}
	n, err := w.Write(data)
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	if err != nil {
		o.mu.Lock()
		to.w, to.err = nil, err
		o.mu.Unlock()
	}
}

// started says that the script has acknowledged that the command comes next.
func (o *output) started() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.ack.found
}

// after is the cursor.
func (o *output) after() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.cursor
}

// startFailure is what loader or script said about why the command was not
// run, if they did.
func (o *output) startFailure(id string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	end, _ := o.failText.Bytes()
	return startFailure(id, end)
}

// close ends the delivery, fills in the result, and adds what the writers came
// to grief with to the error of the call.
func (o *output) close(res *Result, err error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	res.Stdout, res.StdoutTruncated = o.stdout.tail.Bytes()
	res.Stderr, res.StderrTruncated = o.stderr.tail.Bytes()
	res.StdoutBytes, res.StderrBytes = o.stdout.tail.Total(), o.stderr.tail.Total()
	var failed []error
	for _, to := range []*outlet{&o.stdout, &o.stderr} {
		if to.err != nil {
			failed = append(failed, fmt.Errorf("createos: exec: write to Command.%s: %w", to.name, to.err))
		}
	}
	var known *fixedError
	if errors.As(err, &known) && known == err { // its text is to stay as it is
		return fixed(err, failed...)
	}
	if len(failed) == 0 {
		return err
	}
	return errors.Join(append([]error{err}, failed...)...)
}

// An ack finds the acknowledgement in standard error and takes it off, however
// the provider split that and whatever stands around it. What may be its
// beginning is held back until more is known.
type ack struct {
	want  []byte
	held  []byte
	found bool
}

// take returns what of the data so far is output. The data is not kept.
func (a *ack) take(data []byte) []byte {
	if a.found {
		return data
	}
	if len(a.held) > 0 {
		data = append(a.held, data...)
		a.held = nil
	}
	if before, behind, found := bytes.Cut(data, a.want); found {
		a.found = true
		return slices.Concat(before, behind)
	}
	for n := min(len(a.want)-1, len(data)); n > 0; n-- {
		if bytes.HasSuffix(data, a.want[:n]) {
			a.held = bytes.Clone(data[len(data)-n:])
			return data[:len(data)-n]
		}
	}
	return data
}

// rest is what is held back.
func (a *ack) rest() []byte {
	held := a.held
	a.held = nil
	return held
}
