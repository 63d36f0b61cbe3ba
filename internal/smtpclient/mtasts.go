package smtpclient

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/store"
)

// MTA-STS (RFC 8461): a domain's policy lists its mail servers and requires TLS with
// valid certificates. An attacker who can forge DNS answers or strip STARTTLS cannot
// forge the policy, which is fetched over HTTPS, and cannot remove it, since it is
// kept for its max_age.

type stsMode string

const (
	stsNone    stsMode = "none"
	stsTesting stsMode = "testing"
	stsEnforce stsMode = "enforce"
)

const (
	maxPolicy     = 64 << 10
	maxPolicyMX   = 100
	maxPolicyAge  = 31557600 * time.Second // RFC 8461 3.2: a year
	policyTimeout = 20 * time.Second
	policyRetry   = 5 * time.Minute // wait after a fetch that failed
	maxPolicies   = 10_000          // policies in memory
)

// An stsPolicy is the policy of a domain. The zero policy requires nothing.
type stsPolicy struct {
	ID      string // of the record that announced it
	Mode    stsMode
	MX      []string
	Expires time.Time

	text  string    // as it was fetched
	retry time.Time // no fetch before this, after one that failed
}

// allows reports whether host matches one of the policy's patterns, RFC 8461 4.1.
func (p stsPolicy) allows(host string) bool {
	return slices.ContainsFunc(p.MX, func(pattern string) bool {
		suffix, wild := strings.CutPrefix(pattern, "*.")
		if !wild {
			return strings.EqualFold(pattern, host)
		}
		_, rest, ok := strings.Cut(host, ".") // one label, not more
		return ok && strings.EqualFold(rest, suffix)
	})
}

// parsePolicy parses a policy file, RFC 8461 3.2.
func parsePolicy(text string) (p stsPolicy, err error) {
	if len(text) > maxPolicy {
		return stsPolicy{}, errors.New("the policy is too long")
	}
	seen := map[string]bool{}
	age := int64(-1)
	for line := range strings.SplitSeq(strings.TrimRight(text, "\r\n \t"), "\n") {
		key, value, ok := strings.Cut(strings.TrimSuffix(line, "\r"), ":")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		if !ok {
			return stsPolicy{}, errors.New("a line of the policy is no pair of key and value")
		}
		if key != "mx" && seen[key] {
			continue // RFC 8461 3.2: the first counts
		}
		switch seen[key] = true; key {
		case "version":
			if value != "STSv1" {
				return stsPolicy{}, errors.New("the policy is of another version than STSv1")
			}
		case "mode":
			p.Mode = stsMode(value)
		case "max_age":
			if age, err = strconv.ParseInt(value, 10, 64); err != nil || age < 0 || len(value) > 10 {
				return stsPolicy{}, errors.New("the policy's max_age is not a number of seconds")
			}
		case "mx":
			if len(p.MX) == maxPolicyMX || value == "" || len(value) > 255 {
				return stsPolicy{}, errors.New("the policy names too many servers or one that is none")
			}
			p.MX = append(p.MX, strings.ToLower(strings.TrimSuffix(value, ".")))
		}
	}
	switch {
	case !seen["version"] || age < 0:
		return stsPolicy{}, errors.New("the policy has no version or no max_age")
	case p.Mode != stsNone && p.Mode != stsTesting && p.Mode != stsEnforce:
		return stsPolicy{}, errors.New("the policy has no known mode")
	case p.Mode != stsNone && len(p.MX) == 0:
		return stsPolicy{}, errors.New("the policy names no servers")
	}
	p.Expires = time.Now().Add(min(time.Duration(age)*time.Second, maxPolicyAge))
	p.text = text
	return p, nil
}

var stsRecord = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^v=STSv1\s*;(?:[^;]*;)*?\s*id\s*=\s*([A-Za-z0-9]{1,32})\s*(?:;.*)?$`)
})

// policies fetches and caches the policies of domains. It is safe for concurrent use.
// A nil *policies has none.
type policies struct {
	resolver *net.Resolver
	client   *http.Client
	port     string
	db       *store.DB // nil keeps them in memory alone

	mu   sync.Mutex // guards held
	held map[string]stsPolicy
}

// newPolicies returns the policies with a client that fetches them. mayConnect
// refuses addresses that are not on the public Internet.
func newPolicies(d *Direct, mayConnect func(netip.Addr) error) *policies {
	dialer := &net.Dialer{Timeout: policyTimeout, Resolver: d.Resolver}
	return &policies{
		resolver: d.Resolver, port: d.PolicyPort, db: d.DB, held: map[string]stsPolicy{},
		client: &http.Client{
			Timeout: policyTimeout,
			// RFC 8461 3.3: a redirect is not followed.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Transport: &http.Transport{
				// The resolved address is checked and then dialed itself, so that DNS
				// rebinding does not help.
				DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
					host, port, err := net.SplitHostPort(addr)
					if err != nil {
						return nil, err
					}
					addrs, err := d.Resolver.LookupNetIP(ctx, "ip", host+".")
					if err != nil {
						return nil, err
					}
					err = errors.New("the host has no address")
					for _, a := range addrs[:min(len(addrs), 4)] {
						if err = mayConnect(a.Unmap()); err != nil {
							continue
						}
						var c net.Conn
						if c, err = dialer.DialContext(ctx, network, net.JoinHostPort(a.Unmap().String(), port)); err == nil {
							return c, nil
						}
					}
					return nil, err
				},
				TLSClientConfig:        &tls.Config{RootCAs: d.Roots, MinVersion: tls.VersionTLS12},
				TLSHandshakeTimeout:    10 * time.Second,
				ResponseHeaderTimeout:  10 * time.Second,
				MaxResponseHeaderBytes: 16 << 10,
				DisableKeepAlives:      true,
			},
		},
	}
}

// policy returns the policy for mail to a domain.
func (ps *policies) policy(ctx context.Context, domain string) stsPolicy {
	if ps == nil {
		return stsPolicy{}
	}
	held, ok := ps.get(ctx, domain)
	if ok && time.Now().After(held.Expires) {
		held, ok = stsPolicy{retry: held.retry}, false
	}
	id, err := ps.announced(ctx, domain)
	// RFC 8461 3.1, 5.1: without a record, or if the lookup fails, the cached policy
	// still applies. The attack: forged DNS answers that remove the record.
	if err != nil || id == "" || ok && id == held.ID {
		return held
	}
	if time.Now().Before(held.retry) {
		return held
	}
	fresh, err := ps.fetch(ctx, domain)
	if err != nil {
		held.retry = time.Now().Add(policyRetry)
		ps.hold(domain, held)
		return held
	}
	fresh.ID = id
	ps.hold(domain, fresh)
	ps.keep(ctx, domain, fresh)
	return fresh
}

// announced returns the ID of the policy in DNS, or the empty string.
func (ps *policies) announced(ctx context.Context, domain string) (id string, err error) {
	texts, err := ps.resolver.LookupTXT(ctx, "_mta-sts."+domain+".")
	if err != nil {
		return "", err
	}
	for _, t := range texts {
		if !strings.HasPrefix(t, "v=STSv1") {
			continue
		}
		m := stsRecord().FindStringSubmatch(t)
		if m == nil || id != "" {
			return "", nil // RFC 8461 3.1: several records count as none
		}
		id = m[1]
	}
	return id, nil
}

// fetch fetches the policy of a domain, RFC 8461 section 3.3.
func (ps *policies) fetch(ctx context.Context, domain string) (stsPolicy, error) {
	host := "mta-sts." + domain
	if ps.port != "" {
		host = net.JoinHostPort(host, ps.port)
	}
	ctx, cancel := context.WithTimeout(ctx, policyTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+host+"/.well-known/mta-sts.txt", nil)
	if err != nil {
		return stsPolicy{}, err
	}
	resp, err := ps.client.Do(req)
	if err != nil {
		return stsPolicy{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return stsPolicy{}, fmt.Errorf("the policy's server answered %d", resp.StatusCode)
	}
	if t, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || t != "text/plain" {
		return stsPolicy{}, errors.New("the policy is not text/plain") // RFC 8461 3.2; the attack: a user's upload on that host
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxPolicy+1))
	if err != nil {
		return stsPolicy{}, err
	}
	if bytes.IndexByte(b, 0) >= 0 {
		return stsPolicy{}, errors.New("the policy holds a NUL")
	}
	return parsePolicy(string(b))
}

// get returns the policy of a domain that is held in memory, or kept in the
// database. ok is false if there is none.
func (ps *policies) get(ctx context.Context, domain string) (stsPolicy, bool) {
	ps.mu.Lock()
	p, ok := ps.held[domain]
	ps.mu.Unlock()
	if ok && p.Mode != "" || ps.db == nil {
		return p, ok && p.Mode != ""
	}
	var id, text string
	var expires int64
	err := ps.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select id, policy, expires_at from mta_sts where domain = $1`, []any{domain}, &id, &text, &expires)
	})
	if err != nil { // there is none, or the database failed; DNS decides
		return p, false
	}
	kept, err := parsePolicy(text)
	if err != nil { // unreachable: it was parsed before it was kept
		return p, false
	}
	kept.ID, kept.Expires, kept.retry = id, store.FromTime(expires), p.retry
	ps.hold(domain, kept)
	return kept, true
}

// hold keeps a policy in memory.
func (ps *policies) hold(domain string, p stsPolicy) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if len(ps.held) >= maxPolicies { // policies in the database are loaded again
		clear(ps.held)
	}
	ps.held[domain] = p
}

// keep stores a policy in the database, so that it outlives this process. Errors are
// ignored: the policy is fetched again then.
func (ps *policies) keep(ctx context.Context, domain string, p stsPolicy) {
	if ps.db == nil {
		return
	}
	_ = ps.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into mta_sts (domain, id, policy, expires_at) values ($1, $2, $3, $4)
			on conflict (domain) do update set id = excluded.id, policy = excluded.policy, expires_at = excluded.expires_at`,
			domain, p.ID, p.text, store.Time(p.Expires))
		return err
	})
}
