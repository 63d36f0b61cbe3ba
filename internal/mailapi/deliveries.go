package mailapi

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
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

func (s deliveryServer) listRecipients(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	ds, err := s.post.Deliveries(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	out := []api.Delivery{}
	for _, d := range ds {
		out = append(out, api.Delivery{
			Recipient: d.Recipient, State: api.DeliveryState(d.State), Code: d.Code, Status: d.Status, Detail: d.Detail, Remote: d.Remote, Attempts: d.Attempts,
			FirstAt: timeOrNull(d.First), LastAt: timeOrNull(d.Last), NextAt: timeOrNull(d.Next), SettledAt: timeOrNull(d.Settled), ComplainedAt: timeOrNull(d.Complained),
		})
	}
	answer(w, http.StatusOK, api.DeliveryList{Deliveries: out})
	return nil
}

func (s deliveryServer) countSuppressed(w http.ResponseWriter, r *http.Request, c caller) error {
	count, err := s.post.Suppression.Count(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	counts := map[string]int{}
	for reason, n := range count {
		counts[string(reason)] = n
	}
	answer(w, http.StatusOK, api.SuppressionCounts{Counts: counts})
	return nil
}

func address(r *http.Request) (string, error) {
	var in api.Address
	err := door.Decode(r, &in)
	return in.Address, err
}

func (s deliveryServer) suppress(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := address(r)
	if err == nil {
		err = s.post.Suppression.Add(r.Context(), c.Principal, a)
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
	v, err := s.post.Suppression.Find(r.Context(), c.Principal, a)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.Suppression{Reason: string(v.Reason), Inbox: v.Inbox, CreatedAt: v.Created})
	return nil
}

func (s deliveryServer) unsuppress(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := address(r)
	if err == nil {
		err = s.post.Suppression.Remove(r.Context(), c.Principal, a)
	}
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
	}
	return err
}

func (s deliveryServer) listSuspensions(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Delivery.Suspensions(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	out := []api.Suspension{}
	for _, v := range list {
		out = append(out, api.Suspension{Scope: v.Scope, Reason: v.Reason, SuspendedAt: v.At})
	}
	answer(w, http.StatusOK, api.SuspensionList{Suspensions: out})
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
	var in api.Lift
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Reason = strings.TrimSpace(in.Reason); in.Reason == "" || len(in.Reason) > 1000 {
		return fmt.Errorf("%w: reason: is missing or longer than 1000 bytes", errRequest)
	}
	if err := checkReason(in.Reason); err != nil {
		return err
	}
	if err := s.post.Delivery.Lift(r.Context(), c.Principal, scope(r, "id"), in.Reason); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func signingKeyOf(k signing.Key) api.SigningKey {
	return api.SigningKey{
		ID: k.ID, Kind: string(k.Kind), CreatedAt: k.Created, From: k.From, Until: timeOrNull(k.Until), InUse: k.InUse(time.Now()), Name: k.Name(), Record: k.Record(),
	}
}

func answerKeys(w http.ResponseWriter, keys []signing.Key, err error) error {
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.SigningKeyList{Keys: each(keys, signingKeyOf)})
	return nil
}

func (s deliveryServer) listSigningDomains(w http.ResponseWriter, r *http.Request, c caller) error {
	names, err := s.post.Signing.Domains(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.SigningDomainList{Domains: append([]string{}, names...)})
	return nil
}

func (s deliveryServer) listSigningKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	keys, err := s.post.Signing.Keys(r.Context(), c.Principal, scope(r, "id"))
	return answerKeys(w, keys, err)
}

func (s deliveryServer) rotateSigningKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	keys, err := s.post.Signing.Rotate(r.Context(), c.Principal, scope(r, "id"))
	return answerKeys(w, keys, err)
}

func (s deliveryServer) checkSigningKeys(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Signing.Check(r.Context(), c.Principal, scope(r, "id"))
	if err != nil {
		return err
	}
	out := []api.SigningKey{}
	for _, p := range list {
		k := signingKeyOf(p.Key)
		k.Found, k.Detail = &p.Found, p.Detail
		out = append(out, k)
	}
	answer(w, http.StatusOK, api.SigningKeyList{Keys: out})
	return nil
}

func (s deliveryServer) removeSigningKey(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := s.post.Signing.Remove(r.Context(), c.Principal, scope(r, "id"), scope(r, "key")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
