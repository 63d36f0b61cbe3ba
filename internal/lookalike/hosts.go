package lookalike

import (
	"context"
	"fmt"
	"slices"
	"time"

	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// hostsOf returns the hosts that an action of kind r.Kind opens a way to, in ASCII and
// without duplicates. It returns none for mail: package mailbox examines its recipients.
func hostsOf(r *policy.Request) (out []string) {
	list := r.To
	switch r.Kind {
	case policy.KindRequest, policy.KindSecret, policy.KindTool:
		if r.HTTP != nil && r.HTTP.Host != "" {
			list = []string{r.HTTP.Host}
		}
	case policy.KindConnect, policy.KindPermit, policy.KindWebhook, policy.KindAllow, policy.KindRun:
	case policy.KindSend, policy.KindReceive, policy.KindArchive, policy.KindTrash, policy.KindCopy, policy.KindMode, policy.KindChange, policy.KindExport, policy.KindExec:
		return nil
	}
	for _, h := range list {
		if h = ascii(h); h != "" && !slices.Contains(out, h) {
			out = append(out, h)
		}
	}
	return out
}

// what returns the words with which a finding says what goes to the host, such as "mail to".
func what(k policy.Kind) string {
	switch k {
	case policy.KindConnect:
		return "a connection to"
	case policy.KindAllow:
		return "mail to"
	case policy.KindPermit:
		return "a permit for"
	case policy.KindWebhook:
		return "a webhook at"
	case policy.KindRun:
		return "a run that reaches"
	default:
		return "a request to"
	}
}

// registries returns the hosts of package registries, which every project knows. It leaves
// out hosts that serve other things as well.
func registries() (out []string) {
	for _, r := range policy.Registries() {
		for _, h := range r.Hosts {
			if h.Prefix == "" {
				out = append(out, h.Name)
			}
		}
	}
	return out
}

// Examine adds to q the findings about its hosts, as part of tx. The gate calls it for each
// action before it asks the policy.
func (r *Register) Examine(ctx context.Context, tx *store.Tx, project string, q *policy.Request) error {
	hosts := hostsOf(q)
	if len(hosts) == 0 {
		return nil
	}
	own, err := r.Own(ctx, tx, project)
	if err != nil {
		return err
	}
	names := make([]Name, len(hosts))
	for i, h := range hosts {
		names[i] = Name{Host: h, Subject: h}
	}
	found, err := r.Find(ctx, tx, Query{Project: project, Names: names, Own: append(own, registries()...), What: what(q.Kind)})
	if err != nil {
		return err
	}
	q.Findings = append(found, q.Findings...)
	return nil
}

// Learn records the hosts of an action that a person approved and that was carried out.
// The gate calls it for each move of an action.
func (r *Register) Learn(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	if _, person := a.Person(); a.State != oversight.Done || !person {
		return nil
	}
	return r.Note(ctx, tx, a.Project, hostsOf(&a.Request), true)
}

const (
	fillActions = 5000 // newest approved actions of a project that are read
	fillStep    = 200  // in one transaction
)

// Fill records, once for each project, what people approved before the register existed, so
// that the register is not empty after an upgrade: the hosts and recipients of approved
// actions, and the domains of the allow lists, which listed returns. It reads no payload. It
// skips rows that this server did not write: otherwise somebody who can write the database
// could make a lookalike known.
func (r *Register) Fill(ctx context.Context, db *store.DB, listed func(ctx context.Context, tx *store.Tx, project string) ([]string, error)) error {
	var projects []string
	err := db.View(ctx, func(tx *store.Tx) (err error) {
		projects, err = tx.Strings(ctx, `select id from project where id not in (select project_id from domain_filled) order by id`)
		return err
	})
	if err != nil {
		return fmt.Errorf("list projects: %w", err)
	}
	for _, p := range projects {
		if err := r.fill(ctx, db, p, listed); err != nil {
			return fmt.Errorf("note known domains of project %s: %w", p, err)
		}
	}
	return nil
}

func (r *Register) fill(ctx context.Context, db *store.DB, project string, listed func(context.Context, *store.Tx, string) ([]string, error)) error {
	var hosts []string
	last := oversight.Action{Created: time.Now()}
	for range fillActions / fillStep {
		var page []oversight.Action
		err := db.View(ctx, func(tx *store.Tx) (err error) {
			page, err = oversight.ApprovedBefore(ctx, tx, project, &last, fillStep)
			return err
		})
		if err != nil {
			return err
		}
		for i := range page {
			last = page[i]
			list := hostsOf(&page[i].Request)
			if page[i].Kind == policy.KindSend {
				list = page[i].Request.To
			}
			hosts = append(hosts, list...)
		}
		if len(page) < fillStep {
			break
		}
	}
	var entries []string
	err := db.View(ctx, func(tx *store.Tx) (err error) {
		entries, err = listed(ctx, tx, project)
		return err
	})
	if err != nil {
		return err
	}
	var names []string
	for _, h := range append(hosts, entries...) {
		if h = ascii(h); h != "" {
			names = append(names, h)
		}
	}
	slices.Sort(names)
	for chunk := range slices.Chunk(slices.Compact(names), MaxNames) {
		err := db.UpdateIn(ctx, store.Project(project), func(tx *store.Tx) error { return r.Note(ctx, tx, project, chunk, true) })
		if err != nil {
			return err
		}
	}
	return db.UpdateIn(ctx, store.Project(project), func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into domain_filled (project_id, at) values ($1, $2) on conflict (project_id) do nothing`, project, store.Time(time.Now()))
		return err
	})
}
