package createos

import (
	"context"

	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A sandbox that stays in transition does not hold an Exec for ever.
func TestExecDoesNotWaitForEverForASandboxToPause(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rSpawn, then(shows(statePausing), refuse(409)))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var over atomic.Bool
		wg.Go(func() {
			_, _ = m.exec(ctx, Command{Timeout: time.Minute}, hello)
			over.Store(true)
		})
		time.Sleep(24 * time.Hour)
		assert.True(t, over.Load(), "Exec with timeouts of 1 min and 5 min still waits after a day; %d reads", m.count(rGet))
		cancel()
		wg.Wait()
	})
}

// A resume that was sent is waited for, or it would land after a Release has
// paused.
func TestExecAwaitsAResumeThatItSent(t *testing.T) {
	synctestMachine(t, reusable, func(t *testing.T, m *machine) {
		m.script(rInput, then(shows(statePaused), refuse(409)))
		healthy := becomes(stateRunning, `{"id":"`+box+`","status":"resuming"}`)
		m.script(rResume, slowly(8*time.Second, healthy)) // the later ones are quick
		m.script(rKill, refuse(409))
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = m.exec(context.Background(), Command{}, hello) })
		time.Sleep(2 * time.Second)
		require.NoError(t, m.d.Release(t.Context(), m.env, m.lease))
		wg.Wait()
		require.Equal(t, statePaused, m.current())
		time.Sleep(time.Minute)
		assert.Equal(t, statePaused, m.current(), "released by pause, and runs: %v", m.requests())
		assert.Empty(t, m.d.Unconfirmed())
	})
}

// The row of a sandbox may show a pause a moment late.
func TestExecLooksAgainAtAConflictWithoutAPause(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		began := time.Now()
		m.script(rSpawn, repeat(3, refuse(409))...) // the pause is accepted, the row is a moment late
		m.script(rGet, view, view, view)
		res, err := m.exec(t.Context(), Command{}, hello)
		assert.NoError(t, err, "after %v: %v", time.Since(began), m.requests())
		assert.True(t, res.Success())
	})
}

// A sandbox that is paused again and again is not resumed without end.
func TestExecWakesASandboxThatFlapsWithPausesAndALimit(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rConnect, then(shows(statePaused), refuse(409)))
		_, err := m.exec(t.Context(), Command{Timeout: time.Minute}, func(p *proc) { p.sleep(time.Hour) })
		t.Log(err)
		assert.Less(t, m.count(rResume), 100, "resumes in one minute")
	})
}
