//go:build unix

package createos_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// Syncs of one lease may run at the same time, to the same target too: the target
// is one of them as a whole.
func TestSyncsRunAtTheSameTime(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	const n = 4
	for i := range n {
		for j := range 5 {
			r.write(r.local(fmt.Sprintf("src%d/%d", i, j)), fmt.Sprint(i))
		}
	}
	var all sync.WaitGroup
	failed := make([]error, 2*n)
	for i := range n {
		all.Go(func() {
			_, failed[i] = r.in(t.Context(), createos.SyncMapping{Source: r.local(fmt.Sprintf("src%d", i)), Target: "same"})
		})
		all.Go(func() {
			own := fmt.Sprintf("own%d", i)
			_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local(fmt.Sprintf("src%d", i)), Target: own})
			_, err2 := r.out(t.Context(), createos.SyncMapping{Source: own, Target: r.local("same")})
			failed[n+i] = errors.Join(err, err2)
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(failed...))
	for _, dir := range []string{r.remote("same"), r.local("same")} {
		first := r.content(filepath.Join(dir, "0"))
		for j := range 5 {
			require.Equal(t, first, r.content(filepath.Join(dir, fmt.Sprint(j))), dir)
		}
	}
	r.clean()
}

// Two syncs to one local target wait for each other, also when they call it by
// different names.
func TestSyncOutKnowsATargetByAllItsNames(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("one/f"), "one")
	r.write(r.remote("two/f"), "two")
	require.NoError(t, os.Mkdir(r.local("real"), 0o755))
	require.NoError(t, os.Symlink("real", r.local("alias")))
	staged, moveOn := make(chan struct{}), make(chan struct{})
	r.srv.Fail(createostest.Fault{When: scratchFile("GET", "p."), Nth: 1, Before: func() {
		close(staged)
		<-moveOn
	}})
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := r.out(t.Context(), createos.SyncMapping{Source: "one", Target: r.local("real/t")})
		first <- err
	}()
	<-staged
	go func() {
		_, err := r.out(t.Context(), createos.SyncMapping{Source: "two", Target: r.local("alias/t")})
		second <- err
	}()
	select {
	case err := <-second:
		t.Errorf("did not wait: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	require.DirExists(t, r.local("real/.createos-new.t"))
	close(moveOn)
	require.NoError(t, <-first)
	require.NoError(t, <-second)
	require.Equal(t, "two", r.content(r.local("real/t/f")))
	r.clean()
}

// A source that changes while it is read is noticed.
func TestSyncInNoticesAChange(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.local("src/a"), "12345")
	r.write(r.remote("dst/old"), "old")
	r.srv.Fail(createostest.Fault{Route: "POST /v1/sandboxes/{id}/exec", Nth: 2, After: func() {
		_ = os.WriteFile(r.local("src/a"), []byte("1"), 0o644)
	}})
	m := createos.SyncMapping{Source: r.local("src"), Target: "dst", Delta: true}
	_, err := r.in(t.Context(), m)
	require.ErrorIs(t, err, createos.ErrSyncChanged)
	require.Equal(t, "old", r.content(r.remote("dst/old")))
	r.srv.ClearFaults()
	_, err = r.in(t.Context(), m)
	require.NoError(t, err)
	r.clean()
}

// So is one that keeps its size or grows while it is read: what arrives is never a
// mixture of two versions.
func TestSyncInNoticesAChangeInPlace(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	fill(t, r.local("f"), 40<<20)
	fill(t, r.local("small/f"), 15<<20)
	fill(t, r.local("large/f"), 40<<20)
	noticed := 0
	for source, file := range map[string]string{"f": "f", "small": "small/f", "large": "large/f"} {
		for i := range 4 {
			before := r.content(r.local(file))
			r.srv.Fail(createostest.Fault{When: scratchFile("PUT", "p."), Nth: 1, Before: func() {
				f, err := os.OpenFile(r.local(file), os.O_RDWR, 0)
				if err == nil {
					_, _ = f.WriteAt([]byte{byte(i)}, 0)
					_, _ = f.WriteAt([]byte{byte(i)}, int64(len(before)-1+i%2)) // every other time it grows
					f.Close()
				}
			}})
			_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local(source), Target: "dst/" + source})
			r.srv.ClearFaults()
			if err != nil {
				require.ErrorIs(t, err, createos.ErrSyncChanged)
				noticed++
				continue
			}
			// All of it was read before or, again, after the change.
			got := r.content(r.remote("dst/" + file))
			require.True(t, got == before || got == r.content(r.local(file)), "a mixture")
		}
	}
	require.Positive(t, noticed)
	r.clean()
}

// A file of the sandbox that grows, as a log does, has changed, and is not corrupt.
func TestSyncOutNoticesAFileThatGrows(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	fill(t, r.remote("src/log"), 17<<20)
	r.srv.Fail(createostest.Fault{When: scratchFile("GET", "b."), Before: func() {
		f, err := os.OpenFile(r.remote("src/log"), os.O_WRONLY|os.O_APPEND, 0)
		if err == nil {
			_, _ = f.WriteString("line\n")
			f.Close()
		}
	}})
	_, err := r.out(t.Context(), createos.SyncMapping{Source: "src/log", Target: r.local("log")})
	require.ErrorIs(t, err, createos.ErrSyncChanged)
	_, err = r.out(t.Context(), createos.SyncMapping{Source: "src", Target: r.local("out")})
	require.ErrorIs(t, err, createos.ErrSyncChanged)
	require.NoFileExists(t, r.local("log"))
	require.NoDirExists(t, r.local("out"))
	r.srv.ClearFaults()
	r.clean()
}

// While a delta is on its way another one goes to the same target. What the first has
// found there is what it goes by, so the second waits.
func TestSyncInDeltasToOneTargetWaitForEachOther(t *testing.T) {
	t.Parallel()
	r := newSyncRig(t, createostest.Options{})
	r.write(r.remote("dst/f"), "v0")
	r.write(r.local("first/f"), "v0") // which need not be moved
	r.write(r.local("first/g"), "first")
	r.write(r.local("second/f"), "v1")
	delta := func(name, target string) error {
		_, err := r.in(t.Context(), createos.SyncMapping{Source: r.local(name), Target: target, Delta: true, Delete: true})
		return err
	}
	sent, moveOn := make(chan struct{}), make(chan struct{})
	r.srv.Fail(createostest.Fault{When: scratchFile("PUT", "p."), Nth: 1, Before: func() {
		close(sent)
		<-moveOn
	}})
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- delta("first", "dst") }()
	<-sent
	require.NoError(t, delta("second", "another"), "one to another target does not wait")
	go func() { second <- delta("second", r.remote("dst")) }()
	select {
	case err := <-second:
		t.Errorf("did not wait: %v", err)
		second <- err
	case <-time.After(500 * time.Millisecond):
	}
	close(moveOn)
	require.NoError(t, <-first)
	require.NoError(t, <-second)
	require.Equal(t, "v1", r.content(r.remote("dst/f")))
	require.NoFileExists(t, r.remote("dst/g"))
	r.clean()
}
