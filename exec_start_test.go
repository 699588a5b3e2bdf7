package createos

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// slowly takes its time before it answers.
func slowly(d time.Duration, a answerFunc) answerFunc {
	return func(p *provider, req *http.Request) (*http.Response, error) {
		time.Sleep(d)
		return a(p, req)
	}
}

func TestExecCreationThatIsKnownToHaveFailed(t *testing.T) {
	for _, status := range []int{400, 401, 402, 403, 405, 413, 422} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rSpawn, refuse(status))
				res, err := m.exec(t.Context(), Command{}, hello)
				var refused *RequestError
				require.ErrorAs(t, err, &refused)
				assert.Equal(t, status, refused.Status)
				assert.Equal(t, OpProcessCreation, refused.Operation)
				assert.NotContains(t, err.Error(), "canary")
				assert.Equal(t, -1, res.ExitCode)
				assert.Equal(t, []string{rSpawn}, m.requests(), "nothing to look for")
				m.requireNothingRuns()
			})
		})
	}
	t.Run("429 is repeated", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rSpawn, refuse(429), refuse(429))
			res, err := m.exec(t.Context(), Command{}, hello)
			require.NoError(t, err)
			assert.True(t, res.Success())
		})
	})
	t.Run("sandbox gone", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.always(rSpawn, refuse(404))
			m.always(rGet, refuse(404))
			_, err := m.exec(t.Context(), Command{}, hello)
			require.ErrorIs(t, err, ErrLeaseGone)
			assert.NotErrorIs(t, err, ErrUnjudged)
			m.requireNothingRuns()
		})
	})
	t.Run("not found by a gateway", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.always(rSpawn, raw(404, "<html>"))
			m.always(rGet, raw(404, "<html>"))
			_, err := m.exec(t.Context(), Command{}, hello)
			require.ErrorIs(t, err, ErrUnjudged)
			assert.NotErrorIs(t, err, ErrLeaseGone)
		})
	})
}

func TestExecCreationOfUnknownOutcome(t *testing.T) {
	for name, reply := range map[string]answerFunc{
		"reset": reset, "408": refuse(408), "500": refuse(500), "503": refuse(503), "garbage": raw(200, "{"), "empty": raw(201, ""),
		"bad id": ok(`{"process_id":"../x"}`), "redirect": refuse(302),
	} {
		t.Run(name+"/made", func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rSpawn, then(m.spawn, reply))
				m.script(rProcesses, refuse(500), ok(`{"processes":[]}`))
				res, err := m.exec(t.Context(), Command{}, hello)
				require.Error(t, err)
				assert.NotErrorIs(t, err, ErrProcessCreationUnknown)
				assert.Equal(t, 1, m.count(rSpawn))
				assert.Equal(t, 1, m.count(rKill))
				assert.Empty(t, m.only().script, "the command was not run")
				assert.False(t, res.Success())
				m.requireNothingRuns()

				res, err = m.exec(t.Context(), Command{}, hello)
				require.NoError(t, err)
				assert.True(t, res.Success(), "the lease stays usable")
			})
		})
		t.Run(name+"/not found", func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rSpawn, reply)
				_, err := m.exec(t.Context(), Command{}, hello)
				require.ErrorIs(t, err, ErrProcessCreationUnknown)
				assert.EqualError(t, err, ErrProcessCreationUnknown.Error())
				assert.Equal(t, len(lookGaps), m.count(rProcesses))
				assert.Equal(t, 1, m.count(rSpawn))
				all := m.d.Unconfirmed()
				require.Len(t, all, 1)
				assert.Equal(t, ProcessUnproven, all[0].Kind)
				require.Len(t, all[0].Processes, 1)
				assert.True(t, strings.HasPrefix(all[0].Processes[0], execIDPrefix))
				_, err = m.exec(t.Context(), Command{}, hello)
				require.ErrorIs(t, err, ErrLeaseClosing)
			})
		})
	}
	t.Run("made, not ended", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rSpawn, then(m.spawn, reset))
			m.always(rKill, refuse(500))
			_, err := m.exec(t.Context(), Command{}, hello)
			require.ErrorIs(t, err, ErrProcessCreationUnknown)
			assert.ErrorIs(t, err, ErrUnavailable)
			assert.Equal(t, []DebtKind{ProcessUnproven}, kinds(m.d))
		})
	})
	t.Run("list fails", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rSpawn, then(m.spawn, reset))
			m.always(rProcesses, refuse(503))
			began := time.Now()
			_, err := m.exec(t.Context(), Command{}, hello)
			require.ErrorIs(t, err, ErrProcessCreationUnknown)
			assert.Less(t, time.Since(began), time.Minute)
		})
	})
	t.Run("sandbox gone", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rSpawn, reset)
			m.always(rProcesses, refuse(404))
			m.always(rGet, refuse(404))
			_, err := m.exec(t.Context(), Command{}, hello)
			require.ErrorIs(t, err, ErrLeaseGone)
			m.requireNothingRuns()
		})
	})
}

func TestExecFollowsACreationToItsReply(t *testing.T) {
	for name, tc := range map[string]struct {
		reply  answerFunc
		poison bool
	}{
		"that comes":           {nil, false},
		"that comes not":       {hang, false}, // found in the list
		"for what is not made": {hang, true},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				reply := slowly(3*time.Second, m.spawn)
				if tc.reply != nil {
					reply = tc.reply
					if !tc.poison {
						reply = then(m.spawn, tc.reply)
					}
				}
				m.script(rSpawn, reply)
				ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errTest)
				defer cancel()
				_, err := m.exec(ctx, Command{}, hello)
				require.ErrorIs(t, err, errTest)
				if tc.poison {
					assert.ErrorIs(t, err, ErrProcessCreationUnknown)
					assert.Equal(t, []DebtKind{ProcessUnproven}, kinds(m.d))
					return
				}
				assert.NotErrorIs(t, err, ErrProcessCreationUnknown)
				assert.Empty(t, m.only().script)
				m.requireNothingRuns()
			})
		})
	}
}

func TestExecWakesAPausedSandbox(t *testing.T) {
	paused := then(shows(statePaused), refuse(409))
	long := func(p *proc) { hello(p); p.sleep(time.Minute); p.out("stdout", "!") }
	for name, script := range map[string]func(m *machine){
		"at the creation": func(m *machine) { m.script(rSpawn, paused) },
		"while pausing": func(m *machine) {
			m.script(rSpawn, then(shows(statePausing), refuse(409)))
			m.script(rGet, view, view, shows(statePaused))
		},
		"at the connection": func(m *machine) { m.script(rConnect, paused) },
		"at the input":      func(m *machine) { m.script(rInput, paused) },
		"at a reconnect":    func(m *machine) { m.script(rConnect, m.cutAfter(2), paused) },
		"at the wait":       func(m *machine) { m.script(rConnect, m.cutAfter(2)); m.script(rWait, paused) },
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				script(m)
				res, err := m.exec(t.Context(), Command{}, long)
				require.NoError(t, err)
				assert.True(t, res.Success())
				assert.Equal(t, "hello world!", string(res.Stdout))
				assert.Equal(t, 1, m.count(rResume))
				assert.Zero(t, m.count(rSetEgress))
			})
		})
	}
	t.Run("restricted", func(t *testing.T) {
		synctestMachine(t, func(c *Config) { c.EgressAllowlist = []string{"example.com"} }, func(t *testing.T, m *machine) {
			m.script(rSpawn, paused)
			_, err := m.exec(t.Context(), Command{}, hello)
			require.NoError(t, err)
			log := m.requests()
			assert.Less(t, indexOf(log, rSetEgress), indexOf(log, rResume), "never runs without its restriction")
			assert.Contains(t, log, rSetEgress)
		})
	})
	t.Run("conflict for ever", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.always(rSpawn, refuse(409))
			_, err := m.exec(t.Context(), Command{}, hello)
			require.ErrorIs(t, err, ErrConflict)
			assert.Equal(t, wakeTries, m.count(rSpawn))
			m.requireNothingRuns()
		})
	})
	t.Run("conflict on every connection", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.always(rConnect, refuse(409))
			_, err := m.exec(t.Context(), Command{}, long)
			require.ErrorIs(t, err, ErrConflict)
			m.requireNothingRuns()
		})
	})
	t.Run("destroyed", func(t *testing.T) {
		for _, route := range []string{rSpawn, rConnect, rKill} {
			onMachine(t, func(t *testing.T, m *machine) {
				m.always(route, then(shows(stateDestroyed), refuse(409)))
				res, err := m.exec(t.Context(), Command{Timeout: time.Second}, long)
				if route == rKill {
					require.NoError(t, err)
					assert.True(t, res.TimedOut)
				} else {
					require.ErrorIs(t, err, ErrLeaseGone)
				}
				assert.Empty(t, m.d.Unconfirmed())
				time.Sleep(2 * time.Minute)
			})
		}
	})
	t.Run("cannot be woken", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rSpawn, paused)
			m.script(rResume, then(shows(stateFailed), refuse(409)))
			_, err := m.exec(t.Context(), Command{}, hello)
			var state *StateError
			require.ErrorAs(t, err, &state)
			assert.Equal(t, stateFailed, state.Last)
			m.requireNothingRuns()
		})
	})
}

func indexOf(list []string, what string) int {
	for i, s := range list {
		if s == what {
			return i
		}
	}
	return -1
}

func TestExecStartsACommandOnce(t *testing.T) {
	for name, script := range map[string]func(m *machine){
		"reply lost":          func(m *machine) { m.script(rInput, then(m.on((*proc).feed), reset)) },
		"500 after it":        func(m *machine) { m.script(rInput, then(m.on((*proc).feed), refuse(500))) },
		"500 before it":       func(m *machine) { m.script(rInput, refuse(500), refuse(503)) },
		"409 after it":        func(m *machine) { m.script(rInput, then(m.on((*proc).feed), reset), refuse(409)) },
		"every reply lost":    func(m *machine) { m.always(rInput, then(m.on((*proc).feed), reset)) },
		"connection is slow":  func(m *machine) { m.script(rConnect, slowly(20*time.Second, m.on((*proc).connect))) },
		"connection hangs":    func(m *machine) { m.script(rConnect, hang) },
		"reply never comes":   func(m *machine) { m.script(rInput, then(m.on((*proc).feed), hang)) },
		"reply is no success": func(m *machine) { m.script(rInput, then(m.on((*proc).feed), raw(200, "{"))) },
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				script(m)
				var mu sync.Mutex
				runs := 0
				res, err := m.exec(t.Context(), Command{Timeout: time.Hour}, func(p *proc) {
					mu.Lock()
					runs++
					mu.Unlock()
					hello(p)
					p.sleep(2 * time.Second)
				})
				require.NoError(t, err)
				assert.True(t, res.Success())
				assert.Equal(t, "hello world", string(res.Stdout))
				mu.Lock()
				assert.Equal(t, 1, runs)
				mu.Unlock()
				time.Sleep(2 * time.Minute) // the reply that never comes is given up
			})
		})
	}
}

func TestExecThatCannotBeStarted(t *testing.T) {
	loaderGivesUp := func(m *machine, why string) answerFunc {
		return m.on(func(p *proc, req *http.Request) (*http.Response, error) {
			id, _ := ourExecID(Process{Cmd: execShell, Args: p.args})
			p.out("stderr", "bash: cd: no such file\n")
			p.out("stderr", fmt.Sprintf("createos-exec %s: %s\n", id, why))
			p.end(exitCode(failCode), true)
			return ok(`{}`)(nil, req)
		})
	}
	t.Run("directory", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rInput, loaderGivesUp(m, failDirectory))
			res, err := m.exec(t.Context(), Command{Dir: "/no/such", TailBytes: 1}, hello)
			var start *StartError
			require.ErrorAs(t, err, &start)
			assert.EqualError(t, err, "createos: the command was not started: cannot enter the directory")
			assert.Equal(t, -1, res.ExitCode)
			assert.False(t, res.Success())
			m.requireNothingRuns()
		})
	})
	t.Run("message lost", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rInput, refuse(500), reset, then(loaderGivesUp(m, failNoCommand), refuse(503)))
			_, err := m.exec(t.Context(), Command{}, hello)
			var start *StartError
			require.ErrorAs(t, err, &start)
			assert.ErrorIs(t, err, ErrUnavailable, "why the message did not get there")
			m.requireNothingRuns()
		})
	})
	for _, status := range []int{400, 401, 403, 404, 413} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.always(rInput, refuse(status))
				began := time.Now()
				res, err := m.exec(t.Context(), Command{}, hello)
				var refused *RequestError
				require.ErrorAs(t, err, &refused)
				assert.Equal(t, status, refused.Status)
				assert.Less(t, time.Since(began), 10*time.Second)
				assert.False(t, res.Success())
				assert.Empty(t, m.only().script)
				m.requireNothingRuns()
			})
		})
	}
}

// keepFile is an upload.

// The line may have arrived, its reply lost: what becomes of its repetition says
// nothing about the command.
func TestExecKeepsItsDoubtAboutTheLine(t *testing.T) {
	for _, first := range []struct {
		name string
		a    answerFunc
	}{{"500", refuse(500)}, {"reset", reset}} {
		t.Run(first.name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rInput, then(m.on((*proc).feed), first.a), refuse(429), refuse(429), refuse(429), refuse(429))
				res, err := m.exec(t.Context(), Command{}, func(p *proc) { hello(p); p.sleep(time.Minute) })
				assert.NoError(t, err)
				assert.True(t, res.Success())
				assert.Zero(t, m.count(rKill))
			})
		})
	}
}
