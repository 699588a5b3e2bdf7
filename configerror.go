package createos

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// FieldError says what is wrong with one key of a configuration.
type FieldError struct {
	// Field is the key in the document, such as "apiUrl". Inside a list or an
	// object it names the member too: "egressAllowlist[0]",
	// "rootfsByAdapter.codex".
	Field string
	// Message is a sentence that names the key. It quotes no values, so neither
	// the API key nor what stands in a wrong apiUrl.
	Message string
}

// ConfigError is returned for a configuration that does not hold: by
// [ParseConfig], [Config.Validate] and [Config.UnmarshalJSON], and by every call
// that is given such a Config. Match it with errors.As. Nothing was sent when it
// comes.
type ConfigError struct {
	// Fields holds all that is wrong, not only the first; never empty. The order
	// is that of the fields of Config, unknown keys last and sorted.
	Fields []FieldError
}

// Error lists every field.
func (e *ConfigError) Error() string {
	messages := make([]string, len(e.Fields))
	for i, f := range e.Fields {
		messages[i] = f.Message
	}
	return "createos: invalid configuration: " + strings.Join(messages, "; ")
}

// forCleanup is what keeps even a destroy from being sent, nil for nothing: cleanup
// needs a valid origin and a key, and nothing else of a configuration.
func (e *ConfigError) forCleanup() *ConfigError {
	if e == nil {
		return nil
	}
	return newConfigError(slices.DeleteFunc(slices.Clone(e.Fields), func(f FieldError) bool {
		return f.Field != "apiUrl" && f.Field != "apiKey"
	}))
}

// newConfigError returns nil for no errors.
func newConfigError(errs fieldErrors) *ConfigError {
	if len(errs) == 0 {
		return nil
	}
	fields := slices.Clone(errs)
	slices.SortStableFunc(fields, compareFields)
	return &ConfigError{Fields: fields}
}

// fieldErrors collects what is wrong while a configuration is checked.
type fieldErrors []FieldError

// add records an error; the text goes on after the name of the field.
func (e *fieldErrors) add(field, text string) {
	*e = append(*e, FieldError{Field: field, Message: field + " " + text})
}

// has reports whether anything is wrong with a key or inside of it.
func (e fieldErrors) has(key string) bool {
	return slices.ContainsFunc(e, func(f FieldError) bool { return topKey(f.Field) == key })
}

// covers reports whether the same field, or all of its key, is known to be wrong.
func (e fieldErrors) covers(field string) bool {
	return slices.ContainsFunc(e, func(f FieldError) bool { return f.Field == field || f.Field == topKey(field) })
}

// documentKeys are the keys of a document, in the order of their errors.
var documentKeys = []string{
	"apiUrl", "apiKey", "shape", "rootfs", "region", "rootfsByAdapter", "timeoutMs",
	"reuseLease", "autoPauseAfterSeconds", "egressAllowlist", "egressDenyAll",
}

// topKey returns the key of the document in which a field stands. An unknown
// key is its own, also when it looks like a member of a known one.
func topKey(field string) string {
	end := strings.IndexAny(field, ".[")
	if end < 0 {
		return field
	}
	if key := field[:end]; key == "rootfsByAdapter" || key == "egressAllowlist" {
		return key
	}
	return field
}

func compareFields(a, b FieldError) int {
	rankA, rankB := fieldRank(a.Field), fieldRank(b.Field)
	if rankA == rankB && rankA == len(documentKeys) {
		return strings.Compare(a.Field, b.Field)
	}
	return cmp.Compare(rankA, rankB)
}

func fieldRank(field string) int {
	if i := slices.Index(documentKeys, topKey(field)); i >= 0 {
		return i
	}
	return len(documentKeys)
}

// adapterField names a member of rootfsByAdapter, quoted if it would be hard to
// read or could be taken for something else.
func adapterField(adapter string) string {
	plain := !strings.ContainsFunc(adapter, func(r rune) bool {
		return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	})
	if plain {
		return "rootfsByAdapter." + adapter
	}
	return "rootfsByAdapter[" + strconv.Quote(adapter) + "]"
}

func indexField(key string, index int) string { return key + "[" + strconv.Itoa(index) + "]" }
