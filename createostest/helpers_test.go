package createostest

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain fails the run when goroutines outlive the tests: every server of
// the tests is closed by then.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if left := leftGoroutines(); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines left behind:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

// leftGoroutines returns the stacks of goroutines that belong to this package
// or to net/http, after giving those that are about to end the time to.
func leftGoroutines() string {
	buf := make([]byte, 1<<20)
	for deadline := time.Now().Add(5 * time.Second); ; runtime.Gosched() {
		var left []string
		for _, stack := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(stack, "leftGoroutines") || strings.Contains(stack, "testing.(*M).Run") {
				continue
			}
			if strings.Contains(stack, "createostest") || strings.Contains(stack, "net/http") {
				left = append(left, stack)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return strings.Join(left, "\n\n")
		}
	}
}

// client speaks plain HTTP to a server.
type client struct {
	t   testing.TB
	srv *Server
	key string
}

func newClient(t testing.TB, opts Options) *client {
	t.Helper()
	if opts.Commands == nil {
		opts.InMemory = true
	}
	srv := NewServer(t, opts)
	return &client{t, srv, srv.APIKey()}
}

// answer is a JSend answer.
type jsend struct {
	code    int
	header  http.Header
	raw     string
	Status  string          `json:"status"`
	Data    json.RawMessage `json:"data"`
	Message string          `json:"message"`
	Code    int             `json:"code"`
}

// object returns the payload as an object.
func (a jsend) object(t testing.TB) map[string]any {
	t.Helper()
	var m map[string]any
	require.NoError(t, json.Unmarshal(a.Data, &m), "payload %s", a.raw)
	return m
}

func (c *client) request(method, path string, body any) *http.Request {
	c.t.Helper()
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case []byte:
		reader = bytes.NewReader(b)
	case string:
		reader = strings.NewReader(b)
	default:
		data, err := json.Marshal(b)
		require.NoError(c.t, err)
		reader = bytes.NewReader(data)
	}
	r, err := http.NewRequest(method, c.srv.URL+path, reader)
	require.NoError(c.t, err)
	if c.key != "" {
		r.Header.Set("X-Api-Key", c.key)
	}
	r.Header.Set("Content-Type", "application/json")
	return r
}

// try sends a request that may get no answer.
func (c *client) try(method, path string, body any) (jsend, error) {
	c.t.Helper()
	resp, err := c.srv.Transport().RoundTrip(c.request(method, path, body))
	if err != nil {
		return jsend{}, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	a := jsend{code: resp.StatusCode, header: resp.Header, raw: string(data)}
	if err == nil && strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
		if err := json.Unmarshal(data, &a); err != nil {
			a.Status = "not JSON"
		}
	}
	return a, err
}

func (c *client) do(method, path string, body any) jsend {
	c.t.Helper()
	a, err := c.try(method, path, body)
	require.NoError(c.t, err)
	return a
}

// want sends a request and checks the status.
func (c *client) want(status int, method, path string, body any) jsend {
	c.t.Helper()
	a := c.do(method, path, body)
	require.Equal(c.t, status, a.code, "%s %s: %s", method, path, a.raw)
	return a
}

// box creates a sandbox and returns its path.
func (c *client) box(extra ...map[string]any) string {
	c.t.Helper()
	body := map[string]any{"shape": "s-1vcpu-256mb"}
	for _, e := range extra {
		for k, v := range e {
			body[k] = v
		}
	}
	a := c.want(201, "POST", "/v1/sandboxes", body)
	return "/v1/sandboxes/" + a.object(c.t)["id"].(string)
}

func idOf(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

func (c *client) state(box string) string {
	c.t.Helper()
	return c.want(200, "GET", box, nil).object(c.t)["status"].(string)
}

// run starts a managed process and returns its path.
func (c *client) run(box, cmd string, args ...string) string {
	c.t.Helper()
	a := c.want(201, "POST", box+"/processes", map[string]any{"cmd": cmd, "args": args})
	return box + "/processes/" + a.object(c.t)["process_id"].(string)
}

func (c *client) input(proc, text string) jsend {
	return c.do("POST", proc+"/input", map[string]any{"data_base64": base64.StdEncoding.EncodeToString([]byte(text))})
}

// feed is a connect stream in reading.
type feed struct {
	t     testing.TB
	resp  *http.Response
	lines *bufio.Reader
}

func (c *client) connect(path string) *feed {
	c.t.Helper()
	resp, err := c.srv.Transport().RoundTrip(c.request("GET", path, nil))
	require.NoError(c.t, err)
	require.Equal(c.t, 200, resp.StatusCode)
	return &feed{c.t, resp, bufio.NewReaderSize(resp.Body, 1<<20)}
}

func (f *feed) close() { f.resp.Body.Close() }

// next returns the next event; nil at the end of the stream.
func (f *feed) next() (map[string]any, error) {
	line, err := f.lines.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	var event map[string]any
	return event, json.Unmarshal(line, &event)
}

// rest reads to the end: the output, and the last event that was none of it.
func (f *feed) rest() (output string, last map[string]any, err error) {
	defer f.close()
	var b strings.Builder
	for {
		event, err := f.next()
		if err == io.EOF {
			return b.String(), last, nil
		}
		if err != nil {
			return b.String(), last, err
		}
		last = event
		if event["type"] == "data" {
			b.WriteString(dataOf(f.t, event))
		}
	}
}

func dataOf(t testing.TB, event map[string]any) string {
	t.Helper()
	data, err := base64.StdEncoding.DecodeString(event["data_base64"].(string))
	require.NoError(t, err)
	return string(data)
}

func filePathQuery(box, path string) string { return box + "/files?path=" + url.QueryEscape(path) }
