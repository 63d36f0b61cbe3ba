package mailapi

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"postern/internal/audit"
	"postern/internal/mailbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// marked is a text that nobody has by chance, with where it was put in it.
func marked(where string) string { return "SECRET" + where + "q7vK2mZx" }

// TestAuditRedaction plays the road of mail and of oversight with a marked
// secret in each place that could hold one, and looks for them in all entries
// and in each format of an export. What an entry may hold is in docs/reference/audit.md:
// addresses of recipients that were proposed, and words that persons gave as
// reasons, but no subject, body, name, file, comment or credential.
func TestAuditRedaction(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		var marks []string
		m := func(where string) string {
			marks = append(marks, marked(where))
			return marked(where)
		}
		must := func(code int, got answered) answered {
			t.Helper()
			if got.code != code {
				t.Fatalf("%d %s, want %d", got.code, got.body, code)
			}
			return got
		}
		inbox := "/v1/inboxes/" + f.a.ID
		// What arrives, and what is in quarantine.
		raw := func(part string) string {
			return "From: " + m(part+"name") + " <erin@example.com>\r\nTo: " + f.a.Address + "\r\nSubject: " + m(part+"subject") +
				"\r\nMessage-ID: <" + m(part+"id") + "@example.com>\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n\r\n" + m(part+"body") +
				"\r\n--b\r\nContent-Disposition: attachment; filename=" + m(part+"file") + ".txt\r\n\r\n" + m(part+"content") + "\r\n--b--\r\n"
		}
		id := f.arrive(t, f.a, "key a", raw("in"))
		must(200, f.do(t, "key a", "GET", inbox+"/search?q="+m("query"), ""))
		must(200, f.do(t, "key a", "POST", inbox+"/labels", fmt.Sprintf(`{"ids":[%q],"add":["starred"]}`, id)))
		// What is proposed, revised, commented, decided and sent.
		mail := func(part string) string {
			return fmt.Sprintf(`{"to":["%s <bob@example.com>"],"bcc":["carol@example.com"],"subject":%q,"text":%q,"attachments":[{"name":"%s.txt","content_base64":%q}]`,
				m(part+"to"), m(part+"subject"), m(part+"body"), m(part+"file"), base64.StdEncoding.EncodeToString([]byte(m(part+"content"))))
		}
		decide := func(act string, approve bool) {
			t.Helper()
			a, err := f.gate.Action(t.Context(), f.person, act)
			if err != nil {
				t.Fatal(err)
			}
			must(200, f.do(t, "person", "POST", "/v1/actions/"+act+"/decision", fmt.Sprintf(`{"version":%d,"digest":%q,"approve":%t,"reason":"a reason"}`, a.Version, a.Hex(), approve)))
		}
		first := must(202, f.do(t, "key a", "POST", inbox+"/messages", mail("out")+"}", "Idempotency-Key", `"`+m("idempotency")+`"`)).field(t, "id")
		if _, err := f.gate.Comment(t.Context(), f.person, first, m("remark"), true); err != nil {
			t.Fatal(err)
		}
		must(202, f.do(t, "key a", "POST", "/v1/actions/"+first+"/revision", `{"version":1,"to":["dora@example.com"],"subject":"`+m("revised")+`","text":"`+m("revisedbody")+`"}`))
		decide(first, true)
		if ran, err := f.gate.RunOne(t.Context()); err != nil || !ran || len(f.hop.got) == 0 {
			t.Fatalf("it was not sent: %v, %v", ran, err)
		}
		second := must(202, f.do(t, "key a", "POST", inbox+"/messages", mail("rejected")+"}")).field(t, "id")
		decide(second, false)
		reply := must(202, f.do(t, "key a", "POST", inbox+"/messages/"+id+"/reply", fmt.Sprintf(`{"text":%q}`, m("reply")))).field(t, "id")
		must(200, f.do(t, "key a", "POST", "/v1/actions/"+reply+"/cancel", ""))
		draft := must(201, f.do(t, "key a", "POST", inbox+"/drafts", mail("draft")+"}")).field(t, "id")
		must(202, f.do(t, "key a", "POST", inbox+"/drafts/"+draft+"/send", `{"version":1}`))
		// Credentials, grants, webhooks, codes.
		key := must(201, f.do(t, "key a", "POST", inbox+"/keys", `{"scope":"read","name":"n"}`)).field(t, "key")
		recovery := must(201, f.do(t, "key a", "POST", inbox+"/recovery-key", "")).field(t, "key")
		hook := must(201, f.do(t, "key a", "POST", inbox+"/webhooks", fmt.Sprintf(`{"url":"https://example.com/%s?token=%s"}`, m("path"), m("token")))).body
		code := must(201, f.do(t, "person", "POST", inbox+"/mode-codes", `{"mode":"autonomous","reason":"three good weeks"}`)).field(t, "code")
		must(204, f.do(t, "project", "POST", "/v1/suppression", fmt.Sprintf(`{"address":"%s@example.com"}`, m("suppressed"))))
		for _, part := range strings.FieldsFunc(hook, func(r rune) bool { return r == '"' || r == ',' || r == ':' }) {
			if strings.HasPrefix(part, "whsec_") {
				marks = append(marks, part)
			}
		}
		for _, s := range append(f.secrets, key, recovery, code) {
			if len(s) < 8 {
				t.Fatalf("a secret is %q", s)
			}
			marks = append(marks, s)
		}
		if _, err := f.record.Make(t.Context()); err != nil {
			t.Fatal(err)
		}

		var all strings.Builder
		entries := 0
		_, err := audit.Export(t.Context(), db, audit.Query{}, func(e audit.Entry, hash audit.Digest) error {
			entries++
			fmt.Fprintln(&all, e.Actor, e.Verb, e.Object, e.Detail)
			line, err := audit.MarshalLine(e, hash)
			if err != nil {
				return err
			}
			message, err := audit.Syslog(e, hash, "host", 1<<20)
			fmt.Fprintf(&all, "%s\n%s\n%s\n", line, audit.CEF(e, hash, "1"), message)
			return err
		})
		if err != nil || entries < 15 {
			t.Fatalf("%d entries, %v", entries, err)
		}
		text := strings.ToLower(all.String())
		for _, s := range marks {
			for how, form := range map[string]string{"as it is": s, "as base64": base64.StdEncoding.EncodeToString([]byte(s))[:8*(len(s)/8)], "as hexadecimal": hex.EncodeToString([]byte(s))} {
				if i := strings.Index(text, strings.ToLower(form)); i >= 0 {
					t.Errorf("%s is in an entry %s: …%s…", s, how, text[max(0, i-150):min(len(text), i+100)])
				}
			}
		}
		// The test looks where it should: what may be there is.
		for _, want := range []string{"bob@example.com", "carol@example.com", "a reason", first, "action.approve", "action.done", "action.revise", "action.comment", string(mailbox.SendKind)} {
			if !strings.Contains(all.String(), want) {
				t.Errorf("no entry has %q", want)
			}
		}
	})
}
