//go:build race

package createos_test

// raceEnabled says that the race detector is built in.
const raceEnabled = true
