package hosttree_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/hosttree"
)

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
		"in the rm":     {[]string{".createos-gone.d.0/older", ".createos-gone.d.7/older", "d/old"}, []string{"d"}},
		"twice":         {[]string{".createos-gone.d.0/x", ".createos-old.d/older", "d/old"}, []string{"d"}},
		"others' rm":    {[]string{".createos-gone.e.0/older", "d/old"}, []string{".createos-gone.e.0", "d"}},
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
