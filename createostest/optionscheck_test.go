package createostest

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestStartRefusesOptionsThatCannotBeMeant(t *testing.T) {
	for field, all := range map[string][]Options{
		"RealCommands":  {{RealCommands: true}, {RealCommands: true, Commands: Builtin}},
		"Dir":           {{Dir: "x", Commands: Builtin}, {Dir: "x", InMemory: true}, {Dir: "x", InMemory: true, RealCommands: true, Commands: Builtin}},
		"Shapes":        {{Shapes: []Shape{}}},
		"Rootfs":        {{Rootfs: []Rootfs{}}},
		"IDPrefix":      {{IDPrefix: "sb/"}, {IDPrefix: "sb-\n"}, {IDPrefix: "sé-"}},
		"CreateStatus":  {{CreateStatus: 199}, {CreateStatus: 300}, {CreateStatus: -1}},
		"ListShape":     {{ListShape: -1}, {ListShape: 3}},
		"AllowedShapes": {{AllowedShapes: []string{"s-none"}}, {AllowedShapes: []string{"s-1vcpu-1gb"}, Shapes: []Shape{{ID: "small"}}}},
		"MaxDiskMiB":    {{MaxDiskMiB: -1}},
		"MaxBoxes":      {{MaxBoxes: -1}},
		"CreatingPolls": {{CreatingPolls: -1}},
		"ListLag":       {{ListLag: -1}},
		"BootDelay":     {{BootDelay: -1}},
		"PauseDelay":    {{PauseDelay: -1}},
		"ResumeDelay":   {{ResumeDelay: -1}},
		"DestroyDelay":  {{DestroyDelay: -1}},
		"RateLimit":     {{RateLimit: -1}},
		"JournalBytes":  {{JournalBytes: -1}},
		"Heartbeat":     {{Heartbeat: -1}},
		"MaxFileBytes":  {{MaxFileBytes: -1}},
	} {
		for _, o := range all {
			srv, err := Start(o)
			if assert.ErrorContains(t, err, "createostest: Options."+field+": ") {
				assert.Nil(t, srv)
				continue
			}
			srv.Close()
		}
	}
	for _, o := range []Options{
		{}, {CreateStatus: 299, IDPrefix: "sb_A-9", ListShape: ListBare, AllowedShapes: []string{}},
		{AllowedShapes: []string{"small"}, Shapes: []Shape{{ID: "small"}}},
		{InMemory: true, RealCommands: true, Dir: "x"}, {InMemory: true, RealCommands: true, Commands: Builtin},
	} {
		assert.NoError(t, o.check(), "%+v", o)
	}
}

func TestNewServerRefusesOptionsThatCannotBeMeant(t *testing.T) {
	for want, opts := range map[string][]Options{
		"createostest: Options.CreateStatus: is not 200 to 299": {{InMemory: true, CreateStatus: 404}},
		"createostest: NewServer: takes at most one Options":    {{InMemory: true}, {}},
	} {
		synctest.Test(t, func(t *testing.T) { // nothing of a server is left running
			said := &listener{TB: t}
			func() {
				defer func() { recover() }() // a real Fatalf does not return
				NewServer(said, opts...)
			}()
			require.Equal(t, "fatal: "+want, said.text())
			require.Empty(t, said.cleanups)
		})
	}
}
