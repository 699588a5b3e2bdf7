// Package manifest holds lists of the entries of trees of files. They are sorted,
// and they do not take memory as they grow: what is more than a few thousand entries
// is in a temporary file, so what works on trees does so by going through lists.
package manifest

import (
	"bufio"
	"container/heap"
	"io"
	"iter"
	"slices"

	"github.com/createos-lease/createos/internal/archive"
)

const (
	// batch is how many entries a list holds in memory.
	batch = 4096
	// maxRuns is how many sorted runs there are before they are made one. Each
	// takes a buffer of readSize when they are.
	maxRuns  = 64
	readSize = 16 << 10
)

// Entries are what lists are gone through by. An error is the last that they yield.
type Entries = iter.Seq2[archive.Entry, error]

// A List is a list of entries. They are added in any order, then sorted, and then
// gone through any number of times. Entries of one name come in no particular order.
// It is for one goroutine until it is sorted, and for any number after that.
type List struct {
	// Len is the number of entries, Files that of the files among them, and Bytes
	// how long these are together.
	Len, Files int
	Bytes      int64

	recent []archive.Entry // not written yet
	runs   []run
	last   string // the last name of the last run
	stored Buffer
}

// A run is a part of what is stored, which is sorted.
type run struct {
	begin, end int64
	count      int // entries
}

// Add adds an entry.
func (l *List) Add(e archive.Entry) error {
	l.recent = append(l.recent, e)
	l.Len++
	if e.Kind == archive.File {
		l.Files++
		l.Bytes += e.Size
	}
	if len(l.recent) < batch {
		return nil
	}
	return l.store()
}

// store writes what is in memory: to the last run if it goes on there, as it does
// when entries are added in their order.
func (l *List) store() error {
	l.sortRecent()
	if len(l.recent) == 0 {
		return nil
	}
	if len(l.runs) == 0 || Compare(l.recent[0].Name, l.last) < 0 {
		l.runs = append(l.runs, run{begin: l.stored.Size()})
	}
	w := bufio.NewWriterSize(&l.stored, readSize)
	var record []byte
	for _, e := range l.recent {
		record = appendEntry(record[:0], e)
		if _, err := w.Write(record); err != nil {
			return err
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	last := &l.runs[len(l.runs)-1]
	last.end = l.stored.Size()
	last.count += len(l.recent)
	l.last = l.recent[len(l.recent)-1].Name
	clear(l.recent)
	l.recent = l.recent[:0]
	if len(l.runs) < maxRuns {
		return nil
	}
	return l.merge()
}

func (l *List) sortRecent() {
	slices.SortFunc(l.recent, func(a, b archive.Entry) int { return Compare(a.Name, b.Name) })
}

// merge makes one run of all.
func (l *List) merge() error {
	var one List
	for e, err := range l.merged() {
		if err == nil {
			err = one.Add(e)
		}
		if err != nil {
			one.Close()
			return err
		}
	}
	if err := one.store(); err != nil {
		one.Close()
		return err
	}
	l.stored.Close()
	l.runs, l.last, l.stored = one.runs, one.last, one.stored
	return nil
}

// Sort ends the adding.
func (l *List) Sort() error {
	if len(l.runs) == 0 {
		l.sortRecent()
		return nil
	}
	if err := l.store(); err != nil || len(l.runs) == 1 {
		return err
	}
	return l.merge()
}

// All goes through the entries of a sorted list.
func (l *List) All() Entries {
	if len(l.runs) > 0 {
		return l.read(l.runs[0])
	}
	return func(yield func(archive.Entry, error) bool) {
		for _, e := range l.recent {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func (l *List) read(r run) Entries {
	return func(yield func(archive.Entry, error) bool) {
		d := l.decoder(r)
		for {
			e, err := d.next()
			if err == io.EOF || !yield(e, err) || err != nil {
				return
			}
		}
	}
}

func (l *List) decoder(r run) *decoder {
	return &decoder{left: r.count, r: bufio.NewReaderSize(io.NewSectionReader(&l.stored, r.begin, r.end-r.begin), readSize)}
}

// merged goes through all runs at once.
func (l *List) merged() Entries {
	return func(yield func(archive.Entry, error) bool) {
		var heads heads
		for _, r := range l.runs {
			h := &head{from: l.decoder(r)}
			var err error
			if h.entry, err = h.from.next(); err != nil {
				yield(archive.Entry{}, err)
				return
			}
			heads = append(heads, h)
		}
		heap.Init(&heads)
		for len(heads) > 0 {
			h := heads[0]
			if !yield(h.entry, nil) {
				return
			}
			var err error
			switch h.entry, err = h.from.next(); err {
			case nil:
				heap.Fix(&heads, 0)
			case io.EOF:
				heap.Pop(&heads)
			default:
				yield(archive.Entry{}, err)
				return
			}
		}
	}
}

// A head is the next entry of a run.
type head struct {
	entry archive.Entry
	from  *decoder
}

type heads []*head

func (h heads) Len() int           { return len(h) }
func (h heads) Less(i, j int) bool { return Compare(h[i].entry.Name, h[j].entry.Name) < 0 }
func (h heads) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *heads) Push(x any)        { *h = append(*h, x.(*head)) }
func (h *heads) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}

// Close empties the list, which may be used and closed again.
func (l *List) Close() {
	l.stored.Close()
	*l = List{}
}
