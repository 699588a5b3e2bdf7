package createos_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// On a provider whose create answers running: three requests for an Acquire
// and a whoami per key, one for a Destroy, two for a Release by pause; and no
// time passes.
func TestRequestsOfAHealthyCycle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{}, func(cfg *createos.DriverConfig) { cfg.Budget = createos.NewBudget(0) })
		r.env.Config.ReuseLease = true
		routes := func() []string {
			var all []string
			for _, q := range r.srv.Requests() {
				all = append(all, q.Route)
			}
			return all
		}
		began := time.Now()
		lease := r.acquire()
		require.Len(t, routes(), 4)
		require.NoError(t, r.driver.Release(t.Context(), r.env, lease))
		require.Len(t, routes(), 6)
		require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
		require.Len(t, routes(), 7)
		r.acquire()
		require.Len(t, routes(), 10)
		assert.Zero(t, time.Since(began))
		require.NoError(t, r.driver.Shutdown(t.Context()))
	})
}

// 400 requests fired at once never exceed the figure of the budget in any 60 s,
// and a destroy behind them is sent with no time passing.
func TestBudgetHoldsAndCleanupOvertakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{RateLimit: 300}, func(cfg *createos.DriverConfig) { cfg.Budget = createos.NewBudget(0) })
		lease := r.acquire()
		client, err := r.driver.Client(r.env)
		require.NoError(t, err)
		done := make(chan error, 400)
		for range 400 {
			go func() {
				_, err := client.Sandbox(t.Context(), lease.ProviderLeaseID)
				done <- err
			}()
		}
		synctest.Wait()
		began := time.Now()
		require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
		assert.Zero(t, time.Since(began))
		for range 400 {
			require.NoError(t, <-done)
		}
		assert.Greater(t, time.Since(began), 30*time.Second, "400 do not fit into a minute")
		var arrivals []time.Time
		for _, q := range r.srv.Requests() {
			arrivals = append(arrivals, q.Arrived)
			require.NotEqual(t, 429, q.Status)
		}
		slices.SortFunc(arrivals, time.Time.Compare)
		worst := 0
		for i, from := range arrivals {
			n := 0
			for _, at := range arrivals[i:] {
				if at.Sub(from) <= time.Minute {
					n++
				}
			}
			worst = max(worst, n)
		}
		assert.LessOrEqual(t, worst, 280)
		assert.Greater(t, worst, 200, "the window is used")
	})
}

// What is queued and cancelled has sent nothing, and the rest keeps its turn.
func TestQueuedAcquireThatIsCancelledSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{}, func(cfg *createos.DriverConfig) { cfg.Budget = createos.NewBudget(10) })
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		errs := make(chan error, 20)
		for range 20 {
			go func() {
				_, err := r.driver.Acquire(ctx, r.env, r.options())
				errs <- err
			}()
		}
		for range 20 {
			if err := <-errs; err != nil {
				assert.True(t, errors.Is(err, context.DeadlineExceeded), strings.TrimSpace(err.Error()))
			}
		}
		assert.LessOrEqual(t, len(r.srv.Requests()), 10+1)
	})
}
