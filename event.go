package createos

import "time"

// EventKind says what an [Event] is about.
type EventKind string

// EventRequest is one attempt of a request: it was sent and is over, or, for a
// stream and a download, its headers are there. A request that ended while it
// waited for the budget was not sent, and makes no event.
const EventRequest EventKind = "request"

// Events about the entries of [Driver.Unconfirmed]: one was made or got a new
// cause, or one ended. Event.Debt is the entry.
const (
	EventOwed    EventKind = "owed"
	EventSettled EventKind = "settled"
)

// An Event is for hosts that want metrics. It holds no secret, no path and no
// text of the provider.
//
// Events are delivered by a call of the hook on a goroutine that works for the
// driver, with no lock held, and possibly from several goroutines at once. Those
// about entries come one at a time and in the order in which the entries changed,
// so that a list that is kept by them is right; they may come from another call
// than the one that changed the entry, and shortly after that has returned. The
// hook must not block, because the work waits for it, and must not call the
// driver.
type Event struct {
	Kind EventKind
	// Operation and Detail name the request, coarsely and finely, as in
	// [RequestError].
	Operation Operation
	Detail    string
	// SandboxID is the sandbox that the request named; empty for a create, a
	// list, and an account.
	SandboxID string
	// Status is the HTTP status; 0 if there was no answer.
	Status int
	// Attempt counts the attempts of one request from 1.
	Attempt int
	// Queued is how long the attempt waited for the budget, Took how long
	// the attempt itself lasted.
	Queued, Took time.Duration
	// Err is why the attempt failed; nil if it was answered as the API
	// promises. An attempt with an Err may be followed by another one.
	Err error
	// Time is when the attempt was over, or the entry changed.
	Time time.Time
	// Debt is a copy of the entry that an EventOwed or EventSettled is about;
	// of the other fields those have Kind, SandboxID and Time.
	Debt *Unconfirmed
}
