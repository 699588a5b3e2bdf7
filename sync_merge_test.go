//go:build unix

package createos_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

func TestSyncMergesIntoTheWorkspace(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("src/a"), "new")
	r.write(r.local("src/.paperclip-runtime/.paperclip-createos-lease"), "forged")
	r.write(r.remote("kept"), "kept")
	marker := r.content(r.remote(".paperclip-runtime/.paperclip-createos-lease"))
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: r.workspace, Merge: true})
	require.NoError(t, err)
	require.Equal(t, "kept", r.content(r.remote("kept")))
	_, err = r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: ".", Delta: true, Delete: true})
	require.NoError(t, err)
	require.NoFileExists(t, r.remote("kept"))
	require.Equal(t, marker, r.content(r.remote(".paperclip-runtime/.paperclip-createos-lease")))
	_, err = r.out(t.Context(), createos.SyncMapping{Source: ".", Target: r.local("all")})
	require.NoError(t, err)
	require.Len(t, snapshot(t, r.local("all")), 1)
	r.clean()
}

// A target that is merged into and was not there is made with the mode of the
// source, also if that is empty; one that was there keeps its own.
func TestSyncMergesIntoNothing(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	mode := func(dir string, want os.FileMode) {
		t.Helper()
		info, err := os.Stat(dir)
		require.NoError(t, err)
		require.Equal(t, want, info.Mode().Perm())
	}
	for i, m := range []createos.SyncMapping{{Merge: true}, {Delta: true}, {Delta: true, Delete: true}, {Merge: true, Delete: true}} {
		for _, file := range []string{"", "f"} {
			name := fmt.Sprintf("%d%s", i, file)
			require.NoError(t, os.MkdirAll(r.local(name), 0o755))
			if file != "" {
				r.write(r.local(name+"/f"), "x")
			}
			require.NoError(t, os.Chmod(r.local(name), 0o710))
			m.Source, m.Target = r.local(name), "new/it's "+name
			_, err := r.in(t.Context(), m)
			require.NoError(t, err)
			mode(r.remote(m.Target), 0o710)
			require.NoError(t, os.Chmod(r.remote(m.Target), 0o750))
			_, err = r.in(t.Context(), m)
			require.NoError(t, err)
			mode(r.remote(m.Target), 0o750)

			m.Source, m.Target = m.Target, r.local(name+" back")
			_, err = r.out(t.Context(), m)
			require.NoError(t, err)
			mode(m.Target, 0o750)
			require.NoError(t, os.Chmod(m.Target, 0o700))
			_, err = r.out(t.Context(), m)
			require.NoError(t, err)
			mode(m.Target, 0o700)
		}
	}
	r.clean()
}

// The name under which a merge stages cannot be used twice.
func TestSyncOutSkipsTheNameOfItsStage(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/.createos-new.out/sub/f"), "data")
	r.write(r.remote("src/.createos-new.other/f"), "data")
	r.write(r.remote("src/sub/.createos-new.out/f"), "data")
	m := createos.SyncMapping{Source: "src", Target: r.local("out"), Merge: true}
	for range 2 {
		res, err := r.out(t.Context(), m)
		require.NoError(t, err)
		require.Equal(t, 2, res.Operations[0].Files+res.Operations[0].Unchanged)
		require.Equal(t, []createos.SyncSkip{{Path: ".createos-new.out", Reason: "has a name that belongs to the sync"}}, res.Operations[0].Skipped)
		require.Len(t, snapshot(t, r.local("out")), 5)
		m.Delta, m.Delete = true, true
	}
	res, err := r.out(t.Context(), m)
	require.NoError(t, err)
	require.Equal(t, 2, res.Operations[0].Unchanged)
	require.Zero(t, res.Operations[0].Files)
	m = createos.SyncMapping{Source: "src", Target: r.local("out")}
	_, err = r.out(t.Context(), m)
	require.NoError(t, err)
	require.FileExists(t, r.local("out/.createos-new.out/sub/f"), "beside the target it is in nobody's way")
}

// A merge that comes to nothing leaves no new directory.
func TestSyncOutLeavesNothingWhenAMergeIsRefused(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/a"), "new")
	r.srv.Fail(createostest.Fault{When: scratchFile("GET", "p."), Body: "something else"})
	defer r.srv.ClearFaults()
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out"), Merge: true})
	require.Error(t, err)
	require.NoDirExists(t, r.local("out"))
	require.NoError(t, os.Mkdir(r.local("out"), 0o755))
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out"), Merge: true})
	require.Error(t, err)
	require.DirExists(t, r.local("out"), "it was there before")
}
