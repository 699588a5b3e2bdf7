package createos

import (
	"context"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A writer that blocks does not keep a Release from pausing.
func TestReleasePausesWhileAWriterBlocks(t *testing.T) {
	synctestMachine(t, reusable, func(t *testing.T, m *machine) {
		release := make(chan struct{})
		stuck := writerFunc(func(p []byte) (int, error) { <-release; return len(p), nil })
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = m.exec(context.Background(), Command{Stdout: stuck}, func(p *proc) { hello(p); p.sleep(time.Hour) })
		})
		time.Sleep(time.Second)
		err := m.d.Release(t.Context(), m.env, m.lease)
		assert.NoError(t, err)
		assert.Equal(t, statePaused, m.current())
		wg.Wait()
		close(release)
		m.heal()
	})
}

// The exit is known when ctx ends.
func TestExecReportsAKnownExitNextToTheEndOfItsContext(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		release := make(chan struct{})
		stuck := writerFunc(func(p []byte) (int, error) { <-release; return len(p), nil })
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		res, err := m.exec(ctx, Command{Stdout: stuck, Timeout: 2 * time.Second}, func(p *proc) { hello(p); p.end(exitCode(3), true) })
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Positive(t, m.count(rProcess), "the exit was asked for and seen")
		assert.Equal(t, 3, res.ExitCode, "next to an error it is set if the command is known to have exited")
		close(release)
	})
}

// A command has succeeded even if it is not proven that what it left behind has
// ended.
func TestExecSucceedsNextToAnErrorAboutWhatItLeft(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rKill, refuse(403))
		res, err := m.exec(t.Context(), Command{EndTree: true}, hello)
		require.ErrorIs(t, err, ErrTerminationUnproven)
		assert.True(t, res.Success())
		_, _ = m.only().kill(&http.Request{})
	})
}

// All of the output was received and handed to the writer, which has not come
// to an end with the last of it.
func TestExecSucceedsWhileAWriterHoldsTheLastOutput(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		release := make(chan struct{})
		stuck := writerFunc(func(p []byte) (int, error) { <-release; return len(p), nil })
		res, err := m.exec(t.Context(), Command{Stdout: stuck, Timeout: time.Minute}, func(p *proc) { p.out("stdout", "last") })
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Equal(t, "last", string(res.Stdout))
		assert.Zero(t, m.count(rKill))
		close(release)
	})
}
