package mailapi

import (
	"fmt"
	"net/http"
	"regexp"
	"sync"
	"time"

	"postern/internal/domain"
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

// A domainJSON is a domain in this door's words and in LobsterMail's, whose
// client reads domain, status, dnsRecords and createdAt.
type domainJSON struct {
	ID         string       `json:"id"`
	Domain     string       `json:"domain"`      // as the DNS knows it
	Unicode    string       `json:"unicode"`     // as people write it
	State      domain.State `json:"state"`       // pending, verified, degraded or lost
	Problem    string       `json:"problem"`     // what is wrong, for a person, or empty
	VerifiedAt *time.Time   `json:"verified_at"` // since when it is the project's
	CheckedAt  *time.Time   `json:"checked_at"`
	NextCheck  *time.Time   `json:"next_check_at"` // by itself

	Status     string    `json:"status"` // pending_verification, verified or failed
	DNSRecords []dnsJSON `json:"dnsRecords"`
	CreatedAt  time.Time `json:"createdAt"`
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

func (s domainServer) domainOf(r *http.Request, d domain.Domain) (domainJSON, error) {
	out := domainJSON{
		ID: d.ID, Domain: d.Name, Unicode: d.Unicode(), State: d.State, Problem: d.Problem(), VerifiedAt: timeOrNull(d.Verified),
		CheckedAt: timeOrNull(d.Checked), NextCheck: timeOrNull(d.Next), Status: lobsterStatus[d.State], DNSRecords: []dnsJSON{}, CreatedAt: d.Created,
	}
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
	out := []domainJSON{}
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
	var in struct {
		Domain string `json:"domain"`
	}
	if err := decode(r, &in); err != nil {
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
		name = "" // which no domain has; who may not ask is still told that
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
	answer(w, http.StatusOK, map[string]any{"id": d.ID, "domain": d.Name, "deleted": true}) // LobsterMail's client reads JSON from every answer
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
	answer(w, http.StatusOK, map[string]any{
		"domain": d.Name, "state": d.State, "checked_at": timeOrNull(d.Checked), "records": rs, "mta_sts_policy": s.domains.MTASTSPolicy(),
	})
	return nil
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
