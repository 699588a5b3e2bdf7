package createos

import (
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// A command travels as a script, in one message to a process that waits for
// it. Nothing of the command is in an argument list that the provider echoes,
// and until the message is whole nothing runs.

const (
	// execShell is the shell that the image must provide.
	execShell = "/bin/bash"

	// execMark is the third argument of every process that Exec starts. It
	// tells them from processes of the host in a process list, and is $0 of
	// the shell, so that it begins what the shell has to say.
	execMark = "createos-exec"

	// execWrapper puts the three descriptors of the process out of the reach
	// of a login profile, which might read the script or redirect what the
	// command is to print; the numbers are far from those that profiles use. The
	// login shell then makes way for a shell that has of it what is inherited:
	// environment, limits, umask. Functions, aliases, options, traps and a logout
	// file of the login shell are none of that. The last shell is -p so that
	// BASH_ENV and functions in the environment do not get into it either. All
	// of it stands in one word, because a profile may set $1.
	execWrapper = `exec 243<&0 244>&1 245>&2 0</dev/null || exit 125
printf -v c 'builtin set +vx; builtin exec /bin/bash -pc %q %q %q 2>/dev/null' "$1" "$0" "$2"
exec /bin/bash -lc "$c"`

	// execLoader waits for one whole line, runs what it holds, and fails
	// closed: a cut line is skipped, a second copy is never read, and without
	// a line it gives up. The exec id is $1, here and in the script.
	execLoader = `exec 1>&244 2>&245 244>&- 245>&- || exit 125
createos_fail() { printf 'createos-exec %s: %s\n' "$1" "$2" >&2; exit 125; }
while IFS= read -r -t 120 l <&243; do case $l in (L1:*:E) l=${l#L1:}
s=$(printf %s "${l%:E}" | base64 -d) && [ -n "$s" ] || createos_fail "$1" 'cannot decode the command'
exec 243<&-; unset -v l; eval "$s"; exit 125;; esac; done
createos_fail "$1" 'no command came'`

	// failCode is the exit code of createos_fail. What tells such an exit from
	// the command's own is that the script did not acknowledge itself.
	failCode = 125
)

// maxLineScript is the longest script that fits in one line, which is one
// input of the provider.
const maxLineScript = (maxInput - len("\nL1:") - len(":E\n")) / 4 * 3

// startFailures are what createos_fail may say: loader and script use no other
// texts.
var startFailures = []string{
	failDecode, failNoCommand, failDirectory, failStdin, failEnv, failScript,
}

const (
	failDecode    = "cannot decode the command"
	failNoCommand = "no command came"
	failDirectory = "cannot enter the directory"
	failStdin     = "cannot stage the standard input"
	failEnv       = "cannot set the environment"
	failScript    = "cannot read the command"
)

// acknowledgement is what the script prints on standard error as its last
// step before it makes way for the command. It is no output: an ack takes it
// off. Whatever ends without it was not the command.
func acknowledgement(id string) string { return fmt.Sprintf("%s %s: started\n", execMark, id) }

// startFailure finds in the end of the standard error of a process what
// createos_fail said; "" if it was not called.
func startFailure(id string, end []byte) string {
	for _, text := range startFailures {
		if strings.Contains(string(end), fmt.Sprintf("%s %s: %s\n", execMark, id, text)) {
			return text
		}
	}
	return ""
}

// maxFailText is how much of the end of standard error startFailure looks at.
const maxFailText = 512

// execArgs are the arguments of the process that will run a script.
func execArgs(id string) []string {
	return []string{"-c", execWrapper, execMark, execLoader, id}
}

// ourExecID returns the exec id of a process that an Exec started, be it of
// this driver or another.
func ourExecID(p Process) (string, bool) {
	if p.Cmd != execShell || len(p.Args) != 5 || p.Args[0] != "-c" || p.Args[2] != execMark {
		return "", false
	}
	return p.Args[4], true
}

// execLine is the message that opens the gate. The line end in front of it
// closes a line that may have been cut.
func execLine(script string) []byte {
	return []byte("\nL1:" + base64.StdEncoding.EncodeToString([]byte(script)) + ":E\n")
}

// A script is what the process runs in the end.
type script struct {
	dir   string // absolute
	name  string
	args  []string
	env   map[string]Secret
	spool string // private path beside the workspace: a file, or a directory if there are parts
	stdin []byte // standard input, if it is part of the script
	parts int    // number of uploaded parts of standard input otherwise
	// staged says that spool is a directory that has to go before the command
	// runs.
	staged bool
}

// render writes the script. All of it is one compound command: the shell has
// parsed it to its end before LC_ALL and the like can change how it reads.
// It ends in exec, so that a signal that ends the command ends the process. It
// fails only on a NUL, which checkCommand has excluded.
func (s *script) render() (string, error) {
	var w scriptWriter
	w.text("{ cd -P -- ").word(s.dir).orFail(failDirectory)
	s.renderStdin(&w)
	s.renderEnv(&w)
	w.text("printf '" + execMark + ` %s: started\n' "$1" >&2 || exit 125` + "\nexec -- ").word(s.name)
	for _, arg := range s.args {
		w.text(" ").word(arg)
	}
	w.text("; }")
	return w.b.String(), w.err
}

// renderStdin makes a file the standard input. Its name is gone before the
// first byte is written, so nothing stays behind whenever the process is
// killed; and a file, unlike a pipe, needs no helper process that a command
// could find among its children.
func (s *script) renderStdin(w *scriptWriter) {
	switch {
	case len(s.stdin) > 0:
		w.unnamed(s.spool).text("printf %s '" + base64.StdEncoding.EncodeToString(s.stdin) + "' | base64 -d >&4")
		w.text(" && exec 4>&-").orFail(failStdin)
	case s.parts > 0:
		w.unnamed(s.spool + "/stdin").text("for p in")
		for i := range s.parts {
			w.text(" " + strconv.Itoa(i))
		}
		w.text("; do cat -- ").word(s.spool + "/part.").text(`"$p" >&4 && rm -f -- `).word(s.spool + "/part.").text(`"$p"`)
		w.orFail(failStdin).text("done && exec 4>&-").orFail(failStdin)
	}
	if s.staged {
		w.text("rm -rf -- ").word(s.spool).orFail(failStdin)
	}
}

// renderEnv exports the environment. Each name is unset first, because some
// are magic until then: RANDOM would give another value than it was given.
// What the shell says about a locale that does not exist is no output of
// the command.
func (s *script) renderEnv(w *scriptWriter) {
	if len(s.env) == 0 {
		return
	}
	names := slices.Sorted(maps.Keys(s.env))
	w.text("{ unset -v")
	for _, name := range names {
		w.text(" ").word(name)
	}
	w.text(" && export")
	for _, name := range names {
		value := s.env[name].Reveal()
		if name == shellLevel {
			value = nextShellLevel(value)
		}
		w.text(" ").word(name + "=" + value)
	}
	w.text("; } 2>/dev/null").orFail(failEnv)
}

// A scriptWriter collects the text of a script, and the first word that cannot
// be part of one.
type scriptWriter struct {
	b   strings.Builder
	err error
}

// text adds text that is ours.
func (w *scriptWriter) text(s string) *scriptWriter {
	w.b.WriteString(s)
	return w
}

// word adds data.
func (w *scriptWriter) word(s string) *scriptWriter {
	quoted, err := shellQuote(s)
	if w.err == nil {
		w.err = err
	}
	return w.text(quoted)
}

// orFail ends a command that must succeed.
func (w *scriptWriter) orFail(text string) *scriptWriter {
	return w.text(` || createos_fail "$1" '` + text + "'\n")
}

// unnamed opens a fresh file, 4 for writing and 0 for reading, and takes its
// name away.
func (w *scriptWriter) unnamed(file string) *scriptWriter {
	w.text("(umask 077 && : >").word(file).text(") && exec 4>").word(file).text(" 0<").word(file)
	return w.text(" && rm -f -- ").word(file).text(" && ")
}

// shellLevel is the variable that bash lowers by one when it makes way for a
// command by exec.
const shellLevel = "SHLVL"

// nextShellLevel makes up for that. checkEnv admits only numbers with which
// it can be done.
func nextShellLevel(value string) string {
	n, _ := strconv.Atoi(value)
	return strconv.Itoa(n + 1)
}

// renderLoaded is the script that stands in the line if the real one was
// uploaded to path.
func renderLoaded(path string) (string, error) {
	var w scriptWriter
	w.text("{ s=$(cat -- ").word(path).text(`) && [ -n "$s" ]`).orFail(failScript).text(`eval "$s"; }`)
	return w.b.String(), w.err
}
