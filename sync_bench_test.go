package createos_test

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// The benchmarks of sync run against the emulator in this process, in turns with
// the least loop that can do the same:
//
//	go test -run '^$' -bench Sync -benchtime 3x .
//
// What compares is the ratio of each: x/bare is throughput as a part of the bare
// loop's (more is better), time/bare is time as a multiple of the bare loop's,
// and time/full that of a delta as a part of a full sync. Each is the median of
// all turns. peak-MiB is how far the resident memory of this process, emulator
// included, rose above its start.

// filesPath is the path of the file API for a file in the workspace.
func (r *syncRig) filesPath(path string) string {
	return "/v1/sandboxes/" + r.lease.ProviderLeaseID + "/files?path=" + url.QueryEscape(path)
}

// request sends a request with a body of a known length.
func (r *syncRig) request(method, path string, body io.Reader, length int64) (*http.Response, error) {
	req, err := http.NewRequestWithContext(context.Background(), method, r.env.Config.APIURL+path, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.ContentLength = length
	}
	req.Header.Set("X-Api-Key", r.env.Config.APIKey.Reveal())
	resp, err := (&http.Client{Transport: r.transport}).Do(req)
	if err == nil && resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		err = errors.New(method + ": " + resp.Status)
	}
	return resp, err
}

func (r *syncRig) barePut(from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	resp, err := r.request(http.MethodPut, r.filesPath(to), f, info.Size())
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func (r *syncRig) bareGet(from, to string) error {
	resp, err := r.request(http.MethodGet, r.filesPath(from), nil, 0)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, resp.Body)
	return errors.Join(err, f.Close())
}

// bareExec runs a shell command in the sandbox.
func (r *syncRig) bareExec(script string) error {
	body := fmt.Sprintf(`{"cmd":"/bin/bash","args":["-c",%q]}`, script)
	resp, err := r.request(http.MethodPost, "/v1/sandboxes/"+r.lease.ProviderLeaseID+"/exec", strings.NewReader(body), int64(len(body)))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && !strings.Contains(string(answer), `"exit_code":0`) {
		err = errors.New("exec failed")
	}
	return err
}

// bareTreeIn pipes a tar into a PUT and unpacks it.
func (r *syncRig) bareTreeIn(from, to string) error {
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(writeTar(pw, from)) }()
	resp, err := r.request(http.MethodPut, r.filesPath(to+".tar"), pr, -1)
	if err != nil {
		return err
	}
	resp.Body.Close()
	return r.bareExec("mkdir " + to + " && tar -xf " + to + ".tar -C " + to + " && rm " + to + ".tar")
}

func writeTar(w io.Writer, dir string) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		h, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		h.Name = p[len(dir)+1:]
		if err := tw.WriteHeader(h); err != nil || d.IsDir() {
			return err
		}
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(tw, f)
		return err
	})
	return errors.Join(err, tw.Close())
}

// bareTreeOut makes a tar, and extracts the GET through an os.Root.
func (r *syncRig) bareTreeOut(from, to string) error {
	if err := r.bareExec("tar -cf " + from + ".tar -C " + from + " ."); err != nil {
		return err
	}
	resp, err := r.request(http.MethodGet, r.filesPath(from+".tar"), nil, 0)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(to)
	if err != nil {
		return err
	}
	defer root.Close()
	tr := tar.NewReader(resp.Body)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return r.bareExec("rm " + from + ".tar")
		}
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeDir {
			if err := root.MkdirAll(filepath.Clean(h.Name), 0o755); err != nil {
				return err
			}
			continue
		}
		f, err := root.OpenFile(filepath.Clean(h.Name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, fs.FileMode(h.Mode).Perm())
		if err != nil {
			return err
		}
		_, err = io.Copy(f, tr)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}

// fill makes a file of random bytes.
func fill(tb testing.TB, path string, size int64) {
	tb.Helper()
	require.NoError(tb, os.MkdirAll(filepath.Dir(path), 0o755))
	f, err := os.Create(path)
	require.NoError(tb, err)
	_, err = io.CopyN(f, rand.NewChaCha8([32]byte{byte(size)}), size)
	require.NoError(tb, err)
	require.NoError(tb, f.Close())
}

// bytesTotal is how much the throughput benchmarks move.
const bytesTotal = 1 << 30

// big is what they move it as: files under the provider's limit, or one above it,
// which the bare request may send as one because the emulator's limit is higher.
var big = []struct {
	name  string
	files int
}{{"16x64MiB", 16}, {"4x256MiB", 4}, {"1x1GiB", 1}}

func newBigRig(b *testing.B, files int) *syncRig {
	r := newSyncRig(b, createostest.Options{MaxFileBytes: 2 << 30})
	for i := range files {
		fill(b, r.local(fmt.Sprintf("src/%02d", i)), bytesTotal/int64(files))
	}
	require.NoError(b, os.MkdirAll(r.remote("bare"), 0o755))
	require.NoError(b, os.MkdirAll(r.local("bare"), 0o755))
	return r
}

// turns runs two things in turns and returns the median of the ratio of their
// times, b over a. before is not measured.
func turns(b *testing.B, before func(), ours, bare func() error) float64 {
	// What one has written goes to the disk while the next runs, which would pay for
	// it: by a factor of eight between two runs of a full sync, as was seen.
	settled := func() {
		before()
		_ = exec.Command("sync").Run() // not every system has it
	}
	var ratios []float64
	for b.Loop() {
		b.StopTimer()
		settled()
		began := time.Now()
		require.NoError(b, bare())
		theirs := time.Since(began)
		settled()
		b.StartTimer()
		began = time.Now()
		err := ours()
		ratios = append(ratios, theirs.Seconds()/time.Since(began).Seconds())
		require.NoError(b, err)
	}
	slices.Sort(ratios)
	return ratios[len(ratios)/2]
}

func BenchmarkSyncUpload(b *testing.B) {
	for _, c := range big {
		b.Run(c.name, func(b *testing.B) {
			r := newBigRig(b, c.files)
			b.SetBytes(bytesTotal)
			before := func() { require.NoError(b, os.RemoveAll(r.remote("ours"))) }
			peak := watchMemory(b)
			ratio := turns(b, before, func() error {
				_, err := r.in(b.Context(), createos.SyncMapping{Source: r.local("src"), Target: "ours"})
				return err
			}, func() error {
				for i := range c.files {
					name := fmt.Sprintf("%02d", i)
					if err := r.barePut(r.local("src/"+name), r.remote("bare/"+name)); err != nil {
						return err
					}
				}
				return nil
			})
			b.ReportMetric(peak(), "peak-MiB")
			b.ReportMetric(ratio, "x/bare")
		})
	}
}

func BenchmarkSyncDownload(b *testing.B) {
	for _, c := range big {
		b.Run(c.name, func(b *testing.B) {
			r := newBigRig(b, c.files)
			require.NoError(b, os.Rename(r.local("src"), r.remote("src")))
			b.SetBytes(bytesTotal)
			before := func() { require.NoError(b, os.RemoveAll(r.local("ours"))) }
			peak := watchMemory(b)
			ratio := turns(b, before, func() error {
				_, err := r.out(b.Context(), createos.SyncMapping{Source: "src", Target: r.local("ours")})
				return err
			}, func() error {
				for i := range c.files {
					name := fmt.Sprintf("%02d", i)
					if err := r.bareGet(r.remote("src/"+name), r.local("bare/"+name)); err != nil {
						return err
					}
				}
				return nil
			})
			b.ReportMetric(peak(), "peak-MiB")
			b.ReportMetric(ratio, "x/bare")
		})
	}
}

func fillTree(tb testing.TB, dir string, files int) {
	rnd := rand.NewChaCha8([32]byte{1})
	for i := range files {
		path := filepath.Join(dir, fmt.Sprintf("d%03d/f%05d", i%100, i))
		require.NoError(tb, os.MkdirAll(filepath.Dir(path), 0o755))
		content := make([]byte, 1<<10)
		rnd.Read(content)
		require.NoError(tb, os.WriteFile(path, content, 0o644))
	}
}

const smallFiles = 20_000

func BenchmarkSyncTreeIn(b *testing.B) {
	r := newSyncRig(b, createostest.Options{})
	fillTree(b, r.local("src"), smallFiles)
	n := 0
	peak := watchMemory(b)
	ratio := turns(b, func() { n++ }, func() error {
		_, err := r.in(b.Context(), createos.SyncMapping{Source: r.local("src"), Target: fmt.Sprintf("t%d", n)})
		return err
	}, func() error { return r.bareTreeIn(r.local("src"), r.remote(fmt.Sprintf("t%d", n))) })
	b.ReportMetric(peak(), "peak-MiB")
	b.ReportMetric(1/ratio, "time/bare")
}

func BenchmarkSyncTreeOut(b *testing.B) {
	r := newSyncRig(b, createostest.Options{})
	fillTree(b, r.remote("src"), smallFiles)
	n := 0
	peak := watchMemory(b)
	ratio := turns(b, func() { n++ }, func() error {
		_, err := r.out(b.Context(), createos.SyncMapping{Source: "src", Target: r.local(fmt.Sprintf("t%d", n))})
		return err
	}, func() error { return r.bareTreeOut(r.remote("src"), r.local(fmt.Sprintf("t%d", n))) })
	b.ReportMetric(peak(), "peak-MiB")
	b.ReportMetric(1/ratio, "time/bare")
}

// BenchmarkSyncDelta compares the second sync of an unchanged tree with Delta and
// without: the same call to the same target, which the one without replaces. What that
// costs is the making of so many files, which differs by a factor of ten and more from
// one file system, and one directory, to another; what a delta costs does not.
func BenchmarkSyncDelta(b *testing.B) {
	r := newSyncRig(b, createostest.Options{})
	fillTree(b, r.local("src"), smallFiles)
	in := func(delta bool) error {
		_, err := r.in(b.Context(), createos.SyncMapping{Source: r.local("src"), Target: "there", Delta: delta})
		return err
	}
	out := func(delta bool) error {
		_, err := r.out(b.Context(), createos.SyncMapping{Source: "there", Target: r.local("back"), Delta: delta})
		return err
	}
	require.NoError(b, errors.Join(in(false), out(false)))
	for _, c := range []struct {
		name string
		sync func(delta bool) error
	}{{"in", in}, {"out", out}} {
		b.Run(c.name, func(b *testing.B) {
			peak := watchMemory(b)
			ratio := turns(b, func() {}, func() error { return c.sync(true) }, func() error { return c.sync(false) })
			b.ReportMetric(peak(), "peak-MiB")
			b.ReportMetric(1/ratio, "time/full")
		})
	}
}

// BenchmarkSyncCount shows what memory trees of many files take, all of whose entries
// differ from what is there: peak-MiB should not follow the number of files.
func BenchmarkSyncCount(b *testing.B) {
	for _, files := range []int{2_500, 10_000} {
		b.Run(fmt.Sprint(files), func(b *testing.B) {
			r := newSyncRig(b, createostest.Options{})
			for i := range files {
				r.write(r.local(fmt.Sprintf("src/directory-%03d/a-file-with-a-name-%06d", i%100, i)), "")
			}
			n := 0
			peak := watchMemory(b)
			for b.Loop() {
				n++
				_, err := r.in(b.Context(), createos.SyncMapping{Source: r.local("src"), Target: "there", Delta: true, Delete: true, Mode: fs.FileMode(0o600 + n%2)})
				require.NoError(b, err)
				_, err = r.out(b.Context(), createos.SyncMapping{Source: "there", Target: r.local("back"), Delta: true, Delete: true})
				require.NoError(b, err)
			}
			b.ReportMetric(peak(), "peak-MiB")
		})
	}
}

// watchMemory returns a function that says how far the resident memory of this
// process has risen, in MiB, at most.
func watchMemory(b *testing.B) (peak func() float64) {
	start := resident()
	if start == 0 {
		return func() float64 { return 0 } // not known on this system
	}
	top, stop, done := start, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				top = max(top, resident())
			case <-stop:
				return
			}
		}
	}()
	return func() float64 {
		close(stop)
		<-done
		return float64(top-start) / (1 << 20)
	}
}

func resident() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, pages int64
	if _, err := fmt.Sscan(string(text), &size, &pages); err != nil {
		return 0
	}
	return pages * int64(os.Getpagesize())
}
