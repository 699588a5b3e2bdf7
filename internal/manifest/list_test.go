package manifest_test

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/manifest"
)

// all reads a list whole.
func all(t require.TestingT, l *manifest.List) (got []archive.Entry) {
	for e, err := range l.All() {
		require.NoError(t, err)
		got = append(got, e)
	}
	return got
}

func listOf(t require.TestingT, entries ...archive.Entry) *manifest.List {
	l := &manifest.List{}
	for _, e := range entries {
		require.NoError(t, l.Add(e))
	}
	require.NoError(t, l.Sort())
	return l
}

// named makes entries: directories end in a slash.
func named(names ...string) (list []archive.Entry) {
	for _, name := range names {
		e := archive.Entry{Name: strings.TrimSuffix(name, "/"), Kind: archive.File}
		if e.Name != name {
			e.Kind = archive.Dir
		}
		list = append(list, e)
	}
	return list
}

// Whatever is in an entry comes back, from memory and from the disk, in order,
// however the entries came in.
func TestListKeepsEverything(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	rapid.Check(t, func(rt *rapid.T) {
		count := rapid.SampledFrom([]int{0, 1, 100, 4095, 4096, 4097, 9000}).Draw(rt, "count")
		order := rapid.SampledFrom([]string{"sorted", "backwards", "mixed", "in two"}).Draw(rt, "order")
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		want := make([]archive.Entry, count)
		files, bytes := 0, int64(0)
		for i := range want {
			e := archive.Entry{
				Name: fmt.Sprintf("d%d/%c%x", rnd.IntN(50), 1+rnd.IntN(255), i), Kind: archive.Kind(rnd.IntN(4)), Mode: fs.FileMode(rnd.IntN(0o1000)),
				Size: rnd.Int64() >> rnd.IntN(64), ModTime: rnd.Int64() - rnd.Int64(), Followed: rnd.IntN(2) == 0,
			}
			if rnd.IntN(2) == 0 {
				e.Target, e.Skip, e.Sum[rnd.IntN(32)] = strings.Repeat("t", rnd.IntN(300)), "is no good", 1
			}
			if want[i] = e; e.Kind == archive.File {
				files, bytes = files+1, bytes+e.Size
			}
		}
		byName := func(a, b archive.Entry) int { return manifest.Compare(a.Name, b.Name) }
		slices.SortFunc(want, byName)
		in := slices.Clone(want)
		switch order {
		case "backwards":
			slices.Reverse(in)
		case "mixed":
			rnd.Shuffle(len(in), func(i, j int) { in[i], in[j] = in[j], in[i] })
		case "in two":
			in = append(in[len(in)/2:], in[:len(in)/2]...)
		}
		l := listOf(rt, in...)
		for range 2 {
			require.True(rt, slices.Equal(want, all(rt, l)))
		}
		require.Equal(rt, count, l.Len)
		require.Equal(rt, files, l.Files)
		require.Equal(rt, bytes, l.Bytes)
		l.Close()
		require.Empty(rt, all(rt, l))
		left, err := os.ReadDir(os.Getenv("TMPDIR"))
		require.NoError(rt, err)
		require.Empty(rt, left)
	})
}

// A list does not take memory as it grows, neither when entries are added, in the
// worst order, nor when it is sorted or gone through.
func TestListDoesNotGrowInMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("makes a list of many entries")
	}
	live := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	start := live()
	l := &manifest.List{}
	defer l.Close()
	const count = 300_000
	most, sofar := int64(0), 0
	look := func() {
		if sofar++; sofar%50_000 == 0 {
			most = max(most, live()-start)
		}
	}
	for i := range count {
		name := fmt.Sprintf("directory-%03d/with-a-name-of-some-length-%07d", i*7919%1000, count-i)
		require.NoError(t, l.Add(archive.Entry{Name: name, Kind: archive.File, Sum: [32]byte{1}}))
		look()
	}
	require.NoError(t, l.Sort())
	last := ""
	for e, err := range l.All() {
		require.NoError(t, err)
		require.Negative(t, manifest.Compare(last, e.Name))
		last = e.Name
		look()
	}
	require.Equal(t, count, l.Len)
	require.Less(t, most, int64(8<<20))
}

// A disk that is full, or no place for a temporary file, is an error, and nothing is
// lost in silence.
func TestListSaysWhenItCannotStore(t *testing.T) {
	t.Setenv("TMPDIR", "/nonexistent")
	if runtime.GOOS == "windows" {
		t.Setenv("TMP", `C:\nonexistent`)
	}
	l := &manifest.List{}
	defer l.Close()
	var err error
	for i := 0; err == nil && i < 100_000; i++ {
		err = l.Add(archive.Entry{Name: fmt.Sprintf("some/name/that/is/not/short/%d", i)})
	}
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorAs(t, err, new(*manifest.StoreError))
}

// The order is that of a walk: what is in a directory comes right after it.
func TestCompareIsTheOrderOfAWalk(t *testing.T) {
	t.Parallel()
	sorted := []string{"a", "a/!", "a/b", "a/b/c", "a/b!", "a/bc", "a!", "a-b", "a-b/c", "a0", "b", "b/\x01", "\xff"}
	for i, a := range sorted {
		for j, b := range sorted {
			require.Equal(t, cmp.Compare(i, j), manifest.Compare(a, b), "%q %q", a, b)
		}
	}
	require.True(t, manifest.Below("a/b", "a"))
	for _, name := range []string{"a", "ab", "ab/c", "", "b/a"} {
		require.False(t, manifest.Below(name, "a"))
	}
	parts := func(name string) []string { return strings.Split(name, "/") }
	rapid.Check(t, func(rt *rapid.T) {
		name := rapid.StringMatching(`[ab!\x01]{1,2}(/[ab!\x01]{1,2}){0,3}`)
		a, b := name.Draw(rt, "a"), name.Draw(rt, "b")
		require.Equal(rt, slices.Compare(parts(a), parts(b)), manifest.Compare(a, b))
	})
}

func TestBottomUp(t *testing.T) {
	t.Parallel()
	l := listOf(t, named("a/", "a/b/", "a/b/c", "a/d", "e/", "f", "g/h/", "g/h/i/")...)
	var got []string
	for e, err := range manifest.BottomUp(l.All()) {
		require.NoError(t, err)
		got = append(got, e.Name)
	}
	require.Equal(t, []string{"a/b/c", "a/b", "a/d", "a", "e", "f", "g/h/i", "g/h"}, got)
	for range manifest.BottomUp(l.All()) {
		break // it may be left at any place
	}
	rapid.Check(t, func(rt *rapid.T) {
		names := rapid.SliceOfDistinct(rapid.StringMatching(`[ab!](/[ab!]){0,3}/?`), func(s string) string { return strings.TrimSuffix(s, "/") }).Draw(rt, "names")
		seen := make(map[string]bool)
		for e, err := range manifest.BottomUp(listOf(rt, named(names...)...).All()) {
			require.NoError(rt, err)
			for up := path.Dir(e.Name); up != "."; up = path.Dir(up) {
				require.False(rt, seen[up], "%s comes after %s", e.Name, up)
			}
			seen[e.Name] = e.Kind == archive.Dir
		}
		require.Len(rt, seen, len(names))
	})
}

func TestPairs(t *testing.T) {
	t.Parallel()
	a, b := listOf(t, named("a", "b", "d/", "d/x")...), listOf(t, named("b", "c", "d", "e")...)
	var got []string
	for p, err := range manifest.Pairs(a.All(), b.All()) {
		require.NoError(t, err)
		text := "-"
		if p.A != nil {
			text = p.A.Name
		}
		if p.B != nil {
			text += " " + p.B.Name
		}
		got = append(got, text)
	}
	require.Equal(t, []string{"a", "b b", "- c", "d d", "d/x", "- e"}, got)
	for range manifest.Pairs(a.All(), b.All()) {
		break
	}
	broken := errors.New("broken")
	failing := func(yield func(archive.Entry, error) bool) {
		_ = yield(archive.Entry{Name: "b"}, nil) && yield(archive.Entry{}, broken)
	}
	for _, pairs := range []func(func(manifest.Pair, error) bool){manifest.Pairs(failing, b.All()), manifest.Pairs(a.All(), failing)} {
		var last error
		for _, err := range pairs {
			require.NoError(t, last, "an error is the last")
			last = err
		}
		require.ErrorIs(t, last, broken)
	}
	for _, err := range manifest.BottomUp(failing) {
		if err != nil {
			require.ErrorIs(t, err, broken)
			return
		}
	}
	t.Fatal("the error was lost")
}

// A buffer gives back what was written to it, from memory and from the disk.
func TestBuffer(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var b manifest.Buffer
	var want []byte
	for i := range 300 {
		part := []byte(strings.Repeat(string(rune('a'+i%26)), 1+i*73%9000))
		want = append(want, part...)
		n, err := b.Write(part)
		require.NoError(t, err)
		require.Equal(t, len(part), n)
		require.Equal(t, int64(len(want)), b.Size())
		if i%37 == 0 || i == 299 {
			got, err := io.ReadAll(io.NewSectionReader(&b, 0, b.Size()))
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	}
	_, err := b.ReadAt(make([]byte, 1), b.Size())
	require.ErrorIs(t, err, io.EOF)
	b.Close()
	require.Zero(t, b.Size())
	b.Close()
	left, err := os.ReadDir(os.Getenv("TMPDIR"))
	require.NoError(t, err)
	require.Empty(t, left)
}
