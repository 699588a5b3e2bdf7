package createos_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// The benchmarks run against the emulator, in this process:
//
//	go test -run '^$' -bench . -benchmem .
//
// The emulator's work is in every figure. What compares is therefore the ratio
// x/bare of BenchmarkOutput, whose two sides have the same emulator and take
// turns, and the requests of an operation, req/op, which do not depend on the
// machine. Give BenchmarkOutput at least -benchtime 5x where others use the
// machine too.

// A bench is a driver on an emulator.
type bench struct {
	*harness
	b *testing.B
}

func newBench(b *testing.B, opts createostest.Options) *bench {
	b.Helper()
	srv := createostest.NewServer(b, opts)
	h, err := newHarness(srv.DriverConfig(), srv.Config(), srv.Workspace())
	require.NoError(b, err)
	b.Cleanup(func() {
		require.NoError(b, h.driver.Shutdown(context.Background()))
		require.Empty(b, srv.LeakReport())
	})
	return &bench{h, b}
}

// measure begins the measured part. The function it returns ends it and
// reports the requests of one operation.
func (b *bench) measure() (done func()) {
	before := b.requests.Load()
	b.b.ReportAllocs()
	b.b.ResetTimer()
	return func() {
		b.b.StopTimer()
		b.b.ReportMetric(float64(b.requests.Load()-before)/float64(b.b.N), "req/op")
	}
}

var quick = createos.Command{Name: "true"}

func nothing(context.Context, *createostest.Command) int { return 0 }

// runners are the emulator's two ways to run a command.
var runners = []struct {
	name string
	opts createostest.Options
}{
	{"memory", createostest.Options{InMemory: true, Commands: nothing}},
	{"processes", createostest.Options{}},
}

func (h *harness) cycle(ctx context.Context) error {
	lease, err := h.acquire(ctx)
	if err != nil {
		return err
	}
	_, err = h.driver.Exec(ctx, h.env, lease, quick)
	return errors.Join(err, h.driver.Destroy(ctx, h.env, lease))
}

// BenchmarkAcquire acquires; the destroys are not measured.
func BenchmarkAcquire(b *testing.B) {
	r := newBench(b, createostest.Options{InMemory: true, Commands: nothing})
	before := r.requests.Load()
	acquired := int64(0)
	b.ReportAllocs()
	for b.Loop() {
		lease, err := r.acquire(b.Context())
		require.NoError(b, err)
		b.StopTimer()
		acquired += r.requests.Load() - before
		require.NoError(b, r.driver.Destroy(b.Context(), r.env, lease))
		before = r.requests.Load()
		b.StartTimer()
	}
	b.ReportMetric(float64(acquired)/float64(b.N), "req/op")
}

// BenchmarkExec runs a command that does nothing.
func BenchmarkExec(b *testing.B) {
	for _, runner := range runners {
		b.Run(runner.name, func(b *testing.B) {
			r := newBench(b, runner.opts)
			lease, err := r.acquire(b.Context())
			require.NoError(b, err)
			done := r.measure()
			for b.Loop() {
				res, err := r.driver.Exec(b.Context(), r.env, lease, quick)
				require.NoError(b, err)
				require.NoError(b, res.Err())
			}
			done()
			require.NoError(b, r.driver.Destroy(b.Context(), r.env, lease))
		})
	}
}

// BenchmarkCycle is a whole life: acquire, one command, destroy.
func BenchmarkCycle(b *testing.B) {
	for _, runner := range runners {
		b.Run(runner.name, func(b *testing.B) {
			r := newBench(b, runner.opts)
			done := r.measure()
			for b.Loop() {
				require.NoError(b, r.cycle(b.Context()))
			}
			done()
		})
	}
}

// BenchmarkCycles50 is fifty lives at a time; one operation is all fifty.
func BenchmarkCycles50(b *testing.B) {
	r := newBench(b, createostest.Options{InMemory: true, Commands: nothing})
	done := r.measure()
	for b.Loop() {
		var all sync.WaitGroup
		failed := make([]error, 50)
		for i := range failed {
			all.Go(func() { failed[i] = r.cycle(b.Context()) })
		}
		all.Wait()
		require.NoError(b, errors.Join(failed...))
	}
	done()
}

// BenchmarkOutput streams the output of a command over TCP, by turns through
// Exec and through the least loop that can read it; time, MB/s and B/op are
// Exec's. x/bare is the throughput of Exec as a part of the loop's, the median
// of all turns. allocs/frame is what Exec allocates more than the loop, which
// leaves the emulator out.
func BenchmarkOutput(b *testing.B) {
	for _, c := range []struct{ total, frame int }{{256 << 20, 32 << 10}, {64 << 20, 1 << 10}} {
		b.Run(fmt.Sprintf("%dMiB/%dKiB", c.total>>20, c.frame>>10), func(b *testing.B) {
			r := newBench(b, createostest.Options{Commands: flood})
			lease, err := r.acquire(b.Context())
			require.NoError(b, err)
			defer func() { require.NoError(b, r.driver.Destroy(context.Background(), r.env, lease)) }()
			var ratios []float64
			allocs := 0.0
			b.SetBytes(int64(c.total))
			b.ReportAllocs()
			for b.Loop() {
				ours := costOf(func() { err = r.execFlood(b.Context(), lease, c.total, c.frame) })
				b.StopTimer()
				require.NoError(b, err)
				bare := costOf(func() { err = r.bareFlood(b.Context(), lease, c.total, c.frame) })
				require.NoError(b, err)
				ratios = append(ratios, bare.time.Seconds()/ours.time.Seconds())
				allocs += float64(ours.allocs) - float64(bare.allocs)
				b.StartTimer()
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "x/bare")
			b.ReportMetric(allocs/float64(b.N*c.total/c.frame), "allocs/frame")
		})
	}
}

// A cost is what something took of this process.
type cost struct {
	time   time.Duration
	allocs uint64
}

func costOf(f func()) cost {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	f()
	c := cost{time: time.Since(began)}
	runtime.ReadMemStats(&after)
	c.allocs = after.Mallocs - before.Mallocs
	return c
}
