package createos

import (
	"errors"
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// officialOrigins are the provider's own: the only ones the fallback key is
// sent to.
var officialOrigins = []string{
	"https://api.sb.createos.sh",
	"https://api-us.sb.createos.sh",
	"https://api-eu.sb.createos.sh",
}

func isOfficial(origin string) bool { return slices.Contains(officialOrigins, origin) }

// checkKey returns the key as it is sent, or says what is wrong with it, in
// words that follow the name of the field. The checks are stricter than those
// of a header: net/http would refuse the rest with an error that quotes it.
func checkKey(key Secret) (Secret, string) {
	text := key.Reveal()
	if strings.ContainsAny(text, "\r\n\x00") {
		return Secret{}, "must not contain CR, LF or NUL"
	}
	text = strings.TrimSpace(text)
	switch {
	case text == "":
		return Secret{}, "must not be empty"
	case text == redactionMark:
		return Secret{}, "is the mark that stands for a key in print; put the key itself back"
	case strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }):
		return Secret{}, "must be printable ASCII"
	}
	return NewSecret(text), ""
}

func (e *fieldErrors) origin(apiURL string) string {
	if apiURL == "" {
		e.add("apiUrl", "is required: an origin such as https://api.sb.createos.sh")
		return ""
	}
	origin, err := normalizeOrigin(apiURL)
	if err != nil {
		e.add("apiUrl", err.Error())
	}
	return origin
}

// text returns a string in normal form; "" is absent.
func (e *fieldErrors) text(field, value string) string {
	if value == "" {
		return ""
	}
	text, wrong := checkText(value)
	if wrong != "" {
		e.add(field, wrong)
	}
	return text
}

// limits are those of a duration that a document gives as a number of units.
type limits struct {
	unit, min, max time.Duration
	rule           string
}

var (
	timeoutLimits = limits{time.Millisecond, time.Millisecond, 24 * time.Hour,
		"must be an integer from 1 to 86400000, in milliseconds"}
	autoPauseLimits = limits{time.Second, time.Minute, 24 * time.Hour,
		"must be an integer from 60 to 86400, in seconds; leave it out for no auto-pause"}
)

// duration returns a duration that is within its limits; 0 is absent.
func (e *fieldErrors) duration(field string, value time.Duration, l limits) time.Duration {
	if value == 0 {
		return 0
	}
	if value < l.min || value > l.max || value%l.unit != 0 {
		e.add(field, l.rule)
		return 0
	}
	return value
}

func (e *fieldErrors) images(byAdapter map[string]string) map[string]string {
	const field = "rootfsByAdapter"
	images := make(map[string]string, len(byAdapter))
	for _, name := range slices.Sorted(maps.Keys(byAdapter)) {
		adapter, wrong := checkText(name)
		if wrong != "" {
			e.add(field, "has an adapter whose name "+wrong)
			continue
		}
		if _, double := images[adapter]; double {
			e.add(adapterField(adapter), "is there twice, once with white space around the name")
			continue
		}
		image, wrong := checkText(byAdapter[name])
		if wrong != "" {
			e.add(adapterField(adapter), wrong)
			continue
		}
		images[adapter] = image
	}
	if len(images) == 0 {
		return nil
	}
	return images
}

func (e *fieldErrors) egress(list []string) []string {
	const field = "egressAllowlist"
	if list == nil {
		return nil
	}
	if len(list) == 0 {
		e.add(field, "must not be an empty list: leave the key out for open egress, or set egressDenyAll for none")
		return nil
	}
	rules, wrong := normalEgress(list)
	for _, w := range wrong {
		e.add(indexField(field, w.index), w.message)
	}
	return rules
}

// checkText trims a string, or says what is wrong with it, in words that follow
// the name of the field.
func checkText(value string) (text, wrong string) {
	text = strings.TrimSpace(value)
	switch {
	case text == "":
		return "", "must not be empty"
	case strings.ContainsRune(text, 0):
		return "", "must not contain NUL"
	case !utf8.ValidString(text):
		return "", "must be valid UTF-8" // JSON would replace the bytes that are not
	}
	return text, ""
}

type wrongRule struct {
	index   int
	message string
}

// normalEgress returns an egress list in normal form: trimmed, without
// duplicates, and without * where a real rule stands beside it. With anything
// wrong there is no list.
func normalEgress(list []string) ([]string, []wrongRule) {
	var rules []string
	var wrong []wrongRule
	for i, entry := range list {
		rule, message := checkText(entry)
		if message == "" && (strings.ContainsFunc(rule, breaksRule) || strings.Contains(rule, "://")) {
			message = "must be one host, *.host, IP address or CIDR block, with :port or without, or *"
		}
		switch {
		case message != "":
			wrong = append(wrong, wrongRule{i, message})
		case !slices.Contains(rules, rule):
			rules = append(rules, rule)
		}
	}
	if len(wrong) > 0 {
		return nil, wrong
	}
	if len(rules) > 1 {
		rules = slices.DeleteFunc(rules, func(rule string) bool { return rule == openRule })
	}
	return rules, nil
}

// breaksRule reports whether r stands in no egress rule, as far as is known. The
// provider is reported to open the network when it cannot read a list.
func breaksRule(r rune) bool { return r == ',' || unicode.IsSpace(r) || unicode.IsControl(r) }

const openRule = "*"

// isOpen reports whether a list in normal form restricts nothing.
func isOpen(rules []string) bool {
	return len(rules) == 0 || len(rules) == 1 && rules[0] == openRule
}

// normalizeOrigin returns the origin of an API URL in the one form in which
// origins are compared. Its errors quote nothing of the URL, which may hold
// credentials; they follow the name of the field.
func normalizeOrigin(apiURL string) (string, error) {
	text := strings.TrimSpace(apiURL)
	// Looked for in the text, because url.Parse forgets an empty fragment.
	if strings.ContainsAny(text, "?#") {
		return "", errors.New("must not have a query or a fragment")
	}
	u, err := url.Parse(text)
	if err != nil || u.Opaque != "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", errors.New("must be an https URL such as https://api.sb.createos.sh")
	}
	if u.User != nil {
		return "", errors.New("must not have user info")
	}
	switch u.EscapedPath() {
	case "", "/", "/v1", "/v1/":
	default:
		return "", errors.New("must be an origin: the only path it may have is /v1")
	}
	host, ok := normalHost(u.Hostname(), strings.HasPrefix(u.Host, "["))
	if !ok {
		return "", errors.New("must have a valid host, in ASCII")
	}
	if u.Scheme == "http" && host != "localhost" && host != "127.0.0.1" && host != "[::1]" {
		return "", errors.New("must use https; http is for localhost, 127.0.0.1 and [::1] only")
	}
	origin := u.Scheme + "://" + host
	if u.Port() == "" {
		return origin, nil
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	switch {
	case err != nil || port == 0:
		return "", errors.New("must have a port from 1 to 65535, or none")
	case u.Scheme == "https" && port == 443, u.Scheme == "http" && port == 80:
		return origin, nil
	}
	return origin + ":" + strconv.FormatUint(port, 10), nil
}

// normalHost returns a host in lower case, an IPv6 address in its shortest form
// and in brackets. A final dot stays: it is another name to everything that
// compares names, certificates and the fallback key included. A name outside
// ASCII is refused, because the transport would map it to another one.
func normalHost(host string, bracketed bool) (string, bool) {
	if bracketed {
		addr, err := netip.ParseAddr(host)
		if err != nil || !addr.Is6() || addr.Zone() != "" {
			return "", false
		}
		return "[" + addr.String() + "]", true
	}
	if strings.ContainsFunc(host, func(r rune) bool { return !isHostRune(r) }) {
		return "", false
	}
	if slices.Contains(strings.Split(strings.TrimSuffix(host, "."), "."), "") {
		return "", false
	}
	return strings.ToLower(host), true
}

func isHostRune(r rune) bool {
	return r == '-' || r == '.' || r == '_' || '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
}
