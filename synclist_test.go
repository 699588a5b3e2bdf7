package createos

import (
	"bufio"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
)

// listSyncer can read lists, and no more.
func listSyncer(dir syncDirection, entries int) *syncer {
	return &syncer{plan: &syncPlan{dir: dir, limits: archive.Limits{Bytes: 1 << 30, Entries: entries, NameBytes: MaxSyncPath}}}
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
	require.ErrorIs(t, y.readList(bufio.NewReader(from), &mapping{}, &tree{}), ErrSyncRefused)
	_, err := y.readEntries(bufio.NewReader(from), &mapping{}, nil)
	require.ErrorIs(t, err, ErrSyncRefused)
	require.Less(t, from.taken, 64<<10)
}

// A target that no system has is a lie; one above our limit does not travel.
func TestSyncListTargetsAreBounded(t *testing.T) {
	t.Parallel()
	read := func(length int) (*tree, error) {
		got := &tree{}
		list := "755\n" + record("l", "777", "1", "1.0", strings.Repeat("a/", length/2), "x")
		return got, listSyncer(syncOut, 10).readList(bufio.NewReaderSize(strings.NewReader(list), 64<<10), &mapping{}, got)
	}
	_, err := read(pathMax + 2)
	require.ErrorIs(t, err, ErrSyncRefused)
	_, err = read(0)
	require.ErrorIs(t, err, ErrSyncRefused)
	got, err := read(MaxSyncPath + 2)
	require.NoError(t, err)
	require.Empty(t, got.entries)
	require.Len(t, got.skipped, 1)
	got, err = read(MaxSyncPath)
	require.NoError(t, err)
	require.Len(t, got.entries, 1)
}

// What is excluded is not taken if the directory that excludes it is not listed, or
// listed later; and it counts for no limit.
func TestSyncListLeavesOutWhatIsExcluded(t *testing.T) {
	t.Parallel()
	m := &mapping{SyncMapping: SyncMapping{Exclude: []string{".git", "a/b/"}}, remote: "x"}
	list := "755\n" + record("d", "755", "0", "1.5", "", "a")
	for _, name := range []string{".git/hooks/x", "a/b/c/d", "a/bc", "a/.git", "a/b", "a/d/.git/e"} {
		list += record("f", "644", "3", "1.5", "", name)
	}
	got := &tree{}
	y := listSyncer(syncOut, 3)
	y.plan.limits.Bytes = 6
	require.NoError(t, y.readList(bufio.NewReader(strings.NewReader(list)), m, got))
	var names []string
	for _, e := range got.entries {
		names = append(names, e.Name)
	}
	require.Equal(t, []string{"a", "a/b", "a/bc"}, names, "of a/b only a directory is excluded")
}

// Whatever a sandbox lists: it is refused, or what is taken of it is a tree within
// the limits.
func FuzzSyncList(f *testing.F) {
	file, dir := record("f", "644", "3", "1.5", "", "a/b"), record("d", "755", "4096", "1.0", "", "a")
	for _, list := range []string{
		"", "755\n", "755\n" + dir + file, "755\n" + file + dir, "755\n" + dir + dir, "755\n" + file[:9], "8\n", "755\n" + record("f", "644", "-1", "1", "", "a"),
		"755\n" + record("l", "777", "1", "1", "../x", "l") + record("f", "644", "1", "1", "", "l/x"), "755\n" + record("p", "644", "0", "1", "", "p"),
		"755\n" + record("f", "644", "1", "1", "", "../x") + record("f", "644", "1", "1", "", "/x"), "755\n" + record("f", "644", "1", "1", "", "no/x"),
		"755\n" + record("l", "777", "1", "1", strings.Repeat("x", 5000), "l"), strings.Repeat("7", 5000), "755\n" + strings.Repeat("x", 5000),
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
		got := &tree{}
		if y.readList(bufio.NewReaderSize(strings.NewReader(list), 4096), m, got) != nil {
			return
		}
		require.LessOrEqual(t, len(got.entries)+len(got.skipped), y.plan.limits.Entries)
		last, links, bytes := "", make(archive.Links), int64(0)
		for _, e := range got.entries {
			require.Less(t, last, e.Name)
			require.Empty(t, archive.CheckName(e.Name, MaxSyncPath))
			require.NotContains(t, strings.Split(e.Name, "/"), "no")
			require.GreaterOrEqual(t, e.Size, int64(0))
			require.Equal(t, e.Mode.Perm(), e.Mode)
			if last, bytes = e.Name, bytes+e.Size; e.Kind == archive.Link {
				links[e.Name] = e.Target
			}
		}
		require.LessOrEqual(t, bytes, y.plan.limits.Bytes)
		for name := range links {
			require.True(t, in || links.Stays(name))
		}
		for _, s := range got.skipped {
			require.Negative(t, hosttree.Find(got.entries, s.Name))
		}
	})
}
