package mailbox

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/leak"
	"postern/internal/lookalike"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// clues are what a mail has that a reviewer should look at closely, as far as it is
// known without the database.
type clues struct {
	hidden   []string // recipients in no header, as a reviewer is shown them
	accounts []leak.Account
	answered [][]byte // hashes of the Message-IDs that it answers, see [PostOffice.refs]
}

// maxEach is how many findings of one kind are listed one by one. The attack: a hundred
// hidden recipients, so that the reviewer ticks without reading.
const maxEach = 8

// look adds to r what the checks of a message's content found, and returns what the
// database must complete.
func (m *PostOffice) look(r *policy.Request, p mail.Message, env mail.Envelope, found leak.Report) (c clues, err error) {
	if c.hidden, err = env.Hidden(); err != nil {
		return c, fmt.Errorf("read what is proposed: %v", err) //nolint:errorlint // it was parsed before
	}
	c.accounts = found.Accounts
	r.Subject = cmp.Or(r.Subject, leak.Redact(p.Subject))
	for _, w := range moneyWords(p.Subject + "\n" + p.Text) {
		if !slices.Contains(r.Money, w) {
			r.Money = append(r.Money, w)
		}
	}
	if len(found.Accounts) > 0 && !slices.Contains(r.Money, "bank account") {
		r.Money = append(r.Money, "bank account")
	}
	r.Findings = append(r.Findings, secretsFound(found)...)
	r.Findings = append(r.Findings, oddAccounts(found.Accounts)...)
	return c, nil
}

// secretsFound returns one finding for each rule that found a secret.
func secretsFound(found leak.Report) (out []policy.Finding) {
	for _, f := range found.Findings {
		if f.Flag != leak.FlagSecret && f.Flag != leak.FlagPrivateKey {
			continue
		}
		id := policy.FindSecret + ":" + f.Rule + " in " + f.Where
		out = append(out, policy.Finding{ID: id, Kind: policy.FindSecret, Subject: f.Where, Title: "It contains a secret: " + strings.ReplaceAll(f.Rule, "_", " ") + " in " + f.Where, Text: f.String()})
	}
	return bounded(out, "secrets", func(f policy.Finding) string { return f.Text })
}

// bounded returns the findings of one kind. Where they are more than maxEach, the last one
// stands for all the others. The attack: so many harmless ones that the grave one is not
// among them.
func bounded(list []policy.Finding, what string, text func(policy.Finding) string) []policy.Finding {
	if len(list) <= maxEach {
		return list
	}
	rest := list[maxEach-1:]
	f := policy.Finding{Kind: rest[0].Kind, Subject: fmt.Sprintf("%d more %s", len(rest), what)}
	f.ID, f.Title = f.Kind+":"+f.Subject, "There are "+f.Subject
	var texts []string
	for _, r := range rest {
		texts = append(texts, text(r))
	}
	f.Text = strings.Join(texts, "; ")
	return append(slices.Clip(list[:maxEach-1]), f)
}

// account returns an account's number in short: the country and how it ends. It is the
// subject of findings, which are on the record.
func account(number string) string { return number[:2] + "…" + number[len(number)-4:] }

// oddAccounts returns findings about accounts that differ from the others: of two, both
// where none is named more often; of more, those that are named less often than the one
// that is named most. A list in which each is named once, such as of salaries, has none.
func oddAccounts(list []leak.Account) (out []policy.Finding) {
	if len(list) < 2 {
		return nil
	}
	most, least := list[0], list[0]
	for _, a := range list[1:] {
		if a.Count > most.Count {
			most = a
		}
		if a.Count < least.Count {
			least = a
		}
	}
	if most.Count == least.Count && len(list) > 2 {
		return nil
	}
	for _, a := range list {
		if a.Number == most.Number {
			continue
		}
		out = append(out, policy.Finding{
			ID: policy.FindAccount + ":" + account(a.Number), Kind: policy.FindAccount, Subject: account(a.Number),
			Title: "It names a second bank account: " + account(a.Number) + " in " + a.Where + " is not " + account(most.Number) + " in " + most.Where,
			Text:  fmt.Sprintf("%s is named %d times, %s %d times.", grouped(a.Number), a.Count, grouped(most.Number), most.Count),
		})
	}
	return bounded(out, "bank accounts", func(f policy.Finding) string { return f.Text })
}

// grouped returns an IBAN in groups of four, as people read it.
func grouped(number string) string {
	var b strings.Builder
	for i, c := range number {
		if i > 0 && i%4 == 0 {
			b.WriteByte(' ')
		}
		b.WriteRune(c)
	}
	return b.String()
}

// strange completes the findings of r by what the database knows, as part of tx: domains
// that look like known ones, hidden recipients outside, accounts that are new here.
func (m *PostOffice) strange(ctx context.Context, tx *store.Tx, b directory.Inbox, r *policy.Request, c clues) error {
	own, err := m.known.Own(ctx, tx, b.Project)
	if err != nil {
		return err
	}
	hidden, err := m.outside(ctx, tx, b.Project, c.hidden, own)
	if err != nil {
		return err
	}
	r.Findings = append(r.Findings, hiddenOutside(hidden)...)
	var alike []policy.Finding
	if !r.Listed { // else a person has put each of them on the list, letter by letter
		q := lookalike.Query{Project: b.Project, Own: own, Common: func(name string) bool { return slices.Contains(providers, name) }, What: "mail to"}
		for _, address := range r.To {
			q.Names = append(q.Names, lookalike.Name{Host: hostOf(address), Subject: address})
		}
		if alike, err = m.known.Find(ctx, tx, q); err != nil {
			return err
		}
	}
	// Names first: they are read first.
	r.Findings = append(alike, r.Findings...)
	fresh, err := m.newAccounts(ctx, tx, b.ID, r, c.accounts)
	r.Findings = append(r.Findings, fresh...)
	return err
}

// inside reports whether an address is in one of the domains, or below it.
func inside(address string, domains []string) bool { return lookalike.Below(hostOf(address), domains) }

// hostOf returns the domain of an address in ASCII and lower case, or as it is.
func hostOf(address string) string {
	host := address[strings.LastIndexByte(address, '@')+1:]
	if name, err := domain.ASCII(host); err == nil {
		return name
	}
	return strings.ToLower(host)
}

// outside returns the hidden recipients outside of the project: those that are not at its
// own domains, and no inboxes of its own. The attack: on a server of several projects an
// instruction in a mail has the agent send a hidden copy to the attacker's own inbox here.
func (m *PostOffice) outside(ctx context.Context, tx *store.Tx, project string, hidden, own []string) (out []string, err error) {
	for _, a := range hidden {
		if !inside(a, []string{m.cfg.Domain}) {
			if !inside(a, own) {
				out = append(out, a)
			}
			continue
		}
		b, err := m.Directory.Addressee(ctx, tx, strings.ToLower(a))
		if err != nil && !errors.Is(err, directory.ErrNoInbox) {
			return nil, fmt.Errorf("find hidden recipient: %w", err)
		}
		if err != nil || b.Project != project {
			out = append(out, a)
		}
	}
	return out, nil
}

// hiddenOutside returns findings about hidden recipients who are outside.
func hiddenOutside(hidden []string) (out []policy.Finding) {
	for _, a := range hidden {
		out = append(out, policy.Finding{
			ID: policy.FindHidden + ":" + a, Kind: policy.FindHidden, Subject: a, Title: a + " gets it hidden from the other recipients", Text: "The address is in Bcc, and belongs to somebody outside.",
		})
	}
	return bounded(out, "hidden recipients", func(f policy.Finding) string { return f.Subject })
}

// newAccounts sets the accounts of r, and returns findings about those that the inbox's
// earlier mail did not name, where that named any. The attack: an instruction in a mail
// has the agent put another account into an invoice.
func (m *PostOffice) newAccounts(ctx context.Context, tx *store.Tx, inbox string, r *policy.Request, list []leak.Account) (out []policy.Finding, err error) {
	r.Accounts = nil
	if len(list) == 0 {
		return nil, nil
	}
	known, err := tx.Strings(ctx, `select hash from known_account where inbox_id = $1 limit 1000`, inbox)
	if err != nil {
		return nil, fmt.Errorf("read known accounts: %w", err)
	}
	for _, a := range list {
		hash := m.accountHash(inbox, a.Number)
		r.Accounts = append(r.Accounts, hash)
		id := policy.FindAccount + ":" + account(a.Number)
		said := func(f policy.Finding) bool {
			return f.Kind == policy.FindAccount && strings.HasPrefix(f.Text, grouped(a.Number))
		}
		if len(known) == 0 || slices.Contains(known, hash) || slices.ContainsFunc(r.Findings, said) {
			continue
		}
		out = append(out, policy.Finding{
			ID: id, Kind: policy.FindAccount, Subject: account(a.Number), Title: "It names a bank account that no earlier mail of this inbox named: " + account(a.Number) + " in " + a.Where,
			Text: grouped(a.Number),
		})
	}
	return bounded(out, "bank accounts that no earlier mail of this inbox named", func(f policy.Finding) string { return f.Text }), nil
}

// accountHash returns the keyed hash under which an account is known to an inbox. The
// database alone does not tell which accounts an inbox named.
func (m *PostOffice) accountHash(inbox, number string) string {
	return hex.EncodeToString(seal.Hash(m.cfg.Secret, inbox, "postern bank account v1", number)[:16])
}

// learn notes the recipients and accounts of mail that left. Only what a person approved,
// or an allow list has, counts as known. The attack: an inbox that sends without review
// writes to a lookalike once, so that no inbox gets a finding about it.
func (m *PostOffice) learn(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	if a.State != oversight.Done || a.Kind != SendKind || len(a.Request.To) == 0 {
		return nil
	}
	_, person := a.Person()
	hosts := make([]string, len(a.Request.To))
	for i, address := range a.Request.To {
		hosts[i] = hostOf(address)
	}
	if err := m.known.Note(ctx, tx, a.Project, hosts, person || a.Request.Listed); err != nil || !person {
		return err
	}
	for _, hash := range a.Request.Accounts {
		err := tx.Later(ctx, `insert into known_account (inbox_id, hash, at) values ($1, $2, $3) on conflict (inbox_id, hash) do nothing`, a.Inbox, hash, store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("note account: %w", err)
		}
	}
	return nil
}

// ListedDomains returns the domains of all entries of a project's allow lists that are in
// force. Rows that this server did not write are left out.
func ListedDomains(ctx context.Context, tx *store.Tx, project string) (out []string, err error) {
	const most = 10_000
	rows, err := tx.Rows(ctx, SealedAllowed(), false, `inbox_id in (select id from inbox where project_id = $1 and deleted_at = 0) and (expires_at = 0 or expires_at > $2) order by id limit $3`,
		project, store.Time(time.Now()), most)
	if err != nil {
		return nil, fmt.Errorf("read allow lists: %w", err)
	}
	for _, row := range rows {
		if pattern, ok := row.Values["pattern"].(string); ok && row.Holds {
			out = append(out, hostOf(pattern))
		}
	}
	return out, nil
}

// Find implements [oversight.Finder]: without the database, from the payload alone.
func (x sendExecutor) Find(a oversight.Action) ([]policy.Finding, error) {
	if ByRequest(a.Payload) {
		return nil, nil
	}
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return nil, fmt.Errorf("look for findings in action %s: %w", a.ID, err)
	}
	p, err := mail.Parse(env.Raw)
	if err != nil {
		return nil, fmt.Errorf("look for findings in action %s: %w", a.ID, err)
	}
	var r policy.Request
	c, err := x.m.look(&r, p, env, x.m.leaks(p, env.Raw))
	if err != nil {
		return nil, err
	}
	return append(r.Findings, hiddenOutside(c.hidden)...), nil
}

// moneyWords returns the words about money in a text, each once: what an attacker wants
// paid is written with one of them.
func moneyWords(text string) (out []string) {
	const most = 64 << 10
	if len(text) > most {
		text = text[:most]
	}
	text = strings.ToLower(text)
	for _, w := range [...]string{
		"invoice", "payment", "bank transfer", "wire transfer", "iban", "remittance", "refund", "payroll", "salary", "gift card", "purchase order", "bitcoin", "account number",
		"rechnung", "überweisung", "zahlung", "bankverbindung", "kontonummer", "gehalt", "facture", "virement", "factura", "transferencia", "fattura", "bonifico",
	} {
		if len(out) < 3 && strings.Contains(text, w) {
			out = append(out, w)
		}
	}
	return out
}

// unsaid returns the notes that do not repeat a finding: that the domain of a recipient has
// letters outside of ASCII is said once. A note about letters before the @ stays.
func unsaid(notes, to []string, findings []policy.Finding) []string {
	for _, address := range to {
		local, _, _ := strings.Cut(address, "@")
		host := hostOf(address)
		ascii := !strings.ContainsFunc(local, func(r rune) bool { return r > unicode.MaxASCII })
		if ascii && slices.ContainsFunc(findings, func(f policy.Finding) bool { return f.Kind == policy.FindLookalike && hostOf(f.Subject) == host }) {
			notes = slices.DeleteFunc(notes, func(n string) bool { return mail.NotesForeign(n, address) })
		}
	}
	return notes
}
