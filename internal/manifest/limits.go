package manifest

import (
	"errors"

	"github.com/createos-lease/createos/internal/archive"
)

// ErrLimit says that a tree is larger than its limits allow.
var ErrLimit = errors.New("is above a limit")

// Limits bound a tree: the content of its files, the number of its entries, and the
// length of a name in bytes.
type Limits struct {
	Bytes     int64
	Entries   int
	NameBytes int
}

// A Tally counts entries against limits.
type Tally struct {
	Limits
	bytes   int64
	entries int
}

// Count returns ErrLimit if an entry is one too many.
func (t *Tally) Count(e archive.Entry) error {
	if t.entries == t.Entries || e.Size > t.Bytes-t.bytes {
		return ErrLimit
	}
	t.entries++
	t.bytes += e.Size
	return nil
}
