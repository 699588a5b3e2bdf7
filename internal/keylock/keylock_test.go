package keylock_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/keylock"
)

func TestLockExcludesHoldersOfAKey(t *testing.T) {
	var l keylock.Lock
	counts := map[string]*int{"a": new(int), "b": new(int)}
	var all sync.WaitGroup
	for range 50 {
		for key, n := range counts {
			all.Go(func() {
				unlock, err := l.Lock(context.Background(), key)
				if err != nil {
					t.Error(err)
					return
				}
				*n++ // the race detector sees two holders
				unlock()
			})
		}
	}
	all.Wait()
	require.Equal(t, 50, *counts["a"])
	require.Equal(t, 50, *counts["b"])
}

func TestLockLeavesWithItsContext(t *testing.T) {
	var l keylock.Lock
	unlock, err := l.Lock(t.Context(), "a")
	require.NoError(t, err)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err = l.Lock(ctx, "a")
	require.ErrorIs(t, err, cause)
	unlock()
	unlock, err = l.Lock(t.Context(), "a")
	require.NoError(t, err)
	unlock()
}
