package createos_test

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A slowLog holds up the first record of a text until it is released.
type slowLog struct {
	slog.Handler
	text    string
	release chan struct{}
}

func (h *slowLog) Handle(_ context.Context, r slog.Record) error {
	if r.Message == h.text {
		<-h.release
	}
	return nil
}

// An entry that one call makes, and another one ends before the first has told of
// it: a host that keeps a list by the events must not be left with it.
func TestEventsComeInTheOrderOfTheChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &slowLog{slog.NewTextHandler(io.Discard, nil), "createos: unconfirmed", make(chan struct{})}
		var kinds []createos.EventKind
		r := newRig(t, createostest.Options{Commands: work}, func(cfg *createos.DriverConfig) {
			cfg.Logger = slog.New(slow)
			cfg.OnEvent = func(e createos.Event) {
				if e.Kind != createos.EventRequest {
					kinds = append(kinds, e.Kind) // never from two goroutines at once
				}
			}
		})
		lease := r.acquire()
		r.srv.Fail(createostest.Fault{Route: "DELETE /v1/sandboxes/{id}/processes/{process}", Status: 403})
		done := make(chan error)
		go func() {
			_, err := r.driver.Exec(t.Context(), r.env, lease, createos.Command{Name: "work", Timeout: time.Second})
			done <- err
		}()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Len(t, r.driver.Unconfirmed(), 1, "the entry is there, and its event is not told yet")
		require.Empty(t, kinds)
		require.NoError(t, r.driver.Destroy(t.Context(), r.env, lease))
		require.Empty(t, r.driver.Unconfirmed())
		close(slow.release)
		require.ErrorIs(t, <-done, createos.ErrTerminationUnproven)
		require.Equal(t, []createos.EventKind{createos.EventOwed, createos.EventSettled}, kinds)
		r.settle()
	})
}
