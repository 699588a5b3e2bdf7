package createos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

const (
	// inlineStdin is the most standard input that travels in the script.
	inlineStdin = 96 << 10
	// stdinPart is the size of the parts in which more than that is uploaded.
	// Each can be repeated, and one is in memory at a time.
	stdinPart = 8 << 20
	// maxEmptyReads is how often in a row a reader may return nothing.
	maxEmptyReads = 100
)

// spoolPath is a private path beside the workspace: inside, a sync could meet
// it.
func spoolPath(workspace, id string) string {
	return path.Join(path.Dir(workspace), ".createos-"+id)
}

// prepare reads the standard input, uploads what does not fit in a line, and
// writes the line. No process exists before it is done, so a command is never
// started without its input.
func (x *execution) prepare(ctx context.Context) error {
	s := &script{dir: x.directory(), name: x.cmd.Name, args: x.cmd.Args, env: x.cmd.Env, spool: x.spool}
	head, whole, err := x.readHead(ctx)
	if err != nil {
		return err
	}
	if whole {
		s.stdin = head
		text, err := s.render()
		if err != nil {
			return err
		}
		if len(text) <= maxLineScript {
			x.line = execLine(text)
			return nil
		}
		s.stdin = nil
	}
	if err := x.stage(ctx, s, head, whole); err != nil {
		if why := ended(ctx); why != nil {
			return execError(why)
		}
		return err
	}
	return nil
}

// directory is Command.Dir made absolute. It is not cleaned: what ".." means
// behind a link is for the kernel to say.
func (x *execution) directory() string {
	switch dir := x.cmd.Dir; {
	case dir == "":
		return x.workspace
	case strings.HasPrefix(dir, "/"):
		return dir
	default:
		return x.workspace + "/" + dir
	}
}

// readHead reads as much of the standard input as may travel in the script.
func (x *execution) readHead(ctx context.Context) (head []byte, whole bool, err error) {
	if x.cmd.Stdin == nil {
		return nil, true, nil
	}
	head = make([]byte, inlineStdin+1)
	n, whole, err := readPart(ctx, x.cmd.Stdin, head)
	return head[:n], whole, err
}

// readPart fills p, or reads to the end, which is io.EOF itself: any other error
// of a reader, io.ErrUnexpectedEOF too, says that there was more. When ctx ends
// it leaves a Read that blocks to itself, and p with it.
func readPart(ctx context.Context, r io.Reader, p []byte) (n int, whole bool, err error) {
	var read struct {
		n   int
		err error
	}
	done := make(chan struct{})
	go func() { // ends when the Read lets go of it
		defer close(done)
		for empty := 0; read.n < len(p) && read.err == nil && ctx.Err() == nil; {
			var m int
			m, read.err = r.Read(p[read.n:])
			read.n += m
			if empty++; m > 0 {
				empty = 0
			}
			if empty == maxEmptyReads && read.err == nil {
				read.err = io.ErrNoProgress
			}
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
		return 0, false, execError(ended(ctx))
	}
	switch {
	case read.err == io.EOF:
		return read.n, true, nil
	case read.err != nil:
		return read.n, false, fmt.Errorf("createos: exec: read Command.Stdin: %w", read.err)
	case read.n < len(p):
		return 0, false, execError(ended(ctx))
	}
	return read.n, false, nil
}

// stage uploads into a private directory what does not fit in the line: standard
// input, the script, or both.
func (x *execution) stage(ctx context.Context, s *script, head []byte, whole bool) error {
	if err := x.makeSpool(ctx); err != nil {
		return err
	}
	s.staged = true
	var err error
	if s.parts, err = x.uploadStdin(ctx, head, whole); err != nil {
		return err
	}
	text, err := s.render()
	if err != nil {
		return err
	}
	if len(text) > maxLineScript {
		file := x.spool + "/script"
		if err := x.upload(ctx, file, []byte(text)); err != nil {
			return err
		}
		if text, err = renderLoaded(file); err != nil {
			return err
		}
	}
	x.line = execLine(text)
	return nil
}

// failSpool is a StartError of its own: there is no script yet.
const failSpool = "cannot make a private directory beside the workspace"

func (x *execution) makeSpool(ctx context.Context) error {
	dir, err := shellQuote(x.spool)
	if err != nil {
		return err
	}
	x.staged = true // from now on it may exist
	err = x.awake(ctx, func() error { return x.command(ctx, "(umask 077 && mkdir -- "+dir+")") })
	if errors.Is(err, errCommand) {
		return &StartError{Problem: failSpool}
	}
	return x.d.missing(ctx, x.l, err)
}

var errCommand = errors.New("the command for it failed")

// command runs a short command of ours.
func (x *execution) command(ctx context.Context, text string) error {
	got, err := x.client.exec(ctx, x.t.scope.id, execShell, []string{"-lc", text})
	if err == nil && (got.Failed || got.ExitCode == nil || *got.ExitCode != 0) {
		err = errCommand
	}
	return err
}

// uploadStdin uploads the standard input in parts and returns their number. head
// was read already, and is all of it if whole.
func (x *execution) uploadStdin(ctx context.Context, head []byte, whole bool) (parts int, err error) {
	if len(head) == 0 {
		return 0, nil
	}
	if whole {
		return 1, x.uploadPart(ctx, 0, head)
	}
	r := io.MultiReader(bytes.NewReader(head), x.cmd.Stdin)
	part := make([]byte, stdinPart)
	for total := 0; ; parts++ {
		n, whole, err := readPart(ctx, r, part)
		if err != nil {
			return parts, err
		}
		if total += n; total > MaxStdin {
			return parts, &InputError{"Command.Stdin", "is longer than 64 MiB"}
		}
		if n == 0 {
			return parts, nil
		}
		if err := x.uploadPart(ctx, parts, part[:n]); err != nil {
			return parts, err
		}
		if whole {
			return parts + 1, nil
		}
	}
}

func (x *execution) uploadPart(ctx context.Context, number int, data []byte) error {
	return x.upload(ctx, fmt.Sprintf("%s/part.%d", x.spool, number), data)
}

func (x *execution) upload(ctx context.Context, file string, data []byte) error {
	err := x.awake(ctx, func() error {
		return x.client.upload(ctx, x.t.scope.id, file, bytes.NewReader(data), int64(len(data)))
	})
	if errors.Is(err, ErrConnection) && !notSent(err) {
		x.late = true
	}
	return x.d.missing(ctx, x.l, err)
}

// errLate is a warning: the provider may still act on an upload that it never
// answered.
var errLate = errors.New("createos: exec: staged input was removed, but an upload without a reply may bring some back")

// unstage removes what was uploaded, unless the script has done that: it
// acknowledges itself afterwards. ctx is a cleanup context. A failure is a
// warning.
func (x *execution) unstage(ctx context.Context) {
	if !x.staged || x.output.started() {
		return
	}
	x.staged = false
	dir, err := shellQuote(x.spool)
	if err != nil {
		return
	}
	for try := 1; ; try++ {
		err = x.awake(ctx, func() error { return x.command(ctx, "rm -rf -- "+dir) })
		if err == nil && x.late {
			x.res.Warnings = append(x.res.Warnings, errLate)
		}
		if err == nil || errors.Is(err, ErrLeaseGone) {
			return
		}
		if try == startTries || !unclear(err) || sleep(ctx, jitter(try)) != nil {
			break
		}
	}
	x.res.Warnings = append(x.res.Warnings, fmt.Errorf("createos: exec: staged input was not removed: %w", err))
}
