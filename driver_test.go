package createos

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jarcoal/httpmock"
	"github.com/stretchr/testify/require"
)

// A provider is the API as unit tests script it: every route has a healthy
// answer, and a queue of answers that come first.
type provider struct {
	t    testing.TB
	mock *httpmock.MockTransport

	mu      sync.Mutex
	scripts map[string][]answerFunc
	log     []string
	state   string // of box, as get shows it
	name    string // of the latest create
	envs    []string
	marker  string
}

// An answerFunc answers one request.
type answerFunc func(p *provider, req *http.Request) (*http.Response, error)

const (
	box       = "sb-01k7a0000000000000000000t1"
	origin    = "http://localhost:7"
	keyCanary = "skp_canary_key"
)

// Routes as scripts and the log name them.
const (
	rWhoami    = "GET whoami"
	rCreate    = "POST sandboxes"
	rList      = "GET sandboxes"
	rGet       = "GET sandbox"
	rDelete    = "DELETE sandbox"
	rPause     = "POST pause"
	rResume    = "POST resume"
	rExec      = "POST exec"
	rPut       = "PUT files"
	rFetch     = "GET files"
	rSetEgress = "PUT egress"
	rProcesses = "GET processes"
)

func newProvider(t testing.TB) *provider {
	p := &provider{t: t, mock: httpmock.NewMockTransport(), scripts: make(map[string][]answerFunc), state: stateRunning}
	one := `=~^` + regexp.QuoteMeta(origin) + `/v1/sandboxes/[\w-]+`
	routes := []struct {
		name, method, url string
		healthy           answerFunc
	}{
		{rWhoami, "GET", origin + "/v1/whoami", ok(`{"user_id":"usr_1","stats":{"running":0,"paused":0,"other":0,"total":0}}`)},
		{rCreate, "POST", origin + "/v1/sandboxes", created},
		{rList, "GET", origin + "/v1/sandboxes", listed()},
		{rGet, "GET", one + `$`, view},
		{rDelete, "DELETE", one + `$`, becomes(stateDestroyed, `{"id":"`+box+`","status":"destroying"}`)},
		{rPause, "POST", one + `/pause$`, becomes(statePaused, `{"id":"`+box+`","status":"pausing"}`)},
		{rResume, "POST", one + `/resume$`, becomes(stateRunning, `{"id":"`+box+`","status":"resuming"}`)},
		{rExec, "POST", one + `/exec$`, ok(`{"result":{"stdout":"","stderr":"","exit_code":0},"exec_ms":1}`)},
		{rPut, "PUT", one + `/files$`, stored},
		{rFetch, "GET", one + `/files$`, fetched},
		{rSetEgress, "PUT", one + `/egress$`, echoedEgress},
		{rProcesses, "GET", one + `/processes$`, ok(`{"processes":[]}`)},
	}
	for _, r := range routes {
		p.mock.RegisterResponder(r.method, r.url, func(req *http.Request) (*http.Response, error) {
			return p.answer(r.name, r.healthy, req)
		})
	}
	return p
}

func (p *provider) answer(route string, healthy answerFunc, req *http.Request) (*http.Response, error) {
	p.mu.Lock()
	p.log = append(p.log, route)
	next := healthy
	if queue := p.scripts[route]; len(queue) > 0 {
		next, p.scripts[route] = queue[0], queue[1:]
	}
	p.mu.Unlock()
	resp, err := next(p, req)
	if resp != nil {
		resp.Request = req
	}
	return resp, err
}

// script puts answers before the healthy one of a route.
func (p *provider) script(route string, answers ...answerFunc) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.scripts[route] = append(p.scripts[route], answers...)
}

// always makes one answer the only one of a route.
func (p *provider) always(route string, a answerFunc) {
	p.script(route, repeat(1000, a)...)
}

func (p *provider) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.scripts)
}

func (p *provider) setState(state string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state = state
}

func (p *provider) current() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

func (p *provider) count(route string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, r := range p.log {
		if r == route {
			n++
		}
	}
	return n
}

// requests returns the log and empties it.
func (p *provider) requests() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	log := p.log
	p.log = nil
	return log
}

func repeat(n int, a answerFunc) []answerFunc {
	all := make([]answerFunc, n)
	for i := range all {
		all[i] = a
	}
	return all
}

func jsonResponse(status int, body string) *http.Response {
	resp := httpmock.NewStringResponse(status, body)
	resp.Header.Set("Content-Type", "application/json")
	return resp
}

// ok answers 200 with data.
func ok(data string) answerFunc {
	return func(*provider, *http.Request) (*http.Response, error) {
		return jsonResponse(http.StatusOK, `{"status":"success","data":`+data+`}`), nil
	}
}

// refuse answers with a status and a JSend body that holds a provider text.
func refuse(status int) answerFunc {
	return func(*provider, *http.Request) (*http.Response, error) {
		kind := `"status":"fail","data":"provider canary text"`
		if status >= 500 {
			kind = `"status":"error","message":"provider canary text","code":1`
		}
		return jsonResponse(status, `{`+kind+`}`), nil
	}
}

// raw answers with a body as it is.
func raw(status int, body string) answerFunc {
	return func(*provider, *http.Request) (*http.Response, error) { return jsonResponse(status, body), nil }
}

// reset is a connection that broke after the request was sent.
func reset(*provider, *http.Request) (*http.Response, error) {
	return nil, fmt.Errorf("read tcp 10.0.0.1->secret.host: %w", syscall.ECONNRESET)
}

// hang answers when the client has left.
func hang(_ *provider, req *http.Request) (*http.Response, error) {
	<-req.Context().Done()
	return nil, req.Context().Err()
}

// then does one thing and answers with another: an effect without its reply.
func then(effect, reply answerFunc) answerFunc {
	return func(p *provider, req *http.Request) (*http.Response, error) {
		if _, err := effect(p, req); err != nil {
			return nil, err
		}
		return reply(p, req)
	}
}

// created makes the box.
func created(p *provider, req *http.Request) (*http.Response, error) {
	var body struct {
		Name, Shape string
		Envs        map[string]string
	}
	if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.name, p.envs = body.Name, nil
	for name := range body.Envs {
		p.envs = append(p.envs, name)
	}
	return jsonResponse(http.StatusCreated, fmt.Sprintf(
		`{"status":"success","data":{"id":%q,"status":%q,"name":%q,"shape":%q}}`, box, p.state, p.name, body.Shape)), nil
}

// row is the box as get and list show it.
func (p *provider) row() string {
	envs, _ := json.Marshal(p.envs)
	return fmt.Sprintf(`{"id":%q,"status":%q,"name":%q,"shape":"s-1vcpu-1gb","envs":%s,"vcpu":1,"mem_mib":1024,"disk_mib":1,`+
		`"created_at":"2026-10-02T09:00:00Z","ingress_enabled":false}`, box, p.state, p.name, envs)
}

func view(p *provider, _ *http.Request) (*http.Response, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return jsonResponse(http.StatusOK, `{"status":"success","data":`+p.row()+`}`), nil
}

// shows is a get that shows a state, whatever it is.
func shows(state string) answerFunc {
	return func(p *provider, req *http.Request) (*http.Response, error) {
		p.setState(state)
		return view(p, req)
	}
}

// listed is a list with these rows.
func listed(rows ...string) answerFunc {
	return func(*provider, *http.Request) (*http.Response, error) {
		return jsonResponse(http.StatusOK, fmt.Sprintf(
			`{"status":"success","data":{"data":[%s],"pagination":{"total":%d,"limit":500,"offset":0,"count":%d}}}`,
			strings.Join(rows, ","), len(rows), len(rows))), nil
	}
}

// listsBox is a list that shows the box.
func listsBox(p *provider, req *http.Request) (*http.Response, error) {
	p.mu.Lock()
	row := p.row()
	p.mu.Unlock()
	return listed(row)(p, req)
}

// becomes moves the state and answers with data.
func becomes(state, data string) answerFunc {
	return func(p *provider, req *http.Request) (*http.Response, error) {
		p.setState(state)
		return ok(data)(p, req)
	}
}

func stored(p *provider, req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.marker = string(body)
	p.mu.Unlock()
	return ok(`{}`)(p, req)
}

func fetched(p *provider, _ *http.Request) (*http.Response, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return httpmock.NewStringResponse(http.StatusOK, p.marker), nil
}

// file is a download with this content.
func file(content string) answerFunc {
	return func(*provider, *http.Request) (*http.Response, error) {
		return httpmock.NewStringResponse(http.StatusOK, content), nil
	}
}

func echoedEgress(p *provider, req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	var list struct{ Egress json.RawMessage }
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, err
	}
	return ok(`{"id":"`+box+`","egress":`+string(list.Egress)+`}`)(p, req)
}

// driver makes a driver on the provider.
func (p *provider) driver(cfg DriverConfig) *Driver {
	p.t.Helper()
	cfg.Transport, cfg.DisableFallbackKey = p.mock, true
	if cfg.Budget == nil {
		cfg.Budget = NewBudget(1 << 20)
	}
	d, err := NewDriver(cfg)
	require.NoError(p.t, err)
	return d
}

// testEnv is the environment of unit tests; edit changes its configuration.
func testEnv(edit ...func(*Config)) Environment {
	cfg := Config{APIURL: origin, APIKey: NewSecret(keyCanary), Shape: "s-1vcpu-1gb"}
	for _, e := range edit {
		e(&cfg)
	}
	return Environment{CompanyID: "acme", EnvironmentID: "ci", Config: cfg}
}

func reusable(c *Config) { c.ReuseLease = true }

// acquire is an Acquire that must work.
func (p *provider) acquire(d *Driver, env Environment) *Lease {
	p.t.Helper()
	lease, err := d.Acquire(p.t.Context(), env, AcquireOptions{})
	require.NoError(p.t, err)
	return lease
}

// kinds lists what is unconfirmed, by kind.
func kinds(d *Driver) []DebtKind {
	all := []DebtKind{}
	for _, u := range d.Unconfirmed() {
		all = append(all, u.Kind)
	}
	return all
}

// quietDriver checks that a driver holds no state of finished work.
func quietDriver(t testing.TB, d *Driver) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	require.Empty(t, d.active)
	require.Empty(t, d.acquiring)
	require.Empty(t, d.closing)
	require.Empty(t, d.works)
}

var errTest = errors.New("test")
