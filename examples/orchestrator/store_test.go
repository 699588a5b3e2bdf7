package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

const someOrigin = "https://api.sb.createos.sh"

func TestStoreSurvives(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leases.json")
	st, err := openStore(file)
	require.NoError(t, err)
	require.NoError(t, st.intend(createos.Intent{APIURL: someOrigin, SandboxName: "l-one", LeaseKey: "CREATEOS_LEASE_1"}))
	require.NoError(t, st.intend(createos.Intent{APIURL: someOrigin, SandboxName: "l-two", LeaseKey: "CREATEOS_LEASE_2"}))
	lease := someLease("sb-2", "l-two")
	require.NoError(t, st.acquired(lease))
	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci"}
	require.Nil(t, st.take(someOrigin, env), "whoever acquired it has it")

	// The program ends here, by whatever means.
	st, err = openStore(file)
	require.NoError(t, err)
	owed := st.owed(someOrigin)
	require.Len(t, owed, 1)
	assert.Equal(t, createos.CreateUnknown, owed[0].Kind)
	assert.Equal(t, "l-one", owed[0].SandboxName)
	assert.Less(t, owed[0].Age(), time.Minute)
	assert.Empty(t, st.owed("https://api-us.sb.createos.sh"))

	kept := st.take(someOrigin, env)
	require.NotNil(t, kept)
	assert.Equal(t, text(t, lease), text(t, kept))
	require.Nil(t, st.take(someOrigin, env), "only one may have it")
	st.free(kept)
	require.NotNil(t, st.take(someOrigin, env))
	require.NoError(t, st.gone(kept))
	require.Empty(t, st.records(someOrigin))

	left, err := filepath.Glob(filepath.Join(filepath.Dir(file), "*"))
	require.NoError(t, err)
	assert.Equal(t, []string{file}, left, "no temporary file stays behind")
}

func TestStoreThatCannotBeReadIsNotReplaced(t *testing.T) {
	for _, broken := range []string{"", "{", `{"leases":[{}]}`, `{"leases":[{"lease":7}]}`} {
		file := filepath.Join(t.TempDir(), "leases.json")
		require.NoError(t, os.WriteFile(file, []byte(broken), 0o600))
		_, err := openStore(file)
		require.Error(t, err, broken)
	}
}

// What is not on the disk did not happen: above all, nothing is created then.
func TestStoreThatCannotBeWrittenStopsAcquire(t *testing.T) {
	srv := createostest.NewServer(t, createostest.Options{InMemory: true})
	dir := filepath.Join(t.TempDir(), "volume")
	require.NoError(t, os.Mkdir(dir, 0o700))
	st, err := openStore(filepath.Join(dir, "leases.json"))
	require.NoError(t, err)
	require.NoError(t, os.Remove(dir))

	site := &site{config: srv.Config(), driver: srv.DriverConfig(), workspace: func() (string, error) { return "", nil }}
	h, err := newHost(nil, site, st)
	require.NoError(t, err)
	_, err = h.acquire(t.Context(), h.envs[0])
	require.ErrorIs(t, err, os.ErrNotExist)
	assert.Empty(t, srv.Sandboxes())
	assert.Empty(t, h.driver.Unconfirmed())
}

func TestStoreIsUsedByManyJobs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leases.json")
	st, err := openStore(file)
	require.NoError(t, err)
	var jobs sync.WaitGroup
	for i := range 20 {
		jobs.Go(func() {
			name := string(rune('a' + i))
			assert.NoError(t, st.intend(createos.Intent{APIURL: someOrigin, SandboxName: name}))
			if i%2 == 0 {
				assert.NoError(t, st.notCreated(name))
			} else {
				assert.NoError(t, st.acquired(someLease("sb-"+name, name)))
			}
		})
	}
	jobs.Wait()
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	var c contents
	require.NoError(t, json.Unmarshal(raw, &c))
	assert.Empty(t, c.Intents)
	assert.Len(t, c.Leases, 10)
}

func someLease(id, name string) *createos.Lease {
	return &createos.Lease{ProviderLeaseID: id, Metadata: createos.Metadata{
		Provider: "createos", APIURL: someOrigin, CompanyID: "acme", EnvironmentID: "ci", SandboxName: name,
	}}
}

func text(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	require.NoError(t, err)
	return string(b)
}
