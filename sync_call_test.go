//go:build unix

package createos_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

func TestSyncRefusesImpossibleMappings(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("f"), "f")
	good := createos.SyncMapping{Source: r.local("f"), Target: "f"}
	with := func(change func(*createos.SyncMapping)) createos.SyncMapping {
		m := good
		change(&m)
		return m
	}
	r.srv.ForgetRequests()
	for field, m := range map[string]createos.SyncMapping{
		"Target: absolute":        with(func(m *createos.SyncMapping) { m.Target = "/etc/x" }),
		"Target: neighbour":       with(func(m *createos.SyncMapping) { m.Target = r.workspace + "-other/f" }),
		"Target: parent":          with(func(m *createos.SyncMapping) { m.Target = "../f" }),
		"Target: unclean":         with(func(m *createos.SyncMapping) { m.Target = "a/../f" }),
		"Target: slash":           with(func(m *createos.SyncMapping) { m.Target = "a/" }),
		"Target: empty":           with(func(m *createos.SyncMapping) { m.Target = "" }),
		"Target: NUL":             with(func(m *createos.SyncMapping) { m.Target = "a\x00" }),
		"Target: ours":            with(func(m *createos.SyncMapping) { m.Target = ".paperclip-runtime/x" }),
		"Target: ours itself":     with(func(m *createos.SyncMapping) { m.Target = r.remote(".paperclip-runtime") }),
		"Target: workspace":       with(func(m *createos.SyncMapping) { m.Target = "." }),
		"Target: too long":        with(func(m *createos.SyncMapping) { m.Target = strings.Repeat("a/", 1100) + "a" }),
		"Source: empty":           with(func(m *createos.SyncMapping) { m.Source = "" }),
		"Source: NUL":             with(func(m *createos.SyncMapping) { m.Source = "a\x00" }),
		"Kind: unknown":           with(func(m *createos.SyncMapping) { m.Kind = "socket" }),
		"Mode: setuid":            with(func(m *createos.SyncMapping) { m.Mode = fs.ModeSetuid | 0o755 }),
		"Exclude: malformed":      with(func(m *createos.SyncMapping) { m.Exclude = []string{"[a"} }),
		"Exclude: empty":          with(func(m *createos.SyncMapping) { m.Exclude = []string{""} }),
		"Exclude: dot":            with(func(m *createos.SyncMapping) { m.Exclude = []string{"ok", "./build"} }),
		"Exclude: dots":           with(func(m *createos.SyncMapping) { m.Exclude = []string{"../s"} }),
		"Exclude: dots inside":    with(func(m *createos.SyncMapping) { m.Exclude = []string{"/a/../s"} }),
		"Exclude: dot at the end": with(func(m *createos.SyncMapping) { m.Exclude = []string{"a/."} }),
		"Exclude: empty name":     with(func(m *createos.SyncMapping) { m.Exclude = []string{"build//x"} }),
		"Exclude: two slashes":    with(func(m *createos.SyncMapping) { m.Exclude = []string{"build//"} }),
		"Exclude: slash":          with(func(m *createos.SyncMapping) { m.Exclude = []string{"/"} }),
		"Exclude: taken back":     with(func(m *createos.SyncMapping) { m.Exclude = []string{"*.o", "!keep.o"} }),
		"FollowSymlinks: in":      with(func(m *createos.SyncMapping) { m.FollowSymlinks = true }),
		"Delete: without a merge": with(func(m *createos.SyncMapping) { m.Delete = true }),
	} {
		_, err := r.in(t.Context(), good, m)
		var input *createos.InputError
		require.ErrorAs(t, err, &input, field)
		name, _, _ := strings.Cut(field, ":")
		require.Equal(t, "Sync.Operations[0].Mappings[1]."+name, input.Field)
	}
	for field, s := range map[string]createos.Sync{
		"Sync.MaxBytes":    {MaxBytes: -1},
		"Sync.MaxEntries":  {MaxEntries: -1},
		"Sync.MaxFile":     {MaxFile: 1<<16 - 1},
		"Sync.Compression": {Compression: "zstd"},
		"Sync.Operations":  {Operations: []createos.SyncOperation{{Mappings: make([]createos.SyncMapping, 1001)}}},
	} {
		_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
		var input *createos.InputError
		require.ErrorAs(t, err, &input)
		require.Equal(t, field, input.Field)
	}
	bad := createos.Sync{Operations: []createos.SyncOperation{{Commands: []createos.Command{{}}}}}
	_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, bad)
	var input *createos.InputError
	require.ErrorAs(t, err, &input)
	require.Equal(t, "Sync.Operations[0].Commands[0].Name", input.Field)
	_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, bad)
	require.ErrorContains(t, err, "Commands")
	require.Empty(t, r.srv.Requests(), "nothing was sent")
}

// A batch is looked at as a whole on both sides before the first byte of content.
func TestSyncLooksAtAllMappingsFirst(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("f"), "f")
	r.write(r.local("d/x"), "x")
	r.write(r.remote("dir/x"), "x")
	r.write(r.remote("file"), "x")
	require.NoError(t, syscall.Mkfifo(r.local("fifo"), 0o600))
	require.NoError(t, syscall.Mkfifo(r.remote("fifo"), 0o600))
	good := createos.SyncMapping{Source: r.local("f"), Target: "good"}
	for _, c := range []struct {
		bad  createos.SyncMapping
		want error
	}{
		{createos.SyncMapping{Source: r.local("nothing"), Target: "x"}, createos.ErrSyncMissing},
		{createos.SyncMapping{Source: r.local("f"), Target: "x", Kind: createos.SyncDir}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: r.local("d"), Target: "x", Kind: createos.SyncFile}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: r.local("fifo"), Target: "x"}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: r.local("f"), Target: "dir"}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: r.local("d"), Target: "file"}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: r.local("d"), Target: "file/x"}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: r.local("d"), Target: "fifo"}, createos.ErrSyncKind},
	} {
		_, err := r.in(t.Context(), good, c.bad)
		require.ErrorIs(t, err, c.want, "%+v", c.bad)
		require.NoFileExists(t, r.remote("good"))
	}
	goodOut := createos.SyncMapping{Source: "file", Target: r.local("good")}
	for _, c := range []struct {
		bad  createos.SyncMapping
		want error
	}{
		{createos.SyncMapping{Source: "nothing", Target: r.local("x")}, createos.ErrSyncMissing},
		{createos.SyncMapping{Source: "dir", Target: r.local("f")}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: "file", Target: r.local("d")}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: "fifo", Target: r.local("x")}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: "file", Target: r.local("x"), Kind: createos.SyncDir}, createos.ErrSyncKind},
		{createos.SyncMapping{Source: "dir", Target: "/", Merge: true}, createos.ErrSyncKind},
	} {
		_, err := r.out(t.Context(), goodOut, c.bad)
		require.ErrorIs(t, err, c.want, "%+v", c.bad)
		require.NoFileExists(t, r.local("good"))
	}
	r.clean()
}

// There may be more paths than one command can name.
func TestSyncTakesManyMappings(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("f"), "f")
	long := strings.Repeat(strings.Repeat("x", 200)+"/", 9)
	var list []createos.SyncMapping
	for i := range 200 {
		list = append(list, createos.SyncMapping{Source: r.local("f"), Target: fmt.Sprint(long, i)})
	}
	require.NoError(t, os.MkdirAll(r.remote(long+"199"), 0o755))
	_, err := r.in(t.Context(), list...)
	require.ErrorIs(t, err, createos.ErrSyncKind)
	var failed *createos.SyncError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 199, failed.Mapping)
	r.clean()
}

func TestSyncExcludes(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for _, f := range []string{"!x", "a.o", "a.c", "d/b.o", "d/b.c", "d/node_modules/x", "build/x", "d/build/x", "docs/a/b/c.md", "docs/x.txt", "tmp", "e/tmp/x"} {
		r.write(r.local("src/"+f), f)
	}
	m := createos.SyncMapping{Source: r.local("src"), Target: "dst", Exclude: []string{"*.o", "node_modules", "/build", "docs/**/*.md", "tmp/", `\!x`}}
	_, err := r.in(t.Context(), m)
	require.NoError(t, err)
	want := []string{"a.c", "d/b.c", "d/build/x", "docs/x.txt", "tmp"}
	files := func(dir string) (list []string) {
		for name, text := range snapshot(t, dir) {
			if text[0] == '-' {
				list = append(list, name)
			}
		}
		return list
	}
	require.ElementsMatch(t, want, files(r.remote("dst")))

	// The same words mean the same on the way back, and what they match is
	// not deleted.
	for _, f := range []string{"x.o", "build/y", "docs/q/z.md", "gone"} {
		r.write(r.local("back/"+f), f)
		r.write(r.remote("dst/"+f), "other "+f)
	}
	require.NoError(t, os.Remove(r.remote("dst/gone")))
	m.Source, m.Target, m.Delta, m.Delete = "dst", r.local("back"), true, true
	res, err := r.out(t.Context(), m)
	require.NoError(t, err)
	require.Equal(t, 1, res.Operations[0].Deleted)
	require.ElementsMatch(t, append(want, "x.o", "build/y", "docs/q/z.md"), files(r.local("back")))
	require.Equal(t, "x.o", r.content(r.local("back/x.o")))
	r.clean()
}

func TestSyncOutFollowsLinksWhenAsked(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("elsewhere/file"), "followed")
	r.write(r.remote("src/own"), "own")
	victim, _ := r.victim()
	for name, to := range map[string]string{
		"abs": r.remote("elsewhere/file"), "rel": "../elsewhere/file", "own2": "own", "dir": "../elsewhere",
		"out": filepath.Join(victim, "file"), "marker": r.remote(".paperclip-runtime/.paperclip-createos-lease"), "chain": "rel",
	} {
		require.NoError(t, os.Symlink(to, r.remote("src/"+name)))
	}
	res, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out"), FollowSymlinks: true})
	require.NoError(t, err)
	for _, name := range []string{"abs", "rel", "chain"} {
		require.Equal(t, "followed", r.content(r.local("out/"+name)))
	}
	require.Equal(t, "own", r.content(r.local("out/own2")))
	info, err := os.Lstat(r.local("out/own2"))
	require.NoError(t, err)
	require.True(t, info.Mode().IsRegular())
	var skipped []string
	for _, s := range res.Operations[0].Skipped {
		skipped = append(skipped, s.Path)
	}
	require.ElementsMatch(t, []string{"dir", "out", "marker"}, skipped)
	r.clean()
}

// A file above the limit goes in parts and is one file again.
func TestSyncSplitsLargeFiles(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{MaxFileBytes: 300_000})
	fill(t, r.local("src/large"), 1_000_000)
	fill(t, r.local("exact"), 600_000)
	s := syncOf(createos.SyncMapping{Source: r.local("src/large"), Target: "large"}, createos.SyncMapping{Source: r.local("exact"), Target: "exact"})
	s.MaxFile = 300_000
	_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
	require.NoError(t, err)
	require.Equal(t, r.content(r.local("src/large")), r.content(r.remote("large")))
	require.Equal(t, r.content(r.local("exact")), r.content(r.remote("exact")))

	// The provider may have a limit for downloads as well.
	refused := r.srv.Fail(createostest.Fault{Status: 413, When: func(q createostest.Request) bool {
		return scratchFile("GET", "b.")(q) && !strings.HasSuffix(q.Query.Get("path"), ".part")
	}})
	s = syncOf(createos.SyncMapping{Source: "large", Target: r.local("back")})
	s.MaxFile = 300_000
	_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
	require.NoError(t, err)
	require.Equal(t, 1, refused.Hits())
	require.Equal(t, r.content(r.local("src/large")), r.content(r.local("back")))
	s.StrongDigests = true
	s.Operations[0].Mappings[0].Target = r.local("back2")
	_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
	require.NoError(t, err)
	require.Equal(t, r.content(r.local("src/large")), r.content(r.local("back2")))
	r.clean()
}

// Large files in a tree go by themselves, in both directions.
// Whatever is sent keeps to the limit of a file: archives and lists of names too.
func TestSyncKeepsArchivesBelowMaxFile(t *testing.T) {
	t.Parallel()
	const limit = 1 << 16
	r := newSyncRig(t, createostest.Options{MaxFileBytes: limit})
	for i := range 5 {
		fill(t, r.local(fmt.Sprintf("src/small%d", i)), 30_000)
	}
	long := strings.Repeat("n", 200)
	for i := range 100 { // with their headers they need more than one archive
		r.write(r.local(fmt.Sprintf("src/d%d/%s", i, long)), "x")
	}
	fill(t, r.local("src/just"), limit-1024)
	fill(t, r.local("src/large"), 3*limit)
	for _, merge := range []bool{false, true} {
		s := syncOf(createos.SyncMapping{Source: r.local("src"), Target: fmt.Sprint("dst", merge), Merge: merge, Delete: merge})
		s.MaxFile = limit
		for i := range 400 {
			r.write(r.remote(fmt.Sprintf("dst%v/old/%d%s", merge, i, long)), "gone")
		}
		res, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		require.Equal(t, 107, res.Operations[0].Files)
		require.Equal(t, snapshot(t, r.local("src")), snapshot(t, r.remote(fmt.Sprint("dst", merge))))
		s.Operations = syncOf(createos.SyncMapping{Source: fmt.Sprint("dst", merge), Target: r.local("back"), Merge: merge}).Operations
		res, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		require.Equal(t, 107, res.Operations[0].Files)
		require.Equal(t, snapshot(t, r.local("src")), snapshot(t, r.local("back")))
	}
	r.clean()
}

func TestSyncTreeWithLargeFiles(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	fill(t, r.local("src/d/large one"), 17<<20)
	fill(t, r.local("src/z\n\xff"), 16<<20)
	r.write(r.local("src/d/small"), "small")
	require.NoError(t, os.Chmod(r.local("src/d/large one"), 0o640))
	want := snapshot(t, r.local("src"))
	for _, strong := range []bool{false, true} {
		s := syncOf(createos.SyncMapping{Source: r.local("src"), Target: fmt.Sprint("dst", strong)})
		s.StrongDigests = strong
		_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		s = syncOf(createos.SyncMapping{Source: fmt.Sprint("dst", strong), Target: r.local(fmt.Sprint("back", strong))})
		s.StrongDigests = strong
		_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		require.Equal(t, want, snapshot(t, r.local(fmt.Sprint("back", strong))))
	}
	r.clean()
}

func TestSyncCompresses(t *testing.T) {
	t.Parallel()
	for _, c := range []createos.SyncCompression{createos.SyncCompressAlways, createos.SyncCompressNever} {
		r := newSyncRig(t, createostest.Options{})
		for i := range 20 {
			r.write(r.local(fmt.Sprintf("src/%d", i)), strings.Repeat("compressible ", 5000))
		}
		want := snapshot(t, r.local("src"))
		s := createos.Sync{Compression: c, Operations: syncOf(createos.SyncMapping{Source: r.local("src"), Target: "dst"}).Operations}
		r.srv.ForgetRequests()
		_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		require.Equal(t, want, snapshot(t, r.remote("dst")))
		var sent int64
		for _, q := range r.srv.Requests() {
			if scratchFile("PUT", "p.")(q) {
				sent += q.BodyBytes
			}
		}
		require.Equal(t, c == createos.SyncCompressAlways, sent < 100_000, "%d bytes were sent", sent)
		s.Operations = syncOf(createos.SyncMapping{Source: "dst", Target: r.local("back")}).Operations
		_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		require.Equal(t, want, snapshot(t, r.local("back")))
		r.clean()
	}
}

func TestSyncKeepsLimits(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for _, dir := range []string{r.local("src"), r.remote("src")} {
		r.write(filepath.Join(dir, "a"), "12345")
		r.write(filepath.Join(dir, "b"), "12345")
	}
	for name, limit := range map[string]createos.Sync{"bytes": {MaxBytes: 9}, "entries": {MaxEntries: 1}} {
		s := limit
		s.Operations = syncOf(createos.SyncMapping{Source: r.local("src"), Target: "dst"}).Operations
		_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
		require.ErrorIs(t, err, createos.ErrSyncLimit, name)
		s.Operations = syncOf(createos.SyncMapping{Source: "src", Target: r.local("dst")}).Operations
		_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
		require.ErrorIs(t, err, createos.ErrSyncLimit, name)
	}
	require.NoFileExists(t, r.remote("dst"))
	require.NoFileExists(t, r.local("dst"))
	// What is excluded does not count.
	for _, dir := range []string{r.local("src"), r.remote("src")} {
		for i := range 20 {
			r.write(filepath.Join(dir, fmt.Sprintf("node_modules/%d", i)), "12345")
		}
	}
	for _, limit := range []createos.Sync{{MaxBytes: 10}, {MaxEntries: 2}} {
		s := limit
		s.Operations = syncOf(createos.SyncMapping{Source: r.local("src"), Target: "dst", Exclude: []string{"node_modules"}}).Operations
		_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		s.Operations = syncOf(createos.SyncMapping{Source: "src", Target: r.local("dst"), Exclude: []string{"node_modules"}}).Operations
		_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
	}
	// What is followed counts as the files that it leads to, with all others.
	r.write(r.remote("other"), "12345")
	require.NoError(t, os.Symlink("../other", r.remote("src/l")))
	s := syncOf(createos.SyncMapping{Source: "src", Target: r.local("dst"), Exclude: []string{"node_modules"}, FollowSymlinks: true})
	for limit, want := range map[int64]error{14: createos.ErrSyncLimit, 15: nil} {
		s.MaxBytes = limit
		_, err := r.driver.SyncOut(t.Context(), r.env, r.lease, s)
		require.ErrorIs(t, err, want)
	}
	r.clean()
}

// Large lists need room on this machine. Without it the error says so, and is not
// about the files.
func TestSyncSaysWhenItsListsHaveNoRoom(t *testing.T) {
	r := newSyncRig(t, createostest.Options{})
	long := strings.Repeat("n", 240)
	for i := range 4500 {
		r.write(r.local(fmt.Sprintf("src/%s%d", long, i)), "")
	}
	t.Setenv("TMPDIR", filepath.Join(r.host, "nowhere"))
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "dst"})
	require.ErrorContains(t, err, "temporary files")
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NotErrorIs(t, err, createos.ErrSyncMissing)
	require.NotContains(t, err.Error(), r.host)
	require.NoFileExists(t, r.remote("dst"))
	r.clean()
}

func TestSyncRunsCommandsInOrderUntilOneFails(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("f"), "f")
	s := syncOf(createos.SyncMapping{Source: r.local("f"), Target: "dir/f"})
	s.Operations[0].Commands = []createos.Command{
		{Name: "cat", Args: []string{"f"}, Dir: "dir"},
		{Name: "sh", Args: []string{"-c", "exit 3"}},
		{Name: "touch", Args: []string{"never"}},
	}
	s.Operations = append(s.Operations, createos.SyncOperation{ID: "second", Mappings: []createos.SyncMapping{{Source: r.local("f"), Target: "second"}}})
	res, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
	var exit *createos.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 3, exit.ExitCode)
	var failed *createos.SyncError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, []any{"op", -1, 1}, []any{failed.Operation, failed.Mapping, failed.Command})
	require.Len(t, res.Operations, 1)
	require.False(t, res.Operations[0].Done)
	require.Len(t, res.Operations[0].Commands, 2)
	require.Equal(t, "f", string(res.Operations[0].Commands[0].Stdout))
	require.NoFileExists(t, r.remote("never"))
	require.NoFileExists(t, r.remote("second"))
	s.Operations[0].Commands = s.Operations[0].Commands[:1]
	res, err = r.driver.SyncIn(t.Context(), r.env, r.lease, s)
	require.NoError(t, err)
	require.True(t, res.Operations[0].Done && res.Operations[1].Done)
	r.clean()
}

// Release, Destroy and Shutdown cancel a sync, and wait until it has cleaned up.
func TestSyncIsCancelledAndWaitedFor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  func(r *syncRig) error
		want error
	}{
		"destroy":  {func(r *syncRig) error { return r.driver.Destroy(context.Background(), r.env, r.lease) }, createos.ErrLeaseClosing},
		"shutdown": {func(r *syncRig) error { return r.driver.Shutdown(context.Background()) }, createos.ErrShutdown},
	} {
		for _, dir := range []string{"in", "out"} {
			t.Run(name+"/"+dir, func(t *testing.T) {
				r := newSyncRig(t, createostest.Options{}, func(c *createos.DriverConfig) {
					c.CleanupTimeout = 4 * time.Second // half of it the upload is waited for
				})
				r.write(r.local("src/f"), "new")
				r.write(r.remote("src/f"), "new")
				r.write(r.local("out/old"), "old")
				reached := make(chan struct{})
				method := map[string]string{"in": "PUT", "out": "GET"}[dir]
				r.srv.Fail(createostest.Fault{When: scratchFile(method, "p."), Nth: 1, Hang: true, Before: func() { close(reached) }})
				done := make(chan error, 1)
				go func() {
					var err error
					if dir == "in" {
						_, err = r.in(context.Background(), createos.SyncMapping{Source: r.local("src"), Target: "dst"})
					} else {
						_, err = r.out(context.Background(), createos.SyncMapping{Source: "src", Target: r.local("out")})
					}
					done <- err
				}()
				<-reached
				require.NoError(t, c.end(r))
				r.clean() // it was waited for
				err := <-done
				require.ErrorIs(t, err, c.want)
				require.NotErrorIs(t, err, context.Canceled)
				require.Equal(t, "old", r.content(r.local("out/old")))
				_, err = r.in(context.Background(), createos.SyncMapping{Source: r.local("src"), Target: "dst"})
				if name == "shutdown" {
					require.ErrorIs(t, err, createos.ErrShutdown)
					require.ErrorIs(t, err, createos.ErrLeaseClosing)
				}
				require.Empty(t, r.driver.Unconfirmed())
				r.clean()
			})
		}
	}
}

// A sync that comes to nothing does not leave a paused sandbox running, which costs
// money, for the sake of its scratch files.
func TestSyncThatIsCancelledWakesNothing(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]createostest.Fault{
		"before the first request": {Method: "POST", Nth: 1, Status: 500}, // not met
		"during the first request": {Method: "POST", Nth: 1},
		"its reply is lost":        {Method: "POST", Nth: 1, DropReply: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newSyncRig(t, createostest.Options{})
			r.write(r.local("f"), "f")
			require.NoError(t, r.srv.Pause(r.lease.ProviderLeaseID))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if fault.Status != 0 {
				cancel()
			}
			fault.Before = cancel
			hit := r.srv.Fail(fault)
			r.srv.ForgetRequests()
			res, err := r.in(ctx, createos.SyncMapping{Source: r.local("f"), Target: "f"})
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, fault.Status == 0, hit.Hits() == 1)
			for _, q := range r.srv.Requests() {
				require.NotContains(t, q.Route, "resume")
			}
			// Where a request was sent something could be there, whatever the answer says.
			require.Equal(t, fault.Status == 0, len(res.Warnings) == 1)
			r.srv.ClearFaults()
		})
	}
}

// A file that takes long to read does not hold up the end of a sync.
func TestSyncIsCancelledWhileItHashes(t *testing.T) {
	t.Parallel()
	const size = 1 << 36 // minutes, if all of it is read
	file := func(path string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, nil, 0o644))
		require.NoError(t, os.Truncate(path, size))
	}
	told := fmt.Sprintf(`{"status":"success","data":{"result":{"stdout":"644\n%d %x\n","stderr":"","exit_code":0}}}`, int64(size), sha256.Sum256(nil))
	for name, c := range map[string]struct {
		out   bool
		m     createos.SyncMapping
		reply string
	}{
		"dir in":   {false, createos.SyncMapping{Source: "src", Target: "dst", Delta: true}, ""},
		"dir out":  {true, createos.SyncMapping{Source: "dst", Target: "src", Delta: true}, ""},
		"file in":  {false, createos.SyncMapping{Source: "src/a", Target: "dst/a", Delta: true}, told},
		"file out": {true, createos.SyncMapping{Source: "big", Target: "src/a", Delta: true}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := newSyncRig(t, createostest.Options{})
			file(r.local("src/a"))
			file(r.remote("big"))
			r.write(r.remote("dst/a"), "a")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan time.Time, 1)
			stop := func() { // once the reply has arrived
				time.AfterFunc(300*time.Millisecond, func() { ended <- time.Now(); cancel() })
			}
			f := createostest.Fault{Route: "POST /v1/sandboxes/{id}/exec", Nth: 2, After: stop}
			if c.reply != "" {
				f.Reply = func(int, []byte) (int, []byte) { return 200, []byte(c.reply) }
			}
			r.srv.Fail(f)
			var err error
			if c.out {
				c.m.Target = r.local(c.m.Target)
				_, err = r.out(ctx, c.m)
			} else {
				c.m.Source = r.local(c.m.Source)
				_, err = r.in(ctx, c.m)
			}
			require.ErrorIs(t, err, context.Canceled)
			require.Less(t, time.Since(<-ended), 5*time.Second)
			r.clean()
		})
	}
}

func TestSyncBelongsToItsEnvironment(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.srv.ForgetRequests()
	other := r.env
	other.CompanyID = "other"
	_, err := r.driver.SyncIn(t.Context(), other, r.lease, createos.Sync{})
	require.ErrorIs(t, err, createos.ErrForeignLease)
	_, err = r.driver.SyncOut(t.Context(), other, r.lease, createos.Sync{})
	require.ErrorIs(t, err, createos.ErrForeignLease)
	require.Empty(t, r.srv.Requests())
	res, err := r.driver.SyncIn(t.Context(), r.env, r.lease, createos.Sync{})
	require.NoError(t, err)
	require.Empty(t, res.Operations)
}

// A sandbox that its auto-pause has paused is woken, whatever step comes next.
func TestSyncWakesAPausedSandbox(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("src/f"), "new")
	pause := func() {
		_ = r.srv.Pause(r.lease.ProviderLeaseID)
	}
	for _, method := range []string{"PUT", "GET", "POST"} {
		hit := r.srv.Fail(createostest.Fault{Method: method, Nth: 1, Before: pause, When: func(q createostest.Request) bool {
			return strings.HasSuffix(q.Path, "/files") || strings.HasSuffix(q.Path, "/exec")
		}, Frames: nil})
		_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "dst"})
		require.NoError(t, err)
		_, err = r.out(t.Context(), createos.SyncMapping{Source: "dst", Target: r.local("back")})
		require.NoError(t, err)
		require.Equal(t, 1, hit.Hits(), method)
		r.srv.ClearFaults()
	}
	r.clean()
}

// What is excluded by its plain name is not looked at in the sandbox: it may be large,
// and change all the time. Other patterns have the same result.
func TestSyncDoesNotLookAtWhatIsExcluded(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	kept := []string{"a", "d/plain file", "up", "build2/x", "d/build/x", "n/dir-only"}
	for _, f := range append(slices.Clone(kept), "node modules/x", "d/node modules/y", "build/x", "p/q'\xff/x", "dir-only/x", "n/up/x.o", "x.o") {
		r.write(r.remote("src/"+f), f)
	}
	m := createos.SyncMapping{
		Source: "src", Target: r.local("out"), Exclude: []string{"node modules", "/build", "p/q'\xff/", "dir-only/", "*.o"},
	}
	for _, how := range []createos.SyncMapping{{}, {Delta: true}, {FollowSymlinks: true}} {
		m.Delta, m.FollowSymlinks = how.Delta, how.FollowSymlinks
		require.NoError(t, os.RemoveAll(m.Target))
		var lists []byte
		for _, prefix := range []string{"list.", "sums."} {
			r.srv.Fail(createostest.Fault{When: scratchFile("GET", prefix), Reply: func(s int, b []byte) (int, []byte) {
				lists = append(lists, b...)
				return s, b
			}})
		}
		res, err := r.out(t.Context(), m)
		r.srv.ClearFaults()
		require.NoError(t, err)
		require.Equal(t, len(kept), res.Operations[0].Files)
		for _, f := range kept {
			require.Equal(t, f, r.content(filepath.Join(m.Target, f)))
		}
		for _, f := range []string{"node modules", "build/", "q'", "dir-only/"} {
			list := strings.ReplaceAll(strings.ReplaceAll(string(lists), "d/build/", ""), "build2/", "")
			require.NotContains(t, list, f)
		}
		require.Contains(t, string(lists), "x.o")
	}
	r.clean()
}
