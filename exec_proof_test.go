package createos

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A router may lose a sandbox for a moment: one 404 to a termination proves
// nothing.
func TestExecDoesNotBelieveOneNotFoundToATermination(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.script(rKill, refuse(404)) // the process runs, the sandbox is there, the next request would find both
		res, err := m.exec(t.Context(), Command{Timeout: time.Second}, func(p *proc) { hello(p); p.sleep(time.Hour) })
		require.NoError(t, err)
		assert.True(t, res.TimedOut)
		defer func() { _, _ = m.only().kill(&http.Request{}) }()
		m.only().mu.Lock()
		defer m.only().mu.Unlock()
		assert.True(t, m.only().tree, "still runs, lease not poisoned: %v", m.d.Unconfirmed())
	})
}

// A tree that was last seen alive has not ended because its record is gone.
func TestExecDoesNotBelieveANotFoundOfATreeThatWasSeenAlive(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.script(rConnect, m.endAfter(3))
		m.always(rKill, refuse(404))
		_, err := m.exec(t.Context(), Command{EndTree: true}, func(p *proc) { hello(p); p.end(exitCode(0), false); <-p.killed })
		require.Positive(t, m.count(rWait), "which showed leader_exited, tree_exited:false")
		require.Positive(t, m.count(rKill))
		_, _ = m.only().kill(&http.Request{})
		assert.ErrorIs(t, err, ErrTerminationUnproven)
	})
}
