package createostest

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// transitions is the table of what is legal in which state.
const transitions = `
state      get exec pause resume fork patch delete
creating   200 409  409   409    409  409   200
running    200 200  202   409    409  200   200
pausing    200 409  409   409    409  409   409
paused     200 409  409   202    200  200   200
resuming   200 409  409   409    409  409   409
forking    200 409  409   409    409  409   409
error      200 409  409   202    409  409   200
destroying 200 409  409   409    409  409   200
destroyed  200 409  409   409    409  409   200
failed     200 409  409   409    409  409   200
`

func TestTransitions(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(transitions), "\n")
	calls := strings.Fields(lines[0])[1:]
	requests := map[string]string{
		"get": "GET ", "exec": "POST /exec", "pause": "POST /pause", "resume": "POST /resume", "fork": "POST /fork",
		"patch": "PATCH ", "delete": "DELETE ",
	}
	for _, line := range lines[1:] {
		fields := strings.Fields(line)
		t.Run(fields[0], func(t *testing.T) {
			c := newClient(t, Options{})
			for i, call := range calls {
				box := c.box()
				if fields[0] != "running" {
					require.NoError(t, c.srv.SetState(idOf(box), State(fields[0])))
				}
				method, path, _ := strings.Cut(requests[call], " ")
				a := c.do(method, box+path, map[string]any{"cmd": "true"})
				assert.Equal(t, fields[i+1], strconv.Itoa(a.code), "%s: %s", call, a.raw)
			}
		})
	}
}

func TestTransitionsLeadWhereTheySay(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	pause := c.want(202, "POST", box+"/pause", nil)
	assert.Equal(t, "pausing", pause.object(t)["status"])
	assert.NotEmpty(t, pause.header.Get("X-Poll-After"))
	view := c.want(200, "GET", box, nil).object(t)
	assert.Equal(t, "paused", view["status"])
	assert.NotEmpty(t, view["paused_at"])
	assert.Equal(t, "resuming", c.want(202, "POST", box+"/resume", nil).object(t)["status"])
	view = c.want(200, "GET", box, nil).object(t)
	assert.Equal(t, "running", view["status"])
	assert.NotEmpty(t, view["last_resumed_at"])
	assert.Equal(t, "destroying", c.want(200, "DELETE", box, nil).object(t)["status"])
	view = c.want(200, "GET", box, nil).object(t)
	assert.Equal(t, "destroyed", view["status"])
	assert.NotEmpty(t, view["destroyed_at"])
	assert.Equal(t, "destroyed", c.want(200, "DELETE", box, nil).object(t)["status"])

	paused := c.box()
	c.want(202, "POST", paused+"/pause", nil)
	assert.Equal(t, "destroyed", c.want(200, "DELETE", paused, nil).object(t)["status"])
}

func TestConflictTexts(t *testing.T) {
	c := newClient(t, Options{})
	for _, tt := range []struct {
		state             State
		method, path, has string
	}{
		{StatePaused, "POST", "/pause", "sandbox is paused, expected running"},
		{StatePausing, "POST", "/pause", "sandbox is pausing"},
		{StatePausing, "POST", "/exec", "sandbox is pausing; resume first"},
		{StatePaused, "POST", "/exec", "sandbox is paused; resume it before accessing files"},
		{StatePaused, "GET", "/files?path=/a", "sandbox is paused; resume it before accessing files"},
		{StatePaused, "POST", "/processes", "sandbox is paused"},
		{StateResuming, "POST", "/resume", "sandbox is resuming"},
		{StateRunning, "POST", "/resume", "sandbox is running"},
		{StateRunning, "POST", "/fork", "sandbox is running, expected paused"},
	} {
		box := c.box()
		require.NoError(t, c.srv.SetState(idOf(box), tt.state))
		a := c.want(409, tt.method, box+tt.path, map[string]any{"cmd": "true"})
		assert.Equal(t, "fail", a.Status)
		assert.Contains(t, string(a.Data), tt.has)
	}
}

func TestTransitionSwitches(t *testing.T) {
	c := newClient(t, Options{PausePausedOK: true, ResumeRunningOK: true, DeleteInTransition: true})
	box := c.box()
	assert.Equal(t, "running", c.want(200, "POST", box+"/resume", nil).object(t)["status"])
	c.want(202, "POST", box+"/pause", nil)
	assert.Equal(t, "paused", c.want(200, "POST", box+"/pause", nil).object(t)["status"])
	for _, state := range []State{StatePausing, StateResuming, StateForking} {
		box := c.box()
		require.NoError(t, c.srv.SetState(idOf(box), state))
		c.want(200, "DELETE", box, nil)
		assert.Equal(t, "destroyed", c.state(box))
	}
}

func TestBehindTheBack(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	id := idOf(box)
	proc := c.run(box, "sleep", "1000")
	require.NoError(t, c.srv.Pause(id))
	assert.Equal(t, "paused", c.state(box))
	require.NoError(t, c.srv.Resume(id))
	c.want(200, "GET", proc, nil)
	require.Len(t, c.srv.Processes(id), 1)
	assert.False(t, c.srv.Processes(id)[0].LeaderExited)
	require.NoError(t, c.srv.Kill(id))
	assert.Equal(t, "destroyed", c.state(box))
	assert.Empty(t, c.srv.Processes(id))
	assert.Error(t, c.srv.SetState(id, StateRunning))

	other := c.box()
	require.NoError(t, c.srv.RemoveRow(idOf(other)))
	c.want(404, "GET", other, nil)
	assert.Error(t, c.srv.Pause(idOf(other)))
	assert.Empty(t, c.srv.Leaks())
}
