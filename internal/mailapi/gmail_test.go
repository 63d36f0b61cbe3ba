package mailapi

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/gmail"
	"postern/internal/gmail/gmailtest"
	"postern/internal/mailauth"
	"postern/internal/secret"
	"postern/internal/storetest"

	"postern/internal/store"
)

const gmailApp = "1-a.apps.googleusercontent.com"

// signInsAtGoogle returns sign-ins at a stand-in for Google, which f.google is then.
func (f *fixture) signInsAtGoogle(t *testing.T, log *slog.Logger, secrets *secret.Store) *gmail.SignIns {
	t.Helper()
	f.google = gmailtest.Start()
	t.Cleanup(f.google.Close)
	f.google.AddClient(gmailtest.Client{ID: gmailApp, Secret: "s3cret", Devices: true})
	service, err := gmail.New(gmail.Config{Transport: &http.Transport{}, Base: f.google.URL, Backoff: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	mailboxes, err := connector.New(log, f.db, f.post, secrets, connector.Config{
		Openers: map[connector.Kind]connector.Opener{gmail.Kind: service}, Strip: func(raw []byte) []byte { return raw }, Results: mailauth.Given,
	})
	if err != nil {
		t.Fatal(err)
	}
	s, err := gmail.NewSignIns(f.db, service, mailboxes, secrets)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// begun begins a sign-in on another device as a person does, who says yes there with
// the account.
func (f *fixture) begun(t *testing.T, person, account string) (token string) {
	t.Helper()
	f.google.AddAccount(account)
	got := f.do(t, person, "POST", "/v1/connections/gmail/sign-ins", `{"client_id":"`+gmailApp+`","client_secret":"s3cret"}`)
	if got.code != http.StatusCreated {
		t.Fatal(got.code, got.body)
	}
	res, err := new(http.Client).PostForm(f.google.URL+"/device", url.Values{"user_code": {got.field(t, "user_code")}, "account": {account}, "answer": {"allow"}})
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatal(err, res)
	}
	res.Body.Close()
	return got.field(t, "sign_in")
}

func TestConnectGmail(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		connect := func(who, body string) answered {
			t.Helper()
			return f.do(t, who, "POST", "/v1/connections/gmail", body)
		}
		// What a person began, nobody else ends, and nobody changes.
		token := f.begun(t, "person", "ann@gmail.example")
		if got := connect("foreign person", `{"sign_in":"`+token+`"}`); got.code != 400 || !strings.Contains(got.body, "begun") {
			t.Errorf("another project's person: got %d %s", got.code, got.body)
		}
		for _, bad := range []string{"", "x", token[:20], token + "A", strings.Repeat("A", 20000)} {
			if got := connect("person", `{"sign_in":"`+bad+`"}`); got.code != 400 {
				t.Errorf("sign_in %.30q: got %d %s", bad, got.code, got.body)
			}
		}
		got := connect("person", `{"sign_in":"`+token+`","display_name":"Ann","most":10}`)
		if got.code != 201 || got.field(t, "address") != "ann@gmail.example" || !strings.HasPrefix(got.field(t, "key"), "pib_") {
			t.Fatalf("connect: got %d %s", got.code, got.body)
		}
		if got := connect("person", `{"sign_in":"`+token+`"}`); got.code != 400 {
			t.Errorf("once more: got %d %s", got.code, got.body)
		}
		// A second sign-in of the same mailbox leaves nothing open behind it.
		revoked := f.google.Revocations()
		if got := connect("person", `{"sign_in":"`+f.begun(t, "person", "ann@gmail.example")+`"}`); got.code != 409 {
			t.Errorf("the same mailbox: got %d %s", got.code, got.body)
		}
		if f.google.Revocations() != revoked+1 {
			t.Error("a credential that nobody keeps was not revoked")
		}
		// Signing in again takes the same mailbox alone, and shows no key.
		if got := connect("person", `{"connection":"ann@gmail.example","sign_in":"`+f.begun(t, "person", "ann@gmail.example")+`"}`); got.code != 201 || strings.Contains(got.body, "pib_") {
			t.Errorf("sign in again: got %d %s", got.code, got.body)
		}
		if got := connect("person", `{"connection":"ann@gmail.example","sign_in":"`+f.begun(t, "person", "bob@gmail.example")+`"}`); got.code != 400 || !strings.Contains(got.body, "other account") {
			t.Errorf("another account: got %d %s", got.code, got.body)
		}

		// In a browser: only to where the code is the person's own.
		begin := func(redirect string) answered {
			return f.do(t, "person", "POST", "/v1/connections/gmail/sign-ins", fmt.Sprintf(`{"client_id":%q,"client_secret":"s3cret","redirect_uri":%q}`, gmailApp, redirect))
		}
		for _, bad := range []string{"https://evil.example/", "http://evil.example/", "http://localhost:1/", "http://127.0.0.1:1/?x", "http://127.0.0.1.evil.example/", "http://a@127.0.0.1/", "javascript:alert(1)", "https://mail.example/console/callback"} {
			if got := begin(bad); got.code != 400 || !strings.Contains(got.body, "redirect_uri") {
				t.Errorf("redirect to %s: got %d %s", bad, got.code, got.body)
			}
		}
		for _, good := range []string{"http://127.0.0.1:7/", "http://[::1]:7/x"} {
			if got := begin(good); got.code != 201 || strings.Contains(got.field(t, "url"), "s3cret") {
				t.Errorf("redirect to %s: got %d %s", good, got.code, got.body)
			}
		}
		token = begin("http://127.0.0.1:7/").field(t, "sign_in")
		if got := connect("person", `{"sign_in":"`+token+`","state":"other","code":"x"}`); got.code != 400 || !strings.Contains(got.body, "state") {
			t.Errorf("a code of somebody else's sign-in: got %d %s", got.code, got.body)
		}
		if got := f.do(t, "person", "POST", "/v1/connections/gmail/sign-ins", `{"client_id":"other"}`); got.code != 400 || !strings.Contains(got.body, "client") {
			t.Errorf("an unknown client: got %d %s", got.code, got.body)
		}

		// What Google gave is nowhere in the clear.
		for _, r := range f.google.RefreshTokens() {
			if strings.Contains(f.log.String(), r) || inConnections(t, db, r) {
				t.Error("a refresh token is in the log or in the database")
			}
		}
		if inConnections(t, db, "s3cret") || strings.Contains(f.log.String(), "s3cret") {
			t.Error("the client's secret is in the log or in the database")
		}
	})
}

// inConnections reports whether the connections' table has a text.
func inConnections(t *testing.T, db *store.DB, text string) bool {
	t.Helper()
	found := false
	err := db.View(t.Context(), func(tx *store.Tx) error {
		rows, err := tx.QueryContext(t.Context(), `select settings, public, problem from mail_connection`)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var settings []byte
			var public, problem string
			if err := rows.Scan(&settings, &public, &problem); err != nil {
				return err
			}
			var v map[string]string
			if err := json.Unmarshal([]byte(public), &v); err != nil {
				return err
			}
			found = found || strings.Contains(string(settings)+public+problem, text)
		}
		return rows.Err()
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// ownSignIn is the rule of ending a sign-in: the person who began it.
func ownSignIn(p principal, _ target, ok int) int {
	if p.kind == auth.Person && p.foreign {
		return http.StatusBadRequest
	}
	return when(p.kind == auth.Person, ok)
}
