package createostest

import (
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// onBothRunners runs a test on real processes and in memory: what a client can
// tell apart there would make tests in memory worth little.
func onBothRunners(t *testing.T, f func(t *testing.T, c *client)) {
	t.Helper()
	t.Run("memory", func(t *testing.T) { f(t, newClient(t, Options{})) })
	t.Run("host", func(t *testing.T) {
		if runtime.GOOS == "windows" {
			t.Skip("no runner of real processes")
		}
		srv := NewServer(t)
		f(t, &client{t, srv, srv.APIKey()})
	})
}

func TestBothRunnersRunAScript(t *testing.T) {
	onBothRunners(t, func(t *testing.T, c *client) {
		box := c.box(map[string]any{"envs": map[string]string{"DECLARED": "from create"}})
		ws := c.srv.Workspace()
		for _, script := range []string{"mkdir -p -- " + quoted(ws), "(umask 077 && mkdir -- " + quoted(ws+"/.spool") + ")"} {
			a := c.want(200, "POST", box+"/exec", map[string]any{"cmd": "/bin/bash", "args": []string{"-lc", script}})
			require.Equal(t, map[string]any{"stdout": "", "stderr": "", "exit_code": 0.0}, a.object(t)["result"], script)
		}
		c.want(200, "PUT", filePathQuery(box, ws+"/.spool/part.0"), "input")
		loader := `while IFS= read -r -t 120 l <&3; do case $l in (L1:*:E) l=${l#L1:}; s=$(printf %s "${l%:E}" | base64 -d); exec 3<&-; eval "$s"; exit;; esac; done; exit 125`
		proc := c.run(box, "/bin/bash", "-c", loaderArgs[1], loaderName, loader, "exec-1")
		feed := c.connect(proc + "/connect?after=0")
		spool := quoted(ws + "/.spool")
		script := "{ builtin cd -P -- " + quoted(ws) + " || exit 125\n(umask 077 && : >" + spool + "/'in') && exec 4>" + spool + "/'in' 0<" + spool +
			"/'in' && command cat -- " + spool + "/'part.0' >&4 && exec 4>&- || exit 125\ncommand rm -rf -- " + spool + " || exit 125\n" +
			"{ unset -v 'A' && export 'A=it'\\''s'; } 2>/dev/null || exit 125\nexec -- 'bash' '-c' 'cat; echo \"/$A/$DECLARED/$PWD\" >out; cat out; exit 7'; }"
		if strings.Contains(t.Name(), "memory") {
			script = strings.ReplaceAll(script, "$PWD", "$(pwd)")
		}
		require.Equal(t, 200, c.input(proc, loaderLine(script)).code)
		out, last, err := feed.rest()
		require.NoError(t, err)
		assert.Equal(t, "input/it's/from create/"+ws+"\n", out)
		assert.Equal(t, map[string]any{"type": "exit", "exit_code": 7.0}, last)
		d := c.want(200, "GET", proc+"/wait?scope=tree&timeout_ms=30000", nil).object(t)
		assert.Equal(t, 7.0, d["exit_code"])
		assert.Equal(t, "/it's/from create/"+ws+"\n", c.want(200, "GET", filePathQuery(box, ws+"/out"), nil).raw)
		c.want(404, "GET", filePathQuery(box, ws+"/.spool/part.0"), nil)
		c.want(200, "DELETE", proc, nil)
		c.want(404, "GET", proc, nil)
	})
}

func TestBothRunnersExec(t *testing.T) {
	onBothRunners(t, func(t *testing.T, c *client) {
		box := c.box()
		a := c.want(200, "POST", box+"/exec", map[string]any{"cmd": "bash", "args": []string{"-c", "cat; echo err >&2; exit 3"}, "stdin": "in\n"})
		assert.Equal(t, map[string]any{"stdout": "in\n", "stderr": "err\n", "exit_code": 3.0}, a.object(t)["result"])
		resp, err := c.srv.Transport().RoundTrip(c.request("POST", box+"/exec?stream=true", `{"cmd":"bash","args":["-c","echo out; exit 4"]}`))
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Equal(t, "{\"stdout\":\"out\\n\"}\n{\"exit_code\":4}\n", string(body))
	})
}

// What cannot be started has no exit code of its own; in a script it is 127.
func TestBothRunnersMissACommand(t *testing.T) {
	onBothRunners(t, func(t *testing.T, c *client) {
		box := c.box()
		for _, cmd := range []string{"/no/such", "no-such-command"} {
			a := c.want(200, "POST", box+"/exec", map[string]any{"cmd": cmd})
			result := a.object(t)["result"].(map[string]any)
			assert.Equal(t, -1.0, result["exit_code"], a.raw)
			assert.Contains(t, result["error"], "exec: start "+cmd, a.raw)
			streamed := c.want(200, "POST", box+"/exec?stream=true", map[string]any{"cmd": cmd})
			assert.Contains(t, streamed.raw, `{"error":"exec: start `+cmd)
			a = c.want(400, "POST", box+"/processes", map[string]any{"cmd": cmd})
			assert.Contains(t, a.object(t)["cmd"], "start "+cmd, a.raw)
			a = c.want(200, "POST", box+"/exec", map[string]any{"cmd": "sh", "args": []string{"-c", cmd}})
			assert.Equal(t, 127.0, a.object(t)["result"].(map[string]any)["exit_code"], a.raw)
		}
	})
}

// Of a function nobody knows what it can do.
func TestAFunctionAnswersForItself(t *testing.T) {
	c := newClient(t, Options{Commands: Builtin})
	a := c.want(200, "POST", c.box()+"/exec", map[string]any{"cmd": "no-such-command"})
	assert.Equal(t, 127.0, a.object(t)["result"].(map[string]any)["exit_code"], a.raw)
}

// A missing directory is no fault of the command.
func TestARealProcessNeedsItsDirectory(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no runner of real processes")
	}
	srv := NewServer(t)
	c := &client{t, srv, srv.APIKey()}
	box := c.box()
	a := c.want(400, "POST", box+"/processes", map[string]any{"cmd": "true", "cwd": srv.Workspace()})
	assert.JSONEq(t, `{"cwd":"no such directory"}`, string(a.Data))
	file := srv.Workspace()
	c.want(200, "PUT", filePathQuery(box, file), "a file")
	a = c.want(400, "POST", box+"/processes", map[string]any{"cmd": "true", "cwd": file})
	assert.JSONEq(t, `{"cwd":"no such directory"}`, string(a.Data))
	a = c.want(400, "POST", box+"/processes", map[string]any{"cmd": "/no/such"})
	assert.Contains(t, a.object(t), "cmd")
}

func TestBothRunnersSignalPauseAndDestroy(t *testing.T) {
	onBothRunners(t, func(t *testing.T, c *client) {
		box := c.box()
		killed := c.run(box, "sleep", "1000")
		c.want(200, "POST", killed+"/signal", `{"signal":"SIGTERM"}`)
		_, last, err := c.connect(killed + "/connect").rest()
		require.NoError(t, err)
		assert.Equal(t, map[string]any{"type": "exit", "signal": "SIGTERM"}, last)

		kept := c.run(box, "bash", "-c", "echo before; cat; echo after")
		feed := c.connect(kept + "/connect")
		event, err := feed.next()
		require.NoError(t, err)
		assert.Equal(t, "before\n", dataOf(t, event))
		c.want(202, "POST", box+"/pause", nil)
		_, last, err = feed.rest()
		require.NoError(t, err)
		assert.Nil(t, last)
		assert.Equal(t, "paused", c.state(box))
		assert.Equal(t, 409, c.input(kept, "x").code)
		c.want(202, "POST", box+"/resume", nil)
		c.want(200, "POST", kept+"/stdin/close", nil)
		out, last, err := c.connect(kept + "/connect?after=1").rest()
		require.NoError(t, err)
		assert.Equal(t, "after\n", out)
		assert.Equal(t, 0.0, last["exit_code"])

		doomed := c.run(box, "sleep", "1000")
		d := c.want(200, "DELETE", doomed+"?grace_ms=1000", nil).object(t)
		assert.Equal(t, true, d["tree_exited"])
		assert.Equal(t, "SIGTERM", d["signal"])

		c.run(box, "sleep", "1000")
		c.want(200, "DELETE", box, nil)
		assert.Equal(t, "destroyed", c.state(box))
		assert.Empty(t, c.srv.LeakReport())
	})
}

func TestADaemonDoesNotHoldUpARealExec(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no runner of real processes")
	}
	srv := NewServer(t)
	c := &client{t, srv, srv.APIKey()}
	box := c.box()
	a := c.want(200, "POST", box+"/exec", `{"cmd":"bash","args":["-c","sleep 1000 </dev/null >/dev/null 2>&1 & echo started"]}`)
	assert.Contains(t, a.raw, `"stdout":"started\n"`)
	require.Len(t, srv.Processes(idOf(box)), 1)
	assert.False(t, srv.Processes(idOf(box))[0].TreeExited)
}
