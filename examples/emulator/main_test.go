package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
)

// A served is an emulator that runs for a test.
type served struct {
	lines *bufio.Scanner
	stop  context.CancelFunc
	err   chan error
}

func serve(t *testing.T, args ...string) *served {
	ctx, stop := context.WithCancel(t.Context())
	read, write := io.Pipe()
	s := &served{lines: bufio.NewScanner(read), stop: stop, err: make(chan error, 1)}
	go func() {
		err := run(ctx, write, args)
		_ = write.Close()
		s.err <- err
	}()
	t.Cleanup(func() {
		stop()
		_ = read.Close()
	})
	return s
}

// value reads the next line, which must have the label.
func (s *served) value(t *testing.T, label string) string {
	require.True(t, s.lines.Scan(), "no line for %s", label)
	got := regexp.MustCompile(`^([A-Z]+) +(.*)$`).FindStringSubmatch(s.lines.Text())
	require.Len(t, got, 3, s.lines.Text())
	require.Equal(t, label, got[1])
	return got[2]
}

// end stops the program and returns the rest of its output and its error.
func (s *served) end() (string, error) {
	s.stop()
	var rest strings.Builder
	for s.lines.Scan() {
		rest.WriteString(s.lines.Text() + "\n")
	}
	return rest.String(), <-s.err
}

func TestServesUntilInterrupted(t *testing.T) {
	s := serve(t, "-builtin", "-key", "skp_mine", "-rate-limit", "300", "-workspaces", "2")
	url := s.value(t, "URL")
	require.Equal(t, "skp_mine", s.value(t, "KEY"))
	first, second := s.value(t, "WORKSPACE"), s.value(t, "WORKSPACE")
	require.NotEqual(t, first, second)

	d, env := client(t, url, "skp_mine")
	lease, err := d.Acquire(t.Context(), env, createos.AcquireOptions{Workspace: first})
	require.NoError(t, err)
	require.NoError(t, d.Destroy(t.Context(), env, lease))

	rest, err := s.end()
	require.NoError(t, err)
	assert.Equal(t, "SERVED     5 requests, 1 sandboxes\n", rest)
}

func TestNamesWhatWasNeverDestroyed(t *testing.T) {
	for _, allowed := range []bool{false, true} {
		args := []string{"-builtin"}
		if allowed {
			args = append(args, "-allow-leaks")
		}
		s := serve(t, args...)
		d, env := client(t, s.value(t, "URL"), s.value(t, "KEY"))
		lease, err := d.Acquire(t.Context(), env, createos.AcquireOptions{Workspace: s.value(t, "WORKSPACE")})
		require.NoError(t, err)

		rest, err := s.end()
		if allowed {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, "1 sandboxes were never destroyed")
		}
		assert.Contains(t, rest, "\nLEAK       "+lease.ProviderLeaseID)
	}
}

func TestRefusesWhatItDoesNotUnderstand(t *testing.T) {
	require.ErrorContains(t, run(t.Context(), io.Discard, []string{"serve"}), "unexpected argument")
	require.Error(t, run(t.Context(), io.Discard, []string{"-addr", "nowhere:port"}))
	require.ErrorContains(t, run(t.Context(), io.Discard, []string{"-workspaces", "-1"}), "-workspaces -1: is negative")
	require.ErrorContains(t, run(t.Context(), io.Discard, []string{"-delay", "-1s"}), "Delay: is negative")
	_, err := parse([]string{"-h"})
	require.True(t, errors.Is(err, flag.ErrHelp))
}

func client(t *testing.T, url, key string) (*createos.Driver, createos.Environment) {
	d, err := createos.NewDriver(createos.DriverConfig{})
	require.NoError(t, err)
	return d, createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: createos.Config{
		APIURL: url, APIKey: createos.NewSecret(key), Shape: "s-1vcpu-1gb",
	}}
}
