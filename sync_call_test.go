//go:build unix

package createos_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
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
	require.ErrorContains(t, err, "Command.Name")
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
	for _, f := range []string{"a.o", "a.c", "d/b.o", "d/b.c", "d/node_modules/x", "build/x", "d/build/x", "docs/a/b/c.md", "docs/x.txt", "tmp", "e/tmp/x"} {
		r.write(r.local("src/"+f), f)
	}
	m := createos.SyncMapping{Source: r.local("src"), Target: "dst", Exclude: []string{"*.o", "node_modules", "/build", "docs/**/*.md", "tmp/"}}
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
				select {
				case err := <-done:
					require.ErrorIs(t, err, c.want)
					require.NotErrorIs(t, err, context.Canceled)
				default:
					t.Fatal("not waited for")
				}
				require.Equal(t, "old", r.content(r.local("out/old")))
				_, err := r.in(context.Background(), createos.SyncMapping{Source: r.local("src"), Target: "dst"})
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

// Syncs of one lease may run at the same time, to the same target too: the target
// is one of them as a whole.
func TestSyncsRunAtTheSameTime(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	const n = 4
	for i := range n {
		for j := range 5 {
			r.write(r.local(fmt.Sprintf("src%d/%d", i, j)), fmt.Sprint(i))
		}
	}
	var all sync.WaitGroup
	failed := make([]error, 2*n)
	for i := range n {
		all.Go(func() {
			_, failed[i] = r.in(t.Context(), createos.SyncMapping{Source: r.local(fmt.Sprintf("src%d", i)), Target: "same"})
		})
		all.Go(func() {
			own := fmt.Sprintf("own%d", i)
			_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local(fmt.Sprintf("src%d", i)), Target: own})
			_, err2 := r.out(t.Context(), createos.SyncMapping{Source: own, Target: r.local("same")})
			failed[n+i] = errors.Join(err, err2)
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(failed...))
	for _, dir := range []string{r.remote("same"), r.local("same")} {
		first := r.content(filepath.Join(dir, "0"))
		for j := range 5 {
			require.Equal(t, first, r.content(filepath.Join(dir, fmt.Sprint(j))), dir)
		}
	}
	r.clean()
}

// Two syncs to one local target wait for each other, also when they call it by
// different names.
func TestSyncOutKnowsATargetByAllItsNames(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("one/f"), "one")
	r.write(r.remote("two/f"), "two")
	require.NoError(t, os.Mkdir(r.local("real"), 0o755))
	require.NoError(t, os.Symlink("real", r.local("alias")))
	staged, moveOn := make(chan struct{}), make(chan struct{})
	r.srv.Fail(createostest.Fault{When: scratchFile("GET", "p."), Nth: 1, Before: func() {
		close(staged)
		<-moveOn
	}})
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := r.out(t.Context(), createos.SyncMapping{Source: "one", Target: r.local("real/t")})
		first <- err
	}()
	<-staged
	go func() {
		_, err := r.out(t.Context(), createos.SyncMapping{Source: "two", Target: r.local("alias/t")})
		second <- err
	}()
	select {
	case err := <-second:
		t.Errorf("did not wait: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	require.DirExists(t, r.local("real/.createos-new.t"))
	close(moveOn)
	require.NoError(t, <-first)
	require.NoError(t, <-second)
	require.Equal(t, "two", r.content(r.local("real/t/f")))
	r.clean()
}

// A source that changes while it is read is noticed.
func TestSyncInNoticesAChange(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("src/a"), "12345")
	r.write(r.remote("dst/old"), "old")
	r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/exec", Nth: 2, After: func() {
		_ = os.WriteFile(r.local("src/a"), []byte("1"), 0o644)
	}})
	m := createos.SyncMapping{Source: r.local("src"), Target: "dst", Delta: true}
	_, err := r.in(t.Context(), m)
	require.ErrorIs(t, err, createos.ErrSyncChanged)
	require.Equal(t, "old", r.content(r.remote("dst/old")))
	r.srv.ClearFaults()
	_, err = r.in(t.Context(), m)
	require.NoError(t, err)
	r.clean()
}

// So is one that keeps its size or grows while it is read: what arrives is never a
// mixture of two versions.
func TestSyncInNoticesAChangeInPlace(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	fill(t, r.local("f"), 40<<20)
	fill(t, r.local("small/f"), 15<<20)
	fill(t, r.local("large/f"), 40<<20)
	noticed := 0
	for source, file := range map[string]string{"f": "f", "small": "small/f", "large": "large/f"} {
		for i := range 4 {
			before := r.content(r.local(file))
			r.srv.Fail(createostest.Fault{When: scratchFile("PUT", "p."), Nth: 1, Before: func() {
				f, err := os.OpenFile(r.local(file), os.O_RDWR, 0)
				if err == nil {
					_, _ = f.WriteAt([]byte{byte(i)}, 0)
					_, _ = f.WriteAt([]byte{byte(i)}, int64(len(before)-1+i%2)) // every other time it grows
					f.Close()
				}
			}})
			_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local(source), Target: "dst/" + source})
			r.srv.ClearFaults()
			if err != nil {
				require.ErrorIs(t, err, createos.ErrSyncChanged)
				noticed++
				continue
			}
			// All of it was read before or, again, after the change.
			got := r.content(r.remote("dst/" + file))
			require.True(t, got == before || got == r.content(r.local(file)), "a mixture")
		}
	}
	require.Positive(t, noticed)
	r.clean()
}

// A file of the sandbox that grows, as a log does, has changed, and is not corrupt.
func TestSyncOutNoticesAFileThatGrows(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	fill(t, r.remote("src/log"), 17<<20)
	r.srv.Fail(createostest.Fault{When: scratchFile("GET", "b."), Before: func() {
		f, err := os.OpenFile(r.remote("src/log"), os.O_WRONLY|os.O_APPEND, 0)
		if err == nil {
			_, _ = f.WriteString("line\n")
			f.Close()
		}
	}})
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "src/log", Target: r.local("log")})
	require.ErrorIs(t, err, createos.ErrSyncChanged)
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
	require.ErrorIs(t, err, createos.ErrSyncChanged)
	require.NoFileExists(t, r.local("log"))
	require.NoDirExists(t, r.local("out"))
	r.srv.ClearFaults()
	r.clean()
}
