package createos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jarcoal/httpmock"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/budget"
)

const (
	testOrigin  = "https://api.example.test"
	testKey     = "skp_canary_key"
	testSandbox = "sb-01k7a0000000000000000000t1"
	testProcess = "proc_T3stT3stT3stT3st"
)

// testClient makes a client with room in its budget.
func testClient(transport http.RoundTripper, changes ...func(*clientConfig)) *Client {
	cfg := clientConfig{
		origin: testOrigin, key: NewSecret(testKey), transport: transport, budget: NewBudget(1 << 20),
	}
	for _, change := range changes {
		change(&cfg)
	}
	return newClient(cfg)
}

// success is a JSend success.
func success(data string) string { return `{"status":"success","data":` + data + `}` }

// answering makes a transport that gives the answers in turn, the last for
// ever, and counts the requests.
func answering(answers ...httpmock.Responder) *httpmock.MockTransport {
	mock := httpmock.NewMockTransport()
	var n atomic.Int32
	mock.RegisterNoResponder(func(req *http.Request) (*http.Response, error) {
		if req.Body != nil {
			if _, err := io.Copy(io.Discard, req.Body); err != nil {
				return nil, err
			}
		}
		return answers[min(int(n.Add(1)), len(answers))-1](req)
	})
	return mock
}

func reply(status int, body string) httpmock.Responder {
	return httpmock.NewStringResponder(status, body).SetContentLength()
}

// An operation is one typed call, with an answer that satisfies it.
type operation struct {
	name      string
	method    string
	good      string // data of a success
	operation Operation
	call      func(context.Context, *Client) error
}

const (
	goodSandbox = `{"id":"` + testSandbox + `","status":"running"}`
	goodProcess = `{"process_id":"` + testProcess + `","state":"exited","leader_exited":true,"tree_exited":true}`
)

// operations are all unary calls.
var operations = []operation{
	{"create", "POST", goodSandbox, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.create(ctx, createRequest{Name: "l-1", Shape: "s"})
		return err
	}},
	{"get", "GET", goodSandbox, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.Sandbox(ctx, testSandbox)
		return err
	}},
	{"list", "GET", `[` + goodSandbox + `]`, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.Sandboxes(ctx)
		return err
	}},
	{"destroy", "DELETE", goodSandbox, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.destroy(ctx, testSandbox)
		return err
	}},
	{"pause", "POST", goodSandbox, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, _, err := c.pause(ctx, testSandbox)
		return err
	}},
	{"resume", "POST", goodSandbox, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, _, err := c.resume(ctx, testSandbox)
		return err
	}},
	{"exec", "POST", `{"result":{"exit_code":0}}`, OpWorkspaceCommand, func(ctx context.Context, c *Client) error {
		_, err := c.exec(ctx, testSandbox, "true", nil)
		return err
	}},
	{"upload", "PUT", `{}`, OpFileTransfer, func(ctx context.Context, c *Client) error {
		return c.upload(ctx, testSandbox, "/secret/path", strings.NewReader("x"), 1)
	}},
	{"download", "GET", `{}`, OpFileTransfer, func(ctx context.Context, c *Client) error {
		body, _, err := c.download(ctx, testSandbox, "/secret/path")
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, body)
		return errors.Join(err, body.Close())
	}},
	{"egress", "GET", `{"id":"` + testSandbox + `","egress":[]}`, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.Egress(ctx, testSandbox)
		return err
	}},
	{"setEgress", "PUT", `{"id":"` + testSandbox + `","egress":["192.0.2.1/32"]}`, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.setEgress(ctx, testSandbox, []string{"192.0.2.1/32"})
		return err
	}},
	{"account", "GET", `{"user_id":"usr_demo"}`, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.Account(ctx)
		return err
	}},
	{"createProcess", "POST", goodProcess, OpProcessCreation, func(ctx context.Context, c *Client) error {
		_, err := c.createProcess(ctx, testSandbox, "sh", nil, "/")
		return err
	}},
	{"processes", "GET", `{"processes":[` + goodProcess + `]}`, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.processes(ctx, testSandbox)
		return err
	}},
	{"process", "GET", goodProcess, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.process(ctx, testSandbox, testProcess)
		return err
	}},
	{"input", "POST", `{"input_seq":1}`, OpLifecycle, func(ctx context.Context, c *Client) error {
		return c.input(ctx, testSandbox, testProcess, []byte("x"))
	}},
	{"wait", "GET", goodProcess, OpLifecycle, func(ctx context.Context, c *Client) error {
		_, err := c.wait(ctx, testSandbox, testProcess, true, time.Second)
		return err
	}},
	{"terminate", "DELETE", goodProcess, OpProcessCleanup, func(ctx context.Context, c *Client) error {
		_, err := c.terminate(ctx, testSandbox, testProcess, time.Second)
		return err
	}},
}

// Each operation meets each failure once, and then an answer that is well.
func TestWhatIsSentAgain(t *testing.T) {
	reset := errors.New("reset")
	for _, op := range operations {
		for _, status := range []int{0, 302, 400, 401, 402, 403, 404, 405, 408, 409, 410, 413, 422, 429, 500, 501, 502, 503, 504} {
			t.Run(fmt.Sprint(op.name, status), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					failure := reply(status, "")
					if status == 0 {
						failure = httpmock.NewErrorResponder(reset)
					}
					mock := answering(failure, reply(200, success(op.good)))
					err := op.call(t.Context(), testClient(mock))

					again := false
					switch status {
					case 429:
						again = true
					case 408:
						again = op.method != "POST" && op.name != "wait"
					case 0, 500, 502, 503, 504:
						again = op.method != "POST"
					}
					if again {
						require.NoError(t, err)
						assert.Equal(t, 2, mock.GetTotalCallCount())
						return
					}
					require.Error(t, err)
					assert.Equal(t, 1, mock.GetTotalCallCount())
					if op.name == "wait" && status == 408 {
						assert.Equal(t, errWaitTimeout, err)
						return
					}
					unknown := status == 0 || status == 302 || status == 408 || status >= 500
					assert.Equal(t, unknown, unclear(err))
					assert.False(t, notSent(err), "the transport gives no proof")
				})
			})
		}
	}
}

func TestAttemptsAreBounded(t *testing.T) {
	for _, status := range []int{429, 503} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mock := answering(reply(status, ""))
				began := time.Now()
				_, err := testClient(mock).get(t.Context(), testSandbox)
				assert.Equal(t, maxAttempts, mock.GetTotalCallCount())
				var refused *RequestError
				require.ErrorAs(t, err, &refused)
				assert.Equal(t, status, refused.Status)
				// 250, 500 and 1000 ms, less jitter of up to half.
				assert.GreaterOrEqual(t, time.Since(began), 875*time.Millisecond)
				assert.LessOrEqual(t, time.Since(began), 1750*time.Millisecond)
			})
		})
	}
}

func TestAPollSurvivesAMixOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mock := answering(reply(503, ""), reply(429, "").HeaderSet(http.Header{"Retry-After": {"1"}}),
			httpmock.NewErrorResponder(syscall.ECONNRESET), reply(200, success(goodSandbox)))
		s, err := testClient(mock).get(t.Context(), testSandbox)
		require.NoError(t, err)
		assert.Equal(t, "running", s.Status)
		assert.Equal(t, 4, mock.GetTotalCallCount())
	})
}

func TestRetryAfterIsObeyedByEverybody(t *testing.T) {
	at := func(d time.Duration) string { return time.Now().Add(d).UTC().Format(http.TimeFormat) }
	for name, row := range map[string]struct {
		header func() http.Header
		want   time.Duration
	}{
		"seconds": {func() http.Header { return http.Header{"Retry-After": {"7"}} }, 7 * time.Second},
		"date":    {func() http.Header { return http.Header{"Retry-After": {at(9 * time.Second)}} }, 9 * time.Second},
		"our clock": {func() http.Header {
			return http.Header{"Retry-After": {at(time.Hour)}, "Date": {at(time.Hour - 5*time.Second)}}
		}, 5 * time.Second},
		"past":     {func() http.Header { return http.Header{"Retry-After": {at(-time.Hour)}} }, 0},
		"an hour":  {func() http.Header { return http.Header{"Retry-After": {"3600"}} }, time.Minute},
		"for ever": {func() http.Header { return http.Header{"Retry-After": {"1e300"}} }, time.Minute},
		"nonsense": {func() http.Header { return http.Header{"Retry-After": {"NaN"}} }, 0},
		"negative": {func() http.Header { return http.Header{"Retry-After": {"-5"}} }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mock := answering(reply(429, "").HeaderSet(row.header()), reply(200, success(goodSandbox)))
				c := testClient(mock)
				began := time.Now()
				other := make(chan time.Duration, 1)
				var first sync.Once
				_, err := c.create(withTraits(t.Context(), traits{onAnswer: func(error) {
					first.Do(func() { // after the 429 is there
						go func() {
							_, err := c.get(t.Context(), testSandbox)
							assert.NoError(t, err)
							other <- time.Since(began)
						}()
					})
				}}), createRequest{})
				require.NoError(t, err)
				assert.GreaterOrEqual(t, time.Since(began), row.want)
				assert.LessOrEqual(t, time.Since(began), row.want+time.Second)
				assert.GreaterOrEqual(t, <-other, row.want, "a 429 is for the address, not for the request")
			})
		})
	}
}

func TestStatusClasses(t *testing.T) {
	classes := []error{ErrInvalidRequest, ErrUnauthorized, ErrNoCredit, ErrForbidden, ErrNotFound, ErrConflict, ErrRateLimited, ErrUnavailable}
	for status, class := range map[int]error{
		300: nil, 304: nil, 400: ErrInvalidRequest, 401: ErrUnauthorized, 402: ErrNoCredit, 403: ErrForbidden, 404: ErrNotFound,
		405: ErrInvalidRequest, 409: ErrConflict, 413: ErrInvalidRequest, 418: nil, 422: ErrInvalidRequest, 429: ErrRateLimited,
		500: ErrUnavailable, 502: ErrUnavailable, 503: ErrUnavailable, 504: ErrUnavailable, 599: nil,
	} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mock := answering(reply(status, "").HeaderSet(http.Header{"X-Request-Id": {"req-1"}, "Retry-After": {"0.5"}}))
				_, err := testClient(mock).exec(t.Context(), testSandbox, "true", nil)
				err = fmt.Errorf("wrapped: %w", err)
				for _, c := range classes {
					assert.Equal(t, c == class, errors.Is(err, c), "%v", c)
				}
				var refused *RequestError
				require.ErrorAs(t, err, &refused)
				assert.Equal(t, fmt.Sprintf("CreateOS request failed (HTTP %d) during workspace command.", status), refused.Error())
				assert.Equal(t, "req-1", refused.RequestID)
				assert.Equal(t, 500*time.Millisecond, refused.RetryAfter)
				assert.Equal(t, "run command", refused.Detail)
			})
		})
	}
	for _, status := range []int{101, 199, 600, 999} {
		_, err := testClient(answering(reply(status, success(goodSandbox)))).get(t.Context(), testSandbox)
		assert.ErrorIs(t, err, ErrInvalidResponse, status)
	}
}

func TestOperationNames(t *testing.T) {
	for _, op := range operations {
		err := op.call(t.Context(), testClient(answering(reply(418, ""))))
		var refused *RequestError
		require.ErrorAs(t, err, &refused, op.name)
		assert.Equal(t, op.operation, refused.Operation, op.name)
		assert.NotEmpty(t, refused.Detail, op.name)
	}
}

func TestRequestIDsAreIDs(t *testing.T) {
	for value, want := range map[string]string{
		"abc-1.2:3_Z":            "abc-1.2:3_Z",
		"":                       "",
		"two words":              "",
		"<b>":                    "",
		strings.Repeat("a", 200): strings.Repeat("a", 200),
		strings.Repeat("a", 201): "",
	} {
		assert.Equal(t, want, requestIDOf(http.Header{"X-Request-Id": {value}}))
		assert.Equal(t, want, requestIDOf(http.Header{"X-Fc-Request-Id": {value}}))
	}
	assert.Equal(t, "a", requestIDOf(http.Header{"X-Request-Id": {"a"}, "X-Fc-Request-Id": {"b"}}))
}

// A server that sends everything back that it was sent, and names files, hosts
// and keys, must not get a word of it into what a host prints or logs.
func TestNothingOfARequestOrAnAnswerIsPrinted(t *testing.T) {
	echo := func(req *http.Request) (*http.Response, error) {
		text := fmt.Sprintf("%s %v provider_words", req.URL, req.Header)
		if req.Body != nil {
			body, err := io.ReadAll(req.Body)
			if err != nil {
				return nil, err
			}
			text += string(body)
		}
		data, err := json.Marshal(map[string]string{"code": text})
		if err != nil {
			return nil, err
		}
		status := 400
		switch req.Method {
		case "PUT":
			return nil, fmt.Errorf("dial %s: %s: %w", req.URL, text, syscall.ECONNREFUSED)
		case "GET":
			status = 200 // a success in the wrong envelope
		case "DELETE":
			status = 500
		}
		resp := httpmock.NewStringResponse(status, `{"status":"fail","message":"provider_words","data":`+string(data)+`}`)
		resp.Header.Set("X-Request-Id", text)
		return resp, nil
	}
	canaries := []string{testKey, "secret/path", "secret%2Fpath", "provider_words", "canary_arg", "/v1/", "X-Api-Key"}
	calls := append([]operation{{name: "args", call: func(ctx context.Context, c *Client) error {
		_, err := c.exec(ctx, testSandbox, "canary_arg", []string{"canary_arg"})
		return err
	}}}, operations...)
	for _, op := range calls {
		if op.name == "download" {
			continue // its body is the caller's
		}
		t.Run(op.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var out bytes.Buffer
				log := slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
				var events []Event
				c := testClient(answering(echo), func(cfg *clientConfig) {
					cfg.log = log
					cfg.hook = func(e Event) { events = append(events, e) }
				})
				err := op.call(t.Context(), c)
				require.Error(t, err)
				host := struct {
					Client *Client
					hidden *Client
					err    error
				}{c, c, err}
				log.Info("host", "err", err, "client", c, "host", host, "events", events)
				for e := err; e != nil; e = errors.Unwrap(e) {
					fmt.Fprintf(&out, "%v %+v %#v %s %q\n", e, e, e, e, e)
				}
				fmt.Fprintf(&out, "%v %+v %#v %s\n", host, host, host, c)
				fmt.Fprintf(&out, "%+v %#v %#v\n", *c, *c, events)
				for _, v := range []any{err, c, host, events} {
					text, err := json.Marshal(v)
					require.NoError(t, err)
					out.Write(text)
				}
				for _, canary := range canaries {
					assert.NotContains(t, out.String(), canary)
				}
				assert.NotEmpty(t, events)
			})
		})
	}
}

func TestCausesOfAConnectionErrorCanBeMatched(t *testing.T) {
	mock := answering(httpmock.NewErrorResponder(fmt.Errorf("https://host/path: %w", syscall.ECONNREFUSED)))
	_, err := testClient(mock).create(t.Context(), createRequest{})
	assert.Equal(t, "CreateOS connection failed.", err.Error())
	assert.ErrorIs(t, err, ErrConnection)
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
	var lost *ConnectionError
	require.ErrorAs(t, err, &lost)
	assert.Equal(t, "create sandbox", lost.Detail)
}

func TestAnAnswerIsASuccessEnvelopeOrAnError(t *testing.T) {
	bodies := map[string]string{
		"empty":       "",
		"page":        "<html>login</html>",
		"cut":         `{"status":"success","data":{"id":"` + testSandbox,
		"trailing":    success(goodSandbox) + "x",
		"fail":        `{"status":"fail","data":` + goodSandbox + `}`,
		"error":       `{"status":"error","data":` + goodSandbox + `}`,
		"no status":   `{"data":` + goodSandbox + `}`,
		"no data":     `{"status":"success"}`,
		"null data":   success("null"),
		"bare":        goodSandbox,
		"null":        "null",
		"list":        success("[]"),
		"text":        success(`"ok"`),
		"number id":   success(`{"id":5,"process_id":5,"status":"running","user_id":5}`),
		"foreign id":  success(`{"id":"sb-2","process_id":"proc_2","status":"running","user_id":"\u0000","egress":[]}`),
		"number exit": success(`{"result":{"exit_code":1.5}}`),
	}
	for _, op := range operations {
		if op.name == "download" {
			continue
		}
		for name, body := range bodies {
			for _, status := range []int{200, 202} {
				mock := answering(reply(status, body))
				err := op.call(t.Context(), testClient(mock))
				switch {
				case op.name == "upload" || op.name == "input":
					// Nothing of their answer is needed but that it is a success.
					if body == "" || strings.HasPrefix(body, `{"status":"success"`) && json.Valid([]byte(body)) {
						assert.NoError(t, err, op.name+name)
						continue
					}
				case op.name == "list" && name == "list":
					assert.NoError(t, err) // nobody has a sandbox
					continue
				case op.name == "processes" && name == "list":
					assert.NoError(t, err)
					continue
				case (op.name == "create" || op.name == "createProcess") && name == "foreign id":
					assert.NoError(t, err) // a new id is whatever the provider says
					continue
				}
				if assert.ErrorIs(t, err, ErrInvalidResponse, op.name+name) {
					var invalid *ResponseError
					require.ErrorAs(t, err, &invalid)
					assert.Equal(t, status, invalid.Status)
					assert.Equal(t, op.operation, invalid.Operation)
					assert.True(t, unclear(err))
					assert.Equal(t, 1, mock.GetTotalCallCount(), "an answer that is there is not asked for again")
				}
			}
		}
	}
}

func TestEmptySuccess(t *testing.T) {
	for _, status := range []int{204, 205} {
		for _, op := range operations {
			err := op.call(t.Context(), testClient(answering(reply(status, ""))))
			if op.name == "upload" || op.name == "input" {
				assert.NoError(t, err)
				continue
			}
			assert.ErrorIs(t, err, ErrInvalidResponse, op.name)
		}
	}
}

func TestBadIDsNeverBecomePaths(t *testing.T) {
	bad := []string{
		"", "..", ".", "../admin", "..%2f..", "%2e%2e", "sb 1", "sb1?x=", "sb1/../sb2", "sb1#", "sb\x00", "ß", strings.Repeat("a", 201),
		strings.Repeat("a", 10<<10),
	}
	for _, id := range bad {
		mock := answering(reply(200, success(goodSandbox)))
		c := testClient(mock)
		ctx := t.Context()
		check := func(err error) {
			t.Helper()
			var input *InputError
			require.ErrorAs(t, err, &input, "%q", id)
			assert.True(t, notSent(err))
			assert.False(t, unclear(err))
			if len(id) > 2 {
				assert.NotContains(t, err.Error(), id)
			}
		}
		_, err := c.get(ctx, id)
		check(err)
		_, err = c.destroy(ctx, id)
		check(err)
		_, _, err = c.pause(ctx, id)
		check(err)
		_, _, err = c.resume(ctx, id)
		check(err)
		_, err = c.exec(ctx, id, "true", nil)
		check(err)
		check(c.upload(ctx, id, "/a", strings.NewReader(""), 0))
		_, _, err = c.download(ctx, id, "/a")
		check(err)
		_, err = c.Egress(ctx, id)
		check(err)
		_, err = c.setEgress(ctx, id, []string{"x"})
		check(err)
		_, err = c.createProcess(ctx, id, "sh", nil, "")
		check(err)
		_, err = c.processes(ctx, id)
		check(err)
		for _, pair := range [][2]string{{id, testProcess}, {testSandbox, id}} {
			_, err = c.process(ctx, pair[0], pair[1])
			check(err)
			check(c.input(ctx, pair[0], pair[1], nil))
			_, err = c.wait(ctx, pair[0], pair[1], true, 0)
			check(err)
			_, err = c.terminate(ctx, pair[0], pair[1], 0)
			check(err)
		}
		assert.Zero(t, mock.GetTotalCallCount())

		text, err := json.Marshal(id)
		require.NoError(t, err)
		mock = answering(reply(201, success(`{"status":"running","id":`+string(text)+`,"process_id":`+string(text)+`}`)))
		c = testClient(mock)
		_, err = c.create(ctx, createRequest{})
		assert.ErrorIs(t, err, ErrInvalidResponse)
		assert.True(t, unclear(err), "a sandbox may exist")
		_, err = c.createProcess(ctx, testSandbox, "sh", nil, "")
		assert.ErrorIs(t, err, ErrInvalidResponse)
		assert.True(t, unclear(err), "a process may run")
		assert.Equal(t, 2, mock.GetTotalCallCount())
	}
}

func TestBadArgumentsSendNothing(t *testing.T) {
	mock := answering(reply(200, success("{}")))
	c := testClient(mock)
	ctx := t.Context()
	_, execErr := c.exec(ctx, testSandbox, "true", []string{"\xff"})
	_, processErr := c.createProcess(ctx, testSandbox, "\xff", nil, "")
	_, egressErr := c.setEgress(ctx, testSandbox, nil)
	_, _, downloadErr := c.download(ctx, testSandbox, "relative")
	_, keyErr := testClient(mock, func(cfg *clientConfig) { cfg.key = NewSecret("a\r\nX: b") }).list(ctx)
	for _, err := range []error{
		execErr, processErr, egressErr, downloadErr, keyErr,
		c.upload(ctx, testSandbox, "", strings.NewReader(""), 0),
		c.upload(ctx, testSandbox, "/a\x00", strings.NewReader(""), 0),
		c.input(ctx, testSandbox, testProcess, make([]byte, maxInput+1)),
	} {
		var input *InputError
		assert.ErrorAs(t, err, &input)
	}
	assert.Zero(t, mock.GetTotalCallCount())
}

func TestTraits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		assert.Equal(t, budget.Normal, traitsOf(t.Context()).class)
		mock := answering(reply(503, ""), reply(503, ""), reply(200, success(goodSandbox)))
		sends, answers := 0, 0
		ctx := withTraits(t.Context(), traits{class: budget.Cleanup, onSend: func() {
			assert.Equal(t, sends, mock.GetTotalCallCount(), "before it is sent")
			sends++
		}, onAnswer: func(err error) {
			answers++
			assert.Equal(t, sends, answers)
			assert.Equal(t, answers == 3, err == nil)
		}})
		c := testClient(mock, func(cfg *clientConfig) { cfg.budget = NewBudget(4) })
		began := time.Now()
		_, err := c.get(ctx, testSandbox)
		require.NoError(t, err)
		assert.Less(t, time.Since(began), 2*time.Second, "a third of four turns a minute is a long wait for all but cleanup")
		assert.Equal(t, []int{3, 3}, []int{sends, answers}, "each attempt")
	})
}

func TestEventsAndRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		var events []Event
		mock := answering(
			reply(429, "").HeaderSet(http.Header{"Retry-After": {"2"}}),
			reply(200, success(goodSandbox)).HeaderSet(http.Header{"X-Request-Id": {"req-7"}}).Delay(30*time.Millisecond))
		c := testClient(mock, func(cfg *clientConfig) {
			cfg.log = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
			cfg.hook = func(e Event) { events = append(events, e) }
		})
		_, err := c.get(t.Context(), testSandbox)
		require.NoError(t, err)
		require.Len(t, events, 2)
		assert.ErrorIs(t, events[0].Err, ErrRateLimited)
		assert.Equal(t, 429, events[0].Status)
		events[0].Err = nil
		assert.Equal(t, Event{
			Kind: EventRequest, Operation: OpLifecycle, Detail: "get sandbox", SandboxID: testSandbox, Status: 200, Attempt: 2,
			Took: 30 * time.Millisecond, Time: time.Now(),
		}, events[1])
		records := strings.Split(strings.TrimSpace(out.String()), "\n")
		require.Len(t, records, 2)
		assert.Contains(t, records[0], `level=WARN msg="createos: throttled" operation="sandbox lifecycle" detail="get sandbox" status=429 attempt=1`)
		assert.Contains(t, records[1], `level=DEBUG msg="createos: request" operation="sandbox lifecycle" detail="get sandbox" status=200 attempt=2 took=30ms request_id=req-7`)
	})
}

func TestBudgets(t *testing.T) {
	assert.Same(t, originBudget("https://a.test"), originBudget("https://a.test"))
	assert.NotSame(t, originBudget("https://a.test"), originBudget("https://b.test"))
	assert.Same(t, originBudget("https://a.test"), newClient(clientConfig{origin: "https://a.test"}).budget)
	assert.Equal(t, BudgetStats{Limit: 280, Reserve: 30}, NewBudget(0).Stats())

	b := NewBudget(100)
	c := testClient(answering(reply(200, success(goodSandbox))), func(cfg *clientConfig) { cfg.budget = b })
	_, err := c.get(t.Context(), testSandbox)
	require.NoError(t, err)
	assert.Equal(t, 1, b.Stats().Sent)
}

func FuzzErrorBody(f *testing.F) {
	for _, body := range []string{
		"", "null", "bad gateway", `{"status":"fail","data":"sandbox not found"}`, `{"status":"fail","data":null}`,
		`{"status":"error","message":"internal error","code":500}`,
		`{"status":"fail","data":{"code":"output_offset_expired","oldest_available_seq":900}}`,
		`{"status":"fail","data":{"code":"output_offset_expired","oldest_available_seq":-1}}`,
		`{"status":"success","data":{}}`, `{"status":"fail","data":{"code":["x"]}}`, `[{"status":"fail"}]`,
	} {
		f.Add(410, body)
	}
	f.Fuzz(func(t *testing.T, status int, body string) {
		if status < 300 || status > 599 {
			return
		}
		mock := answering(reply(status, body))
		_, err := testClient(mock).exec(t.Context(), testSandbox, "true", nil)
		if status == 429 {
			return // is repeated
		}
		var refused *RequestError
		require.ErrorAs(t, err, &refused)
		assert.Equal(t, status, refused.Status)
		assert.GreaterOrEqual(t, refused.oldest, int64(0))
		assert.Contains(t, []string{"", codeOffsetExpired}, refused.code)
		if refused.envelope {
			assert.True(t, json.Valid([]byte(body)))
		}
	})
}
