package createos

import (
	"encoding/json"
	"reflect"
	"testing"
)

func FuzzParseConfig(f *testing.F) {
	for _, seed := range []string{
		`{"apiUrl":"https://api.sb.createos.sh","shape":"s"}`,
		`{"apiUrl":" HTTP://[::1]:80/v1/ ","apiKey":"k","shape":"s","timeoutMs":1e3,"autoPauseAfterSeconds":60}`,
		`{"apiUrl":"https://a.test","shape":"s","egressAllowlist":["*"," a.test","a.test"],"rootfsByAdapter":{" a ":"b"}}`,
		`{"apiUrl":"https://a.test","shape":"s","egressAllowlist":["*"],"egressDenyAll":false,"reuseLease":true}`,
		`{"apiUrl":"https://a.test","shape":"\u0000","timeoutMs":1.5,"apiKey":"[redacted]","egressAllowlist":[]}`,
		`{"apiUrl":null,"typo":[{}],"rootfsByAdapter":{"a.b[":5}}`,
		`{}`, `null`, `[]`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var doc map[string]any
		if json.Unmarshal(data, &doc) != nil {
			return
		}
		config, err := ParseConfig(doc)
		s, serr := config.settings(NewSecret("skp_fallback"))
		if s.timeout <= 0 {
			t.Fatalf("no timeout: %v", s.timeout)
		}
		if err != nil {
			if config.Validate() == nil || serr == nil {
				t.Fatalf("became valid: %v", err)
			}
			return
		}
		if err := config.Validate(); err != nil {
			t.Fatalf("what parses is not valid: %v", err)
		}
		config.APIKey = Secret{} // has no way back from JSON
		written, err := json.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		var read Config
		if err := json.Unmarshal(written, &read); err != nil {
			t.Fatalf("%s: %v", written, err)
		}
		if !reflect.DeepEqual(config, read) {
			t.Fatalf("changed on the way:\n%+v\n%+v", config, read)
		}
	})
}
