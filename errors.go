//lint:file-ignore ST1005 The fixed texts are matched word for word, capital and full stop included.

package createos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"
)

// The texts below are fixed: hosts written before this package match on them
// word for word. New code should use [errors.Is] and [errors.As].
var (
	// ErrForeignLease is returned by every call that was given a lease whose
	// metadata does not name the company, the environment and the API origin
	// of the call. Nothing was sent and nothing changed. Exec words it
	// differently, but its error matches ErrForeignLease too.
	ErrForeignLease = errors.New("CreateOS lease does not belong to this environment.")

	// ErrCleanupInProgress is returned by Release and Destroy when another
	// Release or Destroy of the same lease is at work.
	ErrCleanupInProgress = errors.New("CreateOS lease cleanup is already in progress.")

	// ErrPoisoned is returned by a Release that was to pause a lease on which
	// a process may still run. The sandbox was not paused. Destroy the lease.
	ErrPoisoned = errors.New("CreateOS process cleanup is unconfirmed; destroy this lease before reusing it.")

	// ErrCleanupFirst is returned by Resume when the lease is being released,
	// is being resumed by another call, or is poisoned.
	ErrCleanupFirst = errors.New("CreateOS lease cleanup must finish before resume.")

	// ErrLeaseClosing is returned by Exec when the lease is being released,
	// is poisoned, or the driver is shut down, and matched by the error of a
	// call that a Release or Destroy has cancelled.
	ErrLeaseClosing = errors.New("CreateOS lease is closing or requires cleanup.")

	// ErrProcessCreationUnknown is returned by Exec when it could not be
	// settled whether the command was started. The lease is poisoned.
	ErrProcessCreationUnknown = errors.New("CreateOS process creation could not be confirmed; destroy the lease before reusing it.")

	// ErrTerminationUnproven is returned by Exec when a command was to be
	// ended and the provider did not confirm that its process tree is gone.
	// The lease is poisoned.
	ErrTerminationUnproven = errors.New("CreateOS command cleanup failed; process termination is unconfirmed.")

	// ErrConnection is matched by every error that stands for a request
	// without an HTTP answer. See [ConnectionError].
	ErrConnection = errors.New("CreateOS connection failed.")

	// ErrInvalidResponse is matched by every error that stands for an answer
	// that could not be read as what the API promises. See [ResponseError].
	ErrInvalidResponse = errors.New("CreateOS returned an invalid response.")
)

var (
	// ErrShutdown is matched by the error of a call that was refused or
	// cancelled because [Driver.Shutdown] was called.
	ErrShutdown = errors.New("createos: driver is shut down")

	// ErrLeaseExpired is matched by the error of a Resume that found that the
	// lease cannot be continued. It is a verdict, not a failure: nothing was
	// destroyed. See [ExpiredError] for the reason and for what remains.
	ErrLeaseExpired = errors.New("createos: lease expired")

	// ErrLeaseGone is matched by the error of an Exec whose sandbox does not
	// exist any more.
	ErrLeaseGone = errors.New("createos: sandbox of the lease is gone")

	// ErrUnjudged is matched by an error that stands for a 404 which does not
	// prove that the sandbox is gone: the answer may come from a gateway, or
	// the key in use may belong to an account that cannot see the sandbox.
	ErrUnjudged = errors.New("createos: not found, but absence is not proven")

	// ErrTimeout is matched by the error of an operation that reached its own
	// bound (Config.Timeout, or a cleanup bound), as opposed to the end of the
	// caller's context. It also matches [context.DeadlineExceeded].
	ErrTimeout = fmt.Errorf("createos: operation timed out: %w", context.DeadlineExceeded)
)

// Classes of refused requests, matched through [RequestError].
var (
	// ErrInvalidRequest stands for 400, 405, 413 and 422.
	ErrInvalidRequest = errors.New("createos: request refused as invalid")
	// ErrUnauthorized stands for 401: the key is missing, wrong or revoked.
	ErrUnauthorized = errors.New("createos: key refused")
	// ErrNoCredit stands for 402. Repeating cannot help before a top-up.
	ErrNoCredit = errors.New("createos: account has no credit")
	// ErrForbidden stands for 403: plan quota or access list.
	ErrForbidden = errors.New("createos: forbidden by plan or access list")
	// ErrNotFound stands for 404. For a sandbox it is judged before it is
	// believed; see [ErrUnjudged].
	ErrNotFound = errors.New("createos: not found")
	// ErrConflict stands for 409: the state is not what the call needs. It may
	// clear by itself.
	ErrConflict = errors.New("createos: conflict with the current state")
	// ErrRateLimited stands for 429.
	ErrRateLimited = errors.New("createos: rate limited")
	// ErrUnavailable stands for 500, 502, 503 and 504: no capacity, or the
	// control plane is in trouble.
	ErrUnavailable = errors.New("createos: provider unavailable")
)

// ErrExecForeignLease is the form of [ErrForeignLease] that Exec returns. It
// matches ErrForeignLease.
var ErrExecForeignLease error = &fixedError{
	text: "CreateOS execution requires a lease from this environment.",
	is:   []error{ErrForeignLease},
}

// errExecShutdown has the text of ErrLeaseClosing, as hosts expect of Exec,
// and says why.
var errExecShutdown error = &fixedError{
	text: ErrLeaseClosing.Error(),
	is:   []error{ErrLeaseClosing, ErrShutdown},
}

// A fixedError is a fixed text that matches other errors as well.
type fixedError struct {
	text string
	is   []error
}

func (e *fixedError) Error() string   { return e.text }
func (e *fixedError) Unwrap() []error { return e.is }

// fixed is an error with the text of first, to the letter, that matches all of
// them.
func fixed(first error, others ...error) error {
	is := []error{first}
	for _, err := range others {
		if err != nil {
			is = append(is, err)
		}
	}
	return &fixedError{text: first.Error(), is: is}
}

// Operation is the coarse name of a request in the fixed error text.
type Operation string

// The operations that an error text may name.
const (
	OpFileTransfer     Operation = "file transfer"
	OpStdinClose       Operation = "stdin close"
	OpOutputConnection Operation = "output connection"
	OpProcessCreation  Operation = "process creation"
	OpProcessCleanup   Operation = "process cleanup"
	OpWorkspaceCommand Operation = "workspace command"
	OpLifecycle        Operation = "sandbox lifecycle" // everything else
)

// A RequestError is an answer of the provider that refuses a request. It
// never holds a text of the provider, a URL or a key. It matches one of
// the class errors, such as [ErrConflict] or [ErrNoCredit], if there is one for its
// status: for 408, 410, 501 and redirects there is none.
type RequestError struct {
	// Status is the HTTP status, 300 to 599.
	Status int
	// Operation is the coarse name that stands in the text.
	Operation Operation
	// Detail is the finer operation, such as "create sandbox".
	Detail string
	// RequestID is the provider's id of the request, for its support; may be
	// empty. Ids with other characters than letters, digits and ._:- are
	// dropped, because the header is the provider's to fill.
	RequestID string
	// RetryAfter is how long the provider asked to wait; 0 if it did not.
	RetryAfter time.Duration

	// envelope says that the body was a JSend envelope: a gateway's page is
	// no verdict about a sandbox.
	envelope bool
	// code is data.code of the envelope if it is one that we know.
	code string
	// oldest is oldest_available_seq of a 410, 0 if absent.
	oldest int64
}

func (e *RequestError) Error() string {
	return fmt.Sprintf("CreateOS request failed (HTTP %d) during %s.", e.Status, e.Operation)
}

// Is maps the status to its class error.
func (e *RequestError) Is(target error) bool {
	switch e.Status {
	case http.StatusBadRequest, http.StatusMethodNotAllowed, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		return target == ErrInvalidRequest
	case http.StatusUnauthorized:
		return target == ErrUnauthorized
	case http.StatusPaymentRequired:
		return target == ErrNoCredit
	case http.StatusForbidden:
		return target == ErrForbidden
	case http.StatusNotFound:
		return target == ErrNotFound
	case http.StatusConflict:
		return target == ErrConflict
	case http.StatusTooManyRequests:
		return target == ErrRateLimited
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return target == ErrUnavailable
	}
	return false
}

// A ConnectionError is a request that got no HTTP answer, or whose answer was
// cut. It matches [ErrConnection] and keeps only those causes that carry no
// host name and no path: context errors, [io.ErrUnexpectedEOF] for an answer
// that was cut, and [syscall.Errno] values.
type ConnectionError struct {
	Operation Operation
	Detail    string

	// sent is false only if it is known that no byte of the request left.
	sent  bool
	cause error
}

func (e *ConnectionError) Error() string { return ErrConnection.Error() }

// Unwrap gives ErrConnection and the cause, if it could be kept.
func (e *ConnectionError) Unwrap() []error {
	if e.cause == nil {
		return []error{ErrConnection}
	}
	return []error{ErrConnection, e.cause}
}

// scrub keeps of a transport error what callers may match and nothing that
// names a URL, a host or a certificate.
func scrub(err error) error {
	var causes []error
	for _, known := range []error{context.Canceled, context.DeadlineExceeded, io.ErrUnexpectedEOF} {
		if errors.Is(err, known) {
			causes = append(causes, known)
		}
	}
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		causes = append(causes, errno)
	}
	var timeout interface{ Timeout() bool }
	if len(causes) == 0 && errors.As(err, &timeout) && timeout.Timeout() {
		causes = append(causes, context.DeadlineExceeded)
	}
	return errors.Join(causes...)
}

// A ResponseError is an answer that could not be read as what the API
// promises. It matches [ErrInvalidResponse].
type ResponseError struct {
	Operation Operation
	Detail    string
	// Status is the HTTP status of the answer.
	Status int
	// RequestID is as in [RequestError].
	RequestID string
}

func (e *ResponseError) Error() string { return ErrInvalidResponse.Error() }

// Unwrap gives ErrInvalidResponse.
func (e *ResponseError) Unwrap() error { return ErrInvalidResponse }

// A SetupError is returned by Acquire when a sandbox was created, could not be
// made ready, and could not be proven destroyed. The sandbox is listed by
// [Driver.Unconfirmed] as destroy owed. Both causes can be matched.
type SetupError struct {
	// SandboxID is the sandbox that may still exist.
	SandboxID string
	// Setup is why the sandbox was to be given up.
	Setup error
	// Destroy is why its destroy is not proven.
	Destroy error
}

func (e *SetupError) Error() string {
	return fmt.Sprintf("CreateOS setup failed and cleanup is unconfirmed for sandbox %s.", e.SandboxID)
}

// Unwrap gives the setup failure first, then the destroy failure.
func (e *SetupError) Unwrap() []error { return []error{e.Setup, e.Destroy} }

// A CreateUnknownError is returned by Acquire when it could not be settled
// whether a create made a sandbox. The name is listed by
// [Driver.Unconfirmed] as create unknown.
type CreateUnknownError struct {
	// SandboxName is the name that the create asked for.
	SandboxName string
	// Cause is what the create came back with.
	Cause error
}

func (e *CreateUnknownError) Error() string {
	return fmt.Sprintf("CreateOS sandbox creation could not be confirmed; a sandbox named %s may exist.", e.SandboxName)
}

// Unwrap gives the cause.
func (e *CreateUnknownError) Unwrap() error { return e.Cause }

// ExpiredReason says why a lease cannot be continued.
type ExpiredReason string

// The reasons of an [ExpiredError].
const (
	// ExpiredMarkerInvalid: the marker in the metadata is not a UUID.
	ExpiredMarkerInvalid ExpiredReason = "marker invalid"
	// ExpiredMetadata: a field of the metadata is malformed.
	ExpiredMetadata ExpiredReason = "metadata malformed"
	// ExpiredConfigChanged: shape, image, region, egress or auto-pause of the
	// lease differ from the configuration. Found before any request.
	ExpiredConfigChanged ExpiredReason = "configuration changed"
	// ExpiredSandboxGone: the sandbox does not exist, or is on its way out.
	ExpiredSandboxGone ExpiredReason = "sandbox gone"
	// ExpiredSandboxFailed: the sandbox is failed and cannot run again.
	ExpiredSandboxFailed ExpiredReason = "sandbox failed"
	// ExpiredMarkerDiffers: the marker file on the disk is not the one that
	// Acquire wrote: it is not the same disk.
	ExpiredMarkerDiffers ExpiredReason = "marker differs"
	// ExpiredMarkerMissing: the marker file is missing, and the sandbox does
	// not show our lease key either.
	ExpiredMarkerMissing ExpiredReason = "marker missing"
	// ExpiredSuspect: the marker file is missing, but the sandbox still
	// carries our lease key. A user may have cleaned the workspace. Look, or
	// sync out, before you destroy.
	ExpiredSuspect ExpiredReason = "suspect: marker missing, lease key present"
)

// Remains says what is known of the sandbox of an expired lease.
type Remains string

// What may remain of the sandbox of an expired lease.
const (
	RemainsUnknown Remains = "unknown" // nothing was asked
	RemainsExists  Remains = "exists"  // it exists, and costs money
	RemainsGone    Remains = "gone"    // it is proven gone
)

// An ExpiredError is the verdict of Resume that a lease cannot be continued.
// It matches [ErrLeaseExpired]. Nothing was destroyed: what remains is the
// host's to look at and to [Driver.Destroy].
type ExpiredError struct {
	SandboxID string
	Reason    ExpiredReason
	Remains   Remains
	// Fields names the differing or malformed fields, if that is the reason.
	Fields []string
	// Cleanup is set if the sandbox was woken to find out and could not be
	// proven paused again; it is then listed as pause owed.
	Cleanup error
}

func (e *ExpiredError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "createos: lease of sandbox %s expired: %s", e.SandboxID, e.Reason)
	if len(e.Fields) > 0 {
		fmt.Fprintf(&b, " (%s)", strings.Join(e.Fields, ", "))
	}
	fmt.Fprintf(&b, "; sandbox: %s", e.Remains)
	if e.Cleanup != nil {
		fmt.Fprintf(&b, "; %v", e.Cleanup)
	}
	return b.String()
}

// Unwrap gives ErrLeaseExpired and, if there is one, the cleanup failure.
func (e *ExpiredError) Unwrap() []error {
	if e.Cleanup == nil {
		return []error{ErrLeaseExpired}
	}
	return []error{ErrLeaseExpired, e.Cleanup}
}

// A StateError says that a sandbox is in a state from which the operation
// cannot go on, or did not reach the wanted state within the bound.
type StateError struct {
	SandboxID string
	// Want is the state that was waited for.
	Want string
	// Last is the last state that was seen; "unrecognised" stands for a word
	// that this package does not know. Empty: none was seen.
	Last string
	// Cause is why the wait ended, nil if Last itself ended it.
	Cause error
}

func (e *StateError) Error() string {
	last := e.Last
	if last == "" {
		last = "unknown"
	}
	if e.Cause == nil {
		return fmt.Sprintf("createos: sandbox %s is %s, want %s", e.SandboxID, last, e.Want)
	}
	return fmt.Sprintf("createos: sandbox %s is %s, want %s: %v", e.SandboxID, last, e.Want, e.Cause)
}

// Unwrap gives the cause.
func (e *StateError) Unwrap() error { return e.Cause }

// A CleanupError says that something that was asked for is not proven: a
// destroy, a pause, or the end of a process. It is listed by
// [Driver.Unconfirmed], and [Driver.RetryCleanup] repeats it.
type CleanupError struct {
	Kind DebtKind
	// SandboxID is the sandbox; empty if only SandboxName is known.
	SandboxID   string
	SandboxName string
	Cause       error
}

func (e *CleanupError) Error() string {
	who := e.SandboxID
	if who == "" {
		who = "named " + e.SandboxName
	}
	return fmt.Sprintf("createos: %s for sandbox %s: %v", e.Kind, who, e.Cause)
}

// Unwrap gives the cause.
func (e *CleanupError) Unwrap() error { return e.Cause }

// A BusyError is returned by a Release that was to pause when calls on the
// lease did not end within the cleanup bound. The sandbox was not paused, and
// is listed as pause owed.
type BusyError struct {
	SandboxID string
	// Calls is how many calls were still running.
	Calls int
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("createos: sandbox %s not paused: %d calls did not end within the cleanup bound", e.SandboxID, e.Calls)
}

// An InputError is bad input to a call, found before anything was sent.
type InputError struct {
	// Field names the argument, such as "Command.Dir".
	Field string
	// Problem says what is wrong with it, without its value.
	Problem string
}

func (e *InputError) Error() string { return "createos: " + e.Field + ": " + e.Problem }

// A WorkspaceError is returned by Acquire when the workspace could not be
// made in a sandbox that runs.
type WorkspaceError struct {
	SandboxID string
	// ExitCode is the exit code of the command that makes the workspace, -1 if the
	// provider could not run it.
	ExitCode int
}

func (e *WorkspaceError) Error() string {
	return fmt.Sprintf("createos: prepare workspace in sandbox %s: exit code %d; the image must provide Bash at /bin/bash", e.SandboxID, e.ExitCode)
}
