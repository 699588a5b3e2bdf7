package manifest

import (
	"io"
	"os"
)

// inMemory is how many bytes a Buffer holds in memory. What most syncs need is less.
const inMemory = 1 << 20

// A Buffer holds bytes that were written to it: in memory as long as they are few,
// and then in a temporary file, which is gone when it is closed or, where the system
// allows that, when this process ends. The zero Buffer is empty. It is for one
// writer, and for any number of readers when all is written.
type Buffer struct {
	memory []byte
	file   *os.File
	remove bool // the file has a name still
	size   int64
}

// A StoreError says that there is no temporary file, or no room in it.
type StoreError struct{ Err error }

func (e *StoreError) Error() string { return "temporary files cannot be written: " + e.Err.Error() }

// Unwrap gives the cause.
func (e *StoreError) Unwrap() error { return e.Err }

// Write appends p. If it fails the error is a [*StoreError].
func (b *Buffer) Write(p []byte) (n int, err error) {
	if b.file == nil && len(b.memory)+len(p) <= inMemory {
		b.memory = append(b.memory, p...)
		b.size += int64(len(p))
		return len(p), nil
	}
	if b.file == nil {
		err = b.spill()
	}
	if err == nil {
		n, err = b.file.WriteAt(p, b.size)
		b.size += int64(n)
	}
	if err != nil {
		err = &StoreError{err}
	}
	return n, err
}

func (b *Buffer) spill() error {
	f, err := os.CreateTemp("", "createos-list-")
	if err != nil {
		return err
	}
	b.file, b.remove = f, os.Remove(f.Name()) != nil
	_, err = f.Write(b.memory)
	b.memory = nil
	return err
}

// ReadAt reads what was written, as io.ReaderAt says.
func (b *Buffer) ReadAt(p []byte, off int64) (int, error) {
	if b.file != nil {
		return b.file.ReadAt(p, off)
	}
	if off >= int64(len(b.memory)) {
		return 0, io.EOF
	}
	n := copy(p, b.memory[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// Size is how many bytes were written.
func (b *Buffer) Size() int64 { return b.size }

// Close empties the buffer, which may be used and closed again. A file that cannot be
// removed is left to the system.
func (b *Buffer) Close() {
	if f := b.file; f != nil {
		_ = f.Close()
		if b.remove {
			_ = os.Remove(f.Name())
		}
	}
	*b = Buffer{}
}
