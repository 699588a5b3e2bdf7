package createos

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"
)

const (
	defaultTimeout = 5 * time.Minute

	// denyAllRule stands for "nothing may leave". The provider has no such
	// rule, and reads an empty list as "everything may". So the only address
	// that is allowed is one that belongs to nobody: RFC 5737 reserves it for
	// documentation.
	denyAllRule = "192.0.2.1/32"
)

// Config is the provider configuration of one environment. It is made from a
// document by [ParseConfig] or [Config.UnmarshalJSON], or written down as a
// struct; both go through the same checks. In the struct the zero value of a
// field means that the key is absent. Each field names its key in the document.
//
// Strings are trimmed of white space at both ends; they may neither be empty
// then, nor hold a NUL byte or invalid UTF-8.
//
// A Config is plain data. It may be copied, and used from several goroutines as
// long as none changes it. With a key in it, reflect.DeepEqual does not call it
// equal to its own copy; see [Secret].
type Config struct {
	// APIURL (apiUrl, required) is the origin of the provider's API, such as
	// https://api.sb.createos.sh. The scheme http is taken for localhost,
	// 127.0.0.1 and [::1] only. User info, a query and a fragment are refused.
	// The path may be empty, "/", "/v1" or "/v1/", and is dropped, as is the
	// default port; scheme and host become lower case. The driver enforces
	// all this: the key travels to this origin and to no other. A lease
	// belongs to the origin it was acquired at, so after a change of origin
	// older leases are refused.
	APIURL string

	// APIKey (apiKey) authenticates to the provider. A key here always wins.
	// Without one the driver's fallback key serves, but only when the origin is
	// exactly https://api.sb.createos.sh, https://api-us.sb.createos.sh or
	// https://api-eu.sb.createos.sh; anywhere else a configuration could have
	// the machine's own key sent to a server of its choice. A key is printable
	// ASCII. A line break or NUL is refused wherever it stands, also at the
	// ends, where other white space is trimmed. So is the text "[redacted]",
	// which is what a key prints and marshals as. The driver enforces this, and
	// shows no key in any error.
	APIKey Secret

	// Shape (shape, required) is the id of a machine size in the provider's
	// catalogue, such as s-1vcpu-1gb. The provider refuses an unknown shape, or
	// one that the plan does not hold, when a sandbox is created. Too little
	// memory shows as killed commands, too much as cost. A lease with another
	// shape than this one is expired when it is resumed.
	Shape string

	// Rootfs (rootfs) is the image of the sandbox. Absent, the provider's
	// default image. The image must hold Bash. As with Shape, a change makes
	// existing leases expire at resume.
	Rootfs string

	// Region (region) is where the provider runs the sandbox. Absent, the
	// provider's default. A change makes existing leases expire at resume.
	Region string

	// RootfsByAdapter (rootfsByAdapter) names the image for an adapter, the kind
	// of program a lease is acquired for. It goes before Rootfs. Absent or
	// without the adapter in question, Rootfs serves. Names are trimmed and
	// otherwise taken as written, upper and lower case apart.
	RootfsByAdapter map[string]string

	// Timeout (timeoutMs, an integer of milliseconds) bounds one operation of
	// the driver, and is the default bound of one command. It is no lifetime of
	// a sandbox. Whole milliseconds from 1 ms to 24 h; absent, 5 minutes. The
	// driver enforces it. Too short, and a sandbox that is slow to boot is
	// destroyed before it was ready, and commands end as timed out; too long,
	// and a call hangs with a provider that does not answer.
	Timeout time.Duration

	// ReuseLease (reuseLease, default false) says what Release does. False
	// destroys the sandbox. True pauses it, and Resume goes on with its files
	// and processes; a paused sandbox goes on costing what the provider charges
	// for its storage. The driver enforces it. A lease is paused only if this
	// was set both when it was acquired and when it is released.
	ReuseLease bool

	// AutoPauseAfter (autoPauseAfterSeconds, an integer of seconds) is the idle
	// time after which the provider itself pauses the sandbox of a lease,
	// whatever ReuseLease says: the brake for a host that died. Whole seconds from 60 s to 24 h;
	// absent, there is no brake. The provider enforces it. Too short, and a
	// command that is silent for long is frozen in its middle and has to be
	// woken; too long or absent, and a forgotten sandbox runs and costs as long.
	// A change makes existing leases expire at resume.
	AutoPauseAfter time.Duration

	// EgressAllowlist (egressAllowlist) lists what the sandbox may connect to:
	// host, host:port, *.host, an IP address, ip:port, a CIDR block, cidr:port,
	// or * for everything. Absent (nil), the provider's default, which is open.
	// Duplicates are dropped, and so is * beside a real rule. An empty list that
	// is not nil is refused, because it is unclear what it would mean: for the
	// provider it means everything. So are empty entries, and entries with
	// white space, a comma or "://": a list that the provider cannot read is
	// reported to be treated as open.
	//
	// The provider enforces the list, not this library. It applies address
	// rules at once. Host-name rules are not a security boundary at this
	// provider: they have been seen to come into force late, to be weak for
	// plain HTTP, and to be accepted without any effect. What EgressDenyAll
	// leaves reachable stays reachable here as well. A missing rule shows as
	// connections that fail inside the sandbox. A change makes existing leases
	// expire at resume.
	EgressAllowlist []string

	// EgressDenyAll (egressDenyAll, default false) says that nothing may leave.
	// It excludes EgressAllowlist. The provider has no rule for it, so what is
	// sent is a list with one address that leads nowhere, 192.0.2.1/32 (reserved
	// for documentation), and the provider enforces that.
	//
	// As observed at the provider, this stays reachable all the same: names are
	// still resolved, so DNS queries leave the sandbox, and can carry data; and
	// the link-local block 169.254.0.0/16 answers, with a metadata service if
	// there is one. Peers in an overlay network are subject to the list, and so
	// are cut off. Whoever needs more than that must not give the sandbox
	// anything worth carrying away.
	EgressDenyAll bool

	// invalid holds what was wrong with the document this was made from. Such a
	// Config stays invalid, whatever its fields say: a refused value is no longer
	// in them, and without it they may mean something else, an open network for
	// instance. Its address and key still serve cleanup.
	invalid []FieldError
}

// Origin is the API origin in the form in which leases, intents and entries of
// Unconfirmed carry it: scheme and host in lower case, without a default port.
// It is empty if APIURL is not valid.
func (c Config) Origin() string {
	origin, err := normalizeOrigin(c.APIURL)
	if err != nil {
		return ""
	}
	return origin
}

// Validate returns nil, or a *[ConfigError] with everything that is wrong. A
// missing key is no error here, because the driver may have a fallback. What
// was wrong with a document stays wrong: a Config that came out of ParseConfig
// together with an error is never valid, also after its fields were changed.
func (c Config) Validate() error {
	if _, errs := c.normal(); len(errs) > 0 {
		return newConfigError(errs)
	}
	return nil
}

// MarshalJSON writes the document form, without the keys that are absent. The
// API key is written as "[redacted]", and a document with that is refused when
// it is read, until the key is put back. A Config that came out of a document
// with errors is refused with its *[ConfigError]: without the values that were
// refused, the document would say something else than its author meant.
func (c Config) MarshalJSON() ([]byte, error) {
	if len(c.invalid) > 0 {
		return nil, newConfigError(c.invalid)
	}
	return json.Marshal(configDocument{
		APIURL:                c.APIURL,
		APIKey:                c.APIKey,
		Shape:                 c.Shape,
		Rootfs:                c.Rootfs,
		Region:                c.Region,
		RootfsByAdapter:       c.RootfsByAdapter,
		TimeoutMs:             float64(c.Timeout) / float64(time.Millisecond),
		ReuseLease:            c.ReuseLease,
		AutoPauseAfterSeconds: c.AutoPauseAfter.Seconds(),
		EgressAllowlist:       c.EgressAllowlist,
		EgressDenyAll:         c.EgressDenyAll,
	})
}

// configDocument is the document form. Its durations are floats, so that one
// which is not whole in its unit is written as it is, and refused when it is
// read, instead of being rounded. An empty list is written for the same reason.
type configDocument struct {
	APIURL                string            `json:"apiUrl,omitzero"`
	APIKey                Secret            `json:"apiKey,omitzero"`
	Shape                 string            `json:"shape,omitzero"`
	Rootfs                string            `json:"rootfs,omitzero"`
	Region                string            `json:"region,omitzero"`
	RootfsByAdapter       map[string]string `json:"rootfsByAdapter,omitempty"`
	TimeoutMs             float64           `json:"timeoutMs,omitzero"`
	ReuseLease            bool              `json:"reuseLease,omitzero"`
	AutoPauseAfterSeconds float64           `json:"autoPauseAfterSeconds,omitzero"`
	EgressAllowlist       []string          `json:"egressAllowlist,omitzero"`
	EgressDenyAll         bool              `json:"egressDenyAll,omitzero"`
}

// UnmarshalJSON reads the document form through [ParseConfig]. On a
// *[ConfigError] the receiver holds what was valid, as the Config that
// ParseConfig returns does. Inside a larger document encoding/json stops at such
// an error and leaves the rest unread; a host that wants the rest all the same
// decodes the configuration from a json.RawMessage of its own.
func (c *Config) UnmarshalJSON(data []byte) error {
	if string(bytes.TrimSpace(data)) == "null" {
		return nil // as encoding/json asks for
	}
	var doc map[string]any
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	if dec.Decode(&doc) != nil {
		// The decoder's own text may quote what it read.
		return errors.New("createos: configuration is not a JSON object")
	}
	var err error
	*c, err = ParseConfig(doc)
	return err
}

// settings is a checked configuration: what the driver works with. A field that
// did not pass its check is zero.
type settings struct {
	origin                string
	key                   Secret
	shape, rootfs, region string
	rootfsByAdapter       map[string]string
	timeout               time.Duration
	reuse                 bool
	autoPauseSeconds      int
	egress                []string // the list to send; nil for open
}

// settings checks c and settles the key. It fills what is valid even when it
// returns an error, since cleanup needs the origin and the key only. Unlike
// Validate it takes a missing key as an error.
func (c Config) settings(fallback Secret) (settings, *ConfigError) {
	n, errs := c.normal()
	s := settings{
		origin:           n.APIURL,
		key:              n.APIKey,
		shape:            n.Shape,
		rootfs:           n.Rootfs,
		region:           n.Region,
		rootfsByAdapter:  n.RootfsByAdapter,
		timeout:          n.Timeout,
		reuse:            n.ReuseLease,
		autoPauseSeconds: int(n.AutoPauseAfter / time.Second),
	}
	if s.timeout == 0 {
		s.timeout = defaultTimeout
	}
	switch {
	case n.EgressDenyAll, errs.has("egressAllowlist"):
		// A list that was refused is not the same as none: none is open.
		s.egress = []string{denyAllRule}
	case !isOpen(n.EgressAllowlist):
		s.egress = n.EgressAllowlist
	}
	// A key that was given and refused is not replaced: the fallback serves
	// those who gave none.
	if s.key.IsZero() && !errs.has("apiKey") {
		s.key = errs.fallbackKey(fallback, s.origin, errs.has("apiUrl"))
	}
	return s, newConfigError(errs)
}

// fallbackKey returns the fallback key if it may be sent to the origin, and
// otherwise records why there is no key.
func (e *fieldErrors) fallbackKey(fallback Secret, origin string, originInvalid bool) Secret {
	switch {
	case fallback.IsZero():
		e.add("apiKey", "is required: the configuration has none, and there is no fallback key")
	case originInvalid:
		// Whether a key is needed is not known before apiUrl is right.
	case !isOfficial(origin):
		e.add("apiKey", "is required: the fallback key serves the provider's official origins only, "+
			strings.Join(officialOrigins, ", ")+", and apiUrl is none of them")
	default:
		key, wrong := checkKey(fallback)
		if wrong != "" {
			e.add("apiKey", "is required: the configuration has none, and the fallback key "+wrong)
		}
		return key
	}
	return Secret{}
}

// rootfsFor returns the image for an adapter; "" is the provider's default.
func (s settings) rootfsFor(adapter string) string {
	if image, ok := s.rootfsByAdapter[adapter]; ok {
		return image
	}
	return s.rootfs
}

// normal returns c in normal form, with what is not valid set to zero, and what
// is wrong with it. It shares nothing with c that can be changed.
func (c Config) normal() (Config, fieldErrors) {
	var errs fieldErrors
	n := Config{ReuseLease: c.ReuseLease, EgressDenyAll: c.EgressDenyAll}

	n.APIURL = errs.origin(c.APIURL)
	if !c.APIKey.IsZero() {
		key, wrong := checkKey(c.APIKey)
		if wrong != "" {
			errs.add("apiKey", wrong)
		}
		n.APIKey = key
	}
	if c.Shape == "" {
		errs.add("shape", "is required")
	}
	n.Shape = errs.text("shape", c.Shape)
	n.Rootfs = errs.text("rootfs", c.Rootfs)
	n.Region = errs.text("region", c.Region)
	n.RootfsByAdapter = errs.images(c.RootfsByAdapter)

	n.Timeout = errs.duration("timeoutMs", c.Timeout, timeoutLimits)
	n.AutoPauseAfter = errs.duration("autoPauseAfterSeconds", c.AutoPauseAfter, autoPauseLimits)
	n.EgressAllowlist = errs.egress(c.EgressAllowlist)
	if c.EgressDenyAll && c.EgressAllowlist != nil {
		errs.add("egressDenyAll", "and egressAllowlist exclude each other: keep the one that is meant")
	}

	// What the document said about a key is the cause of what the emptied field
	// would say now.
	document := fieldErrors(c.invalid)
	errs = slices.DeleteFunc(errs, func(e FieldError) bool { return document.covers(e.Field) })
	errs = append(slices.Clone(document), errs...)
	slices.SortStableFunc(errs, compareFields)
	n.invalid = errs
	return n, errs
}
