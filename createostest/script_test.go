package createostest

import (
	"context"
	"encoding/base64"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// loaderArgs is how a driver starts the process that waits for a script.
var loaderArgs = []string{"-c", `exec 3<&0 0</dev/null; exec /bin/bash -lc "$1" "$0" "$2"`, loaderName, "while …", "exec-1"}

func loaderLine(script string) string {
	return "\nL1:" + base64.StdEncoding.EncodeToString([]byte(script)) + ":E\n"
}

// quoted is a word as a driver writes it.
func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func TestAScriptIsTakenOffItsCommand(t *testing.T) {
	const hostile = "it's $HOME `x` \"q\" \\ \n && || ; é"
	stdin := strings.Repeat("line\n", 100)
	inline := "(umask 077 && : >'/ws/.spool') && exec 4>'/ws/.spool' 0<'/ws/.spool' && rm -f -- '/ws/.spool' && printf %s '" +
		base64.StdEncoding.EncodeToString([]byte(stdin)) + "' | base64 -d >&4 && exec 4>&-" + ` || createos_fail "$1" 'cannot stage the standard input'` + "\n"
	parts := "(umask 077 && : >'/ws/.spool/stdin') && exec 4>'/ws/.spool/stdin' 0<'/ws/.spool/stdin' && rm -f -- '/ws/.spool/stdin' && " +
		`for p in 0 1; do cat -- '/ws/.spool/part.'"$p" >&4 && rm -f -- '/ws/.spool/part.'"$p" || createos_fail "$1" 'cannot stage the standard input'` +
		"\ndone && exec 4>&- || createos_fail \"$1\" 'cannot stage the standard input'\nrm -rf -- '/ws/.spool' || createos_fail \"$1\" 'cannot stage the standard input'\n"
	temporary := `t=$(mktemp) && printf %s '` + base64.StdEncoding.EncodeToString([]byte(stdin)) + `' | base64 -d >"$t" && exec 0<"$t" && rm -f -- "$t" || exit 125; `
	env := "{ unset -v 'HOSTILE' 'SHLVL' && export 'HOSTILE=" + strings.ReplaceAll(hostile, "'", `'\''`) + `' 'SHLVL=3'; } 2>/dev/null || createos_fail "$1" 'cannot set the environment'` + "\n"
	started := `printf 'createos-exec %s: started\n' "$1" >&2 || exit 125` + "\n"
	for name, tt := range map[string]struct{ setup, stdin string }{
		"no input":   {"", ""},
		"in script":  {inline, stdin},
		"temporary":  {temporary, stdin},
		"from parts": {parts, "part 0, part 1"},
	} {
		t.Run(name, func(t *testing.T) {
			var got *Command
			var read string
			commands := func(ctx context.Context, c *Command) int {
				data, err := io.ReadAll(c.Stdin)
				assert.NoError(t, err)
				got, read = c, string(data)
				return 5
			}
			c := newClient(t, Options{InMemory: true, Commands: commands})
			box := c.box(map[string]any{"envs": map[string]string{"DECLARED": "1"}})
			for path, text := range map[string]string{"/ws/dir/x": "", "/ws/.spool/part.0": "part 0, ", "/ws/.spool/part.1": "part 1"} {
				if name == "from parts" || path == "/ws/dir/x" {
					require.NoError(t, c.srv.WriteFile(idOf(box), path, []byte(text)))
				}
			}
			proc := c.run(box, "/bin/bash", loaderArgs...)
			script := `{ cd -P -- '/ws/dir' || createos_fail "$1" 'cannot enter the directory'` + "\n" +
				tt.setup + env + started + "exec -- " + quoted("tool's") + " 'one' " + quoted(hostile) + " ''; }"
			require.Equal(t, 200, c.input(proc, "L1:cut li").code)
			require.Equal(t, 200, c.input(proc, loaderLine(script)).code)
			d := c.want(200, "GET", proc+"/wait", nil).object(t)
			out, _, err := c.connect(proc + "/connect").rest()
			require.NoError(t, err)
			require.Equal(t, 5.0, d["exit_code"], out)
			assert.Equal(t, "createos-exec exec-1: started\n", out)
			assert.Equal(t, "tool's", got.Name)
			assert.Equal(t, []string{"one", hostile, ""}, got.Args)
			assert.Equal(t, "/ws/dir", got.Dir)
			assert.Equal(t, map[string]string{"HOSTILE": hostile, "DECLARED": "1", "SHLVL": "2"}, got.Env)
			assert.Equal(t, tt.stdin, read)
			files := slices.Sorted(maps.Keys(got.files().files))
			assert.Equal(t, []string{"/ws/dir/x"}, files, "what was staged is gone")
		})
	}
}

func TestAnUploadedScriptIsRun(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	require.NoError(t, c.srv.WriteFile(idOf(box), "/ws/.spool/script", []byte(`exec -- 'echo' 'long'`)))
	proc := c.run(box, "/bin/bash", loaderArgs...)
	c.input(proc, loaderLine(`{ s=$(cat -- '/ws/.spool/script') && [ -n "$s" ] || createos_fail "$1" 'cannot read the command'`+"\n"+`eval "$s"; }`))
	out, _, err := c.connect(proc + "/connect").rest()
	require.NoError(t, err)
	assert.Equal(t, "long\n", out)
}

func TestTheLoaderFailsClosed(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, c *client) {
		box := c.box()
		for name, tt := range map[string]struct {
			input string
			code  float64
			says  string
		}{
			"a missing directory": {loaderLine(`{ cd -P -- '/none' || createos_fail "$1" 'cannot enter the directory'` + "\n" + `exec -- 'true'; }`), 125, "createos-exec exec-1: cannot enter the directory\n"},
			"not base64":          {"L1:?:E\n", 125, "createos-exec exec-1: cannot decode the command\n"},
			"an empty script":     {"L1::E\n", 125, "cannot decode the command\n"},
			"no line end":         {"L1:dHJ1ZQ==:E", 125, "createos-exec exec-1: no command came\n"},
			"beyond the shell":    {loaderLine("while true; do true; done"), 2, "is not in the part of the shell language"},
			"repeated":            {loaderLine("exec -- 'false'") + loaderLine("exec -- 'true'"), 1, ""},
		} {
			proc := c.run(box, "/bin/bash", loaderArgs...)
			c.input(proc, tt.input)
			c.do("POST", proc+"/stdin/close", nil)
			out, last, err := c.connect(proc + "/connect").rest()
			require.NoError(t, err)
			assert.Equal(t, tt.code, last["exit_code"], name)
			assert.Contains(t, out, tt.says, name)
		}
		// Without a line it gives up by itself; with one, its input is closed.
		began := time.Now()
		_, last, err := c.connect(c.run(box, "/bin/bash", loaderArgs...) + "/connect").rest()
		require.NoError(t, err)
		assert.Equal(t, 125.0, last["exit_code"])
		assert.Equal(t, loaderPatient, time.Since(began))
		proc := c.run(box, "/bin/bash", loaderArgs...)
		c.input(proc, loaderLine("exec -- 'sleep' '1000'"))
		synctest.Wait()
		assert.Equal(t, 409, c.input(proc, loaderLine("exec -- 'true'")).code)
	})
}

func TestShell(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box(map[string]any{"envs": map[string]string{"V": "value"}})
	for script, want := range map[string]string{
		`echo a; echo b # comment`:                          "a\nb\n",
		`true && echo yes || echo no`:                       "yes\n",
		`false && echo yes || echo no`:                      "no\n",
		`! false && echo "$?"`:                              "0\n",
		`echo '$V' "$V" ${V}s $V\ x "a\"b" $`:               "$V value values value x a\"b $\n",
		`x=$(echo one; echo two); echo "$x"`:                "one\ntwo\n",
		`echo one two | cat | cat`:                          "one two\n",
		`(cd /tmp && pwd); pwd`:                             "/tmp\n/root\n",
		`mkdir -p /d/e && cd /d/e && pwd`:                   "/d/e\n",
		`echo x >/f; echo y >>/f; cat /f; cat </f`:          "x\ny\nx\ny\n",
		`echo x >/g && mv /g /h && touch /i && cat /h`:      "x\n",
		`{ echo out; echo err >&2; } 2>/dev/null`:           "out\n",
		`echo err 2>/dev/null >&2`:                          "",
		`cat /none 2>/dev/null || echo "failed $?"`:         "failed 1\n",
		`if [ -d /tmp ]; then echo dir; else echo no; fi`:   "dir\n",
		`if false; then echo 1; elif true; then echo 2; fi`: "2\n",
		`for i in a "b c"; do printf '<%s>' "$i"; done`:     "<a><b c>",
		`printf '%s=%d;' a 1 b 2; printf '%%\n'`:            "a=1;b=2;%\n",
		`printf -- 'x\ty'`:                                  "x\ty",
		`export A=1; B=2; env | cat; unset A; echo "$A$B"`:  "A=1\nV=value\n2\n",
		`X=1 env`: "V=value\nX=1\n",
		`printf aGk= | base64 -d; printf hi | base64`:                                "hiaGk=\n",
		`t=$(mktemp -d) && test -d "$t" && rmdir=1; rm -r $t; test -e "$t"; echo $?`: "1\n",
		`exec echo last; echo never`:                                                 "last\n",
		`exec >/log; echo hidden; exec 1>&2`:                                         "",
		`eval 'echo "$V"'; exit 0; echo never`:                                       "value\n",
		`echo "$#" "$1" "$@"`:                                                        "2 p1 p1 p2\n",
		"echo a \\\n b":                                                              "a b\n",
		`[ a = a ] && [ a != b ] && test -z "" && echo eq`:                           "eq\n",
		`sleep 0 && command true && cd / && pwd`:                                     "/\n",
		`echo -n x; : ; set -e; umask 077; chmod 600 /f`:                             "x",
		`bash -c 'echo nested $1' _ arg`:                                             "nested arg\n",
	} {
		a := c.want(200, "POST", box+"/exec", map[string]any{"cmd": "bash", "args": []string{"-c", script, "name", "p1", "p2"}})
		result := a.object(t)["result"].(map[string]any)
		assert.Equal(t, want, result["stdout"], "%s: %v", script, result)
	}
}

func TestShellFailures(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	for script, code := range map[string]int{
		`exit 3`: 3, `exit 300`: 44, `no-such-command`: 127, `cat /none`: 1, `cd /none`: 1, `mkdir /a/b`: 1, `rm /none`: 1,
		`rm /tmp`: 1, `cat </none`: 1, `echo >/none/x`: 1, `echo >&7`: 1, `sleep x`: 1, `[ a`: 2, `test a b c d`: 2, `test -q x`: 2,
		`printf '%x' 1`: 1, `printf`: 1, `export 1A=`: 1, `mv a`: 1, `mv /none /x`: 1, `printf '?' | base64 -d`: 1, `touch /tmp`: 1,
		// Not in the part that is emulated:
		`while true; do :; done`: 2, `echo $((1+1))`: 2, `sleep 1 &`: 2, `cat <<E`: 2, "echo `x`": 2, `echo *`: 2, `echo "x`: 2, `echo 'x`: 2,
		`(echo`: 2, `{ echo; `: 2, `if true; fi`: 2, `for i; do :; done`: 2, `&& x`: 2, `a && `: 2, `echo ${V:-x}`: 2, `f() { :; }`: 2,
	} {
		a := c.want(200, "POST", box+"/exec", map[string]any{"cmd": "sh", "args": []string{"-c", script}})
		result := a.object(t)["result"].(map[string]any)
		assert.Equal(t, float64(code), result["exit_code"], "%s: %v", script, result)
		if code != 3 && code != 44 {
			assert.NotEmpty(t, result["stderr"], script)
		}
	}
}

// What a test's function understands and the emulator does not reaches it as
// it is.
func TestForeignScriptsReachTheFunction(t *testing.T) {
	var got []string
	c := newClient(t, Options{InMemory: true, Commands: func(_ context.Context, c *Command) int {
		got = append([]string{c.Name}, c.Args...)
		return 0
	}})
	box := c.box()
	c.want(200, "POST", box+"/exec", map[string]any{"cmd": "bash", "args": []string{"-lc", "while :; do :; done"}})
	assert.Equal(t, []string{"bash", "-lc", "while :; do :; done"}, got)
	c.want(200, "POST", box+"/exec", map[string]any{"cmd": "bash", "args": []string{"-lc", "make 'a b' && false"}})
	assert.Equal(t, []string{"make", "a b"}, got)
}

func TestCommandsSeeTheirFiles(t *testing.T) {
	c := newClient(t, Options{InMemory: true, Commands: func(_ context.Context, c *Command) int {
		data, err := c.ReadFile("in")
		if err != nil || c.WriteFile("sub/out", append(data, '!')) != nil {
			return 1
		}
		return c.KilledBy("SIGSEGV")
	}})
	box := c.box()
	require.NoError(t, c.srv.WriteFile(idOf(box), "/srv/in", []byte("text")))
	a := c.want(201, "POST", box+"/processes", map[string]any{"cmd": "tool", "cwd": "/srv"}).object(t)
	d := c.want(200, "GET", box+"/processes/"+a["process_id"].(string)+"/wait", nil).object(t)
	assert.Equal(t, "SIGSEGV", d["signal"])
	out, err := c.srv.ReadFile(idOf(box), "/srv/sub/out")
	require.NoError(t, err)
	assert.Equal(t, "text!", string(out))
}

func FuzzParseScript(f *testing.F) {
	for _, seed := range []string{
		`{ cd -- 'a' || exit 125; export 'A=b'\''c'; exec -- 'x' 'y'; }`, `a | b && c || d; (e)`, `x=$(y "$z") >f 2>&1`,
		"if a; then b; elif c; then d; else e; fi", "for i in a b; do c; done", `"unfinished $(`, "${", "$((", "1>", "\\",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list, err := parseScript(text)
		if err == nil {
			require.NotNil(t, list)
		}
		// A word that a driver quotes is one word with that text.
		if strings.ContainsRune(text, 0) {
			return
		}
		list, err = parseScript("x " + quoted(text))
		require.NoError(t, err)
		words := list.items[0].cmd.(*shPipe).stages[0].(*shSimple).words
		require.Len(t, words, 2)
		sh := &shell{}
		got, _ := sh.expand(words[1])
		assert.Equal(t, text, got)
	})
}
