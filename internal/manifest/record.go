package manifest

import (
	"bufio"
	"encoding/binary"
	"io"
	"io/fs"

	"github.com/createos-lease/createos/internal/archive"
)

// Flags of a record.
const (
	hasSum = 1 << iota
	isFollowed
)

// appendEntry appends an entry as it is stored: kind and flags, numbers, the digest
// if there is one, and texts with their lengths.
func appendEntry(b []byte, e archive.Entry) []byte {
	flags := byte(0)
	if e.Sum != [len(e.Sum)]byte{} {
		flags |= hasSum
	}
	if e.Followed {
		flags |= isFollowed
	}
	b = append(b, byte(e.Kind), flags)
	b = binary.AppendUvarint(b, uint64(e.Mode))
	b = binary.AppendVarint(b, e.Size)
	b = binary.AppendVarint(b, e.ModTime)
	if flags&hasSum != 0 {
		b = append(b, e.Sum[:]...)
	}
	for _, text := range []string{e.Name, e.Target, e.Skip} {
		b = binary.AppendUvarint(b, uint64(len(text)))
		b = append(b, text...)
	}
	return b
}

// A decoder reads what appendEntry has written.
type decoder struct {
	r    *bufio.Reader
	left int // entries
	text []byte
	err  error // the first
}

// next returns the next entry, and io.EOF after the last.
func (d *decoder) next() (e archive.Entry, err error) {
	if d.left == 0 {
		return e, io.EOF
	}
	d.left--
	kind, flags := d.byte(), d.byte()
	e.Kind, e.Followed = archive.Kind(kind), flags&isFollowed != 0
	e.Mode = fs.FileMode(d.uvarint())
	e.Size = d.varint()
	e.ModTime = d.varint()
	if flags&hasSum != 0 && d.err == nil {
		_, d.err = io.ReadFull(d.r, e.Sum[:])
	}
	e.Name, e.Target, e.Skip = d.string(), d.string(), d.string()
	if d.err == io.EOF {
		d.err = io.ErrUnexpectedEOF
	}
	return e, d.err
}

func (d *decoder) byte() (b byte) {
	if d.err == nil {
		b, d.err = d.r.ReadByte()
	}
	return b
}

func (d *decoder) uvarint() (n uint64) {
	if d.err == nil {
		n, d.err = binary.ReadUvarint(d.r)
	}
	return n
}

func (d *decoder) varint() (n int64) {
	if d.err == nil {
		n, d.err = binary.ReadVarint(d.r)
	}
	return n
}

func (d *decoder) string() string {
	n := d.uvarint()
	if d.err != nil || n == 0 {
		return ""
	}
	if uint64(cap(d.text)) < n {
		d.text = make([]byte, n)
	}
	d.text = d.text[:n]
	_, d.err = io.ReadFull(d.r, d.text)
	return string(d.text)
}
