package createos

import (
	"errors"
	"fmt"
	"strings"
)

// errShellNUL is returned for a word with a NUL byte. No shell and no program can be given one, and what bash does with it
// (it drops the byte, or ends the word there) would run another command than the one asked for.
var errShellNUL = errors.New("word contains a NUL byte")

// shellQuote returns s as one word of a script for bash, which reads it back byte for byte. The form serves every POSIX shell: between
// single quotes nothing is special, neither backslash nor "!" nor line end, so only the single quote itself must stand outside.
// The empty string gives a pair of quotes, because a word that is not there would let the next one take its place.
//
// It is meant for words within a script. Where a program can be given an argument vector, that is better than any quoting.
func shellQuote(s string) (string, error) {
	if strings.IndexByte(s, 0) >= 0 {
		return "", errShellNUL
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'", nil
}

// shellJoin quotes words and puts a space between them. Its error says which word is bad, by its place, never by what is in it.
func shellJoin(words []string) (string, error) {
	var script strings.Builder
	for i, word := range words {
		quoted, err := shellQuote(word)
		if err != nil {
			return "", fmt.Errorf("word %d: %w", i, err)
		}
		if i > 0 {
			script.WriteByte(' ')
		}
		script.WriteString(quoted)
	}
	return script.String(), nil
}
