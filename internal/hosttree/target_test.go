package hosttree_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
)

var limits = archive.Limits{Bytes: 1 << 20, Entries: 100, NameBytes: 500}

func write(t *testing.T, path, content string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
}

func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func TestSwapReplacesADirectory(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "d/old"), "old")
	require.NoError(t, os.Chmod(filepath.Join(dir, "d"), 0o500)) // it must be removable all the same
	target, err := hosttree.OpenTarget(filepath.Join(dir, "d"))
	require.NoError(t, err)
	defer target.Close()
	root, err := target.StageDir()
	require.NoError(t, err)
	require.NoError(t, root.WriteFile("new", []byte("new"), 0o600))
	require.NoError(t, root.Close())
	require.Equal(t, "old", content(t, filepath.Join(dir, "d/old")))
	left, err := target.Swap(0o750)
	require.NoError(t, err)
	require.NoError(t, left)
	require.Equal(t, []string{"d"}, names(t, dir))
	require.Equal(t, []string{"new"}, names(t, filepath.Join(dir, "d")))
	info, err := os.Stat(filepath.Join(dir, "d"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o750), info.Mode().Perm())
}

// What was moved aside is put back if the new directory cannot take its place.
func TestSwapPutsBack(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "d/old"), "old")
	target, err := hosttree.OpenTarget(filepath.Join(dir, "d"))
	require.NoError(t, err)
	defer target.Close()
	root, err := target.StageDir()
	require.NoError(t, err)
	require.NoError(t, root.Close())
	require.NoError(t, os.Remove(filepath.Join(dir, ".createos-new.d")))
	_, err = target.Swap(0o755)
	require.Error(t, err)
	require.Equal(t, []string{"d"}, names(t, dir))
	require.Equal(t, "old", content(t, filepath.Join(dir, "d/old")))
}

func TestOpenTargetEndsWhatWasKilled(t *testing.T) {
	for name, c := range map[string]struct{ before, after []string }{
		"staging":       {[]string{".createos-new.d/x", "d/old"}, []string{"d"}},
		"between":       {[]string{".createos-new.d/x", ".createos-old.d/old"}, []string{"d"}},
		"before the rm": {[]string{".createos-old.d/older", "d/old"}, []string{"d"}},
		"others'":       {[]string{".createos-old.e/older", "d/old"}, []string{".createos-old.e", "d"}},
		"nothing":       {[]string{"x"}, []string{"x"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for _, f := range c.before {
				write(t, filepath.Join(dir, f), filepath.Base(f))
			}
			target, err := hosttree.OpenTarget(filepath.Join(dir, "d"))
			require.NoError(t, err)
			target.Close()
			require.Equal(t, c.after, names(t, dir))
			if name != "nothing" {
				require.Equal(t, "old", content(t, filepath.Join(dir, "d/old")))
			}
		})
	}
}

func TestLongNamesHaveAPlaceBesideThem(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, strings.Repeat("n", 250))
	target, err := hosttree.OpenTarget(path)
	require.NoError(t, err)
	defer target.Close()
	f, err := target.StageFile()
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, target.PutFile())
	require.FileExists(t, path)
}

func TestOpenDirRefusesALink(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "d/f"), "f")
	require.NoError(t, os.Symlink("d", filepath.Join(dir, "l")))
	require.NoError(t, os.Symlink("f", filepath.Join(dir, "d/fl")))
	_, err := hosttree.OpenDir(filepath.Join(dir, "l"))
	require.ErrorIs(t, err, hosttree.ErrIsLink)
	_, err = hosttree.OpenDir(filepath.Join(dir, "d/f"))
	require.ErrorIs(t, err, hosttree.ErrNotDir)
	_, _, err = hosttree.OpenFile(filepath.Join(dir, "d/fl"))
	require.ErrorIs(t, err, hosttree.ErrIsLink)
	_, _, err = hosttree.OpenFile(filepath.Join(dir, "d"))
	require.ErrorIs(t, err, hosttree.ErrNotFile)
	root, err := hosttree.OpenDir(filepath.Join(dir, "l/../d"))
	require.NoError(t, err, "what lies above is followed")
	require.NoError(t, root.Close())
	root, err = hosttree.OpenDir("/")
	require.NoError(t, err)
	require.NoError(t, root.Close())
}

func TestListLeavesOutWhatLeadsOut(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a/f"), "1234")
	for name, to := range map[string]string{"in": "a/f", "a/up": "../in", "out": "..", "a/out": "../../x", "abs": "/etc"} {
		require.NoError(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	root, err := hosttree.OpenDir(dir)
	require.NoError(t, err)
	defer root.Close()
	list := func(o hosttree.ListOptions) (listed, skipped []string) {
		o.Limits = limits
		l, err := hosttree.List(t.Context(), root, o)
		require.NoError(t, err)
		for _, e := range l.Entries {
			listed = append(listed, e.Name)
		}
		for _, s := range l.Skipped {
			skipped = append(skipped, s.Name)
		}
		require.Equal(t, int64(4), l.Bytes)
		require.Equal(t, 1, l.Files)
		return listed, skipped
	}
	listed, skipped := list(hosttree.ListOptions{})
	require.Equal(t, []string{"a", "a/f", "a/up", "in"}, listed)
	require.ElementsMatch(t, []string{"a/out", "abs", "out"}, skipped)
	listed, skipped = list(hosttree.ListOptions{All: true, Exclude: func(name string, _ bool) bool { return name == "abs" }})
	require.Equal(t, []string{"a", "a/f", "a/out", "a/up", "in", "out"}, listed)
	require.Empty(t, skipped)

	_, err = hosttree.List(t.Context(), root, hosttree.ListOptions{Limits: archive.Limits{Bytes: 3, Entries: 10, NameBytes: 100}})
	require.ErrorIs(t, err, hosttree.ErrLimit)
	_, err = hosttree.List(t.Context(), root, hosttree.ListOptions{Limits: archive.Limits{Bytes: 30, Entries: 2, NameBytes: 100}})
	require.ErrorIs(t, err, hosttree.ErrLimit)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = hosttree.List(ctx, root, hosttree.ListOptions{Limits: limits})
	require.ErrorIs(t, err, context.Canceled)
}

func TestReaderNoticesWhatChanged(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "d/f"), "1234")
	root, err := hosttree.OpenDir(dir)
	require.NoError(t, err)
	defer root.Close()
	r := hosttree.NewReader(root)
	defer r.Close()
	buf := make([]byte, 100)
	for _, size := range []int64{3, 5, 200} {
		e := archive.Entry{Name: "d/f", Kind: archive.File, Size: size}
		_, err := r.Digest(t.Context(), e, buf)
		require.ErrorIs(t, err, archive.ErrChanged)
		_, err = r.Open(e)
		require.ErrorIs(t, err, archive.ErrChanged)
	}
	for _, n := range []int{4, 100, 5000} { // with one read, and with several
		write(t, filepath.Join(dir, "d/f"), strings.Repeat("x", n))
		sum, err := r.Digest(t.Context(), archive.Entry{Name: "d/f", Kind: archive.File, Size: int64(n)}, buf)
		require.NoError(t, err)
		require.NotZero(t, sum)
	}
	_, err = r.Digest(t.Context(), archive.Entry{Name: "d/gone", Kind: archive.File}, buf)
	require.ErrorIs(t, err, archive.ErrChanged)
}

// os.Root follows a link that stays in it, and that may lead to what was not to be
// read.
func TestReaderNoticesALink(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "pub/a"), "1234")
	write(t, filepath.Join(dir, "priv/a"), "5678")
	write(t, filepath.Join(dir, "x/sub/a"), "5678")
	require.NoError(t, os.Symlink("priv", filepath.Join(dir, "dir")))
	require.NoError(t, os.Symlink("x", filepath.Join(dir, "deep")))
	require.NoError(t, os.Symlink("a", filepath.Join(dir, "pub/link")))
	root, err := hosttree.OpenDir(dir)
	require.NoError(t, err)
	defer root.Close()
	r := hosttree.NewReader(root)
	defer r.Close()
	buf := make([]byte, 100)
	for _, name := range []string{"dir/a", "pub/link", "deep/sub/a", "priv"} {
		e := archive.Entry{Name: name, Kind: archive.File, Size: 4}
		_, err := r.Open(e)
		require.ErrorIs(t, err, archive.ErrChanged, name)
		_, err = r.Digest(t.Context(), e, buf)
		require.ErrorIs(t, err, archive.ErrChanged, name)
	}
	_, err = r.Digest(t.Context(), archive.Entry{Name: "x/sub/a", Kind: archive.File, Size: 4}, buf)
	require.NoError(t, err)
}
