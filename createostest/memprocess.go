package createostest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"path"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// Command is a command that a function answers in place of a process: see
// [Options.Commands]. The fields are what the command would see of its world.
// A driver's loader and script are already read: Name and Args are the
// command itself.
type Command struct {
	// Sandbox is the id of the sandbox.
	Sandbox string
	Name    string
	Args    []string
	// Dir is the working directory. Nothing checks that it is there, unlike
	// with real processes, where the API refuses a missing one.
	Dir string
	Env map[string]string
	// Stdin ends when the other side closes it; a command without input reads
	// an end at once. Reads end with an error once the command is killed.
	Stdin io.Reader
	// Writes block while nobody makes room for more output and while the
	// sandbox is paused, and fail once the command is killed.
	Stdout, Stderr io.Writer
	// PTY tells that the command runs on a terminal.
	PTY bool

	ctx     context.Context
	process *memoryProcess
	member  *member
}

// Sleep waits for d of the sandbox's time: a pause does not count. It returns
// an error when the command is killed meanwhile.
func (c *Command) Sleep(d time.Duration) error {
	m := c.process.machine
	for {
		if err := m.await(c.ctx); err != nil {
			return err
		}
		if d <= 0 {
			return nil
		}
		began := time.Now()
		timer := time.NewTimer(d)
		_, frozen := m.gates()
		select {
		case <-timer.C:
		case <-frozen:
			timer.Stop()
		case <-c.ctx.Done():
			timer.Stop()
		}
		d -= time.Since(began)
	}
}

// Trap catches signals: those named are sent to the channel and no longer end
// the command. SIGKILL cannot be caught. A signal that finds the channel full
// is dropped, as the second of two pending ones is.
func (c *Command) Trap(signals ...string) <-chan string {
	p := c.process
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.member.caught == nil {
		c.member.caught = make(chan string, 8)
	}
	c.member.traps = append(c.member.traps, signals...)
	return c.member.caught
}

// KilledBy says what no exit code can, that a signal ended the command. A
// function returns its result.
func (c *Command) KilledBy(signal string) int {
	p := c.process
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.member.killedBy == "" {
		c.member.killedBy = signal
	}
	return -1
}

// Spawn starts a child in the background; called by a command that was killed
// or has returned it does nothing. The child belongs to the tree of the
// process, holds its output open, shares its fate under signals, and may
// outlive the command.
func (c *Command) Spawn(f func(ctx context.Context, child *Command)) { c.spawn(f, false) }

// SpawnSession starts a child with a session of its own: signals to the process
// do not reach it, nor does it hold the output open; a terminate of the whole
// tree ends it.
func (c *Command) SpawnSession(f func(ctx context.Context, child *Command)) { c.spawn(f, true) }

func (c *Command) spawn(f func(context.Context, *Command), session bool) {
	p := c.process
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, alive := p.members[c.member]; !alive || c.member.killedBy != "" {
		return // who has ended starts nothing
	}
	m := p.addMemberLocked(session)
	child := *c
	child.Args, child.Env = slices.Clone(c.Args), maps.Clone(c.Env)
	p.bind(&child, m)
	p.machine.runner.running.Go(func() {
		defer p.endMember(m)
		child.guard(func(ctx context.Context, c *Command) int {
			f(ctx, c)
			return 0
		})
		p.machine.await(m.ctx) // nothing ends while the machine stands still
	})
}

// guard runs a function of a test. A panic ends the command as a crash would,
// and says so on its standard error.
func (c *Command) guard(f func(context.Context, *Command) int) (code int) {
	defer func() {
		if v := recover(); v != nil {
			fmt.Fprintf(c.Stderr, "createostest: a command panicked: %v\n%s", v, debug.Stack())
			code = c.KilledBy("SIGABRT")
		}
	}()
	return f(c.ctx, c)
}

// ReadFile reads a file of the sandbox; a relative name is taken from Dir.
func (c *Command) ReadFile(name string) ([]byte, error) {
	return c.process.machine.files.read(c.abs(name))
}

// WriteFile writes a file of the sandbox, with missing parents.
func (c *Command) WriteFile(name string, data []byte) error {
	return c.process.machine.files.write(c.abs(name), slices.Clone(data))
}

func (c *Command) abs(name string) string {
	if path.IsAbs(name) {
		return path.Clean(name)
	}
	return path.Join(c.Dir, name)
}

// member is one process of a tree: the leader or a child.
type member struct {
	session  bool
	ctx      context.Context
	cancel   context.CancelFunc
	traps    []string // signals that caught gets
	caught   chan string
	killedBy string // the signal that ended it
}

// memoryProcess is a leader with its children. mu guards what follows it.
type memoryProcess struct {
	machine *memoryMachine
	number  int
	spec    spec
	stdin   *inputPipe

	leaderEnd, outputEnd, treeEnd chan struct{}

	mu       sync.Mutex
	leader   *member
	members  map[*member]struct{} // alive
	code     *int
	signaled string
}

func newMemoryProcess(m *memoryMachine, number int, spec spec) *memoryProcess {
	p := &memoryProcess{
		machine: m, number: number, spec: spec, stdin: newInputPipe(), members: make(map[*member]struct{}),
		leaderEnd: make(chan struct{}), outputEnd: make(chan struct{}), treeEnd: make(chan struct{}),
	}
	p.leader = p.addMemberLocked(false)
	return p
}

func (p *memoryProcess) addMemberLocked(session bool) *member {
	ctx, cancel := context.WithCancel(context.Background())
	m := &member{session: session, ctx: ctx, cancel: cancel}
	p.members[m] = struct{}{}
	return m
}

// bind connects a command to a member of the tree.
func (p *memoryProcess) bind(c *Command, m *member) {
	c.ctx, c.process, c.member = m.ctx, p, m
	c.Stdout = &gatedWriter{p.machine, m.ctx, p.spec.stdout}
	c.Stderr = &gatedWriter{p.machine, m.ctx, p.spec.stderr}
}

// run is the life of the leader.
func (p *memoryProcess) run() {
	c := &Command{
		Sandbox: p.machine.id, Name: p.spec.cmd, Args: slices.Clone(p.spec.args), Dir: p.spec.dir,
		Env: mergeEnv(p.machine.env, p.spec.env), PTY: p.spec.pty != nil,
	}
	if c.Dir == "" {
		c.Dir = "/root"
	}
	p.bind(c, p.leader)
	c.Stdin = &gatedReader{p.machine, p.leader.ctx, p.stdin}
	code := c.guard(func(_ context.Context, c *Command) int { return runCommand(c, p.machine.runner.commands) })
	p.stdin.close()
	p.machine.await(p.leader.ctx) // a paused machine does not exit
	p.mu.Lock()
	if p.signaled = p.leader.killedBy; p.signaled == "" {
		code &= 0xff
		p.code = &code
	}
	p.mu.Unlock()
	close(p.leaderEnd)
	p.endMember(p.leader)
}

func (p *memoryProcess) endMember(m *member) {
	p.mu.Lock()
	m.cancel()
	delete(p.members, m)
	last, holders := len(p.members) == 0, 0
	for o := range p.members {
		if !o.session {
			holders++
		}
	}
	if holders == 0 && !isClosed(p.outputEnd) {
		close(p.outputEnd)
	}
	if last {
		close(p.treeEnd)
	}
	p.mu.Unlock()
	if last {
		p.machine.forget(p)
	}
}

func (p *memoryProcess) pid() int                      { return p.number }
func (p *memoryProcess) leaderDone() <-chan struct{}   { return p.leaderEnd }
func (p *memoryProcess) treeDone() <-chan struct{}     { return p.treeEnd }
func (p *memoryProcess) outputEnds() []<-chan struct{} { return []<-chan struct{}{p.outputEnd} }
func (p *memoryProcess) closeInput() error             { return p.stdin.closeOnce() }
func (p *memoryProcess) input(data []byte) error       { return p.stdin.write(data) }
func (p *memoryProcess) resize(int, int) error         { return nil }
func (p *memoryProcess) status() (*int, string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.code, p.signaled
}

// Which members of a tree a signal reaches.
type reach bool

const (
	processGroup reach = false
	everyMember  reach = true
)

func (p *memoryProcess) signal(name string) error {
	if isClosed(p.outputEnd) {
		return errExited
	}
	p.kill(name, processGroup)
	return nil
}

// kill sends a signal.
func (p *memoryProcess) kill(signal string, to reach) {
	p.mu.Lock()
	var hit []*member
	for m := range p.members {
		if to == everyMember || !m.session {
			hit = append(hit, m)
		}
	}
	p.mu.Unlock()
	for _, m := range hit {
		p.killMember(m, signal)
	}
}

func (p *memoryProcess) killMember(m *member, signal string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if signal == "SIGWINCH" && !slices.Contains(m.traps, signal) {
		return // ignored by default
	}
	if signal != "SIGKILL" && slices.Contains(m.traps, signal) {
		select {
		case m.caught <- signal:
		default:
		}
		return
	}
	if m.killedBy == "" {
		m.killedBy = signal
	}
	m.cancel()
}

func (p *memoryProcess) terminate(grace time.Duration) {
	if grace > 0 {
		p.kill("SIGTERM", everyMember)
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-p.treeEnd:
			return
		case <-timer.C:
		}
	}
	p.kill("SIGKILL", everyMember)
}

// gatedWriter writes for a member of a machine: not while the machine stands
// still, and not after the member was killed.
type gatedWriter struct {
	machine *memoryMachine
	ctx     context.Context
	to      io.Writer
}

func (w *gatedWriter) Write(data []byte) (int, error) {
	if err := w.machine.await(w.ctx); err != nil {
		return 0, err
	}
	if u, ok := w.to.(interface {
		writeUntil(done <-chan struct{}, p []byte) (int, error)
	}); ok {
		return u.writeUntil(w.ctx.Done(), data)
	}
	return w.to.Write(data)
}

type gatedReader struct {
	machine *memoryMachine
	ctx     context.Context
	from    *inputPipe
}

func (r *gatedReader) Read(data []byte) (int, error) {
	if err := r.machine.await(r.ctx); err != nil {
		return 0, err
	}
	return r.from.read(r.ctx, data)
}

// inputPipe is the standard input of a process. It takes whatever is written
// at once, so that a command that does not read blocks nobody.
type inputPipe struct {
	mu     sync.Mutex
	data   []byte
	closed bool // by the writer: what is there is still read
	broken bool // by the reader: nobody will read
	wake   chan struct{}
}

func newInputPipe() *inputPipe { return &inputPipe{wake: make(chan struct{})} }

func (i *inputPipe) write(data []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed || i.broken {
		return errInputClosed
	}
	i.data = append(i.data, data...)
	i.wakeLocked()
	return nil
}

func (i *inputPipe) closeOnce() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed || i.broken {
		return errInputClosed
	}
	i.closed = true
	i.wakeLocked()
	return nil
}

// close is the end of the reading side.
func (i *inputPipe) close() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.broken, i.data = true, nil
}

func (i *inputPipe) wakeLocked() {
	close(i.wake)
	i.wake = make(chan struct{})
}

func (i *inputPipe) read(ctx context.Context, into []byte) (int, error) {
	for {
		i.mu.Lock()
		n := copy(into, i.data)
		i.data = i.data[n:]
		over, wake := i.closed || i.broken, i.wake
		i.mu.Unlock()
		switch {
		case n > 0 || len(into) == 0:
			return n, nil
		case over:
			return 0, io.EOF
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}
