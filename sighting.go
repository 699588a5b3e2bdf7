package createos

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// The states of a sandbox.
const (
	stateCreating   = "creating"
	stateRunning    = "running"
	statePausing    = "pausing"
	statePaused     = "paused"
	stateResuming   = "resuming"
	stateForking    = "forking"
	stateError      = "error"
	stateDestroying = "destroying"
	stateDestroyed  = "destroyed"
	stateFailed     = "failed"
)

// stateName is a state as it may appear in an error: words of the provider
// that we do not know do not.
func stateName(status string) string {
	switch status {
	case "", stateCreating, stateRunning, statePausing, statePaused, stateResuming, stateForking,
		stateError, stateDestroying, stateDestroyed, stateFailed:
		return status
	}
	return "unrecognised"
}

// A sighting is what this driver last saw of a sandbox. Driver.mu guards it.
type sighting struct {
	status string
	alive  time.Time // when the API last spoke of the sandbox as being there
	// byID says that it was read under its id. Answers to a create do not
	// count, nor those without content: their ids may have been garbled.
	byID    bool
	tracked time.Time
	// owner is the key that created it, or that a list showed it to; zero if neither
	// was in this driver.
	owner Secret
	// pinned keeps a sighting that alone says whose the sandbox is: its
	// account is not known, so only that key can prove its absence.
	pinned bool
}

// Sightings are pruned when there are many: hosts that never destroy what
// they lease must not grow the driver for ever. Those that are pinned stay.
const (
	sightingsMax  = 4096
	sightingsKeep = time.Hour
)

// track begins to remember sightings of a sandbox.
func (d *Driver) track(s scope) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trackLocked(s)
}

func (d *Driver) trackLocked(s scope) *sighting {
	now := time.Now()
	seen := d.sightings[s]
	if seen == nil {
		if len(d.sightings) >= sightingsMax {
			d.pruneLocked(now)
		}
		seen = new(sighting)
		d.sightings[s] = seen
	}
	seen.tracked = now
	return seen
}

func (d *Driver) pruneLocked(now time.Time) {
	type aged struct {
		scope scope
		at    time.Time
	}
	var old []aged
	for s, seen := range d.sightings {
		if seen.pinned {
			continue
		}
		at := seen.tracked
		if seen.alive.After(at) {
			at = seen.alive
		}
		if now.Sub(at) > sightingsKeep {
			delete(d.sightings, s)
		} else {
			old = append(old, aged{s, at})
		}
	}
	if len(old) < sightingsMax {
		return
	}
	slices.SortFunc(old, func(a, b aged) int { return a.at.Compare(b.at) })
	for _, o := range old[:len(old)/4] {
		delete(d.sightings, o.scope)
	}
}

// saw records the state in which a sandbox was seen.
func (d *Driver) saw(s scope, status string) {
	if status == "" {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if seen := d.sightings[s]; seen != nil {
		seen.status = status
	}
}

func (d *Driver) sawAlive(s scope) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if seen := d.sightings[s]; seen != nil {
		seen.alive = now
	}
}

func (d *Driver) sawByID(s scope) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if seen := d.sightings[s]; seen != nil {
		seen.byID = true
	}
}

// owned records the key that made a sandbox, or, for the scope of a name, may have made
// one, or that a list has shown it to: the API said so just now. account is empty if it
// is not known.
func (d *Driver) owned(s scope, key Secret, account string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	seen := d.trackLocked(s)
	seen.owner, seen.alive, seen.pinned = key, time.Now(), account == ""
}

func (d *Driver) forget(s scope) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.sightings, s)
}

// seen returns a copy of what is known of a sandbox.
func (d *Driver) seen(s scope) sighting {
	d.mu.Lock()
	defer d.mu.Unlock()
	if seen := d.sightings[s]; seen != nil {
		return *seen
	}
	return sighting{}
}

// A target is a sandbox that work is done on, with what judges a 404.
type target struct {
	scope    scope
	client   *Client
	key      Secret
	name     string
	leaseKey string
	account  string
}

func (l *lessee) target() target {
	m := l.lease.Metadata
	return target{scope: l.scope, client: l.client, key: l.set.key, name: m.SandboxName, leaseKey: m.LeaseKey, account: m.AccountID}
}

// debt is an entry about the sandbox.
func (t target) debt(kind DebtKind, cause error) Unconfirmed {
	return Unconfirmed{
		Kind: kind, CompanyID: t.scope.company, EnvironmentID: t.scope.environment, APIURL: t.scope.origin,
		SandboxID: t.scope.id, SandboxName: t.name, LeaseKey: t.leaseKey, AccountID: t.account, Cause: cause.Error(),
	}
}

// read gets the state of the sandbox and remembers it.
func (d *Driver) read(ctx context.Context, t target) (Sandbox, error) {
	box, err := t.client.get(ctx, t.scope.id)
	if err == nil {
		d.saw(t.scope, box.Status)
		d.sawByID(t.scope)
	}
	return box, err
}

// secondLook is the distance of the read that must agree with a 404.
const secondLook = time.Second

// absent is the one judge of a 404 about the sandbox itself. It returns nil if
// err proves that the sandbox does not exist, and otherwise the error that
// the caller is to report: err itself if that is no 404, else one that
// matches ErrUnjudged.
//
// A 404 is absence only if the API said it (a gateway's page is not the API),
// at the origin of the lease, to a key whose account is the sandbox's: to any
// other account every sandbox is "not found". And routers were seen to lose a
// sandbox for a moment, so a second look must agree: to be wrong once is to lose a
// sandbox for good.
func (d *Driver) absent(ctx context.Context, t target, err error) error {
	if !isNotFound(err) {
		return err
	}
	if !saidByAPI(err) {
		return fmt.Errorf("%w: %w", ErrUnjudged, err)
	}
	seen := d.seen(t.scope)
	if why := d.foreignKey(ctx, t, seen); why != nil {
		return fmt.Errorf("%w: %w", ErrUnjudged, why)
	}
	if serr := sleep(ctx, secondLook); serr != nil {
		return fmt.Errorf("%w: %w", ErrUnjudged, serr)
	}
	box, again := t.client.get(ctx, t.scope.id)
	switch {
	case again == nil && box.Status == stateDestroyed:
		return nil
	case again == nil:
		d.saw(t.scope, box.Status)
		return fmt.Errorf("%w: %w: %w", ErrUnjudged, errFoundAgain, err)
	case isNotFound(again) && saidByAPI(again):
		return nil
	}
	return fmt.Errorf("%w: %w", ErrUnjudged, again)
}

// errFoundAgain is a 404 that a second look did not confirm.
var errFoundAgain = errors.New("a second look found it")

// foreignKey returns nil if the key in use is known to see the sandbox, if it
// exists.
func (d *Driver) foreignKey(ctx context.Context, t target, seen sighting) error {
	if !seen.owner.IsZero() && seen.owner.Equal(t.key) {
		return nil
	}
	mine := t.account
	if mine == "" && seen.owner.IsZero() {
		// A lease of an older provider, or written elsewhere: nothing can
		// verify it, so it keeps the reading that it always had.
		d.log.Warn("createos: absence taken unverified, the lease names no account", "sandbox", t.scope.id)
		return nil
	}
	if mine == "" { // it may be told by now
		var err error
		if mine, err = d.account(ctx, d.client(t.scope.tenant, seen.owner), t.scope.origin, seen.owner); err != nil {
			return err
		}
	}
	account, err := d.account(ctx, t.client, t.scope.origin, t.key)
	switch {
	case err != nil:
		return err
	case mine == "":
		return errors.New("the key in use is not the one that the sandbox is known to, and its account is not known")
	case account != mine:
		return errors.New("the key in use belongs to another account")
	}
	return nil
}

func isNotFound(err error) bool {
	var refused *RequestError
	return errors.As(err, &refused) && refused.Status == http.StatusNotFound
}

func saidByAPI(err error) bool {
	var refused *RequestError
	return errors.As(err, &refused) && refused.envelope
}

func isConflict(err error) bool {
	var refused *RequestError
	return errors.As(err, &refused) && refused.Status == http.StatusConflict
}

// An accountCache holds the account of each key and origin: one whoami each
// in the life of the driver, however many acquires begin at once.
type accountCache struct {
	mu sync.Mutex // guards calls; not held while a call runs
	// calls holds the look-ups that run and those that succeeded.
	calls map[accountKey]*accountCall
}

type accountKey struct {
	origin string
	key    [sha256.Size]byte
}

type accountCall struct {
	done chan struct{}
	id   string
	err  error
	left bool // ended because its own caller left: says nothing to others
}

// account returns the account that a key belongs to, "" if the provider does
// not say.
func (d *Driver) account(ctx context.Context, c *Client, origin string, key Secret) (string, error) {
	k := accountKey{origin, sha256.Sum256([]byte(key.Reveal()))}
	for {
		call, mine := d.accounts.join(k)
		if mine {
			return d.accounts.lookUp(ctx, c, k, call)
		}
		select {
		case <-call.done:
		case <-ctx.Done():
			return "", ended(ctx)
		}
		if !call.left || call.err == nil {
			return call.id, call.err
		}
	}
}

func (a *accountCache) join(k accountKey) (call *accountCall, mine bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if call := a.calls[k]; call != nil {
		return call, false
	}
	if a.calls == nil {
		a.calls = make(map[accountKey]*accountCall)
	}
	call = &accountCall{done: make(chan struct{})}
	a.calls[k] = call
	return call, true
}

// lookUp asks, and lets go of those who wait whatever happens. Only a success
// is kept.
func (a *accountCache) lookUp(ctx context.Context, c *Client, k accountKey, call *accountCall) (string, error) {
	call.left = true // what a panic leaves behind
	call.err = ErrConnection
	defer func() {
		a.mu.Lock()
		if call.err != nil || call.id == "" {
			delete(a.calls, k)
		}
		a.mu.Unlock()
		close(call.done)
	}()
	call.id, call.err = whoami(ctx, c)
	call.left = ctx.Err() != nil
	return call.id, call.err
}

// whoami treats an account that the provider will not tell as unknown; a
// refused key and trouble are errors.
func whoami(ctx context.Context, c *Client) (string, error) {
	account, err := c.Account(ctx)
	var refused *RequestError
	var unreadable *ResponseError
	switch {
	case err == nil:
		return account.UserID, nil
	case errors.As(err, &unreadable):
		return "", nil
	case errors.As(err, &refused) && slices.Contains([]int{http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed}, refused.Status):
		return "", nil
	}
	return "", err
}

// sameEgress compares two egress lists without regard to order.
func sameEgress(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}
