package createos

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"time"
	"unicode"
	"unicode/utf8"
)

// A Sandbox is what the provider tells of a sandbox. A field that was not
// shown is zero: in the reply to a create, a destroy or a pause most are not.
type Sandbox struct {
	// ID is the provider's id.
	ID string
	// Status is the provider's word: creating, running, pausing, paused,
	// resuming, forking, error, destroying, destroyed or failed, or one that
	// this package does not know.
	Status string
	// Name is unique among the sandboxes of an account that are not over.
	Name   string
	Shape  string
	Rootfs string
	Region string
	// Egress is the list of addresses that may be reached. Empty means all.
	Egress []string
	// EnvNames are the names of the environment variables that were given at
	// creation; values are never shown. Nil if the names were not shown.
	EnvNames []string
	// Ingress says that the sandbox can be reached from outside.
	Ingress bool
	// AutoPauseAfter is the idle time after which the provider pauses the
	// sandbox; 0 means never.
	AutoPauseAfter time.Duration
	// The times are zero if they were not shown or not readable.
	CreatedAt   time.Time
	RunningAt   time.Time
	PausedAt    time.Time
	DestroyedAt time.Time

	// has tells a field that was empty from one that was not shown.
	has sandboxFields
	// shownAt is what the provider's clock said when it showed this; zero if it
	// did not tell.
	shownAt time.Time
}

// sandboxFields says which fields of a Sandbox were shown.
type sandboxFields struct {
	status, name, shape, rootfs, region, egress, envs, ingress, autoPause bool
}

// An Account is what the provider tells of the owner of a key.
type Account struct {
	// UserID is the account; sandboxes belong to it, whatever key made them.
	UserID string
	// Counts of sandboxes that are not destroyed. Total is all of them.
	Running, Paused, Other, Total int
}

// Sandbox reads one sandbox. A 404 matches [ErrNotFound]; it does not tell a
// sandbox that is gone from one of another account or region. Other errors are
// as in [Client], and ctx ends the call.
func (c *Client) Sandbox(ctx context.Context, id string) (Sandbox, error) { return c.get(ctx, id) }

// Sandboxes lists the sandboxes of the account, those that are over included
// as long as the provider shows them. It returns the whole list or an error: a
// list that changed while its pages were read matches [ErrInvalidResponse], and
// the caller may try again.
func (c *Client) Sandboxes(ctx context.Context) ([]Sandbox, error) { return c.list(ctx) }

// Account reads whose key it is. A key that is refused matches
// [ErrUnauthorized].
func (c *Client) Account(ctx context.Context) (Account, error) {
	a, err := c.do(ctx, &request{
		method: http.MethodGet, path: "/v1/whoami", operation: OpLifecycle, detail: "read account",
	})
	if err != nil {
		return Account{}, err
	}
	var w struct {
		UserID string `json:"user_id"`
		Stats  struct {
			Running int `json:"running"`
			Paused  int `json:"paused"`
			Other   int `json:"other"`
			Total   int `json:"total"`
		} `json:"stats"`
	}
	if err := a.decode(&w); err != nil {
		return Account{}, err
	}
	if !validAccount(w.UserID) {
		return Account{}, a.invalid()
	}
	return Account{w.UserID, w.Stats.Running, w.Stats.Paused, w.Stats.Other, w.Stats.Total}, nil
}

// validAccount says whether an account id can be stored and compared. It never
// becomes part of a path, so it may be an address or hold a bar.
func validAccount(id string) bool {
	if id == "" || len(id) > 200 || !utf8.ValidString(id) {
		return false
	}
	for _, c := range id {
		if !unicode.IsPrint(c) {
			return false
		}
	}
	return true
}

// wireSandbox is a Sandbox as it is sent. A pointer is nil if the field was
// absent or null.
type wireSandbox struct {
	ID          string    `json:"id"`
	Status      *string   `json:"status"`
	Name        *string   `json:"name"`
	Shape       *string   `json:"shape"`
	Rootfs      *string   `json:"rootfs"`
	Region      *string   `json:"region"`
	Egress      *[]string `json:"egress"`
	Envs        *[]string `json:"envs"`
	Ingress     *bool     `json:"ingress_enabled"`
	AutoPause   *int32    `json:"auto_pause_after_seconds"`
	CreatedAt   any       `json:"created_at"`
	RunningAt   any       `json:"running_at"`
	PausedAt    any       `json:"paused_at"`
	DestroyedAt any       `json:"destroyed_at"`
}

func (w *wireSandbox) sandbox() Sandbox {
	s := Sandbox{
		ID:        w.ID,
		CreatedAt: timeOf(w.CreatedAt), RunningAt: timeOf(w.RunningAt),
		PausedAt: timeOf(w.PausedAt), DestroyedAt: timeOf(w.DestroyedAt),
	}
	s.Status, s.has.status = shown(w.Status)
	s.Name, s.has.name = shown(w.Name)
	s.Shape, s.has.shape = shown(w.Shape)
	s.Rootfs, s.has.rootfs = shown(w.Rootfs)
	s.Region, s.has.region = shown(w.Region)
	s.Egress, s.has.egress = shown(w.Egress)
	s.EnvNames, s.has.envs = shown(w.Envs)
	s.Ingress, s.has.ingress = shown(w.Ingress)
	var idle int32
	idle, s.has.autoPause = shown(w.AutoPause)
	s.AutoPauseAfter = time.Duration(idle) * time.Second
	return s
}

func shown[T any](p *T) (v T, ok bool) {
	if p == nil {
		return v, false
	}
	return *p, true
}

// timeOf reads a time. A time decides nothing, so one that is not readable
// must not make the rest of the answer unreadable.
func timeOf(v any) time.Time {
	text, _ := v.(string)
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}
	}
	return t
}

// decodeSandbox reads an answer about one sandbox. An answer about another one
// than was asked for is as bad as none. Without an asked id any valid one
// will do.
func (a *answer) decodeSandbox(asked string) (Sandbox, error) {
	var w wireSandbox
	if err := a.decode(&w); err != nil {
		return Sandbox{}, err
	}
	if !validID(w.ID) || asked != "" && w.ID != asked {
		return Sandbox{}, a.invalid()
	}
	return w.sandbox(), nil
}

// sandboxPath is the path of a sandbox and of what is under it.
func sandboxPath(id, under string) (string, error) {
	if !validID(id) {
		return "", &InputError{"sandbox id", "is no sandbox id"}
	}
	return "/v1/sandboxes/" + id + under, nil
}

// A createRequest is the body of a create; what is empty is left to the
// provider's default.
type createRequest struct {
	Name             string            `json:"name,omitempty"`
	Shape            string            `json:"shape"`
	Rootfs           string            `json:"rootfs,omitempty"`
	Region           string            `json:"region,omitempty"`
	Egress           []string          `json:"egress,omitempty"`
	AutoPauseSeconds int               `json:"auto_pause_after_seconds,omitempty"`
	Envs             map[string]string `json:"envs,omitempty"`
}

// create makes a sandbox that cannot be reached from outside. It is sent once;
// again only after 429. It has no bound but ctx, because the provider may queue
// a create. Status is what the reply says, and may be empty.
func (c *Client) create(ctx context.Context, q createRequest) (Sandbox, error) {
	a, err := c.do(ctx, &request{
		method: http.MethodPost, path: "/v1/sandboxes", operation: OpLifecycle, detail: "create sandbox", bound: noBound,
		body: struct {
			createRequest
			Ingress bool `json:"ingress_enabled"`
		}{q, false},
	})
	if err != nil {
		return Sandbox{}, err
	}
	s, err := a.decodeSandbox("")
	if err != nil {
		return Sandbox{}, err
	}
	if s.has.name && q.Name != "" && s.Name != q.Name {
		return Sandbox{}, a.invalid()
	}
	return s, nil
}

// get reads one sandbox.
func (c *Client) get(ctx context.Context, id string) (Sandbox, error) {
	a, err := c.onSandbox(ctx, id, "", &request{method: http.MethodGet, detail: "get sandbox"})
	if err != nil {
		return Sandbox{}, err
	}
	s, err := a.decodeSandbox(id)
	if err == nil && s.Status == "" {
		err = a.invalid()
	}
	if err != nil {
		return Sandbox{}, err
	}
	s.shownAt = a.clock()
	return s, nil
}

// onSandbox sends a lifecycle request about a sandbox.
func (c *Client) onSandbox(ctx context.Context, id, under string, r *request) (*answer, error) {
	path, err := sandboxPath(id, under)
	if err != nil {
		return nil, err
	}
	r.path, r.sandbox = path, id
	if r.operation == "" {
		r.operation = OpLifecycle
	}
	return c.do(ctx, r)
}

// destroy asks for the end of a sandbox, and returns what the reply says.
func (c *Client) destroy(ctx context.Context, id string) (Sandbox, error) {
	a, err := c.onSandbox(ctx, id, "", &request{method: http.MethodDelete, detail: "destroy sandbox"})
	if err != nil {
		return Sandbox{}, err
	}
	return a.decodeSandbox(id)
}

// pause asks for a pause. Beside what the reply says it returns when the
// provider proposes to look for the first time; 0 if it does not.
func (c *Client) pause(ctx context.Context, id string) (Sandbox, time.Duration, error) {
	return c.move(ctx, id, "/pause", "pause sandbox")
}

// resume is as pause, the other way.
func (c *Client) resume(ctx context.Context, id string) (Sandbox, time.Duration, error) {
	return c.move(ctx, id, "/resume", "resume sandbox")
}

func (c *Client) move(ctx context.Context, id, under, detail string) (Sandbox, time.Duration, error) {
	a, err := c.onSandbox(ctx, id, under, &request{method: http.MethodPost, detail: detail})
	if err != nil {
		return Sandbox{}, 0, err
	}
	s, err := a.decodeSandbox(id)
	if err != nil {
		return Sandbox{}, 0, err
	}
	return s, seconds(a.header.Get("X-Poll-After")), nil
}

// Egress reads the rules of what a sandbox may reach; an empty list means that
// nothing is kept from it. That a rule is listed does not mean that the provider
// enforces it: see Config.EgressAllowlist. Its errors are those of
// [Client.Sandbox].
func (c *Client) Egress(ctx context.Context, id string) ([]string, error) {
	a, err := c.onSandbox(ctx, id, "/egress", &request{method: http.MethodGet, detail: "get egress"})
	if err != nil {
		return nil, err
	}
	return a.decodeEgress(id)
}

// setEgress replaces the list and returns what the provider made of it. An
// empty list is refused: it would open everything.
func (c *Client) setEgress(ctx context.Context, id string, rules []string) ([]string, error) {
	if len(rules) == 0 {
		return nil, &InputError{"egress", "is empty, which would allow everything"}
	}
	a, err := c.onSandbox(ctx, id, "/egress", &request{
		method: http.MethodPut, detail: "set egress", body: map[string][]string{"egress": rules},
	})
	if err != nil {
		return nil, err
	}
	return a.decodeEgress(id)
}

func (a *answer) decodeEgress(asked string) ([]string, error) {
	var w struct {
		ID     string          `json:"id"`
		Egress json.RawMessage `json:"egress"`
	}
	if err := a.decode(&w); err != nil {
		return nil, err
	}
	var rules []string // null stands for the empty list, an absent field for nothing
	if w.ID != asked || json.Unmarshal(w.Egress, &rules) != nil {
		return nil, a.invalid()
	}
	return rules, nil
}

const (
	pageLimit = 500 // the most that the provider gives
	maxPages  = 200
)

// list reads all pages. What it returns is the whole list, as far as the
// provider's own count can prove it: a list that under-reports would make
// sandboxes look gone.
func (c *Client) list(ctx context.Context) ([]Sandbox, error) {
	var all []Sandbox
	seen := make(map[string]struct{})
	total := -1
	for range maxPages {
		a, err := c.do(ctx, &request{
			method: http.MethodGet, path: "/v1/sandboxes", operation: OpLifecycle, detail: "list sandboxes",
			query: url.Values{"limit": {strconv.Itoa(pageLimit)}, "offset": {strconv.Itoa(len(all))}}, limit: maxListJSON,
		})
		if err != nil {
			return nil, err
		}
		var rows []wireSandbox
		p, err := a.decodePage("sandboxes", &rows, len(all))
		if err != nil {
			return nil, err
		}
		for i := range rows {
			s := rows[i].sandbox()
			s.shownAt = a.clock()
			if _, twice := seen[s.ID]; twice || !validID(s.ID) || s.Status == "" {
				return nil, a.invalid()
			}
			seen[s.ID] = struct{}{}
			all = append(all, s)
		}
		switch {
		case p == nil:
			// A form without a total: the whole list, unless it was cut to
			// just what we asked for.
			if len(rows) == pageLimit {
				return nil, a.invalid()
			}
			return all, nil
		case total >= 0 && p.total != total, len(all) > p.total, len(rows) == 0 && len(all) < p.total:
			return nil, a.invalid()
		case len(all) == p.total:
			return all, nil
		}
		total = p.total
	}
	return nil, &ResponseError{Operation: OpLifecycle, Detail: "list sandboxes", Status: http.StatusOK}
}

// page is what a paginated list says of itself.
type page struct{ total int }

// decodePage reads the rows of a list in any of the forms that the provider
// has used: paginated, an object with the rows under the name of their kind, or
// the bare rows. Only the first gives a page.
func (a *answer) decodePage(kind string, rows any, offset int) (*page, error) {
	if bytes.HasPrefix(bytes.TrimSpace(a.data), []byte("[")) {
		return nil, a.decode(rows)
	}
	var object map[string]json.RawMessage
	if err := a.decode(&object); err != nil {
		return nil, err
	}
	list, paginated := object["data"]
	legacy, named := object[kind]
	if paginated == named { // neither, or both
		return nil, a.invalid()
	}
	if named {
		list = legacy
	}
	if !bytes.HasPrefix(list, []byte("[")) || json.Unmarshal(list, rows) != nil {
		return nil, a.invalid()
	}
	raw, counted := object["pagination"]
	if !counted && named {
		return nil, nil
	}
	var p struct{ Total, Offset, Count *int }
	if json.Unmarshal(raw, &p) != nil || p.Total == nil {
		return nil, a.invalid()
	}
	var items []json.RawMessage
	if json.Unmarshal(list, &items) != nil ||
		p.Count != nil && *p.Count != len(items) || p.Offset != nil && *p.Offset != offset {
		return nil, a.invalid()
	}
	return &page{*p.Total}, nil
}
