//go:build !unix

package createostest

import "errors"

func newHostRunner(dir string) (runner, error) {
	return nil, errors.New("the host runner needs bash and process groups; use the in-memory runner")
}
