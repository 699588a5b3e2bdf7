//go:build linux

package createos_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A directory goes in, a command works on it, and its result comes out.
func ExampleDriver_SyncIn() {
	srv, err := createostest.Start(createostest.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer srv.Close()
	dir, err := os.MkdirTemp("", "example-")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	source, result := filepath.Join(dir, "source"), filepath.Join(dir, "result")
	if err := os.MkdirAll(filepath.Join(source, "node_modules"), 0o755); err != nil {
		fmt.Println(err)
		return
	}
	if err := os.WriteFile(filepath.Join(source, "words"), []byte("b\nc\na\n"), 0o644); err != nil {
		fmt.Println(err)
		return
	}

	ctx := context.Background()
	d, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer d.Shutdown(ctx)
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
	lease, err := d.Acquire(ctx, env, createos.AcquireOptions{Workspace: srv.Workspace()})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer d.Destroy(ctx, env, lease)

	in, err := d.SyncIn(ctx, env, lease, createos.Sync{Operations: []createos.SyncOperation{{
		ID:       "build",
		Mappings: []createos.SyncMapping{{Source: source, Target: "project", Exclude: []string{"node_modules"}}},
		Commands: []createos.Command{{Name: "sort", Args: []string{"-o", "sorted", "words"}, Dir: "project"}},
	}}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("files in:", in.Operations[0].Files)

	out, err := d.SyncOut(ctx, env, lease, createos.Sync{Operations: []createos.SyncOperation{{
		Mappings: []createos.SyncMapping{{Source: "project/sorted", Target: result}},
	}}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("files out:", out.Operations[0].Files)
	sorted, err := os.ReadFile(result)
	fmt.Printf("%q %v\n", sorted, err)
	// Output:
	// files in: 1
	// files out: 1
	// "a\nb\nc\n" <nil>
}
