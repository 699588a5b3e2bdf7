package createos

import (
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
)

// redactionMark is what a Secret prints as. A configuration refuses it as a
// key, because a document that was printed and read back would otherwise send
// the mark to the provider instead of the key.
const redactionMark = "[redacted]"

// Secret is a string that does not print: an API key, or the value of an
// environment variable. Every verb of fmt, encoding/json, encoding.TextMarshaler
// and log/slog show the mark "[redacted]" in its place. Only [Secret.Reveal]
// gives the string back.
//
// The string is held in a closure, not in a field. A printer that works by
// reflection and cannot call methods, as fmt does with the unexported fields of
// a struct, and as the diffs of test libraries do everywhere, finds a function
// and prints its address at most.
//
// The zero Secret is the empty string and means "no secret". Two secrets are
// compared with [Secret.Equal]; the == operator does not compile, and
// reflect.DeepEqual calls no two non-zero secrets equal, not even a secret and
// its copy. A Secret never changes and may be used from several goroutines.
type Secret struct {
	reveal func() string
	// With a second field the struct is not laid out as a bare pointer, which
	// at least one popular printer of unexported fields mistakes and crashes
	// on.
	_ struct{}
}

// NewSecret returns a Secret that holds s. For the empty string it is the zero
// Secret.
func NewSecret(s string) Secret {
	if s == "" {
		return Secret{}
	}
	return Secret{reveal: func() string { return s }}
}

// Reveal returns the string itself. The caller answers for where it goes.
func (s Secret) Reveal() string {
	if s.reveal == nil {
		return ""
	}
	return s.reveal()
}

// IsZero reports whether s holds nothing. It also makes the JSON option
// "omitzero" leave an absent secret out.
func (s Secret) IsZero() bool { return s.Reveal() == "" }

// Equal reports whether both hold the same string. The time it takes depends on
// their lengths, not on where they differ.
func (s Secret) Equal(other Secret) bool {
	return subtle.ConstantTimeCompare([]byte(s.Reveal()), []byte(other.Reveal())) == 1
}

// String returns "[redacted]", or "" for the zero Secret.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return redactionMark
}

// GoString returns the same as String; it is what the verb %#v asks for.
func (s Secret) GoString() string { return s.String() }

// Format writes the same as String, whatever the verb and its flags. Without it
// a verb that does not suit a string, such as %d, would print the inside.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.String()) }

// MarshalJSON writes "[redacted]", or null for the zero Secret. There is no way
// back: a Secret cannot be read from JSON.
func (s Secret) MarshalJSON() ([]byte, error) {
	if s.IsZero() {
		return []byte("null"), nil
	}
	return []byte(`"` + redactionMark + `"`), nil
}

// MarshalText writes "[redacted]", or nothing for the zero Secret.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue makes log/slog show "[redacted]", or "" for the zero Secret.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// Env wraps each value of vars, for a command's environment. A variable with an
// empty value stays in the map, as the zero Secret. The map is a new one; a nil
// map gives nil.
func Env(vars map[string]string) map[string]Secret {
	if vars == nil {
		return nil
	}
	env := make(map[string]Secret, len(vars))
	for name, value := range vars {
		env[name] = NewSecret(value)
	}
	return env
}
