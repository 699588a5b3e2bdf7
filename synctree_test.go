package createos

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/manifest"
)

// drawTree makes a small tree whose names are in the order of a walk only if that is
// compared as it should be.
func drawTree(t *rapid.T, label string) []archive.Entry {
	var list []archive.Entry
	var fill func(at string, depth int)
	fill = func(at string, depth int) {
		for _, base := range []string{"a", "a b", "a-b", "b"} {
			e := archive.Entry{Name: path.Join(at, base), Mode: 0o644}
			switch rapid.IntRange(0, 5).Draw(t, label+" "+e.Name) {
			case 0, 1:
				continue
			case 2:
				e.Kind, e.Target = archive.Link, rapid.SampledFrom([]string{"x", "y"}).Draw(t, "target")
			case 3:
				if e.Kind = archive.Dir; depth < 2 {
					list = append(list, e)
					fill(e.Name, depth+1)
					continue
				}
			default:
				e.Kind, e.Sum[0] = archive.File, rapid.SampledFrom([]byte{0, 1, 2}).Draw(t, "sum")
			}
			list = append(list, e)
		}
	}
	fill("", 0)
	return list
}

// A difference is what the words say, whatever the trees: all that is not the same is
// put, what is only in the target is removed, and before all else what stands in the
// way of something of another kind, with everything that is in it.
func TestSyncDifference(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		source, target := drawTree(t, "source"), drawTree(t, "target")
		m := &mapping{SyncMapping: SyncMapping{Merge: true, Delta: rapid.Bool().Draw(t, "delta"), Delete: rapid.Bool().Draw(t, "delete")}}
		from, to := &tree{}, &tree{}
		for tree, list := range map[*tree][]archive.Entry{from: source, to: target} {
			for _, e := range list {
				require.NoError(t, tree.entries.Add(e))
			}
			require.NoError(t, tree.entries.Sort())
		}
		d, err := m.difference(from, to)
		require.NoError(t, err)
		defer d.close()

		in := func(list []archive.Entry, name string) (archive.Entry, bool) {
			i := slices.IndexFunc(list, func(e archive.Entry) bool { return e.Name == name })
			if i < 0 {
				return archive.Entry{}, false
			}
			return list[i], true
		}
		var put, first, last []string
		same := 0
		for _, e := range source {
			there, found := in(target, e.Name)
			switch {
			case !m.Delta || !found || !m.equal(e, there):
				put = append(put, e.Name)
			case e.Kind == archive.File:
				same++
			}
		}
		for _, e := range target {
			if !m.Delete {
				break
			}
			_, found := in(source, e.Name)
			way := false
			for at := e.Name; at != "."; at = path.Dir(at) {
				a, inSource := in(source, at)
				b, _ := in(target, at)
				way = way || inSource && (a.Kind == archive.Dir) != (b.Kind == archive.Dir)
			}
			switch {
			case way:
				first = append(first, e.Name)
			case !found:
				last = append(last, e.Name)
			}
		}
		for want, got := range map[*[]string]*manifest.List{&put: d.put, &first: &d.first, &last: &d.last} {
			var names []string
			for e, err := range got.All() {
				require.NoError(t, err)
				names = append(names, e.Name)
			}
			require.ElementsMatch(t, *want, names)
		}
		require.Equal(t, same, d.same)
	})
}

// A list that makes no sense is bad, wherever it comes from.
func TestSyncListsMakeSense(t *testing.T) {
	t.Parallel()
	pipe, file, dir := record("p", "644", "0", "1.0", "", "x"), record("f", "644", "3", "1.0", "", "x/y"), record("d", "755", "0", "1.0", "", "x")
	far := record("l", "777", "1", "1.0", strings.Repeat("t", MaxSyncPath+1), "x")
	for _, list := range []string{pipe + file, far + file, file, dir + dir, pipe + pipe} {
		_, err := listSyncer(syncOut, 10).read(strings.NewReader(list), 4096, &mapping{})
		require.ErrorIs(t, err, ErrSyncRefused)
	}
	bad := errors.New("bad")
	twice := []archive.Entry{{Name: "a", Kind: archive.File}, {Name: "a", Kind: archive.File}}
	var l manifest.List
	for _, e := range twice {
		require.NoError(t, l.Add(e))
	}
	require.NoError(t, l.Sort())
	err := (&tree{}).fill(connected(l.All(), bad), listSyncer(syncOut, 10).plan.limits, true)
	require.ErrorIs(t, err, bad)
	for _, err = range noted(l.All(), l.All(), func(*archive.Entry, archive.Entry) {}) {
		if err != nil {
			break
		}
	}
	require.ErrorIs(t, err, ErrSyncRefused, "notes that say two things")
}

// The side that fails ends the other, and is what is reported.
func TestSyncSidesEndEachOther(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	fails := func(context.Context) (*tree, error) { return nil, broken }
	waits := func(ctx context.Context) (*tree, error) {
		<-ctx.Done()
		return nil, fmt.Errorf("the other side: %w", ctx.Err())
	}
	_, _, err := bothSides(t.Context(), fails, waits)
	require.Equal(t, broken, err)
	_, _, err = bothSides(t.Context(), waits, fails)
	require.Equal(t, broken, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(ErrShutdown)
	_, _, err = bothSides(ctx, waits, waits)
	require.ErrorIs(t, err, ErrShutdown)
	made := &tree{}
	here, there, err := bothSides(t.Context(), func(context.Context) (*tree, error) { return made, nil }, func(context.Context) (*tree, error) { return made, nil })
	require.NoError(t, err)
	require.True(t, here == made && there == made)
}
