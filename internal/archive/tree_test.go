package archive_test

import (
	"archive/tar"
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

// A cell is a directory with a tree in it and nothing else.
type cell struct{ dir, tree string }

func newCell(t testing.TB) cell {
	t.Helper()
	c := cell{dir: t.TempDir()}
	c.tree = filepath.Join(c.dir, "tree")
	require.NoError(t, os.Mkdir(c.tree, 0o755))
	return c
}

// fill fills the tree, and requires that nothing came to lie beside it, and no file
// in it if that failed.
func (c cell) fill(t testing.TB, data []byte, asked []archive.Entry) error {
	t.Helper()
	root, err := os.OpenRoot(c.tree)
	require.NoError(t, err)
	defer root.Close()
	tree := archive.NewTree(root)
	err = tree.Extract(bytes.NewReader(data), asked)
	tree.Close()
	beside, rerr := os.ReadDir(c.dir)
	require.NoError(t, rerr)
	require.Len(t, beside, 1, "something lies beside the tree")
	files := 0
	require.NoError(t, filepath.WalkDir(c.tree, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			require.True(t, d.Type().IsRegular())
			files++
		}
		return err
	}))
	if err == nil {
		require.Equal(t, len(asked), files)
	} else {
		require.Zero(t, files)
	}
	return err
}

// A GODEBUG setting makes archive/tar look at names by itself. The result must not
// depend on it.
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
				err = newCell(t).fill(t, data, c.Asked)
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

// What an archive has written is gone after it failed, and the same tree takes a good
// one then.
func TestTreeTakesAnArchiveAgain(t *testing.T) {
	asked := []archive.Entry{
		{Name: "d/f", Kind: archive.File, Mode: 0o440, Size: 3, ModTime: 1e9},
		{Name: "g", Kind: archive.File, Mode: 0o644, Size: 70_000},
	}
	data := read(t, asked)
	c := newCell(t)
	for _, cut := range []int{0, 100, 700, 2100, len(data) - 4000} {
		require.Error(t, c.fill(t, data[:cut], asked))
	}
	require.NoError(t, c.fill(t, data, asked))
	info, err := os.Stat(filepath.Join(c.tree, "d/f"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o440), info.Mode())
	require.Equal(t, int64(1e9), info.ModTime().Unix())
}

// A tree is made of directories that can be written to while it is filled, whatever
// modes they get at the end.
func TestTreeMakesWhatIsNoFile(t *testing.T) {
	c := newCell(t)
	root, err := os.OpenRoot(c.tree)
	require.NoError(t, err)
	defer root.Close()
	tree := archive.NewTree(root)
	defer tree.Close()
	dir := archive.Entry{Name: "a/b", Kind: archive.Dir, Mode: 0o500}
	require.NoError(t, tree.MakeDir(dir))
	require.NoError(t, tree.AddFile(archive.Entry{Name: "a/b/f", Kind: archive.File, Mode: 0o640, Size: 3}, strings.NewReader("more than that")))
	require.ErrorIs(t, tree.AddFile(archive.Entry{Name: "a/b/g", Kind: archive.File, Size: 9}, strings.NewReader("less")), io.ErrUnexpectedEOF)
	require.NoError(t, tree.MakeLink(archive.Entry{Name: "a/b/l", Kind: archive.Link, Target: "f"}))
	require.NoError(t, tree.SetMode(dir))
	defer func() { require.NoError(t, os.Chmod(filepath.Join(c.tree, "a/b"), 0o700)) }() // for the removal
	got, err := os.ReadFile(filepath.Join(c.tree, "a/b/l"))
	require.NoError(t, err)
	require.Equal(t, "mor", string(got))
	require.NoFileExists(t, filepath.Join(c.tree, "a/b/g"))
	info, err := os.Stat(filepath.Join(c.tree, "a/b"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o500), info.Mode().Perm())
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
		require.NoError(t, c.fill(t, data, h.Asked))
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
	for _, h := range entries {
		entry, err := tarEntry(first, h.Name)
		require.NoError(t, err)
		require.Equal(t, h.Size, entry.Size)
		require.Equal(t, h.Target, entry.Linkname)
	}
}

// tarEntry finds an entry of an archive.
func tarEntry(data []byte, name string) (*tar.Header, error) {
	r := tar.NewReader(bytes.NewReader(data))
	for {
		h, err := r.Next()
		if err != nil || strings.TrimSuffix(h.Name, "/") == "./"+name {
			return h, err
		}
	}
}

func TestStreamNoticesAFileThatShrank(t *testing.T) {
	s, err := archive.NewStream([]archive.Entry{{Name: "f", Kind: archive.File, Size: 10}},
		func(archive.Entry) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("nine byte")), nil })
	require.NoError(t, err)
	_, err = io.ReadAll(s)
	require.ErrorIs(t, err, archive.ErrChanged)
	require.NoError(t, s.Close())
}

// FuzzTree requires that no archive writes beside its tree, nor anything in it but all
// that was asked for.
func FuzzTree(f *testing.F) {
	cases, err := hostile.Read("../../testdata/hostile.txt")
	require.NoError(f, err)
	for _, c := range cases {
		data, err := c.Archive()
		require.NoError(f, err)
		name, more := "a", false
		if len(c.Asked) > 0 {
			name, more = c.Asked[0].Name, len(c.Asked) > 1
		}
		f.Add(data, name, more)
	}
	f.Fuzz(func(t *testing.T, data []byte, name string, more bool) {
		if archive.CheckName(name, 500) != "" || name == "b" || strings.HasPrefix(name, "b/") {
			t.Skip("is not asked for")
		}
		asked := []archive.Entry{{Name: name, Kind: archive.File, Size: 1}}
		if more {
			asked = append(asked, archive.Entry{Name: "b", Kind: archive.File, Size: 1})
		}
		c := newCell(t)
		if c.fill(t, data, asked) != nil {
			return
		}
		for _, e := range asked {
			info, err := os.Lstat(filepath.Join(c.tree, e.Name))
			require.NoError(t, err)
			require.Equal(t, e.Size, info.Size())
			require.Zero(t, info.Mode()&^fs.ModePerm)
		}
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
