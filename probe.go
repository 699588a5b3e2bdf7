package createos

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// A ProbeResult is what a Probe found out.
type ProbeResult struct {
	// OK says that a sandbox was acquired and that a command ran in its
	// workspace with the expected output. It says nothing about the destroy.
	OK bool `json:"ok"`
	// Summary is one short sentence for a person.
	Summary string `json:"summary"`
	// Steps are the steps that were begun, in order.
	Steps []ProbeStep `json:"steps"`
	// SandboxID is the sandbox that was used; empty if there was none.
	SandboxID string `json:"sandboxId,omitempty"`
	// Err is why OK is false.
	Err error `json:"-"`
	// Cleanup is set if the sandbox is not proven destroyed. It is then listed
	// by Unconfirmed too. It is independent of OK.
	Cleanup error `json:"-"`
}

// A ProbeStep is one step of a Probe: "acquire", "command" or "destroy".
type ProbeStep struct {
	Name string        `json:"name"`
	Took time.Duration `json:"tookNs"`
	OK   bool          `json:"ok"`
}

// Probe finds out whether an environment works: it acquires a sandbox, never
// for reuse, runs one command in its workspace, checks the output, and
// destroys the sandbox. It takes as long as a cold start takes; each step is
// bounded by Config.Timeout, the destroy by DriverConfig.CleanupTimeout.
//
// What does not work is in the result, not in the error. The error is non-nil
// only if nothing was sent: [*ConfigError], [*InputError], ErrShutdown. The
// end of ctx, and Shutdown, cancel the step that runs; the sandbox is destroyed
// all the same. Only opts.Workspace, AdapterType and BeforeCreate matter, as
// for Acquire. It may be called concurrently.
func (d *Driver) Probe(ctx context.Context, env Environment, opts AcquireOptions) (*ProbeResult, error) {
	env.Config.ReuseLease = false
	a, err := d.plan(env, opts)
	if err != nil {
		return nil, err
	}
	// The acquire is not over before its sandbox is destroyed: there is no host
	// to hand it to, and whatever happens in between, it must be listed.
	ctx, leave, err := d.enterAcquire(ctx, a)
	if err != nil {
		return nil, err
	}
	defer leave()
	return d.probe(ctx, env, a), nil
}

func (d *Driver) probe(ctx context.Context, env Environment, a *acquisition) *ProbeResult {
	r := new(ProbeResult)
	var lease *Lease
	err := r.step("acquire", func() (err error) {
		lease, err = d.acquire(ctx, a)
		return err
	})
	if err != nil {
		var setup *SetupError
		if errors.As(err, &setup) {
			r.SandboxID = setup.SandboxID
			kind := a.target(setup.SandboxID).destroyDebt(setup.Destroy).Kind
			r.Cleanup = &CleanupError{Kind: kind, SandboxID: setup.SandboxID, Cause: setup.Destroy}
		}
		return r.conclude(err)
	}
	a.closed = false
	r.SandboxID = lease.ProviderLeaseID
	failed := r.step("command", func() error { return d.probeCommand(ctx, env, lease) })
	r.Cleanup = r.step("destroy", func() error {
		ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), d.cfg.CleanupTimeout, ErrTimeout)
		defer cancel()
		return d.Destroy(ctx, env, lease)
	})
	a.closed = true // proven, owed, or still closing: listed in its own right
	return r.conclude(failed)
}

// probeCommand runs one command and believes only its output.
func (d *Driver) probeCommand(ctx context.Context, env Environment, lease *Lease) error {
	word := uuid.NewString()
	res, err := d.Exec(ctx, env, lease, Command{Name: "printf", Args: []string{"%s", word}})
	if err != nil {
		return err
	}
	if err := res.Err(); err != nil {
		return err
	}
	if string(res.Stdout) != word {
		return errors.New("createos: probe: the command did not print what it was asked to")
	}
	return nil
}

func (r *ProbeResult) step(name string, f func() error) error {
	began := time.Now()
	err := f()
	r.Steps = append(r.Steps, ProbeStep{Name: name, Took: time.Since(began), OK: err == nil})
	return err
}

func (r *ProbeResult) conclude(err error) *ProbeResult {
	r.OK, r.Err = err == nil, err
	r.Summary = "A sandbox was acquired and ran a command."
	if err != nil {
		last := ""
		for _, s := range r.Steps {
			if !s.OK {
				last = s.Name
				break
			}
		}
		r.Summary = fmt.Sprintf("The %s step failed: %v", last, err)
	}
	if r.Cleanup != nil {
		r.Summary += fmt.Sprintf(" The sandbox %s is not proven destroyed.", r.SandboxID)
	}
	return r
}
