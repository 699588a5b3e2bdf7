package createostest

import (
	"net"
	"sync"
	"time"
)

// limiter is a sliding window of a minute for each client address, whatever
// the key. Refused requests do not count.
type limiter struct {
	perMinute int

	mu   sync.Mutex
	sent map[string][]time.Time
}

const rateWindow = time.Minute

// allow counts a request; when there are too many it tells how long until the
// next one fits.
func (l *limiter) allow(remote string, now time.Time) (retry time.Duration, ok bool) {
	if l.perMinute <= 0 {
		return 0, true
	}
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		host = remote
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sent == nil {
		l.sent = make(map[string][]time.Time)
	}
	recent := l.sent[host]
	for len(recent) > 0 && now.Sub(recent[0]) >= rateWindow {
		recent = recent[1:]
	}
	if len(recent) >= l.perMinute {
		l.sent[host] = recent
		return recent[0].Add(rateWindow).Sub(now), false
	}
	l.sent[host] = append(recent, now)
	return 0, true
}
