package createos_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A hybrid is the sandbox of a sync that runs commands. Its steps are run by the
// bash of this machine, on a directory of it. The commands are functions: a real
// process that waits for its input would hold up the bubble for minutes.
type hybrid struct {
	s         *scene
	workspace string // as the sandbox knows it
	dir       string // what it is here
	mu        sync.Mutex
}

// hybrids are those of the sandboxes of all schedules, by id.
var hybrids sync.Map

// hybridCommand answers the commands of hybrids, and, before a sandbox is one, of
// others.
func hybridCommand(ctx context.Context, c *createostest.Command) int {
	found, ok := hybrids.Load(c.Sandbox)
	if !ok {
		return createostest.Builtin(ctx, c)
	}
	h := found.(*hybrid)
	switch {
	case c.Name == "note":
		return h.note(c)
	case len(c.Args) == 2 && c.Args[0] == "-c" && strings.Contains(c.Args[1], h.workspace):
		return h.step(ctx, c)
	}
	return createostest.Builtin(ctx, c)
}

// newHybrid makes one of the sandbox of a lease, until the end of the schedule.
func newHybrid(s *scene) *hybrid {
	h := &hybrid{s: s, workspace: s.lease.Metadata.RemoteCwd, dir: s.t.TempDir()}
	hybrids.Store(s.lease.ProviderLeaseID, h)
	s.t.Cleanup(func() { hybrids.Delete(s.lease.ProviderLeaseID) })
	return h
}

// step runs a script of the sync.
func (h *hybrid) step(ctx context.Context, c *createostest.Command) int {
	h.takeUploads()
	cmd := exec.CommandContext(ctx, "/bin/bash", "-c", strings.ReplaceAll(c.Args[1], h.workspace, h.dir))
	cmd.Stdout, cmd.Stderr = c.Stdout, c.Stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		return 126
	}
	return cmd.ProcessState.ExitCode()
}

// takeUploads moves what was uploaded to where the scripts find it, once: another
// one may be reading it.
func (h *hybrid) takeUploads() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.s.srv.Requests() {
		name, within := strings.CutPrefix(r.Query.Get("path"), h.workspace+"/")
		if r.Method != "PUT" || !within {
			continue
		}
		b, err := h.s.srv.ReadFile(h.s.lease.ProviderLeaseID, r.Query.Get("path"))
		if err != nil {
			continue // it did not arrive, or was taken
		}
		_ = h.s.srv.RemoveFile(h.s.lease.ProviderLeaseID, r.Query.Get("path"))
		file := filepath.Join(h.dir, name)
		h.s.claim(errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, b, 0o600)) == nil, "cannot take %s", name)
	}
}

// noting is a command that notes that it begins, with what it finds in the place of
// the file, and that it ends.
func noting(name string) createos.Command {
	return createos.Command{Name: "note", Args: []string{name, canaryArg}}
}

// noted is what the commands note if all goes well.
var noted = []string{"1 begins: new-canary", "1 ends", "2 begins: new-canary", "2 ends"}

func (h *hybrid) note(c *createostest.Command) int {
	content, _ := os.ReadFile(filepath.Join(h.dir, "old/a/1")) // old or new, it is there
	h.add(fmt.Sprintf("%s begins: %s", c.Args[0], content))
	if c.Sleep(time.Second) != nil {
		return 1
	}
	if _, err := fmt.Fprintf(c.Stdout, "output-canary %s\n", c.Args[0]); err != nil {
		return 1
	}
	h.add(c.Args[0] + " ends")
	return 0
}

func (h *hybrid) add(line string) {
	h.s.synced.mu.Lock()
	defer h.s.synced.mu.Unlock()
	h.s.synced.ran = append(h.s.synced.ran, line)
}

// forget makes as if no command had run.
func (y *synced) forget() {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.ran = nil
}

// commands are what the commands have noted.
func (y *synced) commands() []string {
	y.mu.Lock()
	defer y.mu.Unlock()
	return slices.Clone(y.ran)
}

// truthCommands: no command begins before all that comes before it has succeeded,
// nor twice, and no result claims what was not.
func (j syncJob) truthCommands(s *scene, err error) {
	ran := s.synced.commands()
	s.claim(len(ran) <= len(noted) && slices.Equal(ran, noted[:len(ran)]), "the commands did %q", ran)
	var results []*createos.Result
	if len(s.synced.res.Operations) > 0 {
		results = s.synced.res.Operations[0].Commands
	}
	last := commandOf(err)
	if err == nil {
		last = 1
	}
	s.claim(len(results) == last+1, "%d results: %v", len(results), err)
	s.claim(len(ran) <= 2*len(results), "%q was done for %d results", ran, len(results))
	for i, res := range results {
		ended := len(ran) >= 2*i+2
		fails := err != nil && i == last
		s.claim(res.Success() || fails, "command %d did not succeed, and the sync went on", i)
		s.claim(!res.Success() || !fails, "command %d succeeded, and is blamed: %v", i, err)
		s.claim(res.ExitCode < 0 || res.ExitCode == 0 && ended, "exit code %d of command %d was made up: %q", res.ExitCode, i, ran)
		s.claim(fails || string(res.Stdout) == fmt.Sprintf("output-canary %d\n", i+1), "the output of command %d is %q", i, res.Stdout)
		told := fails && (res.ExitCode >= 0 || res.Signal != "" || res.TimedOut)
		s.claim(!errors.As(err, new(*createos.ExitError)) || !fails || told, "no command ended so: %v", err)
	}
}

// commandOf is the index of the command that ended a sync, -1 for none.
func commandOf(err error) int {
	var failed *createos.SyncError
	if !errors.As(err, &failed) {
		return -1
	}
	return failed.Command
}

// blames: an error says in which part of the operation it was, if one was begun.
func blames(s *scene, err error) {
	var failed *createos.SyncError
	if !errors.As(err, &failed) {
		begun := len(s.synced.res.Operations) > 0
		s.claim(begun == (err == nil), "an operation was begun: %t, and the error does not name it: %v", begun, err)
		return
	}
	s.claim(failed.Operation == "op" && failed.OperationIndex == 0, "the error names another operation: %v", err)
	one := failed.Mapping == 0 && failed.Command == -1 || failed.Mapping == -1 && failed.Command >= 0
	s.claim(one, "mapping %d and command %d failed: %v", failed.Mapping, failed.Command, err)
}
