package createos_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A probe that goes wrong in any way destroys its sandbox once; if that is not
// proven, the result says so in addition, and it is listed.
func TestProbeLeavesNoSandboxBehind(t *testing.T) {
	const processes = "/v1/sandboxes/{id}/processes"
	for name, c := range map[string]struct {
		fault    createostest.Fault
		commands func(context.Context, *createostest.Command) int
		ok       bool
		step     string
		owed     bool
	}{
		"healthy":               {ok: true},
		"process not created":   {fault: createostest.Fault{Route: "POST " + processes, Status: 500}, step: "command"},
		"exits with 7":          {commands: func(_ context.Context, c *createostest.Command) int { return 7 }, step: "command"},
		"never ends":            {commands: func(ctx context.Context, _ *createostest.Command) int { <-ctx.Done(); return 1 }, step: "command"},
		"prints something else": {commands: func(_ context.Context, c *createostest.Command) int { fmt.Fprint(c.Stdout, "x"); return 0 }, step: "command"},
		"destroy fails":         {fault: createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 500}, ok: true, owed: true},
		"setup fails":           {fault: createostest.Fault{Route: "PUT /v1/sandboxes/{id}/files", Status: 413}, step: "acquire"},
		"cold start":            {fault: createostest.Fault{Route: "POST /v1/sandboxes", Delay: 45 * time.Second}, ok: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				commands := c.commands
				if commands != nil {
					commands = func(ctx context.Context, cmd *createostest.Command) int {
						if cmd.Name != "printf" {
							return createostest.Builtin(ctx, cmd)
						}
						return c.commands(ctx, cmd)
					}
				}
				r := newRig(t, createostest.Options{Commands: commands})
				r.env.Config.ReuseLease = true
				if c.fault.Route != "" {
					r.srv.Fail(c.fault)
				}
				res, err := r.driver.Probe(t.Context(), r.env, r.options())
				require.NoError(t, err)
				assert.Equal(t, c.ok, res.OK, res.Summary)
				assert.Equal(t, c.ok, res.Err == nil)
				assert.Equal(t, c.owed, res.Cleanup != nil)
				for _, s := range res.Steps {
					assert.Equal(t, s.Name != c.step && (s.Name != "destroy" || !c.owed), s.OK, s.Name)
				}
				if c.owed {
					assert.Equal(t, createos.DestroyOwed, r.driver.Unconfirmed()[0].Kind)
					assert.Contains(t, res.Summary, res.SandboxID)
				}
				r.balance()
				r.settle()
			})
		})
	}
}

// The caller gives up at a random moment, 200 times over.
func TestAcquireCancelledAtRandom(t *testing.T) {
	for i := range uint64(200) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(i, 7))
			r := newRig(t, createostest.Options{BootDelay: time.Duration(rng.IntN(300)) * time.Millisecond, CreatingPolls: rng.IntN(3)})
			for _, route := range []string{"POST /v1/sandboxes", "GET /v1/sandboxes/{id}", "POST /v1/sandboxes/{id}/exec", "PUT /v1/sandboxes/{id}/files"} {
				r.srv.Fail(createostest.Fault{Route: route, Delay: time.Duration(rng.IntN(200)) * time.Millisecond, DelayReply: time.Duration(rng.IntN(200)) * time.Millisecond})
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(1500))*time.Millisecond)
			defer cancel()
			lease, err := r.driver.Acquire(ctx, r.env, r.options())
			require.NotEqual(t, lease == nil, err == nil)
			r.balance(lease)
			assert.Empty(t, r.driver.Unconfirmed())
			r.settle(lease)
		})
	}
}

// After a failed acquire the next one gets a sandbox of its own.
func TestAcquireAgainAfterRollback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		r.srv.Fail(createostest.Fault{Route: "PUT /v1/sandboxes/{id}/files", Nth: 1, Status: 507})
		_, err := r.driver.Acquire(t.Context(), r.env, r.options())
		require.Error(t, err)
		lease := r.acquire()
		boxes := r.srv.Sandboxes()
		require.Len(t, boxes, 2)
		r.balance(lease)
		require.Len(t, r.srv.Leaks(), 1)
		r.settle(lease)
	})
}

// The sandbox was destroyed behind the driver's back.
func TestSandboxGoneBehindTheBack(t *testing.T) {
	for _, forget := range []bool{false, true} {
		t.Run(fmt.Sprintf("row forgotten %v", forget), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, createostest.Options{ForgetDestroyed: forget})
				r.env.Config.ReuseLease = true
				lost := func() *createos.Lease {
					lease := r.acquire()
					require.NoError(t, r.srv.Kill(lease.ProviderLeaseID))
					return lease
				}
				require.NoError(t, r.driver.Destroy(t.Context(), r.env, lost()))
				require.NoError(t, r.driver.Release(t.Context(), r.env, lost()))
				_, err := r.driver.Resume(t.Context(), r.env, lost())
				var expired *createos.ExpiredError
				require.ErrorAs(t, err, &expired)
				assert.Equal(t, createos.ExpiredSandboxGone, expired.Reason)
				assert.Equal(t, createos.RemainsGone, expired.Remains)
				_, err = r.driver.Exec(t.Context(), r.env, lost(), createos.Command{Name: "true"})
				require.Error(t, err)
				if forget {
					assert.ErrorIs(t, err, createos.ErrLeaseGone)
				}
				assert.Empty(t, r.driver.Unconfirmed())
			})
		})
	}
}

// A destroy that is refused while the sandbox never leaves a transition ends as
// an entry, and other leases go on.
func TestStuckSandboxDoesNotBlockOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		stuck, other := r.acquire(), r.acquire()
		require.NoError(t, r.srv.SetState(stuck.ProviderLeaseID, "resuming"))
		began := time.Now()
		err := r.driver.Destroy(t.Context(), r.env, stuck)
		var owed *createos.CleanupError
		require.ErrorAs(t, err, &owed)
		var state *createos.StateError
		require.ErrorAs(t, err, &state)
		assert.Equal(t, "resuming", state.Last)
		assert.LessOrEqual(t, time.Since(began), 6*time.Minute)
		res, err := r.driver.Exec(t.Context(), r.env, other, createos.Command{Name: "true"})
		require.NoError(t, err)
		require.NoError(t, res.Err())
		r.balance(other)
		require.NoError(t, r.srv.SetState(stuck.ProviderLeaseID, "running"))
		r.settle(other)
	})
}

// Many goroutines release one lease, half by pause and half by destroy: one of
// them does it, the losers are told, and a later one finds nothing to do.
func TestConcurrentReleases(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{})
			r.env.Config.ReuseLease = true
			lease := r.acquire()
			var all sync.WaitGroup
			var mu sync.Mutex
			destroyed, paused := 0, 0
			for i := range 32 {
				all.Go(func() {
					do, n := r.driver.Release, &paused
					if i%2 == 0 {
						do, n = r.driver.Destroy, &destroyed
					}
					switch err := do(t.Context(), r.env, lease); {
					case err == nil:
						mu.Lock()
						*n++
						mu.Unlock()
					case !errors.Is(err, createos.ErrCleanupInProgress):
						t.Errorf("%v", err)
					}
				})
			}
			all.Wait()
			assert.Positive(t, destroyed+paused)
			if destroyed > 0 {
				assert.Empty(t, r.srv.Leaks())
			}
			assert.Empty(t, r.driver.Unconfirmed())
			require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
			require.NoError(t, r.driver.Release(t.Context(), r.env, lease))
			r.settle(lease)
		})
	}
}

// A Release is not starved by somebody who keeps running instant commands.
func TestReleaseIsNotStarved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		lease := r.acquire()
		stopped := make(chan error)
		go func() {
			for {
				if _, err := r.driver.Exec(t.Context(), r.env, lease, createos.Command{Name: "true"}); err != nil {
					stopped <- err
					return
				}
				time.Sleep(time.Millisecond)
			}
		}()
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
		err := <-stopped
		assert.True(t, errors.Is(err, createos.ErrLeaseClosing) || errors.Is(err, createos.ErrUnjudged) || errors.Is(err, createos.ErrLeaseGone) ||
			errors.Is(err, createos.ErrConflict), "%v", err)
		assert.Empty(t, r.driver.Unconfirmed())
		r.settle()
	})
}

// A 404 in the middle of a transition that is not confirmed is no loss.
func TestStray404InATransition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{PauseDelay: 3 * time.Second, ResumeDelay: 3 * time.Second})
		r.env.Config.ReuseLease = true
		lease := r.acquire()
		r.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes/{id}", Nth: 1, Status: 404})
		require.NoError(t, r.driver.Release(t.Context(), r.env, lease))
		r.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes/{id}", Nth: 3, Status: 404})
		_, err := r.driver.Resume(t.Context(), r.env, lease)
		require.NoError(t, err)
		r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/pause", Nth: 1, Status: 404})
		require.NoError(t, r.driver.Release(t.Context(), r.env, lease))
		r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/resume", Nth: 1, Status: 404})
		_, err = r.driver.Resume(t.Context(), r.env, lease)
		require.NoError(t, err)
		r.settle(lease)
	})
}

// Sixty acquires under a tight budget, each with little time: those that do not
// get their turn in time say so and leave nothing.
func TestAcquiresThatQueueTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{}, func(cfg *createos.DriverConfig) { cfg.Budget = createos.NewBudget(60) })
		r.env.Config.Timeout = 30 * time.Second
		var mu sync.Mutex
		var leases []*createos.Lease
		failed := 0
		var all sync.WaitGroup
		for range 60 {
			all.Go(func() {
				lease, err := r.driver.Acquire(t.Context(), r.env, r.options())
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					leases = append(leases, lease)
					return
				}
				failed++
				assert.ErrorIs(t, err, createos.ErrTimeout)
			})
		}
		all.Wait()
		assert.Positive(t, failed)
		r.balance(leases...)
		r.settle(leases...)
	})
}

// Entries of every kind that a driver can make are retried without the
// configuration they came from.
func TestEveryKindOfEntryIsReachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{Commands: work})
		r.env.Config.ReuseLease = true
		// destroy owed, pause owed, process unproven, create unknown
		destroy, pause, process := r.acquire(), r.acquire(), r.acquire()
		r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 403})
		require.Error(t, r.driver.Destroy(t.Context(), r.env, destroy))
		r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/pause", Status: 403})
		require.Error(t, r.driver.Release(t.Context(), r.env, pause))
		r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}/processes/{process}", Status: 403})
		_, err := r.driver.Exec(t.Context(), r.env, process, createos.Command{Name: "work", Timeout: time.Second})
		require.ErrorIs(t, err, createos.ErrTerminationUnproven)
		r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes", DropReply: true})
		r.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes", Status: 403})
		_, err = r.driver.Acquire(t.Context(), r.env, r.options())
		require.ErrorAs(t, err, new(*createos.CreateUnknownError))

		kinds := map[createos.DebtKind]int{}
		for _, u := range r.driver.Unconfirmed() {
			kinds[u.Kind]++
			assert.NotEmpty(t, u.Cause)
			assert.Equal(t, "acme", u.CompanyID)
		}
		assert.Equal(t, map[createos.DebtKind]int{
			createos.DestroyOwed: 1, createos.PauseOwed: 1, createos.ProcessUnproven: 1, createos.CreateUnknown: 1,
		}, kinds)
		require.ErrorIs(t, r.driver.Release(t.Context(), r.env, process), createos.ErrPoisoned)

		// A new driver, with nothing but the entries and a key.
		next := r.cfg
		next.Unconfirmed = r.driver.Unconfirmed()
		r.srv.ClearFaults()
		r.driver, err = createos.NewDriver(next)
		require.NoError(t, err)
		env := r.env
		env.Config = createos.Config{APIURL: r.env.Config.APIURL, APIKey: r.env.Config.APIKey}
		err = r.driver.RetryCleanup(t.Context(), env)
		var left *createos.UnconfirmedError
		require.ErrorAs(t, err, &left)
		require.Len(t, left.Entries, 1)
		assert.Equal(t, createos.ProcessUnproven, left.Entries[0].Kind)
		assert.Contains(t, left.Entries[0].Note, "terminated with proof")
		assert.Zero(t, r.alive(process.ProviderLeaseID))
		_, err = r.driver.Exec(t.Context(), r.env, process, createos.Command{Name: "true"})
		require.ErrorIs(t, err, createos.ErrLeaseClosing, "proof that comes later does not cure")
		require.NoError(t, r.driver.Destroy(t.Context(), r.env, process))
		r.settle(pause)
	})
}

// A provider that keeps the output connection of a paused sandbox open, with
// heartbeats for ever: the command is found paused, woken, and followed on.
func TestPausedBehindAnOpenStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{Commands: work})
		lease := r.acquire()
		beats := func(n int, line []byte) []byte {
			if n > 3 {
				return []byte(`{"type":"heartbeat"}` + "\n")
			}
			return line
		}
		r.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes/{id}/processes/{process}/connect", Nth: 1, Frames: beats})
		r.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes/{id}/processes/{process}/wait", Nth: 1, Status: 409})
		res, err := r.driver.Exec(t.Context(), r.env, lease, createos.Command{Name: "work", EndTree: true})
		require.NoError(t, err)
		require.NoError(t, res.Err())
		assert.Equal(t, 60, strings.Count(string(res.Stdout), "line "))
		r.settle(lease)
	})
}

// The id in the reply to a create was garbled, and so was the reply to the
// destroy of what has that id: that nothing of it exists says nothing about the
// sandbox.
func TestGarbledIDAndGarbledDestroy(t *testing.T) {
	for _, status := range []int{200, 409} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{})
			r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes", Nth: 1, WrongID: true})
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Nth: 1, Status: status, Body: `{"status":"fail"}`})
			_, err := r.driver.Acquire(t.Context(), r.env, r.options())
			require.Error(t, err)
			r.balance()
			r.settle()
		})
	}
}

// A driver that never saw the sandbox, as after a restart, believes a lone 404 no
// more than another does.
func TestAbsenceTakesTwoLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		lease := r.acquire()
		fresh, err := createos.NewDriver(r.cfg)
		require.NoError(t, err)
		r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Times: 1, Status: 404, Body: `{"status":"fail","data":"not found"}`})
		require.ErrorIs(t, fresh.Destroy(t.Context(), r.env, lease), createos.ErrUnjudged)
		require.Len(t, fresh.Unconfirmed(), 1)
		require.NoError(t, fresh.RetryCleanup(t.Context(), r.env))
		require.Empty(t, r.srv.Leaks())
	})
}
