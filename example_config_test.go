package createos_test

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/createos-lease/createos"
)

// A document is usually part of a larger one, so it is read with encoding/json.
// The Config then goes through the same checks as ParseConfig.
func ExampleParseConfig() {
	var doc map[string]any
	err := json.Unmarshal([]byte(`{
		"apiUrl": "https://api.sb.createos.sh/v1",
		"apiKey": "skp_example",
		"shape": "s-1vcpu-1gb",
		"timeoutMs": 120000,
		"egressAllowlist": ["mirror.example.com:443", "sums.example.com:443"]
	}`), &doc)
	if err != nil {
		fmt.Println(err)
		return
	}
	config, err := createos.ParseConfig(doc)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(config.APIURL, config.APIKey, config.Timeout)
	fmt.Println(config.EgressAllowlist)
	// Output:
	// https://api.sb.createos.sh [redacted] 2m0s
	// [mirror.example.com:443 sums.example.com:443]
}

// All that is wrong comes at once.
func ExampleParseConfig_errors() {
	_, err := createos.ParseConfig(map[string]any{
		"apiUrl":          "http://sandboxes.example.com",
		"timeoutMs":       "500",
		"egressAllowList": []string{"mirror.example.com:443"},
	})
	var invalid *createos.ConfigError
	if errors.As(err, &invalid) {
		for _, field := range invalid.Fields {
			fmt.Println(field.Message)
		}
	}
	// Output:
	// apiUrl must use https; http is for localhost, 127.0.0.1 and [::1] only
	// shape is required
	// timeoutMs must be an integer from 1 to 86400000, in milliseconds
	// unknown key "egressAllowList", is egressAllowlist meant?
}
