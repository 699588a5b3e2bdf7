package manifest

import (
	"cmp"
	"iter"
	"strings"

	"github.com/createos-lease/createos/internal/archive"
)

// Compare orders names as a walk through the tree comes by: a directory, then all
// that is in it, and then what comes after it. So "a/b" comes before "a-b".
func Compare(a, b string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return cmp.Compare(rank(a[i]), rank(b[i]))
		}
	}
	return cmp.Compare(len(a), len(b))
}

func rank(c byte) byte {
	if c == '/' {
		return 0 // which is in no name
	}
	return c
}

// Below says whether a name lies below a directory.
func Below(name, dir string) bool {
	return len(name) > len(dir) && name[len(dir)] == '/' && strings.HasPrefix(name, dir)
}

// BottomUp goes through sorted entries with each directory after what is in it.
func BottomUp(sorted Entries) Entries {
	return func(yield func(archive.Entry, error) bool) {
		var within []archive.Entry // directories, each in the one before
		leave := func(name string) bool {
			for n := len(within) - 1; n >= 0 && !Below(name, within[n].Name); n-- {
				dir := within[n]
				within = within[:n]
				if !yield(dir, nil) {
					return false
				}
			}
			return true
		}
		for e, err := range sorted {
			if err != nil {
				yield(e, err)
				return
			}
			if !leave(e.Name) {
				return
			}
			if e.Kind == archive.Dir {
				within = append(within, e)
			} else if !yield(e, nil) {
				return
			}
		}
		leave("")
	}
}

// Only goes through those of entries that want says yes to.
func Only(entries Entries, want func(archive.Entry) bool) Entries {
	return func(yield func(archive.Entry, error) bool) {
		for e, err := range entries {
			if (err != nil || want(e)) && !yield(e, err) {
				return
			}
		}
	}
}

// A Pair is what two lists have under one name; nil for what one of them has not.
type Pair struct{ A, B *archive.Entry }

// Pairs goes through two sorted lists, of distinct names, side by side.
func Pairs(a, b Entries) iter.Seq2[Pair, error] {
	return func(yield func(Pair, error) bool) {
		nextA, stopA := iter.Pull2(a)
		defer stopA()
		nextB, stopB := iter.Pull2(b)
		defer stopB()
		x, err, moreA := nextA()
		y, errB, moreB := nextB()
		for moreA || moreB {
			if err = cmp.Or(err, errB); err != nil {
				yield(Pair{}, err)
				return
			}
			order := Compare(x.Name, y.Name)
			switch {
			case !moreB:
				order = -1
			case !moreA:
				order = 1
			}
			var p Pair
			if order <= 0 {
				e := x
				p.A = &e
			}
			if order >= 0 {
				e := y
				p.B = &e
			}
			if !yield(p, nil) {
				return
			}
			if order <= 0 {
				x, err, moreA = nextA()
			}
			if order >= 0 {
				y, errB, moreB = nextB()
			}
		}
	}
}
