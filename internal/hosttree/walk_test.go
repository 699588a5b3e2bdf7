package hosttree_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
	"github.com/createos-lease/createos/internal/manifest"
)

var limits = manifest.Limits{Bytes: 1 << 20, Entries: 100, NameBytes: 500}

func TestWalkComesByEverything(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a/f"), "1234")
	for name, to := range map[string]string{"in": "a/f", "a/up": "../in", "out": ".."} {
		require.NoError(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	root, err := hosttree.OpenDir(dir)
	require.NoError(t, err)
	defer root.Close()
	walk := func(o hosttree.WalkOptions) map[string]archive.Entry {
		o.Limits = limits
		got := make(map[string]archive.Entry)
		require.NoError(t, hosttree.Walk(t.Context(), root, o, func(e archive.Entry) error {
			up := filepath.Dir(e.Name)
			require.True(t, up == "." || got[up].Kind == archive.Dir, "%s comes before its directory", e.Name)
			require.NotContains(t, got, e.Name)
			got[e.Name] = e
			return nil
		}))
		return got
	}
	got := walk(hosttree.WalkOptions{})
	require.Len(t, got, 5)
	require.Equal(t, int64(4), got["a/f"].Size)
	require.Zero(t, got["a/f"].Sum)
	require.Equal(t, "../in", got["a/up"].Target)
	require.Equal(t, archive.Link, got["out"].Kind)
	got = walk(hosttree.WalkOptions{Digest: true, Exclude: func(name string, dir bool) bool { return name == "out" || name == "in" && !dir }})
	require.Len(t, got, 3)
	require.Equal(t, sha256.Sum256([]byte("1234")), got["a/f"].Sum)

	visited := func(archive.Entry) error { return nil }
	for _, l := range []manifest.Limits{{Bytes: 3, Entries: 10, NameBytes: 100}, {Bytes: 30, Entries: 2, NameBytes: 100}} {
		require.ErrorIs(t, hosttree.Walk(t.Context(), root, hosttree.WalkOptions{Limits: l}, visited), manifest.ErrLimit)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, hosttree.Walk(ctx, root, hosttree.WalkOptions{Limits: limits}, visited), context.Canceled)
	stop := errors.New("stop")
	require.ErrorIs(t, hosttree.Walk(t.Context(), root, hosttree.WalkOptions{Limits: limits}, func(archive.Entry) error { return stop }), stop)
}

// A directory may have any number of names: they are read some at a time.
func TestWalkComesByLargeDirectories(t *testing.T) {
	for _, n := range []int{0, 1, 1023, 1024, 1025, 2048, 2500} {
		dir := t.TempDir()
		for i := range n {
			require.NoError(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), []byte(strconv.Itoa(i)), 0o600))
		}
		root, err := os.OpenRoot(dir)
		require.NoError(t, err)
		seen := make(map[string]bool)
		o := hosttree.WalkOptions{Limits: manifest.Limits{Bytes: 1 << 20, Entries: n, NameBytes: 10}, Digest: true}
		require.NoError(t, hosttree.Walk(t.Context(), root, o, func(e archive.Entry) error {
			require.Equal(t, sha256.Sum256([]byte(e.Name)), e.Sum)
			seen[e.Name] = true
			return nil
		}))
		require.Len(t, seen, n)
		require.NoError(t, root.Close())
	}
}

// What is exchanged between the look at it and its opening has changed: it is not
// missing, and a link in its place is not followed.
func TestWalkNoticesWhatChanges(t *testing.T) {
	for name, become := range map[string]func(path string) error{
		"gone": func(string) error { return nil },
		"file": func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"link": func(path string) error { return os.Symlink("b", path) },
		"another directory": func(path string) error {
			return errors.Join(os.Mkdir(path+"2", 0o700), os.Rename(path+"2", path))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, filepath.Join(dir, "a/f"), "")
			write(t, filepath.Join(dir, "b/f"), "")
			root, err := os.OpenRoot(dir)
			require.NoError(t, err)
			defer root.Close()
			var seen []string
			err = hosttree.Walk(t.Context(), root, hosttree.WalkOptions{Limits: limits}, func(e archive.Entry) error {
				seen = append(seen, e.Name)
				path := filepath.Join(dir, e.Name)
				if e.Name != "a" {
					return nil
				}
				return errors.Join(os.RemoveAll(path), become(path))
			})
			if name == "another directory" { // as if it had been listed a moment later
				require.NoError(t, err)
				require.Equal(t, []string{"a", "b", "b/f"}, seen)
				return
			}
			require.ErrorIs(t, err, archive.ErrChanged)
		})
	}
}

// A file is hashed with one read if it is small, and with several; one that must not
// be read has no digest.
func TestWalkHashes(t *testing.T) {
	dir := t.TempDir()
	large := strings.Repeat("x", 200<<10)
	write(t, filepath.Join(dir, "large"), large)
	write(t, filepath.Join(dir, "empty"), "")
	write(t, filepath.Join(dir, "edge"), large[:64<<10])
	write(t, filepath.Join(dir, "below"), large[:64<<10-1])
	write(t, filepath.Join(dir, "closed"), "x")
	require.NoError(t, os.Chmod(filepath.Join(dir, "closed"), 0))
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer root.Close()
	require.NoError(t, hosttree.Walk(t.Context(), root, hosttree.WalkOptions{Limits: limits, Digest: true}, func(e archive.Entry) error {
		want := sha256.Sum256([]byte(large[:e.Size]))
		if e.Name == "closed" && os.Geteuid() != 0 {
			want = [32]byte{}
		}
		require.Equal(t, want, e.Sum, e.Name)
		return nil
	}))
}

func TestReaderNoticesWhatChanged(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "d/f"), "1234")
	root, err := hosttree.OpenDir(dir)
	require.NoError(t, err)
	defer root.Close()
	r := hosttree.NewReader(root)
	defer r.Close()
	for _, size := range []int64{3, 5, 200} {
		_, err = r.Open(archive.Entry{Name: "d/f", Kind: archive.File, Size: size})
		require.ErrorIs(t, err, archive.ErrChanged)
	}
	f, err := r.Open(archive.Entry{Name: "d/f", Kind: archive.File, Size: 4})
	require.NoError(t, err)
	write(t, filepath.Join(dir, "d/f"), "12345")
	require.ErrorIs(t, f.Close(), archive.ErrChanged)
	_, err = r.Open(archive.Entry{Name: "d/gone", Kind: archive.File})
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
	for _, name := range []string{"dir/a", "pub/link", "deep/sub/a", "priv"} {
		e := archive.Entry{Name: name, Kind: archive.File, Size: 4}
		_, err := r.Open(e)
		require.ErrorIs(t, err, archive.ErrChanged, name)
	}
	f, err := r.Open(archive.Entry{Name: "x/sub/a", Kind: archive.File, Size: 4})
	require.NoError(t, err)
	require.NoError(t, f.Close())
}
