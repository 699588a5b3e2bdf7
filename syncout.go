package createos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
)

// out moves one mapping out of the sandbox.
func (y *syncer) out(ctx context.Context, m *mapping, r *SyncOperationResult) error {
	key, err := targetKey(m.local)
	if err != nil {
		return err
	}
	unlock, err := hostTargets.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	t, err := hosttree.OpenTarget(m.local)
	if err != nil {
		return err
	}
	defer t.Close()
	y.phase(m, SyncScan, 0, 0)
	move := y.outDir
	if m.Kind == SyncFile {
		move = y.outFile
	}
	err = move(ctx, m, t, r)
	if derr := t.Discard(); derr != nil {
		y.warn(derr)
	}
	return err
}

// targetKey is the same for all names of a local path, whose parent must exist.
func targetKey(local string) (string, error) {
	abs, err := filepath.Abs(local)
	if err != nil {
		return "", err
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
	return filepath.Join(dir, filepath.Base(abs)), err
}

func (y *syncer) warn(err error) {
	y.res.Warnings = append(y.res.Warnings, fmt.Errorf("createos: sync: files were left behind: %w", hostError(err)))
}

// A ready is what a step in the sandbox has made ready to be fetched.
type ready struct {
	file remoteFile
	mode fs.FileMode
	at   int64
}

// A pending is a step that runs beside its owner, who waits for it.
type pending struct {
	done chan struct{}
	out  string
	err  error
}

// launch begins a step; one without a body is over.
func (y *syncer) launch(ctx context.Context, body string) *pending {
	p := &pending{done: make(chan struct{})}
	if body == "" {
		close(p.done)
		return p
	}
	go func() {
		defer close(p.done)
		p.out, p.err = y.step(ctx, body)
	}()
	return p
}

func (p *pending) wait() (string, error) {
	<-p.done
	return p.out, p.err
}

// mark reads the line that the script function "mark" has printed first.
func (p *pending) mark() (string, error) {
	out, err := p.wait()
	line, _, _ := strings.Cut(out, "\n")
	return line, err
}

// pinBody gives a file of the workspace a second name in the scratch directory:
// what is fetched is then the file that was checked, wherever its path leads
// later. Its digest is made while it is fetched. Not every ln knows -P; without it a
// link could be followed, or be what gets the name, so that is looked at again. Where
// there are no hard links, as between two disks, a copy has to do, with mode and time
// of the file, if the file stays as it is meanwhile.
func pinBody(number int, remote string) string {
	return guestDown(remote, false, false) + `b=` + guestWord("./"+path.Base(remote)) + ` f=` + pinned(number) + `
[ ! -L "$b" ] || exit 90
[ -e "$b" ] || exit 92
[ -f "$b" ] || exit 93
ln -P -- "$b" "$f" || { [ ! -L "$b" ] && ln -- "$b" "$f"; } || {
	seen=$(stat -c '%s %y' -- "$b") && cp -pP -- "$b" "$f" && [ "$(stat -c '%s %y' -- "$b")" = "$seen" ]
} || exit 95
[ -f "$f" ] && [ ! -L "$f" ] || exit 90
` + statPin(number)
}

func statPin(number int) string { return `stat -c '%s %a %Y' -- ` + pinned(number) + " || exit 95\n" }

func pinned(number int) string { return `"$S/b.` + strconv.Itoa(number) + `"` }

func markBody(number int) string { return "mark " + pinned(number) + " || exit 95\n" }

// readPin reads what pinBody printed.
func (y *syncer) readPin(number int, out string) (ready, error) {
	p := ready{file: remoteFile{name: "b." + strconv.Itoa(number), hash: y.newLarge()}}
	var mode uint32
	if _, err := fmt.Sscanf(out, "%d %o %d\n", &p.file.size, &mode, &p.at); err != nil || p.file.size < 0 {
		return ready{}, ErrSyncStep
	}
	p.mode = fs.FileMode(mode).Perm()
	return p, nil
}

// fetchPinned fetches what was pinned. That is the file itself, which may be written
// to meanwhile: then it is no wonder that it does not fit.
func (y *syncer) fetchPinned(ctx context.Context, number int, p ready, sink func(io.Reader) error) error {
	err := y.fetch(ctx, p.file, sink)
	if !errors.Is(err, ErrSyncCorrupt) {
		return err
	}
	out, serr := y.step(ctx, statPin(number))
	now, perr := y.readPin(number, out)
	if serr == nil && perr == nil && (now.file.size != p.file.size || now.at != p.at) {
		return ErrSyncChanged
	}
	return err
}

func (y *syncer) outFile(ctx context.Context, m *mapping, t *hosttree.Target, r *SyncOperationResult) error {
	n := y.number()
	out, err := y.step(ctx, pinBody(n, m.remote))
	if err != nil {
		return err
	}
	p, err := y.readPin(n, out)
	if err != nil {
		return err
	}
	if p.file.size > y.plan.limits.Bytes {
		return ErrSyncLimit
	}
	kind, err := t.Look()
	if err != nil {
		return err
	}
	if kind == archive.Dir {
		return hosttree.ErrNotFile
	}
	e := archive.Entry{Name: "file", Kind: archive.File, Size: p.file.size, Mode: m.fileMode(p.mode), ModTime: p.at}
	if m.Delta && kind == archive.File {
		same, err := y.localIs(ctx, m, e, p)
		if err != nil {
			return err
		}
		if same {
			r.Unchanged++
			return nil
		}
	}
	y.phase(m, SyncTransfer, 1, e.Size)
	f, err := t.StageFile()
	if err != nil {
		return err
	}
	defer f.Close()
	marked := y.launch(ctx, markBody(n))
	defer func() { _, _ = marked.wait() }()
	p.file.sum = marked.mark
	buf := make([]byte, 256<<10)
	err = y.fetchPinned(ctx, n, p, func(from io.Reader) error {
		_, err := f.Seek(0, io.SeekStart)
		if err == nil {
			err = f.Truncate(0)
		}
		if err == nil {
			y.meter.bytes.Store(0)
			_, err = io.CopyBuffer(struct{ io.Writer }{f}, &countedReader{from, y.meter}, buf)
		}
		return err
	})
	if err != nil {
		return err
	}
	y.meter.add(0, 1)
	y.phase(m, SyncCommit, 1, e.Size)
	if err := finishFile(t, f, e); err != nil {
		return err
	}
	r.Files++
	r.Bytes += e.Size
	return nil
}

// finishFile gives the staged file its mode and time and puts it in its place.
func finishFile(t *hosttree.Target, f *os.File, e archive.Entry) error {
	if err := f.Chmod(e.Mode); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	at := time.Unix(e.ModTime, 0)
	dir, name := t.StagedName()
	if err := dir.Chtimes(name, at, at); err != nil {
		return err
	}
	return t.PutFile()
}

// localIs says whether the local file has mode and content of what was pinned.
func (y *syncer) localIs(ctx context.Context, m *mapping, e archive.Entry, p ready) (bool, error) {
	f, info, err := hosttree.OpenFile(m.local)
	if errors.Is(err, fs.ErrPermission) {
		return false, nil // it can be replaced all the same
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }() // if it changed, the other content replaces it
	if info.Size() != e.Size || info.Mode().Perm() != e.Mode {
		return false, nil
	}
	s := y.newSource(io.NewSectionReader(f, 0, e.Size), newSHA256(), e.Size, 0)
	if _, err := readAll(ctx, s); err != nil {
		return false, err
	}
	out, err := y.step(ctx, `told "$S/`+p.file.name+`" || exit 95`)
	if err != nil {
		return false, err
	}
	there, err := toldFile(p.file.name, out)
	if err != nil {
		return false, err
	}
	sum, err := there.sum()
	return err == nil && there.size == e.Size && sum == s.hash.text(), err
}

type countedReader struct {
	from  io.Reader
	meter *meter
}

func (r *countedReader) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	r.meter.add(int64(n), 0)
	return n, err
}

func (y *syncer) outDir(ctx context.Context, m *mapping, t *hosttree.Target, r *SyncOperationResult) error {
	kind, err := t.Look()
	switch {
	case err != nil:
		return err
	case kind == archive.Link:
		return hosttree.ErrIsLink
	case kind == archive.File:
		return hosttree.ErrNotDir
	}
	here, from, err := bothSides(ctx,
		func(ctx context.Context) (*tree, error) { return y.targetTree(ctx, m, t, kind) },
		func(ctx context.Context) (*tree, error) { return y.remoteTree(ctx, m, false, m.misfit(t)) })
	defer here.close()
	defer from.close()
	if err != nil {
		return err
	}
	diff, err := m.difference(from, here)
	defer diff.close()
	if err != nil {
		return err
	}
	if !m.Merge || kind != archive.Dir || diff.count() > 0 {
		deleted, err := y.takeTree(ctx, m, t, from.mode, diff)
		if err != nil {
			return err
		}
		r.Deleted += deleted
	}
	r.moved(diff.put)
	r.Unchanged += diff.same
	r.skipped(m, from.skips)
	return nil
}

// targetTree lists the directory that is merged into, without what a merge that was
// killed has left.
func (y *syncer) targetTree(ctx context.Context, m *mapping, t *hosttree.Target, kind archive.Kind) (*tree, error) {
	if kind != archive.Dir || !m.Delta && !m.Delete {
		return &tree{absent: true}, nil
	}
	root, err := t.Open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return y.localTree(ctx, root, m, func(name string, dir bool) bool { return t.IsStage(name) || m.excludes(name, dir) })
}

// misfit says why what has the name under which a merge stages cannot be part of it:
// it would be taken for that, and removed.
func (m *mapping) misfit(t *hosttree.Target) func(name string) string {
	return func(name string) string {
		if m.Merge && t.IsStage(name) {
			return "has a name that belongs to the sync"
		}
		return ""
	}
}
