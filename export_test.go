package createos

import "context"

// What follows lets the tests of package createos_test see the state that the
// laws are about. Nothing of it is compiled into the library.

// A DriverState is how much of everything a driver holds at one moment.
type DriverState struct {
	Active, Acquiring, Closing, Works int
	// Owed are the entries themselves, without what Unconfirmed adds for work
	// that runs.
	Owed []Unconfirmed
}

// State reads the maps of a driver.
func (d *Driver) State() DriverState {
	d.mu.Lock()
	defer d.mu.Unlock()
	owed := d.debtsLocked()
	sortEntries(owed)
	return DriverState{
		Active: len(d.active), Acquiring: len(d.acquiring), Closing: len(d.closing), Works: len(d.works), Owed: owed,
	}
}

// Quiet waits until no call and no cleanup runs.
func (d *Driver) Quiet(ctx context.Context) error { return d.quiet(ctx) }
