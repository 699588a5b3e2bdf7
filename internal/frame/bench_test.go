package frame_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/createos-lease/createos/internal/frame"
	"github.com/createos-lease/createos/internal/ndjson"
)

const framesPerStream = 64

// BenchmarkStream reads a whole stream in three ways; MB/s are of output. "bare" is the least that can be done, splitting
// and base64 with every key at a known place; the distance to it is the price of reading the events.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{1 << 10, 32 << 10} {
		text := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{'x'}, size))
		var stream []byte
		for i := range framesPerStream {
			stream = fmt.Appendf(stream, "{\"type\":\"data\",\"seq\":%d,\"stream\":\"stdout\",\"data_base64\":\"%s\"}\n", i+1, text)
		}
		for _, way := range []struct {
			name string
			read func(stream []byte) (output int, err error)
		}{
			{"bare", readBare},
			{"frame", readFrames()},
			{"json", readJSON},
		} {
			b.Run(fmt.Sprintf("%dKiB/%s", size>>10, way.name), func(b *testing.B) {
				b.SetBytes(int64(size * framesPerStream))
				b.ReportAllocs()
				for b.Loop() {
					if output, err := way.read(stream); err != nil || output != size*framesPerStream {
						b.Fatal(output, err)
					}
				}
			})
		}
	}
}

var dataKey = []byte(`"data_base64":"`)

func readBare(stream []byte) (output int, err error) {
	s := bufio.NewScanner(bytes.NewReader(stream))
	s.Buffer(make([]byte, 64<<10), 4<<20)
	to := make([]byte, 64<<10)
	for s.Scan() {
		line := s.Bytes()
		from := bytes.Index(line, dataKey) + len(dataKey)
		n, err := base64.StdEncoding.Decode(to, line[from:len(line)-2])
		if err != nil {
			return 0, err
		}
		output += n
	}
	return output, s.Err()
}

func readFrames() func(stream []byte) (int, error) {
	var ev frame.Event
	return func(stream []byte) (output int, err error) {
		r := ndjson.NewReader(bytes.NewReader(stream), 0)
		for {
			line, err := r.Next()
			if err != nil {
				return output, nil
			}
			if err := frame.Decode(line, &ev); err != nil {
				return 0, err
			}
			output += len(ev.Data)
		}
	}
}

func readJSON(stream []byte) (output int, err error) {
	d := json.NewDecoder(bytes.NewReader(stream))
	for d.More() {
		var ev struct {
			Type   string `json:"type"`
			Seq    int64  `json:"seq"`
			Stream string `json:"stream"`
			Data   []byte `json:"data_base64"`
		}
		if err := d.Decode(&ev); err != nil {
			return 0, err
		}
		output += len(ev.Data)
	}
	return output, nil
}

// BenchmarkDecode is the cost of one event; 0 allocations is part of the promise.
func BenchmarkDecode(b *testing.B) {
	text := base64.StdEncoding.EncodeToString(make([]byte, 1<<10))
	for name, line := range map[string]string{
		"data 1KiB":         `{"type":"data","seq":1,"stream":"stdout","data_base64":"` + text + `"}`,
		"data 1KiB by json": `{"type":"data","seq":1,"stream":"stdout","data_base64":"` + text + `","x":null}`,
		"heartbeat":         `{"type":"heartbeat"}`,
		"exit":              `{"type":"exit","exit_code":0}`,
	} {
		b.Run(name, func(b *testing.B) {
			var ev frame.Event
			event := []byte(line)
			b.ReportAllocs()
			for b.Loop() {
				if err := frame.Decode(event, &ev); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
