package budget

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sends records, in fake time, who was given a turn and when.
type sends struct {
	mu    sync.Mutex
	start time.Time
	at    []time.Duration
	label []string
}

func newSends() *sends { return &sends{start: time.Now()} }

func (s *sends) add(label string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = append(s.at, time.Since(s.start))
	s.label = append(s.label, label)
}

func (s *sends) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.at)
}

// requireNeverMoreThan looks at every window of 60 s that begins with a send; a fuller one cannot begin elsewhere.
func (s *sends) requireNeverMoreThan(t testing.TB, limit int) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.at {
		if i+limit < len(s.at) {
			require.Greaterf(t, s.at[i+limit]-s.at[i], time.Minute, "sends %d to %d are in one minute", i, i+limit)
		}
	}
}

// ask waits for a turn in a goroutine of wg and records it. It returns once the caller is queued or served.
func ask(ctx context.Context, t testing.TB, wg *sync.WaitGroup, b *Budget, class Class, s *sends, label string) {
	wg.Go(func() {
		if assert.NoError(t, b.Wait(ctx, class)) {
			s.add(label)
		}
	})
	synctest.Wait()
}

func TestNewFillsInDefaults(t *testing.T) {
	for _, tc := range []struct{ limit, reserve, wantLimit, wantReserve int }{
		{0, 0, 280, 30},
		{-1, -1, 280, 30},
		{300, 0, 300, 32},
		{560, 0, 560, 60},
		{28, 0, 28, 3},
		{5, 0, 5, 1},
		{2, 0, 2, 1},
		{1, 0, 1, 0},
		{1, 7, 1, 0},
		{100, 40, 100, 40},
		{100, 100, 100, 99},
		{100, 5000, 100, 99},
	} {
		s := New(tc.limit, tc.reserve).Stats()
		assert.Equal(t, tc.wantLimit, s.Limit, "%+v", tc)
		assert.Equal(t, tc.wantReserve, s.Reserve, "%+v", tc)
	}
}

func TestIdleBudgetSendsHalfOfTheShareAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(280, 30)
		start := time.Now()
		for range 125 {
			require.NoError(t, b.Wait(t.Context(), Normal))
		}
		assert.Zero(t, time.Since(start))
		assert.Equal(t, 125, b.Stats().Sent)
	})
}

func TestSmallestBudgetSendsOnceAWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := New(1, 0), newSends()
		for i := range 6 {
			require.NoError(t, b.Wait(t.Context(), Class(i%3)))
			s.add("")
		}
		s.requireNeverMoreThan(t, 1)
		assert.Equal(t, 5*window, s.at[5])
	})
}

func TestBurstsAreSpreadAndKeepEveryWindow(t *testing.T) {
	for _, n := range []int{400, 2000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, s := New(280, 30), newSends()
				var wg sync.WaitGroup
				for range n {
					wg.Go(func() {
						if assert.NoError(t, b.Wait(t.Context(), Normal)) {
							s.add("")
						}
					})
				}
				wg.Wait()
				require.Len(t, s.at, n)
				s.requireNeverMoreThan(t, 250)
				// Nobody stands still for long, and what is not needed for spreading is not thrown away.
				for i := 1; i < n; i++ {
					require.LessOrEqual(t, s.at[i]-s.at[i-1], 500*time.Millisecond, "gap before send %d", i)
				}
				minutes := float64(s.at[n-1]) / float64(time.Minute)
				assert.Less(t, minutes, float64(n-125)/250+0.6)
			})
		})
	}
}

func TestCleanupIsServedAtOnceBehindACrowd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := New(280, 30), newSends()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 400 {
			wg.Go(func() {
				if b.Wait(ctx, Normal) == nil {
					s.add("normal")
				}
			})
		}
		synctest.Wait()
		for range 30 {
			start := time.Now()
			require.NoError(t, b.Wait(ctx, Cleanup))
			require.Zero(t, time.Since(start))
		}
		assert.Equal(t, 125, s.count())
		assert.Equal(t, [3]int{Normal: 275}, b.Stats().Waiting)
		cancel()
		wg.Wait()
	})
}

func TestReserveIsThereWhenNormalUsedUpItsShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(28, 3)
		for b.Stats().Sent < 24 { // the 25th would come when the first leave
			require.NoError(t, b.Wait(t.Context(), Normal))
		}
		start := time.Now()
		for range 4 {
			require.NoError(t, b.Wait(t.Context(), Search))
		}
		assert.Zero(t, time.Since(start))
		assert.Equal(t, 28, b.Stats().Sent)
		// Now the whole window is used, and nobody may send before the oldest leaves.
		require.NoError(t, b.Wait(t.Context(), Cleanup))
		assert.Positive(t, time.Since(start))
	})
}

func TestUrgentRequestsMayUseTheWholeWindowAndNormalWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, start := New(28, 3), time.Now()
		for range 28 {
			require.NoError(t, b.Wait(t.Context(), Cleanup))
		}
		assert.Zero(t, time.Since(start))
		require.NoError(t, b.Wait(t.Context(), Normal))
		assert.Equal(t, window, time.Since(start))
	})
}

func TestNormalIsSpreadWhenUrgentRequestsTookOfItsShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := New(28, 3), newSends()
		for range 20 { // 17 of the share of 25
			require.NoError(t, b.Wait(t.Context(), Search))
		}
		for range 5 {
			require.NoError(t, b.Wait(t.Context(), Normal))
			s.add("")
		}
		assert.Zero(t, s.at[0], "an idle sender waits for nothing")
		assert.Equal(t, window/7, s.at[1], "then the seven free sends are dealt out over the window")
		assert.Less(t, s.at[4], window)
	})
}

func TestWithinAClassTheOrderOfArrivalIsKept(t *testing.T) {
	for _, class := range []Class{Normal, Search, Cleanup} {
		t.Run(class.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, s := New(1, 0), newSends() // one turn a window: each is recorded before the next is given
				var wg sync.WaitGroup
				var want []string
				for i := range 12 {
					ask(t.Context(), t, &wg, b, class, s, fmt.Sprint(i))
					want = append(want, fmt.Sprint(i))
				}
				wg.Wait()
				assert.Equal(t, want, s.label)
			})
		})
	}
}

func TestCleanupOvertakesWaitersOfAFullWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := New(1, 0), newSends()
		var wg sync.WaitGroup
		for _, class := range []Class{Normal, Class(99), Search, Cleanup, Search, Class(-1), Cleanup} {
			ask(t.Context(), t, &wg, b, class, s, class.String())
		}
		wg.Wait()
		assert.Equal(t, []string{"normal", "cleanup", "cleanup", "search", "search", "normal", "normal"}, s.label)
	})
}

func TestCancelledWaiterReturnsAtOnceAndOthersKeepOrderAndSpacing(t *testing.T) {
	const n = 100
	for name, leaves := range map[string]func(i int) bool{
		"first": func(i int) bool { return i == 0 },
		"last":  func(i int) bool { return i == n-1 },
		"odd":   func(i int) bool { return i%2 == 1 },
		"all":   func(int) bool { return true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, s := New(56, 6), newSends() // share 50: 25 at once, then spread
				for range 25 {
					require.NoError(t, b.Wait(t.Context(), Normal))
					s.add("at once")
				}
				ctx, cancel := context.WithCancel(t.Context())
				var wg, left sync.WaitGroup
				var want []string
				for i := range n {
					if !leaves(i) {
						want = append(want, fmt.Sprint(i))
						ask(t.Context(), t, &wg, b, Normal, s, fmt.Sprint(i))
						continue
					}
					left.Go(func() { assert.ErrorIs(t, b.Wait(ctx, Normal), context.Canceled) })
					synctest.Wait()
				}
				time.Sleep(50 * time.Millisecond)
				before := time.Now()
				cancel()
				left.Wait()
				assert.Zero(t, time.Since(before), "who leaves does not wait for the queue")
				synctest.Wait()
				assert.Equal(t, 25, s.count(), "no burst follows")

				wg.Wait()
				assert.Equal(t, want, append([]string(nil), s.label[25:]...))
				s.requireNeverMoreThan(t, 50)
				for i := 26; i < len(s.at); i++ {
					require.GreaterOrEqual(t, s.at[i]-s.at[i-1], window/50, "spacing before send %d", i)
				}
				assert.Zero(t, b.Stats().Waiting)
				assert.Nil(t, b.timer, "nobody waits, so no timer runs")
			})
		})
	}
}

func TestDeadlineIsTheErrorAndNothingIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(1, 0)
		require.NoError(t, b.Wait(t.Context(), Normal))
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		start := time.Now()
		require.ErrorIs(t, b.Wait(ctx, Normal), context.DeadlineExceeded)
		assert.Equal(t, 50*time.Millisecond, time.Since(start))
		s := b.Stats()
		assert.Equal(t, 1, s.Sent)
		assert.Equal(t, 50*time.Millisecond, s.Waited)
		// The turn was not used up by the one who left.
		require.NoError(t, b.Wait(t.Context(), Normal))
		assert.Equal(t, window, time.Since(start))
	})
}

func TestCauseOfTheContextIsReturned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shutdown := errors.New("shut down")
		b := New(1, 0)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(shutdown)
		require.Equal(t, shutdown, b.Wait(ctx, Cleanup), "an ended context is not served even by an idle budget")
		assert.Zero(t, b.Stats().Sent)

		require.NoError(t, b.Wait(t.Context(), Normal))
		ctx, cancel = context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(shutdown) })
		require.Equal(t, shutdown, b.Wait(ctx, Cleanup))
	})
}

func TestTurnThatRacesWithTheEndOfTheContextIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := New(1, 0), newSends()
		require.NoError(t, b.Wait(t.Context(), Normal))
		s.add("first")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() { assert.ErrorIs(t, b.Wait(ctx, Normal), context.Canceled) })
		synctest.Wait()
		ask(t.Context(), t, &wg, b, Normal, s, "next")
		time.Sleep(window - 1)

		// The context ends, and before its waiter can say so the turn comes.
		b.mu.Lock()
		cancel()
		b.normal = nil
		now := b.nowLocked()
		b.serveLocked(now)
		assert.Equal(t, []time.Duration{now}, b.normal)
		b.mu.Unlock()

		wg.Wait()
		assert.Equal(t, []string{"first", "next"}, s.label)
		assert.Equal(t, window-1, s.at[1], "the turn went on to the next without delay")
		assert.Equal(t, 1, b.Stats().Sent)
	})
}

func TestGivingBackTakesOnlyTheOwnSendOutOfTheLog(t *testing.T) {
	b := New(10, 2)
	b.normal = []time.Duration{1, 2, 2, 5}
	b.unlogLocked(Normal, 2)
	assert.Equal(t, []time.Duration{1, 2, 5}, b.normal)
	b.unlogLocked(Normal, 3) // no longer there
	assert.Equal(t, []time.Duration{1, 2, 5}, b.normal)
	b.unlogLocked(Cleanup, 1)
	assert.Equal(t, []time.Duration{1, 2, 5}, b.normal)
}

func TestPauseStopsEveryClass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := New(280, 30), newSends()
		b.Pause(0)
		b.Pause(-time.Second)
		assert.Zero(t, b.Stats().Pauses)
		b.Pause(7 * time.Second)
		b.Pause(3 * time.Second) // does not shorten the other
		var wg sync.WaitGroup
		for _, class := range []Class{Normal, Search, Cleanup} {
			ask(t.Context(), t, &wg, b, class, s, class.String())
		}
		st := b.Stats()
		assert.Equal(t, 2, st.Pauses)
		assert.Equal(t, 7*time.Second, st.Paused)
		wg.Wait()
		for _, at := range s.at {
			assert.Equal(t, 7*time.Second, at)
		}
		st = b.Stats()
		assert.Equal(t, 21*time.Second, st.Waited)
		assert.Zero(t, st.Paused)
	})
}

func TestPauseIsCapped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, start := New(280, 30), time.Now()
		b.Pause(time.Hour)
		require.NoError(t, b.Wait(t.Context(), Cleanup))
		assert.Equal(t, MaxPause, time.Since(start))
	})
}

func TestPauseDuringAWaitIsObeyed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, start := New(1, 0), time.Now()
		require.NoError(t, b.Wait(t.Context(), Normal))
		time.AfterFunc(59*time.Second, func() { b.Pause(30 * time.Second) })
		require.NoError(t, b.Wait(t.Context(), Cleanup))
		assert.Equal(t, 89*time.Second, time.Since(start))
	})
}

// TestRandomLoad lets callers of all classes come, leave and pause at random over virtual minutes.
func TestRandomLoad(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rnd := rand.New(rand.NewPCG(seed, 1))
				limit := 2 + rnd.IntN(60)
				b, all, normal := New(limit, 0), newSends(), newSends()
				var wg sync.WaitGroup
				for range 600 {
					class := Class(rnd.IntN(4)) % 3
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.Int64N(int64(3*time.Minute))))
					wg.Go(func() {
						defer cancel()
						if b.Wait(ctx, class) == nil {
							all.add("")
							if class == Normal {
								normal.add("")
							}
						}
					})
					if rnd.IntN(50) == 0 {
						b.Pause(time.Duration(rnd.Int64N(int64(10 * time.Second))))
					}
					if rnd.IntN(3) > 0 {
						time.Sleep(time.Duration(rnd.Int64N(int64(2 * time.Second))))
					}
				}
				wg.Wait()
				assert.Greater(t, all.count(), limit)
				all.requireNeverMoreThan(t, limit)
				normal.requireNeverMoreThan(t, limit-b.Stats().Reserve)
				assert.Zero(t, b.Stats().Waiting)
				assert.Nil(t, b.timer)
			})
		})
	}
}

func TestLogHoldsOnlyTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(1<<20, 0)
		for range 10_000 {
			require.NoError(t, b.Wait(t.Context(), Normal))
			time.Sleep(time.Second)
		}
		assert.LessOrEqual(t, b.Stats().Sent, 61)
		assert.LessOrEqual(t, cap(b.normal), 512)
	})
}

// TestBudgetOutlivesFakeTime shares one budget between two bubbles and real time, as a process-wide one is shared.
func TestBudgetOutlivesFakeTime(t *testing.T) {
	b := New(2, 1)
	for range 2 {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			for range 3 {
				require.NoError(t, b.Wait(t.Context(), Normal))
			}
			b.Pause(time.Minute)
			assert.Equal(t, 2*window, time.Since(start))
		})
	}
	require.NoError(t, b.Wait(t.Context(), Normal))
}

func TestConcurrentUseInRealTime(t *testing.T) {
	b := New(200, 50)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var granted sync.Map
	begun := make(chan struct{})
	for i := range 400 {
		wg.Go(func() {
			begun <- struct{}{}
			if b.Wait(ctx, Class(i%3)) == nil {
				granted.Store(i, true)
			}
			b.Stats()
		})
	}
	for range 400 {
		<-begun
	}
	cancel()
	wg.Wait()
	n := 0
	granted.Range(func(any, any) bool { n++; return true })
	assert.LessOrEqual(t, n, 200)
	assert.Equal(t, n, b.Stats().Sent, "the log holds who was told to send, and nobody else")
}

func BenchmarkWait(b *testing.B) {
	ctx := b.Context()
	b.Run("uncontended", func(b *testing.B) {
		budget := New(1<<40, 0)
		b.ReportAllocs()
		for b.Loop() {
			if err := budget.Wait(ctx, Normal); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("parallel", func(b *testing.B) {
		budget := New(1<<40, 0)
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				_ = budget.Wait(ctx, Cleanup)
			}
		})
	})
	b.Run("ended context", func(b *testing.B) {
		budget := New(280, 0)
		ended, cancel := context.WithCancel(ctx)
		cancel()
		b.ReportAllocs()
		for b.Loop() {
			_ = budget.Wait(ended, Normal)
		}
	})
}
