package createos

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Over HTTP/2 one connection serves all requests, and net/http has rules of its
// own for sending a request again.
func TestHTTP2(t *testing.T) {
	var posts atomic.Int32
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 2 {
			t.Errorf("request over %s", r.Proto)
		}
		if r.Method == http.MethodPost {
			posts.Add(1)
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write([]byte(goodReply))
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()

	c := testClient(srv.Client().Transport, func(cfg *clientConfig) { cfg.origin = srv.URL })
	_, err := c.get(t.Context(), testSandbox)
	require.NoError(t, err)
	_, err = c.create(t.Context(), createRequest{})
	require.ErrorIs(t, err, ErrConnection)
	assert.True(t, unclear(err))
	assert.Equal(t, int32(1), posts.Load())

	// A certificate that is not trusted: the handshake fails, and its text names hosts.
	c = testClient(&http.Transport{}, func(cfg *clientConfig) { cfg.origin = srv.URL })
	_, err = c.create(t.Context(), createRequest{})
	require.ErrorIs(t, err, ErrConnection)
	assert.Equal(t, "CreateOS connection failed.", err.Error())
	assert.True(t, notSent(err))
}

func TestTheTransportOfTheProcess(t *testing.T) {
	c := newClient(clientConfig{origin: testOrigin})
	shared, ok := c.transport.(*http.Transport)
	require.True(t, ok)
	assert.Same(t, shared, newClient(clientConfig{origin: "https://other.test"}).transport)
	assert.NotSame(t, http.DefaultTransport, shared)
	assert.Equal(t, 64, shared.MaxIdleConnsPerHost)
	assert.NotNil(t, shared.Proxy)
}
