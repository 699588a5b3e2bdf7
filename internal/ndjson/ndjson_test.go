package ndjson

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// readAll returns copies of all lines, whether the last had a line end, and the error at the end.
func readAll(src io.Reader, maxLine int) (lines []string, terminated bool, err error) {
	r := NewReader(src, maxLine)
	for {
		line, err := r.Next()
		if err != nil {
			return lines, r.Terminated(), err
		}
		lines = append(lines, string(line))
	}
}

func TestNext(t *testing.T) {
	for name, tc := range map[string]struct {
		in         string
		want       []string
		terminated bool
	}{
		"empty":                    {"", nil, false},
		"lines":                    {"{\"a\":1}\n{\"b\":2}\n", []string{`{"a":1}`, `{"b":2}`}, true},
		"carriage returns":         {"{}\r\n[1]\r\n", []string{"{}", "[1]"}, true},
		"blank lines":              {"\n\r\n \n\t \r\n{}\n\n\n", []string{"{}"}, true},
		"no last line end":         {"{}\n{\"a\":1}", []string{"{}", `{"a":1}`}, false},
		"cut inside a line end":    {"{}\r", []string{"{}"}, false},
		"cut inside a value":       {"{}\n{\"a", []string{"{}", `{"a`}, false},
		"byte order mark":          {"\ufeff{}\n\ufeff{}\n", []string{"{}", "\ufeff{}"}, true},
		"only a byte order mark":   {"\ufeff", nil, false},
		"mark on a blank line":     {"\ufeff\r\n{}\n", []string{"{}"}, true},
		"mark before an event":     {"\ufeffdata: {}\n", []string{"{}"}, true},
		"server-sent events":       {": hello\nevent: x\nid: 7\nretry: 10\ndata: {\"a\":1}\n\ndata:{}\r\n\r\n:\n", []string{`{"a":1}`, "{}"}, true},
		"one space is framing":     {"data:  {}\n", []string{" {}"}, true},
		"event without a value":    {"data:\ndata: \r\n", nil, true},
		"other text is not judged": {"database\nevents\nnull\n x\n", []string{"database", "events", "null", " x"}, true},
		"carriage return inside":   {"{}\r{}\r\r\n", []string{"{}\r{}\r"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			for how, src := range map[string]io.Reader{
				"at once":          strings.NewReader(tc.in),
				"byte by byte":     iotest.OneByteReader(strings.NewReader(tc.in)),
				"end with the end": iotest.DataErrReader(strings.NewReader(tc.in)),
			} {
				lines, terminated, err := readAll(src, 0)
				require.Equal(t, io.EOF, err, how)
				assert.Equal(t, tc.want, lines, how)
				assert.Equal(t, tc.terminated, terminated, how)
			}
		})
	}
}

func TestLinesUpToTheLimitAndNoLonger(t *testing.T) {
	for _, limit := range []int{1, 2, 4<<10 - 3, 4<<10 - 2, 4<<10 - 1, 4 << 10, 64<<10 - 3, 64<<10 - 2, 64<<10 - 1, 64 << 10, 65 << 10, 1 << 20} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			for _, end := range []string{"\n", "\r\n", "\r", ""} {
				fits := strings.Repeat("x", limit)
				for _, before := range []string{"", "y\n", "y\r\n\n"} {
					lines, _, err := readAll(strings.NewReader(before+fits+end), limit)
					require.Equalf(t, io.EOF, err, "end %q before %q", end, before)
					require.True(t, fits == lines[len(lines)-1])

					lines, _, err = readAll(strings.NewReader(before+fits+"x"+end+"z\n"), limit)
					var tooLong *TooLongError
					require.ErrorAs(t, err, &tooLong)
					require.Equal(t, limit, tooLong.Limit)
					require.Len(t, lines, min(1, len(before)), "lines before the long one are returned")
				}
			}
		})
	}
}

func TestTooLongIsStickyAndNamesTheLimit(t *testing.T) {
	src := &counting{src: strings.NewReader(strings.Repeat("secret", 100) + "\n{}\n")}
	r := NewReader(src, 16)
	_, err := r.Next()
	require.EqualError(t, err, "line is longer than the limit of 16 bytes")
	reads := src.reads
	line, again := r.Next()
	assert.Equal(t, err, again)
	assert.Nil(t, line)
	assert.Equal(t, reads, src.reads)
}

func TestLineWithoutEndDoesNotFillTheMemory(t *testing.T) {
	src := &counting{src: forever{}}
	_, err := NewReader(src, 1<<20).Next()
	var tooLong *TooLongError
	require.ErrorAs(t, err, &tooLong)
	assert.LessOrEqual(t, src.largest, 1<<20+lineEndReserve, "the buffer stays within the limit")
	assert.LessOrEqual(t, src.bytes, 1<<20+lineEndReserve, "nothing is read beyond it")

	r := NewReader(forever{}, math.MaxInt)
	for range 4 {
		r.fill()
	}
	assert.NoError(t, r.srcErr, "the largest limit does not overflow")
}

func TestShortLinesDoNotMakeTheBufferGrow(t *testing.T) {
	src := &counting{src: iotest.HalfReader(strings.NewReader(strings.Repeat(strings.Repeat("x", 40<<10)+"\n", 50)))}
	lines, _, err := readAll(src, 0)
	require.Equal(t, io.EOF, err)
	assert.Len(t, lines, 50)
	assert.LessOrEqual(t, src.largest, bulkBuffer)
}

func TestBufferGrowsOnlyIfDataComeFast(t *testing.T) {
	text := strings.Repeat(strings.Repeat("x", 1000)+"\n", 1000)
	for name, tc := range map[string]struct{ piece, buffer int }{
		"line by line": {piece: 1001, buffer: firstBuffer},
		"in bulk":      {piece: len(text), buffer: bulkBuffer},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewReader(&pieces{rest: []byte(text), size: tc.piece}, 0)
			for range 1000 {
				line, err := r.Next()
				require.NoError(t, err)
				require.Len(t, line, 1000)
			}
			assert.Len(t, r.buf, tc.buffer)
			_, err := r.Next()
			assert.Equal(t, io.EOF, err)
		})
	}
}

func TestErrorOfTheSourceComesAfterTheData(t *testing.T) {
	broken := errors.New("broken")
	for _, end := range []error{io.ErrUnexpectedEOF, broken} {
		src := io.MultiReader(strings.NewReader("{}\n[1]\n{\"cu"), iotest.ErrReader(end))
		r := NewReader(src, 0)
		for _, want := range []string{"{}", "[1]"} {
			line, err := r.Next()
			require.NoError(t, err)
			assert.Equal(t, want, string(line))
			assert.True(t, r.Terminated())
		}
		line, err := r.Next()
		require.NoError(t, err)
		assert.Equal(t, `{"cu`, string(line))
		assert.False(t, r.Terminated())
		for range 2 {
			_, err = r.Next()
			assert.Equal(t, end, err)
		}
	}
}

func TestSourceThatGivesNothing(t *testing.T) {
	_, err := NewReader(nothing{}, 0).Next()
	assert.Equal(t, io.ErrNoProgress, err)
}

func TestALineIsReturnedBeforeMoreIsRead(t *testing.T) {
	src := &counting{src: io.MultiReader(strings.NewReader("{}\n[1]\n"), iotest.ErrReader(io.ErrUnexpectedEOF))}
	r := NewReader(src, 0)
	for range 2 {
		_, err := r.Next()
		require.NoError(t, err)
		assert.Equal(t, 1, src.reads, "a reader of a quiet stream must not wait for more")
	}
}

func TestNextDoesNotAllocate(t *testing.T) {
	r := NewReader(strings.NewReader(strings.Repeat("data: {\"a\":1}\n\nevent: x\n", 10_000)), 0)
	_, err := r.Next()
	require.NoError(t, err)
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		if _, err := r.Next(); err != nil {
			t.Error(err)
		}
	}))
}

// naiveLines splits a whole text by the rules of the package documentation.
func naiveLines(text string, maxLine int) (lines []string, tooLong bool) {
	for i, raw := range strings.Split(text, "\n") {
		raw = strings.TrimSuffix(raw, "\r")
		if len(raw) > maxLine {
			return lines, true
		}
		if i == 0 {
			raw = strings.TrimPrefix(raw, "\ufeff")
		}
		if strings.HasPrefix(raw, ":") || strings.HasPrefix(raw, "event:") || strings.HasPrefix(raw, "id:") || strings.HasPrefix(raw, "retry:") {
			continue
		}
		if value, ok := strings.CutPrefix(raw, "data:"); ok {
			raw = strings.TrimPrefix(value, " ")
		}
		if strings.Trim(raw, " \t\r") != "" {
			lines = append(lines, raw)
		}
	}
	return lines, false
}

func FuzzNext(f *testing.F) {
	for _, seed := range []string{
		"", "\n", "\r\n", "{}\n[1]\r\n\r\nnull", "\ufeff{}\n", "\xef\xbb", "data: {}\n\n:\nevent: x\nid:\nretry: 1\ndata:\n", "a\rb\r\r\n",
		strings.Repeat("x", 40) + "\nshort\n", strings.Repeat("\n", 20) + "x\r",
	} {
		f.Add([]byte(seed), 20, 3)
		f.Add([]byte(seed), 1<<10, 1)
	}
	f.Fuzz(func(t *testing.T, text []byte, maxLine, piece int) {
		maxLine = 1 + int(uint(maxLine)%(1<<10))
		want, tooLong := naiveLines(string(text), maxLine)
		for _, src := range []io.Reader{bytes.NewReader(text), &pieces{rest: text, size: 1 + int(uint(piece)%64)}} {
			got, _, err := readAll(src, maxLine)
			require.Equal(t, want, got)
			if tooLong {
				require.Equal(t, &TooLongError{Limit: maxLine}, err)
			} else {
				require.Equal(t, io.EOF, err)
			}
		}
	})
}

func BenchmarkNext(b *testing.B) {
	for _, size := range []int{100, 1 << 10, 43 << 10, 500 << 10} {
		text := []byte(strings.Repeat("{"+strings.Repeat("x", size-2)+"}\n", 4<<20/size))
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				r := NewReader(bytes.NewReader(text), 0)
				for {
					if _, err := r.Next(); err != nil {
						break
					}
				}
			}
		})
		b.Run(fmt.Sprintf("%dB bufio.Scanner", size), func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				s := bufio.NewScanner(bytes.NewReader(text))
				s.Buffer(make([]byte, bulkBuffer), DefaultMaxLine)
				for s.Scan() {
				}
			}
		})
	}
}

// counting notes how it is read from.
type counting struct {
	src                   io.Reader
	reads, bytes, largest int
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.src.Read(p)
	c.reads++
	c.bytes += n
	c.largest = max(c.largest, len(p))
	return n, err
}

// forever is a line that does not end.
type forever struct{}

func (forever) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

type nothing struct{}

func (nothing) Read([]byte) (int, error) { return 0, nil }

// pieces returns so many bytes a read.
type pieces struct {
	rest []byte
	size int
}

func (p *pieces) Read(to []byte) (int, error) {
	if len(p.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(to, p.rest[:min(p.size, len(p.rest))])
	p.rest = p.rest[n:]
	return n, nil
}
