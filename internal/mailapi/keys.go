package mailapi

import (
	"fmt"
	"net/http"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/seal"
)

// A keyServer serves the keys of an inbox.
type keyServer struct {
	access

	post *mailbox.PostOffice
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

// What is said where keys are shown, since that is when it can still be acted on.
const (
	lossNotice     = "Keep the key: it is shown this once and stored nowhere. Whoever loses every key of an inbox loses its mail; no operator can open it. A recovery key (POST …/recovery-key) kept offline by a person is the way back."
	recoveryNotice = "Keep the recovery key away from any machine, on paper or in a safe: it is shown this once and stored nowhere. With it, and after every other key was lost or stolen, POST …/recover makes a new key. Whoever loses it and every key of the inbox loses its mail; no operator can open it."
)

func partOf(p keyring.Part) api.Credential {
	kind := string(p.Kind)
	if p.Kind == auth.Agent {
		kind = "key"
	}
	return api.Credential{
		ID: p.Credential, Inbox: p.Inbox, Kind: kind, Name: p.Name, Scope: api.Scope(p.Scope), CreatedAt: p.Created, CreatedBy: p.CreatedBy,
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

// keyRequest returns the key that n asks for.
func keyRequest(n api.NewKey) keyring.NewKey {
	out := keyring.NewKey{Name: n.Name, Scope: seal.Scope(n.Scope)}
	if n.ExpiresAt != nil {
		out.Expires = *n.ExpiresAt
	}
	return out
}

func (s keyServer) addKey(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	var in api.NewKey
	if err := decode(r, &in); err != nil {
		return err
	}
	p, key, err := s.post.Keys.Add(r.Context(), c.Principal, k, keyRequest(in))
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
	k, id, err := s.item(r, c)
	if err != nil {
		return err
	}
	p, key, err := s.post.Keys.Rotate(r.Context(), c.Principal, k, id)
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
	if err := decode(r, &in); err != nil {
		return err
	}
	_, p, key, err := s.post.Keys.Recover(r.Context(), c.Principal, c.key, in.RevokeOthers)
	if err != nil {
		return err
	}
	answerKey(w, p, key, lossNotice)
	return nil
}
