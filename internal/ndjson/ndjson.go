// Package ndjson reads streams of one JSON value a line, line by line.
//
// It does not look into the lines: a line is what stands between two line ends. What proxies and servers put around the
// values is taken off: "\r\n" as line end, a byte order mark at the very start, blank lines, and the framing of
// server-sent events, where a value follows "data:" and all other fields and comments say nothing to us.
package ndjson

import (
	"bytes"
	"fmt"
	"io"
)

const (
	// DefaultMaxLine is the longest line, in bytes, where no limit is given.
	DefaultMaxLine = 4 << 20

	firstBuffer    = 4 << 10  // enough for a stream that says little, of which there may be hundreds
	bulkBuffer     = 64 << 10 // holds some lines of the usual size, so that few are moved
	maxEmptyReads  = 100      // as in bufio
	lineEndReserve = len("\r\n")
)

// TooLongError is returned when a line has more bytes than the reader's limit. Nothing of the line is in it.
type TooLongError struct {
	Limit int // bytes, line end excluded
}

// Error names the limit.
func (e *TooLongError) Error() string {
	return fmt.Sprintf("line is longer than the limit of %d bytes", e.Limit)
}

// Reader reads lines. It is not safe for concurrent use. Make one with [NewReader].
type Reader struct {
	src     io.Reader
	maxLine int

	buf        []byte
	start, end int // what was read and not yet returned is buf[start:end]
	searched   int // there is no line end in buf[start:searched]

	begun      bool  // the first line was cut off, and with it the byte order mark
	terminated bool  // see Terminated
	srcErr     error // src ended with this; what is in buf still comes
	err        error // every Next from now on returns this
}

// NewReader returns a Reader of src. Lines of up to maxLine bytes are read, counted as they come (with "data:" or a
// byte order mark, without the line end); maxLine of zero or less means [DefaultMaxLine]. The buffer begins with 4 KiB, grows
// to about 64 KiB when data come faster than they are read, and beyond that, up to maxLine, only for a line that needs it.
func NewReader(src io.Reader, maxLine int) *Reader {
	if maxLine <= 0 {
		maxLine = DefaultMaxLine
	}
	return &Reader{src: src, maxLine: maxLine}
}

// Next returns the next line that is not blank, without its line end. The line is valid until the next call.
// Next reads from the source only when no whole line is left of what was read before, so a line is returned as soon as it is there.
//
// After the last line Next returns the error by which the source ended, [io.EOF] in the good case. A line over the limit
// gives a *[TooLongError]. Every error is final: later calls return it again, and read nothing.
//
// What the source ended with, be it io.EOF or another error, is returned as a line even when its line end is missing; [Reader.Terminated]
// then reports false. It may be a whole value whose writer adds no last line end, or the beginning of one that was cut off. The
// decoder of the value knows: a JSON object that was cut is malformed.
func (r *Reader) Next() ([]byte, error) {
	for {
		line, err := r.rawLine()
		if err != nil {
			return nil, err
		}
		if line = payload(line); line != nil {
			return line, nil
		}
	}
}

// Terminated reports whether the line that Next returned last had a line end.
func (r *Reader) Terminated() bool { return r.terminated }

// rawLine returns the next line as it came, without line end and byte order mark.
func (r *Reader) rawLine() ([]byte, error) {
	for r.err == nil {
		if i := bytes.IndexByte(r.buf[r.searched:r.end], '\n'); i >= 0 {
			return r.cutLine(r.searched+i, r.searched+i+1)
		}
		r.searched = r.end
		switch pending := r.end - r.start; {
		case pending > r.maxLine+1, pending == r.maxLine+1 && r.buf[r.end-1] != '\r':
			r.fail(&TooLongError{Limit: r.maxLine})
		case r.srcErr != nil && pending > 0:
			return r.cutLine(r.end, r.end)
		case r.srcErr != nil:
			r.fail(r.srcErr)
		default:
			r.fill()
		}
	}
	return nil, r.err
}

// cutLine takes the line that ends at the given index and goes on at next.
func (r *Reader) cutLine(end, next int) ([]byte, error) {
	line := bytes.TrimSuffix(r.buf[r.start:end], []byte{'\r'})
	if len(line) > r.maxLine {
		r.fail(&TooLongError{Limit: r.maxLine})
		return nil, r.err
	}
	r.terminated = next > end
	r.start, r.searched = next, next
	if !r.begun {
		r.begun = true
		line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
	}
	return line, nil
}

func (r *Reader) fail(err error) {
	r.err, r.buf = err, nil
	r.start, r.end, r.searched = 0, 0, 0
}

// fill reads once, or notes how the source ended.
func (r *Reader) fill() {
	r.makeRoom()
	for range maxEmptyReads {
		n, err := r.src.Read(r.buf[r.end:])
		r.end += n
		r.srcErr = err
		if n > 0 || err != nil {
			return
		}
	}
	r.srcErr = io.ErrNoProgress
}

// makeRoom sees to it that there is room behind end. When the buffer is used up, the line being read moves to the front. The
// buffer grows if that line fills it; a small one also because the last read filled it, for then more is waiting.
func (r *Reader) makeRoom() {
	if r.end < len(r.buf) && r.start < r.end {
		return
	}
	to := r.buf
	if r.end == len(r.buf) && (r.start == 0 || len(r.buf) < bulkBuffer) {
		most := max(r.maxLine, bulkBuffer-lineEndReserve) // written so that the largest limit does not overflow
		to = make([]byte, max(firstBuffer, min(2*len(r.buf)-lineEndReserve, most)+lineEndReserve))
	}
	copy(to, r.buf[r.start:r.end])
	r.buf = to
	r.end -= r.start
	r.searched -= r.start
	r.start = 0
}

// payload takes off the framing. It returns nil for a line that carries no value.
func payload(line []byte) []byte {
	if len(line) == 0 {
		return nil
	}
	switch line[0] {
	case '{':
		return line
	case ':':
		return nil
	case 'd':
		if value, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			return unlessBlank(bytes.TrimPrefix(value, []byte{' '}))
		}
	case 'e', 'i', 'r':
		for _, field := range []string{"event:", "id:", "retry:"} {
			if bytes.HasPrefix(line, []byte(field)) {
				return nil
			}
		}
	}
	return unlessBlank(line)
}

func unlessBlank(line []byte) []byte {
	if len(bytes.TrimLeft(line, " \t\r")) == 0 {
		return nil
	}
	return line
}
