// Package lookalike keeps the domains that a project has dealt with, and finds names that
// look like one of them: recipients of mail, and hosts of connections, requests, permits,
// webhooks and entries of allow lists.
//
// A domain is known once a person has approved something that goes there, or once it is on
// an allow list. The package decides nothing: policy says whether a reviewer must tick a
// finding. It must not open the payload of an action.
package lookalike

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/policy"
	"postern/internal/scan"
	"postern/internal/store"
)

// Sealed describes how the rows of known domains are authenticated. The attack: somebody who
// can write the database makes a lookalike a known domain.
func Sealed() store.Sealed {
	return store.Sealed{Table: "domain_look", Key: []string{"project_id", "look", "domain"}}
}

const (
	// MaxNames is the number of unknown domains that are compared for one action.
	MaxNames   = 40
	maxTrusted = 20_000 // domains that a process remembers
	maxKeys    = 200    // arguments of one query
)

// trusted remembers which domains are known in the database, so that they cost no query.
// It is safe for concurrent use.
type trusted struct {
	mu sync.Mutex // guards by
	by map[string]bool
}

func (t *trusted) has(project, domain string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.by[project+" "+domain]
}

func (t *trusted) add(project, domain string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.by) >= maxTrusted {
		clear(t.by)
	}
	t.by[project+" "+domain] = true
}

// A Register has the known domains of all projects. It is safe for concurrent use.
type Register struct {
	domain  string // of this server's inboxes
	trusted trusted
}

// New returns the register of a server whose inboxes are at domain, which may be empty.
func New(domain string) *Register {
	return &Register{domain: domain, trusted: trusted{by: map[string]bool{}}}
}

// A Name is a host of an action. Subject is what a reviewer sees for it, such as a
// recipient's address.
type Name struct{ Host, Subject string }

// A Query asks which names look like known ones. Hosts are in ASCII and lower case.
type Query struct {
	Project string
	Names   []Name
	Own     []string          // known domains; everything below them is known too
	Common  func(string) bool // reports whether everybody knows a domain; may be nil
	What    string            // what goes to the names: "mail to"
}

// Find returns findings about names that look like a known domain or contain letters outside
// of ASCII. A name whose own domain is known is a finding only if it contains another known
// domain.
func (r *Register) Find(ctx context.Context, tx *store.Tx, q Query) (out []policy.Finding, err error) {
	names := map[string]Name{} // by host
	var hosts, keys []string
	for _, n := range q.Names {
		name := scan.Registered(n.Host)
		// A name below a known domain may still contain another known domain. The attack: a
		// person approves mail to attacker.example, and the next mail goes to
		// globex.com.attacker.example; or one mail goes to both.
		if _, seen := names[n.Host]; seen || n.Host == "" || Below(n.Host, q.Own) || n.Host == name && r.trusted.has(q.Project, name) {
			continue
		}
		if len(hosts) == MaxNames {
			out = append(out, policy.Finding{ID: policy.FindMore, Kind: policy.FindMore, Title: "It goes to more unknown domains than were compared with known ones: read all of them"})
			break
		}
		names[n.Host] = n
		hosts = append(hosts, n.Host)
		keys = append(keys, scan.Looks(n.Host)...)
	}
	if len(hosts) == 0 {
		return nil, nil
	}
	known, err := r.known(ctx, tx, q.Project, keys)
	if err != nil {
		return nil, err
	}
	for _, host := range hosts {
		name := scan.Registered(host)
		trusted := q.Common != nil && q.Common(name) || r.trusted.has(q.Project, name) ||
			slices.ContainsFunc(known, func(k knownDomain) bool { return k.trusted && k.domain == name })
		if f, ok := q.strange(names[host], known, trusted); ok {
			out = append(out, f)
		}
	}
	return out, nil
}

// Below reports whether a host is one of the domains or below one of them. Empty domains
// match nothing. Host and domains are in ASCII and lower case.
func Below(host string, domains []string) bool {
	return slices.ContainsFunc(domains, func(d string) bool { return d != "" && (host == d || strings.HasSuffix(host, "."+d)) })
}

// strange returns the finding about a name that looks like a known one. trusted says that
// the name's own domain is known; then the name must contain another known domain.
func (q *Query) strange(n Name, known []knownDomain, trusted bool) (policy.Finding, bool) {
	names := slices.Clone(q.Own)
	for _, k := range known {
		if !slices.Contains(names, k.domain) {
			names = append(names, k.domain)
		}
	}
	host := n.Host
	f := policy.Finding{ID: policy.FindLookalike + ":" + host, Kind: policy.FindLookalike, Subject: n.Subject}
	shown := scan.Foreign(host)
	if trusted {
		shown = ""
	}
	for _, name := range names {
		if how := scan.Alike(host, name); how != "" && (!trusted || scan.Contains(host, name)) {
			f.Title = host + " is not " + name + ": " + how
			f.Text = "This project knows " + name + ". Nobody has approved " + q.What + " " + host + " before."
			if trusted {
				f.Text = "This project knows " + name + ", which is another domain than " + scan.Registered(host) + "."
			}
			break
		}
	}
	if shown != "" {
		f.Text = strings.TrimSpace(f.Text + " Programs show " + host + " as " + shown + ".")
		if f.Title == "" {
			f.Title = host + " is shown as " + shown + ", with letters that are not what they seem"
		}
	}
	return f, f.Title != ""
}

// A knownDomain is a domain that a project has dealt with.
type knownDomain struct {
	domain  string
	trusted bool
}

// known returns the domains of a project that have one of the keys.
func (r *Register) known(ctx context.Context, tx *store.Tx, project string, keys []string) (out []knownDomain, err error) {
	slices.Sort(keys)
	for chunk := range slices.Chunk(slices.Compact(keys), maxKeys) {
		args := []any{project}
		for _, k := range chunk {
			args = append(args, k)
		}
		rows, err := tx.Rows(ctx, Sealed(), false, `project_id = $1 and look in (`+store.Places(2, len(chunk))+`)`, args...)
		if err != nil {
			return nil, fmt.Errorf("read known domains: %w", err)
		}
		for _, row := range rows {
			name, _ := row.Values["domain"].(string)
			trust, _ := row.Values["trusted"].(int64)
			// A row whose seal does not hold can cause a warning, but makes no domain known.
			out = append(out, knownDomain{name, row.Holds && trust == 1})
		}
	}
	return out, nil
}

// Note records, as part of tx, that something went to hosts. With trust, their domains are
// known from now on. Without trust, they only serve to find names that look like them.
// Hosts are in ASCII and lower case.
func (r *Register) Note(ctx context.Context, tx *store.Tx, project string, hosts []string, trust bool) error {
	var names []string
	for _, host := range hosts {
		name := scan.Registered(host)
		if name != "" && !slices.Contains(names, name) && len(names) < MaxNames && !r.trusted.has(project, name) && (trust || !r.trusted.has(project, "~"+name)) {
			names = append(names, name)
		}
	}
	slices.Sort(names) // all transactions write the same rows in the same order
	for _, name := range names {
		if err := r.note(ctx, tx, project, name, trust); err != nil {
			return err
		}
	}
	return nil
}

// note writes the rows of a domain.
func (r *Register) note(ctx context.Context, tx *store.Tx, project, name string, trust bool) error {
	keys := scan.Looks(name)
	slices.Sort(keys)
	for _, key := range keys {
		at := store.Time(time.Now())
		mac, err := tx.SealOf(Sealed(), map[string]any{"project_id": project, "look": key, "domain": name, "trusted": store.Flag(trust), "at": at})
		if err != nil {
			return fmt.Errorf("seal known domain: %w", err)
		}
		err = tx.Later(ctx, `insert into domain_look (project_id, look, domain, trusted, at, seal) values ($1, $2, $3, $4, $5, $6)
			on conflict (project_id, look, domain) do update set trusted = excluded.trusted, at = excluded.at, seal = excluded.seal where domain_look.trusted < excluded.trusted`,
			project, key, name, store.Flag(trust), at, mac)
		if err != nil {
			return fmt.Errorf("note domain: %w", err)
		}
	}
	tx.AfterCommit(func() {
		if trust {
			r.trusted.add(project, name)
		} else {
			r.trusted.add(project, "~"+name) // written, but not known
		}
	})
	return nil
}

// Own returns the domains of this server and of a project. It leaves out domains whose proof
// of ownership is gone, since they may belong to somebody else.
func (r *Register) Own(ctx context.Context, tx *store.Tx, project string) ([]string, error) {
	list, err := tx.Strings(ctx, `select name from mail_domain where project_id = $1 and state in ('verified', 'degraded')`, project)
	if err != nil {
		return nil, fmt.Errorf("read domains: %w", err)
	}
	return append(list, r.domain), nil
}

// ascii returns the host of a name, pattern or mail address in ASCII and lower case, without
// "*." and without a trailing dot. It returns "" for an IP address, a prefix of addresses, and
// a name of one label, which nobody can have registered.
func ascii(host string) string {
	host = strings.TrimPrefix(host[strings.LastIndexByte(host, '@')+1:], "*.")
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return ""
	}
	if _, err := netip.ParsePrefix(host); err == nil {
		return ""
	}
	host, _ = policy.Host(host)
	if !strings.Contains(host, ".") {
		return ""
	}
	return host
}
