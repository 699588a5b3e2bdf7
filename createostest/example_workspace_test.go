//go:build unix

package createostest_test

import (
	"context"
	"fmt"
	"log"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// Without options commands are processes of this computer, and each sandbox
// needs a workspace that the server gives out.
func ExampleServer_Workspace() {
	ctx := context.Background()
	srv, err := createostest.Start(createostest.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer srv.Close()
	driver, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		log.Fatal(err)
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
	lease, err := driver.Acquire(ctx, env, createos.AcquireOptions{Workspace: srv.Workspace()})
	if err != nil {
		log.Fatal(err)
	}
	res, err := driver.Exec(ctx, env, lease, createos.Command{Name: "sh", Args: []string{"-c", "echo real | tr a-z A-Z"}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(string(res.Stdout))
	fmt.Println(driver.Destroy(ctx, env, lease))
	// Output:
	// REAL
	// <nil>
}
