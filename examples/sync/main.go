// Sync moves a directory into a sandbox, runs a command on it there, and moves the
// result out, with a bar that shows how far each has come and a summary at the
// end. A second sync in moves only what has changed.
//
//	go run ./examples/sync
//
// It needs no account: an emulator of the provider runs within the program and
// starts the commands as processes of this machine. The bar goes to standard
// error, the summary to standard output.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// cleanupBound is how long the end of the program may take.
const cleanupBound = time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C has its usual meaning
	err := run(ctx, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "sync:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out, bars io.Writer) error {
	srv, err := createostest.Start(createostest.Options{})
	if err != nil {
		return err
	}
	defer srv.Close()
	return runOn(ctx, srv, out, bars)
}

func runOn(ctx context.Context, srv *createostest.Server, out, bars io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "createos-sync-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	driver, err := createos.NewDriver(srv.DriverConfig())
	if err != nil {
		return err
	}
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "build", Config: srv.Config()}
	var lease *createos.Lease
	defer func() {
		// Whatever came of it, and even if ctx is over, nothing is left behind. A
		// nil lease is nothing to destroy.
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		err = errors.Join(err, driver.Destroy(cleanup, env, lease), driver.Shutdown(cleanup))
	}()
	lease, err = driver.Acquire(ctx, env, createos.AcquireOptions{Workspace: srv.Workspace()})
	if err != nil {
		return err
	}
	return (&tour{driver, env, lease, dir, out, bars}).run(ctx)
}

// A tour is the program with all that it works with.
type tour struct {
	driver *createos.Driver
	env    createos.Environment
	lease  *createos.Lease
	dir    string
	out    io.Writer
	bars   io.Writer
}

func (t *tour) run(ctx context.Context) error {
	project := filepath.Join(t.dir, "project")
	if err := writeProject(project); err != nil {
		return err
	}
	in := createos.SyncOperation{
		ID: "project",
		Mappings: []createos.SyncMapping{{
			Source: project, Target: "project", Exclude: []string{"node_modules", "*.tmp"},
			Delta: true, Delete: true, // the same call serves first and later syncs
		}},
		Commands: []createos.Command{
			{Name: "mkdir", Args: []string{"-p", "dist"}},
			{Name: "sh", Args: []string{"-c", "cat project/src/* | wc -c > dist/size"}},
		},
	}
	if err := t.sync(ctx, "in", t.driver.SyncIn, in); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(project, "src", "part-000"), []byte("changed\n"), 0o644); err != nil {
		return err
	}
	if err := t.sync(ctx, "in again", t.driver.SyncIn, in); err != nil {
		return err
	}
	dist := filepath.Join(t.dir, "dist")
	err := t.sync(ctx, "out", t.driver.SyncOut, createos.SyncOperation{
		ID: "dist", Mappings: []createos.SyncMapping{{Source: "dist", Target: dist}},
	})
	if err != nil {
		return err
	}
	size, err := os.ReadFile(filepath.Join(dist, "size"))
	fmt.Fprintln(t.out, "result:", strings.TrimSpace(string(size)))
	return err
}

type syncFunc func(context.Context, createos.Environment, *createos.Lease, createos.Sync) (*createos.SyncResult, error)

// sync runs one operation with a bar, and sums up what it did.
func (t *tour) sync(ctx context.Context, name string, f syncFunc, op createos.SyncOperation) error {
	bar := newBar(t.bars, name)
	res, err := f(ctx, t.env, t.lease, createos.Sync{Operations: []createos.SyncOperation{op}, Progress: bar.show})
	bar.done()
	for _, r := range res.Operations {
		fmt.Fprintf(t.out, "%s: %d files moved (%d bytes), %d unchanged, %d deleted\n", name, r.Files, r.Bytes, r.Unchanged, r.Deleted)
		for _, s := range r.Skipped {
			fmt.Fprintf(t.out, "%s: skipped %s: %s\n", name, s.Path, s.Reason)
		}
	}
	for _, warning := range res.Warnings {
		fmt.Fprintln(t.out, "warning:", warning)
	}
	return err
}

// A bar shows the progress of one sync.
type bar struct {
	*progressbar.ProgressBar
	name string
}

func newBar(w io.Writer, name string) *bar {
	return &bar{name: name, ProgressBar: progressbar.NewOptions64(-1,
		progressbar.OptionSetWriter(w), progressbar.OptionShowBytes(true), progressbar.OptionSetDescription(name),
		progressbar.OptionSetWidth(30), progressbar.OptionThrottle(50*time.Millisecond),
	)}
}

// show is called by the driver, never twice at a time. A bar that cannot be drawn
// is no reason to stop.
func (b *bar) show(p createos.SyncProgress) {
	b.Describe(fmt.Sprintf("%s: %s %d/%d files", b.name, p.Phase, p.Files, p.TotalFiles))
	if p.TotalBytes > 0 {
		b.ChangeMax64(p.TotalBytes)
		_ = b.Set64(p.Bytes)
	}
}

func (b *bar) done() { _ = b.Exit() }

// writeProject makes something to move.
func writeProject(dir string) error {
	files := map[string]string{
		"README":                "A project.\n",
		"scratch.tmp":           "not moved\n",
		"node_modules/x/README": "not moved\n",
	}
	for i := range 200 {
		files[fmt.Sprintf("src/part-%03d", i)] = strings.Repeat("0123456789abcde\n", 64)
	}
	for name, content := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	// It leads out of the project, so it stays here, and the summary says so.
	return os.Symlink("/etc/hosts", filepath.Join(dir, "hosts"))
}
