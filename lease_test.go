package createos

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func leaseFile(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "leases", name))
	require.NoError(t, err)
	return data
}

func readLease(t testing.TB, data []byte) Lease {
	t.Helper()
	var l Lease
	require.NoError(t, json.Unmarshal(data, &l))
	return l
}

func readMetadata(t testing.TB, text string) Metadata {
	t.Helper()
	var m Metadata
	require.NoError(t, json.Unmarshal([]byte(text), &m))
	return m
}

func TestLeaseFilesSurvive(t *testing.T) {
	for _, name := range []string{
		"typescript.json", "typescript-restricted.json", "typescript-older.json", "go.json", "unknown-keys.json", "malformed.json",
	} {
		t.Run(name, func(t *testing.T) {
			data := leaseFile(t, name)
			l := readLease(t, data)
			written, err := json.Marshal(l)
			require.NoError(t, err)
			assert.JSONEq(t, string(data), string(written))

			again, err := json.Marshal(readLease(t, written))
			require.NoError(t, err)
			assert.Equal(t, string(written), string(again))

			byPointer, err := json.Marshal([]*Lease{&l})
			require.NoError(t, err)
			assert.Equal(t, "["+string(written)+"]", string(byPointer))
		})
	}
}

func TestLeaseIsWrittenInOrder(t *testing.T) {
	for _, name := range []string{"typescript.json", "typescript-restricted.json", "typescript-older.json", "go.json"} {
		var compact bytes.Buffer
		require.NoError(t, json.Compact(&compact, leaseFile(t, name)))
		written, err := json.Marshal(readLease(t, leaseFile(t, name)))
		require.NoError(t, err)
		assert.Equal(t, compact.String(), string(written), name)
	}
}

func TestLeaseFields(t *testing.T) {
	assert.Equal(t, Lease{
		ProviderLeaseID: "sb-01k7a0000000000000000000t2",
		Metadata: Metadata{
			Provider: "createos", APIURL: "https://api-eu.sb.createos.sh/v1", CompanyID: "acme", EnvironmentID: "agents",
			RemoteCwd: "/paperclip-workspace", ShellCommand: "bash", Marker: "0b8f6c1e-93a7-4f55-8f43-2a1d5f6e7c80",
			Shape: "s-2vcpu-4gb", Rootfs: "codex:1", Region: "eu", ReuseLease: true, AdapterType: "codex",
			BaseEgressAllowlist:      []string{"mirror.example.com:443", "10.0.0.0/8"},
			EffectiveEgressAllowlist: []string{"mirror.example.com:443", "10.0.0.0/8", "api.example.com"},
			AutoPauseAfterSeconds:    900, ResumedLease: true,
		},
	}, readLease(t, leaseFile(t, "typescript-restricted.json")))

	ours := readLease(t, leaseFile(t, "go.json")).Metadata
	assert.Equal(t, "CREATEOS_LEASE_0123456789abcdef0123456789abcdef", ours.LeaseKey)
	assert.Equal(t, "l-aebagbafaydqqcikbmga", ours.SandboxName)
	assert.Equal(t, "acc_demo", ours.AccountID)
	assert.Empty(t, ours.Rootfs)
	assert.False(t, ours.legacy())
}

func TestNewLeaseJSON(t *testing.T) {
	written, err := json.Marshal(Lease{ProviderLeaseID: "sb-1", Metadata: Metadata{Provider: "createos"}})
	require.NoError(t, err)
	assert.Equal(t, `{"providerLeaseId":"sb-1","metadata":{"provider":"createos","apiUrl":"","companyId":"","environmentId":"",`+
		`"remoteCwd":"","shellCommand":"","marker":"","shape":"","rootfs":null,"region":null,"reuseLease":false,`+
		`"adapterType":null,"baseEgressAllowlist":[],"effectiveEgressAllowlist":[],"autoPauseAfterSeconds":null}}`, string(written))
}

func TestOlderLease(t *testing.T) {
	l := readLease(t, leaseFile(t, "typescript-older.json"))
	assert.True(t, l.Metadata.legacy())
	assert.Empty(t, l.Metadata.malformed)
	assert.Equal(t, "devbox:1", l.Metadata.Rootfs)
	rules, ok := l.Metadata.restriction()
	assert.True(t, ok)
	assert.Nil(t, rules)

	l.Metadata.ResumedLease = true
	written, err := json.Marshal(l)
	require.NoError(t, err)
	for _, newer := range []string{"adapterType", "baseEgressAllowlist", "effectiveEgressAllowlist", "autoPauseAfterSeconds"} {
		assert.NotContains(t, string(written), newer)
		m := readMetadata(t, `{"`+newer+`":null}`)
		assert.False(t, m.legacy(), "a lease with %s is a newer one", newer)
		assert.Contains(t, m.malformed, "baseEgressAllowlist")
	}
	assert.Contains(t, string(written), `"resumedLease":true`)
}

func TestUnknownKeysAreKept(t *testing.T) {
	l := readLease(t, leaseFile(t, "unknown-keys.json"))
	assert.Equal(t, "acme", l.Metadata.CompanyID, "a key in another case is another key")
	assert.Empty(t, l.Metadata.malformed)

	l.Metadata.ResumedLease = true
	written, err := json.Marshal(l.clone())
	require.NoError(t, err)
	assert.Contains(t, string(written), `"expiresAt":12345678901234567890`, "numbers keep their digits")
	assert.Contains(t, string(written), `2.50`)
	assert.Contains(t, string(written), canary)

	metadata, err := json.Marshal(l.Metadata)
	require.NoError(t, err)
	assert.Contains(t, string(metadata), `"nested":`, "metadata is kept whole when it is stored alone")
}

func TestLeasePrintsNoUnknownKeys(t *testing.T) {
	for _, name := range []string{"unknown-keys.json", "malformed.json"} {
		l := readLease(t, leaseFile(t, name))
		type host struct {
			lease    Lease
			ptr      *Lease
			metadata Metadata
			list     []Lease
		}
		for _, v := range []any{l, &l, host{l, &l, l.Metadata, []Lease{l}}, &host{l, &l, l.Metadata, []Lease{l}}, []*Lease{&l}, l.Metadata} {
			for way, out := range everyPrint(t, v) {
				if strings.Contains(out, `"providerLeaseId"`) || strings.Contains(out, `"provider"`) {
					continue // the JSON form, which holds all by design
				}
				assert.NotContains(t, out, canary, "%T printed with %s", v, way)
				assert.NotContains(t, out, "hostToken", "%T printed with %s", v, way)
			}
		}
		out := everyPrint(t, l)
		for _, way := range []string{"%v", "%+v", "%#v", "%s", "slog text", "slog json"} {
			assert.Contains(t, out[way], l.ProviderLeaseID, way)
			assert.NotContains(t, out[way], "s-1vcpu-1gb", "%s shows more than is said", way)
			assert.NotContains(t, out[way], canary, way)
		}
	}
}

func TestLeaseString(t *testing.T) {
	l := readLease(t, leaseFile(t, "go.json"))
	assert.Equal(t, `lease "sb-01k7a0000000000000000000t4" (name "l-aebagbafaydqqcikbmga", origin "https://api.sb.createos.sh", `+
		`company "acme", environment "ci")`, l.String())
	l.Metadata.APIURL = "https://" + canary + "@h"
	assert.NotContains(t, l.String(), canary, "what is no origin is not shown")
	l.ProviderLeaseID = "sb\nlevel=ERROR"
	assert.NotContains(t, l.String(), "\n")
}

func TestMalformedLease(t *testing.T) {
	l := readLease(t, leaseFile(t, "malformed.json"))
	m := l.Metadata
	assert.Equal(t, []string{
		"remoteCwd", "marker", "rootfs", "reuseLease", "baseEgressAllowlist", "effectiveEgressAllowlist",
		"autoPauseAfterSeconds", "leaseKey",
	}, m.malformed)
	assert.True(t, m.belongsTo("acme", "ci", officialOrigin), "it can still be destroyed")
	assert.Equal(t, Metadata{
		Provider: "createos", APIURL: officialOrigin, CompanyID: "acme", EnvironmentID: "ci", ShellCommand: "bash", Shape: "s-1vcpu-1gb",
	}, Metadata{
		Provider: m.Provider, APIURL: m.APIURL, CompanyID: m.CompanyID, EnvironmentID: m.EnvironmentID, RemoteCwd: m.RemoteCwd,
		ShellCommand: m.ShellCommand, Marker: m.Marker, Shape: m.Shape, Rootfs: m.Rootfs, ReuseLease: m.ReuseLease,
		BaseEgressAllowlist: m.BaseEgressAllowlist, EffectiveEgressAllowlist: m.EffectiveEgressAllowlist,
		AutoPauseAfterSeconds: m.AutoPauseAfterSeconds, LeaseKey: m.LeaseKey,
	}, "what is malformed is zero")
	_, ok := m.restriction()
	assert.False(t, ok)
}

func TestMalformedFields(t *testing.T) {
	const newer = `"baseEgressAllowlist":[],"effectiveEgressAllowlist":[]`
	for text, want := range map[string][]string{
		`{` + newer + `}`: nil,
		`{` + newer + `,"autoPauseAfterSeconds":null}`:                    nil,
		`{` + newer + `,"autoPauseAfterSeconds":900.0}`:                   nil,
		`{` + newer + `,"autoPauseAfterSeconds":"900"}`:                   {"autoPauseAfterSeconds"},
		`{` + newer + `,"autoPauseAfterSeconds":-1}`:                      {"autoPauseAfterSeconds"},
		`{` + newer + `,"autoPauseAfterSeconds":1e400}`:                   {"autoPauseAfterSeconds"},
		`{` + newer + `,"autoPauseAfterSeconds":9999999999}`:              {"autoPauseAfterSeconds"},
		`{` + newer + `,"autoPauseAfterSeconds":true}`:                    {"autoPauseAfterSeconds"},
		`{` + newer + `,"adapterType":1}`:                                 {"adapterType"},
		`{` + newer + `,"companyId":null,"marker":null}`:                  nil,
		`{` + newer + `,"reuseLease":null}`:                               nil,
		`{` + newer + `,"reuseLease":1}`:                                  {"reuseLease"},
		`{` + newer + `,"resumedLease":"yes"}`:                            {"resumedLease"},
		`{` + newer + `,"companyId":["acme"]}`:                            {"companyId"},
		`{"effectiveEgressAllowlist":["a.test"]}`:                         {"baseEgressAllowlist"},
		`{"baseEgressAllowlist":["a.test"]}`:                              {"effectiveEgressAllowlist"},
		`{"baseEgressAllowlist":null}`:                                    {"baseEgressAllowlist", "effectiveEgressAllowlist"},
		`{"adapterType":"codex"}`:                                         {"baseEgressAllowlist", "effectiveEgressAllowlist"},
		`{"baseEgressAllowlist":{},"effectiveEgressAllowlist":[]}`:        {"baseEgressAllowlist"},
		`{"baseEgressAllowlist":[5],"effectiveEgressAllowlist":[]}`:       {"baseEgressAllowlist"},
		`{"baseEgressAllowlist":[null],"effectiveEgressAllowlist":[]}`:    {"baseEgressAllowlist"},
		`{"baseEgressAllowlist":"a.test","effectiveEgressAllowlist":[]}`:  {"baseEgressAllowlist"},
		`{"baseEgressAllowlist":false,"effectiveEgressAllowlist":["a"]} `: {"baseEgressAllowlist"},
	} {
		m := readMetadata(t, text)
		assert.Equal(t, want, m.malformed, text)
		_, ok := m.restriction()
		assert.Equal(t, want == nil, ok, text)

		written, err := json.Marshal(m)
		require.NoError(t, err)
		assert.Equal(t, want, readMetadata(t, string(written)).malformed, "writing it mends nothing: %s", written)
	}
}

func TestLeaseDecodeErrors(t *testing.T) {
	for _, text := range []string{
		`[]`, `5`, `"` + canary + `"`, `true`,
		`{"providerLeaseId":5}`, `{"providerLeaseId":["` + canary + `"]}`, `{"providerLeaseId":{}}`, `{"providerLeaseId":true}`,
		`{"providerLeaseId":"sb-1","metadata":[]}`, `{"providerLeaseId":"sb-1","metadata":"` + canary + `"}`,
	} {
		l := Lease{ProviderLeaseID: "before"}
		err := json.Unmarshal([]byte(text), &l)
		if assert.Error(t, err, text) {
			assert.NotContains(t, err.Error(), canary)
		}
		assert.Equal(t, "before", l.ProviderLeaseID, "a lease that cannot be read changes nothing")
	}
}

func TestLeaseWithoutMetadataBelongsToNobody(t *testing.T) {
	for _, text := range []string{`{"providerLeaseId":"sb-1"}`, `{"providerLeaseId":"sb-1","metadata":null}`, `{"providerLeaseId":"sb-1","metadata":{}}`} {
		l := readLease(t, []byte(text))
		assert.Equal(t, "sb-1", l.ProviderLeaseID)
		assert.False(t, l.Metadata.belongsTo("acme", "ci", officialOrigin))
		assert.False(t, l.Metadata.belongsTo("", "", ""))
		assert.True(t, l.Metadata.legacy())
	}
	for _, text := range []string{`{}`, `{"providerLeaseId":null}`} {
		assert.Empty(t, readLease(t, []byte(text)).ProviderLeaseID)
	}

	l := readLease(t, leaseFile(t, "go.json"))
	require.NoError(t, json.Unmarshal([]byte(`{"providerLeaseId":"sb-2"}`), &l))
	assert.Empty(t, l.Metadata.CompanyID, "nothing of an earlier lease stays in the receiver")
	require.NoError(t, json.Unmarshal([]byte(`null`), &l))
	assert.Equal(t, "sb-2", l.ProviderLeaseID)
}

func TestBelongsTo(t *testing.T) {
	mine := Metadata{Provider: "createos", APIURL: "https://api.sb.createos.sh", CompanyID: "acme", EnvironmentID: "ci"}
	assert.True(t, mine.belongsTo("acme", "ci", officialOrigin))
	for _, same := range []string{"https://api.sb.createos.sh/v1", "https://API.sb.createos.sh:443/v1/"} {
		m := mine
		m.APIURL = same
		assert.True(t, m.belongsTo("acme", "ci", officialOrigin), same)
	}
	for name, change := range map[string]func(*Metadata){
		"other provider":      func(m *Metadata) { m.Provider = "other" },
		"provider in capital": func(m *Metadata) { m.Provider = "CreateOS" },
		"no provider":         func(m *Metadata) { m.Provider = "" },
		"other company":       func(m *Metadata) { m.CompanyID = "acme2" },
		"no company":          func(m *Metadata) { m.CompanyID = "" },
		"company with space":  func(m *Metadata) { m.CompanyID = "acme " },
		"other environment":   func(m *Metadata) { m.EnvironmentID = "agents" },
		"no environment":      func(m *Metadata) { m.EnvironmentID = "" },
		"other origin":        func(m *Metadata) { m.APIURL = "https://api-eu.sb.createos.sh" },
		"other port":          func(m *Metadata) { m.APIURL = "https://api.sb.createos.sh:8443" },
		"final dot":           func(m *Metadata) { m.APIURL = "https://api.sb.createos.sh." },
		"with user info":      func(m *Metadata) { m.APIURL = "https://a@api.sb.createos.sh" },
		"no origin":           func(m *Metadata) { m.APIURL = "" },
	} {
		m := mine
		change(&m)
		assert.False(t, m.belongsTo("acme", "ci", officialOrigin), name)
	}
	assert.False(t, mine.belongsTo("", "ci", officialOrigin))
	assert.False(t, mine.belongsTo("acme", "", officialOrigin))
	assert.False(t, mine.belongsTo("acme", "ci", ""))
	empty := Metadata{Provider: "createos", APIURL: officialOrigin}
	assert.False(t, empty.belongsTo("", "", officialOrigin), "an empty id matches nothing")
	empty = Metadata{Provider: "createos", CompanyID: "acme", EnvironmentID: "ci"}
	assert.False(t, empty.belongsTo("acme", "ci", ""))
}

func TestRestriction(t *testing.T) {
	type lists = []string
	for _, tc := range []struct {
		base, effective, want lists
		ok                    bool
	}{
		{lists{}, lists{}, nil, true},
		{lists{"*"}, lists{"*"}, nil, true},
		{lists{"*"}, lists{}, nil, true},
		{lists{"a.test"}, lists{"a.test", "b.test"}, lists{"a.test"}, true},
		{lists{"a.test"}, lists{}, lists{"a.test"}, true},
		{lists{}, lists{"b.test"}, lists{"b.test"}, true},
		{lists{"*"}, lists{"b.test"}, lists{"b.test"}, true},
		{lists{"*", "a.test"}, lists{"*"}, lists{"a.test"}, true},
		{lists{denyAllRule}, lists{denyAllRule}, lists{denyAllRule}, true},
		{lists{""}, lists{}, nil, false},
		{lists{"a.test"}, lists{" "}, nil, false},
		{lists{"a.test,b.test"}, lists{}, nil, false},
	} {
		got, ok := Metadata{BaseEgressAllowlist: tc.base, EffectiveEgressAllowlist: tc.effective}.restriction()
		assert.Equal(t, tc.want, got, "%q %q", tc.base, tc.effective)
		assert.Equal(t, tc.ok, ok, "%q %q", tc.base, tc.effective)
	}
	_, ok := Metadata{BaseEgressAllowlist: lists{"a.test"}, malformed: lists{"marker"}}.restriction()
	assert.False(t, ok)
}

func TestLeaseClone(t *testing.T) {
	l := readLease(t, leaseFile(t, "typescript-restricted.json"))
	l.Metadata.malformed = []string{"marker"}
	c := l.clone()
	assert.Equal(t, &l, c)
	c.ProviderLeaseID = "other"
	c.Metadata.BaseEgressAllowlist[0] = "changed"
	c.Metadata.EffectiveEgressAllowlist[0] = "changed"
	c.Metadata.malformed[0] = "changed"
	assert.Equal(t, "sb-01k7a0000000000000000000t2", l.ProviderLeaseID)
	assert.Equal(t, "mirror.example.com:443", l.Metadata.BaseEgressAllowlist[0])
	assert.Equal(t, "mirror.example.com:443", l.Metadata.EffectiveEgressAllowlist[0])
	assert.Equal(t, "marker", l.Metadata.malformed[0])
	assert.Nil(t, (*Lease)(nil).clone())
}

func TestValidID(t *testing.T) {
	for _, id := range []string{"sb-01k7a0000000000000000000t1", "a", "A_b-9", strings.Repeat("a", 200)} {
		assert.True(t, validID(id), id)
	}
	for _, id := range []string{"", " ", "a b", "a/b", "..", "a\n", "\na", "a.b", "a%2f", "ä", strings.Repeat("a", 201)} {
		assert.False(t, validID(id), "%q", id)
	}
}

func FuzzLeaseJSON(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "leases", "*.json"))
	require.NoError(f, err)
	for _, file := range files {
		f.Add(leaseFile(f, filepath.Base(file)))
	}
	for _, seed := range []string{`{}`, `null`, `{"metadata":{"adapterType":null,"a":"<>"},"\u2028":"\ud800"}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var first, second Lease
		if json.Unmarshal(data, &first) != nil {
			return
		}
		written, err := json.Marshal(first)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(written, &second), "%s", written)
		again, err := json.Marshal(second)
		require.NoError(t, err)
		require.Equal(t, string(written), string(again))

		require.Equal(t, first.String(), second.String())
		require.Equal(t, first.Metadata.malformed, second.Metadata.malformed)
		require.Equal(t, first.Metadata.legacy(), second.Metadata.legacy())
		firstRules, firstOK := first.Metadata.restriction()
		secondRules, secondOK := second.Metadata.restriction()
		require.Equal(t, firstRules, secondRules)
		require.Equal(t, firstOK, secondOK)
		if firstOK && firstRules != nil {
			require.NotEmpty(t, firstRules)
			require.NotContains(t, firstRules, "*")
		}
	})
}
