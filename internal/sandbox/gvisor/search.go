package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/sandbox"
)

var _ sandbox.Searcher = (*Runtime)(nil)

// A removed is what a sandbox had that was removed: each start has another name and user
// ID. It is remembered so that Search knows what to look for.
type removed struct {
	parts []removedPart // at most maxParts, the newest last
	at    time.Time
}

type removedPart struct {
	name string // of directory, cgroup and container
	uid  uint32 // 0 if it had none
}

const (
	maxRemoved = 1024 // remembered sandboxes
	maxParts   = 32   // starts of one of them
)

// remember notes what is about to be removed.
func (r *Runtime) remember(id, name string) {
	uid, ok := r.ids.has(name)
	if !ok && name == id {
		if _, err := os.Lstat(r.dir(id)); err != nil {
			return // there is nothing, or nothing any more
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.removed == nil {
		r.removed = map[string]removed{}
	}
	for len(r.removed) >= maxRemoved {
		oldest := ""
		for k, v := range r.removed {
			if oldest == "" || v.at.Before(r.removed[oldest].at) {
				oldest = k
			}
		}
		delete(r.removed, oldest)
	}
	was := r.removed[id].parts
	part := removedPart{name, uid}
	if !slices.Contains(was, part) {
		was = append(was, part)
	}
	r.removed[id] = removed{was[max(0, len(was)-maxParts):], time.Now()}
}

// Search implements [sandbox.Searcher]. It knows what to look for if this process has
// removed the sandbox.
func (r *Runtime) Search(_ context.Context, id string) []sandbox.Trace {
	r.remember(id, r.name(id)) // if it is still there
	r.mu.Lock()
	known := slices.Clone(r.removed[id].parts)
	_, running := r.all[id]
	r.mu.Unlock()
	if !idPattern.MatchString(id) || len(known) == 0 {
		return []sandbox.Trace{{What: "processes", Detail: "this server has not removed the sandbox, so it cannot tell what was its own"}}
	}
	names := []string{id}
	for _, k := range known {
		if !slices.Contains(names, k.name) {
			names = append(names, k.name)
		}
	}
	trace := func(what, looked string, found []string, err error) sandbox.Trace {
		t := sandbox.Trace{What: what, Gone: len(found) == 0 && err == nil, Detail: "looked for " + looked}
		if len(found) > 0 {
			t.Detail += "; found " + strings.Join(found[:min(len(found), 5)], ", ")
		}
		if err != nil {
			t.Detail += "; " + err.Error()
		}
		return t
	}
	var record []string
	if running {
		record = []string{id}
	}
	uids, given, uerr := r.searchIDs(known)
	processes, perr := r.searchProcesses(names, uids)
	groups, gerr := exists(eachTree(r.cgroups.trees(), names))
	var dirs []string
	for _, n := range names {
		dirs = append(dirs, r.dir(n))
	}
	left, derr := exists(dirs)
	info, merr := os.ReadFile("/proc/self/mountinfo")
	mounts := searchMounts(string(info), names)
	return []sandbox.Trace{
		trace("processes", fmt.Sprintf("processes of user %v, in cgroups %q, or with these names in their arguments", uids, names), processes, perr),
		trace("cgroup", fmt.Sprintf("cgroups %q", names), groups, gerr),
		trace("user ID", fmt.Sprintf("user IDs of %q", names), given, uerr),
		trace("files", fmt.Sprintf("%q in the state directory", names), left, derr),
		trace("mounts", fmt.Sprintf("mounts of %q", names), mounts, merr),
		trace("runtime", "the runtime's record", record, nil),
	}
}

// eachTree returns the directories of names below trees.
func eachTree(trees, names []string) (out []string) {
	for _, t := range trees {
		for _, n := range names {
			out = append(out, filepath.Join(t, n))
		}
	}
	return out
}

// exists returns those of paths that exist.
func exists(paths []string) (found []string, err error) {
	for _, p := range paths {
		if _, serr := os.Lstat(p); serr == nil {
			found = append(found, p)
		} else if !errors.Is(serr, fs.ErrNotExist) {
			err = errors.Join(err, serr)
		}
	}
	return found, err
}

// searchIDs returns the user IDs that nobody else has got since, and those that are still
// given to the sandbox.
func (r *Runtime) searchIDs(known []removedPart) (uids []uint32, given []string, err error) {
	for _, k := range known {
		if k.uid == 0 {
			continue
		}
		at, lerr := os.Readlink(r.ids.link(k.uid))
		switch {
		case errors.Is(lerr, fs.ErrNotExist):
			uids = append(uids, k.uid)
		case lerr != nil:
			err = errors.Join(err, lerr)
		case at == filepath.Join(r.conf.StateDir, k.name):
			uids, given = append(uids, k.uid), append(given, strconv.FormatUint(uint64(k.uid), 10))
		}
	}
	return uids, given, err
}

// searchProcesses returns the processes on this machine that have one of the user IDs, are
// in a cgroup of one of the names, or have a name in their arguments.
func (r *Runtime) searchProcesses(names []string, uids []uint32) (found []string, err error) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	self := strconv.Itoa(os.Getpid())
	for _, p := range procs {
		if _, nerr := strconv.Atoi(p.Name()); nerr != nil || p.Name() == self {
			continue
		}
		read := func(file string) string {
			b, _ := os.ReadFile(filepath.Join("/proc", p.Name(), file)) // it may end meanwhile
			return string(b)
		}
		status := read("status")
		if strings.Contains(status, "\nState:\tZ") || strings.Contains(status, "\nState:\tX") {
			continue // it has ended; who inherited it is in no hurry
		}
		cmd, group := read("cmdline"), read("cgroup")
		ours := slices.ContainsFunc(names, func(n string) bool {
			return strings.Contains(cmd, n) || strings.Contains(group, "/"+n+"\n") || strings.Contains(group, "/"+n+"/")
		})
		ours = ours || slices.ContainsFunc(uids, func(u uint32) bool { return strings.Contains(status, fmt.Sprintf("\nUid:\t%d\t", u)) })
		if ours {
			found = append(found, p.Name())
		}
	}
	return found, nil
}

// searchMounts returns the mounts in /proc/PID/mountinfo in which one of the names occurs.
func searchMounts(info string, names []string) (found []string) {
	for l := range strings.Lines(info) {
		if f := strings.Fields(l); len(f) > 4 && slices.ContainsFunc(names, func(n string) bool { return strings.Contains(l, n) }) {
			found = append(found, f[4])
		}
	}
	return found
}
