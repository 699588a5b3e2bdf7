package createos

import (
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
