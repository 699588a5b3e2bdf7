// Package budget paces requests by a sliding log of their send times.
//
// A provider that allows so many requests a minute counts them in a window that slides. A token bucket does not
// fit that: a full bucket plus its refill may exceed the window, and a bucket small enough to be safe makes an idle
// client wait for nothing. Here every send is remembered for as long as the provider may count it, and a caller
// waits only if the window has no room for it.
//
// Three classes share one window. [Cleanup] and [Search] may use all of it, and a part of it is kept from [Normal]
// requests, so that a crowd of polls never stands in the way of a destroy. Normal requests go at once while
// less than half of their share is used; beyond that they are spread over the time until room comes back, because a
// client that uses up its minute in a second is dead for the other fifty-nine.
package budget

import (
	"container/list"
	"context"
	"sync"
	"time"
)

const (
	// DefaultLimit is the number of sends per minute where none is given.
	DefaultLimit = 280

	// MaxPause is the longest time for which [Budget.Pause] stops the senders.
	MaxPause = time.Minute

	// window is how long a send counts: the provider's minute, and a little more, because a request reaches the
	// wire and the provider somewhat after its turn was logged.
	window = time.Minute + 50*time.Millisecond
)

// Class says how urgent a request is. A waiting request of a higher class is served before all of a lower one; within
// a class, who came first is served first. A value that is none of the constants counts as [Normal].
type Class int

const (
	// Normal is every request that is neither of the others.
	Normal Class = iota
	// Search looks for what an unclear request left behind. It may use the part that is kept from Normal.
	Search
	// Cleanup ends something that costs money or runs: a destroy, a termination, a pause.
	Cleanup

	classes = iota
)

// String returns the name of the class in lower case, for logs.
func (c Class) String() string {
	switch c {
	case Search:
		return "search"
	case Cleanup:
		return "cleanup"
	default:
		return "normal"
	}
}

// Stats is what a [Budget] did and does, read at one moment.
type Stats struct {
	Limit   int           // sends allowed in a window
	Reserve int           // sends of Limit that Normal never uses
	Sent    int           // sends that count now
	Waiting [classes]int  // callers in Wait, by Class
	Waited  time.Duration // total time that callers spent waiting, those who left included, those who wait now not
	Pauses  int           // pauses asked for since New
	Paused  time.Duration // what is left of a pause; 0 when there is none
}

// Budget hands out turns to send. It is safe for concurrent use, starts no goroutine of its own, and keeps one timer,
// only while somebody waits. Make one with [New].
type Budget struct {
	limit   int
	reserve int
	share   int // limit without reserve: what Normal may use

	mu          sync.Mutex         // guards all below; never held while waiting
	start       time.Time          // zero of the times below; moved only when the clock went back
	seen        time.Duration      // the latest time read
	normal      []time.Duration    // send times of Normal since start, oldest first
	urgent      []time.Duration    // the same of Search and Cleanup
	queues      [classes]list.List // of *waiter; nobody in it could be served when it was last looked at
	pausedUntil time.Duration      // since start
	timer       *time.Timer        // nil when nobody waits
	timerAt     time.Duration      // when timer fires, since start
	waited      time.Duration
	pauses      int
}

type waiter struct {
	class   Class
	since   time.Duration
	granted chan struct{} // closed when the turn is given
	place   *list.Element // nil once the turn was given
	at      time.Duration // the logged send time, once the turn was given
}

// New returns a Budget of limit sends in any 60 seconds, of which reserve serve Search and Cleanup only.
//
// A limit that is not positive means [DefaultLimit]. A reserve that is not positive means 30 for a limit of 280 and the
// same proportion of others, at least 1. At least one send a minute stays with Normal, however large reserve is;
// a limit of 1 therefore has no reserve.
func New(limit, reserve int) *Budget {
	if limit <= 0 {
		limit = DefaultLimit
	}
	if reserve <= 0 {
		reserve = max(1, limit/28*3+limit%28*3/28)
	}
	reserve = min(reserve, limit-1)
	return &Budget{limit: limit, reserve: reserve, share: limit - reserve, start: time.Now()}
}

// Wait returns nil when it is the caller's turn. The send is then logged with the present time, so the caller
// sends exactly one request, at once.
//
// When ctx ends first, Wait returns the cause of ctx: without a cause of the host's own that is
// [context.DeadlineExceeded] or [context.Canceled]. Then nothing is logged and the turn goes to the next. Wait does not fail
// early when the turn would come after the deadline: a request that leaves the queue makes room for the others.
func (b *Budget) Wait(ctx context.Context, class Class) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if class < Normal || class > Cleanup {
		class = Normal
	}
	w := b.enter(class)
	if w == nil {
		return nil
	}
	select {
	case <-w.granted:
	case <-ctx.Done():
	}
	// Turn and end of ctx may come together; then the turn is of no use to this caller.
	if ctx.Err() != nil {
		b.leave(w)
		return context.Cause(ctx)
	}
	return nil
}

// Pause keeps callers of every class from sending for d from now, as asked for by an answer 429. It is cut to
// [MaxPause], because a wrong header must not stop cleanup for an hour. A pause never shortens an earlier one.
func (b *Budget) Pause(d time.Duration) {
	if d <= 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.nowLocked()
	b.pauses++
	b.pausedUntil = max(b.pausedUntil, now+min(d, MaxPause))
	b.serveLocked(now)
}

// Stats returns a reading of the budget.
func (b *Budget) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.nowLocked()
	s := Stats{
		Limit:   b.limit,
		Reserve: b.reserve,
		Sent:    len(b.normal) + len(b.urgent),
		Waited:  b.waited,
		Pauses:  b.pauses,
		Paused:  max(0, b.pausedUntil-now),
	}
	for class := range b.queues {
		s.Waiting[class] = b.queues[class].Len()
	}
	return s
}

// enter takes a turn at once and returns nil, or queues the caller.
func (b *Budget) enter(class Class) *waiter {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.nowLocked()
	if b.nextLocked() == nil && b.readyAtLocked(class) <= now {
		b.logLocked(class, now)
		return nil
	}
	w := &waiter{class: class, since: now, granted: make(chan struct{})}
	w.place = b.queues[class].PushBack(w)
	b.serveLocked(now)
	return w
}

// leave takes w out of its queue, or gives its turn back.
func (b *Budget) leave(w *waiter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.nowLocked()
	if w.place != nil {
		b.queues[w.class].Remove(w.place)
		b.waited += now - w.since
	} else {
		b.unlogLocked(w.class, w.at)
	}
	b.serveLocked(now)
}

// wake is the timer's function.
func (b *Budget) wake() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.serveLocked(b.nowLocked())
}

// serveLocked gives a turn to everyone who may have one now, and sets the timer for the next who may not.
//
// It is enough to look at the most urgent waiter: what stops that one (a pause, a full window) stops the others too.
func (b *Budget) serveLocked(now time.Duration) {
	for {
		w := b.nextLocked()
		if w == nil {
			b.stopTimerLocked()
			return
		}
		if at := b.readyAtLocked(w.class); at > now {
			b.setTimerLocked(at, now)
			return
		}
		b.queues[w.class].Remove(w.place)
		w.place, w.at = nil, now
		b.waited += now - w.since
		b.logLocked(w.class, now)
		close(w.granted)
	}
}

// nextLocked returns the waiter who is served next, nil if there is none.
func (b *Budget) nextLocked() *waiter {
	for class := Cleanup; class >= Normal; class-- {
		if first := b.queues[class].Front(); first != nil {
			return first.Value.(*waiter)
		}
	}
	return nil
}

// readyAtLocked returns the time from which a request of the class may be sent, as things stand.
func (b *Budget) readyAtLocked(class Class) time.Duration {
	at := b.pausedUntil
	if len(b.normal)+len(b.urgent) >= b.limit {
		at = max(at, b.oldestLocked()+window)
	}
	if class == Normal {
		at = max(at, b.normalAtLocked())
	}
	return at
}

// normalAtLocked is the rule of spreading. While less than half of the share is used there is no wait. After that
// the free sends are dealt out evenly over the time until the next old one leaves, and never faster than the share lasts
// for a window; so the last free one is kept until another comes, and nobody stands still for long.
func (b *Budget) normalAtLocked() time.Duration {
	free := b.share - len(b.normal)
	oldest := func() time.Duration { return b.normal[0] }
	if over := len(b.urgent) - b.reserve; over > 0 { // urgent requests have taken of the share too
		free -= over
		oldest = b.oldestLocked
	}
	used := b.share - free
	switch {
	case 2*used < b.share, free > 0 && len(b.normal) == 0:
		return 0
	case free <= 0:
		return oldest() + window
	}
	last := b.normal[len(b.normal)-1]
	even := (oldest() + window - last) / time.Duration(free)
	return last + max(even, window/time.Duration(b.share))
}

// oldestLocked returns the time of the oldest send that counts; there must be one.
func (b *Budget) oldestLocked() time.Duration {
	switch {
	case len(b.normal) == 0:
		return b.urgent[0]
	case len(b.urgent) == 0:
		return b.normal[0]
	default:
		return min(b.normal[0], b.urgent[0])
	}
}

// logOfLocked returns the log that a class is written to.
func (b *Budget) logOfLocked(class Class) *[]time.Duration {
	if class == Normal {
		return &b.normal
	}
	return &b.urgent
}

func (b *Budget) logLocked(class Class, now time.Duration) {
	log := b.logOfLocked(class)
	*log = append(*log, now)
}

// unlogLocked takes one send at the given time out of the log, if it still counts.
func (b *Budget) unlogLocked(class Class, at time.Duration) {
	log := b.logOfLocked(class)
	for i := len(*log) - 1; i >= 0 && (*log)[i] >= at; i-- {
		if (*log)[i] == at {
			*log = append((*log)[:i], (*log)[i+1:]...)
			return
		}
	}
}

// nowLocked returns the present time and drops what no longer counts.
//
// A clock that went back is another clock: fake time of a test that shares this budget with the test before. What was
// logged by the other one says nothing here, and could stop everybody for years.
func (b *Budget) nowLocked() time.Duration {
	now := time.Since(b.start)
	if now < b.seen {
		b.start, now = time.Now(), 0
		b.normal, b.urgent, b.pausedUntil = nil, nil, 0
	}
	b.seen = now
	b.normal = dropUntil(b.normal, now-window)
	b.urgent = dropUntil(b.urgent, now-window)
	return now
}

// dropUntil drops the entries up to t. The array stays until append, finding it used up, moves to one of fitting size: that is
// constant time for each send, and memory in proportion to the log.
func dropUntil(log []time.Duration, t time.Duration) []time.Duration {
	for len(log) > 0 && log[0] <= t {
		log = log[1:]
	}
	return log
}

func (b *Budget) setTimerLocked(at, now time.Duration) {
	if b.timer != nil && b.timerAt == at {
		return
	}
	b.stopTimerLocked()
	b.timer, b.timerAt = time.AfterFunc(at-now, b.wake), at
}

// stopTimerLocked also forgets the timer: one that was made under fake time must not be touched outside of it.
func (b *Budget) stopTimerLocked() {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
}
