package createostest

import (
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var errBroken = errors.New("runner is broken")

// brokenRunner makes machines that fail in one way.
type brokenRunner struct {
	runner
	noMachine, noStart, noDestroy, noFiles bool
}

func (r *brokenRunner) newMachine(id string, env map[string]string) (machine, error) {
	if r.noMachine {
		return nil, errBroken
	}
	m, err := r.runner.newMachine(id, env)
	return &brokenMachine{m, r}, err
}

type brokenMachine struct {
	machine
	r *brokenRunner
}

func (m *brokenMachine) start(s spec) (process, error) {
	if m.r.noStart {
		return nil, errBroken
	}
	return m.machine.start(s)
}

func (m *brokenMachine) destroy() error {
	err := m.machine.destroy()
	if m.r.noDestroy {
		err = errBroken
	}
	return err
}

func (m *brokenMachine) put(path string, body io.Reader) (int64, error) {
	if m.r.noFiles {
		return 0, errBroken
	}
	return m.machine.put(path, body)
}

func (m *brokenMachine) open(path string) (io.ReadCloser, int64, error) {
	if m.r.noFiles {
		return nil, 0, errBroken
	}
	return m.machine.open(path)
}

func newBroken(t *testing.T) (*client, *brokenRunner, *listener) {
	t.Helper()
	said := &listener{TB: t}
	srv := NewServer(said, Options{InMemory: true})
	t.Cleanup(srv.Close)
	broken := &brokenRunner{runner: srv.runner}
	srv.runner = broken
	return &client{t, srv, srv.APIKey()}, broken, said
}

func TestAMachineThatCannotBeMadeFails(t *testing.T) {
	c, broken, said := newBroken(t)
	broken.noMachine = true
	a := c.want(500, "POST", "/v1/sandboxes", createBody())
	assert.Equal(t, "error", a.Status)
	assert.Equal(t, "internal error", a.Message)
	assert.Equal(t, StateFailed, c.srv.Sandboxes()[0].State)
	assert.Contains(t, said.text(), "error: createostest: a machine for sb-")
}

func TestACommandThatCannotBeStarted(t *testing.T) {
	c, broken, _ := newBroken(t)
	box := c.box()
	broken.noStart = true
	a := c.want(400, "POST", box+"/processes", `{"cmd":"x"}`)
	assert.JSONEq(t, `{"cmd":"runner is broken"}`, string(a.Data))
	result := c.want(200, "POST", box+"/exec", `{"cmd":"x"}`).object(t)["result"]
	assert.Equal(t, map[string]any{"stdout": "", "stderr": "", "exit_code": -1.0, "error": "exec: runner is broken"}, result)
	assert.Equal(t, "{\"error\":\"exec: runner is broken\"}\n", c.want(200, "POST", box+"/exec?stream=true", `{"cmd":"x"}`).raw)
	assert.Empty(t, c.srv.Processes(idOf(box)))
}

func TestFilesThatCannotBeReached(t *testing.T) {
	c, broken, _ := newBroken(t)
	box := c.box()
	broken.noFiles = true
	c.want(500, "PUT", filePathQuery(box, "/f"), "x")
	c.want(500, "GET", filePathQuery(box, "/f"), nil)
	_, err := c.srv.ReadFile(idOf(box), "/f")
	assert.ErrorIs(t, err, errBroken)
	assert.ErrorIs(t, c.srv.WriteFile(idOf(box), "/f", nil), errBroken)
}

func TestAMachineThatCannotBeDestroyedIsSeen(t *testing.T) {
	c, broken, said := newBroken(t)
	box := c.box()
	broken.noDestroy = true
	c.want(200, "DELETE", box, nil)
	assert.Equal(t, "error", c.state(box))
	assert.Len(t, c.srv.Leaks(), 1)
	assert.Contains(t, said.text(), "error: createostest: destroying sb-")
	broken.noDestroy = false
	c.want(200, "DELETE", box, nil)
	assert.Empty(t, c.srv.Leaks())
}

// A panic of ours must not pass for an injected fault.
func TestAPanicOfAHandlerFailsTheTest(t *testing.T) {
	c, _, said := newBroken(t)
	c.srv.Fail(Fault{Route: "GET /healthz", Before: func() { panic("bug") }})
	_, err := c.try("GET", "/healthz", nil)
	require.Error(t, err)
	assert.Contains(t, said.text(), "error: createostest: panic in GET /healthz: bug")
}

func TestAForkWithoutAForkerIsNotEmulated(t *testing.T) {
	c, _, _ := newBroken(t)
	box := c.box()
	c.want(202, "POST", box+"/pause", nil)
	c.want(http.StatusNotImplemented, "POST", box+"/fork", nil)
}

func TestOldRowsAreForgotten(t *testing.T) {
	srv := NewServer(t, Options{InMemory: true})
	for range maxRows + 5 {
		sb := &sandbox{id: "sb-" + lowerText(26), owner: "usr", state: StateCreating}
		srv.mu.Lock()
		srv.addLocked(sb)
		srv.setStateLocked(sb, StateDestroyed)
		srv.mu.Unlock()
	}
	assert.Len(t, srv.Sandboxes(), maxRows)
}
