package createostest

import (
	"net/http"
	"slices"
)

// Shape is a size of machine in the catalogue.
type Shape struct {
	ID             string `json:"id"`
	VCPU           int    `json:"vcpu"`
	MemMiB         int    `json:"mem_mib"`
	DefaultDiskMiB int    `json:"default_disk_mib"`
	CPUQuotaPct    int    `json:"cpu_quota_pct,omitempty"` // percent of one CPU; 0 is no quota
}

// Rootfs is a disk image in the catalogue.
type Rootfs struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	Deprecated  bool   `json:"deprecated,omitempty"`
	Successor   string `json:"successor,omitempty"`
	// Disabled images are listed nowhere and refused with 400.
	Disabled bool `json:"-"`
}

func defaultShapes() []Shape {
	const disk = 10240
	return []Shape{
		{"s-1vcpu-256mb", 1, 256, disk, 0},
		{"s-0.25vcpu-512mb", 1, 512, disk, 25},
		{"s-0.5vcpu-1gb", 1, 1024, disk, 50},
		{"s-1vcpu-1gb", 1, 1024, disk, 0},
		{"s-1vcpu-2gb", 1, 2048, disk, 0},
		{"s-2vcpu-2gb", 2, 2048, disk, 0},
		{"s-2vcpu-4gb", 2, 4096, disk, 0},
		{"s-4vcpu-4gb", 4, 4096, disk, 0},
		{"s-4vcpu-8gb", 4, 8192, disk, 0},
		{"s-8vcpu-8gb", 8, 8192, disk, 0},
		{"s-8vcpu-16gb", 8, 16384, disk, 0},
	}
}

func defaultRootfs() []Rootfs {
	return []Rootfs{
		{Name: "devbox:1", Description: "general purpose"},
		{Name: "ubuntu:26.04"},
		{Name: "debian:13"},
		{Name: "alpine:3.20"},
		{Name: "desktop:1"},
	}
}

func (s *Server) shape(id string) (Shape, bool) {
	i := slices.IndexFunc(s.opts.Shapes, func(sh Shape) bool { return sh.ID == id })
	if i < 0 {
		return Shape{}, false
	}
	return s.opts.Shapes[i], true
}

func (s *Server) defaultRootfs() string {
	if len(s.opts.Rootfs) == 0 {
		return ""
	}
	return s.opts.Rootfs[0].Name
}

func (s *Server) hasRootfs(name string) bool {
	return slices.ContainsFunc(s.opts.Rootfs, func(r Rootfs) bool { return r.Name == name && !r.Disabled })
}

func (s *Server) handleShapes(w http.ResponseWriter, r *http.Request) {
	page, err := parsePage(r)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	success(w, http.StatusOK, paginate(s.opts.Shapes, page))
}

func (s *Server) handleRootfs(w http.ResponseWriter, _ *http.Request) {
	names, entries := []string{}, []Rootfs{}
	for _, fs := range s.opts.Rootfs {
		if !fs.Disabled {
			names, entries = append(names, fs.Name), append(entries, fs)
		}
	}
	success(w, http.StatusOK, map[string]any{"rootfs": names, "default": s.defaultRootfs(), "entries": entries})
}

func (s *Server) handleHealth(w http.ResponseWriter, _ *http.Request) {
	success(w, http.StatusOK, map[string]any{"up": true})
}

func (s *Server) handleReady(w http.ResponseWriter, _ *http.Request) {
	success(w, http.StatusOK, map[string]any{"ready": true, "scheduler_last_ok_ms_ago": 420})
}

// handleWhoami tells the account and how many sandboxes it has; total is what
// is not destroyed.
func (s *Server) handleWhoami(w http.ResponseWriter, r *http.Request) {
	user := userOf(r)
	var running, paused, other int
	s.mu.Lock()
	for _, sb := range s.sandboxes {
		switch {
		case sb.owner != user || sb.state == StateDestroyed:
		case sb.state == StateRunning:
			running++
		case sb.state == StatePaused:
			paused++
		default:
			other++
		}
	}
	s.mu.Unlock()
	success(w, http.StatusOK, map[string]any{"user_id": user, "stats": map[string]int{
		"running": running, "paused": paused, "other": other, "total": running + paused + other,
	}})
}
