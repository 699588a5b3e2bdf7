package createos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/createos-lease/createos/internal/budget"
)

// version is part of the User-Agent.
const version = "0.1.0"

const (
	// maxAttempts bounds how often one request is sent.
	maxAttempts = 4
	// The pause before an attempt doubles from backOffFirst to backOffMax, and
	// is drawn from its upper half, so that clients that failed together do
	// not come back together.
	backOffFirst = 250 * time.Millisecond
	backOffMax   = 4 * time.Second
	// maxRetryAfter is how long a Retry-After is obeyed.
	maxRetryAfter = time.Minute

	defaultRequestTimeout = time.Minute
	defaultReplyGrace     = 30 * time.Second
)

// A Client reads from the provider on behalf of one environment: with its key,
// at its origin. A host gets one from [Driver.Client]; it shares budget,
// transport, logger and event hook with the driver.
//
// GET, PUT and DELETE are sent up to four times: again after a connection
// failure, 408, 429, 500, 502, 503 and 504, after 250 ms doubling to 4 s with
// jitter, or after what Retry-After asks, at most 60 s. POST is repeated only
// after 429, because only then it is known to have had no effect. Each attempt
// has 60 s to the headers of its answer and 60 s more for its body. Redirects
// are never followed, cookies never kept.
//
// When ctx ends, the error of a call matches its end, and ErrConnection as well, like
// that of every request without an answer: ask for the end of the context first.
//
// A Client is safe for concurrent use. It keeps no state of its own, works after
// Shutdown too, and needs no closing. It prints as its type only.
type Client struct {
	origin         string
	key            Secret
	transport      http.RoundTripper
	budget         *Budget
	log            *slog.Logger
	hook           func(Event)
	replyGrace     time.Duration
	requestTimeout time.Duration
}

// String names the type only: a client knows a key.
func (c *Client) String() string { return "createos.Client" }

// GoString is as String.
func (c *Client) GoString() string { return c.String() }

// LogValue is as String.
func (c *Client) LogValue() slog.Value { return slog.StringValue(c.String()) }

// clientConfig is what a Client is made of.
type clientConfig struct {
	origin    string // normalised: scheme and host, no path
	key       Secret
	transport http.RoundTripper // nil: the one that this process shares
	budget    *Budget           // nil: the one that this process shares for the origin
	log       *slog.Logger      // nil discards
	hook      func(Event)       // nil: nobody listens
	// replyGrace is how long the reply to a POST, or to an upload, that was sent is awaited
	// after the caller's context ended. 0 means defaultReplyGrace.
	replyGrace time.Duration
	// requestTimeout bounds the wait for the headers of one attempt. 0 means
	// defaultRequestTimeout.
	requestTimeout time.Duration
}

func newClient(cfg clientConfig) *Client {
	c := &Client{
		origin: cfg.origin, key: cfg.key, transport: cfg.transport, budget: cfg.budget, log: cfg.log, hook: cfg.hook,
		replyGrace: cfg.replyGrace, requestTimeout: cfg.requestTimeout,
	}
	if c.transport == nil {
		c.transport = sharedTransport()
	}
	if c.budget == nil {
		c.budget = originBudget(c.origin)
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.replyGrace == 0 {
		c.replyGrace = defaultReplyGrace
	}
	if c.requestTimeout == 0 {
		c.requestTimeout = defaultRequestTimeout
	}
	return c
}

// sharedTransport is http.DefaultTransport with room for more idle connections
// to one host: two, the default, make a driver with a hundred leases open a
// connection for nearly every request.
var sharedTransport = sync.OnceValue(func() http.RoundTripper {
	base, ok := http.DefaultTransport.(*http.Transport)
	if !ok { // the program has put its own in place: for all requests, so for ours
		return http.DefaultTransport
	}
	t := base.Clone()
	t.MaxIdleConnsPerHost = 64
	return t
})

// traits say how the requests of a context are to be treated.
type traits struct {
	class budget.Class
	// onSend, if not nil, is called right before each attempt of a request, when its
	// turn was granted, and onAnswer with what became of it.
	onSend   func()
	onAnswer func(error)
}

type traitsKey struct{}

// withTraits makes t the traits of all requests under the context.
func withTraits(ctx context.Context, t traits) context.Context {
	return context.WithValue(ctx, traitsKey{}, t)
}

// traitsOf returns the traits of a context; the zero traits are those of an
// ordinary request.
func traitsOf(ctx context.Context) traits {
	t, _ := ctx.Value(traitsKey{}).(traits)
	return t
}

// A request is one call of the API before it becomes attempts.
type request struct {
	method    string
	path      string     // from /v1 on; ids in it have been validated
	query     url.Values // nil for none
	operation Operation
	detail    string
	sandbox   string // for events; empty if the request names none

	body   any      // sent as JSON, unless nil
	upload *payload // sent as it is, unless nil; excludes body

	// bound is the time to the headers. 0 means the client's own, and
	// noBound none at all.
	bound time.Duration
	limit int64 // of the JSON of a success; 0 means maxJSON
	// stream hands out the body of a success instead of reading it.
	stream bool
	// ends408 says that 408 is an answer and not a failure.
	ends408 bool

	// Set by prepare.
	url     *url.URL
	encoded []byte
}

const noBound time.Duration = -1

// lingers says whether the reply is awaited beyond the caller's context: a
// change whose reply is lost is worse than a caller who waits a little. So is a
// file that turns up after it was cleaned away; but only once it was sent whole
// does an upload linger.
func (r *request) lingers() bool { return r.method == http.MethodPost || r.upload != nil }

// do sends a request until it has an answer or no attempt is left. What happens
// to a request stands here, in its order: it is built; each attempt waits for
// its turn at the budget, is sent, and its answer read and classified; what may
// be repeated is repeated after a pause.
//
// The error is a *[RequestError], *[ConnectionError], *[ResponseError] or
// *[InputError]; when ctx ended between attempts, the error of the last attempt
// that also matches the end of ctx.
func (c *Client) do(ctx context.Context, r *request) (*answer, error) {
	if err := c.prepare(r); err != nil {
		return nil, err
	}
	t := traitsOf(ctx)
	var last error
	left := false // an attempt before may have reached the provider
	for attempt := 1; ; attempt++ {
		queued, err := c.turn(ctx, t.class)
		if err != nil {
			if last != nil {
				return nil, interrupted(last, ended(ctx))
			}
			return nil, r.connectionError(ctx, err, false)
		}
		if t.onSend != nil {
			t.onSend()
		}
		a, err := c.send(ctx, r, attempt, queued)
		if t.onAnswer != nil {
			t.onAnswer(err)
		}
		if err == nil {
			return a, nil
		}
		// Only of the request as a whole can it be said that nothing left.
		if lost := (*ConnectionError)(nil); left && errors.As(err, &lost) {
			lost.sent = true
		}
		left = left || !notSent(err) && !errors.Is(err, ErrRateLimited)
		last = err
		if attempt == maxAttempts || !r.repeatable(err) {
			return nil, err
		}
		if err := backOff(ctx, attempt, retryAfterOf(err)); err != nil {
			return nil, interrupted(last, err)
		}
	}
}

// prepare makes URL and body, once for all attempts.
func (c *Client) prepare(r *request) error {
	if strings.ContainsFunc(c.key.Reveal(), func(c rune) bool { return c < ' ' || c == 0x7f }) {
		// The transport would refuse it too, but not say that nothing was sent.
		return &InputError{"Config.APIKey", "holds a control character"}
	}
	u, err := url.Parse(c.origin + r.path)
	if err != nil {
		return &InputError{"Config.APIURL", "is no origin"}
	}
	// Some servers read a plus sign in a query as itself.
	u.RawQuery = strings.ReplaceAll(r.query.Encode(), "+", "%20")
	r.url = u
	if r.body == nil {
		return nil
	}
	if r.encoded, err = json.Marshal(r.body); err != nil {
		return &InputError{r.detail, "cannot be written as JSON"}
	}
	return nil
}

// turn waits for the budget and says how long.
func (c *Client) turn(ctx context.Context, class budget.Class) (time.Duration, error) {
	began := time.Now()
	err := c.budget.b.Wait(ctx, class)
	return time.Since(began), err
}

// send is one attempt.
func (c *Client) send(ctx context.Context, r *request, attempt int, queued time.Duration) (*answer, error) {
	began := time.Now()
	a, err := c.exchange(ctx, r)
	e := Event{
		Kind: EventRequest, Operation: r.operation, Detail: r.detail, SandboxID: r.sandbox, Attempt: attempt,
		Queued: queued, Took: time.Since(began), Err: err, Time: time.Now(),
	}
	status, id := statusOf(err)
	if a != nil {
		status, id = a.status, a.requestID
	}
	e.Status = status
	if e.Status == http.StatusTooManyRequests {
		c.budget.b.Pause(retryAfterOf(err))
	}
	c.record(ctx, e, id)
	if c.hook != nil {
		c.hook(e)
	}
	return a, err
}

// exchange sends the request once and reads its answer.
func (c *Client) exchange(ctx context.Context, r *request) (*answer, error) {
	f := c.launch(ctx, r)
	req, err := c.build(f, r)
	if err != nil {
		f.end()
		return nil, err
	}
	// Not an http.Client: that would follow redirects, and knows cookies.
	resp, err := c.transport.RoundTrip(req)
	if err == nil && resp != nil && resp.Body == nil {
		resp.Body = http.NoBody // what a transport of tests may forget
	}
	switch unread := f.stopUpload(); {
	case err == nil && resp == nil:
		err = r.connectionError(ctx, errors.New("transport gave neither answer nor error"), true)
	case unread != nil: // the provider did not get the file, whatever it says
		if err == nil {
			_ = resp.Body.Close()
		}
		err = unread
	case err != nil:
		err = r.connectionError(ctx, err, f.sent(err))
	default:
		return r.receive(ctx, f, resp)
	}
	f.end()
	return nil, err
}

// build makes the request of one attempt.
func (c *Client) build(f *flight, r *request) (*http.Request, error) {
	req := (&http.Request{
		Method: r.method, URL: r.url, Host: r.url.Host,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{
			"Accept": {"application/json"},
			// No compression: a length that was announced can then be checked,
			// and a line of a stream comes when it was written.
			"Accept-Encoding": {"identity"},
			"User-Agent":      {"createos-go/" + version},
			"X-Api-Key":       {c.key.Reveal()},
		},
	}).WithContext(f.ctx)
	if r.stream {
		req.Header.Set("Accept", "*/*")
	}
	// GetBody stays nil, and no header calls a POST idempotent: either would
	// let net/http send it a second time by itself.
	switch {
	case r.upload != nil:
		body, err := f.openUpload(r.upload)
		if err != nil {
			return nil, err
		}
		req.Body, req.ContentLength = body, r.upload.size
		req.Header.Set("Content-Type", "application/octet-stream")
	case r.encoded != nil:
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(r.encoded)), int64(len(r.encoded))
		req.Header.Set("Content-Type", "application/json")
	}
	return req, nil
}

// repeatable says whether a request may be sent again after err.
func (r *request) repeatable(err error) bool {
	if errors.Is(err, ErrRateLimited) {
		return true
	}
	if r.method == http.MethodPost {
		return false
	}
	if status, _ := statusOf(err); status == http.StatusRequestTimeout {
		return !r.ends408
	}
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrConnection)
}

// backOff waits before the attempt after the given one, at least for what the
// provider asked. It returns the end of ctx, if that comes first.
func backOff(ctx context.Context, attempt int, asked time.Duration) error {
	if ctx.Err() != nil {
		return ended(ctx)
	}
	pause := min(backOffFirst<<(attempt-1), backOffMax)
	pause -= rand.N(pause / 2)
	timer := time.NewTimer(max(pause, min(asked, maxRetryAfter)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ended(ctx)
	}
}

// record writes the log record of an attempt. URL, headers and bodies are not
// in it, nor is any text of the provider.
func (c *Client) record(ctx context.Context, e Event, requestID string) {
	level, text := slog.LevelDebug, "createos: request"
	if e.Status == http.StatusTooManyRequests {
		level, text = slog.LevelWarn, "createos: throttled"
	}
	if !c.log.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("operation", string(e.Operation)),
		slog.String("detail", e.Detail),
		slog.Int("status", e.Status),
		slog.Int("attempt", e.Attempt),
		slog.Duration("took", e.Took),
	}
	if requestID != "" {
		attrs = append(attrs, slog.String("request_id", requestID))
	}
	c.log.LogAttrs(ctx, level, text, attrs...)
}
