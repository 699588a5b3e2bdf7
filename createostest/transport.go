package createostest

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// newTransport returns a transport that goes nowhere but to the server: no
// proxy, no HTTP/2, and room for the idle connections of a stress test.
func newTransport() *http.Transport {
	return &http.Transport{
		MaxIdleConns:        0,
		MaxIdleConnsPerHost: 256,
		DisableCompression:  true,
	}
}

// pipeListener is a listener whose connections are net.Pipe. Reads and writes
// of a pipe block in a way that testing/synctest can see through, which those
// of a socket do not.
type pipeListener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

// dial has the signature of a transport's dial functions. For https it stands
// in for the TLS handshake too: what runs over the pipe is plain HTTP/1.1.
func (l *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	err := net.ErrClosed
	select {
	case l.conns <- server:
		return client, nil
	case <-l.done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	client.Close()
	server.Close()
	return nil, &net.OpError{Op: "dial", Net: "pipe", Addr: pipeAddr{}, Err: err}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return pipeAddr{} }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }
