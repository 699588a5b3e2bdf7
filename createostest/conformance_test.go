package createostest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestProbesAndCatalogueNeedNoKey(t *testing.T) {
	c := newClient(t, Options{})
	c.key = ""
	for path, want := range map[string]string{
		"/healthz":           `{"up":true}`,
		"/readyz":            `{"ready":true,"scheduler_last_ok_ms_ago":420}`,
		"/v1/shapes?limit=2": `{"data":[{"id":"s-1vcpu-256mb","vcpu":1,"mem_mib":256,"default_disk_mib":10240},{"id":"s-0.25vcpu-512mb","vcpu":1,"mem_mib":512,"default_disk_mib":10240,"cpu_quota_pct":25}],"pagination":{"total":11,"limit":2,"offset":0,"count":2}}`,
	} {
		a := c.want(200, "GET", path, nil)
		assert.Equal(t, "success", a.Status)
		assert.JSONEq(t, want, string(a.Data), path)
		assert.NotEmpty(t, a.header.Get("X-Request-Id"))
	}
	rootfs := c.want(200, "GET", "/v1/rootfs", nil).object(t)
	assert.Equal(t, "devbox:1", rootfs["default"])
	assert.Contains(t, rootfs["rootfs"], "debian:13")
}

func TestWhoamiCountsWhatIsNotDestroyed(t *testing.T) {
	c := newClient(t, Options{UserID: "usr_demo"})
	c.box()
	paused, gone := c.box(), c.box()
	c.want(202, "POST", paused+"/pause", nil)
	c.want(200, "DELETE", gone, nil)
	a := c.want(200, "GET", "/v1/whoami", nil)
	assert.JSONEq(t, `{"user_id":"usr_demo","stats":{"running":1,"paused":1,"other":0,"total":2}}`, string(a.Data))
}

func TestKeys(t *testing.T) {
	c := newClient(t, Options{})
	c.key = ""
	for name, value := range map[string]string{
		"none": "", "X-Api-Key": "skp_wrong", "Authorization": "Bearer " + c.srv.APIKey(),
	} {
		r := c.request("GET", "/v1/whoami", nil)
		r.Header.Set(name, value)
		resp, err := c.srv.Transport().RoundTrip(r)
		require.NoError(t, err)
		resp.Body.Close()
		assert.Equal(t, 401, resp.StatusCode, name)
	}
	// Another credential shadows a good key.
	for _, name := range []string{"Authorization", "X-Access-Token", "X-Auth-Token"} {
		r := c.request("GET", "/v1/whoami", nil)
		r.Header.Set("X-Api-Key", c.srv.APIKey())
		r.Header.Set(name, "x")
		resp, err := c.srv.Transport().RoundTrip(r)
		require.NoError(t, err)
		resp.Body.Close()
		assert.Equal(t, 401, resp.StatusCode, name)
	}
	c.key = c.srv.AddKey("usr_second")
	assert.Equal(t, "usr_second", c.want(200, "GET", "/v1/whoami", nil).object(t)["user_id"])
	c.srv.RevokeKey(c.key)
	assert.JSONEq(t, `"invalid api key"`, string(c.want(401, "GET", "/v1/whoami", nil).Data))
}

func TestAccountsSeeNothingOfEachOther(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box(map[string]any{"name": "shared-name"})
	proc := c.run(box, "sleep", "1000")
	c.key = c.srv.AddKey("usr_other")
	for _, call := range []string{
		"GET ", "DELETE ", "PATCH ", "POST /pause", "POST /resume", "POST /fork", "POST /resize", "GET /egress", "PUT /egress",
		"POST /exec", "GET /files?path=/a", "PUT /files?path=/a", "GET /processes", "POST /processes",
	} {
		method, path, _ := strings.Cut(call, " ")
		a := c.want(404, method, box+path, map[string]any{"cmd": "true"})
		assert.JSONEq(t, `"sandbox not found"`, string(a.Data), call)
	}
	c.want(404, "GET", proc+"/wait?scope=tree&timeout_ms=1", nil)
	c.want(404, "GET", "/v1/sandboxes/by-ip/10.42.0.3", nil)
	assert.Empty(t, c.want(200, "GET", "/v1/sandboxes", nil).object(t)["data"])
	c.box(map[string]any{"name": "shared-name"}) // names are an account's own
	assert.Len(t, c.srv.Sandboxes(), 2)
}

func TestCreateAnswersAndShows(t *testing.T) {
	c := newClient(t, Options{UserID: "usr_demo"})
	a := c.want(201, "POST", "/v1/sandboxes", map[string]any{
		"shape": "s-1vcpu-1gb", "name": "lease-7f3a", "envs": map[string]string{"JOB_TOKEN": "s3cret", "A": "1"},
		"egress": []string{"240.0.0.0/4"}, "auto_pause_after_seconds": 900, "unheard_of": true,
	})
	made := a.object(t)
	require.Regexp(t, regexp.MustCompile(`^sb-[0-9a-hjkmnp-tv-z]{26}$`), made["id"])
	for key, want := range map[string]any{
		"status": "running", "name": "lease-7f3a", "shape": "s-1vcpu-1gb", "rootfs": "devbox:1", "vcpu": 1.0,
		"mem_mib": 1024.0, "disk_mib": 10240.0, "egress": []any{"240.0.0.0/4"}, "auto_pause_after_seconds": 900.0,
	} {
		assert.Equal(t, want, made[key], key)
	}
	got := c.want(200, "GET", "/v1/sandboxes/"+made["id"].(string), nil)
	assert.NotContains(t, got.raw, "s3cret")
	view := got.object(t)
	for key, want := range map[string]any{
		"envs": []any{"A", "JOB_TOKEN"}, "created_by": "usr_demo", "region": "eu", "ingress_enabled": false,
		"status": "running", "ip": made["ip"],
	} {
		assert.Equal(t, want, view[key], key)
	}
	byIP := c.want(200, "GET", "/v1/sandboxes/by-ip/"+made["ip"].(string), nil)
	assert.Equal(t, view, byIP.object(t))
	unnamed := c.want(200, "GET", c.box(), nil).object(t)
	assert.Regexp(t, `^[a-z]+-[a-z]+`, unnamed["name"])
}

// sshKey is a key that nobody has the other half of.
const sshKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA nobody"

func TestSSHKeysAreShown(t *testing.T) {
	c := newClient(t, Options{})
	made := c.want(201, "POST", "/v1/sandboxes", map[string]any{"shape": "s-1vcpu-256mb", "ssh_pubkeys": []string{sshKey}}).object(t)
	assert.Equal(t, []any{sshKey}, made["ssh_pubkeys"])
	box := "/v1/sandboxes/" + made["id"].(string)
	assert.Equal(t, []any{sshKey}, c.want(200, "GET", box, nil).object(t)["ssh_pubkeys"])
	c.want(202, "POST", box+"/pause", nil)
	assert.Equal(t, []any{sshKey}, c.want(200, "POST", box+"/fork", nil).object(t)["ssh_pubkeys"])
	other := strings.Replace(sshKey, "nobody", "other", 1)
	fork := c.want(200, "POST", box+"/fork", map[string]any{"ssh_pubkeys": []string{other}}).object(t)
	assert.Equal(t, []any{other}, fork["ssh_pubkeys"])
	c.want(400, "POST", box+"/fork", map[string]any{"ssh_pubkeys": []string{"AAAA"}})
}

func TestCreateIsRefused(t *testing.T) {
	c := newClient(t, Options{
		Rootfs:        []Rootfs{{Name: "devbox:1"}, {Name: "old:1", Disabled: true}},
		AllowedShapes: []string{"s-1vcpu-256mb"}, MaxDiskMiB: 10240,
	})
	many := make(map[string]string)
	for i := range 65 {
		many[fmt.Sprintf("K%d", i)] = ""
	}
	wide := make(map[string]string)
	for i := range 17 {
		wide[fmt.Sprintf("K%d", i)] = strings.Repeat("x", 4000)
	}
	for name, tt := range map[string]struct {
		status int
		change string
		text   string
	}{
		"no shape":          {400, `{"shape":""}`, `{"shape":"is required"}`},
		"unknown shape":     {400, `{"shape":"s-none"}`, "unknown shape"},
		"foreign shape":     {403, `{"shape":"s-1vcpu-1gb"}`, "shape not allowed; Allowed: [s-1vcpu-256mb]"},
		"unknown rootfs":    {400, `{"rootfs":"x"}`, "rootfs"},
		"disabled rootfs":   {400, `{"rootfs":"old:1"}`, "rootfs"},
		"long name":         {400, `{"name":"a2345678901234567890123"}`, `{"name":"must be at most 22 characters"}`},
		"upper-case name":   {400, `{"name":"Lease"}`, "name"},
		"name ends in dash": {400, `{"name":"lease-"}`, "name"},
		"region":            {400, `{"region":"us"}`, "region"},
		"bandwidth":         {400, `{"bandwidth_quota_bytes":1}`, "bandwidth_quota_bytes"},
		"disk":              {403, `{"disk_mib":20480}`, "disk_mib"},
		"negative disk":     {400, `{"disk_mib":-1}`, "disk_mib"},
		"short auto-pause":  {400, `{"auto_pause_after_seconds":59}`, `must be between 60 and 86400`},
		"zero auto-pause":   {400, `{"auto_pause_after_seconds":0}`, `must be between 60 and 86400`},
		"long auto-pause":   {400, `{"auto_pause_after_seconds":86401}`, `must be between 60 and 86400`},
		"env key":           {400, `{"envs":{"1A":""}}`, "envs"},
		"env value":         {400, `{"envs":{"A":"` + strings.Repeat("x", 4097) + `"}}`, "4096"},
		"env type":          {400, `{"envs":{"A":1}}`, "envs"},
		"many envs":         {400, string(jsonOf(t, map[string]any{"envs": many})), "64 entries"},
		"wide envs":         {400, string(jsonOf(t, map[string]any{"envs": wide})), "64 KiB"},
		"egress rule":       {400, `{"egress":["two words"]}`, "egress"},
		"egress port":       {400, `{"egress":["example.com:0"]}`, "egress"},
		"SSH key":           {400, `{"ssh_pubkeys":["AAAA"]}`, "ssh_pubkeys"},
		"SSH key, text":     {400, `{"ssh_pubkeys":["ssh-ed25519 not-base64 me"]}`, "ssh_pubkeys"},
		"SSH key, type":     {400, string(jsonOf(t, map[string]any{"ssh_pubkeys": []string{"ssh-rsa" + strings.TrimPrefix(sshKey, "ssh-ed25519")}})), "ssh_pubkeys"},
		"SSH keys, lines":   {400, string(jsonOf(t, map[string]any{"ssh_pubkeys": []string{sshKey + "\n" + sshKey}})), "ssh_pubkeys"},
		"relative mount":    {400, `{"disks":[{"disk_id":"disk_1","mount_path":"data"}]}`, "mount_path"},
		"nameless disk":     {400, `{"disks":[{"mount_path":"/data"}]}`, "disk_id"},
		"disk sub-path":     {400, `{"disks":[{"disk_id":"disk_1","mount_path":"/data","sub_path":"a/../.."}]}`, "sub_path"},
		"rooted sub-path":   {400, `{"disks":[{"disk_id":"disk_1","mount_path":"/data","sub_path":"/a"}]}`, "sub_path"},
		"nameless network":  {400, `{"networks":[{}]}`, "networks"},
		"type":              {400, `{"name":7}`, "name"},
		"not JSON":          {400, `{`, "body"},
	} {
		t.Run(name, func(t *testing.T) {
			body := []byte(tt.change)
			if name != "not JSON" {
				merged := map[string]any{"shape": "s-1vcpu-256mb"}
				require.NoError(t, json.Unmarshal(body, &merged))
				body = jsonOf(t, merged)
			}
			a := c.want(tt.status, "POST", "/v1/sandboxes", body)
			assert.Equal(t, "fail", a.Status)
			assert.Contains(t, string(a.Data), tt.text)
		})
	}
	assert.Empty(t, c.srv.Sandboxes())
	c.box(map[string]any{
		"name": "a234567890123456789012", "region": "eu", "envs": map[string]string{"A": strings.Repeat("x", 4096)},
		"egress": []string{"*", "h.example", "h.example:443", "*.example.com", "192.0.2.1", "192.0.2.1:1", "10.0.0.0/8", "10.0.0.0/8:80", "2001:db8::1", "[2001:db8::1]:443"},
	})
}

func jsonOf(t testing.TB, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	require.NoError(t, err)
	return data
}

func TestAccountsMustBeKnown(t *testing.T) {
	c := newClient(t, Options{})
	first := c.srv.UserID()
	require.Equal(t, c.want(200, "GET", "/v1/whoami", nil).object(t)["user_id"], first)
	c.srv.SetCredit(first, false)
	c.srv.AddKey(first)
	c.want(402, "POST", "/v1/sandboxes", createBody()) // another key is no credit
	c.srv.SetCredit(first, true)
	c.box()

	assert.Panics(t, func() { c.srv.SetCredit("usr_none", false) })
	assert.Panics(t, func() { c.srv.RevokeKey("skp_none") })
	key := c.srv.AddKey("usr_second")
	c.srv.RevokeKey(key)
	assert.Panics(t, func() { c.srv.RevokeKey(key) }, "it is no key any more")
	c.srv.SetCredit("usr_second", false) // the account stays
	c.want(200, "GET", "/v1/whoami", nil)
}

func TestCreditGatesCreateResumeAndFork(t *testing.T) {
	c := newClient(t, Options{UserID: "usr_poor"})
	box := c.box()
	c.want(202, "POST", box+"/pause", nil)
	c.srv.SetCredit("usr_poor", false)
	c.want(402, "POST", "/v1/sandboxes", map[string]any{"shape": "s-1vcpu-256mb"})
	c.want(402, "POST", box+"/resume", nil)
	c.want(402, "POST", box+"/fork", nil)
	c.want(404, "POST", "/v1/sandboxes/sb-none/resume", nil) // ownership comes first
	c.srv.SetCredit("usr_poor", true)
	c.want(202, "POST", box+"/resume", nil)
}

func TestCreateSwitches(t *testing.T) {
	t.Run("200 without status", func(t *testing.T) {
		c := newClient(t, Options{CreateStatus: 200, OmitCreateState: true, IDPrefix: "sb_"})
		a := c.want(200, "POST", "/v1/sandboxes", map[string]any{"shape": "s-1vcpu-256mb"})
		assert.NotContains(t, a.object(t), "status")
		assert.Regexp(t, `^sb_`, a.object(t)["id"])
	})
	t.Run("unknown fields", func(t *testing.T) {
		c := newClient(t, Options{RejectUnknownFields: true})
		c.want(400, "POST", "/v1/sandboxes", map[string]any{"shape": "s-1vcpu-256mb", "timeout": 3})
	})
	t.Run("creating for two polls", func(t *testing.T) {
		c := newClient(t, Options{CreatingPolls: 2})
		a := c.want(201, "POST", "/v1/sandboxes", map[string]any{"shape": "s-1vcpu-256mb"}).object(t)
		assert.Equal(t, "creating", a["status"])
		box := "/v1/sandboxes/" + a["id"].(string)
		view := c.want(200, "GET", box, nil).object(t)
		assert.Equal(t, "creating", view["status"])
		assert.NotContains(t, view, "ip")
		c.want(409, "POST", box+"/exec", map[string]any{"cmd": "true"})
		assert.Equal(t, "creating", c.state(box))
		assert.Equal(t, "running", c.state(box))
	})
	t.Run("box cap", func(t *testing.T) {
		c := newClient(t, Options{MaxBoxes: 1})
		box := c.box()
		c.want(403, "POST", "/v1/sandboxes", map[string]any{"shape": "s-1vcpu-256mb"})
		c.want(202, "POST", box+"/pause", nil)
		c.box()
	})
	t.Run("same name", func(t *testing.T) {
		c := newClient(t, Options{AllowSameName: true})
		c.box(map[string]any{"name": "twin"})
		c.box(map[string]any{"name": "twin"})
	})
}

func TestNamesAreTakenUntilDestroyed(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box(map[string]any{"name": "lease"})
	again := func() int {
		return c.do("POST", "/v1/sandboxes", map[string]any{"shape": "s-1vcpu-256mb", "name": "lease"}).code
	}
	for _, state := range []State{StateRunning, StatePaused, StateError, StateDestroying} {
		require.NoError(t, c.srv.SetState(idOf(box), state))
		assert.Equal(t, 409, again(), state)
	}
	require.NoError(t, c.srv.SetState(idOf(box), StateDestroyed))
	assert.Equal(t, 201, again())
}

func TestListShowsTerminalRowsNewestFirst(t *testing.T) {
	c := newClient(t, Options{})
	var names []string
	for i := range 5 {
		name := fmt.Sprintf("box-%d", i)
		box := c.box(map[string]any{"name": name})
		if i == 1 {
			c.want(200, "DELETE", box, nil)
		}
		names = append([]string{name}, names...)
	}
	list := func(query string) (got []string, page map[string]any) {
		o := c.want(200, "GET", "/v1/sandboxes"+query, nil).object(t)
		for _, row := range o["data"].([]any) {
			got = append(got, row.(map[string]any)["name"].(string))
		}
		return got, o["pagination"].(map[string]any)
	}
	got, page := list("")
	assert.Equal(t, names, got)
	assert.Equal(t, map[string]any{"total": 5.0, "limit": 50.0, "offset": 0.0, "count": 5.0}, page)
	got, page = list("?limit=2&offset=3")
	assert.Equal(t, names[3:], got)
	assert.Equal(t, map[string]any{"total": 5.0, "limit": 2.0, "offset": 3.0, "count": 2.0}, page)
	got, page = list("?limit=1000&offset=9")
	assert.Empty(t, got)
	assert.Equal(t, 500.0, page["limit"])
	got, _ = list("?status=destroyed")
	assert.Equal(t, []string{"box-1"}, got)
	for _, bad := range []string{"?status=paused", "?limit=x", "?offset=-1"} {
		c.want(400, "GET", "/v1/sandboxes"+bad, nil)
	}
}

func TestListSwitches(t *testing.T) {
	for shape, want := range map[ListShape]string{ListBare: `^\[\{"id"`, ListNamed: `^\{"sandboxes":\[\{"id"`} {
		c := newClient(t, Options{ListShape: shape, AnyStatusFilter: true})
		c.box()
		assert.Regexp(t, want, string(c.want(200, "GET", "/v1/sandboxes", nil).Data))
		c.want(200, "GET", "/v1/sandboxes?status=paused", nil)
	}
	c := newClient(t, Options{ForgetDestroyed: true})
	box := c.box()
	c.want(200, "DELETE", box, nil)
	c.want(404, "GET", box, nil)
	c.want(404, "DELETE", box, nil)
	assert.Empty(t, c.want(200, "GET", "/v1/sandboxes", nil).object(t)["data"])
}

func TestPatchResizeAndEgress(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	view := c.want(200, "PATCH", box, `{"auto_pause_after_seconds":60,"ingress_enabled":true}`).object(t)
	assert.Equal(t, 60.0, view["auto_pause_after_seconds"])
	assert.Contains(t, view["ingress_url_template"], "<port>")
	c.want(400, "PATCH", box, `{"auto_pause_after_seconds":59}`)
	view = c.want(200, "PATCH", box, `{"disable_auto_pause":true}`).object(t)
	assert.NotContains(t, view, "auto_pause_after_seconds")
	assert.Equal(t, true, view["ingress_enabled"])

	assert.Equal(t, 20480.0, c.want(200, "POST", box+"/resize", `{"disk_mib":20480}`).object(t)["disk_mib"])
	c.want(400, "POST", box+"/resize", `{"disk_mib":20480}`)

	assert.JSONEq(t, `[]`, string(jsonOf(t, c.want(200, "GET", box+"/egress", nil).object(t)["egress"])))
	put := c.want(200, "PUT", box+"/egress", `{"egress":["192.0.2.10:443"]}`).object(t)
	assert.Equal(t, map[string]any{"id": idOf(box), "egress": []any{"192.0.2.10:443"}}, put)
	assert.Equal(t, put, c.want(200, "GET", box+"/egress", nil).object(t))
	c.want(400, "PUT", box+"/egress", `{"egress":["a b"]}`)
	assert.Equal(t, put, c.want(200, "GET", box+"/egress", nil).object(t))
	assert.Empty(t, c.want(200, "PUT", box+"/egress", `{"egress":null}`).object(t)["egress"])
}

func TestForkCopiesFilesAndLeavesTheSourcePaused(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box(map[string]any{"envs": map[string]string{"A": "1"}})
	c.want(200, "PUT", filePathQuery(box, "/f"), "content")
	c.want(409, "POST", box+"/fork", nil)
	c.want(202, "POST", box+"/pause", nil)
	view := c.want(200, "POST", box+"/fork", `{"envs":{"B":"2"}}`).object(t)
	assert.Equal(t, "forking", view["status"])
	assert.Equal(t, idOf(box), view["forked_from"])
	child := "/v1/sandboxes/" + view["id"].(string)
	assert.Equal(t, "running", c.state(child))
	assert.Equal(t, "paused", c.state(box))
	assert.Equal(t, []any{"A", "B"}, c.want(200, "GET", child, nil).object(t)["envs"])
	assert.Equal(t, "content", c.want(200, "GET", filePathQuery(child, "/f"), nil).raw)
	paused := c.want(200, "POST", box+"/fork", `{"start_paused":true}`).object(t)
	assert.Equal(t, "paused", c.state("/v1/sandboxes/"+paused["id"].(string)))
}

func TestFiles(t *testing.T) {
	c := newClient(t, Options{MaxFileBytes: 1000})
	box := c.box()
	put := c.want(200, "PUT", filePathQuery(box, "/srv/in/a.txt"), "8 bytes.")
	assert.JSONEq(t, `{"bytes":8,"path":"/srv/in/a.txt"}`, string(put.Data))
	got := c.want(200, "GET", filePathQuery(box, "/srv/in/a.txt"), nil)
	assert.Equal(t, "8 bytes.", got.raw)
	assert.Equal(t, "application/octet-stream", got.header.Get("Content-Type"))
	c.want(200, "PUT", filePathQuery(box, "/srv/in/a.txt"), "")
	assert.Empty(t, c.want(200, "GET", filePathQuery(box, "/srv/in/a.txt"), nil).raw)

	for _, path := range []string{"", "relative", "./x"} {
		c.want(400, "PUT", filePathQuery(box, path), "x")
		c.want(400, "GET", filePathQuery(box, path), nil)
	}
	missing := c.want(404, "GET", filePathQuery(box, "/none"), nil)
	assert.JSONEq(t, `{"path":"no such file"}`, string(missing.Data))
	c.want(400, "GET", filePathQuery(box, "/srv"), nil)
	c.want(400, "PUT", filePathQuery(box, "/srv"), "x")
	c.want(400, "PUT", filePathQuery(box, "/srv/in/a.txt/below"), "x")
	c.want(413, "PUT", filePathQuery(box, "/big"), strings.Repeat("x", 1001))
	c.want(404, "GET", filePathQuery(box, "/big"), nil)

	id := idOf(box)
	require.NoError(t, c.srv.WriteFile(id, "/x", []byte("1")))
	data, err := c.srv.ReadFile(id, "/x")
	require.NoError(t, err)
	assert.Equal(t, "1", string(data))
	require.NoError(t, c.srv.RemoveFile(id, "/x"))
	c.want(404, "GET", filePathQuery(box, "/x"), nil)
	assert.Error(t, c.srv.RemoveFile(id, "/x"))
	assert.Error(t, c.srv.WriteFile("sb-none", "/x", nil))
}

func TestBufferedExec(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box(map[string]any{"envs": map[string]string{"TOKEN": "declared"}})
	result := func(body map[string]any) map[string]any {
		return c.want(200, "POST", box+"/exec", body).object(t)["result"].(map[string]any)
	}
	assert.Equal(t, map[string]any{"stdout": "hi\n", "stderr": "err\n", "exit_code": 3.0},
		result(map[string]any{"cmd": "sh", "args": []string{"-c", "cat; echo err >&2; exit 3"}, "stdin": "hi\n"}))
	assert.Equal(t, "declared\n", result(map[string]any{"cmd": "sh", "args": []string{"-c", "echo $TOKEN"}})["stdout"])
	assert.Equal(t, "other\n", result(map[string]any{
		"cmd": "sh", "args": []string{"-c", "echo $TOKEN"}, "env": map[string]string{"TOKEN": "other"},
	})["stdout"])
	undeclared := c.want(400, "POST", box+"/exec", map[string]any{"cmd": "env", "env": map[string]string{"X": ""}})
	assert.JSONEq(t, `{"env":"X is not declared on this sandbox"}`, string(undeclared.Data))
	c.want(400, "POST", box+"/exec", map[string]any{})
	assert.Empty(t, c.want(200, "GET", box+"/processes", nil).object(t)["processes"])

	old := newClient(t, Options{DropExecStdin: true, DropExecEnv: true})
	a := old.want(200, "POST", old.box()+"/exec", map[string]any{"cmd": "cat", "stdin": "x", "env": map[string]string{"X": ""}})
	assert.Contains(t, a.raw, `"stdout":""`)
}

func TestWhatIsNotEmulatedSaysSo(t *testing.T) {
	c := newClient(t, Options{})
	box := c.box()
	for _, extra := range []string{`"disks":[{"disk_id":"disk_1","mount_path":"/data"}]`, `"networks":[{"id":"net-1"}]`} {
		c.want(501, "POST", "/v1/sandboxes", `{"shape":"s-1vcpu-256mb",`+extra+`}`)
	}
	c.want(501, "POST", box+"/fork", `{"bandwidth_quota_bytes":1}`)
	assert.Len(t, c.srv.Sandboxes(), 1)
	c.box(map[string]any{"disks": []any{}, "networks": []any{}})
	a := c.want(501, "POST", box+"/access-token", nil)
	assert.Equal(t, "error", a.Status)
	assert.Equal(t, 501, a.Code)
	assert.Equal(t, "fail", c.want(404, "GET", "/v2/nothing", nil).Status)
	notAllowed := c.want(405, "PUT", box, nil)
	assert.Equal(t, "fail", notAllowed.Status)
	assert.Contains(t, notAllowed.header.Get("Allow"), "DELETE")
	c.want(413, "POST", box+"/exec", `{"cmd":"`+strings.Repeat("x", maxJSONBytes)+`"}`)
}

func TestRegionsAreServersThatShareAKey(t *testing.T) {
	eu := newClient(t, Options{APIKey: "skp_shared", UserID: "usr_1"})
	us := newClient(t, Options{APIKey: "skp_shared", UserID: "usr_1", Region: "us"})
	require.NotEqual(t, eu.srv.URL, us.srv.URL)
	box := us.box(map[string]any{"region": "us"})
	us.want(http.StatusOK, "GET", box, nil)
	eu.want(http.StatusNotFound, "GET", box, nil)
	eu.want(http.StatusNotFound, "DELETE", box, nil)
	assert.Len(t, us.srv.Leaks(), 1)
	assert.Contains(t, us.srv.LeakReport(), idOf(box))
}
