//go:build unix && !linux

package createostest

import (
	"errors"
	"os"
)

// terminal is the near side of a pseudo terminal, which the host runner has on
// Linux only.
type terminal struct{ master *os.File }

func openTerminal(ptySize) (*terminal, *os.File, error) {
	return nil, nil, errors.New("the host runner has terminals on Linux only")
}

func (t *terminal) resize(ptySize) error         { return errNoTerminal }
func (t *terminal) foreground(otherwise int) int { return otherwise }
