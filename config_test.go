package createos

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const officialOrigin = "https://api.sb.createos.sh"

// minimalDoc returns a valid document with the given keys set on top.
func minimalDoc(with map[string]any) map[string]any {
	doc := map[string]any{"apiUrl": officialOrigin, "shape": "s-1vcpu-1gb"}
	maps.Copy(doc, with)
	return doc
}

func minimalConfig() Config {
	return Config{APIURL: officialOrigin, APIKey: NewSecret("skp_x"), Shape: "s-1vcpu-1gb"}
}

// wrongFields returns the fields of a *ConfigError, and checks what holds for
// every one of them.
func wrongFields(t *testing.T, err error) []string {
	t.Helper()
	var config *ConfigError
	require.ErrorAs(t, err, &config)
	fields := []string{}
	for _, f := range config.Fields {
		assert.Contains(t, f.Message, f.Field, "every message names the key")
		assert.Contains(t, err.Error(), f.Message)
		fields = append(fields, f.Field)
	}
	require.NotEmpty(t, fields)
	return fields
}

func TestParseConfigFull(t *testing.T) {
	config, err := ParseConfig(map[string]any{
		"apiUrl":                " HTTPS://API-EU.sb.createos.sh:443/v1/ ",
		"apiKey":                " skp_x\t",
		"shape":                 " s-1vcpu-1gb ",
		"rootfs":                " devbox:1 ",
		"region":                "eu",
		"rootfsByAdapter":       map[string]any{"codex": " codex:1 ", " claude ": "claude:2"},
		"timeoutMs":             1500,
		"reuseLease":            true,
		"autoPauseAfterSeconds": 900.0,
		"egressAllowlist":       []any{" a.test ", "*", "a.test", "10.0.0.0/8:443"},
		"egressDenyAll":         false,
	})
	require.NoError(t, err)
	assert.Equal(t, "skp_x", config.APIKey.Reveal())
	config.APIKey = Secret{}
	assert.Equal(t, Config{
		APIURL:          "https://api-eu.sb.createos.sh",
		Shape:           "s-1vcpu-1gb",
		Rootfs:          "devbox:1",
		Region:          "eu",
		RootfsByAdapter: map[string]string{"codex": "codex:1", "claude": "claude:2"},
		Timeout:         1500 * time.Millisecond,
		ReuseLease:      true,
		AutoPauseAfter:  15 * time.Minute,
		EgressAllowlist: []string{"a.test", "10.0.0.0/8:443"},
	}, config)
	assert.NoError(t, config.Validate())
}

func TestParseConfigNullIsAbsent(t *testing.T) {
	doc := minimalDoc(nil)
	for _, key := range documentKeys {
		if _, required := doc[key]; !required {
			doc[key] = nil
		}
	}
	config, err := ParseConfig(doc)
	require.NoError(t, err)
	assert.Equal(t, Config{APIURL: officialOrigin, Shape: "s-1vcpu-1gb"}, config)

	config, err = ParseConfig(minimalDoc(map[string]any{
		"egressAllowlist": []any(nil), "rootfsByAdapter": map[string]any(nil),
	}))
	require.NoError(t, err, "a nil list or map marshals as null")
	assert.Nil(t, config.EgressAllowlist)

	_, err = ParseConfig(map[string]any{"apiUrl": nil, "shape": nil})
	assert.Equal(t, []string{"apiUrl", "shape"}, wrongFields(t, err))
	assert.ErrorContains(t, err, "apiUrl is required")
	assert.ErrorContains(t, err, "shape is required")
}

func TestParseConfigRefuses(t *testing.T) {
	for _, tc := range []struct {
		key   string
		value any
		field string // "" for the key itself
	}{
		{"apiUrl", 5, ""},
		{"apiUrl", "", ""},
		{"apiUrl", "  ", ""},
		{"apiUrl", "https://a\x00.test", ""},
		{"apiKey", 5, ""},
		{"apiKey", true, ""},
		{"apiKey", "", ""},
		{"apiKey", " ", ""},
		{"apiKey", "a\x00b", ""},
		{"apiKey", "[redacted]", ""},
		{"apiKey", json.Number("5"), ""},
		{"apiKey", NewSecret("skp_x"), ""},
		{"shape", 1, ""},
		{"shape", "", ""},
		{"shape", "\t\n", ""},
		{"shape", "a\x00", ""},
		{"shape", "a\xff", ""},
		{"shape", json.Number("1"), ""},
		{"rootfs", "", ""},
		{"rootfs", " ", ""},
		{"rootfs", []any{"a"}, ""},
		{"region", "", ""},
		{"region", false, ""},
		{"region", "\x00", ""},
		{"rootfsByAdapter", "codex:1", ""},
		{"rootfsByAdapter", []any{}, ""},
		{"rootfsByAdapter", map[string]any{"codex": nil}, "rootfsByAdapter.codex"},
		{"rootfsByAdapter", map[string]any{"codex": 1}, "rootfsByAdapter.codex"},
		{"rootfsByAdapter", map[string]any{"codex": ""}, "rootfsByAdapter.codex"},
		{"rootfsByAdapter", map[string]string{"codex": " "}, "rootfsByAdapter.codex"},
		{"rootfsByAdapter", map[string]any{"a.b\n": 1}, `rootfsByAdapter["a.b\n"]`},
		{"rootfsByAdapter", map[string]any{"a": "x", " a": "y"}, "rootfsByAdapter.a"},
		{"rootfsByAdapter", map[string]any{" ": "x"}, ""},
		{"rootfsByAdapter", map[string]any{"a\x00": "x"}, ""},
		{"timeoutMs", "500", ""},
		{"timeoutMs", true, ""},
		{"timeoutMs", 1.5, ""},
		{"timeoutMs", float32(1.5), ""},
		{"timeoutMs", math.NaN(), ""},
		{"timeoutMs", math.Inf(1), ""},
		{"timeoutMs", math.Inf(-1), ""},
		{"timeoutMs", 0, ""},
		{"timeoutMs", 0.0, ""},
		{"timeoutMs", math.Copysign(0, -1), ""},
		{"timeoutMs", -1, ""},
		{"timeoutMs", 86_400_001, ""},
		{"timeoutMs", 1e300, ""},
		{"timeoutMs", int64(math.MaxInt64), ""},
		{"timeoutMs", int64(math.MinInt64), ""},
		{"timeoutMs", uint64(math.MaxUint64), ""},
		{"timeoutMs", uint(math.MaxUint), ""},
		{"timeoutMs", json.Number("1.5"), ""},
		{"timeoutMs", json.Number("1e400"), ""},
		{"timeoutMs", json.Number("NaN"), ""},
		{"timeoutMs", json.Number("Inf"), ""},
		{"timeoutMs", json.Number("0x10"), ""},
		{"timeoutMs", json.Number("+5"), ""},
		{"timeoutMs", json.Number("05"), ""},
		{"timeoutMs", json.Number("5 "), ""},
		{"timeoutMs", json.Number("-"), ""},
		{"timeoutMs", json.Number("true"), ""},
		{"timeoutMs", json.Number(""), ""},
		{"timeoutMs", 500 * time.Millisecond, ""},
		{"timeoutMs", time.Duration(500), ""},
		{"timeoutMs", []any{500}, ""},
		{"reuseLease", "true", ""},
		{"reuseLease", 1, ""},
		{"autoPauseAfterSeconds", 59, ""},
		{"autoPauseAfterSeconds", 0, ""},
		{"autoPauseAfterSeconds", 86_401, ""},
		{"autoPauseAfterSeconds", 60.5, ""},
		{"autoPauseAfterSeconds", "900", ""},
		{"egressAllowlist", "a.test", ""},
		{"egressAllowlist", map[string]any{}, ""},
		{"egressAllowlist", []any{}, ""},
		{"egressAllowlist", []string{}, ""},
		{"egressAllowlist", []any{"a.test", ""}, "egressAllowlist[1]"},
		{"egressAllowlist", []any{" ", "a.test"}, "egressAllowlist[0]"},
		{"egressAllowlist", []any{"*", ""}, "egressAllowlist[1]"},
		{"egressAllowlist", []any{"a.test", nil}, "egressAllowlist[1]"},
		{"egressAllowlist", []any{80}, "egressAllowlist[0]"},
		{"egressAllowlist", []string{"a\x00.test"}, "egressAllowlist[0]"},
		{"egressAllowlist", []string{"a.test,b.test"}, "egressAllowlist[0]"},
		{"egressAllowlist", []string{"a.test b.test"}, "egressAllowlist[0]"},
		{"egressAllowlist", []string{"a.test\nb.test"}, "egressAllowlist[0]"},
		{"egressAllowlist", []string{"https://a.test"}, "egressAllowlist[0]"},
		{"egressDenyAll", "yes", ""},
		{"egressDenyAll", 0, ""},
		{"timeoutms", 500, ""},
		{"", 1, ""},
	} {
		t.Run(fmt.Sprintf("%s=%#v", tc.key, tc.value), func(t *testing.T) {
			config, err := ParseConfig(minimalDoc(map[string]any{tc.key: tc.value}))
			field := tc.field
			if field == "" {
				field = tc.key
			}
			assert.Equal(t, []string{field}, wrongFields(t, err))
			assert.Equal(t, err, config.Validate(), "it stays invalid, for the same reasons")

			s, serr := config.settings(NewSecret("skp_fallback"))
			require.Error(t, serr)
			assert.Equal(t, tc.key == "apiUrl" || tc.key == "apiKey", serr.forCleanup() != nil)
			if tc.key == "apiKey" {
				assert.True(t, s.key.IsZero(), "a refused key is not replaced by the fallback")
			}
			if strings.HasPrefix(tc.key, "egressA") {
				assert.Equal(t, []string{denyAllRule}, s.egress, "a refused list is not open")
			}
		})
	}
}

func TestParseConfigTakesEveryKindOfInteger(t *testing.T) {
	for _, n := range []any{
		int(100), int8(100), int16(100), int32(100), int64(100), uint(100), uint8(100), uint16(100),
		uint32(100), uint64(100), float32(100), float64(100),
		json.Number("100"), json.Number("1e2"), json.Number("100.0"),
	} {
		config, err := ParseConfig(minimalDoc(map[string]any{"timeoutMs": n, "autoPauseAfterSeconds": n}))
		require.NoError(t, err, "%T %v", n, n)
		assert.Equal(t, 100*time.Millisecond, config.Timeout, "%T", n)
		assert.Equal(t, 100*time.Second, config.AutoPauseAfter, "%T", n)
	}
	for _, edge := range []map[string]any{
		{"timeoutMs": 1}, {"timeoutMs": 86_400_000},
		{"autoPauseAfterSeconds": 60}, {"autoPauseAfterSeconds": 86_400},
	} {
		_, err := ParseConfig(minimalDoc(edge))
		assert.NoError(t, err, edge)
	}
}

func TestParseConfigReportsAllErrorsInOrder(t *testing.T) {
	config, err := ParseConfig(map[string]any{
		"zeta": 1, "ApiUrl": "https://a.test", "apiUrl.x": 1,
		"egressDenyAll":         1,
		"egressAllowlist":       []any{"", "ok.test", 5, "a b"},
		"autoPauseAfterSeconds": 1,
		"reuseLease":            1,
		"timeoutMs":             1.5,
		"rootfsByAdapter":       map[string]any{"b": 1, "a": "", "ok": "image"},
		"region":                "",
		"rootfs":                "devbox:1",
		"apiKey":                "a\nb",
	})
	assert.Equal(t, []string{
		"apiUrl", "apiKey", "shape", "region", "rootfsByAdapter.b", "rootfsByAdapter.a", "timeoutMs",
		"reuseLease", "autoPauseAfterSeconds", "egressAllowlist[2]", "egressAllowlist[0]", "egressAllowlist[3]",
		"egressDenyAll", "ApiUrl", "apiUrl.x", "zeta",
	}, wrongFields(t, err))
	assert.ErrorContains(t, err, `unknown key "ApiUrl", is apiUrl meant?`)

	assert.Equal(t, "devbox:1", config.Rootfs, "what was valid is there")
	assert.Equal(t, map[string]string{"ok": "image"}, config.RootfsByAdapter)
	assert.Equal(t, err, config.Validate())
	config.Shape = "s-1vcpu-1gb"
	assert.Equal(t, err, config.Validate(), "a repair by hand does not make it valid")
}

func TestValidateTyped(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Config)
		want   []string
	}{
		"valid":                   {func(*Config) {}, nil},
		"a key is not needed":     {func(c *Config) { c.APIKey = Secret{} }, nil},
		"no URL, no shape":        {func(c *Config) { c.APIURL, c.Shape = "", "" }, []string{"apiUrl", "shape"}},
		"blank strings":           {func(c *Config) { c.Rootfs, c.Region = " ", "\t" }, []string{"rootfs", "region"}},
		"blank key":               {func(c *Config) { c.APIKey = NewSecret("  ") }, []string{"apiKey"}},
		"redacted key":            {func(c *Config) { c.APIKey = NewSecret(" [redacted] ") }, []string{"apiKey"}},
		"blank adapter":           {func(c *Config) { c.RootfsByAdapter = map[string]string{" ": "x"} }, []string{"rootfsByAdapter"}},
		"blank image":             {func(c *Config) { c.RootfsByAdapter = map[string]string{"a": ""} }, []string{"rootfsByAdapter.a"}},
		"negative timeout":        {func(c *Config) { c.Timeout = -time.Second }, []string{"timeoutMs"}},
		"timeout below 1 ms":      {func(c *Config) { c.Timeout = time.Microsecond }, []string{"timeoutMs"}},
		"timeout of broken ms":    {func(c *Config) { c.Timeout = 1500 * time.Microsecond }, []string{"timeoutMs"}},
		"timeout above 24 h":      {func(c *Config) { c.Timeout = 24*time.Hour + time.Millisecond }, []string{"timeoutMs"}},
		"timeout of 24 h":         {func(c *Config) { c.Timeout = 24 * time.Hour }, nil},
		"auto-pause too short":    {func(c *Config) { c.AutoPauseAfter = 59 * time.Second }, []string{"autoPauseAfterSeconds"}},
		"auto-pause too long":     {func(c *Config) { c.AutoPauseAfter = 25 * time.Hour }, []string{"autoPauseAfterSeconds"}},
		"auto-pause of broken s":  {func(c *Config) { c.AutoPauseAfter = 90*time.Second + 1 }, []string{"autoPauseAfterSeconds"}},
		"auto-pause of 60 s":      {func(c *Config) { c.AutoPauseAfter = time.Minute }, nil},
		"empty egress list":       {func(c *Config) { c.EgressAllowlist = []string{} }, []string{"egressAllowlist"}},
		"deny all":                {func(c *Config) { c.EgressDenyAll = true }, nil},
		"deny all beside a list":  {func(c *Config) { c.EgressDenyAll, c.EgressAllowlist = true, []string{"a"} }, []string{"egressDenyAll"}},
		"deny all beside *":       {func(c *Config) { c.EgressDenyAll, c.EgressAllowlist = true, []string{"*"} }, []string{"egressDenyAll"}},
		"deny all beside nothing": {func(c *Config) { c.EgressDenyAll, c.EgressAllowlist = true, []string{} }, []string{"egressAllowlist", "egressDenyAll"}},
	} {
		t.Run(name, func(t *testing.T) {
			config := minimalConfig()
			tc.change(&config)
			err := config.Validate()
			if tc.want == nil {
				assert.NoError(t, err)
				return
			}
			assert.Equal(t, tc.want, wrongFields(t, err))
		})
	}
}

func TestEmptyEgressListNamesBothMeanings(t *testing.T) {
	config := minimalConfig()
	config.EgressAllowlist = []string{}
	err := config.Validate()
	assert.ErrorContains(t, err, "leave the key out for open egress")
	assert.ErrorContains(t, err, "egressDenyAll")
}

func TestValidateDoesNotChangeTheConfig(t *testing.T) {
	config := minimalConfig()
	config.APIKey = Secret{}
	config.APIURL = " HTTPS://A.test/v1 "
	config.EgressAllowlist = []string{" a.test", "*", "a.test"}
	config.RootfsByAdapter = map[string]string{" a ": " b "}
	before := config
	before.EgressAllowlist = []string{" a.test", "*", "a.test"}
	before.RootfsByAdapter = map[string]string{" a ": " b "}

	require.NoError(t, config.Validate())
	s, err := config.settings(Secret{})
	require.NotNil(t, err)
	s.egress[0], s.rootfsByAdapter["a"] = "changed", "changed"
	assert.Equal(t, before, config)
}

func TestSettings(t *testing.T) {
	config, err := ParseConfig(minimalDoc(map[string]any{
		"apiKey": "skp_x", "rootfs": "devbox:1", "region": "eu", "reuseLease": true,
		"autoPauseAfterSeconds": 900, "rootfsByAdapter": map[string]string{"codex": "codex:1"},
	}))
	require.NoError(t, err)
	s, serr := config.settings(NewSecret("skp_fallback"))
	require.Nil(t, serr)
	assert.Equal(t, "skp_x", s.key.Reveal(), "a key in the configuration wins")
	s.key = Secret{}
	assert.Equal(t, settings{
		origin: officialOrigin, shape: "s-1vcpu-1gb", rootfs: "devbox:1", region: "eu",
		rootfsByAdapter: map[string]string{"codex": "codex:1"},
		timeout:         5 * time.Minute, reuse: true, autoPauseSeconds: 900,
	}, s)
	assert.Equal(t, "codex:1", s.rootfsFor("codex"))
	assert.Equal(t, "devbox:1", s.rootfsFor("claude"))
	assert.Equal(t, "devbox:1", s.rootfsFor(""))
}

func TestSettingsEgress(t *testing.T) {
	for name, tc := range map[string]struct {
		list []string
		deny bool
		want []string
	}{
		"absent":         {nil, false, nil},
		"everything":     {[]string{"*"}, false, nil},
		"* twice":        {[]string{"*", " * "}, false, nil},
		"* beside a":     {[]string{"*", "a.test", "*"}, false, []string{"a.test"}},
		"duplicates":     {[]string{"b.test", "a.test", " b.test "}, false, []string{"b.test", "a.test"}},
		"a wild card":    {[]string{"*.a.test", "*"}, false, []string{"*.a.test"}},
		"nothing at all": {nil, true, []string{"192.0.2.1/32"}},
	} {
		t.Run(name, func(t *testing.T) {
			config := minimalConfig()
			config.EgressAllowlist, config.EgressDenyAll = tc.list, tc.deny
			s, err := config.settings(Secret{})
			require.Nil(t, err)
			assert.Equal(t, tc.want, s.egress)
		})
	}
}

func TestSettingsOfAnInvalidConfigServeCleanup(t *testing.T) {
	config, err := ParseConfig(map[string]any{
		"apiUrl": "http://localhost:8080/v1", "apiKey": "skp_x", "timeoutMs": "500", "typo": 1,
	})
	require.Error(t, err)
	s, serr := config.settings(Secret{})
	require.Error(t, serr)
	assert.Nil(t, serr.forCleanup())
	assert.Equal(t, "http://localhost:8080", s.origin)
	assert.Equal(t, "skp_x", s.key.Reveal())
	assert.Equal(t, 5*time.Minute, s.timeout)

	typed := Config{APIURL: officialOrigin}
	s, serr = typed.settings(NewSecret("skp_fallback"))
	require.Error(t, serr)
	assert.Nil(t, serr.forCleanup(), "the fallback serves cleanup too")
	assert.Equal(t, "skp_fallback", s.key.Reveal())

	assert.Nil(t, (*ConfigError)(nil).forCleanup())

	_, serr = Config{}.settings(Secret{})
	assert.Equal(t, []string{"apiUrl", "apiKey"}, wrongFields(t, serr.forCleanup()), "and not the shape, which it does not need")
}

func TestFallbackKeyGoesToOfficialOriginsOnly(t *testing.T) {
	const fallback = "skp-fallback-canary"
	for _, tc := range []struct {
		apiURL   string
		official bool
	}{
		{"https://api.sb.createos.sh", true},
		{"https://api-us.sb.createos.sh", true},
		{"https://api-eu.sb.createos.sh", true},
		{"https://API.SB.CREATEOS.SH", true},
		{"HTTPS://api.sb.createos.sh:443/", true},
		{"https://api.sb.createos.sh/v1", true},
		{"https://api.sb.createos.sh.attacker.test", false},
		{"https://api.sb.createos.sh:8443", false},
		{"https://api.sb.createos.sh./", false},
		{"https://api-ap.sb.createos.sh", false},
		{"https://sb.createos.sh", false},
		{"https://xapi.sb.createos.sh", false},
		{"https://attacker.test/v1", false},
		{"http://127.0.0.1:8080", false},
		{"http://localhost", false},
	} {
		t.Run(tc.apiURL, func(t *testing.T) {
			config := Config{APIURL: tc.apiURL, Shape: "s"}
			s, err := config.settings(NewSecret(fallback))
			if tc.official {
				require.Nil(t, err)
				assert.Equal(t, fallback, s.key.Reveal())
				return
			}
			assert.Equal(t, []string{"apiKey"}, wrongFields(t, err))
			assert.ErrorContains(t, err, "apiKey is required")
			assert.ErrorContains(t, err, "official origins only")
			assert.True(t, s.key.IsZero())
			assert.NotContains(t, err.Error(), fallback)

			config.APIKey = NewSecret("skp_own")
			s, err = config.settings(NewSecret(fallback))
			require.Nil(t, err)
			assert.Equal(t, "skp_own", s.key.Reveal(), "an explicit key is used as given")
		})
	}
}

func TestMissingKey(t *testing.T) {
	s, err := Config{APIURL: officialOrigin, Shape: "s"}.settings(Secret{})
	assert.Equal(t, []string{"apiKey"}, wrongFields(t, err))
	assert.NotNil(t, err.forCleanup())
	assert.Equal(t, officialOrigin, s.origin)

	_, err = Config{APIURL: "https://h/other", Shape: "s"}.settings(Secret{})
	assert.Equal(t, []string{"apiUrl", "apiKey"}, wrongFields(t, err), "all at once")
	_, err = Config{APIURL: "https://h/other", Shape: "s"}.settings(NewSecret("skp_f"))
	assert.Equal(t, []string{"apiUrl"}, wrongFields(t, err))

	for _, bad := range []string{"skp\r\nX: 1", "[redacted]", " "} {
		s, err = Config{APIURL: officialOrigin, Shape: "s"}.settings(NewSecret(bad))
		assert.Equal(t, []string{"apiKey"}, wrongFields(t, err), "a bad fallback key: %q", bad)
		assert.ErrorContains(t, err, "fallback key")
		assert.True(t, s.key.IsZero())
	}
}

func TestKeyBytes(t *testing.T) {
	for _, bad := range []string{"a\rb", "a\nb", "a\r\nX-Evil: 1", "key\n", "\nkey", "a\x00b", "a\x7fb", "a\x01b", "a\tb", "a\x1bb", "ключ", "a\u200bb", "a\xffb"} {
		_, err := ParseConfig(minimalDoc(map[string]any{"apiKey": bad}))
		assert.Equal(t, []string{"apiKey"}, wrongFields(t, err), "%q", bad)
		assert.NotContains(t, err.Error(), bad)

		config := minimalConfig()
		config.APIKey = NewSecret(bad)
		assert.Equal(t, []string{"apiKey"}, wrongFields(t, config.Validate()), "%q", bad)
	}
	for good, want := range map[string]string{" skp_x ": "skp_x", "a b": "a b", "\t~!\t": "~!"} {
		config, err := ParseConfig(minimalDoc(map[string]any{"apiKey": good}))
		require.NoError(t, err, "%q", good)
		assert.Equal(t, want, config.APIKey.Reveal())
	}
}

func TestNormalizeOrigin(t *testing.T) {
	for in, want := range map[string]string{
		"https://api.sb.createos.sh":           officialOrigin,
		"HTTPS://Api.SB.CreateOS.sh/":          officialOrigin,
		" https://api.sb.createos.sh/v1\n":     officialOrigin,
		"https://api.sb.createos.sh/v1/":       officialOrigin,
		"https://api.sb.createos.sh:443/v1/":   officialOrigin,
		"https://api.sb.createos.sh:0443":      officialOrigin,
		"https://api.sb.createos.sh:":          officialOrigin,
		"https://api.sb.createos.sh.":          "https://api.sb.createos.sh.",
		"https://api.sb.createos.sh:8443":      "https://api.sb.createos.sh:8443",
		"https://api.sb.createos.sh:80":        "https://api.sb.createos.sh:80",
		"https://10.0.0.1":                     "https://10.0.0.1",
		"https://[2001:DB8::0:1]:8443":         "https://[2001:db8::1]:8443",
		"http://localhost":                     "http://localhost",
		"HTTP://LocalHost:80/v1":               "http://localhost",
		"http://127.0.0.1:1":                   "http://127.0.0.1:1",
		"http://[::1]:1":                       "http://[::1]:1",
		"http://[0:0:0:0:0:0:0:1]:1":           "http://[::1]:1",
		"https://localhost:443":                "https://localhost",
		"https://under_score.test":             "https://under_score.test",
		"https://api.sb.createos.sh.evil.test": "https://api.sb.createos.sh.evil.test",
	} {
		got, err := normalizeOrigin(in)
		if assert.NoError(t, err, in) {
			assert.Equal(t, want, got, in)
			again, err := normalizeOrigin(got)
			require.NoError(t, err)
			assert.Equal(t, got, again, "a normal form stays as it is")
		}
	}
	for _, in := range []string{
		"", " ", "api.sb.createos.sh", "//api.sb.createos.sh", "/v1", "https:", "https:///v1", "https://", "https://:443",
		"https:api.sb.createos.sh", "ftp://a.test", "ws://a.test", "file:///etc/passwd", "javascript:x",
		"http://example.com", "http://localhost.evil.test", "http://localhost.", "http://127.0.0.2", "http://127.1",
		"http://0.0.0.0", "http://[::]", "http://[::ffff:127.0.0.1]", "http://127.0.0.1.evil.test", "http://10.0.0.1",
		"https://canary:canary@h", "https://canary@h", "https://@h", "https://:@h",
		"https://h/?canary=1", "https://h?", "https://h/?", "https://h/#canary", "https://h#", "https://h/v1?",
		"https://h/other", "https://h/v1/sandboxes", "https://h//", "https://h/v1//", "https://h/V1", "https://h/v2",
		"https://h/%76%31", "https://h/.", "https://h/../v1", "https://h/v1%2f", "https://h/;v1",
		"https://h:0", "https://h:65536", "https://h:x", "https://h:-1", "https://h:99999999999999999999",
		"https://h\\@evil.test", "https://h evil.test", "https://h\tx", "https://h\nx", "https://h\x00", "https://a..test", "https://.a.test", "https://.", "https://..",
		"https://ａpi.sb.createos.sh", "https://bücher.test", "https://a%2etest", "https://a%00.test", "https://a,b.test", "https://a*.test",
		"https://[::1", "https://[::1]x", "https://[fe80::1%25eth0]", "https://[127.0.0.1]", "https://[]", "https://[a.test]", "https://::1",
	} {
		got, err := normalizeOrigin(in)
		if assert.Error(t, err, "%q gives %q", in, got) {
			assert.Empty(t, got, in)
			assert.NotContains(t, err.Error(), "canary", "an error quotes nothing of the URL")
		}
	}
}

func TestConfigErrorsShowNoSecret(t *testing.T) {
	for _, doc := range []map[string]any{
		{"apiUrl": "https://" + canary + "@h", "apiKey": canary + "\n"},
		{"apiUrl": "https://h/?k=" + canary, "apiKey": canary + "\x00"},
		{"apiUrl": "https://h/#" + canary, "apiKey": []any{canary}},
		{"apiUrl": "https://h/" + canary + "%zz", "apiKey": canary + "é"},
		{"apiUrl": map[string]any{canary: 1}, "apiKey": map[string]any{"a": canary}},
		{"apiUrl": "http://h", "apiKey": canary, "timeoutMs": canary, "reuseLease": canary, "egressAllowlist": canary},
	} {
		config, err := ParseConfig(doc)
		require.Error(t, err)
		assert.NotContains(t, err.Error(), canary)
		requireHidden(t, err)

		config.invalid = nil // a Config that is invalid has no JSON form
		requireHidden(t, config)
	}
}

func TestConfigIsNeverPrintedWithItsKey(t *testing.T) {
	config := minimalConfig()
	config.APIKey = NewSecret(canary)
	s, err := config.settings(Secret{})
	require.Nil(t, err)
	type host struct {
		config Config
		ptr    *Config
		s      settings
	}
	for _, v := range []any{config, &config, host{config, &config, s}, &host{config, &config, s}, map[string]Config{"a": config}, s} {
		requireHidden(t, v)
	}
}

func TestConfigJSON(t *testing.T) {
	config := minimalConfig()
	config.APIKey = NewSecret(canary)
	config.RootfsByAdapter = map[string]string{"codex": "codex:1"}
	config.Timeout, config.AutoPauseAfter = 90*time.Second, 15*time.Minute
	config.EgressAllowlist = []string{"a.test"}
	config.ReuseLease = true
	data, err := json.Marshal(config)
	require.NoError(t, err)
	assert.JSONEq(t, `{"apiUrl":"https://api.sb.createos.sh","apiKey":"[redacted]","shape":"s-1vcpu-1gb",
		"rootfsByAdapter":{"codex":"codex:1"},"timeoutMs":90000,"reuseLease":true,"autoPauseAfterSeconds":900,
		"egressAllowlist":["a.test"]}`, string(data))

	var read Config
	err = json.Unmarshal(data, &read)
	assert.Equal(t, []string{"apiKey"}, wrongFields(t, err), "the mark is no key")
	assert.Equal(t, config.Shape, read.Shape, "what was valid is filled in")

	config.APIKey = Secret{}
	data, err = json.Marshal(&config)
	require.NoError(t, err)
	assert.NotContains(t, string(data), "apiKey")
	read = Config{Rootfs: "from before"}
	require.NoError(t, json.Unmarshal(data, &read))
	assert.Equal(t, config, read)
}

func TestConfigJSONKeepsWhatIsWrong(t *testing.T) {
	for field, change := range map[string]func(*Config){
		"timeoutMs":             func(c *Config) { c.Timeout = 1500 * time.Microsecond },
		"autoPauseAfterSeconds": func(c *Config) { c.AutoPauseAfter = 90500 * time.Millisecond },
		"egressAllowlist":       func(c *Config) { c.EgressAllowlist = []string{} },
		"shape":                 func(c *Config) { c.Shape = "" },
		"rootfs":                func(c *Config) { c.Rootfs = " " },
	} {
		config := minimalConfig()
		config.APIKey = Secret{}
		change(&config)
		data, err := json.Marshal(config)
		require.NoError(t, err)
		var read Config
		assert.Equal(t, []string{field}, wrongFields(t, json.Unmarshal(data, &read)), "%s", data)
	}

	var config Config
	require.Error(t, json.Unmarshal([]byte(`{"apiUrl":"https://a.test","shape":"s","egressAllowlist":[]}`), &config))
	_, err := json.Marshal(config)
	assert.Equal(t, []string{"egressAllowlist"}, wrongFields(t, err), "written without the list it would be open")
}

func TestConfigUnmarshalInside(t *testing.T) {
	var host struct {
		Name   string
		Config Config
	}
	err := json.Unmarshal([]byte(`{"Name":"n","Config":{"apiUrl":"https://a.test","apiKey":"`+canary+`","shape":5}}`), &host)
	assert.Equal(t, []string{"shape"}, wrongFields(t, err))
	assert.Equal(t, "https://a.test", host.Config.APIURL)
	assert.Equal(t, canary, host.Config.APIKey.Reveal())

	require.NoError(t, json.Unmarshal([]byte(`{"Config":null}`), &host))
	assert.Equal(t, "https://a.test", host.Config.APIURL, "null leaves the field alone")

	var config *ConfigError
	for _, text := range []string{`[]`, `"` + canary + `"`, `5`} {
		err := json.Unmarshal([]byte(text), &Config{})
		require.Error(t, err)
		assert.False(t, errors.As(err, &config))
		assert.NotContains(t, err.Error(), canary)
	}
}

func TestConfigOriginIsTheOneInLeases(t *testing.T) {
	for url, want := range map[string]string{
		"https://API.sb.createos.sh:443/v1/": "https://api.sb.createos.sh",
		"http://localhost:80":                "http://localhost",
		"http://127.0.0.1:8080/":             "http://127.0.0.1:8080",
		"http://example.com":                 "",
		"":                                   "",
	} {
		assert.Equal(t, want, Config{APIURL: url}.Origin(), url)
	}
}
