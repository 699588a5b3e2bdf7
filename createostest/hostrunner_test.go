//go:build unix

package createostest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// patience is how long a test waits for an event that must come.
const patience = 20 * time.Second

func testRunner(t *testing.T) *hostRunner {
	t.Helper()
	table, err := newProcessTable()
	require.NoError(t, err)
	return testRunnerOn(t, table)
}

func testRunnerOn(t *testing.T, table processTable) *hostRunner {
	t.Helper()
	r, err := newHostRunnerOn(table, "")
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, r.close())
		_, err := os.Lstat(r.dir)
		require.ErrorIs(t, err, os.ErrNotExist)
		requireNoGoroutines(t)
	})
	return r
}

// requireNoGoroutines waits for the goroutines of this file's subject to end. The
// last steps of a goroutine come after it has told its owner.
func requireNoGoroutines(t *testing.T) {
	t.Helper()
	stacks := make([]byte, 1<<20)
	for end := time.Now().Add(patience); ; runtime.Gosched() {
		n := runtime.Stack(stacks, true)
		dump := string(stacks[:n])
		if !strings.Contains(dump, "createostest.(*hostProcess)") &&
			!strings.Contains(dump, "createostest.(*outputPipe)") &&
			!strings.Contains(dump, "createostest.(*stdinPipe)") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("goroutines left:\n%s", dump)
		}
	}
}

func testMachine(t *testing.T, r *hostRunner, env map[string]string) *hostMachine {
	t.Helper()
	m, err := r.newMachine("sb-1", env)
	require.NoError(t, err)
	return m.(*hostMachine)
}

// recorder is a writer that a test can wait on.
type recorder struct {
	mu    sync.Mutex
	buf   bytes.Buffer
	wrote chan struct{} // replaced and closed by every write
}

func newRecorder() *recorder { return &recorder{wrote: make(chan struct{})} }

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.wrote)
	r.wrote = make(chan struct{})
	return r.buf.Write(p)
}

func (r *recorder) now() (string, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.buf.String(), r.wrote
}

func (r *recorder) String() string { s, _ := r.now(); return s }

// await returns the output once it satisfies ok.
func (r *recorder) await(t *testing.T, ok func(output string) bool) string {
	t.Helper()
	deadline := time.After(patience)
	for {
		output, wrote := r.now()
		if ok(output) {
			return output
		}
		select {
		case <-wrote:
		case <-deadline:
			t.Fatalf("output did not come; there is %q", output)
		}
	}
}

func (r *recorder) awaitLines(t *testing.T, n int) []string {
	t.Helper()
	output := r.await(t, func(output string) bool { return strings.Count(output, "\n") >= n })
	return strings.Split(strings.TrimSuffix(output, "\n"), "\n")
}

func (r *recorder) awaitPIDs(t *testing.T, n int) []int {
	t.Helper()
	var pids []int
	for _, line := range r.awaitLines(t, n)[:n] {
		pid, err := strconv.Atoi(line)
		require.NoError(t, err)
		pids = append(pids, pid)
	}
	return pids
}

func awaitDone(t *testing.T, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("did not end")
	}
}

func isDone(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// bash starts a script, with out as both outputs.
func bash(t *testing.T, m *hostMachine, out io.Writer, script string, args ...string) *hostProcess {
	t.Helper()
	p, err := m.start(spec{cmd: "/bin/bash", args: append([]string{"-c", script, "bash"}, args...), stdout: out, stderr: out})
	require.NoError(t, err)
	return p.(*hostProcess)
}

func requireAlive(t *testing.T, m *hostMachine, want bool, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		_, alive, err := m.r.table.read(pid)
		require.NoError(t, err)
		require.Equal(t, want, alive, "process %d", pid)
	}
}

func TestHostRunnerExit(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	tests := []struct {
		script string
		code   int
		signal string
	}{
		{"exit 0", 0, ""},
		{"exit 3", 3, ""},
		{"exit 255", 255, ""},
		{"kill -TERM $$", 0, "SIGTERM"},
		{"kill -KILL $$", 0, "SIGKILL"},
	}
	for _, test := range tests {
		t.Run(test.script, func(t *testing.T) {
			p := bash(t, m, io.Discard, test.script)
			awaitDone(t, p.leaderDone())
			code, signal := p.status()
			assert.Equal(t, test.signal, signal)
			if test.signal != "" {
				assert.Nil(t, code)
			} else if assert.NotNil(t, code) {
				assert.Equal(t, test.code, *code)
			}
			awaitDone(t, p.treeDone())
			assert.ErrorIs(t, p.signal("SIGTERM"), errExited)
			assert.ErrorIs(t, p.input([]byte("late")), errInputClosed)
			assert.ErrorIs(t, p.closeInput(), errInputClosed)
			p.terminate(time.Hour) // nothing is left, so it does not wait
		})
	}
}

func TestHostRunnerStartErrors(t *testing.T) {
	m := testMachine(t, testRunner(t), map[string]string{"PATH": t.TempDir()})
	for _, cmd := range []string{"no-such-command", "/no/such/command"} {
		_, err := m.start(spec{cmd: cmd})
		require.Error(t, err, cmd)
	}
	_, err := m.start(spec{cmd: "/bin/bash", dir: "/no/such/directory"})
	require.ErrorIs(t, err, errNoDir)
	_, err = m.start(spec{cmd: "bash"})
	require.ErrorIs(t, err, exec.ErrNotFound, "PATH is the one of the sandbox")
	require.NoError(t, m.destroy())
	_, err = m.start(spec{cmd: "/bin/bash"})
	require.ErrorIs(t, err, errDestroyed)
}

func TestHostRunnerEnvironment(t *testing.T) {
	t.Setenv("SECRET_OF_THE_USER", "1")
	m := testMachine(t, testRunner(t), map[string]string{"BOX": "box", "BOTH": "box"})
	out := newRecorder()
	p, err := m.start(spec{
		cmd: "bash", args: []string{"-c", `pwd -P; echo "$HOME" "$TMPDIR" "$LANG" "$BOX" "$BOTH" "${SECRET_OF_THE_USER-none}"; mktemp`},
		env: map[string]string{"BOTH": "call"}, stdout: out,
	})
	require.NoError(t, err)
	awaitDone(t, p.leaderDone())
	lines := out.awaitLines(t, 3)
	assert.Equal(t, m.home(), lines[0])
	assert.Equal(t, strings.Join([]string{m.home(), m.tmp(), "C.UTF-8", "box", "call", "none"}, " "), lines[1])
	assert.Equal(t, m.tmp(), filepath.Dir(lines[2]))
}

// A command gets ordinary pipes: programs take a non-blocking one for broken.
func TestHostRunnerPipesBlock(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads the flags of descriptors from /proc")
	}
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `for fd in 0 1 2; do while read -r name value; do [ "$name" = flags: ] && echo "$value"; done </proc/$$/fdinfo/$fd; done`)
	awaitDone(t, p.leaderDone())
	for _, line := range out.awaitLines(t, 3) {
		flags, err := strconv.ParseInt(line, 8, 64)
		require.NoError(t, err)
		assert.Zero(t, flags&syscall.O_NONBLOCK)
	}
}

func TestHostRunnerInput(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, "cat; echo end")
	data := bytes.Repeat([]byte("\x00\xff\n\r binary \x80"), 40_000)
	for chunk := range 8 {
		piece := append([]byte(nil), data[chunk*len(data)/8:(chunk+1)*len(data)/8]...)
		require.NoError(t, p.input(piece))
		clear(piece) // the queue has its own copy
	}
	require.NoError(t, p.closeInput())
	require.ErrorIs(t, p.closeInput(), errInputClosed)
	require.ErrorIs(t, p.input(nil), errInputClosed)
	awaitDone(t, p.leaderDone())
	require.Equal(t, sha256.Sum256(append(data, "end\n"...)), sha256.Sum256([]byte(out.String())))
}

func TestHostRunnerInputThatNobodyReads(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, "echo ready; exec sleep 1000")
	out.awaitLines(t, 1)
	for range 8 {
		require.NoError(t, p.input(make([]byte, 256<<10)), "does not wait for the process")
	}
	require.NoError(t, p.closeInput())
	require.NoError(t, p.signal("SIGKILL"))
	awaitDone(t, p.treeDone())

	p = bash(t, m, io.Discard, "sleep 1000 <&0 & read -r x")
	require.NoError(t, p.input(append([]byte("line\n"), make([]byte, 1<<20)...)))
	awaitDone(t, p.leaderDone())
	awaitDone(t, p.stdin.done)
	require.False(t, isDone(p.treeDone()), "a child still has the other end")
	p.terminate(0)

	p = bash(t, m, out, "exec 0<&-; echo closed; exec sleep 1000")
	out.awaitLines(t, 2)
	require.NoError(t, p.input([]byte("x")))
	awaitDone(t, p.stdin.done)
	require.ErrorIs(t, p.input([]byte("x")), errInputClosed, "the process closed its end")
	p.terminate(0)
	awaitDone(t, p.treeDone())
}

func TestHostRunnerBigOutput(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	sum, size := sha256.New(), 0
	count := writerFunc(func(p []byte) (int, error) {
		size += len(p)
		return sum.Write(p)
	})
	p, err := m.start(spec{cmd: "bash", args: []string{"-c", "head -c 20000000 /dev/zero; head -c 1000 /dev/zero >&2"}, stdout: count})
	require.NoError(t, err, "a missing writer discards")
	awaitDone(t, p.leaderDone())
	require.Equal(t, 20_000_000, size)
	require.Equal(t, sha256.Sum256(make([]byte, size)), [32]byte(sum.Sum(nil)))
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestHostRunnerWriteErrorDoesNotBlockTheProcess(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	calls := 0
	broken := writerFunc(func([]byte) (int, error) { calls++; return 0, errors.New("nobody reads") })
	p, err := m.start(spec{cmd: "head", args: []string{"-c", "3000000", "/dev/zero"}, stdout: broken})
	require.NoError(t, err)
	awaitDone(t, p.treeDone())
	require.Equal(t, 1, calls)
	code, _ := p.status()
	require.Equal(t, 0, *code)
}

func TestHostRunnerBackgroundChildHoldsPipes(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	fifo := mkfifo(t, m)
	out := newRecorder()
	p := bash(t, m, out, `(read -r x <"$1"; echo "child: $x"; exit 0) & head -c 40000 /dev/zero | tr '\0' x; echo; exit 7`, fifo)
	awaitDone(t, p.leaderDone())
	require.Equal(t, strings.Repeat("x", 40000)+"\n", out.String(), "all that the leader wrote, and no more")
	code, _ := p.status()
	require.Equal(t, 7, *code)
	require.False(t, isDone(p.treeDone()))

	require.NoError(t, os.WriteFile(fifo, []byte("open\n"), 0))
	awaitDone(t, p.treeDone())
	require.True(t, strings.HasSuffix(out.String(), "\nchild: open\n"), "output after the leader's exit")
}

func TestHostRunnerLeaderEndsUnderEndlessOutput(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	seen, first := make(chan struct{}), sync.Once{}
	p := bash(t, m, writerFunc(func(p []byte) (int, error) {
		first.Do(func() { close(seen) })
		return len(p), nil
	}), "yes & read -r x")
	awaitDone(t, seen)
	require.NoError(t, p.closeInput())
	awaitDone(t, p.leaderDone())
	require.False(t, isDone(p.treeDone()))
	p.terminate(0)
	awaitDone(t, p.treeDone())
}

func TestOutputPipeDrainEnds(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer w.Close()
	total := 0
	o := newOutputPipe(r, writerFunc(func(p []byte) (int, error) {
		if total += len(p); total > 2*pipeLimit {
			return 0, errors.New("drained without end")
		}
		_, err := w.Write(p) // there is always more
		return len(p), err
	}))
	_, err = w.Write(make([]byte, 4096))
	require.NoError(t, err)
	require.NoError(t, o.empty(make([]byte, outputBuffer)))
	require.Equal(t, pipeLimit, total)
	require.NoError(t, r.Close())
}

func TestHostRunnerSignalsGroup(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `trap 'echo leader; exit 4' USR1
		bash -c 'trap "echo child; exit 0" USR1; echo ready; while :; do sleep 1000 & wait $!; done' &
		while :; do wait; done`)
	out.awaitLines(t, 1)
	require.Error(t, p.signal("SIGNONSENSE"))
	require.NoError(t, p.signal("SIGUSR1"))
	awaitDone(t, p.leaderDone())
	out.await(t, func(s string) bool { return strings.Contains(s, "leader\n") && strings.Contains(s, "child\n") })
	// What is left are the sleeps, which die of the signal unless they were
	// born after it.
	p.terminate(0)
	awaitDone(t, p.treeDone())
}

func TestHostRunnerSignalsGroupWithoutLeader(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `bash -c 'trap "echo got; exit 0" USR1; echo ready; while :; do read -r -t 1 <>"$1"; done' bash "$1" & exit 0`, mkfifo(t, m))
	awaitDone(t, p.leaderDone())
	out.awaitLines(t, 1)
	require.NoError(t, p.signal("SIGUSR1"))
	awaitDone(t, p.treeDone())
	require.Equal(t, "ready\ngot\n", out.String())
	require.ErrorIs(t, p.signal("SIGUSR1"), errExited)
}

// mkfifo makes a pipe that nobody writes to, for a shell to wait at. It must wait
// in short turns: a signal that comes between its last look for one and the call
// of read(2) runs no trap until the read is over.
func mkfifo(t *testing.T, m *hostMachine) string {
	t.Helper()
	return makeFIFO(t, filepath.Join(m.dir, "fifo"))
}

// makeFIFO runs a program, as package syscall cannot do it on all systems.
func makeFIFO(t *testing.T, path string) string {
	t.Helper()
	require.NoError(t, exec.Command("mkfifo", path).Run())
	return path
}

func TestHostRunnerTerminateLetsTheTreeEnd(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `trap 'echo bye; exit 9' TERM; echo ready; while :; do read -r -t 1 <>"$1"; done`, mkfifo(t, m))
	out.awaitLines(t, 1)
	p.terminate(patience)
	awaitDone(t, p.treeDone())
	require.Equal(t, "ready\nbye\n", out.String())
	code, _ := p.status()
	require.Equal(t, 9, *code)
}

func TestHostRunnerTerminateKillsWhatIgnoresTERM(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `trap '' TERM; echo $$; while :; do sleep 1000; done`)
	pids := out.awaitPIDs(t, 1)
	p.terminate(50 * time.Millisecond)
	awaitDone(t, p.treeDone())
	requireAlive(t, m, false, pids...)
	_, signal := p.status()
	require.Equal(t, "SIGKILL", signal)
}

// The journal is full and its reader does not come.
func TestHostRunnerBlockedWriter(t *testing.T) {
	for _, how := range []string{"terminate", "destroy"} {
		t.Run(how, func(t *testing.T) {
			m := testMachine(t, testRunner(t), nil)
			entered, unblock := make(chan struct{}), make(chan struct{})
			var once sync.Once
			p := bash(t, m, writerFunc(func(p []byte) (int, error) {
				once.Do(func() { close(entered) })
				<-unblock
				return len(p), nil
			}), "while :; do echo output; done")
			awaitDone(t, entered)
			if how == "terminate" {
				p.terminate(0)
			} else {
				require.NoError(t, m.destroy())
			}
			awaitDone(t, p.treeDone())
			requireAlive(t, m, false, p.pid())
			close(unblock)
		})
	}
}

func TestHostRunnerFreeze(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	// One writes, others fork all the time, so that freeze meets newborns.
	talker := bash(t, m, out, `printf -v x %1000s; while :; do echo "$x"; done`)
	ready := newRecorder()
	forker := bash(t, m, ready, `for i in 1 2 3; do (echo ready; while :; do (:) & wait; done) & done; wait`)
	out.awaitLines(t, 10)
	ready.awaitLines(t, 3)

	requireAllStopped := func() {
		t.Helper()
		members, _, err := m.r.census(talker, forker)
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(members), 5)
		for _, p := range members {
			require.True(t, p.stopped || p.blocked, "%+v runs", p)
		}
	}
	for range 5 {
		m.freeze()
		requireAllStopped()
		requireAllStopped()
		m.thaw()
		before := len(out.String())
		out.await(t, func(s string) bool { return len(s) > before+200_000 }) // more than a pipe held
	}
	m.freeze()
	require.NoError(t, m.destroy(), "a paused sandbox can be destroyed")
	awaitDone(t, talker.treeDone())
	awaitDone(t, forker.treeDone())
}

func TestHostRunnerStartWhileFrozen(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	m.freeze()
	out := newRecorder()
	p := bash(t, m, out, "read -r x; echo $x")
	require.NoError(t, p.input([]byte("thawed\n")))
	members, _, err := m.r.census(p)
	require.NoError(t, err)
	require.Len(t, members, 1)
	require.True(t, members[0].stopped)
	m.thaw()
	awaitDone(t, p.treeDone())
	require.Equal(t, "thawed\n", out.String())
}

func TestHostRunnerDestroy(t *testing.T) {
	r := testRunner(t)
	m, other := testMachine(t, r, nil), testMachine(t, r, nil)
	mine, fromFile, foreign, unused := r.workspace(), r.workspace(), r.workspace(), r.workspace()
	run := func(m *hostMachine, script string) {
		p := bash(t, m, io.Discard, script)
		awaitDone(t, p.treeDone())
		code, _ := p.status()
		require.Equal(t, 0, *code, script)
	}
	run(m, fmt.Sprintf("mkdir -p -- '%s' && mkdir '%[1]s/readonly' && touch '%[1]s/readonly/file' && chmod 500 '%[1]s/readonly'", mine))
	_, err := m.put(fromFile+"/a/b", strings.NewReader("x"))
	require.NoError(t, err)
	run(other, "mkdir -p -- '"+foreign+"'")
	run(m, "touch '"+foreign+"/guest'")

	require.NoError(t, m.destroy())
	require.NoError(t, m.destroy(), "repeated")
	for _, dir := range []string{m.dir, filepath.Dir(mine), filepath.Dir(fromFile)} {
		assert.NoDirExists(t, dir)
	}
	assert.FileExists(t, foreign+"/guest", "belongs to the machine that was first")
	assert.DirExists(t, filepath.Dir(unused))
	_, err = m.put(fromFile+"/a/b", strings.NewReader("x"))
	require.ErrorIs(t, err, errDestroyed)
	assert.NoDirExists(t, filepath.Dir(fromFile))

	run(other, "mkdir -p -- '"+mine+"'")
	require.NoError(t, other.destroy())
	assert.NoDirExists(t, filepath.Dir(mine), "a path can be used again, and has a new owner")
}

func TestHostRunnerClose(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "ws-1")
	require.NoError(t, os.Mkdir(keep, 0o700))
	closer, err := newHostRunner(dir)
	require.NoError(t, err)
	r := closer.(*hostRunner)
	m := testMachine(t, r, nil)
	require.NotEqual(t, keep, filepath.Dir(r.workspace()))
	out := newRecorder()
	bash(t, m, out, `echo $$; sleep 1000 & echo $!; wait`)
	pids := out.awaitPIDs(t, 2)

	require.NoError(t, r.close())
	require.NoError(t, r.close(), "repeated")
	requireAlive(t, m, false, pids...)
	requireNoGoroutines(t)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "only what somebody else made")
	_, err = r.newMachine("sb-2", nil)
	require.ErrorIs(t, err, errRunnerClosed)
	_, err = m.start(spec{cmd: "true"})
	require.Error(t, err)
}

// Everything at once, for the race detector.
func TestHostRunnerConcurrently(t *testing.T) {
	r := testRunner(t)
	var all sync.WaitGroup
	for range 4 {
		m := testMachine(t, r, nil)
		for range 4 {
			all.Go(func() {
				p, err := m.start(spec{cmd: "bash", args: []string{"-c", "sleep 1000 & (sleep 1000 &) ; cat"}, stdout: io.Discard})
				if err != nil {
					assert.ErrorIs(t, err, errDestroyed)
					return
				}
				_ = p.input([]byte("x"))
				_ = p.closeInput()
				_ = p.signal("SIGUSR1")
				p.terminate(0)
				select {
				case <-p.treeDone():
				case <-time.After(patience):
					t.Error("did not end")
				}
			})
		}
		all.Go(func() { m.freeze(); m.thaw() })
		all.Go(func() { assert.NoError(t, m.destroy()) })
	}
	all.Wait()
}

// What a test reads right after the last process died is not what was noticed
// some milliseconds before.
func TestHostRunnerRefreshKnowsTheTree(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `sleep 1000 & echo $!`)
	awaitDone(t, p.leaderDone())
	p.refresh()
	require.False(t, isDone(p.treeDone()))

	pid := out.awaitPIDs(t, 1)[0]
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	for alive := true; alive; runtime.Gosched() {
		var err error
		_, alive, err = m.r.table.read(pid)
		require.NoError(t, err)
	}
	p.refresh()
	require.True(t, isDone(p.treeDone()))
}
