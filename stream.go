package createos

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/createos-lease/createos/internal/frame"
	"github.com/createos-lease/createos/internal/ndjson"
)

const (
	// streamSilence is how long a stream may say nothing, not even that it is
	// alive, before it counts as cut. The provider's heartbeat is known to be
	// 5 s for commands.
	streamSilence = 30 * time.Second
	// maxFrameLine is the longest line of a stream in bytes. The provider
	// keeps 1 MiB of output per process, which is less than 1.5 MiB as base64.
	maxFrameLine = 4 << 20
)

// An eventStream is the output of a process as it comes. One goroutine at a
// time may use it; what ends a Next from outside is the end of the context that
// the stream was opened with. Whoever has one closes it.
type eventStream struct {
	answer *answer
	lines  *ndjson.Reader
	event  frame.Event
	exited bool
}

// connect opens the output of a process behind the given sequence number, 0
// for all of it. If the provider does not keep what follows it any more, the
// error is a *[RequestError] with codeOffsetExpired; it may also come as an event
// of the stream.
func (c *Client) connect(ctx context.Context, id, pid string, after int64) (*eventStream, error) {
	a, err := c.onProcess(ctx, id, pid, "/connect", &request{
		method: http.MethodGet, operation: OpOutputConnection, detail: "connect to process", stream: true,
		query: url.Values{"after": {strconv.FormatInt(after, 10)}},
	})
	if err != nil {
		return nil, err
	}
	a.flow.silence = streamSilence
	return &eventStream{answer: a, lines: ndjson.NewReader(a.flow, maxFrameLine)}, nil
}

// Next returns the next event, heartbeats and events of unknown kind included.
// The event is valid until the next call. At the end of a whole stream the error
// is io.EOF, which says nothing about the process: only an exit event does. A
// stream that was cut, or silent for streamSilence, ends with a
// *[ConnectionError], one that is no event stream with a *[ResponseError].
func (s *eventStream) Next() (*frame.Event, error) {
	line, err := s.lines.Next()
	if err != nil {
		return nil, s.failure(err)
	}
	if err := frame.Decode(line, &s.event); err != nil {
		if !s.lines.Terminated() { // the last line, and not whole
			return nil, s.answer.flow.cut(io.ErrUnexpectedEOF)
		}
		return nil, s.answer.invalid()
	}
	s.exited = s.exited || s.event.Kind == frame.Exit
	return &s.event, nil
}

// failure makes an error of what ended the lines.
func (s *eventStream) failure(err error) error {
	var long *ndjson.TooLongError
	var lost *ConnectionError
	switch {
	case err == io.EOF, errors.As(err, &lost):
		return err
	case errors.As(err, &long):
		return s.answer.invalid()
	}
	return s.answer.flow.cut(err)
}

// Close ends the reading. After an exit event the end of the stream is awaited
// for drainTime, so that the connection can be used again; a stream that is left
// earlier goes on for ever, and its connection is closed at once.
func (s *eventStream) Close() error {
	if s.exited {
		return s.answer.flow.Close()
	}
	return s.answer.flow.abandon()
}
