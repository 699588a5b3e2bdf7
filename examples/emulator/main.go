// Emulator serves the emulated provider on a port of this machine, for programs
// in any language that speak the CreateOS Sandbox API.
//
//	$ go run ./examples/emulator
//	URL        http://127.0.0.1:40123
//	KEY        skp_...
//	WORKSPACE  /tmp/.../ws-1/workspace
//
// URL and KEY are what a client needs. WORKSPACE is a directory for commands and
// files: the emulator runs commands as processes of this machine, unconfined,
// where a path such as /workspace does not exist. A workspace serves one sandbox
// at a time; -workspaces prints more of them. With -builtin nothing of this
// machine is touched: files are kept in memory, any absolute path will do, and
// a handful of commands (echo, cat, sleep and the like) are answered by the
// emulator itself.
//
// SIGINT or SIGTERM ends it. It then names every sandbox that was never
// destroyed, paused ones included, and exits with code 1 if there is one, unless
// -allow-leaks is given: so a test script can let it check its client.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/createos-lease/createos/createostest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "emulator:", err)
		os.Exit(1)
	}
}

// settings are what the command line says.
type settings struct {
	server     createostest.Options
	workspaces int
	allowLeaks bool
}

func parse(args []string) (settings, error) {
	var (
		s       settings
		builtin bool
		delay   time.Duration
	)
	flags := flag.NewFlagSet("emulator", flag.ContinueOnError)
	flags.StringVar(&s.server.Addr, "addr", "127.0.0.1:0", "TCP `address` to listen on; port 0 is a free one. Keep it on loopback: whoever has the key runs commands here")
	flags.StringVar(&s.server.APIKey, "key", "", "API `key` to accept; default is a random one")
	flags.IntVar(&s.server.RateLimit, "rate-limit", 0, "requests in any 60 s before 429; the provider has 300, 0 is none")
	flags.DurationVar(&delay, "delay", 0, "how long a boot, pause, resume and destroy takes")
	flags.BoolVar(&builtin, "builtin", false, "answer a few commands in memory, run no processes")
	flags.IntVar(&s.workspaces, "workspaces", 1, "how many workspaces to print")
	flags.BoolVar(&s.allowLeaks, "allow-leaks", false, "exit with 0 even if sandboxes were never destroyed")
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	if flags.NArg() > 0 {
		return s, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if s.workspaces < 0 {
		return s, fmt.Errorf("-workspaces %d: is negative", s.workspaces)
	}
	if builtin {
		s.server.Commands = createostest.Builtin
	}
	s.server.BootDelay, s.server.PauseDelay, s.server.ResumeDelay, s.server.DestroyDelay = delay, delay, delay, delay
	return s, nil
}

// run serves until ctx ends.
func run(ctx context.Context, out io.Writer, args []string) error {
	s, err := parse(args)
	if err != nil {
		return err
	}
	srv, err := createostest.Start(s.server)
	if err != nil {
		return err
	}
	defer srv.Close()

	// Programs read these lines: the label stands first, then spaces, then
	// the value up to the end of the line.
	fmt.Fprintf(out, "%-10s %s\n", "URL", srv.URL)
	fmt.Fprintf(out, "%-10s %s\n", "KEY", srv.APIKey())
	for range s.workspaces {
		fmt.Fprintf(out, "%-10s %s\n", "WORKSPACE", srv.Workspace())
	}

	<-ctx.Done()
	return report(out, srv, s.allowLeaks)
}

// report says what the clients did and what they left.
func report(out io.Writer, srv *createostest.Server, allowLeaks bool) error {
	fmt.Fprintf(out, "%-10s %d requests, %d sandboxes\n", "SERVED", len(srv.Requests()), len(srv.Sandboxes()))
	leaks := srv.Leaks()
	for _, box := range leaks {
		fmt.Fprintf(out, "%-10s %s\n", "LEAK", box)
	}
	if len(leaks) > 0 && !allowLeaks {
		return fmt.Errorf("%d sandboxes were never destroyed", len(leaks))
	}
	return nil
}
