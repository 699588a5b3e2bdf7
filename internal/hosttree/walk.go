// Package hosttree reads and replaces trees of files on this machine without
// ever following a link out of them.
package hosttree

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/manifest"
)

// WalkOptions say what a walk comes by.
type WalkOptions struct {
	// Exclude leaves something out, with all that is below it.
	Exclude func(name string, dir bool) bool
	Limits  manifest.Limits
	// Target says that the tree is one in which things may have to be removed:
	// what does not travel is an entry like others then, and directories that
	// their owner must not read are read all the same.
	Target bool
	// Digest is whether files are hashed. One that changes meanwhile, or must not
	// be read, gets no digest, and so equals nothing.
	Digest bool
}

// Walk calls visit with each entry of the tree of root, a directory before its
// content, but otherwise in no order. If a directory or link is another thing when it
// is opened than when it was seen, the error is archive.ErrChanged.
func Walk(ctx context.Context, root *os.Root, o WalkOptions, visit func(archive.Entry) error) error {
	w := &walker{ctx: ctx, o: o, visit: visit, tally: manifest.Tally{Limits: o.Limits}}
	if o.Digest {
		w.buf = make([]byte, 64<<10)
	}
	return w.dir(root, ".")
}

type walker struct {
	ctx   context.Context
	o     WalkOptions
	visit func(archive.Entry) error
	tally manifest.Tally
	buf   []byte
}

// dir walks through one directory, through a root of its own: what is in it is then
// one step away, however deep it lies.
func (w *walker) dir(root *os.Root, at string) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	return eachName(root, func(base string) error { return w.entry(root, base, path.Join(at, base)) })
}

// nameBatch is how many names of a directory are read at once.
const nameBatch = 1024

// eachName calls f with the names in a directory, some at a time, and these sorted:
// there may be any number. It is open meanwhile only if there are many, for f may go
// far down.
func eachName(root *os.Root, f func(base string) error) error {
	d, err := root.Open(".")
	if err != nil {
		return changed(err)
	}
	defer func() { _ = d.Close() }()
	for last := false; !last; {
		names, err := d.Readdirnames(nameBatch)
		if err != nil && err != io.EOF {
			return err
		}
		if last = len(names) < nameBatch; last {
			more, err := d.Readdirnames(nameBatch)
			if err != nil && err != io.EOF {
				return err
			}
			names = append(names, more...)
			if last = len(more) == 0; last {
				_ = d.Close()
			}
		}
		slices.Sort(names) // so that most trees need not be sorted by those who list them
		for _, base := range names {
			if err := f(base); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *walker) entry(root *os.Root, base, name string) error {
	info, err := root.Lstat(base)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it went away while we looked
	}
	if err != nil {
		return err
	}
	if w.o.Exclude != nil && w.o.Exclude(name, info.IsDir()) {
		return nil
	}
	e := archive.Entry{Name: name, Mode: info.Mode().Perm(), ModTime: info.ModTime().Unix()}
	if e.Skip = archive.CheckName(name, w.o.Limits.NameBytes); e.Skip != "" {
		return w.visit(e)
	}
	switch {
	case info.Mode().IsRegular():
		e.Kind, e.Size = archive.File, info.Size()
	case info.IsDir():
		e.Kind = archive.Dir
	case info.Mode()&fs.ModeSymlink != 0:
		e.Kind = archive.Link
		if e.Target, err = root.Readlink(base); err != nil {
			return changed(err)
		}
	case !w.o.Target:
		e.Skip = ReasonKind
		return w.visit(e)
	}
	if err := w.tally.Count(e); err != nil {
		return err
	}
	if e.Kind == archive.File && w.o.Digest {
		if e.Sum, err = w.digest(root, base, info); err != nil {
			return err
		}
	}
	if err := w.visit(e); err != nil || e.Kind != archive.Dir {
		return err
	}
	if w.o.Target && e.Mode&0o500 != 0o500 && root.Chmod(base, info.Mode()|0o500) == nil {
		defer func() { _ = root.Chmod(base, info.Mode()) }()
	}
	sub, err := openSub(root, base)
	if err != nil {
		return changed(err)
	}
	defer func() { _ = sub.Close() }()
	return w.dir(sub, name)
}

// ReasonKind is why something is skipped that is none of the three kinds.
const ReasonKind = "is neither file, directory nor symbolic link"

// digest is the SHA-256 of a file.
func (w *walker) digest(root *os.Root, base string, seen fs.FileInfo) (sum [sha256.Size]byte, err error) {
	f, info, err := openSeen(root, base, seen)
	if err == nil {
		sum, err = w.hash(f, info)
		_ = f.Close() // it was only read from
	}
	if w.ctx.Err() != nil {
		return sum, w.ctx.Err()
	}
	if errors.Is(changed(err), archive.ErrChanged) || errors.Is(err, fs.ErrPermission) {
		return [sha256.Size]byte{}, nil
	}
	return sum, err
}

// hash does with one read if it can: a file that gives exactly what it was seen to
// have, of what would have been more, is all there. Trees are made of small files,
// and most of the time goes into the calls of the system.
func (w *walker) hash(f *os.File, info fs.FileInfo) (sum [sha256.Size]byte, err error) {
	if info.Size() < int64(len(w.buf)) {
		n, err := f.Read(w.buf[:info.Size()+1])
		if err == io.EOF {
			err = nil
		}
		if err == nil && int64(n) != info.Size() {
			err = archive.ErrChanged
		}
		return sha256.Sum256(w.buf[:n]), err
	}
	h := sha256.New()
	if _, err := io.CopyBuffer(struct{ io.Writer }{h}, Until(w.ctx, f), w.buf); err != nil {
		return sum, err
	}
	h.Sum(sum[:0])
	return sum, (&File{f, info}).Same()
}
