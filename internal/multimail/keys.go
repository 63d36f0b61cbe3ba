package multimail

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/seal"
)

func (s *Server) keyRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/api-keys", serve: s.listKeys},
		{method: "POST", path: "/v1/api-keys", body: maxBody, serve: s.createKey},
		{method: "PATCH", path: "/v1/api-keys/{id}", serve: s.updateKey},
		{method: "DELETE", path: "/v1/api-keys/{id}", serve: s.revokeKey},
	}
}

// keyTime is how long a new key lives. A grant always ends, so that a person looks at
// it again.
const keyTime = 365 * 24 * time.Hour

// scopesOf returns MultiMail's scopes of one of ours.
func scopesOf(scope seal.Scope) []string {
	out := []string{}
	for _, x := range []struct {
		scope seal.Scope
		name  string
	}{{seal.Read, "read"}, {seal.Send, "send"}, {seal.Manage, "admin"}} {
		if scope.Includes(x.scope) {
			out = append(out, x.name)
		}
	}
	return out
}

// A keyInfo is a key without its secret.
type keyInfo struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	Prefix    string     `json:"prefix"`
	Scopes    []string   `json:"scopes"`
	Mailboxes []string   `json:"mailbox_ids"`
	CreatedAt time.Time  `json:"created_at"`
	LastUsed  *time.Time `json:"last_used_at"`
	Expires   *time.Time `json:"expires_at"`
	IsActive  bool       `json:"is_active"`
}

// prefixOf returns what the keys of a kind begin with.
func prefixOf(kind auth.Kind) string {
	switch kind {
	case auth.Agent:
		return "pib_…"
	case auth.Recovery:
		return "prk_…"
	default: // no other kind has a part in a mailbox
		return KeyPrefix + "…"
	}
}

// managed returns the mailboxes whose keys the caller's credential manages.
func (s *Server) managed(r *http.Request, c caller) ([]directory.Inbox, error) {
	list, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
	if err != nil {
		return nil, err
	}
	var out []directory.Inbox
	for _, b := range list {
		_, scope, err := s.post.Keys.Reach(r.Context(), c.Principal, b.ID)
		if err != nil {
			return nil, err
		}
		if scope.Includes(seal.Manage) {
			out = append(out, b)
		}
	}
	if len(out) == 0 && len(list) > 0 {
		return nil, fmt.Errorf("this key does not have the scope admin in any mailbox: %w", auth.ErrForbidden)
	}
	return out, nil
}

// parts returns the keys of the mailboxes that the caller's credential manages. For a
// manager these are the grants of its project, accounts among them: a project can have
// thousands of mailboxes, each with keys of its own.
func (s *Server) parts(r *http.Request, c caller) (out []keyring.Part, err error) {
	if directory.MayManage(c.Principal) == nil {
		return s.post.Keys.Grants(r.Context(), c.Principal)
	}
	list, err := s.managed(r, c)
	if err != nil {
		return nil, err
	}
	for _, b := range list {
		ps, err := s.post.Keys.Parts(r.Context(), c.Principal, b.ID)
		if err != nil {
			return nil, err
		}
		out = append(out, ps...)
	}
	return out, nil
}

func (s *Server) listKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	ps, err := s.parts(r, c)
	if err != nil {
		return err
	}
	out, at := []*keyInfo{}, map[string]*keyInfo{}
	for _, p := range ps {
		k, ok := at[p.Credential]
		if !ok {
			k = &keyInfo{
				ID: p.Credential, Name: p.Name, Prefix: prefixOf(p.Kind), Scopes: scopesOf(p.Scope), CreatedAt: p.Created, LastUsed: orNull(p.Used), Expires: orNull(p.Expires), IsActive: true,
			}
			at[p.Credential] = k
			out = append(out, k)
		}
		k.Mailboxes = append(k.Mailboxes, p.Inbox)
	}
	answer(w, http.StatusOK, map[string]any{"api_keys": out})
	return nil
}

// createKey makes a grant over the mailboxes that the caller manages. MultiMail asks
// the operator first; here nobody gets more than the caller has, and the grant ends.
func (s *Server) createKey(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		Name         string   `json:"name"`
		Scopes       []string `json:"scopes"`
		ApprovalCode string   `json:"approval_code"` // nothing here waits for one
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	scope := seal.Scope("")
	for i, v := range in.Scopes {
		switch v {
		case "read":
			scope = seal.Join(scope + " " + seal.Read)
		case "send":
			scope = seal.Join(scope + " " + seal.Send)
		case "oversight":
			return fmt.Errorf("scopes[%d]: no key decides, only a signed-in person: %w", i, auth.ErrForbidden)
		case "admin":
			return fmt.Errorf("scopes[%d]: an owner makes a key that manages mailboxes: postern account create --multimail: %w", i, auth.ErrForbidden)
		default:
			return fmt.Errorf("%w: scopes[%d]: must be read or send", errRequest, i)
		}
	}
	if scope == "" {
		scope = seal.Read
	}
	if c.key == "" || c.Kind != auth.Agent && c.Kind != auth.Grant {
		return fmt.Errorf("a %s opens no mailbox, so it cannot give access to one: %w", c.Kind, auth.ErrForbidden)
	}
	list, err := s.managed(r, c)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return fmt.Errorf("%w: create a mailbox first: a key opens mailboxes", errConflict)
	}
	want := keyring.NewKey{Name: in.Name, Scope: scope, Expires: time.Now().Add(keyTime).UTC().Truncate(time.Second)}
	id, key, err := s.grant(r.Context(), c, list, want)
	if err != nil {
		return err
	}
	shown := KeyFor(key.Reveal())
	answer(w, http.StatusCreated, map[string]any{
		"id": id, "api_key": shown, "prefix": shown[:len(KeyPrefix)+3], "name": in.Name, "scopes": scopesOf(scope), "expires_at": want.Expires,
	})
	return nil
}

// grant makes one grant over all mailboxes of a list, or none.
func (s *Server) grant(ctx context.Context, c caller, list []directory.Inbox, want keyring.NewKey) (id string, key auth.Secret, err error) {
	for i, b := range list {
		k, err := s.post.Keys.Open(ctx, c.Principal, c.key, b.ID)
		if err == nil && i == 0 {
			var p keyring.Part
			p, key, err = s.post.Keys.Grant(ctx, c.Principal, k, want)
			id = p.Credential
		} else if err == nil {
			_, err = s.post.Keys.Extend(ctx, c.Principal, k, id, want)
		}
		if err != nil {
			for _, done := range list[:i] {
				err = errors.Join(err, s.post.Keys.Revoke(ctx, c.Principal, done.ID, id, false))
			}
			return "", "", err
		}
	}
	return id, key, nil
}

func (s *Server) updateKey(http.ResponseWriter, *http.Request, caller) error {
	return fmt.Errorf("a key cannot be changed: make another and revoke this one: %w", errAbsent)
}

func (s *Server) revokeKey(w http.ResponseWriter, r *http.Request, c caller) error {
	key, err := id(r, "id")
	if err != nil {
		return err
	}
	if directory.MayManage(c.Principal) == nil {
		if err := s.post.Keys.RevokeGrant(r.Context(), c.Principal, key); err != nil {
			return err
		}
		answer(w, http.StatusOK, map[string]any{"status": "revoked", "id": key})
		return nil
	}
	ps, err := s.parts(r, c)
	if err != nil {
		return err
	}
	ps = slices.DeleteFunc(ps, func(p keyring.Part) bool { return p.Credential != key })
	if len(ps) == 0 {
		return fmt.Errorf("%s: %w", key, keyring.ErrNoKey)
	}
	for _, p := range ps {
		if err := s.post.Keys.Revoke(r.Context(), c.Principal, p.Inbox, key, false); err != nil {
			return err
		}
	}
	answer(w, http.StatusOK, map[string]any{"status": "revoked", "id": key})
	return nil
}
