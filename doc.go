// Package createos leases CreateOS cloud sandboxes: it acquires one, runs
// commands in it, pauses or destroys it, resumes it later, and can say at any
// moment that nothing is left running, or costing money, that it does not know
// about.
//
// # The life of a lease
//
//	           Acquire                    Exec
//	(nothing) ────────> acquiring ──────> leased <───────┐
//	                        │               │            │ Resume
//	                        │     Release   ├──────> paused
//	                        │     Destroy   │            │
//	                        v               v            v
//	                    destroying <── closing <─────────┘
//	                     │      │
//	        with proof   │      │  without proof, or
//	                     v      v  of unknown outcome
//	                   gone    Unconfirmed ── RetryCleanup, Destroy ──> gone
//
// A [Lease] is plain data. It survives JSON, a restart and another process, and
// it says whose it is: a call with another company, environment or API origin
// is refused before anything is sent. The host keeps leases; the driver keeps
// what is in between.
//
// # Quick start
//
//	d, err := createos.NewDriver(createos.DriverConfig{})
//	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: createos.Config{
//		APIURL: "https://api.sb.createos.sh", Shape: "s-1vcpu-1gb",
//	}}
//	lease, err := d.Acquire(ctx, env, createos.AcquireOptions{})
//	res, err := d.Exec(ctx, env, lease, createos.Command{Name: "go", Args: []string{"version"}, Stdout: os.Stdout})
//	err = d.Destroy(ctx, env, lease)
//	err = d.Shutdown(ctx)
//
// The key comes from the configuration or, for the provider's own origins, from
// the variable CREATEOS_API_KEY. Package createostest has an emulator that all
// of this runs on without an account.
//
// # What is promised
//
// No silent orphan. From the moment a create request may have reached the
// provider until its sandbox is proven gone or handed to the host, the driver
// lists it: it is recorded before the first byte is written, and no error, end
// of a context or panic forgets it. The promise holds within the life of a
// process and its Driver. Across a crash a sandbox is recognised by the marks
// that its create carried: a random name, and the names of two environment
// variables, one of the lease and one of the environment. A host that must
// find its sandboxes again after a crash writes them to a journal in
// [AcquireOptions.BeforeCreate]; [Intent.Unconfirmed] hands them to the next
// driver. What was not written down is found by [Driver.Reconcile], which lists
// the account and recognises the environment's sandboxes by their marks.
//
// Unknown is never success and never absence. A command without an exit has no
// exit code; a create without a reply is looked for; a 404 is believed only if
// the API itself said it, at the origin of the lease, to a key of the account
// that the sandbox belongs to, and twice.
//
// Poison is sticky. A lease on which a process may still run, or whose destroy
// is owed, runs nothing more and no Release pauses it. Only a proven [Driver.Destroy]
// cures it.
//
// What is not promised: that "destroying", the provider's acceptance of a
// destroy, is followed by its completion; that a file or a process survives in
// a sandbox which its own guest, another process or the provider changes; that
// a killed host left nothing behind without a journal.
//
// # Cancellation
//
// The end of a context ends the caller's wait, not the driver's duty. Cleanup
// runs detached from it, under a bound of its own
// ([DriverConfig.CleanupTimeout]), and the call returns after it. A request
// that changes something and was sent is not cut: its reply is awaited for
// that long, and acted on. A request that still waits for the budget leaves
// without being sent. [Driver.Release] and [Driver.Destroy] are cleanup
// themselves: they return when their context ends, the work goes on, and
// [Driver.Shutdown] waits for it.
//
// # Files
//
// [Driver.SyncIn] and [Driver.SyncOut] move files and directories between this
// machine and the workspace of a lease, whole or not at all: what is new is made
// ready in a private place, its length and digest compared, and renamed. No link is
// followed on either side, and what comes out of a sandbox is not trusted. With
// SyncMapping.Delta only what differs moves.
//
// # Requests
//
// Each request waits for its turn at a [Budget]: at most 280 in any minute by
// default, of which 30 serve cleanup alone; the provider allows 300 a minute
// and address. An idle driver sends at once. Destroys and terminations go
// first, then searches. A 429 holds everybody for its Retry-After, at most a
// minute.
//
// GET, PUT and DELETE are repeated on connection failure, 408, 429, 500, 502,
// 503 and 504: four attempts at most, with jittered back-off from 250 ms to
// 4 s, or for what Retry-After asks. POST is repeated on 429 only. A create
// and a command are never repeated: what became of one is found out by
// looking. A pause or resume of unclear outcome is sent again only after the
// state shows that it came to nothing.
//
// States are polled after 250 ms, growing to 2 s, or after X-Poll-After; the
// first look comes at once.
//
// # Errors
//
// All errors can be matched with errors.Is and errors.As: [RequestError] for
// an answer that refuses, with classes such as [ErrConflict] and [ErrNoCredit];
// [ConnectionError] for none; [ResponseError] for one that cannot be read;
// [SetupError] and [CreateUnknownError] where something may be left; and so on.
// None of them, and no log record, holds a text of the provider, a URL, a
// key, a file content or the input of a command. Texts that begin with
// "CreateOS" are fixed, for hosts that match on them.
//
// # Concurrency
//
// All methods of [Driver] and [Client] may be called concurrently. Several
// commands may run on one lease. While a lease is being released nothing else
// starts on it, and what runs on it is cancelled and waited for. Others,
// another process or the provider's auto-pause, may move the state of a
// sandbox at any time; the driver looks again then.
//
// # Testing
//
// Package createostest is an HTTP server that behaves like the provider, with
// faults to inject, a log of requests and a report of what was never
// destroyed. Commands run in real processes of the machine, or, in memory,
// in a Go function, which also works in a testing/synctest bubble.
package createos
