package createos

import (
	"sync"
	"sync/atomic"
	"time"
)

// A meter counts what was moved and reports it from a goroutine of its own, so
// that no report holds up a transfer, and none is made under a lock.
type meter struct {
	report func(SyncProgress) // nil: nobody listens
	files  atomic.Int64
	bytes  atomic.Int64

	mu   sync.Mutex // guards what follows
	todo []SyncProgress
	now  SyncProgress // the phase that runs, without its counts

	wake  chan struct{}
	close chan struct{}
	ended chan struct{}
}

func newMeter(report func(SyncProgress)) *meter {
	m := &meter{report: report, wake: make(chan struct{}, 1), close: make(chan struct{}), ended: make(chan struct{})}
	if report == nil {
		close(m.ended)
		return m
	}
	go m.run()
	return m
}

// add counts; it may be called from any goroutine, and with negative numbers when
// an attempt is repeated.
func (m *meter) add(bytes int64, files int) {
	m.bytes.Add(bytes)
	m.files.Add(int64(files))
}

// phase ends the phase before and begins one. The counts of a mapping go on from
// its transfer to its commit.
func (m *meter) phase(p SyncProgress) {
	if m.report == nil {
		return
	}
	m.mu.Lock()
	last := m.countedLocked()
	if last.Phase != "" {
		m.todo = append(m.todo, last)
	}
	if p.Phase != SyncCommit {
		m.files.Store(0)
		m.bytes.Store(0)
	}
	m.now = p
	m.todo = append(m.todo, m.countedLocked())
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

func (m *meter) countedLocked() SyncProgress {
	p := m.now
	p.Files, p.Bytes = int(m.files.Load()), m.bytes.Load()
	return p
}

// run reports until close. It ends with the last report.
func (m *meter) run() {
	defer close(m.ended)
	tick := time.NewTicker(syncTick)
	defer tick.Stop()
	var last SyncProgress
	for {
		closing := false
		select {
		case <-tick.C:
			m.mu.Lock()
			if now := m.countedLocked(); now.Phase != "" && now != last && len(m.todo) == 0 {
				m.todo = append(m.todo, now)
			}
			m.mu.Unlock()
		case <-m.wake:
		case <-m.close:
			closing = true
		}
		m.mu.Lock()
		todo := m.todo
		m.todo = nil
		if now := m.countedLocked(); closing && now.Phase != "" && (len(todo) == 0 || todo[len(todo)-1] != now) {
			todo = append(todo, now)
		}
		m.mu.Unlock()
		for _, p := range todo {
			m.report(p)
			last = p
		}
		if closing {
			return
		}
	}
}

// stop makes the last report and waits for the goroutine, though not for ever for
// a report that blocks.
func (m *meter) stop() {
	if m.report == nil {
		return
	}
	close(m.close)
	timer := time.NewTimer(letGo)
	defer timer.Stop()
	select {
	case <-m.ended:
	case <-timer.C:
	}
}
