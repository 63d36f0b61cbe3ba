package console_test

import (
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pquerna/otp/totp"

	"postern/internal/auth"
	"postern/internal/console"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// least says which role each form of the console needs. It is written here once
// more: the table of routes is what is tested.
var least = map[string]auth.Role{
	"/console/account/app":                      auth.Viewer,
	"/console/account/app/confirm":              auth.Viewer,
	"/console/account/app/remove":               auth.Viewer,
	"/console/account/codes":                    auth.Viewer,
	"/console/account/passkeys":                 auth.Viewer,
	"/console/account/passkeys/ask":             auth.Viewer,
	"/console/account/passkeys/{id}/remove":     auth.Viewer,
	"/console/account/password":                 auth.Viewer,
	"/console/account/reach":                    auth.Viewer,
	"/console/account/sessions/{id}/end":        auth.Viewer,
	"/console/account/telegram":                 auth.Viewer,
	"/console/account/telegram/unlink":          auth.Viewer,
	"/console/actions/{id}/cancel":              auth.Reviewer,
	"/console/actions/{id}/comment":             auth.Reviewer,
	"/console/actions/{id}/decision":            auth.Reviewer,
	"/console/actions/{id}/edit":                auth.Reviewer,
	"/console/actions/{id}/resolution":          auth.Reviewer,
	"/console/actions/{id}/snooze":              auth.Reviewer,
	"/console/actions/{id}/wake":                auth.Reviewer,
	"/console/actions/{id}/assign":              auth.Reviewer,
	"/console/audit/verify":                     auth.Viewer,
	"/console/batch":                            auth.Reviewer,
	"/console/domains":                          auth.Owner,
	"/console/domains/{id}/check":               auth.Reviewer,
	"/console/domains/{id}/remove":              auth.Owner,
	"/console/apps/{id}/end":                    auth.Owner,
	"/console/connect":                          auth.Owner,
	"/console/inboxes":                          auth.Owner,
	"/console/inboxes/{id}/allow":               auth.Owner,
	"/console/inboxes/{id}/code":                auth.Owner,
	"/console/inboxes/{id}/delete":              auth.Owner,
	"/console/inboxes/{id}/disallow":            auth.Reviewer,
	"/console/inboxes/invite":                   auth.Owner,
	"/console/inboxes/{id}/limits":              auth.Owner,
	"/console/inboxes/{id}/mode":                auth.Reviewer,
	"/console/inboxes/{id}/restore":             auth.Owner,
	"/console/inboxes/{id}/revoke":              auth.Owner,
	"/console/inboxes/{id}/settings":            auth.Owner,
	"/console/keys":                             auth.Owner,
	"/console/keys/{id}/end":                    auth.Owner,
	"/console/account/keys":                     auth.Viewer,
	"/console/people":                           auth.Owner,
	"/console/people/invitations/{id}/withdraw": auth.Owner,
	"/console/people/{id}/disable":              auth.Owner,
	"/console/people/{id}/enable":               auth.Owner,
	"/console/people/{id}/reach":                auth.Owner,
	"/console/people/{id}/reset":                auth.Owner,
	"/console/people/{id}/role":                 auth.Owner,
	"/console/people/{id}/link-operator":        auth.Owner,
	"/console/people/{id}/unlink-operator":      auth.Owner,
	"/console/account/operator":                 auth.Owner, // if nobody has said that the person is the operator; TestOperatorConfirms has the rest
	"/console/account/operator/unlink":          auth.Viewer,
	"/console/policy":                           auth.Reviewer,
	"/console/quarantine/{id}/drop":             auth.Reviewer,
	"/console/quarantine/{id}/release":          auth.Reviewer,
	"/console/recover":                          auth.Owner,
	"/console/sandboxes/{id}/kill":              auth.Reviewer,
	"/console/sandboxes/{id}/download":          auth.Reviewer,
	"/console/sandboxes/{id}/pause":             auth.Owner,
	"/console/sandboxes/{id}/resume":            auth.Owner,
	"/console/sandboxes/{id}/fork":              auth.Owner,
	"/console/sandboxes/{id}/extend":            auth.Owner,
	"/console/sandboxes/{id}/command":           auth.Owner,
	"/console/sandboxes/{id}/terminal":          auth.Owner,
	"/console/runs/{id}/cancel":                 auth.Reviewer,
	"/console/sending/lift":                     auth.Owner,
	"/console/sending/lookup":                   auth.Reviewer,
	"/console/sending/suppression":              auth.Reviewer,
	"/console/setup":                            "",
	"/console/signin":                           "",
	"/console/signin/code":                      "",
	"/console/signin/passkey":                   "",
	"/console/signin/passkey/ask":               "",
	"/console/signout":                          "",
	"/console/stepup":                           auth.Viewer,
	"/console/stepup/passkey":                   auth.Viewer,
	"/console/stepup/passkey/ask":               auth.Viewer,
	"/console/switches":                         auth.Reviewer,
	"/console/switches/{id}/off":                auth.Owner,
	"/console/account/context":                  auth.Reviewer,
	"/console/account/context/{id}/remove":      auth.Reviewer,
	"/console/disk/measure":                     auth.Owner,
	"/console/disk/builds/{id}/delete":          auth.Owner,
	"/console/permits/{id}/end":                 auth.Reviewer,
	"/console/actions/{id}/narrow":              auth.Reviewer,
	"/console/inboxes/codes/{id}/withdraw":      auth.Owner,
	"/console/mailboxes":                        auth.Owner,
	"/console/mailboxes/{id}":                   auth.Owner,
	"/console/mailboxes/gmail":                  auth.Owner,
	"/console/mailboxes/gmail/callback":         auth.Owner,
	"/console/secrets":                          auth.Owner,
	"/console/secrets/{id}":                     auth.Owner,
	"/console/webhooks":                         auth.Owner,
	"/console/webhooks/{id}":                    auth.Owner,

	"/console/account/notifications":                     auth.Viewer,
	"/console/account/notifications/devices":             auth.Viewer,
	"/console/account/notifications/devices/{id}/remove": auth.Viewer,
	"/console/account/notifications/project":             auth.Owner,
	"/console/account/notifications/rooms":               auth.Owner,
	"/console/account/notifications/rooms/{id}/remove":   auth.Owner,
	"/console/account/notifications/rooms/{id}/test":     auth.Owner,
	"/console/account/notifications/slack":               auth.Viewer,
	"/console/account/notifications/slack/unlink":        auth.Viewer,
	"/console/account/notifications/test":                auth.Viewer,
}

// TestEveryFormNeedsItsRole tries each role on every form, and fails for one that is in no row.
func TestEveryFormNeedsItsRole(t *testing.T) {
	f := setup(t)
	f.enter()
	as := map[auth.Role]*http.Client{}
	for _, role := range []auth.Role{auth.Owner, auth.Reviewer, auth.Viewer} {
		as[role] = f.joined(role)
	}
	nobody := f.browser()
	// From the least on: what an owner changes, such as who the operator is, must not
	// decide what the others are answered.
	roles := []auth.Role{auth.Viewer, auth.Reviewer, auth.Owner}
	for _, path := range console.Forms() {
		want, ok := least[path]
		if !ok {
			t.Errorf("%s is in no row of least: which role does it need?", path)
			continue
		}
		// Of something that there is not: who may is told that, or what is wrong
		// with the form, and nothing is changed.
		p := strings.NewReplacer("{id}", "act_"+strings.Repeat("A", 26), "{name}", "x", "{version}", "1").Replace(path)
		if want == "" { // it is shown that each answers who is nobody, by the tests of what it does
			continue
		}
		for i, role := range roles {
			f.client = as[role]
			if got := f.submit(p, url.Values{}); (got.status == http.StatusForbidden) != (i < slices.Index(roles, want)) {
				t.Errorf("POST %s as %s: status %d, and it needs %q", path, role, got.status, want)
			}
		}
		f.client = nobody
		if got := f.submit(p, url.Values{}); got.status != http.StatusUnauthorized {
			t.Errorf("POST %s as nobody: status %d, want 401", path, got.status)
		}
	}
}

// joined returns the browser of somebody new with this role, called "an-viewer" and so on.
func (f *fixture) joined(role auth.Role) *http.Client {
	f.t.Helper()
	f.client = f.browser()
	f.update(func(tx *store.Tx) (err error) {
		_, f.link, err = auth.NewInvitation(f.t.Context(), tx, auth.Invitation{Project: f.project.Project, Role: role})
		return err
	})
	if a := f.submit("/console/setup", url.Values{"token": {f.link.Reveal()}, "name": {"an-" + string(role)}, "password": {password}, "again": {password}}); a.status != http.StatusSeeOther {
		f.t.Fatalf("make a %s: %d", role, a.status)
	}
	return f.client
}

// TestOperatorConfirms: an owner says for themselves that they are the operator; a reviewer
// confirms that an owner has said so, and a viewer is told that they decide nothing.
func TestOperatorConfirms(t *testing.T) {
	f := setup(t)
	f.enter()
	owner := f.client
	as := map[auth.Role]*http.Client{auth.Reviewer: f.joined(auth.Reviewer), auth.Viewer: f.joined(auth.Viewer)}
	post := func(c *http.Client, path string, want int) {
		t.Helper()
		f.client = c
		if got := f.submit(path, url.Values{}); got.status != want {
			t.Errorf("POST %s: %d, want %d", path, got.status, want)
		}
	}
	for _, c := range as { // nobody has said so
		post(c, "/console/account/operator", http.StatusForbidden)
		post(c, "/console/account/operator/unlink", http.StatusBadRequest)
	}
	post(owner, "/console/people/an-viewer/link-operator", http.StatusConflict)
	post(owner, "/console/people/an-reviewer/link-operator", http.StatusSeeOther)
	post(owner, "/console/account/operator", http.StatusBadRequest) // it is the reviewer
	post(as[auth.Viewer], "/console/account/operator", http.StatusBadRequest)
	post(as[auth.Reviewer], "/console/account/operator", http.StatusSeeOther)
	post(as[auth.Viewer], "/console/account/operator/unlink", http.StatusBadRequest)
	post(as[auth.Reviewer], "/console/account/operator/unlink", http.StatusSeeOther)
	post(owner, "/console/account/operator", http.StatusSeeOther)
}

// TestSecondFactorSignIn: a person sets up an app, signs in with it, and is asked for
// it again where it matters; every way back is to a page of ours.
func TestSecondFactorSignIn(t *testing.T) {
	f := setup(t)
	f.enter()
	shown := f.submit("/console/account/app", url.Values{"password": {password}})
	secret := regexp.MustCompile(`<code class="copy">([A-Z2-7 ]+)</code>`).FindStringSubmatch(shown.body)
	if shown.status != http.StatusOK || secret == nil || !strings.Contains(shown.body, `<svg class="qr"`) {
		t.Fatalf("set up an app: %d\n%s", shown.status, shown.body)
	}
	now := func() string {
		f.exec(`update totp set step = 0`) // as time would
		code, err := totp.GenerateCode(strings.ReplaceAll(secret[1], " ", ""), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return code
	}
	form := f.form(shown.body, "app-form")
	code, err := totp.GenerateCode(strings.ReplaceAll(secret[1], " ", ""), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	form.Set("code", code)
	if a := f.submit("/console/account/app/confirm", form); a.status != http.StatusOK || strings.Count(a.body, `<code class="copy">`) != 10 {
		t.Fatalf("confirm: %d\n%s", a.status, a.body)
	}
	f.submit("/console/signout", url.Values{})

	ask := func() url.Values {
		a := f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {password}, "next": {"/console/decided"}})
		if a.status != http.StatusOK || len(a.header["Set-Cookie"]) > 0 {
			t.Fatalf("the password alone: %d, %v", a.status, a.header)
		}
		return f.form(a.body, "code-form")
	}
	second := ask()
	second.Set("code", "000000")
	if a := f.submit("/console/signin/code", second); a.status != http.StatusUnauthorized || len(a.header["Set-Cookie"]) > 0 {
		t.Errorf("a wrong code: %d", a.status)
	}
	second.Set("code", now())
	second.Set("next", "https://evil.example/")
	if a := f.submit("/console/signin/code", second); a.status != http.StatusSeeOther || a.location != "/console/" {
		t.Errorf("the right code, and a way to another site: %d to %q", a.status, a.location)
	}
	second.Set("code", now())
	if a := f.submit("/console/signin/code", second); a.status != http.StatusUnauthorized {
		t.Errorf("the question a second time: %d", a.status)
	}
	f.submit("/console/signout", url.Values{})
	second = ask()
	second.Set("code", now())
	if a := f.submit("/console/signin/code", second); a.location != "/console/decided" {
		t.Errorf("the right code leads to %q", a.location)
	}

	// Long after: people are not managed without another proof.
	f.exec(`update session set strong_at = 1`)
	a := f.submit("/console/people", url.Values{"role": {"owner"}})
	if a.status != http.StatusForbidden || !strings.Contains(a.body, `href="/console/stepup?next=%2Fconsole%2Fpeople"`) {
		t.Fatalf("invite: %d\n%s", a.status, a.body)
	}
	for _, next := range []string{"https://evil.example/", "//evil.example/console/", "/console/../v1/", "javascript:alert(1)", "/console/signout", "/console/stepup/passkey", "/console/%2e%2e/"} {
		page := f.get("/console/stepup?" + url.Values{"next": {next}}.Encode())
		if got := f.form(page.body, "code-form").Get("next"); got != "/console/" {
			t.Errorf("a proof would lead to %q, for %q", got, next)
		}
		f.update(func(tx *store.Tx) error { _, err := tx.ExecContext(t.Context(), `delete from sign_in_try`); return err })
		if a := f.submit("/console/stepup", url.Values{"next": {next}, "code": {now()}}); a.status != http.StatusSeeOther || a.location != "/console/" {
			t.Errorf("a proof leads to %q (%d), for %q", a.location, a.status, next)
		}
	}
	if a := f.submit("/console/people", url.Values{"role": {"reviewer"}}); a.status != http.StatusCreated {
		t.Errorf("invite after the proof: %d\n%s", a.status, a.body)
	}
}

// TestVoteOfDisabledPersonDoesNotCount: of two who have to approve one is let in no more: his yes
// counts no more either.
func TestVoteOfDisabledPersonDoesNotCount(t *testing.T) {
	f := setup(t)
	f.enter()
	f.judge.verdict = policy.Verdict{Effect: policy.Ask, Approvers: 2}
	approve := func(a oversight.Action, who auth.Principal) {
		if err := f.gate.Decide(t.Context(), who, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		act  func() error
	}{
		{"disabled", func() error { return f.people.Disable(t.Context(), f.person, "disabled") }},
		{"demoted", func() error { return f.people.SetRole(t.Context(), f.person, "demoted", auth.Viewer) }},
	} {
		var him auth.Principal
		f.update(func(tx *store.Tx) error {
			_, link, err := auth.NewInvitation(t.Context(), tx, auth.Invitation{Project: f.project.Project, Role: auth.Reviewer})
			if err == nil {
				him, err = auth.Redeem(t.Context(), tx, link, tt.name, "x")
			}
			return err
		})
		f.exec(`update person_change set at = 1`) // a day ago, or longer
		a := f.propose(draft())
		approve(a, him)
		if got := f.state(a.ID); got.Approvals != 1 {
			t.Fatalf("%s: %d approvals before", tt.name, got.Approvals)
		}
		if err := tt.act(); err != nil {
			t.Fatal(err)
		}
		approve(a, f.person)
		if got := f.state(a.ID); got.Approvals != 1 || got.State != oversight.Pending {
			t.Errorf("%s: %d approvals, state %s; want the owner's alone, pending", tt.name, got.Approvals, got.State)
		}
	}
}
