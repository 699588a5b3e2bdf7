package createos_test

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A treeMaker makes random trees of what file systems allow and programs stumble
// over.
type treeMaker struct {
	t   *testing.T
	rnd *rand.Rand
	dir string
	all []string // entries that are no links, below dir
}

var oddNames = []string{
	"plain", "two words", "new\nline", "-dash", "--help", "-", "tab\there", "quote'\"`", "$HOME", "*", "?[a]", "\\back\\slash", "\\n",
	"dot.", ".hidden", "...", "#hash", "~", "é", "日本", "\xff\xfe", "bad\xc3utf", "end\n", " lead", "trail ", "a|b;c&d", "!bang",
	strings.Repeat("long", 60), "sum  file", "\x01\x02",
}

func (m *treeMaker) name() string {
	n := oddNames[m.rnd.IntN(len(oddNames))]
	if m.rnd.IntN(3) == 0 {
		n += fmt.Sprint(m.rnd.IntN(100))
	}
	return n
}

// make fills a directory, some levels deep.
func (m *treeMaker) make(at string, depth int) {
	for range m.rnd.IntN(7) {
		name := path.Join(at, m.name())
		full := filepath.Join(m.dir, name)
		if _, err := os.Lstat(full); err == nil {
			continue
		}
		switch k := m.rnd.IntN(10); {
		case k < 3 && depth > 0:
			require.NoError(m.t, os.Mkdir(full, 0o700))
			m.make(name, depth-1)
			require.NoError(m.t, os.Chmod(full, 0o700|fs.FileMode(m.rnd.IntN(0o100))))
			m.all = append(m.all, name)
		case k == 9:
			m.link(name, full)
		default:
			m.file(full)
			m.all = append(m.all, name)
		}
	}
}

// link makes one that stays: to something that is there, to nothing, or to itself.
func (m *treeMaker) link(name, full string) {
	target := "nowhere/at all"
	switch {
	case m.rnd.IntN(5) == 0:
		target = path.Base(name)
	case len(m.all) > 0:
		up := strings.Repeat("../", strings.Count(name, "/"))
		target = up + m.all[m.rnd.IntN(len(m.all))]
	}
	require.NoError(m.t, os.Symlink(target, full))
}

func (m *treeMaker) file(full string) {
	f, err := os.Create(full)
	require.NoError(m.t, err)
	switch m.rnd.IntN(4) {
	case 0: // empty
	case 1: // sparse
		require.NoError(m.t, f.Truncate(int64(m.rnd.IntN(1<<18))))
	default:
		content := make([]byte, m.rnd.IntN(3000))
		for i := range content {
			content[i] = byte(m.rnd.Uint32())
		}
		_, err = f.Write(content)
		require.NoError(m.t, err)
	}
	require.NoError(m.t, f.Chmod(fs.FileMode(0o400|m.rnd.IntN(0o1000))))
	require.NoError(m.t, f.Close())
}

// snapshot describes all that must survive of a tree.
func snapshot(t testing.TB, dir string) map[string]string {
	t.Helper()
	got := make(map[string]string)
	require.NoError(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		info, err := os.Lstat(p)
		if err != nil {
			return err
		}
		text := ""
		switch {
		case info.Mode().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			text = fmt.Sprintf("%d %d %x", info.ModTime().Unix(), len(b), sha256.Sum256(b))
		case info.Mode()&fs.ModeSymlink != 0:
			text, err = os.Readlink(p)
		}
		got[p[len(dir)+1:]] = info.Mode().String() + " " + text
		return err
	}))
	return got
}

func TestSyncCarriesRandomTreesThereAndBack(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m := &treeMaker{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), dir: filepath.Join(t.TempDir(), "tree")}
			require.NoError(t, os.Mkdir(m.dir, 0o755))
			for len(m.all) < 5 {
				m.make(".", 4)
			}
			want := snapshot(t, m.dir)
			remote := fmt.Sprintf("t%d", seed)
			merge := seed%3 == 1 // both ways, and by deltas
			res, err := r.in(t.Context(), createos.SyncMapping{Source: m.dir, Target: remote, Merge: merge})
			require.NoError(t, err)
			require.Empty(t, res.Warnings)
			require.Empty(t, res.Operations[0].Skipped)
			require.Equal(t, want, snapshot(t, r.remote(remote)), "in the sandbox")
			back := filepath.Join(t.TempDir(), "back")
			res, err = r.out(t.Context(), createos.SyncMapping{Source: remote, Target: back, Merge: merge, Delta: seed%3 == 2})
			require.NoError(t, err)
			require.Empty(t, res.Warnings)
			require.Empty(t, res.Operations[0].Skipped)
			require.Equal(t, want, snapshot(t, back), "and back")
		})
	}
	r.clean()
}

// A delta must come to the same as a full sync, whatever was there.
func TestSyncDeltaMakesTreesEqual(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m := &treeMaker{t: t, rnd: rand.New(rand.NewPCG(seed, 2)), dir: filepath.Join(t.TempDir(), "tree")}
			require.NoError(t, os.Mkdir(m.dir, 0o755))
			for len(m.all) < 8 {
				m.make(".", 3)
			}
			remote, back := fmt.Sprintf("d%d", seed), filepath.Join(t.TempDir(), "back")
			in := createos.SyncMapping{Source: m.dir, Target: remote, Delta: true, Delete: true}
			out := createos.SyncMapping{Source: remote, Target: back, Delta: true, Delete: true}
			for round := range 3 {
				want := snapshot(t, m.dir)
				_, err := r.in(t.Context(), in)
				require.NoError(t, err)
				require.Equal(t, want, snapshot(t, r.remote(remote)), "in, round %d", round)
				_, err = r.out(t.Context(), out)
				require.NoError(t, err)
				require.Equal(t, want, snapshot(t, back), "out, round %d", round)
				res, err := r.in(t.Context(), in)
				require.NoError(t, err)
				require.Zero(t, res.Operations[0].Files)
				m.change()
			}
		})
	}
	r.clean()
}

// change changes and removes some files and adds others.
func (m *treeMaker) change() {
	var kept []string
	for _, name := range m.all {
		full := filepath.Join(m.dir, name)
		info, err := os.Lstat(full)
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		switch m.rnd.IntN(3) {
		case 0:
			require.NoError(m.t, os.Remove(full))
			continue
		case 1:
			require.NoError(m.t, os.Remove(full))
			m.file(full)
		}
		kept = append(kept, name)
	}
	m.all = kept
	m.make(".", 2)
}
