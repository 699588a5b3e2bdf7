//go:build unix

package createostest

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTreeMembers(t *testing.T) {
	const token = "mine"
	leader := procInfo{pid: 100, ppid: 50, pgid: 100, sid: 100, birth: 7, token: token}
	tests := map[string]struct {
		procs    []procInfo
		want     []int
		doubtful bool
	}{
		"nothing":          {},
		"leader":           {procs: []procInfo{leader}, want: []int{100}},
		"token":            {procs: []procInfo{{pid: 200, ppid: 1, pgid: 200, sid: 200, birth: 8, token: token}}, want: []int{200}},
		"another token":    {procs: []procInfo{{pid: 200, ppid: 1, pgid: 200, sid: 200, birth: 8, token: "other"}}},
		"session":          {procs: []procInfo{{pid: 200, ppid: 1, pgid: 200, sid: 100, birth: 8}}, want: []int{200}},
		"group":            {procs: []procInfo{{pid: 200, ppid: 1, pgid: 100, birth: 8}}, want: []int{200}},
		"child of a child": {procs: []procInfo{{pid: 202, ppid: 201, pgid: 202, sid: 202, birth: 9}, {pid: 201, ppid: 100, pgid: 201, sid: 201, birth: 8}, leader}, want: []int{202, 201, 100}},
		"parent and sister": {procs: []procInfo{{pid: 50, ppid: 1, pgid: 50, sid: 50, birth: 1}, leader,
			{pid: 101, ppid: 50, pgid: 50, sid: 50, birth: 7}}, want: []int{100}},
		"reused leader":            {procs: []procInfo{{pid: 100, ppid: 1, pgid: 30, sid: 30, birth: 9}}},
		"in exec":                  {procs: []procInfo{{pid: 200, ppid: 1, pgid: 200, sid: 200, birth: 8, blank: true}}, doubtful: true},
		"in exec before the start": {procs: []procInfo{{pid: 200, ppid: 1, pgid: 200, sid: 200, birth: 6, blank: true}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			members, doubtful := newTree(token, leader.id()).members(test.procs, false)
			var got []int
			for _, p := range members {
				got = append(got, p.pid)
			}
			assert.Equal(t, test.want, got)
			assert.Equal(t, test.doubtful, doubtful)
		})
	}
}

func TestTreeRemembersAndForgets(t *testing.T) {
	leader := procInfo{pid: 100, ppid: 50, pgid: 100, sid: 100, birth: 7}
	child := procInfo{pid: 101, ppid: 100, pgid: 101, sid: 101, birth: 8}
	tree := newTree("mine", leader.id())
	members, _ := tree.members([]procInfo{leader, child}, false)
	require.Len(t, members, 2)

	child.ppid = 1
	members, _ = tree.members([]procInfo{child}, true)
	require.Equal(t, []procInfo{child}, members, "a known member stays one without its parent")

	stranger := procInfo{pid: 100, ppid: 1, pgid: 100, sid: 100, birth: 9}
	members, _ = tree.members([]procInfo{child, stranger}, true)
	require.Equal(t, []procInfo{child}, members, "the number of an ended group may be used again")

	child.birth++
	members, _ = tree.members([]procInfo{child}, true)
	require.Empty(t, members, "another process with the same number")
}

func TestSnapshotsAreShared(t *testing.T) {
	table := &scriptedTable{entered: make(chan struct{}), proceed: make(chan struct{})}
	s := snapshots{table: table}
	var all sync.WaitGroup
	pids := make([]int, 6)
	take := func(i int) {
		all.Go(func() {
			procs, err := s.take()
			if assert.NoError(t, err) {
				pids[i] = procs[0].pid
			}
		})
	}
	take(0)
	<-table.entered
	for i := 1; i < len(pids); i++ {
		take(i)
	}
	require.Eventually(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.next != nil }, patience, time.Millisecond)
	table.proceed <- struct{}{}
	<-table.entered
	table.proceed <- struct{}{}
	go func() { // for those who came after the second reading began, if any
		for range table.entered {
			table.proceed <- struct{}{}
		}
	}()
	all.Wait()
	close(table.entered)
	require.Equal(t, 1, pids[0])
	for _, pid := range pids[1:] {
		require.GreaterOrEqual(t, pid, 2, "nobody gets a reading that began before they asked")
	}
	require.Less(t, table.readings, len(pids))
}

// scriptedTable answers the n-th reading with one process n.
type scriptedTable struct {
	entered, proceed chan struct{}
	readings         int
}

func (s *scriptedTable) list() ([]procInfo, error) {
	s.readings++
	n := s.readings
	s.entered <- struct{}{}
	<-s.proceed
	return []procInfo{{pid: n}}, nil
}

func (s *scriptedTable) read(int) (procInfo, bool, error) {
	return procInfo{}, false, errors.New("not scripted")
}

// Processes that are born while the table is read are met by the next round.
func TestInsistUntilQuiet(t *testing.T) {
	// No system has such numbers, so nothing real is signalled.
	const pid = 1 << 30
	leader := procInfo{pid: pid, ppid: 1, pgid: pid, birth: 1}
	child := procInfo{pid: pid + 1, ppid: pid, pgid: pid, birth: 2}
	stopped := func(p procInfo) procInfo { p.stopped = true; return p }
	waiting := func(p procInfo) procInfo { p.blocked = true; return p }
	inExec := procInfo{pid: pid + 2, ppid: 1, pgid: pid + 2, birth: 3, blank: true}

	tests := map[string]struct {
		act      func(r *hostRunner, p *hostProcess) error
		readings [][]procInfo
	}{
		"kill": {func(r *hostRunner, p *hostProcess) error { return r.killAll(p) },
			[][]procInfo{{leader}, {child}, {inExec}, {}}},
		"stop": {func(r *hostRunner, p *hostProcess) error { return r.stopAll(p) },
			[][]procInfo{{leader}, {stopped(leader), child}, {stopped(leader), stopped(child), inExec}, {stopped(leader), stopped(child)}}},
		"stop what waits": {func(r *hostRunner, p *hostProcess) error { return r.stopAll(p) },
			[][]procInfo{{waiting(leader)}, {waiting(leader)}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			table := &replay{readings: test.readings}
			r := &hostRunner{table: table, snapshots: snapshots{table: table}}
			p := &hostProcess{tree: newTree("mine", leader.id()), reaped: make(chan struct{})}
			require.NoError(t, test.act(r, p))
			require.Empty(t, table.readings)
		})
	}
}

// replay is a table that answers each reading with the next of a list.
type replay struct{ readings [][]procInfo }

func (r *replay) list() ([]procInfo, error) {
	if len(r.readings) == 0 {
		return nil, errors.New("no reading left")
	}
	procs := r.readings[0]
	r.readings = r.readings[1:]
	return procs, nil
}

func (r *replay) read(int) (procInfo, bool, error) { return procInfo{}, false, nil }

func TestDeliverVerifies(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	p, err := m.start(spec{cmd: "sleep", args: []string{"1000"}})
	require.NoError(t, err)
	sleeper, alive, err := m.r.table.read(p.pid())
	require.NoError(t, err)
	require.True(t, alive)

	reused := sleeper
	reused.birth++
	require.False(t, deliver(m.r.table, reused, syscall.SIGKILL))
	for _, pid := range []int{-1, 0, 1, os.Getpid()} {
		now, _, _ := m.r.table.read(pid)
		now.pid = pid
		require.False(t, deliver(m.r.table, now, syscall.Signal(0)), "process %d", pid)
	}
	require.True(t, deliver(m.r.table, sleeper, syscall.SIGKILL))
	awaitDone(t, p.treeDone())
	require.False(t, deliver(m.r.table, sleeper, syscall.SIGKILL))
}

// What follows is a conformance test of the process tables that can be used here.

func eachTable(t *testing.T, test func(t *testing.T, table processTable)) {
	native, err := newProcessTable()
	require.NoError(t, err)
	t.Run("native", func(t *testing.T) { test(t, native) })
	t.Run("ps", func(t *testing.T) {
		if _, err := (psTable{}).list(); err != nil {
			t.Skip("no usable ps:", err)
		}
		test(t, psTable{})
	})
}

func TestTableSeesItself(t *testing.T) {
	eachTable(t, func(t *testing.T, table processTable) {
		self, alive, err := table.read(os.Getpid())
		require.NoError(t, err)
		require.True(t, alive)
		require.Equal(t, os.Getppid(), self.ppid)
		require.False(t, self.stopped)
		require.NotZero(t, self.birth)

		procs, err := table.list()
		require.NoError(t, err)
		ids := make(map[procID]bool)
		for _, p := range procs {
			ids[p.id()] = true
		}
		require.True(t, ids[self.id()])

		_, alive, err = table.read(1 << 30)
		require.NoError(t, err)
		require.False(t, alive)
	})
}

func TestTableKillsTree(t *testing.T) {
	eachTable(t, func(t *testing.T, table processTable) {
		m := testMachine(t, testRunnerOn(t, table), nil)
		out := newRecorder()
		p := bash(t, m, out, `trap '' TERM; echo $$; bash -c 'echo $$; while :; do sleep 1000; done' & wait; wait`)
		pids := out.awaitPIDs(t, 2)
		requireAlive(t, m, true, pids...)
		p.terminate(20 * time.Millisecond)
		awaitDone(t, p.treeDone())
		requireAlive(t, m, false, pids...)
	})
}

func TestTableFreezes(t *testing.T) {
	eachTable(t, func(t *testing.T, table processTable) {
		m := testMachine(t, testRunnerOn(t, table), nil)
		out := newRecorder()
		p := bash(t, m, out, `echo ready; while read -r x; do echo "$x"; done`)
		out.awaitLines(t, 1)
		m.freeze()
		now, alive, err := table.read(p.pid())
		require.NoError(t, err)
		require.True(t, alive)
		require.True(t, now.stopped)
		require.Equal(t, p.pid(), now.pgid)
		require.NoError(t, p.input([]byte("thawed\n")))
		m.thaw()
		out.awaitLines(t, 2)
		require.NoError(t, p.closeInput())
		awaitDone(t, p.treeDone())
	})
}

func TestTableSignalsOnlyTheLiving(t *testing.T) {
	eachTable(t, func(t *testing.T, table processTable) {
		m := testMachine(t, testRunnerOn(t, table), nil)
		p := bash(t, m, io.Discard, "read -r x")
		require.NoError(t, p.signal("SIGUSR1"))
		awaitDone(t, p.treeDone())
		_, signal := p.status()
		require.Equal(t, "SIGUSR1", signal)
		require.ErrorIs(t, p.signal("SIGUSR1"), errExited)
	})
}

func TestParsePS(t *testing.T) {
	procs, err := parsePS("    1     0     1 Ss   Mon Nov 30 10:05:00 2026\n" +
		"  812   800   812 T+   Mon Nov  2 10:05:59 2026\n" +
		"  813   800   812 Z    Mon Nov  2 10:05:59 2026\n")
	require.NoError(t, err)
	require.Equal(t, []procInfo{
		{pid: 1, pgid: 1, birth: 1796033100},
		{pid: 812, ppid: 800, pgid: 812, birth: 1793613959, stopped: true},
	}, procs)
	for _, bad := range []string{"1 2\n", "a 2 3 S Mon Nov 30 10:05:00 2026\n", "1 2 3 S yesterday\n"} {
		_, err := parsePS(bad)
		require.Error(t, err, bad)
	}
}
