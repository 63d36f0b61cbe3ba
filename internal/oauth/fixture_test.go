package oauth

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/seal"
	"postern/internal/site"
	"postern/internal/store"
)

// A nowhere is a transport that delivers nothing.
type nowhere struct{}

func (nowhere) Deliver(context.Context, mail.Envelope) ([]mail.Delivery, error) { return nil, nil }

// A fixture is a server with two projects, and an inbox of the first.
type fixture struct {
	db   *store.DB
	post *mailbox.PostOffice
	srv  *Server

	ann, eve auth.Principal // owners, of one project each
	inbox    directory.Inbox
	key      auth.Secret // a full key of inbox
	foreign  directory.Inbox
}

const (
	base  = "http://postern.test"
	back  = "https://app.example/callback?keep=1"
	proof = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk" // the verifier of RFC 7636, appendix B
)

func setup(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	ctx := t.Context()
	f := &fixture{db: db}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f.post = mailbox.New(log, db, oversight.NewGate(log, db, oversighttest.Rules(nil)), mailbox.Config{Blobs: blobs, Transport: nowhere{}, Domain: "agents.test"})
	f.srv = New(log, db, f.post, Config{Site: site.Site{Base: "http://localhost:3000", Hosts: []string{"postern.test"}}})
	for name, who := range map[string]*auth.Principal{"ann": &f.ann, "eve": &f.eve} {
		*who = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: name}
		err := db.Update(ctx, func(tx *store.Tx) (err error) {
			who.Project, _, err = auth.NewProject(ctx, tx, name)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if f.inbox, f.key, err = f.post.CreateInbox(ctx, f.ann, directory.NewInbox{Address: "analyst"}, ""); err != nil {
		t.Fatal(err)
	}
	if f.foreign, _, err = f.post.CreateInbox(ctx, f.eve, directory.NewInbox{Address: "foreign"}, ""); err != nil {
		t.Fatal(err)
	}
	return f
}

// post sends a form or a JSON document to an endpoint, and returns the status and answer.
func (f *fixture) send(t *testing.T, path string, body any) (int, map[string]any) {
	t.Helper()
	kind, text := "application/json", ""
	switch b := body.(type) {
	case url.Values:
		kind, text = "application/x-www-form-urlencoded", b.Encode()
	case string:
		text = b
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, base+path, strings.NewReader(text))
	r.Header.Set("Content-Type", kind)
	r.RemoteAddr = "127.0.0.1:5"
	w := httptest.NewRecorder()
	f.srv.Handler().ServeHTTP(w, r)
	out := map[string]any{}
	if b, _ := io.ReadAll(w.Body); len(b) > 0 {
		if err := json.Unmarshal(b, &out); err != nil {
			t.Fatalf("%s: %v: %s", path, err, b)
		}
	}
	return w.Code, out
}

// register registers a program and returns its id.
func (f *fixture) register(t *testing.T, name string, redirects ...string) string {
	t.Helper()
	b, err := json.Marshal(map[string]any{"client_name": name, "redirect_uris": redirects, "logo_uri": "https://evil.example/x.png", "token_endpoint_auth_method": "client_secret_post"})
	if err != nil {
		t.Fatal(err)
	}
	status, got := f.send(t, registerPath, string(b))
	if status != 201 || got["token_endpoint_auth_method"] != "none" {
		t.Fatalf("registered = %d %v", status, got)
	}
	return got["client_id"].(string)
}

// asks returns what a program sends the browser with.
func asks(client string, more ...string) url.Values {
	sum := sha256.Sum256([]byte(proof))
	q := url.Values{
		"response_type": {"code"}, "client_id": {client}, "redirect_uri": {back}, "state": {"a&b=c"}, "scope": {"read draft send"},
		"code_challenge": {base64.RawURLEncoding.EncodeToString(sum[:])}, "code_challenge_method": {"S256"}, "resource": {base + "/mcp"},
	}
	for i := 0; i+1 < len(more); i += 2 {
		q.Set(more[i], more[i+1])
	}
	return q
}

// code has ann allow a program, and returns its code.
func (f *fixture) code(t *testing.T, client string, c Choice) string {
	t.Helper()
	r, err := f.srv.Ask(t.Context(), base, asks(client))
	if err != nil {
		t.Fatal(err)
	}
	a, err := f.srv.Allow(t.Context(), f.ann, r, c)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(a.URL)
	if err != nil || !strings.HasPrefix(a.URL, "https://app.example/callback?keep=1&") || u.Query().Get("state") != "a&b=c" || u.Query().Get("iss") != base {
		t.Fatalf("answer = %s", a.URL)
	}
	return u.Query().Get("code")
}

func exchange(client, code string, more ...string) url.Values {
	v := url.Values{"grant_type": {"authorization_code"}, "client_id": {client}, "code": {code}, "redirect_uri": {back}, "code_verifier": {proof}}
	for i := 0; i+1 < len(more); i += 2 {
		v.Set(more[i], more[i+1])
	}
	return v
}

func refresh(client string, token any) url.Values {
	return url.Values{"grant_type": {"refresh_token"}, "client_id": {client}, "refresh_token": {token.(string)}}
}

// opens reports what a token may do: the scope of its key, and whether that opens mail.
func (f *fixture) opens(t *testing.T, token any) (scope seal.Scope, reads bool, err error) {
	t.Helper()
	who, key, err := auth.Identify(t.Context(), f.db, auth.Secret(token.(string)))
	if err != nil {
		return "", false, err
	}
	_, scope, err = f.post.Keys.Reach(t.Context(), who, "")
	if err != nil {
		return "", false, err
	}
	_, open := f.post.Keys.Open(t.Context(), who, key, "")
	if open != nil && !errors.Is(open, auth.ErrForbidden) {
		t.Fatal(open)
	}
	return scope, open == nil, nil
}

func (f *fixture) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	if err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), query, args...)
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) count(t *testing.T, query string, args ...any) (n int) {
	t.Helper()
	if err := f.db.View(t.Context(), func(tx *store.Tx) error { return tx.One(t.Context(), query, args, &n) }); err != nil {
		t.Fatal(err)
	}
	return n
}
