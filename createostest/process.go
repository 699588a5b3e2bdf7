package createostest

import (
	"context"
	"encoding/base64"
	"errors"
	"maps"
	"net/http"
	"path"
	"slices"
	"time"
)

// Kinds of processes. Those of exec are seen by the emulator's own reports
// only, as the API lists managed processes alone.
const (
	kindProcess = "process"
	kindPTY     = "pty"
	kindExec    = "exec"
)

// managed is a process with its journal. Server.mu guards the fields from
// inputs on.
type managed struct {
	id, kind  string
	cmd       string
	args      []string
	cwd       string
	createdAt time.Time
	proc      process
	journal   *journal

	inputs      int64
	terminating bool
	finishedAt  time.Time
}

func (p *managed) leader() <-chan struct{} { return p.proc.leaderDone() }
func (p *managed) tree() <-chan struct{}   { return p.proc.treeDone() }

// details is a process as the API shows it.
type details struct {
	ProcessID    string       `json:"process_id"`
	Kind         string       `json:"kind"`
	PID          int          `json:"pid"`
	State        string       `json:"state"`
	LeaderExited bool         `json:"leader_exited"`
	TreeExited   bool         `json:"tree_exited"`
	CreatedAt    string       `json:"created_at"`
	FinishedAt   string       `json:"finished_at,omitempty"`
	ExitCode     *int         `json:"exit_code,omitempty"`
	Signal       string       `json:"signal,omitempty"`
	Cmd          string       `json:"cmd"`
	Args         []string     `json:"args"`
	Cwd          string       `json:"cwd"`
	Output       journalRange `json:"output"`
}

// details reads the state of the process. The tree is asked first: a tree that
// has ended implies a leader that has.
func (s *Server) details(p *managed) details {
	s.mu.Lock()
	terminating, finished := p.terminating, p.finishedAt
	s.mu.Unlock()
	d := details{
		ProcessID: p.id, Kind: p.kind, PID: p.proc.pid(), State: "running", CreatedAt: stamp(p.createdAt),
		Cmd: p.cmd, Args: p.args, Cwd: p.cwd,
	}
	d.TreeExited = isClosed(p.tree())
	d.LeaderExited = isClosed(p.leader())
	if d.LeaderExited {
		d.ExitCode, d.Signal = p.proc.status()
		d.State = "exited"
		if finished.IsZero() {
			finished = time.Now() // this very moment; nobody has noted it yet
		}
		d.FinishedAt = stamp(finished)
	} else if terminating {
		d.State = "terminating"
	}
	// Last, so that the output of an exited process is complete here.
	d.Output = p.journal.extent()
	return d
}

type startRequest struct {
	Cmd  string            `json:"cmd"`
	Args []string          `json:"args"`
	Cwd  string            `json:"cwd"`
	Env  map[string]string `json:"env"`
	PTY  *struct {
		Rows int `json:"rows"`
		Cols int `json:"cols"`
	} `json:"pty"`
}

func (s *Server) handleStartProcess(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	var req startRequest
	err := s.decode(r, &req)
	kind := kindProcess
	var size *ptySize
	switch {
	case err != nil:
	case req.PTY != nil:
		kind, size = kindPTY, &ptySize{req.PTY.Rows, req.PTY.Cols}
		if req.Cmd == "" {
			req.Cmd = "/bin/bash"
		}
		if size.rows < 1 || size.cols < 1 {
			err = badField("pty", "rows and cols must be positive")
		}
	case req.Cmd == "":
		err = badField("cmd", "is required")
	}
	if err == nil && req.Cwd != "" && !path.IsAbs(req.Cwd) {
		err = badField("cwd", "must be absolute")
	}
	if err == nil {
		err = s.checkCommandEnv(sb, req.Env)
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	m, _, ok := s.running(w, sb)
	if !ok {
		return
	}
	p := s.newManaged(sb, kind, req.Cmd, req.Args)
	p.cwd = req.Cwd
	streams := [2]string{"stdout", "stderr"}
	if size != nil {
		streams = [2]string{"pty", "pty"}
	}
	err = s.startManaged(sb, m, p, spec{
		cmd: req.Cmd, args: req.Args, dir: req.Cwd, env: mergeEnv(sb.envs, req.Env), pty: size,
		stdout: journalWriter{p.journal, streams[0]}, stderr: journalWriter{p.journal, streams[1]},
	})
	if err != nil {
		s.failStart(w, sb, err)
		return
	}
	success(w, http.StatusCreated, s.details(p))
}

// failStart answers for a process that could not be started: with the state
// if that is why, else with the field that is at fault.
func (s *Server) failStart(w http.ResponseWriter, sb *sandbox, err error) {
	s.mu.Lock()
	running := sb.state == StateRunning
	s.mu.Unlock()
	if !running {
		s.failNotRunning(w, sb)
		return
	}
	if errors.Is(err, errNoDir) {
		fail(w, http.StatusBadRequest, badField("cwd", errNoDir.Error()))
		return
	}
	fail(w, http.StatusBadRequest, badField("cmd", err.Error()))
}

// checkCommandEnv refuses keys that the sandbox did not declare at its create.
func (s *Server) checkCommandEnv(sb *sandbox, env map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(env)) {
		if _, ok := sb.envs[key]; !ok {
			return badField("env", key+" is not declared on this sandbox")
		}
	}
	return nil
}

func mergeEnv(base, over map[string]string) map[string]string {
	env := make(map[string]string, len(base)+len(over))
	maps.Copy(env, base)
	maps.Copy(env, over)
	return env
}

func (s *Server) newManaged(sb *sandbox, kind, cmd string, args []string) *managed {
	var onWrite func()
	if s.opts.ActivityOnOutput {
		onWrite = func() { s.touch(sb) }
	}
	if args == nil {
		args = []string{}
	}
	return &managed{
		id: newProcessID(), kind: kind, cmd: cmd, args: args, createdAt: time.Now(),
		journal: newJournal(s.opts.JournalBytes, s.opts.EvictUnderReader, onWrite),
	}
}

// startManaged starts the process, files it under its sandbox and watches over
// it until its tree has ended. While the server closes there is no true answer
// about a command: the request is dropped like all others.
func (s *Server) startManaged(sb *sandbox, m machine, p *managed, spec spec) error {
	if !s.begin() {
		panic(http.ErrAbortHandler)
	}
	proc, err := m.start(spec)
	if err != nil {
		s.work.Done()
		if isClosed(s.done) {
			panic(http.ErrAbortHandler)
		}
		return err
	}
	p.proc = proc
	s.mu.Lock()
	closing := s.closing || sb.state.terminal() || sb.state == StateDestroying
	if !closing {
		sb.processes = append(sb.processes, p)
	}
	s.mu.Unlock()
	if closing {
		p.journal.close() // came too late to be found by who closes them all
	}
	go func() {
		defer s.work.Done()
		<-p.leader()
		s.mu.Lock()
		p.finishedAt = time.Now()
		s.mu.Unlock()
		<-p.tree()
		if p.kind == kindExec {
			s.forgetProcess(sb, p)
		}
	}()
	return nil
}

func (s *Server) forgetProcess(sb *sandbox, p *managed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb.processes = slices.DeleteFunc(sb.processes, func(o *managed) bool { return o == p })
}

func (s *Server) handleListProcesses(w http.ResponseWriter, _ *http.Request, sb *sandbox) {
	if _, _, ok := s.running(w, sb); !ok {
		return
	}
	list := []details{}
	for _, p := range s.processesOf(sb) {
		if p.kind != kindExec {
			list = append(list, s.details(p))
		}
	}
	success(w, http.StatusOK, map[string]any{"processes": list})
}

func (s *Server) processesOf(sb *sandbox) []*managed {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(sb.processes)
}

// processCall is what a route of one process works on.
type processCall struct {
	sb   *sandbox
	p    *managed
	left <-chan struct{} // closed when the sandbox stops running
}

// process finds the process of the path, in a running sandbox.
func (s *Server) process(next func(http.ResponseWriter, *http.Request, processCall)) http.HandlerFunc {
	return s.owned(func(w http.ResponseWriter, r *http.Request, sb *sandbox) {
		_, left, ok := s.running(w, sb)
		if !ok {
			return
		}
		id := r.PathValue("process")
		for _, p := range s.processesOf(sb) {
			if p.id == id && p.kind != kindExec {
				next(w, r, processCall{sb, p, left})
				return
			}
		}
		fail(w, http.StatusNotFound, "process not found")
	})
}

func (s *Server) handleGetProcess(w http.ResponseWriter, _ *http.Request, c processCall) {
	success(w, http.StatusOK, s.details(c.p))
}

const (
	defaultWait  = 30 * time.Second
	maxWait      = 10 * time.Minute
	defaultGrace = 5 * time.Second
	maxGrace     = time.Minute
	// killSettle is how long a delete waits for the end of a killed tree.
	killSettle = 5 * time.Second
)

// queryMillis reads a duration in milliseconds.
func queryMillis(r *http.Request, name string, missing, largest time.Duration) (time.Duration, error) {
	ms, err := queryInt(r, name, int(missing.Milliseconds()))
	if err == nil && ms > int(largest.Milliseconds()) {
		err = badField(name, "is too large")
	}
	return time.Duration(ms) * time.Millisecond, err
}

func (s *Server) handleWait(w http.ResponseWriter, r *http.Request, c processCall) {
	timeout, err := queryMillis(r, "timeout_ms", defaultWait, maxWait)
	ended := c.p.leader()
	switch scope := r.URL.Query().Get("scope"); {
	case err != nil:
	case scope == "tree":
		ended = c.p.tree()
	case scope != "" && scope != "leader":
		err = badField("scope", "must be leader or tree")
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	// Both ends are waited for: a tree may be over while the last output of
	// its leader waits for a reader, and the exit is not known before.
	for _, end := range []<-chan struct{}{ended, c.p.leader()} {
		select {
		case <-end:
		case <-ctx.Done():
		case <-c.left:
		case <-s.done:
		}
		if r.Context().Err() != nil {
			panic(http.ErrAbortHandler)
		}
		if !s.undisturbed(w, c.sb, c.left) {
			return
		}
		if !isClosed(end) {
			fail(w, http.StatusRequestTimeout, "wait timed out")
			return
		}
	}
	success(w, http.StatusOK, s.details(c.p))
}

func (s *Server) handleInput(w http.ResponseWriter, r *http.Request, c processCall) {
	var req struct {
		Data *string `json:"data_base64"`
	}
	err := s.decode(r, &req)
	var data []byte
	if err == nil {
		if req.Data == nil {
			err = badField("data_base64", "is required")
		} else if data, err = base64.StdEncoding.DecodeString(*req.Data); err != nil {
			err = badField("data_base64", "is not base64")
		} else if len(data) > maxInputBytes {
			err = badField("data_base64", "must be at most 256 KiB decoded")
		}
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if err := c.p.proc.input(data); err != nil {
		fail(w, http.StatusConflict, inputConflict(err))
		return
	}
	s.mu.Lock()
	c.p.inputs++
	seq := c.p.inputs
	s.mu.Unlock()
	success(w, http.StatusOK, map[string]any{"input_seq": seq})
}

func inputConflict(err error) string {
	switch {
	case errors.Is(err, errInputClosed):
		return "stdin already closed"
	case errors.Is(err, errExited):
		return "process has exited"
	}
	return err.Error()
}

func (s *Server) handleCloseStdin(w http.ResponseWriter, _ *http.Request, c processCall) {
	if c.p.kind == kindPTY {
		fail(w, http.StatusConflict, "process has a pty")
		return
	}
	if err := c.p.proc.closeInput(); err != nil {
		fail(w, http.StatusConflict, inputConflict(err))
		return
	}
	ok(w)
}

func ok(w http.ResponseWriter) { success(w, http.StatusOK, map[string]any{"ok": true}) }

func (s *Server) handleResizePTY(w http.ResponseWriter, r *http.Request, c processCall) {
	var req struct {
		Rows int `json:"rows"`
		Cols int `json:"cols"`
	}
	err := s.decode(r, &req)
	if err == nil && (req.Rows < 1 || req.Cols < 1) {
		err = badField("rows", "rows and cols must be positive")
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if c.p.kind != kindPTY {
		fail(w, http.StatusConflict, "process has no pty")
		return
	}
	if p, can := c.p.proc.(resizer); can {
		if err := p.resize(req.Rows, req.Cols); err != nil {
			fail(w, http.StatusConflict, err)
			return
		}
	}
	ok(w)
}

var knownSignals = []string{"SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH"}

func (s *Server) handleSignal(w http.ResponseWriter, r *http.Request, c processCall) {
	var req struct {
		Signal string `json:"signal"`
	}
	err := s.decode(r, &req)
	if err == nil && !slices.Contains(knownSignals, req.Signal) {
		err = badField("signal", "unknown signal")
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if err := c.p.proc.signal(req.Signal); err != nil {
		fail(w, http.StatusConflict, inputConflict(err))
		return
	}
	ok(w)
}

// handleDeleteProcess ends the tree and, once that is proven, forgets the
// record. Of an exited process only the record goes.
func (s *Server) handleDeleteProcess(w http.ResponseWriter, r *http.Request, c processCall) {
	grace, err := queryMillis(r, "grace_ms", defaultGrace, maxGrace)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	s.mu.Lock()
	c.p.terminating = true
	s.mu.Unlock()
	c.p.journal.release()
	// It goes on when the client leaves: what was asked for is under way.
	s.spawn(func() { c.p.proc.terminate(grace) })
	s.awaitEnd(r, c, grace+killSettle)
	d := s.details(c.p)
	switch {
	case d.TreeExited:
		s.forgetProcess(c.sb, c.p)
	case isClosed(c.left):
		s.failNotRunning(w, c.sb)
		return
	}
	success(w, http.StatusOK, d)
}

// awaitEnd waits for the tree and the exit of a process, within a bound.
func (s *Server) awaitEnd(r *http.Request, c processCall, bound time.Duration) {
	timer := time.NewTimer(bound)
	defer timer.Stop()
	for _, end := range []<-chan struct{}{c.p.tree(), c.p.leader()} {
		select {
		case <-end:
		case <-timer.C:
			return
		case <-c.left:
			return
		case <-r.Context().Done():
			return
		case <-s.done:
			return
		}
	}
}
