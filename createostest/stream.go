package createostest

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// streamBatch is how much output is taken from a journal at a time: enough to
// make the cost of a write small, little against the size of a journal.
const streamBatch = 128 << 10

// stream sends a journal to a client as lines of JSON, heartbeats in quiet
// times and the exit at the end. Lines are appended to a buffer rather than
// marshalled, and flushed only when there is nothing more to send: a
// benchmark of a client should not measure its emulator.
type stream struct {
	server    *Server
	reader    *journalReader
	exited    <-chan struct{} // then the exit is sent, after the output so far
	left      <-chan struct{} // then the stream is cut: it ends without an exit
	heartbeat string
	frame     func(buf []byte, f frame) []byte
	exit      func() any
	lost      func(oldest int64) any
}

// run sends until the stream is over, for whatever reason.
func (st *stream) run(w http.ResponseWriter, r *http.Request) {
	defer st.reader.detach()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	out.Flush()

	beat := time.NewTicker(st.server.opts.Heartbeat)
	defer beat.Stop()
	var buf []byte
	var frames []frame
	last := int64(-1) // what is sent before the exit; known once it happened
	for {
		// Before the exit, which a destroy or Close would bring about: what
		// they cut must not look like a command that ended.
		if st.cut() {
			return
		}
		if last < 0 && isClosed(st.exited) {
			last = st.reader.journal.extent().NewestSeq
		}
		if last >= 0 && st.reader.cursor >= last {
			st.writeLine(w, st.exit())
			return
		}
		var more <-chan struct{}
		var lost int64
		frames, more, lost = st.reader.take(frames[:0], streamBatch)
		if lost > 0 {
			st.writeLine(w, st.lost(lost))
			return
		}
		if len(frames) > 0 {
			buf = buf[:0]
			for _, f := range frames {
				buf = st.frame(buf, f)
			}
			if _, err := w.Write(buf); err != nil {
				return
			}
			st.reader.sent(frames[len(frames)-1].seq)
			clear(frames) // the journal alone decides how long data stay
			beat.Reset(st.server.opts.Heartbeat)
			continue
		}
		out.Flush()
		if !st.wait(w, r, more, beat.C, last < 0) {
			return
		}
	}
}

// wait waits for more to send; false ends the stream.
func (st *stream) wait(w http.ResponseWriter, r *http.Request, more <-chan struct{}, beat <-chan time.Time, running bool) bool {
	exited := st.exited
	if !running {
		exited = nil
	}
	select {
	case <-more:
	case <-exited:
	case <-st.left:
	case <-st.server.done:
	case <-r.Context().Done():
		return false
	case <-beat:
		if _, err := w.Write([]byte(st.heartbeat)); err != nil {
			return false
		}
		http.NewResponseController(w).Flush()
	}
	return true
}

// cut tells whether the sandbox has stopped running; the end of the server is
// not orderly, and closes the connection.
func (st *stream) cut() bool {
	if isClosed(st.server.done) {
		panic(http.ErrAbortHandler)
	}
	return isClosed(st.left)
}

func (st *stream) writeLine(w http.ResponseWriter, event any) {
	line, err := json.Marshal(event)
	if err != nil {
		st.server.complain("createostest: stream event: %v", err)
		return
	}
	w.Write(append(line, '\n'))
}

// event is the last line of a connect stream.
type event struct {
	Type     string `json:"type"`
	ExitCode *int   `json:"exit_code,omitempty"`
	Signal   string `json:"signal,omitempty"`
	Error    string `json:"error,omitempty"`
	Oldest   int64  `json:"oldest_available_seq,omitempty"`
}

func offsetExpired(oldest int64) any {
	return event{Type: "error", Error: "output_offset_expired", Oldest: oldest}
}

func exitEvent(p process) any {
	code, signal := p.status()
	return event{Type: "exit", ExitCode: code, Signal: signal}
}

// appendDataEvent renders a frame as a data event.
func appendDataEvent(buf []byte, f frame) []byte {
	buf = append(buf, `{"type":"data","seq":`...)
	buf = strconv.AppendInt(buf, f.seq, 10)
	buf = append(buf, `,"stream":"`...)
	buf = append(buf, f.stream...)
	buf = append(buf, `","data_base64":"`...)
	buf = base64.StdEncoding.AppendEncode(buf, f.data)
	return append(buf, "\"}\n"...)
}

func (s *Server) handleConnect(w http.ResponseWriter, r *http.Request, c processCall) {
	after, err := queryInt(r, "after", 0)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	reader, oldest := c.p.journal.attach(int64(after))
	if reader == nil {
		s.failOffset(w, oldest)
		return
	}
	exited := c.p.leader()
	if s.opts.ExitAtTree {
		exited = s.bothEnds(c.p)
	}
	st := &stream{
		server: s, reader: reader, exited: exited, left: c.left,
		heartbeat: "{\"type\":\"heartbeat\"}\n", frame: appendDataEvent,
		exit: func() any { return exitEvent(c.p.proc) }, lost: offsetExpired,
	}
	st.run(w, r)
}

func (s *Server) failOffset(w http.ResponseWriter, oldest int64) {
	if s.opts.OffsetErrorInStream {
		w.Header().Set("Content-Type", "application/x-ndjson")
		w.WriteHeader(http.StatusOK)
		(&stream{server: s}).writeLine(w, offsetExpired(oldest))
		return
	}
	fail(w, http.StatusGone, map[string]any{"code": "output_offset_expired", "oldest_available_seq": oldest})
}

// bothEnds is closed when the tree has ended and the exit is known.
func (s *Server) bothEnds(p *managed) <-chan struct{} {
	return s.follow(func() {
		<-p.tree()
		<-p.leader()
	})
}
