//go:build unix

package hosttree

import "syscall"

const nonblock = syscall.O_NONBLOCK
