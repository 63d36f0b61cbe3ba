package console_test

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/store"
)

var shownKey = regexp.MustCompile(`id="(key|recovery-key)">([a-z]{3}_[A-Z2-7]{26})<`)

func shown(t *testing.T, page string) map[string]auth.Secret {
	t.Helper()
	out := map[string]auth.Secret{}
	for _, m := range shownKey.FindAllStringSubmatch(page, -1) {
		out[m[1]] = auth.Secret(m[2])
	}
	return out
}

// TestInboxPages is a person who makes an inbox, sees its key once, changes it,
// loses the key, recovers, deletes it and brings it back; and never its mail.
func TestInboxPages(t *testing.T) {
	f := setup(t)
	f.enter()
	for name, form := range map[string]url.Values{
		"a reserved name": {"name": {"mailer-daemon"}},
		"a line break":    {"name": {"abc\r\nBcc: x"}},
		"a bad date":      {"name": {"fresh"}, "expires": {"soon"}},
		"yesterday":       {"name": {"fresh"}, "expires": {"2001-01-01"}},
		"a hostile name":  {"name": {"fresh"}, "display": {"<script>alert(1)</script> boss@example.com"}},
		"another domain":  {"name": {"fresh@example.org"}},
	} {
		a := f.submit("/console/inboxes", form)
		if a.status != http.StatusBadRequest || strings.Contains(a.body, "<script>") || strings.Contains(a.body, "pib_") {
			t.Errorf("%s: %d", name, a.status)
		}
		contains(t, name, a.body, "Nothing was")
	}
	if a := f.submit("/console/inboxes", url.Values{"name": {"analyst"}}); a.status != http.StatusBadRequest || !strings.Contains(a.body, "Available:") {
		t.Errorf("a taken name: %d", a.status)
	}
	a := f.submit("/console/inboxes", url.Values{"name": {"reporter"}, "display": {"The reporter"}, "recovery": {"yes"}})
	keys := shown(t, a.body)
	if a.status != http.StatusCreated || len(keys) != 2 {
		t.Fatalf("make: %d, %d keys", a.status, len(keys))
	}
	contains(t, "the key's page", a.body, "shown only once", "the mail is lost", "reporter@agents.test")
	b, err := f.post.Directory.Find(t.Context(), f.person, "reporter@agents.test")
	if err != nil {
		t.Fatal(err)
	}
	page := "/console/inboxes/" + b.ID
	err = f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte("Subject: Kohlrabi\r\n\r\nKohlrabi\r\n")}})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{page, "/console/inboxes"} {
		body := f.get(p).body
		contains(t, p, body, "reporter@agents.test", "The reporter", "1 message")
		for _, bad := range []string{"Kohlrabi", keys["key"].Reveal(), keys["recovery-key"].Reveal(), "pib_", "prk_"} {
			if strings.Contains(body, bad) {
				t.Errorf("%s shows %q", p, bad)
			}
		}
	}
	body := f.get(page).body
	contains(t, "the inbox", body, "recovery key", "read, draft, propose, manage", "create a new key", `value="1024"`)

	// Settings.
	if a := f.submit(page+"/settings", url.Values{"display": {"R"}, "expires": {"2999-12-31"}, "megabytes": {"20"}}); a.status != http.StatusSeeOther {
		t.Errorf("settings: %d", a.status)
	}
	contains(t, "the changed inbox", f.get(page).body, `value="2999-12-31"`, `value="20"`, "20 MiB")
	for name, form := range map[string]url.Values{"room": {"megabytes": {"5000"}}, "no room": {"megabytes": {""}}, "past": {"megabytes": {"20"}, "expires": {"2001-01-01"}}} {
		if a := f.submit(page+"/settings", form); a.status != http.StatusBadRequest {
			t.Errorf("settings, %s: %d", name, a.status)
		}
	}

	// What it may send.
	limits := url.Values{"minute": {"7"}, "hour": {"0"}, "day": {"-1"}, "recipients": {"9"}, "bytes": {"3145728"}}
	if a := f.submit(page+"/limits", limits); a.status != http.StatusSeeOther {
		t.Errorf("limits: %d %s", a.status, a.body)
	}
	contains(t, "the limited inbox", f.get(page).body, "7 of 7 emails a minute left", "9 of 9 recipients a day left", "3 MiB of 3 MiB a day left", `name="day" value="-1"`)
	limits.Set("minute", "-2")
	if a := f.submit(page+"/limits", limits); a.status != http.StatusBadRequest {
		t.Errorf("a limit that is none: %d", a.status)
	}
	f.exec(`insert into suspension (scope, project_id, reason, suspended_at, lifted_at) values ($1, $2, 'too many <b>bounces</b>', 1, 0)`, b.ID, f.project.Project)
	contains(t, "the suspended inbox", f.get(page).body, "Sending has been suspended since", "too many &lt;b&gt;bounces")

	// The key is lost: the recovery key makes another, and ends the first.
	for name, key := range map[string]string{"nonsense": "x", "its own key": keys["key"].Reveal(), "a project key": f.projectKey.Reveal(), "empty": ""} {
		if a := f.submit("/console/recover", url.Values{"recovery": {key}}); a.status != http.StatusBadRequest || len(shown(t, a.body)) != 0 || key != "" && key != "x" && strings.Contains(a.body, key) {
			t.Errorf("recover with %s: %d", name, a.status)
		}
	}
	a = f.submit("/console/recover", url.Values{"recovery": {keys["recovery-key"].Reveal()}, "revoke": {"yes"}})
	fresh := shown(t, a.body)["key"]
	if a.status != http.StatusCreated || fresh == "" {
		t.Fatalf("recover: %d", a.status)
	}
	if _, err := auth.CheckKey(t.Context(), f.db, keys["key"]); err == nil {
		t.Error("the stolen key is still a key")
	}
	agent, err := auth.CheckKey(t.Context(), f.db, fresh)
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), agent, fresh, "")
	if err != nil {
		t.Fatal(err)
	}
	if ms, err := f.post.Messages(t.Context(), agent, k, 0); err != nil || len(ms) != 1 || ms[0].Subject != "Kohlrabi" {
		t.Errorf("the new key reads %v, %v", ms, err)
	}

	// The last key goes only when that is said twice.
	if a := f.submit(page+"/revoke", url.Values{"credential": {agent.ID}}); a.status != http.StatusConflict || !strings.Contains(a.body, "Revoke the last key") {
		t.Errorf("revoking the last key: %d", a.status)
	}
	if a := f.submit(page+"/revoke", url.Values{"credential": {agent.ID}, "last": {agent.ID}}); a.status != http.StatusSeeOther {
		t.Errorf("revoking the last key, twice said: %d", a.status)
	}
	if a := f.submit(page+"/revoke", url.Values{"credential": {agent.ID}}); a.status != http.StatusConflict {
		t.Errorf("revoking it again: %d", a.status)
	}
	for _, id := range []string{"", "x", "crd_' or 1=1"} {
		if a := f.submit(page+"/revoke", url.Values{"credential": {id}}); a.status != http.StatusNotFound {
			t.Errorf("revoking %q: %d", id, a.status)
		}
	}

	// Deleted and back.
	if a := f.submit(page+"/delete", url.Values{}); a.status != http.StatusSeeOther {
		t.Errorf("delete: %d", a.status)
	}
	contains(t, "the deleted inbox", f.get(page).body, "Restore inbox", "deleted")
	contains(t, "the list", f.get("/console/inboxes").body, "Permanently deleted")
	if err := f.post.Accepts(t.Context(), b.Address); err == nil {
		t.Error("a deleted inbox takes mail")
	}
	if a := f.submit(page+"/restore", url.Values{}); a.status != http.StatusSeeOther {
		t.Errorf("restore: %d", a.status)
	}
	if err := f.post.Accepts(t.Context(), b.Address); err != nil {
		t.Errorf("a restored inbox: %v", err)
	}
}

// TestInboxOfAnotherProjectIsHidden: another project's inbox is not there, and its recovery key
// recovers nothing here.
func TestInboxOfAnotherProjectIsHidden(t *testing.T) {
	f := setup(t)
	f.enter()
	var other auth.Principal
	f.update(func(tx *store.Tx) error {
		id, _, err := auth.NewProject(t.Context(), tx, "two")
		other = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
		return err
	})
	b, key, err := f.post.CreateInbox(t.Context(), other, directory.NewInbox{Address: "foreign"}, "")
	if err != nil {
		t.Fatal(err)
	}
	agent, err := auth.CheckKey(t.Context(), f.db, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), agent, key, "")
	if err != nil {
		t.Fatal(err)
	}
	_, recovery, err := f.post.Keys.AddRecovery(t.Context(), agent, k)
	if err != nil {
		t.Fatal(err)
	}
	page := "/console/inboxes/" + b.ID
	tries := []answer{f.get(page), f.get("/console/inboxes/foreign@agents.test"), f.get("/console/inboxes/%27")}
	for form, v := range map[string]url.Values{"settings": {"megabytes": {"1"}}, "limits": {"minute": {"1"}, "hour": {"1"}, "day": {"1"}, "recipients": {"1"}, "bytes": {"1"}}, "delete": {}, "restore": {}, "revoke": {"credential": {agent.ID}}} {
		tries = append(tries, f.submit(page+"/"+form, v))
	}
	for i, a := range tries {
		if a.status != http.StatusNotFound || strings.Contains(a.body, "foreign@") {
			t.Errorf("try %d: %d, want 404", i, a.status)
		}
	}
	if a := f.submit("/console/recover", url.Values{"recovery": {recovery.Reveal()}}); a.status != http.StatusBadRequest || len(shown(t, a.body)) != 0 {
		t.Errorf("recover: %d", a.status)
	}
	if b, err := f.post.Directory.Find(t.Context(), other, b.ID); err != nil || b.MaxBytes != directory.MaxBytes {
		t.Errorf("afterwards: %+v, %v", b, err)
	}
}
