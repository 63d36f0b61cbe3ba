package gmail_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"postern/internal/connector"
	"postern/internal/gmail"
	"postern/internal/gmail/gmailtest"
)

var testTime = time.Date(2026, 11, 23, 10, 0, 0, 0, time.UTC)

// consent fills in Google's page as a person does, and returns where it sends them.
func consent(t *testing.T, page, answer string) url.Values {
	t.Helper()
	res, err := new(http.Client).Get(page)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), "<form") {
		return url.Values{"page": {string(b)}}
	}
	form := url.Values{"account": {ann}, "answer": {answer}}
	for _, m := range regexp.MustCompile(`name="(\w+)" value="([^"]*)"`).FindAllStringSubmatch(string(b), -1) {
		if m[1] != "answer" {
			form.Set(m[1], strings.NewReplacer("&#43;", "+", "&amp;", "&").Replace(m[2]))
		}
	}
	u, _ := url.Parse(page)
	c := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	res, err = c.PostForm(u.Scheme+"://"+u.Host+"/consent", form)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	back, err := res.Location()
	if err != nil {
		b, _ := io.ReadAll(res.Body)
		return url.Values{"page": {string(b)}}
	}
	return back.Query()
}

func TestBrowserSignIn(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	ctx := t.Context()
	const redirect = "http://127.0.0.1:7777/"
	v := gmail.Verifier()
	q := consent(t, s.SignInURL(app, redirect, "the-state", ann, v), "allow")
	if q.Get("state") != "the-state" || q.Get("code") == "" {
		t.Fatalf("came back with %v", q)
	}
	if _, err := s.Exchange(ctx, app, redirect, q.Get("code"), gmail.Verifier()); !errors.Is(err, connector.ErrSignIn) {
		t.Errorf("with another verifier: got %v, want it refused", err)
	}
	q = consent(t, s.SignInURL(app, redirect, "s", "", v), "allow")
	c, err := s.Exchange(ctx, app, redirect, q.Get("code"), v)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := s.Mailbox(c).Profile(ctx); err != nil || p.Address != ann {
		t.Errorf("profile: got %+v, %v", p, err)
	}
	if _, err := s.Exchange(ctx, app, redirect, q.Get("code"), v); !errors.Is(err, connector.ErrSignIn) {
		t.Errorf("a code again: got %v, want it refused", err)
	}
	if q := consent(t, s.SignInURL(app, redirect, "s", "", v), "deny"); q.Get("error") != "access_denied" {
		t.Errorf("declined: came back with %v", q)
	}
	g.Untick()
	q = consent(t, s.SignInURL(app, redirect, "s", "", v), "allow")
	if _, err := s.Exchange(ctx, app, redirect, q.Get("code"), v); !errors.Is(err, gmail.ErrRefused) || !strings.Contains(err.Error(), "tick") {
		t.Errorf("without the permission: got %v", err)
	}
	for name, c := range map[string]struct {
		client   gmailtest.Client
		redirect string
		says     string
	}{
		"not registered":  {gmailtest.Client{ID: "web", Redirects: []string{"https://mail.example/console/x"}}, redirect, "redirect_uri_mismatch"},
		"not a test user": {gmailtest.Client{ID: "test", TestUsers: []string{"other@gmail.example"}}, redirect, "access_denied"},
		"no loopback":     {gmailtest.Client{ID: "desk"}, "http://evil.example/", "redirect_uri_mismatch"},
	} {
		g.AddClient(c.client)
		if q := consent(t, s.SignInURL(gmail.App{ID: c.client.ID}, c.redirect, "s", "", v), "allow"); !strings.Contains(q.Get("page"), c.says) {
			t.Errorf("%s: got %v", name, q)
		}
	}
}

func TestDeviceSignIn(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	ctx := t.Context()
	if _, err := s.StartDevice(ctx, app); !errors.Is(err, gmail.ErrRefused) || !strings.Contains(err.Error(), "browser") {
		t.Errorf("as Google has it: got %v, want a way out", err)
	}
	g.AddClient(gmailtest.Client{ID: app.ID, Secret: string(app.Secret), Devices: true})
	d, err := s.StartDevice(ctx, app)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Poll(ctx, app, d.Code); !errors.Is(err, gmail.ErrPending) {
		t.Errorf("before the person has answered: got %v, want ErrPending", err)
	}
	answer := func(code, answer string) {
		res, err := new(http.Client).PostForm(d.URL, url.Values{"user_code": {code}, "account": {ann}, "answer": {answer}})
		if err != nil || res.StatusCode != http.StatusOK {
			t.Fatal(err, res)
		}
		res.Body.Close()
	}
	answer(d.UserCode, "allow")
	c, err := s.Poll(ctx, app, d.Code)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := s.Mailbox(c).Profile(ctx); err != nil || p.Address != ann {
		t.Errorf("profile: got %+v, %v", p, err)
	}
	if d, err = s.StartDevice(ctx, app); err != nil {
		t.Fatal(err)
	}
	answer(d.UserCode, "deny")
	if _, err := s.Poll(ctx, app, d.Code); !errors.Is(err, gmail.ErrRefused) {
		t.Errorf("declined: got %v", err)
	}
}

// TestErrorsHaveNoSecret: whatever Google answers, it is repeated without what was sent.
func TestErrorsHaveNoSecret(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	c := gmail.Credential{App: app, Refresh: "1//canary-of-the-refresh-token"}
	for _, f := range []gmailtest.Fault{{Status: 400, Reason: "invalid_grant", Message: "x"}, {Status: 500}, {Status: 400, Reason: "\x1b[2J", Message: strings.Repeat("x", 5000)}} {
		f.Path = "/token"
		g.Fail(f)
		_, err := s.Mailbox(c).Profile(t.Context())
		text := fmt.Sprintf("%v %+v", err, err)
		if err == nil || strings.Contains(text, "canary") || strings.Contains(text, string(app.Secret)) || strings.ContainsRune(text, '\x1b') || len(err.Error()) > 800 {
			t.Errorf("%d: got %v", f.Status, err)
		}
	}
	if text := fmt.Sprintf("%v %+v %#v", c, c, c); strings.Contains(text, "canary") {
		t.Errorf("a credential prints as %s", text)
	}
	for _, a := range []gmail.App{{}, {ID: "a b"}, {ID: "x\r\ny"}, {ID: "x", Secret: "a b"}} {
		if gmail.CheckApp(a) == nil {
			t.Errorf("%+v is taken for an OAuth client", a)
		}
	}
}
