package createos

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The sweep puts every kind of fault at every request that an Exec can make,
// alone and in pairs, before or after the request had its effect. Whatever
// happens: a success is one, output is whole or said not to be, and nothing
// runs that is not listed.
func TestExecFaultSweep(t *testing.T) {
	routes := map[string]func(*proc, *http.Request) (*http.Response, error){
		rSpawn: nil, rConnect: (*proc).connect, rInput: (*proc).feed, rWait: (*proc).wait, rKill: (*proc).kill, rProcess: (*proc).show,
	}
	faults := map[string]answerFunc{
		"reset": reset, "hang": hang, "garbage": raw(200, "{"), "html": raw(404, "<html>"), "empty": raw(204, ""),
		"401": refuse(401), "404": refuse(404), "408": refuse(408), "409": refuse(409), "410": refuse(410), "429": refuse(429), "500": refuse(500), "503": refuse(503), "302": refuse(302),
	}
	type injected struct {
		name  string
		apply func(m *machine)
	}
	var all []injected
	for route, healthy := range routes {
		for name, fault := range faults {
			// An input that is accepted is read: this would be a lie.
			if lie := route == rInput && name == "empty"; !lie {
				all = append(all, injected{route + " " + name, func(m *machine) { m.script(route, fault) }})
			}
			if route == rSpawn && slices.Contains([]string{"html", "401", "404", "409", "429"}, name) {
				continue // answers that the API gives before it does anything
			}
			all = append(all, injected{route + " does it, then " + name, func(m *machine) {
				effect := m.spawn
				if healthy != nil {
					effect = m.on(healthy)
				}
				m.script(route, then(effect, fault))
			}})
		}
	}
	all = append(all, injected{"nothing", func(*machine) {}},
		injected{"cut", func(m *machine) { m.script(rConnect, m.cutAfter(1)) }},
		injected{"ends early", func(m *machine) { m.script(rConnect, m.endAfter(2)) }})

	const n = 40
	program, want := numbered(n)
	run := func(t *testing.T, endless bool, faults ...injected) {
		onMachine(t, func(t *testing.T, m *machine) {
			for _, f := range faults {
				f.apply(m)
			}
			m.always(rGet, view)
			out := &strings.Builder{}
			ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Minute, errTest)
			defer cancel()
			began := time.Now()
			res, err := m.exec(ctx, Command{Stdout: out, Timeout: 5 * time.Minute}, func(p *proc) {
				program(p)
				if endless {
					<-p.killed
				} else {
					p.sleep(time.Second)
				}
			})
			require.NotNil(t, res)
			assert.Less(t, time.Since(began), 12*time.Minute)
			assert.True(t, strings.HasPrefix(want, out.String()), "in order, each byte once")
			if err == nil {
				assert.Equal(t, want, out.String(), "whole")
				assert.Equal(t, endless, res.TimedOut)
				assert.Equal(t, !endless, res.Success())
			} else {
				assert.False(t, res.Success())
				assert.NotContains(t, err.Error(), "canary")
			}
			m.mu.Lock()
			lives := false
			for _, p := range m.procs {
				p.mu.Lock()
				lives = lives || !p.tree
				p.mu.Unlock()
			}
			m.mu.Unlock()
			if lives {
				require.Error(t, err)
				assert.Equal(t, []DebtKind{ProcessUnproven}, kinds(m.d), "what may run is listed: %v", err)
			}
			m.heal()
			require.NoError(t, m.d.Destroy(t.Context(), m.env, m.lease))
			m.mu.Lock()
			procs := m.procs
			m.mu.Unlock()
			for _, p := range procs {
				_, err := p.kill(&http.Request{})
				require.NoError(t, err)
			}
			time.Sleep(3 * time.Minute) // replies that never come are given up
		})
	}
	for _, endless := range []bool{false, true} {
		for _, f := range all {
			t.Run(f.name+"/endless="+strconv.FormatBool(endless), func(t *testing.T) { run(t, endless, f) })
		}
	}
	step := 17
	if testing.Short() {
		step = 97
	}
	for i := 0; i < len(all)*len(all); i += step {
		a, b := all[i/len(all)], all[i%len(all)]
		t.Run(a.name+"+"+b.name, func(t *testing.T) { run(t, i%2 == 0, a, b) })
	}
}
