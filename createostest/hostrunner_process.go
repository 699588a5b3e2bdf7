//go:build unix

package createostest

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

var signalNames = map[syscall.Signal]string{
	syscall.SIGHUP: "SIGHUP", syscall.SIGINT: "SIGINT", syscall.SIGQUIT: "SIGQUIT",
	syscall.SIGILL: "SIGILL", syscall.SIGTRAP: "SIGTRAP", syscall.SIGABRT: "SIGABRT",
	syscall.SIGBUS: "SIGBUS", syscall.SIGFPE: "SIGFPE", syscall.SIGKILL: "SIGKILL",
	syscall.SIGUSR1: "SIGUSR1", syscall.SIGSEGV: "SIGSEGV", syscall.SIGUSR2: "SIGUSR2",
	syscall.SIGPIPE: "SIGPIPE", syscall.SIGALRM: "SIGALRM", syscall.SIGTERM: "SIGTERM",
	syscall.SIGCHLD: "SIGCHLD", syscall.SIGCONT: "SIGCONT", syscall.SIGSTOP: "SIGSTOP",
	syscall.SIGTSTP: "SIGTSTP", syscall.SIGTTIN: "SIGTTIN", syscall.SIGTTOU: "SIGTTOU",
	syscall.SIGURG: "SIGURG", syscall.SIGXCPU: "SIGXCPU", syscall.SIGXFSZ: "SIGXFSZ",
	syscall.SIGVTALRM: "SIGVTALRM", syscall.SIGPROF: "SIGPROF", syscall.SIGWINCH: "SIGWINCH",
	syscall.SIGIO: "SIGIO", syscall.SIGSYS: "SIGSYS",
}

// hostProcess is a command and everything that it started. The command is the
// leader of its own session, and so of its own process group.
//
// One goroutine, supervise, owns its life and waits for the others: one for each
// pipe, and one that waits for the last output of the leader.
type hostProcess struct {
	m       *hostMachine
	cmd     *exec.Cmd
	tree    *tree
	tty     *terminal // nil without a terminal
	stdin   *stdinPipe
	outputs []*outputPipe

	reaped  chan struct{} // the leader is; cmd.ProcessState is set
	leader  chan struct{} // and its output is delivered
	gone    chan struct{} // no process is left
	settled chan struct{} // and all output is delivered
	look    chan struct{} // asks supervise to look at the tree now

	abandoned   chan struct{} // nobody wants the output
	abandonOnce sync.Once
}

func startHostProcess(m *hostMachine, s spec) (_ *hostProcess, err error) {
	if err := m.r.hold(); err != nil {
		return nil, err
	}
	started := false
	defer func() {
		if !started {
			m.r.running.Done()
		}
	}()

	token := rand.Text()
	p := &hostProcess{
		m:         m,
		reaped:    make(chan struct{}),
		leader:    make(chan struct{}),
		gone:      make(chan struct{}),
		settled:   make(chan struct{}),
		look:      make(chan struct{}, 1),
		abandoned: make(chan struct{}),
	}
	p.cmd = &exec.Cmd{
		Args:        append([]string{s.cmd}, s.args...),
		Dir:         s.dir,
		Env:         m.environ(token, s.env),
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if info, err := os.Stat(s.dir); err != nil || !info.IsDir() {
		return nil, errNoDir // else the error would be that of the command
	}
	if p.cmd.Path, err = lookPath(s.cmd, p.cmd.Env); err != nil {
		return nil, err
	}
	closeOurs, closeTheirs, err := p.connect(s)
	if err != nil {
		return nil, err
	}
	err = p.cmd.Start()
	closeTheirs()
	if err != nil {
		closeOurs()
		return nil, err
	}

	// The leader is not reaped before supervise runs, so until then its number
	// is its own. A birth that cannot be read stays 0 and matches no process:
	// then the leader has ended, and its group and token mark what it left.
	self, _, _ := m.r.table.read(p.pid())
	p.tree = newTree(token, procID{p.pid(), self.birth})
	started = true
	frozen, destroyed := m.register(p)
	go p.supervise()
	switch {
	case destroyed:
		p.abandon()
		_ = m.r.killAll(p) // close waits for it and says so if it did not work
		return nil, errDestroyed
	case frozen:
		_ = m.r.stopAll(p) // as in freeze
	}
	return p, nil
}

// lookPath finds name as a shell with this environment would.
func lookPath(name string, environ []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	path := ""
	for _, entry := range environ {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			path = value
		}
	}
	for _, dir := range filepath.SplitList(path) {
		file := filepath.Join(dir, name)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	return "", fmt.Errorf("%q: %w", name, exec.ErrNotFound)
}

// connect makes the pipes or the terminal of the command. closeTheirs closes the
// ends that the command got a copy of, closeOurs the others.
func (p *hostProcess) connect(s spec) (closeOurs, closeTheirs func(), err error) {
	var ours, theirs []*os.File
	closeAll := func(files *[]*os.File) func() {
		return func() {
			for _, f := range *files {
				_ = f.Close()
			}
		}
	}
	closeOurs, closeTheirs = closeAll(&ours), closeAll(&theirs)
	if s.pty != nil {
		tty, slave, err := openTerminal(*s.pty)
		if err != nil {
			return nil, nil, err
		}
		ours, theirs = []*os.File{tty.master}, []*os.File{slave}
		p.tty = tty
		p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = slave, slave, slave
		p.cmd.SysProcAttr.Setctty = true // descriptor 0, the default
		p.stdin = newStdinPipe(tty.master, false)
		p.outputs = []*outputPipe{newOutputPipe(tty.master, s.stdout)}
		return closeOurs, closeTheirs, nil
	}

	var pairs [3][2]*os.File // read end, write end
	for i := range pairs {
		pairs[i][0], pairs[i][1], err = os.Pipe()
		if err != nil {
			closeOurs()
			closeTheirs()
			return nil, nil, err
		}
		our, their := pairs[i][0], pairs[i][1]
		if i == 0 {
			our, their = their, our
		}
		ours, theirs = append(ours, our), append(theirs, their)
	}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = theirs[0], theirs[1], theirs[2]
	p.stdin = newStdinPipe(ours[0], true)
	p.outputs = []*outputPipe{newOutputPipe(ours[1], s.stdout), newOutputPipe(ours[2], s.stderr)}
	return closeOurs, closeTheirs, nil
}

// supervise runs from the start of the command until nothing of it is left: no
// process, no goroutine, no descriptor.
func (p *hostProcess) supervise() {
	defer p.m.r.running.Done()
	go p.stdin.run()
	for _, o := range p.outputs {
		go o.run()
	}

	_ = p.cmd.Wait() // what it says is in ProcessState
	close(p.reaped)
	p.stdin.abort()
	go func() {
		p.deliverRest(false)
		close(p.leader)
	}()

	p.watchTree()
	close(p.gone)
	<-p.leader
	p.deliverRest(true)
	p.m.forget(p)
	close(p.settled)

	<-p.stdin.done
	for _, o := range p.outputs {
		<-o.done
	}
}

// deliverRest returns when what is in the pipes now has been delivered, or when
// the output is abandoned.
func (p *hostProcess) deliverRest(last bool) {
	drained := make([]<-chan struct{}, len(p.outputs))
	for i, o := range p.outputs {
		drained[i] = o.drain(last)
	}
	for i, o := range p.outputs {
		select {
		case <-drained[i]:
		case <-o.done:
		case <-p.abandoned:
			return
		}
	}
}

// watchTree returns when no process of the tree is left. It begins when the
// leader is gone, which is why a running command costs nothing.
func (p *hostProcess) watchTree() {
	for {
		members, doubtful, err := p.m.r.census(p)
		if err == nil && len(members) == 0 && !doubtful {
			return
		}
		select {
		case <-time.After(treePoll):
		case <-p.look:
		}
	}
}

// refresh decides whether anything of the tree is left. Without it the end of a
// tree would be noticed up to treePoll late, and later while other programs start.
func (p *hostProcess) refresh() {
	if !p.isReaped() || isClosed(p.settled) {
		return
	}
	over := false
	err := p.m.r.insist("look at", []*hostProcess{p}, func(members []procInfo, doubtful bool) bool {
		over = len(members) == 0 && !doubtful
		return over || len(members) > 0
	})
	if err != nil || !over {
		return
	}
	p.lookSoon()
	timer := time.NewTimer(deliverBound) // a writer may accept nothing
	defer timer.Stop()
	select {
	case <-p.settled:
	case <-timer.C:
	}
}

// lookSoon spares watchTree the rest of its pause.
func (p *hostProcess) lookSoon() {
	select {
	case p.look <- struct{}{}:
	default:
	}
}

func (p *hostProcess) pid() int { return p.cmd.Process.Pid }

// input queues data for standard input. It does not wait for the process to read
// it, so success does not mean that it will.
func (p *hostProcess) input(data []byte) error { return p.stdin.send(data) }

// closeInput ends standard input after what was queued. A terminal has no end.
func (p *hostProcess) closeInput() error {
	if p.tty != nil {
		return errInputClosed
	}
	return p.stdin.finish()
}

func (p *hostProcess) leaderDone() <-chan struct{} { return p.leader }
func (p *hostProcess) treeDone() <-chan struct{}   { return p.settled }

func (p *hostProcess) isReaped() bool {
	select {
	case <-p.reaped:
		return true
	default:
		return false
	}
}

// status is how the leader ended: an exit code or the name of a signal.
func (p *hostProcess) status() (code *int, signal string) {
	if !p.isReaped() {
		return nil, ""
	}
	state, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case !ok:
		return nil, ""
	case state.Signaled():
		return nil, signalName(state.Signal())
	default:
		exit := state.ExitStatus()
		return &exit, ""
	}
}

func signalName(sig syscall.Signal) string {
	if name, ok := signalNames[sig]; ok {
		return name
	}
	return fmt.Sprintf("SIG%d", int(sig))
}

func signalNumber(name string) (syscall.Signal, error) {
	for sig, known := range signalNames {
		if known == name {
			return sig, nil
		}
	}
	return 0, fmt.Errorf("unknown signal %q", name)
}

// signal goes to the process group of the leader, or to the foreground group of
// the terminal. Processes that made their own group do not get it.
func (p *hostProcess) signal(name string) error {
	sig, err := signalNumber(name)
	if err != nil {
		return err
	}
	now, alive, err := p.m.r.table.read(p.pid())
	if err != nil {
		return err
	}
	if !p.isReaped() && alive && now.birth == p.tree.leader.birth {
		group := p.pid()
		if p.tty != nil {
			group = p.tty.foreground(group)
		}
		return p.groupError(syscall.Kill(-group, sig))
	}
	return p.signalOrphans(sig)
}

func (p *hostProcess) groupError(err error) error {
	if errors.Is(err, syscall.ESRCH) {
		return errExited
	}
	return err
}

// signalOrphans signals what is left of the group, process by process: without
// its leader, the number of a group is no proof that it is still the same.
func (p *hostProcess) signalOrphans(sig syscall.Signal) error {
	members, _, err := p.m.r.census(p)
	if err != nil {
		return err
	}
	reached := false
	for _, member := range members {
		if member.pgid == p.pid() && deliver(p.m.r.table, member, sig) {
			reached = true
		}
	}
	if !reached {
		return errExited
	}
	return nil
}

// resize changes the size of the terminal, and is an error without one.
func (p *hostProcess) resize(rows, cols int) error {
	if p.tty == nil {
		return errNoTerminal
	}
	return p.tty.resize(ptySize{rows, cols})
}

// terminate ends the tree. A process that is stopped does not react to the first
// signal, and is killed after grace like one that ignores it.
func (p *hostProcess) terminate(grace time.Duration) {
	if grace > 0 {
		_ = p.m.r.signalAll(syscall.SIGTERM, p) // what it does not reach is killed
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-p.gone:
		case <-timer.C:
		}
	}
	_ = p.m.r.killAll(p) // whether it worked is what treeDone tells
	time.AfterFunc(deliverBound, p.abandon)
	p.lookSoon()
}

// abandon ends the wait for writers that accept nothing, so that the tree can be
// done without them. What they accept later is still delivered.
func (p *hostProcess) abandon() {
	p.abandonOnce.Do(func() { close(p.abandoned) })
}
