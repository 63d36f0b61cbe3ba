package mailapi

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/signing"
)

// A deliveryServer serves what became of sent mail, the suppression list, suspensions, and the keys that sign mail.
type deliveryServer struct {
	post *mailbox.PostOffice
}

func (s deliveryServer) routes() []route {
	return []route{
		{"GET", "/v1/actions/{id}/deliveries", 0, s.listRecipients},
		{"GET", "/v1/suppression", 0, s.countSuppressed},
		// Addresses are in bodies: paths are in logs.
		{"POST", "/v1/suppression", maxBody, s.suppress},
		{"POST", "/v1/suppression/lookup", maxBody, s.lookUpSuppressed},
		{"POST", "/v1/suppression/removal", maxBody, s.unsuppress},
		{"GET", "/v1/suspensions", 0, s.listSuspensions},
		{"POST", "/v1/suspensions/{id}/lift", maxBody, s.lift},
		{"GET", "/v1/signing", 0, s.listSigningDomains},
		{"GET", "/v1/signing/{id}", 0, s.listSigningKeys},
		{"POST", "/v1/signing/{id}/rotation", 0, s.rotateSigningKeys},
		{"POST", "/v1/signing/{id}/check", 0, s.checkSigningKeys},
		{"DELETE", "/v1/signing/{id}/keys/{key}", 0, s.removeSigningKey},
	}
}

// A recipientJSON is what became of one recipient.
type recipientJSON struct {
	Recipient    string                `json:"recipient"`
	State        mailbox.DeliveryState `json:"state"`
	Code         int                   `json:"code"`   // SMTP code of the last reply; 0 where there was none
	Status       string                `json:"status"` // RFC 3463 code of it, or empty
	Detail       string                `json:"detail"`
	Remote       string                `json:"remote"`
	Attempts     int64                 `json:"attempts"`
	FirstAt      *time.Time            `json:"first_at"`
	LastAt       *time.Time            `json:"last_at"`
	NextAt       *time.Time            `json:"next_at"`
	SettledAt    *time.Time            `json:"settled_at"`
	ComplainedAt *time.Time            `json:"complained_at"`
}

func (s deliveryServer) listRecipients(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	ds, err := s.post.Deliveries(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	out := []recipientJSON{}
	for _, d := range ds {
		out = append(out, recipientJSON{
			d.Recipient, d.State, d.Code, d.Status, d.Detail, d.Remote, d.Attempts,
			timeOrNull(d.First), timeOrNull(d.Last), timeOrNull(d.Next), timeOrNull(d.Settled), timeOrNull(d.Complained),
		})
	}
	answer(w, http.StatusOK, map[string]any{"deliveries": out})
	return nil
}

func (s deliveryServer) countSuppressed(w http.ResponseWriter, r *http.Request, c caller) error {
	count, err := s.post.Suppressions(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"counts": count})
	return nil
}

func address(r *http.Request) (string, error) {
	var in struct {
		Address string `json:"address"`
	}
	err := decode(r, &in)
	return in.Address, err
}

func (s deliveryServer) suppress(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := address(r)
	if err == nil {
		err = s.post.Suppress(r.Context(), c.Principal, a)
	}
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
	}
	return err
}

func (s deliveryServer) lookUpSuppressed(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := address(r)
	if err != nil {
		return err
	}
	v, err := s.post.Suppressed(r.Context(), c.Principal, a)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"reason": v.Reason, "inbox": v.Inbox, "created_at": v.Created})
	return nil
}

func (s deliveryServer) unsuppress(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := address(r)
	if err == nil {
		err = s.post.Unsuppress(r.Context(), c.Principal, a)
	}
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
	}
	return err
}

func (s deliveryServer) listSuspensions(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Suspensions(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	type suspension struct {
		Scope       string    `json:"scope"`
		Reason      string    `json:"reason"`
		SuspendedAt time.Time `json:"suspended_at"`
	}
	out := []suspension{}
	for _, v := range list {
		out = append(out, suspension{v.Scope, v.Reason, v.At})
	}
	answer(w, http.StatusOK, map[string]any{"suspensions": out})
	return nil
}

var scopeForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9._-]{1,253}$`) })

// scope returns what the path names: the id of an inbox, or a domain. What
// cannot be one is nobody's.
func scope(r *http.Request, name string) string {
	if v := r.PathValue(name); scopeForm().MatchString(v) {
		return v
	}
	return "-"
}

func (s deliveryServer) lift(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("only a person lifts a suspension: %w", auth.ErrForbidden)
	}
	var in struct {
		Reason string `json:"reason"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	if in.Reason = strings.TrimSpace(in.Reason); in.Reason == "" || len(in.Reason) > 1000 {
		return fmt.Errorf("%w: reason: is missing or longer than 1000 bytes", errRequest)
	}
	if err := checkReason(in.Reason); err != nil {
		return err
	}
	if err := s.post.Lift(r.Context(), c.Principal, scope(r, "id"), in.Reason); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// A signingKeyJSON is the public half of a key that signs what leaves.
type signingKeyJSON struct {
	ID        string       `json:"id"`
	Kind      signing.Kind `json:"kind"`
	CreatedAt time.Time    `json:"created_at"`
	From      time.Time    `json:"from"`
	Until     *time.Time   `json:"until"`
	InUse     bool         `json:"in_use"`
	Name      string       `json:"name"`   // of the DNS record; empty for a statement's key
	Record    string       `json:"record"` // its text
	Found     *bool        `json:"found,omitempty"`
	Detail    string       `json:"detail,omitempty"`
}

func signingKeyOf(k signing.Key) signingKeyJSON {
	return signingKeyJSON{
		ID: k.ID, Kind: k.Kind, CreatedAt: k.Created, From: k.From, Until: timeOrNull(k.Until), InUse: k.InUse(time.Now()), Name: k.Name(), Record: k.Record(),
	}
}

func answerKeys(w http.ResponseWriter, keys []signing.Key, err error) error {
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"keys": each(keys, signingKeyOf)})
	return nil
}

func (s deliveryServer) listSigningDomains(w http.ResponseWriter, r *http.Request, c caller) error {
	names, err := s.post.SigningDomains(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"domains": append([]string{}, names...)})
	return nil
}

func (s deliveryServer) listSigningKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	keys, err := s.post.SigningKeys(r.Context(), c.Principal, scope(r, "id"))
	return answerKeys(w, keys, err)
}

func (s deliveryServer) rotateSigningKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	keys, err := s.post.RotateKeys(r.Context(), c.Principal, scope(r, "id"))
	return answerKeys(w, keys, err)
}

func (s deliveryServer) checkSigningKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.CheckKeys(r.Context(), c.Principal, scope(r, "id"))
	if err != nil {
		return err
	}
	out := []signingKeyJSON{}
	for _, p := range list {
		k := signingKeyOf(p.Key)
		k.Found, k.Detail = &p.Found, p.Detail
		out = append(out, k)
	}
	answer(w, http.StatusOK, map[string]any{"keys": out})
	return nil
}

func (s deliveryServer) removeSigningKey(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := s.post.RemoveKey(r.Context(), c.Principal, scope(r, "id"), scope(r, "key")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
