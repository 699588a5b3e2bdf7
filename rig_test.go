package createos_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A rig is a driver on an emulator in memory, inside a synctest bubble.
type rig struct {
	t      testing.TB
	srv    *createostest.Server
	driver *createos.Driver
	env    createos.Environment
	cfg    createos.DriverConfig
}

func newRig(t testing.TB, opts createostest.Options, edit ...func(*createos.DriverConfig)) *rig {
	t.Helper()
	opts.InMemory = true
	srv := createostest.NewServer(t, opts)
	cfg := srv.DriverConfig()
	for _, e := range edit {
		e(&cfg)
	}
	d, err := createos.NewDriver(cfg)
	require.NoError(t, err)
	return &rig{t: t, srv: srv, driver: d, cfg: cfg, env: createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}}
}

func (r *rig) options() createos.AcquireOptions {
	return createos.AcquireOptions{Workspace: r.srv.Workspace()}
}

func (r *rig) acquire() *createos.Lease {
	r.t.Helper()
	lease, err := r.driver.Acquire(r.t.Context(), r.env, r.options())
	require.NoError(r.t, err)
	return lease
}

// balance checks the first law: every sandbox that the provider ever made is
// destroyed, or one of the leases, or listed; and nothing is listed that is
// destroyed.
func (r *rig) balance(leases ...*createos.Lease) {
	r.t.Helper()
	listed := map[string]bool{}
	for _, u := range r.driver.Unconfirmed() {
		if u.Kind == createos.DestroyOwed || u.Kind == createos.CreateUnknown {
			listed[u.SandboxID], listed[u.SandboxName] = true, true
		}
	}
	for _, box := range r.srv.Sandboxes() {
		leased := slices.ContainsFunc(leases, func(l *createos.Lease) bool { return l != nil && l.ProviderLeaseID == box.ID })
		over := box.State == "destroyed" || box.State == "destroying"
		known := listed[box.ID] || listed[box.Name]
		switch {
		case over:
			assert.False(r.t, listed[box.ID], "%s is destroyed and listed", box.ID)
		case !leased && !known:
			r.t.Errorf("%s is %s, and nobody knows of it", box.ID, box.State)
		case leased && known:
			r.t.Errorf("%s is leased and listed", box.ID)
		}
	}
}

// settle checks that a healthy provider lets everything be cleared: name-only
// entries after the settle time.
func (r *rig) settle(leases ...*createos.Lease) {
	r.t.Helper()
	r.srv.ClearFaults()
	time.Sleep(createos.DefaultSettleTime)
	for _, l := range leases {
		if l != nil {
			require.NoError(r.t, r.driver.Destroy(context.Background(), r.env, l))
		}
	}
	require.NoError(r.t, r.driver.RetryCleanup(context.Background(), r.env))
	require.Empty(r.t, r.driver.Unconfirmed())
	require.NoError(r.t, r.driver.Shutdown(context.Background()))
	time.Sleep(time.Minute) // an accepted destroy takes its time
	require.Empty(r.t, r.srv.Leaks())
}

// work answers the commands of tests: "work" prints, leaves a session of its
// own that never ends, and takes a minute; everything else is built in.
func work(ctx context.Context, c *createostest.Command) int {
	if c.Name != "work" {
		return createostest.Builtin(ctx, c)
	}
	c.SpawnSession(func(ctx context.Context, child *createostest.Command) { <-ctx.Done() })
	for i := range 60 {
		if _, err := fmt.Fprintf(c.Stdout, "line %d\n", i); err != nil || c.Sleep(time.Second) != nil {
			return 1
		}
	}
	return 0
}

// alive counts the process trees of a sandbox that have not ended.
func (r *rig) alive(id string) int {
	n := 0
	for _, p := range r.srv.Processes(id) {
		if !p.TreeExited {
			n++
		}
	}
	return n
}
