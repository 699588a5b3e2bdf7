package main

import (
	"errors"
	"slices"
	"sync"

	"github.com/createos-lease/createos"
	"github.com/createos-lease/createos/createostest"
)

// A site is where the sandboxes are: the provider, an emulator that runs
// elsewhere, or one within this program.
type site struct {
	config createos.Config
	driver createos.DriverConfig
	// workspace names a workspace for one more sandbox; "" is the default.
	workspace func() (string, error)
	leaks     func() string // embedded only
	close     func()        // embedded only
}

func embeddedSite() (*site, error) {
	srv, err := createostest.Start(createostest.Options{})
	if err != nil {
		return nil, err
	}
	return &site{
		config:    srv.Config(),
		driver:    srv.DriverConfig(),
		workspace: func() (string, error) { return srv.Workspace(), nil },
		leaks:     srv.LeakReport,
		close:     srv.Close,
	}, nil
}

// remoteSite is one that outlives the program.
func remoteSite(o options, st *store) (*site, error) {
	doc := map[string]any{"apiUrl": o.url, "shape": o.shape}
	if o.key != "" {
		doc["apiKey"] = o.key
	}
	// ParseConfig, unlike a literal, gives the origin in the form in which
	// leases and intents have it, so that the store can be searched for it.
	config, err := createos.ParseConfig(doc)
	if err != nil {
		return nil, err
	}
	free := &workspaces{any: len(o.workspaces) == 0}
	used := st.workspaces(config.APIURL)
	for _, path := range o.workspaces {
		if !slices.Contains(used, path) {
			free.paths = append(free.paths, path)
		}
	}
	return &site{config: config, workspace: free.next}, nil
}

// workspaces hands out the paths of the command line. Only the sandboxes of an
// emulator need them, which share the files of one machine.
type workspaces struct {
	any bool // the default serves every sandbox

	mu    sync.Mutex // guards paths
	paths []string
}

func (w *workspaces) next() (string, error) {
	if w.any {
		return "", nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.paths) == 0 {
		return "", errors.New("no workspace is free: give one more -workspace for each sandbox")
	}
	path := w.paths[0]
	w.paths = w.paths[1:]
	return path, nil
}
