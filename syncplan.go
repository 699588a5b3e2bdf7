package createos

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/hosttree"
	"github.com/createos-lease/createos/internal/manifest"
)

// runtimeDir is the driver's own directory in a workspace.
const runtimeDir = ".paperclip-runtime"

// A syncPlan is a Sync that was checked.
type syncPlan struct {
	dir       syncDirection
	ops       []SyncOperation
	mappings  [][]*mapping // of each operation
	limits    manifest.Limits
	maxFile   int64
	strong    bool
	compress  SyncCompression
	progress  func(SyncProgress)
	workspace string
}

// A mapping is a SyncMapping that was checked.
type mapping struct {
	SyncMapping
	op, index int
	local     string // path on this machine
	remote    string // relative to the workspace, "." for the workspace itself
}

// plan checks everything that can be checked without looking at anything.
func (s Sync) plan(workspace string, dir syncDirection) (*syncPlan, error) {
	ws, err := checkWorkspace(workspace)
	if err != nil {
		return nil, &InputError{"Lease.Metadata.RemoteCwd", "is no workspace"}
	}
	p := &syncPlan{
		dir: dir, ops: s.Operations, workspace: ws, progress: s.Progress, maxFile: s.MaxFile, strong: s.StrongDigests, compress: s.Compression,
		limits: manifest.Limits{Bytes: s.MaxBytes, Entries: s.MaxEntries, NameBytes: MaxSyncPath},
	}
	if err := p.setLimits(); err != nil {
		return nil, err
	}
	total := 0
	for i := range s.Operations {
		op := &s.Operations[i]
		if total += len(op.Mappings); total > maxSyncMappings {
			return nil, &InputError{"Sync.Operations", fmt.Sprintf("have more than %d mappings", maxSyncMappings)}
		}
		mappings, err := p.planOperation(op, i)
		if err != nil {
			return nil, err
		}
		p.mappings = append(p.mappings, mappings)
	}
	return p, nil
}

func (p *syncPlan) setLimits() error {
	switch {
	case p.limits.Bytes < 0:
		return &InputError{"Sync.MaxBytes", "is negative"}
	case p.limits.Entries < 0:
		return &InputError{"Sync.MaxEntries", "is negative"}
	case p.maxFile != 0 && p.maxFile < minSyncFile:
		return &InputError{"Sync.MaxFile", "is too small"}
	case p.compress != SyncCompressAuto && p.compress != SyncCompressAlways && p.compress != SyncCompressNever:
		return &InputError{"Sync.Compression", "is none of the known words"}
	}
	if p.limits.Bytes == 0 {
		p.limits.Bytes = DefaultSyncBytes
	}
	if p.limits.Entries == 0 {
		p.limits.Entries = DefaultSyncEntries
	}
	if p.maxFile == 0 {
		p.maxFile = MaxSyncFile
	}
	return nil
}

func (p *syncPlan) planOperation(op *SyncOperation, index int) ([]*mapping, error) {
	field := fmt.Sprintf("Sync.Operations[%d]", index)
	if p.dir == syncOut && len(op.Commands) > 0 {
		return nil, &InputError{field + ".Commands", "can only be given to SyncIn"}
	}
	for i := range op.Commands {
		if err := op.Commands[i].check(); err != nil {
			return nil, withinField(err, fmt.Sprintf("%s.Commands[%d]", field, i))
		}
	}
	list := make([]*mapping, len(op.Mappings))
	for i, m := range op.Mappings {
		list[i] = &mapping{SyncMapping: m, op: index, index: i}
		if problem, of := p.planMapping(list[i]); problem != "" {
			return nil, &InputError{fmt.Sprintf("%s.Mappings[%d].%s", field, i, of), problem}
		}
	}
	return list, nil
}

// withinField makes an error about a command one about that of a field.
func withinField(err error, field string) error {
	var input *InputError
	if errors.As(err, &input) {
		return &InputError{field + strings.TrimPrefix(input.Field, "Command"), input.Problem}
	}
	return err
}

// planMapping completes a mapping and says what is wrong with which field.
func (p *syncPlan) planMapping(m *mapping) (problem, field string) {
	remote, remoteField, localField := m.Target, "Target", "Source"
	m.local = m.Source
	if p.dir == syncOut {
		remote, remoteField, localField = m.Source, "Source", "Target"
		m.local = m.Target
	}
	m.Merge = m.Merge || m.Delta
	var reason string
	m.remote, reason = p.inWorkspace(remote)
	switch {
	case reason != "":
		return reason, remoteField
	case m.local == "" || strings.ContainsRune(m.local, 0):
		return "is empty or holds a NUL", localField
	case m.Kind != SyncAuto && m.Kind != SyncFile && m.Kind != SyncDir:
		return "is no kind", "Kind"
	case m.Mode != m.Mode.Perm():
		return "has other bits than permissions", "Mode"
	case m.FollowSymlinks && p.dir == syncIn:
		return "can only be given to SyncOut: nothing of this machine is followed", "FollowSymlinks"
	case m.Delete && !m.Merge:
		return "needs Merge or Delta", "Delete"
	case m.remote == "." && m.Kind == SyncFile:
		return "is a directory", remoteField
	case m.remote == "." && p.dir == syncIn && !m.Merge:
		return "is the workspace itself, which can only be merged into", remoteField
	}
	for _, pattern := range m.Exclude {
		if problem := patternProblem(pattern); problem != "" {
			return problem, "Exclude"
		}
	}
	return "", ""
}

// patternProblem says what is wrong with a pattern. One that looks as if it meant
// something and matches nothing would let pass what its author wants to keep back.
func patternProblem(pattern string) string {
	switch {
	case pattern == "" || strings.ContainsRune(pattern, 0) || !doublestar.ValidatePattern(pattern):
		return "has a pattern that is empty or malformed"
	case strings.HasPrefix(pattern, "!"):
		return `has a pattern that begins with "!", which must be escaped: nothing is taken back`
	}
	rest := strings.TrimSuffix(strings.TrimPrefix(pattern, "/"), "/")
	for part := range strings.SplitSeq(rest, "/") {
		if part == "" || part == "." || part == ".." {
			return `has a pattern with an empty name, "." or "..", which matches nothing`
		}
	}
	return ""
}

// inWorkspace makes a remote path relative to the workspace.
func (p *syncPlan) inWorkspace(remote string) (rel, problem string) {
	if strings.HasPrefix(remote, "/") {
		switch {
		case remote == p.workspace:
			remote = "."
		case strings.HasPrefix(remote, p.workspace+"/"):
			remote = remote[len(p.workspace)+1:]
		default:
			return "", "is not in the workspace"
		}
	}
	if remote == "." {
		return remote, ""
	}
	if remote != path.Clean(remote) || archive.CheckName(remote, MaxSyncPath) != "" {
		return "", "is not a clean path in the workspace"
	}
	if first, _, _ := strings.Cut(remote, "/"); first == runtimeDir {
		return "", "is in the directory that belongs to the driver"
	}
	return remote, ""
}

// excludes says whether an entry of the tree is left out; nil if there is
// nothing to leave out.
func (m *mapping) excludes(name string, dir bool) bool {
	if m.remote == "." && (name == runtimeDir || strings.HasPrefix(name, runtimeDir+"/")) {
		return true
	}
	for _, pattern := range m.Exclude {
		if p, only := strings.CutSuffix(pattern, "/"); only {
			if !dir {
				continue
			}
			pattern = p
		}
		subject := name
		if !strings.Contains(pattern, "/") {
			subject = path.Base(name)
		}
		if doublestar.MatchUnvalidated(strings.TrimPrefix(pattern, "/"), subject) {
			return true
		}
	}
	return false
}

// checkHost looks at this machine's side of all mappings, and changes nothing.
func (p *syncPlan) checkHost() error {
	for _, list := range p.mappings {
		for _, m := range list {
			check := m.checkSource
			if p.dir == syncOut {
				check = m.checkTarget
			}
			if err := check(); err != nil {
				return p.failed(m, hostError(err))
			}
		}
	}
	return nil
}

// failed is the error of a mapping.
func (p *syncPlan) failed(m *mapping, err error) error {
	return &SyncError{Operation: p.ops[m.op].ID, OperationIndex: m.op, Mapping: m.index, Command: -1, Err: err}
}

// checkSource finds out the kind of a local source.
func (m *mapping) checkSource() error {
	if m.Kind != SyncFile {
		root, err := hosttree.OpenDir(m.local)
		if err == nil {
			m.Kind = SyncDir
			return root.Close()
		}
		if m.Kind == SyncDir || hostError(err) != ErrSyncKind {
			return err
		}
	}
	f, _, err := hosttree.OpenFile(m.local)
	if err != nil {
		return err
	}
	m.Kind = SyncFile
	if m.remote == "." {
		_ = f.Close()
		return hosttree.ErrNotDir
	}
	return f.Close()
}

// checkTarget looks at what is in the place of a local target. The kind of the
// source may be known only later; then this is done again.
func (m *mapping) checkTarget() error {
	kind, err := hosttree.Look(m.local)
	switch {
	case err != nil:
		return err
	case m.Kind == SyncFile && kind == archive.Dir:
		return hosttree.ErrNotFile
	case m.Kind == SyncDir && kind == archive.Link:
		return hosttree.ErrIsLink
	case m.Kind == SyncDir && kind == archive.File:
		return hosttree.ErrNotDir
	}
	return nil
}
