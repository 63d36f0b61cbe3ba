package oauth

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/seal"
	"postern/internal/store"
)

// An App is a program that a person has connected to an inbox.
type App struct {
	ID         string // "app_…"
	Name       string // as it calls itself: hostile text
	ReturnsTo  string // where its answers go, in words
	Inbox      string
	Address    string // of the inbox
	Credential string // the key of the inbox that it uses
	Scope      seal.Scope
	Created    time.Time
	CreatedBy  string    // a principal
	Used       time.Time // to ten minutes; zero means never
}

// mayManage returns an error unless who sees and ends connections of the project.
func mayManage(who auth.Principal) error {
	if who.Kind == auth.Person {
		return nil
	}
	return directory.MayManage(who)
}

// Apps returns the connections of who's project, the oldest first.
func (s *Server) Apps(ctx context.Context, who auth.Principal) (out []App, err error) {
	if err := mayManage(who); err != nil {
		return nil, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (a App, err error) {
			var created, used int64
			err = row(&a.ID, &a.Name, &a.ReturnsTo, &a.Inbox, &a.Address, &a.Credential, &a.Scope, &created, &a.CreatedBy, &used)
			a.Created, a.Used = store.FromTime(created), store.FromTime(used)
			return a, err
		}, `select g.id, g.name, g.returns_to, g.inbox_id, b.address, g.credential_id, g.scope, g.created_at, g.created_by, c.used_at
			from oauth_grant g join credential c on c.id = g.credential_id join inbox b on b.id = g.inbox_id
			where g.project_id = $1 and c.revoked_at = 0 order by g.created_at, g.id`, who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list apps: %w", err)
	}
	return out, nil
}

// Revoke ends a connection of who's project. Its tokens are invalid at once, and its
// inbox gets a new key pair if the program could read it.
func (s *Server) Revoke(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	if err := mayManage(who); err != nil {
		return err
	}
	return s.db.Update(ctx, func(tx *store.Tx) error {
		c, err := find(ctx, tx, printable(id))
		if errors.Is(err, store.ErrNotFound) || err == nil && c.project != who.Project {
			return ErrNoApp
		}
		if err != nil {
			return err
		}
		return s.end(ctx, tx, who, c, "revocation")
	})
}

// end removes a connection with its key, its code and its tokens.
func (s *Server) end(ctx context.Context, tx *store.Tx, who auth.Principal, c connection, why string) error {
	for _, table := range []string{"oauth_token", "oauth_code"} {
		if _, err := tx.ExecContext(ctx, `delete from `+table+` where grant_id = $1`, c.id); err != nil {
			return fmt.Errorf("end connection: %w", err)
		}
	}
	gone, err := tx.Changed(ctx, `delete from oauth_grant where id = $1`, c.id)
	if err != nil || !gone {
		return err
	}
	if err := s.post.Keys.Drop(ctx, tx, who, c.inbox, c.credential, why); err != nil {
		return err
	}
	return audit.Append(ctx, tx, who, audit.AppRevoke, c.id, audit.Fields{"inbox": c.inbox, "credential": c.credential, "why": why})
}

// Forget ends the connection that a token belongs to, as its program asks (RFC 7009). An
// unknown token is no error: there is nothing to end.
func (s *Server) Forget(ctx context.Context, token auth.Secret) error {
	return s.db.Update(ctx, func(tx *store.Tx) error {
		var id string
		err := tx.One(ctx, `select grant_id from oauth_token where hash = $1 and expires_at > $2`, []any{token.Digest(), store.Time(time.Now())}, &id)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		c, err := find(ctx, tx, id)
		if err != nil {
			return err
		}
		return s.end(ctx, tx, system(c.project), c, "the app disconnected itself")
	})
}

// Sweep removes expired codes and tokens, clients that nobody uses, and connections
// whose code was never exchanged, whose last token has expired, or whose key is gone.
func (s *Server) Sweep(ctx context.Context) error {
	now := store.Time(time.Now())
	var ended []connection
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		for _, table := range []string{"oauth_token", "oauth_code"} {
			if _, err := tx.ExecContext(ctx, `delete from `+table+` where expires_at <= $1`, now); err != nil {
				return err
			}
		}
		if err := dropClients(ctx, tx); err != nil {
			return err
		}
		list, err := store.List(ctx, tx, func(row func(...any) error) (c connection, err error) {
			return c, row(&c.id, &c.project, &c.client, &c.credential, &c.inbox)
		}, `select g.id, g.project_id, g.client_id, g.credential_id, g.inbox_id from oauth_grant g
			where exists (select 1 from credential c where c.id = g.credential_id and c.revoked_at > 0)
			or not exists (select 1 from oauth_token t where t.grant_id = g.id) and not exists (select 1 from oauth_code o where o.grant_id = g.id) limit 1000`)
		ended = list
		return err
	})
	if err != nil {
		return fmt.Errorf("remove expired tokens: %w", err)
	}
	for _, c := range ended {
		if err := s.db.Update(ctx, func(tx *store.Tx) error { return s.end(ctx, tx, system(c.project), c, "expired") }); err != nil {
			return fmt.Errorf("end connection %s: %w", c.id, err)
		}
	}
	return nil
}
