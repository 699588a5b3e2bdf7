// Quickstart takes a sandbox through its whole life: it leases one, runs
// commands in it with live output, releases it by pause, resumes it, shows that
// its files are still there, destroys it, and asks the driver whether anything
// is left.
//
//	go run ./examples/quickstart
//
// It needs no account: an emulator of the provider runs within the program and
// starts the commands as processes of this machine. With -live the sandbox is
// a real one, and costs money for some seconds:
//
//	export CREATEOS_API_URL=https://api.sb.createos.sh
//	export CREATEOS_API_KEY=... CREATEOS_SHAPE=s-1vcpu-1gb
//	go run ./examples/quickstart -live
//
// Whatever happens on the way, Ctrl-C included, the sandbox is destroyed before
// the program ends. Its exit code is 0 only if everything worked and nothing
// is left.
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

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// cleanupBound is how long the end of the program may take. The driver has
// bounds of its own within.
const cleanupBound = 2 * time.Minute

func main() {
	// The first Ctrl-C ends ctx, and with it whatever runs in the sandbox; stop
	// gives the second one its usual meaning back, should cleanup hang.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	live := flags.Bool("live", false, "use the provider at CREATEOS_API_URL instead of the emulator")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *live {
		config, err := liveConfig()
		if err != nil {
			return err
		}
		return tour(ctx, out, createos.DriverConfig{}, config, "")
	}

	srv, err := createostest.Start(createostest.Options{})
	if err != nil {
		return err
	}
	defer srv.Close()
	if err := tour(ctx, out, srv.DriverConfig(), srv.Config(), srv.Workspace()); err != nil {
		return err
	}
	// The driver says that nothing is left. The emulator can confirm it.
	if leaks := srv.LeakReport(); leaks != "" {
		return fmt.Errorf("the emulator still holds\n%s", leaks)
	}
	fmt.Fprintln(out, "the emulator agrees")
	return nil
}

// liveConfig is the provider as the environment names it.
func liveConfig() (createos.Config, error) {
	config := createos.Config{
		APIURL: os.Getenv("CREATEOS_API_URL"),
		APIKey: createos.NewSecret(os.Getenv("CREATEOS_API_KEY")),
		Shape:  os.Getenv("CREATEOS_SHAPE"),
	}
	if config.APIURL == "" || config.APIKey.IsZero() || config.Shape == "" {
		return config, errors.New("-live needs CREATEOS_API_URL, CREATEOS_API_KEY and CREATEOS_SHAPE")
	}
	return config, nil
}

// tour is the life of one lease. Whichever way it ends, the sandbox is destroyed
// and the driver shut down.
func tour(ctx context.Context, out io.Writer, driverConfig createos.DriverConfig, config createos.Config, workspace string) (err error) {
	config.ReuseLease = true // Release pauses, so that Resume can go on
	driver, err := createos.NewDriver(driverConfig)
	if err != nil {
		return err
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "quickstart", Config: config}

	var lease *createos.Lease
	defer func() {
		// ctx may be over, which may be why we are here: cleanup has a context of
		// its own. Shutdown comes first, because it waits for a Release that the
		// end of ctx left at work and that would stand in the way of Destroy.
		// RetryCleanup tries what is still owed once more, and tells what
		// remains. A nil lease is nothing to destroy.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		_ = driver.Shutdown(ctx)
		err = errors.Join(err, driver.Destroy(ctx, env, lease), driver.RetryCleanup(ctx))
	}()

	step(out, "acquire a sandbox")
	lease, err = driver.Acquire(ctx, env, createos.AcquireOptions{Workspace: workspace})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "leased", lease.ProviderLeaseID)

	step(out, "run commands in it")
	box := sandbox{driver, env, lease, out}
	if err := box.work(ctx); err != nil {
		return err
	}

	step(out, "release it: a reusable lease is paused, with its disk and memory")
	if err := driver.Release(ctx, env, lease); err != nil {
		return err
	}
	fmt.Fprintln(out, "paused")

	step(out, "resume it")
	resumed, err := driver.Resume(ctx, env, lease)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "the same sandbox again:", resumed.ProviderLeaseID == lease.ProviderLeaseID)
	lease = resumed
	box.lease = lease
	if err := box.look(ctx); err != nil {
		return err
	}

	step(out, "destroy it")
	if err := driver.Destroy(ctx, env, lease); err != nil {
		return err
	}
	lease = nil
	if owed := driver.Unconfirmed(); len(owed) > 0 {
		return fmt.Errorf("not proven clean: %v", owed)
	}
	fmt.Fprintln(out, "destroyed; the driver knows of nothing that is left")
	return nil
}

func step(out io.Writer, what string) { fmt.Fprintf(out, "\n== %s\n", what) }
