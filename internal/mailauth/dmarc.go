package mailauth

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"postern/internal/mail"
)

// The policies of RFC 9989 section 4.7.
const (
	policyNone       = "none"
	policyQuarantine = "quarantine"
	policyReject     = "reject"
)

// An author is the domain of a message's From field and its DMARC records.
type author struct {
	domain string // empty unless there is exactly one
	why    string // why domain is empty
	many   bool   // there are several From fields or domains
	local  bool   // see [Message.local]; then tree and absent are not set
	ours   bool   // local, and the address sends only through this server
	tree   tree
	absent bool // the domain has neither address nor mail exchanger
}

// findAuthor reads the From field and looks up the policy of its domain.
func findAuthor(ctx context.Context, ask *asker, m Message) author {
	list, n, proper := mail.Authors(m.Raw)
	var domains []string
	for _, a := range list {
		d, ok := domainName(mail.Domain(a.Addr))
		if a.Addr == "" || !ok {
			proper = false
			continue
		}
		if !slices.Contains(domains, d) {
			domains = append(domains, d)
		}
	}
	switch {
	case n == 0:
		return author{why: "there is no From field"}
	case n > 1:
		return author{why: fmt.Sprintf("there are %d From fields", n), many: true}
	case len(domains) > 1:
		return author{why: fmt.Sprintf("the From field names %d domains", len(domains)), many: true}
	case len(domains) == 0 || !proper:
		return author{why: "the From field is no list of addresses"}
	}
	a := author{domain: domains[0], local: m.local()}
	if a.local {
		for _, from := range list {
			a.ours = a.ours || ask.cfg.Ours != nil && ask.cfg.Ours(ctx, from.Addr)
		}
		return a
	}
	a.tree = walk(ctx, ask, a.domain)
	if errors.Is(a.tree.err, errManyLookups) {
		// The attack: many signatures and seals use up the lookups, so that the policy
		// cannot be looked up and is not applied.
		return author{why: errManyLookups.Err, many: true}
	}
	if r := a.tree.policy(); r != nil && r.domain != a.domain && r.np != "" {
		a.absent = absent(ctx, ask, a.domain)
	}
	return a
}

// absent reports whether a domain certainly does not exist, RFC 9989 section 3.2.
func absent(ctx context.Context, ask *asker, domain string) bool {
	var wg group
	var noAddr, noMX bool
	wg.Go(func() {
		_, err := ask.LookupIPAddr(ctx, domain)
		noAddr = notFound(err)
	})
	wg.Go(func() {
		_, err := ask.LookupMX(ctx, domain)
		noMX = notFound(err)
	})
	wg.Wait()
	return noAddr && noMX
}

// A record is a DMARC policy record.
type record struct {
	domain    string
	p, sp, np string // policies for the domain, its subdomains, its absent subdomains; sp and np may be empty
	psd       string // y, n or u
	strictSPF bool   // aspf=s: SPF must prove exactly the author's domain
	strictDK  bool   // adkim=s: likewise for DKIM
	testing   bool   // t=y
}

// parseRecord parses a TXT record. ok is false if it is not a DMARC record. Unknown tags
// and values are ignored (section 4.7).
func parseRecord(domain, text string) (r record, ok bool) {
	first, rest, _ := strings.Cut(text, ";")
	name, version, _ := strings.Cut(first, "=")
	if strings.Trim(name, " \t") != "v" || strings.Trim(version, " \t") != "DMARC1" {
		return record{}, false
	}
	t := map[string]string{}
	for tag := range strings.SplitSeq(rest, ";") {
		name, value, ok := strings.Cut(tag, "=")
		name = strings.Trim(name, " \t")
		if _, twice := t[name]; ok && !twice {
			t[name] = strings.ToLower(strings.Trim(value, " \t"))
		}
	}
	policy := func(tag string) string {
		if slices.Contains([]string{policyNone, policyQuarantine, policyReject}, t[tag]) {
			return t[tag]
		}
		return ""
	}
	r = record{
		domain: domain, p: policy("p"), sp: policy("sp"), np: policy("np"), psd: "u",
		strictDK: t["adkim"] == "s", strictSPF: t["aspf"] == "s", testing: t["t"] == "y",
	}
	if r.p == "" {
		r.p = policyNone
	}
	if t["psd"] == "y" || t["psd"] == "n" {
		r.psd = t["psd"]
	}
	return r, true
}

// A tree is the result of a DNS tree walk from a domain upwards.
type tree struct {
	start   string
	records []record // from the start upwards, to the first with psd=y or psd=n
	err     error    // first failed lookup; a record may be missing then
}

// treeNames returns the domains that a tree walk looks up: at most eight, RFC 9989
// section 4.10.
func treeNames(domain string) []string {
	names := []string{domain}
	labels := strings.Split(domain, ".")
	if len(labels) > 8 {
		labels = labels[len(labels)-8:]
	}
	for i := 1; i < len(labels); i++ {
		names = append(names, strings.Join(labels[i:], "."))
	}
	return names
}

// walk does the DNS tree walk from domain. It looks up all names concurrently, since most
// of them are needed anyway.
func walk(ctx context.Context, ask *asker, domain string) tree {
	names := treeNames(domain)
	texts, errs := make([][]string, len(names)), make([]error, len(names))
	var wg group
	for i, n := range names {
		wg.Go(func() { texts[i], errs[i] = ask.LookupTXT(ctx, "_dmarc."+n) })
	}
	wg.Wait()
	t := tree{start: domain}
	for i, n := range names {
		if errs[i] != nil && !notFound(errs[i]) && t.err == nil {
			t.err = errs[i]
		}
		var found []record
		for _, text := range texts[i] {
			if r, ok := parseRecord(n, text); ok {
				found = append(found, r)
			}
		}
		if len(found) != 1 {
			continue // section 4.10: several records count as none
		}
		t.records = append(t.records, found[0])
		if found[0].psd != "u" {
			break
		}
	}
	return t
}

// organization returns the organizational domain, section 4.10.2.
func (t tree) organization() string {
	org := t.start
	for _, r := range t.records {
		switch {
		case r.psd == "n":
			return r.domain
		case r.psd == "y" && r.domain != t.start:
			below := strings.TrimSuffix(t.start, "."+r.domain)
			return below[strings.LastIndexByte(below, '.')+1:] + "." + r.domain
		}
		org = r.domain
	}
	return org
}

// policy returns the record that applies to the start, section 4.10.1: its own, that of
// its organizational domain, or that of the public suffix. It returns nil if there is
// none.
func (t tree) policy() *record {
	org := t.organization()
	var last *record
	for i, r := range t.records {
		if r.domain == t.start || r.domain == org {
			return &t.records[i]
		}
		last = &t.records[i]
	}
	if last != nil && last.psd == "y" {
		return last
	}
	return nil
}

// asks returns the policy that r sets for unauthenticated mail of a's domain.
func (r record) asks(a author) string {
	p := r.p
	if r.domain != a.domain {
		if r.sp != "" {
			p = r.sp
		}
		if a.absent && r.np != "" {
			p = r.np
		}
	}
	if r.testing { // section 4.7: one level lower
		p = map[string]string{policyReject: policyQuarantine, policyQuarantine: policyNone, policyNone: policyNone}[p]
	}
	return p
}

// evaluate computes the DMARC result, RFC 9989 section 5.3. policy is the domain's policy
// if the message failed, and empty otherwise.
func evaluate(ctx context.Context, ask *asker, a author, from spfResult, sigs []signature) (c mail.Check, policy string) {
	if a.domain == "" {
		c = mail.Check{Result: "permerror", Detail: a.why}
		switch {
		case a.many:
			// The attack: DMARC checks one author, and the mail program shows another.
			return c, policyReject
		case a.why != "":
			return c, policyQuarantine
		}
		return c, ""
	}
	c.Domain = a.domain
	if a.local {
		for _, s := range sigs {
			if s.result == "pass" && s.domain == a.domain {
				c.Result, c.Detail = "pass", "by dkim of "+s.domain
				return c, ""
			}
		}
		if a.ours {
			// The attack: a program on this machine, or mail that a relay in front has
			// not checked, impersonates an inbox to an agent. Mail of an inbox is signed.
			c.Result, c.Detail = "fail", "it came from this machine under an address of this server, but is not signed by it"
			return c, policyQuarantine
		}
		c.Result, c.Detail = "none", "it came from this machine"
		return c, ""
	}
	r := a.tree.policy()
	if r == nil || r.domain != a.domain && a.tree.err != nil {
		if a.tree.err != nil {
			c.Result, c.Detail = "temperror", "the policy of the domain could not be asked for"
			return c, ""
		}
		c.Result, c.Detail = "none", "the domain has no policy"
		return c, ""
	}
	var proofs []proof
	if from.result == "pass" || from.result == "temperror" {
		proofs = append(proofs, proof{"spf", from.domain, from.result == "pass", r.strictSPF})
	}
	for _, s := range sigs {
		if s.result == "pass" || s.result == "temperror" {
			proofs = append(proofs, proof{"dkim", s.domain, s.result == "pass", r.strictDK})
		}
	}
	unsure := false
	for _, p := range proofs {
		ok, err := aligned(ctx, ask, a, p)
		if ok && p.passed {
			c.Result, c.Detail = "pass", "by "+p.by+" of "+p.domain
			return c, ""
		}
		unsure = unsure || ok || err != nil
	}
	if unsure {
		c.Result, c.Detail = "temperror", "what would prove it could not be asked for"
		return c, ""
	}
	policy = r.asks(a)
	c.Result, c.Detail = "fail", "neither SPF nor DKIM proves the domain, which asks for: "+policy
	return c, policy
}

// A proof is a domain that SPF or DKIM has authenticated, or might have without a
// failed lookup.
type proof struct {
	by, domain string // by is "spf" or "dkim"
	passed     bool   // false if a lookup failed
	strict     bool   // alignment needs exactly the author's domain
}

// aligned reports whether p authenticates the author's domain, section 4.4.
func aligned(ctx context.Context, ask *asker, a author, p proof) (bool, error) {
	switch {
	case p.domain == a.domain:
		return true, nil
	case p.strict, p.domain == "", top(p.domain) != top(a.domain):
		return false, nil
	}
	if a.tree.err != nil {
		return false, a.tree.err
	}
	// The attack: a forger sends with a valid proof of their own domain, and their DNS
	// servers fail when its organization is looked up. The result would be temperror,
	// and the policy of the forged author would not be applied. So domains outside the
	// author's organization are ruled out without a lookup.
	org := a.tree.organization()
	if p.domain != org && !strings.HasSuffix(p.domain, "."+org) {
		return false, nil
	}
	t := walk(ctx, ask, p.domain)
	if errors.Is(t.err, errManyLookups) {
		return false, nil
	}
	if t.err != nil {
		return false, t.err
	}
	return t.organization() == org, nil
}

// top returns the top-level domain. Domains with different ones never belong to the same
// organization.
func top(domain string) string { return domain[strings.LastIndexByte(domain, '.')+1:] }
