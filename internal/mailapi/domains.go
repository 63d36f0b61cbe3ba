package mailapi

import (
	"fmt"
	"net/http"
	"regexp"
	"sync"
	"time"

	"postern/internal/api"
	"postern/internal/domain"
	"postern/internal/door"
)

// A domainServer serves the domains that a project brought.
type domainServer struct {
	domains *domain.Registry
}

func (s domainServer) routes() []route {
	return []route{
		{"GET", "/v1/domains", 0, s.listDomains},
		{"POST", "/v1/domains", maxBody, s.addDomain},
		{"GET", "/v1/domains/{id}", 0, s.getDomain},
		{"DELETE", "/v1/domains/{id}", 0, s.removeDomain},
		{"GET", "/v1/domains/{id}/records", 0, s.domainRecords},
		{"POST", "/v1/domains/{id}/verify", 0, s.verifyDomain},
	}
}

// A domainAnswer is a domain in our words and in LobsterMail's, whose client
// reads domain, status, dnsRecords and createdAt.
type domainAnswer struct {
	api.Domain

	Status     string    `json:"status"` // pending_verification, verified or failed
	DNSRecords []dnsJSON `json:"dnsRecords"`
}

type dnsJSON struct {
	Type     string `json:"type"`
	Host     string `json:"host"`
	Value    string `json:"value"`
	Priority int    `json:"priority,omitempty"`
}

// lobsterStatus is a state in LobsterMail's words.
var lobsterStatus = map[domain.State]string{
	domain.StatePending: "pending_verification", domain.StateVerified: "verified", domain.StateDegraded: "verified", domain.StateLost: "failed",
}

// timeOrNull is t, or nil for the zero time.
func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func (s domainServer) domainOf(r *http.Request, d domain.Domain) (domainAnswer, error) {
	out := domainAnswer{Domain: api.Domain{
		ID: d.ID, Domain: d.Name, Unicode: d.Unicode(), State: api.DomainState(d.State), Problem: d.Problem(), VerifiedAt: timeOrNull(d.Verified),
		CheckedAt: timeOrNull(d.Checked), NextCheckAt: timeOrNull(d.Next), CreatedAt: d.Created,
	}, Status: lobsterStatus[d.State], DNSRecords: []dnsJSON{}}
	rs, err := s.domains.Records(r.Context(), d)
	for _, rec := range rs {
		if rec.Need != domain.Optional {
			out.DNSRecords = append(out.DNSRecords, dnsJSON{rec.Type, rec.Name, rec.Value, rec.Priority})
		}
	}
	return out, err
}

func (s domainServer) listDomains(w http.ResponseWriter, r *http.Request, c caller) error {
	ds, err := s.domains.Domains(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	out := []domainAnswer{}
	for _, d := range ds { // a project has few
		v, err := s.domainOf(r, d)
		if err != nil {
			return err
		}
		out = append(out, v)
	}
	answer(w, http.StatusOK, map[string]any{"data": out})
	return nil
}

func (s domainServer) addDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewDomain
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	d, err := s.domains.Add(r.Context(), c.Principal, in.Domain)
	if err != nil {
		return err
	}
	out, err := s.domainOf(r, d)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/domains/"+d.ID)
	answer(w, http.StatusCreated, out)
	return nil
}

var domainForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9._-]{1,253}$`) })

// findDomain returns the domain that the path names by its id or its name.
func (s domainServer) findDomain(r *http.Request, c caller) (domain.Domain, error) {
	name := r.PathValue("id")
	if !domainForm().MatchString(name) {
		name = "" // matches nothing, but still checks permission
	}
	d, err := s.domains.Find(r.Context(), c.Principal, name)
	if err != nil && name == "" {
		return d, fmt.Errorf("id in the path: %w", err)
	}
	return d, err
}

func (s domainServer) getDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	d, err := s.findDomain(r, c)
	if err != nil {
		return err
	}
	out, err := s.domainOf(r, d)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, out)
	return nil
}

func (s domainServer) removeDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	d, err := s.findDomain(r, c)
	if err != nil {
		return err
	}
	if err := s.domains.Remove(r.Context(), c.Principal, d.ID); err != nil {
		return err
	}
	answer(w, http.StatusOK, api.RemovedDomain{ID: d.ID, Domain: d.Name, Deleted: true}) // LobsterMail's client reads JSON from every answer
	return nil
}

func (s domainServer) domainRecords(w http.ResponseWriter, r *http.Request, c caller) error {
	d, err := s.findDomain(r, c)
	if err != nil {
		return err
	}
	rs, err := s.domains.Records(r.Context(), d)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.DomainRecords{
		Domain: d.Name, State: api.DomainState(d.State), CheckedAt: timeOrNull(d.Checked), Records: each(rs, recordOf), MTASTSPolicy: s.domains.MTASTSPolicy(),
	})
	return nil
}

func recordOf(r domain.Record) api.DomainRecord {
	return api.DomainRecord{
		Kind: string(r.Kind), Type: r.Type, Name: r.Name, Value: r.Value, Priority: r.Priority, Need: string(r.Need), Why: r.Why,
		Result: string(r.Result), Found: r.Found, Detail: r.Detail,
	}
}

func (s domainServer) verifyDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	d, err := s.findDomain(r, c)
	if err != nil {
		return err
	}
	if d, err = s.domains.Check(r.Context(), c.Principal, d.ID); err != nil {
		return err
	}
	out, err := s.domainOf(r, d)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, out)
	return nil
}
