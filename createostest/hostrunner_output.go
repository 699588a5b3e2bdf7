//go:build unix

package createostest

// outputEnds are closed when nobody holds the other ends of the pipes any more.
// A child that runs on with its output elsewhere does not hold up an exec.
func (p *hostProcess) outputEnds() []<-chan struct{} {
	ends := make([]<-chan struct{}, len(p.outputs))
	for i, o := range p.outputs {
		ends[i] = o.done
	}
	return ends
}
