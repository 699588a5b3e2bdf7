package createostest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// runCommand answers a command with the function of a test, after reading what
// a driver wraps around it.
func runCommand(c *Command, commands func(context.Context, *Command) int) int {
	if script, ok := shellScript(c); ok {
		if len(c.Args) > 2 && c.Args[2] == loaderName {
			return runLoader(c, commands)
		}
		list, err := parseScript(script)
		if err == nil {
			return newShell(c, commands, c.Args[2:]).main(list)
		}
	}
	return commands(c.ctx, c)
}

// loaderName is the $0 by which a driver's loader is known: a shell that reads
// its script as one line from standard input and gives the script no input.
const loaderName = "createos-exec"

// shellScript returns the script of a shell that was called with -c or -lc.
func shellScript(c *Command) (string, bool) {
	name := path.Base(c.Name)
	if name != "bash" && name != "sh" || len(c.Args) < 2 {
		return "", false
	}
	if flags := c.Args[0]; !strings.HasPrefix(flags, "-") || !strings.HasSuffix(flags, "c") {
		return "", false
	}
	return c.Args[1], true
}

// The exit code of a loader that got no script, how long it waits for one, and
// the frame of its line.
const (
	loaderFailed  = 125
	loaderPatient = 120 * time.Second
	linePrefix    = "L1:"
	lineSuffix    = ":E"
)

// runLoader waits for a whole line and runs the script in it. Anything else on
// standard input is skipped, as the loader does.
func runLoader(c *Command, commands func(context.Context, *Command) int) int {
	sh := newShell(c, commands, append([]string{loaderName}, c.Args[min(4, len(c.Args)):]...))
	script, reason := readScript(c)
	c.process.stdin.close()
	if reason != "" {
		return builtinFail(sh, []string{sh.variable("1"), reason}, sh.io)
	}
	sh.io.in = eofReader{}
	list, err := parseScript(script)
	if err != nil {
		return sh.complain(2, fmt.Errorf("createostest: the script of a command is %w", err))
	}
	return sh.main(list)
}

// readScript returns the script of the first whole line, or why there is none.
func readScript(c *Command) (script, reason string) {
	ctx, cancel := context.WithTimeout(c.ctx, loaderPatient)
	defer cancel()
	lines := bufio.NewReader(&gatedReader{c.process.machine, ctx, c.process.stdin})
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return "", "no command came"
		}
		encoded, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), linePrefix)
		if ok {
			encoded, ok = strings.CutSuffix(encoded, lineSuffix)
		}
		if !ok {
			continue
		}
		decoded, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil || len(decoded) == 0 {
			return "", "cannot decode the command"
		}
		return string(decoded), ""
	}
}

type eofReader struct{}

func (eofReader) Read([]byte) (int, error) { return 0, io.EOF }

// shell runs a script for one member of a process tree. Subshells and
// substitutions run on copies, in turn; only commands of the test may take
// time.
type shell struct {
	base     *Command
	commands func(context.Context, *Command) int
	files    *memoryFiles
	dir      string
	vars     map[string]string // all variables
	exported map[string]bool
	params   []string // $0 and on
	io       stdio
	status   int
	exited   bool
}

// stdio is what a command has open: 0 to read, the others to write.
type stdio struct {
	in       io.Reader
	out, err io.Writer
	others   [10]io.Writer // from 3 on
}

func newShell(c *Command, commands func(context.Context, *Command) int, params []string) *shell {
	sh := &shell{
		base: c, commands: commands, files: c.process.machine.files, dir: c.Dir, vars: maps.Clone(c.Env),
		exported: make(map[string]bool), params: params, io: stdio{in: c.Stdin, out: c.Stdout, err: c.Stderr},
	}
	for name := range c.Env {
		sh.exported[name] = true
	}
	if len(sh.params) == 0 {
		sh.params = []string{c.Name}
	}
	return sh
}

func (sh *shell) copy() *shell {
	child := *sh
	child.vars, child.exported = maps.Clone(sh.vars), maps.Clone(sh.exported)
	return &child
}

func (sh *shell) main(list *shList) int { return sh.list(list) }

func (sh *shell) list(list *shList) int {
	for _, item := range list.items {
		if item.op == "&&" && sh.status != 0 || item.op == "||" && sh.status == 0 {
			continue
		}
		sh.status = sh.node(item.cmd)
		if sh.base.ctx.Err() != nil {
			sh.exited = true // killed
		}
		if sh.exited {
			break
		}
	}
	return sh.status
}

func (sh *shell) node(node shNode) int {
	switch n := node.(type) {
	case *shPipe:
		return sh.pipe(n)
	case *shGroup:
		return sh.group(n)
	case *shIf:
		return sh.conditional(n)
	case *shFor:
		return sh.loop(n)
	case *shSimple:
		return sh.simple(n)
	}
	return 2
}

// pipe runs the stages one after the other on buffers: those of a script are
// short and end by themselves.
func (sh *shell) pipe(n *shPipe) int {
	status := 0
	if len(n.stages) == 1 {
		status = sh.node(n.stages[0])
	} else {
		input := sh.io.in
		for i, stage := range n.stages {
			child, buf := sh.copy(), new(bytes.Buffer)
			child.io.in = input
			if i < len(n.stages)-1 {
				child.io.out = buf
			}
			status = child.node(stage)
			input = buf
		}
	}
	if n.negated && !sh.exited {
		if status == 0 {
			return 1
		}
		return 0
	}
	return status
}

func (sh *shell) group(n *shGroup) int {
	in := sh
	if n.subshell {
		in = sh.copy()
	}
	before := in.io
	redirected, err := in.redirect(n.redirs)
	if err != nil {
		return sh.complain(1, err)
	}
	in.io = redirected
	status := in.list(n.body)
	if len(n.redirs) > 0 {
		in.io = before
	}
	return status
}

func (sh *shell) conditional(n *shIf) int {
	cond := sh.list(n.cond)
	switch {
	case sh.exited:
		return sh.status
	case cond == 0:
		return sh.list(n.then)
	case n.otherwise != nil:
		sh.status = 0
		return sh.list(n.otherwise)
	}
	return 0
}

func (sh *shell) loop(n *shFor) int {
	status := 0
	for _, value := range sh.expandAll(n.words) {
		sh.vars[n.name] = value
		if status = sh.list(n.body); sh.exited {
			break
		}
	}
	return status
}

func (sh *shell) complain(status int, err error) int {
	fmt.Fprintf(sh.io.err, "%s: %v\n", sh.params[0], err)
	return status
}

func (sh *shell) simple(n *shSimple) int {
	words := sh.expandAll(n.words)
	assigns := make(map[string]string, len(n.assigns))
	status := 0
	for _, a := range n.assigns {
		assigns[a.name], status = sh.expand(a.value)
		if len(n.words) == 0 {
			sh.vars[a.name] = assigns[a.name]
		}
	}
	streams, err := sh.redirect(n.redirs)
	if err != nil {
		return sh.complain(1, err)
	}
	if len(words) == 0 {
		return status
	}
	for len(words) > 1 && (words[0] == "builtin" || words[0] == "command") {
		words = words[1:]
	}
	if builtin, ok := shellBuiltins[words[0]]; ok {
		return builtin(sh, words[1:], streams)
	}
	return sh.run(words, assigns, streams, false)
}

// run runs a command that is not the shell's own. The plumbing of scripts
// comes before the function of the test, unless the script gives itself up for
// the command.
func (sh *shell) run(words []string, assigns map[string]string, streams stdio, last bool) int {
	c := *sh.base
	c.Name, c.Args, c.Dir = words[0], words[1:], sh.dir
	c.Stdin, c.Stdout, c.Stderr = streams.in, streams.out, streams.err
	c.Env = make(map[string]string)
	for name, value := range sh.vars {
		if sh.exported[name] {
			c.Env[name] = value
		}
	}
	maps.Copy(c.Env, assigns)
	if utility, ok := utilities[path.Base(c.Name)]; ok && !last {
		return utility(&c)
	}
	return sh.commands(c.ctx, &c)
}

func (sh *shell) redirect(redirs []shRedir) (stdio, error) {
	streams := sh.io
	for _, r := range redirs {
		target, _ := sh.expand(r.target)
		switch r.op {
		case "<":
			data, err := sh.readInput(target)
			if err != nil {
				return streams, err
			}
			if r.fd == 0 {
				streams.in = data
			}
		case "<&":
			if target == "-" && r.fd == 0 {
				streams.in = eofReader{}
			}
		case ">", ">>":
			file, err := sh.openOutput(target, r.op == ">>")
			if err != nil {
				return streams, err
			}
			streams.set(r.fd, file)
		case ">&":
			to := streams.get(target)
			if to == nil {
				return streams, fmt.Errorf("%s: bad file descriptor", target)
			}
			streams.set(r.fd, to)
		}
	}
	return streams, nil
}

func (s *stdio) set(fd int, w io.Writer) {
	switch fd {
	case 0:
	case 1:
		s.out = w
	case 2:
		s.err = w
	default:
		s.others[fd] = w
	}
}

// get returns what stands behind >&; nil if nothing does.
func (s *stdio) get(target string) io.Writer {
	switch target {
	case "-":
		return io.Discard
	case "1":
		return s.out
	case "2":
		return s.err
	}
	if len(target) != 1 || target[0] < '3' || target[0] > '9' {
		return nil
	}
	return s.others[target[0]-'0']
}

func (sh *shell) abs(name string) string {
	if path.IsAbs(name) {
		return path.Clean(name)
	}
	return path.Join(sh.dir, name)
}

func (sh *shell) readInput(name string) (io.Reader, error) {
	if name == "/dev/null" {
		return eofReader{}, nil
	}
	file, err := sh.files.open(sh.abs(name), false, false)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &memoryFileReader{files: sh.files, file: file}, nil
}

func (sh *shell) openOutput(name string, add bool) (io.Writer, error) {
	if name == "/dev/null" {
		return io.Discard, nil
	}
	full := sh.abs(name)
	if !sh.files.isDir(path.Dir(full)) {
		return nil, fmt.Errorf("%s: no such directory", name)
	}
	file, err := sh.files.open(full, true, !add)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return memoryFileWriter{sh.files, file}, nil
}

func (sh *shell) expandAll(words []shWord) []string {
	var out []string
	for _, word := range words {
		if len(word) == 2 && word[1].name == "@" && word[1].quoted && word[0].text == "" {
			out = append(out, sh.params[1:]...)
			continue
		}
		text, _ := sh.expand(word)
		quoted := slices.ContainsFunc(word, func(p shPart) bool { return p.quoted })
		if text != "" || quoted {
			out = append(out, text)
		}
	}
	return out
}

// expand joins the parts of a word. Variables that stand unquoted are not
// split into several words. The status is that of the last substitution.
func (sh *shell) expand(word shWord) (text string, status int) {
	var b strings.Builder
	for _, part := range word {
		switch {
		case part.subst != nil:
			child, buf := sh.copy(), new(bytes.Buffer)
			child.io.out = buf
			status = child.list(part.subst)
			b.WriteString(strings.TrimRight(buf.String(), "\n"))
		case part.name != "":
			b.WriteString(sh.variable(part.name))
		default:
			b.WriteString(part.text)
		}
	}
	return b.String(), status
}

func (sh *shell) variable(name string) string {
	switch name {
	case "?":
		return strconv.Itoa(sh.status)
	case "#":
		return strconv.Itoa(len(sh.params) - 1)
	case "@":
		return strings.Join(sh.params[1:], " ")
	case "$":
		return strconv.Itoa(sh.base.process.number)
	}
	if i, err := strconv.Atoi(name); err == nil {
		if i < len(sh.params) {
			return sh.params[i]
		}
		return ""
	}
	return sh.vars[name]
}

// shellBuiltins are the commands that act on the shell itself.
var shellBuiltins map[string]func(sh *shell, args []string, streams stdio) int

func init() {
	nothing := func(*shell, []string, stdio) int { return 0 }
	shellBuiltins = map[string]func(*shell, []string, stdio) int{
		":": nothing, "set": nothing, "umask": nothing, "trap": nothing, "shopt": nothing, "ulimit": nothing,
		"cd": builtinCD, "exec": builtinExec, "exit": builtinExit, "eval": builtinEval,
		"export": builtinExport, "unset": builtinUnset, "createos_fail": builtinFail,
	}
}

// dropDashes removes the -- before operands.
func dropDashes(args []string) []string {
	if len(args) > 0 && args[0] == "--" {
		return args[1:]
	}
	return args
}

func builtinCD(sh *shell, args []string, _ stdio) int {
	for len(args) > 0 && (args[0] == "-P" || args[0] == "-L") {
		args = args[1:]
	}
	args = dropDashes(args)
	dir := "/root"
	if len(args) > 0 {
		dir = sh.abs(args[0])
	}
	if !sh.files.isDir(dir) {
		return sh.complain(1, fmt.Errorf("cd: %s: no such directory", dir))
	}
	sh.dir = dir
	return 0
}

// shellLevel is the variable that a shell lowers when it gives itself up.
const shellLevel = "SHLVL"

// builtinExec gives the shell up for a command, or redirects it from here on.
func builtinExec(sh *shell, args []string, streams stdio) int {
	args = dropDashes(args)
	if len(args) == 0 {
		sh.io = streams
		return 0
	}
	if level, err := strconv.Atoi(sh.vars[shellLevel]); err == nil {
		sh.vars[shellLevel] = strconv.Itoa(level - 1)
	}
	status := sh.run(args, nil, streams, true)
	sh.exited = true
	return status
}

// builtinFail is the function of a driver's loader that says why a command
// could not be started: with the exec id and a text.
func builtinFail(sh *shell, args []string, _ stdio) int {
	sh.exited = true
	if len(args) < 2 {
		return 2
	}
	fmt.Fprintf(sh.io.err, "%s %s: %s\n", loaderName, args[0], args[1])
	return loaderFailed
}

func builtinExit(sh *shell, args []string, _ stdio) int {
	sh.exited = true
	if len(args) == 0 {
		return sh.status
	}
	code, err := strconv.Atoi(args[0])
	if err != nil {
		return 2
	}
	return code & 0xff
}

func builtinEval(sh *shell, args []string, _ stdio) int {
	list, err := parseScript(strings.Join(args, " "))
	if err != nil {
		return sh.complain(2, err)
	}
	sh.status = 0
	return sh.list(list)
}

func builtinExport(sh *shell, args []string, _ stdio) int {
	for _, arg := range dropDashes(args) {
		name, value, ok := strings.Cut(arg, "=")
		if !envPattern.MatchString(name) {
			return sh.complain(1, fmt.Errorf("export: %q is not a name", name))
		}
		if ok {
			sh.vars[name] = value
		}
		sh.exported[name] = true
	}
	return 0
}

func builtinUnset(sh *shell, args []string, _ stdio) int {
	for _, name := range args {
		delete(sh.vars, name)
		delete(sh.exported, name)
	}
	return 0
}
