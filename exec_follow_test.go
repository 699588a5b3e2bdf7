package createos

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// The stream may go on for as long as the tree lives.
func TestExecEndsAtTheExitWhileLeftoversPrint(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.exitAtTree = true
		began := time.Now()
		res, err := m.exec(t.Context(), Command{Timeout: 10 * time.Minute}, func(p *proc) {
			p.out("stdout", "done")
			p.end(exitCode(0), false)
			for {
				select {
				case <-p.killed:
					return
				case <-time.After(time.Second):
					p.out("stdout", ".")
				}
			}
		})
		took := time.Since(began)
		var lost *OutputLostError
		if errors.As(err, &lost) {
			assert.True(t, lost.To == 0 || lost.From <= lost.To, "range %d to %d", lost.From, lost.To)
		}
		assert.NoError(t, err)
		assert.True(t, res.Success())
		assert.Less(t, took, 2*time.Minute, "a command that exits by itself ends Exec at its exit")
		assert.Zero(t, m.count(rKill), "what it leaves behind goes on")
		_, _ = m.only().kill(&http.Request{})
	})
}

// One 404 to a reconnect is no reason to end a command.
func TestExecOutlivesANotFoundOfItsOutput(t *testing.T) {
	for name, a := range map[string]answerFunc{"api": refuse(404), "page of a gateway": raw(404, "<html>")} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rConnect, m.cutAfter(2), a)
				res, err := m.exec(t.Context(), Command{}, func(p *proc) { hello(p); p.sleep(time.Minute) })
				assert.NoError(t, err)
				assert.True(t, res.Success())
				assert.Zero(t, m.count(rKill))
			})
		})
	}
}

// A question that hangs does not hold up the output.
func TestExecDeliversWhileItAsksForTheExit(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.always(rWait, hang)
		var late time.Duration
		var printed time.Time
		w := writerFunc(func(p []byte) (int, error) { late = time.Since(printed); return len(p), nil })
		_, err := m.exec(t.Context(), Command{Stdout: w}, func(p *proc) {
			p.sleep(12 * time.Second)
			printed = time.Now()
			p.out("stdout", "x")
			p.sleep(time.Second)
		})
		assert.NoError(t, err)
		assert.Less(t, late, 5*time.Second, "output is delivered live")
	})
}

// An exit event counts, whatever a later question is answered.
func TestExecBelievesAnExitThatWasRead(t *testing.T) {
	onMachine(t, func(t *testing.T, m *machine) {
		m.script(rConnect, m.cutAfter(1))
		m.always(rWait, refuse(408))
		res, err := m.exec(t.Context(), Command{}, hello)
		assert.NoError(t, err)
		assert.Equal(t, "hello world", string(res.Stdout))
		assert.True(t, res.Success())
		assert.Zero(t, m.count(rKill))
	})
}
