// Package frame decodes the events of a process stream: one JSON object each, output as base64.
//
// Output is what comes in bulk, so an event of the usual shape is read without reflection and without allocation.
// Everything else goes to encoding/json. Both readings follow the same rules; a test holds them against each other.
package frame

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// ErrMalformed is matched by every error of this package. The errors say which rule was broken and hold nothing of
// the event, which may be the output of a command.
var ErrMalformed = errors.New("malformed event")

var (
	errJSON   = fmt.Errorf("%w: not a JSON object", ErrMalformed)
	errType   = fmt.Errorf("%w: type is not a string", ErrMalformed)
	errSeq    = fmt.Errorf("%w: seq is not a positive integer", ErrMalformed)
	errStream = fmt.Errorf("%w: unknown stream", ErrMalformed)
	errData   = fmt.Errorf("%w: data_base64 is not base64", ErrMalformed)
	errExit   = fmt.Errorf("%w: exit_code is not an integer", ErrMalformed)
	errSignal = fmt.Errorf("%w: signal is not a string", ErrMalformed)
	errNoExit = fmt.Errorf("%w: exit without exit_code and signal", ErrMalformed)
	errCode   = fmt.Errorf("%w: error is not a string", ErrMalformed)
	errOldest = fmt.Errorf("%w: oldest_available_seq is not a positive integer", ErrMalformed)
)

// Kind is the kind of an event.
type Kind uint8

const (
	// Unknown is an event of a type that this package does not know. It is to be ignored.
	Unknown Kind = iota
	// Data is a piece of output.
	Data
	// Exit is the end of the process.
	Exit
	// Heartbeat says that the stream is alive.
	Heartbeat
	// Error is an error that the provider reports within the stream.
	Error
)

// Stream is the stream that a piece of output was written to.
type Stream uint8

// The streams of a process; the zero Stream is none of them.
const (
	Stdout Stream = 1 + iota
	Stderr
	PTY
)

// String returns the provider's name of the stream.
func (s Stream) String() string {
	switch s {
	case Stdout:
		return "stdout"
	case Stderr:
		return "stderr"
	case PTY:
		return "pty"
	default:
		return ""
	}
}

// Event is one event. Only the fields of its kind are set.
type Event struct {
	Kind Kind

	Seq    int64  // Data: at least 1
	Stream Stream // Data: one of the constants
	Data   []byte // Data: the output; may be empty

	ExitCode    int    // Exit
	HasExitCode bool   // Exit: false if the event has no code, which is not code 0; then Signal is set
	Signal      string // Exit: the signal that ended the process, as the provider names it; may come with a code

	Code      string // Error: the provider's code or text, not cleaned; not fit for a message as it is
	Oldest    int64  // Error: the oldest sequence number still available, at least 1
	HasOldest bool   // Error: whether Oldest was given
}

// Decode reads the event in line into ev. Output is decoded into the memory of ev.Data, which grows as needed, so one Event
// used over and over does not allocate; its Data is valid until the next call. All other fields are set anew.
//
// The rules: an output event has a seq of at least 1, a known stream and whole base64. An exit event has a code or a signal;
// null counts as absent, and anything that is not an integer is no code. So no exit is ever made up. Keys are
// exact, of a repeated key the last counts, unknown keys and types are ignored. An event that breaks a rule gives an error
// that matches [ErrMalformed], and ev then holds nothing.
func Decode(line []byte, ev *Event) error {
	*ev = Event{Data: ev.Data[:0]}
	if decodeFast(line, ev) {
		return nil
	}
	*ev = Event{Data: ev.Data[:0]}
	err := decodeSlow(line, ev)
	if err != nil {
		*ev = Event{Data: ev.Data[:0]}
	}
	return err
}

// decodeBase64 decodes into the memory of dst.
func decodeBase64(dst, src []byte) ([]byte, error) {
	dst = slices.Grow(dst[:0], base64.StdEncoding.DecodedLen(len(src)))
	n, err := base64.StdEncoding.Decode(dst[:cap(dst)], src)
	return dst[:n], err
}

// object is an event as encoding/json splits it. Unlike a struct it keeps keys exact, and null apart from zero.
type object map[string]json.RawMessage

func decodeSlow(line []byte, ev *Event) error {
	var o object
	if err := json.Unmarshal(line, &o); err != nil || o == nil {
		return errJSON
	}
	kind, ok := o.str("type")
	if !ok {
		return errType
	}
	switch kind {
	case "data":
		return o.data(ev)
	case "exit":
		return o.exit(ev)
	case "error":
		return o.failure(ev)
	case "heartbeat":
		ev.Kind = Heartbeat
	}
	return nil
}

func (o object) data(ev *Event) (err error) {
	ev.Kind = Data
	if ev.Seq, err = strconv.ParseInt(string(o["seq"]), 10, 64); err != nil || ev.Seq < 1 {
		return errSeq
	}
	name, _ := o.str("stream")
	if ev.Stream = streamOf([]byte(name)); ev.Stream == 0 {
		return errStream
	}
	text, ok := o.str("data_base64")
	if !ok {
		return errData
	}
	if ev.Data, err = decodeBase64(ev.Data, []byte(text)); err != nil {
		return errData
	}
	return nil
}

func (o object) exit(ev *Event) (err error) {
	ev.Kind = Exit
	if ev.HasExitCode = o.has("exit_code"); ev.HasExitCode {
		if ev.ExitCode, err = strconv.Atoi(string(o["exit_code"])); err != nil {
			return errExit
		}
	}
	if o.has("signal") {
		var ok bool
		if ev.Signal, ok = o.str("signal"); !ok {
			return errSignal
		}
	}
	if !ev.HasExitCode && ev.Signal == "" {
		return errNoExit
	}
	return nil
}

func (o object) failure(ev *Event) (err error) {
	ev.Kind = Error
	var ok bool
	if ev.Code, ok = o.str("error"); !ok {
		return errCode
	}
	if ev.HasOldest = o.has("oldest_available_seq"); ev.HasOldest {
		if ev.Oldest, err = strconv.ParseInt(string(o["oldest_available_seq"]), 10, 64); err != nil || ev.Oldest < 1 {
			return errOldest
		}
	}
	return nil
}

// has reports whether the key is there and not null.
func (o object) has(key string) bool {
	value, ok := o[key]
	return ok && string(value) != "null"
}

// str returns the string under key; ok is false if there is none.
func (o object) str(key string) (s string, ok bool) {
	value := o[key]
	if len(value) == 0 || value[0] != '"' {
		return "", false
	}
	return s, json.Unmarshal(value, &s) == nil
}

func streamOf(name []byte) Stream {
	switch string(name) {
	case "stdout":
		return Stdout
	case "stderr":
		return Stderr
	case "pty":
		return PTY
	default:
		return 0
	}
}
