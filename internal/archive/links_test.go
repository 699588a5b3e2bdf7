package archive_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos/internal/archive"
)

func TestLinksAreJudgedByWhatChanges(t *testing.T) {
	for name, c := range map[string]struct {
		before, after archive.Links
		want          string
	}{
		"nothing":                    {},
		"new, stays":                 {nil, archive.Links{"a/x": "../b"}, ""},
		"new, leads out":             {nil, archive.Links{"a/x": "../../b"}, "a/x"},
		"old, leads out":             {archive.Links{"x": "/etc"}, archive.Links{"x": "/etc", "y": "z"}, ""},
		"old, through another":       {archive.Links{"x": "own/f", "own": ".."}, archive.Links{"x": "own/f", "own": "..", "y": "z"}, ""},
		"old, led out another way":   {archive.Links{"x": "own/f", "own": ".."}, archive.Links{"x": "own/f", "own": "a/../../b"}, "own"},
		"old, changes behind it":     {archive.Links{"x": "../d/y"}, archive.Links{"x": "../d/y", "d": "."}, ""},
		"old, one on its way goes":   {archive.Links{"x": "l/../../f", "l": "a/b"}, archive.Links{"x": "l/../../f"}, "x"},
		"old, one on its way comes":  {archive.Links{"x": "l/../f"}, archive.Links{"x": "l/../f", "l": "."}, "x"},
		"old, does not lead out now": {archive.Links{"x": "own/f", "own": ".."}, archive.Links{"x": "own/f", "own": "a"}, ""},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, c.after.Harm(c.before)) })
	}
}
