package main

import "fmt"

// summarize says how a life went and what it leaves.
func (h *host) summarize(title string) {
	t := &h.tally
	kept, expired := 0, 0
	for _, r := range h.store.records(h.site.config.APIURL) {
		if r.Expired != "" {
			expired++
		} else {
			kept++
		}
	}
	owed := h.driver.Unconfirmed()
	h.log.Printf("-- summary of the %s", title)
	line := func(label, format string, args ...any) {
		h.log.Printf("%-10s %s", label, fmt.Sprintf(format, args...))
	}
	line("jobs", "%d done, %d failed, %d cancelled", t.done.Load(), t.failed.Load(), t.cancelled.Load())
	line("sandboxes", "%d acquired, %d resumed, %d destroyed", t.acquired.Load(), t.resumed.Load(), t.destroyed.Load())
	line("kept", "%d leases, paused, in %s", kept, h.store.path)
	if expired > 0 {
		line("expired", "%d leases: look at them, then use -destroy", expired)
	}
	line("requests", "%d", t.requests.Load())
	if len(owed) == 0 {
		line("owed", "nothing")
	}
	for _, u := range owed {
		line("owed", "%s", describe(u))
	}
}
