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

// A domainsPage is the domains that the project brought.
type domainsPage struct {
	Domains []domain.Domain
	Own     string // the server's, in which every project's inboxes may be
	Notice  string // what became of the form that was just sent
	Name    string // as typed into a form that could not be taken
}

// domainHandlers manages the domains of the project.
type domainHandlers struct{ *Server }

func (s domainHandlers) routes() []route {
	return []route{
		{"GET", "/console/domains", looks, s.domainList},
		{"POST", "/console/domains", manages, s.addDomain},
		{"GET", "/console/domains/{id}", looks, s.domain},
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
	return s.render(w, status, page{Name: "domains", Title: "Domains", Who: who, Here: "domains", Body: v})
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

// International reports whether people write the name otherwise than the DNS.
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
	return s.render(w, status, page{Name: "domain", Title: "Domain " + d.Name, Who: who, Here: "domains", Body: v})
}

func (s domainHandlers) checkDomain(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	d, err := s.pathDomain(r, who)
	if err != nil {
		return err
	}
	_, err = s.domains.Check(r.Context(), who, d.ID)
	if errors.Is(err, domain.ErrTooSoon) {
		return s.showDomain(w, r, who, http.StatusTooManyRequests, "The DNS was asked moments ago: this is what it said. Try again in a few seconds.")
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
	// Typed, not clicked: mail for the domain is refused from then on.
	if !strings.EqualFold(strings.TrimSpace(r.PostForm.Get("name")), d.Name) && strings.TrimSpace(r.PostForm.Get("name")) != d.Unicode() {
		return s.showDomain(w, r, who, http.StatusBadRequest, "Nothing was changed: to remove the domain, type its name into the field.")
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

// recordNames are what people call the kinds of records.
var recordNames = map[domain.Kind]string{
	domain.Ownership: "Proof that it is yours", domain.MX: "MX: mail comes here", domain.SPF: "SPF: this server may send",
	domain.DKIM: "DKIM: the key that signs", domain.DMARC: "DMARC: what others do with forgeries",
	domain.MTASTS: "MTA-STS: delivery over TLS only", domain.TLSRPT: "TLS reports",
}

// resultNames are what people call the results of a look at the DNS.
var resultNames = map[domain.Result]string{
	domain.Unchecked: "not looked at yet", domain.OK: "found", domain.Warning: "found, see below", domain.Missing: "missing",
	domain.Wrong: "wrong", domain.Unreachable: "no answer",
}

// domainMeaning says what a domain's state means.
func domainMeaning(d domain.Domain) string {
	switch d.State {
	case domain.StatePending:
		if d.Next.IsZero() {
			return "It is not proved to be yours, and is not looked at by itself any more. Publish the records and look again."
		}
		return "It is not proved to be yours yet: no inbox can be made in it. Publish the records; they are looked for by themselves."
	case domain.StateVerified:
		return "It is yours: inboxes in it receive and send."
	case domain.StateDegraded:
		if !d.Missing.IsZero() {
			return "The proof that it is yours is not found. If it stays away, the domain is lost: then it no longer sends, and later no longer receives."
		}
		return "It is yours, and a record is missing or wrong: mail may not arrive, or be distrusted."
	case domain.StateLost:
		return "The proof is gone. It still receives for a time and does not send. Publish the proof again before somebody else may have the name."
	}
	return ""
}
