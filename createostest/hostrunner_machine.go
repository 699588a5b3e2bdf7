//go:build unix

package createostest

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// hostMachine is the sandbox that a hostRunner pretends to have: a directory, an
// environment and the processes started in it.
type hostMachine struct {
	r   *hostRunner
	id  string
	dir string
	env map[string]string

	mu        sync.Mutex // guards the fields below
	frozen    bool
	destroyed bool
	live      map[*hostProcess]struct{} // until their tree is done
}

func (m *hostMachine) home() string { return filepath.Join(m.dir, "root") }
func (m *hostMachine) tmp() string  { return filepath.Join(m.dir, "tmp") }

// start runs a command. An empty cmd means the shell, and an empty dir the home
// directory of the machine.
func (m *hostMachine) start(s spec) (process, error) {
	if m.isDestroyed() {
		return nil, errDestroyed
	}
	m.r.claim(m, s.dir+"\x00"+s.cmd+"\x00"+strings.Join(s.args, "\x00"))
	if s.cmd == "" {
		s.cmd = "/bin/bash"
	}
	if s.dir == "" {
		s.dir = m.home()
	}
	p, err := startHostProcess(m, s)
	if err != nil && m.isDestroyed() {
		return nil, errDestroyed // rather than what the missing directory caused
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.cmd, err)
	}
	return p, nil
}

// register records a process that has just been started, and reports what
// happened to the machine in the meantime.
func (m *hostMachine) register(p *hostProcess) (frozen, destroyed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live[p] = struct{}{}
	return m.frozen, m.destroyed
}

func (m *hostMachine) forget(p *hostProcess) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.live, p)
}

func (m *hostMachine) isDestroyed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.destroyed
}

// environ is the environment of a command: little of this program's own, so that
// a test does not depend on the shell it was started from.
func (m *hostMachine) environ(token string, extra map[string]string) []string {
	path := os.Getenv("PATH")
	if path == "" {
		path = defaultPath
	}
	vars := map[string]string{
		"PATH":   path,
		"HOME":   m.home(),
		"TMPDIR": m.tmp(),
		"LANG":   "C.UTF-8",
	}
	maps.Copy(vars, m.env)
	maps.Copy(vars, extra)
	vars[treeVariable] = token
	environ := make([]string, 0, len(vars))
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		environ = append(environ, name+"="+vars[name])
	}
	return environ
}

// freeze stops every process of the machine and returns when none runs.
func (m *hostMachine) freeze() {
	_ = m.r.stopAll(m.setFrozen(true)...) // what cannot be stopped waits in the kernel
}

// thaw lets them go on, also those that had stopped themselves before.
func (m *hostMachine) thaw() {
	_ = m.r.signalAll(syscall.SIGCONT, m.setFrozen(false)...)
}

func (m *hostMachine) setFrozen(frozen bool) []*hostProcess {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = frozen
	return slices.Collect(maps.Keys(m.live))
}

// destroy kills every process and removes the files of the machine. It waits for
// the processes, but not for writers that accept nothing. It may be repeated.
func (m *hostMachine) destroy() error {
	m.mu.Lock()
	m.destroyed = true
	live := slices.Collect(maps.Keys(m.live))
	m.mu.Unlock()

	for _, p := range live {
		p.abandon()
	}
	err := m.r.killAll(live...)
	if err == nil {
		err = m.awaitTrees(live)
	}
	if err == nil {
		err = m.removeFiles()
	}
	if err != nil {
		return fmt.Errorf("destroy sandbox %s: %w", m.id, err)
	}
	return nil
}

func (m *hostMachine) awaitTrees(processes []*hostProcess) error {
	timer := time.NewTimer(killBound)
	defer timer.Stop()
	for _, p := range processes {
		select {
		case <-p.treeDone():
		case <-timer.C:
			return fmt.Errorf("process %d is not reaped after %v", p.pid(), killBound)
		}
	}
	return nil
}

func (m *hostMachine) removeFiles() error {
	errs := []error{removeTree(m.dir)}
	for _, dir := range m.r.disown(m) {
		errs = append(errs, removeTree(dir))
	}
	return errors.Join(errs...)
}
