package createostest

import (
	"context"
	"time"
)

// Limits and defaults of the provider that Options can change.
const (
	defaultJournalBytes = 1 << 20
	defaultMaxFileBytes = 500 << 20
	defaultHeartbeat    = 5 * time.Second
	defaultRegion       = "eu"
	maxFrameBytes       = 32 << 10
	maxInputBytes       = 256 << 10
	maxJSONBytes        = 1 << 20
)

// ListShape is the form in which GET /v1/sandboxes answers.
type ListShape int

// The three forms that the provider has used; clients must accept them all.
const (
	ListPaginated ListShape = iota // {"data":[…],"pagination":{…}}
	ListNamed                      // {"sandboxes":[…]}, the whole list at once
	ListBare                       // […], the whole list at once
)

// Options says how an emulated provider behaves. The zero value is the
// provider as it is best known: real processes on this computer, a loopback
// port, no rate limit, every state change done by the time of the first look.
//
// Where public sources disagree about the provider, the zero value is the
// better proven behaviour and a field chooses the other.
//
// [Start] and [NewServer] refuse options that cannot be meant: numbers,
// durations and sizes below 0, values outside of what their field allows, and
// fields that need or exclude each other.
type Options struct {
	// Commands answers commands in place of real processes. It runs on its own
	// goroutine for each command and returns the exit code. It must return
	// once ctx is done: that is how a signal, a terminate and Close reach it.
	// Setting it selects the runner in memory, whatever InMemory says. SyncIn
	// and SyncOut of the driver do not work then, unless the function does what
	// their scripts ask of tar, find and other programs.
	Commands func(ctx context.Context, c *Command) int

	// InMemory makes a server without sockets, files or processes: connections
	// are [net.Pipe], the origin is https://emulator-N.invalid, and commands
	// are answered by Commands or, when that is nil, by [Builtin]. Such a
	// server works within a testing/synctest bubble if it was started there.
	// SyncIn and SyncOut of the driver need RealCommands as well.
	InMemory bool

	// RealCommands, which needs InMemory, runs real processes and keeps real
	// files all the same: only the connections are in memory then. In a bubble
	// the clock stands still while a process works, so commands cost no virtual
	// time, and one that waits for something outside holds the bubble up.
	// Commands, where set, still wins.
	RealCommands bool

	// Addr is the TCP address to listen on; "" is 127.0.0.1:0. Not used with
	// InMemory.
	Addr string

	// Dir is where the runner of real processes keeps the files of sandboxes. A
	// directory that is missing is made, with its parents; Close removes from it
	// what this server has put there, and leaves Dir itself. "" is a fresh
	// temporary directory, which Close removes. Not allowed where files are in
	// memory.
	Dir string

	// APIKey and UserID are the first account; "" means generated ones. Two
	// servers with the same key play two regions of one provider.
	APIKey, UserID string

	// Region is this server's region; "" is "eu". A create that names another
	// is refused.
	Region string

	// Shapes and Rootfs replace the catalogue; nil is the provider's of 2026,
	// and an empty list is refused. The first entry of Rootfs is the default.
	Shapes []Shape
	Rootfs []Rootfs

	// AllowedShapes, when not nil, are the ids of the shapes that the plan
	// allows, all of the catalogue; another of it is answered with 403.
	AllowedShapes []string
	// MaxDiskMiB, when positive, is the plan's cap on disk_mib: 403 beyond. 0
	// is none.
	MaxDiskMiB int
	// MaxBoxes, when positive, is how many sandboxes of one account may hold a
	// machine; 0 is any number. More creates are refused with 403, or wait if QueueBoxes is set:
	// the row shows as creating and the request is held until there is room.
	MaxBoxes   int
	QueueBoxes bool

	// IDPrefix begins sandbox ids; "" is "sb-". It is made of letters, digits,
	// _ and -.
	IDPrefix string
	// CreateStatus is the HTTP status of a create, from 200 to 299; 0 is 201.
	CreateStatus int
	// OmitCreateState leaves the field status out of the answer to a create.
	OmitCreateState bool
	// CreatingPolls, when positive, makes create answer at once with the state
	// creating; that many GETs of the sandbox still show it.
	CreatingPolls int
	// AllowSameName lets two live sandboxes of an account share a name.
	AllowSameName bool
	// RejectUnknownFields answers 400 to a request body with an unknown field.
	RejectUnknownFields bool

	// PausePausedOK answers 200 to a pause of a paused sandbox, not 409;
	// ResumeRunningOK the same to a resume of a running one.
	PausePausedOK, ResumeRunningOK bool
	// DeleteInTransition accepts a delete while pausing, resuming or forking,
	// in place of 409.
	DeleteInTransition bool
	// ForgetDestroyed answers 404 for a destroyed sandbox and drops it from
	// lists; otherwise the row stays.
	ForgetDestroyed bool

	// ListShape chooses the form of the list of sandboxes.
	ListShape ListShape
	// ListLag hides a new sandbox from lists, not from GET, for that long.
	ListLag time.Duration
	// AnyStatusFilter lets the list be filtered by every state, not only by
	// running, creating, destroyed and failed.
	AnyStatusFilter bool

	// How long a change of state takes. With 0 it is over before the answer
	// that announces it is sent, so the first look sees the new state. A
	// create is held open for BootDelay.
	BootDelay, PauseDelay, ResumeDelay, DestroyDelay time.Duration

	// RateLimit, when positive, is how many requests one client address may
	// make in any 60 seconds; the provider has 300. Beyond: 429.
	RateLimit int
	// OmitRetryAfter leaves Retry-After out of those answers.
	OmitRetryAfter bool

	// JournalBytes is how much output a process keeps; 0 is 1 MiB.
	JournalBytes int
	// EvictUnderReader drops the oldest output also while a reader is
	// connected; otherwise the process blocks once the slowest reader is a
	// whole journal behind.
	EvictUnderReader bool
	// OffsetErrorInStream reports an expired offset of connect as an event in
	// a stream that answered 200, in place of 410.
	OffsetErrorInStream bool
	// ExitAtTree holds the exit event of connect until the whole tree of the
	// process is gone; otherwise it follows the exit of the leader.
	ExitAtTree bool
	// Heartbeat is the period of heartbeats on quiet streams; 0 is 5 s.
	Heartbeat time.Duration
	// MaxFileBytes is the size cap of a file; 0 is 500 MiB.
	MaxFileBytes int64
	// DropExecStdin and DropExecEnv ignore those fields of an exec request
	// without a word, as the provider once did. Undeclared environment keys
	// are otherwise answered with 400.
	DropExecStdin, DropExecEnv bool
	// ActivityOnOutput lets output of processes, too, put off an auto-pause;
	// otherwise only an accepted exec, file or process request does.
	ActivityOnOutput bool
}

// withDefaults fills what is zero.
func (o Options) withDefaults() Options {
	if o.Region == "" {
		o.Region = defaultRegion
	}
	if o.UserID == "" {
		o.UserID = "usr_" + lowerText(10)
	}
	if o.APIKey == "" {
		o.APIKey = "skp_" + lowerText(24)
	}
	if o.Shapes == nil {
		o.Shapes = defaultShapes()
	}
	if o.Rootfs == nil {
		o.Rootfs = defaultRootfs()
	}
	if o.IDPrefix == "" {
		o.IDPrefix = "sb-"
	}
	if o.CreateStatus == 0 {
		o.CreateStatus = 201
	}
	if o.JournalBytes == 0 {
		o.JournalBytes = defaultJournalBytes
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = defaultHeartbeat
	}
	if o.MaxFileBytes == 0 {
		o.MaxFileBytes = defaultMaxFileBytes
	}
	return o
}
