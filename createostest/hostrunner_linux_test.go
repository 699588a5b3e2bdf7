package createostest

import (
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// These escape from the process group and from their parents; all ignore TERM.
var escapes = map[string]string{
	"own session":             `setsid bash -c 'trap "" TERM; echo $$; while :; do sleep 1000; done' & wait`,
	"orphan in own session":   `(setsid bash -c 'trap "" TERM; echo $$; while :; do sleep 1000; done' &); wait`,
	"double fork twice":       `(setsid bash -c '(setsid bash -c "trap \"\" TERM; echo \$\$; while :; do sleep 1000; done" &)' &)`,
	"no environment, child":   `setsid env -i bash -c 'trap "" TERM; echo $$; while :; do sleep 1000; done' & wait`,
	"no environment, session": `(env -i bash -c 'trap "" TERM; echo $$; while :; do sleep 1000; done' &)`,
	"no output":               `f=$1; (setsid bash -c 'trap "" TERM; echo $$ >"$1"; exec >/dev/null 2>&1 </dev/null; while :; do sleep 1000; done' bash "$f" &); read -r pid <"$f"; echo $pid`,
}

func TestHostRunnerFindsEscapes(t *testing.T) {
	for name, script := range escapes {
		t.Run(name, func(t *testing.T) {
			m := testMachine(t, testRunner(t), nil)
			out := newRecorder()
			p := bash(t, m, out, script, mkfifo(t, m))
			escaped := out.awaitPIDs(t, 1)
			require.False(t, isDone(p.treeDone()))

			m.freeze()
			now, _, err := m.r.table.read(escaped[0])
			require.NoError(t, err)
			require.True(t, now.stopped)
			m.thaw()

			p.terminate(20 * time.Millisecond)
			awaitDone(t, p.treeDone())
			requireAlive(t, m, false, escaped...)
		})
	}
}

func TestHostRunnerCloseFindsEscapes(t *testing.T) {
	r := testRunner(t)
	m := testMachine(t, r, nil)
	out := newRecorder()
	p := bash(t, m, out, escapes["double fork twice"])
	awaitDone(t, p.leaderDone())
	escaped := out.awaitPIDs(t, 1)
	require.False(t, isDone(p.treeDone()))
	require.NoError(t, r.close())
	requireAlive(t, m, false, escaped...)
}

// A chain in which each process starts the next and ends: at no time is anybody
// alive for long, yet the tree is.
func TestHostRunnerFollowsChain(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `next() { if [ "$1" = 0 ]; then echo end; else (next $(($1-1)) &); fi; }; next 100`)
	awaitDone(t, p.treeDone())
	require.Equal(t, "end\n", out.String())
}

func TestHostRunnerTokenIsPerTree(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	stays := bash(t, m, out, "echo ready; read -r x")
	out.awaitLines(t, 1)
	ends := bash(t, m, io.Discard, "(setsid sleep 1000 &)")
	awaitDone(t, ends.leaderDone())
	ends.terminate(0)
	awaitDone(t, ends.treeDone())
	requireAlive(t, m, true, stays.pid())
	require.NoError(t, stays.closeInput())
	awaitDone(t, stays.treeDone())
}

func TestHostRunnerTerminal(t *testing.T) {
	// In the background of a shell tests ignore SIGINT, and then so does what they
	// start, which cannot even trap it.
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p, err := m.start(spec{
		args:   []string{"-c", `tty -s && stty size; read -r x; stty size; trap 'echo interrupted; exit 5' INT; echo "got $x"; while :; do read -r -t 1; done`}, // in turns, as mkfifo says
		pty:    &ptySize{rows: 30, cols: 90},
		stdout: out,
	})
	require.NoError(t, err)
	out.await(t, func(s string) bool { return strings.Contains(s, "30 90\r\n") })
	require.NoError(t, p.(*hostProcess).resize(40, 120))
	require.NoError(t, p.input([]byte("hello\n")))
	out.await(t, func(s string) bool { return strings.Contains(s, "40 120\r\n") && strings.Contains(s, "got hello\r\n") })
	require.ErrorIs(t, p.closeInput(), errInputClosed)
	require.NoError(t, p.signal("SIGINT"))
	awaitDone(t, p.treeDone())
	code, _ := p.status()
	require.Equal(t, 5, *code)
	require.True(t, strings.HasSuffix(out.String(), "interrupted\r\n"))

	plain := bash(t, m, io.Discard, "exit 0")
	require.ErrorIs(t, plain.resize(1, 1), errNoTerminal)
	awaitDone(t, plain.treeDone())
}

func TestHostRunnerKilledTerminal(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p, err := m.start(spec{cmd: "cat", pty: &ptySize{rows: 24, cols: 80}, stdout: out})
	require.NoError(t, err)
	require.NoError(t, p.input([]byte("x\n")))
	out.await(t, func(s string) bool { return strings.Contains(s, "x\r\nx\r\n") }) // the echo and cat
	p.terminate(0)
	awaitDone(t, p.treeDone())
}

func TestParseStat(t *testing.T) {
	fields := func(state, flags, threads string) string {
		return "412 (a) (b\n c) " + state + " 7 400 300 34816 412 " + flags + " 0 0 0 0 1 2 0 0 20 0 " + threads + " 0 123456789012 1000 10"
	}
	tests := map[string]struct {
		line  string
		alive bool
		check func(procInfo) bool
	}{
		"sleeping":      {fields("S", "4194304", "1"), true, func(p procInfo) bool { return !p.stopped && !p.blocked }},
		"stopped":       {fields("T", "4194304", "1"), true, func(p procInfo) bool { return p.stopped }},
		"traced":        {fields("t", "4194304", "1"), true, func(p procInfo) bool { return p.stopped }},
		"blocked":       {fields("D", "4194304", "1"), true, func(p procInfo) bool { return p.blocked }},
		"zombie":        {fields("Z", "4194304", "1"), false, nil},
		"zombie leader": {fields("Z", "4194304", "3"), true, nil},
		"kernel thread": {fields("S", "2097216", "1"), false, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p, alive, err := parseStat([]byte(test.line))
			require.NoError(t, err)
			require.Equal(t, test.alive, alive)
			if test.check != nil {
				require.True(t, test.check(p))
			}
			p.stopped, p.blocked = false, false
			require.Equal(t, procInfo{pid: 412, ppid: 7, pgid: 400, sid: 300, birth: 123456789012}, p)
		})
	}
	for _, bad := range []string{"", "412 (x", "412 (x) S 1 2", strings.Replace(fields("S", "0", "1"), "123456789012", "soon", 1)} {
		_, _, err := parseStat([]byte(bad))
		assert.Error(t, err, bad)
	}
}

func TestReadProcGrowsItsBuffer(t *testing.T) {
	want, err := os.ReadFile("/proc/self/environ")
	require.NoError(t, err)
	if len(want) < 2 {
		t.Skip("no environment to read")
	}
	buf := make([]byte, 1)
	got, err := readProc(os.Getpid(), "environ", &buf)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

func TestEnvironValue(t *testing.T) {
	environ := []byte("A=1\x00X" + treeVariable + "=no\x00" + treeVariable + "=yes\x00B=" + treeVariable + "=no\x00")
	require.Equal(t, "yes", environValue(environ, treeVariable))
	require.Empty(t, environValue(environ, "C"))
}

// A program with an empty environment is doubtful only while it could be in exec.
func TestBlankEnvironment(t *testing.T) {
	m := testMachine(t, testRunner(t), nil)
	out := newRecorder()
	p := bash(t, m, out, `exec env -i "$(type -P bash)" -c 'echo $$; read -r x'`)
	pid := out.awaitPIDs(t, 1)[0]
	table := m.r.table.(*procfs)
	buf := make([]byte, 16)
	now, alive, err := table.inspect(pid, &buf)
	require.NoError(t, err)
	require.True(t, alive)
	require.True(t, now.blank, strconv.Itoa(pid))

	other := &procfs{}
	procs := []procInfo{now}
	other.judgeBlanks(procs)
	require.True(t, procs[0].blank, "seen for the first time")
	other.blanks[now.id()] = time.Now().Add(-blankFor)
	other.judgeBlanks(procs)
	require.False(t, procs[0].blank, "for long")
	other.judgeBlanks(nil)
	require.Empty(t, other.blanks, "those that ended are forgotten")
	require.NoError(t, p.closeInput())
	awaitDone(t, p.treeDone())
}
