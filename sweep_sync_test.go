package createos_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// syncOperations are swept like all others, with the programs of this machine in
// the place of a sandbox's: connections and time are the bubble's, processes and
// files are real. That makes a schedule some fifty times as dear, so the short
// form runs a fixed sample of them: two troubles at each request.
var syncOperations = func() []operation {
	if runtime.GOOS != "linux" { // sandboxes are Linux
		return nil
	}
	var all []operation
	file := createos.SyncMapping{Source: "new/a/1", Target: "old/a/1"}
	directory := createos.SyncMapping{Source: "new", Target: "old"}
	delta := createos.SyncMapping{Source: "new", Target: "old", Delta: true, Delete: true}
	for _, c := range []struct {
		name string
		job  syncJob
	}{
		{"SyncIn, file", syncJob{m: file}},
		{"SyncIn, directory", syncJob{m: directory}},
		{"SyncIn, delta", syncJob{m: delta}},
		{"SyncIn, commands", syncJob{m: file, commands: true}},
		{"SyncOut, file", syncJob{out: true, m: file}},
		{"SyncOut, directory", syncJob{out: true, m: directory}},
		{"SyncOut, delta", syncJob{out: true, m: delta}},
	} {
		opts := createostest.Options{RealCommands: true}
		if c.job.commands {
			opts.Commands = hybridCommand // which wins
		}
		all = append(all, operation{
			name: c.name, sample: 24, opts: opts,
			prepare: c.job.prepare, call: c.job.call, truth: c.job.truth, after: c.job.after,
		})
	}
	return all
}()

// A syncJob moves the tree "new" of one side to "old" of the other, or one file, and
// may run commands then.
type syncJob struct {
	out      bool
	m        createos.SyncMapping
	commands bool
}

// A synced is what a schedule of a sync goes by.
type synced struct {
	local       string // a directory of this side
	remote      string // the workspace, as a directory of this machine
	res         *createos.SyncResult
	old, latest any // the target before, and after a success

	mu  sync.Mutex
	ran []string // what the commands have noted
}

func (j syncJob) prepare(s *scene) {
	hold(s)
	s.synced.local, s.synced.remote = s.t.TempDir(), s.lease.Metadata.RemoteCwd
	if j.commands {
		s.synced.remote = newHybrid(s).dir
	}
	at := time.Unix(1_700_000_000, 0)
	for name, content := range map[string]string{
		"new/a/1": "new-canary", "new/a/same": "same", "new/b": "new", "old/a/1": "old-canary", "old/a/same": "same", "old/gone": "old",
	} {
		side := s.synced.local
		if j.out == strings.HasPrefix(name, "new/") {
			side = s.synced.remote
		}
		path := filepath.Join(side, name)
		require.NoError(s.t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(s.t, os.WriteFile(path, []byte(content), 0o644))
		require.NoError(s.t, os.Chtimes(path, at, at))
	}
	source, target := j.ends(s)
	s.synced.old, s.synced.latest = lookAt(s.t, target), lookAt(s.t, source)
	require.NotEqual(s.t, s.synced.old, s.synced.latest)
}

// ends are the two ends as paths of this machine.
func (j syncJob) ends(s *scene) (source, target string) {
	from, to := s.synced.local, s.synced.remote
	if j.out {
		from, to = to, from
	}
	return filepath.Join(from, j.m.Source), filepath.Join(to, j.m.Target)
}

func (j syncJob) call(ctx context.Context, s *scene) (err error) {
	m, move := j.m, s.driver.SyncIn
	if j.out {
		m.Target, move = filepath.Join(s.synced.local, m.Target), s.driver.SyncOut
	} else {
		m.Source = filepath.Join(s.synced.local, m.Source)
	}
	what := syncOf(m)
	if j.commands {
		what.Operations[0].Commands = []createos.Command{noting("1"), noting("2")}
	}
	s.synced.res, err = move(ctx, s.env, s.lease, what)
	return err
}

func (j syncJob) truth(s *scene, err error) {
	_, target := j.ends(s)
	old, latest, got := s.synced.old, s.synced.latest, lookAt(s.t, target)
	isNew := reflect.DeepEqual(got, latest)
	s.claim(err != nil || isNew, "success, and the target is %v", got)
	s.claim(isNew || reflect.DeepEqual(got, old) || j.m.Delta && len(neitherOldNorNew(old, latest, got)) == 0, "neither old nor new: %v", got)
	for _, op := range s.synced.res.Operations {
		moved := err == nil || commandOf(err) >= 0
		s.claim(op.Done == (err == nil), "done is %t next to the error %v", op.Done, err)
		s.claim(moved || op.Files == 0, "files are counted next to the error %v", err)
		s.claim(!moved || op.Files > 0 && isNew, "%d files are counted, and the target is %v: %v", op.Files, got, err)
	}
	blames(s, err)
	if j.commands {
		j.truthCommands(s, err)
	}
	s.claim(len(s.driver.Unconfirmed()) == 0 || commandOf(err) >= 0, "a sync poisoned the lease")
	s.claim(len(j.scratch(s)) == 0 || len(s.synced.res.Warnings) > 0, "scratch files are left, and nothing says so: %v", j.scratch(s))
}

// scratch names what a sync has left on either side.
func (j syncJob) scratch(s *scene) (left []string) {
	for _, pattern := range []string{
		filepath.Join(s.synced.remote, ".paperclip-runtime/sync-*"), filepath.Join(s.synced.remote, ".createos-*"),
		filepath.Join(s.synced.local, ".createos-*"), filepath.Join(s.synced.local, "*/*/.createos-*"),
	} {
		found, err := filepath.Glob(pattern)
		require.NoError(s.t, err)
		left = append(left, found...)
	}
	return left
}

// after: on a healthy provider the same sync succeeds, and removes what the
// swept one could not.
func (j syncJob) after(ctx context.Context, s *scene) {
	if over(s.box(s.lease.ProviderLeaseID).State) {
		return
	}
	poisoned := len(s.driver.Unconfirmed()) > 0
	s.synced.forget()
	err := j.call(ctx, s)
	if poisoned {
		s.claim(errors.Is(err, createos.ErrLeaseClosing) && len(s.synced.res.Operations) == 0, "a sync on a lease that is poisoned: %v", err)
		return
	}
	s.claim(err == nil && len(s.synced.res.Warnings) == 0, "a healthy sync: %v", errors.Join(append(s.synced.res.Warnings, err)...))
	_, target := j.ends(s)
	s.claim(reflect.DeepEqual(lookAt(s.t, target), s.synced.latest), "a healthy sync did not bring the new content")
	s.claim(len(j.scratch(s)) == 0, "scratch files are left after a healthy sync: %v", j.scratch(s))
	s.claim(!j.commands || slices.Equal(s.synced.commands(), noted), "the commands of a healthy sync did %q", s.synced.commands())
}
