// Package keylock has locks that are known by a key.
package keylock

import (
	"context"
	"sync"
)

// A Lock excludes holders of the same key from each other. Unlike a mutex it may
// be held over a wait: who waits for it leaves with its context. The zero value
// is ready for use.
type Lock struct {
	mu   sync.Mutex
	held map[string]chan struct{} // closed when the holder lets go
}

// Lock waits for the key, or for the end of ctx, whose cause it returns. The
// function it returns lets go.
func (l *Lock) Lock(ctx context.Context, key string) (unlock func(), err error) {
	mine := make(chan struct{})
	for {
		l.mu.Lock()
		other, busy := l.held[key]
		if !busy {
			if l.held == nil {
				l.held = make(map[string]chan struct{})
			}
			l.held[key] = mine
		}
		l.mu.Unlock()
		if !busy {
			return func() { l.unlock(key, mine) }, nil
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (l *Lock) unlock(key string, mine chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.held, key)
	close(mine)
}
