// Package cksum computes what cksum(1) prints: the CRC-32 of POSIX.
package cksum

import (
	"encoding/binary"
	"hash/crc32"
	"math/bits"
)

// A Sum is the checksum of what was written to it. The zero value is that of
// nothing. It is for one goroutine at a time.
//
// The CRC of POSIX has the polynomial of hash/crc32's IEEE table but takes the
// bits of each byte the other way round. Turning the bytes first lets it use
// the instructions that hash/crc32 uses, which makes it several times faster
// than a table.
type Sum struct {
	state uint32
	size  int64
	buf   [4 << 10]byte
}

// Write adds p. It never fails.
func (s *Sum) Write(p []byte) (int, error) {
	n := len(p)
	s.size += int64(n)
	s.update(p)
	return n, nil
}

func (s *Sum) update(p []byte) {
	for len(p) > 0 {
		n := min(len(p), len(s.buf))
		turn(s.buf[:n], p[:n])
		s.state = ^crc32.Update(^s.state, crc32.IEEETable, s.buf[:n])
		p = p[n:]
	}
}

// turn copies bytes with their bits turned round. to is as long as from.
func turn(to, from []byte) {
	for len(from) >= 32 && len(to) >= 32 { // four at a time, for they do not wait for each other
		f, t := (*[32]byte)(from), (*[32]byte)(to)
		binary.LittleEndian.PutUint64(t[0:8], turned(binary.LittleEndian.Uint64(f[0:8])))
		binary.LittleEndian.PutUint64(t[8:16], turned(binary.LittleEndian.Uint64(f[8:16])))
		binary.LittleEndian.PutUint64(t[16:24], turned(binary.LittleEndian.Uint64(f[16:24])))
		binary.LittleEndian.PutUint64(t[24:32], turned(binary.LittleEndian.Uint64(f[24:32])))
		to, from = to[32:], from[32:]
	}
	for i, b := range from {
		to[i] = bits.Reverse8(b)
	}
}

// turned turns the bits of each of eight bytes.
func turned(x uint64) uint64 {
	const m1, m2, m4 = 0x5555555555555555, 0x3333333333333333, 0x0f0f0f0f0f0f0f0f
	x = x>>1&m1 | x&m1<<1
	x = x>>2&m2 | x&m2<<2
	return x>>4&m4 | x&m4<<4
}

// Sum32 is the checksum so far, which covers the length as well.
func (s *Sum) Sum32() uint32 {
	end := Sum{state: s.state}
	for n := s.size; n > 0; n >>= 8 {
		end.update([]byte{byte(n)})
	}
	return bits.Reverse32(^end.state)
}

// Size is how much was written.
func (s *Sum) Size() int64 { return s.size }

// Reset begins anew.
func (s *Sum) Reset() { s.state, s.size = 0, 0 }
