package createos

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"strings"

	"github.com/google/uuid"
)

// A tenant is on whose behalf a call is made, and where: everything of a
// scope but the sandbox. The newest key of a tenant serves its cleanup.
type tenant struct {
	company, environment, origin string
}

// A scope is the key of all state in memory: one sandbox of one tenant.
// Before an id exists, id holds the sandbox name; names begin with
// namePrefix and ids of the provider do not, so the two never meet.
//
// The account and the credential are deliberately no part of it: a key that
// is rotated must find the same closing and the same poison, and looking
// those up must not need a request.
type scope struct {
	tenant
	id string
}

const (
	namePrefix     = "l-"
	leaseKeyPrefix = "CREATEOS_LEASE_"
	ownerPrefix    = "CREATEOS_OWNER_"
)

// marks are what a create carries so that its sandbox is recognised after a
// lost reply or a crash: the API has neither labels nor idempotency keys, but
// it shows names, and the names of environment variables.
type marks struct {
	name     string // l- and 20 characters of base32: the API allows 22
	leaseKey string // CREATEOS_LEASE_ and a UUID: proves that a sandbox is of this acquire
	owner    string // CREATEOS_OWNER_ and a digest: of this tenant and deployment
}

// newMarks draws fresh marks. 20 characters of base32 hold 94 random
// bits of the UUID, so a name that is taken already is ours.
func newMarks(deployment string, t tenant) marks {
	id := uuid.New()
	return marks{
		name:     namePrefix + strings.ToLower(base32.StdEncoding.EncodeToString(id[:]))[:20],
		leaseKey: leaseKeyPrefix + strings.ReplaceAll(uuid.NewString(), "-", ""),
		owner:    ownerMark(deployment, t),
	}
}

// ownerMark is the same for every lease of a tenant in a deployment. NUL
// separates the parts, and no part may hold one, so no two tenants share it
// by moving a character across the border.
func ownerMark(deployment string, t tenant) string {
	sum := sha256.Sum256([]byte(deployment + "\x00" + t.company + "\x00" + t.environment))
	return ownerPrefix + hex.EncodeToString(sum[:8])
}

// envs is the environment that a create declares: two names whose values mean
// nothing.
func (m marks) envs() map[string]string {
	return map[string]string{m.leaseKey: "1", m.owner: "1"}
}
