package createos

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestExecChecksBeforeItSends(t *testing.T) {
	long := strings.Repeat("x", MaxArgument)
	for name, tc := range map[string]struct {
		cmd   Command
		field string
	}{
		"no name":        {Command{}, "Command.Name"},
		"NUL in name":    {Command{Name: "a\x00"}, "Command.Name"},
		"long name":      {Command{Name: long + "x"}, "Command.Name"},
		"NUL in arg":     {Command{Name: "a", Args: []string{"", "canary\x00"}}, "Command.Args[1]"},
		"long arg":       {Command{Name: "a", Args: []string{long + "x"}}, "Command.Args[0]"},
		"NUL in dir":     {Command{Name: "a", Dir: "canary\x00"}, "Command.Dir"},
		"env empty":      {Command{Name: "a", Env: Env(map[string]string{"": "canary"})}, "Command.Env"},
		"env injection":  {Command{Name: "a", Env: Env(map[string]string{"A;touch /canary": "1"})}, "Command.Env"},
		"env space":      {Command{Name: "a", Env: Env(map[string]string{"A canary": "1"})}, "Command.Env"},
		"env digit":      {Command{Name: "a", Env: Env(map[string]string{"1A": "1"})}, "Command.Env"},
		"env hyphen":     {Command{Name: "a", Env: Env(map[string]string{"MY-KEY": "1"})}, "Command.Env"},
		"env line":       {Command{Name: "a", Env: Env(map[string]string{"A\n": "1"})}, "Command.Env"},
		"env equals":     {Command{Name: "a", Env: Env(map[string]string{"A=canary": "1"})}, "Command.Env"},
		"env NUL":        {Command{Name: "a", Env: Env(map[string]string{"A": "canary\x00"})}, "Command.Env[A]"},
		"env long":       {Command{Name: "a", Env: Env(map[string]string{"A": long[:MaxArgument-1]})}, "Command.Env[A]"},
		"env level":      {Command{Name: "a", Env: Env(map[string]string{"SHLVL": "canary"})}, "Command.Env[SHLVL]"},
		"timeout":        {Command{Name: "a", Timeout: -1}, "Command.Timeout"},
		"timeout short":  {Command{Name: "a", Timeout: time.Millisecond - 1}, "Command.Timeout"},
		"timeout long":   {Command{Name: "a", Timeout: 24*time.Hour + 1}, "Command.Timeout"},
		"tail":           {Command{Name: "a", TailBytes: -1}, "Command.TailBytes"},
		"tail too large": {Command{Name: "a", TailBytes: MaxTailBytes + 1}, "Command.TailBytes"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, DriverConfig{})
			res, err := m.d.Exec(t.Context(), m.env, m.lease, tc.cmd)
			var input *InputError
			require.ErrorAs(t, err, &input)
			assert.Equal(t, tc.field, input.Field)
			assert.NotContains(t, err.Error(), "canary")
			assert.Equal(t, -1, res.ExitCode)
			assert.Empty(t, m.requests())
			quietDriver(t, m.d)
		})
	}
	for _, name := range bashOwn {
		require.Error(t, (&Command{Name: "a", Env: Env(map[string]string{name: "1"})}).check(), name)
	}
	require.NoError(t, (&Command{Name: long, Args: []string{long, ""}, Env: Env(map[string]string{"A": long[:MaxArgument-2], "LD_PRELOAD": "x", "PATH": ""}),
		Timeout: 24 * time.Hour, TailBytes: MaxTailBytes, Dir: "a\nb"}).check())
}

func TestExecNeedsALeaseOfItsEnvironment(t *testing.T) {
	m := newMachine(t, DriverConfig{})
	foreign := m.env
	foreign.CompanyID = "other"
	for _, lease := range []*Lease{m.lease, nil, {}} {
		env := m.env
		if lease == m.lease {
			env = foreign
		}
		res, err := m.d.Exec(t.Context(), env, lease, Command{Name: "a"})
		require.ErrorIs(t, err, ErrForeignLease)
		require.EqualError(t, err, "CreateOS execution requires a lease from this environment.")
		require.NotNil(t, res)
	}
	bad := *m.lease
	bad.Metadata.RemoteCwd = "relative"
	_, err := m.d.Exec(t.Context(), m.env, &bad, Command{Name: "a"})
	var input *InputError
	require.ErrorAs(t, err, &input)
	require.NoError(t, m.d.Shutdown(t.Context()))
	_, err = m.d.Exec(t.Context(), m.env, m.lease, Command{Name: "a"})
	require.ErrorIs(t, err, ErrShutdown)
	require.EqualError(t, err, ErrLeaseClosing.Error())
	assert.Empty(t, m.requests())
}

func TestExecDirectories(t *testing.T) {
	for dir, want := range map[string]string{"": "/paperclip-workspace", "/x/../y": "/x/../y", "a/b": "/paperclip-workspace/a/b", "..": "/paperclip-workspace/..", "-": "/paperclip-workspace/-"} {
		onMachine(t, func(t *testing.T, m *machine) {
			_, err := m.exec(t.Context(), Command{Dir: dir}, hello)
			require.NoError(t, err)
			assert.Contains(t, m.only().script, "cd -P -- '"+want+"' ||")
		})
	}
}

func TestCommandPrintsNoSecret(t *testing.T) {
	c := Command{Name: "deploy", Args: []string{"canary"}, Dir: "/canary", Env: Env(map[string]string{"canary": "canary"}), Stdin: strings.NewReader("canary")}
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	logger.Info("x", "cmd", c)
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "cmd", c, "in", []Command{c})
	marshalled, err := json.Marshal(map[string]any{"c": c})
	require.NoError(t, err)
	for _, text := range []string{fmt.Sprint(c), fmt.Sprintf("%v %+v %#v %s %q %d %x", c, c, c, c, c, c, c), fmt.Sprintf("%+v", &c), fmt.Sprintf("%#v", []Command{c}), log.String(), string(marshalled)} {
		assert.NotContains(t, text, "canary")
		assert.Contains(t, text, "deploy")
	}
}
