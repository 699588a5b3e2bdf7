// Package createos leases CreateOS cloud sandboxes.
package createos
