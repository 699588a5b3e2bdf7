package createostest

import (
	"bytes"
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

const (
	// execReadTimeout is how long an exec whose leader has exited is held by
	// children that keep its output open.
	execReadTimeout = 60 * time.Second
	// maxExecOutput bounds what a buffered exec collects of each stream.
	maxExecOutput = 64 << 20
)

type execRequest struct {
	Cmd    string            `json:"cmd"`
	Args   []string          `json:"args"`
	Stdin  string            `json:"stdin"`
	Env    map[string]string `json:"env"`
	Stream bool              `json:"stream"`
}

type execResult struct {
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	ExitCode int    `json:"exit_code"`
	Error    string `json:"error,omitempty"`
}

func (s *Server) handleExec(w http.ResponseWriter, r *http.Request, sb *sandbox) {
	var req execRequest
	err := s.decode(r, &req)
	if s.opts.DropExecStdin {
		req.Stdin = ""
	}
	if s.opts.DropExecEnv {
		req.Env = nil
	}
	if err == nil && req.Cmd == "" {
		err = badField("cmd", "is required")
	}
	if err == nil {
		err = s.checkCommandEnv(sb, req.Env)
	}
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	m, left, ok := s.running(w, sb)
	if !ok {
		return
	}
	if req.Stream || r.URL.Query().Get("stream") == "true" {
		s.execStream(w, r, sb, m, req, left)
		return
	}
	s.execBuffered(w, r, sb, m, req, left)
}

// execBuffered answers when the command has ended and its output is closed. If
// the client leaves or the sandbox is paused, the command is not ended.
func (s *Server) execBuffered(w http.ResponseWriter, r *http.Request, sb *sandbox, m machine, req execRequest, left <-chan struct{}) {
	began := time.Now()
	p := s.newManaged(sb, kindExec, req.Cmd, req.Args)
	var stdout, stderr boundedBuffer
	err := s.startManaged(sb, m, p, spec{
		cmd: req.Cmd, args: req.Args, env: mergeEnv(sb.envs, req.Env), stdout: &stdout, stderr: &stderr,
	})
	reply := func(result execResult) {
		success(w, http.StatusOK, map[string]any{"result": result, "exec_ms": milliseconds(time.Since(began))})
	}
	if err != nil {
		reply(execResult{ExitCode: -1, Error: "exec: " + err.Error()})
		return
	}
	s.feed(p, req.Stdin)
	select {
	case <-s.execEnd(p):
	case <-left:
	case <-s.done:
	case <-r.Context().Done():
		panic(http.ErrAbortHandler)
	}
	switch {
	case isClosed(s.done):
		panic(http.ErrAbortHandler)
	case isClosed(left):
		// What the gateway says when its upstream is gone. A conflict would
		// be a lie: the command was started, and goes on after a resume.
		failServer(w, http.StatusBadGateway, "bad gateway")
		return
	}
	result := execResult{Stdout: stdout.String(), Stderr: stderr.String()}
	code, signal := p.proc.status()
	if code != nil {
		result.ExitCode = *code
	} else {
		result.ExitCode, result.Error = -1, "signal: "+signal
	}
	reply(result)
}

// feed writes the standard input in the background: a command that does not
// read must not hold up its answer.
func (s *Server) feed(p *managed, stdin string) {
	s.spawn(func() {
		if stdin != "" {
			p.proc.input([]byte(stdin)) // an error is the command's choice
		}
		p.proc.closeInput()
	})
}

// execEnd is closed when an exec may be answered: its leader has exited and
// its output is closed, or has been held open for too long.
func (s *Server) execEnd(p *managed) <-chan struct{} {
	ends := []<-chan struct{}{p.tree()}
	if h, ok := p.proc.(outputHolder); ok {
		ends = h.outputEnds()
	}
	return s.follow(func() {
		<-p.leader()
		timer := time.NewTimer(execReadTimeout)
		defer timer.Stop()
		for _, end := range ends {
			select {
			case <-end:
			case <-timer.C:
				return
			case <-s.done:
				return
			}
		}
	})
}

// execStream sends the output as it comes. There is no replay, and a client
// that leaves ends the command.
func (s *Server) execStream(w http.ResponseWriter, r *http.Request, sb *sandbox, m machine, req execRequest, left <-chan struct{}) {
	p := s.newManaged(sb, kindExec, req.Cmd, req.Args)
	reader, _ := p.journal.attach(0)
	err := s.startManaged(sb, m, p, spec{
		cmd: req.Cmd, args: req.Args, env: mergeEnv(sb.envs, req.Env),
		stdout: journalWriter{p.journal, "stdout"}, stderr: journalWriter{p.journal, "stderr"},
	})
	if err != nil {
		w.Header().Set("Content-Type", "application/x-ndjson")
		w.WriteHeader(http.StatusOK)
		(&stream{server: s}).writeLine(w, map[string]any{"error": "exec: " + err.Error()})
		return
	}
	s.feed(p, req.Stdin)
	st := &stream{
		server: s, reader: reader, exited: s.execEnd(p), left: left, heartbeat: "{\"hb\":true}\n",
		frame: appendExecFrame, exit: func() any { return execExit(p.proc) },
		lost: func(int64) any { return map[string]any{"error": "output was lost"} },
	}
	st.run(w, r)
	if !isClosed(p.leader()) && !isClosed(left) {
		p.journal.release()
		p.proc.terminate(0)
	}
}

func execExit(p process) any {
	code, signal := p.status()
	if code == nil {
		return map[string]any{"error": "signal: " + signal}
	}
	return map[string]any{"exit_code": *code}
}

// appendExecFrame renders output as text: bytes that are not UTF-8 do not
// survive, as they do not at the provider.
func appendExecFrame(buf []byte, f frame) []byte {
	text, err := json.Marshal(string(f.data))
	if err != nil {
		return buf // a string always marshals
	}
	buf = append(buf, `{"`...)
	buf = append(buf, f.stream...)
	buf = append(buf, `":`...)
	buf = append(buf, text...)
	return append(buf, "}\n"...)
}

// boundedBuffer collects output and forgets what is too much.
type boundedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *boundedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.buf.Write(p[:min(len(p), maxExecOutput-b.buf.Len())])
	return len(p), nil
}

func (b *boundedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
