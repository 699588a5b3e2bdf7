package createostest

import (
	"errors"
	"io"
	"time"
)

// Errors of a runner that the server turns into answers of the API.
var (
	errBadPath     = errors.New("path is not an absolute path of a file in this sandbox")
	errInputClosed = errors.New("standard input is closed")
	errExited      = errors.New("process has exited")
	errNoDir       = errors.New("no such directory")
)

// runner makes the machines behind sandboxes. The server knows states, names
// and journals; a runner knows only how commands run and where files are.
// There is one that starts processes of this computer and one in memory.
// All methods of the three interfaces may be called at the same time.
type runner interface {
	newMachine(id string, env map[string]string) (machine, error)
	// workspace returns a fresh absolute path that machines accept.
	workspace() string
	// close kills and removes everything that is left, and returns when it
	// is gone.
	close() error
}

// machine is what runs behind one sandbox.
type machine interface {
	// start gives errNoDir for a working directory that is missing, if it can
	// know: in memory every directory is taken to be there.
	start(spec spec) (process, error)
	// put creates missing parents and replaces a regular file. A path that
	// cannot be a file here gives errBadPath.
	put(path string, body io.Reader) (int64, error)
	// open gives fs.ErrNotExist for a missing file, errBadPath for a
	// directory or a path outside.
	open(path string) (io.ReadCloser, int64, error)
	remove(path string) error
	// freeze stops everything until thaw: that is a pause.
	freeze()
	thaw()
	// destroy kills every process and removes the files. It is called once
	// more than needed now and then.
	destroy() error
}

// spec is one command to start. Writes to stdout and stderr may block while
// a journal is full. A write error means that nobody will ever read: the
// process must be reaped all the same.
type spec struct {
	cmd            string
	args           []string
	dir            string
	env            map[string]string
	pty            *ptySize
	stdout, stderr io.Writer
}

// ptySize is the size of a terminal, in characters.
type ptySize struct{ rows, cols int }

// process is a started command with everything that descends from it.
type process interface {
	pid() int
	// input gives errInputClosed after closeInput or the exit.
	input(p []byte) error
	closeInput() error
	// signal reaches the process group; errExited when it is gone.
	signal(name string) error
	// leaderDone is closed once the leader has exited and the output that it
	// wrote before was delivered.
	leaderDone() <-chan struct{}
	// status is valid after leaderDone: an exit code, or a signal.
	status() (code *int, signal string)
	// treeDone is closed once no process of the tree is left.
	treeDone() <-chan struct{}
	// terminate asks the tree to end, kills it after grace and returns once
	// the kill was sent; treeDone says when it is over.
	terminate(grace time.Duration)
}

// outputHolder is what a process can add when it knows who holds its output
// open. A buffered exec returns once its leader has exited and all of these
// channels are closed. Without it the end of the tree is taken.
type outputHolder interface {
	outputEnds() []<-chan struct{}
}

// refresher is what a process can add that learns of the end of its tree only
// now and then. refresh returns once treeDone is no older than the call, or
// cannot be brought up to date.
type refresher interface {
	refresh()
}

// resizer is what a process behind a terminal can add.
type resizer interface {
	resize(rows, cols int) error
}

// forker is what a machine can add to be copied, files without processes.
type forker interface {
	fork(id string, env map[string]string) (machine, error)
}
