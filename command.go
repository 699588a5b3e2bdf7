package createos

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// MaxStdin is the most standard input that a command can be given, in
	// bytes.
	MaxStdin = 64 << 20
	// MaxArgument is the largest argument of a command, and the largest
	// NAME=value of its environment, in bytes. It is the limit of Linux. All of
	// them together are bounded by the sandbox, which then refuses to start the
	// command: exit code 126.
	MaxArgument = 131071
	// DefaultTailBytes is how many bytes of each stream a Result keeps by
	// default.
	DefaultTailBytes = 64 << 10
	// MaxTailBytes is the most that can be asked for with Command.TailBytes.
	MaxTailBytes = 16 << 20
)

// A Command is what [Driver.Exec] runs. Only Name is required.
//
// The image must provide bash, base64, cat and rm. The login profile of the
// sandbox's user is read before the command runs. It decides on what is
// inherited: the environment (PATH included, but Env wins), umask, limits and
// ignored signals. What it prints is output of the command. Its functions,
// aliases, shell options, traps, redirections and a logout file have no
// influence, and it cannot touch the input. A profile that exits or runs
// another program in the shell's place keeps the command from running, which
// is a [*StartError], never an exit of the command.
//
// It is a program and its arguments, never text for a shell: whatever the
// bytes in arguments, environment and directory are, they reach the program
// as they are. None of them, and nothing of Stdin, is put on a command line
// that the provider lists, in an error or in a log. Printed, a Command shows its
// name and counts.
type Command struct {
	// Name is the program: a path, or a name that is looked up in the PATH of
	// the command. A path that is not absolute is relative to Dir. The program
	// must exist: its absence is exit code 127, not an error.
	Name string
	// Args are the arguments behind the name, each of at most MaxArgument
	// bytes and without NUL.
	Args []string
	// Dir is the working directory: absolute, or relative to the workspace of
	// the lease. Empty means the workspace. It must exist, else the error is a
	// [*StartError].
	Dir string
	// Env is added to the environment of the sandbox and of its login profile,
	// and wins over both. Names are of the form [A-Za-z_][A-Za-z0-9_]* and not
	// among those that bash does not let go of (BASHOPTS, BASH_VERSINFO, EUID,
	// PPID, SHELLOPTS, UID; the arrays BASH_ARGC, BASH_ARGV, BASH_LINENO,
	// BASH_SOURCE and PIPESTATUS; and _); SHLVL must be a number from 0 to 998.
	// Every other name is passed on, PATH, BASH_ENV and LD_PRELOAD included: who
	// may choose names may choose what runs. The PATH given here is the one in
	// which Name is looked up. NAME=value has at most MaxArgument bytes. See
	// [Env].
	Env map[string]Secret
	// Stdin is the standard input. Nil, like an empty one, is a file that is at
	// its end. It is read to its end, at most MaxStdin bytes, before the command
	// is started, and the command reads it from a file without a name. That
	// file is made beside the workspace, so the directory that the workspace
	// is in must be writable; whatever is uploaded on the way is removed before
	// the command runs, or else when Exec returns. Only io.EOF is the end of it:
	// with any other error of the reader, io.ErrUnexpectedEOF too, nothing is run.
	// If ctx ends while a Read blocks, Exec returns without waiting for that Read,
	// which is the last, on a goroutine that ends when the Read does: close the
	// reader, and do not use it otherwise. A panic in Read ends the program, for
	// it is not on the caller's goroutine.
	Stdin io.Reader
	// Stdout and Stderr receive the output as it comes, byte for byte and each
	// in its order. There is never more than one Write at a time, across both,
	// so one writer may serve as both. A slow writer slows the command down and
	// loses nothing, up to what the provider keeps (1 MiB): a command that the
	// provider does not stop runs ahead of it, and Exec ends with an
	// [*OutputLostError]. An error of a writer ends the delivery to it and
	// nothing else; a panic in Write ends the program, for it is not on the
	// caller's goroutine. Nil discards; the tails of the Result are kept all the
	// same.
	Stdout, Stderr io.Writer
	// Timeout bounds the run of the command, 1 ms to 24 h, counted from the
	// moment that the message that starts it was sent: neither the staging of
	// Stdin nor the creation of the process count, nor what it takes until the
	// provider does not refuse that message, as while the sandbox is paused. 0
	// means Config.Timeout. A command of which it is not known by then that it
	// was started is ended too, with an error that matches ErrTimeout.
	Timeout time.Duration
	// TailBytes is how many of the last bytes of each stream the Result keeps.
	// 0 means DefaultTailBytes, negative is refused, the limit is MaxTailBytes.
	TailBytes int
	// EndTree ends, after the command has exited, everything that it left
	// running, with proof. Otherwise that goes on: a pause freezes it, a resume
	// revives it, the destroy of the sandbox ends it.
	EndTree bool
}

// String shows the name and how much there is of the rest.
func (c Command) String() string {
	return fmt.Sprintf("command %q (%d arguments, %d variables)", c.Name, len(c.Args), len(c.Env))
}

// GoString is as String.
func (c Command) GoString() string { return c.String() }

// Format prints the same as String, whatever the verb.
func (c Command) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, c.String()) }

// LogValue is a group of what String shows.
func (c Command) LogValue() slog.Value {
	return slog.GroupValue(slog.String("name", c.Name), slog.Int("args", len(c.Args)), slog.Int("env", len(c.Env)))
}

// MarshalJSON writes what String shows: a command has no JSON form to be read
// back, and must not show its arguments by way of a log handler.
func (c Command) MarshalJSON() ([]byte, error) { return []byte(strconv.QuoteToASCII(c.String())), nil }

// check finds what makes a command impossible, before anything is sent. It never
// names a value.
func (c *Command) check() error {
	if c.Name == "" {
		return &InputError{"Command.Name", "is empty"}
	}
	if err := checkWord("Command.Name", c.Name); err != nil {
		return err
	}
	for i, arg := range c.Args {
		if err := checkWord(fmt.Sprintf("Command.Args[%d]", i), arg); err != nil {
			return err
		}
	}
	if strings.ContainsRune(c.Dir, 0) {
		return &InputError{"Command.Dir", "holds a NUL"}
	}
	if err := checkEnv(c.Env); err != nil {
		return err
	}
	if c.Timeout != 0 && (c.Timeout < time.Millisecond || c.Timeout > 24*time.Hour) {
		return &InputError{"Command.Timeout", "is not within 1 ms and 24 h"}
	}
	if c.TailBytes < 0 || c.TailBytes > MaxTailBytes {
		return &InputError{"Command.TailBytes", "is not within 0 and 16 MiB"}
	}
	return nil
}

func checkWord(field, word string) error {
	if strings.ContainsRune(word, 0) {
		return &InputError{field, "holds a NUL"}
	}
	if len(word) > MaxArgument {
		return &InputError{field, fmt.Sprintf("is longer than %d bytes", MaxArgument)}
	}
	return nil
}

var envForm = regexp.MustCompile(`\A[A-Za-z_][A-Za-z0-9_]*\z`)

// bashOwn are the variables that cannot be passed through bash: it refuses to
// set them, or sets them itself at the last moment.
var bashOwn = []string{
	"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID",
	"BASH_ARGC", "BASH_ARGV", "BASH_LINENO", "BASH_SOURCE", "PIPESTATUS", "_",
}

func checkEnv(env map[string]Secret) error {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		// What is no name may be anything, a whole NAME=value too.
		if len(name) > MaxArgument || !envForm.MatchString(name) {
			return &InputError{"Command.Env", "has a name that is not of the form [A-Za-z_][A-Za-z0-9_]*"}
		}
		field := "Command.Env[" + name[:min(len(name), 100)] + "]"
		if slices.Contains(bashOwn, name) {
			return &InputError{field, "is kept by bash itself"}
		}
		value := env[name].Reveal()
		if name == shellLevel && !validShellLevel(value) {
			return &InputError{field, "is not a number from 0 to 998"}
		}
		if err := checkWord(field, name+"="+value); err != nil {
			return err
		}
	}
	return nil
}

func validShellLevel(value string) bool {
	n, err := strconv.Atoi(value)
	return err == nil && strconv.Itoa(n) == value && n >= 0 && n <= 998
}

// tailLimit is TailBytes with its default.
func (c *Command) tailLimit() int {
	if c.TailBytes == 0 {
		return DefaultTailBytes
	}
	return c.TailBytes
}

// A Result is how a command ended, as far as that is known, and the end of its
// output. The zero Result is not success. One that comes with an error is
// success only if that error is about something else than the command: about a
// writer, or about what the command left running (Command.EndTree). See
// [Result.Success].
type Result struct {
	// ExitCode is the exit code of the command, -1 unless one was seen. Next to
	// an error it is set if the command is known to have exited.
	ExitCode int
	// Signal is the signal that ended the command, such as "SIGKILL"; empty if
	// none did. A word of the provider that is no signal name is
	// "unrecognised".
	Signal string
	// TimedOut says that Command.Timeout was over and the command was ended for
	// it. There is no exit code then.
	TimedOut bool
	// Stdout and Stderr are the last bytes of each stream, at most
	// Command.TailBytes. They begin at the start of a UTF-8 sequence if the
	// stream is UTF-8. StdoutTruncated and StderrTruncated say that something
	// was written before them, StdoutBytes and StderrBytes how much was
	// received in all.
	Stdout, Stderr                   []byte
	StdoutTruncated, StderrTruncated bool
	StdoutBytes, StderrBytes         int64
	// Duration is the time from the message that started the command to the
	// news of its end; 0 if it was not started.
	Duration time.Duration
	// Warnings are failures that change nothing about the result, such as a
	// staged file that could not be removed.
	Warnings []error

	seen bool // an end of the command was seen, and all of its output
}

// Success says that the command is known to have exited with code 0, by
// itself, and that all of its output was received. It says nothing about an
// error that came with the Result: see there.
func (r *Result) Success() bool {
	return r != nil && r.seen && r.ExitCode == 0 && r.Signal == "" && !r.TimedOut
}

// errNoEnd is what a Result says that was never filled in.
var errNoEnd = errors.New("createos: the end of the command was not seen")

// Err is nil for a success, an [*ExitError] for a command that exited with
// another code, was ended by a signal, or timed out, and some other error for a
// Result that does not know the end, the zero Result included.
func (r *Result) Err() error {
	switch {
	case r == nil || !r.seen && !r.TimedOut:
		return errNoEnd
	case r.Success():
		return nil
	}
	return &ExitError{ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut}
}

// An ExitError is a command that did not succeed, from [Result.Err].
type ExitError struct {
	// ExitCode, Signal and TimedOut are as in [Result].
	ExitCode int
	Signal   string
	TimedOut bool
}

// Error says how the command ended, and what that usually means.
func (e *ExitError) Error() string {
	switch {
	case e.TimedOut:
		return "createos: command timed out"
	case e.Signal != "":
		return "createos: command ended by " + e.Signal + reason(e.Signal)
	}
	text := "createos: command exited with code " + strconv.Itoa(e.ExitCode)
	switch e.ExitCode {
	case 126:
		return text + " (could not be executed)"
	case 127:
		return text + " (not found)"
	case 128 + 9:
		return text + reason("SIGKILL")
	case 128 + 11:
		return text + reason("SIGSEGV")
	case 128 + 15:
		return text + reason("SIGTERM")
	}
	return text
}

func reason(signal string) string {
	switch signal {
	case "SIGKILL":
		return " (killed, perhaps for want of memory)"
	case "SIGSEGV":
		return " (segmentation fault)"
	case "SIGTERM":
		return " (asked to end)"
	}
	return ""
}

// Is makes a timed-out command match [ErrTimeout] and
// context.DeadlineExceeded.
func (e *ExitError) Is(target error) bool { return e.TimedOut && errors.Is(ErrTimeout, target) }

// A StartError says that the command was not run: the shell that was to start
// it ended before it did. Nothing of the command runs, and the lease stays
// usable.
type StartError struct {
	// Problem says what went wrong, such as "cannot enter the directory", or
	// how the shell ended. What the shell had to say is in Result.Stderr.
	Problem string
}

func (e *StartError) Error() string { return "createos: the command was not started: " + e.Problem }

// An OutputLostError says that output of a command is missing: the provider
// does not keep it any more, or skipped it. What runs of the command was ended
// with proof unless the error also matches [ErrTerminationUnproven]; if it had
// exited by itself, the Result holds its exit.
type OutputLostError struct {
	// From and To are the first and the last event that are missing, in the
	// provider's count over both streams of the command, from 1. To is 0 if it
	// is not known.
	From, To int64
}

func (e *OutputLostError) Error() string {
	if e.To == 0 {
		return fmt.Sprintf("createos: output lost: events from %d on", e.From)
	}
	return fmt.Sprintf("createos: output lost: events %d to %d", e.From, e.To)
}
