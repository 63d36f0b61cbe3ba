package console_test

import (
	"crypto/sha256"
	"encoding/base64"
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pquerna/otp/totp"

	"postern/internal/auth"
	"postern/internal/oauth"
)

// app registers a program, and returns the query with which it sends a browser.
func (f *fixture) app(name, back string) url.Values {
	f.t.Helper()
	c, err := f.oauth.Register(f.t.Context(), "127.0.0.1", name, []string{back})
	if err != nil {
		f.t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(strings.Repeat("v", 43)))
	return url.Values{
		"response_type": {"code"}, "client_id": {c.ID}, "redirect_uri": {back}, "state": {`s"><script>`}, "scope": {"read send"},
		"code_challenge": {base64.RawURLEncoding.EncodeToString(sum[:])}, "code_challenge_method": {"S256"},
	}
}

// with returns a copy of v with more values.
func with(v url.Values, more ...string) url.Values {
	out := url.Values{}
	for k, list := range v {
		out[k] = append([]string{}, list...)
	}
	for i := 0; i+1 < len(more); i += 2 {
		out.Add(more[i], more[i+1])
	}
	return out
}

var returns = regexp.MustCompile(`<a class="btn[ a-z]*" href="([^"]*)" id="return">`)

// TestConnect: an owner allows and refuses programs, sees them, and disconnects one.
func TestConnect(t *testing.T) {
	f := setup(t)
	f.enter()
	const back = "https://app.example/cb"
	q := f.app(`<b>Helper</b>`, back)
	page := f.get(oauth.ConsentPath + "?" + q.Encode())
	if page.status != 200 || page.header.Get("Refresh") != "" || strings.Contains(page.body, "<b>Helper") || strings.Contains(page.body, `s"><script>`) {
		t.Fatalf("consent = %d %s", page.status, page.body)
	}
	contains(t, "the consent page", page.body, "It calls itself", "“&lt;b&gt;Helper&lt;/b&gt;”", "not verified", "<strong><bdi>app.example</bdi></strong>", `value="read" checked`, `value="send" checked`, f.inbox.Address)
	if strings.Contains(page.body, `value="draft"`) {
		t.Error("the page offers more than the app asks for")
	}
	form := f.form(page.body, "connect-form")
	for name, want := range q {
		if html.UnescapeString(form.Get(name)) != want[0] {
			t.Errorf("the form has %s=%q, want %q", name, form.Get(name), want[0])
		}
	}
	link := func(a answer) url.Values {
		t.Helper()
		m := returns.FindStringSubmatch(a.body)
		if a.status != 200 || m == nil {
			t.Fatalf("answer = %d %s", a.status, a.body)
		}
		u, err := url.Parse(html.UnescapeString(m[1]))
		if err != nil || !strings.HasPrefix(u.String(), back+"?") || u.Query().Get("state") != q.Get("state") || u.Query().Get("iss") != f.url {
			t.Fatalf("it returns to %s", m[1])
		}
		return u.Query()
	}
	denied := f.submit(oauth.ConsentPath, with(q, "answer", "deny"))
	if got := link(denied); got.Get("error") != "access_denied" || got.Has("code") || !strings.HasPrefix(denied.header.Get("Refresh"), "1; url="+back) {
		t.Errorf("refused = %v", got)
	}
	// Reading an inbox that exists needs its key, which is neither stored nor shown again.
	without := f.submit(oauth.ConsentPath, with(q, "answer", "allow", "allow", "read", "allow", "send", "inbox", f.inbox.ID))
	if without.status != 400 || !strings.Contains(without.body, "Nothing was connected") || !strings.Contains(without.body, "full key") {
		t.Errorf("without a key = %d %s", without.status, without.body)
	}
	allowed := f.submit(oauth.ConsentPath, with(q, "answer", "allow", "allow", "read", "allow", "send", "inbox", f.inbox.ID, "key", f.inboxKey.Reveal()))
	if got := link(allowed); !strings.HasPrefix(got.Get("code"), "pac_") || strings.Contains(allowed.body, f.inboxKey.Reveal()) {
		t.Errorf("allowed = %v", got)
	}
	code := link(allowed).Get("code")
	if _, err := f.oauth.Exchange(t.Context(), f.url, url.Values{"grant_type": {"authorization_code"}, "client_id": q["client_id"], "code": {code}, "redirect_uri": {back}, "code_verifier": {strings.Repeat("v", 43)}}); err != nil {
		t.Errorf("exchange: %v", err)
	}
	// A new inbox: its key is shown this once, and the page waits until it was copied.
	fresh := f.submit(oauth.ConsentPath, with(q, "answer", "allow", "allow", "send", "name", "helper"))
	link(fresh)
	contains(t, "the page of a new inbox", fresh.body, "helper@agents.test", "pib_", "shown only once")
	if fresh.header.Get("Refresh") != "" {
		t.Error("the page goes on before the key is copied")
	}
	apps := f.get(oauth.AppsPath)
	contains(t, "the apps", apps.body, "“&lt;b&gt;Helper&lt;/b&gt;”", "answers went to", "read, send", f.inbox.Address, "Disconnect")
	end := regexp.MustCompile(`/console/apps/(app_[A-Z2-7]{26})/end`).FindString(apps.body)
	for _, want := range []int{303, 409} {
		if got := f.submit(end, url.Values{}); got.status != want {
			t.Errorf("disconnect = %d, want %d", got.status, want)
		}
	}
	if names, _ := f.verbs("app."); len(names) != 3 {
		t.Errorf("the record has %v", names)
	}
}

// TestConnectAttackers: who tries to connect a program without an owner's will.
func TestConnectAttackers(t *testing.T) {
	f := setup(t)
	q := f.app("Helper", "https://app.example/cb")
	allow := with(q, "answer", "allow", "allow", "send", "inbox", f.inbox.ID)
	connected := func(what string) {
		t.Helper()
		if list, err := f.oauth.Apps(t.Context(), f.person); err != nil || len(list) != 0 {
			t.Errorf("%s: connected %v, %v", what, list, err)
		}
	}
	// Nobody is signed in: the page comes back after it, and is asked again.
	if got := f.get(oauth.ConsentPath + "?" + q.Encode()); got.status != 303 || !strings.HasPrefix(got.location, "/console/signin?next=") || !strings.Contains(got.location, url.QueryEscape(url.QueryEscape(q.Get("redirect_uri")))) {
		t.Errorf("signed out = %d %s", got.status, got.location)
	}
	if got := f.submit(oauth.ConsentPath, allow); got.status != 401 {
		t.Errorf("signed out, a form = %d", got.status)
	}
	f.enter()
	page := f.get(oauth.ConsentPath + "?" + q.Encode())
	if csp := page.header.Get("Content-Security-Policy"); !strings.Contains(csp, "frame-ancestors 'none'") || !strings.Contains(csp, "form-action 'self'") {
		t.Errorf("the page can be framed: %s", csp)
	}
	// A GET connects nothing, whatever its query says.
	f.get(oauth.ConsentPath + "?" + allow.Encode())
	connected("a link")
	// A form of another site, and one whose answer is in the address.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+oauth.ConsentPath, strings.NewReader(allow.Encode()))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Origin", "https://app.example")
	req.Header.Set("Sec-Fetch-Site", "cross-site")
	if got := f.do(req); got.status != 403 {
		t.Errorf("a form of another site = %d", got.status)
	}
	f.submit(oauth.ConsentPath+"?"+allow.Encode(), url.Values{"x": {"y"}})
	connected("forgery")
	for name, form := range map[string]url.Values{
		"another redirect": with(with(q, "answer", "allow", "allow", "send"), "redirect_uri", "https://evil.example/"), "no answer": with(q, "allow", "send"), "no scope": with(q, "answer", "allow", "inbox", f.inbox.ID),
		"more than asked": with(q, "answer", "allow", "allow", "draft", "inbox", f.inbox.ID), "full": with(q, "answer", "allow", "allow", "full", "inbox", f.inbox.ID), "a hostile inbox": with(q, "answer", "allow", "allow", "send", "inbox", "' or 1=1"),
		"an inbox of nobody": with(q, "answer", "allow", "allow", "send", "inbox", "ibx_"+strings.Repeat("A", 26)),
	} {
		got := f.submit(oauth.ConsentPath, form)
		if got.status < 400 || got.header.Get("Refresh") != "" || strings.Contains(got.body, `id="return"`) {
			t.Errorf("%s = %d", name, got.status)
		}
	}
	connected("bad forms")
	// An address that was never registered gets nothing, also no error.
	for _, uri := range []string{"https://evil.example/cb", "javascript:alert(1)", "https://app.example/cb/../evil", ""} {
		bad := with(q)
		bad.Set("redirect_uri", uri)
		got := f.get(oauth.ConsentPath + "?" + bad.Encode())
		if got.status != 400 || got.location != "" || strings.Contains(got.body, "evil.example") || strings.Contains(got.body, "javascript:") {
			t.Errorf("%s = %d %s", uri, got.status, got.location)
		}
	}
	for _, role := range []auth.Role{auth.Reviewer, auth.Viewer} {
		f.exec(`update person set role = $1 where name = 'ann'`, role)
		if got := f.get(oauth.ConsentPath + "?" + q.Encode()); got.status != 403 {
			t.Errorf("a %s sees the page: %d", role, got.status)
		}
		if got := f.submit(oauth.ConsentPath, allow); got.status != 403 {
			t.Errorf("a %s allows: %d", role, got.status)
		}
	}
	connected("others")
	f.exec(`update person set role = 'owner' where name = 'ann'`)
	// With a second factor, a session that did not prove it lately is not enough.
	shown := f.submit("/console/account/app", url.Values{"password": {password}})
	secret := regexp.MustCompile(`<code class="copy">([A-Z2-7 ]+)</code>`).FindStringSubmatch(shown.body)
	if secret == nil {
		t.Fatal("no secret of an authenticator app")
	}
	token, err := totp.GenerateCode(strings.ReplaceAll(secret[1], " ", ""), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	confirm := f.form(shown.body, "app-form")
	confirm.Set("code", token)
	if got := f.submit("/console/account/app/confirm", confirm); got.status != 200 {
		t.Fatalf("confirm = %d", got.status)
	}
	f.exec(`update session set strong_at = 0`)
	if got := f.get(oauth.ConsentPath + "?" + q.Encode()); got.status != 303 || !strings.HasPrefix(got.location, "/console/stepup?") {
		t.Errorf("without a proof = %d %s", got.status, got.location)
	}
	if got := f.submit(oauth.ConsentPath, allow); got.status != 403 {
		t.Errorf("without a proof, a form = %d", got.status)
	}
	connected("an old session")
}
