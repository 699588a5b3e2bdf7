// Package hostile makes archives for tests from a table in words, so that no
// binary file has to be believed.
package hostile

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/createos-lease/createos/internal/archive"
)

// A Case is an archive and what becomes of it.
type Case struct {
	Name string
	// Want is the reason for which it is refused, empty if it is taken.
	Want string
	// Asked are the files that it should hold.
	Asked []archive.Entry
	lines []string
}

// Read reads a table. A case begins with "== name: reason"; each line of it is an
// entry: a type, a name in quotes, and options. Or it is "ask", the name of a file that
// was asked for, and its size=N. The types are file, dir, link,
// hard, char, block, fifo, contiguous, sparse and unknown. The options are "-> target"
// (in quotes), size=N (announced; content=N follow), mode=OCTAL and format=pax or
// format=gnu. Lines that begin with # are comments.
func Read(path string) ([]Case, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var cases []Case
	for _, line := range strings.Split(string(text), "\n") {
		switch head, isCase := strings.CutPrefix(line, "== "); {
		case isCase:
			name, want, _ := strings.Cut(head, ": ")
			cases = append(cases, Case{Name: name, Want: strings.TrimSpace(want)})
		case strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#"):
		case len(cases) == 0:
			return nil, fmt.Errorf("%s: entry before the first case", path)
		default:
			c := &cases[len(cases)-1]
			if asked, is := strings.CutPrefix(line, "ask "); is {
				e := archive.Entry{Kind: archive.File}
				if _, err := fmt.Sscanf(asked, "%q size=%d", &e.Name, &e.Size); err != nil {
					return nil, fmt.Errorf("%s: %q: %w", path, line, err)
				}
				c.Asked = append(c.Asked, e)
				continue
			}
			c.lines = append(c.lines, line)
		}
	}
	return cases, nil
}

var types = map[string]byte{
	"file": tar.TypeReg, "dir": tar.TypeDir, "link": tar.TypeSymlink, "hard": tar.TypeLink, "char": tar.TypeChar,
	"block": tar.TypeBlock, "fifo": tar.TypeFifo, "contiguous": tar.TypeCont, "sparse": tar.TypeGNUSparse, "unknown": 'Z',
}

// Archive makes the archive of a case.
func (c Case) Archive() ([]byte, error) {
	var b bytes.Buffer
	for _, line := range c.lines {
		if err := entry(&b, line); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", c.Name, line, err)
		}
	}
	b.Write(make([]byte, 1024))
	return b.Bytes(), nil
}

// entry writes one entry. The header is made by archive/tar, and then given the
// type and size that archive/tar would not write.
func entry(b *bytes.Buffer, line string) error {
	kind, rest, _ := strings.Cut(line, " ")
	flag, known := types[kind]
	if !known {
		return fmt.Errorf("unknown type")
	}
	name, rest, err := quoted(rest)
	if err != nil {
		return err
	}
	h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(1e9, 0), Format: tar.FormatGNU}
	announced, content := int64(-1), int64(0)
	for rest = strings.TrimSpace(rest); rest != ""; rest = strings.TrimSpace(rest) {
		if to, is := strings.CutPrefix(rest, "-> "); is {
			if h.Linkname, rest, err = quoted(to); err != nil {
				return err
			}
			continue
		}
		var option string
		option, rest, _ = strings.Cut(rest, " ")
		key, value, _ := strings.Cut(option, "=")
		switch key {
		case "size":
			announced, err = strconv.ParseInt(value, 10, 64)
		case "content":
			content, err = strconv.ParseInt(value, 10, 64)
		case "mode":
			h.Mode, err = strconv.ParseInt(value, 8, 64)
		case "format":
			h.Format = map[string]tar.Format{"pax": tar.FormatPAX, "gnu": tar.FormatGNU}[value]
		default:
			err = fmt.Errorf("unknown option")
		}
		if err != nil {
			return err
		}
	}
	if announced < 0 {
		announced = content
	}
	if h.Size = announced; flag == tar.TypeSymlink || flag == tar.TypeLink || flag == tar.TypeDir {
		h.Typeflag = flag
		h.Size = 0
	}
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(h); err != nil {
		return err
	}
	retype(head.Bytes(), flag)
	b.Write(head.Bytes())
	b.Write(make([]byte, (content+511)/512*512))
	return nil
}

// retype gives the last header of a sequence another type, and its checksum.
func retype(head []byte, flag byte) {
	block := head[len(head)-512:]
	block[156] = flag
	copy(block[148:156], "        ")
	sum := 0
	for _, c := range block {
		sum += int(c)
	}
	copy(block[148:156], fmt.Sprintf("%06o\x00 ", sum))
}

// quoted reads a Go string.
func quoted(s string) (value, rest string, err error) {
	text, err := strconv.QuotedPrefix(s)
	if err != nil {
		return "", "", err
	}
	value, err = strconv.Unquote(text)
	return value, s[len(text):], err
}
