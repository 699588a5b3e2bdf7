//go:build linux

package createos_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

const (
	memoryOutput = 256 << 20
	memoryFrame  = 32 << 10
	memoryBound  = 64 << 20

	memoryTest    = "TestOutputInBoundedMemory"
	memoryRole    = "CREATEOS_TEST_MEMORY_ROLE"
	memoryTimeout = 2 * time.Minute
)

// A memoryServer is what the client process is told of the server process.
type memoryServer struct{ URL, Key, Shape, Workspace string }

// A memoryReport is what the client process found. Memory is in bytes.
type memoryReport struct {
	Before, Peak     int64
	Ours, Bare       time.Duration
	OursCPU, BareCPU time.Duration
}

// TestOutputInBoundedMemory streams 256 MiB of output through Exec. Emulator and
// client are processes of their own, started from this test binary, for the
// emulator keeps output and would hide what the client does.
func TestOutputInBoundedMemory(t *testing.T) {
	switch os.Getenv(memoryRole) {
	case "server":
		require.NoError(t, serveMemory(os.Stdin, os.Stdout))
		return
	case "client":
		ctx, cancel := context.WithTimeout(t.Context(), memoryTimeout)
		defer cancel()
		require.NoError(t, measureMemory(ctx, os.Stdin, os.Stdout))
		return
	}
	if testing.Short() {
		t.Skip("-short: moves 512 MiB over loopback")
	}
	if raceEnabled {
		t.Skip("race detector: its shadow memory is several times that of the program and would be measured instead")
	}
	// Not of t.Context, and ended last: the server is to end by itself also
	// when the test fails.
	ctx, cancel := context.WithTimeout(context.Background(), memoryTimeout)
	t.Cleanup(cancel)

	server, about := startMemoryServer(ctx, t)
	client := memoryChild(ctx, "client")
	client.Stdin = bytes.NewReader(about)
	out, err := client.Output() // waits for the process
	require.NoError(t, err, "client: %s", out)
	var r memoryReport
	require.NoError(t, json.NewDecoder(bytes.NewReader(out)).Decode(&r))
	require.NoError(t, server())

	grown := r.Peak - r.Before
	assert.LessOrEqual(t, grown, int64(memoryBound), "bytes of resident memory that the output has taken")
	assert.Positive(t, r.Before)
	assert.GreaterOrEqual(t, r.Peak, r.Before)
	t.Logf("%d MiB of output: %d MiB resident before, %.1f MiB more at the peak", memoryOutput>>20, r.Before>>20, float64(grown)/(1<<20))
	t.Logf("%.0f MB/s, %.2f times a bare loop; %.2f times its processor time",
		memoryOutput/1e6/r.Ours.Seconds(), r.Bare.Seconds()/r.Ours.Seconds(), r.OursCPU.Seconds()/r.BareCPU.Seconds())
}

func memoryChild(ctx context.Context, role string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+memoryTest+"$")
	cmd.Env = append(os.Environ(), memoryRole+"="+role)
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// startMemoryServer starts the emulator and returns the line in which it tells
// where it is. stop ends it, and is called at the end of the test in any case.
func startMemoryServer(ctx context.Context, t *testing.T) (stop func() error, about []byte) {
	cmd := memoryChild(ctx, "server")
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	stopped := false
	stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		_ = stdin.Close() // tells it to end
		_, err := io.Copy(io.Discard, stdout)
		return errors.Join(err, cmd.Wait())
	}
	t.Cleanup(func() { assert.NoError(t, stop(), "server") })
	var server memoryServer
	require.NoError(t, json.NewDecoder(stdout).Decode(&server))
	about, err = json.Marshal(server)
	require.NoError(t, err)
	return stop, about
}

// serveMemory is the server process. It ends with its input, and so at the
// latest with the process that started it.
func serveMemory(until io.Reader, to io.Writer) error {
	srv, err := createostest.Start(createostest.Options{Commands: flood})
	if err != nil {
		return err
	}
	defer srv.Close()
	about := memoryServer{URL: srv.URL, Key: srv.APIKey(), Shape: srv.Config().Shape, Workspace: srv.Workspace()}
	if err := json.NewEncoder(to).Encode(about); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, until)
	return err
}

// measureMemory is the client process.
func measureMemory(ctx context.Context, from io.Reader, to io.Writer) (err error) {
	var server memoryServer
	if err := json.NewDecoder(from).Decode(&server); err != nil {
		return err
	}
	cfg := createos.Config{APIURL: server.URL, APIKey: createos.NewSecret(server.Key), Shape: server.Shape}
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	h, err := newHarness(createos.DriverConfig{Transport: transport, Budget: createos.NewBudget(1 << 20)}, cfg, server.Workspace)
	if err != nil {
		return err
	}
	lease, err := h.acquire(ctx)
	if err != nil {
		return err
	}
	defer func() {
		end := context.WithoutCancel(ctx)
		err = errors.Join(err, h.driver.Destroy(end, h.env, lease), h.driver.Shutdown(end))
	}()
	var r memoryReport
	// Where this is not permitted the peak is that of the whole life of the
	// process, and the test only stricter.
	_ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0)
	if r.Before, err = memoryOf("VmRSS"); err != nil {
		return err
	}
	r.Ours, r.OursCPU, err = timed(func() error { return h.execFlood(ctx, lease, memoryOutput, memoryFrame) })
	if err != nil {
		return err
	}
	if r.Peak, err = memoryOf("VmHWM"); err != nil {
		return err
	}
	r.Bare, r.BareCPU, err = timed(func() error { return h.bareFlood(ctx, lease, memoryOutput, memoryFrame) })
	if err != nil {
		return err
	}
	return json.NewEncoder(to).Encode(r)
}

// memoryOf reads a figure of this process from the kernel, in bytes.
func memoryOf(name string) (int64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(status) {
		if value, ok := bytes.CutPrefix(line, []byte(name+":")); ok {
			var kib int64
			_, err := fmt.Sscanf(string(value), "%d kB", &kib)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no %s in /proc/self/status", name)
}

// timed measures the time that f takes, and that of the processor.
func timed(f func() error) (wall, cpu time.Duration, err error) {
	before, err := processorTime()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := f(); err != nil {
		return 0, 0, err
	}
	wall = time.Since(began)
	after, err := processorTime()
	return wall, after - before, err
}

func processorTime() (time.Duration, error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, err
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
