package mailbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/directory"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scan"
	"postern/internal/store"
)

// SealedLooks returns the rows of known domains as they are authenticated. The attack:
// somebody who can write the database makes a lookalike a known domain.
func SealedLooks() store.Sealed {
	return store.Sealed{Table: "domain_look", Key: []string{"project_id", "look", "domain"}}
}

const (
	maxStrange = 40     // unknown domains of one mail that are compared
	maxTrusted = 20_000 // domains that a process remembers
)

// trusted remembers which domains are known in the database, so that mail to them costs
// no query. It is safe for concurrent use.
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

// lookalikes returns findings about recipients whose domains are unknown, and look like
// one that the project knows or have letters outside of ASCII.
func (m *PostOffice) lookalikes(ctx context.Context, tx *store.Tx, b directory.Inbox, r *policy.Request, own []string) (out []policy.Finding, err error) {
	if r.Listed { // every one of them was put on the list by a person, letter by letter
		return nil, nil
	}
	unknown := map[string]string{} // by registered domain: the first recipient there
	var hosts, keys []string
	for _, address := range r.To {
		host := hostOf(address)
		name := scan.Registered(host)
		if inside(address, own) || unknown[name] != "" || m.trusted.has(b.Project, name) {
			continue
		}
		if len(hosts) == maxStrange {
			out = append(out, policy.Finding{ID: policy.FindMore, Kind: policy.FindMore, Title: "It goes to more unknown domains than were compared with known ones: read all recipients"})
			break
		}
		unknown[name] = address
		hosts = append(hosts, host)
		keys = append(keys, scan.Looks(host)...)
	}
	if len(hosts) == 0 {
		return nil, nil
	}
	known, err := m.known(ctx, tx, b.Project, keys)
	if err != nil {
		return nil, err
	}
	for _, host := range hosts {
		name := scan.Registered(host)
		if slices.Contains(providers, name) || slices.ContainsFunc(known, func(k knownDomain) bool { return k.trusted && k.domain == name }) {
			continue
		}
		if f, ok := strangeDomain(host, unknown[name], known, own); ok {
			out = append(out, f)
		}
	}
	return out, nil
}

// strangeDomain returns the finding about a domain that looks like a known one.
func strangeDomain(host, address string, known []knownDomain, own []string) (policy.Finding, bool) {
	names := slices.Clone(own)
	for _, k := range known {
		if !slices.Contains(names, k.domain) {
			names = append(names, k.domain)
		}
	}
	f := policy.Finding{ID: policy.FindLookalike + ":" + host, Kind: policy.FindLookalike, Subject: address}
	shown := scan.Foreign(host)
	for _, name := range names {
		if how := scan.Alike(host, name); how != "" {
			f.Title = host + " is not " + name + ": " + how
			f.Text = "This project knows " + name + ". Nobody has approved mail to " + host + " before."
			break
		}
	}
	if shown != "" {
		f.Text = strings.TrimSpace(f.Text + " Mail programs show " + host + " as " + shown + ".")
		if f.Title == "" {
			f.Title = host + " is shown as " + shown + ", with letters that are not what they seem"
		}
	}
	return f, f.Title != ""
}

// A knownDomain is a domain that a project's inboxes have written to.
type knownDomain struct {
	domain  string
	trusted bool
}

// known returns the domains of a project that have one of the keys.
func (m *PostOffice) known(ctx context.Context, tx *store.Tx, project string, keys []string) (out []knownDomain, err error) {
	slices.Sort(keys)
	for chunk := range slices.Chunk(slices.Compact(keys), maxHashes) {
		args := []any{project}
		for _, k := range chunk {
			args = append(args, k)
		}
		rows, err := tx.Rows(ctx, SealedLooks(), false, `project_id = $1 and look in (`+places(2, len(chunk))+`)`, args...)
		if err != nil {
			return nil, fmt.Errorf("read known domains: %w", err)
		}
		for _, row := range rows {
			name, _ := row.Values["domain"].(string)
			trust, _ := row.Values["trusted"].(int64)
			// A row that is not authentic warns, but makes nothing known.
			out = append(out, knownDomain{name, row.Holds && trust == 1})
		}
	}
	return out, nil
}

// learn notes the recipients and accounts of mail that left. Only what a person approved,
// or an allow list has, counts as known. The attack: an inbox that sends by itself
// writes to a lookalike once, so that no inbox is warned of it.
func (m *PostOffice) learn(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	if a.State != oversight.Done || a.Kind != SendKind || len(a.Request.To) == 0 {
		return nil
	}
	_, person := a.Person()
	trust := person || a.Request.Listed
	var names []string
	for _, address := range a.Request.To {
		name := scan.Registered(hostOf(address))
		if !slices.Contains(names, name) && len(names) < maxStrange && !m.trusted.has(a.Project, name) && (trust || !m.trusted.has(a.Project, "~"+name)) {
			names = append(names, name)
		}
	}
	slices.Sort(names) // rows that several turns write are written in one order
	for _, name := range names {
		if err := m.know(ctx, tx, a.Project, name, trust); err != nil {
			return err
		}
	}
	if !person {
		return nil
	}
	for _, hash := range a.Request.Accounts {
		err := tx.Later(ctx, `insert into known_account (inbox_id, hash, at) values ($1, $2, $3) on conflict (inbox_id, hash) do nothing`, a.Inbox, hash, store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("note account: %w", err)
		}
	}
	return nil
}

// know writes the rows of a domain.
func (m *PostOffice) know(ctx context.Context, tx *store.Tx, project, name string, trust bool) error {
	keys := scan.Looks(name)
	slices.Sort(keys)
	for _, key := range keys {
		at := store.Time(time.Now())
		mac, err := tx.SealOf(SealedLooks(), map[string]any{"project_id": project, "look": key, "domain": name, "trusted": store.Flag(trust), "at": at})
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
			m.trusted.add(project, name)
		} else {
			m.trusted.add(project, "~"+name) // written, but not known
		}
	})
	return nil
}
