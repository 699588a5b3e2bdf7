package createos_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// The tests of this file run real commands.

type realHost struct {
	srv   *createostest.Server
	d     *createos.Driver
	env   createos.Environment
	lease *createos.Lease
}

func newRealHost(t *testing.T, opts createostest.Options) *realHost {
	t.Helper()
	if _, err := os.Stat("/bin/bash"); err != nil {
		t.Skip("no /bin/bash on this machine")
	}
	h := &realHost{srv: createostest.NewServer(t, opts)}
	var err error
	h.d, err = createos.NewDriver(h.srv.DriverConfig())
	require.NoError(t, err)
	h.env = createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: h.srv.Config()}
	h.lease, err = h.d.Acquire(t.Context(), h.env, createos.AcquireOptions{Workspace: h.srv.Workspace()})
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, h.d.Destroy(context.Background(), h.env, h.lease))
		assert.NoError(t, h.d.Shutdown(context.Background()))
		assert.Empty(t, h.srv.LeakReport())
	})
	h.srv.ForgetRequests()
	return h
}

func (h *realHost) exec(t *testing.T, cmd createos.Command) (*createos.Result, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return h.d.Exec(ctx, h.env, h.lease, cmd)
}

func TestExecRealCommand(t *testing.T) {
	t.Parallel()
	h := newRealHost(t, createostest.Options{})
	args := []string{"", "it's", "a\nb", "$(id)", "\x01\x7f\xff", "canary-arg", ""}
	res, err := h.exec(t, createos.Command{
		Name: "bash", Args: append([]string{"-c", `pwd -P; printf '%s\0' "$#" "$@"; printf '%s\0' "$SECRET" "$SHLVL"; cat; exit 7`, "bash"}, args...),
		Env:   createos.Env(map[string]string{"SECRET": "canary-env'\n\xfe", "SHLVL": "5"}),
		Stdin: strings.NewReader("canary-in\x00\xff"),
	})
	require.NoError(t, err)
	want := h.lease.Metadata.RemoteCwd + "\n7\x00" + strings.Join(args, "\x00") + "\x00canary-env'\n\xfe\x006\x00canary-in\x00\xff"
	assert.Equal(t, want, string(res.Stdout), "the bash that prints adds one to SHLVL")
	assert.Empty(t, string(res.Stderr))
	assert.Equal(t, 7, res.ExitCode)
	assert.Len(t, h.srv.Requests(), 3)
	for _, p := range h.srv.Processes(h.lease.ProviderLeaseID) {
		assert.NotContains(t, strings.Join(p.Args, " "), "canary")
	}
}

func TestExecRealInputOfAnySize(t *testing.T) {
	t.Parallel()
	h := newRealHost(t, createostest.Options{})
	rng := rand.NewChaCha8([32]byte{1})
	for _, size := range []int{0, 1, 96 << 10, 96<<10 + 1, 300 << 10, 8 << 20, 20 << 20} {
		in := make([]byte, size)
		_, _ = rng.Read(in)
		sum := fmt.Sprintf("%x", sha256.Sum256(in))
		res, err := h.exec(t, createos.Command{Name: "sh", Args: []string{"-c", `sha256sum; cd ..; ls -A`}, Stdin: bytes.NewReader(in)})
		require.NoError(t, err, size)
		require.NoError(t, res.Err(), "%d: %s", size, res.Stderr)
		assert.Contains(t, string(res.Stdout), sum, size)
		assert.NotContains(t, string(res.Stdout), ".createos-", "nothing is left of it when the command runs")
		res, err = h.exec(t, createos.Command{Name: "true", Stdin: bytes.NewReader(in)})
		require.NoError(t, err)
		assert.True(t, res.Success(), "a command that does not read it")
	}
	res, err := h.exec(t, createos.Command{Name: "cat"})
	require.NoError(t, err)
	assert.True(t, res.Success(), "no input is an empty one")

	big := strings.Repeat("x", 100_000)
	res, err = h.exec(t, createos.Command{Name: "sh", Args: []string{"-c", `printf '%s' "$1$2$3" | wc -c; cat; ls -A ..`, "sh", big, big, big}, Stdin: strings.NewReader("in")})
	require.NoError(t, err)
	require.NoError(t, res.Err(), string(res.Stderr))
	assert.Contains(t, string(res.Stdout), "300000\nin")
	assert.NotContains(t, string(res.Stdout), ".createos-")
}

func TestExecRealOutputIsWhole(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string][]createostest.Fault{
		"one connection": nil,
		"cut":            {{Route: "GET /v1/sandboxes/{id}/processes/{process}/connect", Times: 8, CutAfterFrames: 40}},
		"cut inside":     {{Route: "GET /v1/sandboxes/{id}/processes/{process}/connect", Times: 8, CutAfterBytes: 1_000_000}},
		"ends clean":     {{Route: "GET /v1/sandboxes/{id}/processes/{process}/connect", Times: 8, CutAfterFrames: 30, CutClean: true}},
	} {
		t.Run(name, func(t *testing.T) {
			// The journal holds it all: what a cut connection leaves there must not be evicted.
			h := newRealHost(t, createostest.Options{JournalBytes: 16 << 20})
			for _, f := range faults {
				h.srv.Fail(f)
			}
			out := sha256.New()
			n := 0
			slow := writerFunc(func(p []byte) (int, error) { n++; return out.Write(p) })
			res, err := h.exec(t, createos.Command{Name: "seq", Args: []string{"1", "1000000"}, Stdout: slow, TailBytes: 16})
			require.NoError(t, err)
			assert.True(t, res.Success())
			assert.EqualValues(t, 6888896, res.StdoutBytes)
			assert.Equal(t, "\n999999\n1000000\n", string(res.Stdout))
			want := sha256.New()
			for i := 1; i <= 1000000; i++ {
				fmt.Fprintln(want, i)
			}
			assert.Equal(t, want.Sum(nil), out.Sum(nil))
		})
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestExecRealEnds(t *testing.T) {
	t.Parallel()
	h := newRealHost(t, createostest.Options{})
	for name, tc := range map[string]struct {
		script string
		code   int
		signal string
	}{
		"exit":   {"exit 3", 3, ""},
		"signal": {"kill -KILL $$", -1, "SIGKILL"},
		"term":   {"kill -TERM $$", -1, "SIGTERM"},
	} {
		res, err := h.exec(t, createos.Command{Name: "sh", Args: []string{"-c", tc.script}})
		require.NoError(t, err, name)
		assert.Equal(t, tc.signal, res.Signal, name)
		if tc.signal == "" {
			assert.Equal(t, tc.code, res.ExitCode, name)
		}
	}
	res, err := h.exec(t, createos.Command{Name: "no-such-program"})
	require.NoError(t, err)
	assert.Equal(t, 127, res.ExitCode)
	res, err = h.exec(t, createos.Command{Name: "true", Dir: "no/such/directory"})
	var start *createos.StartError
	require.ErrorAs(t, err, &start)
	assert.Equal(t, -1, res.ExitCode)
	res, err = h.exec(t, createos.Command{Name: "pwd", Dir: ".."})
	require.NoError(t, err)
	assert.True(t, res.Success())
}

func TestExecRealProfileThatExits(t *testing.T) {
	t.Parallel()
	for profile, says := range map[string]string{
		"echo hi; exit 0": "ended with exit code 0", "echo hi; exec sh -c 'kill -KILL $$'": "was ended by SIGKILL", "echo hi; kill -TERM $$": "was ended by SIGTERM",
	} {
		h := newRealHost(t, createostest.Options{})
		res, err := h.exec(t, createos.Command{Name: "sh", Args: []string{"-c", `printf %s "$1" >~/.bash_profile`, "sh", profile}})
		require.NoError(t, err)
		require.True(t, res.Success())
		res, err = h.exec(t, createos.Command{Name: "echo", Args: []string{"ran"}})
		var start *createos.StartError
		require.ErrorAs(t, err, &start)
		assert.Contains(t, start.Problem, says)
		assert.Equal(t, "hi\n", string(res.Stdout))
		assert.False(t, res.Success())
		assert.Equal(t, -1, res.ExitCode)
	}
}

// live counts the processes of the lease whose tree has not exited.
func (h *realHost) live() (n int) {
	for _, p := range h.srv.Processes(h.lease.ProviderLeaseID) {
		if !p.TreeExited {
			n++
		}
	}
	return n
}

func TestExecRealTreesEnd(t *testing.T) {
	t.Parallel()
	const hardToKill = `trap '' TERM; (trap '' TERM; setsid sleep 300) & sleep 300 & echo ready; wait`
	h := newRealHost(t, createostest.Options{})
	t.Run("time-out", func(t *testing.T) {
		res, err := h.exec(t, createos.Command{Name: "bash", Args: []string{"-c", hardToKill}, Timeout: 1500 * time.Millisecond})
		require.NoError(t, err)
		assert.True(t, res.TimedOut)
		assert.Equal(t, "ready\n", string(res.Stdout))
		assert.Zero(t, h.live())
	})
	t.Run("cancel", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ready := writerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil })
		_, err := h.d.Exec(ctx, h.env, h.lease, createos.Command{Name: "bash", Args: []string{"-c", hardToKill}, Stdout: ready})
		require.ErrorIs(t, err, context.Canceled)
		assert.NotErrorIs(t, err, createos.ErrTerminationUnproven)
		assert.Zero(t, h.live())
	})
	t.Run("background", func(t *testing.T) {
		background := createos.Command{Name: "sh", Args: []string{"-c", `sleep 300 & echo started`}}
		res, err := h.exec(t, background)
		require.NoError(t, err)
		assert.True(t, res.Success(), "an open pipe is no reason to wait")
		assert.Equal(t, 1, h.live())
		background.EndTree = true
		res, err = h.exec(t, background)
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Equal(t, 1, h.live())
	})
	assert.Empty(t, h.d.Unconfirmed())
}

func TestExecRealManyAtOnce(t *testing.T) {
	t.Parallel()
	h := newRealHost(t, createostest.Options{})
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			var out bytes.Buffer
			res, err := h.exec(t, createos.Command{Name: "sh", Args: []string{"-c", `cat; echo "$1"`, "sh", fmt.Sprint(i)}, Stdin: strings.NewReader("in "), Stdout: &out})
			assert.NoError(t, err)
			assert.True(t, res.Success())
			assert.Equal(t, fmt.Sprintf("in %d\n", i), out.String())
		})
	}
	wg.Wait()
}

func TestExecRealEvictedOutput(t *testing.T) {
	t.Parallel()
	for _, inStream := range []bool{false, true} {
		t.Run(fmt.Sprint(inStream), func(t *testing.T) {
			h := newRealHost(t, createostest.Options{JournalBytes: 64 << 10, EvictUnderReader: true, OffsetErrorInStream: inStream})
			// Each connection is cut after two events, and the next one is late. A refusal is
			// one line, and stays whole.
			h.srv.Fail(createostest.Fault{Route: "GET /v1/sandboxes/{id}/processes/{process}/connect", Delay: 300 * time.Millisecond, CutAfterFrames: 2})
			_, err := h.exec(t, createos.Command{Name: "yes"})
			var lost *createos.OutputLostError
			require.ErrorAs(t, err, &lost)
			assert.Positive(t, lost.From)
			assert.GreaterOrEqual(t, lost.To, lost.From)
			assert.Zero(t, h.live())
			assert.Empty(t, h.d.Unconfirmed())
		})
	}
}

func TestExecRealFailingWriter(t *testing.T) {
	t.Parallel()
	h := newRealHost(t, createostest.Options{})
	broken := errors.New("disk full")
	res, err := h.exec(t, createos.Command{Name: "echo", Args: []string{"hi"}, Stdout: writerFunc(func([]byte) (int, error) { return 0, broken }), Stderr: io.Discard})
	require.ErrorIs(t, err, broken)
	assert.True(t, res.Success())
	assert.Equal(t, "hi\n", string(res.Stdout))
}

func BenchmarkExecOutput(b *testing.B) {
	srv := createostest.NewServer(b)
	d, err := createos.NewDriver(srv.DriverConfig())
	require.NoError(b, err)
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
	lease, err := d.Acquire(b.Context(), env, createos.AcquireOptions{Workspace: srv.Workspace()})
	require.NoError(b, err)
	defer func() { require.NoError(b, d.Destroy(b.Context(), env, lease)) }()
	const size = 64 << 20
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		res, err := d.Exec(b.Context(), env, lease, createos.Command{Name: "head", Args: []string{"-c", fmt.Sprint(size), "/dev/zero"}, Stdout: io.Discard})
		require.NoError(b, err)
		require.EqualValues(b, size, res.StdoutBytes)
	}
}
