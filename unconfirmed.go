package createos

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

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

func (u Unconfirmed) scope() scope {
	id := u.SandboxID
	if id == "" {
		id = u.SandboxName
	}
	return scope{tenant{u.CompanyID, u.EnvironmentID, u.APIURL}, id}
}

// A debtKey makes one entry of each kind in a scope.
type debtKey struct {
	scope scope
	kind  DebtKind
}

// A debt is an entry with what only this driver knows of it. Driver.mu guards
// it.
type debt struct {
	Unconfirmed
	// missed is when a complete listing after the settle time first did not
	// show the sandbox of a CreateUnknown entry.
	missed time.Time
}

// takeOver makes an entry of an earlier driver one of this driver.
func (d *Driver) takeOver(u Unconfirmed) error {
	origin, err := normalizeOrigin(u.APIURL)
	if err != nil {
		return errors.New("apiUrl is no origin")
	}
	u.APIURL = origin
	if err := (Environment{CompanyID: u.CompanyID, EnvironmentID: u.EnvironmentID}).check(); err != nil {
		return err
	}
	if u.Kind == Acquiring {
		u.Kind, u.EndedAt = CreateUnknown, time.Now()
		if u.SandboxID != "" {
			u.Kind = DestroyOwed
		}
	}
	switch u.Kind {
	case CreateUnknown:
		if u.SandboxName == "" || u.LeaseKey == "" {
			return errors.New("a create unknown needs sandboxName and leaseKey")
		}
		u.SandboxID = ""
	case DestroyOwed, Stuck, ProcessUnproven, PauseOwed:
		if !validID(u.SandboxID) {
			return errors.New("sandboxId is no sandbox id")
		}
	default:
		return errors.New("kind is not known")
	}
	if u.Since.IsZero() {
		u.Since = time.Now()
	}
	if u.EndedAt.IsZero() {
		u.EndedAt = time.Now() // not known, so as late as can be
	}
	u.Processes = slices.Clone(u.Processes)
	key := debtKey{u.scope(), u.Kind}
	if held := d.unconfirmed[key]; held != nil {
		held.addProcesses(u.Processes)
		return nil
	}
	d.unconfirmed[key] = &debt{Unconfirmed: u}
	if stuck := (debtKey{u.scope(), Stuck}); d.unconfirmed[stuck] != nil {
		delete(d.unconfirmed, debtKey{u.scope(), DestroyOwed})
	}
	return nil
}

// owe records a debt, or renews the cause of one that is there already. A sandbox
// that is stuck has one entry, whatever fails with it next.
func (d *Driver) owe(u Unconfirmed) {
	d.mu.Lock()
	stuck := debtKey{u.scope(), Stuck}
	if u.Kind == DestroyOwed && d.unconfirmed[stuck] != nil {
		u.Kind = Stuck
	}
	key := debtKey{u.scope(), u.Kind}
	for c := range d.active[key.scope] {
		if c.gone {
			d.mu.Unlock()
			return
		}
	}
	held := d.unconfirmed[key]
	if held == nil {
		if key == stuck {
			if before := d.endLocked(debtKey{u.scope(), DestroyOwed}); before != nil {
				u.Since, u.Attempts = before.Since, before.Attempts
			}
		}
		if u.Since.IsZero() {
			u.Since = time.Now()
		}
		held = &debt{Unconfirmed: u}
		d.unconfirmed[key] = held
	} else {
		held.Cause = u.Cause
		held.addProcesses(u.Processes)
	}
	d.changedLocked(EventOwed, held)
	d.mu.Unlock()
	d.tell()
}

func (held *debt) addProcesses(names []string) {
	for _, p := range names {
		if !slices.Contains(held.Processes, p) {
			held.Processes = append(held.Processes, p)
		}
	}
}

// copy is an entry that shares nothing with the debt.
func (held *debt) copy() Unconfirmed {
	u := held.Unconfirmed
	u.Processes = slices.Clone(u.Processes)
	return u
}

// changedLocked notes that an entry was made, has a new cause, or ended. Whoever
// calls it calls tell once the lock is released.
func (d *Driver) changedLocked(kind EventKind, held *debt) {
	u := held.copy()
	d.changes = append(d.changes, Event{Kind: kind, Time: time.Now(), SandboxID: u.SandboxID, Debt: &u})
}

// tell delivers the changes of entries in the order in which they happened: two
// goroutines that each told of their own could tell the end of an entry before
// its beginning, and who keeps a list by the events would keep it for ever. One
// that finds another at it leaves the work to that one.
func (d *Driver) tell() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.telling {
		return
	}
	d.telling = true
	defer func() { d.telling = false }()
	for len(d.changes) > 0 {
		e := d.changes[0]
		d.changes = d.changes[1:]
		d.tellOne(e)
	}
	d.changes = nil
}

// tellOne is called with the lock held, and releases it meanwhile.
func (d *Driver) tellOne(e Event) {
	d.mu.Unlock()
	defer d.mu.Lock() // also if the hook panics
	who := []any{"kind", string(e.Debt.Kind), "sandbox", e.Debt.SandboxID, "name", e.Debt.SandboxName}
	if e.Kind == EventOwed {
		d.log.Warn("createos: unconfirmed", append(who, "cause", e.Debt.Cause)...)
	} else {
		d.log.Info("createos: settled", who...)
	}
	d.emit(e)
}

// settle ends the entries of the given kinds in a scope.
func (d *Driver) settle(s scope, kinds ...DebtKind) {
	d.mu.Lock()
	for _, kind := range kinds {
		d.endLocked(debtKey{s, kind})
	}
	d.mu.Unlock()
	d.tell()
}

// endLocked ends an entry, and returns it; nil if there is none.
func (d *Driver) endLocked(key debtKey) *debt {
	held := d.unconfirmed[key]
	if held != nil {
		delete(d.unconfirmed, key)
		d.changedLocked(EventSettled, held)
	}
	return held
}

// gone ends everything that is known of a sandbox that is proven destroyed. A
// call that did not end in time may still be at work on it.
func (d *Driver) gone(s scope) {
	d.mu.Lock()
	for c := range d.active[s] {
		c.gone = true
	}
	delete(d.scratch, s)
	d.mu.Unlock()
	d.settle(s, DestroyOwed, Stuck, ProcessUnproven, PauseOwed)
	d.forget(s)
}

// Unconfirmed lists what may run or cost money without being held by the host
// as a lease: every entry, oldest first; the acquires that are running now;
// and the releases that are running now, as what they would leave owed if
// they never ended. An empty list means that nothing is owed. The entries
// are copies. It sends nothing and may be called at any time, also after
// Shutdown.
func (d *Driver) Unconfirmed() []Unconfirmed {
	d.mu.Lock()
	list := d.debtsLocked()
	for a := range d.acquiring {
		if a.begun {
			list = append(list, a.entry)
		}
	}
	for s, u := range d.closing {
		if d.unconfirmed[debtKey{s, u.Kind}] == nil {
			list = append(list, u)
		}
	}
	d.mu.Unlock()
	sortEntries(list)
	return list
}

// debtsLocked copies the entries that RetryCleanup works on.
func (d *Driver) debtsLocked() []Unconfirmed {
	list := make([]Unconfirmed, 0, len(d.unconfirmed)+len(d.acquiring)+len(d.closing))
	for _, held := range d.unconfirmed {
		list = append(list, held.copy())
	}
	return list
}

func sortEntries(list []Unconfirmed) {
	slices.SortFunc(list, func(a, b Unconfirmed) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.SandboxID, b.SandboxID),
			cmp.Compare(a.SandboxName, b.SandboxName), cmp.Compare(a.Kind, b.Kind))
	})
}

// An UnconfirmedError lists what is owed after a RetryCleanup or a Shutdown.
type UnconfirmedError struct {
	// Entries is what is left. After a RetryCleanup that are the entries that it
	// works on; after a Shutdown also the acquires and releases that still run,
	// and the sandboxes of other calls that have not ended.
	Entries []Unconfirmed
	// Cause is the end of the caller's context if that is why the call
	// returned, else nil.
	Cause error
}

func (e *UnconfirmedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "createos: %d unconfirmed", len(e.Entries))
	for i, u := range e.Entries {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		who := u.SandboxID
		if who == "" {
			who = u.SandboxName
		}
		fmt.Fprintf(&b, "%s%s (%s)", sep, who, u.Kind)
	}
	if e.Cause != nil {
		fmt.Fprintf(&b, ": %v", e.Cause)
	}
	return b.String()
}

// Unwrap gives the cause.
func (e *UnconfirmedError) Unwrap() error { return e.Cause }
