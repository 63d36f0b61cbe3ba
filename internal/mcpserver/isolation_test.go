package mcpserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A principal of the isolation test, and what it may do in which inbox.
type principal struct {
	name     string
	reads    []string // inboxes
	proposes []string
	drafts   []string // beside those that it proposes for, unless it only sends
	sends    bool     // it proposes, and neither reads nor drafts
	own      string   // the inbox that it means when it names none
	refused  int      // the status at the door, 0 if it gets in
}

var principals = []principal{
	{name: "nobody", refused: 401},
	{name: "project", refused: 403},
	{name: "key a", own: "a", reads: []string{"a"}, proposes: []string{"a"}},
	{name: "reading key a", own: "a", reads: []string{"a"}},
	{name: "drafting key a", own: "a", drafts: []string{"a"}},
	{name: "sending key a", own: "a", proposes: []string{"a"}, sends: true},
	{name: "expired key a", refused: 401},
	{name: "revoked key a", refused: 401},
	{name: "recovery key a", refused: 403},
	{name: "key b", own: "b", reads: []string{"b"}, proposes: []string{"b"}},
	{name: "key of a deleted inbox"},
	{name: "reading grant a", reads: []string{"a"}},
	{name: "proposing grant a", reads: []string{"a"}, proposes: []string{"a"}},
	{name: "grant b", reads: []string{"b"}, proposes: []string{"b"}},
	{name: "ended grant a"},
	{name: "revoked grant a", refused: 401},
	{name: "foreign key", own: "foreign", reads: []string{"foreign"}, proposes: []string{"foreign"}},
	{name: "sandbox of a", own: "a", proposes: []string{"a"}},
	{name: "sandbox of a that was lent the key", own: "a", reads: []string{"a"}, proposes: []string{"a"}},
	{name: "sandbox of a that was lent a key that was revoked", own: "a", proposes: []string{"a"}},
	{name: "sandbox of b", own: "b", proposes: []string{"b"}},
	{name: "sandbox of none"},
}

// tools is every tool: what it takes, and who may use it on the inbox that is
// named. Whoever adds a tool adds its row.
var tools = map[string]struct {
	inbox bool // whether it takes the argument inbox
	args  map[string]any
	may   func(p principal, inbox string) bool
}{
	"email_inbox":         {true, map[string]any{}, reads},
	"email_message_get":   {true, map[string]any{"id": "MESSAGE"}, reads},
	"email_search":        {true, map[string]any{"q": "kohlrabi"}, reads},
	"email_thread_get":    {true, map[string]any{"id": "MESSAGE"}, reads},
	"email_labels_list":   {true, map[string]any{}, reads},
	"email_archive":       {true, map[string]any{"id": "MESSAGE"}, orders},
	"email_trash":         {true, map[string]any{"id": "MESSAGE"}, orders},
	"email_draft_create":  {true, map[string]any{"to": []string{"x@example.com"}, "subject": "s", "body": "BODY"}, drafts},
	"email_send":          {true, map[string]any{"to": []string{"x@example.com"}, "subject": "s", "body": "BODY"}, proposes},
	"email_reply":         {true, map[string]any{"messageId": "MESSAGE", "body": "BODY"}, answers},
	"email_forward":       {true, map[string]any{"messageId": "MESSAGE", "to": []string{"x@example.com"}, "body": "BODY"}, answers},
	"email_action_status": {false, map[string]any{"actionId": "ACTION"}, func(p principal, _ string) bool { return member(p, "a") }},
	// A sandbox takes back what it proposed itself, and ACTION is of a key of a.
	"email_cancel": {false, map[string]any{"actionId": "ACTION"}, func(p principal, _ string) bool {
		return proposes(p, "a") && !strings.HasPrefix(p.name, "sandbox")
	}},
	"email_account": {true, map[string]any{}, member},
	"domain_add":    {false, map[string]any{"domain": "NUMBER.example.com"}, func(p principal, _ string) bool { return p.name == "project" }},
	"domain_status": {false, map[string]any{"domain": "theirs.example"}, func(principal, string) bool { return false }}, // of another project; TestDomains
	"email_help":    {false, map[string]any{}, func(principal, string) bool { return true }},

	"email_draft_list":   {true, map[string]any{}, reads},
	"email_draft_get":    {true, map[string]any{"draftId": "DRAFT"}, reads},
	"email_draft_update": {true, map[string]any{"draftId": "DRAFT", "version": 1, "to": []string{"x@example.com"}, "subject": "s", "body": "BODY"}, orders},
	"email_draft_delete": {true, map[string]any{"draftId": "DRAFT"}, func(p principal, inbox string) bool {
		return orders(p, inbox) || slices.Contains(p.drafts, inbox)
	}},
	"email_draft_send":      {true, map[string]any{"draftId": "DRAFT"}, orders},
	"wait_for_email":        {true, map[string]any{"timeoutSeconds": 0}, reads},
	"email_quarantine_list": {true, map[string]any{}, reads},
	"email_quarantine_get":  {true, map[string]any{"id": "HELD"}, reads},
	"email_action_list":     {false, map[string]any{}, func(principal, string) bool { return true }}, // of one's own; TestActionList
	"email_oversight_get":   {true, map[string]any{}, member},
	"email_allow_request":   {true, map[string]any{"pattern": "PATTERN", "reason": "r"}, proposes},
	"email_mode_request":    {true, map[string]any{"mode": "monitored", "reason": "r"}, proposes},
	"email_mode_code":       {true, map[string]any{"code": "AAAA"}, func(principal, string) bool { return false }}, // nobody has one; TestAsking
	"email_edit": {false, map[string]any{"actionId": "ACTION", "to": []string{"x@example.com"}, "subject": "s", "body": "BODY"}, func(p principal, _ string) bool {
		return proposes(p, "a") && !strings.HasPrefix(p.name, "sandbox")
	}},
}

func reads(p principal, inbox string) bool    { return slices.Contains(p.reads, inbox) }
func proposes(p principal, inbox string) bool { return slices.Contains(p.proposes, inbox) }
func drafts(p principal, inbox string) bool {
	return slices.Contains(p.drafts, inbox) || proposes(p, inbox) && !p.sends
}

func member(p principal, inbox string) bool {
	return reads(p, inbox) || proposes(p, inbox) || drafts(p, inbox)
}

func orders(p principal, inbox string) bool { // what is lent to a sandbox reads and changes nothing
	return answers(p, inbox) && !strings.HasPrefix(p.name, "sandbox")
}
func answers(p principal, inbox string) bool { return reads(p, inbox) && proposes(p, inbox) }

// TestIsolation tries every principal on every tool and inbox, and fails for a
// tool that is in no row.
func TestIsolation(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		fatal := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		a, keyA := f.inbox(t, "alice")
		b, keyB := f.inbox(t, "bella")
		gone, keyGone := f.inbox(t, "gone")
		_, err := f.post.Delete(ctx, f.project, gone.ID)
		fatal(err)
		foreign := f.project
		fatal(db.Update(ctx, func(tx *store.Tx) error {
			foreign.Project, _, err = auth.NewProject(ctx, tx, "two")
			return err
		}))
		c, keyC, err := f.post.CreateInbox(ctx, foreign, directory.NewInbox{Address: "foreign"}, "")
		fatal(err)
		messages, writers := map[string]string{}, map[string]auth.Principal{}
		for name, b := range map[string]struct {
			directory.Inbox
			key auth.Secret
		}{"a": {a, keyA}, "b": {b, keyB}, "foreign": {c, keyC}} {
			raw := "From: Bob <bob@example.com>\r\nTo: " + b.Address + "\r\nSubject: Kohlrabi\r\nMessage-ID: <" + name + "@example.com>\r\n\r\nKohlrabi\r\n"
			fatal(f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"}))
			who, err := auth.CheckKey(ctx, db, b.key)
			fatal(err)
			k, err := f.post.Keys.Open(ctx, who, b.key, "")
			fatal(err)
			ms, err := f.post.Messages(ctx, who, k, 1)
			fatal(err)
			messages[name] = ms[0].ID
			raw = strings.ReplaceAll(raw, "<"+name, "<held-"+name)
			held := mail.Results{DMARC: mail.Check{Result: "fail"}, Policy: "quarantine"}
			fatal(f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1", Auth: held}))
			ms, _, err = f.post.HeldMessages(ctx, who, k, "", 1)
			fatal(err)
			messages["held "+name] = ms[0].ID
			writers[name] = who
		}

		keys := map[string]auth.Secret{"nobody": "", "project": f.projectKey, "key a": keyA, "key b": keyB, "foreign key": keyC, "key of a deleted inbox": keyGone}
		handlers := map[string]http.Handler{}
		whoA, err := auth.CheckKey(ctx, db, keyA)
		fatal(err)
		whoB, err := auth.CheckKey(ctx, db, keyB)
		fatal(err)
		ka, err := f.post.Keys.Open(ctx, whoA, keyA, "")
		fatal(err)
		kb, err := f.post.Keys.Open(ctx, whoB, keyB, "")
		fatal(err)
		soon := time.Now().Add(time.Hour)
		add := func(name string, n keyring.NewKey) string {
			p, key, err := f.post.Keys.Add(ctx, whoA, ka, n)
			fatal(err)
			keys[name] = key
			return p.Credential
		}
		grant := func(name string, who auth.Principal, k *seal.Key, s seal.Scope) string {
			p, key, err := f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Scope: s, Expires: soon})
			fatal(err)
			keys[name] = key
			return p.Credential
		}
		attach := func(name, inbox string, lent auth.Secret) {
			who, _ := f.sandbox(t, inbox) //nolint:contextcheck // it takes t's
			if lent != "" {
				fatal(f.post.Keys.Lend(ctx, f.project, who, lent))
			}
			handlers[name] = f.srv.HandlerFor(who)
		}
		add("reading key a", keyring.NewKey{Scope: seal.Read})
		add("drafting key a", keyring.NewKey{Scope: seal.Draft})
		add("sending key a", keyring.NewKey{Scope: seal.Send})
		expired := add("expired key a", keyring.NewKey{Expires: soon})
		_, keys["recovery key a"], err = f.post.Keys.AddRecovery(ctx, whoA, ka)
		fatal(err)
		grant("reading grant a", whoA, ka, seal.Read)
		grant("proposing grant a", whoA, ka, seal.Propose)
		grant("grant b", whoB, kb, seal.Propose)
		ended := grant("ended grant a", whoA, ka, seal.Propose)
		revoked := add("revoked key a", keyring.NewKey{})
		attach("sandbox of a", a.ID, "")
		attach("sandbox of a that was lent the key", a.ID, keyA)
		attach("sandbox of a that was lent a key that was revoked", a.ID, keys["revoked key a"])
		attach("sandbox of b", b.ID, "")
		attach("sandbox of none", "", "")
		fatal(f.post.Keys.Revoke(ctx, whoA, "", revoked, false))
		fatal(f.post.Keys.RevokeGrant(ctx, f.project, grant("revoked grant a", whoA, ka, seal.Propose)))
		fatal(db.Update(ctx, func(tx *store.Tx) error {
			if _, err := tx.ExecContext(ctx, `update credential set expires_at = 1 where id = $1`, expired); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, `update inbox_key set expires_at = 1 where credential_id = $1`, ended)
			return err
		}))

		_, err = f.domains(t).Add(ctx, foreign, "theirs.example")
		fatal(err)
		for _, tool := range catalog() {
			if _, ok := tools[tool.Name]; !ok && tool.set != Network && tool.set != Code && tool.set != Runs { // TestNetwork, TestCodeIsolation and TestRunIsolation have those
				t.Errorf("tool %s is in no row of tools: who may use it?", tool.Name)
			}
		}
		names := map[string]string{"a": a.ID, "a by address": a.Address, "b": b.ID, "foreign": c.Address, "missing": "nobody@agents.test", "deleted": gone.ID, "hostile": "'; drop table\x00 inbox; --", "": ""}
		n := 0
		for _, p := range principals {
			h := handlers[p.name]
			if h == nil {
				h = f.srv.Handler()
			}
			for tool, row := range tools {
				targets := []string{""}
				if row.inbox {
					targets = []string{"", "a", "a by address", "b", "foreign", "missing", "deleted", "hostile"}
					if testing.Short() || strings.HasSuffix(t.Name(), "postgres") { // who may is asked in the same words there
						targets = []string{"", "a", "foreign", "missing"}
					}
				}
				told := map[string]string{}
				for _, target := range targets {
					n++
					inbox := strings.TrimSuffix(target, " by address")
					if inbox == "" {
						inbox = p.own
					}
					action := ""
					if !row.inbox {
						d := mail.Draft{To: []string{"x@example.com"}, Subject: "s", Text: fmt.Sprint("number ", n)}
						proposed, err := f.post.Send(ctx, whoA, "test", mailbox.Outgoing{Draft: d})
						fatal(err)
						action = proposed.ID
					}
					in := inbox
					if messages[in] == "" {
						in = "a"
					}
					draft := ""
					if _, ok := row.args["draftId"]; ok {
						d, err := f.post.Drafts.Save(ctx, writers[in], mailbox.Outgoing{Draft: mail.Draft{To: []string{"x@example.com"}, Subject: "s", Text: fmt.Sprint("draft ", n)}})
						fatal(err)
						draft = d.ID
					}
					if strings.HasSuffix(tool, "_request") { // of which there are few an hour
						fatal(db.Update(ctx, func(tx *store.Tx) error {
							_, err := tx.ExecContext(ctx, `delete from send_use where scope like '% inbox.%'`)
							return err
						}))
					}
					status, got := f.ask(t, h, keys[p.name], tool, row.args, names[target], strings.NewReplacer("MESSAGE", messages[in], "HELD", messages["held "+in], "DRAFT", draft, "PATTERN", fmt.Sprintf("a%d@example.com", n), "ACTION", action, "NUMBER", fmt.Sprint("d", n), "BODY", fmt.Sprint("number ", n)))
					if draft != "" { // or the inbox is full of them soon
						if err := f.post.Drafts.Delete(ctx, writers[in], "", draft, 0); err != nil && !errors.Is(err, store.ErrNotFound) {
							t.Fatal(err)
						}
					}
					refused := p.refused
					if p.name == "project" && find(tool).set == Domains { // that is what it is for
						refused = 0
					}
					if status != 200 {
						if status != refused {
							t.Errorf("%s (%s) as %s: got %d, want %d", tool, target, p.name, status, refused)
						}
						continue
					}
					want := row.may(p, inbox)
					if refused != 0 || want == got.isErr {
						t.Errorf("%s (%s) as %s: error %v, want %v: %s", tool, target, p.name, got.isErr, !want, got.text)
					}
					if got.isErr && (strings.Contains(got.text, "Kohlrabi") || strings.Contains(got.text, "bob@") || strings.Contains(got.text, "internal error")) {
						t.Errorf("%s (%s) as %s: the refusal tells: %s", tool, target, p.name, got.text)
					}
					if got.isErr {
						told[target] = strings.ReplaceAll(got.text, names[target], "")
					}
				}
				// The attack: telling by the answer whether somebody has an inbox.
				if f, ok := told["foreign"]; ok && f != told["missing"] && p.own != "foreign" {
					t.Errorf("%s as %s: an inbox that is foreign and one that is not there differ:\n%s\n%s", tool, p.name, f, told["missing"])
				}
			}
		}
		t.Logf("%d trials", n)
	})
}

// ask calls a tool as any program would, and returns the status at the door.
func (f *fixture) ask(t *testing.T, h http.Handler, key auth.Secret, tool string, args map[string]any, inbox string, fill *strings.Replacer) (int, result) {
	t.Helper()
	filled := map[string]any{}
	for k, v := range args {
		if s, ok := v.(string); ok {
			v = fill.Replace(s)
		}
		filled[k] = v
	}
	if inbox != "" {
		filled["inbox"] = inbox
	}
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{"name": tool, "arguments": filled}})
	if err != nil {
		t.Fatal(err)
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "http://postern.example"+Path+"?tools="+tool, bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.RemoteAddr = fmt.Sprintf("[2001:db8:%x:%x::1]:1", rand.IntN(1<<16), rand.IntN(1<<16)) // each a stranger of its own
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key.Reveal())
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != http.StatusOK {
		return w.Code, result{}
	}
	var answer struct {
		Result struct {
			IsError bool
			Content []struct{ Text string }
		}
	}
	if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || len(answer.Result.Content) == 0 {
		t.Fatalf("%s: %v: %.300s", tool, err, w.Body)
	}
	return w.Code, result{text: answer.Result.Content[0].Text, isErr: answer.Result.IsError}
}
