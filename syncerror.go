package createos

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
	"github.com/createos-lease/createos/internal/manifest"
)

// What a [SyncError] may match, beside the errors of requests and contexts.
var (
	// ErrSyncUnsafe: a path of a mapping is, or goes through, a symbolic link,
	// or leads out of the workspace.
	ErrSyncUnsafe = errors.New("createos: path is a symbolic link or leads through one")
	// ErrSyncKind: what is there is not what the mapping says or needs, such
	// as a directory in the place of a file.
	ErrSyncKind = errors.New("createos: file where a directory is needed, or the other way round")
	// ErrSyncMissing: a source, or the directory above a local target, does
	// not exist.
	ErrSyncMissing = errors.New("createos: no such file or directory")
	// ErrSyncChanged: something changed while it was moved. Trying again is
	// safe.
	ErrSyncChanged = errors.New("createos: a file changed while it was moved")
	// ErrSyncCorrupt: what arrived is not what was sent. Trying again is safe.
	ErrSyncCorrupt = errors.New("createos: length or digest of a transfer does not match")
	// ErrSyncRefused: the sandbox sent what was not asked for, or what must
	// not be written.
	ErrSyncRefused = errors.New("createos: content from the sandbox was refused")
	// ErrSyncLimit: a tree is above Sync.MaxBytes or Sync.MaxEntries.
	ErrSyncLimit = errors.New("createos: above a limit of the sync")
	// ErrSyncTools: the image lacks a program that a sync needs.
	ErrSyncTools = errors.New("createos: the sandbox lacks a program that sync needs")
	// ErrSyncWrite: the sandbox could not write or place the files: a full
	// disk, or a permission.
	ErrSyncWrite = errors.New("createos: the sandbox could not write the files")
	// ErrSyncStep: a step in the sandbox did not end in time, was lost, or failed
	// in a way that is not known.
	ErrSyncStep = errors.New("createos: a step of the sync in the sandbox did not come to its end")
)

// A SyncError says which part of a sync failed. It names neither paths nor
// content; what it wraps can be matched: the errors above, [*InputError],
// [*ExitError] for a command, fs.ErrPermission and syscall.Errno values of this
// machine's file system, and those of every request.
type SyncError struct {
	// Operation is the ID of the operation, OperationIndex its index.
	Operation      string
	OperationIndex int
	// Mapping is the index of the mapping, Command that of the command; the
	// other one is -1.
	Mapping, Command int
	Err              error
}

func (e *SyncError) Error() string {
	name := strconv.Itoa(e.OperationIndex)
	if e.Operation != "" {
		name = strconv.Quote(e.Operation)
	}
	if e.Command >= 0 {
		return fmt.Sprintf("createos: sync: operation %s, command %d: %v", name, e.Command, e.Err)
	}
	return fmt.Sprintf("createos: sync: operation %s, mapping %d: %v", name, e.Mapping, e.Err)
}

// Unwrap gives the cause.
func (e *SyncError) Unwrap() error { return e.Err }

// A syncCause is a cause with more to it, of which only what is safe is printed.
type syncCause struct {
	kind error
	text string // added to the text of kind
	more error  // can be matched, is not printed
}

func (e *syncCause) Error() string {
	if e.text == "" {
		return e.kind.Error()
	}
	return e.kind.Error() + ": " + e.text
}

func (e *syncCause) Unwrap() []error {
	if e.more == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.more}
}

var errHostFiles = errors.New("createos: file system of this machine")

// hostError makes of an error of this machine's file system one without paths.
func hostError(err error) error {
	var refused *archive.RefusedError
	if _, own := err.(*syncCause); err == nil || own { //nolint:errorlint // what wraps one may say more
		return err
	}
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		return hostErrors(several.Unwrap(), err)
	}
	switch {
	case errors.As(err, &refused):
		return &syncCause{kind: ErrSyncRefused, text: refused.Reason}
	case errors.Is(err, hosttree.ErrIsLink):
		return ErrSyncUnsafe
	case errors.Is(err, hosttree.ErrNotDir), errors.Is(err, hosttree.ErrNotFile):
		return ErrSyncKind
	case errors.Is(err, manifest.ErrLimit):
		return ErrSyncLimit
	case errors.Is(err, archive.ErrChanged):
		return ErrSyncChanged
	case errors.As(err, new(*manifest.StoreError)):
		cause := &syncCause{kind: errHostFiles, text: "temporary files cannot be written"}
		if errno := syscall.Errno(0); errors.As(err, &errno) {
			cause.text, cause.more = cause.text+": "+errno.Error(), errno
		}
		return cause // whatever the file system says, it is not about what is moved
	}
	return scrubHost(err)
}

// hostErrors does so with each of several errors that were joined: one of ours does
// not make the others harmless.
func hostErrors(parts []error, all error) error {
	safe, same := make([]error, len(parts)), true
	for i, err := range parts {
		safe[i] = hostError(err)
		same = same && errors.Is(safe[i], err)
	}
	if same {
		return all
	}
	return errors.Join(safe...)
}

// scrubHost keeps what can be matched of an error that may name paths; what is
// not of the file system passes.
func scrubHost(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	var errno syscall.Errno
	if !errors.As(err, &path) && !errors.As(err, &link) {
		return err
	}
	if errors.As(err, &errno) {
		if errno == syscall.ENOENT {
			return &syncCause{kind: ErrSyncMissing, more: errno}
		}
		return &syncCause{kind: errHostFiles, text: errno.Error(), more: errno}
	}
	// Such as os.Root's own for a path that leads out.
	return &syncCause{kind: ErrSyncUnsafe}
}
