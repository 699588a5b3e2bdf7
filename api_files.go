package createos

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// upload writes size bytes of body to a file, whose directories the provider
// makes. It may be sent several times, each time from the start of body; body is
// not used any more when upload has returned. There is no bound on the whole,
// only on standing still.
func (c *Client) upload(ctx context.Context, id, path string, body io.ReadSeeker, size int64) error {
	r, err := fileRequest(path)
	if err != nil {
		return err
	}
	r.method, r.detail, r.upload = http.MethodPut, "upload file", &payload{body, size}
	_, err = c.onSandbox(ctx, id, "/files", r)
	return err
}

// download opens a file and returns its size, -1 if the provider does not say.
// The reader ends with io.EOF only if the whole file was read. Ending ctx ends
// the reading; the caller closes the reader.
func (c *Client) download(ctx context.Context, id, path string) (io.ReadCloser, int64, error) {
	r, err := fileRequest(path)
	if err != nil {
		return nil, 0, err
	}
	r.method, r.detail, r.stream = http.MethodGet, "download file", true
	a, err := c.onSandbox(ctx, id, "/files", r)
	if err != nil {
		return nil, 0, err
	}
	return a.flow, a.flow.length, nil
}

func fileRequest(path string) (*request, error) {
	if !strings.HasPrefix(path, "/") || strings.ContainsRune(path, 0) {
		return nil, &InputError{"remote path", "is not absolute, or holds a NUL"}
	}
	return &request{operation: OpFileTransfer, query: url.Values{"path": {path}}}, nil
}
