package createostest

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func seqs(frames []frame) (list []int64) {
	for _, f := range frames {
		list = append(list, f.seq)
	}
	return list
}

func TestJournalDropsTheOldestWithoutAReader(t *testing.T) {
	j := newJournal(10, false, nil)
	out, errs := journalWriter{j, "stdout"}, journalWriter{j, "stderr"}
	for _, text := range []string{"aaaa", "bbbb", "cccc"} {
		_, err := io.WriteString(out, text)
		require.NoError(t, err)
	}
	_, err := io.WriteString(errs, "d")
	require.NoError(t, err)
	assert.Equal(t, journalRange{OldestSeq: 2, NewestSeq: 4, Bytes: 9}, j.extent())

	r, oldest := j.attach(0)
	assert.Nil(t, r)
	assert.Equal(t, int64(2), oldest)
	r, _ = j.attach(1)
	require.NotNil(t, r)
	frames, _, _ := r.take(nil, 1000)
	assert.Equal(t, []int64{2, 3, 4}, seqs(frames))
	assert.Equal(t, "stderr", frames[2].stream)
	frames, _, _ = r.take(nil, 1)
	assert.Equal(t, []int64{2}, seqs(frames), "a batch is bounded")
	r.sent(4)
	frames, more, _ := r.take(nil, 1000)
	assert.Empty(t, frames)
	io.WriteString(out, "e")
	assert.True(t, isClosed(more))
}

func TestJournalSplitsLargeWritesAndKeepsSmallOnes(t *testing.T) {
	j := newJournal(defaultJournalBytes, false, nil)
	n, err := journalWriter{j, "stdout"}.Write(bytes.Repeat([]byte("x"), 2*maxFrameBytes+1))
	require.NoError(t, err)
	assert.Equal(t, 2*maxFrameBytes+1, n)
	io.WriteString(journalWriter{j, "stdout"}, "small")
	r, _ := j.attach(0)
	frames, _, _ := r.take(nil, defaultJournalBytes)
	require.Len(t, frames, 4)
	assert.Len(t, frames[1].data, maxFrameBytes)
	assert.Equal(t, "small", string(frames[3].data))
	// A write that is larger than the whole journal is not stuck.
	small := newJournal(4, false, nil)
	_, err = io.WriteString(journalWriter{small, "stdout"}, "abcdefghij")
	require.NoError(t, err)
	assert.Equal(t, journalRange{OldestSeq: 3, NewestSeq: 3, Bytes: 2}, small.extent())
}

func TestJournalBlocksTheWriterForTheSlowestReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(8, false, nil)
		fast, _ := j.attach(0)
		slow, _ := j.attach(0)
		write := func(text string) { go io.WriteString(journalWriter{j, "stdout"}, text) }
		newest := func() int64 {
			synctest.Wait()
			return j.extent().NewestSeq
		}
		write("aaaa")
		write("bbbb")
		require.Equal(t, int64(2), newest())
		write("cccc")
		fast.sent(2)
		require.Equal(t, int64(2), newest(), "the slow reader has had nothing yet")
		slow.sent(1)
		require.Equal(t, int64(3), newest())

		// Who leaves no longer holds anybody up.
		write("dddd")
		fast.sent(3)
		require.Equal(t, int64(3), newest())
		slow.detach()
		require.Equal(t, int64(4), newest())

		// A process that is to end is not held up either.
		write("eeee")
		write("ffff")
		require.Equal(t, int64(5), newest())
		j.release()
		require.Equal(t, int64(6), newest())
		_, _, lost := fast.take(nil, 100)
		assert.Equal(t, int64(5), lost)
	})
}

func TestAClosedJournalFailsItsWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(2, false, nil)
		j.attach(0)
		done := make(chan error)
		go func() {
			_, err := io.WriteString(journalWriter{j, "stdout"}, "abcd")
			done <- err
		}()
		synctest.Wait()
		j.close()
		assert.ErrorIs(t, <-done, io.ErrClosedPipe)
		_, err := io.WriteString(journalWriter{j, "stdout"}, "x")
		assert.ErrorIs(t, err, io.ErrClosedPipe)
	})
}

func TestWriteUntilGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(2, false, nil)
		j.attach(0)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := journalWriter{j, "stdout"}.writeUntil(ctx.Done(), []byte("abcd"))
			done <- err
		}()
		synctest.Wait()
		cancel()
		assert.ErrorIs(t, <-done, io.ErrClosedPipe)
	})
}

// flood writes n frames of 1 KiB.
func flood(n int) func(context.Context, *Command) int {
	return func(ctx context.Context, c *Command) int {
		if c.Name != "flood" {
			return Builtin(ctx, c)
		}
		for range n {
			if _, err := c.Stdout.Write(bytes.Repeat([]byte("x"), 1024)); err != nil {
				return 1
			}
		}
		return 0
	}
}

func TestNothingIsLostUnderAReader(t *testing.T) {
	inBubble(t, Options{Commands: flood(100), JournalBytes: 4096}, func(t *testing.T, c *client) {
		proc := c.run(c.box(), "sh", "-c", "cat; flood")
		feed := c.connect(proc + "/connect")
		c.want(200, "POST", proc+"/stdin/close", nil)
		synctest.Wait()
		newest := c.srv.Sandboxes()[0].Processes[0].NewestSeq
		assert.Less(t, newest, int64(100), "the writer is blocked while nobody reads")
		out, last, err := feed.rest()
		require.NoError(t, err)
		assert.Len(t, out, 100*1024)
		assert.Equal(t, "exit", last["type"])
	})
}

func TestExpiredOffsets(t *testing.T) {
	inBubble(t, Options{Commands: flood(10), JournalBytes: 4096}, func(t *testing.T, c *client) {
		proc := c.run(c.box(), "flood")
		c.want(200, "GET", proc+"/wait", nil)
		a := c.want(410, "GET", proc+"/connect?after=3", nil)
		assert.JSONEq(t, `{"code":"output_offset_expired","oldest_available_seq":7}`, string(a.Data))
		out, _, err := c.connect(proc + "/connect?after=6").rest()
		require.NoError(t, err)
		assert.Len(t, out, 4*1024)
	})
	inBubble(t, Options{Commands: flood(10), JournalBytes: 4096, OffsetErrorInStream: true}, func(t *testing.T, c *client) {
		proc := c.run(c.box(), "flood")
		c.want(200, "GET", proc+"/wait", nil)
		_, last, err := c.connect(proc + "/connect?after=3").rest()
		require.NoError(t, err)
		assert.Equal(t, map[string]any{"type": "error", "error": "output_offset_expired", "oldest_available_seq": 7.0}, last)
	})
}

func TestEvictionUnderAReader(t *testing.T) {
	inBubble(t, Options{Commands: flood(200), JournalBytes: 4096, EvictUnderReader: true}, func(t *testing.T, c *client) {
		proc := c.run(c.box(), "sh", "-c", "cat; flood")
		feed := c.connect(proc + "/connect")
		c.want(200, "POST", proc+"/stdin/close", nil)
		c.want(200, "GET", proc+"/wait", nil) // the process is not held up
		_, last, err := feed.rest()
		require.NoError(t, err)
		assert.Equal(t, "output_offset_expired", last["error"])
	})
}

func TestAStalledReaderDoesNotKeepAProcessAlive(t *testing.T) {
	inBubble(t, Options{Commands: flood(1000), JournalBytes: 4096}, func(t *testing.T, c *client) {
		box := c.box()
		for _, end := range []func(proc string){
			func(proc string) { c.want(200, "POST", proc+"/signal", `{"signal":"SIGKILL"}`) },
			func(proc string) { assert.Equal(t, true, c.want(200, "DELETE", proc, nil).object(t)["tree_exited"]) },
		} {
			proc := c.run(box, "sh", "-c", "cat; flood")
			feed := c.connect(proc + "/connect")
			c.want(200, "POST", proc+"/stdin/close", nil)
			synctest.Wait()
			end(proc)
			synctest.Wait()
			for _, p := range c.srv.Processes(idOf(box)) {
				assert.True(t, p.TreeExited)
			}
			feed.close()
		}
	})
}

func BenchmarkConnect(b *testing.B) {
	for name, size := range map[string]int{"32KiB": 32 << 10, "1KiB": 1 << 10} {
		b.Run(name, func(b *testing.B) {
			const total = 64 << 20
			chunk := []byte(strings.Repeat("x", size))
			c := newClient(b, Options{Commands: func(ctx context.Context, cmd *Command) int {
				for range total / size {
					if _, err := cmd.Stdout.Write(chunk); err != nil {
						return 1
					}
				}
				return 0
			}})
			box := c.box()
			b.SetBytes(total)
			b.ReportAllocs()
			for b.Loop() {
				proc := c.run(box, "sh", "-c", "cat; flood")
				feed := c.connect(proc + "/connect")
				c.want(200, "POST", proc+"/stdin/close", nil)
				io.Copy(io.Discard, feed.resp.Body)
				feed.close()
				c.want(200, "DELETE", proc, nil)
			}
		})
	}
}
