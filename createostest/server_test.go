package createostest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// listener is a testing.TB that keeps what is said to it.
type listener struct {
	testing.TB
	mu   sync.Mutex
	said []string

	cleanups []func()
}

func (l *listener) Logf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = append(l.said, fmt.Sprintf(format, args...))
}

func (l *listener) Errorf(format string, args ...any) { l.Logf("error: "+format, args...) }
func (l *listener) Fatalf(format string, args ...any) { l.Logf("fatal: "+format, args...) }
func (l *listener) Cleanup(f func())                  { l.cleanups = append(l.cleanups, f) }
func (l *listener) Helper()                           {}

func (l *listener) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.said, "\n")
}

func TestCloseEndsEverything(t *testing.T) {
	for _, memory := range []bool{true, false} {
		srv, err := Start(Options{InMemory: memory, Commands: Builtin})
		require.NoError(t, err)
		c := &client{t, srv, srv.APIKey()}
		box := c.box()
		feed := c.connect(c.run(box, "sleep", "1000") + "/connect")
		srv.Fail(Fault{Route: "GET /v1/whoami", Hang: true})
		failed := make(chan error, 2)
		for _, path := range []string{"/v1/whoami", box + "/exec"} {
			go func() {
				a, err := c.try(map[bool]string{true: "POST", false: "GET"}[strings.HasSuffix(path, "exec")], path,
					map[string]any{"cmd": "sleep", "args": []string{"1000"}})
				if err == nil && a.code == 502 {
					err = errors.New("the command was cut") // its end may be quicker than that of the connection
				}
				failed <- err
			}()
		}
		require.Eventually(t, func() bool { return len(srv.log.unfinished()) == 3 }, 5*time.Second, time.Millisecond)
		srv.Close()
		srv.Close() // once more does no harm
		assert.Error(t, <-failed)
		assert.Error(t, <-failed)
		_, _, err = feed.rest()
		assert.Error(t, err, "a client must not take the end of the server for the end of the stream")
		_, err = c.try("GET", "/healthz", nil)
		assert.Error(t, err)
		assert.Len(t, srv.Leaks(), 1, "what was left behind can still be asked")
		assert.Empty(t, leftGoroutines())
	}
}

// A command that comes to a server that is closing did not fail to start: nothing is
// said about it.
func TestCloseAnswersNoCommand(t *testing.T) {
	for _, path := range []string{"/exec", "/processes"} {
		release := make(chan struct{}) // Close waits for the command before it cuts the connections
		srv, err := Start(Options{InMemory: true, Commands: func(_ context.Context, c *Command) int { <-release; return 0 }})
		require.NoError(t, err)
		c := &client{t, srv, srv.APIKey()}
		box := c.box()
		c.run(box, "deaf")
		srv.Fail(Fault{Route: "POST /v1/sandboxes/{id}" + path, Before: func() {
			go srv.Close()
			<-srv.done
		}})
		_, err = c.try("POST", box+path, map[string]any{"cmd": "true"})
		assert.Error(t, err, path)
		close(release)
		<-srv.closed
	}
}

func TestCloseSaysWhatItWaitsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		said := &listener{TB: t}
		srv := NewServer(said, Options{InMemory: true, Commands: func(context.Context, *Command) int { <-release; return 0 }})
		c := &client{t, srv, srv.APIKey()}
		c.run(c.box(), "deaf", "command")
		closed := make(chan struct{})
		go func() {
			srv.Close()
			close(closed)
		}()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		assert.Contains(t, said.text(), "Close has waited 5 seconds for: process proc_")
		assert.Contains(t, said.text(), "(deaf)")
		close(release)
		<-closed
	})
}

func TestAServerThatCannotStartFailsTheTest(t *testing.T) {
	_, err := Start(Options{Commands: Builtin, Addr: "256.0.0.1:0"})
	require.Error(t, err)
	said := &listener{TB: t}
	func() {
		defer func() { recover() }() // a real Fatalf does not return
		NewServer(said, Options{Commands: Builtin, Addr: "256.0.0.1:0"})
	}()
	assert.Contains(t, said.text(), "fatal: createostest: cannot start the emulator")
}

func TestConfigFitsTheServer(t *testing.T) {
	srv := NewServer(t, Options{InMemory: true})
	cfg := srv.Config()
	assert.Equal(t, srv.URL, cfg.APIURL)
	assert.Regexp(t, `^https://emulator-\d+\.invalid$`, cfg.APIURL)
	assert.Equal(t, srv.APIKey(), cfg.APIKey.Reveal())
	assert.Equal(t, "s-1vcpu-256mb", cfg.Shape)
	assert.Same(t, srv.Transport(), srv.DriverConfig().Transport)
	assert.NotNil(t, srv.DriverConfig().Budget)
	assert.Same(t, srv.DriverConfig().Budget, srv.DriverConfig().Budget, "one budget a server")
	assert.NotEqual(t, srv.Workspace(), srv.Workspace())
	assert.True(t, strings.HasPrefix(srv.Workspace(), "/"))
}

func TestOverTCP(t *testing.T) {
	c := newClient(t, Options{Commands: flood(3000)})
	require.Regexp(t, `^http://127\.0\.0\.1:\d+$`, c.srv.URL)
	box := c.box()
	proc := c.run(box, "sh", "-c", "cat; flood")
	feed := c.connect(proc + "/connect")
	c.want(200, "POST", proc+"/stdin/close", nil)
	out, last, err := feed.rest()
	require.NoError(t, err)
	assert.Len(t, out, 3000*1024)
	assert.Equal(t, 0.0, last["exit_code"])
	resp, err := http.Get(c.srv.URL + "/healthz") // any client can come
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	c.srv.CloseIdle()
}

func TestAPanicOfACommandIsItsDeath(t *testing.T) {
	c := newClient(t, Options{InMemory: true, Commands: func(context.Context, *Command) int { panic("ouch") }})
	proc := c.run(c.box(), "x")
	d := c.want(200, "GET", proc+"/wait", nil).object(t)
	assert.Equal(t, "SIGABRT", d["signal"])
	out, _, err := c.connect(proc + "/connect").rest()
	require.NoError(t, err)
	assert.Contains(t, out, "ouch")
}

// Many clients at once, with everything they can do to each other, end in a
// server that is empty and a log that is whole.
func TestManyAtOnce(t *testing.T) {
	inBubble(t, Options{BootDelay: time.Millisecond, PauseDelay: time.Millisecond, DestroyDelay: time.Millisecond}, func(t *testing.T, c *client) {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				box := c.box(map[string]any{"auto_pause_after_seconds": 60 + i})
				proc := c.run(box, "sleep", "1000")
				c.do("POST", box+"/pause", nil)
				c.do("POST", box+"/resume", nil)
				time.Sleep(10 * time.Millisecond)
				c.do("POST", box+"/resume", nil)
				c.do("DELETE", proc+"?grace_ms=0", nil)
				for c.do("DELETE", box, nil).code == 409 {
					time.Sleep(time.Millisecond)
				}
			})
		}
		wg.Wait()
		time.Sleep(time.Second)
		assert.Empty(t, c.srv.LeakReport())
		assert.Len(t, c.srv.Sandboxes(), 20)
		for _, r := range c.srv.Requests() {
			assert.True(t, r.Done)
		}
	})
}

func TestNoLeaksNamesWhatWasLeft(t *testing.T) {
	c := newClient(t, Options{})
	said := &listener{TB: t}
	NoLeaks(said, nil)
	require.Empty(t, said.cleanups)
	NoLeaks(said, c.srv)
	require.Len(t, said.cleanups, 1)
	box := c.box()
	said.cleanups[0]()
	assert.Contains(t, said.text(), "error: createostest: sandboxes that were never destroyed:\n"+idOf(box))
	c.want(200, "DELETE", box, nil)
	said.said = nil
	said.cleanups[0]()
	assert.Empty(t, said.text())
}
