package hosttree

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/createos-lease/createos/internal/archive"
)

var (
	// ErrIsLink says that a path leads to a symbolic link where a file or
	// directory is needed.
	ErrIsLink = errors.New("is a symbolic link")
	// ErrNotDir says that a path leads to something else than a directory.
	ErrNotDir = errors.New("is not a directory")
	// ErrNotFile says that a path leads to something else than a regular file.
	ErrNotFile = errors.New("is not a regular file")
)

// OpenDir opens a directory that must not be a symbolic link itself. Links
// above it are followed: the caller named them.
func OpenDir(name string) (*os.Root, error) {
	parent, base, err := openParent(name)
	if err != nil {
		return nil, err
	}
	if base == "." {
		return parent, nil
	}
	defer parent.Close()
	return openSub(parent, base)
}

func openParent(name string) (*os.Root, string, error) {
	abs, err := filepath.Abs(name)
	if err != nil {
		return nil, "", err
	}
	dir, base := filepath.Dir(abs), filepath.Base(abs)
	if dir == abs {
		base = "."
	}
	root, err := os.OpenRoot(dir)
	return root, base, err
}

// openSub opens a directory of parent. os.Root follows a link there, and what
// was a directory when it was looked at may be a link when it is opened, so what
// was opened is compared with what was seen.
func openSub(parent *os.Root, base string) (*os.Root, error) {
	seen, err := parent.Lstat(base)
	if err != nil {
		return nil, err
	}
	switch {
	case seen.Mode()&fs.ModeSymlink != 0:
		return nil, ErrIsLink
	case !seen.IsDir():
		return nil, ErrNotDir
	}
	sub, err := parent.OpenRoot(base)
	if err != nil {
		return nil, err
	}
	got, err := sub.Stat(".")
	if err == nil && !os.SameFile(seen, got) {
		err = ErrIsLink
	}
	if err != nil {
		_ = sub.Close()
		return nil, err
	}
	return sub, nil
}

// OpenFile opens a regular file that must not be a symbolic link.
func OpenFile(name string) (*File, fs.FileInfo, error) {
	parent, base, err := openParent(name)
	if err != nil {
		return nil, nil, err
	}
	defer parent.Close()
	f, info, err := openRegular(parent, base)
	if err != nil {
		return nil, nil, err
	}
	return &File{f, info}, info, nil
}

func openRegular(root *os.Root, name string) (*os.File, fs.FileInfo, error) {
	seen, err := root.Lstat(name)
	switch {
	case err != nil:
		return nil, nil, err
	case seen.Mode()&fs.ModeSymlink != 0:
		return nil, nil, ErrIsLink
	case !seen.Mode().IsRegular():
		return nil, nil, ErrNotFile
	}
	return openSeen(root, name, seen)
}

// openSeen opens a regular file, and gives archive.ErrChanged if it is another one
// than was seen.
func openSeen(root *os.Root, name string, seen fs.FileInfo) (*os.File, fs.FileInfo, error) {
	// Should a FIFO take its place, the open must not wait for a writer.
	f, err := root.OpenFile(name, os.O_RDONLY|nonblock, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && (!os.SameFile(seen, info) || info.Size() != seen.Size()) {
		err = archive.ErrChanged
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// dirs opens directories of a tree, and keeps the last one open.
type dirs struct {
	root *os.Root
	at   string
	dir  *os.Root
}

// of opens a directory, one step after the other: what was one when the tree was
// listed may be a link now, and os.Root would follow it. It stays open until the next
// one is, or close.
func (d *dirs) of(dir string) (*os.Root, error) {
	if dir == "." {
		return d.root, nil
	}
	if d.dir != nil && d.at == dir {
		return d.dir, nil
	}
	next := d.root
	for part := range strings.SplitSeq(dir, "/") {
		sub, err := openSub(next, part)
		if next != d.root {
			_ = next.Close()
		}
		if err != nil {
			return nil, err
		}
		next = sub
	}
	d.close()
	d.at, d.dir = dir, next
	return next, nil
}

func (d *dirs) close() {
	if d.dir != nil {
		_ = d.dir.Close()
		d.dir = nil
	}
}
