package createos

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
	"github.com/createos-lease/createos/internal/manifest"
)

// in moves one mapping into the sandbox. Of this driver one at a time does so to a
// target: what differs there must be the same when it is put in place.
func (y *syncer) in(ctx context.Context, m *mapping, r *SyncOperationResult) error {
	unlock, err := y.d.commits.Lock(ctx, y.sandboxKey()+"\x00"+m.remote)
	if err != nil {
		return err
	}
	defer unlock()
	if m.Kind == SyncFile {
		return y.inFile(ctx, m, r)
	}
	return y.inDir(ctx, m, r)
}

func (y *syncer) inFile(ctx context.Context, m *mapping, r *SyncOperationResult) error {
	f, info, err := hosttree.OpenFile(m.local)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // whether it changed, who reads it asks
	e := archive.Entry{
		Name: "file", Kind: archive.File, Mode: m.fileMode(info.Mode()), Size: info.Size(), ModTime: info.ModTime().Unix(),
	}
	if e.Size > y.plan.limits.Bytes {
		return ErrSyncLimit
	}
	y.phase(m, SyncScan, 0, 0)
	if m.Delta {
		same, err := y.remoteIs(ctx, m, e, f)
		if err != nil {
			return err
		}
		if same {
			r.Unchanged++
			return nil
		}
	}
	y.phase(m, SyncTransfer, 1, e.Size)
	var bg background
	n := y.number()
	err = errors.Join(y.sendFile(ctx, n, e, f, "", &bg), bg.wait())
	if err != nil {
		return err
	}
	y.phase(m, SyncCommit, 1, e.Size)
	b := guestWord("./" + path.Base(m.remote))
	body := guestDown(m.remote, false, true) + `x=$(near "` + staged(n) + `") && [ -n "$x" ] || exit 96
[ ! -L ` + b + ` ] || exit 90
[ ! -d ` + b + ` ] || exit 93
mv -f -T -- "$x" ` + b + ` || exit 96`
	if _, err := y.commit(ctx, body); err != nil {
		return err
	}
	r.Files++
	r.Bytes += e.Size
	return nil
}

// fileMode is the mode that a file gets.
func (m *mapping) fileMode(own fs.FileMode) fs.FileMode {
	if m.Mode != 0 {
		return m.Mode
	}
	return own.Perm()
}

// lockCommits keeps the syncs of this driver on one sandbox apart.
func (y *syncer) lockCommits(ctx context.Context) (unlock func(), err error) {
	return y.d.commits.Lock(ctx, y.sandboxKey())
}

func (y *syncer) sandboxKey() string { return y.l.scope.origin + "\x00" + y.l.scope.id }

// commit runs the last step of a mapping. Of a sandbox one at a time does.
func (y *syncer) commit(ctx context.Context, body string) (string, error) {
	unlock, err := y.lockCommits(ctx)
	if err != nil {
		return "", err
	}
	defer unlock()
	return y.step(ctx, body)
}

// remoteIs says whether a file of the workspace has mode and content of e.
func (y *syncer) remoteIs(ctx context.Context, m *mapping, e archive.Entry, f io.ReaderAt) (bool, error) {
	b := guestWord("./" + path.Base(m.remote))
	out, err := y.step(ctx, guestDown(m.remote, false, false)+`[ ! -L `+b+` ] || exit 90
[ -f `+b+` ] && [ -r `+b+` ] || exit 92
stat -c %a -- `+b+`; told `+b+` || exit 95`)
	if errors.Is(err, ErrSyncMissing) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	mode, told, _ := strings.Cut(out, "\n")
	there, err := toldFile("", told)
	if err != nil {
		return false, err
	}
	if mode != strconv.FormatUint(uint64(e.Mode), 8) || there.size != e.Size {
		return false, nil
	}
	s := y.newSource(io.NewSectionReader(f, 0, e.Size), newSHA256(), e.Size, 0)
	if n, err := readAll(ctx, s); err != nil {
		return false, err
	} else if n != e.Size {
		return false, archive.ErrChanged
	}
	sum, err := there.sum()
	return err == nil && sum == s.hash.text(), err
}

// staged is the scratch file that sendFile makes.
func staged(number int) string { return "$S/f." + strconv.Itoa(number) }

// sendFile uploads a file, in as many parts as it takes, and makes the scratch file
// "staged" of them. What then happens to it, in $F, is for place to say. The last
// step runs on in bg.
//
// Each part leaves the name under which it was uploaded before it is compared, as in
// claim: what an attempt that was cut off writes later is not in the file.
func (y *syncer) sendFile(ctx context.Context, number int, e archive.Entry, f *hosttree.File, place string, bg *background) error {
	limit := y.plan.maxFile
	for i, off := 0, int64(0); i == 0 || off < e.Size; i++ {
		size := min(limit, e.Size-off)
		name := fmt.Sprintf("p.%d.%d", number, i)
		src := y.newSource(io.NewSectionReader(f, off, size), y.newLarge(), size, size)
		if err := y.put(ctx, name, src, size); err != nil {
			return err
		}
		if off += size; off == e.Size {
			if err := f.Same(); err != nil {
				return err
			}
		}
		part := "$F"
		if i > 0 {
			part = "$F.more"
		}
		body := fmt.Sprintf("F=%s\nmv -T -- \"$S/%s\" \"%s\" && [ \"$(mark \"%s\")\" = '%s' ] || exit 94\n", staged(number), name, part, part, src.hash.text())
		if i > 0 {
			body += `cat <"$F.more" >>"$F" && rm -f -- "$F.more" || exit 96` + "\n"
		}
		if off == e.Size {
			body += fmt.Sprintf("[ \"$(stat -c %%s -- \"$F\")\" = %d ] || exit 94\nchmod %o -- \"$F\" && touch -d @%d -- \"$F\" || exit 96\n%s",
				e.Size, e.Mode.Perm(), e.ModTime, place)
		}
		err := bg.start(func() error {
			_, err := y.step(ctx, body)
			return err
		})
		if err != nil {
			return err
		}
		limit = min(joinPart, y.plan.maxFile)
	}
	y.meter.add(0, 1)
	return nil
}

func (y *syncer) inDir(ctx context.Context, m *mapping, r *SyncOperationResult) error {
	root, err := hosttree.OpenDir(m.local)
	if err != nil {
		return err
	}
	defer root.Close()
	y.phase(m, SyncScan, 0, 0)
	here, there, err := bothSides(ctx,
		func(ctx context.Context) (*tree, error) { return y.localTree(ctx, root, m, m.excludes) },
		func(ctx context.Context) (*tree, error) {
			if !m.Delta && !m.Delete {
				return &tree{absent: true}, nil // for all that is known
			}
			return y.remoteTree(ctx, m, true, nil)
		})
	defer here.close()
	defer there.close()
	if err != nil {
		return err
	}
	diff, err := m.difference(here, there)
	defer diff.close()
	if err != nil {
		return err
	}
	if !m.Merge || there.absent || diff.count() > 0 {
		deleted, err := y.sendTree(ctx, m, root, here.mode, diff)
		if err != nil {
			return err
		}
		r.Deleted += deleted
	}
	r.moved(diff.put)
	r.skipped(m, here.skips)
	r.Unchanged += diff.same
	return nil
}

// sendTree sends what differs and puts it in place.
func (y *syncer) sendTree(ctx context.Context, m *mapping, root *os.Root, mode fs.FileMode, diff *difference) (deleted int, err error) {
	y.phase(m, SyncTransfer, diff.put.Files, diff.put.Bytes)
	top := y.number()
	into := fmt.Sprintf(`"$S/tree.%d"`, top)
	if err := y.sendUnits(ctx, m, root, diff.put.All(), top); err != nil {
		return 0, err
	}
	// Directories keep a mode with which they can be filled, and get their own
	// from a last archive: for all in the place that is merged into, which
	// may have had others.
	dirs := manifest.Only(diff.put.All(), func(e archive.Entry) bool {
		return e.Kind == archive.Dir && (m.Merge || e.Mode&0o700 != 0o700)
	})
	modes := ""
	dest := into
	if m.Merge {
		dest = `"$Q"`
	}
	for u, err := range y.cut(dirs) {
		var text string
		if err == nil {
			text, err = y.sendPack(ctx, u, nil, dest)
		}
		if err != nil {
			return 0, err
		}
		modes += text
	}
	body := "T=" + into + "\nmkdir -p \"$T\" || exit 96\n"
	if m.Merge {
		first, err := y.deleteList(ctx, &diff.first)
		if err != nil {
			return 0, err
		}
		last, err := y.deleteList(ctx, &diff.last)
		if err != nil {
			return 0, err
		}
		body += first + "first=$f\n" + last + "last=$f\n" + guestInto(m.remote) + guestOpen +
			"L=$first\n" + guestFit + guestDelete + guestMerge + "L=$last\n" + guestDelete + "shut\n" + modes +
			fmt.Sprintf("[ -z \"$fresh\" ] || chmod %o . || exit 96\n", mode)
	} else {
		body += modes + guestDown(m.remote, false, true) + replaceBody(m.remote, mode)
	}
	y.phase(m, SyncCommit, diff.put.Files, diff.put.Bytes)
	out, err := y.commit(ctx, body)
	if err != nil {
		return 0, err
	}
	if !m.Merge {
		if out != "" {
			y.warn(&syncCause{kind: ErrSyncWrite, text: "a directory that was replaced could not be removed"})
		}
		return 0, nil
	}
	for _, n := range strings.Fields(out) { // of each guestDelete
		gone, err := strconv.Atoi(n)
		if err != nil || gone < 0 || gone > diff.removals() {
			return 0, ErrSyncStep
		}
		deleted += gone
	}
	return min(deleted, diff.removals()), nil
}

// deleteList uploads names, from the bottom up, and returns the line that makes $f the
// list of them.
func (y *syncer) deleteList(ctx context.Context, list *manifest.List) (string, error) {
	claim, err := y.putNames(ctx, "del", manifest.BottomUp(list.All()))
	if claim == "" {
		claim = "f=/dev/null\n"
	}
	return claim, err
}

// sendUnits sends what is in a tree into the scratch directory "tree." and the
// number.
func (y *syncer) sendUnits(ctx context.Context, m *mapping, root *os.Root, send manifest.Entries, top int) (err error) {
	var bg background
	defer func() { err = errors.Join(err, bg.wait()) }()
	r := hosttree.NewReader(root)
	defer r.Close()
	into := fmt.Sprintf(`"$S/tree.%d"`, top)
	for u, err := range y.cut(send) {
		if err != nil {
			return err
		}
		for i := range u.entries {
			switch e := &u.entries[i]; e.Kind {
			case archive.File:
				e.Mode = m.fileMode(e.Mode)
			case archive.Dir:
				e.Mode |= 0o700
			}
		}
		if u.large {
			err = y.sendLarge(ctx, r, u, top, &bg)
		} else {
			var body string
			if body, err = y.sendPack(ctx, u, r, into); err == nil {
				err = bg.start(func() error {
					_, err := y.step(ctx, body)
					return err
				})
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (y *syncer) sendLarge(ctx context.Context, r *hosttree.Reader, u *unit, top int, bg *background) error {
	e := u.entries[0]
	f, err := r.Open(e)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // whether it changed, who reads it asks
	dir := guestWord(path.Dir("./tree." + strconv.Itoa(top) + "/" + e.Name))
	place := "cd -- \"$S\" && { [ -d " + dir + " ] || mkdir -p -- " + dir + "; } && mv -f -T -- \"$F\" " + dir + "/" + guestWord(path.Base(e.Name)) + " || exit 96"
	return y.sendFile(ctx, u.number, e, f, place, bg)
}

// sendPack uploads an archive and returns the script that unpacks it.
func (y *syncer) sendPack(ctx context.Context, u *unit, r *hosttree.Reader, into string) (string, error) {
	s, err := archive.NewStream(u.entries, func(e archive.Entry) (io.ReadCloser, error) { return r.Open(e) })
	if err != nil {
		return "", err
	}
	defer func() { _ = s.Close() }() // it was only read from
	content, files := int64(0), 0
	for _, e := range u.entries {
		if e.Kind == archive.File {
			content += e.Size
			files++
		}
	}
	var body io.ReadSeeker = s
	size, unpack := s.Size(), `tar -xpof "$f" -C `+into
	if y.compresses() {
		small, err := squeeze(s)
		if err != nil {
			return "", hostError(err)
		}
		if small != nil {
			body, size = bytes.NewReader(small), int64(len(small))
			unpack = `gzip -dc <"$f" | tar -xpo -C ` + into + " -f -"
		}
	}
	src := y.newSource(body, newSHA256(), size, content)
	began := time.Now()
	if err := y.put(ctx, u.name(), src, size); err != nil {
		return "", err
	}
	y.timed(size, began)
	y.meter.add(0, files)
	return fmt.Sprintf("claim %s %d %s\nmkdir -p %s && %s && rm -f \"$f\" || exit 96\n",
		u.name(), size, src.hash.text(), into, unpack), nil
}

// maxSqueezed is the largest compressed archive. It is held in memory, because the
// provider wants to know its length first.
const maxSqueezed = 8 << 20

// squeeze compresses an archive, or gives nil, and the archive back from its start,
// if it stays too large or does not get smaller by much.
func squeeze(s *archive.Stream) ([]byte, error) {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		return nil, err
	}
	for err == nil && b.Len() <= maxSqueezed {
		_, err = io.CopyN(z, s, 256<<10)
	}
	if err == io.EOF {
		err = z.Close()
		if err == nil && int64(b.Len()) < s.Size()/10*9 {
			return b.Bytes(), nil
		}
	}
	_, serr := s.Seek(0, io.SeekStart)
	return nil, errors.Join(err, serr)
}

// putNames uploads a list of names, in as many parts as it takes, and returns the line
// that makes $f the list, "" if there are none. The whole is compared there, in the step
// that goes by it: half a name, or another list, would name what nobody meant.
func (y *syncer) putNames(ctx context.Context, prefix string, list manifest.Entries) (claim string, err error) {
	var text manifest.Buffer
	defer text.Close()
	h := newSHA256()
	w := bufio.NewWriter(io.MultiWriter(&text, h))
	for e, err := range list {
		if err == nil {
			_, err = fmt.Fprintf(w, "./%s\x00", e.Name)
		}
		if err != nil {
			return "", err
		}
	}
	if err := w.Flush(); err != nil || text.Size() == 0 {
		return "", err
	}
	file := prefix + "." + strconv.Itoa(y.number())
	name := file
	for off := int64(0); off < text.Size(); off += y.plan.maxFile {
		size := min(y.plan.maxFile, text.Size()-off)
		if err := y.put(ctx, name, io.NewSectionReader(&text, off, size), size); err != nil {
			return "", err
		}
		if name != file {
			if _, err := y.step(ctx, `cat <"$S/`+name+`" >>"$S/`+file+`" || exit 96`); err != nil {
				return "", err
			}
		}
		name = file + ".part"
	}
	return fmt.Sprintf("claim %s %d %s\n", file, text.Size(), h.text()), nil
}

// guestLeft is what replaceBody prints if it could not remove everything.
const guestLeft = "left"

// replaceBody puts $T in the place of a directory, from the directory above. What
// was moved aside by a step that was killed in between is put back before.
//
// What was replaced gets another name before it is removed. The removal may fail,
// because somebody writes there still, or a disk is mounted there. Then the new directory
// is in its place all the same, and what is left neither stands in the way of the next
// sync nor looks like something that is to be put back. Each sync to the target tries
// the removal again.
func replaceBody(remote string, mode fs.FileMode) string {
	return "b=" + guestWord("./"+path.Base(remote)) + " o=" + guestWord("./"+asideName(remote)) + " g=" + guestWord("./"+goneName(remote)) + fmt.Sprintf(` m=%o
if [ ! -e "$b" ] && [ ! -L "$b" ] && [ -d "$o" ]; then mv -T -- "$o" "$b" || exit 96; fi
[ ! -e "$o" ] && [ ! -L "$o" ] || mv -T -- "$o" "$g$I.$N.0" || exit 96
sweep() { for e in "$g"*; do scrap "$e" || echo %[2]s; done; }
sweep >/dev/null
[ ! -L "$b" ] || exit 90
x=$(near "$T") && [ -n "$x" ] || exit 96
if [ -e "$b" ]; then
	[ -d "$b" ] || exit 93
	mv -T -- "$b" "$o" || exit 96
	mv -T -- "$x" "$b" || { mv -T -- "$o" "$b"; exit 96; }
	chmod "$m" -- "$b"
	mv -T -- "$o" "$g$I.$N" || echo %[2]s
else
	mv -T -- "$x" "$b" && chmod "$m" -- "$b" || exit 96
fi
sweep
`, mode, guestLeft)
}

// guestInto goes to a directory that is merged into, $Q. If it was not there $fresh
// is set.
func guestInto(remote string) string {
	body := "fresh=\n"
	if remote != "." {
		base := guestWord(path.Base(remote))
		body += guestDown(remote, false, true) + "[ -d ./" + base + " ] || fresh=1\ndown 1 " + base + "\n"
	}
	return body + "Q=$PWD\n"
}

// guestOpen has the functions by which directories that their owner must not change
// are changed all the same, and get their modes back.
const guestOpen = `
open() {
	if [ -L "$Q/$1" ] || [ ! -d "$Q/$1" ]; then return; fi
	if [ -r "$Q/$1" ] && [ -w "$Q/$1" ] && [ -x "$Q/$1" ]; then return; fi
	m=$(stat -c %a -- "$Q/$1") && chmod u+rwx -- "$Q/$1" && printf '%s\0%s\0' "$m" "$1" >>"$S/open.$N"
}
shut() { # what lies below first
	[ -f "$S/open.$N" ] || return 0
	ms=() es=()
	while IFS= read -r -d '' m && IFS= read -r -d '' e; do ms+=("$m") es+=("$e"); done <"$S/open.$N"
	rm -f -- "$S/open.$N"
	for ((i = ${#es[@]} - 1; i >= 0; i--)); do
		[ -L "$Q/${es[i]}" ] || [ ! -d "$Q/${es[i]}" ] || chmod "${ms[i]}" -- "$Q/${es[i]}"
	done
}
open .
`

// guestFit looks whether all that is in $T finds its place in the directory where
// the shell is, which is $Q, when what $L names is gone: no directory may meet
// something else, and nothing else a directory. A directory of $L that holds
// something that stays will not go.
const guestFit = `
declare -A gone=()
while IFS= read -r -d '' e; do gone[$e]=1; done <"$L"
while IFS= read -r -d '' e; do
	[ -z "${gone[${e%/*}]}" ] && [ -d "$e" ] && [ ! -L "$e" ] || continue
	while IFS= read -r -d '' c; do
		[ -n "${gone[$c]}" ] || exit 93
	done < <(find "$e" -mindepth 1 -print0)
done <"$L"
cd -- "$T" || exit 96
while IFS= read -r -d '' e; do
	if [ -n "${gone[$e]}${gone[${e%/*}]}" ]; then gone[$e]=1; continue; fi
	[ ! -L "$Q/$e" ] || exit 90
	[ -d "$Q/$e" ] || [ ! -e "$Q/$e" ] || exit 93
done < <(find . -type d -print0)
while IFS= read -r -d '' e; do
	[ -z "${gone[$e]}${gone[${e%/*}]}" ] || continue
	[ -L "$Q/$e" ] || [ ! -d "$Q/$e" ] || exit 93
done < <(find . ! -type d -print0)
cd -- "$Q" || exit 96
`

// guestMerge moves what is in $T into the directory where the shell is, which
// is $Q.
const guestMerge = `
x=$(near "$T") && [ -n "$x" ] || exit 96
case $x in ./*) T=$Q/${x#./} ;; esac
cd -- "$T" || exit 96
find . -type d -print0 | while IFS= read -r -d '' e; do
	[ -d "$Q/$e" ] || mkdir -- "$Q/$e" || exit 96
	open "$e"
	cd -P -- "$Q/$e" && [ "$PWD" = "$Q${e#.}" ] || exit 90
	find "$T/$e" -mindepth 1 -maxdepth 1 ! -type d -print0 | xargs -0 -r mv -f -t . -- || exit 96
done || exit
case $x in ./*) rm -rf -- "$T" ;; esac
cd -- "$Q" || exit 96
`

// guestDelete removes what the list $L names below $Q, from the bottom up, and
// prints how much that was. A directory that is not empty stays. Whatever the list
// says, nothing outside of $Q is meant.
const guestDelete = `
at= v=() gone=0
flush() { [ ${#v[@]} -eq 0 ] || rm -f -- "${v[@]}" || exit 96; v=(); }
while IFS= read -r -d '' e; do
	case $e/ in ./?*) ;; *) exit 90 ;; esac
	case ${e#.}/ in *//* | */./* | */../*) exit 90 ;; esac
	p=${e%/*} n=./${e##*/}
	if [ "$p" != "$at" ]; then
		flush; at=
		q=. rest=${p#.}
		while rest=${rest#/}; [ -n "$rest" ]; do
			q=$q/${rest%%/*}
			open "$q"
			case $rest in */*) rest=${rest#*/} ;; *) rest= ;; esac
		done
		cd -P -- "$Q/$p" 2>/dev/null || continue
		[ "$PWD" = "$Q${p#.}" ] || exit 90
		at=$p
	fi
	if [ -d "$n" ] && [ ! -L "$n" ]; then flush; rmdir -- "$n" 2>/dev/null && gone=$((gone + 1)); continue; fi
	[ -e "$n" ] || [ -L "$n" ] || continue
	v+=("$n") gone=$((gone + 1)); [ ${#v[@]} -lt 500 ] || flush
done <"$L"
flush
echo "$gone"
cd -- "$Q" || exit 96
`
