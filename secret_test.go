package createos

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// canary is a secret that must not turn up in anything printed. It has no
// character that a printer would escape.
const canary = "skp-canary-7f3a91"

// everyPrint shows v in all the ways a host might, by accident, and returns what
// came out under a name for each way.
func everyPrint(t *testing.T, v any) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "% x", "%d", "%t", "%e", "%p", "%T", "%w", "%10v", "%-10s", "%.3s"} {
		out[verb] = fmt.Sprintf(verb, v)
	}
	out["Print"] = fmt.Sprint(v)
	out["Errorf"] = fmt.Errorf("%v", v).Error()

	asJSON, err := json.Marshal(v)
	require.NoError(t, err)
	out["json"] = string(asJSON)

	var text, jsonLog bytes.Buffer
	slog.New(slog.NewTextHandler(&text, nil)).Info("m", "v", v, slog.Group("g", "v", v))
	slog.New(slog.NewJSONHandler(&jsonLog, nil)).Info("m", "v", v, slog.Group("g", "v", v))
	out["slog text"] = text.String()
	out["slog json"] = jsonLog.String()

	out["testify diff"] = testifyDiff(v)
	return out
}

// testifyDiff returns what a failed comparison of v would put into a test log.
func testifyDiff(v any) string {
	var recorder recordingT
	assert.Equal(&recorder, []any{v, "want"}, []any{v, "got"})
	assert.ElementsMatch(&recorder, []any{v}, []any{"other"})
	return recorder.String()
}

type recordingT struct{ bytes.Buffer }

func (r *recordingT) Errorf(format string, args ...any) { fmt.Fprintf(r, format, args...) }

// requireHidden fails when the canary can be read in any print of v, plain or
// as the hexadecimal digits that %x makes of a string.
func requireHidden(t *testing.T, v any) {
	t.Helper()
	for way, out := range everyPrint(t, v) {
		for _, form := range []string{canary, fmt.Sprintf("%x", canary), fmt.Sprintf("%X", canary), fmt.Sprintf("% x", canary)} {
			require.NotContains(t, out, form, "printed with %s", way)
		}
		require.NotEmpty(t, out, "printed with %s", way)
	}
}

func TestSecretIsNeverPrinted(t *testing.T) {
	s := NewSecret(canary)
	type hidden struct{ key Secret }
	type shown struct{ Key Secret }
	type deep struct {
		inner  hidden
		ptr    *hidden
		list   []Secret
		byName map[string]Secret
		any    any
	}
	for name, v := range map[string]any{
		"itself":                 s,
		"a pointer":              &s,
		"an exported field":      shown{s},
		"an unexported field":    hidden{s},
		"a pointer to a struct":  &hidden{s},
		"a slice":                []Secret{s},
		"an array":               [1]Secret{s},
		"a map":                  map[string]Secret{"k": s},
		"a map of structs":       map[string]hidden{"k": {s}},
		"an environment":         Env(map[string]string{"TOKEN": canary}),
		"many levels down":       deep{hidden{s}, &hidden{s}, []Secret{s}, map[string]Secret{"k": s}, s},
		"a pointer to all of it": &deep{hidden{s}, &hidden{s}, []Secret{s}, map[string]Secret{"k": s}, s},
	} {
		t.Run(name, func(t *testing.T) { requireHidden(t, v) })
	}
}

// The helper above would be worthless if it could not see a leak.
func TestEveryPrintSeesAPlainString(t *testing.T) {
	type plain struct{ key string }
	out := everyPrint(t, plain{canary})
	for _, way := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "slog text", "testify diff"} {
		assert.Contains(t, out[way], canary, way)
	}
	assert.Contains(t, out["%x"], fmt.Sprintf("%x", canary))
}

func TestSecretShowsTheMark(t *testing.T) {
	s := NewSecret(canary)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		assert.Equal(t, "[redacted]", fmt.Sprintf(verb, s), verb)
		assert.Empty(t, fmt.Sprintf(verb, Secret{}), verb)
	}
	assert.Equal(t, "[redacted]", s.String())
	assert.Equal(t, "[redacted]", s.GoString())
	assert.Equal(t, "[redacted]", s.LogValue().String())

	type doc struct {
		Key    Secret `json:"key"`
		Absent Secret `json:"absent"`
		Left   Secret `json:"left,omitzero"`
	}
	got, err := json.Marshal(doc{Key: s})
	require.NoError(t, err)
	assert.JSONEq(t, `{"key":"[redacted]","absent":null}`, string(got))

	text, err := xml.Marshal(doc{Key: s})
	require.NoError(t, err)
	assert.Contains(t, string(text), "<Key>[redacted]</Key>")
	assert.NotContains(t, string(text), canary)
}

func TestSecretValue(t *testing.T) {
	s := NewSecret(canary)
	assert.Equal(t, canary, s.Reveal())
	assert.False(t, s.IsZero())
	assert.True(t, s.Equal(NewSecret(canary)))
	assert.False(t, s.Equal(NewSecret(canary+"x")))
	assert.False(t, s.Equal(NewSecret("x"+canary[1:])))
	assert.False(t, s.Equal(Secret{}))

	assert.True(t, NewSecret("").IsZero())
	assert.Equal(t, Secret{}, NewSecret(""))
	assert.True(t, Secret{}.Equal(NewSecret("")))
	assert.Empty(t, Secret{}.Reveal())
}

func TestEnv(t *testing.T) {
	vars := map[string]string{"A": "1", "EMPTY": ""}
	env := Env(vars)
	require.Len(t, env, 2)
	assert.Equal(t, "1", env["A"].Reveal())
	assert.True(t, env["EMPTY"].IsZero())
	assert.Contains(t, env, "EMPTY")

	vars["A"] = "2"
	assert.Equal(t, "1", env["A"].Reveal(), "the map is a copy")
	assert.Nil(t, Env(nil))
}
