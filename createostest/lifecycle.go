package createostest

import (
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// short is the reduced answer of pause, resume and delete.
type short struct {
	ID     string `json:"id"`
	Status State  `json:"status"`
}

// conflictLocked is the text of a 409 on a lifecycle call.
func (sb *sandbox) conflictLocked(expected State) string {
	if sb.state == StatePaused || expected == StatePaused && sb.state == StateRunning {
		return fmt.Sprintf("sandbox is %s, expected %s", sb.state, expected)
	}
	return "sandbox is " + string(sb.state)
}

func (s *Server) handlePause(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	s.mu.Lock()
	switch {
	case sb.state == StatePaused && s.opts.PausePausedOK:
		v := sb.viewLocked()
		s.mu.Unlock()
		success(w, http.StatusOK, v)
		return
	case sb.state != StateRunning:
		text := sb.conflictLocked(StateRunning)
		s.mu.Unlock()
		fail(w, http.StatusConflict, text)
		return
	}
	pause := s.beginPauseLocked(sb, stuckState(r))
	s.mu.Unlock()
	over := s.spawn(pause)
	if s.opts.PauseDelay <= 0 {
		<-over
	}
	w.Header().Set("X-Poll-After", strconv.Itoa(int(math.Ceil(s.opts.PauseDelay.Seconds()))))
	success(w, http.StatusAccepted, short{sb.id, StatePausing})
}

// beginPauseLocked leaves the running state and returns what is to be done
// next without the lock.
func (s *Server) beginPauseLocked(sb *sandbox, stuck State) func() {
	next := StatePausing
	if stuck != "" {
		next = stuck
	}
	epoch, m := s.setStateLocked(sb, next), sb.machine
	return func() {
		m.freeze()
		if stuck == "" && s.sleep(s.opts.PauseDelay) {
			s.move(sb, epoch, StatePaused)
		}
	}
}

func (s *Server) handleResume(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	stuck := stuckState(r)
	s.mu.Lock()
	switch {
	case s.poor[sb.owner]:
		s.mu.Unlock()
		fail(w, http.StatusPaymentRequired, errNoCredit)
		return
	case sb.state == StateRunning && s.opts.ResumeRunningOK:
		v := sb.viewLocked()
		s.mu.Unlock()
		success(w, http.StatusOK, v)
		return
	case sb.state != StatePaused && sb.state != StateError || sb.machine == nil:
		text := "sandbox is " + string(sb.state)
		s.mu.Unlock()
		fail(w, http.StatusConflict, text)
		return
	}
	next := StateResuming
	if stuck != "" {
		next = stuck
	}
	epoch, m := s.setStateLocked(sb, next), sb.machine
	s.mu.Unlock()
	over := s.spawn(func() {
		if stuck == "" && s.sleep(s.opts.ResumeDelay) {
			// Thawed first: once the state says running a pause may follow,
			// and its freeze must not come before this thaw.
			m.thaw()
			s.move(sb, epoch, StateRunning)
		}
	})
	if s.opts.ResumeDelay <= 0 {
		<-over
	}
	success(w, http.StatusAccepted, short{sb.id, StateResuming})
}

func (s *Server) handleDelete(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	stuck := stuckState(r)
	s.mu.Lock()
	switch state := sb.state; {
	case state.terminal():
		s.mu.Unlock()
		success(w, http.StatusOK, short{sb.id, StateDestroyed})
		return
	case state == StateDestroying:
		s.mu.Unlock()
		success(w, http.StatusOK, short{sb.id, StateDestroying})
		return
	case !s.opts.DeleteInTransition && (state == StatePausing || state == StateResuming || state == StateForking):
		s.mu.Unlock()
		fail(w, http.StatusConflict, "sandbox is "+string(state))
		return
	}
	inline := sb.state == StatePaused || sb.state == StateError
	destroy := s.beginDestroyLocked(sb, stuck, inline)
	s.mu.Unlock()
	over := s.spawn(destroy)
	if inline || s.opts.DestroyDelay <= 0 {
		<-over
	}
	if inline && stuck == "" {
		success(w, http.StatusOK, short{sb.id, StateDestroyed})
		return
	}
	success(w, http.StatusOK, short{sb.id, StateDestroying})
}

// beginDestroyLocked starts the way to destroyed and returns what is to be
// done next without the lock.
func (s *Server) beginDestroyLocked(sb *sandbox, stuck State, inline bool) func() {
	next := StateDestroying
	if stuck != "" {
		next = stuck
	}
	processes := slices.Clone(sb.processes)
	epoch, m := s.setStateLocked(sb, next), sb.machine
	return func() {
		if stuck != "" {
			return
		}
		// Journals first: a process that is blocked on a full one could not
		// be reaped.
		for _, p := range processes {
			p.journal.close()
		}
		if m != nil && !s.destroyMachine(sb, m) {
			s.move(sb, epoch, StateError)
			return
		}
		if inline || s.sleep(s.opts.DestroyDelay) {
			s.move(sb, epoch, StateDestroyed)
		}
	}
}

func (s *Server) destroyMachine(sb *sandbox, m machine) bool {
	if err := m.destroy(); err != nil {
		s.complain("createostest: destroying %s: %v", sb.id, err)
		return false
	}
	return true
}

// closeJournals lets go of every process that is blocked on a full one.
func (s *Server) closeJournals() {
	s.mu.Lock()
	var all []*managed
	for _, sb := range s.order {
		all = append(all, sb.processes...)
	}
	s.mu.Unlock()
	for _, p := range all {
		p.journal.close()
	}
}

// watchActivity runs the auto-pause clock of a sandbox, for as long as it is
// on and the sandbox is there.
func (s *Server) watchActivity(sb *sandbox) {
	s.mu.Lock()
	needed := sb.autoPause > 0 && !sb.watched
	sb.watched = sb.watched || needed
	s.mu.Unlock()
	if !needed {
		return
	}
	s.spawn(func() {
		for {
			wait, changed, pause := s.checkActivity(sb)
			switch {
			case pause != nil:
				pause()
			case changed == nil:
				return
			case !s.sleepUnless(wait, changed):
				return
			}
		}
	})
}

// checkActivity takes one look at the clock: pause now, look again after wait
// or at a change, or, with neither, stop looking.
func (s *Server) checkActivity(sb *sandbox) (wait time.Duration, changed <-chan struct{}, pause func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.autoPause == 0 || sb.state.terminal() {
		sb.watched = false
		return 0, nil, nil
	}
	if sb.state != StateRunning {
		return 0, s.changed, nil
	}
	wait = time.Until(sb.lastActivity.Add(time.Duration(sb.autoPause) * time.Second))
	if wait <= 0 {
		return 0, nil, s.beginPauseLocked(sb, "")
	}
	return wait, s.changed, nil
}

// sleepUnless waits for a change, at most d if d is positive; false means that
// the server is closing.
func (s *Server) sleepUnless(d time.Duration, changed <-chan struct{}) bool {
	var expired <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-expired:
	case <-changed:
	case <-s.done:
		return false
	}
	return true
}

// touch puts off the auto-pause.
func (s *Server) touch(sb *sandbox) {
	s.mu.Lock()
	sb.lastActivity = time.Now()
	s.mu.Unlock()
}

// patchRequest is the body of a PATCH; what is absent stays.
type patchRequest struct {
	IngressEnabled   *bool `json:"ingress_enabled"`
	AutoPause        *int  `json:"auto_pause_after_seconds"`
	DisableAutoPause bool  `json:"disable_auto_pause"`
}

func (s *Server) handlePatch(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	var req patchRequest
	err := s.decode(r, &req)
	if err == nil {
		err = checkAutoPause(req.AutoPause)
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	s.mu.Lock()
	if sb.state != StateRunning && sb.state != StatePaused {
		text := "sandbox is " + string(sb.state)
		s.mu.Unlock()
		fail(w, http.StatusConflict, text)
		return
	}
	if req.IngressEnabled != nil {
		sb.ingress = *req.IngressEnabled
	}
	if req.AutoPause != nil {
		sb.autoPause = *req.AutoPause
	}
	if req.DisableAutoPause {
		sb.autoPause = 0
	}
	s.wakeLocked() // the auto-pause clock reads its setting again
	v := sb.viewLocked()
	s.mu.Unlock()
	s.watchActivity(sb)
	success(w, http.StatusOK, v)
}

func (s *Server) handleResize(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	var req struct {
		DiskMiB int `json:"disk_mib"`
	}
	if err := s.decode(r, &req); err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	s.mu.Lock()
	state, size, limit := sb.state, sb.diskMiB, s.opts.MaxDiskMiB
	ok := state == StateRunning && req.DiskMiB > size && (limit == 0 || req.DiskMiB <= limit)
	if ok {
		sb.diskMiB = req.DiskMiB
	}
	s.mu.Unlock()
	switch {
	case ok:
		success(w, http.StatusOK, map[string]any{"id": sb.id, "disk_mib": req.DiskMiB})
	case req.DiskMiB <= size:
		fail(w, http.StatusBadRequest, badField("disk_mib", "must be larger than the current size"))
	case limit > 0 && req.DiskMiB > limit:
		fail(w, http.StatusForbidden, fmt.Sprintf("disk_mib exceeds the plan's cap of %d", limit))
	default:
		fail(w, http.StatusConflict, "sandbox is "+string(state))
	}
}

type egressBody struct {
	ID     string   `json:"id"`
	Egress []string `json:"egress"`
}

func (s *Server) handleGetEgress(w http.ResponseWriter, _ *http.Request, sb *sandbox) {
	s.mu.Lock()
	rules := slices.Clone(sb.egress)
	s.mu.Unlock()
	if rules == nil {
		rules = []string{}
	}
	success(w, http.StatusOK, egressBody{sb.id, rules})
}

// handlePutEgress replaces the list. Rules are kept and shown; nothing
// enforces them.
func (s *Server) handlePutEgress(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	var req egressBody
	err := s.decode(r, &req)
	if err == nil {
		err = checkEgress(req.Egress)
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	s.mu.Lock()
	state := sb.state
	gone := state.terminal() || state == StateDestroying
	if !gone {
		sb.egress = slices.Clone(req.Egress)
	}
	s.mu.Unlock()
	if gone {
		fail(w, http.StatusConflict, "sandbox is "+string(state))
		return
	}
	s.handleGetEgress(w, r, sb)
}

// forkRequest is the body of a fork; what is absent is inherited.
type forkRequest struct {
	StartPaused    bool              `json:"start_paused"`
	Egress         []string          `json:"egress"`
	IngressEnabled *bool             `json:"ingress_enabled"`
	Envs           map[string]string `json:"envs"`
	SSHPubkeys     []string          `json:"ssh_pubkeys"`
	Bandwidth      int64             `json:"bandwidth_quota_bytes"`
}

// handleFork copies a paused sandbox: its files, not its processes. Only the
// runner in memory can.
func (s *Server) handleFork(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	var req forkRequest
	err := s.decode(r, &req)
	if err == nil {
		err = checkEnvs(req.Envs)
	}
	if err == nil {
		err = checkEgress(req.Egress)
	}
	if err == nil {
		err = checkSSHKeys(req.SSHPubkeys)
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if req.Bandwidth != 0 {
		failServer(w, http.StatusNotImplemented, "createostest does not emulate bandwidth accounts")
		return
	}
	child, source, status, reason := s.beginFork(sb, req)
	if reason != "" {
		answer(w, status, reason)
		return
	}
	stuck := stuckState(r)
	v := s.viewOf(child)
	over := s.spawn(func() { s.finishFork(child, source, req.StartPaused, stuck) })
	if s.opts.BootDelay <= 0 {
		<-over
	}
	success(w, http.StatusOK, v)
}

func (s *Server) beginFork(sb *sandbox, req forkRequest) (child *sandbox, source forker, status int, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	source, ok := sb.machine.(forker)
	switch {
	case s.poor[sb.owner]:
		return nil, nil, http.StatusPaymentRequired, errNoCredit.Error()
	case sb.state != StatePaused:
		return nil, nil, http.StatusConflict, sb.conflictLocked(StatePaused)
	case !ok:
		return nil, nil, http.StatusNotImplemented, "createostest forks sandboxes in memory only"
	}
	now := time.Now()
	child = &sandbox{
		id: s.opts.IDPrefix + newULID(now), name: s.freeNameLocked(sb.owner), owner: sb.owner, shape: sb.shape,
		rootfs: sb.rootfs, region: sb.region, envs: maps.Clone(sb.envs), createdAt: now, forkedFrom: sb.id,
		state: StateForking, egress: slices.Clone(sb.egress), ingress: sb.ingress, diskMiB: sb.diskMiB,
		autoPause: sb.autoPause, holds: true, ip: s.nextIPLocked(), sshKeys: sb.sshKeys,
	}
	if req.SSHPubkeys != nil {
		child.sshKeys = req.SSHPubkeys
	}
	if req.Egress != nil {
		child.egress = req.Egress
	}
	if req.IngressEnabled != nil {
		child.ingress = *req.IngressEnabled
	}
	if child.envs == nil {
		child.envs = make(map[string]string)
	}
	maps.Copy(child.envs, req.Envs)
	s.addLocked(child)
	return child, source, 0, ""
}

func (s *Server) finishFork(child *sandbox, source forker, paused bool, stuck State) {
	m, err := source.fork(child.id, child.envs)
	s.mu.Lock()
	epoch := child.epoch
	child.machine = m
	if err == nil && stuck != "" {
		s.setStateLocked(child, stuck)
	}
	s.mu.Unlock()
	switch {
	case err != nil:
		s.move(child, epoch, StateError)
	case stuck != "":
	case !s.sleep(s.opts.BootDelay):
	case paused:
		m.freeze()
		s.move(child, epoch, StatePaused)
		s.watchActivity(child)
	default:
		s.startRunning(child, epoch)
	}
}
