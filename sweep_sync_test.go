package createos_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
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
	for _, c := range []struct {
		name string
		out  bool
		m    createos.SyncMapping
	}{
		{"SyncIn, file", false, createos.SyncMapping{Source: "new/a/1", Target: "old/a/1"}},
		{"SyncIn, directory", false, createos.SyncMapping{Source: "new", Target: "old"}},
		{"SyncIn, delta", false, createos.SyncMapping{Source: "new", Target: "old", Delta: true, Delete: true}},
		{"SyncOut, file", true, createos.SyncMapping{Source: "new/a/1", Target: "old/a/1"}},
		{"SyncOut, directory", true, createos.SyncMapping{Source: "new", Target: "old"}},
		{"SyncOut, delta", true, createos.SyncMapping{Source: "new", Target: "old", Delta: true, Delete: true}},
	} {
		job := syncJob{out: c.out, m: c.m}
		all = append(all, operation{
			name: c.name, sample: 24, opts: createostest.Options{RealCommands: true},
			prepare: job.prepare, call: job.call, truth: job.truth, after: job.after,
		})
	}
	return all
}()

// A syncJob moves the tree "new" of one side to "old" of the other, or one file.
type syncJob struct {
	out bool
	m   createos.SyncMapping
}

// A synced is what a schedule of a sync goes by.
type synced struct {
	local       string // a directory of this side
	res         *createos.SyncResult
	old, latest any // the target before, and after a success
}

func (j syncJob) prepare(s *scene) {
	hold(s)
	s.synced.local = s.t.TempDir()
	at := time.Unix(1_700_000_000, 0)
	for name, content := range map[string]string{
		"new/a/1": "new-canary", "new/a/same": "same", "new/b": "new", "old/a/1": "old-canary", "old/a/same": "same", "old/gone": "old",
	} {
		side := s.synced.local
		if j.out == strings.HasPrefix(name, "new/") {
			side = s.lease.Metadata.RemoteCwd
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
	from, to := s.synced.local, s.lease.Metadata.RemoteCwd
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
	s.synced.res, err = move(ctx, s.env, s.lease, syncOf(m))
	return err
}

func (j syncJob) truth(s *scene, err error) {
	_, target := j.ends(s)
	old, latest, got := s.synced.old, s.synced.latest, lookAt(s.t, target)
	isNew := reflect.DeepEqual(got, latest)
	s.claim(err != nil || isNew, "success, and the target is %v", got)
	s.claim(isNew || reflect.DeepEqual(got, old) || j.m.Delta && eachOldOrNew(old, latest, got), "neither old nor new: %v", got)
	s.claim(err == nil || len(s.synced.res.Operations) == 0 || s.synced.res.Operations[0].Files == 0, "files are counted next to the error %v", err)
	s.claim(len(s.driver.Unconfirmed()) == 0, "a sync poisoned the lease")
	s.claim(len(j.scratch(s)) == 0 || len(s.synced.res.Warnings) > 0, "scratch files are left, and nothing says so: %v", j.scratch(s))
}

// eachOldOrNew says whether every entry of a tree that is merged into is one or the
// other.
func eachOldOrNew(old, latest, got any) bool {
	was, is, has := old.(map[string]string), latest.(map[string]string), got.(map[string]string)
	names := slices.Concat(slices.Collect(maps.Keys(was)), slices.Collect(maps.Keys(is)), slices.Collect(maps.Keys(has)))
	return !slices.ContainsFunc(names, func(name string) bool { return has[name] != was[name] && has[name] != is[name] })
}

// scratch names what a sync has left on either side.
func (j syncJob) scratch(s *scene) (left []string) {
	for _, pattern := range []string{
		filepath.Join(s.lease.Metadata.RemoteCwd, ".paperclip-runtime/sync-*"), filepath.Join(s.lease.Metadata.RemoteCwd, ".createos-*"),
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
	err := j.call(ctx, s)
	s.claim(err == nil && len(s.synced.res.Warnings) == 0, "a healthy sync: %v", errors.Join(append(s.synced.res.Warnings, err)...))
	_, target := j.ends(s)
	s.claim(reflect.DeepEqual(lookAt(s.t, target), s.synced.latest), "a healthy sync did not bring the new content")
	s.claim(len(j.scratch(s)) == 0, "scratch files are left after a healthy sync: %v", j.scratch(s))
}
