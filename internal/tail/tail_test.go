package tail

import (
	"bytes"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var _ io.Writer = (*Tail)(nil)

// naive reads the whole stream from its beginning, character by character, and cuts at the first boundary that leaves at most
// limit bytes.
func naive(stream []byte, limit int) ([]byte, bool) {
	cut := len(stream) - max(0, limit)
	if cut <= 0 {
		return stream, false
	}
	at := 0
	for at < cut {
		if !utf8.FullRune(stream[at:]) {
			return stream[len(stream):], true
		}
		_, size := utf8.DecodeRune(stream[at:])
		at += size
	}
	return stream[at:], true
}

// requireLikeNaive writes stream in pieces of the given sizes, over and over, and looks at the tail after each.
func requireLikeNaive(t *testing.T, stream []byte, limit int, sizes ...int) {
	t.Helper()
	tail := New(limit)
	written := 0
	for i := 0; written < len(stream); i++ {
		piece := stream[written:min(len(stream), written+sizes[i%len(sizes)])]
		n, err := tail.Write(piece)
		require.NoError(t, err)
		require.Equal(t, len(piece), n)
		written += n

		want, wantTruncated := naive(stream[:written], limit)
		got, truncated := tail.Bytes()
		require.Truef(t, bytes.Equal(want, got), "limit %d after %d bytes of %q: want %q, got %q", limit, written, stream, want, got)
		require.Equal(t, wantTruncated, truncated)
		require.EqualValues(t, written, tail.Total())
		require.LessOrEqual(t, cap(tail.ring), tail.limit+before)
	}
}

func TestEveryLimitOfAText(t *testing.T) {
	for name, text := range map[string]string{
		"characters of all lengths": "日本語 🧪 é ascii 日本語 🧪 é",
		"only long characters":      "🧪🧪🧪🧪",
		"ends inside a character":   "aé日🧪"[:9],
		"binary":                    "\x80\x80\x80\x80\xff\xfe\x80a\x80\x80\x80\x80\x80",
		"invalid among valid":       "é\x80\x80\xe3\x81a\xf0\x9f\x80\x80\xc3é\xf0\x9f\xa7\xaa\xaa\xaa",
		"surrogates and overlong":   "\xed\xa0\x80\xc0\x80\xe0\x80\x80\xf4\x90\x80\x80",
		"lone lead bytes":           "\xf0\xf0\xe3\xe3\xc3\xc3",
	} {
		t.Run(name, func(t *testing.T) {
			for limit := -1; limit <= len(text)+2; limit++ {
				requireLikeNaive(t, []byte(text), limit, 1)
				requireLikeNaive(t, []byte(text), limit, 2, 3, 1)
				requireLikeNaive(t, []byte(text), limit, len(text))
			}
		})
	}
}

func TestRandomStreams(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	pieces := []string{"a", "é", "日", "🧪", "\x80", "\xe3", "\xf0\x9f", "\n", "text"}
	for range 300 {
		var stream []byte
		for range rnd.IntN(80) {
			stream = append(stream, pieces[rnd.IntN(len(pieces))]...)
		}
		requireLikeNaive(t, stream, rnd.IntN(40), 1+rnd.IntN(9), 1+rnd.IntN(50), 1)
	}
}

func TestNothingIsDroppedFromABinaryStream(t *testing.T) {
	tail := New(4)
	_, err := tail.Write([]byte("a\x80\x81\x82\x83\x84"))
	require.NoError(t, err)
	got, truncated := tail.Bytes()
	assert.True(t, truncated)
	assert.Equal(t, "\x81\x82\x83\x84", string(got), "these continue no character")
}

func TestTextIsNotDamaged(t *testing.T) {
	text := strings.Repeat("日本語 🧪 é ", 20)
	for limit := range len(text) {
		tail := New(limit)
		for i := range len(text) {
			_, err := tail.Write([]byte{text[i]})
			require.NoError(t, err)
		}
		got, _ := tail.Bytes()
		require.Truef(t, utf8.Valid(got), "limit %d: %q", limit, got)
		require.Greater(t, len(got), limit-utf8.UTFMax)
		require.True(t, strings.HasSuffix(text, string(got)))
	}
}

func TestNewTail(t *testing.T) {
	got, truncated := New(10).Bytes()
	assert.Empty(t, got)
	assert.False(t, truncated)
}

func TestHugeLimit(t *testing.T) {
	requireLikeNaive(t, []byte("日本語"), math.MaxInt, 2)
}

func TestBytesIsACopy(t *testing.T) {
	tail := New(4)
	input := []byte("abcd")
	_, err := tail.Write(input)
	require.NoError(t, err)
	input[0] = 'X'
	first, _ := tail.Bytes()
	first[1] = 'X'
	second, _ := tail.Bytes()
	assert.Equal(t, "abcd", string(second))
}

func TestMemoryGrowsWithTheStream(t *testing.T) {
	tail := New(1 << 20)
	assert.Zero(t, cap(tail.ring))
	_, err := tail.Write(make([]byte, 100))
	require.NoError(t, err)
	assert.LessOrEqual(t, cap(tail.ring), 128)
	for range 3 {
		_, err = tail.Write(make([]byte, 5<<20))
		require.NoError(t, err)
	}
	assert.LessOrEqual(t, cap(tail.ring), 1<<20+before)
	counter := New(0)
	_, err = counter.Write(make([]byte, 5<<20))
	require.NoError(t, err)
	assert.Zero(t, cap(counter.ring))
	assert.EqualValues(t, 5<<20, counter.Total())
}

func TestWriteDoesNotAllocateOnceFull(t *testing.T) {
	tail, piece := New(1000), make([]byte, 300)
	for range 5 {
		_, _ = tail.Write(piece)
	}
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = tail.Write(piece) }))
}

func FuzzTail(f *testing.F) {
	f.Add([]byte("日本語 🧪 é"), 7, 1)
	f.Add([]byte("\x80\x80\x80\x80\xf0\x9f\xa7\xaa\xaa"), 3, 2)
	f.Add([]byte("\xf0\x9f\x98"), 1, 3)
	f.Fuzz(func(t *testing.T, stream []byte, limit, size int) {
		if len(stream) > 1<<10 {
			stream = stream[:1<<10]
		}
		requireLikeNaive(t, stream, limit%256, 1+int(uint(size)%64))
	})
}

func BenchmarkWrite(b *testing.B) {
	for name, size := range map[string]int{"64B": 64, "1KiB": 1 << 10, "32KiB": 32 << 10} {
		b.Run(name, func(b *testing.B) {
			tail, piece := New(64<<10), make([]byte, size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				_, _ = tail.Write(piece)
			}
		})
	}
}
