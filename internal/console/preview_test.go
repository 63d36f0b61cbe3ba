//go:build preview

package console_test

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// TestPreview serves a console with something of everything in it, to look at:
//
//	PREVIEW=127.0.0.1:3999 go test -tags preview -run TestPreview -timeout 1h ./internal/console
//
// It prints the set-up link and ends when the file in PREVIEW_UNTIL is removed.
func TestPreview(t *testing.T) {
	l, err := net.Listen("tcp", os.Getenv("PREVIEW"))
	if err != nil {
		t.Fatal(err)
	}
	f := setupAt(t, l)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	bob, bobKey := f.newInbox("purchasing")
	for i := range 3 {
		r := sandbox.Request{Template: "base", Options: sandbox.Options{Timeout: time.Duration(i+1) * 20 * time.Minute}, Inbox: f.inbox.ID, Metadata: map[string]string{"task": "monthly totals", "postern.inbox": f.inbox.Address}}
		if i == 1 {
			r.Egress = policy.Egress{AllowOut: []string{"pypi.org", "*.pythonhosted.org", "198.51.100.0/24", "example.com"}}
		}
		s, err := f.fleet.Create(ctx, f.project, r)
		if err != nil {
			t.Fatal(err)
		}
		if i == 2 {
			if err := f.fleet.Kill(ctx, f.project, s.ID); err != nil {
				t.Fatal(err)
			}
			continue
		}
		f.agent = s.Principal()
	}
	send := func(d mail.Draft) string { return f.propose(d).ID }
	f.enter()
	decide := func(id, form, reason string) {
		v := f.form(f.get("/console/actions/"+id).body, form)
		v.Set("reason", reason)
		f.submit("/console/actions/"+id+"/decision", v)
		f.drain()
	}
	decide(send(draft()), "approve-form", "")
	d := draft()
	d.Subject, d.Bcc = "Invoice 2026-118, second reminder", nil
	decide(send(d), "reject-form", "The invoice was paid on Thursday. Do not remind them again.")
	f.hop.answer(mail.Uncertain, "the connection broke off after the message was sent and before the answer")
	d.Subject = "Order confirmation 4711"
	decide(send(d), "approve-form", "")
	f.hop.answer(mail.Refused, "550 5.1.1 no such user")
	d.Subject, d.To = "Meeting notes", []string{"nobody@shop.example"}
	decide(send(d), "approve-form", "checked with Carol")
	f.hop.answer(mail.Accepted, "250 2.0.0 ok: queued")

	d = draft()
	d.Text = "Dear Bob,\n\nthe totals for October, by region:\n\n  north   150\n  south    98\n  west    211\n\nThe file has every line. Tell me if a figure looks wrong.\n\nKind regards\nthe analyst\n"
	d.To = append(d.To, bob.Address)
	send(d)
	d.Subject, d.HTML, d.Attachments, d.Cc = "Re: your account ✓ שלום", `<p>Pay <b>now</b></p><img src="https://tracker.example/x.gif"><a href="https://evil.example/login">https://bank.example/</a>`, nil, nil
	d.To, d.Text = []string{`"boss@agents.test, ops@agents.test" <thief@elsewhere.example>`}, "Please pay."
	send(d)
	d = draft()
	d.Subject, d.Bcc, d.Cc, d.To, d.HTML = strings.Repeat("A very long subject that goes on ", 6), nil, nil, nil, ""
	for i := range 14 {
		d.To = append(d.To, fmt.Sprintf("person%d.with-a-rather-long-name@department-of-things.example.org", i))
	}
	send(d)

	d = draft()
	d.Subject, d.To, d.Cc = "Overdue invoices for October, with list", []string{"accounts@n\u043erdwerft.example"}, []string{"i.lindqvist@nordwerft.example"}
	d.Text = "Dear Ms Lindqvist,\n\nthank you for your call this morning. As agreed, here is the list of the invoices from October that are still open, 42 in all, together 61,308.45 EUR.\n\nKind regards\nHarbourline Freight, accounts receivable\n"
	send(d)
	if f.agent, err = auth.CheckKey(ctx, f.db, bobKey); err != nil {
		t.Fatal(err)
	}
	d = draft()
	d.Bcc, d.Attachments = nil, nil
	for i := range 7 {
		d.Subject = fmt.Sprintf("Order 47%02d: confirmation", i)
		send(d)
	}
	f.requested(policy.KindRequest, order())
	f.requested(policy.KindSecret, order())
	if _, err := f.post.RequestMode(ctx, f.agent, "mcp", "", policy.Monitored, "two weeks without a rejection"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.post.AllowList.Request(ctx, f.agent, "mcp", "", "*@partner.example", time.Time{}, "we write to them daily"); err != nil {
		t.Fatal(err)
	}
	f.agent, _ = auth.CheckKey(ctx, f.db, f.inboxKey)
	f.day()
	go func() { _ = f.gate.Run(ctx) }()
	go func() { _ = f.console.Run(ctx) }()
	f.update(func(tx *store.Tx) (err error) {
		f.link, err = auth.NewSetup(ctx, tx, f.project.Project)
		return err
	})
	fmt.Printf("%s/console/setup?%s\n", f.url, url.Values{"token": {f.link.Reveal()}}.Encode())
	for until := os.Getenv("PREVIEW_UNTIL"); ; time.Sleep(time.Second) {
		if _, err := os.Stat(until); err != nil {
			return
		}
	}
}
