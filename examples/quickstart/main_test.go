//go:build unix

package main

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/createostest"
)

const want = `
== acquire a sandbox
leased sb-ID

== run commands in it
$ bash -c 'for n in 1 2 3; do echo "step $n of 3"; sleep 0.2; done; echo "all good, $WHO" > report.txt'
  | step 1 of 3
  | step 2 of 3
  | step 3 of 3
$ echo 'it'\''s "$HOME" & more; exit 9'
  | it's "$HOME" & more; exit 9
$ bash -c 'echo no such report >&2; exit 3'
  ! no such report
  exit code 3

== release it: a reusable lease is paused, with its disk and memory
paused

== resume it
the same sandbox again: true
$ cat report.txt
  | all good, gopher

== destroy it
destroyed; the driver knows of nothing that is left
the emulator agrees
`

func TestQuickstart(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, nil))
	assert.Equal(t, want, regexp.MustCompile(`sb-\w+`).ReplaceAllString(out.String(), "sb-ID"))
}

// Ctrl-C may come anywhere. Nothing may be left then, and the program must not
// claim success.
func TestInterruptLeavesNothing(t *testing.T) {
	for _, at := range []string{"acquire a", "leased", "run commands", "step 1", "exit code", "release it", "resume it", "again: true", "destroy it"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			srv := createostest.NewServer(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out := &tripwire{at: at, trip: cancel}
			err := tour(ctx, out, srv.DriverConfig(), srv.Config(), srv.Workspace())
			require.ErrorIs(t, err, context.Canceled)
			assert.Contains(t, out.seen.String(), at)
			assert.Empty(t, srv.LeakReport())
			if at == "step 1" {
				assert.NotContains(t, out.seen.String(), "| step 3", "output is live, and the command ends with ctx")
			}
		})
	}
}

// A provider that fails in the middle is no reason to leave anything either.
func TestFailureLeavesNothing(t *testing.T) {
	for _, route := range []string{
		"POST /v1/sandboxes/{id}/exec", "POST /v1/sandboxes/{id}/processes",
		"POST /v1/sandboxes/{id}/pause", "POST /v1/sandboxes/{id}/resume",
	} {
		t.Run(strings.ReplaceAll(route, "/", "_"), func(t *testing.T) {
			t.Parallel()
			srv := createostest.NewServer(t)
			fault := srv.Fail(createostest.Fault{Route: route, Status: 403, Nth: 1})
			var out bytes.Buffer
			err := tour(t.Context(), &out, srv.DriverConfig(), srv.Config(), srv.Workspace())
			require.ErrorContains(t, err, "HTTP 403")
			assert.Positive(t, fault.Hits())
			assert.Empty(t, srv.LeakReport())
		})
	}
}

func TestLiveNeedsItsVariables(t *testing.T) {
	for _, name := range []string{"CREATEOS_API_URL", "CREATEOS_API_KEY", "CREATEOS_SHAPE"} {
		t.Setenv(name, "")
	}
	require.ErrorContains(t, run(t.Context(), &bytes.Buffer{}, []string{"-live"}), "CREATEOS_API_KEY")
}

// A tripwire is an output that calls trip once a text has appeared in it.
type tripwire struct {
	at   string
	trip func()
	seen strings.Builder
}

func (w *tripwire) Write(p []byte) (int, error) {
	fmt.Fprintf(&w.seen, "%s", p)
	if strings.Contains(w.seen.String(), w.at) {
		w.trip()
	}
	return len(p), nil
}
