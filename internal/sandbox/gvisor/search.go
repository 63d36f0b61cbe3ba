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

// A removed is what Search looks for after a sandbox was removed. Each start of a sandbox
// may use another name and user ID.
type removed struct {
	parts []removedPart // at most maxParts, the newest last
	at    time.Time     // when the last part was added
}

// A removedPart is the name and user ID of one start of a sandbox.
type removedPart struct {
	name string // of its directory, cgroup and container
	uid  uint32 // 0 if it had none
}

const (
	maxRemoved = 1024 // remembered sandboxes
	maxParts   = 32   // remembered starts of one sandbox
)

// remember notes the name and user ID of a sandbox before they are freed.
func (r *Runtime) remember(id, name string) {
	uid, ok := r.ids.has(name)
	if !ok && name == id {
		if _, err := os.Lstat(r.dir(id)); err != nil {
			return // the sandbox does not exist, or was removed before
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

// Search implements [sandbox.Searcher]. It knows what to look for only if the sandbox still
// exists or this process has removed it.
func (r *Runtime) Search(_ context.Context, id string) []sandbox.Trace {
	r.remember(id, r.name(id)) // in case the sandbox still exists
	r.mu.Lock()
	known := slices.Clone(r.removed[id].parts)
	_, running := r.all[id]
	r.mu.Unlock()
	if !idPattern.MatchString(id) || len(known) == 0 {
		return []sandbox.Trace{{What: "processes", Detail: "this server did not remove the sandbox, so it does not know what belonged to it"}}
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
	named := strings.Join(names, ", ")
	owned := "processes"
	if len(uids) > 0 {
		owned = "processes of users " + joinIDs(uids) + ", processes"
	}
	return []sandbox.Trace{
		trace("processes", owned+" in cgroups "+named+", and processes with these names in their arguments", processes, perr),
		trace("cgroup", "cgroups "+named, groups, gerr),
		trace("user ID", "user IDs assigned to "+named, given, uerr),
		trace("files", named+" in the state directory", left, derr),
		trace("mounts", "mounts of "+named, mounts, merr),
		trace("runtime", "the sandbox in the runtime's table", record, nil),
	}
}

// joinIDs returns user IDs as a text for people.
func joinIDs(uids []uint32) string {
	list := make([]string, len(uids))
	for i, u := range uids {
		list[i] = strconv.FormatUint(uint64(u), 10)
	}
	return strings.Join(list, ", ")
}

// eachTree returns the path of each name in each tree.
func eachTree(trees, names []string) (out []string) {
	for _, t := range trees {
		for _, n := range names {
			out = append(out, filepath.Join(t, n))
		}
	}
	return out
}

// exists returns the paths that exist.
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

// searchIDs returns the sandbox's user IDs that no other sandbox has been given since, and,
// as given, those that are still assigned to it.
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

// searchProcesses returns the IDs of the processes on this machine that run as one of the
// users, are in a cgroup of one of the names, or have a name in their arguments.
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
			b, _ := os.ReadFile(filepath.Join("/proc", p.Name(), file)) // the process may have ended
			return string(b)
		}
		status := read("status")
		if strings.Contains(status, "\nState:\tZ") || strings.Contains(status, "\nState:\tX") {
			continue // it has ended, and only its new parent has not waited for it yet
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

// searchMounts returns the mount points of the lines of a mountinfo file, see proc(5), that
// contain one of the names.
func searchMounts(info string, names []string) (found []string) {
	for l := range strings.Lines(info) {
		if f := strings.Fields(l); len(f) > 4 && slices.ContainsFunc(names, func(n string) bool { return strings.Contains(l, n) }) {
			found = append(found, f[4])
		}
	}
	return found
}
