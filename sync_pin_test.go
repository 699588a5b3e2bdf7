//go:build unix

package createos_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// program puts a script before the programs of a sandbox, under the name of one.
func program(t *testing.T, name, script string) {
	t.Helper()
	bin := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
}

// A file that cannot have a second name comes out as it is: its mode and time travel,
// and the next delta finds it unchanged.
func TestSyncOutWithoutHardLinks(t *testing.T) {
	for name, ln := range map[string]string{
		"BusyBox":         `[ "$1" != -P ] || exit 1; PATH=${PATH#*:}; exec ln "$@"`,
		"no hard links":   `exit 1`,
		"follows symlink": `[ "$1" != -P ] || exit 1; PATH=${PATH#*:}; exec ln -L "$@"`,
	} {
		t.Run(name, func(t *testing.T) {
			program(t, "ln", ln)
			r := newSyncRig(t, createostest.Options{})
			fill(t, r.remote("src/large"), 17<<20)
			r.write(r.remote("run.sh"), "x")
			for _, f := range []string{"src/large", "run.sh"} {
				require.NoError(t, os.Chmod(r.remote(f), 0o751))
				require.NoError(t, os.Chtimes(r.remote(f), swept, swept))
			}
			mappings := []createos.SyncMapping{
				{Source: "run.sh", Target: r.local("run.sh"), Delta: true}, {Source: "src", Target: r.local("out"), Delta: true},
			}
			for _, files := range []int{2, 0} {
				res, err := r.out(t.Context(), mappings...)
				require.NoError(t, err)
				require.Equal(t, files, res.Operations[0].Files)
				require.Equal(t, 2-files, res.Operations[0].Unchanged)
			}
			for _, f := range []string{r.local("run.sh"), r.local("out/large")} {
				info, err := os.Stat(f)
				require.NoError(t, err)
				require.Equal(t, os.FileMode(0o751), info.Mode())
				require.True(t, info.ModTime().Equal(swept))
			}
			r.clean()
		})
	}
}

// A copy of a file that is written to meanwhile could be half of each version.
func TestSyncOutCopiesNoFileThatChanges(t *testing.T) {
	program(t, "ln", "exit 1")
	program(t, "cp", `PATH=${PATH#*:}; cp "$@" && printf more >>"$3"`)
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("f"), "f")
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "f", Target: r.local("f")})
	require.ErrorIs(t, err, createos.ErrSyncChanged)
	require.NoFileExists(t, r.local("f"))
	r.clean()
}
