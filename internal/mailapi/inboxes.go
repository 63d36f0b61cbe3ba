package mailapi

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sort"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/policy"
	"postern/internal/store"
)

// An inboxServer serves inboxes themselves, without their mail.
type inboxServer struct {
	access

	db   *store.DB
	post *mailbox.PostOffice
}

func (s inboxServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes", 0, s.listInboxes},
		{"POST", "/v1/inboxes", maxBody, s.createInbox},
		{"GET", "/v1/inboxes/{inbox}", 0, s.getInbox},
		{"PATCH", "/v1/inboxes/{inbox}", maxBody, s.updateInbox},
		{"DELETE", "/v1/inboxes/{inbox}", 0, s.deleteInbox},
		{"POST", "/v1/inboxes/{inbox}/undelete", 0, s.undeleteInbox},
	}
}

// An inboxAnswer is an inbox in our words and in LobsterMail's.
type inboxAnswer struct {
	api.Inbox
	lobsterInbox
}

// An inboxesAnswer is [api.InboxList], with LobsterMail's fields and its name
// for the list.
type inboxesAnswer struct {
	Inboxes    []inboxAnswer `json:"inboxes"`
	Data       []inboxAnswer `json:"data"`
	NextCursor string        `json:"next_cursor"`
}

func inboxOf(b directory.Inbox) inboxAnswer {
	_, host, _ := strings.Cut(b.Address, "@")
	out := inboxAnswer{Inbox: api.Inbox{
		ID: b.ID, Address: b.Address, DisplayName: b.DisplayName, Mode: api.Mode(b.Mode), ModeAt: moment(b.ModeAt), ModeReason: b.ModeReason, CreatedAt: b.Created,
		ExpiresAt: moment(b.Expires), DeletedAt: moment(b.Deleted), PurgeAt: moment(b.Purge), MaxBytes: b.MaxBytes, AutoSubmitted: api.AutoSubmitted(b.AutoSubmitted),
	}, lobsterInbox: lobsterInbox{Domain: host, IsActive: b.Deleted.IsZero(), ExpiresAt: moment(b.Expires), CreatedAt: b.Created}}
	if b.DisplayName != "" {
		out.lobsterInbox.DisplayName = &b.DisplayName
	}
	return out
}

// counted adds what only accounts are told.
func (s inboxServer) counted(r *http.Request, c caller, in inboxAnswer) (inboxAnswer, error) {
	if c.Kind != auth.Grant {
		return in, nil
	}
	n, err := s.post.Count(r.Context(), in.ID)
	in.EmailCount = &n
	return in, err
}

func (s inboxServer) listInboxes(w http.ResponseWriter, r *http.Request, c caller) error {
	var list []directory.Inbox
	var err error
	switch deleted := r.URL.Query().Get("deleted"); deleted {
	case "", "false":
		list, err = s.post.Directory.Inboxes(r.Context(), c.Principal)
	case "true":
		list, err = s.post.Deleted(r.Context(), c.Principal)
	default:
		err = fmt.Errorf("%w: deleted: must be true or false", errRequest)
	}
	if err != nil {
		return err
	}
	list, next, err := pageOfInboxes(r.URL.Query(), list)
	if err != nil {
		return err
	}
	out := []inboxAnswer{}
	for _, b := range list {
		j, err := s.counted(r, c, inboxOf(b))
		if err != nil {
			return err
		}
		out = append(out, j)
	}
	answer(w, http.StatusOK, inboxesAnswer{out, out, next})
	return nil
}

// pageOfInboxes returns the part of a list that the query asks for, and the
// cursor of the next part. The list is by address, and so is the cursor.
func pageOfInboxes(q url.Values, list []directory.Inbox) (part []directory.Inbox, next string, err error) {
	n, err := limit(q, 1000, 1000)
	if err != nil {
		return nil, "", err
	}
	if q.Has("cursor") {
		after, err := base64.RawURLEncoding.DecodeString(q.Get("cursor"))
		if err != nil || !bytes.ContainsRune(after, '@') || len(after) > 320 {
			return nil, "", fmt.Errorf("%w: cursor: must be the next_cursor of the page before", errRequest)
		}
		list = list[sort.Search(len(list), func(i int) bool { return list[i].Address > string(after) }):]
	}
	if len(list) > n {
		list = list[:n]
		next = base64.RawURLEncoding.EncodeToString([]byte(list[n-1].Address))
	}
	return list, next, nil
}

func (s inboxServer) createInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		api.NewInbox

		// In LobsterMail's words:
		LocalPart    string `json:"localPart"`
		Domain       string `json:"domain"`
		DisplayName2 string `json:"displayName"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if err := s.room(r.Context(), c); err != nil {
		return err
	}
	lobster := in.Address == "" && in.LocalPart != ""
	if lobster {
		in.Address = in.LocalPart
		if in.Domain != "" {
			in.Address += "@" + in.Domain
		}
	}
	if in.DisplayName == "" {
		in.DisplayName = in.DisplayName2
	}
	n := directory.NewInbox{Address: in.Address, Next: in.Next, DisplayName: in.DisplayName, Mode: policy.Mode(in.Mode), MaxBytes: in.MaxBytes}
	if in.ExpiresAt != nil {
		n.Expires = *in.ExpiresAt
	}
	b, key, err := s.post.CreateInbox(r.Context(), c.Principal, n, c.key)
	if lobster && errors.Is(err, directory.ErrReserved) {
		// Its client then tries the next name, as it does for one that is taken.
		err = &directory.TakenError{Address: in.Address}
	}
	if err != nil {
		return err
	}
	out, err := s.counted(r, c, inboxOf(b))
	if err != nil {
		return err
	}
	out.Key, out.Notice = key.Reveal(), lossNotice
	if in.RecoveryKey {
		recovery, err := s.firstRecovery(r, key)
		if err != nil {
			return err
		}
		out.RecoveryKey, out.Notice = recovery.Reveal(), recoveryNotice
	}
	answer(w, http.StatusCreated, out)
	return nil
}

// firstRecovery makes the recovery key of an inbox that was made with key.
func (s inboxServer) firstRecovery(r *http.Request, key auth.Secret) (auth.Secret, error) {
	who, err := auth.CheckKey(r.Context(), s.db, key)
	if err != nil {
		return "", err
	}
	k, err := s.post.Keys.Open(r.Context(), who, key, "")
	if err != nil {
		return "", err
	}
	_, recovery, err := s.post.Keys.AddRecovery(r.Context(), who, k)
	return recovery, err
}

func (s inboxServer) getInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.known(r, c)
	if err != nil {
		return err
	}
	out, err := s.counted(r, c, inboxOf(b))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, out)
	return nil
}

func (s inboxServer) updateInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.InboxChange
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	switch {
	case in.Mode != nil && (in.DisplayName != nil || in.MaxBytes != nil || in.AutoSubmitted != nil || len(in.ExpiresAt) > 0):
		// Each is a change of its own, with who may make it: half of it must not be done.
		return fmt.Errorf("%w: mode: is changed by itself; send the other fields in another request", errRequest)
	case in.Mode != nil:
		b, err := s.post.SetMode(r.Context(), c.Principal, r.PathValue("inbox"), policy.Mode(*in.Mode), in.ModeReason)
		if err != nil {
			return err
		}
		answer(w, http.StatusOK, inboxOf(b))
		return nil
	case in.ModeReason != "":
		return fmt.Errorf("%w: mode_reason: needs a mode", errRequest)
	}
	change := mailbox.Change{DisplayName: in.DisplayName, MaxBytes: in.MaxBytes}
	if in.AutoSubmitted != nil {
		change.AutoSubmitted = new(directory.AutoSubmitted(*in.AutoSubmitted))
	}
	if len(in.ExpiresAt) > 0 {
		change.Expires = new(time.Time)
		if string(in.ExpiresAt) != "null" {
			if err := json.Unmarshal(in.ExpiresAt, change.Expires); err != nil || change.Expires.IsZero() {
				return fmt.Errorf("%w: expires_at: must be a time as in 2026-01-02T15:04:05Z, or null for never", errRequest)
			}
		}
	}
	b, err := s.post.Update(r.Context(), c.Principal, r.PathValue("inbox"), change)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, inboxOf(b))
	return nil
}

func (s inboxServer) deleteInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.post.Delete(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, inboxOf(b))
	return nil
}

func (s inboxServer) undeleteInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.post.Undelete(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, inboxOf(b))
	return nil
}
