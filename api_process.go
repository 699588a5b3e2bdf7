package createos

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"
	"unicode/utf8"
)

// maxInput is the provider's limit of one input to a process, in bytes.
const maxInput = 256 << 10

// errWaitTimeout says that the process had not ended when a wait was over.
var errWaitTimeout = errors.New("createos: process has not ended yet")

// An execResult is the end of a buffered command.
type execResult struct {
	// ExitCode is nil if none was given.
	ExitCode       *int
	Stdout, Stderr string
	// Failed says that the provider could not run the command, or could not
	// see it through. Its exit code then says nothing.
	Failed bool
}

// exec runs a command, without a shell, and waits for its end. It is sent once.
func (c *Client) exec(ctx context.Context, id, cmd string, args []string) (execResult, error) {
	return c.execWithin(ctx, id, cmd, args, 0)
}

// execWithin is exec with a bound of its own, 0 for that of every request.
func (c *Client) execWithin(ctx context.Context, id, cmd string, args []string, bound time.Duration) (execResult, error) {
	if err := checkCommand("", cmd, args); err != nil {
		return execResult{}, err
	}
	a, err := c.onSandbox(ctx, id, "/exec", &request{
		method: http.MethodPost, operation: OpWorkspaceCommand, detail: "run command",
		body: command{Cmd: cmd, Args: args}, bound: bound,
	})
	if err != nil {
		return execResult{}, err
	}
	var w struct {
		Result *struct {
			Stdout   string `json:"stdout"`
			Stderr   string `json:"stderr"`
			ExitCode *int   `json:"exit_code"`
			Error    any    `json:"error"`
		} `json:"result"`
	}
	if err := a.decode(&w); err != nil {
		return execResult{}, err
	}
	if w.Result == nil {
		return execResult{}, a.invalid()
	}
	return execResult{
		ExitCode: w.Result.ExitCode, Stdout: w.Result.Stdout, Stderr: w.Result.Stderr,
		Failed: w.Result.Error != nil && w.Result.Error != "",
	}, nil
}

// command is the body of an exec and of a process creation.
type command struct {
	Cmd  string   `json:"cmd"`
	Args []string `json:"args,omitempty"`
	Cwd  string   `json:"cwd,omitempty"`
}

// checkCommand refuses what JSON cannot carry unchanged: it would put other
// bytes in place of those that are not UTF-8.
func checkCommand(cwd, cmd string, args []string) error {
	ok := utf8.ValidString(cwd) && utf8.ValidString(cmd)
	for _, arg := range args {
		ok = ok && utf8.ValidString(arg)
	}
	if !ok {
		return &InputError{"command", "is not UTF-8"}
	}
	return nil
}

// A Process is what the provider tells of a managed process.
type Process struct {
	ID string
	// State is the provider's word: starting, running, terminating, exited or
	// failed, or one that this package does not know.
	State string
	Cmd   string
	Args  []string
	// LeaderExited says that the command itself has ended, TreeExited that
	// nothing that it started is left. False also if it was not shown.
	LeaderExited, TreeExited bool
	// ExitCode is nil if the process runs, or was ended by Signal.
	ExitCode *int
	Signal   string
	// OldestSeq and NewestSeq bound the output that is kept; 0 if there was
	// none.
	OldestSeq, NewestSeq int64
	CreatedAt            time.Time

	// has tells a false, or a 0, from a field that was not shown.
	has processFields
}

// processFields says which fields of a Process were shown.
type processFields struct{ leaderExited, treeExited, output bool }

type wireProcess struct {
	ID           string   `json:"process_id"`
	State        string   `json:"state"`
	Cmd          string   `json:"cmd"`
	Args         []string `json:"args"`
	LeaderExited *bool    `json:"leader_exited"`
	TreeExited   *bool    `json:"tree_exited"`
	ExitCode     *int     `json:"exit_code"`
	Signal       *string  `json:"signal"`
	CreatedAt    any      `json:"created_at"`
	Output       *struct {
		OldestSeq int64 `json:"oldest_seq"`
		NewestSeq int64 `json:"newest_seq"`
	} `json:"output"`
}

func (w *wireProcess) process() Process {
	p := Process{
		ID: w.ID, State: w.State, Cmd: w.Cmd, Args: w.Args, ExitCode: w.ExitCode, CreatedAt: timeOf(w.CreatedAt),
	}
	p.LeaderExited, p.has.leaderExited = shown(w.LeaderExited)
	p.TreeExited, p.has.treeExited = shown(w.TreeExited)
	p.Signal, _ = shown(w.Signal)
	if w.Output != nil {
		p.has.output = true
		p.OldestSeq, p.NewestSeq = w.Output.OldestSeq, w.Output.NewestSeq
	}
	return p
}

// decodeProcess reads an answer about one process; asked is as in
// decodeSandbox.
func (a *answer) decodeProcess(asked string) (Process, error) {
	var w wireProcess
	if err := a.decode(&w); err != nil {
		return Process{}, err
	}
	if !validID(w.ID) || asked != "" && w.ID != asked {
		return Process{}, a.invalid()
	}
	return w.process(), nil
}

// onProcess sends a request about a process.
func (c *Client) onProcess(ctx context.Context, id, pid, under string, r *request) (*answer, error) {
	if !validID(pid) {
		return nil, &InputError{"process id", "is no process id"}
	}
	return c.onSandbox(ctx, id, "/processes/"+pid+under, r)
}

// createProcess starts a managed process. It is sent once.
func (c *Client) createProcess(ctx context.Context, id, cmd string, args []string, cwd string) (Process, error) {
	if err := checkCommand(cwd, cmd, args); err != nil {
		return Process{}, err
	}
	a, err := c.onSandbox(ctx, id, "/processes", &request{
		method: http.MethodPost, operation: OpProcessCreation, detail: "create process",
		body: command{Cmd: cmd, Args: args, Cwd: cwd},
	})
	if err != nil {
		return Process{}, err
	}
	return a.decodeProcess("")
}

// processes lists the processes that the provider still knows, those that have
// ended included.
func (c *Client) processes(ctx context.Context, id string) ([]Process, error) {
	a, err := c.onSandbox(ctx, id, "/processes", &request{
		method: http.MethodGet, detail: "list processes", limit: maxListJSON,
	})
	if err != nil {
		return nil, err
	}
	var rows []wireProcess
	p, err := a.decodePage("processes", &rows, 0)
	if err != nil {
		return nil, err
	}
	if p != nil && p.total != len(rows) {
		return nil, a.invalid()
	}
	all := make([]Process, len(rows))
	seen := make(map[string]struct{}, len(rows))
	for i := range rows {
		all[i] = rows[i].process()
		if _, twice := seen[all[i].ID]; twice || !validID(all[i].ID) {
			return nil, a.invalid()
		}
		seen[all[i].ID] = struct{}{}
	}
	return all, nil
}

// process reads one process.
func (c *Client) process(ctx context.Context, id, pid string) (Process, error) {
	a, err := c.onProcess(ctx, id, pid, "", &request{method: http.MethodGet, detail: "get process"})
	if err != nil {
		return Process{}, err
	}
	return a.decodeProcess(pid)
}

// input writes to the standard input of a process, at most maxInput bytes. It
// is sent once: repeated, it would be read twice.
func (c *Client) input(ctx context.Context, id, pid string, data []byte) error {
	if len(data) > maxInput {
		return &InputError{"process input", "is above 256 KiB"}
	}
	_, err := c.onProcess(ctx, id, pid, "/input", &request{
		method: http.MethodPost, detail: "write process input", body: map[string][]byte{"data_base64": data},
	})
	return err
}

// wait waits for the end of a process, or with tree of all that it started, for
// at most timeout, which the provider counts and which is rounded up to
// milliseconds. When that is over it returns errWaitTimeout.
func (c *Client) wait(ctx context.Context, id, pid string, tree bool, timeout time.Duration) (Process, error) {
	scope := "leader"
	if tree {
		scope = "tree"
	}
	a, err := c.onProcess(ctx, id, pid, "/wait", &request{
		method: http.MethodGet, detail: "wait for process", ends408: true, bound: timeout + c.requestTimeout,
		query: url.Values{"scope": {scope}, "timeout_ms": {millis(timeout)}},
	})
	if status, _ := statusOf(err); status == http.StatusRequestTimeout {
		return Process{}, errWaitTimeout
	}
	if err != nil {
		return Process{}, err
	}
	return a.decodeProcess(pid)
}

// terminate ends a process and all that it started: asked to, and after grace,
// which is rounded up to milliseconds, killed.
func (c *Client) terminate(ctx context.Context, id, pid string, grace time.Duration) (Process, error) {
	a, err := c.onProcess(ctx, id, pid, "", &request{
		method: http.MethodDelete, operation: OpProcessCleanup, detail: "terminate process",
		bound: grace + c.requestTimeout, query: url.Values{"grace_ms": {millis(grace)}},
	})
	if err != nil {
		return Process{}, err
	}
	return a.decodeProcess(pid)
}

func millis(d time.Duration) string {
	return strconv.FormatInt(int64(max(0, d+time.Millisecond-1)/time.Millisecond), 10)
}
