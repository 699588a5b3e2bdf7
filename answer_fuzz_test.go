package createos

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/jarcoal/httpmock"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/frame"
)

// Whatever a 2xx says: it is about what was asked for, or it is no answer.
func FuzzAnswer(f *testing.F) {
	for _, body := range []string{
		"", "null", "<html>", "{}", success("null"), success("[]"), success(goodSandbox), success(goodProcess),
		success(`{"id":"../admin","status":"running"}`), success(`{"id":7,"status":"running"}`), success(`{"id":"sb-2","status":"running"}`),
		success(`{"id":"` + testSandbox + `","status":null}`), `{"status":"fail","data":` + goodSandbox + `}`, goodSandbox,
		success(`{"result":{"exit_code":0}}`), success(`{"result":{"exit_code":"0"}}`), success(`{"result":null}`), success(`{"result":{"exit_code":0,"error":"x"}}`),
		success(`{"user_id":"usr_1"}`), success(goodSandbox) + success(goodSandbox), success(goodSandbox)[:40],
	} {
		f.Add(200, body)
		f.Add(204, body)
	}
	f.Fuzz(func(t *testing.T, status int, body string) {
		if status < 200 || status > 299 {
			return
		}
		c := testClient(answering(reply(status, body)))
		ctx := t.Context()
		box, err := c.get(ctx, testSandbox)
		requireAnswer(t, err, body, box.ID == testSandbox && box.Status != "")
		p, err := c.process(ctx, testSandbox, testProcess)
		requireAnswer(t, err, body, p.ID == testProcess)
		p, err = c.createProcess(ctx, testSandbox, "true", nil, "")
		requireAnswer(t, err, body, validID(p.ID))
		made, err := c.create(ctx, createRequest{Name: "l-1", Shape: "s"})
		requireAnswer(t, err, body, validID(made.ID))
		_, err = c.exec(ctx, testSandbox, "true", nil)
		requireAnswer(t, err, body, true)
		_, err = c.setEgress(ctx, testSandbox, []string{"a.test"})
		requireAnswer(t, err, body, true)
	})
}

// requireAnswer checks that a call was answered with sense, or failed as
// documented and said nothing of the body.
func requireAnswer(t *testing.T, err error, body string, sense bool) {
	t.Helper()
	if err == nil {
		require.True(t, sense)
		require.True(t, json.Valid([]byte(body)), "taken from what is no JSON")
		return
	}
	require.ErrorIs(t, err, ErrInvalidResponse)
	require.Equal(t, ErrInvalidResponse.Error(), err.Error())
}

// A list is the whole list, each sandbox once, or none.
func FuzzList(f *testing.F) {
	page := func(rows, total string) string {
		return success(`{"data":[` + rows + `],"pagination":{"total":` + total + `}}`)
	}
	one, two := goodSandbox, strings.Replace(goodSandbox, testSandbox, "sb-2", 1)
	for _, p := range [][2]string{
		{page(one, "1"), ""}, {page(one, "2"), page(two, "2")}, {page(one, "2"), page(one, "2")}, {page(one, "2"), page("", "2")},
		{page(one, "2"), page(two, "3")}, {page(one, "0"), ""}, {page("", "0"), ""}, {page("", "-1"), ""}, {page(one, "1e0"), ""},
		{success(`{"sandboxes":[` + one + `]}`), ""}, {success(`[` + one + `,` + two + `]`), ""}, {success(`[]`), ""}, {success(`{}`), ""},
		{success(`{"data":{"data":[]}}`), ""}, {success(`{"data":[],"sandboxes":[]}`), ""}, {success(`{"data":null}`), ""},
		{success(`[{"status":"running"}]`), ""}, {success(`{"data":[` + one + `],"pagination":{"total":1,"offset":9,"count":1}}`), ""},
	} {
		f.Add(p[0], p[1])
	}
	f.Fuzz(func(t *testing.T, first, second string) {
		mock := answering(reply(200, first), reply(200, second))
		boxes, err := testClient(mock).list(t.Context())
		assert.LessOrEqual(t, mock.GetTotalCallCount(), 2+maxPages)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidResponse)
			require.Nil(t, boxes)
			return
		}
		seen := make(map[string]bool)
		for _, b := range boxes {
			require.True(t, validID(b.ID) && b.Status != "" && !seen[b.ID], "%q", b.ID)
			seen[b.ID] = true
		}
		var counted struct {
			Data struct{ Pagination struct{ Total *int } }
		}
		if json.Unmarshal([]byte(first), &counted) == nil && counted.Data.Pagination.Total != nil && mock.GetTotalCallCount() == 1 && len(boxes) > 0 {
			require.Equal(t, *counted.Data.Pagination.Total, len(boxes), "a page was taken for the whole")
		}
	})
}

// A stream ends, whatever is in it, and shows an exit only if a line is one.
func FuzzConnect(f *testing.F) {
	for _, body := range []string{
		"", "\n", exitLine, dataLine(1, "stdout", "a") + exitLine, beatLine + dataLine(1, "stderr", "\x00\xff"), `{"type":"exit"}` + "\n",
		`{"type":"exit","exit_code":null}` + "\n", `{"type":"exit","exit_code":"0"}` + "\n", `{"type":"exit","signal":"SIGKILL"}` + "\r\n",
		`{"type":"error","error":"output_offset_expired"}` + "\n", `{"type":"data","seq":-1}` + "\n", exitLine[:20], "\xef\xbb\xbf" + exitLine, "[]\n",
		dataLine(1, "stdout", "a") + dataLine(3, "stdout", "b"), `{"type":"data","seq":1,"stream":"stdout","data_base64":"!"}` + "\n", strings.Repeat(" ", 70_000),
	} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		c := testClient(answering(func(req *http.Request) (*http.Response, error) {
			resp, err := httpmock.NewStringResponder(200, body)(req)
			resp.Header.Set("Content-Type", "application/x-ndjson")
			return resp, err
		}))
		s, err := c.connect(t.Context(), testSandbox, testProcess, 0)
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		total := 0
		for events := 0; ; events++ {
			require.LessOrEqual(t, events, len(body), "more events than bytes")
			ev, err := s.Next()
			if err != nil {
				require.True(t, err == io.EOF || errors.Is(err, ErrConnection) || errors.Is(err, ErrInvalidResponse), "%v", err)
				return
			}
			if ev.Kind == frame.Data {
				require.Positive(t, ev.Seq)
				total += len(ev.Data)
				require.LessOrEqual(t, total, len(body), "more output than bytes")
			}
			if ev.Kind == frame.Exit {
				require.True(t, ev.HasExitCode || ev.Signal != "", "an exit that says nothing")
			}
		}
	})
}
