//go:build unix && !linux

package createostest

import "time"

// treePoll is how often a tree is looked at when its leader is gone but other
// processes of it are not. Each look runs ps.
const treePoll = 100 * time.Millisecond

func newProcessTable() (processTable, error) {
	if _, err := (psTable{}).list(); err != nil {
		return nil, err
	}
	return psTable{}, nil
}
