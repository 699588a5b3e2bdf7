package createostest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

const (
	// treePoll is how often a tree is looked at when its leader is gone but
	// other processes of it are not.
	treePoll = 20 * time.Millisecond

	// kernelThread is PF_KTHREAD among the flags in /proc/PID/stat.
	kernelThread = 0x00200000

	// blankFor is how long an environment must be empty before it is believed.
	// During exec it is, for much less than this.
	blankFor = 50 * time.Millisecond
)

// procfs is the process table as /proc shows it. Its list must not be called by
// two goroutines at once; its read may.
type procfs struct {
	since  uint64               // older processes cannot descend from this one
	blanks map[procID]time.Time // processes with an empty environment, and since when
}

func newProcessTable() (processTable, error) {
	t := &procfs{}
	self, alive, err := t.read(os.Getpid())
	if err == nil && !alive {
		err = errors.New("this process is not in it")
	}
	if err != nil {
		return nil, fmt.Errorf("read the process table: %w", err)
	}
	t.since = self.birth
	return t, nil
}

// list reads the directory until it names no process that was not seen yet. A
// parent that forks and exits while the directory is being read hides its child
// from that reading, but not from the next.
func (t *procfs) list() ([]procInfo, error) {
	var procs []procInfo
	seen := make(map[int]bool)
	buf := make([]byte, 16<<10)
	for {
		pids, err := processIDs()
		if err != nil {
			return nil, err
		}
		fresh := false
		for _, pid := range pids {
			if seen[pid] {
				continue
			}
			seen[pid], fresh = true, true
			p, alive, err := t.inspect(pid, &buf)
			if err != nil {
				return nil, err
			}
			if alive && p.birth >= t.since {
				procs = append(procs, p)
			}
		}
		if !fresh {
			break
		}
	}
	t.judgeBlanks(procs)
	return procs, nil
}

// judgeBlanks clears blank for the processes whose environment has been empty
// for so long that it really is. Without this, one such process somewhere on the
// computer would delay the end of every tree.
func (t *procfs) judgeBlanks(procs []procInfo) {
	now := time.Now()
	blanks := make(map[procID]time.Time)
	for i := range procs {
		p := &procs[i]
		if !p.blank {
			continue
		}
		first, ok := t.blanks[p.id()]
		if !ok {
			first = now
		}
		blanks[p.id()] = first
		p.blank = now.Sub(first) < blankFor
	}
	t.blanks = blanks
}

func (t *procfs) read(pid int) (procInfo, bool, error) {
	buf := make([]byte, 4<<10)
	return readStat(pid, &buf)
}

// inspect is read, and the token.
func (t *procfs) inspect(pid int, buf *[]byte) (procInfo, bool, error) {
	p, alive, err := readStat(pid, buf)
	if err != nil || !alive || p.birth < t.since {
		return p, alive, err
	}
	environ, err := readProc(pid, "environ", buf)
	switch {
	case err == nil:
		p.token = environValue(environ, treeVariable)
		p.blank = len(environ) == 0
	case gone(err):
		// Its memory is gone and its code does not run, but until it is a
		// zombie it may hold files. The second answer is the newer one.
		return readStat(pid, buf)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		// It runs as somebody else; the other marks of a tree must do.
	default:
		return procInfo{}, false, err
	}
	return p, true, nil
}

func readStat(pid int, buf *[]byte) (procInfo, bool, error) {
	stat, err := readProc(pid, "stat", buf)
	if err != nil {
		if gone(err) {
			err = nil
		}
		return procInfo{}, false, err
	}
	p, alive, err := parseStat(stat)
	if err != nil {
		return procInfo{}, false, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	return p, alive, nil
}

// parseStat reads the line of /proc/PID/stat, as described in proc_pid_stat(5).
// The second field, the name, is in parentheses and may hold anything, also
// parentheses and newlines.
func parseStat(line []byte) (procInfo, bool, error) {
	open, end := bytes.IndexByte(line, '('), bytes.LastIndexByte(line, ')')
	if open < 0 || end < open {
		return procInfo{}, false, errors.New("no process name")
	}
	fields := bytes.Fields(line[end+1:])
	const state, ppid, pgrp, session, flags, threads, start = 0, 1, 2, 3, 6, 17, 19
	if len(fields) <= start {
		return procInfo{}, false, errors.New("too few fields")
	}
	var firstErr error
	number := func(field []byte) int64 {
		n, err := strconv.ParseInt(string(field), 10, 64)
		if err != nil && firstErr == nil {
			firstErr = err
		}
		return n
	}
	p := procInfo{
		pid:     int(number(bytes.TrimSpace(line[:open]))),
		ppid:    int(number(fields[ppid])),
		pgid:    int(number(fields[pgrp])),
		sid:     int(number(fields[session])),
		birth:   uint64(number(fields[start])),
		stopped: bytes.ContainsAny(fields[state], "Tt"),
		blocked: fields[state][0] == 'D',
	}
	alive := number(fields[flags])&kernelThread == 0
	switch fields[state][0] {
	case 'X', 'x':
		alive = false
	case 'Z':
		// A process whose first thread has ended looks like this as well.
		alive = alive && number(fields[threads]) > 1
	}
	return p, alive, firstErr
}

func environValue(environ []byte, name string) string {
	for entry := range bytes.SplitSeq(environ, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, []byte(name+"=")); ok {
			return string(value)
		}
	}
	return ""
}

func processIDs() ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	pids := make([]int, 0, len(names))
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// readProc reads a file of /proc/PID into buf, which it grows as needed. It does
// without os.File, which would try the poller first, as this is called for every
// process of the computer.
func readProc(pid int, name string, buf *[]byte) ([]byte, error) {
	fd, err := retryEINTR(func() (int, error) {
		return syscall.Open("/proc/"+strconv.Itoa(pid)+"/"+name, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, err
	}
	defer syscall.Close(fd)
	for n := 0; ; {
		if n == len(*buf) {
			*buf = append(*buf, make([]byte, len(*buf))...)
		}
		m, err := retryEINTR(func() (int, error) { return syscall.Read(fd, (*buf)[n:]) })
		if err != nil {
			return nil, err
		}
		if m == 0 {
			return (*buf)[:n], nil
		}
		n += m
	}
}

// gone reports whether err of /proc says that the process does not exist.
func gone(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ESRCH)
}
