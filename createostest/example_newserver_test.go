package createostest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// build is the program under test: it runs one command in a fresh sandbox.
func build(ctx context.Context, d *createos.Driver, env createos.Environment) (code int, err error) {
	lease, err := d.Acquire(ctx, env, createos.AcquireOptions{})
	if err != nil {
		return -1, err
	}
	defer func() { // also after an error, and when ctx is over
		err = errors.Join(err, d.Destroy(context.WithoutCancel(ctx), env, lease))
	}()
	res, err := d.Exec(ctx, env, lease, createos.Command{Name: "test", Args: []string{"-d", "."}})
	if err != nil {
		return -1, err
	}
	return res.ExitCode, nil
}

// testBuild is its test. With Options{} the commands would be real processes,
// and AcquireOptions.Workspace would have to be srv.Workspace().
func testBuild(t *testing.T) {
	srv := createostest.NewServer(t, createostest.Options{InMemory: true}) // closed with the test
	d, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		t.Fatal(err)
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}

	code, err := build(t.Context(), d, env)
	if code != 0 || err != nil {
		t.Errorf("build ended with code %d and error %v", code, err)
	}
	if leaks := srv.LeakReport(); leaks != "" {
		t.Errorf("never destroyed:\n%s", leaks)
	}
}

// NewServer is for tests: testBuild is one.
func ExampleNewServer() {
	_ = testBuild // go test calls it, as it would TestBuild
}
