package createos_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
)

// A sweptMerge is what a merge is to come to.
type sweptMerge struct {
	source func(r *syncRig) string
	// keeps says which entries stay that are in the target only.
	keeps func(name string) bool
}

// want is the new tree, from the source and what was in the target.
func (m *sweptMerge) want(r *syncRig, old map[string]string) map[string]string {
	want := snapshot(r.t, m.source(r))
	maps.DeleteFunc(want, func(name, _ string) bool { return excluded(name) })
	for name, what := range old {
		if _, replaced := want[name]; !replaced && m.keeps(name) {
			want[name] = what
		}
	}
	return want
}

// excluded is what the pattern "cache" leaves out.
func excluded(name string) bool { return slices.Contains(strings.Split(name, "/"), "cache") }

// mergeSource is everything that a merge brings, beside something that it must not.
var mergeSource = map[string]string{
	"d/same": "same", "d/mode": "same", "d/new": "new", "d/link": "-> ../changed", "changed": "new", "was-link": "new",
	"now-link": "-> d/new", "swap/f": "new", "flat": "new", "cache/x": "new",
}

// mergeTarget is what is there before. What mergeSwaps adds can only be merged into
// if it may be deleted: files where directories are to be, and the other way round.
var (
	mergeTarget = map[string]string{
		"d/same": "same", "d/mode": "same", "d/link": "-> same", "changed": "old", "was-link": "-> d/same",
		"now-link": "old", "gone/f": "old", "gone/link": "-> ../d/same", "gone/cache/kept": "old", "cache/kept": "old", "cache/link": "-> kept",
	}
	mergeSwaps = map[string]string{"swap": "old", "flat/f": "old", "flat/d/f": "old"}
)

// plant makes a tree of files and, where the text begins with an arrow, links.
func (r *syncRig) plant(dir string, trees ...map[string]string) {
	r.t.Helper()
	for _, tree := range trees {
		for name, text := range tree {
			path := filepath.Join(dir, name)
			if target, link := strings.CutPrefix(text, "-> "); link {
				require.NoError(r.t, os.MkdirAll(filepath.Dir(path), 0o755))
				require.NoError(r.t, os.Symlink(target, path))
				continue
			}
			r.write(path, text)
			require.NoError(r.t, os.Chtimes(path, swept, swept))
		}
	}
}

// mergeCases are merges in both directions.
func mergeCases() []sweepCase {
	var cases []sweepCase
	for _, out := range []bool{false, true} {
		for _, c := range []struct {
			name string
			m    createos.SyncMapping
		}{
			{"merge", createos.SyncMapping{Merge: true}},
			{"delta", createos.SyncMapping{Delta: true}},
			{"delta and delete", createos.SyncMapping{Delta: true, Delete: true}},
		} {
			cases = append(cases, mergeCase(c.name, out, c.m))
		}
	}
	return cases
}

func mergeCase(name string, out bool, m createos.SyncMapping) sweepCase {
	from, to, move, where := (*syncRig).local, (*syncRig).remote, (*syncRig).in, "in"
	if out {
		from, to, move, where = to, from, (*syncRig).out, "out"
	}
	source := func(r *syncRig) string { return from(r, "merge-from") }
	target := func(r *syncRig) string { return to(r, "merge-to") }
	m.Exclude = []string{"cache"}
	return sweepCase{
		name: name + ", " + where, target: target,
		old: func(r *syncRig) {
			if _, err := os.Stat(source(r)); err != nil {
				r.plant(source(r), mergeSource)
				require.NoError(r.t, os.Chmod(filepath.Join(source(r), "d/mode"), 0o751))
				require.NoError(r.t, os.Chmod(filepath.Join(source(r), "d"), 0o711))
				r.t.Cleanup(func() { _ = os.Chmod(target(r), 0o755) }) // or it cannot be removed
			}
			_ = os.Chmod(target(r), 0o755)
			require.NoError(r.t, os.RemoveAll(target(r)))
			r.plant(target(r), mergeTarget)
			if m.Delete {
				r.plant(target(r), mergeSwaps)
			}
			require.NoError(r.t, os.Chmod(target(r), 0o550)) // as it must be again
		},
		sync: func(ctx context.Context, r *syncRig) error {
			m := m
			m.Source, m.Target = source(r), target(r)
			_, err := move(r, ctx, m)
			return err
		},
		merge: &sweptMerge{source, func(name string) bool {
			// What holds something excluded stays.
			return !m.Delete || excluded(name) || name == "gone" || name == "."
		}},
	}
}

// neitherOldNorNew names the entries of a tree that is merged into that are neither
// one nor the other. What gives way to something of another kind goes first, so that
// it may be gone.
func neitherOldNorNew(old, latest, got any) (bad []string) {
	was, is := old.(map[string]string), latest.(map[string]string)
	has, _ := got.(map[string]string) // or it is gone
	names := slices.Concat(slices.Collect(maps.Keys(was)), slices.Collect(maps.Keys(is)), slices.Collect(maps.Keys(has)))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		b, a, g := was[name], is[name], has[name]
		givesWay := b != "" && a != "" && (b[0] == 'L' || (b[0] == 'd') != (a[0] == 'd'))
		if g != b && g != a && (g != "" || !givesWay) {
			bad = append(bad, fmt.Sprintf("%s was %q, is to be %q, is %q", name, b, a, g))
		}
	}
	return bad
}

// mergeForm is how much is swept: one byte, and one reply, of so many. The long form
// is that of TestFaultSweep.
func mergeForm() (bytes int64, replies int) {
	switch {
	case brief():
		return 20_011, 6
	case *sweepLong:
		return 1009, 1
	}
	return 15_013, 3
}

// Whatever cuts a merge short, each file is old or new, and what is excluded is as it
// was; the same merge made again comes to the new tree.
func TestSyncMergeSurvivesTheEndOfItsConnectionAtAnyByte(t *testing.T) {
	t.Parallel()
	stride, _ := mergeForm()
	sweepBytes(t, mergeCases(), stride)
}

func TestSyncMergeSurvivesTheLossOfAnyReply(t *testing.T) {
	t.Parallel()
	_, one := mergeForm()
	sweepReplies(t, mergeCases(), one)
}
