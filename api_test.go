package createos

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jarcoal/httpmock"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// recording answers every request with a success and keeps what was sent.
func recording(data string) (*httpmock.MockTransport, *[]sentRequest) {
	var all []sentRequest
	mock := httpmock.NewMockTransport()
	mock.RegisterNoResponder(func(req *http.Request) (*http.Response, error) {
		s := sentRequest{line: req.Method + " " + req.URL.String(), header: req.Header, replayable: req.GetBody != nil, length: req.ContentLength}
		if req.Body != nil {
			body, err := io.ReadAll(req.Body)
			if err != nil {
				return nil, err
			}
			s.body = string(body)
		}
		all = append(all, s)
		return httpmock.NewStringResponse(200, success(data)), nil
	})
	return mock, &all
}

type sentRequest struct {
	line, body string
	header     http.Header
	replayable bool
	length     int64
}

func TestRequestsOnTheWire(t *testing.T) {
	const sb, proc = testSandbox, testProcess
	base := testOrigin + "/v1/sandboxes"
	for name, row := range map[string]struct {
		call func(context.Context, *Client)
		line string
		body string
	}{
		"create": {
			func(ctx context.Context, c *Client) {
				_, _ = c.create(ctx, createRequest{Name: "l-1", Shape: "s-1vcpu-1gb"})
			},
			"POST " + base, `{"name":"l-1","shape":"s-1vcpu-1gb","ingress_enabled":false}`,
		},
		"create with everything": {
			func(ctx context.Context, c *Client) {
				_, _ = c.create(ctx, createRequest{
					Name: "l-1", Shape: "s", Rootfs: "r", Region: "eu", Egress: []string{"192.0.2.1/32"}, AutoPauseSeconds: 60,
					Envs: map[string]string{"K": "1"},
				})
			},
			"POST " + base,
			`{"name":"l-1","shape":"s","rootfs":"r","region":"eu","egress":["192.0.2.1/32"],"auto_pause_after_seconds":60,"envs":{"K":"1"},"ingress_enabled":false}`,
		},
		"get":     {func(ctx context.Context, c *Client) { _, _ = c.get(ctx, sb) }, "GET " + base + "/" + sb, ""},
		"list":    {func(ctx context.Context, c *Client) { _, _ = c.list(ctx) }, "GET " + base + "?limit=500&offset=0", ""},
		"destroy": {func(ctx context.Context, c *Client) { _, _ = c.destroy(ctx, sb) }, "DELETE " + base + "/" + sb, ""},
		"pause":   {func(ctx context.Context, c *Client) { _, _, _ = c.pause(ctx, sb) }, "POST " + base + "/" + sb + "/pause", ""},
		"resume":  {func(ctx context.Context, c *Client) { _, _, _ = c.resume(ctx, sb) }, "POST " + base + "/" + sb + "/resume", ""},
		"account": {func(ctx context.Context, c *Client) { _, _ = c.Account(ctx) }, "GET " + testOrigin + "/v1/whoami", ""},
		"egress":  {func(ctx context.Context, c *Client) { _, _ = c.Egress(ctx, sb) }, "GET " + base + "/" + sb + "/egress", ""},
		"set egress": {
			func(ctx context.Context, c *Client) { _, _ = c.setEgress(ctx, sb, []string{"a"}) },
			"PUT " + base + "/" + sb + "/egress", `{"egress":["a"]}`,
		},
		"exec": {
			func(ctx context.Context, c *Client) { _, _ = c.exec(ctx, sb, "/bin/bash", []string{"-lc", "<&>"}) },
			"POST " + base + "/" + sb + "/exec", `{"cmd":"/bin/bash","args":["-lc","\u003c\u0026\u003e"]}`,
		},
		"upload": {
			func(ctx context.Context, c *Client) {
				_ = c.upload(ctx, sb, "/w s/a+b&c=%ß", strings.NewReader("data"), 4)
			},
			"PUT " + base + "/" + sb + "/files?path=%2Fw%20s%2Fa%2Bb%26c%3D%25%C3%9F", "data",
		},
		"upload of nothing": {
			func(ctx context.Context, c *Client) { _ = c.upload(ctx, sb, "/a", strings.NewReader(""), 0) },
			"PUT " + base + "/" + sb + "/files?path=%2Fa", "",
		},
		"download": {
			func(ctx context.Context, c *Client) { _, _, _ = c.download(ctx, sb, "/a") },
			"GET " + base + "/" + sb + "/files?path=%2Fa", "",
		},
		"create process": {
			func(ctx context.Context, c *Client) { _, _ = c.createProcess(ctx, sb, "sh", []string{"-c", ""}, "/w") },
			"POST " + base + "/" + sb + "/processes", `{"cmd":"sh","args":["-c",""],"cwd":"/w"}`,
		},
		"processes": {func(ctx context.Context, c *Client) { _, _ = c.processes(ctx, sb) }, "GET " + base + "/" + sb + "/processes", ""},
		"process": {
			func(ctx context.Context, c *Client) { _, _ = c.process(ctx, sb, proc) },
			"GET " + base + "/" + sb + "/processes/" + proc, "",
		},
		"input": {
			func(ctx context.Context, c *Client) { _ = c.input(ctx, sb, proc, []byte("go\n")) },
			"POST " + base + "/" + sb + "/processes/" + proc + "/input", `{"data_base64":"Z28K"}`,
		},
		"wait for the tree": {
			func(ctx context.Context, c *Client) { _, _ = c.wait(ctx, sb, proc, true, 30*time.Second) },
			"GET " + base + "/" + sb + "/processes/" + proc + "/wait?scope=tree&timeout_ms=30000", "",
		},
		"wait for the leader": {
			func(ctx context.Context, c *Client) { _, _ = c.wait(ctx, sb, proc, false, time.Microsecond) },
			"GET " + base + "/" + sb + "/processes/" + proc + "/wait?scope=leader&timeout_ms=1", "",
		},
		"terminate": {
			func(ctx context.Context, c *Client) { _, _ = c.terminate(ctx, sb, proc, 2*time.Second) },
			"DELETE " + base + "/" + sb + "/processes/" + proc + "?grace_ms=2000", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			mock, all := recording("{}")
			row.call(t.Context(), testClient(mock))
			require.Len(t, *all, 1)
			got := (*all)[0]
			assert.Equal(t, row.line, got.line)
			assert.Equal(t, row.body, got.body)
			assert.Equal(t, int64(len(row.body)), got.length)
			assert.False(t, got.replayable, "net/http must not be able to send it again")
			want := []string{"Accept", "Accept-Encoding", "User-Agent", "X-Api-Key"}
			if row.body != "" || strings.HasPrefix(row.line, "PUT") {
				want = append(want, "Content-Type")
			}
			var names []string
			for name := range got.header {
				names = append(names, name)
			}
			assert.ElementsMatch(t, want, names, "another credential would shadow the key")
			assert.Equal(t, testKey, got.header.Get("X-Api-Key"))
			assert.Equal(t, "createos-go/"+version, got.header.Get("User-Agent"))
		})
	}
}

func TestSandboxView(t *testing.T) {
	const full = `{"id":"sb-1","status":"running","name":"l-1","ip":"10.42.0.17","vcpu":1,"shape":"s-1vcpu-1gb","rootfs":"devbox:1",
		"region":"eu","created_at":"2026-10-02T09:00:00Z","running_at":"2026-10-02T09:00:01.5Z","spawn_ms":84.6,"destroyed_at":"soon",
		"ingress_enabled":true,"egress":["240.0.0.0/4"],"envs":["A","B"],"auto_pause_after_seconds":900,"paused_at":7}`
	s, err := testClient(answering(reply(200, success(full)))).Sandbox(t.Context(), "sb-1")
	require.NoError(t, err)
	assert.Equal(t, Sandbox{
		ID: "sb-1", Status: "running", Name: "l-1", Shape: "s-1vcpu-1gb", Rootfs: "devbox:1", Region: "eu", Ingress: true,
		Egress: []string{"240.0.0.0/4"}, EnvNames: []string{"A", "B"}, AutoPauseAfter: 15 * time.Minute,
		CreatedAt: time.Date(2026, 10, 2, 9, 0, 0, 0, time.UTC), RunningAt: time.Date(2026, 10, 2, 9, 0, 1, 5e8, time.UTC),
		has: sandboxFields{true, true, true, true, true, true, true, true, true},
	}, s)

	s, err = testClient(answering(reply(200, success(`{"id":"sb-1","status":"paused","name":null,"envs":[],"egress":null}`)))).get(t.Context(), "sb-1")
	require.NoError(t, err)
	assert.Equal(t, Sandbox{ID: "sb-1", Status: "paused", EnvNames: []string{}, has: sandboxFields{status: true, envs: true}}, s)

	for _, bad := range []string{
		`{"id":"sb-1"}`, `{"id":"sb-1","status":""}`, `{"id":"sb-1","status":1}`, `{"id":"sb-1","status":"running","envs":{"A":"1"}}`,
		`{"id":"sb-1","status":"running","egress":"*"}`, `{"id":"sb-1","status":"running","auto_pause_after_seconds":99999999999}`,
	} {
		_, err = testClient(answering(reply(200, success(bad)))).get(t.Context(), "sb-1")
		assert.ErrorIs(t, err, ErrInvalidResponse, bad)
	}
}

func TestCreateReply(t *testing.T) {
	create := func(data string) (Sandbox, error) {
		return testClient(answering(reply(201, success(data)))).create(t.Context(), createRequest{Name: "l-1"})
	}
	s, err := create(`{"id":"sb_1"}`)
	require.NoError(t, err)
	assert.Empty(t, s.Status, "what was not said is not made up")
	assert.False(t, s.has.status)
	s, err = create(`{"id":"sb-1","status":"creating","name":"l-1"}`)
	require.NoError(t, err)
	assert.Equal(t, "creating", s.Status)
	for _, bad := range []string{`{}`, `{"id":"sb-1","name":"calm-otter"}`, `{"id":"sb-1","name":""}`, `{"id":["sb-1"]}`} {
		_, err := create(bad)
		assert.ErrorIs(t, err, ErrInvalidResponse, bad)
		assert.True(t, unclear(err))
	}
}

func TestPollAfter(t *testing.T) {
	for header, want := range map[string]time.Duration{
		"": 0, "1": time.Second, "0.25": 250 * time.Millisecond, "-1": 0, "x": 0, "NaN": 0, "1e99": 24 * time.Hour,
	} {
		mock := answering(reply(202, success(`{"id":"`+testSandbox+`","status":"pausing"}`)).HeaderSet(http.Header{"X-Poll-After": {header}}))
		s, after, err := testClient(mock).pause(t.Context(), testSandbox)
		require.NoError(t, err)
		assert.Equal(t, want, after, header)
		assert.Equal(t, "pausing", s.Status)
	}
}

// rows makes n rows of a list, from the given number on.
func rows(from, n int) string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf(`{"id":"sb-%d","status":"running"}`, from+i)
	}
	return "[" + strings.Join(all, ",") + "]"
}

func pageOf(rows string, total, offset, count int) string {
	return fmt.Sprintf(`{"data":%s,"pagination":{"total":%d,"limit":500,"offset":%d,"count":%d}}`, rows, total, offset, count)
}

func TestListReadsEveryForm(t *testing.T) {
	for name, row := range map[string]struct {
		pages []string
		want  int
	}{
		"none":             {[]string{pageOf("[]", 0, 0, 0)}, 0},
		"one page":         {[]string{pageOf(rows(0, 3), 3, 0, 3)}, 3},
		"two pages":        {[]string{pageOf(rows(0, 500), 501, 0, 500), pageOf(rows(500, 1), 501, 500, 1)}, 501},
		"smaller pages":    {[]string{pageOf(rows(0, 50), 60, 0, 50), pageOf(rows(50, 10), 60, 50, 10)}, 60},
		"full last page":   {[]string{pageOf(rows(0, 500), 500, 0, 500)}, 500},
		"only the total":   {[]string{`{"data":` + rows(0, 1) + `,"pagination":{"total":1}}`}, 1},
		"named":            {[]string{`{"sandboxes":` + rows(0, 2) + `}`}, 2},
		"named and empty":  {[]string{`{"sandboxes":[]}`}, 0},
		"bare":             {[]string{" " + rows(0, 2)}, 2},
		"bare beyond 500":  {[]string{rows(0, 501)}, 501},
		"named with total": {[]string{`{"sandboxes":` + rows(0, 1) + `,"pagination":{"total":2}}`, `{"sandboxes":` + rows(1, 1) + `,"pagination":{"total":2}}`}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			var answers []httpmock.Responder
			for _, p := range row.pages {
				answers = append(answers, reply(200, success(p)))
			}
			mock := answering(answers...)
			all, err := testClient(mock).Sandboxes(t.Context())
			require.NoError(t, err)
			assert.Len(t, all, row.want)
			assert.Equal(t, len(row.pages), mock.GetTotalCallCount())
		})
	}
}

// A list that does not prove to be whole is no list.
func TestListThatUnderReports(t *testing.T) {
	for name, pages := range map[string][]string{
		"empty object":     {`{}`},
		"null":             {`null`},
		"no pagination":    {`{"data":[]}`},
		"null pagination":  {`{"data":[],"pagination":null}`},
		"no total":         {`{"data":[],"pagination":{"limit":500,"offset":0,"count":0}}`},
		"text total":       {`{"data":[],"pagination":{"total":"0"}}`},
		"no data":          {`{"pagination":{"total":0}}`},
		"null data":        {`{"data":null,"pagination":{"total":0}}`},
		"data is object":   {`{"data":{},"pagination":{"total":0}}`},
		"null named":       {`{"sandboxes":null}`},
		"both":             {`{"sandboxes":[],"data":[],"pagination":{"total":0}}`},
		"wrongly nested":   {`{"data":{"data":[],"pagination":{"total":0}}}`},
		"text":             {`"none"`},
		"total too large":  {pageOf(rows(0, 2), 3, 0, 2), pageOf("[]", 3, 2, 0)},
		"total too small":  {pageOf(rows(0, 2), 1, 0, 2)},
		"negative total":   {pageOf("[]", -1, 0, 0)},
		"count differs":    {pageOf(rows(0, 2), 2, 0, 3)},
		"offset differs":   {pageOf(rows(0, 2), 2, 2, 2)},
		"total grows":      {pageOf(rows(0, 2), 3, 0, 2), pageOf(rows(2, 2), 4, 2, 2)},
		"page shrinks":     {pageOf(rows(0, 500), 502, 0, 500), pageOf(rows(500, 1), 501, 500, 1)},
		"offset ignored":   {pageOf(rows(0, 2), 4, 0, 2), pageOf(rows(0, 2), 4, 2, 2)},
		"twice on a page":  {`[{"id":"sb-1","status":"running"},{"id":"sb-1","status":"destroyed"}]`},
		"cut to our limit": {rows(0, 500)},
		"row without id":   {`[{"status":"running"}]`},
		"row with path":    {`[{"id":"../x","status":"running"}]`},
		"row with number":  {`[{"id":1,"status":"running"}]`},
		"row of null":      {`[null]`},
		"no status":        {`[{"id":"sb-1"}]`},
		"form changes":     {pageOf(rows(0, 2), 4, 0, 2), `{"data":` + rows(2, 2) + `}`},
	} {
		t.Run(name, func(t *testing.T) {
			var answers []httpmock.Responder
			for _, p := range pages {
				answers = append(answers, reply(200, success(p)))
			}
			mock := answering(answers...)
			all, err := testClient(mock).Sandboxes(t.Context())
			assert.ErrorIs(t, err, ErrInvalidResponse)
			assert.Nil(t, all)
			assert.Equal(t, len(pages), mock.GetTotalCallCount())
		})
	}
}

func TestListWithoutEnd(t *testing.T) {
	n := 0
	mock := httpmock.NewMockTransport()
	mock.RegisterNoResponder(func(*http.Request) (*http.Response, error) {
		n++
		return httpmock.NewStringResponse(200, success(pageOf(rows(n, 1), 1<<20, n-1, 1))), nil
	})
	_, err := testClient(mock).Sandboxes(t.Context())
	assert.ErrorIs(t, err, ErrInvalidResponse)
	assert.Equal(t, maxPages, n)
}

func TestProcessList(t *testing.T) {
	c := func(data string) *Client { return testClient(answering(reply(200, success(data)))) }
	all, err := c(`{"processes":[{"process_id":"proc_1","state":"running","cmd":"sh","args":["-c","x"],"leader_exited":false,"exit_code":null,
		"created_at":"2026-10-02T09:02:00Z","output":{"oldest_seq":1,"newest_seq":7,"bytes":9}},
		{"process_id":"proc_2","state":"exited","leader_exited":true,"tree_exited":true,"signal":"SIGTERM"},
		{"process_id":"proc_3","exit_code":3}]}`).processes(t.Context(), testSandbox)
	require.NoError(t, err)
	three := 3
	assert.Equal(t, []Process{
		{
			ID: "proc_1", State: "running", Cmd: "sh", Args: []string{"-c", "x"}, OldestSeq: 1, NewestSeq: 7,
			CreatedAt: time.Date(2026, 10, 2, 9, 2, 0, 0, time.UTC), has: processFields{leaderExited: true, output: true},
		},
		{ID: "proc_2", State: "exited", LeaderExited: true, TreeExited: true, Signal: "SIGTERM", has: processFields{leaderExited: true, treeExited: true}},
		{ID: "proc_3", ExitCode: &three},
	}, all)

	all, err = c(`{"processes":[]}`).processes(t.Context(), testSandbox)
	require.NoError(t, err)
	assert.Empty(t, all)
	for _, bad := range []string{
		`{}`, `null`, `{"processes":null}`, `{"data":[]}`, `{"processes":[{}]}`, `{"processes":[{"process_id":"a/b"}]}`,
		`{"processes":[{"process_id":"a"},{"process_id":"a"}]}`, `{"processes":[],"pagination":{"total":1}}`,
		`{"processes":[{"process_id":"a","tree_exited":"yes"}]}`,
	} {
		_, err := c(bad).processes(t.Context(), testSandbox)
		assert.ErrorIs(t, err, ErrInvalidResponse, bad)
	}
}

func TestExecResults(t *testing.T) {
	code := func(n int) *int { return &n }
	for data, want := range map[string]execResult{
		`{"result":{"stdout":"hi\n","stderr":"err\n","exit_code":3},"exec_ms":12.4}`: {ExitCode: code(3), Stdout: "hi\n", Stderr: "err\n"},
		`{"result":{"stdout":"","stderr":"","exit_code":-1,"error":"waitid"}}`:       {ExitCode: code(-1), Failed: true},
		`{"result":{"exit_code":0,"error":""}}`:                                      {ExitCode: code(0)},
		`{"result":{"exit_code":0,"error":null}}`:                                    {ExitCode: code(0)},
		`{"result":{"exit_code":0,"error":{"x":1}}}`:                                 {ExitCode: code(0), Failed: true},
		`{"result":{}}`: {},
	} {
		got, err := testClient(answering(reply(200, success(data)))).exec(t.Context(), testSandbox, "x", nil)
		require.NoError(t, err, data)
		assert.Equal(t, want, got, data)
	}
	for _, bad := range []string{`{}`, `{"result":null}`, `{"result":{"exit_code":0.5}}`, `{"result":{"exit_code":"0"}}`, `{"result":{"exit_code":1e99}}`} {
		_, err := testClient(answering(reply(200, success(bad)))).exec(t.Context(), testSandbox, "x", nil)
		assert.ErrorIs(t, err, ErrInvalidResponse, bad)
	}
}

func TestEgressReplies(t *testing.T) {
	for data, want := range map[string][]string{
		`{"id":"sb-1","egress":["a","b"]}`: {"a", "b"},
		`{"id":"sb-1","egress":[]}`:        {},
		`{"id":"sb-1","egress":null}`:      nil,
	} {
		got, err := testClient(answering(reply(200, success(data)))).setEgress(t.Context(), "sb-1", []string{"a"})
		require.NoError(t, err, data)
		assert.Equal(t, want, got, data)
	}
	for _, bad := range []string{`{"id":"sb-1"}`, `{"egress":["a"]}`, `{"id":"sb-2","egress":["a"]}`, `{"id":"sb-1","egress":"a"}`} {
		_, err := testClient(answering(reply(200, success(bad)))).Egress(t.Context(), "sb-1")
		assert.ErrorIs(t, err, ErrInvalidResponse, bad)
	}
}

func TestAccountReplies(t *testing.T) {
	a, err := testClient(answering(reply(200, success(`{"user_id":"auth0|a b","stats":{"running":1,"paused":2,"other":0,"total":3}}`)))).Account(t.Context())
	require.NoError(t, err)
	assert.Equal(t, Account{UserID: "auth0|a b", Running: 1, Paused: 2, Total: 3}, a)
	long, err := json.Marshal(strings.Repeat("a", 201))
	require.NoError(t, err)
	for _, id := range []string{`""`, `null`, `7`, `"a\nb"`, `"\ud800"`, string(long)} {
		_, err := testClient(answering(reply(200, success(`{"user_id":`+id+`}`)))).Account(t.Context())
		if id == `"\ud800"` {
			assert.NoError(t, err) // JSON has no such character; the decoder puts U+FFFD in its place
			continue
		}
		assert.ErrorIs(t, err, ErrInvalidResponse, id)
	}
}

func TestOffsetExpired(t *testing.T) {
	for body, want := range map[string]RequestError{
		`{"status":"fail","data":{"code":"output_offset_expired","oldest_available_seq":900}}`: {envelope: true, code: codeOffsetExpired, oldest: 900},
		`{"status":"fail","data":{"code":"other","oldest_available_seq":900}}`:                 {envelope: true},
		`{"status":"fail","data":"output_offset_expired"}`:                                     {envelope: true},
		`{"status":"fail","data":{"code":"output_offset_expired","oldest_available_seq":"x"}}`: {envelope: true},
		`{"code":"output_offset_expired","oldest_available_seq":900}`:                          {},
		`gone`: {},
	} {
		_, err := testClient(answering(reply(410, body))).get(t.Context(), testSandbox)
		var refused *RequestError
		require.ErrorAs(t, err, &refused)
		want.Status, want.Operation, want.Detail = 410, OpLifecycle, "get sandbox"
		assert.Equal(t, want, *refused, body)
	}
}
