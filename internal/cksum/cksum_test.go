package cksum_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/cksum"
)

// The values are those that GNU cksum prints.
func TestKnownSums(t *testing.T) {
	for text, want := range map[string]uint32{
		"":            4294967295,
		"a":           1220704766,
		"hello\n":     3015617425,
		"123456789":   930766865,
		"123456789\n": 1552147931,
	} {
		var s cksum.Sum
		_, err := s.Write([]byte(text))
		require.NoError(t, err)
		require.Equal(t, want, s.Sum32(), text)
		require.Equal(t, want, s.Sum32(), "asking changes nothing")
		require.Equal(t, int64(len(text)), s.Size())
		s.Reset()
		require.Equal(t, uint32(4294967295), s.Sum32())
	}
}

// naive is the definition, bit by bit.
func naive(p []byte) uint32 {
	var crc uint32
	add := func(b byte) {
		crc ^= uint32(b) << 24
		for range 8 {
			if crc&0x80000000 != 0 {
				crc = crc<<1 ^ 0x04c11db7
			} else {
				crc <<= 1
			}
		}
	}
	for _, b := range p {
		add(b)
	}
	for n := len(p); n > 0; n >>= 8 {
		add(byte(n))
	}
	return ^crc
}

func TestSumEqualsTheDefinition(t *testing.T) {
	rnd := rand.New(rand.NewChaCha8([32]byte{}))
	for range 200 {
		p := make([]byte, rnd.IntN(20_000))
		for i := range p {
			p[i] = byte(rnd.Uint32())
		}
		var s cksum.Sum
		for rest := p; len(rest) > 0; {
			n := 1 + rnd.IntN(len(rest))
			_, _ = s.Write(rest[:n])
			rest = rest[n:]
		}
		require.Equal(t, naive(p), s.Sum32())
	}
}

func TestSumEqualsTheProgram(t *testing.T) {
	if _, err := exec.LookPath("cksum"); err != nil {
		t.Skip("no cksum on this machine")
	}
	p := bytes.Repeat([]byte("some text of no meaning\n"), 10_000)
	cmd := exec.Command("cksum")
	cmd.Stdin = bytes.NewReader(p)
	out, err := cmd.Output()
	require.NoError(t, err)
	var s cksum.Sum
	_, _ = s.Write(p)
	require.Equal(t, fmt.Sprintf("%d %d\n", s.Sum32(), len(p)), string(out))
}

func BenchmarkSum(b *testing.B) {
	p := make([]byte, 1<<20)
	b.SetBytes(1 << 20)
	var s cksum.Sum
	for b.Loop() {
		_, _ = s.Write(p)
	}
}
