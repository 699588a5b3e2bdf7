package createostest

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
	"unsafe"
)

// terminal is the near side of a pseudo terminal.
type terminal struct{ master *os.File }

// openTerminal opens a pseudo terminal and returns its far side too, which is
// for the command.
func openTerminal(size ptySize) (*terminal, *os.File, error) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	t := &terminal{master}
	slave, err := t.openSlave(size)
	if err != nil {
		_ = master.Close()
		return nil, nil, fmt.Errorf("open a terminal: %w", err)
	}
	return t, slave, nil
}

func (t *terminal) openSlave(size ptySize) (*os.File, error) {
	var unlock int32
	if err := t.ioctl(syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)); err != nil {
		return nil, err
	}
	var number uint32
	if err := t.ioctl(syscall.TIOCGPTN, unsafe.Pointer(&number)); err != nil {
		return nil, err
	}
	if err := t.resize(size); err != nil {
		return nil, err
	}
	path := "/dev/pts/" + strconv.FormatUint(uint64(number), 10)
	return os.OpenFile(path, os.O_RDWR|syscall.O_NOCTTY, 0)
}

func (t *terminal) resize(size ptySize) error {
	window := struct{ rows, cols, width, height uint16 }{rows: uint16(size.rows), cols: uint16(size.cols)}
	return t.ioctl(syscall.TIOCSWINSZ, unsafe.Pointer(&window))
}

// foreground returns the process group that the terminal sends its signals to,
// or otherwise when it has none.
func (t *terminal) foreground(otherwise int) int {
	var group int32
	if err := t.ioctl(syscall.TIOCGPGRP, unsafe.Pointer(&group)); err != nil || group <= 1 {
		return otherwise
	}
	return int(group)
}

func (t *terminal) ioctl(request uintptr, arg unsafe.Pointer) error {
	raw, err := t.master.SyscallConn()
	if err != nil {
		return err
	}
	var errno syscall.Errno
	err = raw.Control(func(fd uintptr) {
		_, _, errno = syscall.Syscall(syscall.SYS_IOCTL, fd, request, uintptr(arg))
	})
	if err == nil && errno != 0 {
		err = errno
	}
	return err
}
