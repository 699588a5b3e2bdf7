package createos

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// An exit is the command's only if the script acknowledged that it came to run
// it.

func TestExecOfAProcessThatEndsBeforeItsLine(t *testing.T) {
	for fields, why := range map[string]string{
		`"exit_code":0`: "ended with exit code 0", `"exit_code":125`: "ended with exit code 125", `"signal":"SIGKILL"`: "was ended by SIGKILL",
	} {
		t.Run(fields, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rSpawn, func(p *provider, req *http.Request) (*http.Response, error) {
					resp, err := m.spawn(p, req)
					m.procs[0].end(fields, true) // a login profile that says exit, or exec zsh
					return resp, err
				})
				ran := false
				res, err := m.exec(t.Context(), Command{}, func(*proc) { ran = true })
				require.False(t, ran)
				var start *StartError
				require.ErrorAs(t, err, &start)
				assert.Contains(t, start.Problem, why)
				assert.False(t, res.Success())
				assert.Equal(t, -1, res.ExitCode)
				assert.Empty(t, res.Signal)
				m.requireNothingRuns()
			})
		})
	}
}

// The output is lost, and with it the acknowledgement that may have been in it. What
// is known of the start decides whose exit it was; nothing known, nothing claimed.
func TestExecOfAProcessWhoseOutputIsLost(t *testing.T) {
	for name, c := range map[string]struct {
		input answerFunc
		code  int
	}{
		"taken":         {ok(`{"accepted":1}`), 0},
		"taken late":    {slowly(startReply/2, ok(`{"accepted":1}`)), 0},
		"refused":       {refuse(409), -1},
		"refused late":  {slowly(startReply/2, refuse(409)), -1},
		"not known yet": {slowly(30*time.Second, refuse(409)), -1},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rSpawn, func(p *provider, req *http.Request) (*http.Response, error) {
					resp, err := m.spawn(p, req)
					m.procs[0].out("stderr", "profile says no\n")
					m.procs[0].end(`"exit_code":0`, true)
					return resp, err
				})
				m.always(rConnect, refuse(500))
				m.always(rInput, c.input)
				res, err := m.exec(t.Context(), Command{}, hello)
				require.ErrorAs(t, err, new(*OutputLostError))
				assert.Equal(t, c.code, res.ExitCode)
				assert.False(t, res.Success())
				m.requireNothingRuns()
				time.Sleep(time.Minute) // until the reply has come that nobody waits for
			})
		})
	}
}

func TestExecOfALineThatIsReadByAnother(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.unacknowledged = true // such as cat, in the place of the shell
		res, err := m.exec(t.Context(), Command{}, func(p *proc) { p.out("stdout", "L1:") })
		var start *StartError
		require.ErrorAs(t, err, &start)
		assert.False(t, res.Success())
		assert.Equal(t, -1, res.ExitCode)
		assert.Equal(t, "L1:", string(res.Stdout))
		assert.Equal(t, []string{rSpawn, rConnect, rInput}, m.requests())
	})
}

func TestALoginProfileThatKeepsTheCommandFromRunning(t *testing.T) {
	for _, profile := range []string{"exit 0", "exec cat", "exec sh -l", "exec true", "set -n", "builtin() { :; }", "exec 243<&-", "exec 244>&- 245>&-", "cat <&243"} {
		got := runWithHome(t, map[string]string{".bash_profile": profile}, script{dir: "/", name: "echo", args: []string{"ran"}})
		assert.NotContains(t, got.stdout, "ran", profile)
		assert.False(t, got.started, profile)
	}
}

func TestALoginProfileThatDoesNot(t *testing.T) {
	for _, profile := range []string{
		"exec() { :; }", "printf() { :; }; command() { :; }; unset() { :; }; set() { :; }", "exec >/dev/null 2>&1", "exec 3<&- 4>&- 5>&- 9>&1",
		"trap 'exit 0' EXIT", "trap 'echo debug' DEBUG", "set -- a b c", "set -euo pipefail; shopt -s nullglob failglob", "POSIXLY_CORRECT=1", "shopt -s execfail",
		"export SHELLOPTS BASHOPTS", "cd() { :; }; export -f cd", "readonly s l p", "alias exec=echo builtin=echo; shopt -s expand_aliases",
	} {
		s := script{dir: "/", name: "sh", args: []string{"-c", "pwd; cat; exit 3"}, stdin: []byte("in"), spool: filepath.Join(t.TempDir(), "in")}
		got := runWithHome(t, map[string]string{".bash_profile": profile}, s)
		if strings.HasPrefix(profile, "alias") {
			assert.False(t, got.started, "not run, and known not to be")
			continue
		}
		assert.True(t, got.started, profile)
		assert.Equal(t, 3, got.code(t), profile)
		assert.Equal(t, "/\nin", strings.ReplaceAll(got.stdout, "debug\n", ""), profile)
		assert.Empty(t, got.stderr, profile)
	}
}

func TestALogoutFileHidesNoFailure(t *testing.T) {
	for _, logout := range []string{"echo bye >&2", "exit 0", "exec true"} {
		got := runWithHome(t, map[string]string{".bash_logout": logout}, script{dir: "/no/such", name: "echo"})
		assert.Equal(t, failDirectory, startFailure("0123456789abcdef", []byte(got.stderr)), got.stderr)
		assert.Equal(t, failCode, got.code(t))
		assert.False(t, got.started)
	}
}

// runWithHome runs a script where these files are at home.
func runWithHome(t *testing.T, files map[string]string, s script) shellRun {
	t.Helper()
	home := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(home, name), []byte(text), 0o600))
	}
	return runShell(t, execLine(rendered(s)), "HOME="+home)
}

func TestTheAcknowledgementIsNoOutput(t *testing.T) {
	want := acknowledgement("id")
	for name, tc := range map[string]struct {
		in, out string
		found   bool
	}{
		"alone":          {want, "", true},
		"nothing":        {"", "", false},
		"in the middle":  {"profile\n" + want + "error\n", "profile\nerror\n", true},
		"in a line":      {"no end" + want + "error\n", "no enderror\n", true},
		"begins twice":   {"createos-createos-exec " + want, "createos-createos-exec ", true},
		"only the first": {want + want, want, true},
		"of another":     {acknowledgement("other"), acknowledgement("other"), false},
		"cut":            {"x" + want[:len(want)-1], "x" + want[:len(want)-1], false},
	} {
		for size := 1; size <= len(tc.in)+1; size++ {
			a := ack{want: []byte(want)}
			var out []byte
			for at := 0; at < len(tc.in); at += size {
				piece := []byte(tc.in[at:min(at+size, len(tc.in))])
				out = append(out, a.take(piece)...)
				clear(piece) // belongs to the stream
			}
			out = append(out, a.rest()...)
			assert.Equal(t, tc.out, string(out), "%s by %d", name, size)
			assert.Equal(t, tc.found, a.found, name)
		}
	}
}

func TestExecTakesTheAcknowledgementOffWhateverStandsAroundIt(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.unacknowledged = true
		m.script(rConnect, m.cutAfter(1), m.cutAfter(1), m.cutAfter(1))
		var stderr bytes.Buffer
		res, err := m.exec(t.Context(), Command{Stderr: &stderr}, func(p *proc) {
			mark := acknowledgement(p.args[4])
			p.out("stderr", "profile "+mark[:20])
			p.out("stdout", "hello")
			p.out("stderr", mark[20:30])
			p.out("stderr", mark[30:]+"command")
		})
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Equal(t, "profile command", stderr.String())
		assert.Equal(t, "profile command", string(res.Stderr))
		assert.EqualValues(t, len("profile command"), res.StderrBytes)
	})
	onMachine(t, func(t *testing.T, m *machine) {
		m.unacknowledged = true
		var stderr bytes.Buffer
		_, err := m.exec(t.Context(), Command{Stderr: &stderr}, func(p *proc) {
			p.out("stderr", execMark)
			p.sleep(time.Second)
		})
		var start *StartError
		require.ErrorAs(t, err, &start)
		assert.Equal(t, execMark, stderr.String(), "what was held back is output after all")
	})
}
