package createostest

import (
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

// Builtin answers the small set of commands that a server in memory knows by
// itself: true, false, echo, printf, cat, pwd, env, sleep (in the sandbox's
// time), mkdir, rm, mktemp, base64, touch, mv, chmod, test and [, and sh and bash
// with -c for scripts of these: lists, pipelines, groups, if, for, redirections,
// quoting, variables and command substitution, without patterns,
// functions or background jobs. Anything else is "command not found", 127.
//
// A function of [Options.Commands] may fall back on it. A server without such a
// function knows what there is not: there, an exec or process of another command
// cannot be started, which the API reports as it does for real processes, and 127
// is what a script gets.
func Builtin(ctx context.Context, c *Command) int {
	if utility, ok := utilities[path.Base(c.Name)]; ok {
		return utility(c)
	}
	if script, ok := shellScript(c); ok {
		list, err := parseScript(script)
		if err != nil {
			fmt.Fprintf(c.Stderr, "%s: %v\n", c.Name, err)
			return 2
		}
		return newShell(c, Builtin, c.Args[2:]).main(list)
	}
	if ctx.Err() != nil {
		return 1
	}
	fmt.Fprintf(c.Stderr, "%s: command not found\n", c.Name)
	return 127
}

// builtinLacks tells whether Builtin has no such command.
func builtinLacks(name string) bool {
	base := path.Base(name)
	_, known := utilities[base]
	return !known && base != "bash" && base != "sh"
}

// utilities are commands by name. They are set by init because the shell, by
// way of them, refers to them.
var utilities map[string]func(*Command) int

func init() {
	utilities = map[string]func(*Command) int{
		"true":   func(*Command) int { return 0 },
		"false":  func(*Command) int { return 1 },
		"chmod":  func(*Command) int { return 0 },
		"echo":   utilityEcho,
		"printf": utilityPrintf,
		"cat":    utilityCat,
		"pwd":    utilityPwd,
		"env":    utilityEnv,
		"sleep":  utilitySleep,
		"mkdir":  utilityMkdir,
		"rm":     utilityRm,
		"mktemp": utilityMktemp,
		"base64": utilityBase64,
		"touch":  utilityTouch,
		"mv":     utilityMv,
		"test":   func(c *Command) int { return utilityTest(c, c.Args) },
		"[":      utilityBracket,
	}
}

func (c *Command) files() *memoryFiles { return c.process.machine.files }

func (c *Command) complain(format string, args ...any) int {
	fmt.Fprintf(c.Stderr, c.Name+": "+format+"\n", args...)
	return 1
}

// print writes output; a write that fails ends the command as SIGPIPE would.
func (c *Command) print(text string) int {
	if _, err := io.WriteString(c.Stdout, text); err != nil {
		return 141
	}
	return 0
}

// flags splits single-letter options from operands.
func (c *Command) flags() (letters string, operands []string) {
	for i, arg := range c.Args {
		if arg == "--" {
			return letters, c.Args[i+1:]
		}
		if len(arg) < 2 || arg[0] != '-' {
			return letters, c.Args[i:]
		}
		letters += arg[1:]
	}
	return letters, nil
}

func utilityEcho(c *Command) int {
	args, end := c.Args, "\n"
	if len(args) > 0 && args[0] == "-n" {
		args, end = args[1:], ""
	}
	return c.print(strings.Join(args, " ") + end)
}

var printfEscapes = strings.NewReplacer(`\\`, `\`, `\n`, "\n", `\t`, "\t", `\r`, "\r", `\0`, "\x00")

// utilityPrintf knows %s, %d and %%, and repeats its format while there are
// arguments.
func utilityPrintf(c *Command) int {
	args := dropDashes(c.Args)
	if len(args) == 0 {
		return c.complain("a format is missing")
	}
	format, args := printfEscapes.Replace(args[0]), args[1:]
	var b strings.Builder
	for {
		before := len(args)
		for i := 0; i < len(format); i++ {
			if format[i] != '%' || i+1 == len(format) {
				b.WriteByte(format[i])
				continue
			}
			i++
			switch format[i] {
			case '%':
				b.WriteByte('%')
			case 's', 'd':
				if len(args) > 0 {
					b.WriteString(args[0])
					args = args[1:]
				} else if format[i] == 'd' {
					b.WriteByte('0')
				}
			default:
				return c.complain("%%%c is not emulated", format[i])
			}
		}
		if len(args) == 0 || len(args) == before {
			return c.print(b.String())
		}
	}
}

func utilityCat(c *Command) int {
	_, names := c.flags()
	if len(names) == 0 {
		names = []string{"-"}
	}
	for _, name := range names {
		if name == "-" {
			if _, err := io.Copy(c.Stdout, c.Stdin); err != nil {
				return 1
			}
			continue
		}
		data, err := c.ReadFile(name)
		if err != nil {
			return c.complain("%s: %v", name, err)
		}
		if status := c.print(string(data)); status != 0 {
			return status
		}
	}
	return 0
}

func utilityPwd(c *Command) int { return c.print(c.Dir + "\n") }

func utilityEnv(c *Command) int {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(c.Env)) {
		fmt.Fprintf(&b, "%s=%s\n", name, c.Env[name])
	}
	return c.print(b.String())
}

func utilitySleep(c *Command) int {
	var total time.Duration
	for _, arg := range c.Args {
		seconds, err := strconv.ParseFloat(strings.TrimSuffix(arg, "s"), 64)
		if err != nil || seconds < 0 {
			return c.complain("%s is not a time in seconds", arg)
		}
		total += time.Duration(seconds * float64(time.Second))
	}
	if c.Sleep(total) != nil {
		return 1 // killed; the signal says so
	}
	return 0
}

func utilityMkdir(c *Command) int {
	letters, names := c.flags()
	for _, name := range names {
		if err := c.files().mkdir(c.abs(name), strings.Contains(letters, "p")); err != nil {
			return c.complain("%s: %v", name, err)
		}
	}
	return 0
}

func utilityRm(c *Command) int {
	letters, names := c.flags()
	for _, name := range names {
		full := c.abs(name)
		switch {
		case !c.files().exists(full):
			if !strings.Contains(letters, "f") {
				return c.complain("%s: no such file", name)
			}
		case c.files().isDir(full) && !strings.ContainsAny(letters, "rR"):
			return c.complain("%s: is a directory", name)
		default:
			c.files().removeAll(full)
		}
	}
	return 0
}

func utilityMktemp(c *Command) int {
	letters, _ := c.flags()
	name := "/tmp/tmp." + lowerText(10)
	var err error
	if strings.Contains(letters, "d") {
		err = c.files().mkdir(name, true)
	} else {
		err = c.files().write(name, nil)
	}
	if err != nil {
		return c.complain("%v", err)
	}
	return c.print(name + "\n")
}

func utilityBase64(c *Command) int {
	letters, _ := c.flags()
	data, err := io.ReadAll(c.Stdin)
	if err != nil {
		return 1
	}
	if !strings.Contains(letters, "d") {
		return c.print(base64.StdEncoding.EncodeToString(data) + "\n")
	}
	decoded, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(string(data)), ""))
	if err != nil {
		return c.complain("invalid input")
	}
	return c.print(string(decoded))
}

func utilityTouch(c *Command) int {
	_, names := c.flags()
	for _, name := range names {
		if _, err := c.files().open(c.abs(name), true, false); err != nil {
			return c.complain("%s: %v", name, err)
		}
	}
	return 0
}

func utilityMv(c *Command) int {
	_, names := c.flags()
	if len(names) != 2 {
		return c.complain("takes two names")
	}
	data, err := c.ReadFile(names[0])
	if err != nil {
		return c.complain("%s: %v", names[0], err)
	}
	if err := c.files().write(c.abs(names[1]), data); err != nil {
		return c.complain("%s: %v", names[1], err)
	}
	if c.abs(names[0]) != c.abs(names[1]) {
		c.files().removeAll(c.abs(names[0]))
	}
	return 0
}

func utilityBracket(c *Command) int {
	if len(c.Args) == 0 || c.Args[len(c.Args)-1] != "]" {
		c.complain("] is missing")
		return 2
	}
	return utilityTest(c, c.Args[:len(c.Args)-1])
}

// utilityTest knows the unary tests -n -z -e -f -d -r -s and = and != .
func utilityTest(c *Command, args []string) int {
	if len(args) > 0 && args[0] == "!" {
		switch utilityTest(c, args[1:]) {
		case 0:
			return 1
		case 1:
			return 0
		}
		return 2
	}
	var holds bool
	switch {
	case len(args) == 0:
	case len(args) == 1:
		holds = args[0] != ""
	case len(args) == 2:
		full := c.abs(args[1])
		data, err := c.files().read(full)
		switch args[0] {
		case "-n":
			holds = args[1] != ""
		case "-z":
			holds = args[1] == ""
		case "-e":
			holds = c.files().exists(full)
		case "-f", "-r":
			holds = err == nil
		case "-s":
			holds = len(data) > 0
		case "-d":
			holds = c.files().isDir(full)
		default:
			c.complain("%s is not emulated", args[0])
			return 2
		}
	case len(args) == 3 && (args[1] == "=" || args[1] == "!="):
		holds = (args[0] == args[2]) == (args[1] == "=")
	default:
		c.complain("the expression is not emulated")
		return 2
	}
	if holds {
		return 0
	}
	return 1
}
