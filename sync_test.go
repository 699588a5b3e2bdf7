package createos_test

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A syncRig is a lease whose workspace is a directory of this machine.
type syncRig struct {
	*harness
	t     testing.TB
	srv   *createostest.Server
	lease *createos.Lease
	host  string // a directory for this side
}

func newSyncRig(t testing.TB, opts createostest.Options, change ...func(*createos.DriverConfig)) *syncRig {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the scripts of a sync need the programs of a sandbox, which the emulator takes from this machine")
	}
	srv := createostest.NewServer(t, opts)
	cfg := srv.DriverConfig()
	for _, f := range change {
		f(&cfg)
	}
	h, err := newHarness(cfg, srv.Config(), srv.Workspace())
	require.NoError(t, err)
	r := &syncRig{harness: h, t: t, srv: srv, host: t.TempDir()}
	r.lease, err = h.acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, h.driver.Destroy(context.Background(), h.env, r.lease))
		require.NoError(t, h.driver.Shutdown(context.Background()))
	})
	return r
}

func syncOf(m ...createos.SyncMapping) createos.Sync {
	return createos.Sync{Operations: []createos.SyncOperation{{ID: "op", Mappings: m}}}
}

func (r *syncRig) in(ctx context.Context, m ...createos.SyncMapping) (*createos.SyncResult, error) {
	return r.driver.SyncIn(ctx, r.env, r.lease, syncOf(m...))
}

func (r *syncRig) out(ctx context.Context, m ...createos.SyncMapping) (*createos.SyncResult, error) {
	return r.driver.SyncOut(ctx, r.env, r.lease, syncOf(m...))
}

// local and remote are paths on the two sides.
func (r *syncRig) local(name string) string  { return filepath.Join(r.host, name) }
func (r *syncRig) remote(name string) string { return filepath.Join(r.workspace, name) }

// write makes a file with its directories.
func (r *syncRig) write(path, content string) {
	r.t.Helper()
	require.NoError(r.t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(r.t, os.WriteFile(path, []byte(content), 0o644))
}

func (r *syncRig) content(path string) string {
	r.t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(r.t, err)
	return string(b)
}

// clean requires that no scratch file is left on either side.
func (r *syncRig) clean() {
	r.t.Helper()
	for _, dir := range []string{r.workspace, r.host} {
		require.NoError(r.t, filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
			if err == nil && (strings.HasPrefix(d.Name(), ".createos-") || strings.HasPrefix(d.Name(), "sync-")) {
				r.t.Errorf("left behind: %s", p)
			}
			return nil
		}))
	}
}

func TestSyncFileInAndOut(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("a b"), "hello\n")
	require.NoError(t, os.Chmod(r.local("a b"), 0o750))
	res, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("a b"), Target: "new/dir/-x\ny"})
	require.NoError(t, err)
	require.Empty(t, res.Warnings)
	require.Equal(t, 1, res.Operations[0].Files)
	require.Equal(t, "hello\n", r.content(r.remote("new/dir/-x\ny")))
	info, err := os.Stat(r.remote("new/dir/-x\ny"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o750), info.Mode())
	_, err = r.out(t.Context(), createos.SyncMapping{Source: r.remote("new/dir/-x\ny"), Target: r.local("back")})
	require.NoError(t, err)
	require.Equal(t, "hello\n", r.content(r.local("back")))
	r.clean()
}

func TestSyncDirInAndOut(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("src/a/b/c"), "deep")
	r.write(r.local("src/-n\n x"), "odd")
	r.write(r.local("src/bad\xff"), "")
	r.write(r.local("src/skip/node_modules/x"), "no")
	require.NoError(t, os.Symlink("a/b/c", r.local("src/link")))
	require.NoError(t, os.Symlink("/etc/passwd", r.local("src/evil")))
	require.NoError(t, os.Mkdir(r.local("src/empty"), 0o700))
	r.write(r.remote("dst/old"), "old")
	res, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "dst", Exclude: []string{"node_modules"}})
	require.NoError(t, err)
	require.Empty(t, res.Warnings)
	require.Equal(t, 3, res.Operations[0].Files)
	require.Equal(t, []createos.SyncSkip{{Path: "evil", Reason: "is a symbolic link that leads out of the tree"}}, res.Operations[0].Skipped)
	require.NoFileExists(t, r.remote("dst/old"))
	require.Equal(t, "deep", r.content(r.remote("dst/link")))
	require.Equal(t, "odd", r.content(r.remote("dst/-n\n x")))
	r.write(r.local("out/gone"), "x")
	res, err = r.out(t.Context(), createos.SyncMapping{Source: "dst", Target: r.local("out")})
	require.NoError(t, err)
	require.Empty(t, res.Warnings)
	require.NoFileExists(t, r.local("out/gone"))
	require.Equal(t, "deep", r.content(r.local("out/link")))
	require.Equal(t, "odd", r.content(r.local("out/-n\n x")))
	require.FileExists(t, r.local("out/bad\xff"))
	r.clean()

	delta := createos.SyncMapping{Source: r.local("out"), Target: "dst", Delta: true, Delete: true}
	for name, sync := range map[string]func() (*createos.SyncResult, error){
		"in": func() (*createos.SyncResult, error) { return r.in(t.Context(), delta) },
		"out": func() (*createos.SyncResult, error) {
			delta.Source, delta.Target = "dst", r.local("out")
			return r.out(t.Context(), delta)
		},
	} {
		t.Run(name, func(t *testing.T) {
			res, err := sync()
			require.NoError(t, err)
			require.Zero(t, res.Operations[0].Files)
			require.Equal(t, 3, res.Operations[0].Unchanged)
			require.Zero(t, res.Operations[0].Deleted)
		})
		delta.Source, delta.Target = r.local("out"), "dst"
	}
	r.clean()
}
