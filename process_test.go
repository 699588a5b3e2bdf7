package createos

import (
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestResumeEndsStrays(t *testing.T) {
	stray := func(fields string) string {
		args, _ := json.Marshal(execArgs("dead"))
		return `{"process_id":"p9","cmd":"/bin/bash","args":` + string(args) + `,` + fields + `}`
	}
	for name, tc := range map[string]struct {
		row   string
		kills int
	}{
		"runs":           {stray(`"state":"running","leader_exited":false,"tree_exited":false`), 1},
		"background":     {stray(`"state":"exited","leader_exited":true,"tree_exited":false,"exit_code":0`), 0},
		"failed command": {stray(`"state":"exited","leader_exited":true,"tree_exited":false,"exit_code":3`), 0},
		"killed":         {stray(`"state":"exited","leader_exited":true,"tree_exited":false,"signal":"SIGTERM"`), 1},
		"terminating":    {stray(`"state":"terminating","leader_exited":true,"tree_exited":false,"exit_code":0`), 1},
		"over":           {stray(`"state":"exited","leader_exited":true,"tree_exited":true,"exit_code":0`), 0},
		"somebody's":     {`{"process_id":"p9","cmd":"/bin/bash","args":["-c","server"],"state":"running"}`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				m.script(rProcesses, ok(`{"processes":[`+tc.row+`]}`))
				m.script(rKill, ok(`{"process_id":"p9","tree_exited":true}`))
				_, err := m.d.Resume(t.Context(), m.env, m.lease)
				require.NoError(t, err)
				assert.Equal(t, tc.kills, m.count(rKill))
			})
		})
	}
	t.Run("of this driver is spared", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			var wg sync.WaitGroup
			wg.Go(func() {
				res, err := m.exec(t.Context(), Command{}, func(p *proc) { p.sleep(10 * time.Second) })
				assert.NoError(t, err)
				assert.True(t, res.Success())
			})
			time.Sleep(time.Second)
			l, err := m.d.lessee(m.env, m.lease, ErrForeignLease, false)
			require.NoError(t, err)
			require.NoError(t, m.d.endStrays(t.Context(), l))
			wg.Wait()
			assert.Zero(t, m.count(rKill))
		})
	})
	t.Run("without proof", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.script(rProcesses, ok(`{"processes":[`+stray(`"state":"running"`)+`]}`))
			m.always(rKill, refuse(500))
			l, err := m.d.lessee(m.env, m.lease, ErrForeignLease, false)
			require.NoError(t, err)
			require.ErrorIs(t, m.d.endStrays(t.Context(), l), ErrTerminationUnproven)
			assert.Equal(t, []DebtKind{ProcessUnproven}, kinds(m.d))
		})
	})
	t.Run("list fails", func(t *testing.T) {
		onMachine(t, func(t *testing.T, m *machine) {
			m.always(rProcesses, refuse(503))
			l, err := m.d.lessee(m.env, m.lease, ErrForeignLease, false)
			require.NoError(t, err)
			require.ErrorIs(t, m.d.endStrays(t.Context(), l), ErrUnavailable)
			assert.Empty(t, kinds(m.d))
		})
	})
}

func TestRetryEndsProcesses(t *testing.T) {
	for name, tc := range map[string]struct {
		entries []string
		script  func(m *machine)
		is      error
	}{
		"process id": {[]string{"p1"}, func(m *machine) { m.script(rKill, ok(`{"process_id":"p1","tree_exited":true}`)) }, nil},
		"second lives": {[]string{"p1", "p2"}, func(m *machine) {
			m.script(rKill, ok(`{"process_id":"p1","tree_exited":true}`))
			m.always(rKill, ok(`{"process_id":"p2","tree_exited":false}`))
		}, errTreeLives},
		"not found":        {[]string{"p1"}, func(m *machine) { m.script(rKill, refuse(404)) }, errTreeUnseen},
		"exec id unlisted": {[]string{execIDEntry("x")}, nil, errNotListed},
		"list refused":     {[]string{"p1"}, func(m *machine) { m.always(rProcesses, refuse(401)) }, ErrUnauthorized},
		"paused":           {[]string{"p1"}, func(m *machine) { m.always(rKill, refuse(409)) }, ErrConflict},
	} {
		t.Run(name, func(t *testing.T) {
			onMachine(t, func(t *testing.T, m *machine) {
				if tc.script != nil {
					tc.script(m)
				}
				l, err := m.d.lessee(m.env, m.lease, ErrForeignLease, false)
				require.NoError(t, err)
				ctx, cancel := cleanupContext(t.Context(), time.Minute)
				defer cancel()
				require.ErrorIs(t, m.d.endProcesses(ctx, l.target(), tc.entries), tc.is)
			})
		})
	}
}
