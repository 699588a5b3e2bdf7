package createos

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestExecWriters(t *testing.T) {
	t.Run("an error ends the delivery, not the command", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			writes := 0
			bad := writerFunc(func(p []byte) (int, error) { writes++; return 0, errTest })
			var stderr bytes.Buffer
			res, err := m.exec(t.Context(), Command{Stdout: bad, Stderr: &stderr}, hello)
			require.ErrorIs(t, err, errTest)
			assert.EqualError(t, err, "createos: exec: write to Command.Stdout: test")
			assert.Equal(t, 1, writes)
			assert.Equal(t, "oops", stderr.String())
			assert.True(t, res.Success())
			assert.Equal(t, "hello world", string(res.Stdout))
			assert.Zero(t, m.count(rKill))
		})
	})
	t.Run("a short write is an error", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			res, err := m.exec(t.Context(), Command{Stderr: writerFunc(func(p []byte) (int, error) { return len(p) - 1, nil })}, hello)
			require.ErrorIs(t, err, io.ErrShortWrite)
			assert.True(t, res.Success())
		})
	})
	t.Run("a fixed text stays as it is", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.always(rKill, refuse(500))
			bad := writerFunc(func(p []byte) (int, error) { return 0, errTest })
			_, err := m.exec(t.Context(), Command{Stdout: bad, Timeout: time.Second}, func(p *proc) { hello(p); p.sleep(time.Hour) })
			require.ErrorIs(t, err, errTest)
			assert.EqualError(t, err, ErrTerminationUnproven.Error())
			m.only().kill(&http.Request{})
		})
	})
	t.Run("one at a time", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			var mu sync.Mutex
			both := writerFunc(func(p []byte) (int, error) {
				assert.True(t, mu.TryLock())
				defer mu.Unlock()
				time.Sleep(time.Second)
				return len(p), nil
			})
			_, err := m.exec(t.Context(), Command{Stdout: both, Stderr: both}, hello)
			require.NoError(t, err)
		})
	})
	t.Run("live", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			began := time.Now()
			var at []time.Duration
			live := writerFunc(func(p []byte) (int, error) { at = append(at, time.Since(began)); return len(p), nil })
			_, err := m.exec(t.Context(), Command{Stdout: live}, func(p *proc) {
				for range 5 {
					p.out("stdout", ".")
					p.sleep(200 * time.Millisecond)
				}
			})
			require.NoError(t, err)
			for i, d := range at {
				assert.Equal(t, time.Duration(i)*200*time.Millisecond, d)
			}
			assert.Len(t, at, 5)
		})
	})
	t.Run("one that blocks holds nothing up for longer than the bound", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			release := make(chan struct{})
			var writes atomic.Int32
			stuck := writerFunc(func(p []byte) (int, error) { writes.Add(1); <-release; return len(p), nil })
			var wg sync.WaitGroup
			var err error
			wg.Go(func() {
				_, err = m.exec(context.Background(), Command{Stdout: stuck}, func(p *proc) { hello(p); p.sleep(time.Hour) })
			})
			time.Sleep(time.Second)
			began := time.Now()
			require.NoError(t, m.d.Destroy(t.Context(), m.env, m.lease))
			assert.LessOrEqual(t, time.Since(began), DefaultCleanupTimeout+time.Second)
			wg.Wait()
			require.ErrorIs(t, err, ErrLeaseClosing)
			close(release)
			time.Sleep(time.Second)
			assert.EqualValues(t, 1, writes.Load(), "nothing is delivered after Exec returned")
		})
	})
}

func TestExecTails(t *testing.T) {
	text := strings.Repeat("日本語 🧪 é", 10)
	onMachine(t, func(t *testing.T, m *machine) {
		m.script(rConnect, m.cutAfter(7))
		var out, errs bytes.Buffer
		res, err := m.exec(t.Context(), Command{Stdout: &out, Stderr: &errs, TailBytes: 11}, func(p *proc) {
			for i := range len(text) {
				p.out("stdout", text[i:i+1])
				p.out("stderr", text[i:i+1])
			}
		})
		require.NoError(t, err)
		assert.Equal(t, text, out.String())
		assert.Equal(t, text, errs.String())
		assert.Equal(t, "語 🧪 é", string(res.Stdout)[max(0, len(string(res.Stdout))-len("語 🧪 é")):])
		assert.LessOrEqual(t, len(res.Stdout), 11)
		assert.True(t, res.StdoutTruncated && res.StderrTruncated)
		assert.EqualValues(t, len(text), res.StdoutBytes)
		assert.Equal(t, res.Stdout, res.Stderr)
	})
}

func TestExecLeavesBackgroundWorkAlone(t *testing.T) {
	server := func(p *proc) { hello(p); p.end(exitCode(0), false); <-p.killed }
	t.Run("exit held back", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.exitAtTree = true
			began := time.Now()
			res, err := m.exec(t.Context(), Command{}, server)
			require.NoError(t, err)
			assert.True(t, res.Success())
			assert.Equal(t, "hello world", string(res.Stdout))
			assert.Equal(t, 2*m.heartbeat, time.Since(began))
			assert.Zero(t, m.count(rKill))
			m.only().kill(&http.Request{})
		})
	})
	t.Run("few questions about a quiet command", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			_, err := m.exec(t.Context(), Command{Timeout: 2 * time.Hour}, func(p *proc) { p.sleep(time.Hour) })
			require.NoError(t, err)
			assert.Less(t, m.count(rWait), 40)
			assert.Equal(t, 1, m.count(rConnect))
		})
	})
	onMachine(t, func(t *testing.T, m *machine) {
		res, err := m.exec(t.Context(), Command{}, server)
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Zero(t, m.count(rKill))
		m.only().kill(&http.Request{})
	})
	onMachine(t, func(t *testing.T, m *machine) {
		res, err := m.exec(t.Context(), Command{EndTree: true}, server)
		require.NoError(t, err)
		assert.True(t, res.Success())
		assert.Equal(t, 1, m.count(rKill))
		m.requireNothingRuns()
	})
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rKill, refuse(500))
		res, err := m.exec(t.Context(), Command{EndTree: true}, server)
		require.ErrorIs(t, err, ErrTerminationUnproven)
		assert.True(t, res.Success(), "the command itself did")
		assert.Equal(t, []DebtKind{ProcessUnproven}, kinds(m.d))
		m.only().kill(&http.Request{})
	})
}
