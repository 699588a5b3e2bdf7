package createos

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	maxJSON     = 8 << 20  // bytes of the JSON of one answer
	maxListJSON = 32 << 20 // bytes of one page of a list
	// bodyTimeout bounds the reading of an answer after its headers.
	bodyTimeout = time.Minute
	// An error body is of little use: it is read up to maxErrorBody bytes and
	// for errorBodyTimeout, and what it says beyond that is not worth a wait.
	maxErrorBody     = 64 << 10
	errorBodyTimeout = 2 * time.Second
	maxRequestID     = 200
)

// codeOffsetExpired is the code of a 410, and of an error within a stream: the
// journal has moved on beyond the offset that was asked for.
const codeOffsetExpired = "output_offset_expired"

// An answer is a 2xx.
type answer struct {
	request   *request
	status    int
	header    http.Header
	requestID string
	data      json.RawMessage // of the success envelope; nil if the body was empty
	flow      *flow           // of a streamed body
}

// clock is the provider's, as the answer tells it: in whole seconds, so that one
// which agrees with the clock here to that is taken to be the same. Zero if the
// answer does not tell.
func (a *answer) clock() time.Time {
	at, err := http.ParseTime(a.header.Get("Date"))
	if err != nil {
		return time.Time{}
	}
	if now := time.Now(); now.Sub(at).Abs() < 2*time.Second {
		return now
	}
	return at
}

// envelope is the JSend form that every JSON answer has.
type envelope struct {
	Status string          `json:"status"`
	Data   json.RawMessage `json:"data"`
}

// receive takes the answer of an attempt: a success with its body, or the
// error that it stands for. Unless the answer streams, the flight is over.
func (r *request) receive(ctx context.Context, f *flight, resp *http.Response) (*answer, error) {
	a := &answer{request: r, status: resp.StatusCode, header: resp.Header, requestID: requestIDOf(resp.Header)}
	success := a.status >= 200 && a.status < 300
	if success && r.stream && a.streams() {
		a.flow = newFlow(ctx, f, r, resp)
		return a, nil
	}
	defer func() {
		f.end() // before Close, which might wait for a body without end
		_ = resp.Body.Close()
	}()
	switch {
	case success && !r.stream && plain(resp.Header):
		return a, a.read(ctx, f, resp)
	case a.status >= 300 && a.status < 600:
		return nil, a.refusal(f, resp.Body)
	}
	return nil, a.invalid()
}

// streams says whether the body is the whole of what was asked for.
func (a *answer) streams() bool {
	switch a.status {
	case http.StatusNoContent, http.StatusResetContent, http.StatusPartialContent:
		return false
	}
	return plain(a.header)
}

// plain says that the body is not compressed; we asked for that.
func plain(h http.Header) bool {
	encoding := h.Get("Content-Encoding")
	return encoding == "" || strings.EqualFold(encoding, "identity")
}

// read reads the envelope of a success.
func (a *answer) read(ctx context.Context, f *flight, resp *http.Response) error {
	f.timer.Reset(bodyTimeout)
	limit := a.request.limit
	if limit == 0 {
		limit = maxJSON
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	n := int64(len(body))
	switch {
	case err == nil && n <= limit && n < resp.ContentLength:
		err = io.ErrUnexpectedEOF // a transport that does not count by itself
	case err == nil && n > limit:
		return a.invalid()
	}
	if err != nil {
		return a.request.connectionError(ctx, err, true)
	}
	if n == 0 {
		return nil
	}
	var e envelope
	if json.Unmarshal(body, &e) != nil || e.Status != "success" {
		return a.invalid()
	}
	a.data = e.Data
	return nil
}

// decode reads the data of a success into v.
func (a *answer) decode(v any) error {
	if a.data == nil || json.Unmarshal(a.data, v) != nil {
		return a.invalid()
	}
	return nil
}

// invalid is the error for an answer that is not what the API promises.
func (a *answer) invalid() error {
	return &ResponseError{
		Operation: a.request.operation, Detail: a.request.detail, Status: a.status, RequestID: a.requestID,
	}
}

// refusal makes an error of 3xx to 5xx. Of the body it keeps whether it is an
// envelope, and values that are ours to choose from.
func (a *answer) refusal(f *flight, body io.Reader) error {
	e := &RequestError{
		Status: a.status, Operation: a.request.operation, Detail: a.request.detail, RequestID: a.requestID,
		RetryAfter: retryAfter(a.header),
	}
	f.timer.Reset(errorBodyTimeout)
	text, err := io.ReadAll(io.LimitReader(body, maxErrorBody))
	var env envelope
	if err != nil || json.Unmarshal(text, &env) != nil || env.Status != "fail" && env.Status != "error" {
		return e
	}
	e.envelope = true
	var known struct {
		Code   any   `json:"code"`
		Oldest int64 `json:"oldest_available_seq"`
	}
	// Data may as well be a string, or null.
	if json.Unmarshal(env.Data, &known) == nil && known.Code == codeOffsetExpired {
		e.code, e.oldest = codeOffsetExpired, max(known.Oldest, 0)
	}
	return e
}

// connectionError makes an error of what the transport, a body or the budget
// came back with.
func (r *request) connectionError(ctx context.Context, err error, sent bool) *ConnectionError {
	cause := scrub(err)
	switch {
	case ctx.Err() != nil:
		cause = ended(ctx)
	case errors.Is(cause, context.Canceled):
		// One of our own bounds ended the attempt: nobody cancelled.
		cause = context.DeadlineExceeded
	}
	return &ConnectionError{Operation: r.operation, Detail: r.detail, sent: sent, cause: cause}
}

// interrupted is the error of a request whose context ended after an attempt
// had failed: the failure counts, and the end can be matched too.
func interrupted(failure, end error) error { return &interruptedError{failure, end} }

type interruptedError struct{ failure, end error }

func (e *interruptedError) Error() string   { return e.failure.Error() }
func (e *interruptedError) Unwrap() []error { return []error{e.failure, e.end} }

// statusOf returns status and request id of the answer that err stands for, 0
// if there was none.
func statusOf(err error) (int, string) {
	var refused *RequestError
	if errors.As(err, &refused) {
		return refused.Status, refused.RequestID
	}
	var invalid *ResponseError
	if errors.As(err, &invalid) {
		return invalid.Status, invalid.RequestID
	}
	return 0, ""
}

// retryAfterOf returns what the provider asked for with the answer that err
// stands for.
func retryAfterOf(err error) time.Duration {
	var refused *RequestError
	if errors.As(err, &refused) {
		return refused.RetryAfter
	}
	return 0
}

// retryAfter reads the header in both of its forms. A date is compared with the
// Date of the answer, if there is one: the clock here may be wrong.
func retryAfter(h http.Header) time.Duration {
	text := strings.TrimSpace(h.Get("Retry-After"))
	if text == "" {
		return 0
	}
	if d := seconds(text); d > 0 {
		return d
	}
	at, err := http.ParseTime(text)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return max(at.Sub(now), 0)
}

// seconds reads a number of seconds, at most a day of them; 0 if it is none.
func seconds(text string) time.Duration {
	s, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || !(s > 0) { // also NaN
		return 0
	}
	return time.Duration(min(s, 24*60*60) * float64(time.Second))
}

// requestIDOf returns the id by which the provider finds a request, unless it
// holds something else than an id.
func requestIDOf(h http.Header) string {
	id := h.Get("X-Request-ID")
	if id == "" {
		id = h.Get("X-Fc-Request-Id")
	}
	strange := strings.ContainsFunc(id, func(c rune) bool {
		return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.ContainsRune("._:-", c))
	})
	if strange || len(id) > maxRequestID {
		return ""
	}
	return id
}

// notSent says that it is known that no byte of the request left.
func notSent(err error) bool {
	var input *InputError
	if errors.As(err, &input) {
		return true
	}
	var lost *ConnectionError
	return errors.As(err, &lost) && !lost.sent
}

// unclear says that the request may have had an effect, or may have had none:
// there was no reply, or it was cut, is not readable, or comes from a place that
// cannot know. A redirect is such a place: it was not followed.
func unclear(err error) bool {
	if err == nil || notSent(err) {
		return false
	}
	var refused *RequestError
	if errors.As(err, &refused) {
		return refused.Status < 400 || refused.Status == http.StatusRequestTimeout || refused.Status >= 500
	}
	return true
}

// passing says that a failure may go away by itself.
func passing(err error) bool {
	var refused *RequestError
	if errors.As(err, &refused) && refused.Status == http.StatusRequestTimeout {
		return true
	}
	for _, class := range []error{ErrConnection, ErrInvalidResponse, ErrRateLimited, ErrUnavailable} {
		if errors.Is(err, class) {
			return true
		}
	}
	return false
}
