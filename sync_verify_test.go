package createos_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// damage changes the scratch file of a kind when it has arrived.
func (r *syncRig) damage(prefix string, nth int, change func(content []byte) []byte) *createostest.Injection {
	return r.srv.Fail(createostest.Fault{When: scratchFile("PUT", prefix), Nth: nth, After: func() {
		for _, p := range r.scratchFiles() {
			if strings.HasPrefix(filepath.Base(p), prefix) {
				b, err := os.ReadFile(p)
				if err == nil {
					_ = os.WriteFile(p, change(b), 0o600)
				}
			}
		}
	}})
}

// A list of names that is cut short or altered on its way deletes nothing, and fetches
// nothing.
func TestSyncVerifiesListsOfNames(t *testing.T) {
	t.Parallel()
	half := func(b []byte) []byte { return b[:len(b)/2] }
	for name, c := range map[string]struct {
		nth    int // part of the list
		change func([]byte) []byte
	}{
		"short":             {1, half},
		"empty":             {1, func([]byte) []byte { return nil }},
		"another":           {1, func([]byte) []byte { return []byte("./precious/x\x00./keep\x00") }},
		"altered":           {1, func(b []byte) []byte { return bytes.Replace(b, []byte("old"), []byte("kee"), 1) }},
		"second is short":   {2, half},
		"second is altered": {2, func(b []byte) []byte { return bytes.Replace(b, []byte("old"), []byte("kee"), 1) }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newSyncRig(t, createostest.Options{})
			long := strings.Repeat("n", 200)
			for i := range 400 { // too many for one part
				name := fmt.Sprintf("old%d%s", i, long)
				r.write(r.remote("dst/"+name), "o")
			}
			r.write(r.local("src/keep"), "k")
			r.write(r.local("src/new"), "not put either")
			r.write(r.remote("dst/keep"), "k")
			r.write(r.remote("dst/precious/x"), "excluded")
			want := snapshot(t, r.remote("dst"))
			s := syncOf(createos.SyncMapping{Source: r.local("src"), Target: "dst", Delta: true, Delete: true, Exclude: []string{"precious"}})
			s.MaxFile = 64 << 10
			hit := r.damage("del.", c.nth, c.change)
			res, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
			require.ErrorIs(t, err, createos.ErrSyncCorrupt)
			require.Equal(t, 1, hit.Hits())
			require.Zero(t, res.Operations[0].Deleted)
			require.Equal(t, want, snapshot(t, r.remote("dst")))
			r.srv.ClearFaults()
			res, err = r.driver.SyncIn(t.Context(), r.env, r.lease, s)
			require.NoError(t, err)
			require.Equal(t, 400, res.Operations[0].Deleted)

			hit = r.damage("names.", 1, half)
			_, err = r.out(t.Context(), createos.SyncMapping{Source: "dst", Target: r.local("out")})
			require.ErrorIs(t, err, createos.ErrSyncCorrupt)
			require.Equal(t, 1, hit.Hits())
			require.NoDirExists(t, r.local("out"))
			r.srv.ClearFaults()
			r.clean()
		})
	}
}

// An attempt to upload that was cut off may arrive after the next one was compared. It
// is not what is put in place.
func TestSyncComparesWhatItPutsInPlace(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	fill(t, r.local("f"), 100_000)
	fill(t, r.local("large"), 150_000)
	fill(t, r.local("src/large"), 150_000)
	for _, m := range []createos.SyncMapping{
		{Source: r.local("f"), Target: "f"}, {Source: r.local("large"), Target: "large"}, {Source: r.local("src"), Target: "dst"},
	} {
		s := syncOf(m)
		s.MaxFile = 100_000
		first := "" // the first part, which the next step compares
		r.srv.Fail(createostest.Fault{When: scratchFile("PUT", "p."), Nth: 1, After: func() {
			for _, p := range r.scratchFiles() {
				if strings.HasPrefix(filepath.Base(p), "p.") {
					first = p
				}
			}
			r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/exec", Nth: 1, After: func() {
				_ = os.WriteFile(first, []byte("late"), 0o600)
			}})
		}})
		_, err := r.driver.SyncIn(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		r.srv.ClearFaults()
		require.NotEmpty(t, first)
	}
	require.Equal(t, r.content(r.local("f")), r.content(r.remote("f")))
	require.Equal(t, r.content(r.local("large")), r.content(r.remote("large")))
	require.Equal(t, r.content(r.local("src/large")), r.content(r.remote("dst/large")))
	r.clean()
}

// What is damaged on the way out does not look like what a sandbox of the enemy would
// send, and is fetched again.
func TestSyncOutFetchesAgainWhatWasDamaged(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for i := range 20 {
		r.write(r.remote(fmt.Sprintf("src/%d", i)), strings.Repeat("compressible ", 100))
	}
	damage := func(s int, b []byte) (int, []byte) {
		b = bytes.Clone(b)
		for i := range b {
			b[i] ^= 0x55
		}
		return s, b
	}
	for _, prefix := range []string{"list.", "sums.", "p."} {
		for _, compression := range []createos.SyncCompression{createos.SyncCompressNever, createos.SyncCompressAlways} {
			s := syncOf(createos.SyncMapping{Source: "src", Target: r.local("out"), Delta: true})
			s.Compression = compression
			require.NoError(t, os.RemoveAll(r.local("out")))
			hit := r.srv.Fail(createostest.Fault{When: scratchFile("GET", prefix), Nth: 1, Reply: damage})
			_, err := r.driver.SyncOut(t.Context(), r.env, r.lease, s)
			require.NoError(t, err, prefix)
			require.Equal(t, 1, hit.Hits(), prefix)
			require.Equal(t, snapshot(t, r.remote("src")), snapshot(t, r.local("out")))
			r.srv.ClearFaults()

			require.NoError(t, os.RemoveAll(r.local("out")))
			r.srv.Fail(createostest.Fault{When: scratchFile("GET", prefix), Reply: damage})
			_, err = r.driver.SyncOut(t.Context(), r.env, r.lease, s)
			require.ErrorIs(t, err, createos.ErrSyncCorrupt, prefix)
			require.NotErrorIs(t, err, createos.ErrSyncRefused, prefix)
			r.srv.ClearFaults()
		}
	}
	r.clean()
}
