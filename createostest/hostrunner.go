//go:build unix

package createostest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// killBound is how long killing, freezing and closing go on before they
	// give up on a process that will not end, such as one that waits inside the
	// kernel for a disk.
	killBound = 10 * time.Second

	// deliverBound is how long the last output of a killed tree may wait for a
	// writer that accepts nothing.
	deliverBound = 500 * time.Millisecond

	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

var (
	errDestroyed    = errors.New("sandbox is destroyed")
	errRunnerClosed = errors.New("host runner is closed")
	errNoTerminal   = errors.New("process has no terminal")
)

// hostRunner runs commands as real processes of this computer, as the user who
// runs the program and without any isolation: a command sees the whole file
// system. Each machine has a directory for its working directory, HOME and
// TMPDIR, and workspaces lie beside those:
//
//	<dir>/m-<n>/root          working directory and HOME of machine n
//	<dir>/m-<n>/tmp           its TMPDIR
//	<dir>/ws-<n>/workspace    not made here; the host's mkdir -p does that
//
// A workspace belongs to the first machine that names it in a command line, a
// working directory or an upload, and goes with that machine. Two machines that
// live at the same time and use the same path share the files, unlike real
// sandboxes.
//
// If the program dies without close, its commands are not killed; those that
// read standard input see its end.
type hostRunner struct {
	dir       string // absolute, without symbolic links
	temporary bool   // the runner made dir
	root      *os.Root
	escapes   error // what root answers for a path that leads out of dir
	wsPattern *regexp.Regexp
	table     processTable
	snapshots snapshots

	running sync.WaitGroup // supervisors of all processes; Add only under mu and before closed

	mu       sync.Mutex // guards the fields below
	closed   bool
	made     []string // directories in dir that this runner made
	lastID   map[string]int
	machines map[*hostMachine]struct{}
	owners   map[string]*hostMachine // by name of the ws directory
}

// newHostRunner returns a runner that keeps its files in dir, which is made if
// need be. The runner removes what it made in there, and dir itself only if dir
// was empty: then it is a fresh temporary directory.
func newHostRunner(dir string) (runner, error) {
	table, err := newProcessTable()
	if err != nil {
		return nil, err
	}
	return newHostRunnerOn(table, dir)
}

func newHostRunnerOn(table processTable, dir string) (*hostRunner, error) {
	temporary := dir == ""
	var err error
	if temporary {
		dir, err = os.MkdirTemp("", "createostest-")
	} else {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("directory of the host runner: %w", err)
	}
	r := &hostRunner{
		temporary: temporary,
		table:     table,
		snapshots: snapshots{table: table},
		lastID:    make(map[string]int),
		machines:  make(map[*hostMachine]struct{}),
		owners:    make(map[string]*hostMachine),
	}
	if err := r.openRoot(dir); err != nil {
		if temporary {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return nil, fmt.Errorf("directory of the host runner: %w", err)
	}
	return r, nil
}

func (r *hostRunner) openRoot(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	// The shell of a command reports its directory without symbolic links, so
	// paths are handed out that way. (On macOS the temporary directory has one.)
	if r.dir, err = filepath.EvalSymlinks(dir); err != nil {
		return err
	}
	if r.root, err = os.OpenRoot(r.dir); err != nil {
		return err
	}
	// The error for a path that leads out has no exported name.
	_, err = r.root.Lstat("..")
	var pathErr *fs.PathError
	if !errors.As(err, &pathErr) {
		return errors.Join(fmt.Errorf("lstat of the parent through a root: want an error that says it escapes: %w", err), r.root.Close())
	}
	r.escapes = pathErr.Err
	r.wsPattern = regexp.MustCompile(regexp.QuoteMeta(r.dir) + `/(ws-[0-9]+)\b`)
	return nil
}

// makeDir makes a directory prefix-<n> with the next free number. Numbers that
// others use in the same dir are passed over.
func (r *hostRunner) makeDir(prefix string) (string, error) {
	for {
		n, err := r.nextID(prefix)
		if err != nil {
			return "", err
		}
		path := filepath.Join(r.dir, fmt.Sprintf("%s-%d", prefix, n))
		err = os.Mkdir(path, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		if !r.recordDir(path) {
			return "", errors.Join(errRunnerClosed, os.Remove(path))
		}
		return path, nil
	}
}

func (r *hostRunner) nextID(prefix string) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, errRunnerClosed
	}
	r.lastID[prefix]++
	return r.lastID[prefix], nil
}

// recordDir notes a directory for close, or reports that close has been.
func (r *hostRunner) recordDir(path string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.made = append(r.made, path)
	}
	return !r.closed
}

// workspace returns a fresh path whose parent exists. If the parent cannot be
// made, the command that makes the workspace will report why.
func (r *hostRunner) workspace() string {
	parent, err := r.makeDir("ws")
	if err != nil {
		parent = filepath.Join(r.dir, "ws-0")
	}
	return filepath.Join(parent, "workspace")
}

func (r *hostRunner) newMachine(id string, env map[string]string) (machine, error) {
	dir, err := r.makeDir("m")
	if err != nil {
		return nil, fmt.Errorf("machine of sandbox %s: %w", id, err)
	}
	m := &hostMachine{
		r:    r,
		id:   id,
		dir:  dir,
		env:  env,
		live: make(map[*hostProcess]struct{}),
	}
	for _, sub := range []string{m.home(), m.tmp()} {
		if err := os.Mkdir(sub, 0o700); err != nil {
			return nil, errors.Join(fmt.Errorf("machine of sandbox %s: %w", id, err), os.RemoveAll(dir))
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		// close removes the directory, which is recorded.
		return nil, errRunnerClosed
	}
	r.machines[m] = struct{}{}
	return m, nil
}

// claim gives the workspaces that text names to m, except those that have an
// owner.
func (r *hostRunner) claim(m *hostMachine, text string) {
	if !strings.Contains(text, r.dir) {
		return
	}
	found := r.wsPattern.FindAllStringSubmatch(text, -1)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, match := range found {
		if r.owners[match[1]] == nil {
			r.owners[match[1]] = m
		}
	}
}

// disown takes m's workspaces away from it and returns their directories. They
// can be claimed again.
func (r *hostRunner) disown(m *hostMachine) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.machines, m)
	var dirs []string
	for name, owner := range r.owners {
		if owner == m {
			delete(r.owners, name)
			dirs = append(dirs, filepath.Join(r.dir, name))
		}
	}
	return dirs
}

// hold makes close wait for one more process, until running.Done.
func (r *hostRunner) hold() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errRunnerClosed
	}
	r.running.Add(1)
	return nil
}

// close kills every process, waits for every goroutine and removes every file.
// Writers given in a spec must not block any more when it is called: a
// goroutine that waits for one is reported after a bound, and left behind.
func (r *hostRunner) close() error {
	machines, first := r.shut()
	if !first {
		return nil
	}
	var errs []error
	for _, m := range machines {
		errs = append(errs, m.destroy())
	}
	errs = append(errs, r.waitRunning())
	for _, dir := range r.madeDirs() {
		errs = append(errs, removeTree(dir))
	}
	errs = append(errs, r.root.Close())
	if r.temporary {
		errs = append(errs, removeTree(r.dir))
	}
	return errors.Join(errs...)
}

func (r *hostRunner) shut() (machines []*hostMachine, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	first = !r.closed
	r.closed = true
	for m := range r.machines {
		machines = append(machines, m)
	}
	return machines, first
}

func (r *hostRunner) madeDirs() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.made
}

func (r *hostRunner) waitRunning() error {
	done := make(chan struct{})
	go func() { // ends with the goroutines it waits for
		r.running.Wait()
		close(done)
	}()
	timer := time.NewTimer(killBound)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		return fmt.Errorf("processes or their output writers still block after %v", killBound)
	}
}

// census returns the live processes of the given trees. doubtful is explained at
// tree.members.
func (r *hostRunner) census(processes ...*hostProcess) (found []procInfo, doubtful bool, err error) {
	// Whoever is reaped now stays so. The other way round, the answer could be
	// newer than the table.
	reaped := make([]bool, len(processes))
	for i, p := range processes {
		reaped[i] = p.isReaped()
	}
	procs, err := r.snapshots.take()
	if err != nil {
		return nil, false, err
	}
	for i, p := range processes {
		members, doubt := p.tree.members(procs, reaped[i])
		found = append(found, members...)
		doubtful = doubtful || doubt
	}
	return found, doubtful, nil
}

// signalAll sends sig to every process of the given trees, once.
func (r *hostRunner) signalAll(sig syscall.Signal, processes ...*hostProcess) error {
	members, _, err := r.census(processes...)
	for _, p := range members {
		deliver(r.table, p, sig)
	}
	return err
}

// killAll kills the given trees until nothing of them is left. One round is not
// enough, because a process may fork while the table is read.
func (r *hostRunner) killAll(processes ...*hostProcess) error {
	return r.insist("kill", processes, func(members []procInfo, doubtful bool) bool {
		for _, p := range members {
			deliver(r.table, p, syscall.SIGKILL)
		}
		return len(members) == 0 && !doubtful
	})
}

// stopAll stops the given trees until nothing of them runs, for the same reason.
func (r *hostRunner) stopAll(processes ...*hostProcess) error {
	signalled := make(map[procID]bool)
	return r.insist("stop", processes, func(members []procInfo, doubtful bool) bool {
		quiet := !doubtful
		for _, p := range members {
			// A process that waits in the kernel stops when that ends, without
			// running a step of its program; vfork may make it wait for a
			// child that is already stopped.
			if p.stopped || p.blocked && signalled[p.id()] {
				continue
			}
			quiet = false
			deliver(r.table, p, syscall.SIGSTOP)
			signalled[p.id()] = true
		}
		return quiet
	})
}

// insist repeats act on the processes of the given trees until it reports true,
// with growing pauses and not for ever.
func (r *hostRunner) insist(verb string, processes []*hostProcess, act func(members []procInfo, doubtful bool) bool) error {
	if len(processes) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), killBound) // a duty, not a caller's wish
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, treePoll) {
		members, doubtful, err := r.census(processes...)
		if err == nil && act(members, doubtful) {
			return nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return errors.Join(err, fmt.Errorf("%s: %d processes left after %v", verb, len(members), killBound))
		}
	}
}

// removeTree is os.RemoveAll for directories that a command may have made
// read-only, as the Go module cache is.
func removeTree(dir string) error {
	if os.RemoveAll(dir) == nil {
		return nil
	}
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil // what could not be opened is reported below
	})
	return os.RemoveAll(dir)
}
