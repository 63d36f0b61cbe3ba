package console

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"regexp"
	"strings"
	"sync"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/store"
)

// Pages call people, agents, sandboxes and keys by their names. A template writes
// {{template "who" .Proposer}} with a principal such as "agent:crd_…", or with
// "inbox:ibx_…" for the agent of an inbox. While a page is rendered, each becomes a
// mark. [Server.render] then looks all of them up together, with a few queries for the
// page and none for each row, and puts the names in.
//
// The attack: code calls its sandbox "person:ann", "ann", or something that only looks
// like it (other letters, other directions), and a reviewer reads that Ann did
// something. Names of people and addresses of inboxes are ASCII by their own rules. A
// sandbox's name comes from whoever created it, so it is shown only if it is plain ASCII
// and is not similar to a name of a person or agent here; see [plainly]. In addition, each
// name that is not a person's follows its kind, as a symbol and in words.

// A called is the name of a principal, as a page shows it.
type called struct {
	Text   string // the name
	Kind   string // in words; empty for a person
	Symbol string // of the sprite
	ID     string // the principal itself, for those who need it exactly
	Link   string // page about it, or empty
}

// names maps principals to their names; the zero value has none.
type names map[string]called

// of returns the name of p. A principal that was not looked up, or does not exist any more,
// is named by its kind and ID.
func (n names) of(p string) called {
	if c, ok := n[p]; ok {
		return c
	}
	return nameless(p)
}

// nameless returns the name of a principal about which nothing is known.
func nameless(p string) called {
	kind, id, found := strings.Cut(p, ":")
	if !found {
		return called{Text: p, Symbol: "person", ID: p}
	}
	switch kind {
	case "person":
		return called{Text: id, Symbol: "person", ID: p}
	case "system":
		return called{Text: "Postern", Symbol: "gate", ID: p}
	case "sandbox":
		c := called{Text: beginning(id), Kind: "sandbox", Symbol: "box", ID: p}
		if sandboxID().MatchString(id) {
			c.Link = "/console/sandboxes/" + id
		}
		return c
	case "agent", "inbox":
		return called{Text: beginning(id), Kind: "agent", Symbol: "agent", ID: p}
	case "grant":
		return called{Text: beginning(id), Kind: "grant", Symbol: "key", ID: p}
	case "recovery":
		return called{Text: beginning(id), Kind: "recovery key", Symbol: "key", ID: p}
	case "project":
		return called{Text: beginning(id), Kind: "project key", Symbol: "key", ID: p}
	}
	return called{Text: p, Kind: "unknown", Symbol: "key", ID: p}
}

// beginning shortens an ID so that a line of text holds it.
func beginning(id string) string {
	if len(id) > 10 {
		return id[:10] + "…"
	}
	return id
}

// plainName matches names from outside that can be shown. Such a name has no ":", no "@"
// and no letters of other scripts: it cannot be taken for a principal or an address, and
// nothing in it looks like something else.
var plainName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9 ._-]{0,38}[A-Za-z0-9])?$`) })

// skeleton returns the form by which similar names are compared: names with
// the same skeleton look alike.
func skeleton(name string) string {
	return strings.NewReplacer("0", "o", "1", "l", "i", "l", "rn", "m", "vv", "w", " ", "", ".", "", "_", "", "-", "").Replace(strings.ToLower(name))
}

// spoken has skeletons of names that no sandbox is shown with: this server's, and words
// that stand for people in sentences.
var spoken = sync.OnceValue(func() map[string]bool {
	out := map[string]bool{}
	for _, word := range []string{"postern", "system", "policy", "operator", "owner", "reviewer", "admin", "you", "anyone", "nobody", "person"} {
		out[skeleton(word)] = true
	}
	return out
})

// plainly returns the name if it can be shown beside the names in taken, or "".
func plainly(name string, taken map[string]bool) string {
	if s := skeleton(name); !plainName().MatchString(name) || taken[s] || spoken()[s] {
		return ""
	}
	return name
}

// look returns the names of the principals of a project. Principals of other projects
// keep their IDs: a name must not tell one project about another.
func (s *Server) look(ctx context.Context, project string, principals []string) (names, error) {
	out := names{}
	var credentials, inboxes, sandboxes []string
	for _, p := range principals {
		kind, id, _ := strings.Cut(p, ":")
		switch kind {
		case "agent", "grant", "recovery", "project":
			credentials = append(credentials, id)
		case "inbox":
			inboxes = append(inboxes, id)
		case "sandbox":
			sandboxes = append(sandboxes, id)
		}
	}
	if len(credentials)+len(inboxes)+len(sandboxes) == 0 {
		return out, nil
	}
	err := s.db.View(ctx, func(tx *store.Tx) error {
		keys, err := credentialNames(ctx, tx, project, credentials)
		if err != nil {
			return err
		}
		for _, k := range keys {
			if k.inbox != "" {
				inboxes = append(inboxes, k.inbox)
			}
		}
		addresses, err := selectIn(ctx, tx, func(row func(...any) error) (a [2]string, err error) {
			return a, row(&a[0], &a[1])
		}, `select id, address from inbox where project_id = $1 and id in `, project, inboxes)
		if err != nil {
			return fmt.Errorf("name inboxes: %w", err)
		}
		local := map[string]string{}
		for _, a := range addresses {
			local[a[0]] = s.agentName(a[1])
			out["inbox:"+a[0]] = called{local[a[0]], "agent", "agent", "inbox:" + a[0], agentPage(a[0])}
		}
		for _, k := range keys {
			out[k.principal()] = k.called(local[k.inbox])
		}
		return sandboxNames(ctx, tx, project, sandboxes, out)
	})
	if err != nil {
		return names{}, fmt.Errorf("look up names: %w", err)
	}
	return out, nil
}

// agentPage returns the address of the page about the agent of an inbox.
func agentPage(inbox string) string { return "/console/agents/" + inbox }

// agentName returns the name of the agent with an address: its local part if the
// domain is the server's own, where local parts are unique, or the whole address.
func (s *Server) agentName(address string) string {
	if local, at, ok := strings.Cut(address, "@"); ok && at == s.post.Directory.Domain() {
		return local
	}
	return address
}

// selectIn runs a query that ends in "in" for IDs of a project. It splits the IDs, so that
// each query has few enough parameters for both databases.
func selectIn[T any](ctx context.Context, tx *store.Tx, scan func(func(...any) error) (T, error), query, project string, ids []string) (out []T, err error) {
	const most = 500
	for len(ids) > 0 {
		part := ids[:min(len(ids), most)]
		ids = ids[len(part):]
		args := []any{project}
		for _, id := range part {
			args = append(args, id)
		}
		rows, err := store.List(ctx, tx, scan, query+"("+store.Places(2, len(part))+")", args...)
		if err != nil {
			return nil, err
		}
		out = append(out, rows...)
	}
	return out, nil
}

// A credentialName has the columns of a key that its name is made from.
type credentialName struct{ id, kind, name, inbox string }

func credentialNames(ctx context.Context, tx *store.Tx, project string, ids []string) ([]credentialName, error) {
	out, err := selectIn(ctx, tx, func(row func(...any) error) (c credentialName, err error) {
		return c, row(&c.id, &c.kind, &c.name, &c.inbox)
	}, `select id, kind, name, inbox_id from credential where project_id = $1 and id in `, project, ids)
	if err != nil {
		return nil, fmt.Errorf("name keys: %w", err)
	}
	return out, nil
}

func (c *credentialName) principal() string { return c.kind + ":" + c.id }

// called returns the name of the key. An agent has the name of its inbox, whichever key it
// uses: the agent itself chooses the names of further keys.
func (c *credentialName) called(inbox string) called {
	out := nameless(c.principal())
	switch auth.Kind(c.kind) {
	case auth.Agent, auth.Recovery:
		if inbox != "" {
			out.Text, out.Link = inbox, agentPage(c.inbox)
		}
	case auth.Project, auth.Grant:
		if name := plainly(c.name, nil); name != "" {
			out.Text = name
		}
	case auth.Person, auth.Sandbox, auth.System: // have no keys
	}
	return out
}

// sandboxNames adds the names of the sandboxes with these IDs.
func sandboxNames(ctx context.Context, tx *store.Tx, project string, ids []string, out names) error {
	type row struct{ id, asked, template, metadata string }
	rows, err := selectIn(ctx, tx, func(scan func(...any) error) (r row, err error) {
		return r, scan(&r.id, &r.asked, &r.template, &r.metadata)
	}, `select id, asked, template, metadata from sandbox where project_id = $1 and id in `, project, ids)
	if err != nil {
		return fmt.Errorf("name sandboxes: %w", err)
	}
	taken, err := takenNames(ctx, tx, project, len(rows))
	if err != nil {
		return err
	}
	for _, r := range rows {
		var metadata map[string]string
		_ = json.Unmarshal([]byte(r.metadata), &metadata) // without metadata it is named after its template
		c := nameless("sandbox:" + r.id)
		c.Text = sandboxName(r.id, or(r.asked, r.template), metadata, taken)
		out["sandbox:"+r.id] = c
	}
	return nil
}

// takenNames returns the skeletons of the names of people and agents of a project, if
// there is any name to compare with them.
func takenNames(ctx context.Context, tx *store.Tx, project string, named int) (map[string]bool, error) {
	taken := map[string]bool{}
	if named == 0 {
		return taken, nil
	}
	people, err := tx.Strings(ctx, `select name from person where project_id = $1`, project)
	if err != nil {
		return nil, fmt.Errorf("read names of people: %w", err)
	}
	addresses, err := tx.Strings(ctx, `select address from inbox where project_id = $1 and deleted_at = 0`, project)
	if err != nil {
		return nil, fmt.Errorf("read addresses: %w", err)
	}
	for _, name := range people {
		taken[skeleton(name)] = true
	}
	for _, address := range addresses {
		local, _, _ := strings.Cut(address, "@")
		taken[skeleton(local)] = true
	}
	return taken, nil
}

// sandboxName returns the name of a sandbox: the name that its creator gave it, if it
// can be shown, or else its template and the beginning of its ID.
func sandboxName(id, asked string, metadata map[string]string, taken map[string]bool) string {
	for _, key := range []string{"postern.name", "name"} {
		if name := plainly(strings.TrimSpace(metadata[key]), taken); name != "" {
			return name
		}
	}
	start := id[:min(len(id), 6)]
	if from := plainly(asked, taken); from != "" {
		return from + " " + start
	}
	return start
}

// The marks that stand for principals while a page is rendered. Text of agents cannot
// make one: html/template escapes each "<" of it.
const (
	markStart = "<x-who>"
	markEnd   = "</x-who>"
)

// mark returns the mark that stands for p until the names are known.
func mark(p string) template.HTML {
	return template.HTML(markStart + template.HTMLEscapeString(p) + markEnd) //nolint:gosec // escaped
}

// unlinked marks a name that must not be a link, such as in the head of a fold: people who
// do not see the page cannot tell a link from the head, which is pressed itself. No kind of
// principal begins with it.
const unlinked = "!"

// markPlain is mark for a name without a link.
func markPlain(p string) template.HTML { return mark(unlinked + p) }

var marks = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(markStart + `([^<]*)` + markEnd)
})

// unescape is the inverse of [template.HTMLEscapeString].
func unescape(s string) string {
	return strings.NewReplacer("&#34;", `"`, "&#39;", "'", "&lt;", "<", "&gt;", ">", "&amp;", "&").Replace(s)
}

// putNames replaces the marks of a page by names. If they cannot be looked up, the page
// shows IDs: a reviewer must be able to decide all the same.
func (s *Server) putNames(ctx context.Context, project string, html []byte) []byte {
	found := marks().FindAllSubmatch(html, -1)
	if len(found) == 0 {
		return html
	}
	seen := map[string]bool{}
	var principals []string
	for _, m := range found {
		if p := strings.TrimPrefix(unescape(string(m[1])), unlinked); !seen[p] {
			seen[p] = true
			principals = append(principals, p)
		}
	}
	// The page is complete; only a few short queries remain.
	known, err := s.look(ctx, project, principals)
	if err != nil {
		s.log.WarnContext(ctx, "name the principals of a page", "err", err)
	}
	return marks().ReplaceAllFunc(html, func(m []byte) []byte {
		p, plain := strings.CutPrefix(unescape(string(m[len(markStart):len(m)-len(markEnd)])), unlinked)
		name := known.of(p)
		if plain {
			name.Link = ""
		}
		var b bytes.Buffer
		if err := pages()["failure"].ExecuteTemplate(&b, "called", name); err != nil {
			return []byte(template.HTMLEscapeString(mail.Printable(p, 200)))
		}
		return bytes.TrimSpace(b.Bytes())
	})
}
