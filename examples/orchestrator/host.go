package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"sync/atomic"
	"time"

	"github.com/createos-lease/createos"
)

// cleanupBound bounds what the host does after its context ended: giving one
// lease back, and closing.
const cleanupBound = 2 * time.Minute

// A host is one life of the program: a driver and the store that it inherits.
type host struct {
	log    *log.Logger
	site   *site
	store  *store
	driver *createos.Driver
	envs   []createos.Environment
	tally  tally
}

// A tally is what happened in one life.
type tally struct {
	done, failed, cancelled      atomic.Int64 // jobs
	acquired, resumed, destroyed atomic.Int64 // sandboxes
	requests                     atomic.Int64
}

// newHost makes a driver that takes over what the last one owed.
func newHost(logger *log.Logger, at *site, st *store) (*host, error) {
	h := &host{log: logger, site: at, store: st, envs: environments(at.config)}
	st.release()
	config := at.driver
	config.Unconfirmed = st.owed(at.config.APIURL)
	config.OnEvent = func(e createos.Event) {
		if e.Kind == createos.EventRequest {
			h.tally.requests.Add(1)
		}
	}
	driver, err := createos.NewDriver(config)
	if err != nil {
		return nil, err
	}
	h.driver = driver
	return h, nil
}

// recover says what the store holds, and works on what an earlier life owed.
func (h *host) recover(ctx context.Context) {
	origin := h.site.config.APIURL
	h.log.Printf("the store holds %d leases", len(h.store.records(origin)))
	if n := h.store.foreign(origin); n > 0 {
		h.log.Printf("it also holds %d records of other origins, which are left alone", n)
	}
	owed := h.driver.Unconfirmed()
	if len(owed) == 0 {
		return
	}
	for _, u := range owed {
		h.log.Printf("owed from an earlier start: %s", describe(u))
	}
	// The keys are those of this start: the driver that made the entries had
	// its own, and a key is never stored.
	if err := h.driver.RetryCleanup(ctx, h.envs...); err != nil {
		h.log.Printf("still owed, and tried again in the end: %v", err)
		return
	}
	h.log.Printf("settled")
}

// describe names an entry for a person.
func describe(u createos.Unconfirmed) string {
	who := u.SandboxID
	if who == "" {
		who = "the sandbox named " + u.SandboxName
	}
	return fmt.Sprintf("%s: %s (%s)", who, u.Kind, u.Cause)
}

// lease gives a job a sandbox of its environment: a paused one that can be
// resumed, else a fresh one.
func (h *host) lease(ctx context.Context, env createos.Environment) (*createos.Lease, error) {
	for {
		kept := h.store.take(h.site.config.APIURL, env)
		if kept == nil {
			return h.acquire(ctx, env)
		}
		lease, err := h.driver.Resume(ctx, env, kept)
		switch {
		case err == nil:
			h.tally.resumed.Add(1)
			return lease, nil
		case ctx.Err() != nil:
			return nil, err // it is in the store, as good as it was
		case errors.Is(err, createos.ErrLeaseExpired):
			err = h.expire(kept, err)
		case errors.Is(err, createos.ErrCleanupFirst), errors.Is(err, createos.ErrTerminationUnproven):
			// Something may still run in it. Only destroying it cures that.
			err = h.destroy(ctx, env, kept)
		default:
			// Passing trouble, perhaps: the next start will try again.
			h.log.Printf("%s cannot be resumed now and stays in the store: %v", kept.ProviderLeaseID, err)
			err = nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// expire notes that a lease cannot be continued. If something remains of it, a
// person may want to look before it is destroyed, so it is not.
func (h *host) expire(lease *createos.Lease, verdict error) error {
	h.log.Print(verdict)
	var expired *createos.ExpiredError
	if errors.As(verdict, &expired) && expired.Remains == createos.RemainsGone {
		return h.store.gone(lease)
	}
	return h.store.expired(lease, verdict.Error())
}

// acquire makes a sandbox, with an intent in the store from before the create
// until the lease is there.
func (h *host) acquire(ctx context.Context, env createos.Environment) (*createos.Lease, error) {
	workspace, err := h.site.workspace()
	if err != nil {
		return nil, err
	}
	var name string
	lease, err := h.driver.Acquire(ctx, env, createos.AcquireOptions{
		Workspace: workspace,
		BeforeCreate: func(_ context.Context, i createos.Intent) error {
			name = i.SandboxName
			return h.store.intend(i)
		},
	})
	if err != nil {
		return nil, errors.Join(err, h.acquireFailed(name, err))
	}
	h.tally.acquired.Add(1)
	if err := h.store.acquired(lease); err != nil {
		// A sandbox that the store does not know would be lost at a crash.
		return nil, errors.Join(err, h.driver.Destroy(context.WithoutCancel(ctx), env, lease))
	}
	return lease, nil
}

// acquireFailed drops the intent, unless something may be left of it.
func (h *host) acquireFailed(name string, err error) error {
	if name == "" || errors.As(err, new(*createos.SetupError)) || errors.As(err, new(*createos.CreateUnknownError)) {
		return nil
	}
	return h.store.notCreated(name)
}

// giveBack ends a job's hold on a lease, also when the job's context is over.
func (h *host) giveBack(ctx context.Context, env createos.Environment, lease *createos.Lease) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	err := h.driver.Release(ctx, env, lease)
	if errors.Is(err, createos.ErrPoisoned) {
		return h.destroy(ctx, env, lease)
	}
	h.store.free(lease) // the driver lists a pause that is not proven
	return err
}

// destroy ends a lease for good. Only proof takes it out of the store.
func (h *host) destroy(ctx context.Context, env createos.Environment, lease *createos.Lease) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	if err := h.driver.Destroy(ctx, env, lease); err != nil {
		return err
	}
	h.tally.destroyed.Add(1)
	return h.store.gone(lease)
}

// close ends this life, whether ctx is over or not: it waits for what the driver
// is doing, destroys the sandboxes if the host wants none of them again, tries
// once more what is owed, and leaves the rest to the next start.
func (h *host) close(ctx context.Context, destroy bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	_ = h.driver.Shutdown(ctx) // RetryCleanup says what is left of its complaints
	if destroy {
		h.destroyAll(ctx)
	}
	err := h.driver.RetryCleanup(ctx, h.envs...)
	return errors.Join(err, h.store.settled(h.site.config.APIURL, h.driver.Unconfirmed()))
}

// destroyAll destroys all leases of the store, expired ones included: that is
// what the person who asked for it wants. The driver paces the requests.
func (h *host) destroyAll(ctx context.Context) {
	var all sync.WaitGroup
	for _, r := range h.store.records(h.site.config.APIURL) {
		env, ok := h.environment(r.Lease)
		if !ok {
			h.log.Printf("%s belongs to no environment of this host", r.Lease.ProviderLeaseID)
			continue
		}
		all.Go(func() {
			if err := h.destroy(ctx, env, r.Lease); err != nil {
				h.log.Printf("%s stays in the store: %v", r.Lease.ProviderLeaseID, err)
			}
		})
	}
	all.Wait()
}

// environment is the one that a lease belongs to.
func (h *host) environment(lease *createos.Lease) (createos.Environment, bool) {
	for _, env := range h.envs {
		if env.CompanyID == lease.Metadata.CompanyID && env.EnvironmentID == lease.Metadata.EnvironmentID {
			return env, true
		}
	}
	return createos.Environment{}, false
}
