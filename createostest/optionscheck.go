package createostest

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
)

// idPrefixPattern is what an id may begin with: ids are parts of paths.
var idPrefixPattern = regexp.MustCompile(`^[A-Za-z0-9_-]*$`)

// check finds what cannot be meant, before the defaults are filled in.
func (o Options) check() error {
	bad := func(field, reason string) error {
		return fmt.Errorf("createostest: Options.%s: %s", field, reason)
	}
	switch {
	case o.RealCommands && !o.InMemory:
		return bad("RealCommands", "needs InMemory; without it commands are real anyway, unless Commands is set")
	case o.Dir != "" && o.Commands != nil:
		return bad("Dir", "is not used with Commands, whose files are in memory")
	case o.Dir != "" && o.InMemory && !o.RealCommands:
		return bad("Dir", "is not used with InMemory, unless RealCommands is set")
	case o.Shapes != nil && len(o.Shapes) == 0:
		return bad("Shapes", "is empty; nil is the provider's catalogue")
	case o.Rootfs != nil && len(o.Rootfs) == 0:
		return bad("Rootfs", "is empty; nil is the provider's catalogue")
	case !idPrefixPattern.MatchString(o.IDPrefix):
		return bad("IDPrefix", "has a character other than A-Z, a-z, 0-9, _ and -")
	case o.CreateStatus != 0 && (o.CreateStatus < 200 || o.CreateStatus > 299):
		return bad("CreateStatus", "is not 200 to 299")
	case o.ListShape < ListPaginated || o.ListShape > ListBare:
		return bad("ListShape", "is none of ListPaginated, ListNamed and ListBare")
	}
	catalogue := o.Shapes
	if catalogue == nil {
		catalogue = defaultShapes()
	}
	for _, id := range o.AllowedShapes {
		if !slices.ContainsFunc(catalogue, func(s Shape) bool { return s.ID == id }) {
			return bad("AllowedShapes", strconv.Quote(id)+" is no shape of the catalogue")
		}
	}
	for _, n := range []struct {
		field string
		value int64
	}{
		{"MaxDiskMiB", int64(o.MaxDiskMiB)}, {"MaxBoxes", int64(o.MaxBoxes)}, {"CreatingPolls", int64(o.CreatingPolls)},
		{"ListLag", int64(o.ListLag)}, {"BootDelay", int64(o.BootDelay)}, {"PauseDelay", int64(o.PauseDelay)},
		{"ResumeDelay", int64(o.ResumeDelay)}, {"DestroyDelay", int64(o.DestroyDelay)}, {"RateLimit", int64(o.RateLimit)},
		{"JournalBytes", int64(o.JournalBytes)}, {"Heartbeat", int64(o.Heartbeat)}, {"MaxFileBytes", o.MaxFileBytes},
	} {
		if n.value < 0 {
			return bad(n.field, "is negative")
		}
	}
	return nil
}
