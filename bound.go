package createos

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/createos-lease/createos/internal/budget"
)

// queueBound is how long a cleanup may wait for its first turn at the request
// budget. It is longer than the longest pause that a 429 can impose (60 s),
// so that a throttled driver still gets to send its destroys.
const queueBound = 2 * time.Minute

// cleanupContext detaches ctx for work that must happen whether or not the
// caller still waits. Its values are kept. It ends bound after the first
// request was sent: time spent waiting for the budget is no time in which
// the provider could have answered. That wait has a bound of its own.
func cleanupContext(ctx context.Context, bound time.Duration) (context.Context, context.CancelFunc) {
	return sentContext(context.WithoutCancel(ctx), budget.Cleanup, bound)
}

// lookContext bounds a question in the same way, but ends with ctx.
func lookContext(ctx context.Context, bound time.Duration) (context.Context, context.CancelFunc) {
	return sentContext(ctx, traitsOf(ctx).class, bound)
}

func sentContext(ctx context.Context, class budget.Class, bound time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(queueBound, func() { cancel(ErrTimeout) })
	var first sync.Once
	ctx = withTraits(ctx, traits{
		class:  class,
		onSend: func() { first.Do(func() { timer.Reset(bound) }) },
	})
	return ctx, func() {
		timer.Stop()
		cancel(context.Canceled)
	}
}

// searchContext gives the requests of ctx the lowest rank among cleanup:
// what is known by id goes before what must be looked for.
func searchContext(ctx context.Context) context.Context {
	t := traitsOf(ctx)
	t.class = budget.Search
	return withTraits(ctx, t)
}

// ended says why ctx is over, nil if it is not. An end that the driver
// brought about is named by its own cause alone, so that only the caller's
// cancellation matches context.Canceled.
func ended(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	for _, ours := range []error{ErrTimeout, ErrLeaseClosing, ErrShutdown} {
		if errors.Is(cause, ours) {
			return cause
		}
	}
	if cause == err {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// because names the reason why ctx ended, if it has. A request that was cut by
// that end has nothing to add; what was found out otherwise stays in the
// error.
func because(ctx context.Context, operation string, err error) error {
	reason := ended(ctx)
	var state *StateError
	switch cut := (*ConnectionError)(nil); {
	case reason == nil, errors.As(err, &state) && errors.Is(err, reason):
		return err
	case errors.Is(err, ErrTerminationUnproven):
		return fixed(ErrTerminationUnproven, reason, err)
	case errors.As(err, &cut), errors.Is(err, reason):
		return fmt.Errorf("createos: %s: %w", operation, reason)
	}
	return fmt.Errorf("createos: %s: %w: %w", operation, reason, err)
}

// sleep waits for d, or for the end of ctx, which it returns.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ended(ctx)
	}
}

// A poll paces repeated looks at a state: the first comes at once, the next
// after 250 ms, and the gaps grow to 2 s.
type poll struct{ gap time.Duration }

const (
	pollFirst = 250 * time.Millisecond
	pollMax   = 2 * time.Second
)

// hint makes the next gap what the provider asked for (X-Poll-After).
func (p *poll) hint(d time.Duration) {
	if d > 0 {
		p.gap = min(d, 10*time.Second)
	}
}

// wait waits for the next look.
func (p *poll) wait(ctx context.Context) error {
	if p.gap == 0 {
		p.gap = pollFirst
	}
	err := sleep(ctx, p.gap)
	p.gap = min(p.gap*3/2, pollMax)
	return err
}
