package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// A Trace is one kind of thing that a sandbox leaves on the machine if it is not removed
// completely.
type Trace struct {
	What   string // such as "processes"
	Gone   bool   // it was looked for and not found
	Detail string // what was looked for, and what was found
}

// goneTimeout bounds a call to the guest of a sandbox that should not exist.
const goneTimeout = 2 * time.Second

// Gone looks for everything that the fleet, the runtime and the network hold for a
// sandbox, and reports each kind of trace. s is the sandbox as [Fleet.Get] or Create
// returned it while it existed. A search that fails reports its trace as not gone.
func (f *Fleet) Gone(ctx context.Context, s Info) []Trace {
	var out []Trace
	if r, ok := f.runtime.(Searcher); ok {
		out = r.Search(ctx, s.ID)
	} else {
		out = append(out, Trace{What: "processes", Detail: "this runtime cannot look for what a sandbox left"})
	}
	look := func(what, looked string, find func() (found string, err error)) {
		t := Trace{What: what, Detail: "looked for " + looked}
		found, err := find()
		switch {
		case err != nil:
			t.Detail += fmt.Sprintf("; %.512v", err)
		case found != "":
			t.Detail += "; found " + found
		default:
			t.Gone = true
		}
		out = append(out, t)
	}
	look("list of the runtime", "the sandbox in the runtime's list", func() (string, error) {
		ids, err := f.runtime.List(ctx)
		if slices.Contains(ids, s.ID) {
			return s.ID, err
		}
		return "", err
	})
	look("link", "its network link and stack", func() (string, error) {
		h, err := f.network.Handle(s.ID)
		if err == nil {
			h.Close()
			return "a link", nil
		}
		return "", ignore(err, ErrNotFound)
	})
	look("guest", "an answer of its guest", func() (string, error) {
		ctx, cancel := context.WithTimeout(ctx, goneTimeout)
		defer cancel()
		_, err := f.askGuest(ctx, s.ID, f.ChannelKey(s.ID), http.MethodGet, "/envs", nil, http.StatusOK)
		if err == nil {
			return "an answer", nil
		}
		// ErrNotFound means that it is not attached. Any other error leaves it open
		// whether a guest is there.
		return "", ignore(err, ErrNotFound)
	})
	look("ports and tokens", "access by its tokens or public URLs", func() (string, error) {
		if _, ok := f.Traffic(s.ID); ok {
			return "access", nil
		}
		c, err := f.Dial(ctx, s.ID, GuestPort)
		if err == nil {
			c.Close()
			return "a connection", nil
		}
		return "", ignore(err, ErrNotFound)
	})
	look("keeper", "its link and gate in the keeper", func() (string, error) { return f.searchKeeper(ctx, s.ID) })
	look("snapshots", "files of a pause or a snapshot", func() (string, error) { return f.searchSnapshots(ctx, s) })
	look("row", "a row in the database that has not ended", func() (string, error) {
		row, err := f.rows.row(ctx, s.ID)
		if err != nil {
			return "", ignore(err, ErrNotFound)
		}
		if row.Ended.IsZero() || row.saved != "" {
			return "one that is " + string(row.State), nil
		}
		return "", nil
	})
	return out
}

// ignore returns err unless it wraps expected.
func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

// searchKeeper returns the name of something that the keeper holds for a sandbox, or "".
func (f *Fleet) searchKeeper(ctx context.Context, id string) (found string, err error) {
	if f.conf.Keeper == nil {
		return "", nil
	}
	all, err := f.conf.Keeper.All(ctx)
	for name, file := range all {
		file.Close()
		if name == id || name == gateName(id) {
			found = name
		}
	}
	return found, err
}

// searchSnapshots returns the name of one of a sandbox's snapshots, or "" if there is none.
func (f *Fleet) searchSnapshots(ctx context.Context, s Info) (string, error) {
	saved := []string{s.saved}
	if row, err := f.rows.row(ctx, s.ID); err == nil {
		saved = append(saved, row.saved)
	} else if !errors.Is(err, ErrNotFound) {
		return "", err
	}
	for _, name := range saved {
		if name == "" {
			continue
		}
		if _, err := os.Lstat(f.dir(name)); !errors.Is(err, os.ErrNotExist) {
			return name, ignore(err, os.ErrNotExist)
		}
	}
	named, err := f.rows.allSnapshots(ctx)
	if err != nil {
		return "", err
	}
	for _, n := range named {
		if n.Sandbox == s.ID {
			return n.ID, nil
		}
	}
	all, err := filepath.Glob(f.dir("*" + s.ID + "*"))
	if err != nil || len(all) == 0 {
		return "", err
	}
	return filepath.Base(all[0]), nil
}
