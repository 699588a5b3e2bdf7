package createostest

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// inBubble runs a test in virtual time.
func inBubble(t *testing.T, opts Options, f func(t *testing.T, c *client)) {
	t.Helper()
	opts.InMemory = true
	synctest.Test(t, func(t *testing.T) { f(t, newClient(t, opts)) })
}

func TestProcessFromStartToRecord(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, c *client) {
		box := c.box()
		a := c.want(201, "POST", box+"/processes", map[string]any{"cmd": "cat", "args": []string{"-"}, "cwd": "/srv"})
		d := a.object(t)
		require.Regexp(t, `^proc_[A-Za-z0-9_-]{16,128}$`, d["process_id"])
		for key, want := range map[string]any{
			"kind": "process", "state": "running", "leader_exited": false, "tree_exited": false, "cmd": "cat",
			"args": []any{"-"}, "cwd": "/srv", "output": map[string]any{"oldest_seq": 0.0, "newest_seq": 0.0, "bytes": 0.0},
		} {
			assert.Equal(t, want, d[key], key)
		}
		proc := box + "/processes/" + d["process_id"].(string)
		list := c.want(200, "GET", box+"/processes", nil).object(t)["processes"].([]any)
		assert.Equal(t, []any{d}, list)

		assert.Equal(t, 1.0, c.input(proc, "one ").object(t)["input_seq"])
		assert.Equal(t, 2.0, c.input(proc, "two").object(t)["input_seq"])
		c.want(200, "POST", proc+"/stdin/close", nil)
		assert.JSONEq(t, `"stdin already closed"`, string(c.want(409, "POST", proc+"/stdin/close", nil).Data))
		assert.Equal(t, 409, c.input(proc, "late").code)

		d = c.want(200, "GET", proc+"/wait?scope=tree&timeout_ms=30000", nil).object(t)
		assert.Equal(t, "exited", d["state"])
		assert.Equal(t, 0.0, d["exit_code"])
		assert.Equal(t, true, d["tree_exited"])
		assert.NotEmpty(t, d["finished_at"])
		assert.Equal(t, 7.0, d["output"].(map[string]any)["bytes"])

		out, last, err := c.connect(proc + "/connect").rest()
		require.NoError(t, err)
		assert.Equal(t, "one two", out)
		assert.Equal(t, map[string]any{"type": "exit", "exit_code": 0.0}, last)
		newest := int(d["output"].(map[string]any)["newest_seq"].(float64))
		out, _, err = c.connect(fmt.Sprintf("%s/connect?after=%d", proc, newest)).rest()
		require.NoError(t, err)
		assert.Empty(t, out)

		c.want(409, "POST", proc+"/signal", `{"signal":"SIGTERM"}`)
		c.want(200, "DELETE", proc, nil)
		for _, path := range []string{"", "/wait?timeout_ms=1", "/connect"} {
			assert.JSONEq(t, `"process not found"`, string(c.want(404, "GET", proc+path, nil).Data))
		}
		c.want(404, "DELETE", proc, nil)
	})
}

func TestProcessRequestsAreChecked(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	c.want(400, "POST", box+"/processes", `{}`)
	c.want(400, "POST", box+"/processes", `{"cmd":"cat","cwd":"relative"}`)
	c.want(400, "POST", box+"/processes", `{"cmd":"cat","env":{"UNDECLARED":"1"}}`)
	c.want(400, "POST", box+"/processes", `{"cmd":"cat","pty":{"rows":0,"cols":80}}`)
	proc := c.run(box, "cat")
	c.want(400, "POST", proc+"/input", `{}`)
	c.want(400, "POST", proc+"/input", `{"data_base64":"?"}`)
	assert.Equal(t, 200, c.input(proc, strings.Repeat("x", maxInputBytes)).code)
	assert.Equal(t, 400, c.input(proc, strings.Repeat("x", maxInputBytes+1)).code)
	c.want(400, "POST", proc+"/signal", `{"signal":"SIGSEGV"}`)
	c.want(409, "POST", proc+"/resize", `{"rows":40,"cols":120}`)
	c.want(400, "GET", proc+"/wait?scope=both", nil)
	c.want(400, "GET", proc+"/wait?timeout_ms=-1", nil)
	c.want(400, "GET", proc+"/connect?after=x", nil)
	c.want(400, "DELETE", proc+"?grace_ms=x", nil)

	pty := c.want(201, "POST", box+"/processes", `{"cmd":"cat","pty":{"rows":24,"cols":80}}`).object(t)
	assert.Equal(t, "pty", pty["kind"])
	path := box + "/processes/" + pty["process_id"].(string)
	c.want(200, "POST", path+"/resize", `{"rows":40,"cols":120}`)
	c.want(409, "POST", path+"/stdin/close", nil)
	c.input(path, "echo")
	feed := c.connect(path + "/connect")
	event, err := feed.next()
	require.NoError(t, err)
	assert.Equal(t, "pty", event["stream"])
	feed.close()
}

func TestWaitTimesOutAndSeesTheTree(t *testing.T) {
	commands := func(ctx context.Context, c *Command) int {
		c.Spawn(func(_ context.Context, child *Command) { child.Sleep(time.Minute) })
		io.WriteString(c.Stdout, "leader")
		return 4
	}
	inBubble(t, Options{Commands: commands}, func(t *testing.T, c *client) {
		proc := c.run(c.box(), "anything")
		d := c.want(200, "GET", proc+"/wait?scope=leader", nil).object(t)
		assert.Equal(t, 4.0, d["exit_code"])
		assert.Equal(t, false, d["tree_exited"])
		began := time.Now()
		assert.JSONEq(t, `"wait timed out"`, string(c.want(408, "GET", proc+"/wait?scope=tree&timeout_ms=30000", nil).Data))
		assert.Equal(t, 30*time.Second, time.Since(began))
		c.want(200, "GET", proc+"/wait?scope=tree&timeout_ms=60000", nil)
		assert.Equal(t, time.Minute, time.Since(began))
	})
}

func TestConnectEndsAtTheLeaderOrTheTree(t *testing.T) {
	commands := func(ctx context.Context, c *Command) int {
		c.Spawn(func(_ context.Context, child *Command) {
			child.Sleep(time.Minute)
			io.WriteString(child.Stdout, "child")
		})
		io.WriteString(c.Stdout, "leader ")
		return 0
	}
	for tree, want := range map[bool]string{false: "leader ", true: "leader child"} {
		inBubble(t, Options{Commands: commands, ExitAtTree: tree}, func(t *testing.T, c *client) {
			out, last, err := c.connect(c.run(c.box(), "x") + "/connect").rest()
			require.NoError(t, err)
			assert.Equal(t, want, out)
			assert.Equal(t, map[string]any{"type": "exit", "exit_code": 0.0}, last)
		})
	}
}

func TestQuietStreamsBeat(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, c *client) {
		box := c.box()
		feed := c.connect(c.run(box, "sleep", "11") + "/connect")
		for range 2 {
			event, err := feed.next()
			require.NoError(t, err)
			assert.Equal(t, map[string]any{"type": "heartbeat"}, event)
		}
		_, last, err := feed.rest()
		require.NoError(t, err)
		assert.Equal(t, "exit", last["type"])

		r := c.request("POST", box+"/exec?stream=true", `{"cmd":"sh","args":["-c","echo a; sleep 11; echo b >&2; exit 2"]}`)
		resp, err := c.srv.Transport().RoundTrip(r)
		require.NoError(t, err)
		defer resp.Body.Close()
		assert.Equal(t, "application/x-ndjson", resp.Header.Get("Content-Type"))
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Equal(t, "{\"stdout\":\"a\\n\"}\n{\"hb\":true}\n{\"hb\":true}\n{\"stderr\":\"b\\n\"}\n{\"exit_code\":2}\n", string(body))
	})
}

func TestSignals(t *testing.T) {
	commands := func(ctx context.Context, c *Command) int {
		if c.Name == "trap" {
			caught := c.Trap("SIGTERM", "SIGUSR1")
			for range 2 {
				select {
				case name := <-caught:
					io.WriteString(c.Stdout, name+" ")
				case <-ctx.Done():
					return 1
				}
			}
			return 7
		}
		return Builtin(ctx, c)
	}
	inBubble(t, Options{Commands: commands}, func(t *testing.T, c *client) {
		box := c.box()
		proc := c.run(box, "sleep", "1000")
		c.want(200, "POST", proc+"/signal", `{"signal":"SIGWINCH"}`)
		c.want(200, "POST", proc+"/signal", `{"signal":"SIGTERM"}`)
		d := c.want(200, "GET", proc+"/wait", nil).object(t)
		assert.Equal(t, "SIGTERM", d["signal"])
		assert.NotContains(t, d, "exit_code")
		_, last, err := c.connect(proc + "/connect").rest()
		require.NoError(t, err)
		assert.Equal(t, map[string]any{"type": "exit", "signal": "SIGTERM"}, last)

		trap := c.run(box, "trap")
		synctest.Wait()
		c.want(200, "POST", trap+"/signal", `{"signal":"SIGTERM"}`)
		c.want(200, "POST", trap+"/signal", `{"signal":"SIGUSR1"}`)
		out, last, err := c.connect(trap + "/connect").rest()
		require.NoError(t, err)
		assert.Equal(t, "SIGTERM SIGUSR1 ", out)
		assert.Equal(t, 7.0, last["exit_code"])
	})
}

func TestDeleteEndsTheTree(t *testing.T) {
	commands := func(ctx context.Context, c *Command) int {
		if c.Name == "stubborn" {
			c.Trap("SIGTERM")
		}
		// A session of its own is out of a signal's reach, not of a delete's.
		c.SpawnSession(func(_ context.Context, child *Command) { child.Sleep(time.Hour) })
		c.Sleep(time.Hour)
		return 0
	}
	inBubble(t, Options{Commands: commands}, func(t *testing.T, c *client) {
		box := c.box()
		for name, want := range map[string]struct {
			signal string
			after  time.Duration
		}{"meek": {"SIGTERM", 0}, "stubborn": {"SIGKILL", 2 * time.Second}} {
			proc := c.run(box, name)
			synctest.Wait()
			began := time.Now()
			d := c.want(200, "DELETE", proc+"?grace_ms=2000", nil).object(t)
			assert.Equal(t, want.after, time.Since(began), name)
			assert.Equal(t, true, d["tree_exited"], name)
			assert.Equal(t, want.signal, d["signal"], name)
			c.want(404, "GET", proc, nil)
		}
		proc := c.run(box, "meek")
		synctest.Wait()
		c.want(200, "POST", proc+"/signal", `{"signal":"SIGKILL"}`)
		d := c.want(200, "GET", proc+"/wait", nil).object(t)
		assert.Equal(t, false, d["tree_exited"])
	})
}

func TestDeleteThatIsNotProvenLeavesTheRecord(t *testing.T) {
	release := make(chan struct{})
	commands := func(context.Context, *Command) int { <-release; return 0 }
	synctest.Test(t, func(t *testing.T) {
		release = make(chan struct{})
		c := newClient(t, Options{InMemory: true, Commands: commands})
		proc := c.run(c.box(), "deaf")
		d := c.want(200, "DELETE", proc+"?grace_ms=100", nil).object(t)
		assert.Equal(t, false, d["tree_exited"])
		assert.Equal(t, "terminating", d["state"])
		c.want(200, "GET", proc, nil)
		close(release)
		d = c.want(200, "DELETE", proc, nil).object(t)
		assert.Equal(t, true, d["tree_exited"])
	})
}

func TestBufferedExecWaitsForWhoHoldsItsOutput(t *testing.T) {
	commands := func(ctx context.Context, c *Command) int {
		spawn := c.Spawn
		if c.Name == "daemon" {
			spawn = c.SpawnSession
		}
		spawn(func(_ context.Context, child *Command) { child.Sleep(time.Duration(len(c.Args)) * 40 * time.Second) })
		return 0
	}
	inBubble(t, Options{Commands: commands}, func(t *testing.T, c *client) {
		box := c.box()
		for _, tt := range []struct {
			cmd  string
			args []string
			want time.Duration
		}{
			{"child", []string{"x"}, 40 * time.Second},
			{"child", []string{"x", "x"}, execReadTimeout},
			{"daemon", []string{"x"}, 0},
		} {
			began := time.Now()
			c.want(200, "POST", box+"/exec", map[string]any{"cmd": tt.cmd, "args": tt.args})
			assert.Equal(t, tt.want, time.Since(began), tt)
		}
	})
}

func TestLeavingAStreamingExecEndsTheCommand(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, c *client) {
		box := c.box()
		ctx, cancel := context.WithCancel(t.Context())
		r := c.request("POST", box+"/exec", `{"cmd":"sleep","args":["1000"],"stream":true}`).WithContext(ctx)
		resp, err := c.srv.Transport().RoundTrip(r)
		require.NoError(t, err)
		require.Len(t, c.srv.Processes(idOf(box)), 1)
		assert.Equal(t, "exec", c.srv.Processes(idOf(box))[0].Kind)
		cancel()
		resp.Body.Close()
		synctest.Wait()
		assert.Empty(t, c.srv.Processes(idOf(box)))
	})
}

func TestAChildDiesAlone(t *testing.T) {
	commands := func(ctx context.Context, c *Command) int {
		c.Spawn(func(context.Context, *Command) { panic("child") })
		c.Sleep(time.Second)
		return 0
	}
	inBubble(t, Options{Commands: commands}, func(t *testing.T, c *client) {
		proc := c.run(c.box(), "x")
		d := c.want(200, "GET", proc+"/wait?scope=tree", nil).object(t)
		assert.Equal(t, 0.0, d["exit_code"])
		out, _, err := c.connect(proc + "/connect").rest()
		require.NoError(t, err)
		assert.Contains(t, out, "a command panicked: child")
	})
}
