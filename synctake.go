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
	"strings"
	"time"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
	"github.com/createos-lease/createos/internal/manifest"
)

// takeTree fetches what differs and puts it in place.
func (y *syncer) takeTree(ctx context.Context, m *mapping, t *hosttree.Target, mode fs.FileMode, diff *difference) (deleted int, err error) {
	y.phase(m, SyncTransfer, diff.put.Files, diff.put.Bytes)
	stage := t.StageDir
	if m.Merge {
		stage = t.StageMerge
	}
	root, err := stage()
	if err != nil {
		return 0, err
	}
	defer root.Close()
	to := archive.NewTree(root)
	defer to.Close()
	to.FileMode = m.Mode
	if err := y.takeEntries(ctx, m, to, diff.put); err != nil {
		return 0, err
	}
	to.Close()
	y.phase(m, SyncCommit, diff.put.Files, diff.put.Bytes)
	if m.Merge {
		return t.Merge(ctx, hosttree.Change{Put: diff.put, First: &diff.first, Last: &diff.last, Mode: mode})
	}
	// What lies below comes first: it must still be reachable.
	if err := eachOf(manifest.BottomUp(diff.put.All()), archive.Dir, to.SetMode); err != nil {
		return 0, err
	}
	left, err := t.Swap(mode)
	if left != nil {
		y.warn(left)
	}
	return 0, err
}

// eachOf calls f with the entries of a kind.
func eachOf(list manifest.Entries, kind archive.Kind, f func(archive.Entry) error) error {
	for e, err := range list {
		if err == nil && e.Kind == kind {
			err = f(e)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// takeEntries makes directories, fetches the files, and makes the links.
func (y *syncer) takeEntries(ctx context.Context, m *mapping, to *archive.Tree, put *manifest.List) error {
	if err := eachOf(put.All(), archive.Dir, to.MakeDir); err != nil {
		return err
	}
	files := func(yield func(archive.Entry, error) bool) { // those behind links in archives of their own
		for _, behind := range []bool{false, true} {
			for e, err := range put.All() {
				if (err != nil || e.Kind == archive.File && e.Followed == behind) && !yield(e, err) {
					return
				}
			}
		}
	}
	// Each archive takes its own names out of the list.
	packed := func(e archive.Entry) bool { return !y.large(e) }
	claim, err := y.putNames(ctx, "names", manifest.Only(files, packed))
	if err == nil {
		err = y.takeUnits(ctx, m, to, files, claim)
	}
	if err != nil {
		return err
	}
	return eachOf(put.All(), archive.Link, to.MakeLink)
}

// takeUnits fetches one unit after the other. While one is fetched, a step in the
// sandbox makes its digest, if it is a large file, and the next unit ready. The first
// step claims the list of names.
func (y *syncer) takeUnits(ctx context.Context, m *mapping, to *archive.Tree, files manifest.Entries, claim string) error {
	more, stop := iter.Pull2(y.cut(files))
	defer stop()
	var before, u *unit
	next, err, _ := more()
	if err != nil {
		return err
	}
	ready := y.launch(ctx, claimNames(claim)+y.prepare(m, nil, nil, next))
	defer func() { _, _ = ready.wait() }()
	for next != nil {
		before, u = u, next
		out, err := ready.wait()
		if err != nil {
			return err
		}
		if before != nil && before.large {
			_, out, _ = strings.Cut(out, "\n") // its digest
		}
		p, err := y.readUnit(u, out)
		if err != nil {
			return err
		}
		if next, err, _ = more(); err != nil {
			return err
		}
		ready = y.launch(ctx, y.prepare(m, before, u, next))
		if u.large {
			p.file.sum = ready.mark
			err = y.takeLarge(ctx, to, u, p)
		} else {
			err = y.takePack(ctx, to, u, p)
		}
		if err != nil {
			return err
		}
	}
	_, err = ready.wait()
	return err
}

// claimNames keeps the list of names where guestPack looks for it.
func claimNames(claim string) string {
	if claim == "" {
		return ""
	}
	return claim + `mv -f -T -- "$f" "$S/pack" || exit 96` + "\n"
}

// guestPack makes an archive of %[2]d names up to number %[1]d. Directories on
// the way to them are looked at: a link there would lead to another file.
const guestPack = `
head -z -n %[1]d "$S/pack" | tail -z -n %[2]d >"$S/%[3]s.n" || exit 95
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
done <"$S/%[3]s.n"
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

// prepare is the step that is taken while unit u is fetched: its digest, if it is a
// large file, and all that makes the next one ready. The archive of the one before is
// removed. Each may be nil.
func (y *syncer) prepare(m *mapping, before, u, next *unit) string {
	body := ""
	if u != nil && u.large {
		body += markBody(u.number)
	}
	if before != nil {
		body += `rm -f "$S/` + before.name() + "\"\n"
	}
	if next == nil {
		return body
	}
	if next.large {
		return body + pinBody(next.number, path.Join(m.remote, next.entries[0].Name))
	}
	name := next.name()
	body += guestDown(m.remote, true, false) + fmt.Sprintf(guestPack, next.first+len(next.entries), len(next.entries), name)
	option := ""
	if next.follow {
		option = "-h"
		body += fmt.Sprintf(guestBehind, name)
	}
	filter := "cat"
	if next.gzip = y.compresses(); next.gzip {
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
			err = to.Remove(e)
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

// takePack fetches an archive into the tree.
func (y *syncer) takePack(ctx context.Context, to *archive.Tree, u *unit, p ready) error {
	began := time.Now()
	added := false
	back := func() {}
	err := y.fetch(ctx, p.file, func(r io.Reader) (err error) {
		back()
		back = y.counted(to)
		if added {
			err = to.Remove(u.entries...)
		}
		if err == nil {
			err = addArchive(to, r, u)
		}
		added = err == nil
		return err
	})
	if err != nil {
		back()
	}
	y.timed(p.file.size, began)
	return err
}

// addArchive adds an archive that may be compressed. What it grows to is bounded
// by what was asked for.
func addArchive(to *archive.Tree, r io.Reader, u *unit) error {
	if !u.gzip {
		return to.Extract(r, u.entries)
	}
	z, err := gzip.NewReader(r)
	if err == nil {
		err = to.Extract(io.LimitReader(z, u.packed()), u.entries)
	}
	if errors.Is(err, gzip.ErrHeader) || errors.Is(err, gzip.ErrChecksum) {
		err = &archive.RefusedError{Reason: "is not compressed as was asked for"}
	}
	return err
}

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
