package createos_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

var crashes = flag.Int("crash", 20, "how often TestCrash kills a host")

// A diskHost is a host whose leases are files, and whose journal is one if it
// keeps one: what a process that is killed leaves behind.
type diskHost struct {
	dir     string
	journal bool
	env     createos.Environment
	driver  *createos.Driver
}

// crashJob is what the process that is to be killed gets.
type crashJob struct {
	Dir, URL, Key, Workspace string
	Journal                  bool
}

func newDiskHost(job crashJob, cfg createos.DriverConfig) (*diskHost, error) {
	conf := createos.Config{
		APIURL: job.URL, APIKey: createos.NewSecret(job.Key), Shape: "s-1vcpu-1gb", ReuseLease: true, Timeout: time.Minute,
	}
	d, err := createos.NewDriver(cfg)
	return &diskHost{job.Dir, job.Journal, createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: conf}, d}, err
}

// write replaces a file whole.
func (h *diskHost) write(name string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	tmp := filepath.Join(h.dir, "new")
	if err := os.WriteFile(tmp, text, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(h.dir, name))
}

func (h *diskHost) remove(name string) error { return os.Remove(filepath.Join(h.dir, name)) }

// readAll reads the files of a kind into new values of T.
func readAll[T any](h *diskHost, kind string) (all []*T, err error) {
	files, err := filepath.Glob(filepath.Join(h.dir, kind+"-*"))
	for _, file := range files {
		text, rerr := os.ReadFile(file)
		v := new(T)
		if err = errors.Join(err, rerr, json.Unmarshal(text, v)); err == nil {
			all = append(all, v)
		}
	}
	return all, err
}

// live is the life of a lease, over and over, until the process is killed.
func (h *diskHost) live(ctx context.Context, workspace string) error {
	source := filepath.Join(h.dir, "source")
	if err := os.WriteFile(source, []byte(strings.Repeat("new", 1000)), 0o600); err != nil {
		return err
	}
	for {
		var name string
		lease, err := h.driver.Acquire(ctx, h.env, createos.AcquireOptions{Workspace: workspace, BeforeCreate: func(_ context.Context, i createos.Intent) error {
			if name = i.SandboxName; !h.journal {
				return nil
			}
			return h.write("intent-"+name, i)
		}})
		if err != nil {
			return err
		}
		file := "lease-" + lease.ProviderLeaseID
		steps := []func() error{
			func() error { return h.write(file, lease) },
			func() error {
				if !h.journal {
					return nil
				}
				return h.remove("intent-" + name)
			},
			func() error {
				_, err := h.driver.SyncIn(ctx, h.env, lease, createos.Sync{Operations: []createos.SyncOperation{{
					Mappings: []createos.SyncMapping{{Source: source, Target: "data"}},
				}}})
				return err
			},
			func() error {
				_, err := h.driver.Exec(ctx, h.env, lease, createos.Command{Name: "sh", Args: []string{"-c", "cat data; sleep 0.05"}})
				return err
			},
			func() error { return h.driver.Release(ctx, h.env, lease) },
			func() error { _, err := h.driver.Resume(ctx, h.env, lease); return err },
			func() error {
				_, err := h.driver.SyncOut(ctx, h.env, lease, createos.Sync{Operations: []createos.SyncOperation{{
					Mappings: []createos.SyncMapping{{Source: "data", Target: filepath.Join(h.dir, "target")}},
				}}})
				return err
			},
			func() error { return h.driver.Destroy(ctx, h.env, lease) },
			func() error { return h.remove(file) },
		}
		for _, step := range steps {
			if err := step(); err != nil {
				return err
			}
		}
	}
}

// TestCrashHost is the process that TestCrash kills.
func TestCrashHost(t *testing.T) {
	text := os.Getenv("CREATEOS_TEST_CRASH")
	if text == "" {
		t.Skip("is run by TestCrash")
	}
	var job crashJob
	require.NoError(t, json.Unmarshal([]byte(text), &job))
	h, err := newDiskHost(job, createos.DriverConfig{Budget: createos.NewBudget(1_000_000)})
	require.NoError(t, err)
	t.Fatal(h.live(t.Context(), job.Workspace))
}

// A crashCount is what was seen over all crashes.
type crashCount struct {
	at                        map[string]int // requests at which the host died
	lost, strays, alive, gone int
}

// TestCrash kills a host with SIGKILL at a random request, before its effect or
// after, and lets a new one take over from what is on disk: leases, and a journal
// of intents in every second run. With the journal RetryCleanup, and without
// it Reconcile, ends what nobody holds; Resume ends commands that the dead host
// left. In the end nothing is left, and what only Reconcile could know is
// counted.
//
// For a long run: go test -run TestCrash -crash 200.
func TestCrash(t *testing.T) {
	if _, err := os.Stat("/bin/bash"); err != nil {
		t.Skip("no /bin/bash on this machine")
	}
	if testing.Short() {
		t.Skip("starts many processes")
	}
	count := &crashCount{at: make(map[string]int)}
	for i := range *crashes {
		t.Run(fmt.Sprint(i), func(t *testing.T) { crashOnce(t, uint64(i), count) })
		if t.Failed() {
			return
		}
	}
	fmt.Printf("crash: %d hosts killed; sandboxes that a journal named: %d; that only Reconcile could find: %d; commands that ran on: %d; stored leases whose sandbox was gone: %d\n",
		*crashes, count.lost, count.strays, count.alive, count.gone)
	for route, n := range count.at {
		t.Logf("%4d at %s", n, route)
	}
}

func crashOnce(t *testing.T, seed uint64, count *crashCount) {
	rng := rand.New(rand.NewPCG(seed, 3))
	srv := createostest.NewServer(t)
	job := crashJob{Dir: t.TempDir(), URL: srv.URL, Key: srv.APIKey(), Workspace: srv.Workspace(), Journal: seed%2 == 0}
	require.NoError(t, os.WriteFile(filepath.Join(job.Dir, "target"), []byte("old"), 0o600))
	text, err := json.Marshal(job)
	require.NoError(t, err)
	host := exec.Command(os.Args[0], "-test.run=^TestCrashHost$")
	host.Env = append(os.Environ(), "CREATEOS_TEST_CRASH="+string(text))
	var once sync.Once
	var at string
	started := make(chan struct{})
	die := func() {
		once.Do(func() {
			<-started
			assert.NoError(t, host.Process.Kill())
		})
	}
	f := createostest.Fault{Nth: 1 + rng.IntN(45), When: func(r createostest.Request) bool { at = r.Route; return true }}
	if rng.IntN(2) == 0 {
		f.Before = die
	} else {
		f.When = func(r createostest.Request) bool { at = r.Route; return !strings.HasSuffix(r.Route, "/connect") }
		f.After = die
	}
	// When is called in order of arrival, until the fault has hit.
	var mu sync.Mutex
	seen, when := 0, f.When
	f.When = func(r createostest.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		if seen >= f.Nth || !when(r) {
			return false
		}
		seen++
		return true
	}
	srv.Fail(f)
	var out bytes.Buffer
	host.Stdout, host.Stderr = &out, &out
	require.NoError(t, host.Start())
	close(started)
	err = host.Wait()
	require.Error(t, err)
	require.Contains(t, err.Error(), "killed", "%s", out.String())
	// What was on its way when the host died still happens.
	require.Eventually(t, func() bool {
		return !slices.ContainsFunc(srv.Requests(), func(r createostest.Request) bool { return !r.Done })
	}, 10*time.Second, 5*time.Millisecond)
	srv.ClearFaults()
	mu.Lock()
	count.at[at]++
	mu.Unlock()
	takeOver(t, srv, job, count)
}

// takeOver is the next process of the host.
func takeOver(t *testing.T, srv *createostest.Server, job crashJob, count *crashCount) {
	ctx, listed := context.WithCancel(t.Context())
	defer listed()
	cfg := srv.DriverConfig()
	h, err := newDiskHost(job, cfg)
	require.NoError(t, err)
	leases, err := readAll[createos.Lease](h, "lease")
	require.NoError(t, err)
	intents, err := readAll[createos.Intent](h, "intent")
	require.NoError(t, err)
	held := make(map[string]bool)
	for _, l := range leases {
		held[l.Metadata.SandboxName] = true
	}
	for _, i := range intents {
		if !held[i.SandboxName] {
			cfg.Unconfirmed = append(cfg.Unconfirmed, i.Unconfirmed(time.Now()))
		}
	}
	// One listing is enough to find what is there; that a name is absent would
	// take a second one ten seconds later.
	cfg.OnEvent = func(e createos.Event) {
		if e.Detail == "list sandboxes" {
			listed()
		}
	}
	h, err = newDiskHost(job, cfg)
	require.NoError(t, err)
	if job.Journal {
		count.lost += notHeld(srv, leases)
		_ = h.driver.RetryCleanup(ctx, h.env)
		require.NoError(t, h.driver.Quiet(t.Context()))
		assert.Zero(t, notHeld(srv, leases), "what the journal names is destroyed")
	}
	got, err := h.driver.Reconcile(t.Context(), h.env, leases, createos.ReconcileOptions{Apply: true, Grace: 1})
	require.NoError(t, err)
	count.strays += len(got.Strays())
	assert.Zero(t, notHeld(srv, leases), "what nobody holds is destroyed")
	for _, l := range leases {
		count.alive += alive(srv, l.ProviderLeaseID)
		_, err := h.driver.Resume(t.Context(), h.env, l)
		if err != nil {
			require.ErrorIs(t, err, createos.ErrLeaseExpired)
			count.gone++
		} else {
			// The end of a tree whose command exited by itself shows a moment later.
			assert.Eventually(t, func() bool { return alive(srv, l.ProviderLeaseID) == 0 }, 2*time.Second, 5*time.Millisecond,
				"a Resume ends what the dead host ran")
		}
		require.NoError(t, h.driver.Destroy(t.Context(), h.env, l))
	}
	require.Empty(t, srv.LeakReport())
	target, err := os.ReadFile(filepath.Join(job.Dir, "target"))
	if errors.Is(err, fs.ErrNotExist) {
		t.Error("a sync out removed its target")
	}
	assert.Contains(t, []string{"old", strings.Repeat("new", 1000)}, string(target), "old or new")
}

func notHeld(srv *createostest.Server, leases []*createos.Lease) (n int) {
	for _, box := range srv.Leaks() {
		held := false
		for _, l := range leases {
			held = held || l.ProviderLeaseID == box.ID
		}
		if !held {
			n++
		}
	}
	return n
}

func alive(srv *createostest.Server, id string) (n int) {
	for _, p := range srv.Processes(id) {
		if !p.TreeExited {
			n++
		}
	}
	return n
}
