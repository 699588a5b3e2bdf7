package hosttree

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/manifest"
)

// A merging is a directory, "out" in dir, that is merged into.
type merging struct {
	t      *testing.T
	dir    string
	target *Target
	stage  *os.Root
}

// newMerging makes the directory of files with the content "old" and of links.
func newMerging(t *testing.T, files []string, links map[string]string) *merging {
	m := &merging{t: t, dir: t.TempDir()}
	for _, name := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(m.path(name)), 0o755))
		require.NoError(t, os.WriteFile(m.path(name), []byte("old"), 0o644))
	}
	for name, target := range links {
		require.NoError(t, os.Symlink(target, m.path(name)))
	}
	var err error
	m.target, err = OpenTarget(m.path(""))
	require.NoError(t, err)
	t.Cleanup(m.target.Close)
	m.stage, err = m.target.StageMerge()
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.stage.Close() })
	return m
}

func (m *merging) path(name string) string { return filepath.Join(m.dir, "out", name) }

func (m *merging) content(name string) string {
	b, err := os.ReadFile(m.path(name))
	require.NoError(m.t, err)
	return string(b)
}

// staged stages files with the content "new" and returns the list of them.
func (m *merging) staged(names ...string) *manifest.List {
	l := m.listed(names...)
	for _, name := range names {
		require.NoError(m.t, m.stage.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(m.t, m.stage.WriteFile(name, []byte("new"), 0o644))
	}
	return l
}

// listed makes a list of files, or of directories if the name ends in a slash.
func (m *merging) listed(names ...string) *manifest.List {
	var l manifest.List
	for _, name := range names {
		e := archive.Entry{Name: filepath.ToSlash(filepath.Clean(name)), Kind: archive.File, Size: 3}
		if e.Name != name {
			e = archive.Entry{Name: e.Name, Kind: archive.Dir, Mode: 0o755}
		}
		require.NoError(m.t, l.Add(e))
	}
	require.NoError(m.t, l.Sort())
	return &l
}

func (m *merging) merge(c Change) (int, error) {
	for _, l := range []**manifest.List{&c.Put, &c.First, &c.Last} {
		if *l == nil {
			*l = &manifest.List{}
		}
	}
	n, err := m.target.Merge(m.t.Context(), c)
	require.NoError(m.t, m.target.Discard())
	return n, err
}

// What was to be removed with a directory in the way is gone, and something else is
// there, which nobody has listed, or was excluded: nothing is changed.
func TestMergeCountsWhatIsThere(t *testing.T) {
	m := newMerging(t, []string{"a", "d/kept"}, nil)
	_, err := m.merge(Change{Put: m.staged("a", "d"), First: m.listed("d/", "d/listed")})
	require.ErrorIs(t, err, ErrNotFile)
	require.Equal(t, "old", m.content("a"))
	require.Equal(t, "old", m.content("d/kept"))

	m = newMerging(t, []string{"a", "d/x", "d/e/y"}, nil)
	n, err := m.merge(Change{Put: m.staged("a", "d"), First: m.listed("d/", "d/x", "d/e/", "d/e/y", "d/gone")})
	require.NoError(t, err)
	require.Equal(t, 4, n)
	require.Equal(t, "new", m.content("d"))
}

// A directory became a link to another one after the target was listed. That one is
// neither written to, nor is anything removed there, nor does its mode change.
func TestMergeDoesNotFollowALinkThatCameLater(t *testing.T) {
	for name, change := range map[string]func(m *merging) Change{
		"put":        func(m *merging) Change { return Change{Put: m.staged("a", "d/x")} },
		"put deeper": func(m *merging) Change { return Change{Put: m.staged("a", "d/e/x")} },
		"first":      func(m *merging) Change { return Change{Put: m.staged("a"), First: m.listed("d/x")} },
		"last":       func(m *merging) Change { return Change{Put: m.staged("a"), Last: m.listed("d/x")} },
		"in order":   func(m *merging) Change { return Change{Put: m.staged("a"), Last: m.listed("d/e/", "d/e/x")} },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMerging(t, []string{"a", "kept/x", "kept/e/x"}, map[string]string{"d": "kept"})
			n, err := m.merge(change(m))
			require.ErrorIs(t, err, ErrIsLink)
			require.Zero(t, n)
			for _, f := range []string{"a", "kept/x", "kept/e/x"} {
				require.Equal(t, "old", m.content(f))
			}
		})
	}
	// It takes the place while files are moved: that can only be seen afterwards.
	m := newMerging(t, []string{"a", "d/x", "kept/x"}, nil)
	list := m.staged("d/x")
	dir, err := m.target.dirs.of("d")
	require.NoError(t, err)
	require.NoError(t, os.Rename(m.path("d"), m.path("moved")))
	require.NoError(t, os.Symlink("kept", m.path("d")))
	for e := range list.All() {
		require.ErrorIs(t, m.target.place(dir, e.Name), ErrIsLink)
	}
	m.target.dirs.close()
	require.ErrorIs(t, m.target.chmod("d", 0o700), ErrIsLink)
}

// A directory that cannot get its mode does not keep others from getting theirs.
func TestMergeGivesAllModesThatItCan(t *testing.T) {
	m := newMerging(t, []string{"b/x", "kept/x"}, map[string]string{"a": "kept"})
	require.NoError(t, os.Chmod(m.path("b"), 0o700))
	err := m.target.dirModes(m.listed("a/", "b/", "gone/").All())
	require.ErrorIs(t, err, ErrIsLink)
	info, err := os.Stat(m.path("b"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o755), info.Mode().Perm())
}
