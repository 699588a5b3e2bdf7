//go:build !unix

package hosttree

// What is opened is looked at afterwards; these flags only spare a wait.
const (
	nonblock = 0
	nofollow = 0
)
