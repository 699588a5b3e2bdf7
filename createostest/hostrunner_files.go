//go:build unix

package createostest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// put writes a file, and its parent directories if need be. A file that exists is
// overwritten in place, so that a body that ends in an error leaves a part of it
// behind. A symbolic link is followed if it leads, by a relative path, to another
// place below the directory of the runner.
func (m *hostMachine) put(path string, body io.Reader) (int64, error) {
	name, err := m.local(path)
	if err != nil {
		return 0, err
	}
	m.r.claim(m, path)
	n, err := m.write(name, body)
	if m.isDestroyed() {
		// destroy may have come before this file was there.
		return n, errors.Join(errDestroyed, err, m.removeFiles())
	}
	return n, m.fileError(path, err)
}

func (m *hostMachine) write(name string, body io.Reader) (int64, error) {
	dir := filepath.Dir(name)
	if err := m.r.root.MkdirAll(dir, 0o755); err != nil {
		// Go 1.25 says of a link that leads out only that it exists.
		if _, statErr := m.r.root.Stat(dir); errors.Is(statErr, m.r.escapes) {
			err = statErr
		}
		return 0, err
	}
	f, err := m.openRegular(name, os.O_WRONLY|os.O_CREATE)
	if err != nil {
		return 0, err
	}
	if err := f.Truncate(0); err != nil {
		return 0, errors.Join(err, f.Close())
	}
	n, err := io.Copy(f, body)
	return n, errors.Join(err, f.Close())
}

// open returns a file and its size in bytes.
func (m *hostMachine) open(path string) (io.ReadCloser, int64, error) {
	name, err := m.local(path)
	if err != nil {
		return nil, 0, err
	}
	f, err := m.openRegular(name, os.O_RDONLY)
	if err != nil {
		return nil, 0, m.fileError(path, err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

// remove removes a file, or a symbolic link but not what it leads to.
func (m *hostMachine) remove(path string) error {
	name, err := m.local(path)
	if err != nil {
		return err
	}
	info, err := m.r.root.Lstat(name)
	if err == nil && info.IsDir() {
		err = errBadPath
	}
	if err == nil {
		err = m.r.root.Remove(name)
	}
	return m.fileError(path, err)
}

// openRegular opens without waiting: a pipe with a name would otherwise wait for
// its other side.
func (m *hostMachine) openRegular(name string, flag int) (*os.File, error) {
	f, err := m.r.root.OpenFile(name, flag|syscall.O_NONBLOCK, 0o644)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errBadPath
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// local returns path relative to the directory of the runner. The directory of
// another machine is as far away as if it were outside.
func (m *hostMachine) local(path string) (string, error) {
	name, ok := strings.CutPrefix(filepath.Clean(path), m.r.dir+string(filepath.Separator))
	if !ok || !filepath.IsLocal(name) || strings.ContainsRune(name, 0) || strings.HasSuffix(path, "/") {
		return "", fmt.Errorf("%w: %q", errBadPath, path)
	}
	first, _, _ := strings.Cut(name, string(filepath.Separator))
	if strings.HasPrefix(first, "m-") && first != filepath.Base(m.dir) {
		return "", fmt.Errorf("%w: %q", errBadPath, path)
	}
	return name, nil
}

// fileError turns the errors that mean an unsuitable path into errBadPath.
func (m *hostMachine) fileError(path string, err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, errBadPath) {
		return err
	}
	// ENXIO is the answer for a pipe that nobody reads.
	bad := []error{m.r.escapes, syscall.EISDIR, syscall.ELOOP, syscall.ENXIO, syscall.ENAMETOOLONG}
	for _, b := range bad {
		if errors.Is(err, b) {
			return fmt.Errorf("%w: %q", errBadPath, path)
		}
	}
	return err
}
