package createos

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
)

// guestList lists the directory where the shell is, in records of fields that end
// in NUL, so that a name may be anything. Digests come in a list of their own.
const guestList = `
[ -r . ] || exit 96
{ stat -c %%a . && find . -mindepth 1 %[2]s -printf '%%y\0%%m\0%%s\0%%T@\0%%l\0%%P\0'; } >"$S/list.%[1]d" || exit 95
told "$S/list.%[1]d"
`

const guestSums = `
{ find . -mindepth 1 %[2]s -type f -readable -print0 | xargs -0 -r sha256sum -z --; } >"$S/sums.%[1]d" || exit 95
told "$S/sums.%[1]d"
`

// guestFollow lists what links to files within the workspace lead to.
const guestFollow = `
find . -mindepth 1 %[2]s -type l -print0 | while IFS= read -r -d '' e; do
	t=$(readlink -f -- "$e" && printf x) && [ -f "$e" ] || continue
	case $t in "$R"/.paperclip-runtime/*) ;; "$R"/*) stat -L --printf 'f\0%%a\0%%s\0%%Y\0\0' -- "$e" && printf '%%s\0' "${e#./}" || exit 95 ;; esac
done >"$S/follow.%[1]d" || exit 95
told "$S/follow.%[1]d"
`

// listLimit bounds the lists of a tree, with what is excluded. Of the rest all is
// held in memory: many long names are no tree that anybody has.
func (p *syncPlan) listLimit() int64 {
	const fixed, each = 64 << 20, 512
	return fixed + each*min(int64(p.limits.Entries), 1<<50)
}

// remoteTree lists a directory of the workspace. One that does not exist is an
// empty tree if that is allowed.
func (y *syncer) remoteTree(ctx context.Context, m *mapping, sums, mayMiss bool) (*tree, []archive.Entry, error) {
	n := y.number()
	body := guestDown(m.remote, true, false)
	text := guestList
	if sums {
		text += guestSums
	}
	if m.FollowSymlinks {
		text += guestFollow
	}
	prune := ""
	if m.remote == "." {
		prune = "-path ./" + runtimeDir + " -prune -o"
	}
	out, err := y.step(ctx, body+fmt.Sprintf(text, n, prune))
	if mayMiss && errors.Is(err, ErrSyncMissing) {
		return &tree{absent: true}, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	names := []string{"list", "sums", "follow"}
	if !sums {
		names = []string{"list", "follow"}
	}
	told := strings.Split(strings.TrimSpace(out), "\n")
	if len(told) > len(names) {
		return nil, nil, ErrSyncStep
	}
	t := &tree{}
	var followed []archive.Entry
	for i, line := range told {
		f, err := toldFile(fmt.Sprintf("%s.%d", names[i], n), line)
		if err != nil {
			return nil, nil, err
		}
		if f.size > y.plan.listLimit() {
			return nil, nil, ErrSyncLimit
		}
		err = y.fetch(ctx, f, func(r io.Reader) (err error) {
			b := bufio.NewReaderSize(r, 64<<10)
			switch names[i] {
			case "list":
				err = y.readList(b, m, t)
			case "sums":
				err = t.readSums(b)
			default:
				followed, err = y.readEntries(b, m, nil)
			}
			return err
		})
		if err != nil {
			return nil, nil, err
		}
	}
	return t, followed, nil
}

// readList reads a listing. The tree is then sorted, and without what is excluded
// or cannot travel.
func (y *syncer) readList(r *bufio.Reader, m *mapping, t *tree) error {
	line, err := r.ReadSlice('\n') // of the reader's buffer at most
	if err != nil {
		return refusedList(err)
	}
	mode, err := strconv.ParseUint(string(line[:len(line)-1]), 8, 12)
	if err != nil {
		return refusedList(err)
	}
	*t = tree{mode: uint32(mode) & 0o777}
	all, err := y.readEntries(r, m, &t.skipped)
	if err != nil {
		return err
	}
	gone := make(map[string]bool) // what is below something that was skipped
	for _, s := range t.skipped {
		gone[s.Name] = true
	}
	kept := all[:0]
	for _, e := range all {
		if gone[path.Dir(e.Name)] {
			gone[e.Name] = e.Kind == archive.Dir
			continue
		}
		kept = append(kept, e)
	}
	t.entries = kept
	if y.plan.dir == syncOut { // of a target all links count: they may have to go
		t.entries, t.skipped = hosttree.DropLinks(kept, t.skipped)
	}
	return nil
}

func refusedList(error) error {
	return &syncCause{kind: ErrSyncRefused, text: "the list of a directory is not readable"}
}

// readEntries reads records up to the end, and sorts them, without what is excluded.
// What is neither file, directory nor link goes to skipped.
func (y *syncer) readEntries(r *bufio.Reader, m *mapping, skipped *[]hosttree.Skip) ([]archive.Entry, error) {
	var list []archive.Entry
	var bytes int64
	x := excluder{m: m, dir: "."}
	for n := 0; ; {
		if _, err := r.Peek(1); err == io.EOF {
			return list, distinct(list, skipped)
		}
		kind, err := readField(r)
		var fields [5]string
		for i := range fields {
			if err == nil {
				fields[i], err = readField(r)
			}
		}
		if err != nil {
			return nil, refusedList(err)
		}
		e, ok := entryOfFields(kind, fields)
		if !ok {
			return nil, refusedList(nil)
		}
		if x.excludes(e.Name, e.Kind == archive.Dir) {
			continue
		}
		n++
		bytes += e.Size
		if n > y.plan.limits.Entries || bytes > y.plan.limits.Bytes {
			return nil, ErrSyncLimit
		}
		reason := archive.CheckName(e.Name, MaxSyncPath)
		switch {
		case reason != "" || y.plan.dir == syncIn: // of a target all counts: it may have to go
		case e.Kind == archive.Other:
			reason = "is neither file, directory nor symbolic link"
		case len(e.Target) > MaxSyncPath:
			reason = "is a symbolic link with a target above the limit"
		}
		switch {
		case reason == "":
			list = append(list, e)
		case skipped != nil:
			*skipped = append(*skipped, hosttree.Skip{Name: e.Name, Reason: reason})
		}
	}
}

// An excluder says what is excluded, by itself or with a directory above it, be that
// listed or not. It is quick for names of one directory after another.
type excluder struct {
	m   *mapping
	dir string // of the last name
	out bool   // dir is excluded
}

func (x *excluder) excludes(name string, dir bool) bool {
	if up := path.Dir(name); up != x.dir {
		x.dir, x.out = up, false
		for ; up != "." && up != "/" && !x.out; up = path.Dir(up) {
			x.out = x.m.excludes(up, true)
		}
	}
	return x.out || x.m.excludes(name, dir)
}

// distinct sorts a list, and refuses one that names something twice, or something
// in a directory that it does not name: what is in the place of that would not be
// looked at.
func distinct(list []archive.Entry, skipped *[]hosttree.Skip) error {
	byName(list)
	for i := 1; i < len(list); i++ {
		if list[i-1].Name == list[i].Name {
			return refusedList(nil)
		}
	}
	if skipped == nil {
		return nil
	}
	known := "."
	for _, e := range list {
		up := path.Dir(e.Name)
		if up == known || up == "." {
			continue
		}
		if i := hosttree.Find(list, up); i < 0 || list[i].Kind != archive.Dir {
			return refusedList(nil)
		}
		known = up
	}
	seen := make(map[string]bool, len(*skipped))
	for _, s := range *skipped {
		if hosttree.Find(list, s.Name) >= 0 || seen[s.Name] {
			return refusedList(nil)
		}
		seen[s.Name] = true
	}
	return nil
}

// readField reads one field, which is of the reader's buffer at most.
func readField(r *bufio.Reader) (string, error) {
	field, err := r.ReadSlice(0)
	if err != nil {
		return "", err
	}
	return string(field[:len(field)-1]), nil
}

// pathMax is the longest target of a link that Linux has.
const pathMax = 4096

func entryOfFields(kind string, fields [5]string) (e archive.Entry, ok bool) {
	mode, err1 := strconv.ParseUint(fields[0], 8, 12)
	size, err2 := strconv.ParseInt(fields[1], 10, 64)
	second, _, _ := strings.Cut(fields[2], ".")
	at, err3 := strconv.ParseInt(second, 10, 64)
	e = archive.Entry{Name: fields[4], Mode: fs.FileMode(mode).Perm(), ModTime: at}
	switch kind {
	case "f":
		e.Kind, e.Size = archive.File, size
	case "d":
		e.Kind = archive.Dir
	case "l":
		e.Kind, e.Target = archive.Link, fields[3]
		if e.Target == "" || len(e.Target) > pathMax {
			return e, false
		}
	}
	return e, err1 == nil && err2 == nil && err3 == nil && size >= 0 && e.Name != ""
}

// readSums reads what sha256sum -z printed: digest, two characters, name, NUL.
func (t *tree) readSums(r *bufio.Reader) error {
	t.sums = make([][sha256.Size]byte, len(t.entries))
	for {
		line, err := readField(r)
		if err == io.EOF {
			return nil
		}
		const digest = 2 * sha256.Size
		if err != nil || len(line) < digest+2 {
			return refusedList(err)
		}
		var sum [sha256.Size]byte
		if _, err := hex.Decode(sum[:], []byte(line[:digest])); err != nil {
			return refusedList(err)
		}
		if i := hosttree.Find(t.entries, strings.TrimPrefix(line[digest+2:], "./")); i >= 0 {
			t.sums[i] = sum
		}
	}
}

// localTree lists a directory of this machine.
func (y *syncer) localTree(ctx context.Context, root *os.Root, m *mapping) (*tree, error) {
	info, err := root.Stat(".")
	if err != nil {
		return nil, err
	}
	l, err := hosttree.List(ctx, root, hosttree.ListOptions{
		Exclude: m.excludes, Limits: y.plan.limits, All: y.plan.dir == syncOut,
	})
	if err != nil {
		return nil, err
	}
	byName(l.Entries)
	return &tree{entries: l.Entries, skipped: l.Skipped, mode: uint32(info.Mode().Perm())}, nil
}

// digest fills in the digests of a local tree. A file that changed meanwhile, or must
// not be read, gets none, and so equals nothing.
func (t *tree) digest(ctx context.Context, root *os.Root) error {
	t.sums = make([][sha256.Size]byte, len(t.entries))
	r := hosttree.NewReader(root)
	defer r.Close()
	buf := make([]byte, 64<<10)
	for i, e := range t.entries {
		if e.Kind != archive.File {
			continue
		}
		sum, err := r.Digest(ctx, e, buf)
		if ctx.Err() != nil {
			return ended(ctx)
		}
		if err != nil && !errors.Is(err, archive.ErrChanged) && !errors.Is(err, fs.ErrPermission) {
			return err
		}
		t.sums[i] = sum
	}
	return nil
}

// readAll reads r, for those who look at what passes, to its end or that of ctx.
func readAll(ctx context.Context, r io.Reader) (int64, error) {
	n, err := io.Copy(io.Discard, hosttree.Until(ctx, r))
	if ctx.Err() != nil {
		err = ended(ctx)
	}
	return n, err
}
