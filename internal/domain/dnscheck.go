package domain

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"blitiri.com.ar/go/spf"
	"golang.org/x/net/publicsuffix"

	"postern/internal/mail"
)

// The bounds on what a hostile DNS can make a check cost.
const (
	checkTimeout = 25 * time.Second // for all records of a domain
	queryTimeout = 5 * time.Second  // for one question
	maxRead      = 50               // records of one answer that are looked at
	maxShown     = 4                // that are shown
	maxLength    = 300              // octets of each that are shown
	maxHosts     = 4                // mail servers whose addresses are asked for
)

// checkDNS looks up each record of d and returns them with the results. It
// changes nothing.
func (g *Registry) checkDNS(ctx context.Context, d Domain) ([]Record, error) {
	rs, err := g.expected(ctx, d)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	for i := range rs {
		switch r := &rs[i]; r.Kind {
		case Ownership:
			g.checkOwnership(ctx, r, d)
		case MX:
			g.checkMX(ctx, r)
		case SPF:
			g.checkSPF(ctx, r)
		case DKIM:
			g.checkDKIM(ctx, r)
		case DMARC:
			g.checkDMARC(ctx, r, d)
		case MTASTS:
			g.checkTagged(ctx, r, "v=STSv1")
		case TLSRPT:
			g.checkTagged(ctx, r, "v=TLSRPTv1")
		}
	}
	return rs, nil
}

func (r *Record) setResult(result Result, format string, args ...any) {
	r.Result, r.Detail = result, fmt.Sprintf(format, args...)
}

// setFound sets the values that the DNS has, made printable and bounded in number
// and length: they are hostile.
func (r *Record) setFound(values []string) {
	for i, v := range values {
		if i == maxShown {
			r.Found = append(r.Found, fmt.Sprintf("… and %d more", len(values)-maxShown))
			return
		}
		r.Found = append(r.Found, mail.Printable(strings.ReplaceAll(v, "\t", " "), maxLength))
	}
}

// txt returns the TXT records at name. A name without any is not an error.
func (g *Registry) txt(ctx context.Context, name string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	values, err := g.cfg.Resolver.LookupTXT(ctx, name+".")
	if notFound(err) {
		return nil, nil
	}
	return values[:min(len(values), maxRead)], err
}

// notFound reports whether err says that the name has no such record.
func notFound(err error) bool {
	de, ok := errors.AsType[*net.DNSError](err)
	return ok && de.IsNotFound
}

// setUnreachable sets the result of r for an error of the resolver, and reports
// whether there was one.
func (r *Record) setUnreachable(name string, err error) bool {
	if err == nil {
		return false
	}
	why := "its answer was malformed"
	if de, ok := errors.AsType[*net.DNSError](err); ok && de.IsTimeout || errors.Is(err, context.DeadlineExceeded) {
		why = "it did not answer in time"
	} else if ok && de.IsTemporary {
		why = "its server failed"
	}
	r.setResult(Unreachable, "The DNS lookup of %s failed: %s. The record itself may be right; it will be checked again.", name, why)
	return true
}

// checkOwnership looks for the proof among the TXT records of the name. If it is
// missing it also looks where people put it by mistake.
func (g *Registry) checkOwnership(ctx context.Context, r *Record, d Domain) {
	values, err := g.txt(ctx, r.Name)
	if r.setUnreachable(r.Name, err) {
		return
	}
	if slices.ContainsFunc(values, func(v string) bool { return strings.TrimSpace(v) == d.Token }) {
		r.setResult(OK, "The proof was found.")
		return
	}
	r.setFound(values)
	if len(values) > 0 {
		r.setResult(Wrong, "There is a TXT record at %s, but none with the expected value. Publish the value exactly as shown; other records may stay.", r.Name)
		return
	}
	r.setResult(Missing, "There is no TXT record at %s.", r.Name)
	// A common mistake: the whole name entered at a provider that appends the domain.
	if values, err := g.txt(ctx, r.Name+"."+d.Name); err == nil && slices.Contains(values, d.Token) {
		r.Detail = fmt.Sprintf("The record is at %s.%s, because your DNS provider appends the domain. Enter only _postern as the name.", r.Name, d.Name)
	}
	if values, err := g.txt(ctx, d.Name); err == nil && slices.Contains(values, d.Token) {
		r.Detail = fmt.Sprintf("The record is at %s; move it to %s.", d.Name, r.Name)
	}
}

// checkMX checks that mail arrives here. A host counts as this server by its name
// or, for the first few, if all its addresses are this server's.
func (g *Registry) checkMX(ctx context.Context, r *Record) {
	actx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	mxs, err := g.cfg.Resolver.LookupMX(actx, r.Name+".")
	if notFound(err) || err == nil && len(mxs) == 0 {
		r.setResult(Missing, "%s has no MX record, so no mail for it arrives here.", r.Name)
		return
	}
	if len(mxs) == 0 && r.setUnreachable(r.Name, err) { // the resolver drops malformed names, and returns an error beside the others
		return
	}
	mxs = mxs[:min(len(mxs), maxRead)]
	slices.SortStableFunc(mxs, func(a, b *net.MX) int { return int(a.Pref) - int(b.Pref) })
	var all []string
	ours := -1
	for i, m := range mxs {
		host := strings.ToLower(strings.TrimSuffix(m.Host, "."))
		all = append(all, fmt.Sprintf("%d %s", m.Pref, host))
		if ours < 0 && (host == g.cfg.Host || i < maxHosts && g.isHere(ctx, host)) {
			ours = i
		}
	}
	r.setFound(all)
	switch {
	case len(mxs) == 1 && strings.Trim(mxs[0].Host, ".") == "":
		r.setResult(Wrong, "%s has a null MX record (RFC 7505): it declares that it accepts no mail. Replace it.", r.Name)
	case ours < 0:
		r.setResult(Wrong, "Mail for %s goes to other servers. Publish %s with priority %d and remove the others.", r.Name, g.cfg.Host, mxPriority)
	case mxs[ours].Pref > mxs[0].Pref:
		r.setResult(Warning, "Mail goes to %s first, and here only when that server cannot be reached.", mail.Printable(strings.TrimSuffix(mxs[0].Host, "."), maxLength))
	case len(mxs) > 1:
		r.setResult(OK, "Mail arrives here; when this server cannot be reached it goes to the others.")
	default:
		r.setResult(OK, "Mail arrives here.")
	}
}

// isHere reports whether all addresses of host belong to this server.
func (g *Registry) isHere(ctx context.Context, host string) bool {
	if len(g.cfg.Addrs) == 0 || host == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	addrs, err := g.cfg.Resolver.LookupNetIP(ctx, "ip", host+".")
	return err == nil && len(addrs) > 0 && !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !slices.Contains(g.cfg.Addrs, a.Unmap()) })
}

// checkSPF looks for one SPF record. Other TXT records at the name are ignored.
func (g *Registry) checkSPF(ctx context.Context, r *Record) {
	values, err := g.txt(ctx, r.Name)
	if r.setUnreachable(r.Name, err) {
		return
	}
	// Other TXT records at the name may be private; do not show them.
	values = slices.DeleteFunc(values, func(v string) bool {
		v = strings.ToLower(v)
		return v != "v=spf1" && !strings.HasPrefix(v, "v=spf1 ")
	})
	r.setFound(values)
	switch {
	case len(values) == 0:
		r.setResult(Missing, "%s has no SPF record.", r.Name)
	case len(values) > 1:
		r.setResult(Wrong, "%s has %d SPF records, which receivers treat as an error (RFC 7208 section 4.5). Merge them into one.", r.Name, len(values))
	default:
		g.judgeSPF(ctx, r, strings.Fields(strings.ToLower(values[0]))[1:])
	}
}

// judgeSPF checks that the record lets this server send: by the configured terms,
// or by evaluation for its addresses, which finds includes of the owner as well.
func (g *Registry) judgeSPF(ctx context.Context, r *Record, terms []string) {
	all := slices.IndexFunc(terms, func(t string) bool { return strings.TrimLeft(t, "+-~?") == "all" })
	if all >= 0 && (terms[all] == "all" || terms[all] == "+all") {
		r.setResult(Wrong, "The SPF record ends in %s, which lets anybody send for the domain. End it in ~all or -all.", terms[all])
		return
	}
	reached := terms
	if all >= 0 {
		reached = terms[:all] // receivers ignore what follows
	}
	missing := ""
	for want := range strings.FieldsSeq(strings.ToLower(g.cfg.SPF)) {
		if !slices.ContainsFunc(reached, func(t string) bool { return strings.TrimPrefix(t, "+") == want }) {
			missing = want
			break
		}
	}
	switch {
	case missing == "":
		r.setResult(OK, "The record lets this server send.")
	case g.passesSPF(ctx, r.Name):
		r.setResult(OK, "The record lets this server’s address send.")
	default:
		r.setResult(Wrong, "The SPF record does not let this server send: add %q before its final term.", missing)
	}
}

// passesSPF reports whether SPF passes for every address of this server, evaluated
// as receivers do it. The library bounds the number of lookups.
func (g *Registry) passesSPF(ctx context.Context, name string) bool {
	for _, a := range g.cfg.Addrs {
		res, err := spf.CheckHostWithSender(net.IP(a.AsSlice()), g.cfg.Host, "postmaster@"+name, spf.WithContext(ctx), spf.WithResolver(absoluteNames{g.cfg.Resolver}))
		if err != nil && res != spf.Pass || res != spf.Pass {
			return false
		}
	}
	return len(g.cfg.Addrs) > 0
}

// absoluteNames makes names absolute. Without the final dot the resolver would
// also try them below the search domains of this machine.
type absoluteNames struct{ Resolver }

func absolute(name string) string { return strings.TrimSuffix(name, ".") + "." }

// LookupTXT implements [spf.DNSResolver].
func (d absoluteNames) LookupTXT(ctx context.Context, name string) ([]string, error) {
	return d.Resolver.LookupTXT(ctx, absolute(name))
}

// LookupMX implements [spf.DNSResolver].
func (d absoluteNames) LookupMX(ctx context.Context, name string) ([]*net.MX, error) {
	return d.Resolver.LookupMX(ctx, absolute(name))
}

// LookupIPAddr implements [spf.DNSResolver].
func (d absoluteNames) LookupIPAddr(ctx context.Context, host string) ([]net.IPAddr, error) {
	return d.Resolver.LookupIPAddr(ctx, absolute(host))
}

// checkDKIM compares the published key with the one that signs. The order of the
// cases is that of the likely mistakes.
func (g *Registry) checkDKIM(ctx context.Context, r *Record) {
	values, err := g.txt(ctx, r.Name)
	if r.setUnreachable(r.Name, err) {
		return
	}
	r.setFound(values)
	want := tags(r.Value)
	switch {
	case len(values) == 0:
		r.setResult(Missing, "There is no TXT record at %s, so receivers cannot verify signatures.", r.Name)
	case len(values) > 1:
		r.setResult(Wrong, "There are %d TXT records at %s, and receivers may use any of them. Keep only the one shown.", len(values), r.Name)
	case tags(values[0])["p"] == "":
		r.setResult(Wrong, "The record at %s has no key: p= is missing, or empty, which means revoked.", r.Name)
	case tags(values[0])["p"] != want["p"]:
		r.setResult(Wrong, "The key at %s is not the one that signs. It may have been cut off: publish all of it, and if your provider limits strings to 255 characters, split it into several quoted strings.", r.Name)
	case firstNonEmpty(tags(values[0])["k"], "rsa") != firstNonEmpty(want["k"], "rsa"):
		r.setResult(Wrong, "The record at %s has k=%s, but the key is k=%s.", r.Name, mail.Printable(tags(values[0])["k"], 20), firstNonEmpty(want["k"], "rsa"))
	default:
		r.setResult(OK, "The key is published.")
		if slices.Contains(strings.Split(tags(values[0])["t"], ":"), "y") {
			r.setResult(Warning, "The key is published with the test flag (t=y), so receivers may ignore its signatures.")
		}
	}
}

func firstNonEmpty(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// tags parses a tag list (RFC 6376 section 3.2) and removes white space. Of a
// tag that occurs twice the first one counts.
func tags(s string) map[string]string {
	out := map[string]string{}
	for part := range strings.SplitSeq(s, ";") {
		name, value, _ := strings.Cut(part, "=")
		name = strings.ToLower(strings.TrimSpace(name))
		if _, twice := out[name]; !twice && name != "" {
			out[name] = strings.Join(strings.Fields(value), "")
		}
	}
	return out
}

// dmarc returns the DMARC records at name.
func (g *Registry) dmarc(ctx context.Context, name string) ([]string, error) {
	values, err := g.txt(ctx, "_dmarc."+name)
	return slices.DeleteFunc(values, func(v string) bool {
		first, _, _ := strings.Cut(v, ";")
		return strings.Join(strings.Fields(first), "") != "v=DMARC1"
	}), err
}

// checkDMARC looks for the DMARC record that applies to the domain, which may be
// that of a parent.
func (g *Registry) checkDMARC(ctx context.Context, r *Record, d Domain) {
	suffix, _ := publicsuffix.PublicSuffix(d.Name)
	// The tree walk of RFC 9989 section 4.10, no further than the public suffix.
	for name, n := d.Name, 0; name != suffix && n < 8; n++ {
		values, err := g.dmarc(ctx, name)
		if r.setUnreachable("_dmarc."+name, err) {
			return
		}
		if len(values) > 0 {
			r.setFound(values)
			judgeDMARC(r, name, d.Name, values)
			return
		}
		_, parent, ok := strings.Cut(name, ".")
		if !ok {
			break
		}
		name = parent
	}
	r.setResult(Missing, "There is no DMARC record at %s: anybody can forge mail from the domain, and large receivers distrust domains without one.", r.Name)
}

// judgeDMARC checks the policy for name of the record that was found at the domain
// at: of a parent's record that is sp=, if there is one.
func judgeDMARC(r *Record, at, name string, values []string) {
	if len(values) > 1 {
		r.setResult(Wrong, "There are %d DMARC records at _dmarc.%s, and receivers then ignore all of them. Keep one.", len(values), at)
		return
	}
	t := tags(values[0])
	p := strings.ToLower(t["p"])
	where := "The record"
	if at != name {
		where = "The record of " + at
		p = strings.ToLower(firstNonEmpty(t["sp"], p))
	}
	switch p {
	case "quarantine", "reject":
		r.setResult(OK, "%s asks for %s.", where, p)
	case "none":
		r.setResult(Warning, "%s has the policy none, which asks receivers for nothing. Change it to quarantine or reject once your mail passes.", where)
	case "":
		r.setResult(Warning, "%s has no policy, which receivers treat as none.", where)
	default:
		r.setResult(Wrong, "%s has an unknown policy: want none, quarantine or reject.", where)
	}
}

// checkTagged checks an optional record: only its number and its version.
func (g *Registry) checkTagged(ctx context.Context, r *Record, version string) {
	values, err := g.txt(ctx, r.Name)
	if r.setUnreachable(r.Name, err) {
		return
	}
	values = slices.DeleteFunc(values, func(v string) bool {
		first, _, _ := strings.Cut(v, ";")
		return strings.TrimSpace(first) != version
	})
	r.setFound(values)
	switch len(values) {
	case 0:
		r.setResult(Missing, "Not found; it is optional.")
	case 1:
		r.setResult(OK, "The record was found.")
	default:
		r.setResult(Wrong, "There are %d such records at %s, and others then ignore all of them. Keep one.", len(values), r.Name)
	}
}
