package oauth

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestConnection: a program registers, is allowed, gets tokens, renews them, and is
// disconnected.
func TestConnection(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		client := f.register(t, "Analyst's helper", back)
		status, first := f.send(t, tokenPath, exchange(client, f.code(t, client, Choice{Inbox: f.inbox.ID, Scope: "read send", Key: f.key})))
		if status != 200 || first["token_type"] != "Bearer" || first["expires_in"] != 3600.0 || first["scope"] != "read send" {
			t.Fatalf("tokens = %d %v", status, first)
		}
		if scope, reads, err := f.opens(t, first["access_token"]); err != nil || scope != "read send" || !reads {
			t.Errorf("the token has %q, reads %v: %v", scope, reads, err)
		}
		status, second := f.send(t, tokenPath, refresh(client, first["refresh_token"]))
		if status != 200 || second["refresh_token"] == first["refresh_token"] {
			t.Fatalf("refreshed = %d %v", status, second)
		}
		if _, reads, err := f.opens(t, second["access_token"]); err != nil || !reads {
			t.Errorf("the second token reads %v: %v", reads, err)
		}
		list, err := f.srv.Apps(ctx, f.ann)
		if err != nil || len(list) != 1 || list[0].Name != "Analyst's helper" || list[0].ReturnsTo != "app.example" || list[0].Address != f.inbox.Address || list[0].Used.IsZero() {
			t.Errorf("apps = %+v, %v", list, err)
		}
		// Others neither see nor end it.
		if list, err := f.srv.Apps(ctx, f.eve); err != nil || len(list) != 0 {
			t.Errorf("another project sees %v, %v", list, err)
		}
		if err := f.srv.Revoke(ctx, f.eve, list[0].ID); !errors.Is(err, ErrNoApp) {
			t.Errorf("another project ends it: %v", err)
		}
		for _, role := range []auth.Role{auth.Reviewer, auth.Viewer} {
			if err := f.srv.Revoke(ctx, auth.Principal{Kind: auth.Person, Role: role, ID: "bob", Project: f.ann.Project}, list[0].ID); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("a %s ends it: %v", role, err)
			}
		}
		epoch := f.count(t, `select epoch from inbox where id = $1`, f.inbox.ID)
		if err := f.srv.Revoke(ctx, f.ann, list[0].ID); err != nil {
			t.Fatal(err)
		}
		if _, _, err := f.opens(t, second["access_token"]); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("after its end the token: %v", err)
		}
		if status, _ := f.send(t, tokenPath, refresh(client, second["refresh_token"])); status != 400 {
			t.Errorf("after its end it refreshes: %d", status)
		}
		if n := f.count(t, `select epoch from inbox where id = $1`, f.inbox.ID); n != epoch+1 {
			t.Errorf("epoch %d, want %d: the inbox was not re-keyed", n, epoch+1)
		}
	})
}

// TestChoices: what each choice of a person gives, and needs.
func TestChoices(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		client := f.register(t, "App", back)
		ask := func(scope string) Request {
			r, err := f.srv.Ask(ctx, base, asks(client, "scope", scope))
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		// A new inbox: the app gets its scopes, and the person the full key.
		a, err := f.srv.Allow(ctx, f.ann, ask(""), Choice{Name: "fresh", Scope: seal.Propose})
		if err != nil || a.Inbox.Address != "fresh@agents.test" {
			t.Fatalf("new inbox = %+v, %v", a.Inbox, err)
		}
		who, err := auth.CheckKey(ctx, db, a.Key)
		if err != nil {
			t.Fatal(err)
		}
		if k, err := f.post.Keys.Open(ctx, who, a.Key, ""); err != nil || keyring.May(k, seal.Manage) != nil {
			t.Errorf("the person's key: %v", err)
		}
		// Without reading, an owner's word is enough.
		status, got := f.send(t, tokenPath, exchange(client, f.code(t, client, Choice{Inbox: f.inbox.ID, Scope: "draft send"})))
		if scope, reads, err := f.opens(t, got["access_token"]); status != 200 || err != nil || scope != "draft send" || reads {
			t.Errorf("a closed connection has %q, reads %v: %d %v", scope, reads, status, err)
		}
		k, err := f.post.Keys.Open(ctx, f.agent(t), f.key, "")
		if err != nil {
			t.Fatal(err)
		}
		_, narrow, err := f.post.Keys.Add(ctx, f.agent(t), k, keyring.NewKey{Scope: seal.Propose})
		if err != nil {
			t.Fatal(err)
		}
		for name, tt := range map[string]struct {
			who  auth.Principal
			asks string
			Choice
			want error
		}{
			"more than asked":          {f.ann, "send", Choice{Inbox: f.inbox.ID, Scope: "read send", Key: f.key}, directory.ErrInvalid},
			"full":                     {f.ann, "read draft send", Choice{Inbox: f.inbox.ID, Scope: seal.Manage, Key: f.key}, directory.ErrInvalid},
			"nothing":                  {f.ann, "send", Choice{Inbox: f.inbox.ID}, directory.ErrInvalid},
			"unknown scope":            {f.ann, "send", Choice{Inbox: f.inbox.ID, Scope: "root"}, directory.ErrInvalid},
			"read without a key":       {f.ann, "read", Choice{Inbox: f.inbox.ID, Scope: seal.Read}, directory.ErrInvalid},
			"read with a narrow key":   {f.ann, "read", Choice{Inbox: f.inbox.ID, Scope: seal.Read, Key: narrow}, directory.ErrInvalid},
			"read with another's key":  {f.ann, "read", Choice{Inbox: f.inbox.ID, Scope: seal.Read, Key: a.Key}, directory.ErrInvalid},
			"an inbox of others":       {f.ann, "send", Choice{Inbox: f.foreign.ID, Scope: seal.Send}, directory.ErrNoInbox},
			"of another project":       {f.eve, "send", Choice{Inbox: f.inbox.ID, Scope: seal.Send}, directory.ErrNoInbox},
			"of another, with the key": {f.eve, "read", Choice{Inbox: f.inbox.ID, Scope: seal.Read, Key: f.key}, directory.ErrNoInbox},
			"a reviewer":               {auth.Principal{Kind: auth.Person, Role: auth.Reviewer, ID: "bob", Project: f.ann.Project}, "send", Choice{Inbox: f.inbox.ID, Scope: seal.Send}, auth.ErrForbidden},
			"a project key":            {auth.Principal{Kind: auth.Project, ID: "crd_x", Project: f.ann.Project}, "send", Choice{Inbox: f.inbox.ID, Scope: seal.Send}, auth.ErrForbidden},
			"the inbox itself":         {f.agent(t), "send", Choice{Inbox: f.inbox.ID, Scope: seal.Send}, auth.ErrForbidden},
		} {
			before := f.count(t, `select count(*) from credential`)
			if a, err := f.srv.Allow(ctx, tt.who, ask(tt.asks), tt.Choice); !errors.Is(err, tt.want) || f.count(t, `select count(*) from credential`) != before {
				t.Errorf("%s: %+v, %v", name, a, err)
			}
		}
	})
}

func (f *fixture) agent(t *testing.T) auth.Principal {
	t.Helper()
	who, err := auth.CheckKey(t.Context(), f.db, f.key)
	if err != nil {
		t.Fatal(err)
	}
	return who
}

// TestThieves: codes and tokens that others show, or that come twice.
func TestThieves(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		client, other := f.register(t, "App", back), f.register(t, "Evil", back)
		connect := func() (string, map[string]any) {
			code := f.code(t, client, Choice{Inbox: f.inbox.ID, Scope: "send"})
			status, got := f.send(t, tokenPath, exchange(client, code))
			if status != 200 {
				t.Fatalf("tokens = %d %v", status, got)
			}
			return code, got
		}
		code := f.code(t, client, Choice{Inbox: f.inbox.ID, Scope: "send"})
		for name, form := range map[string]interface{ Encode() string }{
			"another client":       exchange(other, code),
			"no client":            exchange("", code),
			"another redirect":     exchange(client, code, "redirect_uri", "https://app.example/other"),
			"another verifier":     exchange(client, code, "code_verifier", strings.Repeat("a", 43)),
			"no verifier":          exchange(client, code, "code_verifier", ""),
			"the challenge itself": exchange(client, code, "code_verifier", asks(client).Get("code_challenge")),
			"another resource":     exchange(client, code, "resource", "https://evil.example/mcp"),
			"another grant":        exchange(client, code, "grant_type", "client_credentials"),
			"a guessed code":       exchange(client, "pac_AAAAAAAAAAAAAAAAAAAAAAAAAA"),
			"the code to refresh":  refresh(client, code),
		} {
			if status, got := f.send(t, tokenPath, form); status != 400 || got["access_token"] != nil {
				t.Errorf("%s = %d %v", name, status, got)
			}
		}
		if status, _ := f.send(t, tokenPath, exchange(client, code)); status != 200 {
			t.Error("its owner cannot use the code after them")
		}
		f.exec(t, `update oauth_code set expires_at = 1`)
		// A code that comes twice ends what it gave.
		code, got := connect()
		if status, _ := f.send(t, tokenPath, exchange(client, code)); status != 400 {
			t.Errorf("a used code = %d", status)
		}
		if _, _, err := f.opens(t, got["access_token"]); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("the token of a code that came twice: %v", err)
		}
		// A refresh token, too, whoever of the two is the thief.
		_, got = connect()
		if status, _ := f.send(t, tokenPath, refresh(other, got["refresh_token"])); status != 400 {
			t.Errorf("another client refreshes: %d", status)
		}
		_, next := f.send(t, tokenPath, refresh(client, got["refresh_token"]))
		if status, _ := f.send(t, tokenPath, refresh(client, got["refresh_token"])); status != 400 {
			t.Errorf("a used refresh token = %d", status)
		}
		for name, token := range map[string]any{"first": got["access_token"], "next": next["access_token"]} {
			if _, _, err := f.opens(t, token); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("the %s token after the reuse: %v", name, err)
			}
		}
		if status, _ := f.send(t, tokenPath, refresh(client, next["refresh_token"])); status != 400 {
			t.Errorf("the next refresh token after the reuse = %d", status)
		}
		// Of many at once one is served, and the connection ends.
		_, got = connect()
		var wg sync.WaitGroup
		served := make([]int, 4)
		for i := range served {
			wg.Go(func() { served[i], _ = f.send(t, tokenPath, refresh(client, got["refresh_token"])) })
		}
		wg.Wait()
		ok := 0
		for _, status := range served {
			if status == 200 {
				ok++
			}
		}
		if ok != 1 {
			t.Errorf("served = %v", served)
		}
		// What was stolen from the database opens nothing, and a token is no key elsewhere.
		_, got = connect()
		access := auth.Secret(got["access_token"].(string))
		if _, err := auth.CheckKey(t.Context(), db, access); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("a token as a key: %v", err)
		}
		f.exec(t, `update oauth_token set grant_id = 'app_OTHER' where hash = $1`, access.Digest())
		if _, _, err := f.opens(t, access.Reveal()); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("a token that was moved to another connection: %v", err)
		}
		_, got = connect()
		for name, token := range map[string]string{"the refresh token": got["refresh_token"].(string), "half": "pat_ABC", "nothing": "pat_", "SQL": "pat_'; drop table oauth_token; --"} {
			if _, _, err := f.opens(t, token); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("%s as an access token: %v", name, err)
			}
		}
		f.exec(t, `update oauth_token set expires_at = 1 where kind = 'access'`)
		if _, _, err := f.opens(t, got["access_token"]); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("an expired token: %v", err)
		}
	})
}

// TestRequests: what programs ask for, and what is refused on the page of the person,
// with no word to the program.
func TestRequests(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		client := f.register(t, "App", back, "http://127.0.0.1/cb", "com.example.app:/done")
		for uri, want := range map[string]string{back: "app.example", "http://127.0.0.1:49152/cb": "this computer (127.0.0.1)", "com.example.app:/done": "the program on this computer that opens com.example.app:"} {
			if r, err := f.srv.Ask(ctx, base, asks(client, "redirect_uri", uri)); err != nil || r.ReturnsTo != want || r.Scope != seal.Propose || r.Resource != base+"/mcp" {
				t.Errorf("%s = %+v, %v", uri, r, err)
			}
		}
		for scope, want := range map[string]seal.Scope{"": seal.Propose, "read offline_access": seal.Read, "send openid profile": seal.Send, "full send": seal.Send, "propose": seal.Propose} {
			if r, err := f.srv.Ask(ctx, base, asks(client, "scope", scope)); err != nil || r.Scope != want {
				t.Errorf("scope %q = %q, %v", scope, r.Scope, err)
			}
		}
		for name, more := range map[string][]string{
			"unknown client": {"client_id", "cli_AAAAAAAAAAAAAAAAAAAAAAAAAA"}, "no client": {"client_id", ""}, "hostile client": {"client_id", "'\x00--"},
			"another host": {"redirect_uri", "https://evil.example/callback?keep=1"}, "a longer path": {"redirect_uri", back + "/more"}, "another query": {"redirect_uri", "https://app.example/callback?keep=2"},
			"another scheme": {"redirect_uri", "http://app.example/callback?keep=1"}, "another port": {"redirect_uri", "https://app.example:444/callback?keep=1"}, "no redirect": {"redirect_uri", ""},
			"another path here": {"redirect_uri", "http://127.0.0.1:1/other"}, "another loopback": {"redirect_uri", "http://[::1]:1/cb"}, "a user": {"redirect_uri", "http://evil@127.0.0.1:1/cb"}, "a name of it": {"redirect_uri", "http://127.0.0.1.evil.example/cb"},
			"javascript": {"redirect_uri", "javascript:alert(1)//"}, "token": {"response_type", "token"}, "no PKCE": {"code_challenge", ""}, "plain PKCE": {"code_challenge_method", "plain"},
			"short challenge": {"code_challenge", "abc"}, "another resource": {"resource", "https://evil.example/mcp"}, "full alone": {"scope", "full"}, "no scope of ours": {"scope", "openid"},
			"long state": {"state", strings.Repeat("a", 2000)}, "lines in state": {"state", "a\r\nLocation: x"},
		} {
			var e *Error
			if r, err := f.srv.Ask(ctx, base, asks(client, more...)); !errors.As(err, &e) {
				t.Errorf("%s = %+v, %v", name, r, err)
			}
		}
		twice := asks(client)
		twice.Add("redirect_uri", "https://evil.example/")
		if _, err := f.srv.Ask(ctx, base, twice); err == nil {
			t.Error("two redirect URIs are taken")
		}
		// The endpoint itself leads to our own page, whatever the request says.
		for _, q := range []string{asks(client).Encode(), "redirect_uri=https://evil.example/&error=x", "//evil.example", ""} {
			w := httptest.NewRecorder()
			f.srv.Handler().ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, base+authorizePath+"?"+q, nil))
			if at := w.Header().Get("Location"); w.Code != http.StatusSeeOther || !strings.HasPrefix(at, ConsentPath+"?") {
				t.Errorf("authorize leads to %s", at)
			}
		}
	})
}

// TestRegistrations: names and addresses that are refused, and the limits.
func TestRegistrations(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		for _, name := range []string{"Postern", "P o s t e r n", "postern support", "Ｐｏｓｔｅｒｎ", "a\u202eb", "a\nb", "Pоstern", "Роѕтern", "Ρostern", "Post\u00adern", "a\ufe0fb", "a\u3164b", "a\u00a0b", "Pаypal", strings.Repeat("a", 61)} {
			if _, err := f.srv.Register(t.Context(), "192.0.2.1", name, []string{back}); err == nil {
				t.Errorf("the name %q is taken", name)
			}
		}
		for _, body := range []string{"", "[]", "null", "{", `{"redirect_uris":"x"}`, `{}`, `{"redirect_uris":["https://a.example/"],"response_types":["token"]}`, `{"redirect_uris":["https://a.example/"],"client_name":5}`, `{"x":"` + strings.Repeat("a", maxBody) + `"}`} {
			if status, got := f.send(t, registerPath, body); status != 400 || got["client_id"] != nil {
				t.Errorf("%.60s = %d %v", body, status, got)
			}
		}
		for i := range 21 {
			if _, err := f.srv.Register(t.Context(), "192.0.2.9", "", []string{back}); (err != nil) != (i == 20) {
				t.Errorf("registration %d: %v", i, err)
			}
		}
		// Who was never connected is forgotten; a connection keeps its program.
		keep := f.register(t, "Kept", back)
		f.code(t, keep, Choice{Inbox: f.inbox.ID, Scope: "send"})
		f.exec(t, `update oauth_client set created_at = 1, used_at = case when used_at > 0 then 1 else 0 end`)
		if err := f.srv.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := f.count(t, `select count(*) from oauth_client`); n != 1 {
			t.Errorf("%d clients are left, want 1", n)
		}
		// A code that nobody exchanged leaves no key behind.
		f.exec(t, `update oauth_code set expires_at = 1`)
		if err := f.srv.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := f.count(t, `select count(*) from oauth_grant`) + f.count(t, `select count(*) from inbox_key where inbox_id = $1`, f.inbox.ID); n != 1 {
			t.Errorf("%d connections and keys are left, want the inbox's own key", n)
		}
	})
}

// TestDisconnect: a program gives up its tokens (RFC 7009).
func TestDisconnect(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		client := f.register(t, "App", back)
		for _, which := range []string{"access_token", "refresh_token"} {
			_, got := f.send(t, tokenPath, exchange(client, f.code(t, client, Choice{Inbox: f.inbox.ID, Scope: "send"})))
			for range 2 { // the second time there is nothing to end
				if status, got := f.send(t, revokePath, exchange(client, "", "token", got[which].(string))); status != 200 {
					t.Errorf("revoke = %d %v", status, got)
				}
			}
			if _, _, err := f.opens(t, got["access_token"]); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("after the end by its %s: %v", which, err)
			}
		}
		// A key that is revoked where keys are ends the tokens, too.
		_, got := f.send(t, tokenPath, exchange(client, f.code(t, client, Choice{Inbox: f.inbox.ID, Scope: "send"})))
		list, err := f.srv.Apps(t.Context(), f.ann)
		if err != nil || len(list) != 1 {
			t.Fatalf("apps = %v, %v", list, err)
		}
		if err := f.post.Keys.Revoke(t.Context(), f.ann, f.inbox.ID, list[0].Credential, false); err != nil {
			t.Fatal(err)
		}
		if _, _, err := f.opens(t, got["access_token"]); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("after the end of its key: %v", err)
		}
		if status, _ := f.send(t, tokenPath, refresh(client, got["refresh_token"])); status != 400 {
			t.Errorf("after the end of its key it refreshes: %d", status)
		}
	})
}

// FuzzRegistration: no registration makes the server fail, and no address is taken that
// a browser would run.
func FuzzRegistration(f *testing.F) {
	for _, seed := range []string{
		`{"redirect_uris":["https://a.example/cb"],"client_name":"A"}`, `{"redirect_uris":["javascript:alert(1)"]}`, `{"redirect_uris":["http://localhost:1/","com.example:/x","http://127.0.0.1:80/a?b"]}`, `[]`, `{"redirect_uris":[null]}`,
	} {
		f.Add([]byte(seed), "https://a.example/cb")
	}
	f.Add([]byte(`{}`), "java\tscript:alert(1)")
	f.Add([]byte(`{}`), "http://127.0.0.1:80@evil.example/")
	f.Fuzz(func(t *testing.T, body []byte, asked string) {
		in, err := decodeRegistration(body)
		if err != nil {
			return
		}
		_, _ = checkName(in.Name, "x")
		for _, uri := range append(in.Redirects, asked) {
			matches(uri, asked)
			if CheckRedirect(uri) != nil {
				continue
			}
			low := strings.ToLower(uri)
			for _, bad := range []string{"javascript:", "data:", "vbscript:", "file:", "blob:", "about:"} {
				if strings.HasPrefix(low, bad) {
					t.Errorf("%q is taken", uri)
				}
			}
			r := Request{Redirect: uri, Issuer: base, State: "s"}
			if to := r.Deny(); strings.ContainsAny(to, "\r\n\"<> ") || !strings.Contains(to, "error=access_denied") {
				t.Errorf("the answer of %q is %q", uri, to)
			}
			if returnsTo(uri) == "" {
				t.Errorf("%q returns to nowhere", uri)
			}
		}
	})
}
