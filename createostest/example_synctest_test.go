package createostest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// testHour waits for a command of an hour, and for a provider that is down for a
// while, without taking real time: a server in memory works in a bubble of
// testing/synctest if it is started there.
func testHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := createostest.NewServer(t, createostest.Options{
			Commands: func(ctx context.Context, c *createostest.Command) int {
				if c.Name != "train" {
					return createostest.Builtin(ctx, c)
				}
				if c.Sleep(time.Hour) != nil { // ends early when the command is killed
					return 1
				}
				return 0
			},
			InMemory: true,
		})
		d, err := createos.NewDriver(srv.DriverConfig())
		if err != nil {
			t.Fatal(err)
		}
		env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
		lease, err := d.Acquire(t.Context(), env, createos.AcquireOptions{})
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		res, err := d.Exec(t.Context(), env, lease, createos.Command{Name: "train", Timeout: 2 * time.Hour})
		if err := errors.Join(err, res.Err()); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took != time.Hour {
			t.Errorf("took %v", took)
		}

		down := srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}", Status: 503, Times: 2})
		if err := d.Destroy(t.Context(), env, lease); err != nil { // it is repeated
			t.Error(err)
		}
		if down.Hits() != 2 || srv.LeakReport() != "" {
			t.Errorf("%d faults, left: %s", down.Hits(), srv.LeakReport())
		}
	})
}

// Time is virtual in a bubble of testing/synctest: testHour is a test that is
// over at once.
func ExampleOptions_virtualTime() {
	_ = testHour // go test calls it, as it would TestHour
}
