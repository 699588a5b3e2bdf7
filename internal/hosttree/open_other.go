//go:build !unix

package hosttree

// What is opened is looked at afterwards; the flag only spares a wait.
const nonblock = 0
