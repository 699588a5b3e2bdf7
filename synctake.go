package createos

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
)

// takeTree fetches entries and puts them in place.
func (y *syncer) takeTree(ctx context.Context, m *mapping, t *hosttree.Target, take []archive.Entry, remove removal, from *tree, followed []archive.Entry) (deleted int, err error) {
	stage := t.StageDir
	if m.Merge {
		stage = t.StageMerge
	}
	root, err := stage()
	if err != nil {
		return 0, err
	}
	defer root.Close()
	to := archive.NewTree(root, y.plan.limits)
	defer to.Close()
	to.FileMode = m.Mode
	if err := y.takeEntries(ctx, m, to, take, followed); err != nil {
		return 0, err
	}
	y.phase(m, SyncCommit, take)
	if err := to.MakeLinks(); err != nil {
		return 0, err
	}
	if m.Merge {
		return t.Merge(ctx, hosttree.Change{Put: take, First: remove.first, Last: remove.last, Mode: fs.FileMode(from.mode)})
	}
	if err := to.SetModes(); err != nil {
		return 0, err
	}
	left, err := t.Swap(fs.FileMode(from.mode))
	if left != nil {
		y.warn(left)
	}
	return 0, err
}

// takeEntries makes directories and notes links from the list, and fetches the
// files.
func (y *syncer) takeEntries(ctx context.Context, m *mapping, to *archive.Tree, take, followed []archive.Entry) error {
	links := make(map[string]bool, len(followed))
	for _, e := range followed {
		links[e.Name] = true
	}
	for _, e := range take {
		if e.Kind != archive.File {
			if err := to.Put(e); err != nil {
				return err
			}
		}
	}
	files := func(behind bool) iter.Seq[archive.Entry] {
		return func(yield func(archive.Entry) bool) {
			for _, e := range take {
				if e.Kind == archive.File && links[e.Name] == behind && !yield(e) {
					return
				}
			}
		}
	}
	units := slices.AppendSeq(slices.Collect(y.cut(files(false), false)), y.cut(files(true), true))
	names, err := y.nameUnits(ctx, units)
	if err != nil {
		return err
	}
	return y.takeUnits(ctx, m, to, units, names)
}

// nameUnits uploads the names of the files in archives. Each archive takes its
// own out of the list.
func (y *syncer) nameUnits(ctx context.Context, units []*unit) (file string, err error) {
	total := 0
	for _, u := range units {
		if !u.large {
			u.first = total
			total += len(u.entries)
		}
	}
	if total == 0 {
		return "", nil
	}
	file = "names." + strconv.Itoa(y.number())
	return file, y.putNames(ctx, file, func(yield func(archive.Entry) bool) {
		for _, u := range units {
			for _, e := range u.entries {
				if !u.large && !yield(e) {
					return
				}
			}
		}
	})
}

// takeUnits fetches one unit after the other. While one is fetched, a step in the
// sandbox makes its digest, if it is a large file, and the next unit ready.
func (y *syncer) takeUnits(ctx context.Context, m *mapping, to *archive.Tree, units []*unit, names string) error {
	next := y.launch(ctx, y.prepare(m, units, 0, names))
	defer func() { _, _ = next.wait() }()
	for i, u := range units {
		out, err := next.wait()
		if err != nil {
			return err
		}
		if i > 0 && units[i-1].large {
			_, out, _ = strings.Cut(out, "\n") // its digest
		}
		p, err := y.readUnit(u, out)
		if err != nil {
			return err
		}
		next = y.launch(ctx, y.prepare(m, units, i+1, names))
		if u.large {
			p.file.sum = next.mark
			err = y.takeLarge(ctx, to, u, p)
		} else {
			err = y.takePack(ctx, to, u, p)
		}
		if err != nil {
			return err
		}
	}
	_, err := next.wait()
	return err
}

// guestPack makes an archive of %[2]d names up to number %[1]d. Directories on
// the way to them are looked at: a link there would lead to another file.
const guestPack = `
head -z -n %[1]d "$S/%[3]s" | tail -z -n %[2]d >"$S/%[4]s.n" || exit 95
at=
while IFS= read -r -d '' e; do
	p=${e%%/*}
	[ "$p" != "$at" ] || continue
	q=.
	at=$p
	IFS=/ read -r -d '' -a parts < <(printf '%%s\0' "${p#.}")
	for c in "${parts[@]}"; do
		[ -n "$c" ] || continue
		q=$q/$c
		[ ! -L "$q" ] || exit 90
	done
done <"$S/%[4]s.n"
`

const guestTar = `
tar --no-unquote --null --no-recursion --hard-dereference %[2]s -T "$S/%[1]s.n" -cf - | %[3]s >"$S/%[1]s" || exit 95
rm -f "$S/%[1]s.n"
told "$S/%[1]s"
`

// guestBehind looks where links lead once more, before they are followed.
const guestBehind = `
while IFS= read -r -d '' e; do
	t=$(readlink -f -- "$e" && printf x) && [ -f "$e" ] || exit 95
	case $t in "$R"/.paperclip-runtime/*) exit 90 ;; "$R"/*) ;; *) exit 90 ;; esac
done <"$S/%[1]s.n"
`

// prepare is the step that is taken while unit i-1 is fetched: its digest, if it
// is a large file, and all that makes unit i ready. The archive of the one
// before is removed.
func (y *syncer) prepare(m *mapping, units []*unit, i int, names string) string {
	body := ""
	if i > 0 && units[i-1].large {
		body += markBody(units[i-1].number)
	}
	if i > 1 {
		body += `rm -f "$S/` + units[i-2].name() + "\"\n"
	}
	if i == len(units) {
		return body
	}
	u := units[i]
	if u.large {
		return body + pinBody(u.number, path.Join(m.remote, u.entries[0].Name))
	}
	name := u.name()
	body += guestDown(m.remote, true, false) + fmt.Sprintf(guestPack, u.first+len(u.entries), len(u.entries), names, name)
	option := ""
	if u.follow {
		option = "-h"
		body += fmt.Sprintf(guestBehind, name)
	}
	filter := "cat"
	if u.gzip = y.compresses(); u.gzip {
		filter = "gzip -1"
	}
	return body + fmt.Sprintf(guestTar, name, option, filter)
}

// readUnit reads what prepare printed about a unit.
func (y *syncer) readUnit(u *unit, out string) (ready, error) {
	if u.large {
		return y.readPin(u.number, out)
	}
	f, err := toldFile(u.name(), out)
	if err == nil && f.size > u.packed() {
		err = ErrSyncChanged // a file grew, or it is a lie
	}
	return ready{file: f}, err
}

// packed is the most that the sandbox can make of a unit: tar may take a header
// more for a long name, and one for a time, and fills up the last record; gzip
// adds a little to what it cannot compress.
func (u *unit) packed() int64 {
	const headers, record = 5 * 512, 20 * 512
	size := int64(2 * record)
	for _, e := range u.entries {
		size += headers + int64(len(e.Name)) + e.Size
	}
	if u.gzip {
		size += size/1000 + 1024
	}
	return size
}

// takeLarge fetches one file into the tree.
func (y *syncer) takeLarge(ctx context.Context, to *archive.Tree, u *unit, p ready) error {
	e := u.entries[0]
	if p.file.size != e.Size {
		return ErrSyncChanged
	}
	e.Mode, e.ModTime = p.mode, p.at
	added := false
	back := func() {}
	err := y.fetchPinned(ctx, u.number, p, func(r io.Reader) error {
		back()
		back = y.counted(to)
		var err error
		if added {
			err = to.Drop(e)
		}
		if err == nil {
			err = to.AddFile(e, r)
		}
		added = err == nil
		return err
	})
	if err != nil {
		back()
	}
	return err
}

// takePack fetches an archive into the tree. Only what was asked for may be in
// it, and all of that must be.
func (y *syncer) takePack(ctx context.Context, to *archive.Tree, u *unit, p ready) error {
	asked := make(map[string]int64, len(u.entries))
	for _, e := range u.entries {
		asked[e.Name] = e.Size
	}
	var got []archive.Entry
	to.Admit = func(e archive.Entry) string {
		size, ok := asked[e.Name]
		if !ok || e.Kind != archive.File {
			return "was not asked for"
		}
		if size != e.Size {
			return reasonChanged
		}
		got = append(got, e)
		return ""
	}
	defer func() { to.Admit = nil }()
	began := time.Now()
	back := func() {}
	err := y.fetch(ctx, p.file, func(r io.Reader) (err error) {
		back()
		back = y.counted(to)
		err = to.Drop(got...)
		got = nil
		if err == nil {
			err = addArchive(to, r, u)
		}
		if err != nil {
			got = nil
		}
		return err
	})
	if err != nil {
		back()
	}
	y.timed(p.file.size, began)
	var refused *archive.RefusedError
	switch {
	case errors.As(err, &refused) && refused.Reason == reasonChanged:
		return ErrSyncChanged
	case err == nil && len(got) != len(asked):
		return &syncCause{kind: ErrSyncRefused, text: "files that were asked for are missing"}
	}
	return err
}

// addArchive adds an archive that may be compressed. What it grows to is bounded
// by what was asked for.
func addArchive(to *archive.Tree, r io.Reader, u *unit) error {
	if !u.gzip {
		return to.Add(r)
	}
	z, err := gzip.NewReader(r)
	if err == nil {
		err = to.Add(io.LimitReader(z, u.packed()))
	}
	if errors.Is(err, gzip.ErrHeader) || errors.Is(err, gzip.ErrChecksum) {
		err = &archive.RefusedError{Reason: "is not compressed as was asked for"}
	}
	return err
}

const reasonChanged = "is of another size than before"

// counted counts what is written to the tree from now on. back takes that back: an
// attempt may fail after all of it was written.
func (y *syncer) counted(to *archive.Tree) (back func()) {
	var bytes int64
	var files int
	to.Progress = func(b int64, f int) {
		bytes += b
		files += f
		y.meter.add(b, f)
	}
	return func() { y.meter.add(-bytes, -files) }
}
