package mailapi

import (
	"fmt"
	"net/http"
	"slices"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/seal"
)

// A keyServer serves the keys of an inbox.
type keyServer struct {
	access

	post  *mailbox.PostOffice
	tools []string // the names of all tools
}

func (s keyServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/keys", 0, s.listKeys},
		{"POST", "/v1/inboxes/{inbox}/keys", maxBody, s.addKey},
		{"POST", "/v1/inboxes/{inbox}/keys/{id}/rotate", 0, s.rotateKey},
		{"DELETE", "/v1/inboxes/{inbox}/keys/{id}", 0, s.revokeKey},
		{"POST", "/v1/inboxes/{inbox}/recovery-key", 0, s.addRecovery},
		{"POST", "/v1/inboxes/{inbox}/recover", maxBody, s.recoverInbox},
	}
}

// The notices beside a new key: only then can a person still act on them.
const (
	lossNotice     = "Store the key: it is shown only once, and the server does not keep it. If every key of an inbox is lost, its mail cannot be opened, not even by the operator. A recovery key (POST …/recovery-key) that a person keeps offline prevents that."
	recoveryNotice = "Keep the recovery key offline, on paper or in a safe: it is shown only once, and the server does not keep it. When every other key is lost or stolen, POST …/recover makes a new key with it. If it is lost together with every key of the inbox, the mail cannot be opened, not even by the operator."
)

func partOf(p keyring.Part) api.Credential {
	kind := string(p.Kind)
	if p.Kind == auth.Agent {
		kind = "key"
	}
	return api.Credential{
		ID: p.Credential, Inbox: p.Inbox, Kind: kind, Name: p.Name, Scope: api.Scope(p.Scope), Scopes: scopesOf(p.Scope), Tools: append([]string{}, p.Tools...), CreatedAt: p.Created, CreatedBy: p.CreatedBy,
		UsedAt: moment(p.Used), ExpiresAt: moment(p.Expires), Account: p.Account,
	}
}

func partsOf(list []keyring.Part, kinds ...auth.Kind) []api.Credential {
	out := []api.Credential{}
	for _, p := range list {
		for _, k := range kinds {
			if p.Kind == k {
				out = append(out, partOf(p))
			}
		}
	}
	return out
}

func (s keyServer) listKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Keys.Parts(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.KeyList{Keys: partsOf(list, auth.Agent, auth.Recovery)})
	return nil
}

func scopesOf(s seal.Scope) []api.Scope {
	return each(s.List(), func(word string) api.Scope { return api.Scope(word) })
}

// keyRequest returns the key that n asks for. Tools are the names that exist; nil means any.
func keyRequest(n api.NewKey, tools []string) (out keyring.NewKey, err error) {
	out = keyring.NewKey{Name: n.Name, Tools: n.Tools}
	asked := n.Scopes
	if n.Scope != "" {
		if len(asked) > 0 {
			return out, fmt.Errorf("%w: scopes: give either scope or scopes", errRequest)
		}
		asked = []api.Scope{n.Scope}
	}
	if len(asked) > 0 {
		if out.Scope = seal.Join(each(asked, func(s api.Scope) seal.Scope { return seal.Scope(s) })...); out.Scope == "" {
			return out, fmt.Errorf("%w: scope: must be some of %v, separated by spaces", errRequest, seal.Scopes)
		}
	}
	for i, t := range n.Tools {
		if tools != nil && !slices.Contains(tools, t) {
			return out, fmt.Errorf("%w: tools[%d]: there is no such tool; docs/reference/mcp.md lists them", errRequest, i)
		}
	}
	if n.ExpiresAt != nil {
		out.Expires = *n.ExpiresAt
	}
	return out, nil
}

func (s keyServer) addKey(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	var in api.NewKey
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	n, err := keyRequest(in, s.tools)
	if err != nil {
		return err
	}
	p, key, err := s.post.Keys.Add(r.Context(), c.Principal, k, n)
	if err != nil {
		return err
	}
	answerKey(w, p, key, lossNotice)
	return nil
}

// answerKey shows a credential, this once.
func answerKey(w http.ResponseWriter, p keyring.Part, key auth.Secret, notice string) {
	out := partOf(p)
	out.Key, out.Notice = key.Reveal(), notice
	answer(w, http.StatusCreated, out)
}

func (s keyServer) rotateKey(w http.ResponseWriter, r *http.Request, c caller) error {
	p, key, err := s.rotated(r, c)
	if err != nil {
		return err
	}
	notice := lossNotice
	if p.Kind == auth.Recovery {
		notice = recoveryNotice
	}
	answerKey(w, p, key, notice)
	return nil
}

// rotated replaces the key that the request names.
func (s keyServer) rotated(r *http.Request, c caller) (p keyring.Part, key auth.Secret, err error) {
	b, err := s.own(r, c)
	if err != nil {
		return p, "", err
	}
	_, scope, err := s.post.Keys.Reach(r.Context(), c.Principal, b.ID)
	if err != nil {
		return p, "", err
	}
	if !scope.Opens() {
		name, err := id(r)
		if err != nil {
			return p, "", err
		}
		return s.post.Keys.RotateClosed(r.Context(), c.Principal, name)
	}
	k, name, err := s.item(r, c)
	if err != nil {
		return p, "", err
	}
	return s.post.Keys.Rotate(r.Context(), c.Principal, k, name)
}

func (s keyServer) revokeKey(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	last := r.URL.Query().Get("even_last")
	if last != "" && last != "true" && last != "false" {
		return fmt.Errorf("%w: even_last: must be true or false", errRequest)
	}
	if err := s.post.Keys.Revoke(r.Context(), c.Principal, r.PathValue("inbox"), id, last == "true"); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s keyServer) addRecovery(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	p, key, err := s.post.Keys.AddRecovery(r.Context(), c.Principal, k)
	if err != nil {
		return err
	}
	answerKey(w, p, key, recoveryNotice)
	return nil
}

// recoverInbox makes a new key for who shows the recovery key.
func (s keyServer) recoverInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.Kind != auth.Recovery {
		return fmt.Errorf("only the inbox's recovery key (prk_…) makes it a new key: %w", auth.ErrForbidden)
	}
	if name := r.PathValue("inbox"); name != c.Inbox {
		b, err := s.post.Directory.Find(r.Context(), c.Principal, name)
		if err != nil || b.ID != c.Inbox {
			return fmt.Errorf("this recovery key is of another inbox than the one named: %w", auth.ErrForbidden)
		}
	}
	var in api.Recover
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	_, p, key, err := s.post.Keys.Recover(r.Context(), c.Principal, c.key, in.RevokeOthers)
	if err != nil {
		return err
	}
	answerKey(w, p, key, lossNotice)
	return nil
}
