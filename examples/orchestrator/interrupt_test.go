//go:build unix

package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/createostest"
)

// TestMain lets the test binary be the program, so that a test can send it a
// signal.
func TestMain(m *testing.M) {
	if os.Getenv("ORCHESTRATOR_AS_PROGRAM") != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// interrupted starts the program, sends it SIGINT when a line with mark has
// appeared, and returns all of its output and its exit code.
func interrupted(t *testing.T, mark string, args ...string) (string, int) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), "ORCHESTRATOR_AS_PROGRAM=1")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())

	var seen strings.Builder
	lines := bufio.NewScanner(io.TeeReader(out, &seen))
	sent := false
	for lines.Scan() {
		if !sent && strings.Contains(lines.Text(), mark) {
			sent = true
			require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
		}
	}
	err = cmd.Wait()
	require.True(t, sent, "no %q in the output:\n%s", mark, &seen)
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, "%s", &seen)
	return seen.String(), exit.ExitCode()
}

func TestSIGINTPausesWhatTheNextStartCanUse(t *testing.T) {
	srv := createostest.NewServer(t)
	file := filepath.Join(t.TempDir(), "leases.json")
	out, code := interrupted(t, "6 of 12 steps", at(srv, file, 4)...)
	assert.Equal(t, 1, code)
	assert.Contains(t, out, "owed       nothing")
	assert.NotContains(t, out, "4 done")
	requireBalance(t, srv, file)
	kept := len(stored(t, file).Leases)
	assert.GreaterOrEqual(t, kept, 2, "no job has more than 3 of the 6 steps")

	out = start(t, append(at(srv, file, 4), "-destroy")...)
	assert.Contains(t, out, "jobs       4 done, 0 failed, 0 cancelled\n")
	assert.Contains(t, out, fmt.Sprintf("sandboxes  %d acquired, %d resumed, 4 destroyed", 4-kept, kept))
	assert.Empty(t, srv.LeakReport())
}

func TestSIGINTDestroysWhatNobodyCanUse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leases.json")
	out, code := interrupted(t, "3 of 12 steps", "-store", file, "-jobs", "4")
	assert.Equal(t, 1, code)
	assert.Regexp(t, `[1-4] destroyed\nkept       0 leases`, out)
	assert.Contains(t, out, "nothing is left")
	assert.Zero(t, stored(t, file))
}
