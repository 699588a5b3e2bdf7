package createos

import (
	"bufio"
	"io"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/manifest"
)

// listSyncer can read lists, and no more.
func listSyncer(dir syncDirection, entries int) *syncer {
	return &syncer{plan: &syncPlan{dir: dir, limits: manifest.Limits{Bytes: 1 << 30, Entries: entries, NameBytes: MaxSyncPath}}}
}

// read reads a list, and makes a tree of it.
func (y *syncer) read(r io.Reader, size int, m *mapping) (*tree, error) {
	var l manifest.List
	if err := y.readEntries(bufio.NewReaderSize(r, size), m, &l, nil); err != nil {
		return nil, err
	}
	if err := l.Sort(); err != nil {
		return nil, err
	}
	t := &tree{}
	return t, t.fill(connected(l.All(), refusedList()), y.plan.limits, y.plan.dir == syncOut)
}

// list is what is in a tree.
func (t *tree) list() (list []archive.Entry) {
	for e := range t.entries.All() {
		list = append(list, e)
	}
	return list
}

// record is an entry as a list has it.
func record(fields ...string) string { return strings.Join(fields, "\x00") + "\x00" }

// An endless is an infinite list, and counts what is taken of it.
type endless struct{ taken int }

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '7'
	}
	e.taken += len(p)
	return len(p), nil
}

// No field of a list is held whatever its length.
func TestSyncListFieldsAreBounded(t *testing.T) {
	t.Parallel()
	from := &endless{}
	y := listSyncer(syncOut, 10)
	_, err := y.read(from, 4096, &mapping{})
	require.ErrorIs(t, err, ErrSyncRefused)
	require.ErrorIs(t, readSums(bufio.NewReader(from), &manifest.List{}), ErrSyncRefused)
	require.Less(t, from.taken, 64<<10)
}

// A target that no system has is a lie; one above our limit does not travel.
func TestSyncListTargetsAreBounded(t *testing.T) {
	t.Parallel()
	read := func(length int) (*tree, error) {
		list := record("l", "777", "1", "1.0", strings.Repeat("a/", length/2), "x")
		return listSyncer(syncOut, 10).read(strings.NewReader(list), 64<<10, &mapping{})
	}
	_, err := read(pathMax + 2)
	require.ErrorIs(t, err, ErrSyncRefused)
	_, err = read(0)
	require.ErrorIs(t, err, ErrSyncRefused)
	got, err := read(MaxSyncPath + 2)
	require.NoError(t, err)
	require.Empty(t, got.list())
	require.Equal(t, 1, got.skips.total)
	got, err = read(MaxSyncPath)
	require.NoError(t, err)
	require.Len(t, got.list(), 1)
}

// What is excluded is not taken if the directory that excludes it is not listed, or
// listed later; and it counts for no limit.
func TestSyncListLeavesOutWhatIsExcluded(t *testing.T) {
	t.Parallel()
	m := &mapping{SyncMapping: SyncMapping{Exclude: []string{".git", "a/b/"}}, remote: "x"}
	list := record("d", "755", "0", "1.5", "", "a")
	for _, name := range []string{".git/hooks/x", "a/b/c/d", "a/bc", "a/.git", "a/b", "a/d/.git/e"} {
		list += record("f", "644", "3", "1.5", "", name)
	}
	y := listSyncer(syncOut, 3)
	y.plan.limits.Bytes = 6
	got, err := y.read(strings.NewReader(list), 4096, m)
	require.NoError(t, err)
	var names []string
	for _, e := range got.list() {
		names = append(names, e.Name)
	}
	require.Equal(t, []string{"a", "a/b", "a/bc"}, names, "of a/b only a directory is excluded")
}

// Whatever a sandbox lists: it is refused, or what is taken of it is a tree within
// the limits.
func FuzzSyncList(f *testing.F) {
	file, dir := record("f", "644", "3", "1.5", "", "a/b"), record("d", "755", "4096", "1.0", "", "a")
	for _, list := range []string{
		"", dir + file, file + dir, dir + dir, file[:9], record("f", "644", "-1", "1", "", "a"),
		record("l", "777", "1", "1", "../x", "l") + record("f", "644", "1", "1", "", "l/x"), record("p", "644", "0", "1", "", "p"),
		record("p", "644", "0", "1", "", "."), record("d", "755", "0", "1", "", ".") + file,
		record("f", "644", "1", "1", "", "../x") + record("f", "644", "1", "1", "", "/x"), record("f", "644", "1", "1", "", "no/x"),
		record("l", "777", "1", "1", strings.Repeat("x", 5000), "l"), strings.Repeat("7", 5000), strings.Repeat("x", 5000),
	} {
		f.Add(list, true)
		f.Add(list, false)
	}
	f.Fuzz(func(t *testing.T, list string, in bool) {
		y := listSyncer(syncOut, 20)
		if in {
			y.plan.dir = syncIn
		}
		m := &mapping{SyncMapping: SyncMapping{Exclude: []string{"no"}}, remote: "."}
		got, err := y.read(strings.NewReader(list), 4096, m)
		if err != nil {
			return
		}
		entries := got.list()
		require.LessOrEqual(t, len(entries)+got.skips.total, y.plan.limits.Entries)
		last, links, bytes := "", make(archive.Links), int64(0)
		kinds := map[string]archive.Kind{".": archive.Dir}
		for _, e := range entries {
			require.Negative(t, manifest.Compare(last, e.Name))
			require.Empty(t, archive.CheckName(e.Name, MaxSyncPath))
			require.NotContains(t, strings.Split(e.Name, "/"), "no")
			require.GreaterOrEqual(t, e.Size, int64(0))
			require.Equal(t, e.Mode.Perm(), e.Mode)
			require.Equal(t, archive.Dir, kinds[path.Dir(e.Name)])
			kinds[e.Name] = e.Kind
			if last, bytes = e.Name, bytes+e.Size; e.Kind == archive.Link {
				links[e.Name] = e.Target
			}
		}
		require.LessOrEqual(t, bytes, y.plan.limits.Bytes)
		for name := range links {
			require.True(t, in || links.Stays(name))
		}
		for _, s := range got.skips.first {
			require.True(t, s.Path == "." || kinds[s.Path] == 0)
		}
	})
}
