//go:build unix

package createos_test

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

func TestSyncReportsProgress(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	fillTree(t, r.local("src"), 300)
	fill(t, r.local("src/large"), 17<<20)
	total := int64(300<<10 + 17<<20)
	check := func(reports []createos.SyncProgress) {
		t.Helper()
		var phases []createos.SyncPhase
		var last createos.SyncProgress
		for _, p := range reports {
			if p.Phase != last.Phase {
				phases = append(phases, p.Phase)
			}
			require.Equal(t, "op", p.Operation)
			require.GreaterOrEqual(t, p.Bytes, last.Bytes)
			last = p
		}
		require.Equal(t, []createos.SyncPhase{createos.SyncScan, createos.SyncTransfer, createos.SyncCommit}, phases)
		require.Equal(t, total, last.Bytes)
		require.Equal(t, total, last.TotalBytes)
		require.Equal(t, 301, last.Files)
		require.Equal(t, 301, last.TotalFiles)
	}
	var reports []createos.SyncProgress
	s := syncOf(createos.SyncMapping{Source: r.local("src"), Target: "dst"})
	s.Progress = func(p createos.SyncProgress) { reports = append(reports, p) }
	_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
	require.NoError(t, err)
	check(reports)
	reports = nil
	s.Operations = syncOf(createos.SyncMapping{Source: "dst", Target: r.local("back")}).Operations
	_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
	require.NoError(t, err)
	check(reports)
}

// What had to be sent again because of its digest counts once.
func TestSyncProgressCountsAnAttemptOnce(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/a"), strings.Repeat("x", 3000))
	fill(t, r.remote("src/large"), 17<<20)
	for _, prefix := range []string{"p.", "b."} {
		r.srv.Fail(createostest.Fault{When: scratchFile("GET", prefix), Nth: 1, Reply: func(s int, b []byte) (int, []byte) { b[700] ^= 1; return s, b }})
	}
	s := syncOf(createos.SyncMapping{Source: "src", Target: r.local("out")})
	var last createos.SyncProgress
	s.Progress = func(p createos.SyncProgress) { last = p }
	_, err := r.driver.SyncOut(t.Context(), r.env, r.lease, s)
	require.NoError(t, err)
	require.Equal(t, last.TotalBytes, last.Bytes)
	require.Equal(t, 2, last.Files)
	// What was not taken in the end does not count at all.
	r.srv.Fail(createostest.Fault{When: scratchFile("GET", "p."), Reply: func(s int, b []byte) (int, []byte) { b[700] ^= 1; return s, b }})
	s.Operations[0].Mappings[0].Exclude = []string{"large"}
	_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
	require.ErrorIs(t, err, createos.ErrSyncCorrupt)
	require.Zero(t, last.Bytes)
	require.Zero(t, last.Files)
}

// A sync that has nothing to do leaves no goroutine behind.
func TestSyncOfNothingEndsItsProgress(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	ours := func() int { // those that report progress, of all syncs of this process
		stacks := make([]byte, 8<<20)
		return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "(*meter).run")
	}
	for range 100 {
		_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, createos.Sync{Progress: func(createos.SyncProgress) {}})
		require.NoError(t, err)
	}
	require.Less(t, ours(), 50)
}

// The result counts what was removed, which is not all that should be.
func TestSyncDeletedIsWhatWasRemoved(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for dir, sync := range map[string]func() (*createos.SyncResult, error){
		r.remote("dst"): func() (*createos.SyncResult, error) {
			return r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "dst", Delta: true, Delete: true, Exclude: []string{"*.o"}})
		},
		r.local("out"): func() (*createos.SyncResult, error) {
			return r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out"), Delta: true, Delete: true, Exclude: []string{"*.o"}})
		},
	} {
		r.write(r.local("src/a/f"), "a")
		r.write(r.remote("src/a/f"), "a")
		r.write(filepath.Join(dir, "kept/x.o"), "excluded")
		r.write(filepath.Join(dir, "gone/x"), "x")
		require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "gone/fifo"), 0o600))
		require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "a"), 0o600)) // in the way of a directory
		require.NoError(t, os.Symlink(strings.Repeat("x/", 1500), filepath.Join(dir, "long")))
		for _, deleted := range []int{5, 0} { // a, gone, gone/x, gone/fifo, long
			res, err := sync()
			require.NoError(t, err)
			require.Equal(t, deleted, res.Operations[0].Deleted)
			require.Zero(t, res.Operations[0].SkippedTotal)
		}
		require.FileExists(t, filepath.Join(dir, "kept/x.o"))
		require.NoDirExists(t, filepath.Join(dir, "gone"))
		require.Equal(t, "a", r.content(filepath.Join(dir, "a/f")))
	}
	r.clean()
}

// A file that could not be compared is not unchanged.
func TestSyncUnchangedIsWhatWasCompared(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("f"), "same")
	r.write(r.remote("f"), "same")
	for nth, sync := range map[int]func() (*createos.SyncResult, error){
		2: func() (*createos.SyncResult, error) {
			return r.in(t.Context(), createos.SyncMapping{Source: r.local("f"), Target: "f", Delta: true})
		},
		3: func() (*createos.SyncResult, error) {
			return r.out(t.Context(), createos.SyncMapping{Source: "f", Target: r.local("f"), Delta: true})
		},
	} {
		hit := r.srv.Fail(createostest.Fault{
			Route: "POST /v1/sandboxes/{id}/exec", Nth: nth, Body: `{"status":"success","data":{"result":{"stdout":"","stderr":"","exit_code":95}}}`,
		})
		res, err := sync()
		require.ErrorIs(t, err, createos.ErrSyncChanged)
		require.Equal(t, 1, hit.Hits())
		require.Zero(t, res.Operations[0].Unchanged)
		r.srv.ClearFaults()
		res, err = sync()
		require.NoError(t, err)
		require.Equal(t, 1, res.Operations[0].Unchanged)
	}
}
