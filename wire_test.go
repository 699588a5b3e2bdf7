package createos

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A wireServer speaks to the client over connections in memory, so that it can
// do to them what servers and proxies do, within a bubble of fake time.
type wireServer struct {
	tb testing.TB
	// serve has one connection, the n-th from 0, and ends by returning; then
	// the connection is closed.
	serve func(n int, c *wireConn)

	transport *http.Transport
	conns     atomic.Int32
	done      sync.WaitGroup

	mu    sync.Mutex // guards lines
	lines []string   // method and path of each request that was read, in order
}

type wireConn struct {
	net.Conn
	server *wireServer
	r      *bufio.Reader
}

func newWireServer(tb testing.TB, serve func(n int, c *wireConn)) *wireServer {
	s := &wireServer{tb: tb, serve: serve}
	s.transport = &http.Transport{DialContext: s.dial}
	return s
}

func (s *wireServer) dial(context.Context, string, string) (net.Conn, error) {
	theirs, ours := net.Pipe()
	n := int(s.conns.Add(1)) - 1
	s.done.Go(func() {
		defer func() { _ = ours.Close() }()
		s.serve(n, &wireConn{ours, s, bufio.NewReader(ours)})
	})
	return theirs, nil
}

// client makes a client of the server. What must happen before the bubble
// ends happens when the test does.
func (s *wireServer) client(changes ...func(*clientConfig)) *Client {
	s.tb.Cleanup(func() {
		s.transport.CloseIdleConnections()
		s.done.Wait()
	})
	return testClient(s.transport, append([]func(*clientConfig){func(c *clientConfig) { c.origin = "http://api.example.test" }}, changes...)...)
}

func (s *wireServer) requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lines
}

// read reads one request with its body; nil means that the client has left.
func (c *wireConn) read() []byte {
	req, err := http.ReadRequest(c.r)
	if err != nil {
		return nil
	}
	c.server.mu.Lock()
	c.server.lines = append(c.server.lines, req.Method+" "+req.URL.Path)
	c.server.mu.Unlock()
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil
	}
	return append([]byte{}, body...)
}

// head reads a request up to the end of its headers.
func (c *wireConn) head() bool {
	req, err := http.ReadRequest(c.r)
	return err == nil && req != nil
}

// send writes text; an error means that the client has left.
func (c *wireConn) send(text string) bool {
	_, err := io.WriteString(c, text)
	return err == nil
}

// answer writes a whole answer.
func (c *wireConn) answer(status int, body string) bool {
	return c.send(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body))
}

// waitForClient returns when the client has closed the connection.
func (c *wireConn) waitForClient() { _, _ = io.Copy(io.Discard, c.r) }

var goodReply = success(goodSandbox)

func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func TestAPostIsOnTheWireOnce(t *testing.T) {
	calls := map[string]func(context.Context, *Client) error{}
	for _, op := range operations {
		if op.method == "POST" {
			calls[op.name] = op.call
		}
	}
	for name, call := range calls {
		bubble(t, name, func(t *testing.T) {
			// The connection is warm, and dies as soon as the request was read.
			s := newWireServer(t, func(_ int, c *wireConn) {
				if c.read() != nil && c.answer(200, goodReply) {
					c.read()
				}
			})
			c := s.client()
			_, err := c.get(t.Context(), testSandbox)
			require.NoError(t, err)
			err = call(t.Context(), c)
			require.ErrorIs(t, err, ErrConnection)
			assert.True(t, unclear(err))
			assert.False(t, notSent(err))
			assert.Len(t, s.requests(), 2)
		})
	}
}

func TestAGetSurvivesADeadConnection(t *testing.T) {
	for _, when := range []string{"before the request", "after the request", "after the headers", "in the body"} {
		bubble(t, when, func(t *testing.T) {
			s := newWireServer(t, func(n int, c *wireConn) {
				switch {
				case n > 0:
					for c.read() != nil && c.answer(200, goodReply) {
					}
				case when == "before the request":
				case when == "after the request":
					c.read()
				case when == "after the headers":
					c.read()
					c.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
				default:
					c.read()
					c.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{\"sta")
				}
			})
			got, err := s.client().get(t.Context(), testSandbox)
			require.NoError(t, err)
			assert.Equal(t, testSandbox, got.ID)
			assert.Equal(t, int32(2), s.conns.Load())
		})
	}
}

func TestACutReplyToAPostIsUnclear(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":      "",
		"status line":  "HTTP/1.1 201",
		"no body":      "HTTP/1.1 201 Created\r\nContent-Length: 90\r\n\r\n",
		"half a body":  "HTTP/1.1 201 Created\r\nContent-Length: 90\r\n\r\n{\"status\":",
		"half a chunk": "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5a\r\n{\"status\":",
		"no HTTP":      "hello\r\n\r\n",
		"broken chunk": "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
	} {
		bubble(t, name, func(t *testing.T) {
			s := newWireServer(t, func(_ int, c *wireConn) {
				if c.read() != nil {
					c.send(text)
				}
			})
			_, err := s.client().create(t.Context(), createRequest{})
			require.ErrorIs(t, err, ErrConnection)
			assert.True(t, unclear(err))
			assert.Len(t, s.requests(), 1)
		})
	}
}

func TestWhatIsKnownNotToBeSent(t *testing.T) {
	dialer := func(err error) *http.Transport {
		return &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return nil, err }}
	}
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	for name, row := range map[string]struct {
		transport http.RoundTripper
		notSent   bool
	}{
		"refused":             {dialer(refused), true},
		"no such host":        {dialer(&net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "api.example.test"}}), true},
		"any error of a dial": {dialer(errors.New("tls: bad certificate")), true},
		"refused, no hooks":   {answering(func(*http.Request) (*http.Response, error) { return nil, refused }), true},
		"reset, no hooks": {answering(func(*http.Request) (*http.Response, error) {
			return nil, &net.OpError{Op: "read", Err: syscall.ECONNRESET}
		}), false},
		"no knowledge": {answering(func(*http.Request) (*http.Response, error) { return nil, errors.New("x") }), false},
		"neither nor":  {answering(func(*http.Request) (*http.Response, error) { return nil, nil }), false},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := testClient(row.transport).create(t.Context(), createRequest{})
			require.ErrorIs(t, err, ErrConnection)
			assert.Equal(t, "CreateOS connection failed.", err.Error())
			assert.Equal(t, row.notSent, notSent(err))
			assert.Equal(t, !row.notSent, unclear(err))
		})
	}
}

// Once one attempt may have arrived, a later one that did not leave does not
// make the request unsent.
func TestNotSentIsSaidOfTheWholeRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mock := answering(reply(503, ""), func(*http.Request) (*http.Response, error) {
			return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		})
		_, err := testClient(mock).destroy(t.Context(), testSandbox)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		assert.False(t, notSent(err))

		mock = answering(reply(429, ""), func(*http.Request) (*http.Response, error) {
			return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		})
		_, err = testClient(mock).create(t.Context(), createRequest{})
		assert.True(t, notSent(err), "a throttled attempt had no effect")
	})
}

func TestARequestThatLeavesTheQueueWasNotSent(t *testing.T) {
	for _, op := range operations {
		bubble(t, op.name, func(t *testing.T) {
			mock := answering(reply(200, success(op.good)))
			b := NewBudget(1)
			require.NoError(t, b.b.Wait(t.Context(), 0))
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			ctx = withTraits(ctx, traits{onSend: func() { t.Error("nothing is sent") }})
			began := time.Now()
			err := op.call(ctx, testClient(mock, func(c *clientConfig) { c.budget = b }))
			assert.Equal(t, 50*time.Millisecond, time.Since(began))
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.ErrorIs(t, err, ErrConnection)
			assert.True(t, notSent(err))
			assert.Zero(t, mock.GetTotalCallCount())
		})
	}
}

// lingering are the operations whose reply is awaited beyond the context.
func lingering(method, name string) bool { return method == "POST" || name == "upload" }

func TestTheReplyToAChangeIsAwaitedBeyondTheContext(t *testing.T) {
	for _, op := range operations {
		if !lingering(op.method, op.name) {
			continue
		}
		for name, row := range map[string]struct {
			delay time.Duration // of the reply, after the context has ended
			good  bool
		}{"in time": {9 * time.Second, true}, "late": {11 * time.Second, false}} {
			bubble(t, op.name+" "+name, func(t *testing.T) {
				ctx, cancel := context.WithCancel(context.WithValue(t.Context(), traitsKey{}, traits{}))
				s := newWireServer(t, func(_ int, c *wireConn) {
					c.read()
					cancel()
					time.Sleep(row.delay)
					c.answer(201, success(op.good))
				})
				began := time.Now()
				err := op.call(ctx, s.client(func(c *clientConfig) { c.replyGrace = 10 * time.Second }))
				if row.good {
					require.NoError(t, err)
					assert.Equal(t, row.delay, time.Since(began))
					return
				}
				assert.Equal(t, 10*time.Second, time.Since(began))
				require.ErrorIs(t, err, context.Canceled)
				assert.ErrorIs(t, err, ErrConnection)
				assert.True(t, unclear(err))
			})
		}
	}
}

// A slowFile gives one byte at a time, and its reader leaves at the second.
type slowFile struct {
	*strings.Reader
	leave func()
}

func (f *slowFile) Read(p []byte) (int, error) {
	if f.Len() == 2 {
		f.leave()
		time.Sleep(time.Second)
	}
	return f.Reader.Read(p[:1])
}

func TestAnUploadThatWasSentInPartEndsWithTheContext(t *testing.T) {
	bubble(t, "half", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := newWireServer(t, func(_ int, c *wireConn) { c.waitForClient() })
		file := &slowFile{Reader: strings.NewReader("abc"), leave: cancel}
		began := time.Now()
		err := s.client().upload(ctx, "sb-1", "/f", file, 3)
		require.ErrorIs(t, err, context.Canceled)
		assert.Less(t, time.Since(began), 5*time.Second, "the read that runs, but no reply")
	})
}

func TestOtherRequestsEndWithTheContext(t *testing.T) {
	for _, op := range operations {
		if lingering(op.method, op.name) {
			continue
		}
		bubble(t, op.name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			s := newWireServer(t, func(_ int, c *wireConn) {
				c.read()
				cancel(ErrLeaseClosing)
				c.waitForClient()
			})
			began := time.Now()
			err := op.call(ctx, s.client())
			assert.Zero(t, time.Since(began))
			require.ErrorIs(t, err, ErrConnection)
			assert.ErrorIs(t, err, ErrLeaseClosing, "the driver says why")
			assert.NotErrorIs(t, err, context.Canceled, "the caller did not cancel")
		})
	}
}

func TestAPostThatWaitsForAConnectionEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		hang := make(chan struct{}) // the transport dials on, whoever has left
		defer close(hang)
		transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			<-hang
			return nil, syscall.ETIMEDOUT
		}}
		began := time.Now()
		_, err := testClient(transport).create(ctx, createRequest{})
		assert.Equal(t, time.Second, time.Since(began))
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.True(t, notSent(err))
	})
}

func TestBackOffObeysTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		mock := answering(reply(429, "").HeaderSet(http.Header{"Retry-After": {"30"}}))
		began := time.Now()
		_, err := testClient(mock).create(ctx, createRequest{})
		assert.Equal(t, time.Second, time.Since(began))
		assert.ErrorIs(t, err, ErrRateLimited)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, "CreateOS request failed (HTTP 429) during sandbox lifecycle.", err.Error())
		assert.False(t, unclear(err), "known not created")

		// The pause of the budget goes on; a request that waits for it has its own end.
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = testClient(answering(reply(503, ""))).get(ctx, testSandbox)
		assert.ErrorIs(t, err, ErrUnavailable)
	})
}

func TestEachAttemptHasItsOwnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(n int, c *wireConn) {
			c.read()
			if n == 0 {
				c.waitForClient()
				return
			}
			c.answer(200, goodReply)
		})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		_, err := s.client(func(c *clientConfig) { c.requestTimeout = time.Second }).get(ctx, testSandbox)
		require.NoError(t, err)
		assert.Equal(t, int32(2), s.conns.Load())
		assert.Less(t, time.Since(began), 2*time.Second)
	})
}

func TestABodyMayTrickle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			c.read()
			c.send(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", len(goodReply)))
			for _, b := range goodReply {
				time.Sleep(2 * time.Second / time.Duration(len(goodReply)))
				c.send(string(b))
			}
		})
		_, err := s.client(func(c *clientConfig) { c.requestTimeout = time.Second }).get(t.Context(), testSandbox)
		require.NoError(t, err)
	})
}

func TestABodyThatStandsStillIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			c.read()
			c.send("HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{")
			c.waitForClient()
		})
		began := time.Now()
		_, err := s.client().create(t.Context(), createRequest{})
		require.ErrorIs(t, err, ErrConnection)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.True(t, unclear(err))
		assert.Equal(t, bodyTimeout, time.Since(began))
	})
}

func TestACreateMayQueueAtTheProvider(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			c.read()
			time.Sleep(time.Hour)
			c.answer(201, goodReply)
		})
		_, err := s.client().create(t.Context(), createRequest{})
		require.NoError(t, err)
	})
}

func TestAnEndlessAnswerIsNotRead(t *testing.T) {
	endless := func(status int, body string) func(int, *wireConn) {
		return func(_ int, c *wireConn) {
			c.read()
			if c.send(fmt.Sprintf("HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n", status)) {
				chunk := fmt.Sprintf("%x\r\n%s\r\n", len(body), body)
				for c.send(chunk) {
				}
			}
		}
	}
	bubble(t, "refused", func(t *testing.T) {
		s := newWireServer(t, endless(400, strings.Repeat("x", 4096)))
		_, err := s.client().get(t.Context(), testSandbox)
		var refused *RequestError
		require.ErrorAs(t, err, &refused)
		assert.Equal(t, 400, refused.Status)
		assert.False(t, refused.envelope)
	})
	bubble(t, "success", func(t *testing.T) {
		s := newWireServer(t, endless(200, strings.Repeat(" ", 1<<16)))
		_, err := s.client().get(t.Context(), testSandbox)
		assert.ErrorIs(t, err, ErrInvalidResponse)
	})
	bubble(t, "refused, then silence", func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			c.read()
			c.send("HTTP/1.1 400 X\r\nContent-Length: 90\r\n\r\n{")
			c.waitForClient()
		})
		began := time.Now()
		_, err := s.client().get(t.Context(), testSandbox)
		assert.ErrorIs(t, err, ErrInvalidRequest)
		assert.Equal(t, errorBodyTimeout, time.Since(began))
	})
}

func TestAShortBodyIsNotAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			c.read()
			c.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + goodReply)
		})
		_, err := s.client().get(t.Context(), testSandbox)
		require.ErrorIs(t, err, ErrConnection)
		assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Len(t, s.requests(), maxAttempts)
	})
}

func TestConnectionsAreReusedAlsoAfterErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int32
		s := newWireServer(t, func(_ int, c *wireConn) {
			for c.read() != nil {
				if n.Add(1)%3 != 0 {
					c.answer(503, "service unavailable")
					continue
				}
				c.answer(200, goodReply)
			}
		})
		c := s.client()
		for range 50 {
			_, err := c.get(t.Context(), testSandbox)
			require.NoError(t, err)
		}
		assert.Equal(t, int32(1), s.conns.Load())
		assert.Len(t, s.requests(), 150)
	})
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	targets := []string{
		"http://other.example.test/x?private", "http://api.example.test:8080/", "https://api.example.test/", "/v1/other", "",
	}
	for _, status := range []int{300, 301, 302, 303, 307, 308} {
		for _, op := range operations {
			bubble(t, fmt.Sprint(status, op.name), func(t *testing.T) {
				for _, target := range targets {
					s := newWireServer(t, func(_ int, c *wireConn) {
						for c.read() != nil && c.send(fmt.Sprintf("HTTP/1.1 %d X\r\nLocation: %s\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n", status, target)) {
						}
					})
					err := op.call(t.Context(), s.client())
					var refused *RequestError
					require.ErrorAs(t, err, &refused)
					assert.Equal(t, status, refused.Status)
					assert.NotContains(t, err.Error(), "private")
					assert.True(t, unclear(err))
					assert.Len(t, s.requests(), 1)
				}
			})
		}
	}
}

type transportFunc func(*http.Request) (*http.Response, error)

func (f transportFunc) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// A transport of somebody else may do less than net/http does.
func TestCarelessTransports(t *testing.T) {
	answer := func(resp *http.Response) *Client {
		return testClient(transportFunc(func(*http.Request) (*http.Response, error) { return resp, nil }))
	}
	err := answer(&http.Response{StatusCode: 204}).input(t.Context(), testSandbox, testProcess, nil)
	require.NoError(t, err)
	_, err = answer(&http.Response{StatusCode: 404}).exec(t.Context(), testSandbox, "true", nil)
	require.ErrorIs(t, err, ErrNotFound)

	gzipped := http.Header{"Content-Encoding": {"gzip"}}
	_, err = answer(&http.Response{StatusCode: 200, Header: gzipped, Body: io.NopCloser(strings.NewReader(goodReply))}).get(t.Context(), testSandbox)
	require.ErrorIs(t, err, ErrInvalidResponse)

	short := func() *http.Response {
		return &http.Response{StatusCode: 200, ContentLength: 1000, Body: io.NopCloser(strings.NewReader(goodReply))}
	}
	_, err = answer(short()).create(t.Context(), createRequest{})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	assert.True(t, unclear(err))
	body, _, err := answer(short()).download(t.Context(), testSandbox, "/a")
	require.NoError(t, err)
	data, err := io.ReadAll(body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	assert.Equal(t, goodReply, string(data))
	require.NoError(t, body.Close())
}

func TestWaitEndsWithTheProvidersAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			for c.read() != nil {
				time.Sleep(80 * time.Second) // beyond the bound of other requests
				c.answer(408, `{"status":"fail","data":"wait timed out"}`)
			}
		})
		_, err := s.client().wait(t.Context(), testSandbox, testProcess, true, 30*time.Second)
		assert.Equal(t, errWaitTimeout, err)
		assert.Len(t, s.requests(), 1)
	})
}
