// Package archive writes and reads the tar archives in which trees of files
// travel. It knows nothing of where they go to or come from.
//
// Reading assumes an enemy: an archive may have been made to escape from the
// directory into which it is extracted, to pass for less than it is, or to leave
// something behind that does so later. See [Tree].
package archive

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"
)

// A Kind is what an entry is.
type Kind byte

// The kinds of entries.
const (
	Other Kind = iota // a FIFO, socket or device: these do not travel
	File
	Dir
	Link // a symbolic link
)

// String names the kind in words.
func (k Kind) String() string {
	switch k {
	case File:
		return "file"
	case Dir:
		return "directory"
	case Link:
		return "symbolic link"
	}
	return "unknown"
}

// An Entry is one file, directory or symbolic link of a tree.
type Entry struct {
	// Name is relative to the tree, with slashes, and clean: it passes
	// [CheckName].
	Name string
	Kind Kind
	// Mode are the permission bits. Others are not carried.
	Mode fs.FileMode
	// Size is the length of a file in bytes.
	Size int64
	// ModTime is in seconds since 1970.
	ModTime int64
	// Target is where a symbolic link leads to, as it is written there.
	Target string
	// Sum is the SHA-256 of a file, zero if it is not known.
	Sum [sha256.Size]byte
	// Followed says that a file is what a link of this name leads to.
	Followed bool
	// Skip, if not empty, says why the entry does not travel, nor what is below it.
	Skip string
}

// maxComponent is the longest name of one file, in bytes, that the usual file
// systems take.
const maxComponent = 255

// CheckName says why a name cannot be one of a tree, "" if it can: it must lead
// to a place below the tree, in one way only. limit bounds its length in bytes.
func CheckName(name string, limit int) string {
	switch {
	case name == "":
		return "has no name"
	case len(name) > limit:
		return "has a name above the limit"
	case strings.ContainsRune(name, 0):
		return "has a NUL in its name"
	case strings.HasPrefix(name, "/"):
		return "has an absolute name"
	}
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "..":
			return "has a name that leads out of the tree"
		case part == "" || part == ".":
			return "has a name that is not clean"
		case len(part) > maxComponent:
			return "has a name above the limit"
		}
	}
	if local := filepath.FromSlash(name); !filepath.IsLocal(local) || filepath.ToSlash(local) != name {
		return "has a name that this system reads as another place"
	}
	return ""
}

// header encodes what stands in front of the content of an entry.
//
// The format is GNU's: it takes names of any bytes and any length, and both GNU
// tar and BusyBox read it.
func (e Entry) header() ([]byte, error) {
	h := &tar.Header{
		Name: "./" + e.Name, // not to be taken for an option, whatever it is
		Mode: int64(e.Mode.Perm()), ModTime: time.Unix(e.ModTime, 0), Format: tar.FormatGNU,
	}
	switch e.Kind {
	case File:
		h.Typeflag, h.Size = tar.TypeReg, e.Size
	case Dir:
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
	case Link:
		h.Typeflag, h.Linkname = tar.TypeSymlink, e.Target
	default:
		return nil, fmt.Errorf("archive: entry of kind %d", e.Kind)
	}
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(h); err != nil {
		return nil, fmt.Errorf("archive: %w", err)
	}
	return b.Bytes(), nil
}
