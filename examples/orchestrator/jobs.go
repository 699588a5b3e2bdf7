package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/createos-lease/createos"
)

// stepsPerJob is how many steps the script reports.
const stepsPerJob = 3

// script stands for some work. It counts, in a file, how often this sandbox was
// used: the count goes on after a pause and a resume.
const script = `
n=$(cat uses 2>/dev/null || echo 0)
for s in 1 2 3; do echo "step $s"; sleep 0.3; done
echo $((n + 1)) > uses
echo "uses $((n + 1))"
`

// runJobs runs the jobs, all at the same time, and waits for them.
func (h *host) runJobs(ctx context.Context, n int) error {
	p := &progress{host: h, jobs: n}
	var jobs sync.WaitGroup
	for i := range n {
		jobs.Go(func() { p.finished(i, h.runJob(ctx, i, p)) })
	}
	jobs.Wait()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("interrupted: %w", err)
	}
	if failed := h.tally.failed.Load(); failed > 0 {
		return fmt.Errorf("%d of %d jobs failed", failed, n)
	}
	return nil
}

// An outcome is how a job ended.
type outcome struct {
	lease *createos.Lease
	uses  string // of its sandbox, this one included
	err   error
}

// runJob runs one job. Whatever becomes of it, its lease is given back.
func (h *host) runJob(ctx context.Context, i int, p *progress) (o outcome) {
	env := h.envs[i%len(h.envs)]
	o.lease, o.err = h.lease(ctx, env)
	if o.err != nil {
		return o
	}
	defer func() { o.err = errors.Join(o.err, h.giveBack(ctx, env, o.lease)) }()
	res, err := h.driver.Exec(ctx, env, o.lease, createos.Command{
		Name: "bash", Args: []string{"-euc", script},
		Stdout: &lineReader{line: func(line string) {
			if strings.HasPrefix(line, "step ") {
				p.stepped()
			}
			if uses, ok := strings.CutPrefix(line, "uses "); ok {
				o.uses = uses
			}
		}},
	})
	if err == nil {
		err = res.Err()
	}
	if err != nil && len(res.Stderr) > 0 {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(res.Stderr))
	}
	o.err = err
	return o
}

// progress reports on the jobs of one life while they run.
type progress struct {
	host        *host
	jobs        int
	steps, over atomic.Int64
}

// stepped reports each quarter of all steps.
func (p *progress) stepped() {
	all := int64(p.jobs * stepsPerJob)
	if n := p.steps.Add(1); n*4/all > (n-1)*4/all {
		p.host.log.Printf("  %d of %d steps", n, all)
	}
}

func (p *progress) finished(i int, o outcome) {
	h := p.host
	var text string
	switch {
	case errors.Is(o.err, context.Canceled):
		h.tally.cancelled.Add(1)
		text = "cancelled"
	case o.err != nil:
		h.tally.failed.Add(1)
		text = fmt.Sprintf("failed: %v", o.err)
	default:
		h.tally.done.Add(1)
		text = fmt.Sprintf("done in %s, use %s", o.lease.ProviderLeaseID, o.uses)
	}
	env := h.envs[i%len(h.envs)]
	h.log.Printf("[%2d/%d] job %02d for %s/%s %s", p.over.Add(1), p.jobs, i+1, env.CompanyID, env.EnvironmentID, text)
}

// A lineReader calls line for each whole line that is written to it. Exec writes
// from one goroutine at a time, so it needs no lock.
type lineReader struct {
	line func(string)
	part []byte
}

func (r *lineReader) Write(p []byte) (int, error) {
	r.part = append(r.part, p...)
	for {
		line, rest, whole := bytes.Cut(r.part, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		r.line(string(line))
		r.part = rest
	}
}
