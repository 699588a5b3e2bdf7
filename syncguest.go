package createos

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/createos-lease/createos/internal/hosttree"
)

// What a sync does in the sandbox it does in steps: short scripts, run by the
// buffered exec of the provider. They need neither output as it comes nor a
// proof of their end, as commands of a host do: each ends by itself, soon, and
// works in a scratch directory without which it can do nothing. So one that was
// cut off does not poison the lease.
//
// A buffered exec must not be repeated blindly when its reply was lost. So each
// step has a number and begins by making a directory of it in the scratch
// directory; who finds it made waits for what the first one says, and gives
// that answer. With that a step may be sent again, and happens once.

// The exit codes of the scripts.
const (
	guestUnsafe  = 90
	guestTools   = 91
	guestMissing = 92
	guestKind    = 93
	guestCorrupt = 94
	guestChanged = 95
	guestWrite   = 96
	guestGone    = 97 // the scratch directory
	guestBusy    = 98 // the step runs on
)

var guestErrors = map[int]error{
	guestUnsafe: ErrSyncUnsafe, guestTools: ErrSyncTools, guestMissing: ErrSyncMissing, guestKind: ErrSyncKind,
	guestCorrupt: ErrSyncCorrupt, guestChanged: ErrSyncChanged, guestWrite: ErrSyncWrite, guestGone: ErrSyncStep,
}

// guestPrelude goes before every script. $W is the workspace, $D the driver's
// directory in it, $S the scratch directory, R the workspace without links.
//
// down goes from there into directories one by one. It refuses links, and looks
// where it came to, so that a link that takes the place of a directory between
// look and step is noticed as well. What follows works on names in the directory
// where the shell then is, which nobody can exchange under it.
//
// scrap removes a tree. Of what does not let itself be removed it opens the directories,
// and nothing else: a file of it may have other names, which are none of our business.
//
// drop removes a scratch directory. That loses its name first, at once and as a whole:
// a step that was cut off, and still runs, must not find a tree half removed and put
// that in place. It finds none, and fails.
//
// claim makes $f an uploaded file of that length and digest, or ends the step. It
// gives it another name first, which no upload has: an attempt that was cut off, and
// arrives after the comparison, must not change what was compared.
const guestPrelude = `
export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
set -o pipefail; umask 077
cd -P -- "$W" 2>/dev/null || exit 92
[ ! -L "$W" ] || exit 90
R=$PWD P=$PWD D=$PWD/.paperclip-runtime
[ ! -L "$D" ] || exit 90
S=$D/sync-$I
sum() { if [ "$1" -gt 4194304 ] && command -v openssl >/dev/null; then openssl dgst -sha256 -r; else sha256sum; fi; }
told() { n=$(stat -c %s -- "$1") && h=$(sum "$n" <"$1") && printf '%s %s\n' "$n" "${h%% *}"; }
mark() { cksum <"$1"; }
verify() { n=$(stat -c %s -- "$1") && [ "$n" = "$2" ] && h=$(sum "$n" <"$1") && [ "${h%% *}" = "$3" ]; }
scrap() { rm -rf -- "$1" || { find "$1" -type d ! -perm -700 -exec chmod u+rwx -- {} \; ; rm -rf -- "$1"; } } 2>/dev/null
drop() { scrap "$1.gone"; mv -T -- "$1" "$1.gone"; scrap "$1.gone" && [ ! -e "$1" ]; } 2>/dev/null
claim() { f=$S/own.$1; mv -T -- "$S/$1" "$f" && verify "$f" "$2" "$3" || exit 94; }
down() {
	make=$1; shift
	for c; do
		[ ! -L "./$c" ] || exit 90
		if [ ! -d "./$c" ]; then
			[ ! -e "./$c" ] || exit 93
			[ "$make" = 1 ] || exit 92
			mkdir -m 755 -- "./$c" || [ -d "./$c" ] || exit 96
		fi
		cd -P -- "./$c" && [ "$PWD" = "$P/$c" ] || exit 90
		P=$PWD
	done
}
near() { # a name in this directory for what is in the scratch directory: renamed in one, it must be on this file system
	if [ "$(stat -c %d -- "$1")" = "$(stat -c %d .)" ]; then printf %s "$1"; else
		scrap "./.createos-new.$I"; cp -a -- "$1" "./.createos-new.$I" && printf %s "./.createos-new.$I"; fi
}
`

// guestStep runs body once, whatever happens to the connection. $N is its number.
// When body ends, well or not, what near has copied to where it went, in $P, is
// removed if it was not put in its place, and then shut is called, which body may
// define. A disk that is full may take no exit code either.
const guestStep = `
[ -d "$S" ] || exit 97
T=$S/run.$N c=97
if mkdir "$T" 2>/dev/null; then
	(shut() { :; }; trap '[ ! -e "$P/.createos-new.$I" ] || scrap "$P/.createos-new.$I"; shut' EXIT; body) >"$T/out" 2>/dev/null </dev/null
	echo $? >"$T/rc" || exit 96
else
	[ -d "$T" ] || [ ! -d "$S" ] || exit 96
	i=0
	while [ ! -s "$T/rc" ]; do
		[ -d "$T" ] || exit 97
		[ $((i += 1)) -lt 150 ] || exit 98
		sleep 0.2
	done
fi 2>/dev/null
mapfile -t o 2>/dev/null <"$T/out"
[ ${#o[@]} = 0 ] || printf '%s\n' "${o[@]}"
read -r c 2>/dev/null <"$T/rc"
exit "$c"
`

// guestLate gives a request that was cut off a moment to arrive before the
// scratch directory is removed: it would make the directory, or a file in it, once
// more. What comes later still is for the next sync to remove.
const guestLate = "sleep 0.3\n"

// guestCleanup waits for a step that still runs, though not for long, and removes
// the scratch directory.
const guestCleanup = `
i=0
while [ $((i += 1)) -lt 50 ]; do
	busy=
	for r in "$S"/run.*; do [ ! -d "$r" ] || [ -e "$r/rc" ] || busy=1; done
	[ -n "$busy" ] || break
	sleep 0.2
done
drop "$S" || exit 96
`

// guestStale removes the scratch directories of hosts that died in the middle:
// those in which nothing was made for a day. A sync that lives makes something
// there with each step and each piece that it sends, and gives up after
// minutes without.
const guestStale = `find "$D" -mindepth 1 -maxdepth 1 -type d -name 'sync-*' -mmin +1440 -print0 2>/dev/null | while IFS= read -r -d '' s; do scrap "$s"; done
`

// guestStrong is mark with a SHA-256.
const guestStrong = `mark() { h=$(sum 99999999 <"$1") && printf '%s\n' "${h%% *}"; }
`

// guestToolCheck checks for the programs; what only GNU has, if it is needed.
func guestToolCheck(gnu bool) string {
	text := `for c in tar sha256sum cksum find xargs stat mv rm cp chmod touch sleep; do command -v "$c" >/dev/null || exit 91; done` + "\n"
	if gnu {
		text += `case $(tar --version) in *GNU*) ;; *) exit 91; esac; find . -maxdepth 0 -printf '' || exit 91` + "\n"
	}
	return text
}

// guestPeek says what is at a path, without following a link on the way there.
// With $1, what a step that was killed has moved aside under that name is put back
// first, if nothing is in its place.
const guestPeek = `
peek() (
	o=$1 P=$R; shift; cd "$R" || exit
	while [ $# -gt 1 ]; do
		[ ! -L "./$1" ] || { echo link; exit; }
		[ -e "./$1" ] || { echo absent; exit; }
		[ -d "./$1" ] || { echo other; exit; }
		cd -P -- "./$1" && [ "$PWD" = "$P/$1" ] || { echo link; exit; }
		P=$PWD; shift
	done
	if [ -n "$o" ] && [ ! -e "./$1" ] && [ ! -L "./$1" ] && [ ! -L "./$o" ] && [ -d "./$o" ]; then mv -T -- "./$o" "./$1" || exit 96; fi
	if [ -L "./$1" ]; then echo link; elif [ -d "./$1" ]; then echo dir; elif [ -f "./$1" ]; then echo file
	elif [ -e "./$1" ]; then echo other; else echo absent; fi
)
`

// scratch is the scratch directory of a sync, as the file API names it.
func (y *syncer) scratch(name string) string {
	return y.plan.workspace + "/" + runtimeDir + "/sync-" + y.id + "/" + name
}

// maxScript is the most text that a script is made of where there may be any
// number of words: it travels as one argument.
const maxScript = 64 << 10

// asideName is the name of a directory while it is replaced.
func asideName(remote string) string {
	return hosttree.OldPrefix + hosttree.ShortName(path.Base(remote))
}

// goneName begins the names of directories that were replaced.
func goneName(remote string) string {
	return hosttree.GonePrefix + hosttree.ShortName(path.Base(remote)) + "."
}

// begin makes the scratch directory, removes what earlier syncs could not, and
// looks at the remote side of all mappings. For SyncIn it puts back what was moved
// aside, and nobody else may be putting anything in place. What it returns is
// whether there is gzip, and what is at each path. It may be repeated by itself.
func (y *syncer) begin(ctx context.Context) (found []string, err error) {
	var w strings.Builder
	w.WriteString(guestToolCheck(y.needsGNU()) + guestPeek)
	w.WriteString(`mkdir -m 755 "$D" 2>/dev/null || [ -d "$D" ] || exit 96` + "\n")
	if y.plan.dir == syncIn {
		unlock, err := y.lockCommits(ctx)
		if err != nil {
			return nil, err
		}
		defer unlock()
	}
	left := y.d.leftovers(y.l.scope)
	for _, id := range left {
		w.WriteString(`drop "$D/sync-` + id + "\"\n")
	}
	w.WriteString(guestStale)
	w.WriteString(`mkdir "$S" 2>/dev/null || [ -d "$S" ] || exit 96` + "\n")
	w.WriteString("command -v gzip >/dev/null && echo gzip || echo plain\n")
	y.doubt = true
	send := func() error {
		out, err := y.script(ctx, w.String())
		found = append(found, strings.Fields(out)...)
		w.Reset()
		w.WriteString(guestPeek)
		return err
	}
	for _, list := range y.plan.mappings {
		for _, m := range list {
			aside := "''"
			if y.plan.dir == syncIn {
				aside = guestWord(asideName(m.remote))
			}
			w.WriteString("peek " + aside + " " + guestWords(m.remote) + " || exit\n")
			if w.Len() > maxScript {
				if err := send(); err != nil {
					return nil, err
				}
			}
		}
	}
	if err := send(); err != nil {
		return nil, err
	}
	y.doubt = y.lost.Load()
	y.d.forgetLeftovers(y.l.scope, left)
	return found, nil
}

// needsGNU says whether the plan needs more of the programs than every image has.
func (y *syncer) needsGNU() bool {
	for _, list := range y.plan.mappings {
		for _, m := range list {
			if y.plan.dir == syncOut && m.Kind != SyncFile || m.Merge {
				return true
			}
		}
	}
	return false
}

// step runs a script in the sandbox, once, and returns what it printed, which is
// ASCII.
func (y *syncer) step(ctx context.Context, body string) (string, error) {
	n := y.steps.Add(1)
	return y.script(ctx, fmt.Sprintf("N=%d\nbody() {\n%s\n}\n%s", n, body, guestStep))
}

// stepTries is how often a step is sent whose reply does not come.
const stepTries = 4

// script runs a script that may be repeated.
func (y *syncer) script(ctx context.Context, body string) (string, error) {
	text := "W=" + guestWord(y.plan.workspace) + " I=" + y.id + guestPrelude
	if y.plan.strong {
		text += guestStrong
	}
	text += body
	over := time.Now().Add(y.timeout) // for all attempts together
	failures, conflicts := 0, 0
	for {
		got, err := y.client.execWithin(ctx, y.l.scope.id, execShell, []string{"-c", text}, max(time.Until(over), time.Second))
		if err == nil {
			y.ran.Store(true)
		}
		if unclear(err) {
			y.lost.Store(true)
		}
		if !notSent(err) { // even a refusal may come after the work was done
			y.dirty.Store(true)
		}
		switch {
		case err == nil && (got.Failed || got.ExitCode == nil):
			return "", ErrSyncStep
		case err == nil && *got.ExitCode == guestBusy && time.Now().Before(over) && ctx.Err() == nil:
			continue
		case err == nil:
			return got.Stdout, guestError(*got.ExitCode)
		case isConflict(err) && y.leaving && !y.ran.Load():
			// It was paused before anything ran, and would be left running. What may
			// be in it can wait for the next sync.
		case isConflict(err) && conflicts < wakeTries:
			conflicts++
			if _, werr := y.d.wake(ctx, y.l); werr != nil {
				return "", werr
			}
			continue
		case unclear(err) || errors.Is(err, ErrConnection):
			if failures++; failures < stepTries && time.Now().Before(over) && sleep(ctx, jitter(failures)) == nil {
				continue
			}
		}
		return "", y.d.missing(ctx, y.l, err)
	}
}

func guestError(code int) error {
	if code == 0 {
		return nil
	}
	if err := guestErrors[code]; err != nil {
		return err
	}
	return &syncCause{kind: ErrSyncStep, text: fmt.Sprintf("exit code %d", code)}
}

// cleanUp removes the scratch directory, on a bound of its own.
func (y *syncer) cleanUp(ctx context.Context) {
	if !y.dirty.Load() {
		return
	}
	y.leaving = true
	ctx, cancel := cleanupContext(ctx, y.d.cfg.CleanupTimeout)
	defer cancel()
	text := guestCleanup
	if y.doubt {
		text = guestLate + text
	}
	_, err := y.script(ctx, text)
	if errors.Is(err, ErrLeaseGone) {
		return
	}
	if y.doubt || err != nil {
		y.d.leaveOver(y.l.scope, y.id)
	}
	if err == nil || errors.Is(err, ErrSyncMissing) {
		return
	}
	y.res.Warnings = append(y.res.Warnings, fmt.Errorf("createos: sync: scratch files were not removed: %w", err))
}

// guestWord is a word of a script, of any bytes: what is not UTF-8 cannot travel
// in JSON, and is written in bash's own way.
func guestWord(s string) string {
	if utf8.ValidString(s) {
		word, err := shellQuote(s)
		if err == nil {
			return word
		}
	}
	var b strings.Builder
	b.WriteString("$'")
	for i := range len(s) {
		fmt.Fprintf(&b, `\x%02x`, s[i])
	}
	b.WriteString("'")
	return b.String()
}

// guestWords are the components of a path in the workspace.
func guestWords(rel string) string {
	var words []string
	for part := range strings.SplitSeq(rel, "/") {
		words = append(words, guestWord(part))
	}
	return strings.Join(words, " ")
}

// guestDown goes to the directory of a path, or with all to the path itself.
func guestDown(rel string, all, mk bool) string {
	if !all {
		rel = path.Dir(rel)
	}
	if rel == "." {
		return ""
	}
	make := "0"
	if mk {
		make = "1"
	}
	return "down " + make + " " + guestWords(rel) + "\n"
}
