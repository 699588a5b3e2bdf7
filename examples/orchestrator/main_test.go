//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

func TestTwoStartsInOneRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leases.json")
	for range 2 { // the second run finds the store of a former emulator
		out := start(t, "-store", file, "-jobs", "4")
		first, second, _ := strings.Cut(out, "== second start")
		assert.Contains(t, first, "jobs       4 done, 0 failed, 0 cancelled\nsandboxes  4 acquired, 0 resumed, 0 destroyed\nkept       4 leases")
		assert.Equal(t, 4, strings.Count(first, ", use 1\n"))
		assert.Contains(t, second, "the store holds 4 leases")
		assert.Contains(t, second, "jobs       4 done, 0 failed, 0 cancelled\nsandboxes  0 acquired, 4 resumed, 4 destroyed\nkept       0 leases")
		assert.Equal(t, 4, strings.Count(second, ", use 2\n"), "the files of the first start are there")
		assert.Contains(t, second, "nothing is left")
		assert.Zero(t, stored(t, file))
	}
}

func TestOneStartPerRun(t *testing.T) {
	srv := createostest.NewServer(t)
	file := filepath.Join(t.TempDir(), "leases.json")
	args := at(srv, file, 4)

	require.Contains(t, start(t, args...), "4 acquired, 0 resumed")
	requireBalance(t, srv, file)
	require.Len(t, stored(t, file).Leases, 4)

	require.Contains(t, start(t, args...), "0 acquired, 4 resumed")
	requireBalance(t, srv, file)

	require.Contains(t, start(t, append(args, "-jobs", "0", "-destroy")...), "4 destroyed")
	assert.Empty(t, srv.LeakReport())
	assert.Zero(t, stored(t, file))
}

// A host that was killed right after its create has written nothing but the
// intent. The next start must find the sandbox and destroy it.
func TestSandboxOfAKilledStartIsFound(t *testing.T) {
	srv := createostest.NewServer(t)
	file := filepath.Join(t.TempDir(), "leases.json")
	st, err := openStore(file)
	require.NoError(t, err)
	d, err := createos.NewDriver(srv.DriverConfig())
	require.NoError(t, err)
	_, err = d.Acquire(t.Context(), environments(srv.Config())[0], createos.AcquireOptions{
		Workspace:    srv.Workspace(),
		BeforeCreate: func(_ context.Context, i createos.Intent) error { return st.intend(i) },
	})
	require.NoError(t, err)
	require.Len(t, srv.Leaks(), 1)

	out := start(t, at(srv, file, 0)...)
	assert.Contains(t, out, "owed from an earlier start")
	assert.Contains(t, out, "\nsettled\n")
	assert.Empty(t, srv.LeakReport())
	assert.Zero(t, stored(t, file))
}

// A lease that cannot be continued is not destroyed: a person may want to look.
func TestExpiredLeaseIsKeptForAPerson(t *testing.T) {
	srv := createostest.NewServer(t)
	file := filepath.Join(t.TempDir(), "leases.json")
	args := at(srv, file, 2)
	start(t, args...)
	lease := stored(t, file).Leases[0].Lease
	marker := filepath.Join(lease.Metadata.RemoteCwd, ".paperclip-runtime/.paperclip-createos-lease")
	require.NoError(t, srv.RemoveFile(lease.ProviderLeaseID, marker))

	out := start(t, append(args, "-workspace", srv.Workspace())...)
	assert.Contains(t, out, "1 acquired, 1 resumed, 0 destroyed")
	assert.Contains(t, out, "expired    1 leases")
	assert.Len(t, srv.Leaks(), 3)
	assert.Len(t, stored(t, file).Leases, 3)
}

func TestRecordsOfOtherOriginsAreLeftAlone(t *testing.T) {
	other := createostest.NewServer(t)
	file := filepath.Join(t.TempDir(), "leases.json")
	start(t, at(other, file, 1)...)
	before := stored(t, file).Leases

	srv := createostest.NewServer(t)
	out := start(t, append(at(srv, file, 1), "-destroy")...)
	assert.Contains(t, out, "1 records of other origins")
	assert.Empty(t, srv.LeakReport())
	require.Len(t, other.Leaks(), 1)
	after := stored(t, file).Leases
	require.Len(t, after, 1)
	assert.Equal(t, text(t, before), text(t, after))
}

// Ctrl-C may come at any request. Then each sandbox is destroyed, or paused and
// in the store, and nothing runs in it.
func TestInterruptAtAnyRequest(t *testing.T) {
	for n := 1; n <= 25; n += 3 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			srv := createostest.NewServer(t)
			file := filepath.Join(t.TempDir(), "leases.json")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			interruptAt(srv, n, cancel)
			err := run(ctx, io.Discard, at(srv, file, 3))
			require.ErrorIs(t, err, context.Canceled)
			requireBalance(t, srv, file)

			start(t, append(at(srv, file, 0), "-destroy")...)
			assert.Empty(t, srv.LeakReport())
		})
	}
}

// interruptAt calls cancel when the nth request arrives.
func interruptAt(srv *createostest.Server, n int, cancel func()) {
	var mu sync.Mutex
	srv.Fail(createostest.Fault{When: func(createostest.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		if n--; n == 0 {
			cancel()
		}
		return false // the request itself is fine
	}})
}

// start runs the program, which must succeed, and returns its output.
func start(t *testing.T, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, args), "%s", &out)
	return out.String()
}

// at is the command line for a server and n jobs.
func at(srv *createostest.Server, file string, n int) []string {
	args := []string{"-store", file, "-jobs", fmt.Sprint(n), "-url", srv.URL, "-key", srv.APIKey()}
	for range n {
		args = append(args, "-workspace", srv.Workspace())
	}
	return args
}

func stored(t *testing.T, file string) contents {
	t.Helper()
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	var c contents
	require.NoError(t, json.Unmarshal(raw, &c))
	if len(c.Leases)+len(c.Intents)+len(c.Unconfirmed) == 0 {
		return contents{} // empty lists are nothing
	}
	return c
}

// requireBalance checks that what the provider has is what the store knows, that
// all of it is paused, and that nothing is owed.
func requireBalance(t *testing.T, srv *createostest.Server, file string) {
	t.Helper()
	c := contents{}
	if _, err := os.Stat(file); err == nil {
		c = stored(t, file)
	}
	require.Empty(t, c.Intents)
	require.Empty(t, c.Unconfirmed)
	known := []string{}
	for _, r := range c.Leases {
		known = append(known, r.Lease.ProviderLeaseID)
	}
	exist := []string{}
	for _, box := range srv.Leaks() {
		exist = append(exist, box.ID)
		require.Equal(t, createostest.StatePaused, box.State)
		for _, p := range box.Processes {
			require.True(t, p.TreeExited, "process %s still runs", p.ID)
		}
	}
	require.ElementsMatch(t, known, exist)
}

// An emulator that was started again at the same address knows nothing of the
// leases of its predecessor, and cannot prove that they are gone. They stay in
// the store, and the jobs get other sandboxes.
func TestProviderThatForgotIsNotBelieved(t *testing.T) {
	former := createostest.NewServer(t)
	file := filepath.Join(t.TempDir(), "leases.json")
	start(t, at(former, file, 2)...)
	former.Close()

	srv := createostest.NewServer(t, createostest.Options{Addr: strings.TrimPrefix(former.URL, "http://")})
	require.Equal(t, former.URL, srv.URL)
	out := start(t, at(srv, file, 2)...)
	assert.Equal(t, 2, strings.Count(out, "cannot be resumed now and stays in the store"))
	assert.Contains(t, out, "jobs       2 done, 0 failed, 0 cancelled\nsandboxes  2 acquired, 0 resumed")
	assert.Len(t, stored(t, file).Leases, 4)

	var destroyed bytes.Buffer
	err := run(t.Context(), &destroyed, append(at(srv, file, 0), "-destroy"))
	var left *createos.UnconfirmedError
	require.ErrorAs(t, err, &left, "it must not claim that all is clean")
	assert.Len(t, left.Entries, 2)
	assert.Contains(t, destroyed.String(), "2 destroyed")
	assert.Empty(t, srv.LeakReport())
	assert.Len(t, stored(t, file).Leases, 2)
}
