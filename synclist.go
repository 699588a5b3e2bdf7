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
	"path"
	"strconv"
	"strings"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
	"github.com/createos-lease/createos/internal/manifest"
)

// guestRecord is what find prints of an entry: kind, mode, size, time, target and name.
const guestRecord = `%%y\0%%m\0%%s\0%%T@\0%%l\0%%P\0`

// guestList prints the mode of the directory where the shell is, and lists it in
// records of fields that end in NUL, so that a name may be anything.
const guestList = `
[ -r . ] && stat -c %%a . || exit 96
find . -mindepth 1 %[2]s -printf '` + guestRecord + `' >"$S/list.%[1]d" || exit 95
told "$S/list.%[1]d"
`

// guestSums makes a list of digests as well, in the same walk: of what is listed the
// files are hashed at once, by several processes, with an output each.
const guestSums = `
[ -r . ] && stat -c %%a . || exit 96
: >"$S/sums.%[1]d.0"
find . -mindepth 1 %[2]s -fprintf "$S/list.%[1]d" '` + guestRecord + `' -type f -readable -print0 |
	xargs -0 -r -n 4096 -P 4 sh -c 'exec sha256sum -z -- "$@" >>"$0.$$"' "$S/sums.%[1]d" || exit 95
cat "$S"/sums.%[1]d.* >"$S/sums.%[1]d" && rm -f -- "$S"/sums.%[1]d.* || exit 95
told "$S/list.%[1]d" && told "$S/sums.%[1]d"
`

// guestFollow lists what links to files within the workspace lead to.
const guestFollow = `
find . -mindepth 1 %[2]s -type l -print0 | while IFS= read -r -d '' e; do
	t=$(readlink -f -- "$e" && printf x) && [ -f "$e" ] || continue
	case $t in "$R"/.paperclip-runtime/*) ;; "$R"/*) stat -L --printf 'f\0%%a\0%%s\0%%Y\0\0' -- "$e" && printf '%%s\0' "${e#./}" || exit 95 ;; esac
done >"$S/follow.%[1]d" || exit 95
told "$S/follow.%[1]d"
`

// listLimit bounds the lists of a tree, with what is excluded, on the disk of this
// machine: many long names are no tree that anybody has.
func (p *syncPlan) listLimit() int64 {
	const fixed, each = 64 << 20, 512
	return fixed + each*min(int64(p.limits.Entries), 1<<50)
}

// remoteTree lists a directory of the workspace. One that does not exist is an
// empty tree if that is allowed. With misfit, names for which it says a reason are
// skipped.
func (y *syncer) remoteTree(ctx context.Context, m *mapping, mayMiss bool, misfit func(name string) string) (*tree, error) {
	n := y.number()
	text, names := guestList, []string{"list"}
	if m.Delta {
		text, names = guestSums, []string{"list", "sums"}
	}
	if m.FollowSymlinks {
		text += guestFollow
		names = append(names, "follow")
	}
	out, err := y.step(ctx, guestDown(m.remote, true, false)+fmt.Sprintf(text, n, m.prune()))
	if mayMiss && errors.Is(err, ErrSyncMissing) {
		return &tree{absent: true}, nil
	}
	if err != nil {
		return nil, err
	}
	told := strings.Split(strings.TrimSpace(out), "\n")
	mode, err := strconv.ParseUint(told[0], 8, 12)
	if err != nil || len(told) != 1+len(names) {
		return nil, ErrSyncStep
	}
	lists := make(map[string]*manifest.List)
	for i, name := range names {
		var l manifest.List
		defer l.Close()
		lists[name] = &l
		f, err := toldFile(fmt.Sprintf("%s.%d", name, n), told[i+1])
		if err != nil {
			return nil, err
		}
		if f.size > y.plan.listLimit() {
			return nil, ErrSyncLimit
		}
		err = y.fetch(ctx, f, func(r io.Reader) error {
			l.Close() // it may be another attempt
			b := bufio.NewReaderSize(r, 64<<10)
			if name == "sums" {
				return readSums(b, &l)
			}
			return y.readEntries(b, m, &l, misfit)
		})
		if err == nil {
			err = l.Sort()
		}
		if err != nil {
			return nil, err
		}
	}
	listed := lists["list"].All()
	if sums := lists["sums"]; sums != nil {
		listed = noted(listed, sums.All(), func(e *archive.Entry, note archive.Entry) { e.Sum = note.Sum })
	}
	if followed := lists["follow"]; followed != nil {
		listed = noted(listed, followed.All(), followLink)
	}
	t := &tree{mode: fs.FileMode(mode).Perm()}
	return t, t.fill(connected(listed, refusedList()), y.plan.limits, y.plan.dir == syncOut)
}

// maxPruned bounds the names that prune gives find.
const maxPruned = 16 << 10

// prune keeps find from what is excluded by a plain name: often that is large, is hashed
// in vain, and changes while find walks through it, which ends the walk. What other
// patterns match is taken out of the list.
func (m *mapping) prune() string {
	var tests []string
	if m.remote == "." {
		tests = append(tests, "-path ./"+runtimeDir)
	}
	size := 0
	for _, pattern := range m.Exclude {
		name, onlyDir := strings.CutSuffix(pattern, "/")
		size += len(name)
		if strings.ContainsAny(name, `*?[]{}\`) || size > maxPruned {
			continue
		}
		test := "-name " + guestWord(name)
		if strings.Contains(name, "/") {
			test = "-path " + guestWord("./"+strings.TrimPrefix(name, "/"))
		}
		if onlyDir {
			test = "-type d " + test
		}
		tests = append(tests, test)
	}
	if len(tests) == 0 {
		return ""
	}
	return `\( ` + strings.Join(tests, " -o ") + ` \) -prune -o`
}

// followLink puts a file in the place of the link that leads to it.
func followLink(e *archive.Entry, note archive.Entry) {
	if e.Kind == archive.Link && e.Skip == "" && note.Kind == archive.File {
		*e = note
		e.Followed = true
	}
}

func refusedList() error {
	return &syncCause{kind: ErrSyncRefused, text: "the list of a directory is not readable"}
}

// readEntries reads records up to the end, without what is excluded. What cannot
// travel is to be skipped; of a target all counts that has a name of ours: it may have
// to go.
func (y *syncer) readEntries(r *bufio.Reader, m *mapping, into *manifest.List, misfit func(name string) string) error {
	tally := manifest.Tally{Limits: y.plan.limits}
	x := excluder{m: m, dir: "."}
	for {
		if _, err := r.Peek(1); err == io.EOF {
			return nil
		}
		kind, err := readField(r)
		var fields [5]string
		for i := range fields {
			if err == nil {
				fields[i], err = readField(r)
			}
		}
		if err != nil {
			return refusedList()
		}
		e, ok := entryOfFields(kind, fields)
		if !ok {
			return refusedList()
		}
		if x.excludes(e.Name, e.Kind == archive.Dir) {
			continue
		}
		if err := tally.Count(e); err != nil {
			return err
		}
		e.Skip = archive.CheckName(e.Name, MaxSyncPath)
		switch {
		case e.Skip != "" || y.plan.dir == syncIn:
		case e.Kind == archive.Other:
			e.Skip = hosttree.ReasonKind
		case len(e.Target) > MaxSyncPath:
			e.Skip = "is a symbolic link with a target above the limit"
		case misfit != nil:
			e.Skip = misfit(e.Name)
		}
		if err := into.Add(e); err != nil {
			return err
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

// readField reads one field, which is of the reader's buffer at most. After the last
// the error is io.EOF.
func readField(r *bufio.Reader) (string, error) {
	field, err := r.ReadSlice(0)
	if err == io.EOF && len(field) > 0 {
		err = io.ErrUnexpectedEOF
	}
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
func readSums(r *bufio.Reader, into *manifest.List) error {
	for {
		line, err := readField(r)
		if err == io.EOF {
			return nil
		}
		const digest = 2 * sha256.Size
		if err != nil || len(line) < digest+2 {
			return refusedList()
		}
		e := archive.Entry{Name: strings.TrimPrefix(line[digest+2:], "./")}
		if _, err := hex.Decode(e.Sum[:], []byte(line[:digest])); err != nil {
			return refusedList()
		}
		if err := into.Add(e); err != nil {
			return err
		}
	}
}

// readAll reads r, for those who look at what passes, to its end or that of ctx.
func readAll(ctx context.Context, r io.Reader) (int64, error) {
	n, err := io.Copy(io.Discard, hosttree.Until(ctx, r))
	if ctx.Err() != nil {
		err = ended(ctx)
	}
	return n, err
}
