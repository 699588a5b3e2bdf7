package createos

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
)

// termGrace is how long a process tree that is asked to end has before it is
// killed.
const termGrace = 2 * time.Second

var (
	errTreeLives  = errors.New("createos: processes of the tree still run")
	errTreeUnseen = errors.New("createos: the record of the process is gone, and processes of its tree still ran when it was last seen")
	errUnknown    = errors.New("createos: the provider does not know the process")
	errUnnamed    = errors.New("createos: the entry names no process that could be ended")
	errNotListed  = errors.New("createos: the process is not in the list of processes")
)

// An exit is how a command ended. has is false if only a signal was shown.
type exit struct {
	code   int
	has    bool
	signal string
}

// String says it of a shell, in the middle of a sentence.
func (e exit) String() string {
	if e.signal != "" {
		return "was ended by " + e.signal
	}
	return fmt.Sprintf("ended with exit code %d", e.code)
}

// exitOf returns the exit that a process shows; nil if it shows none.
func exitOf(p Process) *exit {
	switch {
	case !p.LeaderExited && !p.TreeExited:
	case p.ExitCode != nil:
		return &exit{*p.ExitCode, true, signalName(p.Signal)}
	case p.Signal != "":
		return &exit{signal: signalName(p.Signal)}
	}
	return nil
}

// signalForm is what may be shown of the provider's name of a signal.
var signalForm = regexp.MustCompile(`\A(SIG)?[A-Z][A-Z0-9+-]{0,15}\z`)

func signalName(word string) string {
	if word == "" || signalForm.MatchString(word) {
		return word
	}
	return "unrecognised"
}

// endTree ends a process tree and returns nil only on proof: the provider says
// that the tree has exited, or neither knows the process nor lists it though it
// knows the sandbox, or the sandbox is gone. id is the exec id of the process, if
// that is known: then a process id that was garbled on its way does not hide the
// process. ctx is a cleanup context: its end is the bound. wake brings a paused
// sandbox back, where processes cannot be ended; without it a conflict is an
// error.
//
// lives says that the tree was seen alive before: then a process that is not
// known any more is no proof.
func (d *Driver) endTree(ctx context.Context, t target, pid, id string, lives bool, wake func(context.Context) error) error {
	var p poll
	for {
		got, err := t.client.terminate(ctx, t.scope.id, pid, termGrace)
		if isNotFound(err) {
			if got, err = d.secondLookAt(ctx, t, pid, err); errors.Is(err, ErrLeaseGone) {
				return nil
			}
		}
		switch {
		case err == nil && got.TreeExited:
			return nil
		case err == nil:
			lives, err = true, errTreeLives
		case errors.Is(err, errUnknown):
			listed, lerr := d.listedAs(ctx, t, pid, id, wake)
			switch {
			case errors.Is(lerr, ErrLeaseGone):
				return nil
			case lerr != nil:
				return lerr
			case listed == nil && lives:
				return errTreeUnseen
			case listed == nil || listed.TreeExited:
				return nil
			}
			pid, lives, err = listed.ID, true, errTreeLives
		case isNotFound(err): // by who cannot know
		case isConflict(err):
			if wake == nil {
				return err
			}
			if werr := wake(ctx); errors.Is(werr, ErrLeaseGone) {
				return nil
			} else if werr != nil {
				err = fmt.Errorf("%w: %w", err, werr)
				if !passing(werr) {
					return err
				}
			}
		case !passing(err):
			return err
		}
		if werr := p.wait(ctx); werr != nil {
			return fmt.Errorf("%w: %w", werr, err)
		}
	}
}

// secondLookAt judges a 404 about a process, because routers were seen to lose
// a sandbox for a moment: it is read once more. The error is errUnknown if the
// provider does not know the process in a sandbox that it does know, and matches
// ErrLeaseGone if the sandbox is gone.
func (d *Driver) secondLookAt(ctx context.Context, t target, pid string, cause error) (Process, error) {
	gone, err := d.sandboxGone(ctx, t)
	switch {
	case gone:
		return Process{}, &goneError{cause}
	case err != nil, !saidByAPI(cause):
		return Process{}, cause
	}
	if err := sleep(ctx, secondLook); err != nil {
		return Process{}, cause
	}
	p, err := t.client.process(ctx, t.scope.id, pid)
	if isNotFound(err) && saidByAPI(err) {
		return Process{}, errUnknown
	}
	return p, err
}

// listedAs finds a process in the list, nil if it is not there: by its exec id
// too, if that is known. Of several, one that lives goes first.
func (d *Driver) listedAs(ctx context.Context, t target, pid, id string, wake func(context.Context) error) (found *Process, err error) {
	list, err := d.listProcesses(ctx, t, wake)
	if err != nil {
		return nil, err
	}
	for i, p := range list {
		got, ours := ourExecID(p)
		if p.ID == pid || id != "" && ours && got == id {
			if found == nil || !p.TreeExited {
				found = &list[i]
			}
		}
	}
	return found, nil
}

// sandboxGone looks whether the sandbox is proven gone; err is why not, if that
// is not just that it exists.
func (d *Driver) sandboxGone(ctx context.Context, t target) (gone bool, err error) {
	box, err := d.read(ctx, t)
	if err != nil {
		err = d.absent(ctx, t, err)
		return err == nil, err
	}
	return box.Status == stateDestroyed, nil
}

// missing turns a 404 about a process into what it means: the sandbox may be
// gone, or only the process. Other errors stay as they are.
func (d *Driver) missing(ctx context.Context, l *lessee, err error) error {
	if !isNotFound(err) {
		return err
	}
	gone, gerr := d.sandboxGone(ctx, l.target())
	switch {
	case gone:
		return &goneError{err}
	case gerr != nil:
		return fmt.Errorf("%w: %w", err, gerr)
	}
	return err
}

// rouse brings a paused sandbox back to running in the middle of an Exec, which
// has no bound of its own as long as the command has not begun. One that turns
// out to be destroyed matches ErrLeaseGone.
func (d *Driver) rouse(ctx context.Context, l *lessee) (woke bool, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, l.set.timeout, ErrTimeout)
	defer cancel()
	woke, err = d.wake(ctx, l)
	var state *StateError
	if errors.As(err, &state) && state.Last == stateDestroyed {
		err = &goneError{err}
	}
	return woke, err
}

// lookGaps are the pauses between the looks for a process whose creation has
// an unknown outcome: it may appear a little later.
var lookGaps = []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second}

// endByExecID looks for the process of an exec id and ends its tree. found is
// false if several complete lists did not show it.
func (d *Driver) endByExecID(ctx context.Context, t target, id string, wake func(context.Context) error) (found bool, err error) {
	for _, gap := range lookGaps {
		if err := sleep(ctx, gap); err != nil {
			return false, err
		}
		list, err := d.listProcesses(ctx, t, wake)
		if err != nil {
			return false, err
		}
		for _, p := range list {
			if got, ours := ourExecID(p); ours && got == id {
				found = true
				if err := d.endTree(ctx, t, p.ID, id, !p.TreeExited, wake); err != nil {
					return true, err
				}
			}
		}
		if found {
			return true, nil
		}
	}
	return false, nil
}

// listProcesses reads the process list of a sandbox, and keeps trying to the end
// of ctx, which is a cleanup context.
func (d *Driver) listProcesses(ctx context.Context, t target, wake func(context.Context) error) ([]Process, error) {
	var p poll
	for {
		list, err := t.client.processes(searchContext(ctx), t.scope.id)
		switch {
		case err == nil:
			return list, nil
		case isNotFound(err):
			if gone, gerr := d.sandboxGone(ctx, t); gone {
				return nil, &goneError{err}
			} else if gerr != nil {
				err = fmt.Errorf("%w: %w", err, gerr)
			}
			return nil, err
		case isConflict(err) && wake != nil:
			if werr := wake(ctx); werr != nil {
				return nil, werr
			}
		case !passing(err):
			return nil, err
		}
		if werr := p.wait(ctx); werr != nil {
			return nil, fmt.Errorf("%w: %w", werr, err)
		}
	}
}

// endStrays ends what an Exec of a host that died may have left running on a
// lease. The process of a command that exited by itself is no stray: what it
// left behind was left on purpose. Those of calls that run on this driver are
// spared. If it fails for anything but the list, the lease is poisoned.
func (d *Driver) endStrays(ctx context.Context, l *lessee) error {
	t := l.target()
	mine := d.execIDs(l.scope) // before the list: what ends in between is no stray
	list, err := t.client.processes(ctx, t.scope.id)
	if err != nil {
		return d.missing(ctx, l, err)
	}
	strays := strays(list, mine, d.execIDs(l.scope))
	if len(strays) == 0 {
		return nil
	}
	clean, cancel := cleanupContext(ctx, d.cfg.CleanupTimeout)
	defer cancel()
	wake := func(ctx context.Context) error {
		_, err := d.rouse(ctx, l)
		return err
	}
	for i, pid := range strays {
		if err := d.endTree(clean, t, pid, "", true, wake); err != nil {
			debt := t.debt(ProcessUnproven, err)
			debt.Processes = strays[i:]
			d.owe(debt)
			return fixed(ErrTerminationUnproven, err)
		}
	}
	return nil
}

// execIDs are those of the calls that run here on a scope.
func (d *Driver) execIDs(s scope) map[string]bool {
	ids := make(map[string]bool)
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.active[s] {
		ids[c.execID] = true
	}
	return ids
}

// strays picks the processes of a list that are to be ended; those of calls
// that ran here before the list was read, or run now, are spared.
func strays(list []Process, before, now map[string]bool) (pids []string) {
	for _, p := range list {
		id, ours := ourExecID(p)
		if !ours || p.TreeExited || before[id] || now[id] {
			continue
		}
		if end := exitOf(p); end == nil || end.signal != "" || p.State == "terminating" {
			pids = append(pids, p.ID)
		}
	}
	return pids
}

// execIDPrefix tells an exec id in Unconfirmed.Processes from a process id,
// which cannot hold a colon. The process id follows, after another colon, if
// both are known.
const execIDPrefix = "exec:"

func execIDEntry(id string) string { return execIDPrefix + id }

func processEntry(id, pid string) string { return execIDPrefix + id + ":" + pid }

// endProcesses ends the processes of an entry in Unconfirmed. They may have been
// seen alive, so one that is not known any more is no proof. That the list can
// be read shows first that the key in use sees the sandbox.
func (d *Driver) endProcesses(ctx context.Context, t target, entries []string) error {
	if _, err := d.listProcesses(ctx, t, nil); err != nil {
		if errors.Is(err, ErrLeaseGone) {
			return nil
		}
		return err
	}
	if len(entries) == 0 {
		return errUnnamed
	}
	for _, entry := range entries {
		if err := d.endEntry(ctx, t, entry); err != nil {
			return err
		}
	}
	return nil
}

func (d *Driver) endEntry(ctx context.Context, t target, entry string) error {
	rest, marked := strings.CutPrefix(entry, execIDPrefix)
	id, pid, both := strings.Cut(rest, ":")
	switch {
	case !marked:
		return d.endTree(ctx, t, entry, "", true, nil)
	case both:
		return d.endTree(ctx, t, pid, id, true, nil)
	}
	found, err := d.endByExecID(ctx, t, id, nil)
	if err == nil && !found {
		err = errNotListed
	}
	return err
}
