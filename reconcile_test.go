package createos_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// verdicts maps the sandboxes of a reconciliation to what they were found to be.
func verdicts(r *createos.Reconciliation) map[string]createos.Verdict {
	all := make(map[string]createos.Verdict)
	for _, f := range r.Found {
		all[f.SandboxID] = f.Verdict
	}
	return all
}

// Five sandboxes of which a restarted host knows two: the others are reported,
// and destroyed only when that is asked for. What belongs to another
// environment, deployment or program is not touched.
func TestReconcileFindsWhatNobodyKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		r.env.Config.ReuseLease = true
		kept, paused, lost, lost2 := r.acquire(), r.acquire(), r.acquire(), r.acquire()
		require.NoError(t, r.driver.Release(t.Context(), r.env, paused))
		other := r.env
		other.EnvironmentID = "other"
		foreign, err := r.driver.Acquire(t.Context(), other, r.options())
		require.NoError(t, err)
		elsewhere := r.cfg
		elsewhere.Deployment = "another"
		neighbour, err := createos.NewDriver(elsewhere)
		require.NoError(t, err)
		_, err = neighbour.Acquire(t.Context(), r.env, r.options())
		require.NoError(t, err)

		time.Sleep(createos.DefaultReconcileGrace)
		young := r.acquire()
		fresh, err := createos.NewDriver(r.cfg)
		require.NoError(t, err)
		known := []*createos.Lease{kept, paused, foreign}
		plan, err := fresh.Reconcile(t.Context(), r.env, known, createos.ReconcileOptions{})
		require.NoError(t, err)
		assert.Equal(t, map[string]createos.Verdict{
			kept.ProviderLeaseID: createos.VerdictKnown, paused.ProviderLeaseID: createos.VerdictKnown,
			lost.ProviderLeaseID: createos.VerdictStray, lost2.ProviderLeaseID: createos.VerdictStray,
			young.ProviderLeaseID: createos.VerdictYoung,
		}, verdicts(plan))
		assert.Equal(t, 2, plan.Others)
		assert.Len(t, plan.Strays(), 2)
		for _, f := range plan.Found {
			assert.NotEmpty(t, f.Reason)
		}
		require.Len(t, r.srv.Leaks(), 7, "a plan destroys nothing")

		done, err := fresh.Reconcile(t.Context(), r.env, known, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictDestroyed, verdicts(done)[lost.ProviderLeaseID])
		assert.Equal(t, createos.VerdictDestroyed, verdicts(done)[lost2.ProviderLeaseID])
		assert.Len(t, r.srv.Leaks(), 5)
		assert.Empty(t, fresh.Unconfirmed())
	})
}

// A list that cannot be read whole destroys nothing, nor does one that
// under-reports.
func TestReconcileNeedsTheWholeList(t *testing.T) {
	for name, fault := range map[string]createostest.Fault{
		"500": {Status: 500}, "429": {Status: 429}, "garbage": {Garbage: true}, "cut": {CutAfterBytes: 40},
		"empty":          {Body: `{"status":"success","data":{}}`},
		"no pagination":  {Body: `{"status":"success","data":{"data":[]}}`},
		"total larger":   {Body: `{"status":"success","data":{"data":[],"pagination":{"total":3,"limit":500,"offset":0,"count":0}}}`},
		"row without id": {Body: `{"status":"success","data":{"data":[{"status":"running"}],"pagination":{"total":1,"limit":500,"offset":0,"count":1}}}`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, createostest.Options{})
				r.acquire()
				time.Sleep(time.Hour)
				fault.Route = "GET /v1/sandboxes"
				r.srv.Fail(fault)
				out, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
				require.Error(t, err)
				assert.Nil(t, out)
				assert.Len(t, r.srv.Leaks(), 1)
			})
		})
	}
}

func TestReconcileReadsAllPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		for range 501 {
			r.acquire()
		}
		time.Sleep(time.Hour)
		r.srv.ForgetRequests()
		plan, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{})
		require.NoError(t, err)
		assert.Len(t, plan.Strays(), 501)
		assert.Len(t, r.srv.Requests(), 2)
	})
}

// Two drivers on one account: what one is in the middle of creating is not the
// other's to touch, and what this one is at work on is spared.
func TestReconcileSparesWhatIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{CreatingPolls: 1 << 20})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := r.driver.Acquire(ctx, r.env, r.options())
			done <- err
		}()
		time.Sleep(time.Minute)
		plan, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true, Grace: time.Second})
		require.NoError(t, err)
		require.Len(t, plan.Found, 1)
		assert.Equal(t, createos.VerdictInFlight, plan.Found[0].Verdict)

		other, err := createos.NewDriver(r.cfg)
		require.NoError(t, err)
		plan, err = other.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictYoung, plan.Found[0].Verdict)
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
	})
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		lease := r.acquire()
		r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 403})
		require.Error(t, r.driver.Destroy(t.Context(), r.env, lease))
		time.Sleep(time.Hour)
		plan, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictListed, plan.Found[0].Verdict)
	})
}

// A look-alike is never touched: the owner mark alone, several lease keys, or a
// name that is not ours.
func TestReconcileLeavesAloneWhatIsNotProvablyOurs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		lease := r.acquire()
		var owner string
		for _, box := range r.srv.Sandboxes() {
			for _, name := range box.EnvNames {
				if len(name) > 15 && name[:15] == "CREATEOS_OWNER_" {
					owner = name
				}
			}
		}
		require.NotEmpty(t, owner)
		for i, envs := range []string{
			`"` + owner + `":"1"`,
			`"` + owner + `":"1","CREATEOS_LEASE_a":"1","CREATEOS_LEASE_b":"1"`,
			`"` + owner + `":"1","CREATEOS_LEASE_c":"1"`,
		} {
			r.post(t, "/v1/sandboxes", fmt.Sprintf(`{"shape":"s-1vcpu-256mb","name":"look-alike-%d","envs":{%s}}`, i, envs))
		}
		time.Sleep(time.Hour)
		plan, err := r.driver.Reconcile(t.Context(), r.env, []*createos.Lease{lease}, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		require.Len(t, plan.Found, 4)
		assert.Empty(t, plan.Strays())
		assert.Len(t, r.srv.Leaks(), 4)
	})
}

// A destroy of a stray that is not proven is owed, and does not end the rest.
func TestReconcileOwesWhatItCannotProve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		first := r.acquire()
		time.Sleep(time.Second)
		second := r.acquire()
		time.Sleep(time.Hour)
		r.srv.Fail(createostest.Fault{Route: "/v1/sandboxes/" + first.ProviderLeaseID, Method: "DELETE", Status: 403})
		out, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
		var left *createos.UnconfirmedError
		require.ErrorAs(t, err, &left)
		require.Len(t, left.Entries, 1)
		assert.Equal(t, first.ProviderLeaseID, left.Entries[0].SandboxID)
		assert.Equal(t, createos.VerdictOwed, verdicts(out)[first.ProviderLeaseID])
		assert.Equal(t, createos.VerdictDestroyed, verdicts(out)[second.ProviderLeaseID])
		r.settle()
	})
}

// To the key of another account every sandbox is absent. What was listed to one key is
// not proven gone by what another is told, here and in the process that comes after.
func TestReconcileKnowsWhoseItsStraysAre(t *testing.T) {
	for name, told := range map[string]bool{"account is told": true, "account is not told": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, createostest.Options{})
				lease := r.acquire()
				time.Sleep(time.Hour)
				d, err := createos.NewDriver(r.srv.DriverConfig()) // of a host that lost its leases
				require.NoError(t, err)
				if !told {
					r.srv.Fail(createostest.Fault{Route: "GET /v1/whoami", Status: 403})
				}
				refused := r.srv.Fail(createostest.Fault{Method: "DELETE", Status: 503})
				_, err = d.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
				require.Error(t, err)
				refused.Remove()
				owed := d.Unconfirmed()
				require.Len(t, owed, 1)
				require.Equal(t, told, owed[0].AccountID != "")

				other := r.env
				other.Config.APIKey = createos.NewSecret(r.srv.AddKey("usr_other"))
				require.Error(t, d.RetryCleanup(t.Context(), other))
				require.Len(t, d.Unconfirmed(), 1)
				if told {
					cfg := r.srv.DriverConfig()
					cfg.Unconfirmed = owed
					next, err := createos.NewDriver(cfg)
					require.NoError(t, err)
					require.Error(t, next.RetryCleanup(t.Context(), other))
					require.Len(t, next.Unconfirmed(), 1)
				}
				require.NoError(t, d.RetryCleanup(t.Context(), r.env))
				require.Equal(t, createostest.StateDestroyed, r.srv.Sandboxes()[0].State, lease.ProviderLeaseID)
			})
		})
	}
}

// A call that begins after the survey is not destroyed under its feet.
func TestReconcileSparesWhatBeginsMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, end := make(chan struct{}), make(chan struct{})
		r := newRig(t, createostest.Options{Commands: func(ctx context.Context, c *createostest.Command) int {
			if c.Name == "wait" {
				close(began)
				<-end
			}
			return 0
		}})
		first := r.acquire()
		time.Sleep(time.Second)
		second := r.acquire()
		time.Sleep(time.Hour)
		done := make(chan error, 1)
		r.srv.Fail(createostest.Fault{Route: "/v1/sandboxes/" + first.ProviderLeaseID, Method: "DELETE", Nth: 1, Before: func() {
			go func() {
				_, err := r.driver.Exec(t.Context(), r.env, second, createos.Command{Name: "wait"})
				done <- err
			}()
			<-began
		}})
		out, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictDestroyed, verdicts(out)[first.ProviderLeaseID])
		assert.Equal(t, createos.VerdictInFlight, verdicts(out)[second.ProviderLeaseID])
		close(end)
		require.NoError(t, <-done)
		require.NoError(t, r.driver.Destroy(t.Context(), r.env, second))
	})
}

// A lease that the host holds spares its sandbox whatever else of its record is
// damaged; one that names nothing stops everything.
func TestReconcileSparesWhatADamagedLeaseNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		byID, byKey := r.acquire(), r.acquire()
		time.Sleep(time.Hour)
		known := []*createos.Lease{
			{ProviderLeaseID: byID.ProviderLeaseID},
			{Metadata: createos.Metadata{LeaseKey: byKey.Metadata.LeaseKey}},
		}
		out, err := r.driver.Reconcile(t.Context(), r.env, known, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictKnown, verdicts(out)[byID.ProviderLeaseID])
		assert.Equal(t, createos.VerdictKnown, verdicts(out)[byKey.ProviderLeaseID])
		assert.Len(t, r.srv.Leaks(), 2)
		r.srv.ForgetRequests()
		for _, bad := range []*createos.Lease{nil, {}} {
			_, err = r.driver.Reconcile(t.Context(), r.env, append(known, bad), createos.ReconcileOptions{Apply: true})
			var input *createos.InputError
			require.ErrorAs(t, err, &input)
			assert.Equal(t, "known[2]", input.Field)
		}
		assert.Empty(t, r.srv.Requests())
	})
}

// A stray that could not be read again lives, and the host is told.
func TestReconcileSaysWhatItLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		lease := r.acquire()
		time.Sleep(time.Hour)
		r.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes/{id}", Status: 503})
		out, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
		require.ErrorIs(t, err, createos.ErrUnavailable)
		require.ErrorContains(t, err, lease.ProviderLeaseID)
		assert.Equal(t, createos.VerdictStray, verdicts(out)[lease.ProviderLeaseID])
		assert.Empty(t, r.driver.Unconfirmed())
		assert.Len(t, r.srv.Leaks(), 1)
	})
}

// A transport whose provider has another clock.
type otherClock struct {
	http.RoundTripper
	ahead time.Duration
}

func (c otherClock) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := c.RoundTripper.RoundTrip(req)
	if err == nil {
		resp.Header.Set("Date", time.Now().Add(c.ahead).UTC().Format(http.TimeFormat))
	}
	return resp, err
}

// How old a sandbox is says the clock that also said when it was made. By the one
// here, which is ahead by 16 minutes, it would be old enough.
func TestReconcileGoesByTheProvidersClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{}, func(cfg *createos.DriverConfig) {
			cfg.Transport = otherClock{cfg.Transport, -16 * time.Minute}
		})
		lease := r.acquire()
		time.Sleep(createos.DefaultReconcileGrace + time.Minute)
		out, err := r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictYoung, verdicts(out)[lease.ProviderLeaseID])
	})
}

// A process that may still run poisons its lease until the host destroys it. A
// host that has lost the lease never will.
func TestReconcileDestroysAPoisonedLeaseThatNobodyHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{Commands: work})
		lease := r.acquire()
		r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}/processes/{process}", Status: 403})
		_, err := r.driver.Exec(t.Context(), r.env, lease, createos.Command{Name: "work", Timeout: time.Second})
		require.ErrorIs(t, err, createos.ErrTerminationUnproven)
		r.srv.ClearFaults()
		next := r.cfg
		next.Unconfirmed = r.driver.Unconfirmed()
		fresh, err := createos.NewDriver(next)
		require.NoError(t, err)
		time.Sleep(time.Hour)
		out, err := fresh.Reconcile(t.Context(), r.env, []*createos.Lease{lease}, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictKnown, verdicts(out)[lease.ProviderLeaseID])
		out, err = fresh.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Apply: true})
		require.NoError(t, err)
		assert.Equal(t, createos.VerdictDestroyed, verdicts(out)[lease.ProviderLeaseID])
		assert.Empty(t, fresh.Unconfirmed())
		assert.Empty(t, r.srv.Leaks())
	})
}

func TestReconcileChecksItsInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, createostest.Options{})
		_, err := r.driver.Reconcile(t.Context(), createos.Environment{}, nil, createos.ReconcileOptions{})
		require.ErrorAs(t, err, new(*createos.InputError))
		_, err = r.driver.Reconcile(t.Context(), r.env, nil, createos.ReconcileOptions{Grace: -1})
		require.ErrorAs(t, err, new(*createos.InputError))
		env := r.env
		env.Config.APIURL = "ftp://x"
		_, err = r.driver.Reconcile(t.Context(), env, nil, createos.ReconcileOptions{})
		require.ErrorAs(t, err, new(*createos.ConfigError))
		assert.Empty(t, r.srv.Requests())
	})
}

// Destroy that means gone: it waits for the end, and a sandbox that never goes
// away is listed as stuck.
func TestDestroyThatMeansGone(t *testing.T) {
	await := func(cfg *createos.DriverConfig) { cfg.AwaitDestroyed = true }
	t.Run("waits", func(t *testing.T) {
		for _, forget := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, createostest.Options{DestroyDelay: 20 * time.Second, ForgetDestroyed: forget}, await)
				lease := r.acquire()
				began := time.Now()
				require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
				assert.GreaterOrEqual(t, time.Since(began), 20*time.Second)
				assert.Empty(t, r.srv.Leaks())
			})
		}
	})
	t.Run("stuck", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{}, await)
			lease := r.acquire()
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", StuckState: "destroying"})
			err := r.driver.Destroy(t.Context(), r.env, lease)
			var owed *createos.CleanupError
			require.ErrorAs(t, err, &owed)
			assert.Equal(t, createos.Stuck, owed.Kind)
			require.ErrorIs(t, err, createos.ErrTimeout)
			list := r.driver.Unconfirmed()
			require.Len(t, list, 1)
			assert.Equal(t, createos.Stuck, list[0].Kind)
			assert.Contains(t, list[0].Cause, "destroying")
			assert.GreaterOrEqual(t, list[0].Age(), time.Duration(0))
			_, err = r.driver.Resume(t.Context(), r.env, lease)
			require.ErrorIs(t, err, createos.ErrCleanupFirst)
			require.Error(t, r.driver.RetryCleanup(t.Context()))
			r.srv.ClearFaults()
			require.NoError(t, r.srv.SetState(lease.ProviderLeaseID, "destroyed"))
			require.NoError(t, r.driver.RetryCleanup(t.Context()))
			assert.Empty(t, r.driver.Unconfirmed())
		})
	})
	t.Run("owed becomes stuck", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{}, await)
			lease := r.acquire()
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Nth: 1, Status: 403})
			require.Error(t, r.driver.Destroy(t.Context(), r.env, lease))
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", StuckState: "destroying"})
			require.Error(t, r.driver.RetryCleanup(t.Context()))
			list := r.driver.Unconfirmed()
			require.Len(t, list, 1)
			assert.Equal(t, createos.Stuck, list[0].Kind)
			// It stays one entry, whatever happens to it next.
			r.srv.ClearFaults()
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 403})
			require.Error(t, r.driver.Destroy(t.Context(), r.env, lease))
			list = r.driver.Unconfirmed()
			require.Len(t, list, 1)
			assert.Equal(t, createos.Stuck, list[0].Kind)
			assert.Contains(t, list[0].Cause, "403")
		})
	})
	t.Run("stays stuck for a driver that does not wait", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{}, await)
			lease := r.acquire()
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", StuckState: "destroying"})
			require.Error(t, r.driver.Destroy(t.Context(), r.env, lease))
			cfg := r.cfg
			cfg.AwaitDestroyed, cfg.Unconfirmed = false, r.driver.Unconfirmed()
			next, err := createos.NewDriver(cfg)
			require.NoError(t, err)
			require.Error(t, next.RetryCleanup(t.Context(), r.env))
			require.Len(t, next.Unconfirmed(), 1)
			require.Error(t, next.Destroy(t.Context(), r.env, lease))
			require.NoError(t, r.srv.SetState(lease.ProviderLeaseID, "destroyed"))
			require.NoError(t, next.RetryCleanup(t.Context(), r.env))
			require.Empty(t, next.Unconfirmed())
		})
	})
	// A look that fails is not the sandbox's fault.
	for name, f := range map[string]createostest.Fault{
		"404": {Status: 404, Body: `{"status":"fail","data":"no"}`}, "503": {Status: 503, Times: 6}, "unreadable": {CutAfterBytes: 7, CutClean: true, Times: 3},
	} {
		t.Run("bears with "+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, createostest.Options{DestroyDelay: 8 * time.Second}, await)
				lease := r.acquire()
				f.Route, f.Times = "GET /v1/sandboxes/{id}", max(f.Times, 1)
				hit := r.srv.Fail(f)
				require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
				require.Positive(t, hit.Hits())
				require.Empty(t, r.srv.Leaks())
			})
		})
	}
	t.Run("asks no more than it must", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{}, await)
			lease := r.acquire()
			r.srv.ForgetRequests()
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Reply: func(status int, body []byte) (int, []byte) {
				return status, bytes.ReplaceAll(body, []byte("destroying"), []byte("destroyed"))
			}})
			require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
			require.Len(t, r.srv.Requests(), 1)
		})
	})
}

// post sends a request that is not the driver's.
func (r *rig) post(t testing.TB, path, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.srv.URL+path, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("X-Api-Key", r.srv.APIKey())
	resp, err := r.srv.Transport().RoundTrip(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Less(t, resp.StatusCode, 300)
}
