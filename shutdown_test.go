package createos

import (
	"context"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestShutdownRefusesNewWorkAndKeepsCleanup(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	env := testEnv(reusable)
	lease, other := p.acquire(d, env), p.acquire(d, env)
	require.NoError(t, d.Shutdown(t.Context()))
	p.requests()
	_, err := d.Acquire(t.Context(), env, AcquireOptions{})
	assert.ErrorIs(t, err, ErrShutdown)
	_, err = d.Resume(t.Context(), env, lease)
	assert.ErrorIs(t, err, ErrShutdown)
	_, err = d.Probe(t.Context(), env, AcquireOptions{})
	assert.ErrorIs(t, err, ErrShutdown)
	_, err = d.Exec(t.Context(), env, lease, Command{Name: "true"})
	assert.EqualError(t, err, "CreateOS lease is closing or requires cleanup.")
	assert.ErrorIs(t, err, ErrShutdown)
	assert.ErrorIs(t, err, ErrLeaseClosing)
	assert.Empty(t, p.requests(), "leases that the host holds are not touched")

	require.NoError(t, d.Release(t.Context(), env, lease))
	require.NoError(t, d.Destroy(t.Context(), env, other))
	require.NoError(t, d.RetryCleanup(t.Context()))
	require.NoError(t, d.Shutdown(t.Context()), "again")
}

// Shutdown while an acquire is at each of its steps: it is cancelled, rolled
// back, and nothing is left or what is left is listed.
func TestShutdownWhileAcquiring(t *testing.T) {
	for name, script := range map[string]func(p *provider){
		"whoami hangs":    func(p *provider) { p.script(rWhoami, hang) },
		"create hangs":    func(p *provider) { p.script(rCreate, hang) },
		"get hangs":       func(p *provider) { p.state = stateCreating; p.script(rGet, hang) },
		"get polls":       func(p *provider) { p.state = stateCreating },
		"workspace hangs": func(p *provider) { p.script(rExec, hang) },
		"marker hangs":    func(p *provider) { p.script(rPut, hang) },
		"rollback hangs":  func(p *provider) { p.script(rExec, refuse(400)); p.script(rDelete, hang) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				script(p)
				acquired := make(chan error)
				go func() {
					_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
					acquired <- err
				}()
				synctest.Wait()
				shut := make(chan error)
				for range 2 {
					go func() { shut <- d.Shutdown(t.Context()) }()
				}
				err := <-acquired
				require.Error(t, err)
				if name != "rollback hangs" {
					assert.ErrorIs(t, err, ErrShutdown)
				}
				for range 2 {
					if err := <-shut; err != nil {
						var left *UnconfirmedError
						require.ErrorAs(t, err, &left)
						require.Equal(t, "create hangs", name)
						assert.Equal(t, CreateUnknown, left.Entries[0].Kind)
					}
				}
				quietDriver(t, d)
				if name != "create hangs" {
					assert.Empty(t, d.Unconfirmed())
				}
			})
		})
	}
}

// Shutdown with less time than the rollback needs returns at its deadline and
// lists what is owed; a second one with more time finishes.
func TestShutdownIsBoundedByItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rExec, hang)
		p.script(rDelete, func(p *provider, req *http.Request) (*http.Response, error) {
			if err := sleep(req.Context(), 2*time.Second); err != nil {
				return nil, err
			}
			return ok(`{"id":"`+box+`","status":"destroyed"}`)(p, req)
		})
		acquired := make(chan error, 1)
		go func() {
			_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
			acquired <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		began := time.Now()
		err := d.Shutdown(ctx)
		assert.Equal(t, 500*time.Millisecond, time.Since(began))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var left *UnconfirmedError
		require.ErrorAs(t, err, &left)
		require.Len(t, left.Entries, 1)
		assert.Equal(t, Acquiring, left.Entries[0].Kind)
		assert.Equal(t, box, left.Entries[0].SandboxID)
		require.NoError(t, d.Shutdown(t.Context()))
		require.ErrorIs(t, <-acquired, ErrShutdown)
	})
}

func TestShutdownTriesOwedDestroysOnceMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		lease := p.acquire(d, testEnv())
		p.always(rDelete, refuse(500))
		require.Error(t, d.Destroy(t.Context(), testEnv(), lease))
		err := d.Shutdown(t.Context())
		var left *UnconfirmedError
		require.ErrorAs(t, err, &left)
		assert.Equal(t, 1, left.Entries[0].Attempts)
		p.heal()
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() { assert.NoError(t, d.Shutdown(t.Context())) })
		}
		all.Wait()
		assert.Equal(t, stateDestroyed, p.state)
	})
}

func TestProbeReports(t *testing.T) {
	for name, c := range map[string]struct {
		script  func(p *provider)
		failed  string
		cleanup bool
	}{
		"create refused":      {func(p *provider) { p.script(rCreate, refuse(402)) }, "acquire", false},
		"workspace fails":     {func(p *provider) { p.script(rExec, refuse(400)) }, "acquire", false},
		"rollback fails":      {func(p *provider) { p.script(rExec, refuse(400)); p.always(rDelete, refuse(403)) }, "acquire", true},
		"command not created": {func(p *provider) {}, "command", false}, // the mock has no route for it
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				c.script(p)
				res, err := d.Probe(t.Context(), testEnv(reusable), AcquireOptions{})
				require.NoError(t, err)
				assert.False(t, res.OK)
				require.Error(t, res.Err)
				assert.Contains(t, res.Summary, "The "+c.failed+" step failed")
				assert.NotContains(t, res.Summary, "canary")
				assert.Equal(t, c.cleanup, res.Cleanup != nil)
				if c.cleanup {
					assert.Contains(t, res.Summary, box)
					assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d))
				} else {
					assert.Empty(t, d.Unconfirmed())
				}
				quietDriver(t, d)
			})
		})
	}
}
