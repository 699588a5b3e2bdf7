package hosttree

import (
	"context"
	"errors"
	"io/fs"
	"iter"
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
// what changes.
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
	for _, gone := range []iter.Seq2[archive.Entry, error]{c.First.All(), manifest.Only(c.Last.All(), isLink)} {
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
func each(entries []archive.Entry) iter.Seq2[archive.Entry, error] {
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
func (t *Target) dirModes(put iter.Seq2[archive.Entry, error]) error {
	for e, err := range put {
		switch {
		case err != nil:
			return err
		case e.Kind != archive.Dir:
		case e.Mode&0o700 != 0o700:
			t.modes[e.Name] = e.Mode.Perm()
		default:
			delete(t.modes, e.Name)
			if err := t.merge.Chmod(filepath.FromSlash(e.Name), e.Mode.Perm()); err != nil {
				return err
			}
		}
	}
	return nil
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

func (t *Target) put(entries iter.Seq2[archive.Entry, error]) error {
	at := ""
	for e, err := range entries {
		if err != nil {
			return err
		}
		t.unlockParent(e.Name, &at)
		name := filepath.FromSlash(e.Name)
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
// in the way is gone.
func (t *Target) fit(c Change) error {
	if err := t.empties(c.First); err != nil {
		return err
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
		known int // children that are removed
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
	sub, err := openSub(t.merge, filepath.FromSlash(name))
	if err != nil {
		return err
	}
	defer func() { _ = sub.Close() }()
	return eachName(sub, func(string) error {
		if most--; most < 0 {
			return ErrNotFile
		}
		return nil
	})
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
func (t *Target) remove(entries iter.Seq2[archive.Entry, error]) (deleted int, err error) {
	at := ""
	for e, err := range manifest.BottomUp(entries) {
		if err != nil {
			return deleted, err
		}
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
