package createostest

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func createBody() map[string]any { return map[string]any{"shape": "s-1vcpu-256mb"} }

func TestFaultsOnCreate(t *testing.T) {
	const create = "POST /v1/sandboxes"
	for name, tt := range map[string]struct {
		fault  Fault
		code   int    // 0: no answer
		has    string // in the answer
		boxes  int    // what exists afterwards
		header map[string]string
	}{
		"refused":             {fault: Fault{Refuse: true}},
		"dropped":             {fault: Fault{DropReply: true}, boxes: 1},
		"status":              {fault: Fault{Status: 503}, code: 503, has: `"service unavailable"`},
		"status after effect": {fault: Fault{Status: 500, Effect: true}, code: 500, has: `"internal error"`, boxes: 1},
		"body":                {fault: Fault{Status: 502, Body: "bad gateway"}, code: 502, has: "bad gateway"},
		"fail with 200":       {fault: Fault{Body: `{"status":"fail","data":null}`}, code: 200, has: `"fail"`},
		"garbage":             {fault: Fault{Garbage: true, Effect: true}, code: 200, has: "<html>", boxes: 1},
		"rate limit":          {fault: Fault{RetryAfter: 1500 * time.Millisecond}, code: 429, has: "rate limit", header: map[string]string{"Retry-After": "2"}},
		"redirect":            {fault: Fault{Redirect: "https://elsewhere.invalid/"}, code: 307, header: map[string]string{"Location": "https://elsewhere.invalid/"}},
		"header":              {fault: Fault{Status: 503, Header: http.Header{"x-poll-after": {"9"}}}, code: 503, header: map[string]string{"X-Poll-After": "9"}},
		"cut bytes":           {fault: Fault{CutAfterBytes: 5}, boxes: 1},
		"cut header":          {fault: Fault{CutAfterBytes: -1}, boxes: 1},
		"cut clean":           {fault: Fault{CutAfterBytes: 5, CutClean: true}, code: 201, has: `{"dat`, boxes: 1},
		"reply":               {fault: Fault{Reply: func(int, []byte) (int, []byte) { return 201, []byte(`{}`) }}, code: 201, has: `{}`, boxes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t, Options{})
			fault := tt.fault
			fault.Route = create
			injected := c.srv.Fail(fault)
			a, err := c.try("POST", "/v1/sandboxes", createBody())
			if tt.code == 0 {
				require.Error(t, err)
			} else {
				require.NoError(t, err)
				assert.Equal(t, tt.code, a.code)
				assert.Contains(t, a.raw, tt.has)
			}
			for key, want := range tt.header {
				assert.Equal(t, want, a.header.Get(key))
			}
			assert.Len(t, c.srv.Sandboxes(), tt.boxes)
			assert.Equal(t, 1, injected.Hits())
			entries := c.srv.Requests()
			assert.True(t, entries[len(entries)-1].Faulted)
			c.srv.ClearFaults()
			c.box()
		})
	}
}

func TestWrongID(t *testing.T) {
	c := newClient(t, Options{})
	c.srv.Fail(Fault{Route: "POST /v1/sandboxes", WrongID: true, Times: 1})
	a := c.want(201, "POST", "/v1/sandboxes", createBody()).object(t)
	assert.Regexp(t, `^sb-`, a["id"])
	assert.NotEqual(t, c.srv.Sandboxes()[0].ID, a["id"])
	c.want(404, "GET", "/v1/sandboxes/"+a["id"].(string), nil)
}

func TestFaultOccurrences(t *testing.T) {
	for name, tt := range map[string]struct {
		nth, times int
		want       string
	}{
		"each":        {0, 0, "xxxxx"},
		"first two":   {0, 2, "xx..."},
		"third":       {3, 0, "..x.."},
		"third on":    {3, 9, "..xxx"},
		"second, two": {2, 2, ".xx.."},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t, Options{})
			injected := c.srv.Fail(Fault{Route: "GET /v1/whoami", Status: 500, Nth: tt.nth, Times: tt.times})
			got := ""
			for range 5 {
				c.want(200, "GET", "/healthz", nil) // does not count
				if c.do("GET", "/v1/whoami", nil).code == 500 {
					got += "x"
				} else {
					got += "."
				}
			}
			assert.Equal(t, tt.want, got)
			assert.Equal(t, strings.Count(tt.want, "x"), injected.Hits())
		})
	}
}

func TestFaultsChooseTheirRequests(t *testing.T) {
	c := newClient(t, Options{})
	one, two := c.box(), c.box()
	byPath := c.srv.Fail(Fault{Route: "GET " + one, Status: 500})
	c.want(500, "GET", one, nil)
	c.want(200, "GET", two, nil)
	byPath.Remove()
	c.want(200, "GET", one, nil)
	c.srv.Fail(Fault{Route: "/v1/sandboxes/{id}", Method: "DELETE", Status: 500})
	c.want(200, "GET", one, nil)
	c.want(500, "DELETE", one, nil)
	c.srv.ClearFaults()
	c.srv.Fail(Fault{Status: 500, When: func(r Request) bool { return r.Path == two }})
	c.want(200, "GET", one, nil)
	c.want(500, "GET", two, nil)
	assert.Panics(t, func() { c.srv.Fail(Fault{Route: "POST /v1/sandboxs"}) })
	assert.Panics(t, func() { c.srv.Fail(Fault{Route: "PUT /v1/sandboxes"}) })
}

func TestStuckStates(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, c *client) {
		c.srv.Fail(Fault{Route: "POST /v1/sandboxes", StuckState: StateCreating, Nth: 1})
		a := c.want(201, "POST", "/v1/sandboxes", createBody()).object(t)
		assert.Equal(t, "creating", a["status"])
		stuck := "/v1/sandboxes/" + a["id"].(string)
		time.Sleep(time.Hour)
		assert.Equal(t, "creating", c.state(stuck))
		c.want(200, "DELETE", stuck, nil)
		assert.Equal(t, "destroyed", c.state(stuck))

		box := c.box()
		for _, step := range []struct{ call, state string }{{"pause", "pausing"}, {"resume", "error"}} {
			injected := c.srv.Fail(Fault{Route: "/v1/sandboxes/{id}/" + step.call, StuckState: State(step.state)})
			c.want(202, "POST", box+"/"+step.call, nil)
			time.Sleep(time.Hour)
			assert.Equal(t, step.state, c.state(box))
			injected.Remove()
			require.NoError(t, c.srv.Pause(idOf(box)))
		}
		c.srv.Fail(Fault{Route: "DELETE /v1/sandboxes/{id}", StuckState: StateDestroying})
		require.NoError(t, c.srv.Resume(idOf(box)))
		c.want(200, "DELETE", box, nil)
		time.Sleep(time.Hour)
		assert.Equal(t, "destroying", c.state(box))
		assert.Len(t, c.srv.Leaks(), 1)
		require.NoError(t, c.srv.Kill(idOf(box)))

		c.srv.Fail(Fault{Route: "POST /v1/sandboxes", StuckState: StateFailed})
		a = c.want(201, "POST", "/v1/sandboxes", createBody()).object(t)
		assert.Equal(t, "failed", a["status"])
		assert.Empty(t, c.srv.Leaks())
	})
}

func TestDelaysAndHanging(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, c *client) {
		c.srv.Fail(Fault{Route: "GET /v1/whoami", Delay: time.Second, DelayReply: 2 * time.Second})
		began := time.Now()
		c.want(200, "GET", "/v1/whoami", nil)
		assert.Equal(t, 3*time.Second, time.Since(began))
		assert.Equal(t, began, c.srv.Requests()[0].Arrived)

		c.srv.Fail(Fault{Route: "POST /v1/sandboxes", Hang: true, Effect: true})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := c.srv.Transport().RoundTrip(c.request("POST", "/v1/sandboxes", createBody()).WithContext(ctx))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Len(t, c.srv.Leaks(), 1)
		synctest.Wait()
		log := c.srv.Requests()
		assert.True(t, log[len(log)-1].Done, "the server notices that the client left")
		assert.Zero(t, log[len(log)-1].Status)
	})
}

func TestStreamFaults(t *testing.T) {
	const route = "GET /v1/sandboxes/{id}/processes/{process}/connect"
	setup := func(t *testing.T, fault Fault) *feed {
		t.Helper()
		c := newClient(t, Options{Commands: flood(5)})
		fault.Route = route
		c.srv.Fail(fault)
		return c.connect(c.run(c.box(), "flood") + "/connect")
	}
	t.Run("cut hard", func(t *testing.T) {
		out, _, err := setup(t, Fault{CutAfterFrames: 2}).rest()
		assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Len(t, out, 2*1024)
	})
	t.Run("cut clean", func(t *testing.T) {
		out, last, err := setup(t, Fault{CutAfterFrames: 2, CutClean: true}).rest()
		require.NoError(t, err)
		assert.Equal(t, "data", last["type"])
		assert.Len(t, out, 2*1024)
	})
	t.Run("without any frame", func(t *testing.T) {
		_, last, err := setup(t, Fault{CutAfterFrames: -1, CutClean: true}).rest()
		require.NoError(t, err)
		assert.Nil(t, last)
	})
	t.Run("in mid-frame", func(t *testing.T) {
		feed := setup(t, Fault{CutAfterBytes: 1500})
		body, err := io.ReadAll(feed.resp.Body)
		assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.Len(t, body, 1500)
	})
	t.Run("frames dropped and doubled", func(t *testing.T) {
		feed := setup(t, Fault{Frames: func(n int, frame []byte) []byte {
			switch n {
			case 1:
				return nil
			case 2:
				return append(bytes.Clone(frame), frame...)
			}
			return frame
		}})
		var got []float64
		for range 4 {
			event, err := feed.next()
			require.NoError(t, err)
			got = append(got, event["seq"].(float64))
		}
		assert.Equal(t, []float64{2, 2, 3, 4}, got)
		feed.close()
	})
}

func TestADroppedUploadIsDone(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	c.srv.Fail(Fault{Route: "PUT /v1/sandboxes/{id}/files", DropReply: true, Nth: 1})
	c.srv.Fail(Fault{Route: "PUT /v1/sandboxes/{id}/files", Status: 502, Nth: 2})
	_, err := c.try("PUT", filePathQuery(box, "/f"), "first")
	require.Error(t, err)
	c.want(502, "PUT", filePathQuery(box, "/f"), "second")
	assert.Equal(t, "first", c.want(200, "GET", filePathQuery(box, "/f"), nil).raw)
}

func TestRequestLog(t *testing.T) {
	c := newClient(t, Options{UserID: "usr_demo"})
	box := c.box()
	c.want(200, "PUT", filePathQuery(box, "/f"), "content")
	c.key = "skp_wrong"
	c.want(401, "GET", "/v1/sandboxes?limit=3", nil)
	c.want(404, "GET", "/nowhere", nil)
	log := c.srv.Requests()
	require.Len(t, log, 4)
	create, upload, list, nowhere := log[0], log[1], log[2], log[3]
	assert.Equal(t, "POST /v1/sandboxes", create.Route)
	assert.JSONEq(t, `{"shape":"s-1vcpu-256mb"}`, string(create.Body))
	assert.Equal(t, "usr_demo", create.User)
	assert.Equal(t, 201, create.Status)
	assert.Equal(t, int64(7), upload.BodyBytes)
	assert.Empty(t, upload.Body)
	assert.Equal(t, "3", list.Query.Get("limit"))
	assert.Equal(t, 401, list.Status)
	assert.Empty(t, nowhere.Route)
	for _, r := range log {
		assert.True(t, r.Done)
		assert.NotContains(t, r.Header, "X-Api-Key")
	}
	c.srv.ForgetRequests()
	assert.Empty(t, c.srv.Requests())
}

func TestFaultsCallBackAroundTheWork(t *testing.T) {
	c := newClient(t, Options{})
	var before, after int
	c.srv.Fail(Fault{
		Route:  "POST /v1/sandboxes",
		Before: func() { before = len(c.srv.Sandboxes()) },
		After:  func() { after = len(c.srv.Sandboxes()) },
	})
	box := c.box()
	assert.Equal(t, []int{0, 1}, []int{before, after})
	c.srv.Fail(Fault{Route: "POST /v1/sandboxes/{id}/pause", After: func() { c.srv.Kill(idOf(box)) }})
	c.want(202, "POST", box+"/pause", nil)
	assert.Equal(t, "destroyed", c.state(box))
}
