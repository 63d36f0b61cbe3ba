package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// OwnerOf returns the text that marks the sandboxes that who has created for its
// own work ([Options.Owner]): all keys of an inbox are one agent.
func OwnerOf(who auth.Principal) string {
	if who.Kind == auth.Agent {
		return agentOwner + who.Inbox
	}
	return who.String()
}

// agentOwner begins the owner of an agent's sandboxes.
const agentOwner = "agent:"

// Owned returns a living sandbox that who may work in: of an agent one of its own, of a
// project's key or a person every one of the project. Others are not found.
func (f *Fleet) Owned(ctx context.Context, who auth.Principal, id string) (Info, error) {
	if who.Kind != auth.Agent {
		return f.Get(ctx, who, id)
	}
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return Info{}, err
	}
	if s.Project != who.Project || s.Options.Owner != OwnerOf(who) || !slices.Contains(alive, s.State) {
		return Info{}, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return s, nil
}

// Who returns the sandbox with this ID, which lives, as the caller of other parts.
func (f *Fleet) Who(ctx context.Context, id string) (auth.Principal, error) {
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return auth.Principal{}, err
	}
	if !slices.Contains(alive, s.State) {
		return auth.Principal{}, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return s.Principal(), nil
}

// ListOwned returns the living sandboxes that who has created for its own work, newest
// first.
func (f *Fleet) ListOwned(ctx context.Context, who auth.Principal) ([]Info, error) {
	all, err := f.rows.list(ctx, `where project_id = $1 and state in (`+quoted(alive)+`) order by started_at desc, id`, who.Project)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(s Info) bool { return s.Options.Owner != OwnerOf(who) }), nil
}

// Use readies a sandbox of [Fleet.Owned] for work that takes at most d: it resumes one
// that the server froze, and one with an owner then ends no sooner than after d and
// its idle time.
func (f *Fleet) Use(ctx context.Context, who auth.Principal, id string, d time.Duration) error {
	s, err := f.Owned(ctx, who, id)
	if err != nil {
		return err
	}
	if err := f.Wake(ctx, id); err != nil {
		return err
	}
	// Not at each of many quick calls, since each extension is on the record.
	if s.Options.Owner == "" || time.Until(s.Ends) > d+s.Options.Timeout*9/10 {
		return nil
	}
	ctx, l, err := f.claim(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	if s, err = f.Owned(ctx, who, id); err != nil {
		return err
	}
	_, err = f.setTimeout(ctx, who, s, d+s.Options.Timeout, true)
	return err
}

// EndOwned is [Fleet.Kill] for a sandbox of [Fleet.Owned].
func (f *Fleet) EndOwned(ctx context.Context, who auth.Principal, id string) error {
	if who.Kind != auth.Agent {
		return f.Kill(ctx, who, id)
	}
	if _, err := f.Owned(ctx, who, id); err != nil {
		return err
	}
	return f.kill(ctx, who, id, "killed", func(Info) bool { return true })
}

// mayCreate returns an error unless who may ask for r. An agent creates sandboxes for
// its own work only, without an inbox, a volume or network rules that name secrets.
func (f *Fleet) mayCreate(who auth.Principal, r Request) error {
	if who.Kind != auth.Agent {
		return nil
	}
	switch {
	case f.conf.PerAgent <= 0:
		return fmt.Errorf("agents have no sandboxes on this server (--agent-sandboxes): %w", auth.ErrForbidden)
	case r.Options.Owner != OwnerOf(who), r.Snapshot != "", r.Inbox != "", r.InboxKey != "", len(r.Options.Volumes) > 0, r.Options.AutoPause, r.Options.Traffic.Public,
		len(r.Egress.Rules) > 0, len(r.Egress.Secrets) > 0, len(r.Egress.Tokens) > 0, r.Egress.Proxy != nil:
		return fmt.Errorf("%s may create plain sandboxes for its own work only: %w", who, auth.ErrForbidden)
	}
	return nil
}

// roomForAgent returns an error that wraps [ErrFull] unless one more sandbox with the
// owner of s may live. The count is exact if tx has the turn [store.All].
func (g *registry) roomForAgent(ctx context.Context, tx *store.Tx, who auth.Principal, s Info) error {
	if who.Kind != auth.Agent {
		return nil
	}
	list, err := store.List(ctx, tx, func(scan func(...any) error) (o Options, err error) {
		var text string
		if err = scan(&text); err == nil {
			err = json.Unmarshal([]byte(text), &o)
		}
		return o, err
	}, `select options from sandbox where server_id = $1 and options like '%"owner":"`+agentOwner+`%' and state in (`+quoted(slices.Concat(onMachine, []State{Paused}))+`)`, g.conf.Server)
	if err != nil {
		return err
	}
	own := 0
	for _, o := range list {
		if o.Owner == s.Options.Owner {
			own++
		}
	}
	switch {
	case own >= g.conf.PerAgent:
		return fmt.Errorf("%w: you have %d sandboxes, and an agent may have %d: end one, or go on in it", ErrFull, own, g.conf.PerAgent)
	case len(list) >= max(g.conf.MaxSandboxes/2, 1):
		// The attack: many inboxes' keys take the places of the project's own programs.
		return fmt.Errorf("%w: agents have %d sandboxes, half of what this server may run", ErrFull, len(list))
	}
	return nil
}
