package createostest_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A program starts a server with Start and closes it itself.
func ExampleStart() {
	srv, err := createostest.Start(createostest.Options{InMemory: true})
	if err != nil {
		log.Fatal(err)
	}
	defer srv.Close()

	d, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		log.Fatal(err)
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
	lease, err := d.Acquire(context.Background(), env, createos.AcquireOptions{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("never destroyed:", len(srv.Leaks()))
	if err := d.Destroy(context.Background(), env, lease); err != nil {
		log.Fatal(err)
	}
	fmt.Println("never destroyed:", len(srv.Leaks()))
	for _, r := range srv.Requests() {
		fmt.Println(r.Status, r.Route)
	}
	// Output:
	// never destroyed: 1
	// never destroyed: 0
	// 200 GET /v1/whoami
	// 201 POST /v1/sandboxes
	// 200 POST /v1/sandboxes/{id}/exec
	// 200 PUT /v1/sandboxes/{id}/files
	// 200 DELETE /v1/sandboxes/{id}
}

// The hardest fault for a program is a create that was done and whose reply was
// lost. The driver finds the sandbox by its marks and goes on with it.
func ExampleServer_Fail() {
	srv, err := createostest.Start(createostest.Options{InMemory: true})
	if err != nil {
		log.Fatal(err)
	}
	defer srv.Close()
	d, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		log.Fatal(err)
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}

	lost := srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes", DropReply: true, Nth: 1})
	lease, err := d.Acquire(context.Background(), env, createos.AcquireOptions{})
	fmt.Println("hits:", lost.Hits(), "error:", err, "sandboxes:", len(srv.Sandboxes()))

	// A refusal is not repeated: the destroy is owed.
	refusal := srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 402, Times: 1})
	err = d.Destroy(context.Background(), env, lease)
	fmt.Println("hits:", refusal.Hits(), "no credit:", errors.Is(err, createos.ErrNoCredit))
	fmt.Print(strings.Count(srv.LeakReport(), "\n"), " to be destroyed\n")
	// Output:
	// hits: 1 error: <nil> sandboxes: 1
	// hits: 1 no credit: true
	// 1 to be destroyed
}

// Commands answers commands with a Go function, in place of real processes.
func ExampleOptions_commands() {
	srv, err := createostest.Start(createostest.Options{
		InMemory: true,
		Commands: func(ctx context.Context, c *createostest.Command) int {
			if c.Name != "deploy" {
				return createostest.Builtin(ctx, c) // also for what the driver itself runs
			}
			fmt.Fprintf(c.Stdout, "deploying %s to %s\n", c.Args[0], c.Env["STAGE"])
			if c.Args[0] == "broken" {
				fmt.Fprintln(c.Stderr, "does not start")
				return 7
			}
			return 0
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer srv.Close()

	d, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		log.Fatal(err)
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
	lease, err := d.Acquire(context.Background(), env, createos.AcquireOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for _, version := range []string{"v1.2.0", "broken"} {
		res, err := d.Exec(context.Background(), env, lease, createos.Command{
			Name: "deploy", Args: []string{version}, Env: createos.Env(map[string]string{"STAGE": "test"}),
		})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%d %s%s", res.ExitCode, res.Stdout, res.Stderr)
	}
	// Output:
	// 0 deploying v1.2.0 to test
	// 7 deploying broken to test
	// does not start
}
