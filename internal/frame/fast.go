package frame

import "bytes"

// decodeFast reads the two events that come often, output and heartbeat, if they have the shape that every encoder gives
// them: a flat object of plain strings and natural numbers, no key of ours twice. It returns false for all else, which need not be
// malformed; ev is then to be reset. What it accepts, decodeSlow reads the same way.
func decodeFast(line []byte, ev *Event) bool {
	var kind, stream, data []byte
	var hasSeq, hasStream, hasData bool

	s := scanner{line: line}
	if !s.byte('{') {
		return false
	}
	for {
		key, ok := s.key()
		if !ok {
			return false
		}
		switch string(key) {
		case "type":
			if kind != nil {
				return false
			}
			kind, ok = s.plain()
		case "seq":
			if hasSeq {
				return false
			}
			ev.Seq, ok = s.natural()
			hasSeq = true
		case "stream":
			if hasStream {
				return false
			}
			stream, ok = s.plain()
			hasStream = true
		case "data_base64":
			if hasData {
				return false
			}
			data, ok = s.quoted() // what stands in it is checked by decoding it
			hasData = true
		default:
			ok = s.skip()
		}
		if !ok {
			return false
		}
		if s.byte('}') {
			break
		}
		if !s.byte(',') {
			return false
		}
	}
	if !s.atEnd() {
		return false
	}

	switch string(kind) {
	case "heartbeat":
		*ev = Event{Kind: Heartbeat, Data: ev.Data}
		return !hasData // its content would have to be checked too
	case "data":
		ev.Kind = Data
		ev.Stream = streamOf(stream)
		return ev.Seq > 0 && ev.Stream != 0 && hasData && fastData(data, ev)
	default:
		return false
	}
}

// fastData decodes the inside of a JSON string. Base64 has no backslash and no control character, so what decodes is a
// legal string without escapes, with one exception: the decoder skips line ends. They show in the length.
func fastData(data []byte, ev *Event) bool {
	var err error
	ev.Data, err = decodeBase64(ev.Data, data)
	if err != nil {
		return false
	}
	padding := 0
	for padding < len(data) && data[len(data)-1-padding] == '=' {
		padding++
	}
	return len(data)%4 == 0 && len(ev.Data) == len(data)/4*3-padding
}

// scanner reads the plain part of JSON. Each method skips white space first. It keeps a position rather than the rest: to
// move a slice on costs more, the more so while the garbage collector marks.
type scanner struct {
	line []byte
	pos  int
}

func (s *scanner) space() {
	for s.pos < len(s.line) {
		switch s.line[s.pos] {
		case ' ', '\t', '\r', '\n':
			s.pos++
		default:
			return
		}
	}
}

func (s *scanner) atEnd() bool {
	s.space()
	return s.pos == len(s.line)
}

// byte takes the byte c if it is the next.
func (s *scanner) byte(c byte) bool {
	s.space()
	if s.pos == len(s.line) || s.line[s.pos] != c {
		return false
	}
	s.pos++
	return true
}

// quoted returns what stands up to the next quote, unchecked.
func (s *scanner) quoted() ([]byte, bool) {
	if !s.byte('"') {
		return nil, false
	}
	rest := s.line[s.pos:]
	end := bytes.IndexByte(rest, '"')
	if end < 0 {
		return nil, false
	}
	s.pos += end + 1
	return rest[:end], true
}

// plain returns a string that means what it says: without escapes and control characters.
func (s *scanner) plain() ([]byte, bool) {
	if !s.byte('"') {
		return nil, false
	}
	rest := s.line[s.pos:]
	for i, c := range rest {
		switch {
		case c == '"':
			s.pos += i + 1
			return rest[:i], true
		case c < ' ' || c == '\\':
			return nil, false
		}
	}
	return nil, false
}

func (s *scanner) key() ([]byte, bool) {
	key, ok := s.plain()
	return key, ok && s.byte(':')
}

// natural returns an integer of at most 18 digits without sign.
func (s *scanner) natural() (int64, bool) {
	s.space()
	var n int64
	rest := s.line[s.pos:]
	digits := 0
	for digits < len(rest) && '0' <= rest[digits] && rest[digits] <= '9' {
		if digits == 18 {
			return 0, false
		}
		n = 10*n + int64(rest[digits]-'0')
		digits++
	}
	if digits == 0 || digits > 1 && rest[0] == '0' {
		return 0, false
	}
	s.pos += digits // a fraction or exponent is left, and nothing that may follow a value fits it
	return n, true
}

// skip passes over a value that is plain or natural.
func (s *scanner) skip() bool {
	s.space()
	if s.pos < len(s.line) && s.line[s.pos] == '"' {
		_, ok := s.plain()
		return ok
	}
	_, ok := s.natural()
	return ok
}
