package createos_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// The examples run on the emulator, in memory. For the provider itself a driver
// and a configuration are made like this:
//
//	d, err := createos.NewDriver(createos.DriverConfig{})
//	config := createos.Config{APIURL: "https://api.sb.createos.sh", Shape: "s-1vcpu-1gb"}
func Example() {
	ctx := context.Background()
	srv, err := createostest.Start(createostest.Options{InMemory: true}) // stands in for the provider
	if err != nil {
		log.Fatal(err)
	}
	defer srv.Close()
	d, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		log.Fatal(err)
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}

	fmt.Println("error:", hello(ctx, d, env))
	fmt.Println("left behind:", d.Shutdown(ctx))
	// Output:
	// hello from a sandbox
	// error: <nil>
	// left behind: <nil>
}

func hello(ctx context.Context, d *createos.Driver, env createos.Environment) (err error) {
	lease, err := d.Acquire(ctx, env, createos.AcquireOptions{})
	if err != nil {
		return err // nothing is left, or d.Unconfirmed lists it
	}
	defer func() { // also when ctx is over
		err = errors.Join(err, d.Destroy(context.WithoutCancel(ctx), env, lease))
	}()
	res, err := d.Exec(ctx, env, lease, createos.Command{
		Name: "echo", Args: []string{"hello from", "a sandbox"}, Stdout: os.Stdout,
	})
	if err != nil {
		return err // it is not known how the command ended
	}
	return res.Err() // it is: nil means exit code 0
}

// setup makes what each example needs. It runs on the emulator, in memory.
func setup() (*createostest.Server, *createos.Driver, createos.Environment) {
	srv, err := createostest.Start(createostest.Options{InMemory: true})
	if err != nil {
		log.Fatal(err)
	}
	d, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		log.Fatal(err)
	}
	return srv, d, createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
}

func acquire(d *createos.Driver, env createos.Environment) *createos.Lease {
	lease, err := d.Acquire(context.Background(), env, createos.AcquireOptions{})
	if err != nil {
		log.Fatal(err)
	}
	return lease
}

// A lease is kept as JSON between two lives of a host. Resume says whether it can
// be continued; that it cannot is a verdict of its own, apart from failures.
func ExampleDriver_Resume() {
	ctx := context.Background()
	srv, d, env := setup()
	defer srv.Close()
	env.Config.ReuseLease = true // Release pauses
	lease := acquire(d, env)
	if err := d.Release(ctx, env, lease); err != nil {
		log.Fatal(err)
	}
	stored, err := json.Marshal(lease)
	if err != nil {
		log.Fatal(err)
	}

	// Later, perhaps in another process.
	resume := func() {
		var lease createos.Lease
		if err := json.Unmarshal(stored, &lease); err != nil {
			log.Fatal(err)
		}
		resumed, err := d.Resume(ctx, env, &lease)
		var expired *createos.ExpiredError
		switch {
		case errors.As(err, &expired): // or errors.Is(err, createos.ErrLeaseExpired)
			// If something remains, have a look before Destroy.
			fmt.Println("expired:", expired.Reason, "- remains:", expired.Remains)
		case err != nil:
			fmt.Println("try again later:", err)
		default:
			fmt.Println("resumed:", resumed.Metadata.ResumedLease)
		}
	}
	resume()

	env.Config.Shape = "s-2vcpu-2gb"
	resume()

	env.Config = srv.Config()
	if err := srv.Kill(lease.ProviderLeaseID); err != nil { // behind our back
		log.Fatal(err)
	}
	resume()
	// Output:
	// resumed: true
	// expired: configuration changed - remains: unknown
	// expired: sandbox gone - remains: gone
}

// A destroy that cannot be proven stays on the books until it is.
func ExampleDriver_RetryCleanup() {
	ctx := context.Background()
	srv, d, env := setup()
	defer srv.Close()
	lease := acquire(d, env)

	fault := srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 403})
	err := d.Destroy(ctx, env, lease)
	fmt.Println("forbidden:", errors.Is(err, createos.ErrForbidden))
	for _, u := range d.Unconfirmed() {
		fmt.Println(u.Kind, "for", u.SandboxID == lease.ProviderLeaseID)
	}

	fault.Remove()
	fmt.Println("retry:", d.RetryCleanup(ctx))
	fmt.Println("still owed:", len(d.Unconfirmed()))
	// Output:
	// forbidden: true
	// destroy owed for true
	// retry: <nil>
	// still owed: 0
}

// A host that may be killed writes down what it is about to create. What it
// finds in its journal after the crash, without a lease, it hands to its next
// driver.
func ExampleIntent_Unconfirmed() {
	ctx := context.Background()
	srv, d, env := setup()
	defer srv.Close()

	var journal []byte // a file, or a row in a database
	_, err := d.Acquire(ctx, env, createos.AcquireOptions{
		BeforeCreate: func(_ context.Context, intent createos.Intent) (err error) {
			journal, err = json.Marshal(intent)
			return err
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("sandboxes before:", len(srv.Leaks()))
	// The host is killed here, before it could store its lease.

	var intent createos.Intent
	if err := json.Unmarshal(journal, &intent); err != nil {
		log.Fatal(err)
	}
	config := srv.DriverConfig()
	config.Unconfirmed = []createos.Unconfirmed{intent.Unconfirmed(time.Now())}
	next, err := createos.NewDriver(config)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("owed:", next.Unconfirmed()[0].Kind)
	fmt.Println("retry:", next.RetryCleanup(ctx, env)) // env brings the key
	fmt.Println("sandboxes after:", len(srv.Leaks()))
	// Output:
	// sandboxes before: 1
	// owed: create unknown
	// retry: <nil>
	// sandboxes after: 0
}

// A command that fails is a result. Err makes an error of it where that is
// wanted.
func ExampleResult_Err() {
	ctx := context.Background()
	srv, d, env := setup()
	defer srv.Close()
	lease := acquire(d, env)

	res, err := d.Exec(ctx, env, lease, createos.Command{
		Name: "bash", Args: []string{"-c", "echo cannot build >&2; exit 3"},
	})
	if err != nil {
		log.Fatal(err) // how the command ended is not known
	}
	var exit *createos.ExitError
	if errors.As(res.Err(), &exit) {
		fmt.Println(exit)
		fmt.Printf("code %d: %s\n", exit.ExitCode, bytes.TrimSpace(res.Stderr))
	}

	res, err = d.Exec(ctx, env, lease, createos.Command{
		Name: "sleep", Args: []string{"60"}, Timeout: 10 * time.Millisecond,
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.TimedOut, errors.Is(res.Err(), createos.ErrTimeout))
	// Output:
	// createos: command exited with code 3
	// code 3: cannot build
	// true true
}

// Arguments, environment and standard input reach the program byte for byte; no
// shell reads them. An environment variable is a secret, and prints as one.
func ExampleDriver_Exec() {
	ctx := context.Background()
	srv, d, env := setup()
	defer srv.Close()
	lease := acquire(d, env)

	cmd := createos.Command{
		Name:   "bash",
		Args:   []string{"-c", `cat; echo "$0 $GREETING"`, `$(rm -rf /) "quoted"`},
		Env:    createos.Env(map[string]string{"GREETING": "; hello"}),
		Stdin:  strings.NewReader("from standard input\n"),
		Stdout: os.Stdout, // while it runs
	}
	fmt.Println(cmd)
	fmt.Println(cmd.Env)
	res, err := d.Exec(ctx, env, lease, cmd)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.ExitCode, len(res.Stdout), res.StdoutTruncated) // the end of the output is kept
	// Output:
	// command "bash" (3 arguments, 1 variables)
	// map[GREETING:[redacted]]
	// from standard input
	// $(rm -rf /) "quoted" ; hello
	// 0 49 false
}

// OnEvent is the hook for metrics. Events hold no secret and no path.
func ExampleDriverConfig_metrics() {
	ctx := context.Background()
	srv, _, env := setup()
	defer srv.Close()

	var requests, failures atomic.Int64
	config := srv.DriverConfig()
	config.OnEvent = func(e createos.Event) { // possibly from several goroutines
		switch e.Kind {
		case createos.EventRequest:
			requests.Add(1)
			if e.Err != nil {
				failures.Add(1)
				fmt.Println(e.Detail, "answered", e.Status)
			}
		case createos.EventOwed, createos.EventSettled:
			fmt.Println(e.Kind, e.Debt.Kind)
		}
	}
	d, err := createos.NewDriver(config)
	if err != nil {
		log.Fatal(err)
	}
	lease := acquire(d, env)
	srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 403, Nth: 1})
	_ = d.Destroy(ctx, env, lease)
	_ = d.RetryCleanup(ctx)
	fmt.Println(requests.Load(), "requests,", failures.Load(), "failed")
	// Output:
	// destroy sandbox answered 403
	// owed destroy owed
	// settled destroy owed
	// 6 requests, 1 failed
}
