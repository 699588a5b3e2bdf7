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
	"path/filepath"
	"slices"
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
	// ErrLimit says that a tree is larger than the limits allow.
	ErrLimit = errors.New("is above a limit")
)

// ReasonLink is the reason of a link that was skipped.
const ReasonLink = "is a symbolic link that leads out of the tree"

// A Skip is something that a listing left out.
type Skip struct{ Name, Reason string }

// A Listing is what is in a tree, a directory always before its content.
type Listing struct {
	Entries []archive.Entry
	Skipped []Skip
	Files   int
	Bytes   int64
}

// ListOptions say what is listed.
type ListOptions struct {
	// Exclude leaves something out, with all that is below it.
	Exclude func(name string, dir bool) bool
	Limits  archive.Limits
	// All lists links that lead out of the tree as well, and what does not
	// travel: for a tree in which they may have to be removed.
	All bool
}

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
	// Should a FIFO take its place, the open must not wait for a writer.
	f, err := root.OpenFile(name, os.O_RDONLY|nonblock, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !os.SameFile(seen, info) {
		err = archive.ErrChanged
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// List lists the tree of root. Links are listed as links, if they stay in the
// tree; others, and what is neither file nor directory, are skipped, unless all
// are asked for.
func List(ctx context.Context, root *os.Root, o ListOptions) (*Listing, error) {
	l := &lister{ctx: ctx, o: o}
	if err := l.dir(root, "."); err != nil {
		return nil, err
	}
	if !o.All {
		l.Entries, l.Skipped = DropLinks(l.Entries, l.Skipped)
	}
	return &l.Listing, nil
}

type lister struct {
	Listing
	ctx context.Context
	o   ListOptions
}

func (l *lister) skip(name, reason string) {
	l.Skipped = append(l.Skipped, Skip{name, reason})
}

// dir lists one directory, through a root of its own: what is in it is then one
// step away, however deep it lies.
func (l *lister) dir(root *os.Root, at string) error {
	if err := l.ctx.Err(); err != nil {
		return err
	}
	names, err := namesIn(root)
	if err != nil {
		return err
	}
	for _, base := range names {
		if err := l.entry(root, base, path.Join(at, base)); err != nil {
			return err
		}
	}
	return nil
}

// namesIn returns the sorted names in a directory, and no more: reading whole
// entries would look at each of them, which is done here anyway.
func namesIn(root *os.Root) ([]string, error) {
	d, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

func (l *lister) entry(root *os.Root, base, name string) error {
	info, err := root.Lstat(base)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it went away while we looked
	}
	if err != nil {
		return err
	}
	if l.o.Exclude != nil && l.o.Exclude(name, info.IsDir()) {
		return nil
	}
	if reason := archive.CheckName(name, l.o.Limits.NameBytes); reason != "" {
		l.skip(name, reason)
		return nil
	}
	e := archive.Entry{Name: name, Mode: info.Mode().Perm(), ModTime: info.ModTime().Unix()}
	switch {
	case info.Mode().IsRegular():
		e.Kind, e.Size = archive.File, info.Size()
	case info.IsDir():
		e.Kind = archive.Dir
	case info.Mode()&fs.ModeSymlink != 0:
		e.Kind = archive.Link
		if e.Target, err = root.Readlink(base); err != nil {
			return err
		}
	case !l.o.All:
		l.skip(name, "is neither file, directory nor symbolic link")
		return nil
	}
	if err := l.add(e); err != nil || e.Kind != archive.Dir {
		return err
	}
	// A target may hold a directory that its owner must not read.
	if l.o.All && e.Mode&0o500 != 0o500 && root.Chmod(base, info.Mode()|0o500) == nil {
		defer func() { _ = root.Chmod(base, info.Mode()) }()
	}
	sub, err := openSub(root, base)
	if err != nil {
		return err
	}
	defer sub.Close()
	return l.dir(sub, name)
}

func (l *lister) add(e archive.Entry) error {
	l.Entries = append(l.Entries, e)
	l.Bytes += e.Size
	if e.Kind == archive.File {
		l.Files++
	}
	if len(l.Entries) > l.o.Limits.Entries || l.Bytes > l.o.Limits.Bytes {
		return ErrLimit
	}
	return nil
}

// DropLinks moves the links that lead out of the tree of entries to skipped.
func DropLinks(entries []archive.Entry, skipped []Skip) ([]archive.Entry, []Skip) {
	links := make(archive.Links)
	for _, e := range entries {
		if e.Kind == archive.Link {
			links[e.Name] = e.Target
		}
	}
	kept := entries[:0]
	for _, e := range entries {
		if e.Kind == archive.Link && !links.Stays(e.Name) {
			skipped = append(skipped, Skip{e.Name, ReasonLink})
			continue
		}
		kept = append(kept, e)
	}
	return kept, skipped
}

// A Reader opens the files of a listing. It keeps the directory of the last one
// open. It is for one goroutine at a time.
type Reader struct {
	root *os.Root
	at   string
	dir  *os.Root
}

// NewReader makes a Reader, which must be closed. It does not close root.
func NewReader(root *os.Root) *Reader { return &Reader{root: root} }

// Close lets go of what is open.
func (r *Reader) Close() {
	if r.dir != nil {
		_ = r.dir.Close()
		r.dir = nil
	}
}

// Open opens a file. If it is not what was listed any more, the error is
// archive.ErrChanged.
func (r *Reader) Open(e archive.Entry) (*File, error) {
	f, info, err := r.open(e)
	if err != nil {
		return nil, err
	}
	if info.Size() != e.Size {
		_ = f.Close()
		return nil, archive.ErrChanged
	}
	return &File{f, info}, nil
}

// A File is a file that is read, and must not change meanwhile.
type File struct {
	*os.File
	seen fs.FileInfo // when it was opened
}

// Same returns archive.ErrChanged if the file was written to since it was opened.
func (f *File) Same() error {
	info, err := f.Stat()
	if err == nil && (info.Size() != f.seen.Size() || !info.ModTime().Equal(f.seen.ModTime())) {
		err = archive.ErrChanged
	}
	return err
}

// Close closes the file, and says what Same says.
func (f *File) Close() error {
	same := f.Same()
	if err := f.File.Close(); err != nil {
		return err
	}
	return same
}

func (r *Reader) open(e archive.Entry) (*os.File, fs.FileInfo, error) {
	root, err := r.of(path.Dir(e.Name))
	if err != nil {
		return nil, nil, changed(err)
	}
	f, info, err := openRegular(root, path.Base(e.Name))
	return f, info, changed(err)
}

// changed names the error of a file that is not there any more, or something else
// now, or behind a link.
func changed(err error) error {
	for _, gone := range []error{fs.ErrNotExist, ErrIsLink, ErrNotDir, ErrNotFile} {
		if errors.Is(err, gone) {
			return archive.ErrChanged
		}
	}
	return err
}

// of opens a directory, one step after the other: what was one when the tree was
// listed may be a link now, and os.Root would follow it.
func (r *Reader) of(dir string) (*os.Root, error) {
	if dir == "." {
		return r.root, nil
	}
	if r.dir != nil && r.at == dir {
		return r.dir, nil
	}
	next := r.root
	for part := range strings.SplitSeq(dir, "/") {
		sub, err := openSub(next, part)
		if next != r.root {
			_ = next.Close()
		}
		if err != nil {
			return nil, err
		}
		next = sub
	}
	r.Close()
	r.at, r.dir = dir, next
	return next, nil
}

// Until reads from r until ctx ends.
func Until(ctx context.Context, r io.Reader) io.Reader { return &until{ctx, r} }

type until struct {
	ctx context.Context
	r   io.Reader
}

func (u *until) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.r.Read(p)
}

// Digest is the SHA-256 of a file. buf is for reading.
func (r *Reader) Digest(ctx context.Context, e archive.Entry, buf []byte) (sum [sha256.Size]byte, err error) {
	if e.Size < int64(len(buf)) {
		return r.digestSmall(e, buf)
	}
	f, err := r.Open(e)
	if err != nil {
		return sum, err
	}
	h := sha256.New()
	_, err = io.CopyBuffer(struct{ io.Writer }{h}, Until(ctx, f), buf)
	if cerr := f.Close(); err == nil {
		err = cerr // also if it changed
	}
	if err != nil {
		return sum, err
	}
	h.Sum(sum[:0])
	return sum, nil
}

// digestSmall does with one read: a file that gives exactly what was listed, of
// what would have been more, is all there. Trees are made of small files, and
// most of the time goes into the calls of the system.
func (r *Reader) digestSmall(e archive.Entry, buf []byte) (sum [sha256.Size]byte, err error) {
	f, _, err := r.open(e)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	n, err := f.Read(buf[:e.Size+1])
	switch {
	case err != nil && err != io.EOF:
		return sum, err
	case int64(n) != e.Size:
		return sum, archive.ErrChanged
	}
	return sha256.Sum256(buf[:n]), nil
}

// Find returns the index of a name in a sorted listing, -1 if it is not there.
func Find(sorted []archive.Entry, name string) int {
	i, found := slices.BinarySearchFunc(sorted, name, func(e archive.Entry, name string) int { return strings.Compare(e.Name, name) })
	if !found {
		return -1
	}
	return i
}
