package createos_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/davecgh/go-spew/spew"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

const (
	keyCanary      = "skp_canary_key"
	envCanary      = "canary-env-value"
	stdinCanary    = "canary-stdin"
	providerCanary = "canary-provider-text"
)

// forms are all the ways in which a value may end up in a text: by itself, and
// in an unexported field of somebody's struct, where no method of ours is
// asked. With deep, printers too that open every pointer: not for what is
// alive, whose memory they would read beside its goroutines.
func forms(v any, deep bool) map[string]string {
	verbs := []string{"%v", "%+v", "%#v"}
	if deep {
		verbs = append(verbs, "%s", "%q", "%x", "%d")
	}
	type holder struct{ hidden any }
	type nested struct{ inner *holder }
	out := make(map[string]string)
	for i, x := range []any{v, holder{v}, &holder{v}, nested{&holder{v}}, []any{v}, map[string]any{"k": v}} {
		for _, verb := range verbs {
			out[fmt.Sprint(i, verb)] = fmt.Sprintf(verb, x)
		}
		if text, err := json.Marshal(x); err == nil {
			out[fmt.Sprint(i, "json")] = string(text)
		}
		var log bytes.Buffer
		slog.New(slog.NewTextHandler(&log, nil)).Info("m", "v", x)
		slog.New(slog.NewJSONHandler(&log, nil)).Info("m", "v", x)
		out[fmt.Sprint(i, "slog")] = log.String()
		if deep {
			out[fmt.Sprint(i, "spew")] = spew.Sdump(x)
		}
	}
	return out
}

// hides checks that no form of a value holds a secret.
func hides(t *testing.T, what string, v any) {
	t.Helper()
	hidesIn(t, what, forms(v, true))
}

func hidesIn(t *testing.T, what string, forms map[string]string) {
	t.Helper()
	for form, text := range forms {
		for _, secret := range []string{keyCanary, envCanary, stdinCanary, providerCanary} {
			if secret == stdinCanary && strings.ContainsAny(form[len(form)-1:], "sqxd") {
				continue // a verb that is wrong for a struct makes fmt open the host's own reader
			}
			assert.NotContains(t, text, secret, "%s as %s", what, form)
			assert.NotContains(t, text, fmt.Sprintf("%x", secret), "%s as %s", what, form)
		}
	}
}

// Typed fields of the test's own structs: fmt reaches into these by reflection,
// which is how a string kind would leak.
type hostState struct {
	cfg    createos.Config
	env    createos.Environment
	cmd    createos.Command
	lease  *createos.Lease
	driver *createos.Driver
	client *createos.Client
	debts  []createos.Unconfirmed
}

func TestNothingPrintsASecret(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var logged bytes.Buffer
		handler := slog.NewJSONHandler(&lockedWriter{mu: &mu, w: &logged}, &slog.HandlerOptions{Level: slog.LevelDebug})
		var events []createos.Event
		r := newRig(t, createostest.Options{APIKey: keyCanary}, func(cfg *createos.DriverConfig) {
			cfg.Logger = slog.New(handler)
			cfg.OnEvent = func(e createos.Event) {
				mu.Lock()
				defer mu.Unlock()
				events = append(events, e)
			}
		})
		cmd := func() createos.Command {
			return createos.Command{
				Name: "cat", Stdin: strings.NewReader(stdinCanary),
				Env: createos.Env(map[string]string{"TOKEN": envCanary}),
			}
		}
		require.Equal(t, keyCanary, r.env.Config.APIKey.Reveal())
		client, err := r.driver.Client(r.env)
		require.NoError(t, err)
		lease := r.acquire()
		res, err := r.driver.Exec(t.Context(), r.env, lease, cmd())
		require.NoError(t, err)
		require.Equal(t, stdinCanary, string(res.Stdout), "a result's output is data")

		// Errors of every call against every kind of refusal, with the
		// provider echoing what it should not.
		var errs []error
		body := `{"status":"fail","data":"` + providerCanary + " " + keyCanary + " " + envCanary + `"}`
		for _, fault := range []createostest.Fault{
			{Status: 400, Body: body}, {Status: 403, Body: body}, {Status: 404, Body: body}, {Status: 409, Body: body},
			{Status: 500, Body: body}, {Status: 200, Body: body}, {Redirect: "https://" + providerCanary + ".invalid/"}, {DropReply: true},
			{Status: 200, Body: `{"status":"success","data":{"id":"sb-odd","status":"` + providerCanary + `"}}`},
		} {
			r.srv.Fail(fault)
			fresh, err := createos.NewDriver(r.cfg)
			require.NoError(t, err)
			_, err = fresh.Acquire(t.Context(), r.env, r.options())
			errs = append(errs, err)
			_, err = fresh.Exec(t.Context(), r.env, lease, cmd())
			errs = append(errs, err)
			_, err = fresh.Resume(t.Context(), r.env, lease)
			errs = append(errs, err, fresh.Release(t.Context(), r.env, lease), fresh.Destroy(t.Context(), r.env, lease))
			_, err = client.Sandbox(t.Context(), lease.ProviderLeaseID)
			errs = append(errs, err)
			_, err = client.Sandboxes(t.Context())
			errs = append(errs, err, fresh.RetryCleanup(t.Context()))
			probe, err := fresh.Probe(t.Context(), r.env, r.options())
			require.NoError(t, err)
			hides(t, "probe", probe)
			hides(t, "unconfirmed", fresh.Unconfirmed())
			r.srv.ClearFaults()
		}
		_, err = createos.ParseConfig(map[string]any{"apiUrl": "https://u:" + keyCanary + "@h", "apiKey": keyCanary + "\n", "shape": 7})
		errs = append(errs, err)
		seen := 0
		var walk func(error)
		walk = func(err error) {
			if err == nil {
				return
			}
			hides(t, "error", err)
			seen++
			for _, inner := range unwrap(err) {
				walk(inner)
			}
		}
		for _, err := range errs {
			walk(err)
		}
		assert.Greater(t, seen, 40)

		hides(t, "secret", r.env.Config.APIKey)
		hides(t, "config", r.env.Config)
		hides(t, "environment", r.env)
		hides(t, "command", cmd())
		c := cmd()
		hides(t, "command", &c)
		hides(t, "lease", lease)
		hidesIn(t, "driver", forms(r.driver, false))
		hidesIn(t, "client", forms(client, false))
		hidesIn(t, "driver config", forms(r.cfg, false))
		state := hostState{r.env.Config, r.env, cmd(), lease, r.driver, client, r.driver.Unconfirmed()}
		for _, verb := range []string{"%v", "%+v", "%#v"} {
			text := fmt.Sprintf(verb, state)
			for _, secret := range []string{keyCanary, envCanary, stdinCanary} {
				assert.NotContains(t, text, secret, "unexported fields as %s", verb)
			}
		}
		mu.Lock()
		for _, e := range events {
			hides(t, "event", e)
		}
		assert.NotEmpty(t, events)
		log := logged.String()
		mu.Unlock()
		assert.Contains(t, log, "createos: request")
		for _, secret := range []string{keyCanary, envCanary, stdinCanary, providerCanary, "TOKEN"} {
			assert.NotContains(t, log, secret)
		}
		// What the provider was sent: the key in one header, and nothing of
		// the command where a process list shows it.
		for _, q := range r.srv.Requests() {
			if q.Route == "POST /v1/sandboxes/{id}/processes" {
				assert.NotContains(t, string(q.Body), envCanary)
				assert.NotContains(t, string(q.Body), "TOKEN")
				assert.NotContains(t, string(q.Body), `"cat"`)
			}
		}
		require.NoError(t, r.driver.Destroy(context.Background(), r.env, lease))
	})
}

type lockedWriter struct {
	mu *sync.Mutex
	w  *bytes.Buffer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
