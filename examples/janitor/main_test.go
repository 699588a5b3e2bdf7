package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPlanDestroysNothing(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(t.Context(), &out, nil))
	assert.Equal(t, 2, strings.Count(out.String(), " known "))
	assert.Equal(t, 3, strings.Count(out.String(), " stray "))
	assert.Contains(t, out.String(), "5 of this environment, 3 strays; 0 of others")
	assert.Contains(t, out.String(), "nothing was destroyed")
	assert.Contains(t, out.String(), "the emulator holds 5 sandboxes")
}

func TestApplyDestroysTheStrays(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(t.Context(), &out, []string{"-apply"}))
	assert.Equal(t, 2, strings.Count(out.String(), " known "))
	assert.Equal(t, 3, strings.Count(out.String(), " destroyed "))
	assert.Contains(t, out.String(), "the emulator holds 2 sandboxes")
}

func TestLiveNeedsTheLeases(t *testing.T) {
	require.ErrorContains(t, run(t.Context(), new(strings.Builder), []string{"-live", "-apply"}), "-leases")
	broken := filepath.Join(t.TempDir(), "leases.json")
	require.NoError(t, os.WriteFile(broken, []byte(`{"not":"a list"}`), 0o600))
	require.ErrorContains(t, run(t.Context(), new(strings.Builder), []string{"-live", "-leases", broken}), "leases.json")
}

func TestLiveNeedsItsVariables(t *testing.T) {
	none := filepath.Join(t.TempDir(), "leases.json")
	require.NoError(t, os.WriteFile(none, []byte(`[]`), 0o600))
	for _, missing := range []string{"CREATEOS_API_URL", "CREATEOS_API_KEY"} {
		t.Setenv("CREATEOS_API_URL", "https://provider.invalid")
		t.Setenv("CREATEOS_API_KEY", "skp_example")
		t.Setenv(missing, "")
		err := run(t.Context(), new(strings.Builder), []string{"-live", "-leases", none})
		require.EqualError(t, err, "-live needs CREATEOS_API_URL and CREATEOS_API_KEY", missing)
	}
}

// What is no list of leases must not pass for an empty one: the difference is every
// sandbox of the environment.
func TestReadLeasesRefusesWhatIsNoList(t *testing.T) {
	for _, text := range []string{"", "null", "{}", "[1]", `"x"`} {
		file := filepath.Join(t.TempDir(), "leases.json")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		_, err := readLeases(file)
		require.Error(t, err, text)
	}
	_, err := readLeases("")
	require.Error(t, err)
}
