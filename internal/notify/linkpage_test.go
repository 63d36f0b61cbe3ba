package notify_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/html"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// ask asks the page of links, as anybody can.
func (f *fixture) ask(method, path, body string) (int, string, http.Header) {
	f.t.Helper()
	r := httptest.NewRequestWithContext(f.t.Context(), method, path, strings.NewReader(body))
	if body != "" {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	w := httptest.NewRecorder()
	f.n.Handler().ServeHTTP(w, r)
	b, err := io.ReadAll(w.Result().Body)
	if err != nil {
		f.t.Fatal(err)
	}
	if strings.HasPrefix(w.Header().Get("Content-Type"), "text/html") {
		f.harmless(string(b))
	}
	return w.Code, string(b), w.Header()
}

// harmless fails the test if a page holds a script, a form, something that is
// loaded from elsewhere, or a link out of the console.
func (f *fixture) harmless(page string) {
	f.t.Helper()
	for z := html.NewTokenizer(strings.NewReader(page)); ; {
		kind := z.Next()
		if kind == html.ErrorToken {
			return
		}
		tok := z.Token()
		switch tok.Data {
		case "script", "form", "iframe", "img", "object", "embed", "base", "svg", "style", "button", "input":
			if kind == html.StartTagToken || kind == html.SelfClosingTagToken {
				f.t.Errorf("the page holds <%s>:\n%s", tok.Data, page)
			}
		}
		for _, a := range tok.Attr {
			if (a.Key == "href" || a.Key == "src" || a.Key == "action") && kind != html.TextToken && !regexp.MustCompile(`^(/console/(actions/act_[A-Z2-7]{26})?|/look/style\.css|#main)$`).MatchString(a.Val) || strings.HasPrefix(a.Key, "on") {
				f.t.Errorf("the page has %s=%q", a.Key, a.Val)
			}
		}
	}
}

var inMail = regexp.MustCompile(`/look/([A-Z2-7]{26})`)

// links returns the paths of the links that were mailed.
func (f *fixture) links() (out []string) {
	for _, e := range f.hop.mails() {
		out = append(out, inMail.FindString(strings.ReplaceAll(string(e.Raw), "=\r\n", "")))
	}
	return out
}

// TestLink: the link of a mail shows the action as it is, to whoever has it, and
// changes nothing however often and however it is fetched.
func TestLink(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.judge.say(policy.Verdict{Who: []string{"bob"}})
		f.effect.view = func(v *oversight.View) {
			v.Title = `</title><script>alert(1)</script>`
			v.Notes = []string{`<img src=x onerror=alert(1)>`}
			v.Files = []oversight.File{{Name: `"><svg onload=alert(1)>`, Type: "text/html", Size: 7, SHA256: "ab"}}
			v.Fields = append(v.Fields, oversight.Field{Name: "Bcc", Value: "eve@\u202ehidden.example"})
		}
		a := f.propose("<b onclick=x>hello</b> javascript:alert(1) https://evil.example/ " + strings.Repeat("x", 100<<10))
		f.step()
		link := f.links()[0]
		before := f.everything()
		for range 3 { // scanners
			for _, method := range []string{"GET", "HEAD"} {
				code, page, h := f.ask(method, link, "")
				if code != 200 {
					t.Fatalf("%s: status %d", method, code)
				}
				for name, want := range map[string]string{"Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"} {
					if got := h.Get(name); got != want {
						t.Errorf("%s: %q, want %q", name, got, want)
					}
				}
				if csp := h.Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || !strings.Contains(csp, "form-action 'none'") {
					t.Errorf("policy %q", csp)
				}
				if h.Get("Set-Cookie") != "" {
					t.Error("the link gives a cookie")
				}
				for _, want := range []string{"&lt;b onclick=x&gt;hello", a.Hex(), "/console/actions/" + a.ID, "only the beginning", `eve@\u{202e}hidden.example`, "was written by an agent"} {
					if !strings.Contains(page, want) && method == "GET" {
						t.Errorf("the page does not hold %q", want)
					}
				}
			}
		}
		for _, method := range []string{"POST", "PUT", "DELETE", "PATCH"} {
			code, _, _ := f.ask(method, link, "decision=approve&version=1&digest="+a.Hex())
			if code != http.StatusMethodNotAllowed {
				t.Errorf("%s: status %d, want 405", method, code)
			}
		}
		if got := f.everything(); got != before {
			t.Errorf("looking changed something:\n%s\nbefore:\n%s", got, before)
		}
	})
}

// everything returns the rows that a decision or a look could change.
func (f *fixture) everything() string {
	f.t.Helper()
	var out []string
	err := f.db.View(f.t.Context(), func(tx *store.Tx) (err error) {
		for _, q := range []string{
			`select id || ' ' || state || ' ' || version from action order by id`, `select id || ' ' || state || ' ' || token from notice order by id`,
			`select verb || ' ' || object || ' ' || actor from audit_entry order by seq`, `select person from approval`, `select person_id from session`,
		} {
			rows, err := tx.Strings(f.t.Context(), q)
			if err != nil {
				return err
			}
			out = append(out, rows...)
		}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return strings.Join(out, "\n")
}

// TestForgedLinks: a link is good for one action as it was, for one person who is
// still there, while it waits; and nothing that looks like one is.
func TestForgedLinks(t *testing.T) {
	for _, tt := range []struct {
		name   string
		do     func(f *fixture, a oversight.Action)
		status int
		says   string
	}{
		{"approved", func(f *fixture, a oversight.Action) {
			if err := f.gate.Decide(f.t.Context(), f.who("ann", auth.Owner), decision(a, true)); err != nil {
				f.t.Fatal(err)
			}
		}, 410, "Approved by ann."},
		{"rejected", func(f *fixture, a oversight.Action) {
			if err := f.gate.Decide(f.t.Context(), f.who("ann", auth.Owner), decision(a, false)); err != nil {
				f.t.Fatal(err)
			}
		}, 410, "Rejected by ann."},
		{"taken back", func(f *fixture, a oversight.Action) {
			if _, err := f.gate.Cancel(f.t.Context(), f.agent, a.ID); err != nil {
				f.t.Fatal(err)
			}
		}, 410, "cancelled"},
		{"written anew", func(f *fixture, a oversight.Action) {
			f.update(func(tx *store.Tx) error {
				_, err := f.gate.Revise(f.t.Context(), tx, f.agent, a.ID, 1, oversight.Proposal{
					Request: policy.Request{Kind: "email.send"}, Inbox: "ibx_1", Via: "rest", Payload: []byte("the second"),
				})
				return err
			})
		}, 410, "was edited"},
		{"expired", func(f *fixture, _ oversight.Action) {
			f.exec(`update action set expires_at = $1`, store.Time(time.Now().Add(-time.Second)))
		}, 410, "no longer waits"},
		{"denied since nobody decided", func(f *fixture, a oversight.Action) {
			f.exec(`update action set expires_at = $1`, store.Time(time.Now().Add(-time.Second)))
			if _, err := f.gate.RunOne(f.t.Context()); err != nil {
				f.t.Fatal(err)
			}
		}, 410, "Nobody decided in time"},
		{"payload changed in the database", func(f *fixture, _ oversight.Action) {
			f.exec(`update action set payload = $1`, []byte("the second"))
		}, 200, "differs from what was proposed"},
		{"person disabled", func(f *fixture, _ oversight.Action) { f.exec(`update person set disabled_at = 1 where name = 'bob'`) }, 404, "cannot be used"},
		{"person moved to another project", func(f *fixture, _ oversight.Action) {
			var other string
			f.update(func(tx *store.Tx) (err error) {
				other, _, err = auth.NewProject(f.t.Context(), tx, "two")
				return err
			})
			f.exec(`update person set project_id = $1 where name = 'bob'`, other)
		}, 404, "cannot be used"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t), nil)
			f.judge.say(policy.Verdict{Who: []string{"bob", "ann"}})
			f.exec(`update person set email = '' where name = 'ann'`)
			a := f.propose("the first")
			f.step()
			link := f.links()[0]
			tt.do(f, a)
			code, page, _ := f.ask("GET", link, "")
			if code != tt.status || !strings.Contains(page, tt.says) {
				t.Errorf("status %d, want %d and %q:\n%s", code, tt.status, tt.says, page)
			}
			if strings.Contains(page, "the first") || strings.Contains(page, "the second") {
				t.Errorf("the page shows what it must not:\n%s", page)
			}
		})
	}
	f := setup(t, storetest.SQLite(t), nil)
	f.judge.say(policy.Verdict{Who: []string{"bob"}})
	a := f.propose("the first")
	f.step()
	link := f.links()[0]
	for _, path := range []string{
		"/look/", "/look/x", "/look/" + strings.Repeat("A", 26), link + "A", link[:len(link)-1], strings.ToLower(link), "/look/" + a.ID, link + "/", link + "/decision",
		"/look/%00" + link[6:], "/look/' or '1'='1", "/look/..%2f" + link[6:],
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "http://postern.example/", nil)
		r.URL.Path, r.URL.RawPath = path, ""
		w := httptest.NewRecorder()
		f.n.Handler().ServeHTTP(w, r)
		if w.Code != 404 && w.Code != 307 && w.Code != 301 || strings.Contains(w.Body.String(), "the first") {
			t.Errorf("%s: status %d", path, w.Code)
		}
	}
	// What is stored of the token is not the token.
	var hash string
	err := f.db.View(t.Context(), func(tx *store.Tx) error { return tx.One(t.Context(), `select token from notice`, nil, &hash) })
	if err != nil {
		t.Fatal(err)
	}
	if code, _, _ := f.ask("GET", "/look/"+hash, ""); code != 404 {
		t.Errorf("the stored digest opens the page: status %d", code)
	}
}
