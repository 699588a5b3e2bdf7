//go:build unix

package createostest

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// psTable is the process table as ps(1) shows it, for systems without /proc. It
// knows no sessions and no environments; the comment on tree says what that
// misses.
type psTable struct{}

// psColumns puts the start time last, because it contains spaces.
var psColumns = []string{"-o", "pid=", "-o", "ppid=", "-o", "pgid=", "-o", "stat=", "-o", "lstart="}

func (psTable) list() ([]procInfo, error) {
	return runPS("-ax")
}

func (psTable) read(pid int) (procInfo, bool, error) {
	procs, err := runPS("-p", strconv.Itoa(pid))
	if err != nil || len(procs) == 0 {
		return procInfo{}, false, err
	}
	return procs[0], true, nil
}

func runPS(selection ...string) ([]procInfo, error) {
	cmd := exec.Command("ps", append(selection, psColumns...)...)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + defaultPath}
	out, err := cmd.Output()
	// ps exits with 1 when it selected nothing, which is an answer.
	var exit *exec.ExitError
	if err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1 && len(bytes.TrimSpace(out)) == 0) {
		return nil, fmt.Errorf("ps: %w", err)
	}
	return parsePS(string(out))
}

func parsePS(out string) ([]procInfo, error) {
	var procs []procInfo
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		p, alive, err := parsePSLine(fields)
		if err != nil {
			return nil, fmt.Errorf("ps: line %q: %w", line, err)
		}
		if alive {
			procs = append(procs, p)
		}
	}
	return procs, nil
}

func parsePSLine(fields []string) (procInfo, bool, error) {
	const pid, ppid, pgid, stat, lstart = 0, 1, 2, 3, 4
	if len(fields) <= lstart {
		return procInfo{}, false, errors.New("too few columns")
	}
	var numbers [stat]int
	for i := range numbers {
		n, err := strconv.Atoi(fields[i])
		if err != nil {
			return procInfo{}, false, err
		}
		numbers[i] = n
	}
	start, err := time.Parse("Mon Jan _2 15:04:05 2006", strings.Join(fields[lstart:], " "))
	if err != nil {
		return procInfo{}, false, err
	}
	state := fields[stat]
	return procInfo{
		pid:     numbers[pid],
		ppid:    numbers[ppid],
		pgid:    numbers[pgid],
		birth:   uint64(start.Unix()),
		stopped: strings.HasPrefix(state, "T"),
		blocked: strings.HasPrefix(state, "D") || strings.HasPrefix(state, "U"),
	}, !strings.HasPrefix(state, "Z"), nil
}
