package createos

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// shell is one way to have a script read by a real shell.
type shell struct {
	name  string
	path  string
	flag  string // "" to read the script from standard input
	value string // of LC_ALL
}

func shells(t testing.TB) (found []shell) {
	t.Helper()
	for _, path := range []string{"/bin/bash", "/bin/sh"} {
		if _, err := os.Stat(path); err != nil {
			t.Skipf("quoting is tested against a real shell, and there is no %s here", path)
		}
	}
	for _, locale := range []string{"C", "C.UTF-8"} {
		for _, how := range []struct{ path, flag string }{
			{"/bin/bash", "-c"}, {"/bin/bash", "-lc"}, {"/bin/bash", ""}, {"/bin/sh", "-c"}, {"/bin/sh", ""},
		} {
			found = append(found, shell{fmt.Sprintf("%s%s in %s", how.path[len("/bin/"):], how.flag, locale), how.path, how.flag, locale})
		}
	}
	return found
}

// words runs a script that prints the words it was given, and returns them.
func (s shell) words(t testing.TB, words []string) []string {
	t.Helper()
	joined, err := shellJoin(words)
	require.NoError(t, err)
	script := `printf '%s\0' ` + joined + " </dev/null\n"

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.path)
	if s.flag != "" {
		cmd.Args = append(cmd.Args, s.flag, script)
	} else {
		cmd.Stdin = strings.NewReader(script)
	}
	cmd.Dir = t.TempDir()
	cmd.Env = []string{"LC_ALL=" + s.value, "LANG=" + s.value, "HOME=" + cmd.Dir, "PATH=/usr/bin:/bin"}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	require.NoError(t, cmd.Run(), "%s: %.200q", s.name, stderr.String())
	require.Empty(t, stderr.String(), s.name)
	require.True(t, bytes.HasSuffix(stdout.Bytes(), []byte{0}), s.name)
	return strings.Split(strings.TrimSuffix(stdout.String(), "\x00"), "\x00")
}

// requireWordsComeBack gives the words to a shell in scripts that fit into one argument.
func requireWordsComeBack(t *testing.T, s shell, words []string) {
	t.Helper()
	const maxScript = 60 << 10 // a single quote takes four bytes, and Linux allows 128 KiB for an argument
	for len(words) > 0 {
		n, size := 0, 0
		for n < len(words) && (n == 0 || size+len(words[n])+3*strings.Count(words[n], "'")+3 < maxScript) {
			size += len(words[n]) + 3*strings.Count(words[n], "'") + 3
			n++
		}
		got := s.words(t, words[:n])
		require.Len(t, got, n, s.name)
		for i := range n {
			require.Truef(t, got[i] == words[i], "%s: gave %.200q, got %.200q", s.name, words[i], got[i])
		}
		words = words[n:]
	}
}

const specialBytes = "'\"\\!$`\n\r\t %*?[]{}()<>|&;#~=-^:/@,+.a0\x01\x02\x1b\x7f\x80\x81\x88\xc3\xa9\xe3\xf0\xff"

// hostileWords are words that went wrong somewhere, every byte alone and inside, and every pair of special bytes.
func hostileWords() []string {
	words := []string{
		"", "a", "", "''", "'", "'''", `\'`, `'\''`, `\`, `\\`, `\n`, `a\`, "-n", "-e", "--", "-", "~", "~root", "!", "!!", "a!b", "%s", "%%", `%b\0`,
		"$HOME", "${HOME}", "$(touch x)", "`touch x`", "$((1+1))", "$'\\n'", `$"x"`, "a b", " a ", "\t", "\n", "\n\n", "a\n", "\na", "\r", "a\r\nb",
		"a;touch x", "a&&b", "a||b", "a|b", ">x", "<x", "<<EOF", "2>&1", "&", "#", "a#b", "*", "?", "[a-z]", "{a,b}", "{1..9}", "X=1", "if", "done", "[[", "))",
		"日本語 🧪 é", "日本語'🧪'é", "\xff", "\xc3", "\xc3'", "\xe3\x81", "\xe3\x81'a", "\xf0\x9f\xa7", "'\xf0\x9f\xa7'", "\x80\x80", "\xed\xa0\x80", "\xc0\x80",
		"\x01", "\x01\x01", "\x01'", "'\x01", "\x7f", "\x7f\x7f", "\x01\x7f", "\x7f'\x01", "\x1b[31m", "\x04", "\x1a", "\ufeff", "\u2028",
		strings.Repeat("'", 1000), strings.Repeat(`\`, 1001), strings.Repeat("\n", 1000),
	}
	for c := 1; c < 256; c++ {
		b := string([]byte{byte(c)})
		words = append(words, b, "a"+b+"z", "'"+b+"'")
	}
	for i := range len(specialBytes) {
		for j := range len(specialBytes) {
			words = append(words, specialBytes[i:i+1]+specialBytes[j:j+1])
		}
	}
	return append(words, "") // the last one must not get lost
}

// randomWords are of any bytes but NUL, with many special ones among them.
func randomWords(n int) []string {
	rnd := rand.New(rand.NewPCG(7, 11))
	words := make([]string, n)
	for i := range words {
		word := make([]byte, rnd.IntN(40))
		for j := range word {
			if rnd.IntN(2) == 0 {
				word[j] = specialBytes[rnd.IntN(len(specialBytes))]
			} else {
				word[j] = byte(1 + rnd.IntN(255))
			}
		}
		words[i] = string(word)
	}
	return words
}

func TestShellGivesTheWordsBack(t *testing.T) {
	words := append(hostileWords(), randomWords(2000)...)
	for _, s := range shells(t) {
		t.Run(s.name, func(t *testing.T) { requireWordsComeBack(t, s, words) })
	}
}

func TestShellGivesLargeWordsBack(t *testing.T) {
	large := strings.Join(randomWords(12_000), "")[:200<<10]
	words := []string{large, "", strings.Repeat("'", 200<<10), strings.Repeat("é", 100<<10), "end"}
	for _, s := range shells(t) {
		if s.flag == "" {
			t.Run(s.name, func(t *testing.T) {
				got := s.words(t, words)
				require.Len(t, got, len(words))
				for i := range words {
					require.Truef(t, got[i] == words[i], "word %d", i)
				}
			})
		}
	}
}

func TestShellQuote(t *testing.T) {
	for in, want := range map[string]string{
		"":      `''`,
		"a":     `'a'`,
		"it's":  `'it'\''s'`,
		`\n`:    `'\n'`,
		"'":     `''\'''`,
		"a\nb":  "'a\nb'",
		"\xff!": "'\xff!'",
	} {
		got, err := shellQuote(in)
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
}

func TestShellQuoteRefusesNUL(t *testing.T) {
	for _, in := range []string{"\x00", "hunter2\x00", "\x00hunter2", "hun\x00ter2"} {
		got, err := shellQuote(in)
		require.ErrorIs(t, err, errShellNUL)
		assert.Empty(t, got)
		assert.NotContains(t, err.Error(), "hunter2")
	}
}

func TestShellJoin(t *testing.T) {
	got, err := shellJoin([]string{"", "a b", ""})
	require.NoError(t, err)
	assert.Equal(t, `'' 'a b' ''`, got)

	got, err = shellJoin(nil)
	require.NoError(t, err)
	assert.Empty(t, got)

	got, err = shellJoin([]string{"ok", "hunter2\x00"})
	require.ErrorIs(t, err, errShellNUL)
	require.EqualError(t, err, "word 1: word contains a NUL byte")
	assert.Empty(t, got)
}

func FuzzShellQuote(f *testing.F) {
	for _, seed := range []string{"", "'", `\'`, "a\nb", "$(x)`y`", "!", "\x01\x7f", "\xe3'", "日本語 🧪 é", "a\x00b"} {
		f.Add(seed, seed)
	}
	all := shells(f)
	f.Fuzz(func(t *testing.T, first, second string) {
		if strings.Contains(first+second, "\x00") {
			_, err := shellJoin([]string{first, second})
			require.ErrorIs(t, err, errShellNUL)
			return
		}
		for _, s := range all {
			if s.flag == "" {
				assert.Equal(t, []string{first, second, ""}, s.words(t, []string{first, second, ""}), s.name)
			}
		}
	})
}

func BenchmarkShellQuote(b *testing.B) {
	word := strings.Repeat("it's a word ", 100)
	b.SetBytes(int64(len(word)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := shellQuote(word); err != nil {
			b.Fatal(err)
		}
	}
}
