package mailapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// invitation makes a link of ours, to be withdrawn.
func (x *trial) invitation() {
	v, _, err := x.f.people.Invite(x.t.Context(), x.f.person, auth.Invitation{Role: auth.Viewer})
	if err != nil {
		x.t.Fatal(err)
	}
	x.id, x.after = v.ID, x.f.clearInvitations
}

// clearInvitations withdraws all: a project has room for so many.
func (f *fixture) clearInvitations() {
	_ = f.db.Update(context.Background(), func(tx *store.Tx) error { // what is left is tidied by the next
		_, err := tx.ExecContext(context.Background(), `delete from setup`)
		return err
	})
}

// someone is a person of ours whom the operator manages.
func (f *fixture) someone(t *testing.T) string {
	t.Helper()
	f.member(t, "vic", auth.Viewer)
	return "vic"
}

const password = "correct horse battery"

// member makes a person of ours, if there is none of the name.
func (f *fixture) member(t *testing.T, name string, role auth.Role) {
	t.Helper()
	if f.hash == "" {
		var err error
		if f.hash, err = auth.HashPassword(password); err != nil {
			t.Fatal(err)
		}
	}
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, link, err := auth.NewInvitation(t.Context(), tx, auth.Invitation{Project: f.person.Project, Role: role})
		if err == nil {
			_, err = auth.Redeem(t.Context(), tx, link, name, f.hash)
		}
		return err
	})
	if err != nil && !errors.Is(err, auth.ErrInvalid) { // there is one
		t.Fatal(err)
	}
}

// signIn makes a client of a person's session.
func (f *fixture) signIn(t *testing.T, name string, role auth.Role) {
	t.Helper()
	f.member(t, name, role)
	got := f.do(t, "nobody", "POST", "/v1/session", fmt.Sprintf(`{"name":%q,"password":%q}`, name, password))
	if got.code != http.StatusCreated || got.field(t, "role") != string(role) || got.field(t, "strong_at") != "<nil>" {
		t.Fatalf("sign in %s: %+v", name, got)
	}
	f.byKey(name, auth.Secret(got.field(t, "token")))
}

func TestSession(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.signIn(t, "rita", auth.Reviewer)
		token := f.secret("rita").Reveal()
		if got := f.do(t, "rita", "GET", "/v1/session", ""); got.code != 200 || got.field(t, "person") != "rita" || got.field(t, "role") != "reviewer" {
			t.Errorf("who: %+v", got)
		}
		for _, who := range []string{"project", "key a"} {
			// The attack: an agent that was told a password, or an unlucky person's key.
			if got := f.do(t, who, "POST", "/v1/session", `{"name":"rita","password":"`+password+`"}`); got.code != 403 {
				t.Errorf("%s begins a session: %+v", who, got)
			}
		}
		for name, body := range map[string]string{
			"a wrong password": `{"name":"rita","password":"guess guess guess"}`,
			"nobody":           `{"name":"nobody","password":"guess guess guess"}`,
			"hostile":          `{"name":"x\u0000' or 1=1","password":"guess guess guess"}`,
		} {
			if got := f.do(t, "nobody", "POST", "/v1/session", body); got.code != 401 || got.field(t, "error") != "sign_in_failed" {
				t.Errorf("%s: %+v", name, got)
			}
		}
		// A session is shown as one alone.
		for _, header := range [][]string{{"X-Api-Key", token}, {"Authorization", "Bearer " + token + "A"}, {"Authorization", "Basic " + token}, {"Cookie", auth.SessionCookie + "=" + token}, {"Authorization", "Bearer " + strings.TrimPrefix(token, "pse_")}} {
			if got := f.do(t, "nobody", "GET", "/v1/session", "", header...); got.code != 401 {
				t.Errorf("%s: %+v", header[0], got)
			}
		}
		var browser auth.Secret
		err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
			_, browser, err = auth.BeginSession(t.Context(), tx, auth.Principal{Kind: auth.Person, ID: "rita", Project: f.person.Project}, auth.Session{Kind: auth.Browser})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := f.do(t, "nobody", "GET", "/v1/session", "", "Authorization", "Bearer "+browser.Reveal()); got.code != 401 {
			t.Errorf("a browser's session as a key: %+v", got)
		}
		if _, err := auth.CheckSession(t.Context(), db, auth.Secret(token)); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("a session for REST as a browser's: %v", err)
		}
		// It decides, as its person, and reads no inbox.
		id := f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/messages", draft).field(t, "id")
		a, err := f.gate.Action(t.Context(), f.person, id)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.do(t, "rita", "GET", "/v1/inboxes/"+f.a.ID+"/messages", ""); got.code != 403 {
			t.Errorf("a person reads an inbox: %+v", got)
		}
		if got := f.do(t, "rita", "POST", "/v1/actions/"+id+"/decision", fmt.Sprintf(`{"version":%d,"digest":%q,"approve":true}`, a.Version, a.Hex())); got.code != 200 {
			t.Errorf("decide: %+v", got)
		}
		if a, err = f.gate.Action(t.Context(), f.person, id); err != nil || a.Decider != "person:rita" {
			t.Errorf("decided by %q, %v", a.Decider, err)
		}
		if got := f.do(t, "rita", "POST", "/v1/session/step-up", `{"code":"123456"}`); got.code != 400 {
			t.Errorf("step up without a second factor: %+v", got)
		}
		if got := f.do(t, "rita", "DELETE", "/v1/session", ""); got.code != 204 {
			t.Errorf("sign out: %+v", got)
		}
		if got := f.do(t, "rita", "GET", "/v1/session", ""); got.code != 401 {
			t.Errorf("after that: %+v", got)
		}
	})
}

// least says which role each change of REST needs of a person; none means that
// it is no person's. A viewer changes nothing: only their own session.
var least = map[string]auth.Role{
	"POST /v1/inboxes/{inbox}/mode-codes":                                     auth.Owner,
	"POST /v1/inboxes/{inbox}/upgrade":                                        none,
	"POST /v1/inboxes/{inbox}/request-upgrade":                                none,
	"POST /v1/inboxes/{inbox}/allowlist":                                      auth.Owner,
	"DELETE /v1/inboxes/{inbox}/allowlist/{id}":                               auth.Reviewer,
	"POST /v1/inboxes/{inbox}/allowlist/requests":                             none,
	"POST /v1/inboxes/{inbox}/overseers":                                      auth.Owner,
	"POST /v1/overseers":                                                      auth.Owner,
	"POST /v1/policy":                                                         auth.Reviewer,
	"POST /v1/runs":                                                           auth.Reviewer,
	"PUT /v1/runs/{id}/input":                                                 none, // somebody else proposed the run
	"POST /v1/runs/{id}/propose":                                              none, // likewise
	"POST /v1/runs/{id}/cancel":                                               auth.Reviewer,
	"PUT /v1/contracts/{name}":                                                auth.Owner,
	"DELETE /v1/contracts/{name}":                                             auth.Owner,
	"PUT /v1/boundary":                                                        auth.Owner,
	"DELETE /v1/boundary":                                                     auth.Owner,
	"POST /v1/policy/evaluation":                                              auth.Viewer,
	"POST /v1/notify/test":                                                    auth.Viewer,
	"POST /v1/notify/telegram":                                                auth.Viewer,
	"DELETE /v1/notify/telegram/{person}":                                     auth.Viewer,
	"PUT /v1/notify/settings":                                                 auth.Viewer,
	"DELETE /v1/notify/settings":                                              auth.Viewer,
	"PUT /v1/notify/settings/project":                                         auth.Owner,
	"POST /v1/notify/rooms":                                                   auth.Owner,
	"POST /v1/notify/rooms/{id}/test":                                         auth.Owner,
	"DELETE /v1/notify/rooms/{id}":                                            auth.Owner,
	"DELETE /v1/notify/devices/{id}":                                          auth.Viewer,
	"POST /v1/notify/slack":                                                   auth.Viewer,
	"POST /v1/notify/slack/lookup":                                            auth.Viewer,
	"DELETE /v1/notify/slack/{person}":                                        auth.Viewer,
	"PUT /v1/actions/{id}/snooze":                                             auth.Reviewer,
	"DELETE /v1/actions/{id}/snooze":                                          auth.Reviewer,
	"PUT /v1/actions/{id}/assignee":                                           auth.Reviewer,
	"DELETE /v1/actions/{id}/assignee":                                        auth.Reviewer,
	"DELETE /v1/domains/{id}":                                                 auth.Owner,
	"DELETE /v1/grants/{id}":                                                  auth.Owner,
	"DELETE /v1/apps/{id}":                                                    auth.Owner,
	"DELETE /v1/inboxes/{inbox}":                                              auth.Owner,
	"DELETE /v1/inboxes/{inbox}/drafts/{id}":                                  none,
	"DELETE /v1/inboxes/{inbox}/context-grants/{id}":                          auth.Owner,
	"DELETE /v1/inboxes/{inbox}/grants/{id}":                                  auth.Owner,
	"DELETE /v1/inboxes/{inbox}/keys/{id}":                                    auth.Owner,
	"DELETE /v1/inboxes/{inbox}/webhooks/{id}":                                none,
	"DELETE /v1/invitations/{id}":                                             auth.Owner,
	"DELETE /v1/session":                                                      auth.Viewer,
	"DELETE /v1/signing/{id}/keys/{key}":                                      auth.Owner,
	"DELETE /v1/webhooks/{id}":                                                auth.Owner,
	"PATCH /v1/inboxes/{inbox}":                                               auth.Owner,
	"PATCH /v1/inboxes/{inbox}/webhooks/{id}":                                 none,
	"PATCH /v1/people/{id}":                                                   auth.Owner,
	"POST /v1/accounts":                                                       auth.Owner,
	"POST /v1/actions/{id}/cancel":                                            auth.Reviewer,
	"POST /v1/actions/{id}/decision":                                          auth.Reviewer,
	"POST /v1/actions/{id}/resolution":                                        auth.Reviewer,
	"POST /v1/actions/{id}/revision":                                          none,
	"POST /v1/actions/decisions":                                              auth.Reviewer,
	"POST /v1/actions/{id}/comments":                                          auth.Reviewer,
	"POST /v1/actions/{id}/edit":                                              auth.Reviewer,
	"POST /v1/actions/{id}/narrowing":                                         auth.Reviewer,
	"DELETE /v1/permits/{id}":                                                 auth.Reviewer,
	"POST /v1/switches":                                                       auth.Reviewer,
	"DELETE /v1/switches/{id}":                                                auth.Owner,
	"POST /v1/audit/checkpoint":                                               auth.Reviewer,
	"POST /v1/verifications":                                                  auth.Owner,
	"POST /v1/verifications/{id}":                                             auth.Owner,
	"POST /v1/connect-codes":                                                  auth.Owner,
	"DELETE /v1/connect-codes/{id}":                                           auth.Owner,
	"POST /v1/connections/gmail":                                              auth.Owner,
	"POST /v1/connections/gmail/sign-ins":                                     auth.Owner,
	"POST /v1/connections":                                                    auth.Owner,
	"DELETE /v1/connections/{id}":                                             auth.Owner,
	"POST /v1/connections/{id}/pause":                                         auth.Owner,
	"POST /v1/connections/{id}/resume":                                        auth.Owner,
	"POST /v1/connections/{id}/resync":                                        auth.Owner,
	"POST /v1/connections/{id}/sign-in":                                       auth.Owner,
	"POST /v1/secrets":                                                        auth.Owner,
	"PATCH /v1/secrets/{id}":                                                  auth.Owner,
	"DELETE /v1/secrets/{id}":                                                 auth.Owner,
	"POST /v1/secrets/{id}/rotation":                                          auth.Owner,
	"POST /v1/domains":                                                        auth.Owner,
	"POST /v1/domains/{id}/verify":                                            auth.Reviewer,
	"POST /v1/emails/send":                                                    none,
	"POST /v1/inboxes":                                                        auth.Owner,
	"POST /v1/inboxes/{inbox}/drafts":                                         none,
	"POST /v1/inboxes/{inbox}/drafts/{id}":                                    none,
	"POST /v1/inboxes/{inbox}/drafts/{id}/send":                               none,
	"POST /v1/inboxes/{inbox}/emails/{id}/extract":                            none,
	"POST /v1/inboxes/{inbox}/context-grants":                                 none,
	"POST /v1/inboxes/{inbox}/grants":                                         none,
	"POST /v1/inboxes/{inbox}/keys":                                           none,
	"POST /v1/inboxes/{inbox}/keys/{id}/rotate":                               none,
	"POST /v1/inboxes/{inbox}/labels":                                         none,
	"POST /v1/inboxes/{inbox}/messages":                                       none,
	"POST /v1/inboxes/{inbox}/messages/{id}/forward":                          none,
	"POST /v1/inboxes/{inbox}/messages/{id}/reply":                            none,
	"POST /v1/inboxes/{inbox}/recover":                                        none,
	"POST /v1/inboxes/{inbox}/recovery-key":                                   none,
	"POST /v1/inboxes/{inbox}/sending":                                        auth.Owner,
	"POST /v1/inboxes/{inbox}/undelete":                                       auth.Owner,
	"POST /v1/inboxes/{inbox}/webhooks":                                       none,
	"POST /v1/inboxes/{inbox}/webhooks/{id}/deliveries/{delivery}/redelivery": none,
	"POST /v1/inboxes/{inbox}/webhooks/{id}/rotation":                         none,
	"POST /v1/invitations":                                                    auth.Owner,
	"POST /v1/people/{id}/disable":                                            auth.Owner,
	"POST /v1/people/{id}/enable":                                             auth.Owner,
	"POST /v1/people/{id}/link-operator":                                      none,
	"POST /v1/people/{id}/password-link":                                      none,
	"POST /v1/people/{id}/reset":                                              auth.Owner,
	"POST /v1/people/{id}/unlink-operator":                                    none,
	"POST /v1/quarantine/{id}/drop":                                           auth.Reviewer,
	"POST /v1/quarantine/{id}/release":                                        auth.Reviewer,
	"POST /v1/sending":                                                        auth.Owner,
	"POST /v1/session/step-up":                                                auth.Viewer,
	"POST /v1/signing/{id}/check":                                             auth.Reviewer,
	"POST /v1/signing/{id}/rotation":                                          auth.Owner,
	"POST /v1/suppression":                                                    auth.Reviewer,
	"POST /v1/suppression/lookup":                                             auth.Reviewer,
	"POST /v1/suppression/removal":                                            auth.Owner,
	"POST /v1/suspensions/{id}/lift":                                          auth.Owner,
	"POST /v1/verify/{provider}":                                              auth.Owner,
	"POST /v1/webhooks":                                                       none,
}

const none auth.Role = "none"

// TestRoles tries every route that changes something with a session of each
// role, and fails for one that is in no row.
func TestRoles(t *testing.T) {
	for _, rt := range new(Server).table() {
		if _, ok := least[rt.method+" "+rt.path]; rt.method != "GET" && !ok {
			t.Errorf("%s %s is in no row of least: which role does it need?", rt.method, rt.path)
		}
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.principals(t)
		ranks := []auth.Role{auth.Viewer, auth.Reviewer, auth.Owner, none}
		for _, role := range auth.Roles {
			f.signIn(t, "an-"+string(role), role)
		}
		n := 0
		for _, o := range operations {
			want, ok := least[o.method+" "+o.route]
			if !ok {
				continue
			}
			for _, role := range auth.Roles {
				n++
				x := &trial{t: t, f: f, n: n, target: targets[0], inbox: f.a, holder: "key a", want: 200, after: func() {}}
				may := slices.Index(ranks, role) >= slices.Index(ranks, want)
				if o.prepare != nil {
					o.prepare(x)
				}
				path := strings.NewReplacer("{inbox}", f.a.ID, "{id}", x.id, "{index}", "0").Replace(o.route) + x.query
				got := f.do(t, "an-"+string(role), o.method, path, x.body)
				x.after()
				if o.route == "/v1/session" { // it has ended
					f.signIn(t, "an-"+string(role), role)
				}
				if strings.Contains(o.route, "key") || strings.Contains(o.route, "grants") || strings.Contains(o.route, "recover") {
					f.tidy(t)
				}
				if (got.code != http.StatusForbidden) != may || got.code == http.StatusUnauthorized {
					t.Errorf("%s %s as %s: got %d, want it to need %s: %.300s", o.method, o.route, role, got.code, want, got.body)
				}
			}
		}
	})
}
