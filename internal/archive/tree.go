package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// backslashIsName says that a backslash is a character like others in a name.
const backslashIsName = runtime.GOOS != "windows"

// A RefusedError says that an archive is not extracted, and why.
type RefusedError struct {
	// Entry is the number of the entry in its archive, from 1; 0 if the
	// archive as a whole is meant.
	Entry int
	// Name is its name. It is not part of the text.
	Name string
	// Reason says what is wrong, in words that are ours.
	Reason string
}

func (e *RefusedError) Error() string {
	if e.Entry == 0 {
		return "archive refused: " + e.Reason
	}
	return fmt.Sprintf("archive refused: entry %d %s", e.Entry, e.Reason)
}

// A Tree is a fresh directory that is being filled. Its owner knows all that is to
// be in it before, from a list that was checked: no name is there twice, and what
// lies above a name is a directory. It makes the directories, takes the files out
// of archives, and makes the links and sets the modes of directories at the end.
//
// Everything is written through an os.Root, so nothing lands outside of the
// directory, whatever happens in it meanwhile. Links come last, so nothing is written
// through one. An archive is believed in nothing: it must hold the files that were
// asked for, in their order, of their size, and nothing else.
//
// When something fails the directory holds a part of the tree: fill a fresh one, and
// put it in its place at the end. A Tree is for one goroutine at a time.
type Tree struct {
	root *os.Root
	// FileMode, if not 0, is the mode of all files.
	FileMode fs.FileMode
	// Progress, if not nil, is told of the bytes of files that were written,
	// and of each file that is complete.
	Progress func(bytes int64, files int)

	buf []byte

	// The directory that was written to last stays open: one step to the
	// file is a good deal cheaper than all of them.
	at     string
	atRoot *os.Root
}

// NewTree begins a tree in a directory, which should be empty.
func NewTree(root *os.Root) *Tree { return &Tree{root: root, buf: make([]byte, 128<<10)} }

// Close lets go of what is open. It does not close the root.
func (t *Tree) Close() {
	if t.atRoot != nil {
		_ = t.atRoot.Close()
		t.atRoot = nil
	}
}

// Extract writes the files of want, which an archive must hold exactly. Anything else
// is a [*RefusedError], or [ErrChanged] for a file of another size. If it fails, what
// it has written is gone again, and it can be tried once more.
func (t *Tree) Extract(r io.Reader, want []Entry) error {
	n, err := t.extract(tar.NewReader(r), want)
	if err == nil {
		return nil
	}
	return errors.Join(err, t.Remove(want[:n]...))
}

// extract returns how many files it has begun.
func (t *Tree) extract(r *tar.Reader, want []Entry) (begun int, err error) {
	for {
		h, err := r.Next()
		switch {
		case err == io.EOF && begun < len(want):
			return begun, &RefusedError{Reason: "files that were asked for are missing"}
		case err == io.EOF:
			return begun, nil
		case err != nil:
			return begun, readError(begun+1, err)
		}
		reason := refuse(h)
		if reason == "" && (begun == len(want) || strings.TrimPrefix(h.Name, "./") != want[begun].Name) {
			reason = "was not asked for"
		}
		if reason != "" {
			return begun, &RefusedError{Entry: begun + 1, Name: h.Name, Reason: reason}
		}
		e := want[begun]
		if h.Size != e.Size {
			return begun, ErrChanged
		}
		e.Mode, e.ModTime = fs.FileMode(h.Mode).Perm(), h.ModTime.Unix()
		begun++
		if err := t.write(e, r); err != nil {
			return begun, readError(begun, err)
		}
	}
}

// readError keeps what a reader failed with, and turns what the format is
// refused for into a refusal.
func readError(n int, err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) || errors.Is(err, tar.ErrInsecurePath) {
		return &RefusedError{Entry: n, Reason: "is not readable"}
	}
	return err
}

// refuse says what an entry is, if it is no file.
func refuse(h *tar.Header) string {
	switch h.Typeflag {
	case tar.TypeReg:
		return ""
	case tar.TypeDir:
		return "is a directory"
	case tar.TypeSymlink:
		return "is a symbolic link"
	case tar.TypeLink:
		return "is a hard link"
	case tar.TypeChar, tar.TypeBlock:
		return "is a device"
	case tar.TypeFifo:
		return "is a FIFO"
	}
	return "is of an unknown type"
}

// AddFile writes one file that does not come in an archive. r must hold e.Size
// bytes. If it fails the file is gone again.
func (t *Tree) AddFile(e Entry, r io.Reader) error {
	err := t.write(e, io.LimitReader(r, e.Size))
	if err == nil {
		return nil
	}
	return errors.Join(err, t.Remove(e))
}

// Remove removes files that were written, such as those of an archive that turned
// out to be another one when its digest was known.
func (t *Tree) Remove(files ...Entry) (err error) {
	for _, e := range files {
		rerr := t.root.Remove(filepath.FromSlash(e.Name))
		if !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

// MakeDir makes a directory, and what is missing above it, writable for the time
// being.
func (t *Tree) MakeDir(e Entry) error { return t.root.MkdirAll(filepath.FromSlash(e.Name), 0o700) }

// MakeLink makes a symbolic link, which the owner has judged.
func (t *Tree) MakeLink(e Entry) error {
	dir, err := t.dir(e.Name)
	if err != nil {
		return err
	}
	return dir.Symlink(e.Target, path.Base(e.Name))
}

// SetMode gives a directory its mode, after all that is below it has its own.
func (t *Tree) SetMode(e Entry) error {
	return t.root.Chmod(filepath.FromSlash(e.Name), e.Mode.Perm())
}

// dir opens the directory of a name, and makes it if it is missing.
func (t *Tree) dir(name string) (*os.Root, error) {
	dir := path.Dir(name)
	if dir == "." {
		return t.root, nil
	}
	if t.atRoot != nil && t.at == dir {
		return t.atRoot, nil
	}
	next, err := t.root.OpenRoot(filepath.FromSlash(dir))
	if errors.Is(err, fs.ErrNotExist) {
		if err = t.MakeDir(Entry{Name: dir}); err == nil {
			next, err = t.root.OpenRoot(filepath.FromSlash(dir))
		}
	}
	if err != nil {
		return nil, err
	}
	t.Close()
	t.at, t.atRoot = dir, next
	return next, nil
}

// write writes a file with its final mode and time.
func (t *Tree) write(e Entry, r io.Reader) error {
	dir, err := t.dir(e.Name)
	if err != nil {
		return err
	}
	base := path.Base(e.Name)
	f, err := dir.OpenFile(base, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := t.copy(f, r)
	if err == nil && n != e.Size {
		err = io.ErrUnexpectedEOF
	}
	mode := e.Mode
	if t.FileMode != 0 {
		mode = t.FileMode
	}
	if err == nil {
		err = f.Chmod(mode.Perm())
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	at := time.Unix(e.ModTime, 0)
	if err := dir.Chtimes(base, at, at); err != nil {
		return err
	}
	if t.Progress != nil {
		t.Progress(0, 1)
	}
	return nil
}

// copy copies, and reports as it goes.
func (t *Tree) copy(w io.Writer, r io.Reader) (n int64, err error) {
	for {
		m, err := r.Read(t.buf)
		if m > 0 {
			if _, err := w.Write(t.buf[:m]); err != nil {
				return n, err
			}
			n += int64(m)
			if t.Progress != nil {
				t.Progress(int64(m), 0)
			}
		}
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}
