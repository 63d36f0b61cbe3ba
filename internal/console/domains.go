package console

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/store"
)

// A domainsPage lists the domains that the project added.
type domainsPage struct {
	Domains []domain.Domain
	Own     string // the server's domain, in which every project can have inboxes
	Notice  string // outcome of the submitted form
	Name    string // as typed into a rejected form
}

// domainHandlers manages the domains of the project.
type domainHandlers struct{ *Server }

func (s domainHandlers) routes() []route {
	return []route{
		{"GET", "/console/domains", views, s.domainList},
		{"POST", "/console/domains", manages, s.addDomain},
		{"GET", "/console/domains/{id}", views, s.domain},
		{"POST", "/console/domains/{id}/check", decides, s.checkDomain},
		{"POST", "/console/domains/{id}/remove", manages, s.removeDomain},
	}
}

func (s domainHandlers) domainList(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showDomains(w, r, who, http.StatusOK, "")
}

func (s domainHandlers) showDomains(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	v := domainsPage{Own: s.post.Directory.Domain(), Notice: notice, Name: r.PostForm.Get("domain")}
	var err error
	if v.Domains, err = s.domains.Domains(r.Context(), who); err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "domains", Title: "Domains", Who: who, Here: "domains", Body: v})
}

func (s domainHandlers) addDomain(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	d, err := s.domains.Add(r.Context(), who, r.PostForm.Get("domain"))
	for _, known := range []error{domain.ErrInvalid, domain.ErrTaken, domain.ErrHeld, domain.ErrFull} {
		if errors.Is(err, known) {
			return s.showDomains(w, r, who, http.StatusBadRequest, sentence(strings.TrimPrefix(err.Error(), domain.ErrInvalid.Error()+": ")))
		}
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/domains/"+d.ID, http.StatusSeeOther)
	return nil
}

var domainID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^dom_[A-Z2-7]{26}$`) })

// A domainPage is one domain with its records.
type domainPage struct {
	domain.Domain
	Records []domain.Record
	Policy  string // for MTA-STS
	Notice  string
}

// International reports whether people write the name in another way than the DNS does.
func (d domainPage) International() bool { return d.Unicode() != d.Name }

func (s domainHandlers) domain(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showDomain(w, r, who, http.StatusOK, "")
}

func (s domainHandlers) pathDomain(r *http.Request, who auth.Principal) (domain.Domain, error) {
	id := r.PathValue("id")
	if !domainID().MatchString(id) {
		return domain.Domain{}, fmt.Errorf("domain %q: %w", id, store.ErrNotFound)
	}
	return s.domains.Find(r.Context(), who, id)
}

func (s domainHandlers) showDomain(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	d, err := s.pathDomain(r, who)
	if err != nil {
		return err
	}
	v := domainPage{Domain: d, Policy: s.domains.MTASTSPolicy(), Notice: notice}
	if v.Records, err = s.domains.Records(r.Context(), d); err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "domain", Title: "Domain " + d.Name, Who: who, Here: "domains", Body: v})
}

func (s domainHandlers) checkDomain(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	d, err := s.pathDomain(r, who)
	if err != nil {
		return err
	}
	_, err = s.domains.Check(r.Context(), who, d.ID)
	if errors.Is(err, domain.ErrTooSoon) {
		return s.showDomain(w, r, who, http.StatusTooManyRequests, "DNS was checked a moment ago; the result is shown. Try again in a few seconds.")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/domains/"+d.ID, http.StatusSeeOther)
	return nil
}

func (s domainHandlers) removeDomain(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	d, err := s.pathDomain(r, who)
	if err != nil {
		return err
	}
	// Require the typed name: from then on, mail to the domain is refused.
	if !strings.EqualFold(strings.TrimSpace(r.PostForm.Get("name")), d.Name) && strings.TrimSpace(r.PostForm.Get("name")) != d.Unicode() {
		return s.showDomain(w, r, who, http.StatusBadRequest, "Nothing was changed: enter the domain name to confirm its removal.")
	}
	err = s.domains.Remove(r.Context(), who, d.ID)
	if errors.Is(err, domain.ErrInUse) {
		return s.showDomain(w, r, who, http.StatusConflict, "Nothing was changed: "+err.Error()+".")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/domains", http.StatusSeeOther)
	return nil
}

// recordNames names the kinds of records for people.
var recordNames = map[domain.Kind]string{
	domain.Ownership: "Proof of ownership", domain.MX: "MX: incoming mail", domain.SPF: "SPF: this server may send",
	domain.DKIM: "DKIM: signing key", domain.DMARC: "DMARC: policy for forged mail",
	domain.MTASTS: "MTA-STS: delivery over TLS only", domain.TLSRPT: "TLS reports",
}

// resultNames names the results of a DNS check for people.
var resultNames = map[domain.Result]string{
	domain.Unchecked: "not checked yet", domain.OK: "found", domain.Warning: "found, see below", domain.Missing: "missing",
	domain.Wrong: "wrong", domain.Unreachable: "no answer",
}

// domainMeaning says what a domain's state means.
func domainMeaning(d domain.Domain) string {
	switch d.State {
	case domain.StatePending:
		if d.Next.IsZero() {
			return "Ownership is not proved, and automatic checks have stopped. Publish the records and check again."
		}
		return "Ownership is not proved yet, so you cannot create inboxes in this domain. Publish the records; Postern checks for them automatically."
	case domain.StateVerified:
		return "Inboxes in this domain can receive and send mail."
	case domain.StateDegraded:
		if !d.Missing.IsZero() {
			return "The proof of ownership is missing. If it stays missing, the domain first stops sending and later stops receiving."
		}
		return "A record is missing or wrong. Mail may not arrive or may be treated as suspicious."
	case domain.StateLost:
		return "The proof of ownership is gone. The domain cannot send, and receives only for a limited time. Publish the proof again before another project can add the domain."
	}
	return ""
}
