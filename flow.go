package createos

import (
	"context"
	"io"
	"net/http"
	"time"
)

const (
	// flowSilence is how long a body may stand still before it counts as cut.
	flowSilence = time.Minute
	// What is left of a body when it is closed is read up to drainBytes and
	// for drainTime: the end often comes just after what was wanted, and a
	// body that was read to its end gives its connection back.
	drainBytes = 16 << 10
	drainTime  = 50 * time.Millisecond
)

// A flow is the body of an answer that is read as it comes. Its end is io.EOF
// only if the whole body was there; every other end is a *[ConnectionError]. The
// context of the request ends it too. One goroutine at a time may use it.
type flow struct {
	ctx     context.Context // of the caller, for the cause of a cut
	flight  *flight
	request *request
	body    io.ReadCloser
	length  int64 // -1 if it was not announced
	got     int64
	silence time.Duration
	err     error // how the body ended
}

func newFlow(ctx context.Context, f *flight, r *request, resp *http.Response) *flow {
	f.timer.Stop()
	return &flow{
		ctx: ctx, flight: f, request: r, body: resp.Body, length: max(resp.ContentLength, -1), silence: flowSilence,
	}
}

// Read is as in io.Reader. Only the waiting for the provider counts as
// silence, not the time between reads.
func (f *flow) Read(p []byte) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	f.flight.timer.Reset(f.silence)
	n, err := f.body.Read(p)
	f.flight.timer.Stop()
	f.got += int64(n)
	switch {
	case err == io.EOF && f.got < f.length:
		err = f.cut(io.ErrUnexpectedEOF)
	case err != nil && err != io.EOF:
		err = f.cut(err)
	}
	f.err = err
	return n, err
}

func (f *flow) cut(err error) error { return f.request.connectionError(f.ctx, err, true) }

// Close gives the connection back if the end of the body is near, and closes it
// otherwise. It does not take longer than drainTime.
func (f *flow) Close() error {
	if f.err == nil && f.ctx.Err() == nil {
		f.flight.timer.Reset(drainTime)
		_, _ = io.CopyN(io.Discard, f.body, drainBytes)
	}
	return f.abandon()
}

// abandon closes the connection, unless the body has ended.
func (f *flow) abandon() error {
	if f.err == nil {
		f.err = io.ErrClosedPipe
	}
	f.flight.end()
	return f.body.Close()
}
