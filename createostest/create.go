package createostest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// createRequest is the body of a create. Fields that the provider takes and
// that change nothing here are read only so that they are checked.
type createRequest struct {
	Shape          string              `json:"shape"`
	Rootfs         string              `json:"rootfs"`
	Name           string              `json:"name"`
	DiskMiB        int                 `json:"disk_mib"`
	Envs           map[string]string   `json:"envs"`
	Egress         []string            `json:"egress"`
	IngressEnabled bool                `json:"ingress_enabled"`
	AutoPause      *int                `json:"auto_pause_after_seconds"`
	SSHPubkeys     []string            `json:"ssh_pubkeys"`
	Networks       []map[string]string `json:"networks"`
	Disks          []map[string]string `json:"disks"`
	Region         string              `json:"region"`
	NodeSelector   map[string]string   `json:"node_selector"`
	HostID         string              `json:"host_id"`
	Bandwidth      int64               `json:"bandwidth_quota_bytes"`
}

// created is the answer to a create; it is shorter than a view.
type created struct {
	ID         string   `json:"id"`
	Status     State    `json:"status,omitempty"`
	Name       string   `json:"name,omitempty"`
	IP         string   `json:"ip"`
	Shape      string   `json:"shape"`
	Rootfs     string   `json:"rootfs,omitempty"`
	VCPU       int      `json:"vcpu"`
	MemMiB     int      `json:"mem_mib"`
	DiskMiB    int      `json:"disk_mib"`
	SpawnMS    float64  `json:"spawn_ms"`
	Egress     []string `json:"egress,omitempty"`
	SSHPubkeys []string `json:"ssh_pubkeys,omitempty"`
	Bandwidth  int64    `json:"bandwidth_quota_bytes"`
	AutoPause  int      `json:"auto_pause_after_seconds,omitempty"`
	IngressURL string   `json:"ingress_url_template,omitempty"`
}

const defaultBandwidth = 5 << 30

var (
	namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$`)
	envPattern  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

	errNoCredit     = errors.New("insufficient credit")
	errTooManyBoxes = errors.New("too many running sandboxes for this account")
)

const (
	maxNameLength    = 22
	maxEnvs          = 64
	maxEnvValueBytes = 4096
	maxEnvBytes      = 64 << 10
	minAutoPause     = 60
	maxAutoPause     = 86400
)

func (s *Server) handleCreate(w http.ResponseWriter, r *http.Request) {
	var req createRequest
	if err := s.decode(r, &req); err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if err := s.checkCreate(req); err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if len(req.Disks)+len(req.Networks) > 0 {
		failServer(w, http.StatusNotImplemented, "createostest does not emulate disks and networks")
		return
	}
	sb := s.newSandbox(req, userOf(r))
	if status, err := s.admit(sb, req); err != nil {
		fail(w, status, err)
		return
	}
	stuck := stuckState(r)
	booted := s.spawn(func() { s.boot(sb, stuck) })
	select {
	case <-booted:
	case <-r.Context().Done():
		return // the machine comes up all the same
	}
	s.answerCreate(w, sb, stuck)
}

// checkCreate is everything that is answered with 400.
func (s *Server) checkCreate(req createRequest) error {
	switch {
	case req.Shape == "":
		return badField("shape", "is required")
	case req.Rootfs != "" && !s.hasRootfs(req.Rootfs):
		return badField("rootfs", "unknown or disabled")
	case len(req.Name) > maxNameLength:
		return badField("name", "must be at most 22 characters")
	case req.Name != "" && !namePattern.MatchString(req.Name):
		return badField("name", "must be a DNS label in lower case")
	case req.DiskMiB < 0:
		return badField("disk_mib", "must not be negative")
	case req.Region != "" && req.Region != s.opts.Region:
		return badField("region", "this control plane serves "+s.opts.Region)
	case req.Bandwidth != 0:
		return badField("bandwidth_quota_bytes", "must not be set")
	}
	if _, ok := s.shape(req.Shape); !ok {
		return badField("shape", "unknown shape")
	}
	if err := checkEnvs(req.Envs); err != nil {
		return err
	}
	if err := checkEgress(req.Egress); err != nil {
		return err
	}
	if err := checkSSHKeys(req.SSHPubkeys); err != nil {
		return err
	}
	if err := checkAttachments(req); err != nil {
		return err
	}
	return checkAutoPause(req.AutoPause)
}

func checkEnvs(envs map[string]string) error {
	if len(envs) > maxEnvs {
		return badField("envs", "at most 64 entries")
	}
	total := 0
	for key, value := range envs {
		total += len(key) + len(value)
		switch {
		case !envPattern.MatchString(key):
			return badField("envs", "a key is not a valid name")
		case len(value) > maxEnvValueBytes:
			return badField("envs", key+": value must be at most 4096 bytes")
		}
	}
	if total > maxEnvBytes {
		return badField("envs", "at most 64 KiB in total")
	}
	return nil
}

// checkAttachments refuses disks and networks that the provider would refuse as
// well; others are not emulated.
func checkAttachments(req createRequest) error {
	for _, disk := range req.Disks {
		sub := disk["sub_path"]
		switch {
		case disk["disk_id"] == "":
			return badField("disks", "disk_id is required")
		case !path.IsAbs(disk["mount_path"]):
			return badField("disks", "mount_path must be absolute")
		case path.IsAbs(sub) || slices.Contains(strings.Split(sub, "/"), ".."):
			return badField("disks", "sub_path must be relative, without ..")
		}
	}
	for _, network := range req.Networks {
		if network["id"] == "" {
			return badField("networks", "id is required")
		}
	}
	return nil
}

func checkAutoPause(seconds *int) error {
	if seconds != nil && (*seconds < minAutoPause || *seconds > maxAutoPause) {
		return badField("auto_pause_after_seconds", "must be between 60 and 86400")
	}
	return nil
}

var hostPattern = regexp.MustCompile(`^(\*\.)?([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.?$`)

// checkEgress accepts the rule forms of the API: *, host, *.host, ip and cidr,
// each but the first with an optional port.
func checkEgress(rules []string) error {
	for _, rule := range rules {
		if !validEgress(rule) {
			return badField("egress", "a rule is not a host, an address or a network")
		}
	}
	return nil
}

func validEgress(rule string) bool {
	if rule == "*" || validTarget(rule) {
		return true
	}
	i := strings.LastIndexByte(rule, ':')
	if i < 0 {
		return false
	}
	port, err := strconv.ParseUint(rule[i+1:], 10, 16)
	return err == nil && port > 0 && validTarget(strings.Trim(rule[:i], "[]"))
}

func validTarget(target string) bool {
	if _, err := netip.ParseAddr(target); err == nil {
		return true
	}
	if _, err := netip.ParsePrefix(target); err == nil {
		return true
	}
	return hostPattern.MatchString(target)
}

func (s *Server) newSandbox(req createRequest, owner string) *sandbox {
	shape, _ := s.shape(req.Shape)
	sb := &sandbox{
		id: s.opts.IDPrefix + newULID(time.Now()), name: req.Name, owner: owner, shape: shape,
		rootfs: req.Rootfs, region: s.opts.Region, envs: req.Envs, createdAt: time.Now(),
		state: StateCreating, egress: req.Egress, ingress: req.IngressEnabled, diskMiB: req.DiskMiB,
		pollsLeft: s.opts.CreatingPolls, sshKeys: req.SSHPubkeys,
	}
	if sb.rootfs == "" {
		sb.rootfs = s.defaultRootfs()
	}
	if sb.diskMiB == 0 {
		sb.diskMiB = shape.DefaultDiskMiB
	}
	if req.AutoPause != nil {
		sb.autoPause = *req.AutoPause
	}
	return sb
}

// admit applies credit, plan and name, in that order, and on success puts the
// row into the server. From here on the name is taken.
func (s *Server) admit(sb *sandbox, req createRequest) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.poor[sb.owner] {
		return http.StatusPaymentRequired, errNoCredit
	}
	if allowed := s.opts.AllowedShapes; allowed != nil && !slices.Contains(allowed, req.Shape) {
		return http.StatusForbidden, fmt.Errorf("shape not allowed; Allowed: %v", allowed)
	}
	if s.opts.MaxDiskMiB > 0 && sb.diskMiB > s.opts.MaxDiskMiB {
		return http.StatusForbidden, fmt.Errorf("disk_mib exceeds the plan's cap of %d", s.opts.MaxDiskMiB)
	}
	if !s.opts.QueueBoxes && !s.roomLocked(sb.owner) {
		return http.StatusForbidden, errTooManyBoxes
	}
	if sb.name == "" {
		sb.name = s.freeNameLocked(sb.owner)
	} else if !s.opts.AllowSameName && s.nameTakenLocked(sb.owner, sb.name) {
		return http.StatusConflict, badField("name", "already in use")
	}
	sb.holds = !s.opts.QueueBoxes
	sb.ip = s.nextIPLocked()
	s.addLocked(sb)
	return 0, nil
}

func (s *Server) roomLocked(owner string) bool {
	if s.opts.MaxBoxes <= 0 {
		return true
	}
	held := 0
	for _, sb := range s.order {
		if sb.owner == owner && sb.holds {
			held++
		}
	}
	return held < s.opts.MaxBoxes
}

func (s *Server) freeNameLocked(owner string) string {
	adjectives := []string{"calm", "brave", "quiet", "swift", "amber", "lucky", "plain", "sunny"}
	animals := []string{"otter", "heron", "badger", "lynx", "finch", "tapir", "gecko", "marten"}
	for {
		name := adjectives[rand.IntN(len(adjectives))] + "-" + animals[rand.IntN(len(animals))]
		for s.nameTakenLocked(owner, name) {
			name += "-" + lowerText(4)
			if len(name) > maxNameLength {
				break
			}
		}
		if len(name) <= maxNameLength {
			return name
		}
	}
}

// boot brings the machine up. It goes on when the client that asked for it has
// left, and gives up when the sandbox was deleted meanwhile.
func (s *Server) boot(sb *sandbox, stuck State) {
	if !s.waitForRoom(sb) {
		return
	}
	s.mu.Lock()
	epoch := sb.epoch
	s.mu.Unlock()
	m, err := s.runner.newMachine(sb.id, sb.envs)
	if err != nil {
		if !isClosed(s.done) {
			s.complain("createostest: a machine for %s: %v", sb.id, err)
		}
		s.move(sb, epoch, StateFailed)
		return
	}
	s.mu.Lock()
	wanted := sb.epoch == epoch && sb.state == StateCreating
	if wanted {
		sb.machine = m
		if stuck != "" && stuck != StateCreating {
			epoch = s.setStateLocked(sb, stuck)
		}
	}
	s.mu.Unlock()
	switch {
	case !wanted:
		s.destroyMachine(sb, m)
	case stuck.terminal():
		s.destroyMachine(sb, m)
	case stuck != "" || s.opts.CreatingPolls > 0: // something else moves it on
	case s.sleep(s.opts.BootDelay):
		s.startRunning(sb, epoch)
	}
}

// waitForRoom waits in the queue of the account; false when the sandbox or the
// server is gone.
func (s *Server) waitForRoom(sb *sandbox) bool {
	for {
		s.mu.Lock()
		changed, wanted := s.changed, sb.state == StateCreating
		if wanted && !sb.holds && s.roomLocked(sb.owner) {
			sb.holds = true
		}
		admitted := sb.holds
		s.mu.Unlock()
		if !wanted || admitted {
			return wanted
		}
		select {
		case <-changed:
		case <-s.done:
			return false
		}
	}
}

// move changes the state unless something else did since epoch.
func (s *Server) move(sb *sandbox, epoch int, state State) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.epoch != epoch {
		return false
	}
	s.setStateLocked(sb, state)
	return true
}

// startRunning makes a sandbox run for the first time and starts its
// auto-pause clock.
func (s *Server) startRunning(sb *sandbox, epoch int) {
	if s.move(sb, epoch, StateRunning) {
		s.watchActivity(sb)
	}
}

func (s *Server) answerCreate(w http.ResponseWriter, sb *sandbox, stuck State) {
	s.mu.Lock()
	c := created{
		ID: sb.id, Status: sb.state, Name: sb.name, IP: sb.ip, Shape: sb.shape.ID, Rootfs: sb.rootfs,
		VCPU: sb.shape.VCPU, MemMiB: sb.shape.MemMiB, DiskMiB: sb.diskMiB, SpawnMS: milliseconds(sb.boot),
		Egress: slices.Clone(sb.egress), SSHPubkeys: sb.sshKeys, Bandwidth: defaultBandwidth, AutoPause: sb.autoPause,
	}
	s.mu.Unlock()
	early := s.opts.CreatingPolls > 0 || stuck != ""
	if c.Status != StateRunning && !early {
		failServer(w, http.StatusInternalServerError, "internal error")
		return
	}
	if sb.ingress {
		c.IngressURL = sb.ingressURL()
	}
	if s.opts.OmitCreateState {
		c.Status = ""
	}
	success(w, s.opts.CreateStatus, c)
}
