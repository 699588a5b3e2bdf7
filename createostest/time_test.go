package createostest

import (
	"context"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTransitionsTakeTheirTime(t *testing.T) {
	opts := Options{BootDelay: time.Second, PauseDelay: 2 * time.Second, ResumeDelay: 3 * time.Second, DestroyDelay: 4 * time.Second}
	inBubble(t, opts, func(t *testing.T, c *client) {
		began := time.Now()
		box := c.box()
		assert.Equal(t, time.Second, time.Since(began), "create is held open")
		assert.Equal(t, 1000.0, c.want(200, "GET", box, nil).object(t)["spawn_ms"])
		for _, step := range []struct {
			method, path, during, after string
			takes                       time.Duration
		}{
			{"POST", "/pause", "pausing", "paused", 2 * time.Second},
			{"POST", "/resume", "resuming", "running", 3 * time.Second},
			{"DELETE", "", "destroying", "destroyed", 4 * time.Second},
		} {
			began := time.Now()
			c.do(step.method, box+step.path, nil)
			assert.Zero(t, time.Since(began))
			time.Sleep(step.takes - time.Nanosecond)
			assert.Equal(t, step.during, c.state(box))
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			assert.Equal(t, step.after, c.state(box))
		}
	})
}

func TestABootGoesOnWithoutItsClient(t *testing.T) {
	inBubble(t, Options{BootDelay: time.Minute}, func(t *testing.T, c *client) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.srv.Transport().RoundTrip(c.request("POST", "/v1/sandboxes", createBody()).WithContext(ctx))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Len(t, c.srv.Leaks(), 1)
		assert.Equal(t, StateCreating, c.srv.Leaks()[0].State)
		time.Sleep(time.Minute)
		assert.Equal(t, StateRunning, c.srv.Leaks()[0].State)
	})
}

func TestADeleteEndsABoot(t *testing.T) {
	inBubble(t, Options{BootDelay: time.Minute}, func(t *testing.T, c *client) {
		answer := make(chan jsend)
		go func() {
			a, _ := c.try("POST", "/v1/sandboxes", createBody())
			answer <- a
		}()
		synctest.Wait()
		box := "/v1/sandboxes/" + c.srv.Sandboxes()[0].ID
		c.want(200, "DELETE", box, nil)
		assert.Equal(t, 500, (<-answer).code)
		assert.Equal(t, "destroyed", c.state(box))
	})
}

func TestBoxesQueue(t *testing.T) {
	inBubble(t, Options{MaxBoxes: 1, QueueBoxes: true}, func(t *testing.T, c *client) {
		box := c.box()
		answer := make(chan int)
		go func() {
			a, _ := c.try("POST", "/v1/sandboxes", createBody())
			answer <- a.code
		}()
		time.Sleep(time.Hour)
		require.Len(t, c.srv.Sandboxes(), 2)
		assert.Equal(t, StateCreating, c.srv.Sandboxes()[1].State)
		c.want(200, "DELETE", box, nil)
		assert.Equal(t, 201, <-answer)
	})
}

func TestListLag(t *testing.T) {
	inBubble(t, Options{ListLag: time.Second}, func(t *testing.T, c *client) {
		box := c.box()
		count := func() int { return len(c.want(200, "GET", "/v1/sandboxes", nil).object(t)["data"].([]any)) }
		assert.Zero(t, count())
		assert.Equal(t, "running", c.state(box))
		time.Sleep(time.Second)
		assert.Equal(t, 1, count())
	})
}

func TestAutoPause(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, c *client) {
		box := c.box(map[string]any{"auto_pause_after_seconds": 60})
		time.Sleep(50 * time.Second)
		c.want(200, "POST", box+"/exec", `{"cmd":"true"}`)
		time.Sleep(59 * time.Second)
		assert.Equal(t, "running", c.state(box), "an exec is activity, a look is not")
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, "paused", c.state(box))
		c.want(202, "POST", box+"/resume", nil)
		c.want(200, "PATCH", box, `{"auto_pause_after_seconds":120}`)
		time.Sleep(119 * time.Second)
		assert.Equal(t, "running", c.state(box))
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, "paused", c.state(box))
		c.want(200, "PATCH", box, `{"disable_auto_pause":true}`)
		c.want(202, "POST", box+"/resume", nil)
		time.Sleep(time.Hour)
		assert.Equal(t, "running", c.state(box))
		c.want(200, "PATCH", box, `{"auto_pause_after_seconds":60}`)
		time.Sleep(time.Hour)
		assert.Equal(t, "paused", c.state(box), "the last activity was long ago")
	})
}

func TestAutoPauseHitsASilentCommand(t *testing.T) {
	chatty := func(ctx context.Context, c *Command) int {
		for range 3 {
			io.WriteString(c.Stdout, ".")
			if c.Sleep(30*time.Second) != nil {
				return 1
			}
		}
		return 0
	}
	for onOutput, want := range map[bool]string{false: "paused", true: "running"} {
		inBubble(t, Options{Commands: chatty, ActivityOnOutput: onOutput}, func(t *testing.T, c *client) {
			box := c.box(map[string]any{"auto_pause_after_seconds": 60})
			c.run(box, "chatty")
			time.Sleep(61 * time.Second)
			assert.Equal(t, want, c.state(box))
		})
	}
}

func TestAPauseFreezesTheMachine(t *testing.T) {
	inBubble(t, Options{PauseDelay: time.Second}, func(t *testing.T, c *client) {
		box := c.box()
		proc := c.run(box, "sh", "-c", "echo before; sleep 100; echo after; exit 3")
		feed := c.connect(proc + "/connect")
		waited := make(chan jsend)
		go func() {
			a, _ := c.try("GET", proc+"/wait?scope=tree", nil)
			waited <- a
		}()
		time.Sleep(10 * time.Second)
		c.want(202, "POST", box+"/pause", nil)
		out, last, err := feed.rest()
		require.NoError(t, err, "the stream ends in order")
		assert.Equal(t, "before\n", out)
		assert.NotEqual(t, "exit", last["type"], "but without an exit")
		assert.Equal(t, 409, (<-waited).code)
		c.want(409, "GET", proc, nil)

		time.Sleep(time.Hour)
		c.want(202, "POST", box+"/resume", nil)
		began := time.Now()
		out, last, err = c.connect(proc + "/connect?after=1").rest()
		require.NoError(t, err)
		assert.Equal(t, "after\n", out)
		assert.Equal(t, 3.0, last["exit_code"])
		assert.Equal(t, 90*time.Second, time.Since(began), "the pause did not count")
	})
}

func TestAPausedMachineCanBeDestroyed(t *testing.T) {
	var ended atomic.Bool
	commands := func(ctx context.Context, c *Command) int {
		defer ended.Store(true)
		c.Sleep(time.Hour)
		return 0
	}
	inBubble(t, Options{Commands: commands}, func(t *testing.T, c *client) {
		box := c.box()
		c.run(box, "x")
		c.want(202, "POST", box+"/pause", nil)
		c.want(200, "DELETE", box, nil)
		synctest.Wait()
		assert.True(t, ended.Load())
	})
}

func TestADestroyEndsWhatIsInFlight(t *testing.T) {
	inBubble(t, Options{DestroyDelay: time.Second}, func(t *testing.T, c *client) {
		box := c.box()
		proc := c.run(box, "sleep", "1000")
		feed := c.connect(proc + "/connect")
		codes := make(chan int, 2)
		go func() {
			a, _ := c.try("POST", box+"/exec", map[string]any{"cmd": "sleep", "args": []string{"1000"}})
			codes <- a.code
		}()
		go func() {
			a, _ := c.try("GET", proc+"/wait", nil)
			codes <- a.code
		}()
		synctest.Wait()
		c.want(200, "DELETE", box, nil)
		assert.ElementsMatch(t, []int{502, 409}, []int{<-codes, <-codes}, "the exec had begun, so its end is unknown")
		_, last, err := feed.rest()
		require.NoError(t, err)
		assert.NotEqual(t, "exit", last["type"])
	})
}

func TestRateLimitIsASlidingMinute(t *testing.T) {
	inBubble(t, Options{RateLimit: 3}, func(t *testing.T, c *client) {
		for range 3 {
			c.want(200, "GET", "/healthz", nil)
			time.Sleep(10 * time.Second)
		}
		a := c.want(429, "GET", "/v1/whoami", nil)
		assert.Equal(t, "30", a.header.Get("Retry-After"))
		assert.Equal(t, "fail", a.Status)
		time.Sleep(30 * time.Second)
		c.want(200, "GET", "/healthz", nil)
		assert.Equal(t, "10", c.want(429, "GET", "/healthz", nil).header.Get("Retry-After"))
	})
	inBubble(t, Options{RateLimit: 1, OmitRetryAfter: true}, func(t *testing.T, c *client) {
		c.want(200, "GET", "/healthz", nil)
		assert.Empty(t, c.want(429, "GET", "/healthz", nil).header.Get("Retry-After"))
	})
}
