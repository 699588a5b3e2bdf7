package createos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestListingOfAnotherAccountProvesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{Unconfirmed: []Unconfirmed{{Kind: CreateUnknown, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin,
			SandboxName: "l-abc", LeaseKey: "CREATEOS_LEASE_x", AccountID: "usr_other", Cause: "x", Since: time.Now()}}})
		time.Sleep(DefaultSettleTime)
		err := d.RetryCleanup(t.Context(), testEnv()) // whoami: usr_1
		assert.Error(t, err, "a list of usr_1 says nothing about a sandbox of usr_other")
		assert.Len(t, d.Unconfirmed(), 1)
	})
}

func TestProbeIsListedWhileItsCommandRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, DriverConfig{})
		d := m.d
		done := make(chan struct{})
		m.always(rSpawn, hang)
		go func() { defer close(done); _, _ = d.Probe(context.Background(), m.env, AcquireOptions{}) }()
		time.Sleep(time.Second)
		synctest.Wait()
		assert.NotEmpty(t, d.Unconfirmed(), "during the command of a probe")
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := d.Shutdown(ctx)
		var u *UnconfirmedError
		require.ErrorAs(t, err, &u)
		assert.NotEmpty(t, u.Entries, "%v", err)
		<-done
	})
}

// panicOnProcess panics when a process is to be created.
type panicOnProcess struct{ http.RoundTripper }

func (r panicOnProcess) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method == "POST" && len(req.URL.Path) > 10 && req.URL.Path[len(req.URL.Path)-10:] == "/processes" {
		panic("transport")
	}
	return r.RoundTripper.RoundTrip(req)
}

func TestProbeThatPanicsLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		d.cfg.Transport = panicOnProcess{p.mock}
		func() {
			defer func() { require.NotNil(t, recover()) }()
			_, _ = d.Probe(context.Background(), testEnv(), AcquireOptions{})
		}()
		assert.Zero(t, p.count(rDelete))
		assert.NotEmpty(t, d.Unconfirmed(), "a panic must not forget the sandbox")
	})
}

func TestLegacyLeaseIsRestrictedByTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable, func(c *Config) { c.EgressDenyAll = true })
		marker := "0f8fad5b-d9cb-469f-a165-70867728950e"
		var l Lease
		require.NoError(t, json.Unmarshal([]byte(fmt.Sprintf(`{"providerLeaseId":%q,"metadata":{"provider":"createos","apiUrl":%q,"companyId":"acme","environmentId":"ci","remoteCwd":"/paperclip-workspace","shellCommand":"bash","marker":%q,"shape":"s-1vcpu-1gb","rootfs":null,"region":null,"reuseLease":true}}`, box, origin, marker)), &l))
		p.setState(statePaused)
		p.marker = marker
		_, err := d.Resume(t.Context(), env, &l)
		require.NoError(t, err)
		assert.Equal(t, 1, p.count(rSetEgress), "%v", p.requests())
	})
}

func TestDamagedEgressIsExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable, func(c *Config) { c.EgressAllowlist = []string{"10.0.0.0/8"} })
		lease := p.paused(d, env)
		lease.Metadata.EffectiveEgressAllowlist = []string{"10.0.0.0/8", ""}
		_, err := d.Resume(t.Context(), env, lease)
		assert.True(t, err != nil || p.count(rSetEgress) == 1, "err %v, requests %v", err, p.requests())
	})
}

func TestOne404AfterTheListIsNotBelieved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		p.script(rCreate, then(created, func(p *provider, r *http.Request) (*http.Response, error) { cancel(); return reset(p, r) }))
		p.always(rList, listsBox)
		p.script(rDelete, refuse(404))
		_, err := d.Acquire(ctx, testEnv(), AcquireOptions{})
		require.Error(t, err)
		assert.True(t, p.state == stateDestroyed || len(d.Unconfirmed()) > 0, "sandbox lives and nobody knows of it")
	})
}

func TestOne404AfterTheListIsNotBelievedByRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		p.name, p.envs = "l-abc", []string{"CREATEOS_LEASE_x"}
		d := p.driver(DriverConfig{Unconfirmed: []Unconfirmed{{Kind: CreateUnknown, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin,
			SandboxName: "l-abc", LeaseKey: "CREATEOS_LEASE_x", AccountID: "usr_1", Cause: "x", Since: time.Now()}}})
		p.always(rList, listsBox)
		p.script(rDelete, refuse(404))
		_ = d.RetryCleanup(t.Context(), testEnv())
		assert.True(t, p.state == stateDestroyed || len(d.Unconfirmed()) > 0, "sandbox lives and nobody knows of it")
	})
}

// Whose a sandbox is that was found by its name is known by the key that found it.
func TestFoundNameKeepsItsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.always(rWhoami, refuse(403)) // the account is not told
		p.script(rCreate, then(created, refuse(502)))
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		require.Error(t, err)
		p.script(rList, listsBox)
		p.script(rDelete, repeat(4, refuse(503))...)
		require.Error(t, d.RetryCleanup(t.Context(), testEnv()))
		require.Equal(t, DestroyOwed, d.Unconfirmed()[0].Kind)
		p.always(rDelete, refuse(404)) // as any other account is told
		p.always(rGet, refuse(404))
		require.Error(t, d.RetryCleanup(t.Context(), testEnv(func(c *Config) { c.APIKey = NewSecret("skp_other") })))
		require.Len(t, d.Unconfirmed(), 1)
	})
}

func TestSettleTimeOfARunningAcquireStartsAtTheHandOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(func(c *Config) { c.Timeout = time.Hour })
		p.script(rCreate, hang)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _, _ = d.Acquire(ctx, env, AcquireOptions{}) }()
		time.Sleep(20 * time.Minute) // still in flight: queued at the provider
		entries := d.Unconfirmed()
		require.Len(t, entries, 1)
		d2 := p.driver(DriverConfig{Unconfirmed: entries})
		err := d2.RetryCleanup(t.Context(), env)
		assert.Error(t, err, "presumed absent seconds after the request was in flight")
		cancel()
		<-done
	})
}

func TestBusyReleaseIsOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.acquire(d, env)
		c := &call{scope: scope{env.tenant(origin), lease.ProviderLeaseID}}
		_, err := d.enter(t.Context(), c, func() error { return nil })
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, d.Release(ctx, env, lease), context.Canceled)
		time.Sleep(time.Minute)
		d.leave(c)
		assert.Zero(t, p.count(rPause))
		assert.NotEmpty(t, d.Unconfirmed(), "the caller was told that the cleanup goes on; it did not, and nothing says so")
	})
}

func TestRefusedEgressIsNoAnswerToTheResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable, func(c *Config) { c.EgressAllowlist = []string{"10.0.0.0/8"} })
		lease := p.paused(d, env)
		l, err := d.lessee(env, lease, ErrForeignLease, false)
		require.NoError(t, err)
		p.always(rSetEgress, refuse(403))
		woke, err := d.wake(t.Context(), l)
		require.ErrorIs(t, err, ErrForbidden)
		assert.Equal(t, 1, p.count(rSetEgress), "%v", p.requests())
		assert.False(t, woke, "nothing was sent that could wake it")
	})
}

func TestEgressMismatchFailsThoughSomebodyElseWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable, func(c *Config) { c.EgressAllowlist = []string{"10.0.0.0/8"} })
		lease := p.paused(d, env)
		l, err := d.lessee(env, lease, ErrForeignLease, false)
		require.NoError(t, err)
		p.script(rSetEgress, ok(`{"id":"`+box+`","egress":[]}`))
		p.script(rGet, shows(statePaused), shows(stateRunning))
		_, err = d.wake(t.Context(), l)
		assert.Error(t, err, "the list that is in force is open")
	})
}

func TestGatewayPageForTheMarkerIsNoVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.paused(d, env)
		p.script(rFetch, raw(404, "<html>not found</html>"))
		_, err := d.Resume(t.Context(), env, lease)
		assert.NotErrorIs(t, err, ErrLeaseExpired)
	})
}

func TestSandboxThatEndsBeforeTheMarkerIsRead(t *testing.T) {
	for _, state := range []string{stateDestroyed, stateFailed} {
		synctest.Test(t, func(t *testing.T) {
			p := newProvider(t)
			d := p.driver(DriverConfig{})
			env := testEnv(reusable)
			lease := p.paused(d, env)
			p.script(rFetch, then(becomes(state, "null"), refuse(404)))
			_, err := d.Resume(t.Context(), env, lease)
			var e *ExpiredError
			require.ErrorAs(t, err, &e)
			assert.NotEqual(t, ExpiredSuspect, e.Reason)
			if state == stateDestroyed {
				assert.Equal(t, RemainsGone, e.Remains)
			}
		})
	}
}

func TestSandboxThatGoesInMidResumeIsExpired(t *testing.T) {
	for _, route := range []string{rSetEgress, rProcesses} {
		t.Run(route, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				env := testEnv(reusable, func(c *Config) { c.EgressAllowlist = []string{"10.0.0.0/8"} })
				lease := p.paused(d, env)
				p.script(route, then(func(p *provider, r *http.Request) (*http.Response, error) {
					p.always(rGet, refuse(404))
					p.always(rPause, refuse(404))
					return ok("null")(p, r)
				}, refuse(404)))
				_, err := d.Resume(t.Context(), env, lease)
				assert.ErrorIs(t, err, ErrLeaseExpired)
			})
		})
	}
}

func TestRetryWaitsOnceForAllEnvironments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		var us []Unconfirmed
		var envs []Environment
		for i := range 5 {
			e := testEnv()
			e.EnvironmentID = fmt.Sprint("ci", i)
			envs = append(envs, e)
			us = append(us, Unconfirmed{Kind: CreateUnknown, CompanyID: "acme", EnvironmentID: e.EnvironmentID, APIURL: origin,
				SandboxName: fmt.Sprint("l-", i), LeaseKey: "CREATEOS_LEASE_x", AccountID: "usr_1", Cause: "x", Since: time.Now().Add(-time.Hour), EndedAt: time.Now().Add(-time.Hour)})
		}
		d := p.driver(DriverConfig{Unconfirmed: us})
		began := time.Now()
		require.NoError(t, d.RetryCleanup(t.Context(), envs...))
		assert.LessOrEqual(t, time.Since(began), 15*time.Second)
	})
}

func TestEndedContextIsNoFaultOfACleanDriver(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.NoError(t, d.Shutdown(ctx))
	assert.NoError(t, d.RetryCleanup(ctx))
}

func TestRowWithEmptyEnvironmentIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, then(created, reset))
		p.always(rList, func(p *provider, r *http.Request) (*http.Response, error) {
			p.mu.Lock()
			envs := p.envs
			p.envs = []string{}
			row := p.row()
			p.envs = envs
			p.mu.Unlock()
			return listed(row)(p, r)
		})
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		assert.NotZero(t, p.count(rGet), "a row with our name but without visible environment keys is read by GET")
		if err != nil {
			time.Sleep(DefaultSettleTime)
			require.Error(t, d.RetryCleanup(t.Context()), "the listing shows our name, and it is presumed absent")
		}
	})
}

func TestFoundNameIsListedNoLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		p.name, p.envs = "l-0", []string{"CREATEOS_LEASE_x"}
		var us []Unconfirmed
		for i := range 2 {
			us = append(us, Unconfirmed{Kind: CreateUnknown, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin,
				SandboxName: fmt.Sprint("l-", i), LeaseKey: "CREATEOS_LEASE_x", AccountID: "usr_1", Cause: "x", Since: time.Now().Add(-time.Hour), EndedAt: time.Now().Add(-time.Hour)})
		}
		d := p.driver(DriverConfig{Unconfirmed: us})
		p.always(rList, listsBox)
		go func() { _ = d.RetryCleanup(context.Background(), testEnv()) }()
		time.Sleep(5 * time.Second)
		assert.Equal(t, stateDestroyed, p.current())
		for _, u := range d.Unconfirmed() {
			assert.NotEqual(t, "l-0", u.SandboxName, "destroyed with proof and settled, still listed: %v %s", u.Kind, u.SandboxID)
		}
		time.Sleep(time.Minute)
	})
}

func TestSandboxThatGoesInAcquireIsNoUnknownCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rPut, func(p *provider, r *http.Request) (*http.Response, error) {
			p.always(rGet, refuse(404))
			p.always(rDelete, refuse(404))
			return refuse(404)(p, r)
		})
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		var cu *CreateUnknownError
		assert.False(t, errors.As(err, &cu), "the destroy is proven (judged 404): the original failure is returned")
		assert.Empty(t, d.Unconfirmed())
	})
}

func TestStrayThatWasSeenAliveIsNotEndedByA404(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, DriverConfig{}, reusable)
		id := "00112233445566778899aabbccddeeff"
		args, _ := json.Marshal(execArgs(id))
		row := fmt.Sprintf(`{"processes":[{"process_id":"pr-1","state":"exited","leader_exited":true,"tree_exited":false,"signal":"SIGKILL","cmd":%q,"args":%s,"newest_seq":1,"oldest_available_seq":1,"exit_code":null}]}`, execShell, args)
		m.always(rProcesses, ok(row))
		m.always(rKill, refuse(404))
		_, err := m.d.Resume(t.Context(), m.env, m.lease)
		assert.Error(t, err, "an earlier answer said tree_exited:false, so a 404 is no proof")
	})
}

func TestOriginalFailureStaysWhenTheCallerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		p.script(rExec, func(p *provider, r *http.Request) (*http.Response, error) {
			cancel()
			return ok(`{"result":{"stdout":"","stderr":"","exit_code":127},"exec_ms":1}`)(p, r)
		})
		p.always(rDelete, refuse(503))
		_, err := d.Acquire(ctx, testEnv(), AcquireOptions{})
		var w *WorkspaceError
		assert.ErrorAs(t, err, &w, "%v", errors.Unwrap(err))
		var s *SetupError
		require.ErrorAs(t, err, &s)
	})
}

func TestNothingTerminatedIsNoProof(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{Unconfirmed: []Unconfirmed{{Kind: ProcessUnproven, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin, SandboxID: box, Cause: "x"}}})
	_ = d.RetryCleanup(t.Context(), testEnv())
	assert.Empty(t, d.Unconfirmed()[0].Note, "nothing was terminated")
}

func TestNewCauseIsAnEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		n := 0
		d := p.driver(DriverConfig{OnEvent: func(e Event) {
			if e.Kind == EventOwed {
				n++
			}
		}, Unconfirmed: []Unconfirmed{{Kind: DestroyOwed, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin, SandboxID: box, Cause: "x"}}})
		p.always(rDelete, refuse(403))
		_ = d.RetryCleanup(t.Context(), testEnv())
		assert.Equal(t, 1, n, "EventOwed: one was made or got a new cause")
	})
}

func TestShutdownListsCallsThatHaveNotEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, DriverConfig{})
		m.always(rKill, refuse(503))
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = m.exec(context.Background(), Command{}, func(p *proc) { p.sleep(100 * time.Second) })
		}()
		time.Sleep(2 * time.Second)
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		err := m.d.Shutdown(ctx)
		var u *UnconfirmedError
		require.ErrorAs(t, err, &u)
		assert.NotEmpty(t, u.Entries)
		<-done
		time.Sleep(10 * time.Minute)
	})
}

func TestRecordedEgressIsComparedInNormalForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable, func(c *Config) { c.EgressAllowlist = []string{"10.0.0.0/8", "*"} })
		lease := p.paused(d, env)
		lease.Metadata.BaseEgressAllowlist = []string{"10.0.0.0/8", "*"}
		_, err := d.Resume(t.Context(), env, lease)
		assert.NoError(t, err)
	})
}

// A second row of the name that cannot be read may be ours as well: it is neither
// forgotten when the first is found, nor when that is destroyed.
func TestTwinThatCannotBeReadStaysListed(t *testing.T) {
	twins := func(p *provider, r *http.Request) (*http.Response, error) {
		p.mu.Lock()
		row := p.row()
		twin := fmt.Sprintf(`{"id":"sb-twin","status":"running","name":%q,"shape":"s-1vcpu-1gb"}`, p.name)
		p.mu.Unlock()
		if p.current() == stateDestroyed {
			return listed(twin)(p, r)
		}
		return listed(row, twin)(p, r)
	}
	for name, byAcquire := range map[string]bool{"by the acquire": true, "by a retry": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				p.script(rCreate, then(created, refuse(502)))
				p.always(rGet, refuse(503))
				if byAcquire {
					p.always(rList, twins)
				}
				_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
				require.ErrorAs(t, err, new(*CreateUnknownError))
				if !byAcquire {
					p.always(rList, twins)
					require.Error(t, d.RetryCleanup(t.Context()))
				}
				assert.Equal(t, stateDestroyed, p.current())
				assert.Contains(t, kinds(d), CreateUnknown)
			})
		})
	}
}

func TestDestroyedTwinHidesNoDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		row := func(id, status, envs string) string {
			return fmt.Sprintf(`{"id":%q,"status":%q,"name":"l-0","shape":"s-1vcpu-1gb"%s}`, id, status, envs)
		}
		d := p.driver(DriverConfig{Unconfirmed: []Unconfirmed{{Kind: CreateUnknown, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin,
			SandboxName: "l-0", LeaseKey: "CREATEOS_LEASE_x", AccountID: "usr_1", Cause: "x", Since: time.Now()}}})
		p.always(rList, listed(row(box, "running", ""), row("sb-2", "destroyed", `,"envs":["CREATEOS_LEASE_x"]`)))
		p.always(rGet, refuse(503))
		assert.Error(t, d.RetryCleanup(t.Context(), testEnv()))
	})
}

func TestPruningKeepsWhatAloneTellsWhoseASandboxIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		p.always(rWhoami, refuse(403))
		d := p.driver(DriverConfig{})
		lease := p.acquire(d, testEnv())
		other := testEnv(func(c *Config) { c.APIKey = NewSecret("skp_other") })
		p.always(rDelete, refuse(404)) // what another account sees
		require.ErrorIs(t, d.Destroy(t.Context(), other, lease), ErrUnjudged)
		time.Sleep(2 * time.Hour)
		for i := range sightingsMax { // other leases of a busy driver
			d.track(scope{testEnv().tenant(origin), fmt.Sprint("sb-", i)})
		}
		assert.ErrorIs(t, d.Destroy(t.Context(), other, lease), ErrUnjudged)
		assert.NotEmpty(t, d.Unconfirmed())
	})
}

func TestEntriesOfOneScopeAreMerged(t *testing.T) {
	p := newProvider(t)
	u := Unconfirmed{Kind: ProcessUnproven, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin, SandboxID: box, Cause: "x"}
	a, b := u, u
	a.Processes, b.Processes = []string{"pr-1"}, []string{"pr-2"}
	d := p.driver(DriverConfig{Unconfirmed: []Unconfirmed{a, b}})
	assert.Len(t, d.Unconfirmed()[0].Processes, 2)
}

func TestGoneSandboxOwesNoPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{Unconfirmed: []Unconfirmed{{Kind: PauseOwed, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin, SandboxID: box, AccountID: "usr_1", Cause: "x"}}})
		env := testEnv(reusable)
		lease := p.acquire(d, env)
		p.setState(stateDestroyed)
		_, err := d.Resume(t.Context(), env, lease)
		require.ErrorIs(t, err, ErrLeaseExpired)
		assert.Empty(t, d.Unconfirmed(), "an entry for a sandbox that is proven destroyed")
	})
}

func TestCommandThatEndsBesideAResumeIsNoStray(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, DriverConfig{}, reusable)
		// The list is read while a command runs that ends by itself, leaving a child, before the list is judged.
		var l *lessee
		l, err := m.d.lessee(m.env, m.lease, ErrForeignLease, false)
		require.NoError(t, err)
		id := "00112233445566778899aabbccddeeff"
		args, _ := json.Marshal(execArgs(id))
		c := &call{scope: l.scope, execID: id}
		_, err = m.d.enter(t.Context(), c, func() error { return nil })
		require.NoError(t, err)
		m.script(rProcesses, func(p *provider, r *http.Request) (*http.Response, error) {
			m.d.leave(c)
			return ok(fmt.Sprintf(`{"processes":[{"process_id":"pr-1","state":"running","leader_exited":false,"tree_exited":false,"cmd":%q,"args":%s,"newest_seq":1,"oldest_available_seq":1}]}`, execShell, args))(p, r)
		})
		m.script(rKill, ok(`{"process_id":"pr-1","state":"exited","leader_exited":true,"tree_exited":true,"exit_code":0}`))
		_ = m.d.endStrays(t.Context(), l)
		assert.Zero(t, m.count(rKill), "a command of this driver, which exited by itself, was ended by a Resume beside it")
	})
}

// What the provider could not run has prepared nothing, whatever exit code it gives.
func TestWorkspaceThatWasNotRunIsNone(t *testing.T) {
	for _, result := range []string{`"exit_code":0,"error":"x"`, `"exit_code":-1,"error":"x"`, `"error":"x"`} {
		synctest.Test(t, func(t *testing.T) {
			p := newProvider(t)
			d := p.driver(DriverConfig{})
			p.always(rExec, ok(`{"result":{"stdout":"","stderr":"",`+result+`},"exec_ms":1}`))
			_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
			var failed *WorkspaceError
			require.ErrorAs(t, err, &failed)
			assert.Equal(t, -1, failed.ExitCode)
			assert.Equal(t, stateDestroyed, p.current())
		})
	}
}

// When a Destroy has returned because its context ended, the lease is the host's again.
func TestDestroyDoesNotNeedTheLeaseOnceItReturned(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		running, hold := make(chan struct{}), make(chan struct{})
		go func() {
			_, _ = m.exec(t.Context(), Command{Stdout: writerFunc(func(p []byte) (int, error) { <-hold; return len(p), nil })},
				func(p *proc) { hello(p); close(running); p.sleep(time.Hour) })
		}()
		<-running
		m.always(rDelete, refuse(503))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		lease := m.lease.clone()
		require.ErrorIs(t, m.d.Destroy(ctx, m.env, lease), context.Canceled)
		*lease = Lease{}
		close(hold)
		require.NoError(t, m.d.Quiet(t.Context()))
		owed := m.d.Unconfirmed()
		require.Len(t, owed, 1)
		want := m.lease.Metadata
		assert.Equal(t, []string{want.SandboxName, want.LeaseKey, want.AccountID}, []string{owed[0].SandboxName, owed[0].LeaseKey, owed[0].AccountID})
		m.heal()
		require.NoError(t, m.d.Destroy(t.Context(), m.env, m.lease))
	})
}

// A DELETE whose answer was lost, and a sandbox that is not found after it: two looks
// that agree are the proof.
func TestLostDestroyThatIsNotFoundIsProven(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		lease := p.acquire(d, testEnv())
		p.always(rDelete, refuse(503))
		p.always(rGet, refuse(404))
		require.NoError(t, d.Destroy(t.Context(), testEnv(), lease))
		assert.Empty(t, d.Unconfirmed())
	})
}

func TestShutdownLetsARetryEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{Unconfirmed: []Unconfirmed{{
			Kind: ProcessUnproven, CompanyID: "acme", EnvironmentID: "ci", APIURL: origin, SandboxID: box, Processes: []string{"proc-1"},
		}}})
		asked, answer := make(chan struct{}), make(chan struct{})
		p.script(rProcesses, func(p *provider, r *http.Request) (*http.Response, error) {
			close(asked)
			<-answer
			return ok(`{"processes":[]}`)(p, r)
		})
		done := make(chan error, 1)
		go func() { done <- d.RetryCleanup(t.Context(), testEnv()) }()
		<-asked
		ended := make(chan error, 1)
		go func() { ended <- d.Shutdown(t.Context()) }()
		synctest.Wait()
		close(answer)
		require.Error(t, <-done)  // only a destroy cures it
		require.Error(t, <-ended) // and so it stays listed
		assert.NotContains(t, d.Unconfirmed()[0].Cause, "shut down")
	})
}
