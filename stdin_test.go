package createos

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestExecStandardInput(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789abcde\x00"), (20<<20)/16)
	big = append(big, 0xff, '\n')
	for name, tc := range map[string]struct {
		in    []byte
		parts int
	}{
		"empty": {[]byte{}, 0}, "a byte": {[]byte{0}, 0}, "inline": {big[:inlineStdin], 0}, "just above": {big[:inlineStdin+1], 1},
		"300 KiB": {big[:300<<10], 1}, "one part": {big[:stdinPart], 1}, "a byte more": {big[:stdinPart+1], 2}, "20 MiB": {big, 3},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				var got []byte
				m.files = map[string]string{}
				m.always(rPut, m.keepFile)
				res, err := m.exec(t.Context(), Command{Stdin: iotest.HalfReader(bytes.NewReader(tc.in))}, hello)
				require.NoError(t, err)
				assert.True(t, res.Success())
				script := m.only().script
				assert.Equal(t, tc.parts, m.count(rPut))
				if tc.parts == 0 {
					assert.Equal(t, []string{rSpawn, rConnect, rInput}, m.requests())
					assert.Equal(t, len(tc.in) > 0, strings.Contains(script, "base64 -d >&4"))
					return
				}
				for i := range tc.parts {
					for path, data := range m.files {
						if strings.HasSuffix(path, fmt.Sprintf("/part.%d", i)) {
							got = append(got, data...)
						}
					}
				}
				assert.True(t, bytes.Equal(tc.in, got))
				assert.Contains(t, script, "rm -rf -- '/.createos-")
				log := m.requests()
				assert.Equal(t, rExec, log[0])
				assert.Equal(t, []string{rSpawn, rConnect, rInput}, log[len(log)-3:], "staged before the process exists, and the script cleans up")
			})
		})
	}
}

func (m *machine) keepFile(_ *provider, req *http.Request) (*http.Response, error) {
	data, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.files[req.URL.Query().Get("path")] = string(data)
	m.mu.Unlock()
	return ok(`{}`)(nil, nil)
}

func TestExecOfALargeScript(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rPut, m.keepFile)
		args := []string{strings.Repeat("a", 100_000), strings.Repeat("b", 100_000), strings.Repeat("c", 100_000)}
		res, err := m.exec(t.Context(), Command{Name: "wc", Args: args, Stdin: strings.NewReader("small")}, hello)
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Contains(t, m.only().script, "/script'")
		assert.Less(t, len(m.only().script), 1000)
		for path, data := range m.files {
			switch {
			case strings.HasSuffix(path, "/script"):
				assert.Contains(t, data, args[2])
				assert.NotContains(t, data, "base64", "small input is a part too")
			case strings.HasSuffix(path, "/part.0"):
				assert.Equal(t, "small", data)
			default:
				t.Errorf("unexpected file %s", path)
			}
		}
	})
}

func TestExecDoesNotStartWithoutItsInput(t *testing.T) {
	much := func() io.Reader { return bytes.NewReader(make([]byte, 9<<20)) }
	isRemoved := func(t *testing.T, m *machine) {
		assert.Zero(t, m.count(rSpawn))
		assert.Equal(t, 2, m.count(rExec), "made and removed")
		m.requireNothingRuns()
	}
	for name, tc := range map[string]struct {
		script func(m *machine)
		in     io.Reader
		check  func(t *testing.T, err error)
	}{
		"upload refused": {func(m *machine) { m.always(rPut, refuse(413)) }, much(), func(t *testing.T, err error) { require.ErrorIs(t, err, ErrInvalidRequest) }},
		"upload fails":   {func(m *machine) { m.always(rPut, refuse(500)) }, much(), func(t *testing.T, err error) { require.ErrorIs(t, err, ErrUnavailable) }},
		"reader fails":   {nil, io.MultiReader(much(), iotest.ErrReader(errTest)), func(t *testing.T, err error) { require.ErrorIs(t, err, errTest) }},
		"too long": {nil, io.LimitReader(zeros{}, MaxStdin+1), func(t *testing.T, err error) {
			var input *InputError
			require.ErrorAs(t, err, &input)
			assert.Equal(t, "Command.Stdin", input.Field)
		}},
		"no directory": {func(m *machine) { m.script(rExec, ok(`{"result":{"stdout":"","stderr":"canary","exit_code":1}}`)) }, much(), func(t *testing.T, err error) {
			var start *StartError
			require.ErrorAs(t, err, &start)
		}},
		"directory unknown": {func(m *machine) { m.script(rExec, reset) }, much(), func(t *testing.T, err error) { require.ErrorIs(t, err, ErrConnection) }},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.files = map[string]string{}
				if tc.script != nil {
					tc.script(m)
				}
				res, err := m.exec(t.Context(), Command{Stdin: tc.in}, hello)
				tc.check(t, err)
				assert.Empty(t, res.Warnings)
				isRemoved(t, m)
			})
		})
	}
	t.Run("reader fails at once", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			_, err := m.exec(t.Context(), Command{Stdin: iotest.ErrReader(errTest)}, hello)
			require.ErrorIs(t, err, errTest)
			assert.Empty(t, m.requests())
		})
	})
	t.Run("reader blocks", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			r, w := io.Pipe()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := m.exec(ctx, Command{Stdin: r}, hello)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.Empty(t, m.requests())
			_ = w.Close()
		})
	})
	t.Run("exactly the limit", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.always(rPut, func(_ *provider, req *http.Request) (*http.Response, error) {
				_, err := io.Copy(io.Discard, req.Body)
				if err != nil {
					return nil, err
				}
				return ok(`{}`)(nil, nil)
			})
			res, err := m.exec(t.Context(), Command{Stdin: io.LimitReader(zeros{}, MaxStdin)}, hello)
			require.NoError(t, err)
			assert.True(t, res.Success())
		})
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestExecLeavesNothingOfItsInputBehind(t *testing.T) {
	much := func() io.Reader { return bytes.NewReader(make([]byte, 200<<10)) }
	t.Run("timed out", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.unacknowledged = true
			res, err := m.exec(t.Context(), Command{Stdin: much(), Timeout: time.Second}, func(p *proc) { p.sleep(time.Hour) })
			require.NoError(t, err)
			assert.True(t, res.TimedOut)
			assert.Equal(t, 2, m.count(rExec))
		})
	})
	for _, fields := range []string{`"signal":"SIGKILL"`, `"exit_code":137,"signal":"SIGKILL"`} {
		killed := func(p *proc) { p.end(fields, true) }
		t.Run("killed while it stages "+fields, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.unacknowledged = true
				res, err := m.exec(t.Context(), Command{Stdin: much()}, killed)
				var start *StartError
				require.ErrorAs(t, err, &start)
				assert.Contains(t, start.Problem, "was ended by SIGKILL")
				assert.Empty(t, res.Signal, "not of the command")
				assert.Equal(t, -1, res.ExitCode)
				assert.Equal(t, 2, m.count(rExec), "made and removed")
			})
		})
		t.Run("killed later "+fields, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				res, err := m.exec(t.Context(), Command{Stdin: much()}, killed)
				require.NoError(t, err)
				assert.Equal(t, "SIGKILL", res.Signal)
				assert.Equal(t, 1, m.count(rExec), "the script has removed it")
			})
		})
	}
	t.Run("a failure is a warning", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rExec, ok(`{"result":{"stdout":"","stderr":"","exit_code":0}}`))
			m.always(rExec, refuse(500))
			m.unacknowledged = true
			res, err := m.exec(t.Context(), Command{Stdin: much(), Timeout: time.Second}, func(p *proc) { p.sleep(time.Hour) })
			require.NoError(t, err)
			require.Len(t, res.Warnings, 1)
			assert.ErrorIs(t, res.Warnings[0], ErrUnavailable)
			assert.True(t, res.TimedOut)
			m.requireNothingRuns()
		})
	})
}

// A reader that is cut says io.ErrUnexpectedEOF, as net/http bodies, gzip and
// tar do: that is no end.
func TestExecDoesNotStartWithAnInputThatIsCut(t *testing.T) {
	for name, n := range map[string]int{"inline": 10, "staged": 200 << 10} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.always(rPut, m.keepFile)
				in := io.MultiReader(bytes.NewReader(make([]byte, n)), iotest.ErrReader(io.ErrUnexpectedEOF))
				_, err := m.exec(t.Context(), Command{Stdin: in}, hello)
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
				assert.Zero(t, m.count(rSpawn))
			})
		})
	}
}

// A Read that blocks is left behind, and no other follows it.
func TestExecStopsReadingItsInputWhenItEnds(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		var reads atomic.Int32
		slow := readerFunc(func(p []byte) (int, error) {
			if reads.Add(1) > 1000 {
				return 0, io.EOF
			}
			time.Sleep(2 * time.Second)
			return copy(p, "x"), nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := m.exec(ctx, Command{Stdin: slow}, hello)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		time.Sleep(10 * time.Second)
		got := reads.Load()
		time.Sleep(time.Hour) // let it end
		assert.EqualValues(t, 1, got, "a goroutine that ends when the Read does")
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// A writer that blocks does not keep staged input from being removed.
func TestExecRemovesItsInputWhileAWriterBlocks(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		release := make(chan struct{})
		stuck := writerFunc(func(p []byte) (int, error) { <-release; return len(p), nil })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		m.unacknowledged = true // the text comes from a login profile
		res, _ := m.exec(ctx, Command{Stdin: bytes.NewReader(make([]byte, 200<<10)), Stdout: stuck}, func(p *proc) { hello(p); p.sleep(time.Hour) })
		assert.Equal(t, 2, m.count(rExec), "mkdir and rm; warnings: %v", res.Warnings)
		close(release)
	})
}

// An upload that was sent is waited for, or it would land after the removal.
func TestExecRemovesItsInputAfterTheLastUpload(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.script(rPut, func(_ *provider, req *http.Request) (*http.Response, error) {
			data, err := io.ReadAll(req.Body)
			if err != nil {
				return nil, err
			}
			time.Sleep(3 * time.Second)
			m.mu.Lock()
			m.files[req.URL.Query().Get("path")] = string(data)
			m.mu.Unlock()
			return ok(`{}`)(nil, nil)
		})
		removes := func(*provider, *http.Request) (*http.Response, error) {
			m.mu.Lock()
			clear(m.files)
			m.mu.Unlock()
			return ok(`{"result":{"stdout":"","stderr":"","exit_code":0}}`)(nil, nil)
		}
		m.always(rExec, removes)
		m.files = map[string]string{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		res, err := m.exec(ctx, Command{Stdin: strings.NewReader(strings.Repeat("canary", 40<<10))}, hello)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Empty(t, res.Warnings)
		time.Sleep(time.Minute)
		m.mu.Lock()
		defer m.mu.Unlock()
		for name, data := range m.files {
			t.Errorf("left behind: %s with %d bytes of the input", name, len(data))
		}
	})
}

func TestExecWarnsOfAnUploadThatIsNeverAnswered(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rPut, then(m.keepFile, hang))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		res, err := m.exec(ctx, Command{Stdin: strings.NewReader(strings.Repeat("x", 200<<10))}, hello)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, []error{errLate}, res.Warnings)
		assert.Equal(t, 2, m.count(rExec))
		assert.Less(t, time.Since(began), time.Minute)
	})
}
