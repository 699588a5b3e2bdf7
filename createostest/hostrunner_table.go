//go:build unix

package createostest

import (
	"os"
	"sync"
	"syscall"
)

// processTable reads the processes of this computer.
//
// Both methods leave out the dead: a zombie runs nothing and holds nothing, and
// whether its parent ever collects it is no business of the tree.
type processTable interface {
	// list returns every live process that can belong to a tree of this
	// program. A process that is alive from the beginning to the end of the
	// call is in the result.
	list() ([]procInfo, error)

	// read returns one process, and false when it is dead.
	read(pid int) (procInfo, bool, error)
}

// procInfo is what a processTable says about one process. A process id alone
// names nothing, as it is used again; pid and birth together do.
type procInfo struct {
	pid, ppid, pgid int
	sid             int    // 0 when the table does not tell
	birth           uint64 // start time, in the unit of the table
	token           string // value of treeVariable in its environment
	blank           bool   // its environment should be readable, but is empty: perhaps in the middle of exec
	stopped         bool
	blocked         bool // waits inside the kernel and cannot stop before that ends
}

type procID struct {
	pid   int
	birth uint64
}

func (p procInfo) id() procID { return procID{p.pid, p.birth} }

// snapshots shares one reading of the table among all who ask for it at the
// same time, so that many trees cost little more than one. Nobody is given a
// reading that began before they asked: it could not contain what they did.
type snapshots struct {
	table processTable

	mu      sync.Mutex // guards current and next
	current *snapshot  // being read now
	next    *snapshot  // begins when current ends
}

type snapshot struct {
	done  chan struct{}
	procs []procInfo
	err   error
}

func (s *snapshots) take() ([]procInfo, error) {
	shot, before, mine := s.join()
	if !mine {
		<-shot.done
		return shot.procs, shot.err
	}
	if before != nil {
		<-before.done
	}
	shot.procs, shot.err = s.table.list()

	s.mu.Lock()
	s.current, s.next = s.next, nil
	s.mu.Unlock()
	close(shot.done)
	return shot.procs, shot.err
}

// join returns the snapshot to use, whether the caller has to make it, and then
// which one it has to wait for first.
func (s *snapshots) join() (shot, before *snapshot, mine bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.current == nil:
		s.current = &snapshot{done: make(chan struct{})}
		return s.current, nil, true
	case s.next == nil:
		s.next = &snapshot{done: make(chan struct{})}
		return s.next, s.current, true
	default:
		return s.next, nil, false
	}
}

// deliver sends sig to the process that p describes, or to none when that one is
// dead and its number perhaps in use again.
func deliver(table processTable, p procInfo, sig syscall.Signal) bool {
	if p.pid <= 1 || p.pid == os.Getpid() {
		return false
	}
	// Where the system has process handles (on Linux), FindProcess takes one
	// here: what is verified below is then also what is signalled, even if it
	// dies in between.
	handle, err := os.FindProcess(p.pid)
	if err != nil {
		return false
	}
	defer handle.Release()
	now, alive, err := table.read(p.pid)
	if err != nil || !alive || now.birth != p.birth {
		return false
	}
	return handle.Signal(sig) == nil
}
