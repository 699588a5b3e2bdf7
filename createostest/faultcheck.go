package createostest

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// apiMethods are the methods that the API has.
var apiMethods = []string{"GET", "POST", "PUT", "PATCH", "DELETE"}

// stateRoutes are the requests that change the state of a sandbox.
var stateRoutes = []string{
	"POST /v1/sandboxes", "POST /v1/sandboxes/{id}/pause", "POST /v1/sandboxes/{id}/resume",
	"POST /v1/sandboxes/{id}/fork", "DELETE /v1/sandboxes/{id}",
}

// badFault says which field of a fault cannot be meant.
func badFault(field, reason string) error {
	return fmt.Errorf("createostest: Fault.%s: %s", field, reason)
}

// checkFault finds what would keep a fault from ever doing what it says.
func (s *Server) checkFault(f *Fault) error {
	if err := s.checkFaultRoute(f); err != nil {
		return err
	}
	if err := f.checkNumbers(); err != nil {
		return err
	}
	if err := f.checkState(); err != nil {
		return err
	}
	return f.checkEffects()
}

func (s *Server) checkFaultRoute(f *Fault) error {
	method, path := splitRoute(f.Route)
	switch {
	case f.Method != "" && !slices.Contains(apiMethods, f.Method):
		return badFault("Method", fmt.Sprintf("%q is not one of %s", f.Method, strings.Join(apiMethods, ", ")))
	case f.Method != "" && method != "" && f.Method != method:
		return badFault("Method", fmt.Sprintf("%s is not that of the Route %q", f.Method, f.Route))
	case f.Route != "" && !s.knowsRoute(f.methods(), path):
		return badFault("Route", fmt.Sprintf("no request matches %q", strings.TrimSpace(f.Method+" "+f.Route)))
	}
	return nil
}

// methods are those that the fault can match.
func (f *Fault) methods() []string {
	method, _ := splitRoute(f.Route)
	switch {
	case method != "":
		return []string{method}
	case f.Method != "":
		return []string{f.Method}
	}
	return apiMethods
}

// knowsRoute tells whether the server has the path with one of the methods.
func (s *Server) knowsRoute(methods []string, path string) bool {
	return slices.ContainsFunc(methods, func(m string) bool {
		if !slices.Contains(apiMethods, m) {
			return false
		}
		r, err := http.NewRequest(m, "http://emulator.invalid"+path, nil)
		if err != nil || r.URL.Path != path { // a query is no part of a path
			return false
		}
		_, pattern := s.muxOf(r).Handler(r)
		return pattern != ""
	})
}

func (f *Fault) checkNumbers() error {
	for _, n := range []struct {
		field string
		value int64
	}{
		{"Nth", int64(f.Nth)}, {"Times", int64(f.Times)}, {"RetryAfter", int64(f.RetryAfter)},
		{"Delay", int64(f.Delay)}, {"DelayReply", int64(f.DelayReply)},
	} {
		if n.value < 0 {
			return badFault(n.field, "is negative")
		}
	}
	if f.Status != 0 && (f.Status < 100 || f.Status > 599) {
		return badFault("Status", "is not 100 to 599")
	}
	return nil
}

func (f *Fault) checkState() error {
	switch {
	case f.StuckState == "":
		return nil
	case !slices.Contains(states, f.StuckState):
		return badFault("StuckState", fmt.Sprintf("%q is no state", f.StuckState))
	case f.Refuse || f.answersItself() && !f.Effect && !f.DropReply:
		return badFault("StuckState", "the request is not handled, so that no state changes")
	}
	_, path := splitRoute(f.Route)
	for _, route := range stateRoutes {
		method, pattern := splitRoute(route)
		if slices.Contains(f.methods(), method) && (path == "" || fitsPath(path, pattern) || fitsPath(pattern, path)) {
			return nil
		}
	}
	return badFault("StuckState", "the Method or Route changes no state")
}

// checkEffects refuses fields that nothing comes of, alone or next to the
// others.
func (f *Fault) checkEffects() error {
	cut := f.CutAfterBytes != 0 || f.CutAfterFrames != 0
	rewritten := f.Reply != nil || f.WrongID || f.DelayReply > 0 || f.After != nil
	switch {
	case f.CutClean && !cut:
		return badFault("CutClean", "needs CutAfterBytes or CutAfterFrames")
	case f.Effect && !f.answersItself() && !f.DropReply:
		return badFault("Effect", "needs Status, Body, Garbage, RetryAfter, Redirect or Hang")
	case f.Refuse && (f.Before != nil || f.After != nil):
		return badFault("Refuse", "keeps Before and After from being called")
	case (f.Reply != nil || f.WrongID) && (f.Refuse || f.DropReply || f.answersItself()):
		return badFault("Reply or WrongID", "another field says what is answered")
	case len(f.Header) > 0 && !f.answersItself() && !rewritten:
		return badFault("Header", "needs an answer of the fault to go with, such as Status or Reply")
	case !(f.Refuse || f.DropReply || f.answersItself() || rewritten || cut || f.Delay > 0 ||
		f.Before != nil || f.Frames != nil || f.StuckState != "" || f.When != nil):
		return badFault("When", "is not set, and nothing of the second group either: it would do nothing")
	}
	return nil
}

// answersItself tells whether the fault keeps the client from the handler's
// answer, with one of its own or with none.
func (f *Fault) answersItself() bool { return f.Hang || f.status() != 0 }

// fitsPath tells whether a path fits a pattern, in which {name} is any one
// segment.
func fitsPath(pattern, path string) bool {
	want, have := strings.Split(pattern, "/"), strings.Split(path, "/")
	return slices.EqualFunc(want, have, func(w, h string) bool {
		return w == h || h != "" && strings.HasPrefix(w, "{") && strings.HasSuffix(w, "}")
	})
}
