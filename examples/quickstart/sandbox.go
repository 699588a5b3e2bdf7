package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/createos-lease/createos"
)

// A sandbox is a lease with what it takes to run commands in it.
type sandbox struct {
	driver *createos.Driver
	env    createos.Environment
	lease  *createos.Lease
	out    io.Writer
}

// work leaves a file in the workspace, and shows what commands are like.
func (s sandbox) work(ctx context.Context) error {
	// Output is live: each line is printed when the command prints it.
	count := `for n in 1 2 3; do echo "step $n of 3"; sleep 0.2; done; echo "all good, $WHO" > report.txt`
	err := s.exec(ctx, createos.Command{
		Name: "bash", Args: []string{"-c", count},
		Env: createos.Env(map[string]string{"WHO": "gopher"}),
	})
	if err != nil {
		return err
	}

	// Arguments reach the program byte for byte. No shell reads them, so
	// there is nothing to quote.
	err = s.exec(ctx, createos.Command{Name: "echo", Args: []string{`it's "$HOME" & more; exit 9`}})
	if err != nil {
		return err
	}

	// A command that fails is a result, not an error of Exec.
	err = s.exec(ctx, createos.Command{Name: "bash", Args: []string{"-c", "echo no such report >&2; exit 3"}})
	var exit *createos.ExitError
	if !errors.As(err, &exit) {
		return fmt.Errorf("expected an exit code, got: %w", err)
	}
	fmt.Fprintln(s.out, "  exit code", exit.ExitCode)
	return nil
}

// look reads the file back.
func (s sandbox) look(ctx context.Context) error {
	return s.exec(ctx, createos.Command{Name: "cat", Args: []string{"report.txt"}})
}

// exec runs a command and prints its output, indented, while it runs.
func (s sandbox) exec(ctx context.Context, cmd createos.Command) error {
	fmt.Fprintf(s.out, "$ %s\n", commandLine(cmd))
	cmd.Stdout = &indent{out: s.out, mark: "  | "}
	cmd.Stderr = &indent{out: s.out, mark: "  ! "}
	res, err := s.driver.Exec(ctx, s.env, s.lease, cmd)
	if err != nil {
		return err // it is not known that the command ran to its end
	}
	return res.Err() // it is known, and this is how it ended
}

// commandLine shows a command as one would type it. A Command itself prints
// without its arguments, because they may be secret; these are not.
func commandLine(cmd createos.Command) string {
	words := []string{cmd.Name}
	for _, arg := range cmd.Args {
		if strings.ContainsAny(arg, " \t\n\"'`$&;|<>") {
			arg = "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
		}
		words = append(words, arg)
	}
	return strings.Join(words, " ")
}

// An indent puts a mark in front of each line. Exec never writes to Stdout and
// Stderr at the same time, so two of them may share out.
type indent struct {
	out    io.Writer
	mark   string
	inLine bool
}

func (w *indent) Write(p []byte) (int, error) {
	for line := range bytes.Lines(p) {
		mark := w.mark
		if w.inLine {
			mark = ""
		}
		if _, err := fmt.Fprintf(w.out, "%s%s", mark, line); err != nil {
			return 0, err
		}
		w.inLine = line[len(line)-1] != '\n'
	}
	return len(p), nil
}
