package createos_test

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	sweepLong   = flag.Bool("sweep.long", false, "TestFaultSweep runs all single incidents of syncs too, and one pair in ten; the sweeps of merges end at more bytes, and at every reply")
	sweepPairs  = flag.Int("sweep.pairs", 0, "TestFaultSweep runs one pair of incidents in so many")
	sweepMatrix = flag.String("sweep.matrix", "", "file for the matrix of TestFaultSweep")
)

// TestFaultSweep proves the laws by breaking requests. For each operation it
// records the requests of a healthy run, and repeats the run once for each
// request and each trouble: happening once, and from then on. For some
// operations a second incident follows at each request that the first one led
// to. After each schedule all laws are checked; see scene.laws and
// scene.afterwards.
//
// The limit of the proof: schedules of one or two incidents, and, in the short
// form, a fixed sample of the pairs.
func TestFaultSweep(t *testing.T) {
	sw := &sweep{cells: make(map[string]map[string]string)}
	began := time.Now()
	t.Run("operations", func(t *testing.T) {
		for i := range operations {
			op := &operations[i]
			t.Run(op.name, func(t *testing.T) {
				t.Parallel()
				sw.sweep(t, op)
			})
		}
	})
	sw.report(t, time.Since(began))
}

// A sweep counts and draws up the matrix.
type sweep struct {
	mu                            sync.Mutex
	healthy, singles, pairs, lies int
	findings                      int
	left                          int // cells for the long form
	rows                          []string
	cells                         map[string]map[string]string
}

// What a schedule may come to.
const (
	fine   = "+" // the call succeeded
	failed = "-" // it failed, and nothing is left
	owing  = "o" // it failed, and what is left is listed
	lied   = "?" // the provider lied; see lie
	broken = "!" // a law was broken
	passed = "." // not in the sample
)

// sweep runs all schedules of an operation.
func (sw *sweep) sweep(t *testing.T, op *operation) {
	spots, outcome := sw.run(t, op, nil)
	require.Equal(t, cmp.Or(op.healthy, fine), outcome, "the healthy run of %s", op.name)
	require.NotEmpty(t, spots)
	more, _ := sw.run(t, op, nil) // timers that end at once may make one request more or less
	spots = union(spots, more)
	for row, at := range spots {
		for column, tr := range troubles {
			cell := ""
			for _, lasts := range []bool{false, true} {
				if lasts && tr.leaving() {
					continue
				}
				first := incident{at, tr, lasts}
				if !sw.chosen(op, row, column, first) {
					continue
				}
				later, outcome := sw.run(t, op, []incident{first})
				cell += outcome
				if op.pairs {
					sw.followUp(t, op, first, later)
				}
			}
			if cell == "" && op.sample > 0 {
				cell = passed
			}
			sw.fill(op.name+" | "+at.String(), tr.name, cell)
		}
	}
}

// followUp runs the schedules that begin with an incident that led to these
// requests.
func (sw *sweep) followUp(t *testing.T, op *operation, first incident, spots []spot) {
	for _, at := range spots {
		if at.route == first.route && (at.nth == first.nth || first.lasts) {
			continue // is hit already
		}
		for _, tr := range troubles {
			for _, lasts := range []bool{false, true} {
				second := incident{at, tr, lasts}
				if tr.leaving() && (lasts || first.leaving()) || !sampled(onePairOf(), op.name, first, second) {
					continue
				}
				sw.run(t, op, []incident{first, second})
			}
		}
	}
}

// sampled says whether a schedule is run: of so many, one. The choice is fixed,
// and spread evenly.
func sampled(one int, schedule ...any) bool {
	h := fnv.New32a()
	fmt.Fprint(h, schedule...)
	return int(h.Sum32()>>3)%one == 0
}

// chosen says whether the short form runs an incident. Of what is sampled it runs
// some troubles at each request, and each trouble at some requests.
func (sw *sweep) chosen(op *operation, row, column int, i incident) bool {
	switch {
	case brief():
		return sampled(8*max(1, op.sample), op.name, i)
	case op.sample == 0 || *sweepLong:
		return true
	}
	return (column+11*row)%op.sample == 0 && i.lasts == (row%2 == 1 && !i.leaving())
}

// brief is for runs that look for other things, such as races.
func brief() bool { return testing.Short() || raceEnabled && !*sweepLong }

// onePairOf says of how many pairs of incidents one is run.
func onePairOf() int {
	switch {
	case *sweepPairs > 0:
		return *sweepPairs
	case brief():
		return 1600
	case !*sweepLong:
		return 400
	}
	return 10
}

// run runs one schedule in a bubble of its own. It returns the requests that
// the call made, and what came of it.
func (sw *sweep) run(t *testing.T, op *operation, incidents []incident) (spots []spot, outcome string) {
	var s *scene
	defer func() {
		if p := recover(); p != nil { // such as a deadlock in the bubble
			panic(fmt.Sprintf("%s, %v: %v", op.name, incidents, p))
		}
		if len(s.broken) > 0 {
			t.Errorf("%s, %v:\n\t%s", op.name, incidents, strings.Join(s.broken, "\n\t"))
			outcome = broken
		} else if t.Failed() && outcome == "" {
			t.Logf("%s, %v", op.name, incidents)
			outcome = broken
		}
		sw.count(incidents, outcome)
	}()
	synctest.Test(t, func(t *testing.T) {
		s = newScene(t, op, incidents)
		spots, outcome = s.play()
	})
	return spots, outcome
}

// play prepares, makes the call with its incidents, and checks.
func (s *scene) play() (spots []spot, outcome string) {
	if s.op.prepare != nil {
		s.op.prepare(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	time.Sleep(2 * time.Second) // a lease is not used at the moment it is made
	s.srv.ForgetRequests()
	for _, i := range s.incidents {
		inject(s.srv, i, cancel)
	}
	s.wire.arm(cancel, s.incidents)
	began := time.Now()
	err := s.op.call(ctx, s)
	took := time.Since(began)
	s.asides.Wait()
	require.NoError(s.t, s.driver.Quiet(context.Background()))
	spots = s.spots()
	s.wire.disarm()
	// A caller who left a cleanup was not told what became of it.
	s.laws(err, took, s.onItsWay || err != nil && ctx.Err() != nil && s.op.cleans())
	outcome = fine
	switch {
	case lie(s.incidents):
		outcome = lied
	case err != nil && len(s.driver.Unconfirmed()) > 0:
		outcome = owing
	case err != nil:
		outcome = failed
	}
	s.afterwards()
	return spots, outcome
}

// spots names the requests since the log was emptied.
func (s *scene) spots() []spot {
	var all []spot
	seen := make(map[string]int)
	for _, r := range s.srv.Requests() {
		seen[r.Route]++
		all = append(all, spot{r.Route, seen[r.Route]})
	}
	slices.SortStableFunc(all, func(a, b spot) int { return cmp.Or(cmp.Compare(a.route, b.route), a.nth-b.nth) })
	return all
}

func union(a, b []spot) []spot {
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a, s)
		}
	}
	return a
}

func (sw *sweep) count(incidents []incident, outcome string) {
	sw.mu.Lock()
	defer sw.mu.Unlock()
	switch len(incidents) {
	case 0:
		sw.healthy++
	case 1:
		sw.singles++
	default:
		sw.pairs++
	}
	switch outcome {
	case broken:
		sw.findings++
	case lied:
		sw.lies++
	}
}

func (sw *sweep) fill(row, column, cell string) {
	sw.mu.Lock()
	defer sw.mu.Unlock()
	if sw.cells[row] == nil {
		sw.cells[row] = make(map[string]string)
		sw.rows = append(sw.rows, row)
	}
	if sw.cells[row][column] = cell; cell == passed {
		sw.left++
	}
}

// report prints what was done, and fails if a cell of the matrix is empty.
func (sw *sweep) report(t *testing.T, took time.Duration) {
	fmt.Printf("fault sweep: %d operations, %d requests, %d troubles; schedules: %d single, %d pairs, %d of them in which the provider lies; %d findings; %d cells left to the long form; %v\n",
		len(operations), len(sw.rows), len(troubles), sw.singles, sw.pairs, sw.lies, sw.findings, sw.left, took.Round(100*time.Millisecond))
	if *sweepMatrix != "" {
		f, err := os.Create(*sweepMatrix)
		require.NoError(t, err)
		sw.matrix(f)
		require.NoError(t, f.Close())
	} else if testing.Verbose() {
		sw.matrix(os.Stdout)
	}
	require.Zero(t, sw.findings)
	if brief() || sw.healthy < 2*len(operations) { // or -run chose some
		return
	}
	for _, row := range sw.rows {
		for _, tr := range troubles {
			if sw.cells[row][tr.name] == "" {
				t.Errorf("%s, %s: no schedule", row, tr.name)
			}
		}
	}
	require.GreaterOrEqual(t, sw.singles+sw.pairs, 5000)
}

// Schedules in which the sweep found a law broken, kept as they were found.
func TestFoundByTheSweep(t *testing.T) {
	const (
		create       = "POST /v1/sandboxes"
		sandbox      = "DELETE /v1/sandboxes/{id}"
		process      = "POST /v1/sandboxes/{id}/processes"
		terminate    = "DELETE /v1/sandboxes/{id}/processes/{process}"
		listProcess  = "GET /v1/sandboxes/{id}/processes"
		runWorkspace = "POST /v1/sandboxes/{id}/exec"
		resume       = "POST /v1/sandboxes/{id}/resume"
		get          = "GET /v1/sandboxes/{id}"
	)
	for name, c := range map[string]struct {
		op        string
		incidents []incident
	}{
		"the id of a create was garbled, and the destroy of that id not proven": {"Acquire", []incident{
			at(create, "wrong id", false), at(sandbox, "400", false)}},
		"the same, and what names nothing seemed to answer": {"Acquire, create tells no state", []incident{
			at(create, "wrong id", false), at(get, "data null", true)}},
		"a 404 right after a create was believed": {"Acquire", []incident{
			at(runWorkspace, "500 after", false), at(sandbox, "404", true)}},
		"the id of a process was garbled": {"Exec", []incident{at(process, "wrong id", false)}},
		"the same, and its end not proven": {"Exec", []incident{
			at(process, "wrong id", false), at(listProcess, "refused", true)}},
		"a 404 to a termination was believed":               {"Exec, times out", []incident{at(terminate, "404", true)}},
		"a sandbox stuck in resuming held an Exec for ever": {"Exec, paused before", []incident{at(resume, "sticks", false)}},
		"a 404 right after a list was believed":             {"Reconcile", []incident{at(get, "404", false)}},
		"two entries of one sandbox stood in each other's way": {"Destroy, command runs", []incident{
			at(sandbox, "502", true), at(terminate, "502 after", true)}},
		"a destroy hung until the last sighting was old, and then a 404 was believed": {"Destroy", []incident{
			at(sandbox, "hangs before", false), second(at(sandbox, "404", false))}},
		"the same, but it was the request before that hung": {"Acquire", []incident{
			at("PUT /v1/sandboxes/{id}/files", "hangs before", false), at(sandbox, "404", false)}},
		"a pause hung until the last sighting was old, and then a 404 was believed": {"Release, pause", []incident{
			at("POST /v1/sandboxes/{id}/pause", "hangs before", false), at(get, "404", false)}},
		"a step that hung was given its whole time four times":                     {"SyncIn, directory", []incident{at(runWorkspace, "hangs before", true)}},
		"a first step that was done, and refused all the same, left its directory": {"SyncIn, directory", []incident{at(runWorkspace, "409 after", true)}},
	} {
		t.Run(name, func(t *testing.T) {
			i := slices.IndexFunc(operations, func(op operation) bool { return op.name == c.op })
			if i < 0 {
				t.Skip("not swept on this system")
			}
			_, outcome := new(sweep).run(t, &operations[i], c.incidents)
			require.NotEqual(t, broken, outcome)
		})
	}
}

// at is a trouble at the first request of a route.
func at(route, name string, lasts bool) incident {
	i := slices.IndexFunc(troubles, func(tr trouble) bool { return tr.name == name })
	return incident{spot{route, 1}, troubles[i], lasts}
}

// second moves an incident to the second request of its route.
func second(i incident) incident {
	i.nth = 2
	return i
}

func (sw *sweep) matrix(w io.Writer) {
	slices.Sort(sw.rows)
	fmt.Fprintln(w, "Each cell: what came of the trouble once, and of the same from then on. + success, - an error and nothing left, o an error and what is left is listed, ? the provider lies, ! a law is broken, . only the long form looks.")
	for i, tr := range troubles {
		fmt.Fprintf(w, "%2d %s\n", i+1, tr.name)
	}
	for _, row := range sw.rows {
		for _, tr := range troubles {
			fmt.Fprintf(w, "%-3s", sw.cells[row][tr.name])
		}
		fmt.Fprintln(w, row)
	}
}
