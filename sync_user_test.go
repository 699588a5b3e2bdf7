//go:build linux

package createos_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// asUser runs a test once more as a user whom permissions bind, if they do not
// bind this one. It says whether it did.
func asUser(t *testing.T) bool {
	t.Helper()
	if os.Getuid() != 0 {
		return false
	}
	const nobody = 65534
	dir := t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} {
		require.NoError(t, os.Chown(d, nobody, nobody))
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=2m")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return true
}

// Directories that their owner must not write to, and files that he must not read,
// are updated like others, and have the modes of the source afterwards.
func TestSyncChangesWhatItsOwnerMustNotChange(t *testing.T) {
	t.Parallel()
	if asUser(t) {
		return
	}
	r := newSyncRig(t, createostest.Options{})
	modes := func(dir string, top os.FileMode) map[string]os.FileMode {
		return map[string]os.FileMode{dir: top, dir + "/ro": 0o555, dir + "/ro/deep": 0o555, dir + "/ro/same": 0o500}
	}
	setModes := func(modes map[string]os.FileMode) {
		for name, mode := range modes {
			require.NoError(t, os.Chmod(name, mode))
		}
	}
	unlock := func() { require.NoError(t, exec.Command("chmod", "-R", "u+rwX", r.host, r.workspace).Run()) }
	t.Cleanup(unlock)
	r.write(r.remote("src/ro/deep/a"), "1")
	r.write(r.remote("src/ro/deep/gone"), "1")
	r.write(r.remote("src/ro/same/b"), "1")
	r.write(r.remote("src/w"), "1")
	setModes(modes(r.remote("src"), 0o755))
	out := createos.SyncMapping{Source: "src", Target: r.local("out"), Delta: true, Delete: true}
	in := createos.SyncMapping{Source: r.remote("src"), Target: "dst", Delta: true, Delete: true}
	for round := range 3 {
		want := snapshot(t, r.remote("src"))
		for _, dir := range []string{r.local("out"), r.remote("dst")} {
			if round > 0 {
				// What differs must be seen even if it cannot be read.
				require.NoError(t, os.Chmod(filepath.Join(dir, "w"), 0o200))
				setModes(map[string]os.FileMode{dir: 0o555})
			}
		}
		if round > 0 {
			setModes(map[string]os.FileMode{r.local("out/ro/same"): 0})
		}
		_, err := r.out(t.Context(), out)
		require.NoError(t, err, round)
		require.Equal(t, want, snapshot(t, r.local("out")), round)
		_, err = r.in(t.Context(), in)
		require.NoError(t, err, round)
		require.Equal(t, want, snapshot(t, r.remote("dst")), round)
		for _, dir := range []string{r.local("out"), r.remote("dst")} {
			info, err := os.Stat(dir)
			require.NoError(t, err)
			require.Equal(t, round > 0, info.Mode().Perm() == 0o555, "a target that was there keeps its mode")
		}
		require.NoError(t, os.Chmod(r.remote("src/ro/deep"), 0o755))
		r.write(r.remote("src/ro/deep/a"), fmt.Sprint("new ", round))
		r.write(r.remote("src/ro/deep/new"), fmt.Sprint("new ", round))
		_ = os.Remove(r.remote("src/ro/deep/gone"))
		require.NoError(t, os.Chmod(r.remote("src/ro/deep"), 0o555))
	}
	// A merge that is refused changes no modes either.
	before := snapshot(t, r.local("out"))
	r.write(r.remote("other/w/x"), "a directory in the place of a file")
	r.write(r.remote("other/ro/deep/a"), "3")
	require.NoError(t, os.MkdirAll(r.local("out"), 0o755))
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "other", Target: r.local("out"), Merge: true})
	require.ErrorIs(t, err, createos.ErrSyncKind)
	require.Equal(t, before, snapshot(t, r.local("out")))
	unlock()
	r.clean()
}

// A file of its own that cannot be read is replaced by a delta, in both directions.
func TestSyncReplacesAFileThatCannotBeRead(t *testing.T) {
	t.Parallel()
	if asUser(t) {
		return
	}
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("f"), "new")
	r.write(r.local("g"), "old")
	require.NoError(t, os.Chmod(r.local("g"), 0o200))
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "f", Target: r.local("g"), Delta: true})
	require.NoError(t, err)
	require.Equal(t, "new", r.content(r.local("g")))
	r.write(r.local("g"), "in")
	require.NoError(t, os.Chmod(r.remote("f"), 0o200))
	_, err = r.in(t.Context(), createos.SyncMapping{Source: r.local("g"), Target: "f", Delta: true})
	require.NoError(t, err)
	require.Equal(t, "in", r.content(r.remote("f")))
	r.clean()
}
