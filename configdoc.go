package createos

import (
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ParseConfig reads a configuration document, such as a decoded JSON object. Its
// keys and their rules are those of the fields of [Config].
//
// A value of a wrong type is an error and never converted: "500" is no number, 1
// is no boolean. An integer may be of any built-in integer or float type or a
// json.Number, as long as its value is whole. A list may be a []any or a
// []string, an object a map[string]any or a map[string]string. Null means that
// the key is absent, for every key: a required one is then missing, any other
// one has its default, false for a boolean. Inside a list or an object null is
// an error. Unknown keys are errors too, so that a typo does not become a
// default; upper and lower case are told apart.
//
// The error is nil or a *[ConfigError] with everything that is wrong. The Config
// is returned in either case, in normal form. With an error it holds what was
// valid and stays invalid for good; but as long as its apiUrl and a key are
// valid it still serves Release, Destroy and RetryCleanup, so that a damaged
// configuration does not keep sandboxes running.
func ParseConfig(doc map[string]any) (Config, error) {
	d := document{keys: doc}
	config := Config{
		APIURL:          d.text("apiUrl"),
		APIKey:          NewSecret(d.text("apiKey")),
		Shape:           d.text("shape"),
		Rootfs:          d.text("rootfs"),
		Region:          d.text("region"),
		RootfsByAdapter: d.texts("rootfsByAdapter"),
		Timeout:         d.duration("timeoutMs", timeoutLimits),
		ReuseLease:      d.boolean("reuseLease"),
		AutoPauseAfter:  d.duration("autoPauseAfterSeconds", autoPauseLimits),
		EgressAllowlist: d.list("egressAllowlist"),
		EgressDenyAll:   d.boolean("egressDenyAll"),
	}
	d.unknown()
	config.invalid = d.errs
	config, errs := config.normal()
	if len(errs) > 0 {
		return config, newConfigError(errs)
	}
	return config, nil
}

// document reads the keys of a configuration document. What is absent, null or
// wrong gives the zero value; what is wrong is recorded.
type document struct {
	keys map[string]any
	errs fieldErrors
}

func (d *document) text(key string) string {
	switch value := d.keys[key].(type) {
	case nil:
	case string:
		// Empty means absent in a Config, so it has to be refused here.
		if value == "" {
			d.errs.add(key, "must not be empty")
		}
		return value
	default:
		d.errs.add(key, "must be a string")
	}
	return ""
}

func (d *document) boolean(key string) bool {
	value, ok := d.keys[key].(bool)
	if !ok && d.keys[key] != nil {
		d.errs.add(key, "must be a boolean")
	}
	return value
}

// duration reads a whole number of units. Zero means absent in a Config, so it
// has to be refused here, as does what a time.Duration cannot hold.
func (d *document) duration(key string, l limits) time.Duration {
	if d.keys[key] == nil {
		return 0
	}
	n, ok := wholeNumber(d.keys[key])
	if !ok || n < int64(l.min/l.unit) || n > int64(l.max/l.unit) {
		d.errs.add(key, l.rule)
		return 0
	}
	return time.Duration(n) * l.unit
}

func (d *document) texts(key string) map[string]string {
	var texts map[string]string
	switch value := d.keys[key].(type) {
	case nil:
	case map[string]string:
		texts = value
	case map[string]any:
		texts = make(map[string]string, len(value))
		for _, name := range slices.Sorted(maps.Keys(value)) {
			if text, ok := value[name].(string); ok {
				texts[name] = text
			} else {
				d.errs.add(adapterField(name), "must be a string")
			}
		}
	default:
		d.errs.add(key, "must be an object of strings")
	}
	return texts
}

func (d *document) list(key string) []string {
	switch value := d.keys[key].(type) {
	case nil:
	case []string:
		return value
	case []any:
		if value == nil {
			return nil
		}
		list := make([]string, len(value))
		for i, entry := range value {
			text, ok := entry.(string)
			if !ok {
				d.errs.add(indexField(key, i), "must be a string")
			}
			list[i] = text
		}
		return list
	default:
		d.errs.add(key, "must be a list of strings")
	}
	return nil
}

func (d *document) unknown() {
	for key := range d.keys {
		if slices.Contains(documentKeys, key) {
			continue
		}
		message := "unknown key " + strconv.Quote(key)
		for _, known := range documentKeys {
			if strings.EqualFold(key, known) {
				message += ", is " + known + " meant?"
			}
		}
		d.errs = append(d.errs, FieldError{Field: key, Message: message})
	}
}

// wholeNumber returns a number that has no fraction and is small enough to be
// exact in every form in which documents hold numbers. Named types are refused:
// the number in a time.Duration counts something else than the key does.
func wholeNumber(value any) (int64, bool) {
	const exact = 1 << 53
	var f float64
	switch n := value.(type) {
	case int:
		return int64(n), true
	case int8:
		return int64(n), true
	case int16:
		return int64(n), true
	case int32:
		return int64(n), true
	case int64:
		return n, true
	case uint:
		return int64(n), n <= exact
	case uint8:
		return int64(n), true
	case uint16:
		return int64(n), true
	case uint32:
		return int64(n), true
	case uint64:
		return int64(n), n <= exact
	case float32:
		f = float64(n)
	case float64:
		f = n
	case json.Number:
		var ok bool
		if f, ok = parseNumber(n.String()); !ok {
			return 0, false
		}
	default:
		return 0, false
	}
	// The comparison is false for NaN, and false for the infinities.
	whole := math.Trunc(f) == f && math.Abs(f) <= exact
	if !whole {
		return 0, false
	}
	return int64(f), true
}

// parseNumber reads a JSON number. strconv alone would also take "Inf", "0x1p3"
// and "+1", none of which is one.
func parseNumber(text string) (float64, bool) {
	if text == "" || strings.Trim(text, "0123456789+-.eE") != "" || !json.Valid([]byte(text)) {
		return 0, false
	}
	f, err := strconv.ParseFloat(text, 64)
	return f, err == nil
}
