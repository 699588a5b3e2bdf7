package createos_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A harness is a driver, and plain HTTP, on an emulator that may be another
// process.
type harness struct {
	driver    *createos.Driver
	transport http.RoundTripper
	env       createos.Environment
	workspace string
	requests  atomic.Int64 // that the driver sent
}

// newHarness makes a harness. cfg must have a transport.
func newHarness(cfg createos.DriverConfig, env createos.Config, workspace string) (*harness, error) {
	h := &harness{
		transport: cfg.Transport, workspace: workspace,
		env: createos.Environment{CompanyID: "acme", EnvironmentID: "bench", Config: env},
	}
	on := cfg.OnEvent
	cfg.OnEvent = func(e createos.Event) {
		if on != nil {
			on(e)
		}
		if e.Kind == createos.EventRequest {
			h.requests.Add(1)
		}
	}
	var err error
	h.driver, err = createos.NewDriver(cfg)
	return h, err
}

func (h *harness) acquire(ctx context.Context) (*createos.Lease, error) {
	return h.driver.Acquire(ctx, h.env, createos.AcquireOptions{Workspace: h.workspace})
}

// flood is a command with two arguments: it writes so many bytes, so many at a
// time. With a third it waits for one byte of input before: who connects to the
// output by hand has to be there first.
func flood(_ context.Context, c *createostest.Command) int {
	if len(c.Args) < 2 {
		return 0 // a command of the driver's own
	}
	total, err := strconv.Atoi(c.Args[0])
	size, err2 := strconv.Atoi(c.Args[1])
	if err != nil || err2 != nil || total%size != 0 {
		return 2
	}
	if len(c.Args) > 2 {
		if _, err := io.ReadFull(c.Stdin, make([]byte, 1)); err != nil {
			return 3
		}
	}
	piece := make([]byte, size)
	for i := range piece {
		piece[i] = byte(i * 131 >> 3)
	}
	for range total / size {
		if _, err := c.Stdout.Write(piece); err != nil {
			return 4
		}
	}
	return 0
}

// execFlood reads a flood through Exec.
func (h *harness) execFlood(ctx context.Context, lease *createos.Lease, total, size int) error {
	res, err := h.driver.Exec(ctx, h.env, lease, createos.Command{
		Name: "flood", Args: []string{strconv.Itoa(total), strconv.Itoa(size)}, Stdout: io.Discard,
	})
	switch {
	case err != nil:
		return err
	case res.Err() != nil:
		return res.Err()
	case res.StdoutBytes != int64(total):
		return fmt.Errorf("got %d of %d bytes", res.StdoutBytes, total)
	}
	return nil
}

// bareFlood reads the same flood with the least that can be done: lines are
// split, and the data, at a place known beforehand, is decoded.
func (h *harness) bareFlood(ctx context.Context, lease *createos.Lease, total, size int) error {
	processes := "/v1/sandboxes/" + lease.ProviderLeaseID + "/processes"
	body, err := json.Marshal(map[string]any{
		"cmd": "flood", "args": []string{strconv.Itoa(total), strconv.Itoa(size), "wait"},
	})
	if err != nil {
		return err
	}
	resp, err := h.send(ctx, http.MethodPost, processes, bytes.NewReader(body))
	if err != nil {
		return err
	}
	var created struct {
		Data struct {
			ID string `json:"process_id"`
		} `json:"data"`
	}
	err = json.NewDecoder(resp.Body).Decode(&created)
	resp.Body.Close()
	if err != nil {
		return err
	}
	process := processes + "/" + created.Data.ID
	output, err := h.send(ctx, http.MethodGet, process+"/connect?after=0", nil)
	if err != nil {
		return err
	}
	defer output.Body.Close()
	begin, err := h.send(ctx, http.MethodPost, process+"/input", strings.NewReader(`{"data_base64":"Cg=="}`))
	if err != nil {
		return err
	}
	begin.Body.Close()
	got, err := readBare(output.Body, io.Discard)
	if err == nil && got != total {
		err = fmt.Errorf("got %d of %d bytes", got, total)
	}
	return err
}

func (h *harness) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, h.env.Config.APIURL+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Api-Key", h.env.Config.APIKey.Reveal())
	resp, err := (&http.Client{Transport: h.transport}).Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		resp.Body.Close()
		return nil, errors.New(method + " " + path + ": " + resp.Status)
	}
	return resp, nil
}

var (
	dataKey = []byte(`"data_base64":"`)
	dataEnd = []byte("\"}\n")
)

// readBare reads a stream to its end and returns how much output was in it.
func readBare(from io.Reader, to io.Writer) (total int, err error) {
	lines := bufio.NewReaderSize(from, 64<<10)
	data := make([]byte, 64<<10)
	for {
		line, err := lines.ReadSlice('\n')
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		_, text, ok := bytes.Cut(line, dataKey)
		if !ok {
			continue // the exit
		}
		n, err := base64.StdEncoding.Decode(data, bytes.TrimSuffix(text, dataEnd))
		if err != nil {
			return total, err
		}
		if _, err := to.Write(data[:n]); err != nil {
			return total, err
		}
		total += n
	}
}
