package mailauth

import (
	"context"
	"errors"
	"net/netip"
	"strings"

	"blitiri.com.ar/go/spf"

	"postern/internal/mail"
)

// An spfResult is the SPF result for one identity: the reverse path or the HELO name.
type spfResult struct {
	result string
	domain string // whose record was evaluated
	detail string
}

// Check returns r as agents see it.
func (r spfResult) Check() mail.Check {
	return mail.Check{Result: r.result, Domain: r.domain, Detail: printable(r.detail, 200)}
}

// spfFrom checks the reverse path, RFC 7208 section 2.4. A bounce has none.
func (v *Verifier) spfFrom(ctx context.Context, ask *asker, m Message) spfResult {
	if m.From == "" {
		return spfResult{result: "none"}
	}
	at := strings.LastIndexByte(m.From, '@')
	domain, ok := domainName(m.From[at+1:])
	if !ok || at < 1 {
		return spfResult{result: "none", detail: "the reverse path has no domain"}
	}
	return v.spf(ctx, ask, m, m.From[:at]+"@"+domain, domain)
}

// spfHelo checks the client's HELO name, RFC 7208 section 2.3.
func (v *Verifier) spfHelo(ctx context.Context, ask *asker, m Message) spfResult {
	domain := heloDomain(m.Helo)
	if domain == "" {
		return spfResult{result: "none", detail: "the host gave no name of its own"}
	}
	return v.spf(ctx, ask, m, "postmaster@"+domain, domain)
}

// heloDomain returns the domain of a HELO that can be checked, or "".
func heloDomain(helo string) string {
	d, ok := domainName(helo)
	if _, err := netip.ParseAddr(d); !ok || err == nil || !strings.Contains(d, ".") {
		return ""
	}
	return d
}

// spf evaluates the record of domain for the client's address. The lookups are
// bounded by [maxSPFLookups], so that one identity cannot use up those that DKIM
// and DMARC need.
func (v *Verifier) spf(ctx context.Context, ask *asker, m Message, sender, domain string) spfResult {
	r := spfResult{domain: domain}
	remote := m.Remote.Unmap().WithZone("")
	switch {
	case !remote.IsValid():
		r.result, r.detail = "none", "the sender's address is not known"
		return r
	case m.local():
		// No SPF record can list this address, so the result would always be fail.
		r.result, r.detail = "none", "it came from this machine"
		return r
	}
	helo := heloDomain(m.Helo)
	if helo == "" {
		helo = "unknown"
	}
	res, err := spf.CheckHostWithSender(remote.AsSlice(), helo, sender,
		spf.WithContext(ctx), spf.WithResolver(&budget{asker: ask, left: maxSPFLookups}))
	r.result = string(res)
	if err != nil {
		r.detail = err.Error()
	}
	// The library reports every unknown error as permanent, even a timeout.
	if res == spf.PermError && (ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded)) {
		r.result = string(spf.TempError)
	}
	return r
}
