package createos_test

import (
	"context"
	"fmt"
	"time"

	"github.com/createos-lease/createos"
)

// A host that was killed holds one lease of two. The other sandbox is found by its
// marks; with Apply it would be destroyed.
func ExampleDriver_Reconcile() {
	srv, d, env := setup()
	defer srv.Close()
	ctx := context.Background()
	held := acquire(d, env)
	acquire(d, env) // and its lease is lost

	found, err := d.Reconcile(ctx, env, []*createos.Lease{held}, createos.ReconcileOptions{
		Grace: time.Nanosecond, // by default a quarter of an hour: what is younger may be on its way
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, f := range found.Found {
		fmt.Println(f.State, f.Verdict)
	}
	fmt.Println("strays:", len(found.Strays()))
	// Output:
	// running known
	// running stray
	// strays: 1
}

// A probe acquires a sandbox, runs a command in it and destroys it again: whether a
// configuration works is seen before anybody depends on it.
func ExampleDriver_Probe() {
	srv, d, env := setup()
	defer srv.Close()
	res, err := d.Probe(context.Background(), env, createos.AcquireOptions{})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(res.OK, res.Cleanup)
	for _, step := range res.Steps {
		fmt.Println(step.Name, step.OK)
	}
	// Output:
	// true <nil>
	// acquire true
	// command true
	// destroy true
}

// A client reads what the provider tells: here what lives in the account.
func ExampleDriver_Client() {
	srv, d, env := setup()
	defer srv.Close()
	ctx := context.Background()
	acquire(d, env)
	c, err := d.Client(env)
	if err != nil {
		fmt.Println(err)
		return
	}
	boxes, err := c.Sandboxes(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, box := range boxes {
		fmt.Println(box.Status, box.Shape)
	}
	// Output:
	// running s-1vcpu-256mb
}
