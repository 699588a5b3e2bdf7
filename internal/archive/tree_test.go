package archive_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/archive/hostile"
)

var testLimits = archive.Limits{Bytes: 100_000, Entries: 5, NameBytes: 500}

// A cell is a directory with a tree in it and nothing else.
type cell struct{ dir, tree string }

func newCell(t testing.TB) cell {
	t.Helper()
	c := cell{dir: t.TempDir()}
	c.tree = filepath.Join(c.dir, "tree")
	require.NoError(t, os.Mkdir(c.tree, 0o755))
	return c
}

// extract fills the tree, and requires that nothing came to lie beside it.
func (c cell) extract(t testing.TB, data []byte, limits archive.Limits) error {
	t.Helper()
	root, err := os.OpenRoot(c.tree)
	require.NoError(t, err)
	defer root.Close()
	tree := archive.NewTree(root, limits)
	err = tree.Add(bytes.NewReader(data))
	if err == nil {
		err = tree.Finish()
	}
	tree.Close()
	beside, rerr := os.ReadDir(c.dir)
	require.NoError(t, rerr)
	require.Len(t, beside, 1, "something lies beside the tree")
	return err
}

// A GODEBUG setting makes archive/tar look at names by itself, and not at the
// targets of links. The result must not depend on it.
func TestTreeRefusesHostileArchives(t *testing.T) {
	cases, err := hostile.Read("../../testdata/hostile.txt")
	require.NoError(t, err)
	require.NotEmpty(t, cases)
	for _, insecure := range []string{"tarinsecurepath=0", "tarinsecurepath=1"} {
		t.Setenv("GODEBUG", insecure)
		for _, c := range cases {
			t.Run(insecure+"/"+c.Name, func(t *testing.T) {
				data, err := c.Archive()
				require.NoError(t, err)
				cell := newCell(t)
				err = cell.extract(t, data, testLimits)
				if c.Want == "" {
					require.NoError(t, err)
					return
				}
				require.Error(t, err)
				var refused *archive.RefusedError
				if errors.As(err, &refused) {
					if insecure == "tarinsecurepath=0" && refused.Reason == "is not readable" {
						return // archive/tar was first
					}
					require.Equal(t, c.Want, refused.Reason)
					return
				}
				require.EqualError(t, err, c.Want)
			})
		}
	}
}

// What Add has written is gone after it failed, and the same tree takes a good
// archive then.
func TestTreeTakesAnArchiveAgain(t *testing.T) {
	entries := []archive.Entry{
		{Name: "d", Kind: archive.Dir, Mode: 0o500},
		{Name: "d/f", Kind: archive.File, Mode: 0o440, Size: 3, ModTime: 1e9},
		{Name: "g", Kind: archive.File, Mode: 0o644, Size: 70_000},
	}
	data := read(t, entries)
	c := newCell(t)
	root, err := os.OpenRoot(c.tree)
	require.NoError(t, err)
	defer root.Close()
	tree := archive.NewTree(root, archive.Limits{Bytes: 80_000, Entries: 4, NameBytes: 99})
	for _, cut := range []int{700, 2100, len(data) - 4000} {
		err := tree.Add(bytes.NewReader(data[:cut]))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.NoFileExists(t, filepath.Join(c.tree, "d/f"))
		require.NoFileExists(t, filepath.Join(c.tree, "g"))
	}
	require.NoError(t, tree.Add(bytes.NewReader(data)))
	require.NoError(t, tree.Finish())
	info, err := os.Stat(filepath.Join(c.tree, "d/f"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o440), info.Mode())
	require.Equal(t, int64(1e9), info.ModTime().Unix())
	info, err = os.Stat(filepath.Join(c.tree, "d"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o500), info.Mode().Perm())
	require.NoError(t, os.Chmod(filepath.Join(c.tree, "d"), 0o700)) // for the removal
}

func TestTreeDropsBitsBeyondThePermissions(t *testing.T) {
	cases, err := hostile.Read("../../testdata/hostile.txt")
	require.NoError(t, err)
	for _, h := range cases {
		if h.Name != "bits beyond the permissions" {
			continue
		}
		data, err := h.Archive()
		require.NoError(t, err)
		c := newCell(t)
		require.NoError(t, c.extract(t, data, testLimits))
		info, err := os.Stat(filepath.Join(c.tree, "suid"))
		require.NoError(t, err)
		require.Equal(t, fs.FileMode(0o755), info.Mode())
		return
	}
	t.Fatal("the case is not in the table")
}

// contentOf is the content of a file in tests: its name, over and over.
func contentOf(e archive.Entry) io.ReadCloser {
	return io.NopCloser(strings.NewReader(strings.Repeat(e.Name, int(e.Size)/len(e.Name)+1)[:e.Size]))
}

func read(t testing.TB, entries []archive.Entry) []byte {
	t.Helper()
	s, err := archive.NewStream(entries, func(e archive.Entry) (io.ReadCloser, error) { return contentOf(e), nil })
	require.NoError(t, err)
	data, err := io.ReadAll(s)
	require.NoError(t, err)
	require.Equal(t, s.Size(), int64(len(data)))
	require.NoError(t, s.Close())
	return data
}

func TestStreamCanBeReadAgain(t *testing.T) {
	entries := []archive.Entry{
		{Name: strings.Repeat("long/", 60) + "\xff\n name", Kind: archive.File, Mode: 0o600, Size: 1},
		{Name: "empty", Kind: archive.File},
		{Name: "dir", Kind: archive.Dir, Mode: 0o755},
		{Name: "link", Kind: archive.Link, Target: strings.Repeat("t/", 80) + "x"},
		{Name: "full", Kind: archive.File, Size: 512},
	}
	s, err := archive.NewStream(entries, func(e archive.Entry) (io.ReadCloser, error) { return contentOf(e), nil })
	require.NoError(t, err)
	first, err := io.ReadAll(s)
	require.NoError(t, err)
	for _, part := range []int64{0, 1, 511, 513, 2000, s.Size()} {
		_, err = s.Seek(0, io.SeekStart)
		require.NoError(t, err)
		_, err = io.CopyN(io.Discard, s, part)
		require.NoError(t, err)
		_, err = s.Seek(0, io.SeekStart)
		require.NoError(t, err)
		again, err := io.ReadAll(s)
		require.NoError(t, err)
		require.True(t, bytes.Equal(first, again))
	}
	_, err = s.Seek(1, io.SeekStart)
	require.Error(t, err)
	c := newCell(t)
	require.NoError(t, c.extract(t, first, archive.Limits{Bytes: 1000, Entries: 9, NameBytes: 2000}))
	got, err := os.ReadFile(filepath.Join(c.tree, entries[0].Name))
	require.NoError(t, err)
	require.Equal(t, "l", string(got))
}

func TestStreamNoticesAFileThatShrank(t *testing.T) {
	s, err := archive.NewStream([]archive.Entry{{Name: "f", Kind: archive.File, Size: 10}},
		func(archive.Entry) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("nine byte")), nil })
	require.NoError(t, err)
	_, err = io.ReadAll(s)
	require.ErrorIs(t, err, archive.ErrChanged)
	require.NoError(t, s.Close())
}

// FuzzTree requires that no archive writes beside its tree or leaves a link in it
// that leads out, and that the limits hold.
func FuzzTree(f *testing.F) {
	cases, err := hostile.Read("../../testdata/hostile.txt")
	require.NoError(f, err)
	for _, c := range cases {
		data, err := c.Archive()
		require.NoError(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c := newCell(t)
		err := c.extract(t, data, testLimits)
		files, size := 0, int64(0)
		inside, rerr := filepath.EvalSymlinks(c.tree)
		require.NoError(t, rerr)
		_ = filepath.WalkDir(c.tree, func(p string, d fs.DirEntry, werr error) error {
			if werr != nil {
				return nil // a directory that its mode keeps closed
			}
			if d.Type().IsRegular() {
				info, err := d.Info()
				require.NoError(t, err)
				files++
				size += info.Size()
			}
			if to, lerr := filepath.EvalSymlinks(p); lerr == nil && err == nil {
				require.True(t, to == inside || strings.HasPrefix(to, inside+"/"), "%q leads out", p)
			}
			return nil
		})
		require.LessOrEqual(t, files, testLimits.Entries)
		require.LessOrEqual(t, size, testLimits.Bytes)
		_ = filepath.WalkDir(c.tree, func(p string, d fs.DirEntry, _ error) error { // so that it can be removed
			if d.IsDir() {
				return os.Chmod(p, 0o700)
			}
			return nil
		})
	})
}

func TestPackedIsWhatAnEntryTakes(t *testing.T) {
	for n := 1; n < 1100; n++ {
		name := strings.Repeat("n", n)
		for _, e := range []archive.Entry{
			{Name: name, Kind: archive.File, Size: int64(n)}, {Name: name, Kind: archive.Dir}, {Name: "l", Kind: archive.Link, Target: name},
			{Name: name, Kind: archive.Link, Target: name},
		} {
			s, err := archive.NewStream([]archive.Entry{e}, nil)
			require.NoError(t, err)
			require.Equal(t, s.Size(), e.Packed()+archive.Overhead, "%d %v", n, e.Kind)
		}
	}
}
