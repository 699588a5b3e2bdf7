package hosttree

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/createos-lease/createos/internal/archive"
)

// Prefixes of the names that a target has beside it while it is replaced. The
// package that uses this one documents them.
const (
	NewPrefix = ".createos-new."
	OldPrefix = ".createos-old."
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
	merge    *os.Root
	made     bool // the directory that is merged into was not there, and is not filled yet
	// modes are those that directories of merge get at the end: what the merge
	// needs was added to them.
	modes map[string]fs.FileMode
}

// OpenTarget opens the parent of a path, which must exist, and ends what an
// earlier process that was killed left undone there: a directory that was moved
// aside is put back if nothing is in its place, and removed otherwise.
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
	t := &Target{parent: parent, base: base, new: NewPrefix + short, old: OldPrefix + short}
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
	return removeAll(t.parent, t.old)
}

// Close lets go of the target. What was staged and not put in its place must
// have been discarded.
func (t *Target) Close() {
	if t.merge != nil {
		_ = t.merge.Close()
	}
	_ = t.parent.Close()
}

// Look returns the kind of what is at a path whose parent must exist, 0 for
// nothing. It changes nothing.
func Look(name string) (archive.Kind, error) {
	parent, base, err := openParent(name)
	if err != nil {
		return 0, err
	}
	defer parent.Close()
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
// old one is put back. leftover says why the old one, if it was replaced, could
// not be removed.
func (t *Target) Swap(mode fs.FileMode) (leftover, err error) {
	if err := t.parent.Chmod(t.new, mode.Perm()); err != nil {
		return nil, err
	}
	err = t.parent.Rename(t.base, t.old)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, t.parent.Rename(t.new, t.base)
	}
	if err != nil {
		return nil, err
	}
	if err := t.parent.Rename(t.new, t.base); err != nil {
		return nil, errors.Join(err, t.parent.Rename(t.old, t.base))
	}
	return removeAll(t.parent, t.old), nil
}

// A Change is what a merge does to a directory: entries are put into it, a
// directory before its content; First is removed before, and Last after that. Mode
// is that of the directory itself, if it was not there before.
type Change struct {
	Put, First, Last []archive.Entry
	Mode             fs.FileMode
}

// Merge moves entries from where StageMerge put them into the directory, and
// removes others. Each file is replaced at once. Before anything is changed all is
// looked at: a directory must not meet something else there, a link least of all,
// nor a file a directory; and no link, new or old, may lead out of the directory by
// what changes.
//
// Links that are to be replaced or removed go before anything new comes: together
// with what is new they might lead out, if only until the end, or if the merge
// fails in between.
func (t *Target) Merge(ctx context.Context, c Change) (deleted int, err error) {
	old, err := t.replacedLinks(ctx, c)
	if err != nil {
		return 0, err
	}
	if err := t.fit(c); err != nil {
		return 0, err
	}
	if deleted, err = t.remove(c.First); err != nil {
		return deleted, err
	}
	links, last := apart(c.Last)
	n, err := t.remove(links)
	if deleted += n; err != nil {
		return deleted, err
	}
	if _, err := t.remove(old); err != nil {
		return deleted, err
	}
	if err := t.put(c.Put); err != nil {
		return deleted, err
	}
	n, err = t.remove(last)
	if deleted += n; err != nil {
		return deleted, err
	}
	if err := removeAll(t.merge, t.new); err != nil { // which the modes may not allow
		return deleted, err
	}
	for _, e := range c.Put {
		if e.Kind == archive.Dir {
			t.modes[e.Name] = e.Mode.Perm()
		}
	}
	if t.made {
		t.modes["."] = c.Mode.Perm()
		t.made = false
	}
	return deleted, t.setModes()
}

// unlock adds permissions of the owner to a directory, base in root, if they are
// missing, until the modes are set.
func (t *Target) unlock(root *os.Root, base, name string, need fs.FileMode) {
	info, err := root.Lstat(base)
	if err != nil || !info.IsDir() || info.Mode()&need == need {
		return
	}
	// If it does not work what needs it fails.
	if err := root.Chmod(base, info.Mode()|need); err != nil {
		return
	}
	if _, twice := t.modes[name]; !twice {
		t.modes[name] = info.Mode()
	}
}

// setModes gives directories the modes that they are to have, from below: what lies
// below must still be reachable.
func (t *Target) setModes() error {
	var failed error
	names := slices.Sorted(maps.Keys(t.modes))
	names = slices.DeleteFunc(names, func(name string) bool { return name == "." })
	slices.Reverse(names)
	for _, name := range append(names, ".") {
		mode, set := t.modes[name]
		if !set {
			continue
		}
		err := t.merge.Chmod(filepath.FromSlash(name), mode)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = errors.Join(failed, err)
		}
	}
	clear(t.modes)
	return failed
}

// apart separates links from the rest.
func apart(entries []archive.Entry) (links, rest []archive.Entry) {
	for _, e := range entries {
		if e.Kind == archive.Link {
			links = append(links, e)
		} else {
			rest = append(rest, e)
		}
	}
	return links, rest
}

// replacedLinks judges the links that there will be, and returns those that are
// to be replaced by something else.
func (t *Target) replacedLinks(ctx context.Context, c Change) (old []archive.Entry, err error) {
	before := make(archive.Links)
	if err := t.links(ctx, t.merge, ".", before); err != nil {
		return nil, err
	}
	after := maps.Clone(before)
	for _, list := range [][]archive.Entry{c.First, c.Last, c.Put} {
		for _, e := range list {
			delete(after, e.Name)
		}
	}
	for _, e := range c.Put {
		if e.Kind == archive.Link {
			after[e.Name] = e.Target
		}
		if target, is := before[e.Name]; is && e.Kind != archive.Dir && after[e.Name] != target {
			old = append(old, archive.Entry{Name: e.Name, Kind: archive.Link})
		}
	}
	if name := after.Harm(before); name != "" {
		return nil, &archive.RefusedError{Name: name, Reason: "a symbolic link of the target would lead out of it"}
	}
	return old, nil
}

// links adds all links below a directory, except for what is staged.
func (t *Target) links(ctx context.Context, root *os.Root, at string, into archive.Links) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	names, err := namesIn(root)
	if err != nil {
		return err
	}
	for _, base := range names {
		name := path.Join(at, base)
		if name == t.new {
			continue
		}
		info, err := root.Lstat(base)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		case info.Mode()&fs.ModeSymlink != 0:
			if into[name], err = root.Readlink(base); err != nil {
				return err
			}
		case info.IsDir():
			t.unlock(root, base, name, 0o500)
			sub, err := openSub(root, base)
			if errors.Is(err, fs.ErrPermission) {
				continue // it is another user's
			}
			if err != nil {
				return err
			}
			err = t.links(ctx, sub, name, into)
			_ = sub.Close()
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *Target) put(entries []archive.Entry) error {
	at := ""
	for _, e := range entries {
		t.unlockParent(e.Name, &at)
		name := filepath.FromSlash(e.Name)
		var err error
		if e.Kind == archive.Dir {
			if err = t.merge.Mkdir(name, 0o700); errors.Is(err, fs.ErrExist) {
				err = nil
			}
		} else {
			err = t.merge.Rename(filepath.Join(t.new, name), name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unlockParent lets the directory of a name be changed. at is the last one.
func (t *Target) unlockParent(name string, at *string) {
	if dir := path.Dir(name); dir != *at {
		t.unlock(t.merge, filepath.FromSlash(dir), dir, 0o700)
		*at = dir
	}
}

// fit looks whether all that is put into the directory finds its place, when what is
// in the way is gone. A directory in the way that holds something that stays, such
// as what was excluded, will not go.
func (t *Target) fit(c Change) error {
	gone := make(map[string]bool, len(c.First))
	for _, e := range c.First {
		gone[e.Name] = true
	}
	for _, e := range c.First {
		if e.Kind != archive.Dir {
			continue
		}
		sub, err := openSub(t.merge, filepath.FromSlash(e.Name))
		if err != nil {
			return err
		}
		names, err := namesIn(sub)
		_ = sub.Close()
		if err != nil {
			return err
		}
		for _, base := range names {
			if !gone[path.Join(e.Name, base)] {
				return ErrNotFile
			}
		}
	}
	for _, e := range c.Put {
		if gone[e.Name] || gone[path.Dir(e.Name)] {
			gone[e.Name] = true // nothing will be there, nor below it
			continue
		}
		if err := t.fits(e); err != nil {
			return err
		}
	}
	return nil
}

func (t *Target) fits(e archive.Entry) error {
	info, err := t.merge.Lstat(filepath.FromSlash(e.Name))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case e.Kind == archive.Dir && info.Mode()&fs.ModeSymlink != 0:
		return ErrIsLink
	case e.Kind == archive.Dir && !info.IsDir():
		return ErrNotDir
	case e.Kind != archive.Dir && info.IsDir():
		return ErrNotFile
	}
	return nil
}

// remove removes entries from the merged directory, what lies below before what
// lies above. A directory that is not empty stays.
func (t *Target) remove(names []archive.Entry) (deleted int, err error) {
	at := ""
	for i := len(names) - 1; i >= 0; i-- {
		e := names[i]
		t.unlockParent(e.Name, &at)
		switch err := t.merge.Remove(filepath.FromSlash(e.Name)); {
		case err == nil:
			delete(t.modes, e.Name)
			deleted++
		case errors.Is(err, fs.ErrNotExist), e.Kind == archive.Dir:
		default:
			return deleted, err
		}
	}
	return deleted, nil
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
	list, err := fs.ReadDir(sub.FS(), ".")
	if err != nil {
		return
	}
	for _, d := range list {
		if d.IsDir() {
			open(sub, d.Name())
		}
	}
}
