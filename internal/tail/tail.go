// Package tail keeps the last bytes of a stream.
package tail

import (
	"math"
	"unicode/utf8"
)

// before is how many bytes are kept in front of the limit. They are never handed out: they tell whether the first byte
// inside the limit begins a character or stands in the middle of one.
const before = utf8.UTFMax - 1

// Tail is an [io.Writer] that keeps the last bytes of what is written to it. It holds them in a ring that grows with
// the stream up to its limit, so that writing costs one copy, however long the stream is, and a short stream costs little
// memory. It is not safe for concurrent use. Make one with [New].
type Tail struct {
	limit int
	ring  []byte // at most limit+before bytes; in order of writing until it is full
	next  int    // once ring is full: index of the oldest byte, which is the next to be overwritten
	total int64
}

// New returns a Tail that keeps at most limit bytes. With a limit of zero or less it only counts.
func New(limit int) *Tail {
	return &Tail{limit: min(max(0, limit), math.MaxInt-before)}
}

// Write keeps the end of p. It never fails, and keeps no reference to p.
func (t *Tail) Write(p []byte) (int, error) {
	n := len(p)
	t.total += int64(n)
	if t.limit == 0 {
		return n, nil
	}
	size := t.limit + before
	if len(p) > size {
		p = p[len(p)-size:]
	}
	p = p[t.fill(p, size):]
	for len(p) > 0 {
		copied := copy(t.ring[t.next:], p)
		p = p[copied:]
		t.next = (t.next + copied) % size
	}
	return n, nil
}

// fill appends to a ring that is not full yet and returns how much of p it took.
func (t *Tail) fill(p []byte, size int) int {
	n := min(len(p), size-len(t.ring))
	if need := len(t.ring) + n; need > cap(t.ring) {
		// Growing by append could pass the limit by a quarter.
		grown := make([]byte, len(t.ring), min(size, max(need, 2*cap(t.ring))))
		copy(grown, t.ring)
		t.ring = grown
	}
	t.ring = append(t.ring, p[:n]...)
	return n
}

// Total returns how many bytes were written.
func (t *Tail) Total() int64 { return t.total }

// Bytes returns a copy of the last bytes, at most the limit, and whether anything was written before them that is missing.
//
// A stream that was cut does not begin inside a UTF-8 sequence: what is left of a character whose first byte lies
// before the limit is dropped. Bytes that belong to no such character are kept as they are, valid UTF-8 or not, and so is the
// end of the stream, even if it ends inside a character.
func (t *Tail) Bytes() (tail []byte, truncated bool) {
	all := make([]byte, 0, len(t.ring))
	all = append(all, t.ring[t.next:]...)
	all = append(all, t.ring[:t.next]...)
	if t.total <= int64(t.limit) {
		return all, false
	}
	cut := max(0, len(all)-t.limit)
	return all[cut+restOfCharacter(all, cut):], true
}

// restOfCharacter returns how many bytes from p[cut] on belong to a character that begins before cut.
func restOfCharacter(p []byte, cut int) int {
	for i := cut - 1; i >= 0; i-- {
		if !utf8.RuneStart(p[i]) {
			continue
		}
		if !utf8.FullRune(p[i:]) { // the stream ended inside the character
			return len(p) - cut
		}
		_, size := utf8.DecodeRune(p[i:])
		return max(0, i+size-cut)
	}
	return 0
}
