package createos

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// onMachine runs a test with a machine on virtual time.
func onMachine(t *testing.T, f func(t *testing.T, m *machine)) {
	t.Helper()
	synctestMachine(t, func(*Config) {}, f)
}

func synctestMachine(t *testing.T, edit func(*Config), f func(t *testing.T, m *machine)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, DriverConfig{}, edit)
		f(t, m)
		synctest.Wait()
		quietDriver(t, m.d)
	})
}

func hello(p *proc) {
	p.out("stdout", "hello ")
	p.out("stderr", "oops")
	p.out("stdout", "world")
}

func TestExecTakesThreeRequests(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		var stdout, stderr bytes.Buffer
		res, err := m.exec(t.Context(), Command{Name: "go", Args: []string{"canary-arg"}, Env: Env(map[string]string{"K": "canary-env"}),
			Stdin: strings.NewReader("canary-in"), Stdout: &stdout, Stderr: &stderr}, hello)
		require.NoError(t, err)
		assert.Equal(t, []string{rSpawn, rConnect, rInput}, m.requests())
		assert.True(t, res.Success())
		assert.NoError(t, res.Err())
		assert.Zero(t, res.ExitCode)
		assert.Equal(t, "hello world", stdout.String())
		assert.Equal(t, "hello world", string(res.Stdout))
		assert.Equal(t, "oops", stderr.String())
		assert.Equal(t, "oops", string(res.Stderr))
		assert.EqualValues(t, 11, res.StdoutBytes)
		assert.EqualValues(t, 4, res.StderrBytes)
		assert.False(t, res.StdoutTruncated || res.StderrTruncated || res.TimedOut)
		assert.Empty(t, res.Warnings)

		p := m.only()
		assert.Contains(t, p.script, "exec -- 'go' 'canary-arg'")
		assert.Contains(t, p.script, "cd -P -- '"+DefaultWorkspace+"'")
		assert.NotContains(t, m.bodies[0], "canary", "nothing of the command is in the process list")
		id, ours := ourExecID(Process{Cmd: execShell, Args: p.args})
		assert.True(t, ours)
		assert.Len(t, id, 32)
		m.requireNothingRuns()
	})
}

func TestExecTheWaysACommandEnds(t *testing.T) {
	for _, tc := range []struct {
		fields string
		code   int
		signal string
		text   string
	}{
		{`"exit_code":0`, 0, "", ""},
		{`"exit_code":0,"signal":null`, 0, "", ""},
		{`"exit_code":3`, 3, "", "createos: command exited with code 3"},
		{`"exit_code":-1`, -1, "", "createos: command exited with code -1"},
		{`"exit_code":125`, 125, "", "createos: command exited with code 125"},
		{`"exit_code":126`, 126, "", "createos: command exited with code 126 (could not be executed)"},
		{`"exit_code":127`, 127, "", "createos: command exited with code 127 (not found)"},
		{`"exit_code":137`, 137, "", "createos: command exited with code 137 (killed, perhaps for want of memory)"},
		{`"exit_code":143`, 143, "", "createos: command exited with code 143 (asked to end)"},
		{`"signal":"SIGKILL"`, -1, "SIGKILL", "createos: command ended by SIGKILL (killed, perhaps for want of memory)"},
		{`"exit_code":137,"signal":"SIGKILL"`, 137, "SIGKILL", "createos: command ended by SIGKILL (killed, perhaps for want of memory)"},
		{`"exit_code":0,"signal":"SIGHUP"`, 0, "SIGHUP", "createos: command ended by SIGHUP"},
		{`"signal":"canary text of the provider"`, -1, "unrecognised", "createos: command ended by unrecognised"},
	} {
		t.Run(tc.fields, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				res, err := m.exec(t.Context(), Command{}, func(p *proc) { p.end(tc.fields, true) })
				require.NoError(t, err)
				assert.Equal(t, tc.code, res.ExitCode)
				assert.Equal(t, tc.signal, res.Signal)
				assert.Equal(t, tc.text == "", res.Success())
				if tc.text == "" {
					assert.NoError(t, res.Err())
					return
				}
				var exit *ExitError
				require.ErrorAs(t, res.Err(), &exit)
				assert.EqualError(t, exit, tc.text)
				assert.Zero(t, m.count(rKill))
			})
		})
	}
}

func TestExecNeverMakesUpAnExit(t *testing.T) {
	assert.False(t, (&Result{}).Success())
	assert.Error(t, (&Result{}).Err())
	assert.Error(t, (*Result)(nil).Err())
	for name, frames := range map[string]string{
		"neither code nor signal": `{"type":"exit"}`,
		"null":                    `{"type":"exit","exit_code":null}`,
		"a string":                `{"type":"exit","exit_code":"0"}`,
		"a fraction":              `{"type":"exit","exit_code":0.5}`,
		"garbage":                 `<html>canary</html>`,
		"too long":                strings.Repeat("x", maxFrameLine+1),
		"unknown stream":          `{"type":"data","seq":1,"stream":"other","data_base64":""}`,
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rConnect, streams(frames+"\n"))
				res, err := m.exec(t.Context(), Command{}, func(p *proc) { p.sleep(time.Hour) })
				require.ErrorIs(t, err, ErrInvalidResponse)
				assert.NotContains(t, err.Error(), "canary")
				assert.False(t, res.Success())
				assert.Equal(t, -1, res.ExitCode)
				assert.Error(t, res.Err())
				m.requireNothingRuns()
			})
		})
	}
}

func numbered(n int) (program func(*proc), want string) {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "line %d\n", i)
	}
	return func(p *proc) {
		for i := range n {
			p.out("stdout", fmt.Sprintf("line %d\n", i))
		}
	}, b.String()
}

func TestExecDeliversEachByteOnceAcrossReconnects(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		program, want := numbered(2000)
		overlap := m.on(func(p *proc, req *http.Request) (*http.Response, error) {
			q := req.URL.Query()
			q.Set("after", "0")
			req.URL.RawQuery = q.Encode()
			return p.stream(req, 1500, false)
		})
		m.script(rConnect, m.cutAfter(0), m.cutAfter(1), m.cutAfter(499), reset, m.cutAfter(1), overlap, m.endAfter(499), m.cutAfter(0))
		var out bytes.Buffer
		res, err := m.exec(t.Context(), Command{Stdout: &out}, program)
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.True(t, want == out.String())
		assert.True(t, want == string(res.Stdout))
		m.requireNothingRuns()
	})
}

func TestExecDrainsAfterTheExit(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		// Fast commands: the connection ends at once, without any event.
		m.script(rConnect, m.endAfter(0), m.endAfter(1), m.endAfter(2))
		var out bytes.Buffer
		res, err := m.exec(t.Context(), Command{Stdout: &out}, hello)
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Equal(t, "hello world", out.String())
	})
}

// An exit should be the last event of a stream. If it is not, what comes after it is
// delivered, or missed aloud.
func TestExecReadsOnAfterTheExit(t *testing.T) {
	for name, gap := range map[string]int{"whole": 0, "with a gap": 1} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rConnect, m.on(func(p *proc, _ *http.Request) (*http.Response, error) {
					time.Sleep(2 * time.Second) // the command is over by now
					data := func(seq int, stream, text string) string {
						return fmt.Sprintf(`{"type":"data","seq":%d,"stream":%q,"data_base64":%q}`+"\n", seq, stream, base64.StdEncoding.EncodeToString([]byte(text)))
					}
					return streaming(io.NopCloser(strings.NewReader(data(1, "stderr", acknowledgement(p.args[4])) + data(2, "stdout", "hello ") +
						`{"type":"exit","exit_code":0}` + "\n" + data(3+gap, "stdout", "world")))), nil
				}))
				var out bytes.Buffer
				res, err := m.exec(t.Context(), Command{Stdout: &out}, hello)
				if gap > 0 {
					var lost *OutputLostError
					require.ErrorAs(t, err, &lost)
					require.Equal(t, int64(3), lost.From)
					return
				}
				require.NoError(t, err)
				require.True(t, res.Success())
				require.Equal(t, "hello world", out.String())
			})
		})
	}
}

func TestExecLosesNothingSilently(t *testing.T) {
	endless := func(p *proc) { hello(p); p.sleep(time.Hour) }
	for name, tc := range map[string]struct {
		connect  func(m *machine) []answerFunc
		program  func(*proc)
		from, to int64
		code     int
	}{
		"gap": {func(*machine) []answerFunc {
			return []answerFunc{streams(`{"type":"data","seq":1,"stream":"stdout","data_base64":"YQ=="}` + "\n" + `{"type":"data","seq":5,"stream":"stdout","data_base64":"YQ=="}` + "\n")}
		}, endless, 2, 4, -1},
		"first is late": {func(*machine) []answerFunc {
			return []answerFunc{streams(`{"type":"data","seq":5001,"stream":"stdout","data_base64":"YQ=="}` + "\n")}
		}, endless, 1, 5000, -1},
		"410": {func(*machine) []answerFunc {
			return []answerFunc{raw(http.StatusGone, `{"status":"fail","data":{"code":"output_offset_expired","oldest_available_seq":12}}`)}
		}, endless, 1, 11, -1},
		"410 without a number": {func(*machine) []answerFunc { return []answerFunc{refuse(http.StatusGone)} }, endless, 1, 0, -1},
		"in the stream": {func(*machine) []answerFunc {
			return []answerFunc{streams(`{"type":"data","seq":1,"stream":"stdout","data_base64":"YQ=="}` + "\n" + `{"type":"error","error":"output_offset_expired","oldest_available_seq":9}` + "\n")}
		}, endless, 2, 8, -1},
		"in the stream without a number": {func(*machine) []answerFunc {
			return []answerFunc{streams(`{"type":"error","error":"output_offset_expired"}` + "\n")}
		}, endless, 1, 0, -1},
		"after the exit": {func(m *machine) []answerFunc {
			return append([]answerFunc{m.endAfter(2)}, repeat(20, m.endAfter(0))...)
		}, hello, 3, 4, 0},
		"the exit is known": {func(*machine) []answerFunc {
			return []answerFunc{then(func(*provider, *http.Request) (*http.Response, error) {
				time.Sleep(5 * time.Second)
				return nil, nil
			}, refuse(http.StatusGone))}
		}, func(p *proc) { p.end(exitCode(3), true) }, 1, 0, 3},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rConnect, tc.connect(m)...)
				res, err := m.exec(t.Context(), Command{}, tc.program)
				var lost *OutputLostError
				require.ErrorAs(t, err, &lost)
				assert.Equal(t, &OutputLostError{From: tc.from, To: tc.to}, lost)
				assert.Equal(t, tc.code, res.ExitCode)
				assert.False(t, res.Success())
				assert.Error(t, res.Err())
				m.requireNothingRuns()
			})
		})
	}
}

func TestExecFollowsALongCommandOverManyCuts(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		trouble := []answerFunc{refuse(429), refuse(502), reset, raw(200, `{}`), refuse(503)}
		for i := range 40 {
			m.script(rConnect, m.cutAfter(1+i%3))
			m.script(rWait, trouble[i%len(trouble)])
		}
		var out bytes.Buffer
		res, err := m.exec(t.Context(), Command{Stdout: &out, Timeout: time.Hour}, func(p *proc) {
			for i := range 60 {
				p.sleep(30 * time.Second)
				p.out("stdout", fmt.Sprint(i, ";"))
			}
		})
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Equal(t, 60, strings.Count(out.String(), ";"))
		assert.GreaterOrEqual(t, res.Duration, 30*time.Minute)
	})
}

func TestExecGivesUpOnADeadEnd(t *testing.T) {
	for name, script := range map[string]func(m *machine){
		"streams end, wait fails":   func(m *machine) { m.always(rConnect, m.endAfter(0)); m.always(rWait, refuse(500)) },
		"streams end, command runs": func(m *machine) { m.always(rConnect, m.endAfter(0)) },
		"no connection":             func(m *machine) { m.always(rConnect, reset) },
		"no connection, 503":        func(m *machine) { m.always(rConnect, refuse(503)) },
		"wait knows no exit": func(m *machine) {
			m.always(rConnect, m.endAfter(0))
			m.always(rWait, ok(`{"process_id":"proc-1","leader_exited":true}`))
		},
		"wait does not count output": func(m *machine) {
			m.always(rConnect, m.endAfter(0))
			m.always(rWait, ok(`{"process_id":"proc-1","leader_exited":true,"exit_code":0}`))
		},
		"silence":     func(m *machine) { m.heartbeat = time.Hour },
		"refused":     func(m *machine) { m.always(rConnect, refuse(401)) },
		"record gone": func(m *machine) { m.always(rConnect, refuse(404)) },
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				script(m)
				began := time.Now()
				res, err := m.exec(t.Context(), Command{Timeout: 24 * time.Hour}, func(p *proc) { p.sleep(25 * time.Hour) })
				require.Error(t, err)
				assert.NotErrorIs(t, err, context.Canceled)
				assert.NotErrorIs(t, err, io.EOF)
				assert.Less(t, time.Since(began), 10*time.Minute)
				assert.Equal(t, -1, res.ExitCode)
				assert.False(t, res.Success())
				m.requireNothingRuns()
			})
		})
	}
}

func TestExecOfASandboxThatGoesAway(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.script(rConnect, m.cutAfter(2))
		for _, route := range []string{rConnect, rWait, rKill, rGet, rProcess, rProcesses} {
			m.always(route, refuse(404))
		}
		res, err := m.exec(t.Context(), Command{}, func(p *proc) { hello(p); p.sleep(time.Minute) })
		require.ErrorIs(t, err, ErrLeaseGone)
		assert.NotErrorIs(t, err, ErrUnjudged)
		assert.Equal(t, "hello ", string(res.Stdout))
		assert.Empty(t, m.d.Unconfirmed(), "what is gone runs nothing")
		time.Sleep(time.Minute)
	})
}

func TestExecTimeout(t *testing.T) {
	for name, tc := range map[string]struct {
		config, command, want time.Duration
	}{
		"of the configuration": {10 * time.Second, 0, 10 * time.Second},
		"longer":               {10 * time.Second, 5 * time.Minute, 5 * time.Minute},
		"shorter":              {10 * time.Second, time.Second, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, DriverConfig{}, func(c *Config) { c.Timeout = tc.config })
				m.script(rSpawn, then(func(*provider, *http.Request) (*http.Response, error) {
					time.Sleep(2 * time.Second) // is not charged to the command
					return nil, nil
				}, m.spawn))
				var out bytes.Buffer
				res, err := m.exec(t.Context(), Command{Stdout: &out, Timeout: tc.command}, func(p *proc) { hello(p); p.sleep(time.Hour) })
				require.NoError(t, err)
				assert.True(t, res.TimedOut)
				assert.Equal(t, -1, res.ExitCode)
				assert.Empty(t, res.Signal, "the signal was ours")
				assert.False(t, res.Success())
				require.ErrorIs(t, res.Err(), ErrTimeout)
				assert.EqualError(t, res.Err(), "createos: command timed out")
				assert.Equal(t, "hello world", out.String())
				assert.InDelta(t, tc.want, res.Duration, float64(100*time.Millisecond))
				m.requireNothingRuns()
			})
		})
	}
}

// The time of a command begins with a message that may have started it: what it takes
// to get one accepted is not the command's.
func TestExecTimeoutLeavesOutWhatComesBeforeTheStart(t *testing.T) {
	slow := func(s string) answerFunc {
		return then(func(*provider, *http.Request) (*http.Response, error) {
			time.Sleep(20 * time.Second)
			return nil, nil
		}, becomes(stateRunning, `{"id":"`+box+`","status":"`+s+`"}`))
	}
	for name, prepare := range map[string]func(m *machine){
		"the sandbox was paused": func(m *machine) {
			m.script(rInput, func(p *provider, req *http.Request) (*http.Response, error) {
				m.setState(statePaused)
				return refuse(409)(p, req)
			})
			m.script(rResume, slow(stateResuming))
		},
		"too many requests": func(m *machine) {
			m.script(rInput, func(*provider, *http.Request) (*http.Response, error) {
				r := jsonResponse(429, `{"status":"fail","data":"x"}`)
				r.Header.Set("Retry-After", "20")
				return r, nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				prepare(m)
				res, err := m.exec(t.Context(), Command{Timeout: 10 * time.Second}, func(p *proc) { hello(p); p.sleep(2 * time.Second) })
				require.NoError(t, err)
				require.True(t, res.Success())
				require.Less(t, res.Duration, 10*time.Second)
				res, err = m.exec(t.Context(), Command{Timeout: 10 * time.Second}, func(p *proc) { hello(p); p.sleep(time.Minute) })
				require.NoError(t, err)
				require.True(t, res.TimedOut)
			})
		})
	}
}

// A command of which it is not known that it was started is not called ended for its
// time.
func TestExecTimeoutOfACommandThatWasNotStarted(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rInput, refuse(409))
		res, err := m.exec(t.Context(), Command{Timeout: 10 * time.Second}, hello)
		require.ErrorIs(t, err, ErrTimeout)
		require.ErrorIs(t, err, ErrConflict)
		require.False(t, res.TimedOut)
	})
}

func TestExecIsNotTimedOutWhenOnlyItsOutputIsLate(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		slow := writerFunc(func(p []byte) (int, error) {
			time.Sleep(4 * time.Second)
			return len(p), nil
		})
		res, err := m.exec(t.Context(), Command{Stdout: slow, Timeout: 2 * time.Second}, hello)
		require.NoError(t, err)
		assert.False(t, res.TimedOut)
		assert.True(t, res.Success())
		assert.Zero(t, m.count(rKill))
	})
	onMachine(t, func(t *testing.T, m *machine) {
		release := make(chan struct{})
		stuck := writerFunc(func(p []byte) (int, error) { <-release; return len(p), nil })
		res, err := m.exec(t.Context(), Command{Stdout: stuck, Timeout: 2 * time.Second}, func(p *proc) { hello(p); p.end(exitCode(3), true) })
		var lost *OutputLostError
		require.ErrorAs(t, err, &lost)
		assert.Equal(t, &OutputLostError{From: 3, To: 4}, lost)
		assert.Equal(t, 3, res.ExitCode)
		assert.False(t, res.Success())
		m.requireNothingRuns()
		close(release)
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestExecEndsAreToldApart(t *testing.T) {
	cause := errors.New("caller's cause")
	for name, tc := range map[string]struct {
		end  func(m *machine, cancel context.CancelCauseFunc)
		is   []error
		not  []error
		text string
	}{
		"caller":   {func(_ *machine, cancel context.CancelCauseFunc) { cancel(nil) }, []error{context.Canceled}, []error{ErrLeaseClosing, ErrShutdown, ErrTimeout}, "createos: exec: context canceled"},
		"cause":    {func(_ *machine, cancel context.CancelCauseFunc) { cancel(cause) }, []error{context.Canceled, cause}, []error{ErrLeaseClosing}, "createos: exec: context canceled: caller's cause"},
		"destroy":  {func(m *machine, _ context.CancelCauseFunc) { _ = m.d.Destroy(context.Background(), m.env, m.lease) }, []error{ErrLeaseClosing}, []error{context.Canceled, ErrShutdown, ErrTimeout}, "createos: exec: " + ErrLeaseClosing.Error()},
		"shutdown": {func(m *machine, _ context.CancelCauseFunc) { _ = m.d.Shutdown(context.Background()) }, []error{ErrShutdown}, []error{context.Canceled, ErrTimeout}, "createos: exec: " + ErrShutdown.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				var wg sync.WaitGroup
				wg.Go(func() {
					time.Sleep(10 * time.Second)
					tc.end(m, cancel)
				})
				res, err := m.exec(ctx, Command{}, func(p *proc) { hello(p); p.sleep(time.Hour) })
				wg.Wait()
				for _, is := range tc.is {
					assert.ErrorIs(t, err, is)
				}
				for _, not := range tc.not {
					assert.NotErrorIs(t, err, not)
				}
				assert.EqualError(t, err, tc.text)
				assert.Equal(t, "hello world", string(res.Stdout))
				assert.Equal(t, -1, res.ExitCode)
				assert.False(t, res.Success() || res.TimedOut)
				assert.Equal(t, 1, m.count(rKill))
				m.requireNothingRuns()
			})
		})
	}
	t.Run("deadline", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := m.exec(ctx, Command{}, func(p *proc) { p.sleep(time.Hour) })
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.NotErrorIs(t, err, ErrTimeout)
			m.requireNothingRuns()
		})
	})
	t.Run("before it began", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			res, err := m.exec(ctx, Command{}, hello)
			require.ErrorIs(t, err, context.Canceled)
			assert.NotNil(t, res)
			assert.Empty(t, m.requests())
		})
	})
}

func TestExecWaitsForTheWholeTree(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(time.Second)
			cancel()
			time.Sleep(300 * time.Millisecond)
			cancel() // changes nothing
		})
		_, err := m.exec(ctx, Command{}, func(p *proc) {
			p.mu.Lock()
			p.stubborn = 3
			p.mu.Unlock()
			p.sleep(time.Hour)
		})
		wg.Wait()
		require.ErrorIs(t, err, context.Canceled)
		assert.NotErrorIs(t, err, ErrTerminationUnproven)
		assert.Equal(t, 4, m.count(rKill))
		m.requireNothingRuns()
	})
}

func TestExecTerminationWithoutProofPoisons(t *testing.T) {
	alive := ok(`{"process_id":"proc-1","leader_exited":true,"tree_exited":false}`)
	for name, answers := range map[string]func(m *machine){
		"alive for ever":     func(m *machine) { m.always(rKill, alive) },
		"errors for ever":    func(m *machine) { m.always(rKill, refuse(500)) },
		"resets for ever":    func(m *machine) { m.always(rKill, reset) },
		"garbage for ever":   func(m *machine) { m.always(rKill, raw(200, `{`)) },
		"hangs":              func(m *machine) { m.always(rKill, hang) },
		"refused":            func(m *machine) { m.always(rKill, refuse(403)) },
		"alive, 500, 404":    func(m *machine) { m.script(rKill, alive, refuse(500)); m.always(rKill, refuse(404)) },
		"page of a gateway":  func(m *machine) { m.always(rKill, raw(404, "<html>")) },
		"says nothing of it": func(m *machine) { m.always(rKill, ok(`{"process_id":"proc-1"}`)) },
	} {
		for how, timeout := range map[string]time.Duration{"time-out": time.Second, "cancel": time.Hour} {
			t.Run(name+"/"+how, func(t *testing.T) {
				onMachine(t, func(t *testing.T, m *machine) {
					answers(m)
					ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errTest)
					defer cancel()
					began := time.Now()
					res, err := m.exec(ctx, Command{Timeout: timeout}, func(p *proc) { hello(p); <-p.killed })
					m.only().kill(&http.Request{})
					require.ErrorIs(t, err, ErrTerminationUnproven)
					assert.EqualError(t, err, ErrTerminationUnproven.Error())
					if how == "cancel" {
						assert.ErrorIs(t, err, errTest)
						assert.False(t, res.TimedOut)
					} else {
						assert.ErrorIs(t, err, ErrTimeout)
						assert.True(t, res.TimedOut)
					}
					assert.NotErrorIs(t, err, context.Canceled)
					assert.Equal(t, "hello world", string(res.Stdout))
					assert.Less(t, time.Since(began), 2*time.Minute)
					all := m.d.Unconfirmed()
					require.Len(t, all, 1)
					assert.Equal(t, ProcessUnproven, all[0].Kind)
					require.Len(t, all[0].Processes, 1)
					assert.Regexp(t, `^exec:[0-9a-f]{32}:proc-1$`, all[0].Processes[0])
					assert.Equal(t, box, all[0].SandboxID)

					m.requests()
					_, err = m.exec(t.Context(), Command{}, hello)
					require.ErrorIs(t, err, ErrLeaseClosing)
					assert.EqualError(t, err, ErrLeaseClosing.Error())
					assert.Empty(t, m.requests())
					require.NoError(t, m.d.Destroy(t.Context(), m.env, m.lease))
					assert.Empty(t, m.d.Unconfirmed())
				})
			})
		}
	}
}

func TestExecTerminationWithProof(t *testing.T) {
	for name, answers := range map[string]func(m *machine){
		"not found":    func(m *machine) { m.script(rKill, then(m.on((*proc).kill), refuse(404))) },
		"reply lost":   func(m *machine) { m.script(rKill, then(m.on((*proc).kill), reset)) },
		"500 twice":    func(m *machine) { m.script(rKill, repeat(6, refuse(500))...) },
		"paused":       func(m *machine) { m.script(rKill, then(shows(statePaused), refuse(409))) },
		"garbage once": func(m *machine) { m.script(rKill, raw(200, `[]`)) },
		"sandbox destroyed": func(m *machine) {
			m.always(rKill, then(m.on((*proc).kill), then(shows(stateDestroyed), raw(404, "<html>"))))
		},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				answers(m)
				res, err := m.exec(t.Context(), Command{Timeout: time.Second}, func(p *proc) { hello(p); <-p.killed })
				require.NoError(t, err)
				assert.True(t, res.TimedOut)
				m.requireNothingRuns()
			})
		})
	}
}
