package createos

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The tests of this file send the script through the real shell, started just
// as the provider starts it.

type shellRun struct {
	stdout, stderr string
	err            error
	started        bool // the script acknowledged itself
}

func (r shellRun) code(t *testing.T) int {
	t.Helper()
	if r.err == nil {
		return 0
	}
	var exit *exec.ExitError
	require.ErrorAs(t, r.err, &exit)
	return exit.ExitCode()
}

// rendered renders a script that can be.
func rendered(s script) string {
	text, err := s.render()
	if err != nil {
		panic(err)
	}
	return text
}

func loaded(path string) string {
	text, err := renderLoaded(path)
	if err != nil {
		panic(err)
	}
	return text
}

// runShell runs the loader with input on its standard input.
func runShell(t *testing.T, input []byte, environ ...string) shellRun {
	t.Helper()
	if _, err := os.Stat(execShell); err != nil {
		t.Skipf("no %s on this machine", execShell)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, execShell, execArgs("0123456789abcdef")...)
	cmd.Dir = t.TempDir()
	cmd.Env = append([]string{"HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}, environ...)
	cmd.Stdin = bytes.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	return newShellRun(stdout.String(), stderr.String(), err)
}

// newShellRun takes the acknowledgement off, as an Exec does.
func newShellRun(stdout, stderr string, err error) shellRun {
	a := ack{want: []byte(acknowledgement("0123456789abcdef"))}
	output := string(a.take([]byte(stderr))) + string(a.rest())
	return shellRun{stdout: stdout, stderr: output, err: err, started: a.found}
}

func hostileArgs() []string {
	all := make([]byte, 0, 255)
	for c := 1; c < 256; c++ {
		all = append(all, byte(c))
	}
	return []string{
		"", "a", " ", "-n", "--", "-", "'", "''", `\`, `\n`, `\'`, `"`, "$HOME", "$(touch /tmp/x)", "`id`", "*", "~", "!x", "#", "%s%d",
		"a\nb", "a\r\n", "\t", "\n", "end\n", "\x01", "\x7f", "\x01\x7f", "é日本語🧪", "\xff\xfe", "\xe2\x82", "a=b", "{a,b}", "L1:x:E", string(all),
	}
}

func TestArgumentsReachTheProgramByteForByte(t *testing.T) {
	for _, locale := range []string{"C", "C.UTF-8", "POSIX"} {
		t.Run(locale, func(t *testing.T) {
			words := hostileArgs()
			s := script{dir: t.TempDir(), name: "printf", args: append([]string{`%s\0`}, words...)}
			got := runShell(t, execLine(rendered(s)), "LC_ALL="+locale)
			require.NoError(t, got.err, got.stderr)
			assert.Equal(t, strings.Join(words, "\x00")+"\x00", got.stdout)
			assert.Empty(t, got.stderr)
		})
	}
}

func TestArgumentOfTheLargestSize(t *testing.T) {
	long := strings.Repeat("é'", MaxArgument/3) + strings.Repeat("x", MaxArgument%3)
	require.True(t, len(long) == MaxArgument)
	for _, args := range [][]string{{long}, {long, long[:MaxArgument], "last"}} {
		s := script{dir: "/", name: "printf", args: append([]string{`%s\0`}, args...)}
		text := rendered(s)
		dir := t.TempDir()
		path := filepath.Join(dir, "script")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		require.Greater(t, len(text), maxLineScript)
		got := runShell(t, execLine(loaded(path)))
		require.NoError(t, got.err, got.stderr)
		assert.True(t, strings.Join(args, "\x00")+"\x00" == got.stdout)
	}
}

func TestTheLongestLine(t *testing.T) {
	s := script{dir: "/", name: "printf", args: []string{`%s\0`, ""}}
	s.args[1] = strings.Repeat("x", 100_000)
	s.args = append(s.args, strings.Repeat("y", maxLineScript-len(rendered(s))-len(" ''")))
	text := rendered(s)
	require.Len(t, text, maxLineScript)
	line := execLine(text)
	require.LessOrEqual(t, len(line), maxInput)
	got := runShell(t, line)
	require.NoError(t, got.err, got.stderr)
	assert.True(t, strings.Join(s.args[1:], "\x00")+"\x00" == got.stdout)
}

func TestEnvironmentReachesTheProgramByteForByte(t *testing.T) {
	names := map[string]string{
		"PLAIN": "x", "EMPTY": "", "QUOTES": `'"\$(id)` + "`", "LINES": "a\nb\n", "BYTES": "\x01\x7f\xff\xc3", "_under": "1",
		"HOME": "/nowhere", "PATH": os.Getenv("PATH") + ":/nowhere", "IFS": ",", "RANDOM": "seven", "SECONDS": "007", "LINENO": "x",
		"BASH_ENV": "/nowhere/env", "LC_ALL": "bad_LOCALE.x", "LANG": "bad", "POSIXLY_CORRECT": "", "BASHPID": "x", "EPOCHSECONDS": "1",
		"SRANDOM": "x", "PWD": "/not/here", "OLDPWD": "old", "OPTIND": "x", "PS4": "p", "TZ": "Mars/Phobos", "HISTFILE": "h", "SHELL": "s",
		"SHLVL": "41", "BASH_COMMAND": "c", "BASH_SUBSHELL": "s", "TMOUT": "x", "GLOBIGNORE": "*", "BASH_XTRACEFD": "2", "BASH_ARGV0": "z",
		"HISTCMD": "x", "COMP_WORDBREAKS": "x", "TERM": "dumb", "IGNOREEOF": "x", "LD_LIBRARY_PATH": "", "EXECIGNORE": "*", "HOSTNAME": "h", "COLUMNS": "1",
		"BIG": strings.Repeat("v", 5000), "BASH_COMPAT": "nonsense", "DIRSTACK": "d", "GROUPS": "g", "FUNCNAME": "f", "OSTYPE": "o",
		"s": "1", "l": "2", "p": "3", "BASH_MONOSECONDS": "x", "EPOCHREALTIME": "x", "GLOBSORT": "x", "BASH_REMATCH": "x", "BASH_CMDS": "x", "BASH_ALIASES": "x", "HISTSIZE": "x", "LC_CTYPE": "bad",
	}
	s := script{dir: "/", name: "/usr/bin/env", args: []string{"-0"}, env: Env(names)}
	got := runShell(t, execLine(rendered(s)))
	require.NoError(t, got.err, got.stderr)
	assert.Empty(t, got.stderr)
	env := map[string]string{}
	for _, line := range strings.Split(got.stdout, "\x00") {
		name, value, _ := strings.Cut(line, "=")
		env[name] = value
	}
	for name, value := range names {
		assert.Equal(t, value, env[name], name)
	}
	for name := range env {
		assert.NotContains(t, name, "createos")
	}
}

func TestDirectory(t *testing.T) {
	for _, name := range []string{"plain", "-", "-P", " sp ace", "new\nline", "quo'te", "$HOME", "日本", "\xff\x01", `back\slash`} {
		dir := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		s := script{dir: dir, name: "/bin/pwd", args: []string{"-P"}}
		got := runShell(t, execLine(rendered(s)), "CDPATH=/usr")
		require.NoError(t, got.err, got.stderr)
		assert.Equal(t, dir+"\n", got.stdout)
	}
}

func TestStandardInput(t *testing.T) {
	binary := []byte("\x00\xff\n'\\\x00 end without newline")
	big := bytes.Repeat([]byte("0123456789abcde\x00"), 8<<10)
	for name, in := range map[string][]byte{"none": nil, "one byte": {'x'}, "binary": binary, "128 KiB": big} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := script{dir: "/", name: "cat", stdin: in, spool: filepath.Join(dir, "spool'")}
			got := runShell(t, execLine(rendered(s)))
			require.NoError(t, got.err, got.stderr)
			assert.Equal(t, string(in), got.stdout)
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			assert.Empty(t, left)

			s.name, s.args = "true", nil
			got = runShell(t, execLine(rendered(s)))
			require.NoError(t, got.err, "a command that does not read it")
		})
	}
}

func TestStagedInput(t *testing.T) {
	spool := filepath.Join(t.TempDir(), "spo'ol")
	require.NoError(t, os.Mkdir(spool, 0o700))
	want := ""
	for i := range 12 {
		part := fmt.Sprintf("part %d\x00", i)
		want += part
		require.NoError(t, os.WriteFile(fmt.Sprintf("%s/part.%d", spool, i), []byte(part), 0o400))
	}
	s := script{dir: "/", name: "sh", args: []string{"-c", `cat; ls -d "$1" 2>/dev/null`, "sh", spool}, spool: spool, parts: 12, staged: true}
	require.NoError(t, os.WriteFile(spool+"/script", []byte(rendered(s)), 0o600))
	got := runShell(t, execLine(loaded(spool+"/script")))
	assert.Equal(t, want, got.stdout, "the directory is gone when the command runs")
	assert.Empty(t, got.stderr)
}

func TestNoDescriptorIsLeftOver(t *testing.T) {
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		t.Skip("needs /proc")
	}
	plain, err := exec.Command("ls", "/proc/self/fd").Output() // with what the test itself was given
	require.NoError(t, err)
	s := script{dir: "/", name: "ls", args: []string{"/proc/self/fd"}, stdin: []byte("x"), spool: filepath.Join(t.TempDir(), "in")}
	got := runShell(t, execLine(rendered(s)))
	assert.Equal(t, string(plain), got.stdout)
}

func TestExitAndSignalAreThoseOfTheCommand(t *testing.T) {
	for _, code := range []string{"0", "1", "7", "125", "126", "127", "255"} {
		s := script{dir: "/", name: "sh", args: []string{"-c", "exit " + code}}
		got := runShell(t, execLine(rendered(s)))
		assert.Equal(t, code, fmt.Sprint(got.code(t)))
		assert.True(t, got.started)
		assert.Empty(t, startFailure("0123456789abcdef", []byte(got.stderr)))
	}
	s := script{dir: "/", name: "sh", args: []string{"-c", "kill -KILL $$"}}
	got := runShell(t, execLine(rendered(s)))
	assert.EqualError(t, got.err, "signal: killed")

	s = script{dir: "/", name: "no-such-command-here"}
	assert.Equal(t, 127, runShell(t, execLine(rendered(s))).code(t))
	s = script{dir: "/", name: "/etc"}
	assert.Equal(t, 126, runShell(t, execLine(rendered(s))).code(t))
}

func TestFailuresBeforeTheCommandAreToldApart(t *testing.T) {
	ok := script{dir: "/", name: "echo", args: []string{"ran"}}
	for name, tc := range map[string]struct {
		line []byte
		want string
	}{
		"no directory":      {execLine(rendered(script{dir: "/no/such", name: "echo"})), failDirectory},
		"no place for it":   {execLine(rendered(script{dir: "/", name: "echo", stdin: []byte("x"), spool: "/no/such/x"})), failStdin},
		"part missing":      {execLine(rendered(script{dir: "/", name: "echo", parts: 1, staged: true, spool: t.TempDir()})), failStdin},
		"variable refuses":  {execLine(rendered(script{dir: "/", name: "echo", env: Env(map[string]string{"PPID": "x"})})), failEnv},
		"script missing":    {execLine(loaded("/no/such/script")), failScript},
		"nothing":           {nil, failNoCommand},
		"cut":               {execLine(rendered(ok))[:40], failNoCommand},
		"cut at the end":    {bytes.TrimSuffix(execLine(rendered(ok)), []byte(":E\n")), failNoCommand},
		"without line end":  {bytes.TrimSuffix(execLine(rendered(ok)), []byte("\n")), failNoCommand},
		"empty":             {[]byte("\nL1::E\n"), failDecode},
		"not base64":        {[]byte("\nL1:????:E\n"), failDecode},
		"other lines":       {[]byte("hello\n\nL2:x:E\n"), failNoCommand},
		"cut base64 digits": {[]byte("\nL1:QQ:E\n"), failDecode},
	} {
		t.Run(name, func(t *testing.T) {
			got := runShell(t, tc.line)
			assert.Equal(t, failCode, got.code(t))
			assert.Equal(t, tc.want, startFailure("0123456789abcdef", []byte(got.stderr)), got.stderr)
			assert.NotContains(t, got.stdout, "ran")
			assert.False(t, got.started)
			assert.Empty(t, startFailure("another", []byte(got.stderr)))
		})
	}
}

func TestARepeatedLineRunsOnce(t *testing.T) {
	s := script{dir: "/", name: "echo", args: []string{"ran"}}
	line := execLine(rendered(s))
	for name, in := range map[string][]byte{
		"repeated":      bytes.Repeat(line, 3),
		"after a cut":   append(bytes.Clone(line[:30]), line...),
		"after garbage": append([]byte("x\x00y\nL1:"), line...),
	} {
		got := runShell(t, in)
		require.NoError(t, got.err, name)
		assert.Equal(t, "ran\n", got.stdout, name)
	}
}

func TestALoginProfileCannotSpoilTheScript(t *testing.T) {
	home := t.TempDir()
	profile := `cat >/dev/null; shopt -s expand_aliases execfail; alias rm=false cat=false cd=false; set -aeuxvC
cd() { false; }; rm() { false; }; base64() { false; }; IFS=0; readonly RO=1; export FROM_PROFILE=1; set -k`
	require.NoError(t, os.WriteFile(filepath.Join(home, ".bash_profile"), []byte(profile), 0o600))
	s := script{dir: "/", name: "sh", args: []string{"-c", `echo "$A$FROM_PROFILE$s"; cat`, "k=v"}, env: Env(map[string]string{"A": "a"}),
		stdin: []byte("in"), spool: filepath.Join(t.TempDir(), "in")}
	got := runShell(t, execLine(rendered(s)), "HOME="+home)
	require.NoError(t, got.err, got.stderr)
	assert.Equal(t, "a1\nin", got.stdout)
	assert.NotContains(t, got.stderr, "aW4=", "nothing of it is shown")

	s.name, s.args, s.env = "env", nil, Env(map[string]string{"RO": "2"})
	got = runShell(t, execLine(rendered(s)), "HOME="+home)
	require.NoError(t, got.err, got.stderr)
	assert.Contains(t, got.stdout, "RO=2\n", "never without a variable that was asked for")
}

func TestNothingOfTheCommandIsInTheProcessList(t *testing.T) {
	id, ok := ourExecID(Process{Cmd: execShell, Args: execArgs("abc")})
	assert.True(t, ok)
	assert.Equal(t, "abc", id)
	for _, p := range []Process{{}, {Cmd: execShell, Args: []string{"-c", "x"}}, {Cmd: "/bin/sh", Args: execArgs("abc")}, {Cmd: execShell, Args: append(execArgs("abc"), "x")}} {
		_, ok := ourExecID(p)
		assert.False(t, ok)
	}
}

func FuzzShellWords(f *testing.F) {
	f.Add("a", "b", []byte("in"))
	f.Add("'\\", "\n", []byte{0, 255})
	f.Add("\x01\x7f", "$(id)", []byte(nil))
	f.Fuzz(func(t *testing.T, arg, value string, in []byte) {
		if strings.ContainsRune(arg+value, 0) || len(arg) > 1000 || len(value) > 1000 || len(in) > 1000 {
			t.Skip("is no text that could be run")
		}
		s := script{dir: "/", name: "bash", args: []string{"-c", `printf '%s\0' "$1" "$V"; cat`, "x", arg}, env: Env(map[string]string{"V": value}),
			stdin: in, spool: filepath.Join(t.TempDir(), "in")}
		got := runShell(t, execLine(rendered(s)))
		require.NoError(t, got.err, got.stderr)
		require.Equal(t, arg+"\x00"+value+"\x00"+string(in), got.stdout)
	})
}
