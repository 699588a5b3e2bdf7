package archive

import (
	"path"
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
	hops := 0
	_, ok := l.walk(path.Dir(name), l[name], &hops)
	return ok
}

// walk follows target from the directory dir, which is resolved. ok is false once
// it leaves the tree, be it to come back.
func (l Links) walk(dir, target string, hops *int) (end string, ok bool) {
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
		if next, is := l[at]; is {
			if dir, ok = l.walk(dir, next, hops); !ok {
				return "", false
			}
			continue
		}
		dir = at
	}
	return dir, true
}
