//go:build unix

package createos_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// Scratch files that could not be removed are a warning, and the next sync removes
// them.
func TestSyncRemovesLateWhatItCouldNotRemove(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{}, func(c *createos.DriverConfig) { c.CleanupTimeout = time.Second })
	r.write(r.local("f"), "f")
	r.srv.ForgetRequests()
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("f"), Target: "f"})
	require.NoError(t, err)
	last := len(r.srv.Requests())
	r.srv.Fail(createostest.Fault{Nth: last, Times: 10, Status: 503})
	res, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("f"), Target: "f"})
	require.NoError(t, err)
	require.Len(t, res.Warnings, 1)
	require.NotEmpty(t, r.scratchFiles())
	r.srv.ClearFaults()
	res, err = r.in(t.Context(), createos.SyncMapping{Source: r.local("f"), Target: "f"})
	require.NoError(t, err)
	require.Empty(t, res.Warnings)
	r.clean()
}

// However many syncs have failed before: what they may have left does not make the
// script of the next one too long.
func TestSyncWorksAfterManyThatFailed(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{}, func(c *createos.DriverConfig) { c.Budget = createos.NewBudget(100_000) })
	r.write(r.local("f"), "f")
	m := createos.SyncMapping{Source: r.local("f"), Target: "f"}
	r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/exec", Body: `{"status":"success","data":{"result":{"stdout":"","stderr":"","exit_code":92}}}`})
	for range 1000 {
		_, err := r.in(t.Context(), m)
		require.ErrorIs(t, err, createos.ErrSyncMissing)
	}
	var body int64
	for _, q := range r.srv.Requests() {
		body = max(body, q.BodyBytes)
	}
	require.Less(t, body, int64(32<<10))
	r.srv.ClearFaults()
	res, err := r.in(t.Context(), m)
	require.NoError(t, err)
	require.Empty(t, res.Warnings)
	r.clean()
}

// Nobody knows the scratch directory of a host that died. It is removed once no sync
// can be at work in it any more, and not before.
func TestSyncRemovesWhatADeadHostLeft(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	runtime := r.remote(".paperclip-runtime")
	r.write(filepath.Join(runtime, "sync-dead/run.1/out"), "")
	require.NoError(t, os.Chmod(filepath.Join(runtime, "sync-dead/run.1"), 0o500))
	r.write(filepath.Join(runtime, "sync-alive/p.1"), "")
	r.write(filepath.Join(runtime, "other/p.1"), "")
	r.write(r.remote("data"), "the user's")
	require.NoError(t, os.Chmod(r.remote("data"), 0o444))
	require.NoError(t, os.Link(r.remote("data"), filepath.Join(runtime, "sync-dead/b.1")))
	long, lately := time.Now().Add(-25*time.Hour), time.Now().Add(-23*time.Hour)
	for name, at := range map[string]time.Time{"sync-dead": long, "sync-alive": lately, "other": long} {
		require.NoError(t, os.Chtimes(filepath.Join(runtime, name), at, at))
	}
	r.write(r.local("f"), "f")
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("f"), Target: "f"})
	require.NoError(t, err)
	require.NoDirExists(t, filepath.Join(runtime, "sync-dead"))
	require.FileExists(t, filepath.Join(runtime, "sync-alive/p.1"))
	require.FileExists(t, filepath.Join(runtime, "other/p.1"))
	info, err := os.Stat(r.remote("data"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o444), info.Mode(), "a file that SyncOut was about to fetch")
}

// mount makes a directory of the workspace a small disk of its own.
func (r *syncRig) mount(name string) string {
	dir := r.remote(name)
	require.NoError(r.t, os.MkdirAll(dir, 0o755))
	if err := exec.Command("mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", dir).Run(); err != nil {
		r.t.Skip("cannot mount anything here: ", err)
	}
	r.t.Cleanup(func() { require.NoError(r.t, exec.Command("umount", "-l", dir).Run()) })
	return dir
}

// What is put on another disk is copied there first. Nothing of that stays if it
// does not succeed.
func TestSyncLeavesNothingOnAnotherDisk(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	disk := r.mount("disk")
	fill(t, r.local("fits"), 100_000)
	for i := range 10 {
		fill(t, r.local(fmt.Sprintf("src/%d", i)), 100_000)
	}
	fill(t, r.local("large"), 1_000_000)
	for _, m := range []createos.SyncMapping{
		{Source: r.local("src"), Target: "disk/dst"}, {Source: r.local("src"), Target: "disk/dst", Merge: true}, {Source: r.local("large"), Target: "disk/f"},
	} {
		_, err := r.in(t.Context(), m)
		require.ErrorIs(t, err, createos.ErrSyncWrite)
		r.clean()
		_, err = r.in(t.Context(), createos.SyncMapping{Source: r.local("fits"), Target: "disk/fits"})
		require.NoError(t, err)
		require.FileExists(t, filepath.Join(disk, "fits"))
	}
}

// A disk so full that not even the exit code of a step can be written.
func TestSyncSaysThatTheDiskIsFull(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.mount(".paperclip-runtime")
	for i := range 2 {
		fill(t, r.local(fmt.Sprintf("src/%d", i)), 100_000)
	}
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "dst"})
	require.ErrorIs(t, err, createos.ErrSyncWrite)
	r.clean()
}

// Somebody's disk is mounted in the directory that is replaced, so that it cannot be
// removed. The new one is in its place all the same, and so is the next.
func TestSyncReplacesWhatCannotBeRemoved(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for name, c := range map[string]struct {
		sync   func(context.Context, ...createos.SyncMapping) (*createos.SyncResult, error)
		side   func(string) string
		source string
	}{"in": {r.in, r.remote, r.local("src")}, "out": {r.out, r.local, "src"}} {
		t.Run(name, func(t *testing.T) {
			r.write(r.local("src/new"), "new")
			r.write(r.remote("src/new"), "new")
			r.write(c.side("dst/disk/x"), "x")
			disk := c.side("dst/disk")
			if err := exec.Command("mount", "-t", "tmpfs", "tmpfs", disk).Run(); err != nil {
				t.Skip("cannot mount anything here: ", err)
			}
			unmount := sync.OnceFunc(func() {
				where, err := filepath.Glob(c.side(".createos-*/disk"))
				require.NoError(t, err)
				require.Len(t, where, 1)
				require.NoError(t, exec.Command("umount", "-l", where[0]).Run())
			})
			defer unmount()
			target := "dst"
			if name == "out" {
				target = r.local("dst")
			}
			m := createos.SyncMapping{Source: c.source, Target: target}
			for range 3 {
				res, err := c.sync(t.Context(), m)
				require.NoError(t, err)
				require.Len(t, res.Warnings, 1)
				require.NotContains(t, res.Warnings[0].Error(), c.side(""))
				require.Equal(t, 1, res.Operations[0].Files)
				require.Equal(t, "new", r.content(c.side("dst/new")))
				require.NoDirExists(t, c.side("dst/disk"))
			}
			// It is nothing that is to be put back.
			require.NoError(t, os.RemoveAll(c.side("dst")))
			m.Merge = true
			_, err := c.sync(t.Context(), m)
			require.NoError(t, err)
			require.NoDirExists(t, c.side("dst/disk"))
			unmount()
			m.Merge = false
			res, err := c.sync(t.Context(), m)
			require.NoError(t, err)
			require.Empty(t, res.Warnings)
			r.clean()
		})
	}
}

// A request that was cut off arrives when the sync is long over, which has succeeded with
// another attempt. What it makes is removed by the next one.
func TestSyncRemovesWhatArrivesLate(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("f"), "f")
	m := createos.SyncMapping{Source: r.local("f"), Target: "f"}
	for name, f := range map[string]createostest.Fault{
		"an upload": {When: scratchFile("PUT", "p."), Nth: 1, Refuse: true},
		"the first": {Route: "POST /v1/sandboxes/{id}/exec", Nth: 1, Refuse: true},
		"its reply": {Route: "POST /v1/sandboxes/{id}/exec", Nth: 1, DropReply: true},
	} {
		t.Run(name, func(t *testing.T) {
			r.srv.ForgetRequests()
			hit := r.srv.Fail(f)
			res, err := r.in(t.Context(), m)
			require.NoError(t, err)
			require.Empty(t, res.Warnings)
			require.Equal(t, 1, hit.Hits())
			r.srv.ClearFaults()
			r.clean()
			for _, q := range r.srv.Requests() {
				if scratchFile("PUT", "p.")(q) {
					r.write(q.Query.Get("path"), "late")
				}
			}
			require.NotEmpty(t, r.scratchFiles())
			_, err = r.in(t.Context(), m)
			require.NoError(t, err)
			r.clean()
		})
	}
}
