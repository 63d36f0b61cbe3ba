package multimail

import (
	"net/http"
	"regexp"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/door"
)

func (s *Server) domainRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/domains", serve: s.listDomains},
		{method: "POST", path: "/v1/domains", body: maxBody, serve: s.addDomain},
		{method: "GET", path: "/v1/domains/{id}", serve: s.getDomain},
		{method: "DELETE", path: "/v1/domains/{id}", serve: s.removeDomain},
		{method: "POST", path: "/v1/domains/{id}/verify", role: auth.Reviewer, serve: s.verifyDomain},
	}
}

// A domainAnswer is a domain in MultiMail's words.
type domainAnswer struct {
	ID         string                 `json:"id"`
	Domain     string                 `json:"domain"`
	Status     string                 `json:"status"` // pending or active
	DKIM       bool                   `json:"dkim_verified"`
	SPF        bool                   `json:"spf_verified"`
	MX         bool                   `json:"mx_verified"`
	ReturnPath bool                   `json:"return_path_verified"` // the same as SPF: bounces come back to the domain itself
	Records    map[string][]dnsRecord `json:"dns_records"`
	Problem    string                 `json:"problem"` // for a person; empty if there is none
	CreatedAt  time.Time              `json:"created_at"`
	VerifiedAt *time.Time             `json:"verified_at"`
}

type dnsRecord struct {
	Type     string `json:"type"`
	Host     string `json:"host"`
	Value    string `json:"value"`
	Priority int    `json:"priority,omitempty"`
	Result   string `json:"result"`
}

func (s *Server) domainOf(r *http.Request, d domain.Domain) (domainAnswer, error) {
	out := domainAnswer{ID: d.ID, Domain: d.Name, Status: "pending", Records: map[string][]dnsRecord{}, Problem: d.Problem(), CreatedAt: d.Created, VerifiedAt: orNull(d.Verified)}
	if d.Sends() {
		out.Status = "active"
	}
	list, err := s.conf.Domains.Records(r.Context(), d)
	for _, rec := range list {
		kind := string(rec.Kind)
		out.Records[kind] = append(out.Records[kind], dnsRecord{rec.Type, rec.Name, rec.Value, rec.Priority, string(rec.Result)})
	}
	good := func(kind domain.Kind) bool {
		any := false
		for _, rec := range list {
			if rec.Kind == kind {
				if rec.Result != domain.OK && rec.Result != domain.Warning {
					return false
				}
				any = true
			}
		}
		return any
	}
	out.DKIM, out.SPF, out.MX, out.ReturnPath = good(domain.DKIM), good(domain.SPF), good(domain.MX), good(domain.SPF)
	return out, err
}

func (s *Server) listDomains(w http.ResponseWriter, r *http.Request, c caller) error {
	ds, err := s.conf.Domains.Domains(r.Context(), c.Principal)
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
	answer(w, http.StatusOK, map[string]any{"domains": out})
	return nil
}

func (s *Server) addDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		Domain string `json:"domain"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	d, err := s.conf.Domains.Add(r.Context(), c.Principal, in.Domain)
	return s.answerDomain(w, r, http.StatusCreated, d, err)
}

func (s *Server) answerDomain(w http.ResponseWriter, r *http.Request, status int, d domain.Domain, err error) error {
	if err != nil {
		return err
	}
	out, err := s.domainOf(r, d)
	if err != nil {
		return err
	}
	answer(w, status, out)
	return nil
}

var domainForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9._-]{1,253}$`) })

// findDomain returns the domain that the path names by its ID or its name.
func (s *Server) findDomain(r *http.Request, c caller) (domain.Domain, error) {
	name := r.PathValue("id")
	if !domainForm().MatchString(name) {
		name = "" // matches nothing, but still checks permission
	}
	return s.conf.Domains.Find(r.Context(), c.Principal, name)
}

func (s *Server) getDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	d, err := s.findDomain(r, c)
	return s.answerDomain(w, r, http.StatusOK, d, err)
}

func (s *Server) removeDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	d, err := s.findDomain(r, c)
	if err != nil {
		return err
	}
	if err := s.conf.Domains.Remove(r.Context(), c.Principal, d.ID); err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"status": "deleted", "id": d.ID})
	return nil
}

func (s *Server) verifyDomain(w http.ResponseWriter, r *http.Request, c caller) error {
	d, err := s.findDomain(r, c)
	if err == nil {
		d, err = s.conf.Domains.Check(r.Context(), c.Principal, d.ID)
	}
	return s.answerDomain(w, r, http.StatusOK, d, err)
}
