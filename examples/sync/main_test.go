package main

import (
	"bytes"
	"context"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/createostest"
)

func TestSummary(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the scripts of a sync need the programs of a sandbox, which the emulator takes from this machine")
	}
	var out, bars bytes.Buffer
	require.NoError(t, run(t.Context(), &out, &bars))
	require.Equal(t, strings.TrimLeft(`
in: 201 files moved (204811 bytes), 0 unchanged, 0 deleted
in: skipped hosts: is a symbolic link that leads out of the tree
in again: 1 files moved (8 bytes), 200 unchanged, 0 deleted
in again: skipped hosts: is a symbolic link that leads out of the tree
out: 1 files moved (7 bytes), 0 unchanged, 0 deleted
result: 203784
`, "\n"), out.String())
	require.Contains(t, bars.String(), "201/201 files")
}

func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, io.Discard, io.Discard), context.Canceled)
}

// An interrupt leaves nothing, whatever request it comes with.
func TestInterruptLeavesNothing(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the scripts of a sync need the programs of a sandbox, which the emulator takes from this machine")
	}
	for _, route := range []string{"POST /v1/sandboxes", "POST /v1/sandboxes/{id}/exec", "PUT /v1/sandboxes/{id}/files"} {
		srv := createostest.NewServer(t)
		ctx, cancel := context.WithCancel(t.Context())
		// The end of the sandbox is refused once, too: only Shutdown tries again.
		refused := srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 403, Nth: 1})
		srv.Fail(createostest.Fault{Route: route, Nth: 1, Before: cancel})
		require.ErrorIs(t, runOn(ctx, srv, io.Discard, io.Discard), context.Canceled)
		require.Empty(t, srv.LeakReport(), route)
		require.Equal(t, 1, refused.Hits(), route)
	}
}
