package mcpserver

import (
	"context"
	"fmt"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/domain"
	"postern/internal/scan"
)

func domainTools() []*tool {
	const name = `"domain": {"type": "string", "maxLength": 253, "description": "The name of the domain, \"agents.example.com\"."}`
	return []*tool{
		offer(Domains, mcp.Tool{
			Name: "domain_add", Title: "Add a domain to send from", InputSchema: object("domain", name), Annotations: saves(),
			Description: "Claim a domain for the project's inboxes and list the DNS records that its owner must publish. It can be used once the proof is found in the DNS. It needs a project's key.",
		}, guide{
			Usage:    "Claims a domain and answers with the DNS records to publish: type, name, value, and how much the domain depends on each (required, wanted, optional). Arguments: domain (required).",
			Examples: []string{`{"domain": "agents.example.com"}`},
			Mistakes: []string{
				"Expecting the domain to work at once: its owner must publish the records first.",
				"Calling it with an inbox's key: only a project's key, or a person in the console, manages domains.",
			},
		}, (*Server).addDomain),
		offer(Domains, mcp.Tool{
			Name: "domain_status", Title: "How a domain is", Annotations: &mcp.ToolAnnotations{ReadOnlyHint: true, IdempotentHint: true, DestructiveHint: no(), OpenWorldHint: no()},
			InputSchema: object("", name, `"check": {"type": "boolean", "default": false, "description": "Ask the DNS now instead of reporting the last check. At most once in some seconds."}`),
			Description: "Report the state of one of the project's domains with its DNS records and what the last check found, or list all domains. It needs a project's key.",
		}, guide{
			Usage:    "With domain: its state (pending, verified, degraded, lost), its records, and what the last check found for each. Without: all domains of the project. Arguments: domain, check (default false).",
			Examples: []string{`{"domain": "agents.example.com"}`, `{"domain": "agents.example.com", "check": true}`, `{}`},
			Mistakes: []string{"Checking every second: DNS changes need minutes or hours. The server checks by itself, too."},
		}, (*Server).domainStatus),
	}
}

type addDomainArgs struct {
	Domain string `json:"domain"`
}

type domainArgs struct {
	Domain string `json:"domain"`
	Check  bool   `json:"check"`
}

type domainData struct {
	Notice    string       `json:"notice,omitempty" jsonschema:"what the marks around untrusted mean"`
	Domain    string       `json:"domain"`
	State     domain.State `json:"state" jsonschema:"pending, verified, degraded or lost"`
	Meaning   string       `json:"meaning"`
	MaySend   bool         `json:"maySend" jsonschema:"whether inboxes in it can be made and can send"`
	CheckedAt string       `json:"checkedAt,omitempty"`
	NextAt    string       `json:"nextCheckAt,omitempty"`
	Records   []dnsData    `json:"records"`
}

type dnsData struct {
	Kind     string `json:"kind" jsonschema:"ownership, mx, spf, dkim, dmarc, mta_sts or tls_rpt"`
	Type     string `json:"type" jsonschema:"TXT or MX"`
	Name     string `json:"name"`
	Value    string `json:"value"`
	Priority int    `json:"priority,omitempty" jsonschema:"of an MX record"`
	Need     string `json:"need" jsonschema:"required, wanted or optional"`
	Why      string `json:"why"`
	Result   string `json:"result" jsonschema:"of the last check: unchecked, ok, warning, missing, wrong or unreachable"`
	// Untrusted is nil where the last check found nothing to tell.
	Untrusted *scan.Enclosed[dnsWords] `json:"untrusted,omitempty" jsonschema:"what DNS servers answered, between the marks of a fence"`
}

// dnsWords is what the DNS has, and what is wrong with it.
type dnsWords struct {
	Found  []string `json:"found,omitempty"`
	Detail string   `json:"detail,omitempty"`
}

var errNoDomains = fmt.Errorf("%w: this server does not offer domains for projects", errArgument)

func (s *Server) addDomain(ctx context.Context, c caller, in addDomainArgs) (out reply[domainData], err error) {
	if s.conf.Domains == nil {
		return out, errNoDomains
	}
	if in.Domain == "" {
		return out, fmt.Errorf("%w: domain: is required", errArgument)
	}
	d, err := s.conf.Domains.Add(ctx, c.who, in.Domain)
	if err != nil {
		return out, err
	}
	return s.domain(ctx, d)
}

type domainsData struct {
	Domains []domainData `json:"domains"`
}

func (s *Server) domainStatus(ctx context.Context, c caller, in domainArgs) (out reply[domainsData], err error) {
	if s.conf.Domains == nil {
		return out, errNoDomains
	}
	if in.Domain == "" {
		return s.allDomains(ctx, c)
	}
	d, err := s.conf.Domains.Find(ctx, c.who, in.Domain)
	if err != nil {
		return out, err
	}
	if in.Check {
		if d, err = s.conf.Domains.Check(ctx, c.who, d.ID); err != nil {
			return out, err
		}
	}
	one, err := s.domain(ctx, d)
	if err != nil {
		return out, err
	}
	return reply[domainsData]{Text: one.Text, Data: domainsData{[]domainData{one.Data}}}, nil
}

func (s *Server) allDomains(ctx context.Context, c caller) (out reply[domainsData], err error) {
	ds, err := s.conf.Domains.Domains(ctx, c.who)
	if err != nil {
		return out, err
	}
	out.Data.Domains = []domainData{}
	lines := []string{fmt.Sprintf("%d domains.", len(ds))}
	for _, d := range ds { // a project has few
		one := domainOf(d)
		out.Data.Domains = append(out.Data.Domains, one)
		lines = append(lines, fmt.Sprintf("- %s: %s, %s", one.Domain, one.State, one.Meaning))
	}
	if len(ds) == 0 {
		lines = append(lines, "domain_add adds one.")
	}
	out.Text = strings.Join(lines, "\n")
	return out, nil
}

// domainMeaning says what each state means for who uses the domain.
var domainMeaning = map[domain.State]string{
	domain.StatePending:  "its proof is not found in the DNS yet; nothing can use it",
	domain.StateVerified: "it is the project's; inboxes in it receive and send",
	domain.StateDegraded: "it is the project's, and records by which receivers judge its mail are missing or wrong",
	domain.StateLost:     "its proof is gone; it receives for a time and does not send",
}

func domainOf(d domain.Domain) domainData {
	return domainData{Domain: d.Name, State: d.State, Meaning: domainMeaning[d.State], MaySend: d.Sends(), CheckedAt: stamp(d.Checked), NextAt: stamp(d.Next), Records: []dnsData{}}
}

// domain answers with one domain and its records.
func (s *Server) domain(ctx context.Context, d domain.Domain) (out reply[domainData], err error) {
	rs, err := s.conf.Domains.Records(ctx, d)
	if err != nil {
		return out, err
	}
	f := scan.NewFence()
	out.Data = domainOf(d)
	var b, found strings.Builder
	fmt.Fprintf(&b, "%s is %s: %s.\nRecords for the owner of the domain to publish:\n", out.Data.Domain, out.Data.State, out.Data.Meaning)
	for _, r := range rs {
		one := dnsData{Kind: string(r.Kind), Type: r.Type, Name: r.Name, Value: r.Value, Priority: r.Priority, Need: string(r.Need), Why: r.Why, Result: string(r.Result)}
		value := r.Value
		if r.Priority > 0 {
			value = fmt.Sprintf("%d %s", r.Priority, r.Value)
		}
		fmt.Fprintf(&b, "- %s (%s, %s): %s %s %s\n", r.Kind, r.Need, r.Result, r.Name, r.Type, value)
		if len(r.Found) > 0 || r.Detail != "" {
			// The attack: the owner of a DNS name writes instructions to the agent.
			e := scan.Enclose(f, dnsWords{cleanAll(r.Found), clean(r.Detail)})
			one.Untrusted, out.Data.Notice = &e, f.Notice()
			fmt.Fprintf(&found, "%s %s: %s (found: %s)\n", r.Name, r.Type, e.Content.Detail, strings.Join(e.Content.Found, ", "))
		}
		out.Data.Records = append(out.Data.Records, one)
	}
	if found.Len() > 0 {
		b.WriteString(f.Notice() + "\n" + f.Wrap(found.String()) + "\n")
	}
	if d.State != domain.StateVerified {
		b.WriteString("Next: publish what is missing, then ask domain_status with check: true.")
	}
	out.Text = b.String()
	return out, nil
}
