// Janitor finds sandboxes that nobody knows of any more, and destroys them when
// it is told to:
//
//	go run ./examples/janitor
//	go run ./examples/janitor -apply
//
// It prints a table of the environment's sandboxes: what each is, and why. Only
// what carries the marks of the environment, is in no lease of the store and is
// older than the grace period counts as a stray.
//
// It needs no account: an emulator of the provider runs within the program, and
// a host that is then forgotten makes the strays. With -live it looks at a real
// account, for which it needs the leases of all hosts of the environment as a
// JSON list:
//
//	export CREATEOS_API_URL=https://api.sb.createos.sh CREATEOS_API_KEY=...
//	go run ./examples/janitor -live -company acme -environment ci -leases leases.json
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// cleanupBound is how long the end of the program may take.
const cleanupBound = time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C has its usual meaning
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "janitor:", err)
		os.Exit(1)
	}
}

// A job is what there is to clean.
type job struct {
	driver *createos.Driver
	env    createos.Environment
	known  []*createos.Lease
	grace  time.Duration
}

func run(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("janitor", flag.ContinueOnError)
	apply := flags.Bool("apply", false, "destroy the strays")
	live := flags.Bool("live", false, "use the provider at CREATEOS_API_URL instead of the emulator")
	company := flags.String("company", "acme", "company of the environment")
	environment := flags.String("environment", "ci", "id of the environment")
	leases := flags.String("leases", "", "file with the JSON list of all leases that are held; with -live only, where it is required")
	deployment := flags.String("deployment", "", "DriverConfig.Deployment of the hosts; with -live only")
	grace := flags.Duration("grace", createos.DefaultReconcileGrace, "age below which a sandbox is spared; 0 is the default, so that none at all is 1ns; with -live only")
	if err := flags.Parse(args); err != nil {
		return err
	}
	env := createos.Environment{CompanyID: *company, EnvironmentID: *environment}
	if !*live {
		return demo(ctx, out, env, *apply)
	}
	known, err := readLeases(*leases)
	if err != nil {
		return err
	}
	env.Config = createos.Config{APIURL: os.Getenv("CREATEOS_API_URL"), APIKey: createos.NewSecret(os.Getenv("CREATEOS_API_KEY"))}
	if env.Config.APIURL == "" || env.Config.APIKey.IsZero() {
		return errors.New("-live needs CREATEOS_API_URL and CREATEOS_API_KEY")
	}
	driver, err := createos.NewDriver(createos.DriverConfig{Deployment: *deployment})
	if err != nil {
		return err
	}
	return errors.Join(job{driver, env, known, *grace}.clean(ctx, out, *apply), shutdown(ctx, driver))
}

// shutdown ends a driver in time, even if ctx is over.
func shutdown(ctx context.Context, driver *createos.Driver) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	return driver.Shutdown(ctx)
}

// readLeases refuses to go on without a list: no list and an empty list are
// not the same, and the difference is every sandbox of the environment.
func readLeases(file string) ([]*createos.Lease, error) {
	if file == "" {
		return nil, errors.New("-live needs -leases, or every sandbox would be a stray")
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var known []*createos.Lease
	if err := json.Unmarshal(text, &known); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if known == nil {
		return nil, fmt.Errorf("%s: holds no list", file)
	}
	return known, nil // Reconcile refuses those that name nothing
}

// demo forgets some sandboxes on an emulator and looks for them.
func demo(ctx context.Context, out io.Writer, env createos.Environment, apply bool) (err error) {
	srv, err := createostest.Start(createostest.Options{InMemory: true})
	if err != nil {
		return err
	}
	defer srv.Close()
	env.Config = srv.Config()
	careless, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		return err
	}
	var leases []*createos.Lease
	for range 5 {
		lease, err := careless.Acquire(ctx, env, createos.AcquireOptions{})
		if err != nil {
			return err
		}
		leases = append(leases, lease)
	}
	// The host is gone, and of its five leases two were written down.
	driver, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		return err
	}
	err = job{driver, env, leases[:2], time.Nanosecond}.clean(ctx, out, apply)
	fmt.Fprintf(out, "the emulator holds %d sandboxes\n", len(srv.Leaks()))
	return errors.Join(err, shutdown(ctx, driver))
}

// clean prints what there is, and does what it was told to.
func (j job) clean(ctx context.Context, out io.Writer, apply bool) error {
	found, err := j.driver.Reconcile(ctx, j.env, j.known, createos.ReconcileOptions{Apply: apply, Grace: j.grace})
	if found == nil {
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "SANDBOX\tSTATE\tVERDICT\tWHY")
	for _, f := range found.Found {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", f.SandboxID, f.State, f.Verdict, f.Reason)
	}
	err = errors.Join(err, table.Flush())
	fmt.Fprintf(out, "%d of this environment, %d strays; %d of others were not looked at\n", len(found.Found), len(found.Strays()), found.Others)
	if !apply && len(found.Strays()) > 0 {
		fmt.Fprintln(out, "nothing was destroyed; -apply does that")
	}
	return err
}
