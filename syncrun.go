package createos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/createos-lease/createos/internal/keylock"
	"github.com/createos-lease/createos/internal/manifest"
)

// hostTargets keeps syncs of this process to the same local path apart.
var hostTargets keylock.Lock

// A syncer is one run of SyncIn or SyncOut.
type syncer struct {
	d       *Driver
	env     Environment
	l       *lessee
	client  *Client
	plan    *syncPlan
	res     *SyncResult
	id      string
	timeout time.Duration // of one step
	steps   atomic.Int64
	units   int
	doubt   bool        // a request that was cut off may still make something in the scratch directory
	dirty   atomic.Bool // there may be one: a script has run, or may have
	lost    atomic.Bool // a script was cut off, and may run later
	ran     atomic.Bool // a script has run, so the sandbox was awake
	leaving bool        // only scratch files are removed from now on
	zip     bool        // the sandbox has gzip, and it may be used
	slow    bool        // the connection was seen to be slow
	meter   *meter
}

func (d *Driver) newSyncer(env Environment, l *lessee, plan *syncPlan, res *SyncResult) *syncer {
	return &syncer{
		d: d, env: env, l: l, client: l.client, plan: plan, res: res,
		id:      strings.ReplaceAll(uuid.NewString(), "-", ""),
		timeout: l.set.timeout,
		meter:   newMeter(plan.progress),
	}
}

// run does all operations and removes what it leaves.
func (y *syncer) run(ctx context.Context) error {
	defer y.meter.stop()
	if len(y.plan.ops) == 0 {
		return nil
	}
	if err := ended(ctx); err != nil {
		return because(ctx, "sync", err)
	}
	defer func() { y.cleanUp(ctx) }() // before the meter: a report that blocks must not hold it up
	err := y.operations(ctx)
	if err == nil {
		return nil
	}
	var failed *SyncError
	if why := ended(ctx); why != nil && errors.As(err, &failed) {
		failed.Err = because(ctx, "sync", failed.Err)
		return failed
	}
	return because(ctx, "sync", err)
}

func (y *syncer) operations(ctx context.Context) error {
	if err := y.look(ctx); err != nil {
		return err
	}
	for i := range y.plan.ops {
		y.res.Operations = append(y.res.Operations, SyncOperationResult{ID: y.plan.ops[i].ID})
		r := &y.res.Operations[i]
		for _, m := range y.plan.mappings[i] {
			move := y.in
			if y.plan.dir == syncOut {
				move = y.out
			}
			if err := move(ctx, m, r); err != nil {
				return y.plan.failed(m, hostError(err))
			}
		}
		if err := y.commands(ctx, i, r); err != nil {
			return err
		}
		r.Done = true
	}
	return nil
}

// look makes the scratch directory and checks the remote side of all mappings.
func (y *syncer) look(ctx context.Context) error {
	found, err := y.begin(ctx)
	if err != nil {
		return fmt.Errorf("createos: sync: prepare the sandbox: %w", err)
	}
	mappings := 0
	for _, list := range y.plan.mappings {
		mappings += len(list)
	}
	if len(found) != mappings+1 {
		return fmt.Errorf("createos: sync: prepare the sandbox: %w", ErrSyncStep)
	}
	y.zip = found[0] == "gzip" && y.plan.compress != SyncCompressNever
	found = found[1:]
	for _, list := range y.plan.mappings {
		for _, m := range list {
			check := m.fits
			if y.plan.dir == syncOut {
				check = m.found
			}
			if err := check(found[0]); err != nil {
				return y.plan.failed(m, hostError(err))
			}
			found = found[1:]
		}
	}
	return nil
}

// fits says whether what is in the sandbox can be the target.
func (m *mapping) fits(there string) error {
	switch {
	case there == "link":
		return ErrSyncUnsafe
	case there == "absent", there == "dir" && m.Kind == SyncDir, there == "file" && m.Kind == SyncFile:
		return nil
	}
	return ErrSyncKind
}

// found says whether what is in the sandbox can be the source, and completes the
// mapping by its kind.
func (m *mapping) found(there string) error {
	switch {
	case there == "link":
		return ErrSyncUnsafe
	case there == "absent":
		return ErrSyncMissing
	case there == "dir" && m.Kind != SyncFile:
		m.Kind = SyncDir
	case there == "file" && m.Kind != SyncDir:
		m.Kind = SyncFile
	default:
		return ErrSyncKind
	}
	return m.checkTarget()
}

// commands runs the commands of an operation.
func (y *syncer) commands(ctx context.Context, op int, r *SyncOperationResult) error {
	for i, cmd := range y.plan.ops[op].Commands {
		y.meter.phase(SyncProgress{Operation: r.ID, OperationIndex: op, MappingIndex: i, Phase: SyncCommands})
		res, err := y.d.Exec(ctx, y.env, y.l.lease, cmd)
		r.Commands = append(r.Commands, res)
		if err == nil {
			err = res.Err()
		}
		if err != nil {
			return &SyncError{Operation: r.ID, OperationIndex: op, Mapping: -1, Command: i, Err: err}
		}
	}
	return nil
}

// skipped notes what was left out.
func (r *SyncOperationResult) skipped(m *mapping, s skips) {
	r.SkippedTotal += s.total
	for _, skip := range s.first[:min(len(s.first), MaxSyncSkips-len(r.Skipped))] {
		skip.Mapping = m.index
		r.Skipped = append(r.Skipped, skip)
	}
}

// moved counts what a mapping has moved.
func (r *SyncOperationResult) moved(list *manifest.List) {
	r.Files += list.Files
	r.Bytes += list.Bytes
}

// phase reports the begin of a phase of a mapping, with what is to be moved.
func (y *syncer) phase(m *mapping, phase SyncPhase, files int, bytes int64) {
	y.meter.phase(SyncProgress{
		Operation: y.plan.ops[m.op].ID, OperationIndex: m.op, MappingIndex: m.index, Phase: phase, TotalFiles: files, TotalBytes: bytes,
	})
}

// awake does a request, and again if it found the sandbox paused.
func (y *syncer) awake(ctx context.Context, request func() error) error {
	for try := 1; ; try++ {
		err := request()
		if !isConflict(err) || try == wakeTries {
			return y.d.missing(ctx, y.l, err)
		}
		if _, err := y.d.wake(ctx, y.l); err != nil {
			return err
		}
	}
}

const (
	// slowRate, in bytes a second, is far less than what gzip takes, on any
	// machine.
	slowRate = 4 << 20
	// A smaller archive than slowSize says more about the way there and back.
	slowSize = 1 << 20
)

// compresses says whether the next archive is compressed.
func (y *syncer) compresses() bool {
	return y.zip && (y.slow || y.plan.compress == SyncCompressAlways)
}

// timed notes how long an archive took.
func (y *syncer) timed(size int64, began time.Time) {
	if size >= slowSize {
		y.slow = float64(size)/time.Since(began).Seconds() < slowRate
	}
}

// put uploads a scratch file.
func (y *syncer) put(ctx context.Context, name string, body io.ReadSeeker, size int64) error {
	err := y.awake(ctx, func() error {
		tries := &attempts{ReadSeeker: body}
		err := y.client.upload(ctx, y.l.scope.id, y.scratch(name), tries, size)
		y.doubt = y.doubt || err != nil || tries.n > 1
		return err
	})
	var unread *uploadError
	if !errors.As(err, &unread) {
		return err
	}
	if errors.Is(unread.cause, io.ErrUnexpectedEOF) {
		return ErrSyncChanged
	}
	return hostError(unread.cause)
}

// attempts counts how often an upload is begun: one that was cut off may arrive after
// the next one has succeeded.
type attempts struct {
	io.ReadSeeker
	n int
}

// Seek begins an attempt.
func (a *attempts) Seek(offset int64, whence int) (int64, error) {
	a.n++
	return a.ReadSeeker.Seek(offset, whence)
}

// A background runs one thing at a time beside its owner, who waits for it.
type background struct{ done chan error }

// start begins f when the one before has ended, and returns the error of that.
func (b *background) start(f func() error) error {
	if err := b.wait(); err != nil {
		return err
	}
	b.done = make(chan error, 1)
	done := b.done
	go func() { done <- f() }()
	return nil
}

// wait waits for what runs, if anything does.
func (b *background) wait() error {
	if b.done == nil {
		return nil
	}
	err := <-b.done
	b.done = nil
	return err
}

// bothSides lists what is on both sides of a mapping at once. The first that fails
// ends the other, and is what the error is about. The trees must be closed, and may be
// nil if there is an error.
func bothSides(ctx context.Context, here, there func(context.Context) (*tree, error)) (h, t *tree, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	side := func(list func(context.Context) (*tree, error)) (*tree, error) {
		t, err := list(ctx)
		if err != nil {
			cancel(err)
		}
		return t, err
	}
	var bg background
	_ = bg.start(func() (err error) {
		h, err = side(here)
		return err
	})
	t, err = side(there)
	if herr := bg.wait(); herr != nil || err != nil {
		err = context.Cause(ctx)
	}
	return h, t, err
}

// leftovers are the ids of scratch directories that could not be removed.
func (d *Driver) leftovers(s scope) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.scratch[s]...)
}

// maxLeftovers is how many of them are known of a lease: their removal is part of
// one script. Older ones go like those of a host that died; see guestStale.
const maxLeftovers = 100

func (d *Driver) leaveOver(s scope, id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := append(d.scratch[s], id)
	d.scratch[s] = slices.Clone(list[max(0, len(list)-maxLeftovers):])
}

// forgetLeftovers forgets those that were removed; others may have come meanwhile.
func (d *Driver) forgetLeftovers(s scope, removed []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.scratch[s] = slices.DeleteFunc(d.scratch[s], func(id string) bool { return slices.Contains(removed, id) })
	if len(d.scratch[s]) == 0 {
		delete(d.scratch, s)
	}
}
