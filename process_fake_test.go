package createos

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Routes of managed processes.
const (
	rSpawn   = "POST processes"
	rProcess = "GET process"
	rConnect = "GET connect"
	rInput   = "POST input"
	rWait    = "GET wait"
	rKill    = "DELETE process"
)

// A machine is a provider whose processes run: each is a Go function, in
// memory, so that tests of time work in a synctest bubble.
type machine struct {
	*provider
	d     *Driver
	env   Environment
	lease *Lease

	// program is what a process does once its line came. The process has
	// exited when it returns, unless it was ended before.
	program func(p *proc)
	// heartbeat is the gap between heartbeats.
	heartbeat time.Duration
	// exitAtTree holds the exit event back until the tree has exited.
	exitAtTree bool
	// unacknowledged is a script that does not get to the command.
	unacknowledged bool

	mu     sync.Mutex // guards all below
	procs  []*proc
	bodies []string          // of all requests but uploads
	files  map[string]string // uploaded
}

// A proc is one process.
type proc struct {
	m    *machine
	id   string
	args []string

	mu       sync.Mutex // guards all below
	changed  chan struct{}
	lines    []string // events as NDJSON
	seq      int64
	oldest   int64
	exit     string // fields of the exit
	leader   bool   // has exited
	tree     bool   // has exited
	stubborn int    // kills that do not end the tree
	script   string
	input    string
	killed   chan struct{}
}

func newMachine(t testing.TB, cfg DriverConfig, edit ...func(*Config)) *machine {
	m := &machine{provider: newProvider(t), heartbeat: 5 * time.Second, files: map[string]string{}}
	one := `=~^` + regexp.QuoteMeta(origin) + `/v1/sandboxes/[\w-]+/processes`
	for _, r := range []struct {
		name, method, url string
		healthy           answerFunc
	}{
		{rSpawn, "POST", one + `$`, m.spawn},
		{rProcesses, "GET", one + `$`, m.listProcs},
		{rProcess, "GET", one + `/[\w-]+$`, m.on((*proc).show)},
		{rKill, "DELETE", one + `/[\w-]+$`, m.on((*proc).kill)},
		{rConnect, "GET", one + `/[\w-]+/connect`, m.on((*proc).connect)},
		{rInput, "POST", one + `/[\w-]+/input$`, m.on((*proc).feed)},
		{rWait, "GET", one + `/[\w-]+/wait`, m.on((*proc).wait)},
	} {
		m.mock.RegisterResponder(r.method, r.url, func(req *http.Request) (*http.Response, error) {
			return m.answer(r.name, r.healthy, req)
		})
	}
	m.d = m.driver(cfg)
	m.env = testEnv(edit...)
	m.lease = m.acquire(m.d, m.env)
	m.requests()
	return m
}

// exec is an Exec of a command whose program is f.
func (m *machine) exec(ctx context.Context, cmd Command, f func(p *proc)) (*Result, error) {
	m.program = f
	if cmd.Name == "" {
		cmd.Name = "program"
	}
	return m.d.Exec(ctx, m.env, m.lease, cmd)
}

// only is the one process that there is.
func (m *machine) only() *proc {
	m.mu.Lock()
	defer m.mu.Unlock()
	require.Len(m.t, m.procs, 1)
	return m.procs[0]
}

// requireNothingRuns is the law of every Exec that does not poison its lease.
func (m *machine) requireNothingRuns() {
	m.t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.procs {
		p.mu.Lock()
		require.True(m.t, p.tree, "process %s runs", p.id)
		p.mu.Unlock()
	}
	require.Empty(m.t, m.d.Unconfirmed())
}

func (m *machine) note(req *http.Request) string {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		m.t.Errorf("read request: %v", err)
	}
	m.mu.Lock()
	m.bodies = append(m.bodies, string(body))
	m.mu.Unlock()
	return string(body)
}

func (m *machine) spawn(_ *provider, req *http.Request) (*http.Response, error) {
	var body struct {
		Cmd  string
		Args []string
	}
	if err := json.Unmarshal([]byte(m.note(req)), &body); err != nil {
		return nil, err
	}
	m.mu.Lock()
	p := &proc{m: m, id: fmt.Sprintf("proc-%d", len(m.procs)+1), args: body.Args, oldest: 1, changed: make(chan struct{}), killed: make(chan struct{})}
	m.procs = append(m.procs, p)
	m.mu.Unlock()
	time.AfterFunc(2*time.Minute, p.giveUp)
	return p.show(req)
}

func (m *machine) listProcs(*provider, *http.Request) (*http.Response, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var rows []string
	for _, p := range m.procs {
		p.mu.Lock()
		rows = append(rows, p.rowLocked())
		p.mu.Unlock()
	}
	return ok(`{"processes":[`+strings.Join(rows, ",")+`]}`)(nil, nil)
}

var pidInPath = regexp.MustCompile(`/processes/([\w-]+)`)

func (m *machine) on(f func(*proc, *http.Request) (*http.Response, error)) answerFunc {
	return func(_ *provider, req *http.Request) (*http.Response, error) {
		pid := pidInPath.FindStringSubmatch(req.URL.Path)[1]
		m.mu.Lock()
		var found *proc
		for _, p := range m.procs {
			if p.id == pid {
				found = p
			}
		}
		m.mu.Unlock()
		if found == nil {
			return refuse(http.StatusNotFound)(nil, nil)
		}
		return f(found, req)
	}
}

func (p *proc) rowLocked() string {
	state := "running"
	if p.leader {
		state = "exited"
	}
	fields := ""
	if p.exit != "" {
		fields = "," + p.exit
	}
	args, _ := json.Marshal(p.args)
	return fmt.Sprintf(`{"process_id":%q,"state":%q,"cmd":"/bin/bash","args":%s,"leader_exited":%v,"tree_exited":%v%s,"output":{"oldest_seq":%d,"newest_seq":%d,"bytes":1}}`,
		p.id, state, args, p.leader, p.tree, fields, p.oldest, p.seq)
}

func (p *proc) show(*http.Request) (*http.Response, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return ok(p.rowLocked())(nil, nil)
}

func (p *proc) changeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// out prints.
func (p *proc) out(stream, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seq++
	p.lines = append(p.lines, fmt.Sprintf(`{"type":"data","seq":%d,"stream":%q,"data_base64":%q}`,
		p.seq, stream, base64.StdEncoding.EncodeToString([]byte(text))))
	p.changeLocked()
}

// end is the exit; fields are those of the exit event.
func (p *proc) end(fields string, tree bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.leader {
		p.tree = p.tree || tree
		p.changeLocked()
		return
	}
	p.exit, p.leader, p.tree = fields, true, tree
	p.changeLocked()
}

func exitCode(code int) string { return fmt.Sprintf(`"exit_code":%d`, code) }

// kill is DELETE.
func (p *proc) kill(req *http.Request) (*http.Response, error) {
	p.mu.Lock()
	if p.stubborn > 0 {
		p.stubborn--
		p.mu.Unlock()
		return p.show(req)
	}
	select {
	case <-p.killed:
	default:
		close(p.killed)
	}
	p.mu.Unlock()
	p.end(`"signal":"SIGTERM"`, true)
	return p.show(req)
}

// sleep is a sleep that a kill ends.
func (p *proc) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.killed:
	}
}

// giveUp is what the loader does when no line came for a while.
func (p *proc) giveUp() {
	p.mu.Lock()
	started := p.script != "" || p.leader
	p.mu.Unlock()
	if !started {
		p.out("stderr", fmt.Sprintf("createos-exec %s: %s\n", p.args[4], failNoCommand))
		p.end(exitCode(failCode), true)
	}
}

// feed is the input: the first whole line starts the program.
func (p *proc) feed(req *http.Request) (*http.Response, error) {
	var body struct {
		Data []byte `json:"data_base64"`
	}
	if err := json.Unmarshal([]byte(p.m.note(req)), &body); err != nil {
		return nil, err
	}
	p.mu.Lock()
	if p.leader {
		p.mu.Unlock()
		return refuse(http.StatusConflict)(nil, nil)
	}
	p.input += string(body.Data)
	run := false
	for _, line := range strings.Split(p.input, "\n") {
		if text, whole := strings.CutPrefix(line, "L1:"); whole && strings.HasSuffix(text, ":E") && p.script == "" {
			script, err := base64.StdEncoding.DecodeString(strings.TrimSuffix(text, ":E"))
			if err != nil {
				p.m.t.Errorf("decode script: %v", err)
			}
			p.script, run = string(script), true
		}
	}
	p.mu.Unlock()
	if run {
		if !p.m.unacknowledged {
			p.out("stderr", acknowledgement(p.args[4]))
		}
		go func() {
			p.m.program(p)
			p.end(exitCode(0), true)
		}()
	}
	return ok(`{"input_seq":1}`)(nil, nil)
}

func (p *proc) wait(req *http.Request) (*http.Response, error) {
	millis, err := strconv.Atoi(req.URL.Query().Get("timeout_ms"))
	if err != nil {
		return nil, err
	}
	timer := time.NewTimer(time.Duration(millis) * time.Millisecond)
	defer timer.Stop()
	for {
		p.mu.Lock()
		over, changed := p.leader && (p.tree || req.URL.Query().Get("scope") == "leader"), p.changed
		p.mu.Unlock()
		if over {
			return p.show(req)
		}
		select {
		case <-changed:
		case <-timer.C:
			return refuse(http.StatusRequestTimeout)(nil, nil)
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
}

// connect streams the journal.
func (p *proc) connect(req *http.Request) (*http.Response, error) {
	return p.stream(req, -1, true)
}

// stream streams at most limit events, any number if that is negative, and then
// cuts, or ends if clean.
func (p *proc) stream(req *http.Request, limit int, clean bool) (*http.Response, error) {
	after, err := strconv.ParseInt(req.URL.Query().Get("after"), 10, 64)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	oldest := p.oldest
	p.mu.Unlock()
	if after+1 < oldest {
		return jsonResponse(http.StatusGone, fmt.Sprintf(
			`{"status":"fail","data":{"code":"output_offset_expired","oldest_available_seq":%d}}`, oldest)), nil
	}
	r, w := io.Pipe()
	stop := context.AfterFunc(req.Context(), func() { _ = w.CloseWithError(req.Context().Err()) })
	go func() {
		defer stop()
		for limit != 0 {
			line, last := p.next(req.Context(), after)
			if line == "" {
				_ = w.CloseWithError(req.Context().Err())
				return
			}
			if !last && !strings.Contains(line, "heartbeat") {
				after++
			}
			if _, err := io.WriteString(w, line+"\n"); err != nil {
				return
			}
			if last {
				break
			}
			limit--
		}
		if clean {
			_ = w.Close()
		} else {
			_ = w.CloseWithError(io.ErrUnexpectedEOF)
		}
	}()
	return streaming(r), nil
}

func streaming(r io.ReadCloser) *http.Response {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/x-ndjson"}}, Body: r, ContentLength: -1}
}

// next is the event after a number, when there is one.
func (p *proc) next(ctx context.Context, after int64) (line string, last bool) {
	timer := time.NewTimer(p.m.heartbeat)
	defer timer.Stop()
	for {
		p.mu.Lock()
		changed := p.changed
		switch {
		case int(after) < len(p.lines):
			line = p.lines[after]
		case p.leader && (p.tree || !p.m.exitAtTree):
			line, last = `{"type":"exit",`+p.exit+`}`, true
		}
		p.mu.Unlock()
		if line != "" {
			return line, last
		}
		select {
		case <-changed:
		case <-timer.C:
			return `{"type":"heartbeat"}`, false
		case <-ctx.Done():
			return "", false
		}
	}
}

// cutAfter is a connection that breaks after a number of events.
func (m *machine) cutAfter(events int) answerFunc {
	return m.on(func(p *proc, req *http.Request) (*http.Response, error) { return p.stream(req, events, false) })
}

// endAfter is a connection that ends, as if that were all, after a number of
// events.
func (m *machine) endAfter(events int) answerFunc {
	return m.on(func(p *proc, req *http.Request) (*http.Response, error) { return p.stream(req, events, true) })
}

// streams is a connection with this text, whatever was asked for.
func streams(text string) answerFunc {
	return func(*provider, *http.Request) (*http.Response, error) {
		return streaming(io.NopCloser(strings.NewReader(text))), nil
	}
}
