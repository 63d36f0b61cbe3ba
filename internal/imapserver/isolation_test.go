package imapserver

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/tarpit"
)

// operations is every method of a session, with commands that call it, and the
// scopes that they need. Each new method, also of a newer library, needs a row here.
var operations = map[string]struct {
	commands []string
	needs    seal.Scope // nothing but Read, if empty
	refused  bool       // for everybody
}{
	"Close": {}, "Login": {}, // every trial does
	"AppendLimit": {commands: []string{"CAPABILITY"}},
	"Select":      {commands: []string{"SELECT INBOX", "EXAMINE Archive", "SELECT Drafts"}},
	"Create":      {commands: []string{"CREATE x", "CREATE INBOX"}, refused: true},
	"Delete":      {commands: []string{"DELETE Trash"}, refused: true},
	"Rename":      {commands: []string{"RENAME INBOX x"}, refused: true},
	"Subscribe":   {commands: []string{"SUBSCRIBE Sent"}},
	"Unsubscribe": {commands: []string{"UNSUBSCRIBE Sent"}, refused: true},
	"List":        {commands: []string{`LIST "" *`, `LSUB "" *`, `LIST "" % RETURN (STATUS (MESSAGES SIZE))`}},
	"Status":      {commands: []string{"STATUS INBOX (MESSAGES)"}},
	"Namespace":   {commands: []string{"NAMESPACE"}},
	"Append":      {commands: []string{"APPEND Drafts {19+}\r\nSubject: s\r\n\r\ntext\n"}, needs: seal.Draft},
	"Poll":        {commands: []string{"NOOP"}},
	"Idle":        {commands: []string{"IDLE\r\nDONE"}},
	"Unselect":    {commands: []string{"CLOSE|SELECT INBOX", "UNSELECT|SELECT INBOX"}},
	"Expunge":     {commands: []string{"EXPUNGE", "UID EXPUNGE 1:*"}, needs: seal.Send, refused: true}, // it waits for approval
	"Search":      {commands: []string{"SEARCH TEXT kohlrabi", "UID SEARCH RETURN (COUNT) ALL"}},
	"Fetch":       {commands: []string{"FETCH 1 (FLAGS ENVELOPE BODYSTRUCTURE BODY[])", "UID FETCH 1:* BINARY[1]"}},
	"Store":       {commands: []string{`STORE 1 +FLAGS (\Flagged)`, `UID STORE 1:* -FLAGS (mine)`}, needs: seal.Send},
	"Copy":        {commands: []string{"COPY 1 Trash", "UID COPY 1 Trash"}, needs: seal.Send, refused: true},
	"Move":        {commands: []string{"MOVE 1 Trash", "UID MOVE 1 Trash"}, needs: seal.Send, refused: true},
}

func TestOperationsAreListed(t *testing.T) {
	for _, of := range []reflect.Type{reflect.TypeFor[engine.SessionIMAP4rev2](), reflect.TypeFor[engine.SessionAppendLimit]()} {
		for m := range of.Methods() {
			if name := m.Name; reflect.ValueOf(operations[name]).IsZero() && name != "Close" && name != "Login" {
				t.Errorf("the method %s has no row: say who may call it", name)
			}
		}
	}
	own := reflect.TypeFor[*session]()
	for m := range own.Methods() {
		if name := m.Name; !slices.Contains([]string{"Close", "Login"}, name) && operations[name].commands == nil {
			t.Errorf("the method %s has no row: say who may call it", name)
		}
	}
	// What the library calls only if a session has it would be a new way in.
	for _, name := range []string{"Unauthenticate", "Authenticate"} {
		if _, ok := own.MethodByName(name); ok {
			t.Errorf("%s has no row", name)
		}
	}
}

// A principal of the isolation test.
type principal struct {
	name   string
	secret auth.Secret
	opens  []string   // addresses
	scope  seal.Scope // in these
}

// principals makes every kind of credential.
func (f *fixture) principals(t *testing.T) []principal {
	t.Helper()
	ctx := t.Context()
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	open := func(key auth.Secret) (auth.Principal, *seal.Key) {
		who, err := auth.CheckKey(ctx, f.db, key)
		fatal(err)
		k, err := f.post.Keys.Open(ctx, who, key, "")
		fatal(err)
		return who, k
	}
	soon := time.Now().Add(time.Hour)
	who, a := open(f.keyA)
	whoB, b := open(f.keyB)
	add := func(s seal.Scope) (string, auth.Secret) {
		p, key, err := f.post.Keys.Add(ctx, who, a, keyring.NewKey{Scope: s, Expires: soon})
		fatal(err)
		return p.Credential, key
	}
	grant := func(who auth.Principal, k *seal.Key, s seal.Scope) (string, auth.Secret) {
		p, key, err := f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Name: "g", Scope: s, Expires: soon})
		fatal(err)
		return p.Credential, key
	}
	alice, bella := []string{f.a.Address}, []string{f.b.Address}
	out := []principal{
		{name: "nobody"},
		{name: "a word", secret: "password"},
		{name: "project", secret: f.projectKey},
		{name: "key a", secret: f.keyA, opens: alice, scope: seal.Manage},
		{name: "key b", secret: f.keyB, opens: bella, scope: seal.Manage},
		{name: "foreign key", secret: f.keyForeign, opens: []string{f.foreign.Address}, scope: seal.Manage},
	}
	for _, s := range []seal.Scope{seal.Read, seal.Draft, seal.Send, seal.Propose, seal.Join(seal.Read, seal.Draft), seal.Join(seal.Read, seal.Send), seal.Join(seal.Draft, seal.Send)} {
		_, key := add(s)
		p := principal{name: "key a: " + string(s), secret: key, scope: s}
		if s.Includes(seal.Read) {
			p.opens = alice
		}
		out = append(out, p)
	}
	_, limited, err := f.post.Keys.Add(ctx, who, a, keyring.NewKey{Scope: seal.Propose, Tools: []string{"email_inbox"}})
	fatal(err)
	out = append(out, principal{name: "key a for a tool", secret: limited})
	expired, expiredKey := add(seal.Manage)
	revoked, revokedKey := add(seal.Manage)
	fatal(f.post.Keys.Revoke(ctx, who, "", revoked, false))
	_, recovery, err := f.post.Keys.AddRecovery(ctx, who, a)
	fatal(err)
	_, reading := grant(who, a, seal.Read)
	both, bothKey := grant(who, a, seal.Propose)
	_, err = f.post.Keys.Extend(ctx, whoB, b, both, keyring.NewKey{Scope: seal.Propose, Expires: soon})
	fatal(err)
	ended, endedKey := grant(who, a, seal.Read)
	gone, goneKey := grant(who, a, seal.Propose)
	fatal(f.post.Keys.RevokeGrant(ctx, f.person, gone))
	_, account, err := f.post.Keys.NewAccount(ctx, f.person, "n")
	fatal(err)
	deleted, deletedKey, err := f.post.CreateInbox(ctx, f.person, directory.NewInbox{Address: "deleted"}, "")
	fatal(err)
	_, err = f.post.Delete(ctx, f.person, deleted.ID)
	fatal(err)
	fatal(f.db.Update(ctx, func(tx *store.Tx) error {
		past := store.Time(time.Now().Add(-time.Hour))
		if _, err := tx.ExecContext(ctx, `update inbox_key set expires_at = $1 where credential_id in ($2, $3)`, past, expired, ended); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `update credential set expires_at = $1 where id = $2`, past, expired)
		return err
	}))
	return append(out,
		principal{name: "expired key a", secret: expiredKey},
		principal{name: "revoked key a", secret: revokedKey},
		principal{name: "recovery key a", secret: recovery},
		principal{name: "reading grant a", secret: reading, opens: alice, scope: seal.Read},
		principal{name: "proposing grant a, b", secret: bothKey, opens: slices.Concat(alice, bella), scope: seal.Propose},
		principal{name: "ended grant a", secret: endedKey},
		principal{name: "revoked grant a", secret: goneKey},
		principal{name: "account", secret: account},
		principal{name: "key of a deleted inbox", secret: deletedKey},
	)
}

// TestIsolation: each principal opens its own inboxes alone, does there what its
// scopes say, and learns of no other.
func TestIsolation(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.srv.guesses = tarpit.New(time.Nanosecond) // this test guesses a lot
		for _, b := range []directory.Inbox{f.a, f.b, f.foreign} {
			// Each inbox has its word, which nobody else sees.
			f.receive(t, b, plain("Kohlrabi of "+word(b.Address), "kohlrabi "+word(b.Address)))
		}
		for _, key := range []struct {
			b   directory.Inbox
			key auth.Secret
		}{{f.a, f.keyA}, {f.b, f.keyB}, {f.foreign, f.keyForeign}} {
			c := f.login(t, key.b.Address, key.key)
			c.ok("SELECT INBOX")
			c.ok(`STORE 1 +FLAGS (\Deleted)`)
		}
		users := []string{f.a.Address, strings.ToUpper(f.a.Address), f.a.ID, f.b.Address, f.foreign.Address, "deleted@agents.test", "nobody@agents.test", "alice", `""`, "../alice", "ann"}
		refusals := map[string]string{}
		for _, p := range f.principals(t) {
			for _, user := range users {
				t.Run(p.name+" as "+user, func(t *testing.T) {
					c := f.dial(t)
					got := "OK" // nobody does not even try
					if p.name != "nobody" {
						got = c.do(`LOGIN %s "%s"`, user, p.secret.Reveal())
					}
					may := slices.Contains(p.opens, strings.ToLower(user)) || user == f.a.ID && slices.Contains(p.opens, f.a.Address)
					if p.name != "nobody" && strings.HasPrefix(got, "OK") != may {
						t.Fatalf("LOGIN: %s", got)
					}
					if !may {
						refusals[got] = p.name
						f.tryAll(t, c, p, true)
						return
					}
					c.ok("SELECT INBOX")
					f.tryAll(t, c, p, false)
					c.ok("SELECT INBOX")
					for _, b := range []directory.Inbox{f.a, f.b, f.foreign} {
						if said := c.do("FETCH 1 BODY.PEEK[]"); strings.Contains(said, word(b.Address)) != (b.Address == strings.ToLower(user) || b.ID == user) {
							t.Errorf("the mail of %s: %s", b.Address, said)
						}
					}
				})
			}
		}
		delete(refusals, "OK")
		if len(refusals) != 1 {
			t.Errorf("the refusals differ, and say what is there: %q", refusals)
		}
	})
}

func word(address string) string { return "word-" + strings.ToUpper(address[:3]) }

// tryAll tries every operation. Strangers are refused all of them.
func (f *fixture) tryAll(t *testing.T, c *client, p principal, stranger bool) {
	t.Helper()
	for name, o := range operations {
		for _, command := range o.commands {
			if stranger && name == "AppendLimit" {
				continue // CAPABILITY is for everybody
			}
			if stranger && name == "Poll" {
				continue // NOOP too
			}
			if name == "Idle" && stranger {
				command = "IDLE"
			}
			command, after, _ := strings.Cut(command, "|")
			before := "SELECT INBOX"
			if !stranger {
				c.ok("%s", before)
			}
			got := c.do("%s", command)
			for strings.HasPrefix(got, "+") {
				got = c.until(fmt.Sprintf("t%d", c.n))
			}
			last := got
			if i := strings.LastIndex(strings.TrimSuffix(got, "\r\n"), "\n"); i >= 0 {
				last = got[i+1:]
			}
			allowed := p.scope.Includes(seal.Read) && (o.needs == "" || p.scope.Includes(o.needs))
			switch {
			case stranger:
				if strings.HasPrefix(last, "OK") || strings.Contains(got, "ohlrabi") || strings.Contains(got, "word-") {
					t.Errorf("%s: %s", command, got)
				}
			case o.refused && o.needs != "":
				if strings.Contains(last, "waits for approval as act_") != allowed || strings.HasPrefix(last, "OK") {
					t.Errorf("%s: %s", command, got)
				}
			case strings.HasPrefix(last, "OK") != (allowed && !o.refused):
				t.Errorf("%s: %s", command, got)
			}
			if after != "" && !stranger {
				c.ok("%s", after)
			}
		}
	}
}
