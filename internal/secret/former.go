package secret

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/store"
)

const (
	// formerFor is how long answers are masked for a value after its secret was rotated,
	// moved to other hosts or deleted. The attack: a sandbox has the server store the
	// value, and reads it after the rotation.
	formerFor = 24 * time.Hour
	// maxFormer bounds the former values of a secret: each answer is searched for all.
	maxFormer = 16
	purgeStep = time.Hour
	// guardedFor is how long a project's list is kept. This process notices its own
	// changes at once; another server of the same database after this time.
	guardedFor = time.Second
)

// SealedFormer is the table of former values as rows are authenticated. The attack:
// somebody who can write the database moves a value to other hosts, where it is not
// masked.
func SealedFormer() store.Sealed {
	return store.Sealed{Table: "secret_former", Key: []string{"secret_id", "revision"}}
}

// Run removes former values when their time is over, until ctx is done.
func (s *Store) Run(ctx context.Context) error {
	t := time.NewTicker(purgeStep)
	defer t.Stop()
	for {
		if err := s.db.Update(ctx, func(tx *store.Tx) error { return purge(ctx, tx) }); err != nil && ctx.Err() == nil {
			s.log.ErrorContext(ctx, "remove former values of secrets", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

func purge(ctx context.Context, tx *store.Tx) error {
	_, err := tx.ExecContext(ctx, `delete from secret_former where until <= $1`, store.Time(time.Now()))
	return err
}

// keepFormer keeps was, which is changed or deleted in tx. An AWS pair is not kept: no
// request has its secret access key.
func keepFormer(ctx context.Context, tx *store.Tx, was Secret) error {
	if err := purge(ctx, tx); err != nil || was.Kind == AWS || was.revision == forged {
		return err
	}
	_, err := tx.ExecContext(ctx, `insert into secret_former (secret_id, revision, project_id, name, value, version, hosts, until) values ($1, $2, $3, $4, $5, $6, $7, $8)`,
		was.ID, was.revision, was.Project, was.Name, was.sealed, was.Version, strings.Join(was.Hosts, ","), store.Time(time.Now().Add(formerFor)))
	if err != nil {
		return err
	}
	if err := tx.Seal(ctx, SealedFormer(), `secret_id = $1 and revision = $2`, was.ID, was.revision); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `delete from secret_former where secret_id = $1 and revision not in (select revision from secret_former where secret_id = $1 order by revision desc limit $2)`, was.ID, maxFormer)
	return err
}

// guarded is the cached list of a project, see [Store.Guarded].
type guarded struct {
	list  []inject.Guarded
	until time.Time
}

// Guarded returns whose values answers to who's sandbox are searched for besides those
// of its own secrets: the secrets of the whole project, by their hosts, and what they
// were in the last 24 hours. The attack: one sandbox has the server store a value, and
// another one of the project reads it. A row that was changed in the database is left
// out.
func (s *Store) Guarded(ctx context.Context, who auth.Principal) ([]inject.Guarded, error) {
	s.mu.Lock()
	g, changes := s.guards[who.Project], s.changes
	s.mu.Unlock()
	if time.Now().Before(g.until) {
		return g.list, nil
	}
	g = guarded{until: time.Now().Add(guardedFor)}
	err := s.db.View(ctx, func(tx *store.Tx) error {
		current, err := s.rows(ctx, tx, `project_id = $1 and kind = $2 and hosts <> ''`, who.Project, Plain)
		if err != nil {
			return err
		}
		former, err := s.former(ctx, tx, `project_id = $1 and until > $2`, who.Project, store.Time(time.Now()))
		for _, c := range current {
			if c.revision != forged {
				g.list = append(g.list, inject.Guarded{ID: c.ID, Name: c.Name, Hosts: c.Hosts})
			}
		}
		for _, c := range former {
			g.list = append(g.list, inject.Guarded{ID: c.ID, Name: c.Name, Hosts: c.Hosts, Former: c.revision})
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read secrets of project %s: %w", who.Project, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changes == changes {
		s.guards[who.Project] = g
	}
	return g.list, nil
}

// former returns the former secrets that match and are genuine.
func (s *Store) former(ctx context.Context, tx *store.Tx, where string, args ...any) (out []Secret, err error) {
	rows, err := tx.Rows(ctx, SealedFormer(), false, where, args...)
	for _, r := range rows {
		if c := parse(r.Values); r.Holds {
			c.ID, _ = r.Values["secret_id"].(string)
			out = append(out, c)
		}
	}
	return out, err
}

// forget drops the cached lists, after a secret was created, changed or deleted, and
// tells the caller of New.
func (s *Store) forget(ctx context.Context, project string) {
	s.mu.Lock()
	s.changes++
	clear(s.guards)
	s.mu.Unlock()
	s.conf.Changed(context.WithoutCancel(ctx), project)
}

// OpenGuarded returns a value that [Store.Guarded] listed, to mask answers with. It may
// be in no request. The caller wipes it. The error wraps [inject.ErrGone] if it is
// gone since.
func (s *Store) OpenGuarded(ctx context.Context, who auth.Principal, g inject.Guarded) (inject.Value, error) {
	if who.Kind != auth.Sandbox || who.Project == "" {
		return inject.Value{}, fmt.Errorf("open secret: only for a sandbox: %w", auth.ErrForbidden)
	}
	var rows []Secret
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		if g.Former > 0 {
			rows, err = s.former(ctx, tx, `project_id = $1 and secret_id = $2 and revision = $3 and until > $4`, who.Project, g.ID, g.Former, store.Time(time.Now()))
			return err
		}
		rows, err = s.rows(ctx, tx, `project_id = $1 and id = $2`, who.Project, g.ID)
		return err
	})
	rows = slices.DeleteFunc(rows, func(c Secret) bool { return c.revision == forged })
	if err == nil && len(rows) == 0 {
		err = inject.ErrGone
	}
	if err != nil {
		return inject.Value{}, fmt.Errorf("open secret %s: %w", g.ID, err)
	}
	text, _, _, err := s.open(rows[0])
	return inject.Value{Value: text}, err
}
