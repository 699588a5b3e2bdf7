package hosttree

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/manifest"
)

// A Change is what a merge does to a directory, in sorted lists: entries are put into
// it; First is removed before, and Last after that. Mode is that of the directory
// itself, if it was not there before.
type Change struct {
	Put, First, Last *manifest.List
	Mode             fs.FileMode
}

// Merge moves entries from where StageMerge put them into the directory, and
// removes others. Each file is replaced at once. Before anything is changed all is
// looked at: a directory must not meet something else there, a link least of all,
// nor a file a directory; and no link, new or old, may lead out of the directory by
// what changes. A directory that becomes a link meanwhile is not followed: every way
// is gone step by step. Only a rename cannot be done like that; it is looked at after.
//
// Links that are to be replaced or removed go before anything new comes: together
// with what is new they might lead out, if only until the end, or if the merge
// fails in between.
//
// What is held in memory of it all are the links, and the directories that must be
// made writable while it lasts.
func (t *Target) Merge(ctx context.Context, c Change) (deleted int, err error) {
	old, err := t.replacedLinks(ctx, c)
	if err != nil {
		return 0, err
	}
	if err := t.fit(c); err != nil {
		return 0, err
	}
	isLink := func(e archive.Entry) bool { return e.Kind == archive.Link }
	for _, gone := range []manifest.Entries{c.First.All(), manifest.Only(c.Last.All(), isLink)} {
		n, err := t.remove(gone)
		if deleted += n; err != nil {
			return deleted, err
		}
	}
	if _, err := t.remove(each(old)); err != nil {
		return deleted, err
	}
	if err := t.put(c.Put.All()); err != nil {
		return deleted, err
	}
	n, err := t.remove(manifest.Only(c.Last.All(), func(e archive.Entry) bool { return !isLink(e) }))
	if deleted += n; err != nil {
		return deleted, err
	}
	if err := removeAll(t.merge, t.new); err != nil { // which the modes may not allow
		return deleted, err
	}
	if t.made {
		t.modes["."] = c.Mode.Perm()
		t.made = false
	}
	return deleted, errors.Join(t.dirModes(c.Put.All()), t.setModes())
}

// each goes through entries.
func each(entries []archive.Entry) manifest.Entries {
	return func(yield func(archive.Entry, error) bool) {
		for _, e := range entries {
			if !yield(e, nil) {
				return
			}
		}
	}
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

// dirModes gives directories that were put their modes, but for those that would
// keep others from getting theirs: these are left to setModes.
func (t *Target) dirModes(put manifest.Entries) (failed error) {
	for e, err := range put {
		switch {
		case err != nil:
			return errors.Join(failed, err)
		case e.Kind != archive.Dir:
		case e.Mode&0o700 != 0o700:
			t.modes[e.Name] = e.Mode.Perm()
		default:
			delete(t.modes, e.Name)
			failed = errors.Join(failed, t.chmod(e.Name, e.Mode.Perm()))
		}
	}
	return failed
}

// setModes gives directories the modes that they are to have, from below: what lies
// below must still be reachable.
func (t *Target) setModes() (failed error) {
	names := slices.SortedFunc(maps.Keys(t.modes), func(a, b string) int {
		switch {
		case a == b:
			return 0
		case a == ".":
			return 1
		case b == ".":
			return -1
		}
		return manifest.Compare(b, a)
	})
	for _, name := range names {
		failed = errors.Join(failed, t.chmod(name, t.modes[name]))
	}
	t.dirs.close()
	clear(t.modes)
	return failed
}

// chmod gives a directory a mode, if it is still there.
func (t *Target) chmod(name string, mode fs.FileMode) error {
	dir, err := t.dirs.of(name)
	if err == nil {
		err = dir.Chmod(".", mode)
	}
	return ignoreAbsent(err)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// replacedLinks judges the links that there will be, and returns those that are
// to be replaced by something else.
func (t *Target) replacedLinks(ctx context.Context, c Change) (old []archive.Entry, err error) {
	before := make(archive.Links)
	if err := t.links(ctx, t.merge, ".", before); err != nil {
		return nil, err
	}
	after := maps.Clone(before)
	for _, list := range []*manifest.List{c.First, c.Last, c.Put} {
		for e, err := range list.All() {
			if err != nil {
				return nil, err
			}
			delete(after, e.Name)
		}
	}
	for e, err := range c.Put.All() {
		if err != nil {
			return nil, err
		}
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
	return eachName(root, func(base string) error {
		name := path.Join(at, base)
		if name == t.new {
			return nil
		}
		info, err := root.Lstat(base)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case info.Mode()&fs.ModeSymlink != 0:
			into[name], err = root.Readlink(base)
			return err
		case !info.IsDir():
			return nil
		}
		t.unlock(root, base, name, 0o500)
		sub, err := openSub(root, base)
		if errors.Is(err, fs.ErrPermission) {
			return nil // it is another user's
		}
		if err != nil {
			return err
		}
		defer func() { _ = sub.Close() }()
		return t.links(ctx, sub, name, into)
	})
}

func (t *Target) put(entries manifest.Entries) error {
	t.dirs.close()
	for e, err := range entries {
		if err != nil {
			return err
		}
		dir, err := t.writable(path.Dir(e.Name))
		if err != nil {
			return err
		}
		if e.Kind == archive.Dir {
			if err = dir.Mkdir(path.Base(e.Name), 0o700); errors.Is(err, fs.ErrExist) {
				err = nil
			}
		} else {
			err = t.place(dir, e.Name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// place moves what was staged to its place in dir.
func (t *Target) place(dir *os.Root, name string) error {
	local := filepath.FromSlash(name)
	from := filepath.Join(t.new, local)
	staged, err := t.merge.Lstat(from)
	if err != nil {
		return err
	}
	if err := t.merge.Rename(from, local); err != nil {
		return err
	}
	got, err := dir.Lstat(path.Base(name))
	if err == nil && !os.SameFile(staged, got) {
		err = ErrIsLink
	}
	return err
}

// writable opens a directory that is to be changed.
func (t *Target) writable(name string) (*os.Root, error) {
	if t.dirs.dir != nil && t.dirs.at == name {
		return t.dirs.dir, nil
	}
	if name != "." {
		up, err := t.dirs.of(path.Dir(name))
		if err != nil {
			return nil, err
		}
		t.unlock(up, path.Base(name), name, 0o700)
	}
	return t.dirs.of(name)
}

// fit looks whether all that is put into the directory finds its place, when what is
// in the way is gone, and whether the ways to what is removed lead through no link.
func (t *Target) fit(c Change) error {
	t.dirs.close()
	if err := t.empties(c.First); err != nil {
		return err
	}
	for e, err := range c.Last.All() {
		if err == nil {
			_, err = t.dirs.of(path.Dir(e.Name))
		}
		if ignoreAbsent(err) != nil {
			return err
		}
	}
	free := "" // where nothing will be, nor below it
	for p, err := range manifest.Pairs(c.Put.All(), c.First.All()) {
		switch {
		case err != nil:
			return err
		case p.A == nil || free != "" && manifest.Below(p.A.Name, free):
		case p.B != nil:
			free = p.A.Name
		default:
			if err := t.fits(*p.A); err != nil {
				return err
			}
		}
	}
	return nil
}

// empties looks whether directories that are to be removed hold nothing else: one
// that holds something that stays, such as what was excluded, will not go.
func (t *Target) empties(first *manifest.List) error {
	type dir struct {
		name  string
		known int // of what is in it, so many entries are removed
	}
	var within []dir
	leave := func(name string) error {
		for n := len(within) - 1; n >= 0 && !manifest.Below(name, within[n].name); n-- {
			if err := t.holds(within[n].name, within[n].known); err != nil {
				return err
			}
			within = within[:n]
		}
		return nil
	}
	for e, err := range first.All() {
		if err == nil {
			err = leave(e.Name)
		}
		if err != nil {
			return err
		}
		switch there, err := t.lstat(e.Name); {
		case err != nil:
			return err
		case there == nil: // it went away, and does not count
			continue
		}
		if n := len(within); n > 0 && path.Dir(e.Name) == within[n-1].name {
			within[n-1].known++
		}
		if e.Kind == archive.Dir {
			within = append(within, dir{name: e.Name})
		}
	}
	return leave("")
}

// holds returns ErrNotFile if a directory holds more than so many entries.
func (t *Target) holds(name string, most int) error {
	dir, err := t.dirs.of(name)
	if err != nil {
		return err
	}
	return eachName(dir, func(string) error {
		if most--; most < 0 {
			return ErrNotFile
		}
		return nil
	})
}

// lstat looks at what is there, nil for nothing.
func (t *Target) lstat(name string) (info fs.FileInfo, err error) {
	dir, err := t.dirs.of(path.Dir(name))
	if err == nil {
		info, err = dir.Lstat(path.Base(name))
	}
	return info, ignoreAbsent(err)
}

func (t *Target) fits(e archive.Entry) error {
	info, err := t.lstat(e.Name)
	switch {
	case err != nil || info == nil:
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
func (t *Target) remove(entries manifest.Entries) (deleted int, err error) {
	t.dirs.close()
	for e, err := range manifest.BottomUp(entries) {
		if err != nil {
			return deleted, err
		}
		if t.dirs.at == e.Name {
			t.dirs.close() // not every system removes what is open
		}
		dir, err := t.writable(path.Dir(e.Name))
		if err == nil {
			err = dir.Remove(path.Base(e.Name))
		}
		switch {
		case err == nil:
			delete(t.modes, e.Name)
			deleted++
		case errors.Is(err, fs.ErrNotExist):
		case e.Kind == archive.Dir && !errors.Is(err, ErrIsLink):
		default:
			return deleted, err
		}
	}
	return deleted, nil
}
