package domain

import (
	"context"
	"strings"
)

// Kind is what a record is for.
type Kind string

// The kinds of records.
const (
	Ownership Kind = "ownership" // proves the name
	MX        Kind = "mx"        // brings mail here
	SPF       Kind = "spf"       // lets this server send (RFC 7208)
	DKIM      Kind = "dkim"      // the keys that sign what is sent (RFC 6376)
	DMARC     Kind = "dmarc"     // what receivers do with forged mail (RFC 9989)
	MTASTS    Kind = "mta_sts"   // other servers deliver over TLS only (RFC 8461)
	TLSRPT    Kind = "tls_rpt"   // where they report TLS failures (RFC 8460)
)

// Need says how much a domain depends on a record.
type Need string

// The needs.
const (
	Required Need = "required" // without it the domain is not the project's
	Wanted   Need = "wanted"   // without it the domain is degraded
	Optional Need = "optional"
)

// Result is the outcome of a check of a record.
type Result string

// The results.
const (
	Unchecked   Result = "unchecked"
	OK          Result = "ok"
	Warning     Result = "warning"     // it works; the detail says what to improve
	Missing     Result = "missing"     // there is no such record
	Wrong       Result = "wrong"       // there is one, and it does not work
	Unreachable Result = "unreachable" // the lookup failed: nothing is known
)

// A Record is a DNS record that a domain's owner publishes, with the result of
// the last check.
type Record struct {
	Kind     Kind   `json:"kind"`
	Type     string `json:"type"` // TXT or MX
	Name     string `json:"name"` // absolute, without the final dot
	Value    string `json:"value"`
	Priority int    `json:"priority,omitempty"` // of an MX record
	Need     Need   `json:"need"`
	Why      string `json:"why"` // its purpose, a sentence for people

	Result Result   `json:"result"`
	Found  []string `json:"found,omitempty"`  // values in the DNS, printable, at most maxShown
	Detail string   `json:"detail,omitempty"` // a sentence for people: what is wrong and what to do
}

func (r *Record) good() bool { return r.Result == OK || r.Result == Warning }

// mxPriority is the proposed priority. Any other works as well.
const mxPriority = 10

// expected returns the records of a domain, unchecked.
func (g *Registry) expected(ctx context.Context, d Domain) ([]Record, error) {
	rs := []Record{
		{
			Kind: Ownership, Type: "TXT", Name: "_postern." + d.Name, Value: d.Token, Need: Required,
			Why: "proves that the domain is yours; keep it, since the domain is lost some time after it is gone",
		},
		{Kind: MX, Type: "MX", Name: d.Name, Value: g.cfg.Host, Priority: mxPriority, Need: Wanted, Why: "brings mail for the domain to this server"},
		{Kind: SPF, Type: "TXT", Name: d.Name, Value: "v=spf1 " + g.cfg.SPF + " ~all", Need: Wanted, Why: "lets this server send for the domain"},
	}
	if g.cfg.Keys != nil {
		keys, err := g.cfg.Keys(ctx, d.Project, d.Name)
		if err != nil {
			return nil, err
		}
		for _, k := range keys {
			rs = append(rs, Record{
				Kind: DKIM, Type: "TXT", Name: k.Selector + "._domainkey." + d.Name, Value: k.Value, Need: Wanted,
				Why: "publishes the key that signs mail from the domain",
			})
		}
	}
	rs = append(rs, Record{
		Kind: DMARC, Type: "TXT", Name: "_dmarc." + d.Name, Value: "v=DMARC1; p=quarantine", Need: Wanted,
		Why: "tells receivers what to do with forged mail from the domain",
	}, Record{
		Kind: MTASTS, Type: "TXT", Name: "_mta-sts." + d.Name, Value: "v=STSv1; id=1", Need: Optional,
		Why: "makes other servers deliver to the domain over TLS only; first serve the policy at https://mta-sts." + d.Name + "/.well-known/mta-sts.txt",
	}, Record{
		Kind: TLSRPT, Type: "TXT", Name: "_smtp._tls." + d.Name, Value: "v=TLSRPTv1; rua=mailto:postmaster@" + d.Name, Need: Optional,
		Why: "is where other servers report TLS failures; use an address that somebody reads",
	})
	for i := range rs {
		rs[i].Result = Unchecked
	}
	return rs, nil
}

// Records returns the records that the owner of d publishes. Each has the result
// of the last check, if that checked the same value.
func (g *Registry) Records(ctx context.Context, d Domain) ([]Record, error) {
	rs, err := g.expected(ctx, d)
	if err != nil {
		return nil, err
	}
	for i, r := range rs {
		for _, c := range d.checks {
			if c.Kind == r.Kind && c.Name == r.Name && c.Value == r.Value {
				rs[i].Result, rs[i].Found, rs[i].Detail = c.Result, c.Found, c.Detail
			}
		}
	}
	return rs, nil
}

// Problem returns, for a person, what the last check found wrong with d, or the
// empty string.
func (d Domain) Problem() string {
	var bad []string
	for _, r := range d.checks {
		if r.Need != Optional && !r.good() && r.Result != Unchecked {
			bad = append(bad, strings.ToUpper(string(r.Kind))+": "+r.Detail)
		}
	}
	return strings.Join(bad, " ")
}

// MTASTSPolicy is the text that the owner of a domain serves at
// https://mta-sts.<domain>/.well-known/mta-sts.txt to go with the record
// (RFC 8461 section 3.2).
func (g *Registry) MTASTSPolicy() string {
	return "version: STSv1\r\nmode: testing\r\nmx: " + g.cfg.Host + "\r\nmax_age: 86400\r\n"
}
