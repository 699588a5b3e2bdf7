package createos

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
)

// No error names a path of this machine, whatever it was joined or wrapped with; and
// what can be matched of it stays.
func TestSyncHostErrorsNameNoPaths(t *testing.T) {
	t.Parallel()
	path := &fs.PathError{Op: "openat", Path: "/home/me/secret-name", Err: syscall.EACCES}
	refused := &archive.RefusedError{Reason: "is a device"}
	for _, err := range []error{
		path, errors.Join(refusedList(), path), errors.Join(path, refusedList()), errors.Join(errors.Join(ErrSyncStep, path), refused),
		errors.Join(refused, path), fmt.Errorf("more: %w", errors.Join(refusedList(), path)), errors.Join(guestError(137), path),
	} {
		got := hostError(err)
		require.NotContains(t, got.Error(), "secret", "%#v", err)
		require.ErrorIs(t, got, fs.ErrPermission)
	}
	got := hostError(errors.Join(refusedList(), path))
	require.ErrorIs(t, got, ErrSyncRefused)
	require.ErrorIs(t, hostError(errors.Join(refused, path)), ErrSyncRefused)
	for _, err := range []error{nil, guestError(137), errors.Join(ErrSyncStep, context.Canceled), fmt.Errorf("%w: %w", context.Canceled, ErrShutdown)} {
		require.Equal(t, err, hostError(err))
	}
}
