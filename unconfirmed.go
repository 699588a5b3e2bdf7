package createos

import "time"

// DebtKind says what an entry of [Driver.Unconfirmed] stands for.
type DebtKind string

// The kinds of entries.
const (
	// DestroyOwed: the sandbox was to be destroyed and is not proven gone.
	// The lease is poisoned.
	DestroyOwed DebtKind = "destroy owed"
	// Stuck: the provider accepted the destroy, and the sandbox did not go away
	// within the bound. Only a driver with DriverConfig.AwaitDestroyed finds
	// out. The lease is poisoned.
	Stuck DebtKind = "stuck"
	// CreateUnknown: a create may have made a sandbox of this name.
	CreateUnknown DebtKind = "create unknown"
	// ProcessUnproven: a process may still run in the sandbox. The lease is
	// poisoned, and only the host's own Destroy ends the entry.
	ProcessUnproven DebtKind = "process unproven"
	// PauseOwed: the sandbox was to be paused and is not proven paused.
	PauseOwed DebtKind = "pause owed"
	// Acquiring: an Acquire is running. It is no debt yet, but its sandbox
	// may exist already.
	Acquiring DebtKind = "acquiring"
)

// An Unconfirmed entry names something that may run or cost money, of which
// the driver cannot say that it is over. It is plain data without secrets:
// store it as JSON and hand it to a new driver in [DriverConfig.Unconfirmed].
type Unconfirmed struct {
	Kind          DebtKind `json:"kind"`
	CompanyID     string   `json:"companyId"`
	EnvironmentID string   `json:"environmentId"`
	// APIURL is the normalised origin.
	APIURL string `json:"apiUrl"`
	// SandboxID is empty as long as only the name is known.
	SandboxID   string `json:"sandboxId,omitempty"`
	SandboxName string `json:"sandboxName,omitempty"`
	// LeaseKey is the ownership mark by which the sandbox is recognised.
	LeaseKey string `json:"leaseKey,omitempty"`
	// AccountID is the account that the sandbox belongs to, if known.
	AccountID string `json:"accountId,omitempty"`
	// Processes names the processes of a ProcessUnproven entry, as far as
	// they are known: process ids of the provider, exec ids, by which a process
	// is found in a list, or both.
	Processes []string `json:"processes,omitempty"`
	// Cause is the text of the latest failure; it holds no text of the
	// provider.
	Cause string `json:"cause"`
	// Note says what happened since that does not end the entry, such as a
	// later termination with proof.
	Note string `json:"note,omitempty"`
	// Since is when the entry was made.
	Since time.Time `json:"since"`
	// EndedAt is, for CreateUnknown, when the create request ended: the settle
	// time runs from here. Zero in an entry that is handed to a new driver
	// means that it is not known, and counts as the moment of the handing.
	EndedAt time.Time `json:"endedAt,omitzero"`
	// Attempts counts how often RetryCleanup tried.
	Attempts int `json:"attempts,omitempty"`
}

// Age is how long ago the entry was made.
func (u Unconfirmed) Age() time.Duration { return time.Since(u.Since) }
