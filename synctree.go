package createos

import (
	"context"
	"crypto/sha256"
	"io/fs"
	"os"
	"path"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
	"github.com/createos-lease/createos/internal/manifest"
)

// A tree is what is on one side of a mapping.
type tree struct {
	// entries have distinct names, and what lies above one is a directory among
	// them.
	entries manifest.List
	skipped manifest.List // what a source has besides, and does not travel
	skips   skips
	mode    fs.FileMode // of the top
	absent  bool        // there is no such directory
}

// close lets go of the list. It may be nil.
func (t *tree) close() {
	if t != nil {
		t.entries.Close()
		t.skipped.Close()
	}
}

// skips are what was left out: all are counted, the first are named.
type skips struct {
	total int
	first []SyncSkip
}

func (s *skips) add(name, reason string) {
	if s.total++; len(s.first) < MaxSyncSkips {
		s.first = append(s.first, SyncSkip{Path: name, Reason: reason})
	}
}

const reasonLink = "is a symbolic link that leads out of the tree"

// localTree lists a directory of this machine.
func (y *syncer) localTree(ctx context.Context, root *os.Root, m *mapping, exclude func(name string, dir bool) bool) (*tree, error) {
	info, err := root.Stat(".")
	if err != nil {
		return nil, err
	}
	var listed manifest.List
	defer listed.Close()
	target := y.plan.dir == syncOut
	o := hosttree.WalkOptions{Exclude: exclude, Limits: y.plan.limits, Target: target, Digest: m.Delta}
	if err := hosttree.Walk(ctx, root, o, listed.Add); err != nil {
		return nil, err
	}
	if err := listed.Sort(); err != nil {
		return nil, err
	}
	t := &tree{mode: info.Mode().Perm()}
	// What makes no sense here was moved while we looked.
	return t, t.fill(connected(listed.All(), archive.ErrChanged), y.plan.limits, !target)
}

// fill makes the tree of what was listed. What is to be skipped is counted. Of a
// source, links that lead out of the tree, alone or together, are skipped too. Of a
// target all links count: they may have to go.
func (t *tree) fill(listed manifest.Entries, limits manifest.Limits, source bool) error {
	links := make(archive.Links)
	if source { // they are judged together, so all must be known before
		for e, err := range listed {
			if err != nil {
				return err
			}
			if e.Kind == archive.Link && e.Skip == "" {
				links[e.Name] = e.Target
			}
		}
	}
	tally := manifest.Tally{Limits: limits}
	for e, err := range listed {
		if err == nil && source && e.Kind == archive.Link && e.Skip == "" && !links.Stays(e.Name) {
			e.Skip = reasonLink
		}
		switch {
		case err != nil:
		case e.Skip != "":
			t.skips.add(e.Name, e.Skip)
			if source {
				err = t.skipped.Add(e)
			}
		default:
			if err = tally.Count(e); err == nil {
				err = t.entries.Add(e)
			}
		}
		if err != nil {
			return err
		}
	}
	if err := t.skipped.Sort(); err != nil {
		return err
	}
	return t.entries.Sort()
}

// without goes through sorted entries, without those of the names of others and what
// lies below them.
func without(entries, others manifest.Entries) manifest.Entries {
	return func(yield func(archive.Entry, error) bool) {
		at := ""
		for p, err := range manifest.Pairs(entries, others) {
			if err != nil {
				yield(archive.Entry{}, err)
				return
			}
			if p.B != nil {
				at = p.B.Name
			}
			if p.A == nil || p.B != nil || at != "" && manifest.Below(p.A.Name, at) {
				continue
			}
			if !yield(*p.A, nil) {
				return
			}
		}
	}
}

// connected goes through a sorted list, without what is below a directory that is
// skipped. A list that names something twice, or something in a directory that it does
// not name, ends with the error bad: what is in the place of that would not be looked
// at.
func connected(listed manifest.Entries, bad error) manifest.Entries {
	return func(yield func(archive.Entry, error) bool) {
		var within []string // directories, each in the one before
		last, skipped := "", ""
		for e, err := range listed {
			if err == nil && e.Name == last {
				err = bad
			}
			last = e.Name
			switch {
			case err != nil:
			case skipped != "" && manifest.Below(e.Name, skipped):
				continue
			case e.Skip != "":
				if e.Kind == archive.Dir {
					skipped = e.Name
				}
			default:
				n := len(within)
				for n > 0 && !manifest.Below(e.Name, within[n-1]) {
					n--
				}
				within = within[:n]
				if up := path.Dir(e.Name); up != "." && (n == 0 || up != within[n-1]) {
					err = bad
				}
				if e.Kind == archive.Dir {
					within = append(within, e.Name)
				}
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// noted adds to entries what notes, sorted as well, say about those of their names. It
// refuses notes that speak of one twice.
func noted(listed, notes manifest.Entries, add func(e *archive.Entry, note archive.Entry)) manifest.Entries {
	return func(yield func(archive.Entry, error) bool) {
		last := ""
		for p, err := range manifest.Pairs(listed, notes) {
			if err != nil {
				yield(archive.Entry{}, err)
				return
			}
			if p.B != nil {
				if p.B.Name == last {
					yield(archive.Entry{}, refusedList())
					return
				}
				last = p.B.Name
			}
			if p.A == nil {
				continue
			}
			if p.B != nil {
				add(p.A, *p.B)
			}
			if !yield(*p.A, nil) {
				return
			}
		}
	}
}

// A difference is what makes one tree like another.
type difference struct {
	put *manifest.List // what is to be moved
	// What Delete removes: what stands in the way of an entry of another kind goes
	// first, the rest when all is in place.
	first, last manifest.List
	own         manifest.List // put, if it is not all of the source
	same        int           // files that need not be moved
}

// count is how much is to be done.
func (d *difference) count() int { return d.put.Len + d.removals() }

func (d *difference) removals() int { return d.first.Len + d.last.Len }

func (d *difference) lists() []*manifest.List { return []*manifest.List{&d.first, &d.last, &d.own} }

func (d *difference) close() {
	for _, l := range d.lists() {
		l.Close()
	}
}

// difference compares the source with the target, as far as the mapping asks for it.
// What was skipped in the source is there, so what the target has in its place is not
// to be removed. It is never nil, and must be closed.
func (m *mapping) difference(from, to *tree) (*difference, error) {
	d := &difference{put: &from.entries}
	if !m.Delta && !m.Delete {
		return d, nil
	}
	if m.Delta {
		d.put = &d.own
	}
	way := "" // a directory that stands in the way, with all that is below it
	for p, err := range manifest.Pairs(from.entries.All(), without(to.entries.All(), from.skipped.All())) {
		if err != nil {
			return d, err
		}
		a, b := p.A, p.B
		swapped := a != nil && b != nil && (a.Kind == archive.Dir) != (b.Kind == archive.Dir)
		inWay := b != nil && way != "" && manifest.Below(b.Name, way)
		if swapped && !inWay && b.Kind == archive.Dir {
			way = b.Name
		}
		switch {
		case !m.Delete || b == nil:
		case swapped || inWay:
			err = d.first.Add(*b)
		case a == nil:
			err = d.last.Add(*b)
		}
		switch {
		case err != nil || a == nil || !m.Delta:
		case b == nil || !m.equal(*a, *b):
			err = d.own.Add(*a)
		case a.Kind == archive.File:
			d.same++
		}
		if err != nil {
			return d, err
		}
	}
	for _, l := range d.lists() {
		if err := l.Sort(); err != nil {
			return d, err
		}
	}
	return d, nil
}

// equal says whether what is in the target need not be moved.
func (m *mapping) equal(a, b archive.Entry) bool {
	mode := a.Mode
	if a.Kind == archive.File {
		mode = m.fileMode(mode)
	}
	switch {
	case a.Kind != b.Kind:
		return false
	case a.Kind == archive.Link:
		return a.Target == b.Target
	case mode != b.Mode:
		return false
	}
	return a.Kind == archive.Dir || a.Size == b.Size && a.Sum == b.Sum && a.Sum != [sha256.Size]byte{}
}
