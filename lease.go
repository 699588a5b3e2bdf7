package createos

import (
	"fmt"
	"log/slog"
	"regexp"
	"slices"
)

// providerName is what the metadata of every lease of this provider says.
const providerName = "createos"

// Lease is a sandbox that is ready for work, with metadata that proves whose it
// is. It is plain data and holds no secret of this library. A host keeps it, as
// JSON, wherever it likes, and hands it back later, perhaps in another process.
//
// The JSON form is shared with the provider's TypeScript implementation, in both
// directions. Keys that this library does not know are kept at both levels, and
// written again. They are never printed, since another program may have put
// anything there; but they are part of the JSON form, so a lease as JSON is for
// the host's store and not for its log.
//
// Printed, a Lease shows its id, name, origin and environment only. Leases are
// compared by their JSON: reflect.DeepEqual calls no two leases equal that hold
// unknown keys. A Lease may be used from several goroutines as long as none
// changes it; the driver never changes one that it was given.
type Lease struct {
	// ProviderLeaseID is the id of the sandbox.
	ProviderLeaseID string
	// Metadata says whose the sandbox is and how it was made.
	Metadata Metadata

	kept keptKeys
}

// Metadata is the part of a lease that proves whose it is, and remembers how
// its sandbox was made. An empty string and 0 stand for null where the JSON form
// has null. Hosts read it and do not change it: a lease that says something else
// than its sandbox is expired, or belongs to nobody.
//
// Decoding is tolerant, because a lease that cannot be read is a sandbox that
// cannot be destroyed. A field of a wrong type is left zero; its JSON is kept and
// written again as it was. Such a lease can be released and destroyed if it
// still belongs to its environment, and is expired when it is resumed.
type Metadata struct {
	// Provider is "createos".
	Provider string
	// APIURL is the origin of the API at which the sandbox lives. The driver
	// writes it in normal form; see [Config].
	APIURL string
	// CompanyID and EnvironmentID are those of the environment that acquired
	// the lease. With the origin they decide to whom it belongs.
	CompanyID     string
	EnvironmentID string
	// RemoteCwd is the workspace in the sandbox, an absolute path.
	RemoteCwd string
	// ShellCommand is the shell that the image provides, "bash".
	ShellCommand string
	// Marker is the UUID that was written into the workspace. When it is found
	// again at resume, the disk is still the same one.
	Marker string
	// Shape, Rootfs and Region are what the sandbox was created with; an empty
	// Rootfs or Region is the provider's default.
	Shape  string
	Rootfs string
	Region string
	// ReuseLease is Config.ReuseLease at the time of the acquire.
	ReuseLease bool
	// AdapterType is the adapter named at the acquire, if any.
	AdapterType string
	// BaseEgressAllowlist is the egress list of the configuration at the
	// acquire; empty, or "*" alone, is open.
	BaseEgressAllowlist []string
	// EffectiveEgressAllowlist is the list that the sandbox was given.
	EffectiveEgressAllowlist []string
	// AutoPauseAfterSeconds is the provider-side idle brake in seconds; 0 is
	// none.
	AutoPauseAfterSeconds int
	// LeaseKey is the name of the environment variable that marks the sandbox as
	// this lease. This and the following fields are not written by other
	// implementations, and are left out of the JSON form when they are empty.
	LeaseKey string
	// SandboxName is the name of the sandbox.
	SandboxName string
	// AccountID is the provider account that owns the sandbox, if it was known.
	AccountID string
	// ResumedLease is set in the lease that Resume returns.
	ResumedLease bool

	older     bool     // decoded from a lease without the newer fields
	malformed []string // names of the fields whose JSON could not be used
	kept      keptKeys
}

// String shows the id, the name, the origin and the environment.
func (l Lease) String() string {
	m := l.Metadata
	return fmt.Sprintf("lease %q (name %q, origin %q, company %q, environment %q)",
		l.ProviderLeaseID, m.SandboxName, m.origin(), m.CompanyID, m.EnvironmentID)
}

// GoString returns the same as String; it is what the verb %#v asks for.
func (l Lease) GoString() string { return l.String() }

// LogValue makes log/slog show what String shows, as a group.
func (l Lease) LogValue() slog.Value {
	m := l.Metadata
	return slog.GroupValue(
		slog.String("id", l.ProviderLeaseID),
		slog.String("name", m.SandboxName),
		slog.String("origin", m.origin()),
		slog.String("company", m.CompanyID),
		slog.String("environment", m.EnvironmentID),
	)
}

// clone returns a copy that shares nothing that can be changed.
func (l *Lease) clone() *Lease {
	if l == nil {
		return nil
	}
	c := *l
	c.Metadata.BaseEgressAllowlist = slices.Clone(l.Metadata.BaseEgressAllowlist)
	c.Metadata.EffectiveEgressAllowlist = slices.Clone(l.Metadata.EffectiveEgressAllowlist)
	c.Metadata.malformed = slices.Clone(l.Metadata.malformed)
	return &c
}

// origin returns the origin in normal form, or "" if there is no valid one.
// Other implementations write the URL as it was configured.
func (m Metadata) origin() string {
	origin, err := normalizeOrigin(m.APIURL)
	if err != nil {
		return ""
	}
	return origin
}

// belongsTo reports whether the lease is the property of an environment at an
// origin in normal form. What is empty matches nothing, not even another empty.
func (m Metadata) belongsTo(company, environment, origin string) bool {
	return m.Provider == providerName &&
		company != "" && m.CompanyID == company &&
		environment != "" && m.EnvironmentID == environment &&
		origin != "" && m.origin() == origin
}

// legacy reports whether the lease was written by an older implementation, which
// did not record adapter, egress lists and auto-pause. For those the
// configuration's values apply.
func (m Metadata) legacy() bool { return m.older }

// restriction returns the egress list that has to be in force before the sandbox
// may run again, or nil for a lease that was never restricted. It reports false
// when the record cannot be relied on: then the lease is expired, since to read
// a damaged list as none would open the network.
func (m Metadata) restriction() (list []string, ok bool) {
	if len(m.malformed) > 0 {
		return nil, false
	}
	for _, recorded := range [][]string{m.BaseEgressAllowlist, m.EffectiveEgressAllowlist} {
		rules, wrong := normalEgress(recorded)
		if len(wrong) > 0 {
			return nil, false
		}
		if list == nil && !isOpen(rules) {
			list = rules
		}
	}
	return list, true
}

var idForm = regexp.MustCompile(`\A[A-Za-z0-9_-]{1,200}\z`)

// validID reports whether id has the form of a sandbox id. Anything else is never
// put into a path.
func validID(id string) bool { return idForm.MatchString(id) }
