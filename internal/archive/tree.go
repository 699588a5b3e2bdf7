package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// backslashIsName says that a backslash is a character like others in a name.
const backslashIsName = runtime.GOOS != "windows"

// Limits bound what is extracted. They are counted on what is read, whatever
// the headers announce.
type Limits struct {
	// Bytes is how much content all files may have together.
	Bytes int64
	// Entries is how many entries there may be.
	Entries int
	// NameBytes is how long a name, or the target of a link, may be.
	NameBytes int
}

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

// Reasons about limits; see IsLimit.
const (
	reasonBytes   = "has more content than the limit allows"
	reasonEntries = "is one more than the limit allows"
)

// IsLimit says whether a refusal is about the size of the archive.
func (e *RefusedError) IsLimit() bool {
	return e.Reason == reasonBytes || e.Reason == reasonEntries || strings.HasSuffix(e.Reason, "above the limit")
}

// A Tree is a directory that is being filled from one archive or several.
//
// Everything is written through an os.Root, so nothing lands outside of the
// directory, whatever happens in it meanwhile. No link is written before
// [Tree.Finish], so nothing is written through one. An entry is refused, and Add
// fails, if its name is absolute, leads upwards or is not clean; if it is a
// hard link, device, FIFO or socket, or of another type than file, directory
// and symbolic link; if its name was there before, unless both are directories;
// if something lies below it, or it below something, that is no directory; or if
// it is above a limit. A symbolic link is refused by Finish if it is absolute or
// leads out of the tree, alone or together with others. Bits of a mode beyond
// the permissions are dropped.
//
// When Add or Finish fails the directory holds a part of the tree: fill a fresh
// one, and put it in its place at the end.
type Tree struct {
	root   *os.Root
	limits Limits
	// FileMode, if not 0, is the mode of all files.
	FileMode fs.FileMode
	// Admit, if not nil, is asked about each entry before anything is written
	// for it, and refuses it by a reason.
	Admit func(Entry) (reason string)
	// Progress, if not nil, is told of the bytes of files that were written,
	// and of each file that is complete.
	Progress func(bytes int64, files int)

	kinds   map[string]Kind
	dirs    map[string]fs.FileMode // modes to be set at the end
	links   Links
	bytes   int64
	entries int
	buf     []byte

	// The directory that was written to last stays open: one step to the
	// file is a good deal cheaper than all of them.
	at     string
	atRoot *os.Root
}

// NewTree begins a tree in a directory, which should be empty.
func NewTree(root *os.Root, limits Limits) *Tree {
	return &Tree{
		root: root, limits: limits, kinds: make(map[string]Kind), dirs: make(map[string]fs.FileMode),
		links: make(Links), buf: make([]byte, 128<<10),
	}
}

// Close lets go of what is open. It does not close the root.
func (t *Tree) Close() {
	if t.atRoot != nil {
		_ = t.atRoot.Close()
		t.atRoot = nil
	}
}

// Add extracts one archive. If it fails, the files that it has written are gone
// again, and the same archive can be tried once more.
func (t *Tree) Add(r io.Reader) error {
	var wrote []Entry
	err := t.add(tar.NewReader(r), &wrote)
	return t.undo(wrote, err)
}

// AddFile writes one file that does not come in an archive, under the same
// rules. r must hold e.Size bytes. If it fails the file is gone again.
func (t *Tree) AddFile(e Entry, r io.Reader) error {
	if reason := t.refuse(e); reason != "" {
		return &RefusedError{Name: e.Name, Reason: reason}
	}
	var wrote []Entry
	err := t.put(e, io.LimitReader(r, e.Size), &wrote)
	return t.undo(wrote, err)
}

// undo takes out what was written, if err is not nil.
func (t *Tree) undo(wrote []Entry, err error) error {
	if err == nil {
		return nil
	}
	return errors.Join(err, t.Drop(wrote...))
}

// Drop takes out entries that were added, such as those of an archive that
// turned out to be another one when its digest was known. Directories stay on
// the disk.
func (t *Tree) Drop(entries ...Entry) (err error) {
	for _, e := range entries {
		delete(t.kinds, e.Name)
		delete(t.links, e.Name)
		t.entries--
		if e.Kind == File {
			t.bytes -= e.Size
			err = errors.Join(err, ignoreAbsent(t.root.Remove(filepath.FromSlash(e.Name))))
		}
	}
	return err
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (t *Tree) add(r *tar.Reader, wrote *[]Entry) error {
	for n := 1; ; n++ {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return readError(n, err)
		}
		e, reason := entryOf(h)
		switch {
		case reason != "":
		case e.Name == "." && e.Kind == Dir:
			continue // the tree itself
		default:
			reason = t.refuse(e)
		}
		if reason == "" {
			err = t.put(e, r, wrote)
		}
		if reason != "" {
			return &RefusedError{Entry: n, Name: e.Name, Reason: reason}
		}
		if err != nil {
			return readError(n, err)
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

// entryOf reads a header.
func entryOf(h *tar.Header) (e Entry, reason string) {
	e = Entry{Name: strings.TrimPrefix(h.Name, "./"), Mode: fs.FileMode(h.Mode).Perm(), ModTime: h.ModTime.Unix()}
	switch h.Typeflag {
	case tar.TypeReg:
		e.Kind, e.Size = File, h.Size
	case tar.TypeDir:
		e.Kind = Dir
		if e.Name = strings.TrimSuffix(e.Name, "/"); e.Name == "" && h.Name == "./" {
			e.Name = "."
		}
	case tar.TypeSymlink:
		e.Kind, e.Target = Link, h.Linkname
	case tar.TypeLink:
		return e, "is a hard link"
	case tar.TypeChar, tar.TypeBlock:
		return e, "is a device"
	case tar.TypeFifo:
		return e, "is a FIFO"
	default:
		return e, "is of an unknown type"
	}
	return e, ""
}

// refuse says why an entry must not be part of the tree. It counts it if it may.
func (t *Tree) refuse(e Entry) string {
	if reason := CheckName(e.Name, t.limits.NameBytes); reason != "" {
		return reason
	}
	if e.Kind == Link && (e.Target == "" || len(e.Target) > t.limits.NameBytes || strings.ContainsRune(e.Target, 0)) {
		return "has a target that is empty or above the limit"
	}
	if was, twice := t.kinds[e.Name]; twice && (was != Dir || e.Kind != Dir) {
		return "has a name that was there before"
	}
	for up := path.Dir(e.Name); up != "."; up = path.Dir(up) {
		if kind, known := t.kinds[up]; known && kind != Dir {
			return "lies below something that is no directory"
		} else if known {
			break
		}
	}
	switch {
	case t.entries >= t.limits.Entries:
		return reasonEntries
	case e.Size < 0 || e.Size > t.limits.Bytes-t.bytes:
		return reasonBytes
	case t.Admit != nil:
		return t.Admit(e)
	}
	return ""
}

// put makes an entry that was not refused.
func (t *Tree) put(e Entry, r io.Reader, wrote *[]Entry) error {
	if e.Kind != File {
		_, known := t.kinds[e.Name]
		if err := t.Put(e); err != nil {
			return err
		}
		if !known {
			*wrote = append(*wrote, e)
		}
		return nil
	}
	*wrote = append(*wrote, e)
	t.count(e)
	n, err := t.write(e, r)
	if err == nil && n != e.Size {
		err = io.ErrUnexpectedEOF
	}
	return err
}

func (t *Tree) count(e Entry) {
	if _, known := t.kinds[e.Name]; !known || e.Kind != Dir {
		t.entries++
	}
	t.kinds[e.Name] = e.Kind
	t.bytes += e.Size
}

// Put makes a directory or notes a link, without an archive. The entry is
// trusted: the caller has checked it.
func (t *Tree) Put(e Entry) error {
	t.count(e)
	if e.Kind == Link {
		t.links[e.Name] = e.Target
		return nil
	}
	t.dirs[e.Name] = e.Mode
	return t.parents(e.Name)
}

// parents makes directories, all of them writable for the time being.
func (t *Tree) parents(name string) error {
	for up := name; up != "."; up = path.Dir(up) {
		if _, made := t.dirs[up]; !made {
			t.dirs[up] = 0o755
		}
		if t.kinds[up] == 0 {
			t.kinds[up] = Dir
		}
	}
	return t.root.MkdirAll(filepath.FromSlash(name), 0o700)
}

// dir opens the directory of a name.
func (t *Tree) dir(name string) (*os.Root, error) {
	dir := path.Dir(name)
	if dir == "." {
		return t.root, nil
	}
	if t.atRoot != nil && t.at == dir {
		return t.atRoot, nil
	}
	if t.kinds[dir] == 0 || t.dirs[dir] == 0 {
		if err := t.parents(dir); err != nil {
			return nil, err
		}
	}
	next, err := t.root.OpenRoot(filepath.FromSlash(dir))
	if err != nil {
		return nil, err
	}
	t.Close()
	t.at, t.atRoot = dir, next
	return next, nil
}

// write writes a file with its final mode and time.
func (t *Tree) write(e Entry, r io.Reader) (int64, error) {
	f, err := t.Create(e)
	if err != nil {
		return 0, err
	}
	n, err := t.copy(f, r)
	if err != nil {
		_ = f.Close()
		return n, err
	}
	return n, t.Seal(f, e)
}

// copy copies, and counts what it reads, so that a header that lies about the
// size gains nothing.
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

// Create opens a fresh file of the tree for writing; [Tree.Seal]
// completes it.
func (t *Tree) Create(e Entry) (*os.File, error) {
	dir, err := t.dir(e.Name)
	if err != nil {
		return nil, err
	}
	return dir.OpenFile(path.Base(e.Name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// Seal closes a file that was written, with its final mode and time.
func (t *Tree) Seal(f *os.File, e Entry) error {
	mode := e.Mode
	if t.FileMode != 0 {
		mode = t.FileMode
	}
	err := f.Chmod(mode.Perm())
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	dir, err := t.dir(e.Name)
	if err != nil {
		return err
	}
	at := time.Unix(e.ModTime, 0)
	if err := dir.Chtimes(path.Base(e.Name), at, at); err != nil {
		return err
	}
	if t.Progress != nil {
		t.Progress(0, 1)
	}
	return nil
}

// Finish judges the links and makes them, and gives the directories their modes.
func (t *Tree) Finish() error {
	if err := t.MakeLinks(); err != nil {
		return err
	}
	return t.SetModes()
}

// MakeLinks is the first half of [Tree.Finish]. None is made if one is refused.
func (t *Tree) MakeLinks() error {
	defer t.Close()
	names := slices.Sorted(maps.Keys(t.links))
	for _, name := range names {
		if !t.links.Stays(name) {
			return &RefusedError{Name: name, Reason: "a symbolic link leads out of the tree"}
		}
	}
	for _, name := range names {
		dir, err := t.dir(name)
		if err != nil {
			return err
		}
		if err := dir.Symlink(t.links[name], path.Base(name)); err != nil {
			return err
		}
	}
	return nil
}

// SetModes is the second half of [Tree.Finish].
func (t *Tree) SetModes() error {
	t.Close()
	dirs := slices.Sorted(maps.Keys(t.dirs))
	slices.Reverse(dirs) // what lies below comes first: it must still be reachable
	for _, name := range dirs {
		if err := t.root.Chmod(filepath.FromSlash(name), t.dirs[name].Perm()); err != nil {
			return err
		}
	}
	return nil
}
