package createostest

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// SandboxInfo is what the server knows of a sandbox, more than the API shows.
type SandboxInfo struct {
	ID, Name, Owner string
	State           State
	Shape, Rootfs   string
	Region          string
	EnvNames        []string // sorted
	Egress          []string
	AutoPauseAfter  time.Duration
	ForkedFrom      string
	CreatedAt       time.Time
	DestroyedAt     time.Time // zero while it is there
	Processes       []ProcessInfo
}

// String is one line for a report.
func (i SandboxInfo) String() string {
	return fmt.Sprintf("%s %s (%s), owner %s", i.ID, i.Name, i.State, i.Owner)
}

// ProcessInfo is what the server knows of a process.
type ProcessInfo struct {
	ID string
	// Kind is "process", "pty" or, for a command of an exec, "exec"; the last
	// are known only while they run.
	Kind                     string
	PID                      int
	Cmd                      string
	Args                     []string
	LeaderExited, TreeExited bool
	ExitCode                 *int   // nil while it runs and after a signal
	Signal                   string // such as "SIGTERM"
	NewestSeq                int64  // of its output
}

// Sandboxes returns every sandbox of every account, oldest first, destroyed
// ones included while their row stays.
func (s *Server) Sandboxes() []SandboxInfo {
	s.mu.Lock()
	list := slices.Clone(s.order)
	s.mu.Unlock()
	infos := make([]SandboxInfo, len(list))
	for i, sb := range list {
		infos[i] = s.info(sb)
	}
	return infos
}

func (s *Server) info(sb *sandbox) SandboxInfo {
	s.mu.Lock()
	info := SandboxInfo{
		ID: sb.id, Name: sb.name, Owner: sb.owner, State: sb.state, Shape: sb.shape.ID, Rootfs: sb.rootfs,
		Region: sb.region, EnvNames: slices.Sorted(maps.Keys(sb.envs)), Egress: slices.Clone(sb.egress),
		AutoPauseAfter: time.Duration(sb.autoPause) * time.Second, ForkedFrom: sb.forkedFrom,
		CreatedAt: sb.createdAt, DestroyedAt: sb.destroyedAt,
	}
	processes := slices.Clone(sb.processes)
	s.mu.Unlock()
	for _, p := range processes {
		if r, can := p.proc.(refresher); can {
			r.refresh() // a test wants to know what is, not what was noticed
		}
		d := s.details(p)
		info.Processes = append(info.Processes, ProcessInfo{
			ID: p.id, Kind: p.kind, PID: d.PID, Cmd: p.cmd, Args: slices.Clone(p.args), LeaderExited: d.LeaderExited,
			TreeExited: d.TreeExited, ExitCode: d.ExitCode, Signal: d.Signal, NewestSeq: d.Output.NewestSeq,
		})
	}
	return info
}

// Leaks returns the sandboxes that are neither destroyed nor failed: what
// would go on costing money. A test of a program that cleans up ends with it.
func (s *Server) Leaks() []SandboxInfo {
	return slices.DeleteFunc(s.Sandboxes(), func(i SandboxInfo) bool { return i.State.terminal() })
}

// LeakReport is Leaks as text, one line each; "" when there are none.
func (s *Server) LeakReport() string {
	var b strings.Builder
	for _, leak := range s.Leaks() {
		fmt.Fprintln(&b, leak)
	}
	return b.String()
}

// NoLeaks fails the test, when it ends, for each sandbox that was never
// destroyed. Call it right after NewServer; a nil server is none.
func NoLeaks(tb testing.TB, s *Server) {
	tb.Helper()
	if s == nil {
		return
	}
	tb.Cleanup(func() {
		if leaks := s.LeakReport(); leaks != "" {
			tb.Errorf("createostest: sandboxes that were never destroyed:\n%s", leaks)
		}
	})
}

// Processes returns the processes of a sandbox; none for an unknown one.
func (s *Server) Processes(id string) []ProcessInfo {
	sb, err := s.find(id)
	if err != nil {
		return nil
	}
	return s.info(sb).Processes
}

func (s *Server) find(id string) (*sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb := s.sandboxes[id]; sb != nil {
		return sb, nil
	}
	return nil, fmt.Errorf("createostest: no sandbox %q", id)
}

// Pause pauses a running sandbox behind everybody's back, as auto-pause, the
// guest or another host would, and returns when it is paused.
func (s *Server) Pause(id string) error { return s.SetState(id, StatePaused) }

// Resume resumes a paused sandbox behind everybody's back.
func (s *Server) Resume(id string) error { return s.SetState(id, StateRunning) }

// Kill destroys a sandbox behind everybody's back, in whatever state it is,
// and returns when its processes and files are gone.
func (s *Server) Kill(id string) error { return s.SetState(id, StateDestroyed) }

// SetState forces a sandbox into a state at once, whatever was under way. The
// machine follows: it runs in running, is destroyed in destroyed and failed,
// and stands still in every other state. From a terminal state there is no way
// back.
func (s *Server) SetState(id string, state State) error {
	sb, err := s.find(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	if sb.state.terminal() {
		s.mu.Unlock()
		return fmt.Errorf("createostest: sandbox %s is %s", id, sb.state)
	}
	m, processes := sb.machine, slices.Clone(sb.processes)
	if m == nil && state == StateRunning {
		s.mu.Unlock()
		return fmt.Errorf("createostest: sandbox %s has not booted", id)
	}
	if m != nil && state != StateRunning && !state.terminal() {
		// First, or who sees the state and resumes is overtaken by the freeze.
		s.mu.Unlock()
		m.freeze()
		s.mu.Lock()
	}
	s.setStateLocked(sb, state)
	s.mu.Unlock()
	switch {
	case m == nil:
	case state == StateRunning:
		m.thaw()
		s.watchActivity(sb)
	case state.terminal():
		for _, p := range processes {
			p.journal.close()
		}
		return m.destroy()
	}
	return nil
}

// RemoveRow makes the provider forget a sandbox: it is destroyed, and answers
// like one that never was.
func (s *Server) RemoveRow(id string) error {
	sb, err := s.find(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.forgetLocked(sb)
	gone := sb.state.terminal()
	m, processes := sb.machine, slices.Clone(sb.processes)
	if !gone {
		s.setStateLocked(sb, StateDestroyed)
	}
	s.mu.Unlock()
	for _, p := range processes {
		p.journal.close()
	}
	if m == nil || gone {
		return nil
	}
	return m.destroy()
}

// ReadFile returns the content of a file of a sandbox, in any state that has
// files.
func (s *Server) ReadFile(id, path string) ([]byte, error) {
	m, err := s.machineOf(id)
	if err != nil {
		return nil, err
	}
	file, _, err := m.open(path)
	if err != nil {
		return nil, fmt.Errorf("createostest: %s: %w", path, err)
	}
	defer file.Close()
	return io.ReadAll(file)
}

// WriteFile writes a file into a sandbox, with its missing parents.
func (s *Server) WriteFile(id, path string, data []byte) error {
	m, err := s.machineOf(id)
	if err != nil {
		return err
	}
	if _, err := m.put(path, strings.NewReader(string(data))); err != nil {
		return fmt.Errorf("createostest: %s: %w", path, err)
	}
	return nil
}

// RemoveFile removes a file from a sandbox.
func (s *Server) RemoveFile(id, path string) error {
	m, err := s.machineOf(id)
	if err != nil {
		return err
	}
	if err := m.remove(path); err != nil {
		return fmt.Errorf("createostest: %s: %w", path, err)
	}
	return nil
}

func (s *Server) machineOf(id string) (machine, error) {
	sb, err := s.find(id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.machine == nil || sb.state.terminal() {
		return nil, fmt.Errorf("createostest: sandbox %s is %s and has no files", id, sb.state)
	}
	return sb.machine, nil
}
