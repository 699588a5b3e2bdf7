package createos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestUploadIsRewound(t *testing.T) {
	for _, size := range []int{0, 1, 5 << 20} {
		data := strings.Repeat("0123456789abcdef", size/16+1)[:size]
		for _, when := range []string{"after the body", "within the body"} {
			bubble(t, fmt.Sprint(size, when), func(t *testing.T) {
				var got []byte
				s := newWireServer(t, func(n int, c *wireConn) {
					if n == 0 && when == "within the body" {
						c.head()
						_, _ = io.CopyN(io.Discard, c.r, int64(size/2))
						c.answer(503, "")
						return
					}
					if n == 0 {
						c.read()
						c.answer(503, "")
						return
					}
					got = c.read()
					c.answer(200, success(`{}`))
				})
				c := s.client()
				body := strings.NewReader(data)
				_, err := body.Seek(int64(size/3), io.SeekStart)
				require.NoError(t, err)
				require.NoError(t, c.upload(t.Context(), testSandbox, "/a", body, int64(size)))
				s.transport.CloseIdleConnections()
				s.done.Wait()
				assert.True(t, bytes.Equal([]byte(data), got))
			})
		}
	}
}

func TestUploadIsBoundedByStandingStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 4 << 20
		s := newWireServer(t, func(n int, c *wireConn) {
			c.head()
			for range 64 { // slower than any bound on the whole
				time.Sleep(50 * time.Second)
				_, _ = io.CopyN(io.Discard, c.r, size/64)
			}
			c.answer(200, success(`{}`))
		})
		require.NoError(t, s.client().upload(t.Context(), testSandbox, "/a", bytes.NewReader(make([]byte, size)), size))
	})
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(n int, c *wireConn) {
			c.head()
			time.Sleep(time.Hour)
		})
		began := time.Now()
		err := s.client().upload(t.Context(), testSandbox, "/a", bytes.NewReader(make([]byte, 1<<20)), 1<<20)
		assert.ErrorIs(t, err, ErrConnection)
		assert.Less(t, time.Since(began), maxAttempts*defaultRequestTimeout+10*time.Second)
	})
}

type brokenFile struct {
	after int
	seek  error
}

var errBroken = errors.New("/home/me/private: input/output error")

func (f *brokenFile) Seek(int64, int) (int64, error) { return 0, f.seek }
func (f *brokenFile) Read(p []byte) (int, error) {
	if f.after == 0 {
		return 0, errBroken
	}
	f.after--
	p[0] = 'x'
	return 1, nil
}

func TestUploadOfAFileThatCannotBeRead(t *testing.T) {
	for name, row := range map[string]struct {
		file  io.ReadSeeker
		cause error
	}{
		"error":  {&brokenFile{after: 3}, errBroken},
		"shrunk": {strings.NewReader("abc"), io.ErrUnexpectedEOF},
	} {
		bubble(t, name, func(t *testing.T) {
			s := newWireServer(t, func(_ int, c *wireConn) { c.read() })
			err := s.client().upload(t.Context(), testSandbox, "/a", row.file, 10)
			require.ErrorIs(t, err, row.cause)
			assert.NotContains(t, err.Error(), "private")
			assert.Equal(t, int32(1), s.conns.Load(), "trying again does not mend the file")
		})
	}
	mock := answering(reply(200, success(`{}`)))
	err := testClient(mock).upload(t.Context(), testSandbox, "/a", &brokenFile{seek: errBroken}, 10)
	require.ErrorIs(t, err, errBroken)
	assert.Zero(t, mock.GetTotalCallCount())

	// A success does not count if the provider cannot have the file.
	hasty := transportFunc(func(req *http.Request) (*http.Response, error) {
		_, _ = io.Copy(io.Discard, req.Body)
		return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(success(`{}`)))}, nil
	})
	err = testClient(hasty).upload(t.Context(), testSandbox, "/a", &brokenFile{after: 3}, 10)
	require.ErrorIs(t, err, errBroken)
}

func TestDownload(t *testing.T) {
	get := func(t *testing.T, serve func(int, *wireConn)) (string, int64, *wireServer, error) {
		s := newWireServer(t, serve)
		body, size, err := s.client().download(t.Context(), testSandbox, "/a")
		require.NoError(t, err)
		data, err := io.ReadAll(body)
		require.NoError(t, body.Close())
		_, again := body.Read(make([]byte, 1))
		assert.Error(t, again)
		return string(data), size, s, err
	}
	bubble(t, "whole", func(t *testing.T) {
		data, size, _, err := get(t, func(_ int, c *wireConn) { c.read(); c.answer(200, "12345") })
		require.NoError(t, err)
		assert.Equal(t, "12345", data)
		assert.Equal(t, int64(5), size)
	})
	bubble(t, "empty", func(t *testing.T) {
		data, size, _, err := get(t, func(_ int, c *wireConn) { c.read(); c.answer(200, "") })
		require.NoError(t, err)
		assert.Empty(t, data)
		assert.Zero(t, size)
	})
	bubble(t, "of unknown size", func(t *testing.T) {
		data, size, _, err := get(t, func(_ int, c *wireConn) {
			c.read()
			c.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n123\r\n0\r\n\r\n")
		})
		require.NoError(t, err)
		assert.Equal(t, "123", data)
		assert.Equal(t, int64(-1), size)
	})
	for name, text := range map[string]string{
		"short":     "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345",
		"cut chunk": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
	} {
		bubble(t, name, func(t *testing.T) {
			data, _, _, err := get(t, func(_ int, c *wireConn) { c.read(); c.send(text) })
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			assert.ErrorIs(t, err, ErrConnection)
			assert.Equal(t, "12345", data)
		})
	}
	bubble(t, "slow but steady", func(t *testing.T) {
		data, _, _, err := get(t, func(_ int, c *wireConn) {
			c.read()
			c.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
			for range 100 {
				time.Sleep(flowSilence - time.Second)
				c.send("x")
			}
		})
		require.NoError(t, err)
		assert.Len(t, data, 100)
	})
	bubble(t, "silent", func(t *testing.T) {
		began := time.Now()
		_, _, _, err := get(t, func(_ int, c *wireConn) {
			c.read()
			c.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
			c.waitForClient()
		})
		require.ErrorIs(t, err, ErrConnection)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, flowSilence, time.Since(began))
	})
	for name, text := range map[string]string{
		"a part":     "HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\n1",
		"no content": "HTTP/1.1 204 None\r\n\r\n",
		"compressed": "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\n1",
	} {
		bubble(t, name, func(t *testing.T) {
			s := newWireServer(t, func(_ int, c *wireConn) { c.read(); c.send(text) })
			_, _, err := s.client().download(t.Context(), testSandbox, "/a")
			assert.ErrorIs(t, err, ErrInvalidResponse)
		})
	}
}

func TestDownloadThatIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newWireServer(t, func(_ int, c *wireConn) {
			c.read()
			c.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n1234567890")
			c.waitForClient()
		})
		body, _, err := s.client().download(t.Context(), testSandbox, "/a")
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, body.Close())
		assert.LessOrEqual(t, time.Since(began), drainTime)
		s.done.Wait() // the connection is closed

		ctx, cancel := context.WithCancel(t.Context())
		body, _, err = s.client().download(ctx, testSandbox, "/a")
		require.NoError(t, err)
		cancel()
		_, err = io.ReadAll(body)
		assert.ErrorIs(t, err, context.Canceled)
		require.NoError(t, body.Close())
	})
}
