package createos

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// paused makes a lease and leaves its sandbox paused.
func (p *provider) paused(d *Driver, env Environment) *Lease {
	p.t.Helper()
	lease := p.acquire(d, env)
	require.NoError(p.t, d.Release(p.t.Context(), env, lease))
	require.Equal(p.t, statePaused, p.state)
	p.requests()
	return lease
}

func TestResumeTakesWhatItMust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.paused(d, env)
		got, err := d.Resume(t.Context(), env, lease)
		require.NoError(t, err)
		assert.Equal(t, []string{rGet, rResume, rGet, rFetch, rProcesses}, p.requests())
		assert.Equal(t, lease.ProviderLeaseID, got.ProviderLeaseID)
		assert.True(t, got.Metadata.ResumedLease)
		assert.False(t, lease.Metadata.ResumedLease, "the host's lease is not written to")

		_, err = d.Resume(t.Context(), env, got)
		require.NoError(t, err)
		assert.Equal(t, []string{rGet, rFetch, rProcesses}, p.requests(), "one that runs is not resumed")
		quietDriver(t, d)
	})
}

func TestResumeTransitions(t *testing.T) {
	accepted := ok(`{"id":"` + box + `","status":"resuming"}`)
	for name, c := range map[string]struct {
		script func(p *provider)
		posts  int
		last   string // of the StateError; empty: success
		is     error
	}{
		"old state for a moment": {func(p *provider) {
			p.script(rResume, accepted)
			p.script(rGet, shows(statePaused), shows(statePaused), shows(statePaused), shows(stateResuming), shows(stateRunning))
		}, 1, "", nil},
		"old state for ever": {func(p *provider) { p.script(rResume, accepted); p.always(rGet, shows(statePaused)) }, 1, statePaused, ErrTimeout},
		"ends in error": {func(p *provider) {
			p.script(rResume, accepted)
			p.script(rGet, shows(statePaused), shows(stateResuming), shows(stateError))
		}, 1, stateError, nil},
		"still pausing": {func(p *provider) {
			p.script(rGet, shows(statePausing), shows(statePausing), shows(statePaused))
		}, 1, "", nil},
		"falls back to paused": {func(p *provider) {
			p.script(rResume, accepted)
			p.script(rGet, shows(statePaused), shows(stateResuming), shows(statePaused), shows(statePaused))
		}, 2, "", nil},
		"paused is not durable yet": {func(p *provider) { p.script(rResume, repeat(6, refuse(409))...) }, 7, "", nil},
		"409 for ever":              {func(p *provider) { p.always(rResume, refuse(409)) }, conflictTries, statePaused, ErrConflict},
		"503 once":                  {func(p *provider) { p.script(rResume, refuse(503)) }, 2, "", nil},
		"503 for ever":              {func(p *provider) { p.always(rResume, refuse(503)) }, 3, statePaused, ErrUnavailable},
		"reset, but accepted":       {func(p *provider) { p.script(rResume, then(becomes(stateRunning, `{}`), reset)) }, 1, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				env := testEnv(reusable)
				lease := p.paused(d, env)
				c.script(p)
				_, err := d.Resume(t.Context(), env, lease)
				assert.Equal(t, c.posts, p.count(rResume))
				assert.Zero(t, p.count(rDelete))
				if c.last == "" {
					require.NoError(t, err)
					return
				}
				var state *StateError
				require.ErrorAs(t, err, &state)
				assert.Equal(t, c.last, state.Last)
				assert.NotErrorIs(t, err, ErrLeaseExpired)
				if c.is != nil {
					assert.ErrorIs(t, err, c.is)
				}
				p.heal()
				p.setState(statePaused)
				_, err = d.Resume(t.Context(), env, lease)
				require.NoError(t, err, "the lease stays resumable")
			})
		})
	}
}

// What ends a lease, how much of it remains, and that Resume destroys nothing.
func TestExpiredLeases(t *testing.T) {
	for name, c := range map[string]struct {
		edit    func(*Lease, *Config)
		script  func(p *provider)
		reason  ExpiredReason
		remains Remains
		fields  []string
		sent    bool
	}{
		"marker is no UUID": {edit: func(l *Lease, _ *Config) { l.Metadata.Marker = "x" }, reason: ExpiredMarkerInvalid, remains: RemainsUnknown},
		"shape differs":     {edit: func(_ *Lease, c *Config) { c.Shape = "s-2vcpu-2gb" }, reason: ExpiredConfigChanged, remains: RemainsUnknown, fields: []string{"shape"}},
		"image differs": {edit: func(_ *Lease, c *Config) { c.Rootfs = "debian:13" }, reason: ExpiredConfigChanged, remains: RemainsUnknown,
			fields: []string{"rootfs"}},
		"region differs": {edit: func(_ *Lease, c *Config) { c.Region = "us" }, reason: ExpiredConfigChanged, remains: RemainsUnknown, fields: []string{"region"}},
		"egress differs": {edit: func(_ *Lease, c *Config) { c.EgressAllowlist = []string{"10.0.0.0/8"} }, reason: ExpiredConfigChanged,
			remains: RemainsUnknown, fields: []string{"baseEgressAllowlist"}},
		"auto-pause differs": {edit: func(_ *Lease, c *Config) { c.AutoPauseAfter = time.Minute }, reason: ExpiredConfigChanged,
			remains: RemainsUnknown, fields: []string{"autoPauseAfterSeconds"}},
		"workspace is none": {edit: func(l *Lease, _ *Config) { l.Metadata.RemoteCwd = "../x" }, reason: ExpiredMetadata, remains: RemainsUnknown,
			fields: []string{"remoteCwd"}},
		"gone":       {script: func(p *provider) { p.always(rGet, refuse(404)) }, reason: ExpiredSandboxGone, remains: RemainsGone, sent: true},
		"destroyed":  {script: func(p *provider) { p.script(rGet, shows(stateDestroyed)) }, reason: ExpiredSandboxGone, remains: RemainsGone, sent: true},
		"destroying": {script: func(p *provider) { p.script(rGet, shows(stateDestroying)) }, reason: ExpiredSandboxGone, remains: RemainsExists, sent: true},
		"failed":     {script: func(p *provider) { p.script(rGet, shows(stateFailed)) }, reason: ExpiredSandboxFailed, remains: RemainsExists, sent: true},
		"other marker": {script: func(p *provider) { p.script(rFetch, file("0b9c6f0e-6d2f-4d0a-9b43-0d4c3c1f7a11")) }, reason: ExpiredMarkerDiffers,
			remains: RemainsExists, sent: true},
		"marker and a newline": {script: func(p *provider) { p.script(rFetch, file(p.marker+"\n")) }, reason: ExpiredMarkerDiffers, remains: RemainsExists, sent: true},
		"empty marker":         {script: func(p *provider) { p.script(rFetch, file("")) }, reason: ExpiredMarkerDiffers, remains: RemainsExists, sent: true},
		"a mebibyte of text":   {script: func(p *provider) { p.script(rFetch, file(strings.Repeat("x", 1<<20))) }, reason: ExpiredMarkerDiffers, remains: RemainsExists, sent: true},
		"marker missing, key shows": {script: func(p *provider) { p.script(rFetch, refuse(404)) }, reason: ExpiredSuspect, remains: RemainsExists,
			sent: true},
		"marker missing, no key": {script: func(p *provider) { p.envs = nil; p.script(rFetch, refuse(404)) }, reason: ExpiredMarkerMissing,
			remains: RemainsExists, sent: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				env := testEnv(reusable)
				lease := p.paused(d, env)
				if c.edit != nil {
					c.edit(lease, &env.Config)
				}
				if c.script != nil {
					c.script(p)
				}
				_, err := d.Resume(t.Context(), env, lease)
				require.ErrorIs(t, err, ErrLeaseExpired)
				var expired *ExpiredError
				require.ErrorAs(t, err, &expired)
				assert.Equal(t, c.reason, expired.Reason)
				assert.Equal(t, c.remains, expired.Remains)
				assert.Equal(t, c.fields, expired.Fields)
				assert.NoError(t, expired.Cleanup)
				log := p.requests()
				assert.Equal(t, c.sent, len(log) > 0)
				assert.NotContains(t, log, rDelete)
				if slices.Contains(log, rResume) {
					assert.Equal(t, statePaused, p.state, "what was woken to find out sleeps again")
				}
				assert.Empty(t, d.Unconfirmed())
				quietDriver(t, d)
			})
		})
	}
}

// Passing trouble is returned as such, never as expiry; nothing is destroyed,
// and a healthy provider resumes the same sandbox later.
func TestResumeFailuresArePassing(t *testing.T) {
	for name, c := range map[string]struct {
		script func(p *provider)
		is     error
	}{
		"get 500":             {func(p *provider) { p.always(rGet, refuse(500)) }, ErrUnavailable},
		"get 429":             {func(p *provider) { p.always(rGet, refuse(429)) }, ErrRateLimited},
		"get reset":           {func(p *provider) { p.always(rGet, reset) }, ErrConnection},
		"get 404 of gateway":  {func(p *provider) { p.always(rGet, raw(404, "<html>")) }, ErrUnjudged},
		"404 for a moment":    {func(p *provider) { p.script(rGet, refuse(404)) }, ErrUnjudged},
		"402":                 {func(p *provider) { p.always(rResume, refuse(402)) }, ErrNoCredit},
		"429":                 {func(p *provider) { p.always(rResume, refuse(429)) }, ErrRateLimited},
		"marker read 500":     {func(p *provider) { p.always(rFetch, refuse(500)) }, ErrUnavailable},
		"marker read cut":     {func(p *provider) { p.always(rFetch, reset) }, ErrConnection},
		"marker read 409":     {func(p *provider) { p.always(rFetch, refuse(409)) }, ErrConflict},
		"process list 500":    {func(p *provider) { p.always(rProcesses, refuse(500)) }, ErrUnavailable},
		"process list broken": {func(p *provider) { p.always(rProcesses, ok(`{}`)) }, ErrInvalidResponse},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				env := testEnv(reusable)
				lease := p.paused(d, env)
				c.script(p)
				_, err := d.Resume(t.Context(), env, lease)
				require.ErrorIs(t, err, c.is)
				assert.NotErrorIs(t, err, ErrLeaseExpired)
				assert.Zero(t, p.count(rDelete))
				assert.Equal(t, statePaused, p.state)
				assert.Empty(t, d.Unconfirmed())
				p.heal()
				got, err := d.Resume(t.Context(), env, lease)
				require.NoError(t, err)
				assert.Equal(t, box, got.ProviderLeaseID)
			})
		})
	}
}

func TestNoCreditIsAskedOnce(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	env := testEnv(reusable)
	lease := p.paused(d, env)
	p.always(rResume, refuse(402))
	_, err := d.Resume(t.Context(), env, lease)
	require.ErrorIs(t, err, ErrNoCredit)
	assert.Equal(t, 1, p.count(rResume))
}

// A pause after a failed Resume that is not proven is owed, and the error says
// so next to the cause.
func TestPauseAfterFailedResumeIsOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.paused(d, env)
		p.always(rFetch, refuse(500))
		p.always(rPause, refuse(500))
		_, err := d.Resume(t.Context(), env, lease)
		require.ErrorIs(t, err, ErrUnavailable)
		var owed *CleanupError
		require.ErrorAs(t, err, &owed)
		assert.Equal(t, PauseOwed, owed.Kind)
		assert.Equal(t, []DebtKind{PauseOwed}, kinds(d))
		p.heal()
		require.NoError(t, d.RetryCleanup(t.Context()))
		assert.Equal(t, statePaused, p.state)

		p.script(rFetch, file("another"))
		p.always(rPause, refuse(500))
		_, err = d.Resume(t.Context(), env, lease)
		var expired *ExpiredError
		require.ErrorAs(t, err, &expired)
		require.ErrorAs(t, expired.Cleanup, &owed)
		assert.ErrorContains(t, err, "pause owed")
	})
}

// The egress of a restricted lease is set, and compared, before the sandbox may
// run; an unrestricted lease is sent nothing.
// A Resume that fails does not pause a sandbox in which a command has begun to run
// meanwhile.
func TestFailedResumePausesUnderNobody(t *testing.T) {
	synctestMachine(t, reusable, func(t *testing.T, m *machine) {
		require.NoError(t, m.d.Release(t.Context(), m.env, m.lease))
		reading, running := make(chan struct{}), make(chan struct{})
		m.always(rFetch, func(*provider, *http.Request) (*http.Response, error) { // the marker
			select {
			case <-reading:
			default:
				close(reading)
			}
			<-running
			return jsonResponse(500, ""), nil
		})
		failed := make(chan error, 1)
		go func() {
			_, err := m.d.Resume(t.Context(), m.env, m.lease)
			failed <- err
		}()
		<-reading
		m.requests()
		res, err := m.exec(t.Context(), Command{}, func(p *proc) {
			close(running)
			p.sleep(time.Minute)
			hello(p)
		})
		require.NoError(t, err)
		require.True(t, res.Success())
		require.NotContains(t, m.requests(), rPause)
		require.Error(t, <-failed)
		require.Equal(t, []DebtKind{PauseOwed}, kinds(m.d))
		require.NoError(t, m.d.RetryCleanup(t.Context(), m.env))
		require.Equal(t, statePaused, m.current())
		require.Empty(t, m.d.Unconfirmed())
	})
}

func TestResumeRestrictsBeforeItRuns(t *testing.T) {
	restricted := func(c *Config) { c.ReuseLease, c.EgressAllowlist = true, []string{"10.0.0.0/8", "192.0.2.7:443"} }
	t.Run("in order", func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		lease := p.paused(d, testEnv(restricted))
		_, err := d.Resume(t.Context(), testEnv(restricted), lease)
		require.NoError(t, err)
		log := p.requests()
		assert.Less(t, slices.Index(log, rSetEgress), slices.Index(log, rResume))
	})
	for name, reply := range map[string]answerFunc{
		"refused":  refuse(500),
		"mismatch": ok(`{"id":"` + box + `","egress":["*"]}`),
		"empty":    ok(`{"id":"` + box + `","egress":[]}`),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				lease := p.paused(d, testEnv(restricted))
				p.always(rSetEgress, reply)
				_, err := d.Resume(t.Context(), testEnv(restricted), lease)
				require.Error(t, err)
				assert.Zero(t, p.count(rResume))
			})
		})
	}
	t.Run("deny all", func(t *testing.T) {
		denied := func(c *Config) { c.ReuseLease, c.EgressDenyAll = true, true }
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		lease := p.paused(d, testEnv(denied))
		assert.Equal(t, []string{"192.0.2.1/32"}, lease.Metadata.BaseEgressAllowlist)
		_, err := d.Resume(t.Context(), testEnv(denied), lease)
		require.NoError(t, err)
		assert.Equal(t, 1, p.count(rSetEgress))
	})
	t.Run("a record that lost its list is expired, not open", func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		lease := p.paused(d, testEnv(restricted))
		text, err := json.Marshal(lease)
		require.NoError(t, err)
		for _, broken := range []string{`null`, `"10.0.0.0/8"`, `[7]`} {
			hurt := strings.Replace(string(text), `"baseEgressAllowlist":["10.0.0.0/8","192.0.2.7:443"]`, `"baseEgressAllowlist":`+broken, 1)
			require.NotEqual(t, string(text), hurt)
			var damaged Lease
			require.NoError(t, json.Unmarshal([]byte(hurt), &damaged))
			_, err = d.Resume(t.Context(), testEnv(restricted), &damaged)
			var expired *ExpiredError
			require.ErrorAs(t, err, &expired)
			assert.Equal(t, ExpiredMetadata, expired.Reason)
		}
		assert.Empty(t, p.requests())
	})
}

// Of many Resumes of one lease exactly one holds it.
func TestResumeIsExclusive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.paused(d, env)
		p.script(rGet, func(p *provider, req *http.Request) (*http.Response, error) {
			if err := sleep(req.Context(), time.Second); err != nil {
				return nil, err
			}
			return view(p, req)
		})
		results := make(chan error, 20)
		for range 20 {
			go func() {
				_, err := d.Resume(t.Context(), env, lease)
				results <- err
			}()
		}
		held := 0
		for range 20 {
			if err := <-results; err == nil {
				held++
			} else {
				assert.Equal(t, ErrCleanupFirst, err)
			}
		}
		assert.Equal(t, 1, held)
		assert.Equal(t, 1, p.count(rResume))
	})
}

// A Destroy that comes meanwhile cancels a Resume, waits for it, and does not
// find it pausing.
func TestDestroyCancelsResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		env := testEnv(reusable)
		lease := p.paused(d, env)
		p.always(rFetch, hang)
		resumed := make(chan error)
		go func() {
			_, err := d.Resume(t.Context(), env, lease)
			resumed <- err
		}()
		synctest.Wait()
		destroyed := make(chan error)
		go func() { destroyed <- d.Destroy(t.Context(), env, lease) }()
		err := <-resumed
		require.ErrorIs(t, err, ErrLeaseClosing)
		assert.NotErrorIs(t, err, context.Canceled)
		require.NoError(t, <-destroyed)
		assert.Zero(t, p.count(rPause), "the Destroy does better")
		assert.Empty(t, d.Unconfirmed())
	})
}

// Leases that the TypeScript provider wrote are resumed and destroyed here.
func TestLeasesOfTheTypeScriptProvider(t *testing.T) {
	for _, name := range []string{"typescript.json", "typescript-restricted.json", "typescript-older.json"} {
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile("testdata/leases/" + name)
			require.NoError(t, err)
			var lease Lease
			require.NoError(t, json.Unmarshal(text, &lease))
			p := newProvider(t)
			d := p.driver(DriverConfig{})
			m := lease.Metadata
			env := Environment{CompanyID: m.CompanyID, EnvironmentID: m.EnvironmentID, Config: Config{
				APIURL: origin, APIKey: NewSecret(keyCanary), Shape: m.Shape, Rootfs: m.Rootfs, Region: m.Region, ReuseLease: m.ReuseLease,
				AutoPauseAfter: time.Duration(m.AutoPauseAfterSeconds) * time.Second,
			}}
			if m.AdapterType != "" {
				env.Config.RootfsByAdapter = map[string]string{m.AdapterType: m.Rootfs}
			}
			if len(m.BaseEgressAllowlist) > 0 {
				env.Config.EgressAllowlist = m.BaseEgressAllowlist
			}
			lease.Metadata.APIURL = origin + "/v1" // as it writes them
			p.state, p.marker = statePaused, m.Marker
			rename := func(route string) {
				p.always(route, func(p *provider, req *http.Request) (*http.Response, error) {
					return ok(`{"id":"`+lease.ProviderLeaseID+`","status":"running"}`)(p, req)
				})
			}
			rename(rGet)
			if len(m.EffectiveEgressAllowlist) > 0 {
				list, _ := json.Marshal(m.BaseEgressAllowlist)
				p.always(rSetEgress, ok(`{"id":"`+lease.ProviderLeaseID+`","egress":`+string(list)+`}`))
			}
			got, err := d.Resume(t.Context(), env, &lease)
			require.NoError(t, err)
			assert.True(t, got.Metadata.ResumedLease)
			p.script(rDelete, ok(`{"id":"`+lease.ProviderLeaseID+`","status":"destroyed"}`))
			require.NoError(t, d.Destroy(t.Context(), env, got))
		})
	}
}
