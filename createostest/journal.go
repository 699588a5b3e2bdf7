package createostest

import (
	"io"
	"sync"
)

// frame is one piece of output. Its data are never changed once written, so
// they may be read without the lock.
type frame struct {
	seq    int64
	stream string
	data   []byte
}

// journal keeps the latest output of a process, at most limit bytes of it.
// Sequence numbers rise by one over all streams.
//
// While a reader is connected the writer is blocked rather than let it lose
// output: the oldest frame goes only when every reader has had it. Without a
// reader, or with evict, the oldest frame goes whatever happens.
type journal struct {
	limit   int
	evict   bool
	onWrite func() // may be nil

	mu      sync.Mutex
	frames  []frame // frames[head:] are retained, with consecutive numbers
	head    int
	bytes   int
	newest  int64
	readers map[*journalReader]struct{}
	closed  bool
	slab    []byte        // small frames share allocations
	more    chan struct{} // closed at the next write; nil when nobody waits
	room    chan struct{} // closed when a writer should look again
}

// journalReader is a position in a journal. The journal's lock guards cursor.
type journalReader struct {
	journal *journal
	cursor  int64 // the last number that was sent
}

const slabBytes = 64 << 10

func newJournal(limit int, evict bool, onWrite func()) *journal {
	return &journal{limit: limit, evict: evict, onWrite: onWrite, readers: make(map[*journalReader]struct{})}
}

// journalWriter writes one stream of a process. One write is one frame, unless
// it is larger than a frame may be.
type journalWriter struct {
	journal *journal
	stream  string
}

func (w journalWriter) Write(p []byte) (int, error) { return w.writeUntil(nil, p) }

// writeUntil is Write that gives up, with io.ErrClosedPipe, once done is
// closed. The runner in memory needs it: a function that is blocked here could
// not be killed.
func (w journalWriter) writeUntil(done <-chan struct{}, p []byte) (int, error) {
	j := w.journal
	if j.onWrite != nil {
		j.onWrite()
	}
	written := 0
	for largest := min(maxFrameBytes, j.limit); written < len(p); {
		piece := p[written:min(len(p), written+largest)]
		if !j.append(done, w.stream, piece) {
			return written, io.ErrClosedPipe
		}
		written += len(piece)
	}
	return written, nil
}

func (j *journal) append(done <-chan struct{}, stream string, data []byte) bool {
	j.mu.Lock()
	for !j.closed && j.bytes+len(data) > j.limit {
		if j.mayDropLocked() {
			j.dropLocked()
			continue
		}
		if j.room == nil {
			j.room = make(chan struct{})
		}
		room := j.room
		j.mu.Unlock()
		select {
		case <-room:
		case <-done:
			return false
		}
		j.mu.Lock()
	}
	defer j.mu.Unlock()
	if j.closed {
		return false
	}
	j.newest++
	j.frames = append(j.frames, frame{j.newest, stream, j.storeLocked(data)})
	j.bytes += len(data)
	if j.more != nil {
		close(j.more)
		j.more = nil
	}
	return true
}

func (j *journal) storeLocked(data []byte) []byte {
	if len(j.slab)+len(data) > cap(j.slab) {
		j.slab = make([]byte, 0, max(slabBytes, len(data)))
	}
	from := len(j.slab)
	j.slab = append(j.slab, data...)
	return j.slab[from:len(j.slab):len(j.slab)]
}

// mayDropLocked tells whether the oldest frame may go.
func (j *journal) mayDropLocked() bool {
	if j.evict {
		return true
	}
	for r := range j.readers {
		if r.cursor < j.frames[j.head].seq {
			return false
		}
	}
	return true
}

func (j *journal) dropLocked() {
	j.bytes -= len(j.frames[j.head].data)
	j.frames[j.head] = frame{} // the data go even while the array stays
	j.head++
	if j.head > 64 && j.head*2 > len(j.frames) {
		kept := copy(j.frames, j.frames[j.head:])
		clear(j.frames[kept:])
		j.frames, j.head = j.frames[:kept], 0
	}
}

// attach connects a reader that has had everything up to after. If frames
// after it are gone it returns nil and the oldest number there is.
func (j *journal) attach(after int64) (r *journalReader, oldest int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.head < len(j.frames) {
		if oldest = j.frames[j.head].seq; after+1 < oldest {
			return nil, oldest
		}
	}
	r = &journalReader{journal: j, cursor: after}
	j.readers[r] = struct{}{}
	return r, oldest
}

func (r *journalReader) detach() {
	j := r.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.readers, r)
	j.makeRoomLocked()
}

// take appends up to about maxBytes of unsent frames to into. If there are
// none, more is closed at the next write. lost is the oldest number that there
// is when frames were dropped under the reader, else 0.
func (r *journalReader) take(into []frame, maxBytes int) (frames []frame, more <-chan struct{}, lost int64) {
	j := r.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	kept := j.frames[j.head:]
	if len(kept) == 0 || r.cursor >= j.newest {
		if j.more == nil {
			j.more = make(chan struct{})
		}
		return into, j.more, 0
	}
	first := r.cursor + 1 - kept[0].seq
	if first < 0 {
		return into, nil, kept[0].seq
	}
	for _, f := range kept[first:] {
		into = append(into, f)
		if maxBytes -= len(f.data); maxBytes <= 0 {
			break
		}
	}
	return into, nil, 0
}

// sent moves the reader on after everything up to seq was written to it.
func (r *journalReader) sent(seq int64) {
	j := r.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	r.cursor = seq
	j.makeRoomLocked()
}

func (j *journal) makeRoomLocked() {
	if j.room != nil {
		close(j.room)
		j.room = nil
	}
}

// release never blocks a writer again: the process is to end, and must not be
// held up by a reader that does not read.
func (j *journal) release() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.evict = true
	j.makeRoomLocked()
}

// close refuses further writes; blocked ones return. What is there can still
// be read.
func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.closed = true
	j.makeRoomLocked()
}

// journalRange is what the details of a process say of its journal.
type journalRange struct {
	OldestSeq int64 `json:"oldest_seq"`
	NewestSeq int64 `json:"newest_seq"`
	Bytes     int   `json:"bytes"`
}

func (j *journal) extent() journalRange {
	j.mu.Lock()
	defer j.mu.Unlock()
	e := journalRange{NewestSeq: j.newest, Bytes: j.bytes}
	if j.head < len(j.frames) {
		e.OldestSeq = j.frames[j.head].seq
	}
	return e
}
