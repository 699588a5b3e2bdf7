package createos

import (
	"sync"
	"time"

	"github.com/createos-lease/createos/internal/budget"
)

// A Budget bounds how many requests are sent a minute. It keeps a log of the
// send times, never lets more than its figure into any 60 seconds, and has no
// fixed gap between requests: an idle program sends at once, and as the window
// fills up, requests are spread out rather than stopped dead.
//
// A tenth of the figure or so (30 of the default 280) serves cleanup only, so
// that a crowd of running leases cannot stand in the way of a destroy. An
// answer 429 stops every sender of the budget for as long as the provider
// asked, at most 60 s.
//
// The provider allows 300 requests a minute and network address. A Budget
// holds for this process only: programs that share an address must share the
// figure out among them, each with a Budget of its own in
// [DriverConfig.Budget].
//
// A Budget is safe for concurrent use by any number of drivers. Make one with
// [NewBudget]; [NewDriver] refuses another.
type Budget struct{ b *budget.Budget }

// DefaultBudget is the figure of a budget that was not given one: the
// provider's 300 a minute, less some room for what else uses the address.
const DefaultBudget = budget.DefaultLimit

// NewBudget returns a Budget of perMinute requests in any 60 seconds. Zero or
// less means [DefaultBudget]. An acquire and a command take three each, and a figure
// of 1 leaves nothing for cleanup alone.
func NewBudget(perMinute int) *Budget { return &Budget{b: budget.New(perMinute, 0)} }

// BudgetStats is what a [Budget] did and does, read at one moment.
type BudgetStats struct {
	// Limit is the figure: requests in any 60 seconds.
	Limit int
	// Reserve is how many of Limit serve cleanup only.
	Reserve int
	// Sent is how many requests count now.
	Sent int
	// Waiting is how many requests wait for their turn now.
	Waiting int
	// Waited is the time that requests have spent waiting so far; those that
	// wait now are not in it.
	Waited time.Duration
	// Pauses is how often a 429 stopped everybody.
	Pauses int
	// Paused is what is left of such a stop; 0 if there is none.
	Paused time.Duration
}

// Stats reads the budget.
func (b *Budget) Stats() BudgetStats {
	s := b.b.Stats()
	out := BudgetStats{
		Limit: s.Limit, Reserve: s.Reserve, Sent: s.Sent,
		Waited: s.Waited, Pauses: s.Pauses, Paused: s.Paused,
	}
	for _, n := range s.Waiting {
		out.Waiting += n
	}
	return out
}

// originBudgets holds the budget of each origin that this process talked to
// without being given one. The provider counts by address, so all drivers of
// a process must share it.
var originBudgets struct {
	mu       sync.Mutex // guards byOrigin
	byOrigin map[string]*Budget
}

// originBudget returns the budget that everybody in this process shares for
// an origin.
func originBudget(origin string) *Budget {
	originBudgets.mu.Lock()
	defer originBudgets.mu.Unlock()
	b := originBudgets.byOrigin[origin]
	if b == nil {
		b = NewBudget(DefaultBudget)
		if originBudgets.byOrigin == nil {
			originBudgets.byOrigin = make(map[string]*Budget)
		}
		originBudgets.byOrigin[origin] = b
	}
	return b
}
