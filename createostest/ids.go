package createostest

import (
	"crypto/rand"
	"strings"
	"time"
)

// lowerText returns n random lower-case letters and digits.
func lowerText(n int) string {
	var b strings.Builder
	for b.Len() < n {
		b.WriteString(strings.ToLower(rand.Text()))
	}
	return b.String()[:n]
}

const ulidLength = 26

// newULID returns a lower-case ULID: 48 bits of milliseconds, so that ids made
// later sort later, and 80 random bits.
func newULID(now time.Time) string {
	const alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
	var out [ulidLength]byte
	ms := uint64(now.UnixMilli())
	for i := 9; i >= 0; i-- {
		out[i] = alphabet[ms&31]
		ms >>= 5
	}
	var random [16]byte
	rand.Read(random[:]) // never fails
	for i, b := range random {
		out[10+i] = alphabet[b&31]
	}
	return string(out[:])
}

// newProcessID returns an id of the form proc_ and twenty characters.
func newProcessID() string { return "proc_" + rand.Text()[:20] }
