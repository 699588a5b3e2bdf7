package createos_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
	"github.com/createos-lease/createos/internal/archive/hostile"
)

// scratchFile is a condition for requests about scratch files of a kind.
func scratchFile(method, prefix string) func(createostest.Request) bool {
	return func(q createostest.Request) bool {
		return q.Method == method && strings.HasPrefix(filepath.Base(q.Query.Get("path")), prefix)
	}
}

// victim makes a directory that nothing must touch, and returns a check.
func (r *syncRig) victim() (dir string, untouched func()) {
	dir = filepath.Join(r.t.TempDir(), "victim")
	r.write(filepath.Join(dir, "file"), "precious")
	want := snapshot(r.t, dir)
	return dir, func() {
		r.t.Helper()
		require.Equal(r.t, want, snapshot(r.t, dir))
	}
}

// told is what a sandbox says of a file that it has made ready.
func told(data []byte) string { return fmt.Sprintf("%d %x\n", len(data), sha256.Sum256(data)) }

// stepPrints makes a step of the next sync print something, and do nothing.
func (r *syncRig) stepPrints(nth int, out string) *createostest.Injection {
	return r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/exec", Nth: nth, Reply: func(int, []byte) (int, []byte) {
		return 200, fmt.Appendf(nil, `{"status":"success","data":{"result":{"stdout":%q,"stderr":"","exit_code":0}}}`, out)
	}})
}

// lists makes the next sync out meet this list.
func (r *syncRig) lists(list string) {
	r.stepPrints(2, "755\n"+told([]byte(list)))
	r.srv.Fail(createostest.Fault{When: scratchFile("GET", "list."), Reply: func(int, []byte) (int, []byte) { return 200, []byte(list) }})
}

// Every archive of the table, in the place of the one that the sandbox made: none
// is taken, for none holds what was asked for, and the target stays as it was.
func TestSyncOutRefusesHostileArchives(t *testing.T) {
	t.Parallel()
	cases, err := hostile.Read("testdata/hostile.txt")
	require.NoError(t, err)
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/a"), "new")
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			data, err := c.Archive()
			require.NoError(t, err)
			require.NoError(t, os.RemoveAll(r.local("out")))
			r.write(r.local("out/old"), "old")
			want := snapshot(t, r.host)
			// The sandbox is in the hands of the enemy: length and digest fit.
			lie := r.stepPrints(3, told(data))
			swap := r.srv.Fail(createostest.Fault{When: scratchFile("GET", "p."), Reply: func(int, []byte) (int, []byte) { return 200, data }})
			defer r.srv.ClearFaults()
			_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
			require.Error(t, err)
			require.Equal(t, 1, lie.Hits())
			if len(data) < 20<<10 { // a larger one is not even fetched
				require.Equal(t, 1, swap.Hits())
			}
			require.False(t, errors.Is(err, createos.ErrConnection), "refused for itself: %v", err)
			require.Equal(t, want, snapshot(t, r.host))
		})
	}
	r.srv.ClearFaults()
	r.clean()
}

func TestSyncOutRefusesHostileLists(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/a"), "new")
	entry := func(fields ...string) string { return strings.Join(fields, "\x00") + "\x00" }
	for name, c := range map[string]struct {
		list string
		want error
	}{
		"cut":             {entry("f", "644", "3", "1.0", "", "a")[:10], createos.ErrSyncRefused},
		"twice":           {entry("f", "644", "3", "1.0", "", "a") + entry("d", "755", "3", "1.0", "", "a"), createos.ErrSyncRefused},
		"negative":        {entry("f", "644", "-3", "1.0", "", "a"), createos.ErrSyncRefused},
		"too large":       {entry("f", "644", "9999999999999999", "1.0", "", "a"), createos.ErrSyncLimit},
		"field too long":  {entry("f", "644", "3", "1.0", "", strings.Repeat("a", 1<<17)), createos.ErrSyncRefused},
		"huge":            {strings.Repeat("x", 1<<20), createos.ErrSyncRefused},
		"in no directory": {entry("f", "644", "3", "1.0", "", "x/y"), createos.ErrSyncRefused},
		"in a file":       {entry("f", "644", "3", "1.0", "", "x") + entry("f", "644", "3", "1.0", "", "x/y"), createos.ErrSyncRefused},
		"in a link":       {entry("l", "777", "3", "1.0", "z", "x") + entry("d", "755", "0", "1.0", "", "x/y"), createos.ErrSyncRefused},
		"not there":       {entry("f", "644", "3", "1.0", "", "b"), createos.ErrSyncChanged},
	} {
		t.Run(name, func(t *testing.T) {
			defer r.srv.ClearFaults()
			r.lists(c.list)
			_, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
			require.ErrorIs(t, err, c.want)
			require.NoFileExists(t, r.local("out"))
		})
	}
	// What has no directory in the list would be moved through a link of the target.
	r.write(r.local("merged/keep/y"), "precious")
	require.NoError(t, os.Symlink("keep", r.local("merged/x")))
	r.write(r.remote("src/x/y"), "evil")
	r.lists(entry("f", "644", "4", "1.0", "", "x/y"))
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("merged"), Merge: true, Exclude: []string{"keep"}})
	require.ErrorIs(t, err, createos.ErrSyncRefused)
	require.Equal(t, "precious", r.content(r.local("merged/keep/y")))
	r.srv.ClearFaults()

	// Names that lead elsewhere are skipped before anything is asked for.
	r.lists(entry("f", "644", "3", "1.0", "", "../a") + entry("f", "644", "3", "1.0", "", "/etc/passwd") + entry("d", "755", "0", "1.0", "", "x/.."))
	res, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
	require.NoError(t, err)
	require.Equal(t, 3, res.Operations[0].SkippedTotal)
	require.Empty(t, snapshot(t, r.local("out")))
	r.srv.ClearFaults()

	// What says nothing of the directory, or of another list than was asked for.
	for name, out := range map[string]string{
		"nothing": "", "no mode": told(nil), "another mode": "8\n" + told(nil), "no list": "755\n", "one list more": "755\n" + told(nil) + told(nil), "no digest": "755\n0\n",
	} {
		t.Run(name, func(t *testing.T) {
			defer r.srv.ClearFaults()
			r.stepPrints(2, out)
			_, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("other")})
			require.ErrorIs(t, err, createos.ErrSyncStep)
			require.NoFileExists(t, r.local("other"))
		})
	}
	r.clean()
}

// What a sandbox says of the size of what is to be fetched is not believed: no more
// is fetched than can be meant.
func TestSyncOutFetchesNoMoreThanWasAskedFor(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/a"), "new")
	s := syncOf(createos.SyncMapping{Source: "src", Target: r.local("out")})
	s.MaxEntries, s.MaxBytes = 10, 100
	lie := fmt.Sprintf("%d %x\n", 100<<20, sha256.Sum256(nil))
	for name, c := range map[string]struct {
		step int
		out  string
		want error
	}{"list": {2, "755\n" + lie, createos.ErrSyncLimit}, "p": {3, lie, createos.ErrSyncChanged}} {
		for _, compression := range []createos.SyncCompression{createos.SyncCompressNever, createos.SyncCompressAlways} {
			s.Compression = compression
			r.srv.ForgetRequests()
			r.stepPrints(c.step, c.out)
			_, err := r.driver.SyncOut(t.Context(), r.env, r.lease, s)
			r.srv.ClearFaults()
			require.ErrorIs(t, err, c.want)
			for _, q := range r.srv.Requests() {
				require.False(t, scratchFile("GET", name+".")(q), "fetched")
			}
		}
	}
	require.NoFileExists(t, r.local("out"))
	// Names that make an archive as large as it can be still pass.
	deep := strings.Repeat("d/", 900) + strings.Repeat("n", 200)
	require.NoError(t, os.RemoveAll(r.remote("src")))
	for i := range 30 {
		r.write(r.remote(fmt.Sprintf("src/%s%d", deep, i)), "x")
	}
	s.MaxEntries = 1000
	for _, compression := range []createos.SyncCompression{createos.SyncCompressNever, createos.SyncCompressAlways} {
		s.Compression = compression
		res, err := r.driver.SyncOut(t.Context(), r.env, r.lease, s)
		require.NoError(t, err)
		require.Equal(t, 30, res.Operations[0].Files)
	}
	r.clean()
}

// A transfer that is cut, short, long or altered is never success. The flaw may
// pass: then the next attempt succeeds.
func TestSyncOutVerifiesWhatArrives(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	content := strings.Repeat("content ", 3000)
	r.write(r.remote("src/a"), content)
	r.write(r.local("out/old"), "old")
	r.write(r.local("f"), "old")
	for name, f := range map[string]createostest.Fault{
		"cut":          {CutAfterBytes: 9000},
		"short":        {CutAfterBytes: 9000, CutClean: true},
		"empty":        {Reply: func(int, []byte) (int, []byte) { return 200, nil }},
		"long":         {Reply: func(s int, b []byte) (int, []byte) { return s, append(b, "more"...) }},
		"altered":      {Reply: func(s int, b []byte) (int, []byte) { b[len(b)/3] ^= 1; return s, b }},
		"another's":    {Body: "something else"},
		"no content":   {Status: 204},
		"partial":      {Status: 206, Body: "par"},
		"not found":    {Status: 404, Body: `{"status":"fail","data":{"path":"no such file"}}`},
		"no more room": {Status: 507},
	} {
		for _, m := range []createos.SyncMapping{
			{Source: "src", Target: r.local("out")}, {Source: "src/a", Target: r.local("f"), Kind: createos.SyncFile},
		} {
			t.Run(name+"/"+filepath.Base(m.Target), func(t *testing.T) {
				defer r.srv.ClearFaults()
				prefix := "p."
				if m.Kind == createos.SyncFile {
					prefix = "b."
				}
				f.When = scratchFile("GET", prefix)
				hit := r.srv.Fail(f)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				before := lookAt(t, m.Target)
				res, err := r.out(ctx, m)
				require.Error(t, err)
				require.Positive(t, hit.Hits())
				require.Zero(t, res.Operations[0].Files)
				require.Zero(t, res.Operations[0].Bytes)
				require.Equal(t, before, lookAt(t, m.Target))
				r.clean()
			})
		}
	}
	passing := r.srv.Fail(createostest.Fault{When: scratchFile("GET", "p."), Nth: 1, Reply: func(s int, b []byte) (int, []byte) { b[600] ^= 1; return s, b }})
	res, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
	require.NoError(t, err)
	require.Equal(t, 1, passing.Hits())
	require.Equal(t, 1, res.Operations[0].Files)
	require.Equal(t, content, r.content(r.local("out/a")))
	r.clean()
}

// What arrives in the sandbox is compared there.
func TestSyncInVerifiesWhatArrives(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("src/a"), "new")
	r.write(r.remote("dst/old"), "old")
	r.srv.Fail(createostest.Fault{When: scratchFile("PUT", "p."), Before: func() {}, After: func() {
		for _, p := range r.scratchFiles() {
			if strings.HasPrefix(filepath.Base(p), "p.") {
				f, err := os.OpenFile(p, os.O_WRONLY, 0)
				if err == nil {
					_, _ = f.WriteAt([]byte("X"), 1030)
					f.Close()
				}
			}
		}
	}})
	for _, m := range []createos.SyncMapping{{Source: r.local("src"), Target: "dst"}, {Source: r.local("src"), Target: "dst", Merge: true}, {Source: r.local("src/a"), Target: "dst/old"}} {
		_, err := r.in(t.Context(), m)
		require.ErrorIs(t, err, createos.ErrSyncCorrupt)
		require.Equal(t, "old", r.content(r.remote("dst/old")))
		require.NoFileExists(t, r.remote("dst/a"))
		r.clean()
	}
}

// scratchFiles are the files of syncs in the workspace.
func (r *syncRig) scratchFiles() []string {
	list, _ := filepath.Glob(r.remote(".paperclip-runtime/sync-*/*"))
	return list
}

// Links that were planted on this machine are not followed.
func TestSyncOutDoesNotFollowPlantedLinks(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/sub/a"), "new")
	victim, untouched := r.victim()
	link := func(to, name string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(r.local(name)), 0o755))
		require.NoError(t, os.Symlink(to, r.local(name)))
	}
	link(victim, "dir")
	link(filepath.Join(victim, "file"), "file")
	link(victim, "merged/sub")
	link(filepath.Join(victim, "file"), "merged2/sub/a")

	_, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("dir")})
	require.ErrorIs(t, err, createos.ErrSyncUnsafe)
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("dir"), Merge: true})
	require.ErrorIs(t, err, createos.ErrSyncUnsafe)
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("merged"), Merge: true})
	require.ErrorIs(t, err, createos.ErrSyncUnsafe)
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("merged"), Delta: true, Delete: true})
	require.NoError(t, err, "Delete takes the link away, which stands in the way")
	untouched()
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("merged2"), Merge: true})
	require.NoError(t, err, "a link in the place of a file is replaced")
	require.Equal(t, "new", r.content(r.local("merged2/sub/a")))
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src/sub/a", Target: r.local("file")})
	require.NoError(t, err)
	require.Equal(t, "new", r.content(r.local("file")))
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("nowhere/deeper")})
	require.ErrorIs(t, err, createos.ErrSyncMissing)
	untouched()
	r.clean()
}

// While a merge writes, somebody flips a directory of the target between a
// directory and a link.
func TestSyncOutSurvivesATargetThatChanges(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for i := range 20 {
		r.write(r.remote(fmt.Sprintf("src/sub/%d", i)), "new")
	}
	victim, untouched := r.victim()
	require.NoError(t, os.MkdirAll(r.local("out/sub"), 0o755))
	stop := make(chan struct{})
	var flipper sync.WaitGroup
	flipper.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Rename(r.local("out/sub"), r.local("aside"))
			_ = os.Symlink(victim, r.local("out/sub"))
			_ = os.Remove(r.local("out/sub"))
			_ = os.Rename(r.local("aside"), r.local("out/sub"))
		}
	})
	for range 10 {
		_, _ = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out"), Merge: true})
	}
	close(stop)
	flipper.Wait()
	untouched()
}

// Links that stay in the tree by themselves must not lead out of the target
// together with those that are there, whichever came first.
func TestSyncOutJudgesLinksWithThoseOfTheTarget(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for name, c := range map[string]struct {
		there, come map[string]string
		exclude     []string
		m           createos.SyncMapping
		want        error
	}{
		"the old one then leads out": {
			there: map[string]string{"x": "d1/d2/../../secret"}, come: map[string]string{"d1": ".", "d2": "."}, want: createos.ErrSyncRefused,
		},
		"excluded": {
			there: map[string]string{"x": "d1/d2/../../secret"}, come: map[string]string{"d1": ".", "d2": "."}, exclude: []string{"x"},
			want: createos.ErrSyncRefused,
		},
		"the new one leads out": {
			there: map[string]string{"d1": ".", "d2": "."}, come: map[string]string{"x": "d1/d2/../../secret"}, want: createos.ErrSyncRefused,
		},
		"through one of the owner's": {
			there: map[string]string{"own": ".."}, come: map[string]string{"x": "own/secret"}, want: createos.ErrSyncRefused,
		},
		"one of the owner's is turned": {
			there: map[string]string{"own": "d1/../../data"}, come: map[string]string{"d1": "."}, want: createos.ErrSyncRefused,
		},
		"a link that held another back is replaced": {
			there: map[string]string{"x": "d1/../secret", "d1": "d2/d3"}, come: map[string]string{"d1": "."}, want: createos.ErrSyncRefused,
		},
		"owner's": {
			there: map[string]string{"own": "../secret", "abs": "/etc/passwd"}, come: map[string]string{"d1": "."},
		},
		"deleted": {
			there: map[string]string{"x": "d1/d2/../../secret"}, come: map[string]string{"d1": ".", "d2": "."},
			m: createos.SyncMapping{Delete: true},
		},
		"the way back, deleted": {
			there: map[string]string{"d1": ".", "d2": "."}, come: map[string]string{"x": "d1/d2/../../secret"},
			m: createos.SyncMapping{Delta: true, Delete: true},
		},
		"replaced": {
			there: map[string]string{"x": "d1/d2/../../secret", "d2": "f"}, come: map[string]string{"d1": ".", "d2": ".", "x": "d1/f"},
			m: createos.SyncMapping{Delta: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for dir, links := range map[string]map[string]string{r.local("out"): c.there, r.remote("src"): c.come} {
				require.NoError(t, os.RemoveAll(dir))
				require.NoError(t, os.Mkdir(dir, 0o755))
				for name, to := range links {
					require.NoError(t, os.Symlink(to, filepath.Join(dir, name)))
				}
			}
			r.write(r.remote("src/file"), "new")
			want := snapshot(t, r.host)
			c.m.Source, c.m.Target, c.m.Merge, c.m.Exclude = "src", r.local("out"), true, c.exclude
			_, err := r.out(t.Context(), c.m)
			require.ErrorIs(t, err, c.want)
			if c.want != nil {
				require.Equal(t, want, snapshot(t, r.host))
				return
			}
			for name, to := range c.come {
				got, err := os.Readlink(filepath.Join(r.local("out"), name))
				require.NoError(t, err)
				require.Equal(t, to, got)
			}
			r.clean()
		})
	}
}

// Links that were planted in the sandbox are not followed there.
func TestSyncDoesNotFollowPlantedLinksInTheSandbox(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	victim, untouched := r.victim()
	r.write(r.local("src/sub/file"), "new")
	require.NoError(t, os.MkdirAll(r.remote("merged"), 0o755))
	require.NoError(t, os.Symlink(victim, r.remote("link")))
	require.NoError(t, os.Symlink(victim, r.remote("merged/sub")))
	require.NoError(t, os.Symlink(filepath.Join(victim, "file"), r.remote("filelink")))
	for _, m := range []createos.SyncMapping{
		{Source: r.local("src"), Target: "link"},
		{Source: r.local("src"), Target: "link", Merge: true},
		{Source: r.local("src"), Target: "link/new"},
		{Source: r.local("src/sub/file"), Target: "link/file"},
		{Source: r.local("src/sub/file"), Target: "filelink"},
		{Source: r.local("src"), Target: "merged", Merge: true},
	} {
		_, err := r.in(t.Context(), m)
		require.ErrorIs(t, err, createos.ErrSyncUnsafe, "%+v", m)
		untouched()
	}
	for _, source := range []string{"link", "link/file", "filelink"} {
		_, err := r.out(t.Context(), createos.SyncMapping{Source: source, Target: r.local("got")})
		require.ErrorIs(t, err, createos.ErrSyncUnsafe, source)
		require.NoFileExists(t, r.local("got"))
	}
	r.clean()
}

// The link comes after the look, and before the step that would follow it.
func TestSyncChecksAgainRightBeforeUse(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	victim, untouched := r.victim()
	r.write(r.local("src/file"), "new")
	require.NoError(t, os.MkdirAll(r.remote("dir/old"), 0o755))
	r.srv.Fail(createostest.Fault{When: scratchFile("PUT", "p."), Nth: 1, After: func() {
		require.NoError(t, os.Rename(r.remote("dir"), r.remote("moved")))
		require.NoError(t, os.Symlink(victim, r.remote("dir")))
	}})
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "dir/old"})
	require.ErrorIs(t, err, createos.ErrSyncUnsafe)
	untouched()
	r.clean()
}

// Nothing of this machine leaves it through a link, and one bad mapping keeps all
// others from being sent.
func TestSyncInDoesNotFollowHostLinks(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	victim, _ := r.victim()
	r.write(r.local("src/ok"), "ok")
	for name, to := range map[string]string{
		"absolute": filepath.Join(victim, "file"), "dir": victim, "up": "../../victim/file", "inside": "ok", "dangling": "nothing", "loop": "loop",
	} {
		require.NoError(t, os.Symlink(to, r.local("src/"+name)))
	}
	require.NoError(t, os.Symlink(r.local("src"), r.local("link")))
	r.srv.ForgetRequests()
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "a"}, createos.SyncMapping{Source: r.local("link"), Target: "b"})
	require.ErrorIs(t, err, createos.ErrSyncUnsafe)
	var failed *createos.SyncError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 1, failed.Mapping)
	require.Empty(t, r.srv.Requests(), "checked before the first request")

	res, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "a"})
	require.NoError(t, err)
	var skipped []string
	for _, s := range res.Operations[0].Skipped {
		skipped = append(skipped, s.Path)
	}
	require.ElementsMatch(t, []string{"absolute", "dir", "up"}, skipped)
	got := snapshot(t, r.remote("a"))
	require.Len(t, got, 4)
	for _, name := range []string{"inside", "dangling", "loop"} {
		require.True(t, strings.HasPrefix(got[name], fs.ModeSymlink.String()[:1]), name)
	}
	// What went in comes out.
	res, err = r.out(t.Context(), createos.SyncMapping{Source: "a", Target: r.local("back")})
	require.NoError(t, err)
	require.Zero(t, res.Operations[0].SkippedTotal)
	require.Equal(t, got, snapshot(t, r.local("back")))
}

// A link that takes the place of a file or directory after the look does not lead
// to what was excluded.
func TestSyncInDoesNotFollowALinkThatComesLater(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for name, swap := range map[string]func() error{
		"file": func() error {
			return errors.Join(os.Remove(r.local("src/pub/a")), os.Symlink("secret", r.local("src/pub/a")))
		},
		"directory": func() error {
			return errors.Join(os.RemoveAll(r.local("src/pub")), os.Symlink("priv", r.local("src/pub")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			defer r.srv.ClearFaults()
			require.NoError(t, os.RemoveAll(r.local("src")))
			r.write(r.local("src/pub/a"), "public-file")
			r.write(r.local("src/pub/secret"), "secret-file")
			r.write(r.local("src/priv/a"), "private-one")
			fill(t, r.local("src/first"), 16<<20) // goes by itself, when all has been listed
			r.srv.Fail(createostest.Fault{When: scratchFile("PUT", "p."), Nth: 1, Before: func() { require.NoError(t, swap()) }})
			_, err := r.in(t.Context(), createos.SyncMapping{
				Source: r.local("src"), Target: "dst", Merge: true, Delete: true, Exclude: []string{"priv", "secret"},
			})
			require.ErrorIs(t, err, createos.ErrSyncChanged)
			require.NoFileExists(t, r.remote("dst/pub/a"))
		})
	}
	r.clean()
}

// Content travels in the bodies of uploads and nowhere else.
func TestSyncKeepsContentOutOfCommandsAndErrors(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	const canary = "canary-4711-canary"
	r.write(r.local("src/a"), canary)
	require.NoError(t, os.MkdirAll(r.remote("dst"), 0o755))
	_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "dst", Delta: true})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(r.remote("file"), nil, 0o644))
	_, err = r.in(t.Context(), createos.SyncMapping{Source: r.local("src"), Target: "file"})
	require.Error(t, err)
	texts := []string{err.Error(), fmt.Sprintf("%+v", err)}
	for _, q := range r.srv.Requests() {
		texts = append(texts, string(q.Body))
	}
	for _, text := range texts {
		require.NotContains(t, text, canary)
		require.NotContains(t, text, base64.StdEncoding.EncodeToString([]byte(canary)))
	}
	for _, text := range texts[:2] {
		require.NotContains(t, text, r.host)
		require.NotContains(t, text, r.workspace)
	}
}

// A directory stands in the way of a file and will not go, for it holds what was
// excluded. That is seen before anything is deleted.
func TestSyncDeletesNothingWhenItIsRefused(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	for _, side := range []func(string) string{r.local, r.remote} {
		r.write(side("src/d"), "now a file")
		r.write(side("src/e"), "now a file")
		r.write(side("src/l/sub/f"), "below what was a link")
		r.write(side("src/f/sub/f"), "below what was a file")
		r.write(side("dst/d/keep.o"), "excluded")
		r.write(side("dst/e/x y/]$(z"), "precious")
		r.write(side("dst/f"), "precious")
		r.write(side("dst/g/sub"), "a file where there is none behind the link")
		require.NoError(t, os.Symlink("g", side("dst/l")))
	}
	m := createos.SyncMapping{Target: "dst", Source: r.local("src"), Delta: true, Delete: true, Exclude: []string{"*.o"}}
	sync, there := r.in, r.remote("dst")
	for range 2 {
		want := snapshot(t, there)
		res, err := sync(t.Context(), m)
		require.ErrorIs(t, err, createos.ErrSyncKind)
		require.Zero(t, res.Operations[0].Deleted)
		require.Equal(t, want, snapshot(t, there))

		require.NoError(t, os.Remove(filepath.Join(there, "d/keep.o")))
		_, err = sync(t.Context(), m)
		require.NoError(t, err)
		require.Len(t, snapshot(t, there), 8)
		require.Equal(t, "below what was a link", r.content(filepath.Join(there, "l/sub/f")))
		m.Source, m.Target = "src", r.local("dst")
		sync, there = r.out, r.local("dst")
	}
	r.clean()
}

// A directory that a killed process moved aside is put back, on both sides.
func TestSyncPutsBackWhatWasMovedAside(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("src/a"), "new")
	r.write(r.local(".createos-old.out/precious"), "old")
	r.write(r.local(".createos-new.out/half"), "half")
	hit := r.srv.Fail(createostest.Fault{When: scratchFile("GET", "list."), Status: http.StatusForbidden})
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
	require.ErrorIs(t, err, createos.ErrForbidden)
	require.Positive(t, hit.Hits())
	r.srv.ClearFaults()
	require.Equal(t, "old", r.content(r.local("out/precious")))
	r.clean()

	// Both there: the new one had been put in its place.
	r.write(r.local(".createos-old.out/older"), "older")
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
	require.NoError(t, err)
	require.NoFileExists(t, r.local("out/precious"))
	r.clean()

	r.write(r.remote(".createos-old.dst/precious"), "old")
	r.write(r.local("in/a"), "in")
	_, err = r.in(t.Context(), createos.SyncMapping{Source: r.local("in"), Target: "dst"})
	require.NoError(t, err)
	require.Equal(t, "in", r.content(r.remote("dst/a")))
	require.NoFileExists(t, r.remote("dst/precious"))
	r.clean()

	// A merge goes into what was there as well, on both sides, and a file finds it in
	// its way.
	for _, m := range []createos.SyncMapping{{Merge: true}, {Delta: true}} {
		require.NoError(t, os.RemoveAll(r.remote("dst")))
		require.NoError(t, os.RemoveAll(r.local("out")))
		r.write(r.remote(".createos-old.dst/precious"), "old")
		_, err = r.in(t.Context(), createos.SyncMapping{Source: r.local("in/a"), Target: "dst"})
		require.ErrorIs(t, err, createos.ErrSyncKind)
		require.NoError(t, os.Rename(r.remote("dst"), r.remote(".createos-old.dst")))
		m.Source, m.Target = r.local("in"), "dst"
		_, err = r.in(t.Context(), m)
		require.NoError(t, err)
		require.Equal(t, "old", r.content(r.remote("dst/precious")))
		require.Equal(t, "in", r.content(r.remote("dst/a")))
		r.write(r.local(".createos-old.out/precious"), "old")
		m.Source, m.Target = "src", r.local("out")
		_, err = r.out(t.Context(), m)
		require.NoError(t, err)
		require.Equal(t, "old", r.content(r.local("out/precious")))
		require.Equal(t, "new", r.content(r.local("out/a")))
		r.clean()
	}
}
