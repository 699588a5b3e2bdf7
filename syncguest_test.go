package createos

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A guest runs scripts of a sync, or pieces of them, with the shell of this machine.
type guest struct {
	t         *testing.T
	workspace string
	scratch   string
}

func newGuest(t *testing.T) *guest {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the scripts need the programs of a sandbox")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	g := &guest{t, dir, filepath.Join(dir, runtimeDir, "sync-1")}
	require.NoError(t, os.MkdirAll(g.scratch, 0o755))
	return g
}

// write makes a file of the workspace.
func (g *guest) write(name, content string) {
	g.t.Helper()
	full := filepath.Join(g.workspace, name)
	require.NoError(g.t, os.MkdirAll(filepath.Dir(full), 0o755))
	require.NoError(g.t, os.WriteFile(full, []byte(content), 0o644))
}

// run returns what a script printed, and its exit code.
func (g *guest) run(body string) (string, int) {
	g.t.Helper()
	cmd := exec.CommandContext(g.t.Context(), execShell, "-c", "W="+guestWord(g.workspace)+" I=1"+guestPrelude+body)
	out, err := cmd.Output()
	if cmd.ProcessState == nil {
		require.NoError(g.t, err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// Whatever a list says, nothing is deleted outside of the directory, nor that itself.
func TestGuestDeletesOnlyWhatIsBelow(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"../precious", "./../precious", "./d/../../precious", "./d/./x", "./d/..", "./", ".", "..", "", "d/x", ".//d/x", "./d//x", "/precious", "./d/", "./.",
	} {
		g := newGuest(t)
		g.write("precious", "x")
		g.write("dst/d/x", "x")
		g.write("list", name+"\x00")
		_, code := g.run("N=1 L=$PWD/list\ncd dst && Q=$PWD\n" + guestOpen + guestDelete)
		require.Equal(t, guestUnsafe, code, name)
		require.FileExists(t, filepath.Join(g.workspace, "precious"), name)
		require.FileExists(t, filepath.Join(g.workspace, "dst/d/x"), name)
	}
	g := newGuest(t)
	for _, name := range []string{"...", "..x", "-r", "d/x", "d/..y", "d/.z"} {
		g.write("dst/"+name, "x")
	}
	g.write("list", strings.Join([]string{"./...", "./..x", "./-r", "./d/x", "./d/..y", "./d/.z", "./d", ""}, "\x00"))
	out, code := g.run("N=1 L=$PWD/list\ncd dst && Q=$PWD\n" + guestOpen + guestDelete)
	require.Zero(t, code)
	require.Equal(t, "7\n", out)
	left, err := os.ReadDir(filepath.Join(g.workspace, "dst"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// A commit that was given up may still run when the scratch directory is removed. When
// the removal is half way it finds nothing that it could put in place.
func TestGuestRemovesNothingUnderACommit(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]string{
		"at the end":          guestCleanup,
		"by the next sync":    `drop "$D/sync-1"`,
		"after one that died": `mkdir "$S.gone"; echo half >"$S.gone/f"; drop "$S"`,
	} {
		g := newGuest(t)
		for _, f := range []string{"tree.1/a", "tree.1/b"} {
			g.write(runtimeDir+"/sync-1/"+f, "new")
		}
		// The last step of a commit, when the first file has been removed.
		_, code := g.run(`rm() {
	for last; do :; done
	[ ! -e "$last/tree.1/a" ] || { command rm "$last/tree.1/a"; mv -T -- "$S/tree.1" "$R/dst"; }
	command rm "$@"
}
` + remove)
		require.Zero(t, code, name)
		require.NoDirExists(t, filepath.Join(g.workspace, "dst"), name)
		left, err := os.ReadDir(filepath.Dir(g.scratch))
		require.NoError(t, err)
		require.Empty(t, left, name)
	}
}

// Directories that do not let themselves be emptied are opened. Files keep their modes:
// they may have another name elsewhere.
func TestGuestOpensNothingButDirectories(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	g.write("own", "x")
	own := filepath.Join(g.workspace, "own")
	require.NoError(t, os.MkdirAll(filepath.Join(g.scratch, "a/b"), 0o755))
	require.NoError(t, os.Link(own, filepath.Join(g.scratch, "a/b/own")))
	require.NoError(t, os.Chmod(own, 0o444))
	for _, dir := range []string{"a/b", "a"} {
		require.NoError(t, os.Chmod(filepath.Join(g.scratch, dir), 0))
	}
	// As if permissions bound this user, whoever it is.
	_, code := g.run(`rm() { [ -z "$(find "$D" -type d ! -perm -700)" ] && command rm "$@"; }` + "\n" + guestCleanup)
	require.Zero(t, code)
	require.NoDirExists(t, g.scratch)
	info, err := os.Stat(own)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o444), info.Mode())
}

// The new directory is in its place although what it replaced cannot be removed, as
// often as it takes; later all of that is removed.
func TestGuestReplacesWhatCannotBeRemoved(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	g.write("dst/stuck", "old")
	g.write(asideName("dst")+"/stuck", "older, of a step that was killed")
	replace := func(n int, rm string) string {
		g.write(fmt.Sprintf("%s/sync-1/tree.%d/new", runtimeDir, n), fmt.Sprint(n))
		out, code := g.run(fmt.Sprintf("%s\nN=%d T=$S/tree.%d\n", rm, n, n) + replaceBody("dst", 0o755))
		require.Zero(t, code)
		b, err := os.ReadFile(filepath.Join(g.workspace, "dst/new"))
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(n), string(b))
		return out
	}
	for n := 1; n <= 2; n++ {
		require.NotEmpty(t, replace(n, `rm() { for last; do :; done; [ ! -e "$last/stuck" ] && command rm "$@"; }`))
	}
	require.Empty(t, replace(3, ""))
	left, err := filepath.Glob(filepath.Join(g.workspace, ".createos-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}
