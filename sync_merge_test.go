//go:build unix

package createos_test

import (
	"context"
	"fmt"
	"os"
	"syscall"
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

// What was skipped in the source is there, so Delete leaves what the target has under
// that name.
func TestSyncDeleteKeepsWhatWasSkipped(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for name, c := range map[string]struct {
		sync     func(context.Context, ...createos.SyncMapping) (*createos.SyncResult, error)
		from, to func(string) string
	}{"in": {r.in, r.local, r.remote}, "out": {r.out, r.remote, r.local}} {
		t.Run(name, func(t *testing.T) {
			r.write(c.from("from/d/a"), "a")
			require.NoError(t, os.Symlink("/usr/bin/env", c.from("from/d/env")))
			require.NoError(t, os.Symlink("/usr/lib", c.from("from/lib")))
			require.NoError(t, syscall.Mkfifo(c.from("from/pipe"), 0o600))
			require.NoError(t, os.MkdirAll(c.to("to/d"), 0o755))
			require.NoError(t, os.Symlink("/usr/bin/env", c.to("to/d/env")))
			for _, f := range []string{"lib/deep/x", "lib/y", "lib-y", "lib.z/x", "pipe", "d/env2", "pip", "pipe2"} {
				r.write(c.to("to/"+f), "mine")
			}
			m := createos.SyncMapping{Source: c.from("from"), Target: c.to("to"), Delta: true, Delete: true}
			for range 2 {
				res, err := c.sync(t.Context(), m)
				require.NoError(t, err)
				require.Equal(t, 3, res.Operations[0].SkippedTotal)
			}
			var left []string
			for f := range snapshot(t, c.to("to")) {
				left = append(left, f)
			}
			require.ElementsMatch(t, []string{"d", "d/a", "d/env", "lib", "lib/deep", "lib/deep/x", "lib/y", "pipe"}, left)
			r.clean()
		})
	}
}
