package createos_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// crowd lets one environment wait for so many sandboxes that never get to run,
// until the context ends.
func crowd(ctx context.Context, r *rig, n int) (all *sync.WaitGroup) {
	r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes", Times: n, StuckState: createostest.StateCreating})
	all = new(sync.WaitGroup)
	for range n {
		all.Go(func() {
			_, err := r.driver.Acquire(ctx, r.env, r.options())
			assert.ErrorIs(r.t, err, context.Canceled)
		})
	}
	return all
}

// Fifty acquires of one tenant that poll for ever delay what another tenant
// does, under the budget that both share, by a bounded time, and do not delay
// the end of a command or a destroy at all.
func TestACrowdStarvesNeitherOthersNorCleanup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{Commands: work, RateLimit: 300}, func(cfg *createos.DriverConfig) { cfg.Budget = createos.NewBudget(0) })
		other := r.env
		other.CompanyID = "small"
		lease, err := r.driver.Acquire(t.Context(), other, r.options())
		require.NoError(t, err)
		r.env.Config.Timeout = time.Hour
		ctx, cancel := context.WithCancel(t.Context())
		all := crowd(ctx, r, 50)
		time.Sleep(3 * time.Minute) // the window is full now

		began := time.Now()
		res, err := r.driver.Exec(t.Context(), other, lease, createos.Command{Name: "true"})
		require.NoError(t, err)
		require.True(t, res.Success())
		took := time.Since(began)
		assert.Less(t, took, time.Minute, "three requests behind fifty that poll")

		res, err = r.driver.Exec(t.Context(), other, lease, createos.Command{Name: "work", Timeout: time.Second})
		require.NoError(t, err)
		require.True(t, res.TimedOut)
		assert.InDelta(t, time.Second, res.Duration, float64(3*time.Second), "the end of a command overtakes polls")

		began = time.Now()
		require.NoError(t, r.driver.Destroy(t.Context(), other, lease))
		assert.Less(t, time.Since(began), time.Second)
		for _, q := range r.srv.Requests() {
			require.NotEqual(t, 429, q.Status)
		}
		cancel()
		all.Wait()
		r.settle()
	})
}

// An Exec whose caller leaves while it waits for the budget has sent nothing, and
// the lease is as good as before.
func TestExecThatLeavesTheQueueSentNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{}, func(cfg *createos.DriverConfig) { cfg.Budget = createos.NewBudget(40) })
		lease := r.acquire()
		client, err := r.driver.Client(r.env)
		require.NoError(t, err)
		var busy sync.WaitGroup
		for range 40 {
			busy.Go(func() { _, _ = client.Sandbox(t.Context(), lease.ProviderLeaseID) })
		}
		synctest.Wait()
		r.srv.ForgetRequests()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err = r.driver.Exec(ctx, r.env, lease, createos.Command{Name: "true"})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		for _, q := range r.srv.Requests() {
			assert.NotContains(t, q.Route, "processes")
		}
		assert.Empty(t, r.driver.Unconfirmed())
		busy.Wait()
		_, err = r.driver.Exec(t.Context(), r.env, lease, createos.Command{Name: "true"})
		require.NoError(t, err)
		r.settle(lease)
	})
}

// Forty-five acquires meet a control plane that answers 503 for a while: each
// sends one create, and what may have come of it is settled by looking.
func TestManyAcquiresThroughAnOutage(t *testing.T) {
	for _, effect := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{RateLimit: 300}, func(cfg *createos.DriverConfig) { cfg.Budget = createos.NewBudget(0) })
			began := time.Now()
			r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes", Status: 503, Effect: effect, When: func(createostest.Request) bool {
				return time.Since(began) < 5*time.Second
			}})
			var mu sync.Mutex
			var leases []*createos.Lease
			var all sync.WaitGroup
			var unknown atomic.Int32
			for range 45 {
				all.Go(func() {
					lease, err := r.driver.Acquire(t.Context(), r.env, r.options())
					if err != nil {
						assert.ErrorAs(t, err, new(*createos.CreateUnknownError))
						unknown.Add(1)
						return
					}
					mu.Lock()
					defer mu.Unlock()
					leases = append(leases, lease)
				})
			}
			all.Wait()
			creates := 0
			for _, q := range r.srv.Requests() {
				if q.Route == "POST /v1/sandboxes" {
					creates++
				}
			}
			assert.Equal(t, 45, creates, "none is repeated")
			assert.Equal(t, 45, len(leases)+int(unknown.Load()))
			if effect {
				assert.Zero(t, unknown.Load(), "what was made is found")
			}
			r.balance(leases...)
			r.settle(leases...)
		})
	}
}

// The control plane says running before the agent in the sandbox is up.
func TestAgentThatComesUpLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/exec", Status: 503, Nth: 1, Times: 3})
		lease := r.acquire()
		require.Len(t, r.srv.Sandboxes(), 1)
		r.settle(lease)
	})
}
