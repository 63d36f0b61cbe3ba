package mailbox_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/quota"
)

func TestParseAllowed(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"an address", "Bob@Example.COM", "bob@example.com"},
		{"a domain", " *@Example.com ", "*@example.com"},
		{"a trailing dot", "bob@example.com.", "bob@example.com"},
		{"an international domain", "bob@Bücher.example", "bob@xn--bcher-kva.example"},
		{"a subaddress", "bob+x@example.com", "bob+x@example.com"},
		{"nothing", "", ""},
		{"everything", "*", ""},
		{"every domain", "*@*", ""},
		{"every subdomain", "*@*.example.com", ""},
		{"part of a name", "b*@example.com", ""},
		{"a top domain", "*@com", ""},
		{"a public suffix", "*@co.uk", ""},
		{"a host for everybody", "*@github.io", ""},
		{"an address at one of these", "me@github.io", "me@github.io"},
		{"a Cyrillic o", "b\u043eb@example.com", ""},
		{"the sign for kelvin", "\u212aim@example.com", ""}, // in lower case a k
		{"an unseen character", "bob\u200b@example.com", ""},
		{"a literal", "bob@[192.0.2.1]", ""},
		{"a number", "bob@192.0.2.1", ""},
		{"quoted", `"bob"@example.com`, ""},
		{"a way to another", "eve%evil.example@example.com", ""},
		{"another way", "evil.example!eve@example.com", ""},
		{"two", "bob@example.com,eve@example.org", ""},
		{"two @", "bob@evil.example@example.com", ""},
		{"a line break", "bob@example.com\r\nx", ""},
		{"one label", "bob@localhost", ""},
		{"an empty label", "*@pl..", ""},
		{"a public suffix with a dot", "*@co.uk.", ""},
		{"a last dot of another script", "bob@example.com。", "bob@example.com"},
		{"long", strings.Repeat("a", 400) + "@example.com", ""},
		{"no UTF-8", "bob@\xff.example", ""},
	} {
		got, err := mailbox.ParseAllowed(tt.in)
		if got != tt.want || (err == nil) != (tt.want != "") || err != nil && !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("%s: %q, %v; want %q", tt.name, got, err, tt.want)
		}
	}
}

// FuzzParseAllowed: what is taken is ASCII, in lower case, and stays as it is
// when it is read once more.
func FuzzParseAllowed(f *testing.F) {
	for _, s := range []string{"bob@example.com", "*@example.com", "*@co.uk", "b\u043eb@bücher.example", "a@b@c", "*@*", "x@xn--.com", "*@pl..", "*@pl。"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := mailbox.ParseAllowed(s)
		if err != nil {
			return
		}
		if again, err := mailbox.ParseAllowed(p); err != nil || again != p {
			t.Errorf("%q became %q, and that %q, %v", s, p, again, err)
		}
		if strings.ToLower(p) != p || strings.Count(p, "@") != 1 || strings.IndexFunc(p, func(r rune) bool { return r <= ' ' || r >= 0x7f }) >= 0 || strings.Contains(p[1:], "*") {
			t.Errorf("%q became %q", s, p)
		}
	})
}

// TestListed: who is on an allow list, and who only seems so.
func TestListed(t *testing.T) {
	offices(t, nil, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		judge := &asked{}
		f.judgedBy(t, judge)
		_, agent, _ := f.inbox(t, "alice")
		n := 0
		listed := func(to ...string) bool {
			t.Helper()
			n++
			if _, err := f.post.Send(ctx, agent, "rest", letter(strings.Repeat("n", n), to...)); err != nil {
				t.Fatalf("%v: %v", to, err)
			}
			return judge.got[len(judge.got)-1].Listed
		}
		if listed("bob@example.com") {
			t.Error("an empty list has somebody")
		}
		allow := func(pattern string, until time.Time) mailbox.AllowEntry {
			t.Helper()
			e, err := f.post.AllowList.Add(ctx, f.person, "alice@agents.test", pattern, until)
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
		bob := allow("bob@example.com", time.Time{})
		allow("*@bücher.example", time.Time{})
		allow("soon@example.net", time.Now().Add(time.Hour))
		for _, tt := range []struct {
			to   string
			want bool
		}{
			{"bob@example.com", true},
			{"BOB@EXAMPLE.COM", true},
			{"anna@xn--bcher-kva.example", true},
			{"anna@bücher.example", true},
			{"soon@example.net", true},
			{"bob+eve@example.com", false},
			{"bob.@example.org", false},
			{"b\u043eb@example.com", false},
			{"bob@example.com.evil.example", false},
			{"bob@sub.example.com", false},
			{"anna@sub.xn--bcher-kva.example", false},
			{"eve%evil.example@xn--bcher-kva.example", false},
			{"evil.example!eve@xn--bcher-kva.example", false},
			{"anna@xn--bucher-kva.example", false},
			{"eve@example.com", false},
		} {
			if strings.HasPrefix(tt.to, "bob.@") { // no address at all
				continue
			}
			if got := listed(tt.to); got != tt.want {
				t.Errorf("%s: listed %v, want %v", tt.to, got, tt.want)
			}
		}
		if listed("bob@example.com", "eve@example.com") {
			t.Error("one who is not on the list hides behind one who is")
		}
		o := letter("a hidden one", "bob@example.com")
		o.Bcc = []string{"eve@example.com"}
		if _, err := f.post.Send(ctx, agent, "rest", o); err != nil || judge.got[len(judge.got)-1].Listed {
			t.Errorf("one who is not on the list hides in Bcc: %v", err)
		}
		f.shift(t, `update allow_entry set expires_at = $1 where expires_at > 0`, time.Now().Add(-time.Second).UnixMicro())
		if listed("soon@example.net") {
			t.Error("an entry outlives its end")
		}
		again := allow("Bob@example.com.", time.Now().Add(time.Hour))
		if again.ID != bob.ID || again.Expires.IsZero() {
			t.Errorf("the same again: %+v, first %+v", again, bob)
		}
		if _, err := f.post.AllowList.Add(ctx, f.person, "alice@agents.test", "x@example.com", time.Now().Add(-time.Hour)); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("an end in the past: %v", err)
		}

		// To take off is free, to who may lower the mode.
		viewer := f.person
		viewer.Role = auth.Viewer
		_, other, _ := f.inbox(t, "bella")
		for name, who := range map[string]auth.Principal{"viewer": viewer, "another's key": other, "sandbox": {Kind: auth.Sandbox, ID: "i1", Project: agent.Project, Inbox: agent.Inbox}} {
			if err := f.post.AllowList.Remove(ctx, who, "alice@agents.test", bob.ID); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s takes off: %v", name, err)
			}
		}
		if err := f.post.AllowList.Remove(ctx, agent, "", bob.ID); err != nil {
			t.Error(err)
		}
		if err := f.post.AllowList.Remove(ctx, agent, "", bob.ID); !errors.Is(err, mailbox.ErrNoEntry) {
			t.Errorf("twice: %v", err)
		}
		if listed("bob@example.com") {
			t.Error("an entry that was taken off")
		}
		if list, err := f.post.AllowList.Entries(ctx, agent, ""); err != nil || len(list) != 1 || list[0].Pattern != "*@xn--bcher-kva.example" || list[0].CreatedBy != "person:ann" {
			t.Errorf("list %+v, %v", list, err)
		}
		if _, err := f.post.AllowList.Entries(ctx, other, "alice@agents.test"); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("another's list: %v", err)
		}
	})
}

// TestAllowRequest: an agent asks, an owner says yes, and what was asked is there.
func TestAllowRequest(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		_, agent, _ := f.inbox(t, "alice")
		a, err := f.post.AllowList.Request(ctx, agent, "mcp", "", "*@GMAIL.com", time.Now().Add(time.Hour), "they write often\u202e")
		if err != nil || a.State != oversight.Pending {
			t.Fatalf("%s, %v", a.State, err)
		}
		v, err := f.gate.Show(a)
		if err != nil || !strings.Contains(v.Title, "*@gmail.com") || !strings.Contains(strings.Join(v.Notes, "\n"), "anybody can get an address") || strings.Contains(v.Text, "\u202e") {
			t.Errorf("shown as %+v, %v", v, err)
		}
		if err := f.decide(t, f.person, a.ID, true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		list, err := f.post.AllowList.Entries(ctx, agent, "")
		if err != nil || len(list) != 1 || list[0].Pattern != "*@gmail.com" || list[0].Action != a.ID || list[0].CreatedBy != "person:ann" || list[0].Expires.IsZero() {
			t.Errorf("%+v, %v", list, err)
		}
		a, err = f.post.AllowList.Request(ctx, agent, "mcp", "", "eve@example.com", time.Time{}, "")
		if err != nil {
			t.Fatal(err)
		}
		if err := f.decide(t, f.person, a.ID, false); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if list, _ := f.post.AllowList.Entries(ctx, agent, ""); len(list) != 1 {
			t.Errorf("rejected, and there: %+v", list)
		}
		for range 18 {
			if _, err := f.post.AllowList.Request(ctx, agent, "mcp", "", "eve@example.com", time.Time{}, ""); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := f.post.AllowList.Request(ctx, agent, "mcp", "", "eve@example.com", time.Time{}, ""); !errors.Is(err, quota.ErrLimit) {
			t.Errorf("the 21st in the hour: %v", err)
		}
		if got := f.mode(t, "alice@agents.test"); got != policy.GatedSend {
			t.Errorf("mode %s", got)
		}
	})
}
