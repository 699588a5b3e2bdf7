package createos_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A killer ends a connection once so many bytes have gone over all of them, in
// both directions, and then lets everything pass.
type killer struct {
	mu    sync.Mutex
	count int64
	at    int64 // 0: never
	hit   func()
}

// arm makes the byte number at the last one, for hit to be called then.
func (k *killer) arm(at int64, hit func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.count, k.at, k.hit = 0, at, hit
}

func (k *killer) bytes() int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.count
}

// allow says how many of n bytes may pass, and whether the connection ends then.
func (k *killer) allow(n int) (int, func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.count += int64(n)
	if k.at == 0 || k.count < k.at {
		return n, nil
	}
	n -= int(k.count - k.at)
	k.at = 0
	return n, k.hit
}

func (k *killer) transport() http.RoundTripper {
	var d net.Dialer
	return &http.Transport{
		MaxIdleConnsPerHost: 8,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &mortalConn{c, k}, nil
		},
	}
}

type mortalConn struct {
	net.Conn
	k *killer
}

func (c *mortalConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	m, hit := c.k.allow(n)
	if hit != nil {
		hit()
		c.Close()
		return m, net.ErrClosed
	}
	return n, err
}

func (c *mortalConn) Write(p []byte) (int, error) {
	m, hit := c.k.allow(len(p))
	if hit == nil {
		return c.Conn.Write(p)
	}
	n, _ := c.Conn.Write(p[:m])
	hit()
	c.Close()
	return n, net.ErrClosed
}

// swept is the time of all files, so that trees can be compared.
var swept = time.Unix(1_700_000_000, 0)

// A sweepCase is a sync whose target holds something old before.
type sweepCase struct {
	name   string
	old    func(r *syncRig)
	sync   func(ctx context.Context, r *syncRig) error
	target func(r *syncRig) string
	merge  *sweptMerge // for directories that are merged into
}

// healthy makes the sync without trouble, and returns the target before and after.
func (c *sweepCase) healthy(t *testing.T, r *syncRig) (old, latest any) {
	c.old(r)
	old = lookAt(t, c.target(r))
	require.NoError(t, c.sync(t.Context(), r))
	latest = lookAt(t, c.target(r))
	require.NotEqual(t, old, latest)
	if c.merge != nil { // what it should be does not depend on the sync
		require.Equal(t, c.merge.want(r, old.(map[string]string)), latest)
	}
	return old, latest
}

// judge checks what a sync with trouble has left.
func (c *sweepCase) judge(t *testing.T, r *syncRig, err error, old, latest any, trouble string) {
	t.Helper()
	got := lookAt(t, c.target(r))
	if c.merge == nil {
		if err == nil || fmt.Sprint(got) != fmt.Sprint(old) {
			require.Equal(t, latest, got, "%s, error %v: neither old nor new", trouble, err)
		}
		r.clean()
		return
	}
	if err == nil {
		require.Equal(t, latest, got, "%s: success without the new content", trouble)
	}
	require.Empty(t, neitherOldNorNew(old, latest, got), "%s, error %v", trouble, err)
	r.clean()
	if err != nil { // whatever mixture it begins with
		require.NoError(t, c.sync(t.Context(), r), "%s: the same sync once more", trouble)
		require.Equal(t, latest, lookAt(t, c.target(r)), "%s: the same sync once more", trouble)
		r.clean()
	}
}

// lookAt describes a file or a directory, the mode of that itself included.
func lookAt(t testing.TB, path string) any {
	info, err := os.Lstat(path)
	if err != nil {
		return err.Error()
	}
	if info.IsDir() {
		tree := snapshot(t, path)
		tree["."] = info.Mode().String()
		return tree
	}
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return fmt.Sprintf("%v %x", info.Mode(), sha256.Sum256(b))
}

func sweepCases() []sweepCase {
	resetDir := func(dir string) func(*syncRig) {
		return func(r *syncRig) {
			full := r.remote(dir)
			if dir == "out" {
				full = r.local(dir)
			}
			require.NoError(r.t, os.RemoveAll(full))
			r.write(filepath.Join(full, "a/old"), "old")
			r.write(filepath.Join(full, "b"), "old")
			for _, p := range []string{"a/old", "b"} {
				require.NoError(r.t, os.Chtimes(filepath.Join(full, p), swept, swept))
			}
		}
	}
	file := func(path func(*syncRig) string) func(*syncRig) {
		return func(r *syncRig) {
			require.NoError(r.t, os.RemoveAll(path(r)))
			r.write(path(r), "old")
		}
	}
	in := func(m func(r *syncRig) createos.SyncMapping) func(context.Context, *syncRig) error {
		return func(ctx context.Context, r *syncRig) error { _, err := r.in(ctx, m(r)); return err }
	}
	out := func(m func(r *syncRig) createos.SyncMapping) func(context.Context, *syncRig) error {
		return func(ctx context.Context, r *syncRig) error { _, err := r.out(ctx, m(r)); return err }
	}
	remoteFile := func(r *syncRig) string { return r.remote("f") }
	localFile := func(r *syncRig) string { return r.local("f") }
	return []sweepCase{
		{
			name: "file in", old: file(remoteFile), target: remoteFile,
			sync: in(func(r *syncRig) createos.SyncMapping {
				return createos.SyncMapping{Source: r.local("src/big"), Target: "f", Mode: 0o751}
			}),
		}, {
			name: "file out", old: file(localFile), target: localFile,
			sync: out(func(r *syncRig) createos.SyncMapping {
				return createos.SyncMapping{Source: "src/big", Target: r.local("f"), Mode: 0o751}
			}),
		}, {
			name: "directory in", old: resetDir("in"), target: func(r *syncRig) string { return r.remote("in") },
			sync: in(func(r *syncRig) createos.SyncMapping {
				return createos.SyncMapping{Source: r.local("src"), Target: "in"}
			}),
		}, {
			name: "directory out", old: resetDir("out"), target: func(r *syncRig) string { return r.local("out") },
			sync: out(func(r *syncRig) createos.SyncMapping {
				return createos.SyncMapping{Source: "src", Target: r.local("out")}
			}),
		},
	}
}

// fillSource makes the same tree on both sides.
func (r *syncRig) fillSource() {
	for _, dir := range []string{r.local("src"), r.remote("src")} {
		fill(r.t, filepath.Join(dir, "big"), 9_000)
		for i := range 4 {
			r.write(filepath.Join(dir, fmt.Sprintf("d/%d", i)), "new content")
		}
		require.NoError(r.t, os.Symlink("d/1", filepath.Join(dir, "link")))
		require.NoError(r.t, filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			return os.Chtimes(p, swept, swept)
		}))
	}
}

// Killing the connection, and with it the caller's context, at any byte leaves old
// or new, in a directory that is merged into for each file, and no scratch file.
func TestSyncSurvivesTheEndOfItsConnectionAtAnyByte(t *testing.T) {
	t.Parallel()
	stride := int64(1009)
	if testing.Short() {
		stride = 9001
	}
	sweepBytes(t, sweepCases(), stride)
}

// sweepBytes ends the connection at every so many bytes. Each case begins with
// others, so that together they hit more.
func sweepBytes(t *testing.T, cases []sweepCase, stride int64) {
	k := &killer{}
	r := newSyncRig(t, createostest.Options{}, func(c *createos.DriverConfig) { c.Transport = k.transport() })
	r.fillSource()
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			k.arm(0, nil)
			old, latest := c.healthy(t, r)
			total := k.bytes()
			failures := 0
			for at := 1 + min(int64(i)*stride/int64(len(cases)), total/2); at < total; at += stride {
				c.old(r)
				ctx, cancel := context.WithCancel(t.Context())
				k.arm(at, cancel)
				err := c.sync(ctx, r)
				cancel()
				k.arm(0, nil)
				if err != nil {
					failures++
					require.ErrorIs(t, err, context.Canceled)
				}
				c.judge(t, r, err, old, latest, fmt.Sprintf("byte %d", at))
			}
			require.Positive(t, failures)
		})
	}
	require.Empty(t, r.driver.Unconfirmed(), "a sync does not poison")
}

// The same at every request: its reply is lost with the caller's context, or only
// the reply is lost, and the sync finds out and succeeds.
func TestSyncSurvivesTheLossOfAnyReply(t *testing.T) {
	t.Parallel()
	sweepReplies(t, sweepCases(), 1)
}

// sweepReplies loses one reply of so many, which are others for each case.
func sweepReplies(t *testing.T, cases []sweepCase, one int) {
	r := newSyncRig(t, createostest.Options{})
	r.fillSource()
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r.srv.ForgetRequests()
			old, latest := c.healthy(t, r)
			total := len(r.srv.Requests())
			for k := range 2 * total {
				n, leave := 1+k/2, k%2 == 0
				if (k+i)%one != 0 {
					continue
				}
				c.old(r)
				ctx, cancel := context.WithCancel(t.Context())
				f := createostest.Fault{Nth: n, DropReply: true}
				if leave {
					f.Before = cancel
				}
				r.srv.Fail(f)
				err := c.sync(ctx, r)
				cancel()
				r.srv.ClearFaults()
				if !leave {
					require.NoError(t, err, "request %d", n)
				}
				c.judge(t, r, err, old, latest, fmt.Sprintf("request %d, leave %t", n, leave))
			}
		})
	}
	require.Empty(t, r.driver.Unconfirmed())
}
