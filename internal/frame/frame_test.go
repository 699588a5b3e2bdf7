package frame

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDecode(t *testing.T) {
	exit := func(code int) Event { return Event{Kind: Exit, ExitCode: code, HasExitCode: true} }
	data := func(seq int64, stream Stream, text string) Event {
		return Event{Kind: Data, Seq: seq, Stream: stream, Data: []byte(text)}
	}
	for _, tc := range []struct {
		line string
		want Event
	}{
		{`{"type":"data","seq":1,"stream":"stdout","data_base64":"Z290OmdvCg=="}`, data(1, Stdout, "got:go\n")},
		{`{"type":"data","seq":2,"stream":"stderr","data_base64":"Zm8="}`, data(2, Stderr, "fo")},
		{`{"type":"data","seq":3,"stream":"pty","data_base64":"Zm9v"}`, data(3, PTY, "foo")},
		{`{"data_base64":"Zm9v","stream":"stdout","seq":4,"type":"data"}`, data(4, Stdout, "foo")},
		{" {\t\"type\" : \"data\" , \"seq\": 5,\r\n\"stream\": \"stdout\", \"data_base64\": \"\" } ", data(5, Stdout, "")},
		{`{"type":"data","seq":6,"stream":"stdout","data_base64":"Zm9v","time":"2026-10-02","n":7}`, data(6, Stdout, "foo")},
		{`{"type":"data","seq":7,"stream":"stdout","data_base64":"Zm9v","x":{"seq":[1,null]},"y":1.5,"z":"\""}`, data(7, Stdout, "foo")},
		{`{"type":"data","seq":8,"stream":"stdout","data_base64":"\/\/8\u003d"}`, data(8, Stdout, "\xff\xff")},
		{`{"t\u0079pe":"data","seq":9,"stream":"std\u006fut","data_base64":"Zm9v"}`, data(9, Stdout, "foo")},
		{`{"type":"data","seq":9223372036854775807,"stream":"stdout","data_base64":"Zm9v"}`, data(9223372036854775807, Stdout, "foo")},
		{`{"type":"data","seq":1,"seq":2,"stream":"stdout","data_base64":"Zm9v"}`, data(2, Stdout, "foo")},
		{`{"type":"exit","type":"data","seq":2,"stream":"stdout","data_base64":"Zm9v"}`, data(2, Stdout, "foo")},
		{`{"type":"data","seq":2,"stream":"x","stream":"stdout","data_base64":"Zm9v"}`, data(2, Stdout, "foo")},
		{`{"type":"data","seq":2,"stream":"stdout","data_base64":"?","data_base64":"Zm9v"}`, data(2, Stdout, "foo")},
		{`{"type":"data","seq":2,"SEQ":3,"stream":"stdout","data_base64":"Zm9v"}`, data(2, Stdout, "foo")},
		{`{"type":"data","seq":1,"stream":"stdout","data_base64":"Zm9v","exit_code":0}`, data(1, Stdout, "foo")},

		{`{"type":"exit","exit_code":0}`, exit(0)},
		{`{"type":"exit","exit_code":0,"signal":null}`, exit(0)},
		{`{"type":"exit","exit_code":-1}`, exit(-1)},
		{`{"type":"exit","exit_code":137,"signal":""}`, exit(137)},
		{`{"type":"exit","signal":"SIGKILL"}`, Event{Kind: Exit, Signal: "SIGKILL"}},
		{`{"type":"exit","exit_code":null,"signal":"SIGKILL"}`, Event{Kind: Exit, Signal: "SIGKILL"}},
		{`{"type":"exit","exit_code":137,"signal":"SIGKILL"}`, Event{Kind: Exit, ExitCode: 137, HasExitCode: true, Signal: "SIGKILL"}},

		{`{"type":"error","error":"output_offset_expired","oldest_available_seq":900}`,
			Event{Kind: Error, Code: "output_offset_expired", Oldest: 900, HasOldest: true}},
		{`{"type":"error","error":"output_offset_expired","oldest_available_seq":null}`, Event{Kind: Error, Code: "output_offset_expired"}},
		{`{"type":"error","error":""}`, Event{Kind: Error}},

		{`{"type":"heartbeat"}`, Event{Kind: Heartbeat}},
		{`{"type":"heartbeat","seq":3,"stream":"x","time":"now","data_base64":"?"}`, Event{Kind: Heartbeat}},
		{`{"type":"heartbeat","at":{}}`, Event{Kind: Heartbeat}},
		{`{"type":"resized","rows":24}`, Event{}},
		{`{"type":"DATA"}`, Event{}},
		{`{"type":""}`, Event{}},
	} {
		ev := Event{Kind: Error, Seq: 99, Stream: PTY, Data: []byte("before"), ExitCode: 9, HasExitCode: true, Signal: "S", Code: "C", Oldest: 9, HasOldest: true}
		require.NoError(t, Decode([]byte(tc.line), &ev), tc.line)
		if len(ev.Data) == 0 {
			ev.Data = tc.want.Data // empty and nil are the same to a caller
		}
		assert.Equal(t, tc.want, ev, tc.line)
	}
}

func TestMalformedEvents(t *testing.T) {
	for line, want := range map[string]error{
		``:                                      errJSON,
		`null`:                                  errJSON,
		`[]`:                                    errJSON,
		`"data"`:                                errJSON,
		`{"type":"heartbeat"`:                   errJSON,
		`{"type":"heartbeat"} x`:                errJSON,
		`{"type":"heartbeat"}{}`:                errJSON,
		`{"type":"heartbeat",}`:                 errJSON,
		`{"type" "heartbeat"}`:                  errJSON,
		`{type:"heartbeat"}`:                    errJSON,
		`{"type":"heartbeat" "seq":1}`:          errJSON,
		`{"type":"heartbeat","seq":01}`:         errJSON,
		`{"type":"heartbeat","seq":1x}`:         errJSON,
		"{\"type\":\"heartbeat\",\"x\":\"\n\"}": errJSON,
		"{\"type\":\"data\",\"seq\":1,\"stream\":\"stdout\",\"data_base64\":\"Zm9v\nZm9v\"}": errJSON,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"Zm9v`:                       errJSON,
		`{"type":"exit","exit_code":0`:                                                       errJSON,
		`{}`:                                                                                 errType,
		`{"TYPE":"heartbeat"}`:                                                               errType,
		`{"type":null}`:                                                                      errType,
		`{"type":1}`:                                                                         errType,
		`{"type":{}}`:                                                                        errType,
		`{"type":"data","stream":"stdout","data_base64":""}`:                           errSeq,
		`{"type":"data","seq":null,"stream":"stdout","data_base64":""}`:                errSeq,
		`{"type":"data","seq":0,"stream":"stdout","data_base64":""}`:                   errSeq,
		`{"type":"data","seq":-1,"stream":"stdout","data_base64":""}`:                  errSeq,
		`{"type":"data","seq":1.5,"stream":"stdout","data_base64":""}`:                 errSeq,
		`{"type":"data","seq":1.0,"stream":"stdout","data_base64":""}`:                 errSeq,
		`{"type":"data","seq":1e3,"stream":"stdout","data_base64":""}`:                 errSeq,
		`{"type":"data","seq":"1","stream":"stdout","data_base64":""}`:                 errSeq,
		`{"type":"data","seq":9223372036854775808,"stream":"stdout","data_base64":""}`: errSeq,
		`{"type":"data","seq":1,"data_base64":""}`:                                     errStream,
		`{"type":"data","seq":1,"stream":"stdin","data_base64":""}`:                    errStream,
		`{"type":"data","seq":1,"stream":"","data_base64":""}`:                         errStream,
		`{"type":"data","seq":1,"stream":null,"data_base64":""}`:                       errStream,
		`{"type":"data","seq":1,"stream":1,"data_base64":""}`:                          errStream,
		`{"type":"data","seq":1,"stream":"stdout"}`:                                    errData,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":null}`:                 errData,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":[]}`:                   errData,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"Zm9"}`:                errData,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"Zm-_"}`:               errData,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"Zg==Zg=="}`:           errData,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"===="}`:               errData,
		`{"type":"exit"}`:                                         errNoExit,
		`{"type":"exit","exit_code":null}`:                        errNoExit,
		`{"type":"exit","exit_code":null,"signal":null}`:          errNoExit,
		`{"type":"exit","signal":""}`:                             errNoExit,
		`{"type":"exit","EXIT_CODE":0}`:                           errNoExit,
		`{"type":"exit","exit_code":"0"}`:                         errExit,
		`{"type":"exit","exit_code":""}`:                          errExit,
		`{"type":"exit","exit_code":0.0}`:                         errExit,
		`{"type":"exit","exit_code":false,"signal":"TERM"}`:       errExit,
		`{"type":"exit","exit_code":99999999999999999999}`:        errExit,
		`{"type":"exit","exit_code":0,"signal":9}`:                errSignal,
		`{"type":"error"}`:                                        errCode,
		`{"type":"error","error":{"secret":1}}`:                   errCode,
		`{"type":"error","error":"x","oldest_available_seq":0}`:   errOldest,
		`{"type":"error","error":"x","oldest_available_seq":"9"}`: errOldest,
	} {
		ev := Event{Kind: Exit, HasExitCode: true, Data: []byte("before")}
		err := Decode([]byte(line), &ev)
		require.ErrorIs(t, err, ErrMalformed, line)
		assert.Equal(t, want, err, line)
		assert.Equal(t, Event{Data: []byte{}}, ev, "%s: nothing is left of the event", line)
	}
}

func TestEveryCutOfAnEventIsMalformed(t *testing.T) {
	for _, line := range []string{
		`{"type":"data","seq":10,"stream":"stdout","data_base64":"Zm9vYmFy"}`,
		`{"type":"exit","exit_code":10,"signal":"SIGTERM"}`,
	} {
		for i := range line {
			var ev Event
			require.ErrorIs(t, Decode([]byte(line[:i]), &ev), ErrMalformed, line[:i])
		}
	}
}

func TestErrorsHoldNothingOfTheEvent(t *testing.T) {
	for _, line := range []string{
		`hunter2`, `{"type":"hunter2`, `{"type":["hunter2"]}`, `{"type":"data","seq":"hunter2"}`, `{"type":"data","seq":1,"stream":"hunter2"}`,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"hunter2"}`, `{"type":"exit","exit_code":"hunter2"}`,
		`{"type":"exit","signal":["hunter2"]}`, `{"type":"error","error":["hunter2"]}`, `{"type":"error","error":"","oldest_available_seq":"hunter2"}`,
	} {
		var ev Event
		err := Decode([]byte(line), &ev)
		require.Error(t, err, line)
		assert.NotContains(t, err.Error(), "hunter2")
		assert.NotContains(t, fmt.Sprintf("%#v", ev), "hunter2")
	}
}

func TestUsualEventsTakeTheFastPath(t *testing.T) {
	for _, line := range []string{
		string(dataLine(1, 100)),
		`{"stream":"stderr","type":"data","data_base64":"","seq":123456789012345678}`,
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"Zg==","time":"2026-10-02T09:02:00Z","n":0}`,
		`{"type":"heartbeat"}`,
	} {
		var ev Event
		assert.True(t, decodeFast([]byte(line), &ev), line)
	}
}

func TestMemoryIsReusedAndNothingIsAllocated(t *testing.T) {
	line, beat := dataLine(1, 32<<10), []byte(`{"type":"heartbeat"}`)
	var ev Event
	require.NoError(t, Decode(line, &ev))
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if Decode(line, &ev) != nil || len(ev.Data) != 32<<10 || Decode(beat, &ev) != nil || len(ev.Data) != 0 {
			t.Error("wrong event")
		}
	}))
	// An error does not lose the memory either.
	before := cap(ev.Data)
	require.Error(t, Decode([]byte(`{"type":"data","seq":1,"stream":"stdout","data_base64":"?"}`), &ev))
	assert.Equal(t, before, cap(ev.Data))
}

func TestStreamNames(t *testing.T) {
	for _, s := range []Stream{Stdout, Stderr, PTY} {
		assert.Equal(t, s, streamOf([]byte(s.String())))
	}
	assert.Empty(t, Stream(0).String())
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		`{"type":"data","seq":1,"stream":"stdout","data_base64":"Z290OmdvCg=="}`,
		`{"data_base64":"","seq":1,"stream":"pty","type":"data","x":"y","n":0}`,
		`{"type":"data","seq":1,"seq":2,"stream":"stderr","data_base64":"\u005am9v"}`,
		"{\"type\":\"data\",\"seq\":1,\"stream\":\"stdout\",\"data_base64\":\"Zm9v\r\nZm8=\"}",
		`{"type":"heartbeat"}`, `{"type":"heartbeat","data_base64":"\x"}`, `{"type":"heartbeat","seq":-1}`,
		`{"type":"exit","exit_code":0,"signal":null}`, `{"type":"error","error":"x","oldest_available_seq":9}`,
		`{"type":null}`, `null`, `{}`, `{"a":{"b":[1,2,"c"]}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		var slow Event
		err := decodeSlow(line, &slow)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
		}
		var fast Event
		if decodeFast(line, &fast) {
			require.NoError(t, err)
			require.Equal(t, string(slow.Data), string(fast.Data))
			slow.Data, fast.Data = nil, nil
			require.Equal(t, slow, fast)
		}
		var ev Event
		require.Equal(t, err, Decode(line, &ev))
		if ev.Kind == Exit {
			require.True(t, ev.HasExitCode || ev.Signal != "")
		}
		if ev.Kind == Data {
			require.Positive(t, ev.Seq)
			require.NotEmpty(t, ev.Stream.String())
		}
	})
}

// dataLine returns an event with so many bytes of output.
func dataLine(seq, size int) []byte {
	output := []byte(strings.Repeat("output of a command\n", size/20+1))[:size]
	return fmt.Appendf(nil, `{"type":"data","seq":%d,"stream":"stdout","data_base64":"%s"}`, seq, base64.StdEncoding.EncodeToString(output))
}
