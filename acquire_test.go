package createos

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAcquireTakesThreeRequestsAndOneWhoamiPerKey(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	lease := p.acquire(d, testEnv())
	assert.Equal(t, []string{rWhoami, rCreate, rExec, rPut}, p.requests())
	p.acquire(d, testEnv())
	assert.Equal(t, []string{rCreate, rExec, rPut}, p.requests())

	m := lease.Metadata
	assert.Equal(t, box, lease.ProviderLeaseID)
	assert.Equal(t, "createos", m.Provider)
	assert.Equal(t, origin, m.APIURL)
	assert.Equal(t, DefaultWorkspace, m.RemoteCwd)
	assert.Equal(t, "usr_1", m.AccountID)
	assert.Len(t, m.Marker, 36)
	assert.Regexp(t, `^l-[a-z2-7]{20}$`, m.SandboxName)
	assert.Regexp(t, `^CREATEOS_LEASE_[0-9a-f]{32}$`, m.LeaseKey)
	assert.Empty(t, d.Unconfirmed())
	quietDriver(t, d)
}

func TestCreateCarriesMarksAndConfiguration(t *testing.T) {
	p := newProvider(t)
	var sent map[string]any
	p.script(rCreate, func(p *provider, req *http.Request) (*http.Response, error) {
		body := new(strings.Builder)
		dec := json.NewDecoder(req.Body)
		if err := dec.Decode(&sent); err != nil {
			return nil, err
		}
		text, _ := json.Marshal(sent)
		body.Write(text)
		req.Body = http.NoBody
		return ok(`{"id":"`+box+`","status":"running"}`)(p, req)
	})
	d := p.driver(DriverConfig{Deployment: "eu-1"})
	var intent Intent
	lease, err := d.Acquire(t.Context(), testEnv(func(c *Config) {
		c.EgressAllowlist = []string{"10.0.0.0/8", "*", "10.0.0.0/8"}
		c.AutoPauseAfter = 90 * time.Second
		c.RootfsByAdapter = map[string]string{"codex": "debian:13"}
	}), AcquireOptions{AdapterType: "codex", BeforeCreate: func(_ context.Context, i Intent) error {
		intent = i
		assert.Zero(t, p.count(rCreate))
		return nil
	}})
	require.NoError(t, err)
	assert.Equal(t, map[string]any{
		"name": intent.SandboxName, "shape": "s-1vcpu-1gb", "rootfs": "debian:13", "ingress_enabled": false,
		"egress": []any{"10.0.0.0/8"}, "auto_pause_after_seconds": 90.0,
		"envs": map[string]any{intent.LeaseKey: "1", intent.OwnerKey: "1"},
	}, sent)
	assert.Equal(t, []string{"10.0.0.0/8"}, lease.Metadata.BaseEgressAllowlist)
	assert.Equal(t, "codex", lease.Metadata.AdapterType)
	// SHA-256 over "eu-1" NUL "acme" NUL "ci".
	assert.Equal(t, ownerMark("eu-1", tenant{"acme", "ci", origin}), intent.OwnerKey)
	assert.NotEqual(t, ownerMark("", tenant{"acme", "ci", origin}), intent.OwnerKey)
	assert.NotEqual(t, ownerMark("a", tenant{"b", "c", ""}), ownerMark("a", tenant{"bc", "", ""}))
}

func TestBeforeCreateThatFailsSendsNothing(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{BeforeCreate: func(context.Context, Intent) error { return errTest }})
	require.ErrorIs(t, err, errTest)
	assert.Zero(t, p.count(rCreate))
	assert.Empty(t, d.Unconfirmed())
	assert.PanicsWithValue(t, "host bug", func() {
		_, _ = d.Acquire(t.Context(), testEnv(), AcquireOptions{BeforeCreate: func(context.Context, Intent) error { panic("host bug") }})
	})
	assert.Empty(t, d.Unconfirmed())
	quietDriver(t, d)
}

func TestAcquireChecksInputBeforeAnyRequest(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	for name, c := range map[string]struct {
		env  Environment
		opts AcquireOptions
		want string
	}{
		"no company":           {Environment{EnvironmentID: "ci", Config: testEnv().Config}, AcquireOptions{}, "Environment.CompanyID"},
		"NUL in environment":   {Environment{CompanyID: "a", EnvironmentID: "c\x00", Config: testEnv().Config}, AcquireOptions{}, "Environment.EnvironmentID"},
		"no key":               {testEnv(func(c *Config) { c.APIKey = Secret{} }), AcquireOptions{}, "apiKey"},
		"no shape":             {testEnv(func(c *Config) { c.Shape = "" }), AcquireOptions{}, "shape"},
		"relative workspace":   {testEnv(), AcquireOptions{Workspace: "ws"}, "AcquireOptions.Workspace"},
		"unclean workspace":    {testEnv(), AcquireOptions{Workspace: "/a/../b"}, "AcquireOptions.Workspace"},
		"root workspace":       {testEnv(), AcquireOptions{Workspace: "/"}, "AcquireOptions.Workspace"},
		"bytes in company":     {Environment{CompanyID: "a\xff", EnvironmentID: "c", Config: testEnv().Config}, AcquireOptions{}, "Environment.CompanyID"},
		"bytes in environment": {Environment{CompanyID: "a", EnvironmentID: "\xc3", Config: testEnv().Config}, AcquireOptions{}, "Environment.EnvironmentID"},
		"bytes in adapter":     {testEnv(), AcquireOptions{AdapterType: "\xff"}, "AcquireOptions.AdapterType"},
		"bytes in workspace":   {testEnv(), AcquireOptions{Workspace: "/a\xff"}, "AcquireOptions.Workspace"},
		"NUL in workspace":     {testEnv(), AcquireOptions{Workspace: "/a\x00"}, "AcquireOptions.Workspace"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.Acquire(t.Context(), c.env, c.opts)
			assert.ErrorContains(t, err, c.want)
		})
	}
	assert.Empty(t, p.requests())
}

// Known not created: nothing is looked for, nothing is owed, and the class of
// the refusal can be told.
func TestRefusedCreateLeavesNothing(t *testing.T) {
	for status, class := range map[int]error{
		400: ErrInvalidRequest, 401: ErrUnauthorized, 402: ErrNoCredit, 403: ErrForbidden, 404: ErrNotFound,
		405: ErrInvalidRequest, 413: ErrInvalidRequest, 422: ErrInvalidRequest,
	} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			p := newProvider(t)
			d := p.driver(DriverConfig{})
			p.script(rCreate, refuse(status))
			_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
			require.ErrorIs(t, err, class)
			assert.Equal(t, []string{rWhoami, rCreate}, p.requests())
			assert.Empty(t, d.Unconfirmed())
			quietDriver(t, d)
		})
	}
}

func TestThrottledCreateIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, refuse(429), refuse(429))
		p.acquire(d, testEnv())
		assert.Equal(t, 3, p.count(rCreate))
	})
}

// What a create came back with that says nothing about whether it made a
// sandbox. The rows of cases "transport retried a POST" and "twins under one
// name".
var unclearCreates = map[string]answerFunc{
	"reset": reset, "408": refuse(408), "409": refuse(409), "500": refuse(500), "502": raw(502, "<html>bad gateway"),
	"503": refuse(503), "504": refuse(504), "redirect": refuse(307), "html": raw(200, "<html>"), "empty": raw(200, ""),
	"no id": ok(`{"status":"running"}`), "bad id": ok(`{"id":"../admin"}`), "number id": ok(`{"id":7}`),
	"other name":    ok(`{"id":"sb-other","name":"l-somebodyelse","status":"running"}`),
	"fail envelope": raw(200, `{"status":"fail","data":"provider canary text"}`),
}

func TestUnclearCreateIsFoundAndAdopted(t *testing.T) {
	for name, reply := range unclearCreates {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				p.script(rCreate, then(created, reply))
				p.always(rList, listsBox)
				lease, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
				require.NoError(t, err)
				assert.Equal(t, box, lease.ProviderLeaseID)
				assert.Equal(t, 1, p.count(rCreate))
				assert.Zero(t, p.count(rDelete))
				assert.Empty(t, d.Unconfirmed())
				quietDriver(t, d)
			})
		})
	}
}

func TestUnclearCreateThatIsNotFoundIsListedByName(t *testing.T) {
	for name, reply := range unclearCreates {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				p.script(rCreate, then(created, reply))
				began := time.Now()
				_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
				var unknown *CreateUnknownError
				require.ErrorAs(t, err, &unknown)
				assert.EqualError(t, err, "CreateOS sandbox creation could not be confirmed; a sandbox named "+p.name+" may exist.")
				assert.LessOrEqual(t, time.Since(began), searchBound)
				assert.Equal(t, 4, p.count(rList))
				list := d.Unconfirmed()
				require.Len(t, list, 1)
				assert.Equal(t, CreateUnknown, list[0].Kind)
				assert.Equal(t, p.name, list[0].SandboxName)
				assert.NotContains(t, list[0].Cause, "canary")
				if name == "409" {
					assert.ErrorIs(t, err, ErrConflict)
				}
				quietDriver(t, d)

				// It shows up after all, and RetryCleanup destroys it.
				p.heal()
				p.script(rList, listsBox)
				require.NoError(t, d.RetryCleanup(t.Context()))
				assert.Equal(t, 1, p.count(rDelete))
			})
		})
	}
}

func TestNameAloneIsNoProofOfOwnership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, func(p *provider, req *http.Request) (*http.Response, error) {
			resp, err := created(p, req)
			p.envs = []string{"CREATEOS_LEASE_0123456789abcdef0123456789abcdef"} // somebody else's
			if err != nil {
				return resp, err
			}
			return refuse(409)(p, req)
		})
		p.always(rList, listsBox)
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		var unknown *CreateUnknownError
		require.ErrorAs(t, err, &unknown)
		assert.Zero(t, p.count(rDelete))
		assert.Zero(t, p.count(rExec))
	})
}

func TestRowWithoutEnvironmentIsReadBeforeItCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, then(created, refuse(500)))
		p.script(rList, func(p *provider, req *http.Request) (*http.Response, error) {
			return listed(`{"id":"`+box+`","status":"running","name":"`+p.name+`"}`)(p, req)
		})
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		require.NoError(t, err)
		assert.Equal(t, 1, p.count(rGet))
	})
}

func TestFoundSandboxThatDoesNotFitIsDestroyed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, then(created, refuse(500)))
		p.script(rList, func(p *provider, req *http.Request) (*http.Response, error) {
			return listed(strings.Replace(p.row(), `"ingress_enabled":false`, `"ingress_enabled":true`, 1))(p, req)
		})
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		require.ErrorIs(t, err, ErrUnavailable)
		assert.Equal(t, 1, p.count(rDelete))
		assert.Empty(t, d.Unconfirmed())
	})
}

func TestOfSeveralFoundOneIsKeptAndTheOthersDestroyed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rCreate, then(created, reset))
		p.script(rList, func(p *provider, req *http.Request) (*http.Response, error) {
			return listed(p.row(), strings.Replace(p.row(), box, "sb-twin", 1))(p, req)
		})
		p.script(rDelete, refuse(403))
		lease, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		require.NoError(t, err)
		assert.Equal(t, box, lease.ProviderLeaseID)
		list := d.Unconfirmed() // its destroy failed: a clean success would hide it
		require.Len(t, list, 1)
		assert.Equal(t, DestroyOwed, list[0].Kind)
		assert.Equal(t, "sb-twin", list[0].SandboxID)
	})
}

// A step after the create fails: the sandbox is destroyed before Acquire
// returns, and the original failure is what the caller sees.
func TestAcquireRollsBack(t *testing.T) {
	for name, c := range map[string]struct {
		script func(p *provider)
		is     error
		as     any
	}{
		"created as failed": {func(p *provider) { p.state = stateFailed }, nil, new(*StateError)},
		"creating then failed": {func(p *provider) {
			p.state = stateCreating
			p.script(rGet, shows(stateCreating), shows(stateFailed))
		}, nil, new(*StateError)},
		"state never known": {func(p *provider) { p.state = "provider canary text"; p.always(rGet, view) }, nil, new(*StateError)},
		"get fails":         {func(p *provider) { p.state = stateCreating; p.script(rGet, repeat(4, refuse(500))...) }, ErrUnavailable, new(*RequestError)},
		"get is of another": {func(p *provider) { p.state = stateCreating; p.script(rGet, ok(`{"id":"sb-other","status":"running"}`)) }, ErrInvalidResponse, nil},
		"mkdir exits 1": {func(p *provider) {
			p.script(rExec, ok(`{"result":{"stdout":"","stderr":"","exit_code":1},"exec_ms":1}`))
		}, nil, new(*WorkspaceError)},
		"mkdir without result":   {func(p *provider) { p.script(rExec, ok(`{}`)) }, ErrInvalidResponse, nil},
		"mkdir in fail envelope": {func(p *provider) { p.script(rExec, raw(200, `{"status":"fail"}`)) }, ErrInvalidResponse, nil},
		"agent never up":         {func(p *provider) { p.always(rExec, refuse(503)) }, ErrUnavailable, nil},
		"marker 413":             {func(p *provider) { p.script(rPut, refuse(413)) }, ErrInvalidRequest, nil},
		"marker 507":             {func(p *provider) { p.script(rPut, refuse(507)) }, nil, new(*RequestError)},
		"marker reset":           {func(p *provider) { p.always(rPut, reset) }, ErrConnection, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				c.script(p)
				_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
				require.Error(t, err)
				if c.is != nil {
					assert.ErrorIs(t, err, c.is)
				}
				if c.as != nil {
					assert.ErrorAs(t, err, c.as)
				}
				assert.NotContains(t, err.Error(), "canary")
				assert.Equal(t, 1, p.count(rDelete), p.requests())
				assert.Empty(t, d.Unconfirmed())
				quietDriver(t, d)
			})
		})
	}
}

// The compensating destroy fails too: the error carries both causes, the id
// is listed, and a retry clears it once the provider is well again.
func TestFailedRollBackIsOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rExec, refuse(402))
		p.always(rDelete, refuse(500))
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		assert.EqualError(t, err, "CreateOS setup failed and cleanup is unconfirmed for sandbox "+box+".")
		var setup *SetupError
		require.ErrorAs(t, err, &setup)
		assert.Equal(t, box, setup.SandboxID)
		assert.ErrorIs(t, setup.Setup, ErrNoCredit)
		assert.ErrorIs(t, setup.Destroy, ErrUnavailable)
		assert.ErrorIs(t, err, ErrNoCredit)
		assert.ErrorIs(t, err, ErrUnavailable)
		assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d))

		var left *UnconfirmedError
		require.ErrorAs(t, d.RetryCleanup(t.Context()), &left)
		assert.Equal(t, 1, left.Entries[0].Attempts)
		p.heal()
		require.NoError(t, d.RetryCleanup(t.Context()))
		assert.Empty(t, d.Unconfirmed())
	})
}

// The id is on record before the second request is sent.
func TestIDIsRecordedWhileTheFirstReadHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.state = stateCreating
		p.always(rGet, hang)
		p.always(rDelete, reset)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := d.Acquire(ctx, testEnv(), AcquireOptions{})
			done <- err
		}()
		synctest.Wait()
		list := d.Unconfirmed()
		require.Len(t, list, 1)
		assert.Equal(t, Acquiring, list[0].Kind)
		assert.Equal(t, box, list[0].SandboxID)
		cancel()
		err := <-done
		var setup *SetupError
		require.ErrorAs(t, err, &setup)
		assert.Equal(t, box, setup.SandboxID)
		assert.ErrorIs(t, err, context.Canceled)
		assert.Equal(t, []DebtKind{DestroyOwed}, kinds(d))
	})
}

// Readiness fails by the deadline; the destroy is sent after it, on its own
// bound, and exactly once.
func TestDestroyIsSentAfterTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.state = stateCreating
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := d.Acquire(ctx, testEnv(), AcquireOptions{})
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.NotErrorIs(t, err, ErrTimeout)
		assert.Equal(t, 1, p.count(rDelete))
		assert.Empty(t, d.Unconfirmed())

		p.setState(stateCreating)
		_, err = d.Acquire(t.Context(), testEnv(func(c *Config) { c.Timeout = 3 * time.Second }), AcquireOptions{})
		assert.ErrorIs(t, err, ErrTimeout)
		assert.Equal(t, 2, p.count(rDelete))
	})
}

func TestPollToleratesPassingTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.state = stateCreating
		p.script(rGet, shows(stateCreating), refuse(503), shows(stateCreating), refuse(429), reset, shows(stateRunning))
		p.acquire(d, testEnv())
		assert.Zero(t, p.count(rDelete))
	})
}

func TestFreshSandboxInErrorIsResumedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.state = stateError
		p.acquire(d, testEnv())
		assert.Equal(t, 1, p.count(rResume))

		p.setState(stateError)
		p.always(rResume, then(becomes(stateResuming, `{}`), ok(`{"id":"`+box+`","status":"resuming"}`)))
		p.script(rGet, shows(stateError), shows(stateResuming), shows(stateError))
		_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
		var state *StateError
		require.ErrorAs(t, err, &state)
		assert.Equal(t, stateError, state.Last)
		assert.Equal(t, 2, p.count(rResume))
	})
}

// A create in flight is followed when the caller leaves; its sandbox is
// destroyed before Acquire returns.
func TestCancelWhileCreateIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		release := make(chan struct{})
		p.script(rCreate, func(p *provider, req *http.Request) (*http.Response, error) {
			select {
			case <-release:
				return created(p, req)
			case <-req.Context().Done():
				return nil, req.Context().Err()
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := d.Acquire(ctx, testEnv(), AcquireOptions{})
			done <- err
		}()
		synctest.Wait()
		require.Len(t, d.Unconfirmed(), 1)
		cancel()
		synctest.Wait()
		close(release)
		require.ErrorIs(t, <-done, context.Canceled)
		assert.Equal(t, 1, p.count(rDelete))
		assert.Empty(t, d.Unconfirmed())
		quietDriver(t, d)
	})
}

// The marker was written when the caller left: the lease is returned.
func TestLeaseIsReturnedOnceTheMarkerIsWritten(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	ctx, cancel := context.WithCancel(t.Context())
	p.script(rPut, func(p *provider, req *http.Request) (*http.Response, error) {
		defer cancel()
		return stored(p, req)
	})
	lease, err := d.Acquire(ctx, testEnv(), AcquireOptions{})
	// The answer and the end of ctx may cross on the way: either the lease is
	// there, or the sandbox is proven destroyed.
	if err == nil {
		assert.Equal(t, box, lease.ProviderLeaseID)
		assert.Zero(t, p.count(rDelete))
	} else {
		assert.Equal(t, 1, p.count(rDelete))
	}
	assert.Empty(t, d.Unconfirmed())
}

func TestTransportThatPanicsLosesNothing(t *testing.T) {
	p := newProvider(t)
	d := p.driver(DriverConfig{})
	p.script(rExec, func(*provider, *http.Request) (*http.Response, error) { panic("transport bug") })
	func() {
		defer func() { assert.NotNil(t, recover()) }()
		d.cfg.Transport = panicky{p.mock}
		_, _ = d.Acquire(t.Context(), testEnv(), AcquireOptions{})
	}()
	require.Equal(t, []DebtKind{DestroyOwed}, kinds(d))
	assert.Equal(t, box, d.Unconfirmed()[0].SandboxID)
	d.cfg.Transport = p.mock
	require.NoError(t, d.RetryCleanup(t.Context()))
	quietDriver(t, d)
}

// panicky panics on the caller's goroutine, where the mock would not.
type panicky struct{ next http.RoundTripper }

func (r panicky) RoundTrip(req *http.Request) (*http.Response, error) {
	if strings.HasSuffix(req.URL.Path, "/exec") {
		panic("transport bug")
	}
	return r.next.RoundTrip(req)
}

func TestWhoamiFailuresThatMatter(t *testing.T) {
	for name, c := range map[string]struct {
		reply   answerFunc
		fails   error
		account string
	}{
		"401":        {refuse(401), ErrUnauthorized, ""},
		"500":        {refuse(500), ErrUnavailable, ""},
		"reset":      {reset, ErrConnection, ""},
		"403":        {refuse(403), nil, ""},
		"404":        {refuse(404), nil, ""},
		"405":        {refuse(405), nil, ""},
		"unreadable": {raw(200, "<html>"), nil, ""},
		"healthy":    {ok(`{"user_id":"usr_9"}`), nil, "usr_9"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProvider(t)
				d := p.driver(DriverConfig{})
				p.always(rWhoami, c.reply)
				lease, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
				if c.fails != nil {
					require.ErrorIs(t, err, c.fails)
					assert.Zero(t, p.count(rCreate))
					return
				}
				require.NoError(t, err)
				assert.Equal(t, c.account, lease.Metadata.AccountID)
			})
		})
	}
}

// Twenty acquires that begin at once ask who they are once; one that leaves
// while it asks does not take the others with it.
func TestWhoamiIsSharedAndOutlivesItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProvider(t)
		d := p.driver(DriverConfig{})
		p.script(rWhoami, hang)
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error, 1)
		go func() {
			_, err := d.Acquire(ctx, testEnv(), AcquireOptions{})
			first <- err
		}()
		synctest.Wait()
		rest := make(chan error, 20)
		for range 20 {
			go func() {
				_, err := d.Acquire(t.Context(), testEnv(), AcquireOptions{})
				rest <- err
			}()
		}
		synctest.Wait()
		assert.Equal(t, 1, p.count(rWhoami))
		cancel()
		require.ErrorIs(t, <-first, context.Canceled)
		for range 20 {
			require.NoError(t, <-rest)
		}
		assert.Equal(t, 2, p.count(rWhoami))
	})
}

func TestNotCreated(t *testing.T) {
	assert.True(t, notCreated(&ConnectionError{sent: false}))
	assert.False(t, notCreated(&ConnectionError{sent: true}))
	assert.False(t, notCreated(&ResponseError{Status: 200}))
	assert.False(t, notCreated(errors.New("anything else")))
}
