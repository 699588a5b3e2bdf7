//go:build unix

package createostest

import "sync"

// treeVariable carries the token of a tree in the environment of its leader, and
// from there into every process that inherits an environment.
const treeVariable = "CREATEOSTEST_TREE"

// tree tells which processes descend from one leader. A process belongs when any
// of these holds:
//
//   - its environment carries the token of the tree (Linux only);
//   - it is in the session (Linux only) or process group that the leader made;
//   - its parent belongs;
//   - it belonged the last time somebody looked.
//
// On Linux, a setsid, a double fork or a changed title therefore hide nothing.
// What is missed there is a descendant that both starts from an environment
// without the token and, before the tree is first looked at, has left the session
// and lost its parent. A program whose environment may not be read (it changed its
// user, say) counts as one without a token. On other systems, a descendant that
// left the process group and lost its parent is missed.
type tree struct {
	token  string
	leader procID

	mu        sync.Mutex // guards known and groupGone
	known     map[procID]struct{}
	groupGone bool // the number of the leader may by now name another group
}

func newTree(token string, leader procID) *tree {
	return &tree{token: token, leader: leader, known: map[procID]struct{}{leader: {}}}
}

// members picks the processes of the tree out of a reading of the table. The
// caller says whether the leader had been reaped before the reading began.
//
// doubtful is true when a process has no readable environment just now. It could
// be a member in the middle of exec, so that a tree without members needs a
// second look.
func (t *tree) members(procs []procInfo, reaped bool) (members []procInfo, doubtful bool) {
	t.mu.Lock()
	defer t.mu.Unlock()

	in := make(map[int]bool)
	group := false
	for _, p := range procs {
		inGroup := !t.groupGone && (p.pgid == t.leader.pid || p.sid == t.leader.pid)
		_, known := t.known[p.id()]
		if inGroup || known || p.token == t.token {
			in[p.pid] = true
		}
		group = group || inGroup
		doubtful = doubtful || p.blank && p.birth >= t.leader.birth
	}
	// The system gives out a number again only when no process, group or
	// session has it. Until the leader is reaped it has it itself.
	if reaped && !group {
		t.groupGone = true
	}

	for grown := true; grown; {
		grown = false
		for _, p := range procs {
			if !in[p.pid] && in[p.ppid] {
				in[p.pid], grown = true, true
			}
		}
	}
	for _, p := range procs {
		if in[p.pid] {
			t.known[p.id()] = struct{}{}
			members = append(members, p)
		}
	}
	return members, doubtful
}
