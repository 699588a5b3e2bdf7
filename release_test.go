package createos

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDestroyTakesOneRequest(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	lease := p.acquire(d, testEnv())
	p.requests()
	require.NoError(t, d.Release(t.Context(), testEnv(), lease)) // not reusable
	assert.Equal(t, []string{rDelete}, p.requests())
	assert.Empty(t, d.Unconfirmed())
	quietDriver(t, d)
	assert.Empty(t, d.sightings)
}

func TestReleaseByPauseTakesTwoRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.acquire(d, env)
		p.requests()
		began := time.Now()
		require.NoError(t, d.Release(t.Context(), env, lease))
		assert.Equal(t, []string{rPause, rGet}, p.requests())
		assert.Zero(t, time.Since(began), "nothing artificial is waited for")
	})
}

func TestReusableMeansThenAndNow(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	for _, then := range []bool{false, true} {
		for _, now := range []bool{false, true} {
			lease := p.acquire(d, testEnv(func(c *Config) { c.ReuseLease = then }))
			p.requests()
			require.NoError(t, d.Release(t.Context(), testEnv(func(c *Config) { c.ReuseLease = now }), lease))
			if then && now {
				assert.Equal(t, rPause, p.requests()[0])
			} else {
				assert.Equal(t, []string{rDelete}, p.requests())
			}
			p.setState(stateRunning)
		}
	}
}

func TestBadConfigurationDoesNotBlockCleanup(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	env := testEnv(reusable)
	lease := p.acquire(d, env)
	p.requests()
	bad, err := ParseConfig(map[string]any{"apiUrl": origin, "apiKey": keyCanary, "shape": 7, "reuseLease": true, "typo": 1})
	require.Error(t, err)
	env.Config = bad
	_, err = d.Resume(t.Context(), env, lease)
	require.ErrorAs(t, err, new(*ConfigError))
	require.NoError(t, d.Release(t.Context(), env, lease))
	assert.Equal(t, []string{rDelete}, p.requests())
}

func TestNothingToRelease(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	require.NoError(t, d.Release(t.Context(), testEnv(), nil))
	require.NoError(t, d.Destroy(t.Context(), testEnv(), &Lease{}))
	assert.Empty(t, p.requests())
}

func TestForeignLeaseIsRefusedBeforeAnything(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	lease := p.acquire(d, testEnv())
	p.requests()
	for name, edit := range map[string]func(*Lease, *Environment){
		"company":        func(_ *Lease, e *Environment) { e.CompanyID = "other" },
		"environment":    func(_ *Lease, e *Environment) { e.EnvironmentID = "other" },
		"origin":         func(_ *Lease, e *Environment) { e.Config.APIURL = "http://localhost:8" },
		"provider":       func(l *Lease, _ *Environment) { l.Metadata.Provider = "e2b" },
		"no metadata":    func(l *Lease, _ *Environment) { l.Metadata = Metadata{} },
		"no company":     func(l *Lease, e *Environment) { l.Metadata.CompanyID, e.CompanyID = "", "" },
		"no environment": func(l *Lease, e *Environment) { l.Metadata.EnvironmentID, e.EnvironmentID = "", "" },
	} {
		t.Run(name, func(t *testing.T) {
			mine, env := lease.clone(), testEnv()
			edit(mine, &env)
			assert.Equal(t, ErrForeignLease, d.Release(t.Context(), env, mine))
			assert.Equal(t, ErrForeignLease, d.Destroy(t.Context(), env, mine))
			_, err := d.Resume(t.Context(), env, mine)
			assert.Equal(t, ErrForeignLease, err)
			_, err = d.Exec(t.Context(), env, mine, Command{Name: "true"})
			assert.EqualError(t, err, "CreateOS execution requires a lease from this environment.")
			assert.ErrorIs(t, err, ErrForeignLease)
		})
	}
	assert.Empty(t, p.requests())
	assert.Empty(t, d.Unconfirmed())
}

func TestLeaseIDThatIsAPathIsRefused(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	lease := p.acquire(d, testEnv())
	p.requests()
	for _, id := range []string{"../admin", "..%2f..", "sb 1", "sb1?x=", "sb1/../sb2"} {
		lease.ProviderLeaseID = id
		require.ErrorAs(t, d.Destroy(t.Context(), testEnv(), lease), new(*InputError))
	}
	assert.Empty(t, p.requests())
}

// What a destroy may come back with, and whether that is proof.
func TestProofOfDestroy(t *testing.T) {
	const gone = `{"id":"` + box + `","status":"destroyed"}`
	const going = `{"id":"` + box + `","status":"destroying"}`
	for name, c := range map[string]struct {
		script func(p *provider)
		proven bool
		is     error
	}{
		"destroyed":         {func(p *provider) { p.script(rDelete, ok(gone)) }, true, nil},
		"destroying":        {func(p *provider) { p.script(rDelete, ok(going)) }, true, nil},
		"404":               {func(p *provider) { p.script(rDelete, refuse(404)); p.always(rGet, refuse(404)) }, true, nil},
		"404 once":          {func(p *provider) { p.script(rDelete, refuse(404)) }, false, ErrUnjudged},
		"404 of a gateway":  {func(p *provider) { p.always(rDelete, raw(404, "<html>")) }, false, ErrUnjudged},
		"404 then trouble":  {func(p *provider) { p.script(rDelete, refuse(404)); p.always(rGet, refuse(500)) }, false, ErrUnjudged},
		"empty, then gone":  {func(p *provider) { p.script(rDelete, raw(200, "")); p.script(rGet, shows(stateDestroyed)) }, true, nil},
		"empty, then going": {func(p *provider) { p.script(rDelete, raw(202, "")); p.script(rGet, shows(stateDestroying)) }, true, nil},
		"html, then gone":   {func(p *provider) { p.script(rDelete, raw(200, "<html>")); p.script(rGet, shows(stateDestroyed)) }, true, nil},
		"foreign, then gone": {func(p *provider) {
			p.script(rDelete, ok(`{"id":"sb-x","status":"destroyed"}`))
			p.script(rGet, shows(stateDestroyed))
		}, true, nil},
		"foreign, still there": {func(p *provider) { p.always(rDelete, ok(`{"id":"sb-x","status":"destroyed"}`)) }, false, ErrTimeout},
		"fail envelope":        {func(p *provider) { p.always(rDelete, raw(200, `{"status":"fail"}`)) }, false, ErrTimeout},
		"accepted, never gone": {func(p *provider) { p.always(rDelete, ok(`{"id":"`+box+`","status":"running"}`)) }, false, ErrTimeout},
		"failed": {func(p *provider) {
			p.script(rDelete, ok(`{"id":"`+box+`","status":"failed"}`))
			p.script(rGet, shows(stateFailed))
		}, false, nil},
		"401":             {func(p *provider) { p.always(rDelete, refuse(401)) }, false, ErrUnauthorized},
		"403":             {func(p *provider) { p.always(rDelete, refuse(403)) }, false, ErrForbidden},
		"400":             {func(p *provider) { p.always(rDelete, refuse(400)) }, false, ErrInvalidRequest},
		"500":             {func(p *provider) { p.always(rDelete, refuse(500)) }, false, ErrUnavailable},
		"503 once":        {func(p *provider) { p.script(rDelete, refuse(503)) }, true, nil},
		"reset thrice":    {func(p *provider) { p.script(rDelete, repeat(3, reset)...) }, true, nil},
		"reset for ever":  {func(p *provider) { p.always(rDelete, reset) }, false, ErrConnection},
		"reset, but gone": {func(p *provider) { p.always(rDelete, reset); p.script(rGet, shows(stateDestroyed)) }, true, nil},
		"409 then clear": {func(p *provider) {
			p.script(rDelete, repeat(3, refuse(409))...)
			p.script(rGet, shows(statePausing), shows(statePausing), shows(statePaused))
		}, true, nil},
		"409 for ever": {func(p *provider) { p.always(rDelete, refuse(409)) }, false, ErrConflict},
		"409 while it goes": {func(p *provider) {
			p.script(rDelete, refuse(409))
			p.script(rGet, shows(stateDestroying), shows(stateDestroyed))
		}, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				lease := p.acquire(d, testEnv())
				c.script(p)
				err := d.Destroy(t.Context(), testEnv(), lease)
				quietDriver(t, d)
				if c.proven {
					require.NoError(t, err)
					assert.Empty(t, d.Unconfirmed())
					return
				}
				var owed *CleanupError
				require.ErrorAs(t, err, &owed)
				assert.Equal(t, DestroyOwed, owed.Kind)
				assert.Equal(t, box, owed.SandboxID)
				assert.NotContains(t, err.Error(), "canary")
				if c.is != nil {
					assert.ErrorIs(t, err, c.is)
				}
				assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d))

				// Owed means poisoned, and a second Destroy is the way out.
				_, err = d.Exec(t.Context(), testEnv(), lease, Command{Name: "true"})
				assert.ErrorIs(t, err, ErrLeaseClosing)
				_, err = d.Resume(t.Context(), testEnv(), lease)
				assert.Equal(t, ErrCleanupFirst, err)
				p.heal()
				require.NoError(t, d.Destroy(t.Context(), testEnv(), lease))
				assert.Empty(t, d.Unconfirmed())
			})
		})
	}
}

// A fresh driver never saw the sandbox in a steady state, so "destroying" is
// settled by one look.
func TestDestroyingIsLookedAtByADriverThatNeverSawTheSandbox(t *testing.T) {
	p := newProvider(t)
	lease := p.acquire(p.driver(DriverConfig{}), testEnv())
	p.requests()
	p.script(rGet, shows(stateDestroying))
	require.NoError(t, p.driver(DriverConfig{}).Destroy(t.Context(), testEnv(), lease))
	assert.Equal(t, []string{rDelete, rGet}, p.requests())
}

// Whose key it is decides what a 404 means.
func TestA404IsBelievedOnlyOfTheRightAccount(t *testing.T) {
	other := testEnv(func(c *Config) { c.APIKey = NewSecret("skp_other") })
	for name, c := range map[string]struct {
		account string // of the lease
		whoami  answerFunc
		env     Environment
		fresh   bool // another driver than the one that acquired
		absent  bool
	}{
		"creating key":                   {"usr_1", refuse(500), testEnv(), false, true},
		"other key of the account":       {"usr_1", ok(`{"user_id":"usr_1"}`), other, false, true},
		"key of another account":         {"usr_1", ok(`{"user_id":"usr_2"}`), other, false, false},
		"account cannot be told":         {"usr_1", refuse(403), other, false, false},
		"whoami in trouble":              {"usr_1", refuse(500), other, false, false},
		"account never known, other key": {"", refuse(403), other, false, false},
		"account never known, restarted": {"", refuse(403), other, true, true},
		"restarted, same account":        {"usr_1", ok(`{"user_id":"usr_1"}`), other, true, true},
		"restarted, another account":     {"usr_1", ok(`{"user_id":"usr_2"}`), other, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				if c.account == "" {
					p.always(rWhoami, refuse(403))
				}
				lease := p.acquire(d, testEnv())
				require.Equal(t, c.account, lease.Metadata.AccountID)
				if c.fresh {
					d = p.driver(DriverConfig{})
				}
				p.heal()
				p.always(rWhoami, c.whoami)
				p.always(rDelete, refuse(404))
				p.always(rGet, refuse(404))
				err := d.Destroy(t.Context(), c.env, lease)
				if c.absent {
					require.NoError(t, err)
					assert.Empty(t, d.Unconfirmed())
				} else {
					require.ErrorIs(t, err, ErrUnjudged)
					assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d))
				}
			})
		})
	}
}

// The pause succeeds, or says why not; it is never sent twice without a
// reading that allows it.
func TestReleaseByPause(t *testing.T) {
	accepted := ok(`{"id":"` + box + `","status":"pausing"}`)
	for name, c := range map[string]struct {
		script func(p *provider)
		posts  int // 0: any number
		proven bool
		last   string
		is     error
	}{
		"shows the old state for a moment": {func(p *provider) {
			p.script(rPause, accepted)
			p.script(rGet, shows(stateRunning), shows(stateRunning), shows(statePausing), shows(statePaused))
		}, 1, true, "", nil},
		"shows the old state for ever": {func(p *provider) { p.script(rPause, accepted); p.always(rGet, shows(stateRunning)) }, 1, false, stateRunning, ErrTimeout},
		"ends in error": {func(p *provider) {
			p.script(rPause, accepted)
			p.script(rGet, shows(statePausing), shows(stateError))
		}, 1, false, stateError, nil},
		"ends in failed": {func(p *provider) { p.script(rPause, accepted); p.script(rGet, shows(stateFailed)) }, 1, false, stateFailed, nil},
		"paused already": {func(p *provider) { p.script(rPause, refuse(409)); p.script(rGet, shows(statePaused)) }, 1, true, "", nil},
		"being paused": {func(p *provider) {
			p.script(rPause, refuse(409))
			p.script(rGet, shows(statePausing), shows(statePaused))
		}, 1, true, "", nil},
		"being resumed": {func(p *provider) {
			p.script(rPause, refuse(409))
			p.script(rGet, shows(stateResuming), shows(stateRunning))
		}, 2, true, "", nil},
		"reset, but accepted":  {func(p *provider) { p.script(rPause, then(becomes(statePaused, `{}`), reset)) }, 1, true, "", nil},
		"reset, not accepted":  {func(p *provider) { p.script(rPause, reset) }, 2, true, "", nil},
		"503 once":             {func(p *provider) { p.script(rPause, refuse(503)) }, 2, true, "", nil},
		"503 for ever":         {func(p *provider) { p.always(rPause, refuse(503)) }, 3, false, stateRunning, ErrUnavailable},
		"429 once":             {func(p *provider) { p.script(rPause, refuse(429)) }, 2, true, "", nil},
		"402":                  {func(p *provider) { p.always(rPause, refuse(402)) }, 1, false, "", ErrNoCredit},
		"gone":                 {func(p *provider) { p.script(rPause, refuse(404)); p.always(rGet, refuse(404)) }, 1, true, "", nil},
		"gone, says a gateway": {func(p *provider) { p.always(rPause, raw(404, "<html>")) }, 1, false, "", ErrUnjudged},
		"destroyed meanwhile":  {func(p *provider) { p.script(rPause, refuse(409)); p.script(rGet, shows(stateDestroyed)) }, 1, true, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				env := testEnv(reusable)
				lease := p.acquire(d, env)
				c.script(p)
				err := d.Release(t.Context(), env, lease)
				quietDriver(t, d)
				if c.posts > 0 {
					assert.Equal(t, c.posts, p.count(rPause))
				}
				assert.Zero(t, p.count(rDelete))
				if c.proven {
					require.NoError(t, err)
					assert.Empty(t, d.Unconfirmed())
					return
				}
				var owed *CleanupError
				require.ErrorAs(t, err, &owed)
				assert.Equal(t, PauseOwed, owed.Kind)
				if c.last != "" {
					var state *StateError
					require.ErrorAs(t, err, &state)
					assert.Equal(t, c.last, state.Last)
				}
				if c.is != nil {
					assert.ErrorIs(t, err, c.is)
				}
				assert.Equal(t, []DebtKind{PauseOwed}, kinds(d))

				// No poison: the lease can be resumed, and that clears it.
				p.heal()
				p.setState(statePaused)
				_, err = d.Resume(t.Context(), env, lease)
				require.NoError(t, err)
				assert.Empty(t, d.Unconfirmed())
			})
		})
	}
}

func TestRetryCleanupRepeatsAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.acquire(d, env)
		p.script(rPause, repeat(3, refuse(503))...)
		require.Error(t, d.Release(t.Context(), env, lease))
		require.NoError(t, d.RetryCleanup(t.Context()))
		assert.Equal(t, statePaused, p.state)
		assert.Zero(t, p.count(rDelete))
	})
}

// A second Release or Destroy meanwhile is refused, and the first is the only
// one on the wire.
func TestOneCleanupAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.acquire(d, env)
		release := make(chan struct{})
		p.script(rDelete, func(p *provider, req *http.Request) (*http.Response, error) {
			<-release
			return becomes(stateDestroyed, `{"id":"`+box+`","status":"destroyed"}`)(p, req)
		})
		first := make(chan error)
		go func() { first <- d.Destroy(t.Context(), env, lease) }()
		synctest.Wait()
		var all sync.WaitGroup
		for i := range 32 {
			all.Go(func() {
				do := d.Release
				if i%2 == 0 {
					do = d.Destroy
				}
				err := do(t.Context(), env, lease)
				assert.EqualError(t, err, "CreateOS lease cleanup is already in progress.")
				assert.Equal(t, ErrCleanupInProgress, err)
			})
		}
		all.Wait()
		_, err := d.Resume(t.Context(), env, lease)
		assert.EqualError(t, err, "CreateOS lease cleanup must finish before resume.")
		_, err = d.Exec(t.Context(), env, lease, Command{Name: "true"})
		assert.EqualError(t, err, "CreateOS lease is closing or requires cleanup.")
		assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d)) // as long as it runs
		close(release)
		require.NoError(t, <-first)
		assert.Equal(t, 1, p.count(rDelete))
		assert.Empty(t, d.Unconfirmed())
		p.script(rDelete, refuse(404))
		p.always(rGet, refuse(404))
		require.NoError(t, d.Destroy(t.Context(), env, lease), "a later one finds nothing to do")
	})
}

// Cleanup calls send their requests even if the context is over, and go on
// when it ends.
func TestCleanupOutlivesItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		lease := p.acquire(d, testEnv())
		release := make(chan struct{})
		p.script(rDelete, func(p *provider, req *http.Request) (*http.Response, error) {
			<-release
			return ok(`{"id":"`+box+`","status":"destroyed"}`)(p, req)
		})
		over, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, d.Destroy(over, testEnv(), lease), context.Canceled)
		synctest.Wait()
		assert.Equal(t, 1, p.count(rDelete))
		assert.Equal(t, ErrCleanupInProgress, d.Destroy(t.Context(), testEnv(), lease))
		assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d))

		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var left *UnconfirmedError
		err := d.Shutdown(short)
		require.ErrorAs(t, err, &left)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, box, left.Entries[0].SandboxID)
		close(release)
		require.NoError(t, d.Shutdown(t.Context()))
		assert.Empty(t, d.Unconfirmed())
		quietDriver(t, d)
	})
}

// A destroy that takes 45 s succeeds for a caller who has two minutes.
func TestSlowDestroyIsNotCutByAHiddenBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		slow := func(p *provider, req *http.Request) (*http.Response, error) {
			if err := sleep(req.Context(), 45*time.Second); err != nil {
				return nil, err
			}
			return ok(`{"id":"`+box+`","status":"destroyed"}`)(p, req)
		}
		p.always(rDelete, slow)
		for _, bound := range []time.Duration{2 * time.Minute, 0} {
			lease := p.acquire(d, testEnv())
			ctx := t.Context()
			if bound > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, bound)
				defer cancel()
			}
			require.NoError(t, d.Destroy(ctx, testEnv(), lease))
		}
		lease := p.acquire(d, testEnv())
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		require.ErrorIs(t, d.Destroy(ctx, testEnv(), lease), context.DeadlineExceeded)
		assert.Len(t, d.Unconfirmed(), 1)
		require.NoError(t, d.Shutdown(t.Context()))
	})
}

func TestUnconfirmedSurvivesJSONAndANewDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		lease := p.acquire(d, testEnv())
		p.always(rDelete, refuse(500))
		require.Error(t, d.Destroy(t.Context(), testEnv(), lease))
		text, err := json.Marshal(d.Unconfirmed())
		require.NoError(t, err)
		assert.NotContains(t, string(text), keyCanary)
		var entries []Unconfirmed
		require.NoError(t, json.Unmarshal(text, &entries))

		next := p.driver(DriverConfig{Unconfirmed: entries})
		_, err = next.Resume(t.Context(), testEnv(), lease)
		assert.Equal(t, ErrCleanupFirst, err, "poison comes back with the entries")
		fresh := p.driver(DriverConfig{Unconfirmed: entries})
		var left *UnconfirmedError
		require.ErrorAs(t, fresh.RetryCleanup(t.Context()), &left)
		assert.Contains(t, left.Entries[0].Cause, "no key is known")
		p.heal()
		// Of the configuration only origin and key need be valid.
		require.NoError(t, fresh.RetryCleanup(t.Context(), testEnv(func(c *Config) { c.Shape = "" })))
		assert.Empty(t, fresh.Unconfirmed())
	})
}

func TestBudgetThatWasNotMadeIsRefused(t *testing.T) {
	_, err := NewDriver(DriverConfig{Budget: new(Budget)})
	var input *InputError
	require.ErrorAs(t, err, &input)
	assert.Equal(t, "DriverConfig.Budget", input.Field)
}

func TestEntriesToTakeOverAreChecked(t *testing.T) {
	good := Unconfirmed{Kind: DestroyOwed, CompanyID: "a", EnvironmentID: "b", APIURL: origin, SandboxID: box}
	for name, edit := range map[string]func(*Unconfirmed){
		"kind":   func(u *Unconfirmed) { u.Kind = "something" },
		"id":     func(u *Unconfirmed) { u.SandboxID = "../x" },
		"origin": func(u *Unconfirmed) { u.APIURL = "ftp://x" },
		"name":   func(u *Unconfirmed) { u.Kind = CreateUnknown },
		"tenant": func(u *Unconfirmed) { u.CompanyID = "" },
	} {
		t.Run(name, func(t *testing.T) {
			u := good
			edit(&u)
			_, err := NewDriver(DriverConfig{Unconfirmed: []Unconfirmed{u}})
			var input *InputError
			require.ErrorAs(t, err, &input)
			assert.Equal(t, "DriverConfig.Unconfirmed[0]", input.Field)
		})
	}
	running := Unconfirmed{Kind: Acquiring, CompanyID: "a", EnvironmentID: "b", APIURL: origin, SandboxName: "l-x", LeaseKey: "k"}
	d, err := NewDriver(DriverConfig{Unconfirmed: []Unconfirmed{running}})
	require.NoError(t, err)
	assert.Equal(t, []DebtKind{CreateUnknown}, kinds(d))
	running.SandboxID = box
	d, err = NewDriver(DriverConfig{Unconfirmed: []Unconfirmed{running}})
	require.NoError(t, err)
	assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d))
}

// A create of unknown outcome is presumed absent after the settle time and two
// listings ten seconds apart, and not before.
func TestPresumedAbsentAfterTheSettleTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, reset)
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		require.ErrorAs(t, err, new(*CreateUnknownError))
		require.Error(t, d.RetryCleanup(t.Context()))
		assert.Contains(t, d.Unconfirmed()[0].Note, "may still appear")

		time.Sleep(DefaultSettleTime)
		short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		require.ErrorIs(t, d.RetryCleanup(short), context.DeadlineExceeded)
		assert.Len(t, d.Unconfirmed(), 1, "one listing is not enough")
		require.ErrorAs(t, d.Shutdown(t.Context()), new(*UnconfirmedError))
		quietDriver(t, d)
	})
}

func TestPresumedAbsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, reset)
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		require.ErrorAs(t, err, new(*CreateUnknownError))
		time.Sleep(DefaultSettleTime)
		p.always(rList, ok(`{"data":[]}`)) // not read whole: proves nothing
		require.Error(t, d.RetryCleanup(t.Context()))
		p.heal()
		p.requests()
		began := time.Now()
		require.NoError(t, d.RetryCleanup(t.Context()))
		assert.Equal(t, listingGap, time.Since(began))
		assert.Equal(t, []string{rList, rList}, p.requests())
	})
}

// Forty entries of four environments, one of which has most and fails: the
// others are clean after the first pass.
func TestRetryIsFairToSmallEnvironments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		var entries []Unconfirmed
		var envs []Environment
		add := func(company, id string) {
			entries = append(entries, Unconfirmed{Kind: DestroyOwed, CompanyID: company, EnvironmentID: "ci", APIURL: origin, SandboxID: id})
		}
		for i := range 37 {
			add("big", "sb-big"+string(rune('A'+i)))
		}
		for _, c := range []string{"s1", "s2", "s3"} {
			add(c, "sb-"+c)
		}
		entries = sanitise(entries)
		for _, c := range []string{"big", "s1", "s2", "s3"} {
			env := testEnv()
			env.CompanyID = c
			envs = append(envs, env)
		}
		d := p.driver(DriverConfig{Unconfirmed: entries})
		p.always(rDelete, func(p *provider, req *http.Request) (*http.Response, error) {
			id := req.URL.Path[len("/v1/sandboxes/"):]
			if len(id) > 5 && id < "sb-big5" {
				return refuse(500)(p, req)
			}
			return ok(`{"id":"`+id+`","status":"destroyed"}`)(p, req)
		})
		var left *UnconfirmedError
		require.ErrorAs(t, d.RetryCleanup(t.Context(), envs...), &left)
		for _, u := range left.Entries {
			assert.Equal(t, "big", u.CompanyID)
			assert.Equal(t, 1, u.Attempts)
		}
	})
}

// sanitise keeps ids in the form that the driver accepts.
func sanitise(list []Unconfirmed) []Unconfirmed {
	for i := range list {
		id := []byte(list[i].SandboxID)
		for j, c := range id {
			if !(c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z') {
				id[j] = '0' + byte(i%10)
			}
		}
		list[i].SandboxID = string(id) + string(rune('a'+i%26))
	}
	return list
}

// Fifty destroys under a rate limit: all end destroyed, none is dropped.
func TestBurstOfDestroysUnderThrottling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{Budget: NewBudget(0)})
		lease := p.acquire(d, testEnv())
		p.script(rDelete, repeat(30, throttle("1"))...)
		p.always(rDelete, func(p *provider, req *http.Request) (*http.Response, error) {
			return ok(`{"id":"`+req.URL.Path[len("/v1/sandboxes/"):]+`","status":"destroyed"}`)(p, req)
		})
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() {
				mine := lease.clone()
				mine.ProviderLeaseID = "sb-" + string(rune('a'+i%26)) + string(rune('a'+i/26))
				err := d.Destroy(t.Context(), testEnv(), mine)
				if err != nil {
					assert.ErrorIs(t, err, ErrRateLimited)
					assert.NotEmpty(t, d.Unconfirmed())
				}
			})
		}
		all.Wait()
		if err := d.RetryCleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

func throttle(after string) answerFunc {
	return func(p *provider, req *http.Request) (*http.Response, error) {
		resp, err := refuse(429)(p, req)
		resp.Header.Set("Retry-After", after)
		return resp, err
	}
}

func TestReleasedLeaseOfTheOlderProviderKeepsTheOldReadingOfA404(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	lease := p.acquire(d, testEnv())
	lease.Metadata.AccountID, lease.Metadata.LeaseKey, lease.Metadata.SandboxName = "", "", ""
	p.always(rDelete, refuse(404))
	p.always(rGet, refuse(404))
	require.NoError(t, p.driver(DriverConfig{}).Destroy(t.Context(), testEnv(), lease))
}

func TestErrorsJoinAndUnwrap(t *testing.T) {
	err := error(&UnconfirmedError{Entries: []Unconfirmed{{Kind: CreateUnknown, SandboxName: "l-a"}, {Kind: PauseOwed, SandboxID: "sb-1"}}, Cause: context.Canceled})
	assert.EqualError(t, err, "createos: 2 unconfirmed: l-a (create unknown), sb-1 (pause owed): context canceled")
	assert.True(t, errors.Is(err, context.Canceled))
}
