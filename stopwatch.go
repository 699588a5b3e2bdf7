package createos

import (
	"sync"
	"time"
)

// A stopwatch times a command from the message that started it. A message that was
// refused has started nothing, and until the next one is sent no time passes.
type stopwatch struct {
	// changed gets a value when the watch was started or stopped.
	changed chan struct{}

	mu      sync.Mutex // guards what follows
	began   time.Time  // zero: no message that may have arrived was sent
	arrived bool       // one has, or may have
}

func newStopwatch() *stopwatch { return &stopwatch{changed: make(chan struct{}, 1)} }

// sending notes that a message is about to be sent.
func (s *stopwatch) sending() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.began.IsZero() {
		s.began = time.Now()
		s.tell()
	}
}

// answered notes what became of it.
func (s *stopwatch) answered(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil || unclear(err):
		s.arrived = true
	case !s.arrived:
		s.began = time.Time{}
		s.tell()
	}
}

func (s *stopwatch) tell() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// elapsed is the time that has passed. ok is false while the watch stands still.
func (s *stopwatch) elapsed() (d time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.began.IsZero() {
		return 0, false
	}
	return time.Since(s.began), true
}
