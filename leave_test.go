package createos_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// The caller leaves while the request that creates the process is in flight, at
// any moment: the process is ended, and the lease is as good as before.
func TestCreateProcessInFlightDoesNotPoison(t *testing.T) {
	for name, fault := range map[string]createostest.Fault{
		"slow to act":   {Delay: 2 * time.Second},
		"slow to reply": {DelayReply: 2 * time.Second},
		"reply lost":    {DropReply: true, DelayReply: time.Second},
		"502 after":     {Status: 502, Effect: true, DelayReply: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, createostest.Options{Commands: work})
				lease := r.acquire()
				fault.Route, fault.Nth = "POST /v1/sandboxes/{id}/processes", 1
				r.srv.Fail(fault)
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer cancel()
				_, err := r.driver.Exec(ctx, r.env, lease, createos.Command{Name: "work"})
				require.ErrorIs(t, err, context.DeadlineExceeded)
				assert.Zero(t, r.alive(lease.ProviderLeaseID))
				assert.Empty(t, r.driver.Unconfirmed())
				res, err := r.driver.Exec(t.Context(), r.env, lease, createos.Command{Name: "echo", Args: []string{"fine"}})
				require.NoError(t, err)
				assert.Equal(t, "fine\n", string(res.Stdout))
				r.settle(lease)
			})
		})
	}
}

// A call that outlasts the bound of a Destroy finds the sandbox proven gone: it
// must not leave an entry that nothing could end.
func TestLateCallOwesNothingOnceDestroyed(t *testing.T) {
	for _, delay := range []time.Duration{20 * time.Second, 29 * time.Second, 31 * time.Second, 45 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, createostest.Options{Commands: work})
			lease := r.acquire()
			done := make(chan error)
			go func() {
				_, err := r.driver.Exec(t.Context(), r.env, lease, createos.Command{Name: "work", Stdout: blocked(delay)})
				done <- err
			}()
			time.Sleep(1500 * time.Millisecond)
			r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}/processes/{process}", Delay: delay, Status: 500})
			require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
			require.ErrorIs(t, <-done, createos.ErrLeaseClosing)
			assert.Empty(t, r.driver.Unconfirmed())
			r.settle()
		})
	}
}

// blocked is a writer that takes its time.
type blocked time.Duration

func (b blocked) Write(p []byte) (int, error) {
	time.Sleep(time.Duration(b))
	return len(p), nil
}
