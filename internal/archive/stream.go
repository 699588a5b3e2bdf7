package archive

import (
	"errors"
	"io"
)

const (
	block = 512
	// trailer is what ends an archive: two blocks of zeros.
	trailer = 2 * block
	// inHeader is how long a name or target may be without a header of its own.
	inHeader = 100

	// Overhead is what an archive is longer than its entries.
	Overhead = trailer
)

// ErrChanged is matched by the error of a Stream whose file turned out to be
// shorter than its entry says. (What is longer is cut: it grew meanwhile.)
var ErrChanged = errors.New("archive: a file changed while it was read")

// A Stream is an archive that is made while it is read, of an exact length that
// is known before. It can be read again from its start. It holds one header and
// one open file at a time.
//
// It is for one goroutine at a time, and Close must be called in the end.
type Stream struct {
	entries []Entry
	open    func(Entry) (io.ReadCloser, error)
	size    int64

	next int    // the entry that comes next
	text []byte // header, padding or trailer that is to be sent first
	file io.ReadCloser
	left int64 // of file
	pad  int64 // after file
	over bool  // the trailer was begun
}

// NewStream makes an archive of the entries. open opens the content of a file;
// it is called once for each file and reading.
func NewStream(entries []Entry, open func(Entry) (io.ReadCloser, error)) (*Stream, error) {
	s := &Stream{entries: entries, open: open, size: trailer}
	for _, e := range entries {
		h, err := e.header()
		if err != nil {
			return nil, err
		}
		s.size += int64(len(h))
		if e.Kind == File {
			s.size += e.Size + padding(e.Size)
		}
	}
	return s, nil
}

// Packed is what an entry takes in an archive, with its header.
func (e Entry) Packed() int64 {
	name := int64(len("./") + len(e.Name))
	if e.Kind == Dir {
		name += int64(len("/"))
	}
	size := block + e.Size + padding(e.Size)
	for _, text := range []int64{name, int64(len(e.Target))} {
		if text > inHeader {
			size += block + text + 1 + padding(text+1)
		}
	}
	return size
}

func padding(size int64) int64 { return -size & (block - 1) }

// Size is the length of the archive in bytes.
func (s *Stream) Size() int64 { return s.size }

// Seek goes back to the start, which is the only place it can go to.
func (s *Stream) Seek(offset int64, whence int) (int64, error) {
	if offset != 0 || whence != io.SeekStart {
		return 0, errors.New("archive: a stream can be read from its start only")
	}
	err := s.Close()
	s.next, s.text, s.left, s.pad, s.over = 0, nil, 0, 0, false
	return 0, err
}

// Close closes the file that is being read, if there is one.
func (s *Stream) Close() error {
	if s.file == nil {
		return nil
	}
	f := s.file
	s.file = nil
	return f.Close()
}

// zeros is what padding and trailer are made of.
var zeros [trailer]byte

// Read fills p as far as there is something to fill it with: small files must not
// make small writes.
func (s *Stream) Read(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		switch {
		case len(s.text) > 0:
			m = copy(p[n:], s.text)
			s.text = s.text[m:]
		case s.file != nil:
			m, err = s.readFile(p[n:])
		case s.pad > 0:
			s.text, s.pad = zeros[:s.pad], 0
		default:
			err = s.begin()
		}
		n += m
	}
	if n > 0 && err == io.EOF {
		err = nil
	}
	return n, err
}

func (s *Stream) readFile(p []byte) (int, error) {
	if s.left == 0 {
		return 0, s.Close()
	}
	n, err := s.file.Read(p[:min(int64(len(p)), s.left)])
	s.left -= int64(n)
	if err == io.EOF {
		err = nil
		if s.left > 0 {
			err = ErrChanged
		}
	}
	return n, err
}

// begin goes on to the next entry, or to the end.
func (s *Stream) begin() error {
	if s.next == len(s.entries) {
		if s.over {
			return io.EOF
		}
		s.over, s.text = true, zeros[:]
		return nil
	}
	e := s.entries[s.next]
	s.next++
	h, err := e.header()
	if err != nil {
		return err
	}
	s.text = h
	if e.Kind != File || e.Size == 0 {
		return nil
	}
	if s.file, err = s.open(e); err != nil {
		s.file = nil
		return err
	}
	s.left, s.pad = e.Size, padding(e.Size)
	return nil
}
