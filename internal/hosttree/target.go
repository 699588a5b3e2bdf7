package hosttree

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/createos-lease/createos/internal/archive"
)

// Prefixes of the names that a target has beside it while it is replaced. The
// package that uses this one documents them.
const (
	NewPrefix = ".createos-new."
	OldPrefix = ".createos-old."
	// GonePrefix is that of what was replaced, until it is removed.
	GonePrefix = ".createos-gone."
	// longBase is the longest name that fits behind a prefix.
	longBase = 200
)

// A Target is a file or directory that is to be replaced, or a directory into
// which files are to be put. What is new is made under another name on the same
// file system, and renamed at the end.
type Target struct {
	parent   *os.Root
	base     string
	new, old string // beside base, in parent
	gone     string // begins the names of what is to be removed there
	left     error  // why something of that could not be
	merge    *os.Root
	dirs     dirs // of merge
	made     bool // the directory that is merged into was not there, and is not filled yet
	// modes are those that directories of merge get at the end: what the merge
	// needs was added to them.
	modes map[string]fs.FileMode
}

// OpenTarget opens the parent of a path, which must exist, and ends what an
// earlier process that was killed left undone there: a directory that was moved
// aside is put back if nothing is in its place, and removed otherwise, if it can be.
func OpenTarget(name string) (*Target, error) {
	parent, base, err := openParent(name)
	if err != nil {
		return nil, err
	}
	if base == "." {
		_ = parent.Close()
		return nil, ErrNotFile
	}
	short := ShortName(base)
	t := &Target{parent: parent, base: base, new: NewPrefix + short, old: OldPrefix + short, gone: GonePrefix + short + "."}
	if err := t.restore(); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// ShortName is a name, or, if a prefix might make it too long, its SHA-256.
func ShortName(base string) string {
	if len(base) <= longBase {
		return base
	}
	sum := sha256.Sum256([]byte(base))
	return hex.EncodeToString(sum[:])
}

func (t *Target) restore() error {
	if err := removeAll(t.parent, t.new); err != nil {
		return err
	}
	t.left = t.sweep()
	_, err := t.parent.Lstat(t.old)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := t.parent.Lstat(t.base); errors.Is(err, fs.ErrNotExist) {
		return t.parent.Rename(t.old, t.base)
	}
	t.left = errors.Join(t.left, t.retire())
	return nil
}

// maxGone is how many directories that could not be removed may be beside a target.
const maxGone = 1000

// retire removes what was replaced, under another name: if that fails, what is left
// neither stands in the way of the next one nor looks like something that is to be put
// back.
func (t *Target) retire() error {
	for i := range maxGone {
		name := t.gone + strconv.Itoa(i)
		if _, err := t.parent.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			return errors.Join(t.parent.Rename(t.old, name), removeAll(t.parent, name))
		}
	}
	return removeAll(t.parent, t.old)
}

// sweep removes what could not be removed before.
func (t *Target) sweep() (failed error) {
	err := eachName(t.parent, func(base string) error {
		if strings.HasPrefix(base, t.gone) {
			failed = errors.Join(failed, removeAll(t.parent, base))
		}
		return nil
	})
	if errors.Is(err, fs.ErrPermission) {
		err = nil // the names in it are not ours to see
	}
	return errors.Join(failed, err)
}

// Close lets go of the target. What was staged and not put in its place must
// have been discarded.
func (t *Target) Close() {
	t.dirs.close()
	if t.merge != nil {
		_ = t.merge.Close()
	}
	_ = t.parent.Close()
}

// Look returns the kind of what is at a path whose parent must exist, 0 for
// nothing. It changes nothing. The root of a file system is no target: it is ErrNotFile.
func Look(name string) (archive.Kind, error) {
	parent, base, err := openParent(name)
	if err != nil {
		return 0, err
	}
	defer parent.Close()
	if base == "." {
		return 0, ErrNotFile
	}
	return look(parent, base)
}

// Look returns the kind of what is there, 0 for nothing.
func (t *Target) Look() (archive.Kind, error) { return look(t.parent, t.base) }

func look(parent *os.Root, base string) (archive.Kind, error) {
	info, err := parent.Lstat(base)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return 0, nil
	case err != nil:
		return 0, err
	case info.Mode()&fs.ModeSymlink != 0:
		return archive.Link, nil
	case info.IsDir():
		return archive.Dir, nil
	case info.Mode().IsRegular():
		return archive.File, nil
	}
	return 0, ErrNotFile
}

// Open opens the directory that is there.
func (t *Target) Open() (*os.Root, error) { return openSub(t.parent, t.base) }

// StageFile makes the new file beside the old one.
func (t *Target) StageFile() (*os.File, error) {
	return t.parent.OpenFile(t.new, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// StageDir makes the new directory beside the old one.
func (t *Target) StageDir() (*os.Root, error) {
	if err := t.parent.Mkdir(t.new, 0o700); err != nil {
		return nil, err
	}
	return t.parent.OpenRoot(t.new)
}

// StageMerge makes a directory in the one that is there, or in a fresh one:
// what is moved from it into place then stays in one root all the way.
func (t *Target) StageMerge() (*os.Root, error) {
	err := t.parent.Mkdir(t.base, 0o700)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	t.made = err == nil
	if t.merge, err = openSub(t.parent, t.base); err != nil {
		return nil, err
	}
	t.dirs = dirs{root: t.merge}
	t.modes = make(map[string]fs.FileMode)
	t.unlock(t.merge, ".", ".", 0o700)
	if err := removeAll(t.merge, t.new); err != nil {
		return nil, err
	}
	if err := t.merge.Mkdir(t.new, 0o700); err != nil {
		return nil, err
	}
	return t.merge.OpenRoot(t.new)
}

// IsStage says whether a name in the directory is that of what StageMerge makes, or
// lies below it. Some file systems take names that differ in case for the same.
func (t *Target) IsStage(name string) bool {
	first, _, _ := strings.Cut(name, "/")
	return strings.EqualFold(first, t.new)
}

// Discard removes what was staged, and a directory that was made to be merged into
// and stayed empty.
func (t *Target) Discard() error {
	if t.merge == nil {
		return removeAll(t.parent, t.new)
	}
	err := errors.Join(removeAll(t.merge, t.new), t.setModes())
	if t.made {
		_ = t.merge.Close() // not every system removes what is open
		_ = t.parent.Remove(t.base)
	}
	return err
}

// PutFile puts the staged file in its place. A link that is there is replaced,
// not followed.
func (t *Target) PutFile() error { return t.parent.Rename(t.new, t.base) }

// StagedName is the path of the staged file in the parent, and the parent.
func (t *Target) StagedName() (*os.Root, string) { return t.parent, t.new }

// Swap puts the staged directory in the place of the old one. If that fails the
// old one is put back. leftover says why the old one, if it was replaced, or one before
// it, could not be removed.
func (t *Target) Swap(mode fs.FileMode) (leftover, err error) {
	if err := t.parent.Chmod(t.new, mode.Perm()); err != nil {
		return nil, err
	}
	err = t.parent.Rename(t.base, t.old)
	if errors.Is(err, fs.ErrNotExist) {
		return t.left, t.parent.Rename(t.new, t.base)
	}
	if err != nil {
		return nil, err
	}
	if err := t.parent.Rename(t.new, t.base); err != nil {
		return nil, errors.Join(err, t.parent.Rename(t.old, t.base))
	}
	return errors.Join(t.left, t.retire()), nil
}

// removeAll removes a tree also if directories in it do not allow that.
func removeAll(root *os.Root, name string) error {
	if err := root.RemoveAll(name); err == nil {
		return nil
	}
	open(root, name)
	return root.RemoveAll(name)
}

// open makes directories writable, as far as it can.
func open(root *os.Root, name string) {
	if info, err := root.Lstat(name); err != nil || !info.IsDir() {
		return
	}
	_ = root.Chmod(name, 0o700)
	sub, err := openSub(root, name)
	if err != nil {
		return
	}
	defer sub.Close()
	_ = eachName(sub, func(base string) error {
		open(sub, base)
		return nil
	})
}
