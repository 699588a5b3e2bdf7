package hosttree

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"

	"github.com/createos-lease/createos/internal/archive"
)

// A Reader opens the files that a walk came by. It keeps the directory of the last
// one open. It is for one goroutine at a time.
type Reader struct{ dirs dirs }

// NewReader makes a Reader, which must be closed. It does not close root.
func NewReader(root *os.Root) *Reader { return &Reader{dirs{root: root}} }

// Close lets go of what is open.
func (r *Reader) Close() { r.dirs.close() }

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
	root, err := r.dirs.of(path.Dir(e.Name))
	if err != nil {
		return nil, nil, changed(err)
	}
	f, info, err := openRegular(root, path.Base(e.Name))
	return f, info, changed(err)
}

// changed names the error of what was seen and is not there any more, or something
// else now, or behind a link.
func changed(err error) error {
	// EINVAL is what the system says of the target of what is no link.
	for _, gone := range []error{fs.ErrNotExist, ErrIsLink, ErrNotDir, ErrNotFile, syscall.EINVAL} {
		if errors.Is(err, gone) {
			return archive.ErrChanged
		}
	}
	return err
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
