package createos

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestMain fails the run if a goroutine of this module outlives the tests.
// Each has an owner that waits for it, so there is nothing to allow for but the
// moment between the end of a wait and the end of the goroutine.
func TestMain(m *testing.M) {
	code := m.Run()
	if leaked := leakedGoroutines(5 * time.Second); code == 0 && len(leaked) > 0 {
		fmt.Fprintf(os.Stderr, "%d goroutines are left:\n\n%s\n", len(leaked), strings.Join(leaked, "\n\n"))
		code = 1
	}
	os.Exit(code)
}

// leakedGoroutines returns the stacks of our goroutines that are still there
// when the patience is over.
func leakedGoroutines(patience time.Duration) []string {
	over := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		var ours []string
		buf := make([]byte, 4<<20)
		buf = buf[:runtime.Stack(buf, true)]
		for i, stack := range strings.Split(string(buf), "\n\n") {
			if i > 0 && strings.Contains(stack, "createos-lease/createos") { // 0 is this goroutine
				ours = append(ours, stack)
			}
		}
		if len(ours) == 0 {
			return nil
		}
		select {
		case <-over:
			return ours
		case <-tick.C:
		}
	}
}
