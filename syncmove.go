package createos

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"syscall"

	"github.com/createos-lease/createos/internal/archive"
	"github.com/createos-lease/createos/internal/cksum"
	"github.com/createos-lease/createos/internal/manifest"
)

// Content moves in units, each of which can be repeated by itself: archives of
// small files, and large files by themselves. Archives are small enough for one
// to be checked and unpacked while the next is on its way, and large enough that
// a tree does not use up the request budget: two requests carry up to packBytes.
const (
	packBytes   = 32 << 20
	packEntries = 4096
	// largeFile is from where on a file goes by itself.
	largeFile = 16 << 20
	// joinPart is the size of the parts of a file that is too large, but for the
	// first, which is as large as it may be: that one need not be copied
	// to be joined, and the others are joined while the next is sent.
	joinPart = 64 << 20
	// fetchTries is how often a download is begun.
	fetchTries = 3
)

// A unit is what moves at once.
type unit struct {
	number  int
	entries []archive.Entry
	large   bool // one file, by itself
	follow  bool // the entries are links in the sandbox, whose files are meant
	first   int  // how many entries the archives before it have
	gzip    bool // the archive is compressed
}

func (u *unit) name() string { return "p." + strconv.Itoa(u.number) }

// cut makes units of entries, in their order.
func (y *syncer) cut(entries manifest.Entries) iter.Seq2[*unit, error] {
	return func(yield func(*unit, error) bool) {
		open, size, packed, named := &unit{}, int64(0), int64(0), 0
		pass := func(u *unit) bool {
			u.number = y.number()
			if !u.large {
				u.first = named
				named += len(u.entries)
			}
			return yield(u, nil)
		}
		for e, err := range entries {
			if err != nil {
				yield(nil, err)
				return
			}
			if y.large(e) {
				if !pass(&unit{entries: []archive.Entry{e}, large: true}) {
					return
				}
				continue
			}
			full := len(open.entries) == packEntries || size+e.Size > packBytes || packed+e.Packed() > y.room() || e.Followed != open.follow
			if full && len(open.entries) > 0 {
				if !pass(open) {
					return
				}
				open, size, packed = &unit{}, 0, 0
			}
			open.entries = append(open.entries, e)
			open.follow = e.Followed
			size += e.Size
			packed += e.Packed()
		}
		if len(open.entries) > 0 {
			pass(open)
		}
	}
}

// room is how much an archive may take of its entries.
func (y *syncer) room() int64 { return y.plan.maxFile - archive.Overhead }

// large says whether a file goes by itself.
func (y *syncer) large(e archive.Entry) bool {
	return e.Kind == archive.File && !e.Followed && (e.Size >= largeFile || e.Packed() > y.room())
}

// number gives a number that no other scratch file of this sync has.
func (y *syncer) number() int {
	y.units++
	return y.units
}

// A digest is what a transfer is compared by.
type digest interface {
	io.Writer
	Reset()
	// text is as the sandbox prints it.
	text() string
}

// sha256Digest is the digest of archives and lists.
type sha256Digest struct{ hash.Hash }

func (d sha256Digest) text() string { return hex.EncodeToString(d.Sum(nil)) }

// crcDigest is that of large files. It covers the length.
type crcDigest struct{ cksum.Sum }

func (d *crcDigest) text() string { return fmt.Sprintf("%d %d", d.Sum32(), d.Size()) }

func newSHA256() digest { return sha256Digest{sha256.New()} }

// newLarge is the digest of large files, which the script function "mark" prints.
func (y *syncer) newLarge() digest {
	if y.plan.strong {
		return newSHA256()
	}
	return new(crcDigest)
}

// A source is the body of an upload that is hashed and counted while it is read.
type source struct {
	from io.ReadSeeker
	hash digest
	y    *syncer
	read int64
	size int64 // content in it, of from's length
	of   int64 // length of from
}

// newSource makes a source of so many bytes, which hold content bytes of files.
func (y *syncer) newSource(from io.ReadSeeker, h digest, length, content int64) *source {
	return &source{from: from, hash: h, y: y, size: content, of: length}
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.from.Read(p)
	_, _ = s.hash.Write(p[:n])
	s.advance(s.read + int64(n))
	return n, err
}

// advance counts the content among what was read: of an archive, a like part.
func (s *source) advance(read int64) {
	s.y.meter.add(s.share(read)-s.share(s.read), 0)
	s.read = read
}

func (s *source) share(read int64) int64 {
	if s.of == 0 || read == s.of {
		return s.size * min(read, 1)
	}
	return int64(float64(s.size) * (float64(read) / float64(s.of)))
}

// Seek begins a new attempt.
func (s *source) Seek(offset int64, whence int) (int64, error) {
	s.hash.Reset()
	s.advance(0)
	return s.from.Seek(offset, whence)
}

// A remoteFile is a scratch file that is to be fetched.
type remoteFile struct {
	name string
	size int64
	// sum gives its digest. It may take its time: it is asked when the file
	// is there.
	sum  func() (string, error)
	hash digest // of the same kind
}

// toldFile reads what the script function "told" printed.
func toldFile(name, out string) (remoteFile, error) {
	n, sum, ok := strings.Cut(strings.TrimSpace(out), " ")
	size, err := strconv.ParseInt(n, 10, 64)
	if _, bad := hex.DecodeString(sum); !ok || err != nil || size < 0 || bad != nil || len(sum) != 2*sha256.Size {
		return remoteFile{}, ErrSyncStep
	}
	return remoteFile{name, size, func() (string, error) { return sum, nil }, newSHA256()}, nil
}

// fetch downloads a scratch file into sink, which must take what it read back
// when it is called again. Nothing that sink got counts until fetch has
// returned nil: then length and digest are right. So they are if the error is that of
// sink about the content: what was damaged on the way is fetched again, and blamed on
// nobody.
func (y *syncer) fetch(ctx context.Context, f remoteFile, sink func(io.Reader) error) error {
	for try := 1; ; try++ {
		err := y.fetchOnce(ctx, f, sink)
		again := errors.Is(err, ErrConnection) || errors.Is(err, ErrSyncCorrupt)
		if err == nil || !again || try == fetchTries || sleep(ctx, jitter(try)) != nil {
			return err
		}
	}
}

func (y *syncer) fetchOnce(ctx context.Context, f remoteFile, sink func(io.Reader) error) error {
	body := io.ReadCloser(&partReader{ctx: ctx, y: y, of: f.name, left: f.size, part: y.plan.maxFile})
	flow, length, err := y.openRemote(ctx, f.name)
	var refused *RequestError
	switch {
	case errors.As(err, &refused) && refused.Status == http.StatusRequestEntityTooLarge && f.size > y.plan.maxFile:
		// A larger file may pass, or not: the provider names the limit for
		// uploads only.
	case err != nil:
		return err
	case length >= 0 && length != f.size:
		_ = flow.Close()
		return ErrSyncCorrupt
	default:
		body = flow
	}
	f.hash.Reset()
	h := newSideHash(f.hash)
	r := &checkedReader{from: body, hash: h, left: f.size}
	refusal := sink(r)
	ours := ofThisMachine(refusal)
	if !ours { // or the digest says nothing
		_, err = io.Copy(io.Discard, r)
	}
	got := h.sum()
	if cerr := body.Close(); err == nil && r.err == nil {
		err = cerr
	}
	switch {
	case r.err != nil:
		return r.err // whatever the sink made of it
	case ours:
		return refusal
	case err != nil:
		return err
	}
	want, err := f.sum()
	if err != nil {
		return err
	}
	if got != want {
		return ErrSyncCorrupt // that is why, if the sink refused it
	}
	return refusal
}

// ofThisMachine says whether an error is about where content goes to, and not about
// what it is.
func ofThisMachine(err error) bool { return errors.As(err, new(syscall.Errno)) }

func (y *syncer) openRemote(ctx context.Context, name string) (body io.ReadCloser, length int64, err error) {
	err = y.awake(ctx, func() error {
		body, length, err = y.client.download(ctx, y.l.scope.id, y.scratch(name))
		return err
	})
	return body, length, err
}

// A checkedReader hands out exactly as many bytes as were promised, and hashes
// them. err is set if there are fewer or more, or the connection failed.
type checkedReader struct {
	from io.Reader
	hash *sideHash
	left int64
	err  error
}

func (r *checkedReader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	n, err := r.from.Read(p)
	if int64(n) > r.left {
		r.err = ErrSyncCorrupt
		return 0, r.err
	}
	r.hash.write(p[:n])
	r.left -= int64(n)
	switch {
	case err == io.EOF && r.left > 0:
		r.err = ErrSyncCorrupt
		return n, r.err
	case err != nil && err != io.EOF:
		r.err = err
	}
	return n, err
}

// A sideHash hashes on a goroutine of its own: hashing and writing would
// otherwise take turns. Its owner calls sum, once, which ends it.
type sideHash struct {
	in, free chan []byte
	out      chan string
}

func newSideHash(d digest) *sideHash {
	const buffers, size = 4, 128 << 10
	s := &sideHash{in: make(chan []byte, buffers), free: make(chan []byte, buffers), out: make(chan string, 1)}
	for range buffers {
		s.free <- make([]byte, 0, size)
	}
	go func() { // ends when sum closes in
		for b := range s.in {
			_, _ = d.Write(b)
			s.free <- b[:0]
		}
		s.out <- d.text()
	}()
	return s
}

func (s *sideHash) write(p []byte) {
	for len(p) > 0 {
		b := <-s.free
		n := min(len(p), cap(b))
		s.in <- append(b, p[:n]...)
		p = p[n:]
	}
}

func (s *sideHash) sum() string {
	close(s.in)
	return <-s.out
}

// A partReader reads a scratch file that cannot be had in one piece: a step in
// the sandbox copies one part after the other.
type partReader struct {
	ctx  context.Context
	y    *syncer
	of   string
	at   int64
	left int64
	part int64
	open io.ReadCloser
}

func (r *partReader) Read(p []byte) (int, error) {
	for {
		if r.open == nil {
			if r.left == 0 {
				return 0, io.EOF
			}
			if err := r.next(); err != nil {
				return 0, err
			}
		}
		n, err := r.open.Read(p)
		if err == io.EOF {
			err = r.open.Close()
			r.open = nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

func (r *partReader) next() error {
	size := min(r.left, r.part, joinPart)
	name := fmt.Sprintf("%s.part", r.of)
	body := fmt.Sprintf("cd \"$S\" && tail -c +%d -- %s | head -c %d >%s; [ \"$(stat -c %%s %s)\" = %d ] || exit 95",
		r.at+1, r.of, size, name, name, size)
	if _, err := r.y.step(r.ctx, body); err != nil {
		return err
	}
	open, length, err := r.y.openRemote(r.ctx, name)
	if err != nil {
		return err
	}
	if length >= 0 && length != size {
		_ = open.Close()
		return ErrSyncCorrupt
	}
	r.open = open
	r.at += size
	r.left -= size
	return nil
}

func (r *partReader) Close() error {
	if r.open == nil {
		return nil
	}
	return r.open.Close()
}
