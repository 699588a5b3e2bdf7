package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/createos-lease/createos"
)

// A store is what the host knows across its lives: one JSON file, replaced as
// a whole at each change. It knows every sandbox at every moment. Before a
// create is sent there is its intent; the lease takes the intent's place in one
// write; and a lease goes only when its sandbox is proven gone.
//
// Records of other origins are left alone. This host has no key for them, but
// somebody may have, and they may be all that tells of sandboxes that cost
// money.
type store struct {
	path string

	// mu guards the rest. It is held while the file is written, because the
	// file must see the changes in their order; that takes milliseconds. No
	// call of the driver is made under it.
	mu   sync.Mutex
	data contents
	// taken holds the ids of leases that a job of this life has, or has given
	// up on. After a restart they are free again, as they should be.
	taken map[string]bool
}

// contents is the file.
type contents struct {
	Leases  []record `json:"leases"`
	Intents []intent `json:"intents"`
	// Unconfirmed is what the driver still owed at the end of a life.
	Unconfirmed []createos.Unconfirmed `json:"unconfirmed"`
}

// A record is a lease that this host holds.
type record struct {
	Lease *createos.Lease `json:"lease"`
	// Expired is why the lease cannot be resumed. What remains of it is for a
	// person to look at.
	Expired string `json:"expired,omitempty"`
}

// An intent is a create that may have been sent.
type intent struct {
	createos.Intent
	Since time.Time `json:"since"`
}

// openStore reads the file. No file is an empty store; one that cannot be read
// is an error, because starting without it would orphan what it knows.
func openStore(path string) (*store, error) {
	s := &store{path: path, taken: make(map[string]bool)}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &s.data); err != nil {
		return nil, fmt.Errorf("store %s: %w", path, err)
	}
	for _, r := range s.data.Leases {
		if r.Lease == nil {
			return nil, fmt.Errorf("store %s: a record holds no lease", path)
		}
	}
	return s, nil
}

// change applies f to a copy of the contents, and keeps the copy once it is on
// the disk.
func (s *store) change(f func(*contents)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := contents{
		Leases:      slices.Clone(s.data.Leases),
		Intents:     slices.Clone(s.data.Intents),
		Unconfirmed: slices.Clone(s.data.Unconfirmed),
	}
	f(&next)
	if err := next.write(s.path); err != nil {
		return fmt.Errorf("store %s: %w", s.path, err)
	}
	s.data = next
	return nil
}

// write replaces the file: a new one is written beside it and brought to the
// disk before it takes the name, so that a crash leaves the old or the new
// file and never a torn one.
func (c *contents) write(path string) (err error) {
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, filepath.Base(path)+".*") // for its owner only
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(append(text, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir brings a rename to the disk. Windows has no such call for a
// directory.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// intend records a create that is about to be sent. It is what
// AcquireOptions.BeforeCreate is for.
func (s *store) intend(i createos.Intent) error {
	return s.change(func(c *contents) { c.Intents = append(c.Intents, intent{i, time.Now()}) })
}

// acquired puts a lease in the place of its intent.
func (s *store) acquired(lease *createos.Lease) error {
	s.hold(lease)
	return s.change(func(c *contents) {
		c.dropIntent(lease.Metadata.SandboxName)
		c.Leases = append(c.Leases, record{Lease: lease})
	})
}

// notCreated drops an intent that is known to have come to nothing.
func (s *store) notCreated(name string) error {
	return s.change(func(c *contents) { c.dropIntent(name) })
}

func (c *contents) dropIntent(name string) {
	c.Intents = slices.DeleteFunc(c.Intents, func(i intent) bool { return i.SandboxName == name })
}

// expired marks a lease that cannot be resumed.
func (s *store) expired(lease *createos.Lease, why string) error {
	return s.change(func(c *contents) {
		for i := range c.Leases {
			if same(c.Leases[i].Lease, lease) {
				c.Leases[i].Expired = why
			}
		}
	})
}

// gone drops a lease whose sandbox is proven gone.
func (s *store) gone(lease *createos.Lease) error {
	return s.change(func(c *contents) {
		c.Leases = slices.DeleteFunc(c.Leases, func(r record) bool { return same(r.Lease, lease) })
	})
}

// same compares what names a sandbox: an id means something at its origin only.
func same(a, b *createos.Lease) bool {
	return a.ProviderLeaseID == b.ProviderLeaseID && a.Metadata.APIURL == b.Metadata.APIURL
}

// take gives out a lease of the environment that nobody uses, nil if there is
// none.
func (s *store) take(origin string, env createos.Environment) *createos.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.data.Leases {
		m := r.Lease.Metadata
		switch {
		case m.APIURL != origin, m.CompanyID != env.CompanyID, m.EnvironmentID != env.EnvironmentID:
		case r.Expired != "", s.taken[r.Lease.ProviderLeaseID]:
		default:
			s.taken[r.Lease.ProviderLeaseID] = true
			return r.Lease
		}
	}
	return nil
}

// hold keeps others from taking a lease, free lets them.
func (s *store) hold(lease *createos.Lease) { s.setTaken(lease, true) }
func (s *store) free(lease *createos.Lease) { s.setTaken(lease, false) }

func (s *store) setTaken(lease *createos.Lease, taken bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken[lease.ProviderLeaseID] = taken
}

// release makes all leases free: the jobs that had them are over.
func (s *store) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.taken)
}

// records returns what there is at an origin.
func (s *store) records(origin string) []record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.data.Leases), func(r record) bool {
		return r.Lease.Metadata.APIURL != origin
	})
}

// foreign counts the records of other origins.
func (s *store) foreign(origin string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range s.data.Leases {
		if r.Lease.Metadata.APIURL != origin {
			n++
		}
	}
	for _, i := range s.data.Intents {
		if i.APIURL != origin {
			n++
		}
	}
	for _, u := range s.data.Unconfirmed {
		if u.APIURL != origin {
			n++
		}
	}
	return n
}

// owed is what a new driver has to take over: what the last one still owed,
// and the creates of which nobody knows how they ended.
func (s *store) owed(origin string) []createos.Unconfirmed {
	s.mu.Lock()
	defer s.mu.Unlock()
	var owed []createos.Unconfirmed
	for _, u := range s.data.Unconfirmed {
		if u.APIURL == origin {
			owed = append(owed, u)
		}
	}
	for _, i := range s.data.Intents {
		if i.APIURL == origin {
			owed = append(owed, i.Unconfirmed(i.Since))
		}
	}
	return owed
}

// settled replaces what is owed at an origin by what its driver says in the end.
// That covers the intents: an acquire that is over is a lease, or gone, or
// listed by the driver.
func (s *store) settled(origin string, owed []createos.Unconfirmed) error {
	return s.change(func(c *contents) {
		c.Intents = slices.DeleteFunc(c.Intents, func(i intent) bool { return i.APIURL == origin })
		c.Unconfirmed = slices.DeleteFunc(c.Unconfirmed, func(u createos.Unconfirmed) bool { return u.APIURL == origin })
		c.Unconfirmed = append(c.Unconfirmed, owed...)
	})
}

// workspaces are the paths that sandboxes at an origin use.
func (s *store) workspaces(origin string) []string {
	var paths []string
	for _, r := range s.records(origin) {
		paths = append(paths, r.Lease.Metadata.RemoteCwd)
	}
	return paths
}
