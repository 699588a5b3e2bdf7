package createos

import (
	"context"
	"io/fs"
	"time"
)

// A SyncKind is what a mapping moves.
type SyncKind string

// The kinds of mappings.
const (
	// SyncAuto finds out by looking at the source.
	SyncAuto SyncKind = ""
	SyncFile SyncKind = "file"
	SyncDir  SyncKind = "dir"
)

// Limits of a [Sync].
const (
	// DefaultSyncBytes and DefaultSyncEntries bound one mapping.
	DefaultSyncBytes   = 1 << 40
	DefaultSyncEntries = 200_000
	// MaxSyncPath is the longest path of an entry within its tree, in bytes.
	MaxSyncPath = 2048
	// MaxSyncFile is what the provider takes, and is asked for, as one file,
	// in bytes. Larger ones travel in parts.
	MaxSyncFile = 500 << 20
	// minSyncFile holds an archive of whatever entry has the longest name.
	minSyncFile = 64 << 10
	// MaxSyncSkips is how many skipped entries a result names.
	MaxSyncSkips = 1000
	// maxSyncMappings bounds the mappings of one call.
	maxSyncMappings = 1000
)

// A Sync is what [Driver.SyncIn] and [Driver.SyncOut] do: operations, one after
// the other.
type Sync struct {
	Operations []SyncOperation
	// Progress, if not nil, is told how far the work has come: at the start and
	// the end of each phase of a mapping, and at most every 100 ms in
	// between. It is called from one goroutine, which is not the caller's. It
	// must return quickly and must not call Release, Destroy or Shutdown; when
	// it blocks at the end, it is left behind after a second.
	Progress func(SyncProgress)
	// MaxBytes and MaxEntries bound what one mapping may move: the content of
	// its files, and the number of files, directories and links. 0 means
	// DefaultSyncBytes and DefaultSyncEntries. They are enforced on what is
	// listed, and no more than that is taken; what is excluded does not count.
	//
	// The lists of a tree of more than some thousand entries are in temporary
	// files while it is moved, in os.TempDir, where there must be room for them:
	// for an entry a few times its name and 50 bytes. In memory are neither they
	// nor the content of files, but all symbolic links are, which have to be
	// judged together, and directories whose owner must not write to them. A list
	// from the sandbox may have 64 MiB, and 512 bytes for each of MaxEntries,
	// with what is excluded.
	MaxBytes   int64
	MaxEntries int
	// MaxFile is the largest file that travels in one piece, in bytes. 0 means
	// MaxSyncFile, which is the provider's limit; another value is for
	// deployments that have another limit, and is 64 KiB or more. Archives of
	// small files and lists keep to it as well.
	MaxFile int64
	// StrongDigests compares large files by SHA-256 too, and not by CRC-32. In
	// a sandbox without openssl that can take longer than moving them.
	StrongDigests bool
	// Compression says whether archives of small files travel compressed.
	Compression SyncCompression
}

// A SyncCompression says when archives are compressed with gzip. Large files
// never are: they mostly are already.
type SyncCompression string

// When to compress.
const (
	// SyncCompressAuto compresses where it pays: once an archive of 1 MiB or
	// more has moved at less than 4 MiB a second, those after it are
	// compressed, if the sandbox has gzip.
	SyncCompressAuto SyncCompression = ""
	// SyncCompressAlways compresses from the first archive on, if the sandbox
	// has gzip.
	SyncCompressAlways SyncCompression = "always"
	SyncCompressNever  SyncCompression = "never"
)

// A SyncOperation is a number of mappings and, for SyncIn, what is to be run
// after them.
type SyncOperation struct {
	// ID names the operation in results, progress and errors. It may be empty;
	// the index is there as well.
	ID       string
	Mappings []SyncMapping
	// Commands run after the mappings, in their order, as by [Driver.Exec]. The
	// first that does not succeed ends the sync; its error is an [*ExitError]
	// within a [*SyncError]. Each has a directory and a time limit of its own.
	// For SyncOut there must be none.
	Commands []Command
}

// A SyncMapping moves one file or one directory.
//
// The remote path is absolute, or relative to the workspace of the lease, and
// clean; it must lie within the workspace, and outside of its directory
// ".paperclip-runtime", which belongs to the driver and is never moved or
// touched. Where it is the workspace itself the directory can only be merged
// into. Missing directories above a remote target are made. The local path is
// absolute, or relative to the working directory of this process; the directory
// above a local target must exist, so the root of a file system is none.
//
// No symbolic link is followed on the way, on neither side: a source or target
// that is one is refused (but a local target that is to become a file is
// replaced), and so is a remote path that goes through one below the workspace.
// Links above a local path are the caller's own and are followed.
//
// Within a tree, links travel as links if they are relative and stay in the
// tree, alone and together with the others. Other links, and what is neither
// file, directory nor link, are skipped and named in the result. Permission
// bits and the modification time of files, in seconds, travel; owners, setuid
// and the like, extended attributes and hard links (which become files of their
// own) do not.
type SyncMapping struct {
	Source, Target string
	Kind           SyncKind
	// Mode is the permission bits of all files that are moved. 0 keeps those
	// of the source. Directories always keep theirs, but a target that is
	// merged into, if it was there before, has its own.
	Mode fs.FileMode
	// Exclude leaves out what matches one of the patterns, with all below
	// it. "*", "?", "[a-z]" and "{a,b}" match within one name, "**" any number
	// of directories, and "\" takes the next character for itself. A pattern
	// without a slash is matched against every name at every depth; one with
	// a slash against the whole path from the top of the tree, which a slash at
	// the beginning means as well, so that "/build" is the one at the top. A
	// slash at the end does not count, but matches directories only. Nothing
	// is taken back: a pattern must not begin with "!", nor have an empty name,
	// "." or "..", which match nothing. A directory of the sandbox that is
	// excluded by a plain name, or path, without "*" and the like, is not even
	// looked at; what is excluded otherwise is: it costs time, with Delta that
	// of its digests, and must not change meanwhile. What is excluded is not deleted in the
	// target either, when that is merged into. A mapping of a file ignores
	// Exclude, and Delete.
	Exclude []string
	// FollowSymlinks, for SyncOut of directories only, moves the file that a
	// link leads to, if it is a regular file within the workspace. Links to
	// directories are treated like without it. With Delta such files are moved
	// every time.
	FollowSymlinks bool
	// Merge puts the entries of a directory into the one that exists. Without
	// it the new directory takes the place of the old as a whole: either is
	// there, never a mixture. Merged, each file is replaced at once, but when
	// the sync fails while they are put in place some may be new and some old.
	// Directories that must not be written to are made writable while it lasts.
	Merge bool
	// Delta moves only the files whose size, mode or SHA-256 differs, and
	// implies Merge. A file of the target that cannot be read differs. Both
	// sides read all of their files for it, whatever their times say: it saves
	// the transfer, and the writing, of what is the same.
	Delta bool
	// Delete removes from a target directory that is merged into what is not
	// in the source, of any kind. A directory in which something excluded is
	// left stays. So does what has the name of something that was skipped in
	// the source, with all that is below it.
	Delete bool
}

// A SyncPhase is a part of the work on a mapping.
type SyncPhase string

// The phases, in their order.
const (
	SyncScan     SyncPhase = "scan"     // looking at what is there on both sides
	SyncTransfer SyncPhase = "transfer" // moving content
	SyncCommit   SyncPhase = "commit"   // putting it in its place
	SyncCommands SyncPhase = "commands" // running the commands of an operation
)

// SyncProgress is how far a sync has come with one mapping, or with the
// commands of an operation.
type SyncProgress struct {
	Operation string // SyncOperation.ID
	// OperationIndex and MappingIndex count from 0. MappingIndex is the index
	// of the command in the phase SyncCommands.
	OperationIndex, MappingIndex int
	Phase                        SyncPhase
	// Files and Bytes are what has been moved of TotalFiles and TotalBytes,
	// which are known from the phase SyncTransfer on. An attempt that is
	// repeated may let Bytes go back.
	Files, TotalFiles int
	Bytes, TotalBytes int64
}

// A SyncResult is what was done, in the order of Sync.Operations, as far as the
// sync got.
type SyncResult struct {
	Operations []SyncOperationResult
	// Warnings are failures that change nothing about the result, such as a
	// scratch file that could not be removed.
	Warnings []error
}

// A SyncOperationResult is what was done for one operation. Mappings that
// failed do not count.
type SyncOperationResult struct {
	ID string
	// Files and Bytes are the files that were moved and their content,
	// Unchanged the files that Delta did not have to move, Deleted what
	// Delete removed: files, directories and whatever else there was.
	Files, Unchanged, Deleted int
	Bytes                     int64
	// Skipped names what was left out, though not excluded, and why; the first
	// MaxSyncSkips of SkippedTotal.
	Skipped      []SyncSkip
	SkippedTotal int
	// Commands are the results of the commands that were run.
	Commands []*Result
	// Done says that all of the operation succeeded.
	Done bool
}

// A SyncSkip is an entry that was left out.
type SyncSkip struct {
	Mapping int    // index
	Path    string // within the tree
	Reason  string
}

// SyncIn moves files and directories of this machine into the workspace of a
// lease, and then runs commands there.
//
// All mappings of all operations are checked before the first byte moves, in
// this process and in the sandbox. Then they are worked on in their order. A
// file appears in its place whole, with its mode, or not at all; a directory as
// its mapping says. Everything is made ready in a private directory of the
// workspace first, and renamed: a connection that is lost, a context that ends
// or a sandbox that is paused in the middle leaves what was there before. Length
// and digest of everything that is sent are compared in the sandbox before it is
// put in its place: the SHA-256 of archives and lists, and of files of 16 MiB
// and more, which go by themselves, the CRC-32 of POSIX, as object stores do,
// unless Sync.StrongDigests is set.
//
// The sandbox must have Bash and the usual programs (tar, sha256sum, cksum, find,
// xargs, stat, mv and the like) as GNU has them; for SyncIn without Merge
// those of BusyBox will do. openssl, if it is there, is used for large SHA-256
// sums. Otherwise the error matches [ErrSyncTools].
//
// Content is sent in archives of up to some thousand files and in large files
// of their own, with a length that is known before, as the provider wants it:
// an archive is made while it is sent, from files that are looked at before, and
// nothing but one file's buffer is held of it. A file that is written to while
// it is read is [ErrSyncChanged]. While one piece is sent, the one before is checked and
// unpacked in the sandbox. A file above Sync.MaxFile goes in parts, which are
// joined there.
//
// A directory that is replaced is renamed to ".createos-old." and its name. If the
// sandbox ends the sync before the new one is in its place, the next SyncIn to that
// target puts it back before anything else. Once it is, the old one is renamed to
// ".createos-gone.", its name and an ending, and removed. If that fails, because
// somebody still writes there, say, it is a warning, and each SyncIn that replaces that
// target tries it again.
//
// Failure of an operation ends the sync: the error is a [*SyncError] that names
// it, and those after it are not begun. What an earlier mapping or operation has
// put in its place stays. The result is never nil. An error from outside of an
// operation, such as that of a lease that is gone at the first step, is no
// [*SyncError].
//
// The end of ctx, a Release or Destroy of the lease (ErrLeaseClosing) and
// Shutdown (ErrShutdown) cancel it, and it returns when its scratch files are
// removed, at most after DriverConfig.CleanupTimeout. A removal that fails is a
// warning, not a failure; the next sync of this driver on the lease, or the
// destroy, does it. So does it with what a request that was cut off makes when it
// arrives after that. What a host that died in the middle left is removed by a sync
// of any driver a day later. There is no bound on the whole, because there is none on
// its size: a transfer that stands still for a minute is cut, and a step in the
// sandbox is bounded by Config.Timeout.
//
// A sync never poisons the lease by itself, for what it runs in the sandbox are
// short commands of its own that end by themselves: one that was cut off may
// run for a moment longer and then finds its scratch directory gone. The commands
// of an operation are another matter, and treated as by Exec.
//
// Any number of syncs and commands may run on one lease. Mappings of one driver to
// the same target are worked on one after the other, so the later one wins as a
// whole. Of others only the first look and the last step, the putting in place, are
// done one after the other. Two processes must not sync to the same target at the
// same time.
//
// Errors from before anything was sent: as for Exec, with [ErrForeignLease] for a
// lease of somebody else, and an [*InputError] for a mapping that cannot be;
// a source that is not there or not what it should be is a [*SyncError].
func (d *Driver) SyncIn(ctx context.Context, env Environment, lease *Lease, s Sync) (*SyncResult, error) {
	return d.sync(ctx, env, lease, s, syncIn)
}

// SyncOut moves files and directories from the workspace of a lease to this
// machine. It is SyncIn in the other direction: what is said there holds here.
//
// What comes out of a sandbox is not trusted. A tree is listed first, bounded,
// and then only what was listed is accepted, in a fresh directory beside the
// target, through an os.Root, without ever following a link: not in the archive,
// not in the target, and not if somebody changes the target meanwhile. Anything
// else refuses the mapping ([ErrSyncRefused], or [ErrSyncLimit]) and leaves the
// target as it was.
//
// In a directory that is merged into, the links that are there, excluded ones too,
// are judged together with those that come: what comes must not lead out of it
// through a link that is there, nor make one lead elsewhere than before, outside
// of it. Such a merge is refused as well. A link of your own that leads out by
// itself is left alone. Links that are replaced or deleted are removed before
// anything new is put in place.
//
// The fresh directory is called ".createos-new." and the name of the target, and is
// in the target when that is merged into: what has that name in the source is then
// skipped. A directory that is replaced is moved to ".createos-old." and its name,
// put back if the new one cannot be renamed in, and otherwise removed at the end, as
// ".createos-gone.", its name and a number. If this process is killed in between, the
// old directory is found under the first name, and the next SyncOut to the same target
// puts it back before it begins, or removes it if the new one is in its place. A
// removal that fails is a warning, and tried again by each SyncOut to that target.
// Syncs of one process to the same local target are done one after the other.
//
// Before you destroy a lease whose files you want, look at the error: a sync
// that was cancelled or failed has delivered nothing that its result does not
// count.
func (d *Driver) SyncOut(ctx context.Context, env Environment, lease *Lease, s Sync) (*SyncResult, error) {
	return d.sync(ctx, env, lease, s, syncOut)
}

type syncDirection int

const (
	syncIn syncDirection = iota
	syncOut
)

func (d *Driver) sync(ctx context.Context, env Environment, lease *Lease, s Sync, dir syncDirection) (*SyncResult, error) {
	res := &SyncResult{}
	l, err := d.lessee(env, lease, ErrForeignLease, false)
	if err != nil {
		return res, err
	}
	plan, err := s.plan(l.lease.Metadata.RemoteCwd, dir)
	if err != nil {
		return res, err
	}
	c := &call{scope: l.scope}
	ctx, err = d.enter(ctx, c, func() error { return d.openForExecLocked(l.scope) })
	if err != nil {
		return res, err
	}
	defer d.leave(c)
	if err := plan.checkHost(); err != nil {
		return res, err
	}
	y := d.newSyncer(env, l, plan, res)
	return res, y.run(ctx)
}

// syncTick is the least distance of two reports of progress.
const syncTick = 100 * time.Millisecond
