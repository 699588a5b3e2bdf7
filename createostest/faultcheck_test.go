package createostest

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// A fault that could never act is refused, by the name of the field.
func TestFailRefusesWhatCannotHappen(t *testing.T) {
	srv := NewServer(t, Options{InMemory: true})
	const (
		create  = "POST /v1/sandboxes"
		connect = "GET /v1/sandboxes/{id}/processes/{process}/connect"
	)
	reply := func(status int, body []byte) (int, []byte) { return status, body }
	for field, faults := range map[string][]Fault{
		"Route": {
			{Route: "POST /v1/sandboxs", Status: 500}, {Route: "PUT /v1/sandboxes", Status: 500},
			{Route: "/v1/sandboxes", Method: "PUT", Status: 500}, {Route: "post /v1/sandboxes", Status: 500},
			{Route: "GET /v1/sandboxes?limit=1", Status: 500}, {Route: "GET", Status: 500}, {Route: "GET ", Status: 500},
			{Route: "/v1/sandboxes/{id}/{what}", Status: 500}, {Route: "/v1/sandboxes/", Status: 500},
		},
		"Method": {
			{Method: "post", Status: 500}, {Method: "HEAD", Status: 500},
			{Method: "GET", Route: create, Status: 500},
		},
		"Nth":        {{Nth: -1, Status: 500}},
		"Times":      {{Times: -1, Status: 500}},
		"RetryAfter": {{RetryAfter: -1, Status: 500}},
		"Delay":      {{Delay: -time.Second}},
		"DelayReply": {{DelayReply: -time.Second}},
		"Status":     {{Status: 99}, {Status: 600}, {Status: -1}},
		"StuckState": {
			{StuckState: "asleep"}, {StuckState: StatePaused, Method: "GET"}, {StuckState: StatePaused, Route: connect},
			{StuckState: StatePaused, Route: "GET /v1/sandboxes"}, {StuckState: StatePaused, Route: "/v1/sandboxes/sb-1/exec"},
			{StuckState: StatePaused, Route: create, Refuse: true}, {StuckState: StatePaused, Route: create, Status: 500},
		},
		"CutClean":         {{CutClean: true}, {CutClean: true, Status: 500}},
		"Effect":           {{Effect: true}, {Effect: true, Delay: time.Second}},
		"Header":           {{Header: http.Header{"X-A": {"1"}}}, {Header: http.Header{"X-A": {"1"}}, Delay: time.Second}},
		"Refuse":           {{Refuse: true, Before: func() {}}, {Refuse: true, After: func() {}}},
		"Reply or WrongID": {{Reply: reply, Status: 500}, {WrongID: true, DropReply: true}},
		"When":             {{}, {Route: create, Nth: 2}},
	} {
		for _, f := range faults {
			var said any
			func() {
				defer func() { said = recover() }()
				srv.Fail(f)
			}()
			assert.Regexp(t, `^createostest: Fault\.`+field+`: `, said, "%+v", f)
		}
	}
	assert.Empty(t, srv.faults.list)

	for _, f := range []Fault{
		{When: func(Request) bool { return false }}, // looks on
		{Before: func() {}}, {After: func() {}}, {Frames: func(_ int, line []byte) []byte { return line }},
		{Status: 100}, {Status: 599}, {Method: "DELETE", Route: "/v1/sandboxes/{id}", Status: 500},
		{StuckState: StateError}, {StuckState: StateError, Method: "POST"}, {StuckState: StateError, Route: create, Status: 500, Effect: true},
		{StuckState: StateError, Route: "/v1/sandboxes/sb-1/pause"}, {StuckState: StateError, Route: "/v1/sandboxes/{any}/pause"},
		{CutClean: true, CutAfterFrames: -1}, {Header: http.Header{"X-A": {"1"}}, Reply: reply},
		{DropReply: true, Effect: true}, {Route: "/v1/sandboxes/by-ip/10.42.0.2", Status: 500},
	} {
		assert.NotPanics(t, func() { srv.Fail(f) }, "%+v", f)
	}
}

// The name in the braces of a route is nobody's business, and a part of a path
// may be concrete.
func TestFaultsMatchSegmentBySegment(t *testing.T) {
	c := newClient(t, Options{})
	one, two := c.box(), c.box()
	process, other := c.run(one, "true"), c.run(two, "true")
	named := c.srv.Fail(Fault{Route: "GET /v1/sandboxes/{box}/processes/{pid}", Status: 500})
	c.want(500, "GET", process, nil)
	c.want(200, "GET", one, nil)
	c.want(200, "GET", process+"/wait", nil)
	named.Remove()
	c.srv.Fail(Fault{Route: "GET " + one + "/processes/{process}", Status: 500})
	c.want(500, "GET", process, nil)
	c.want(200, "GET", other, nil)
}
