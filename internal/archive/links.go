package archive

import (
	"maps"
	"path"
	"slices"
	"strings"
)

// maxHops is how many links a path may go through, as in the kernels.
const maxHops = 40

// Links knows the symbolic links of a tree and judges them together: each may
// look harmless while two of them lead out.
type Links map[string]string // name to target

// Stays says whether the link of that name leads to a place in the tree, or to
// nowhere in it. It follows the links on its way. A loop stays: it leads nowhere.
func (l Links) Stays(name string) bool {
	return stays(name, l[name], func(at string) string { return l[at] })
}

// Harm returns a link of l, the links that a tree will have, that must not be
// there: one that is not in before, which are the links of the tree now, and
// leads out; or one that is, and leads out by what has changed on its way. "" if
// there is none. A link that leads out by itself is its owner's.
func (l Links) Harm(before Links) string {
	for _, name := range slices.Sorted(maps.Keys(l)) {
		changed := before[name] != l[name]
		look := func(at string) string {
			changed = changed || before[at] != l[at]
			return l[at]
		}
		if !stays(name, l[name], look) && changed {
			return name
		}
	}
	return ""
}

// stays is told by look what links there are: their targets, "" for no link.
func stays(name, target string, look func(string) string) bool {
	hops := 0
	_, ok := walk(look, path.Dir(name), target, &hops)
	return ok
}

// walk follows target from the directory dir, which is resolved. ok is false once
// it leaves the tree, be it to come back.
func walk(look func(string) string, dir, target string, hops *int) (end string, ok bool) {
	if path.IsAbs(target) || strings.Contains(target, `\`) && !backslashIsName {
		return "", false
	}
	if *hops++; *hops > maxHops {
		return dir, true
	}
	for part := range strings.SplitSeq(target, "/") {
		switch part {
		case "", ".":
			continue
		case "..":
			if dir == "." {
				return "", false
			}
			dir = path.Dir(dir)
			continue
		}
		at := path.Join(dir, part)
		if next := look(at); next != "" {
			if dir, ok = walk(look, dir, next, hops); !ok {
				return "", false
			}
			continue
		}
		dir = at
	}
	return dir, true
}
