package createos

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/frame"
)

const (
	chunkedHead = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
	chunkedEnd  = "0\r\n\r\n"
	exitLine    = `{"type":"exit","exit_code":0}` + "\n"
	beatLine    = `{"type":"heartbeat"}` + "\n"
)

func chunk(text string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(text), text) }

func dataLine(seq int, stream, text string) string {
	return fmt.Sprintf(`{"type":"data","seq":%d,"stream":%q,"data_base64":%q}`+"\n", seq, stream, base64.StdEncoding.EncodeToString([]byte(text)))
}

// follow reads a stream to its end and returns what came as words.
func follow(s *eventStream) ([]string, error) {
	var got []string
	for {
		ev, err := s.Next()
		if err != nil {
			return got, err
		}
		switch ev.Kind {
		case frame.Data:
			got = append(got, fmt.Sprintf("%d %v %s", ev.Seq, ev.Stream, ev.Data))
		case frame.Exit:
			got = append(got, fmt.Sprint("exit ", ev.ExitCode, ev.Signal))
		case frame.Heartbeat:
			got = append(got, "heartbeat")
		case frame.Error:
			got = append(got, fmt.Sprint("error ", ev.Code, ev.Oldest))
		default:
			got = append(got, "unknown")
		}
	}
}

func TestStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			for c.read() != nil {
				c.send(chunkedHead + chunk(dataLine(1, "stdout", "a")+dataLine(2, "stderr", "b")))
				time.Sleep(20 * time.Second)
				c.send(chunk(beatLine) + chunk(`{"type":"new"}`+"\n"))
				time.Sleep(29 * time.Second)
				c.send(chunk(exitLine))
				time.Sleep(drainTime / 2)
				c.send(chunkedEnd)
			}
		})
		c := s.client(func(c *clientConfig) { c.requestTimeout = time.Second })
		for range 2 {
			stream, err := c.connect(t.Context(), testSandbox, testProcess, 0)
			require.NoError(t, err)
			got, err := follow(stream)
			assert.Equal(t, io.EOF, err)
			assert.Equal(t, []string{"1 stdout a", "2 stderr b", "heartbeat", "unknown", "exit 0"}, got)
			require.NoError(t, stream.Close())
		}
		// Closed right after the exit: the end is a little late.
		stream, err := c.connect(t.Context(), testSandbox, testProcess, 0)
		require.NoError(t, err)
		for {
			ev, err := stream.Next()
			require.NoError(t, err)
			if ev.Kind == frame.Exit {
				break
			}
		}
		began := time.Now()
		require.NoError(t, stream.Close())
		assert.LessOrEqual(t, time.Since(began), drainTime)
		stream, err = c.connect(t.Context(), testSandbox, testProcess, 0)
		require.NoError(t, err)
		assert.Equal(t, int32(1), s.conns.Load(), "one connection serves all")
		require.NoError(t, stream.Close())
		assert.Equal(t, "GET /v1/sandboxes/"+testSandbox+"/processes/"+testProcess+"/connect", s.requests()[0])
	})
}

func TestStreamThatEndsBadly(t *testing.T) {
	first := chunk(dataLine(1, "stdout", "a"))
	for name, row := range map[string]struct {
		text string
		is   error
		got  int
	}{
		"cut after the headers":    {chunkedHead, io.ErrUnexpectedEOF, 0},
		"cut between events":       {chunkedHead + first, io.ErrUnexpectedEOF, 1},
		"cut in a chunk":           {chunkedHead + first + "20\r\n{\"type\":", io.ErrUnexpectedEOF, 1},
		"ended within an event":    {chunkedHead + first + chunk(`{"type":"exit","exit_co`) + chunkedEnd, io.ErrUnexpectedEOF, 1},
		"ended without line end":   {chunkedHead + chunk(strings.TrimSpace(exitLine)) + chunkedEnd, io.EOF, 1},
		"ended without exit":       {chunkedHead + first + chunkedEnd, io.EOF, 1},
		"ended without events":     {chunkedHead + chunkedEnd, io.EOF, 0},
		"no events":                {chunkedHead + chunk("<html>\n") + chunkedEnd, ErrInvalidResponse, 0},
		"an exit without a code":   {chunkedHead + chunk(`{"type":"exit"}`+"\n") + chunkedEnd, ErrInvalidResponse, 0},
		"an exit of one and a bit": {chunkedHead + chunk(`{"type":"exit","exit_code":1.5}`+"\n") + chunkedEnd, ErrInvalidResponse, 0},
		"a line without end":       {chunkedHead + first + chunk(strings.Repeat("x", maxFrameLine+2)) + chunkedEnd, ErrInvalidResponse, 1},
	} {
		bubble(t, name, func(t *testing.T) {
			s := newWireServer(t, func(_ int, c *wireConn) { c.read(); c.send(row.text) })
			stream, err := s.client().connect(t.Context(), testSandbox, testProcess, 0)
			require.NoError(t, err)
			got, err := follow(stream)
			assert.ErrorIs(t, err, row.is)
			assert.Len(t, got, row.got)
			if row.is == io.ErrUnexpectedEOF {
				assert.ErrorIs(t, err, ErrConnection)
				assert.NotErrorIs(t, err, io.EOF)
			}
			_, again := stream.Next()
			assert.Error(t, again)
			require.NoError(t, stream.Close())
		})
	}
}

func TestStreamThatIsSilentIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			c.read()
			c.send(chunkedHead)
			for range 100 {
				time.Sleep(streamSilence - time.Second)
				c.send(chunk(beatLine))
			}
			c.waitForClient()
		})
		stream, err := s.client().connect(t.Context(), testSandbox, testProcess, 0)
		require.NoError(t, err)
		time.Sleep(time.Hour) // nobody reads: that is not the provider's silence
		began := time.Now()
		_, err = stream.Next()
		require.NoError(t, err)
		assert.Zero(t, time.Since(began))
		got, err := follow(stream)
		assert.Len(t, got, 99)
		require.ErrorIs(t, err, ErrConnection)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, stream.Close())
	})
}

func TestStreamThatIsLeft(t *testing.T) {
	for name, leave := range map[string]func(*eventStream, context.CancelFunc) error{
		"closed": func(s *eventStream, _ context.CancelFunc) error { return s.Close() },
		"cancelled": func(s *eventStream, cancel context.CancelFunc) error {
			time.AfterFunc(time.Second, cancel)
			if _, err := follow(s); err == nil || err == io.EOF {
				return fmt.Errorf("stream ended with %v", err)
			}
			return s.Close()
		},
	} {
		bubble(t, name, func(t *testing.T) {
			s := newWireServer(t, func(_ int, c *wireConn) {
				c.read()
				c.send(chunkedHead + chunk(dataLine(1, "stdout", "a")))
				c.waitForClient()
			})
			c := s.client()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			for range 200 {
				ctx, cancel := context.WithCancel(ctx)
				stream, err := c.connect(ctx, testSandbox, testProcess, 0)
				require.NoError(t, err)
				_, err = stream.Next()
				require.NoError(t, err)
				require.NoError(t, leave(stream, cancel))
				cancel()
			}
			s.done.Wait() // every connection is closed
		})
	}
}

func TestConnectIsRefused(t *testing.T) {
	mock := answering(reply(410, `{"status":"fail","data":{"code":"output_offset_expired","oldest_available_seq":900}}`))
	_, err := testClient(mock).connect(t.Context(), testSandbox, testProcess, 3)
	var refused *RequestError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, codeOffsetExpired, refused.code)
	assert.Equal(t, int64(900), refused.oldest)
	assert.Equal(t, "CreateOS request failed (HTTP 410) during output connection.", err.Error())

	_, err = testClient(mock).connect(t.Context(), testSandbox, "../x", 0)
	var input *InputError
	assert.ErrorAs(t, err, &input)

	_, err = testClient(answering(reply(204, ""))).connect(t.Context(), testSandbox, testProcess, 0)
	assert.ErrorIs(t, err, ErrInvalidResponse)
}
