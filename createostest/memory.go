package createostest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
)

// memoryRunner answers commands with a Go function and keeps files in maps.
// It uses channels, timers and short locks only, so that a testing/synctest
// bubble sees through every wait.
type memoryRunner struct {
	commands func(context.Context, *Command) int
	lacks    func(name string) bool // tells what cannot be started; nil is nothing
	running  sync.WaitGroup         // functions of commands

	mu       sync.Mutex
	closed   bool
	machines map[*memoryMachine]struct{}
}

// newMemoryRunner returns a runner for a function; nil is Builtin. Of Builtin
// it is known what there is, so that the start of anything else fails, as it
// does for real processes. Any other function has to answer for itself.
func newMemoryRunner(commands func(context.Context, *Command) int) *memoryRunner {
	r := &memoryRunner{commands: commands, machines: make(map[*memoryMachine]struct{})}
	if commands == nil {
		r.commands, r.lacks = Builtin, builtinLacks
	}
	return r
}

var errMachineGone = errors.New("machine is gone")

func (r *memoryRunner) newMachine(id string, env map[string]string) (machine, error) {
	return r.add(id, env, newMemoryFiles())
}

func (r *memoryRunner) add(id string, env map[string]string, files *memoryFiles) (machine, error) {
	m := &memoryMachine{
		runner: r, id: id, env: maps.Clone(env), files: files, processes: make(map[*memoryProcess]struct{}),
		thawed: make(chan struct{}), frozen: make(chan struct{}), nextPID: 100,
	}
	close(m.thawed)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errMachineGone
	}
	r.machines[m] = struct{}{}
	return m, nil
}

func (r *memoryRunner) workspace() string { return "/workspaces/" + lowerText(12) }

func (r *memoryRunner) close() error {
	r.mu.Lock()
	r.closed = true
	machines := maps.Clone(r.machines)
	r.mu.Unlock()
	for m := range machines {
		m.destroy()
	}
	r.running.Wait()
	return nil
}

// memoryMachine is one sandbox in memory.
type memoryMachine struct {
	runner *memoryRunner
	id     string
	env    map[string]string
	files  *memoryFiles

	mu        sync.Mutex
	gone      bool
	processes map[*memoryProcess]struct{}
	nextPID   int
	thawed    chan struct{} // closed while it runs
	frozen    chan struct{} // closed while it stands still
}

func (m *memoryMachine) freeze() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !isClosed(m.frozen) {
		m.thawed = make(chan struct{})
		close(m.frozen)
	}
}

func (m *memoryMachine) thaw() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !isClosed(m.thawed) {
		m.frozen = make(chan struct{})
		close(m.thawed)
	}
}

// gates returns the two channels of the moment.
func (m *memoryMachine) gates() (thawed, frozen <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.thawed, m.frozen
}

// await returns when the machine runs; an error means that ctx ended first.
func (m *memoryMachine) await(ctx context.Context) error {
	for {
		thawed, _ := m.gates()
		select {
		case <-thawed:
			return ctx.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *memoryMachine) start(spec spec) (process, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return nil, errMachineGone
	}
	if lacks := m.runner.lacks; lacks != nil && lacks(spec.cmd) {
		return nil, fmt.Errorf("start %s: %w", spec.cmd, exec.ErrNotFound)
	}
	m.nextPID++
	p := newMemoryProcess(m, m.nextPID, spec)
	m.processes[p] = struct{}{}
	// Counted under the lock: destroy, and with it close, comes before or
	// after, and in the second case kills it.
	m.runner.running.Go(p.run)
	return p, nil
}

func (m *memoryMachine) forget(p *memoryProcess) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.processes, p)
}

func (m *memoryMachine) destroy() error {
	m.mu.Lock()
	m.gone = true
	processes := maps.Clone(m.processes)
	m.mu.Unlock()
	for p := range processes {
		p.kill("SIGKILL", everyMember)
	}
	m.files.removeAll("/")
	m.runner.mu.Lock()
	defer m.runner.mu.Unlock()
	delete(m.runner.machines, m)
	return nil
}

func (m *memoryMachine) fork(id string, env map[string]string) (machine, error) {
	return m.runner.add(id, env, m.files.clone())
}

func (m *memoryMachine) put(name string, body io.Reader) (int64, error) {
	name, err := filePath(name)
	if err != nil {
		return 0, err
	}
	data, err := io.ReadAll(body) // whole before anything is replaced
	if err != nil {
		return 0, err
	}
	return int64(len(data)), m.files.write(name, data)
}

func (m *memoryMachine) open(name string) (io.ReadCloser, int64, error) {
	name, err := filePath(name)
	if err != nil {
		return nil, 0, err
	}
	data, err := m.files.read(name)
	if err != nil {
		return nil, 0, err
	}
	return io.NopCloser(bytes.NewReader(data)), int64(len(data)), nil
}

func (m *memoryMachine) remove(name string) error {
	name, err := filePath(name)
	if err != nil {
		return err
	}
	if _, err := m.files.read(name); err != nil {
		return err
	}
	m.files.removeAll(name)
	return nil
}

// filePath cleans a path that is to name a file.
func filePath(name string) (string, error) {
	if !path.IsAbs(name) || strings.ContainsRune(name, 0) || strings.HasSuffix(name, "/") {
		return "", errBadPath
	}
	return path.Clean(name), nil
}

// memoryFiles is a tree of files.
type memoryFiles struct {
	mu    sync.Mutex
	files map[string]*memoryFile
	dirs  map[string]struct{}
}

// memoryFile is the content of a file, which those who have it open keep when
// its name goes. Bytes are added, never changed. The tree's lock guards data.
type memoryFile struct{ data []byte }

func newMemoryFiles() *memoryFiles {
	f := &memoryFiles{files: make(map[string]*memoryFile), dirs: make(map[string]struct{})}
	for _, dir := range []string{"/", "/tmp", "/root"} {
		f.dirs[dir] = struct{}{}
	}
	return f
}

func (f *memoryFiles) clone() *memoryFiles {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &memoryFiles{files: make(map[string]*memoryFile, len(f.files)), dirs: maps.Clone(f.dirs)}
	for name, file := range f.files {
		c.files[name] = &memoryFile{slices.Clip(file.data)}
	}
	return c
}

// write replaces a file and creates missing parents. Who has the old one open
// keeps it.
func (f *memoryFiles) write(name string, data []byte) error {
	_, err := f.create(name, &memoryFile{data})
	return err
}

// create puts a file under a name.
func (f *memoryFiles) create(name string, file *memoryFile) (*memoryFile, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, isDir := f.dirs[name]; isDir {
		return nil, errBadPath
	}
	if err := f.mkdirAllLocked(path.Dir(name)); err != nil {
		return nil, err
	}
	f.files[name] = file
	return file, nil
}

// open returns a file, and without truncate what is in it; a missing one is
// made if missing is set.
func (f *memoryFiles) open(name string, missing, truncate bool) (*memoryFile, error) {
	f.mu.Lock()
	file := f.files[name]
	if file != nil && truncate {
		file.data = nil
	}
	f.mu.Unlock()
	if file == nil && missing {
		return f.create(name, &memoryFile{})
	}
	if file == nil {
		_, err := f.read(name)
		return nil, err
	}
	return file, nil
}

// append adds to an open file.
func (f *memoryFiles) append(file *memoryFile, data []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	file.data = append(file.data, data...)
}

func (f *memoryFiles) mkdirAllLocked(dir string) error {
	for ; ; dir = path.Dir(dir) {
		if _, isFile := f.files[dir]; isFile {
			return errBadPath
		}
		f.dirs[dir] = struct{}{}
		if dir == "/" {
			return nil
		}
	}
}

func (f *memoryFiles) read(name string) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if file, ok := f.files[name]; ok {
		return slices.Clip(file.data), nil
	}
	if _, isDir := f.dirs[name]; isDir {
		return nil, errBadPath
	}
	return nil, fs.ErrNotExist
}

func (f *memoryFiles) isDir(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.dirs[name]
	return ok
}

func (f *memoryFiles) exists(name string) bool {
	_, err := f.read(name)
	return !errors.Is(err, fs.ErrNotExist)
}

// mkdir makes one directory; all makes parents too and does not mind what is
// there.
func (f *memoryFiles) mkdir(dir string, all bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if all {
		return f.mkdirAllLocked(dir)
	}
	if _, ok := f.dirs[path.Dir(dir)]; !ok {
		return fs.ErrNotExist
	}
	_, isDir := f.dirs[dir]
	_, isFile := f.files[dir]
	if isDir || isFile {
		return fs.ErrExist
	}
	f.dirs[dir] = struct{}{}
	return nil
}

// removeAll removes a file, or a directory with everything below.
func (f *memoryFiles) removeAll(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	below := strings.TrimSuffix(name, "/") + "/"
	inside := func(p string) bool { return p == name || strings.HasPrefix(p, below) }
	maps.DeleteFunc(f.files, func(p string, _ *memoryFile) bool { return inside(p) })
	maps.DeleteFunc(f.dirs, func(p string, _ struct{}) bool { return p != "/" && inside(p) })
}

// memoryFileReader reads an open file, also what is added meanwhile.
type memoryFileReader struct {
	files *memoryFiles
	file  *memoryFile
	at    int
}

func (r *memoryFileReader) Read(into []byte) (int, error) {
	r.files.mu.Lock()
	defer r.files.mu.Unlock()
	if r.at >= len(r.file.data) {
		return 0, io.EOF
	}
	n := copy(into, r.file.data[r.at:])
	r.at += n
	return n, nil
}

// memoryFileWriter appends to an open file.
type memoryFileWriter struct {
	files *memoryFiles
	file  *memoryFile
}

func (w memoryFileWriter) Write(data []byte) (int, error) {
	w.files.append(w.file, data)
	return len(data), nil
}
