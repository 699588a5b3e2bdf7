package createostest

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"
)

// State is the state of a sandbox, as the API spells it.
type State string

// The states of a sandbox. Running, paused and error are steady, destroyed and
// failed are terminal, the others lead somewhere.
const (
	StateCreating   State = "creating"
	StateRunning    State = "running"
	StatePausing    State = "pausing"
	StatePaused     State = "paused"
	StateResuming   State = "resuming"
	StateForking    State = "forking"
	StateError      State = "error"
	StateDestroying State = "destroying"
	StateDestroyed  State = "destroyed"
	StateFailed     State = "failed"
)

var states = []State{
	StateCreating, StateRunning, StatePausing, StatePaused, StateResuming, StateForking, StateError,
	StateDestroying, StateDestroyed, StateFailed,
}

func (s State) terminal() bool { return s == StateDestroyed || s == StateFailed }

// sandbox is one row. Server.mu guards the fields from state on; what is above
// does not change.
type sandbox struct {
	id, name, owner string
	shape           Shape
	rootfs, region  string
	ip              string
	envs            map[string]string
	sshKeys         []string
	createdAt       time.Time
	forkedFrom      string

	state   State
	epoch   int           // rises with each change of state, to outdate delayed ones
	left    chan struct{} // closed while the sandbox is not running
	machine machine       // nil until the boot has got it
	egress  []string
	ingress bool
	diskMiB int
	boot    time.Duration // how long the boot took
	holds   bool          // counts for Options.MaxBoxes

	autoPause    int // seconds; 0 is off
	lastActivity time.Time
	watched      bool // a goroutine runs the auto-pause clock
	pollsLeft    int  // GETs that still show creating

	runningAt, pausedAt, resumedAt, destroyedAt time.Time

	processes []*managed // oldest first; those of exec included while they run
}

// setStateLocked moves a sandbox to a state and wakes everybody who waits for
// a change. It returns the epoch that a delayed next change must check.
func (s *Server) setStateLocked(sb *sandbox, state State) int {
	now := time.Now()
	was := sb.state
	sb.state = state
	sb.epoch++
	switch state {
	case StateRunning:
		if was == StateResuming {
			sb.resumedAt = now
		} else if sb.runningAt.IsZero() {
			sb.runningAt = now
			sb.boot = now.Sub(sb.createdAt)
		}
		sb.lastActivity = now
		sb.holds = true
	case StatePaused:
		sb.pausedAt = now
		sb.holds = false
	case StateDestroyed, StateFailed:
		sb.destroyedAt = now
		sb.holds = false
		sb.processes = nil
		if s.opts.ForgetDestroyed {
			s.forgetLocked(sb)
		}
		s.trimLocked()
	case StateError:
		sb.holds = false
	}
	if was == StateRunning && state != StateRunning {
		close(sb.left)
	}
	if was != StateRunning && state == StateRunning {
		sb.left = make(chan struct{})
	}
	s.wakeLocked()
	return sb.epoch
}

// wakeLocked lets everybody who waits for a change look again.
func (s *Server) wakeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// nextIPLocked is a private address that no sandbox of this server has had.
func (s *Server) nextIPLocked() string {
	s.ips++
	return fmt.Sprintf("10.%d.%d.%d", 42+s.ips/62500, s.ips/250%250, s.ips%250+2)
}

func (s *Server) forgetLocked(sb *sandbox) {
	delete(s.sandboxes, sb.id)
	s.order = slices.DeleteFunc(s.order, func(o *sandbox) bool { return o == sb })
}

// maxRows bounds the rows of destroyed sandboxes, so that a server that runs
// for days does not grow.
const maxRows = 10_000

func (s *Server) trimLocked() {
	if len(s.order) <= maxRows {
		return
	}
	i := slices.IndexFunc(s.order, func(sb *sandbox) bool { return sb.state.terminal() })
	if i >= 0 {
		s.forgetLocked(s.order[i])
	}
}

// addLocked puts a new row into the server.
func (s *Server) addLocked(sb *sandbox) {
	sb.left = make(chan struct{})
	close(sb.left)
	s.sandboxes[sb.id] = sb
	s.order = append(s.order, sb)
}

// nameTakenLocked tells whether a live sandbox of the account has the name.
// One that is paused or still being destroyed keeps its name.
func (s *Server) nameTakenLocked(owner, name string) bool {
	return slices.ContainsFunc(s.order, func(sb *sandbox) bool {
		return sb.owner == owner && sb.name == name && !sb.state.terminal()
	})
}

// view is a sandbox as get, list, by-ip, patch and fork show it.
type view struct {
	ID             string   `json:"id"`
	Status         State    `json:"status"`
	VCPU           int      `json:"vcpu"`
	MemMiB         int      `json:"mem_mib"`
	DiskMiB        int      `json:"disk_mib"`
	CreatedAt      string   `json:"created_at"`
	IngressEnabled bool     `json:"ingress_enabled"`
	IP             string   `json:"ip,omitempty"`
	Name           string   `json:"name,omitempty"`
	Shape          string   `json:"shape,omitempty"`
	Rootfs         string   `json:"rootfs,omitempty"`
	Region         string   `json:"region,omitempty"`
	RunningAt      string   `json:"running_at,omitempty"`
	DestroyedAt    string   `json:"destroyed_at,omitempty"`
	PausedAt       string   `json:"paused_at,omitempty"`
	LastResumedAt  string   `json:"last_resumed_at,omitempty"`
	SpawnMS        float64  `json:"spawn_ms,omitempty"`
	Egress         []string `json:"egress,omitempty"`
	Envs           []string `json:"envs,omitempty"`
	SSHPubkeys     []string `json:"ssh_pubkeys,omitempty"`
	CreatedBy      string   `json:"created_by,omitempty"`
	ForkedFrom     string   `json:"forked_from,omitempty"`
	AutoPause      int      `json:"auto_pause_after_seconds,omitempty"`
	IngressURL     string   `json:"ingress_url_template,omitempty"`
}

func (sb *sandbox) viewLocked() view {
	v := view{
		ID: sb.id, Status: sb.state, VCPU: sb.shape.VCPU, MemMiB: sb.shape.MemMiB, DiskMiB: sb.diskMiB,
		CreatedAt: stamp(sb.createdAt), IngressEnabled: sb.ingress, Name: sb.name, Shape: sb.shape.ID,
		Rootfs: sb.rootfs, Region: sb.region, RunningAt: stamp(sb.runningAt), DestroyedAt: stamp(sb.destroyedAt),
		PausedAt: stamp(sb.pausedAt), LastResumedAt: stamp(sb.resumedAt), SpawnMS: milliseconds(sb.boot),
		Egress: slices.Clone(sb.egress), Envs: slices.Sorted(maps.Keys(sb.envs)), SSHPubkeys: sb.sshKeys, CreatedBy: sb.owner,
		ForkedFrom: sb.forkedFrom, AutoPause: sb.autoPause,
	}
	if sb.state != StateCreating {
		v.IP = sb.ip
	}
	if sb.ingress {
		v.IngressURL = sb.ingressURL()
	}
	return v
}

// ingressURL holds the ULID without its prefix and the literal <port>.
func (sb *sandbox) ingressURL() string {
	return "https://" + sb.id[len(sb.id)-ulidLength:] + "-<port>.ingress.invalid"
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// stamp renders a time as the API does; "" for none.
func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

func (s *Server) viewOf(sb *sandbox) view {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sb.viewLocked()
}

func (s *Server) handleGet(w http.ResponseWriter, _ *http.Request, sb *sandbox) {
	s.mu.Lock()
	if sb.state == StateCreating && sb.machine != nil && sb.pollsLeft > 0 {
		if sb.pollsLeft--; sb.pollsLeft == 0 {
			defer s.startRunning(sb, sb.epoch)
		}
	}
	v := sb.viewLocked()
	s.mu.Unlock()
	success(w, http.StatusOK, v)
}

func (s *Server) handleByIP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	i := slices.IndexFunc(s.order, func(sb *sandbox) bool {
		return sb.owner == userOf(r) && sb.ip == r.PathValue("ip") && sb.state != StateCreating && !sb.state.terminal()
	})
	var v view
	if i >= 0 {
		v = s.order[i].viewLocked()
	}
	s.mu.Unlock()
	if i < 0 {
		fail(w, http.StatusNotFound, errNoSandbox)
		return
	}
	success(w, http.StatusOK, v)
}

// listFilters are the states that the provider documents for the filter.
var listFilters = []State{StateRunning, StateCreating, StateDestroyed, StateFailed}

// handleList shows the account's sandboxes, newest first and terminal rows
// included.
func (s *Server) handleList(w http.ResponseWriter, r *http.Request) {
	p, err := parsePage(r)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	filter := State(r.URL.Query().Get("status"))
	if filter != "" && !s.opts.AnyStatusFilter && !slices.Contains(listFilters, filter) {
		fail(w, http.StatusBadRequest, badField("status", "must be one of running, creating, destroyed, failed"))
		return
	}
	views := s.views(userOf(r), filter)
	switch s.opts.ListShape {
	case ListBare:
		success(w, http.StatusOK, views)
	case ListNamed:
		success(w, http.StatusOK, map[string]any{"sandboxes": views})
	default:
		success(w, http.StatusOK, paginate(views, p))
	}
}

func (s *Server) views(owner string, filter State) []view {
	views := []view{}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sb := range slices.Backward(s.order) {
		if sb.owner != owner || filter != "" && sb.state != filter || now.Sub(sb.createdAt) < s.opts.ListLag {
			continue
		}
		views = append(views, sb.viewLocked())
	}
	return views
}
