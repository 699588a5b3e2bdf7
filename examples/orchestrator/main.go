// Orchestrator is a host that serves several environments and survives its own
// restart. It runs 20 jobs at the same time, each in a sandbox of its own, and
// keeps the sandboxes, paused, for its next start.
//
//	go run ./examples/orchestrator
//
// By default an emulator of the provider runs within the program. Since that
// ends with the program, both starts of the host happen in one run: the first
// leaves paused sandboxes and a store behind, the second, a new driver with
// nothing but the store, resumes them, uses them again and destroys them. With
// -url the provider outlives the program, and each run is one start:
//
//	go run ./examples/emulator -workspaces 20 | tee emulator.txt &
//	go run ./examples/orchestrator -url URL -key KEY $(sed -n 's/^WORKSPACE */-workspace /p' emulator.txt)
//	go run ./examples/orchestrator -url URL -key KEY -destroy
//
// What there is to copy:
//
//   - store.go keeps leases, and the intents of creates that are under way, in a
//     JSON file that a crash cannot tear. Whatever the moment at which the
//     program is killed, the next start finds each sandbox in it.
//   - host.go decides, for each error, what becomes of a lease.
//   - jobs.go runs commands with live output, and gives each lease back on a
//     context of its own.
//
// Ctrl-C cancels the jobs, ends their commands and pauses their sandboxes, or
// destroys them if nobody could resume them. Its exit code is 0 only if all
// jobs were done and nothing is owed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/createos-lease/createos"
)

func main() {
	// The first signal ends ctx. A second one, should cleanup hang, ends the
	// program: the store then knows what is left.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "orchestrator:", err)
		os.Exit(1)
	}
}

// options are what the command line says.
type options struct {
	store      string
	jobs       int
	url, key   string
	shape      string
	workspaces []string
	destroy    bool
}

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("orchestrator", flag.ContinueOnError)
	flags.StringVar(&o.store, "store", "leases.json", "`file` that leases are kept in; not for two hosts at once")
	flags.IntVar(&o.jobs, "jobs", 20, "how many jobs to run, all at the same time")
	flags.StringVar(&o.url, "url", "", "API `origin` of the provider or of a running emulator; default is an emulator within")
	flags.StringVar(&o.key, "key", "", "API `key` of the emulator; a real one is read from CREATEOS_API_KEY, where no process list shows it")
	flags.StringVar(&o.shape, "shape", "s-1vcpu-1gb", "size of the sandboxes")
	flags.Func("workspace", "`path` that one sandbox may use as its workspace; give one for each job, or none for the default", func(path string) error {
		o.workspaces = append(o.workspaces, path)
		return nil
	})
	flags.BoolVar(&o.destroy, "destroy", false, "in the end destroy all sandboxes of the store instead of keeping them paused")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.jobs < 0 {
		return o, errors.New("-jobs is negative")
	}
	return o, nil
}

func run(ctx context.Context, out io.Writer, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	st, err := openStore(o.store)
	if err != nil {
		return err
	}
	logger := log.New(out, "", 0) // may be used by all jobs at once
	if o.url != "" {
		site, err := remoteSite(o, st)
		if err != nil {
			return err
		}
		return life(ctx, logger, "start", site, st, o.jobs, o.destroy)
	}
	site, err := embeddedSite()
	if err != nil {
		return err
	}
	defer site.close()
	// When the first start is interrupted the second one runs no jobs, but it
	// still destroys what the first has left paused.
	err = errors.Join(
		life(ctx, logger, "first start", site, st, o.jobs, false),
		life(ctx, logger, "second start", site, st, o.jobs, true),
	)
	if leaks := site.leaks(); leaks != "" {
		return errors.Join(err, fmt.Errorf("the emulator still holds\n%s", leaks))
	}
	logger.Printf("\nthe emulator confirms that nothing is left")
	return err
}

// environments are whom this host works for. A real host has them, each with a
// configuration of its own, in its database.
func environments(config createos.Config) []createos.Environment {
	config.ReuseLease = true
	// Should this host die, the provider pauses what it left running.
	config.AutoPauseAfter = 10 * time.Minute
	return []createos.Environment{
		{CompanyID: "acme", EnvironmentID: "build", Config: config},
		{CompanyID: "acme", EnvironmentID: "test", Config: config},
		{CompanyID: "globex", EnvironmentID: "docs", Config: config},
	}
}

// life is the host from its start to its end.
func life(ctx context.Context, logger *log.Logger, title string, at *site, st *store, jobs int, destroy bool) error {
	logger.Printf("\n== %s", title)
	h, err := newHost(logger, at, st)
	if err != nil {
		return err
	}
	h.recover(ctx)
	if ctx.Err() == nil { // else it was interrupted before it began
		err = h.runJobs(ctx, jobs)
	}
	err = errors.Join(err, h.close(ctx, destroy))
	h.summarize(title)
	return err
}
