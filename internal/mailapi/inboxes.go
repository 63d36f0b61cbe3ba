package mailapi

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"sort"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/policy"
	"postern/internal/store"
)

var inboxRoutes = []route{
	{"GET", "/v1/inboxes", 0, (*Server).listInboxes},
	{"POST", "/v1/inboxes", maxBody, (*Server).createInbox},
	{"GET", "/v1/inboxes/{inbox}", 0, (*Server).getInbox},
	{"PATCH", "/v1/inboxes/{inbox}", maxBody, (*Server).updateInbox},
	{"DELETE", "/v1/inboxes/{inbox}", 0, (*Server).deleteInbox},
	{"POST", "/v1/inboxes/{inbox}/undelete", 0, (*Server).undeleteInbox},
}

type inboxJSON struct {
	ID          string      `json:"id"`
	Address     string      `json:"address"`
	DisplayName string      `json:"display_name"`
	Mode        policy.Mode `json:"mode"`
	ModeAt      *time.Time  `json:"mode_at"`     // when it changed last; null: it has not
	ModeReason  string      `json:"mode_reason"` // why; may be empty
	CreatedAt   time.Time   `json:"created_at"`
	ExpiresAt   *time.Time  `json:"expires_at"` // null: never
	DeletedAt   *time.Time  `json:"deleted_at"` // null: it is not
	PurgeAt     *time.Time  `json:"purge_at"`   // of a deleted one: when its mail goes for good
	MaxBytes    int64       `json:"max_bytes"`  // what may arrive in it

	// The same in LobsterMail's words, whose client reads these:
	DisplayName2 *string    `json:"displayName"`
	Domain       string     `json:"domain"`
	IsActive     bool       `json:"isActive"`
	EmailCount   *int64     `json:"emailCount,omitempty"` // for accounts only: it is counted anew
	ExpiresAt2   *time.Time `json:"expiresAt"`
	CreatedAt2   time.Time  `json:"createdAt"`

	// In the answer to its creation, once:
	Key         string `json:"key,omitempty"`
	RecoveryKey string `json:"recovery_key,omitempty"`
	Notice      string `json:"notice,omitempty"` // what losing them means
}

func inboxOf(b mailbox.Inbox) inboxJSON {
	_, host, _ := strings.Cut(b.Address, "@")
	out := inboxJSON{
		ID: b.ID, Address: b.Address, DisplayName: b.DisplayName, Mode: b.Mode, ModeAt: moment(b.ModeAt), ModeReason: b.ModeReason, CreatedAt: b.Created,
		ExpiresAt: moment(b.Expires), DeletedAt: moment(b.Deleted), PurgeAt: moment(b.Purge), MaxBytes: b.MaxBytes,
		Domain: host, IsActive: b.Deleted.IsZero(), ExpiresAt2: moment(b.Expires), CreatedAt2: b.Created,
	}
	if b.DisplayName != "" {
		out.DisplayName2 = &b.DisplayName
	}
	return out
}

// counted adds what only accounts are told.
func (s *Server) counted(r *http.Request, c caller, in inboxJSON) (inboxJSON, error) {
	if c.Kind != auth.Grant {
		return in, nil
	}
	n, err := s.post.Count(r.Context(), in.ID)
	in.EmailCount = &n
	return in, err
}

func (s *Server) listInboxes(w http.ResponseWriter, r *http.Request, c caller) error {
	var list []mailbox.Inbox
	var err error
	switch deleted := r.URL.Query().Get("deleted"); deleted {
	case "", "false":
		list, err = s.post.Inboxes(r.Context(), c.Principal)
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
	out := []inboxJSON{}
	for _, b := range list {
		j, err := s.counted(r, c, inboxOf(b))
		if err != nil {
			return err
		}
		out = append(out, j)
	}
	answer(w, http.StatusOK, map[string]any{"inboxes": out, "data": out, "next_cursor": next}) // data for LobsterMail's client
	return nil
}

// pageOfInboxes returns the part of a list that the query asks for, and the
// cursor of the next part. The list is by address, and so is the cursor.
func pageOfInboxes(q url.Values, list []mailbox.Inbox) (part []mailbox.Inbox, next string, err error) {
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

func (s *Server) createInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		Address     string      `json:"address"`
		Next        bool        `json:"next"`
		DisplayName string      `json:"display_name"`
		Mode        policy.Mode `json:"mode"`
		ExpiresAt   *time.Time  `json:"expires_at"`
		MaxBytes    int64       `json:"max_bytes"`
		RecoveryKey bool        `json:"recovery_key"`

		// In LobsterMail's words:
		LocalPart    string `json:"localPart"`
		Domain       string `json:"domain"`
		DisplayName2 string `json:"displayName"`
	}
	if err := decode(r, &in); err != nil {
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
	n := mailbox.NewInbox{Address: in.Address, Next: in.Next, DisplayName: in.DisplayName, Mode: in.Mode, MaxBytes: in.MaxBytes}
	if in.ExpiresAt != nil {
		n.Expires = *in.ExpiresAt
	}
	b, key, err := s.post.CreateInbox(r.Context(), c.Principal, n, c.key)
	if lobster && errors.Is(err, mailbox.ErrReserved) {
		// Its client then tries the next name, as it does for one that is taken.
		err = &mailbox.TakenError{Address: in.Address}
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
func (s *Server) firstRecovery(r *http.Request, key auth.Secret) (auth.Secret, error) {
	who, err := auth.CheckKey(r.Context(), s.db, key)
	if err != nil {
		return "", err
	}
	k, err := s.post.Open(r.Context(), who, key, "")
	if err != nil {
		return "", err
	}
	_, recovery, err := s.post.AddRecovery(r.Context(), who, k)
	return recovery, err
}

func (s *Server) getInbox(w http.ResponseWriter, r *http.Request, c caller) error {
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

// known returns the inbox that the request names, which the caller manages or
// has a part in.
func (s *Server) known(r *http.Request, c caller) (mailbox.Inbox, error) {
	if c.Kind != auth.Project && c.Kind != auth.Person {
		return s.own(r, c)
	}
	return s.post.Find(r.Context(), c.Principal, r.PathValue("inbox"))
}

func (s *Server) updateInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		DisplayName *string         `json:"display_name"`
		ExpiresAt   json.RawMessage `json:"expires_at"` // null: never
		MaxBytes    *int64          `json:"max_bytes"`
		Mode        *policy.Mode    `json:"mode"`
		ModeReason  string          `json:"mode_reason"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	switch {
	case in.Mode != nil && (in.DisplayName != nil || in.MaxBytes != nil || len(in.ExpiresAt) > 0):
		// Each is a change of its own, with who may make it: half of it must not be done.
		return fmt.Errorf("%w: mode: is changed by itself; send the other fields in another request", errRequest)
	case in.Mode != nil:
		b, err := s.post.SetMode(r.Context(), c.Principal, r.PathValue("inbox"), *in.Mode, in.ModeReason)
		if err != nil {
			return err
		}
		answer(w, http.StatusOK, inboxOf(b))
		return nil
	case in.ModeReason != "":
		return fmt.Errorf("%w: mode_reason: needs a mode", errRequest)
	}
	change := mailbox.Change{DisplayName: in.DisplayName, MaxBytes: in.MaxBytes}
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

func (s *Server) deleteInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.post.Delete(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, inboxOf(b))
	return nil
}

func (s *Server) undeleteInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.post.Undelete(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, inboxOf(b))
	return nil
}

// open returns the key of the inbox that the request names, if the caller's
// credential opens it. Everybody else gets the same answer whether the inbox
// exists or not, so that nobody learns addresses by asking.
func (s *Server) open(r *http.Request, c caller) (*mailbox.Key, error) {
	b, err := s.own(r, c)
	if err != nil {
		return nil, err
	}
	return s.post.Open(r.Context(), c.Principal, c.key, b.ID)
}

// item is open for a request that names something in the inbox, whose id it
// returns too.
func (s *Server) item(r *http.Request, c caller) (*mailbox.Key, string, error) {
	k, err := s.open(r, c)
	if err != nil {
		return nil, "", err
	}
	name, err := id(r)
	return k, name, err
}

// own returns the inbox that the request names if the caller's credential has a
// part in it.
func (s *Server) own(r *http.Request, c caller) (mailbox.Inbox, error) {
	if c.key == "" {
		return mailbox.Inbox{}, fmt.Errorf("a %s manages inboxes and opens none, only the inbox's own key (pib_…) does: %w", c.Kind, auth.ErrForbidden)
	}
	b, _, err := s.post.Reach(r.Context(), c.Principal, r.PathValue("inbox"))
	return b, err
}

// idForm is compiled when it is first needed: each part of a sandbox is this
// program, and would otherwise compile it as it starts.
var idForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z]{3}_[A-Z0-9]{10,40}$`) })

// id returns the id in the request's path. What has not the form of one is not
// found.
func id(r *http.Request) (string, error) {
	if v := r.PathValue("id"); idForm().MatchString(v) {
		return v, nil
	}
	return "", fmt.Errorf("id in the path: %w", store.ErrNotFound)
}
