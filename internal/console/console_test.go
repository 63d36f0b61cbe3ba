package console_test

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/console"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// verbs returns the record's verbs with a prefix, oldest first, and the last
// entry's detail.
func (f *fixture) verbs(prefix string) (out []string, last audit.Entry) {
	f.t.Helper()
	err := audit.View(f.t.Context(), f.db, func(tx *store.Tx) error {
		es, err := audit.List(f.t.Context(), tx, audit.Query{Verb: prefix, Limit: 500})
		for _, e := range slices.Backward(es) {
			out, last = append(out, string(e.Verb)), e
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return out, last
}

func TestSetup(t *testing.T) {
	f := setup(t)
	link := "/console/setup?token=" + f.link.Reveal()
	for range 3 { // a chat program's preview, a mail scanner, the person
		if a := f.get(link); a.status != http.StatusOK || len(a.header["Set-Cookie"]) > 0 {
			t.Fatalf("opening the link: %d, %v", a.status, a.header)
		}
		f.send(http.MethodHead, link, nil)
	}
	form := func(token, name, pw, again string) url.Values {
		return url.Values{"token": {token}, "name": {name}, "password": {pw}, "again": {again}}
	}
	for _, tt := range []struct {
		name string
		form url.Values
		want int
		text string
	}{
		{"another token", form("A"+f.link.Reveal(), "ann", password, password), http.StatusGone, "cannot be used"},
		{"no token", form("", "ann", password, password), http.StatusGone, "cannot be used"},
		{"a bad name", form(f.link.Reveal(), "<script>", password, password), http.StatusBadRequest, "Name: use 1 to 63"},
		{"a short password", form(f.link.Reveal(), "ann", "short", "short"), http.StatusBadRequest, "Password: use 10"},
		{"two passwords", form(f.link.Reveal(), "ann", password, password+"x"), http.StatusBadRequest, "do not match"},
	} {
		a := f.submit("/console/setup", tt.form)
		if a.status != tt.want {
			t.Errorf("%s: status %d, want %d", tt.name, a.status, tt.want)
		}
		contains(t, tt.name, a.body, tt.text)
	}
	f.enter()
	if a := f.get("/console/review"); a.status != http.StatusOK {
		t.Errorf("after the set-up: %d", a.status)
	}
	for _, a := range []answer{f.get(link), f.submit("/console/setup", form(f.link.Reveal(), "eve", password, password))} {
		if a.status != http.StatusGone {
			t.Errorf("the link a second time: %d, want 410", a.status)
		}
	}
	if v, last := f.verbs("person."); len(v) != 1 || v[0] != "person.create" || last.Object != "ann" || last.Actor != "person:ann" {
		t.Errorf("record: %v, %+v", v, last)
	}
	var token auth.Secret
	f.update(func(tx *store.Tx) (err error) {
		token, err = auth.NewSetup(t.Context(), tx, f.project.Project)
		return err
	})
	f.exec(`update setup set expires_at = 1 where used_at = 0`)
	if a := f.get("/console/setup?token=" + token.Reveal()); a.status != http.StatusGone {
		t.Errorf("an expired link: %d, want 410", a.status)
	}
}

func TestSignIn(t *testing.T) {
	f := setup(t)
	f.enter()
	cookie := f.client.Jar.Cookies(must(url.Parse(f.url + "/console/")))
	if len(cookie) != 1 || len(f.client.Jar.Cookies(must(url.Parse(f.url+"/v1/")))) != 0 {
		t.Errorf("cookies: %v, want one, for /console alone", cookie)
	}
	if a := f.submit("/console/signout", url.Values{}); a.status != http.StatusSeeOther {
		t.Errorf("sign-out: %d", a.status)
	}
	if a := f.get("/console/decided?page=2"); a.status != http.StatusSeeOther || a.location != "/console/signin?next=%2Fconsole%2Fdecided%3Fpage%3D2" {
		t.Errorf("signed out: %d to %q", a.status, a.location)
	}
	// What the cookie was is worth nothing now.
	req := httptest.NewRequest(http.MethodGet, f.url+"/console/", nil)
	req.RequestURI = ""
	req.AddCookie(cookie[0])
	if a := f.do(req); a.status != http.StatusSeeOther {
		t.Errorf("the session after its end: %d", a.status)
	}
	wrong := f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {"guess guess guess"}})
	unknown := f.submit("/console/signin", url.Values{"name": {"nobody"}, "password": {"guess guess guess"}})
	if wrong.status != http.StatusUnauthorized || strings.ReplaceAll(wrong.body, "ann", "nobody") != unknown.body {
		t.Errorf("the answer tells whether there is such an account: %d, %d", wrong.status, unknown.status)
	}
	a := f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {password}, "next": {"/console/decided?page=2"}})
	if a.status != http.StatusSeeOther || a.location != "/console/decided?page=2" {
		t.Fatalf("sign-in: %d to %q", a.status, a.location)
	}
	set := a.header.Get("Set-Cookie")
	contains(t, "cookie", set, auth.SessionCookie+"=", "Path=/console", "HttpOnly", "SameSite=Strict", "Max-Age=43200")
	if strings.Contains(set, "Secure") {
		t.Errorf("cookie %q is Secure without Config.Secure", set)
	}
	if a := f.get("/console/decided"); a.status != http.StatusOK {
		t.Errorf("after signing in: %d", a.status)
	}
	if a := f.get("/console/signin"); a.status != http.StatusSeeOther || a.location != "/console/" {
		t.Errorf("the sign-in page when signed in: %d to %q", a.status, a.location)
	}
	got, _ := f.verbs("person.")
	if want := "person.create person.signout person.signin_failed person.signin_failed person.signin"; strings.Join(got, " ") != want {
		t.Errorf("record: %v, want %s", got, want)
	}
}

// TestPasswordGuessesAreThrottled: guesses are slowed down, what they write is bounded, and a
// password in the wrong field is not kept for good.
func TestPasswordGuessesAreThrottled(t *testing.T) {
	f := setup(t)
	f.enter()
	var last int
	for range 7 {
		last = f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {"guess guess guess"}}).status
		f.exec(`update sign_in_try set ends_at = 4000000000000000`) // however long it takes here, it is one minute
	}
	if last != http.StatusTooManyRequests {
		t.Errorf("the seventh guess: %d, want 429", last)
	}
	for i := range 40 {
		f.submit("/console/signin", url.Values{"name": {"hunter2-hunter2-" + strconv.Itoa(i) + "\x00"}, "password": {"x"}})
	}
	verbs, e := f.verbs("person.signin_failed")
	if len(verbs) < 30 || len(verbs) > 60 { // a minute may begin in between
		t.Errorf("%d failures are recorded, want 30 a minute", len(verbs))
	}
	if e.Object != "(no such account)" || strings.Contains(e.Detail, "hunter2") {
		t.Errorf("the record holds what was typed: %+v", e)
	}
}

func TestDecide(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	page := "/console/actions/" + a.ID

	queue := f.get("/console/review")
	contains(t, "queue", queue.body, "(1) Waiting", "bob@shop.example</bdi> +2</span>", "1 hidden", "Totals by region", "north 150 south 98", "analyst", "1 file", "first contact", page)
	if !regexp.MustCompile(`<time class="age"[^>]*>\d+ s<`).MatchString(queue.body) {
		t.Error("queue does not say since when it waits")
	}
	if i, j := strings.Index(queue.body, "bob@shop.example"), strings.Index(queue.body, "Totals by region"); i > j {
		t.Error("the subject comes before the recipients")
	}
	shown := f.get(page)
	contains(t, "action", shown.body, "3 recipients, 1 hidden", "eve@hidden.example", "north 150\nsouth 98", "totals.csv", "text/csv, 10 bytes", a.Hex(),
		hex.EncodeToString(digest("north,150\n")), "proposed", "analyst@agents.test", "Approve and send to 3, 1 hidden", "to 3 addresses, 1 of them hidden, at once. It cannot be called back.", `data-state="pending"`)
	form := f.form(shown.body, "approve-form")
	if got := form.Encode(); got != "decision=approve&digest="+a.Hex()+"&queue=&version=1" {
		t.Fatalf("form: %s", got)
	}

	t.Run("what is fetched changes nothing", func(t *testing.T) {
		for _, m := range []string{"GET", "HEAD", "PUT", "DELETE", "OPTIONS"} {
			got := f.send(m, page+"/decision?"+form.Encode(), nil)
			if got.status != http.StatusMethodNotAllowed || got.header.Get("Allow") != "POST" {
				t.Errorf("%s: %d, Allow %q; want 405, POST", m, got.status, got.header.Get("Allow"))
			}
		}
	})
	changed := func(k, v string) url.Values {
		c := url.Values{}
		for n := range form {
			c.Set(n, form.Get(n))
		}
		c.Set(k, v)
		return c
	}
	for _, tt := range []struct {
		name string
		form url.Values
		want int
	}{
		{"another version", changed("version", "2"), http.StatusConflict},
		{"no version", changed("version", ""), http.StatusBadRequest},
		{"another digest", changed("digest", strings.Repeat("0", 64)), http.StatusConflict},
		{"no digest", changed("digest", ""), http.StatusConflict},
		{"neither of both", changed("decision", "maybe"), http.StatusBadRequest},
		{"rejected without a reason", changed("decision", "reject"), http.StatusBadRequest},
		{"fields in the query only", nil, http.StatusBadRequest},
		{"a form without end", changed("reason", strings.Repeat("x", 70_000)), http.StatusRequestEntityTooLarge},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := page + "/decision"
			if tt.form == nil {
				tt.form, path = url.Values{}, path+"?"+form.Encode()
			}
			if got := f.submit(path, tt.form); got.status != tt.want {
				t.Errorf("status %d, want %d\n%s", got.status, tt.want, got.body)
			}
			if got := f.state(a.ID); got.State != oversight.Pending || got.Version != 1 {
				t.Errorf("afterwards: %s, version %d", got.State, got.Version)
			}
		})
	}
	for path, want := range map[string]int{
		"/console/actions/act_AAAAAAAAAAAAAAAAAAAAAAAAAA/decision": 404, "/console/actions/x%00y/decision": 404, "/console/nothing": 404,
	} {
		if got := f.submit(path, form); got.status != want {
			t.Errorf("POST %s: %d, want %d", path, got.status, want)
		}
	}

	if got := f.submit(page+"/decision", form); got.status != http.StatusSeeOther || got.location != "/console/review?done="+a.ID {
		t.Fatalf("approve: %d to %q\n%s", got.status, got.location, got.body)
	}
	shown = f.get(page)
	contains(t, "approved", shown.body, `http-equiv="refresh" content="2"`, "Approved by", "will be carried out soon")
	second := f.submit(page+"/decision", form)
	if second.status != http.StatusConflict {
		t.Errorf("the second click: %d, want 409", second.status)
	}
	contains(t, "the second click", second.body, "Your click changed nothing", `data-state="approved"`)
	f.drain()
	if f.hop.sent() != 1 {
		t.Errorf("sent %d times, want once", f.hop.sent())
	}
	shown = f.get(page)
	contains(t, "done", shown.body, `data-state="done"`, "It was carried out", "250 2.0.0 ok", "execution began")
	for _, not := range []string{"http-equiv", "approve-form", "reject-form"} {
		if strings.Contains(shown.body, not) {
			t.Errorf("the page of what is done has %q", not)
		}
	}

	b := f.propose(draft())
	form = f.form(f.get("/console/actions/"+b.ID).body, "reject-form")
	form.Set("reason", "the figures are wrong\r\nask again")
	if got := f.submit("/console/actions/"+b.ID+"/decision", form); got.status != http.StatusSeeOther {
		t.Fatalf("reject: %d", got.status)
	}
	f.drain()
	if got := f.state(b.ID); got.State != oversight.Denied || got.Reason != "the figures are wrong\nask again" || f.hop.sent() != 1 {
		t.Errorf("rejected: %s, %q, sent %d", got.State, got.Reason, f.hop.sent())
	}
	contains(t, "decided", f.get("/console/decided").body, "rejected", "the figures are wrong", `data-state="done"`, "eve@hidden.example", "hidden")
	contains(t, "queue", f.get("/console/review").body, "Nothing is waiting")
}

func TestResolve(t *testing.T) {
	for outcome, want := range map[string]oversight.State{"happened": oversight.Done, "give-up": oversight.Failed, "again": oversight.Approved} {
		t.Run(outcome, func(t *testing.T) {
			f := setup(t)
			f.enter()
			a := f.propose(draft())
			page := "/console/actions/" + a.ID
			f.submit(page+"/decision", f.form(f.get(page).body, "approve-form"))
			f.hop.answer(mail.Uncertain, "the connection broke off")
			f.drain()
			contains(t, "queue", f.get("/console/review").body, "Outcome unknown", page)
			shown := f.get(page)
			contains(t, "unknown", shown.body, `data-state="unknown"`, "the connection broke off", "may or may not have taken effect")
			form := f.form(shown.body, "resolve-form")
			form.Set("reason", "asked Bob on the phone")
			if got := f.submit(page+"/resolution", form); got.status != http.StatusBadRequest {
				t.Errorf("without an outcome: %d, want 400", got.status)
			}
			form.Set("outcome", outcome)
			form.Set("reason", " ")
			if got := f.submit(page+"/resolution", form); got.status != http.StatusBadRequest {
				t.Errorf("without a reason: %d, want 400", got.status)
			}
			if got := f.get(page + "/resolution"); got.status != http.StatusMethodNotAllowed {
				t.Errorf("GET: %d, want 405", got.status)
			}
			form.Set("reason", "asked Bob on the phone")
			if got := f.submit(page+"/resolution", form); got.status != http.StatusSeeOther {
				t.Fatalf("resolve: %d\n%s", got.status, got.body)
			}
			if got := f.state(a.ID); got.State != want {
				t.Errorf("state %s, want %s", got.State, want)
			}
			if got := f.submit(page+"/resolution", form); got.status != http.StatusConflict {
				t.Errorf("the second click: %d, want 409", got.status)
			}
			contains(t, "after", f.get(page).body, "asked Bob on the phone", "resolved by a person")
		})
	}
}

// TestConcurrentDecisionsCountOnce is many people who click at the same time: one of them decides.
func TestConcurrentDecisionsCountOnce(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	page := "/console/actions/" + a.ID
	body := f.get(page).body
	count := map[int]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			form := f.form(body, []string{"approve-form", "reject-form"}[i%2])
			form.Set("reason", "no")
			f.get("/console/review")
			got := f.submit(page+"/decision", form).status
			mu.Lock()
			defer mu.Unlock()
			count[got]++
		})
	}
	wg.Wait()
	if count[http.StatusSeeOther] != 1 || count[http.StatusConflict] != 7 {
		t.Errorf("answers: %v, want one 303 and seven 409", count)
	}
	if verbs, _ := f.verbs("action."); len(verbs) != 2 {
		t.Errorf("record: %v", verbs)
	}
	if f.drain(); f.hop.sent() > 1 {
		t.Errorf("sent %d times", f.hop.sent())
	}
}

// TestModifiedContentIsNotApproved is who can write the database: what was changed after it
// was proposed is neither shown as good nor approved, also not from a page or
// a list that was made before.
func TestModifiedContentIsNotApproved(t *testing.T) {
	f := setup(t)
	f.enter()
	a, b := f.propose(draft()), f.propose(draft())
	page := "/console/actions/" + a.ID
	form := f.form(f.get(page).body, "approve-form")
	other := draft()
	other.To = []string{"thief@elsewhere.example"}
	f.exec(`update action set payload = $1 where id = $2`, f.propose(other).Payload, a.ID)
	if got := f.submit(page+"/decision", form); got.status != http.StatusConflict {
		t.Errorf("approve: %d, want 409", got.status)
	}
	shown := f.get(page)
	contains(t, "changed", shown.body, "The database has been modified")
	if strings.Contains(shown.body, "-form\"") && strings.Contains(shown.body, "/decision") {
		t.Error("the changed action can be decided")
	}
	f.exec(`update action set payload = $1, digest = $2 where id = $3`, []byte("no envelope"), digest("no envelope"), b.ID)
	shown = f.get("/console/actions/" + b.ID)
	contains(t, "unreadable", shown.body, "cannot be shown", "reject-form")
	if strings.Contains(shown.body, "approve-form") {
		t.Error("what cannot be shown can be approved")
	}
	form = f.form(shown.body, "reject-form")
	form.Set("decision", "approve")
	if got := f.submit("/console/actions/"+b.ID+"/decision", form); got.status != http.StatusConflict || f.state(b.ID).State != oversight.Pending {
		t.Errorf("approving what cannot be shown: %d", got.status)
	}
	contains(t, "queue", f.get("/console/review").body, "its content cannot be shown")
	form.Set("decision", "reject")
	form.Set("reason", "unreadable")
	if got := f.submit("/console/actions/"+b.ID+"/decision", form); got.status != http.StatusSeeOther {
		t.Errorf("rejecting what cannot be shown: %d", got.status)
	}
}

// TestEveryPageNeedsAPerson: no page opens, and no form works, without a
// person's session.
func TestEveryPageNeedsAPerson(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	page := "/console/actions/" + a.ID
	form := f.form(f.get(page).body, "approve-form")
	check := func(t *testing.T, dress func(*http.Request)) {
		t.Helper()
		for _, rt := range console.ClosedRoutes() {
			method, path, want := rt[0], strings.ReplaceAll(rt[1], "{$}", ""), http.StatusSeeOther
			if method == http.MethodPost {
				want = http.StatusUnauthorized
			}
			path = strings.ReplaceAll(strings.ReplaceAll(path, "/actions/{id}", strings.TrimPrefix(page, "/console")), "{id}", "i"+strings.Repeat("a", 20))
			req, err := http.NewRequestWithContext(t.Context(), method, f.url+path, strings.NewReader(form.Encode()))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			if dress != nil {
				dress(req)
			}
			got := f.do(req)
			if got.status != want || strings.Contains(got.body, "eve@hidden.example") {
				t.Errorf("%s %s: %d, want %d", method, path, got.status, want)
			}
			if want == http.StatusSeeOther && !strings.HasPrefix(got.location, "/console/signin") {
				t.Errorf("%s %s leads to %q", method, path, got.location)
			}
		}
		if s := f.state(a.ID); s.State != oversight.Pending {
			t.Errorf("it is %s", s.State)
		}
	}
	session := f.client.Jar.Cookies(must(url.Parse(f.url + "/console/")))[0]
	f.client = f.browser()
	t.Run("nobody", func(t *testing.T) { check(t, nil) })
	for name, key := range map[string]auth.Secret{"inbox key": f.inboxKey, "project key": f.projectKey, "set-up token": f.link} {
		t.Run(name, func(t *testing.T) {
			check(t, func(r *http.Request) {
				r.Header.Set("X-Api-Key", key.Reveal())
				r.Header.Set("Authorization", "Bearer "+key.Reveal())
				r.AddCookie(&http.Cookie{Name: auth.SessionCookie, Value: key.Reveal()})
			})
			if got := f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {key.Reveal()}}); got.status == http.StatusSeeOther {
				t.Errorf("signing in with it: %d", got.status)
			}
		})
	}
	t.Run("an expired session", func(t *testing.T) {
		f.exec(`update session set expires_at = $1`, store.Time(time.Now().Add(-time.Second)))
		check(t, func(r *http.Request) { r.AddCookie(session) })
	})
	t.Run("a person of another project", func(t *testing.T) {
		var token auth.Secret
		f.update(func(tx *store.Tx) error {
			id, _, err := auth.NewProject(t.Context(), tx, "two")
			if err == nil {
				token, err = auth.NewSetup(t.Context(), tx, id)
			}
			return err
		})
		f.submit("/console/setup", url.Values{"token": {token.Reveal()}, "name": {"eve"}, "password": {password}, "again": {password}})
		for path, want := range map[string]int{page: 404, page + "/text": 404, "/console/": 200, "/console/audit": 200} {
			if got := f.get(path); got.status != want || strings.Contains(got.body, "eve@hidden.example") || strings.Contains(got.body, "ann") {
				t.Errorf("GET %s: %d, want %d and nothing of the other project", path, got.status, want)
			}
		}
		if got := f.submit(page+"/decision", form); got.status != http.StatusNotFound {
			t.Errorf("decide: %d, want 404", got.status)
		}
	})
}

// TestOtherOriginsAreRefused: pages of other sites, and other names for this one.
func TestOtherOriginsAreRefused(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	page := "/console/actions/" + a.ID
	form := f.form(f.get(page).body, "approve-form")
	post := func(path string, header map[string]string, host string) answer {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+path, strings.NewReader(form.Encode()))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		for k, v := range header {
			req.Header.Set(k, v)
		}
		req.Host = host
		return f.do(req)
	}
	own := strings.TrimPrefix(f.url, "http://")
	for _, tt := range []struct {
		name   string
		header map[string]string
		host   string
		want   int
	}{
		{"a form of another site", map[string]string{"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}, own, 403},
		// SameSite does not tell ports and names below localhost apart.
		{"a page of a sandbox on this host", map[string]string{"Sec-Fetch-Site": "same-site", "Origin": "http://3000-iabc.localhost"}, own, 403},
		{"an old browser", map[string]string{"Origin": "https://evil.example"}, own, 403},
		{"a sealed frame", map[string]string{"Sec-Fetch-Site": "cross-site", "Origin": "null"}, own, 403},
		{"a name that was rebound", map[string]string{"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"}, "evil.example", 421},
		{"our name with another port", map[string]string{"Sec-Fetch-Site": "same-origin"}, "127.0.0.1:1", 421},
		{"a name that ends in ours", nil, "x.console.test", 421},
		{"a name that begins with ours", nil, "console.test.evil.example", 421},
		{"our name and a dot", nil, "console.test.", 421},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := post(page+"/decision", tt.header, tt.host); got.status != tt.want {
				t.Errorf("status %d, want %d", got.status, tt.want)
			}
			if s := f.state(a.ID); s.State != oversight.Pending {
				t.Errorf("it is %s", s.State)
			}
		})
	}
	for _, host := range []string{"console.test", "Console.Test:8443"} {
		req := httptest.NewRequest(http.MethodGet, f.url+"/console/signin", nil)
		req.Host, req.RequestURI = host, ""
		if got := f.do(req); got.status != 200 && got.status != 303 {
			t.Errorf("Host %s: %d", host, got.status)
		}
	}
	for _, path := range []string{"/console/signin", "/console/setup", "/console/signout"} {
		if got := post(path, map[string]string{"Sec-Fetch-Site": "cross-site"}, own); got.status != 403 {
			t.Errorf("POST %s from another site: %d, want 403", path, got.status)
		}
	}
}

func TestHeaders(t *testing.T) {
	f := setup(t)
	f.enter()
	for _, path := range []string{"/console/", "/console/nothing", "/console/setup?token=x", "/console/static/style.css", "/console/static/..%2fconsole.go"} {
		h := f.get(path).header
		for k, want := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; script-src 'self'; connect-src 'self'; frame-src 'self'; worker-src 'self'; manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
			"X-Content-Type-Options":  "nosniff", "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin",
		} {
			if got := h.Get(k); got != want {
				t.Errorf("%s: %s is %q, want %q", path, k, got, want)
			}
		}
		if got := h.Get("Cache-Control"); got != "no-store" && path != "/console/static/style.css" {
			t.Errorf("%s: Cache-Control is %q", path, got)
		}
	}
}

// TestSignInStaysOnTheConsole: signing in ends on a page of the console.
func TestSignInStaysOnTheConsole(t *testing.T) {
	f := setup(t)
	f.enter()
	const home = "/console/"
	for next, want := range map[string]string{
		"":                                      home,
		"/console/audit?verb=egress.":           "/console/audit?verb=egress.",
		"/console/actions/act_X":                "/console/actions/act_X",
		"//evil.example/console/":               home,
		"/\\evil.example/console/":              home,
		"https://evil.example/console/":         home,
		"http:/console/":                        home,
		"javascript:alert(1)":                   home,
		"/console/../v1/actions":                home,
		"/console/%2e%2e/%2e%2e/evil":           home,
		"/console/..%2f..%2fevil":               home,
		"/console/x%5c..%5cevil":                home,
		"/consolex/":                            home,
		"/v1/actions":                           home,
		"console/":                              home,
		"/console/\r\nSet-Cookie: x=y":          home,
		"/console/\t/evil":                      home,
		" //evil.example":                       home,
		"/console/signout":                      home,
		"/console/signin?next=/console/":        home,
		"/console/" + strings.Repeat("x", 3000): home,
		"//user@evil.example/console/":          home,
		"/console/@evil.example":                "/console/@evil.example",
		"\x00":                                  home,
	} {
		a := f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {password}, "next": {next}})
		if a.status != http.StatusSeeOther || a.location != want {
			t.Errorf("next %.60q: %d to %q, want %q", next, a.status, a.location, want)
		}
		if len(a.header["Set-Cookie"]) != 1 {
			t.Errorf("next %.60q: cookies %q", next, a.header["Set-Cookie"])
		}
	}
}

// TestHostileTextStaysText: whatever agents, sandboxes and mail say is text.
func TestHostileTextStaysText(t *testing.T) {
	payloads := []string{
		`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `'-alert(1)-'`, `</pre><form action=https://evil.example><button>Approve</button></form>`,
		`</title><script>alert(1)</script>`, `{{.}}`, `javascript:alert(1)`, `<!--`, `]]>`, `&lt;script&gt;`, `</textarea><script>`, `<svg onload=alert(1)>`, "\u202egpj.exe",
	}
	for _, p := range payloads {
		t.Run(p, func(t *testing.T) {
			f := setup(t)
			f.enter()
			d := draft()
			plain := strings.ReplaceAll(p, "\u202e", "") // refused in a header of ours
			name := strings.NewReplacer(`"`, "'", "<", "(", ">", ")", "/", "_", "\\", "_", ":", "_").Replace(plain)
			d.Subject, d.Text, d.To, d.Attachments[0].Name = plain, p+"\nx", []string{`"` + strings.ReplaceAll(name, ";", "") + `" <bob@shop.example>`}, name
			a := f.propose(d)
			// Captured mail says in its header what it likes.
			raw := "From: analyst@agents.test\r\nTo: bob@shop.example\r\nSubject: " + p + "\r\nMIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n" +
				"--b\r\nContent-Type: text/html\r\n\r\n" + p + "\r\n--b\r\nContent-Type: text/plain\r\nContent-Disposition: attachment; filename*=UTF-8''" + url.PathEscape(p) + "\r\n\r\nx\r\n--b--\r\n"
			raw = "Date: Sat, 21 Nov 2026 10:00:00 +0000\r\n" + raw
			captured, err := f.post.SendRaw(t.Context(), f.agent, "smtp", "analyst@agents.test", []string{"bob@shop.example"}, []byte(raw))
			if err != nil {
				t.Logf("captured: %v", err) // refused at the door is as good
			}
			s, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{
				Template: p, Metadata: map[string]string{p: p, "postern.inbox": "x"}, Options: sandbox.Options{Timeout: time.Minute}, Inbox: f.inbox.ID, Egress: policy.Egress{AllowOut: []string{p}},
			})
			if err != nil {
				t.Fatal(err)
			}
			f.update(func(tx *store.Tx) error {
				who := auth.Principal{Kind: auth.Sandbox, ID: p, Project: f.project.Project}
				if err := audit.Append(t.Context(), tx, who, audit.EgressDenied, p, audit.Fields{p: p}); err != nil {
					return err
				}
				// No verb is chosen by an agent; this one is by whoever writes the database.
				_, err := tx.ExecContext(t.Context(), `update audit_entry set verb = $1 where object = $2`, "egress."+plain, p)
				return err
			})
			reject := f.form(f.get("/console/actions/"+a.ID).body, "reject-form")
			reject.Set("reason", p+" ")
			stale := url.Values{"version": {"9"}, "digest": {"x"}, "decision": {"reject"}, "reason": {p}}
			pages := map[string]answer{
				"queue": f.get("/console/review"), "action": f.get("/console/actions/" + a.ID), "sandbox": f.get("/console/sandboxes/" + s.ID),
				"sandboxes": f.get("/console/sandboxes"), "audit": f.get("/console/audit"), "filter": f.get("/console/audit?" + url.Values{"verb": {p}, "object": {p}}.Encode()),
				"stale": f.submit("/console/actions/"+a.ID+"/decision", stale), "missing": f.get("/console/" + url.PathEscape(p)),
				"signin":  f.submit("/console/signin", url.Values{"name": {p}, "password": {p}, "next": {p}}),
				"setup":   f.submit("/console/setup", url.Values{"name": {p}, "token": {p}}),
				"verify":  f.submit("/console/audit/verify", url.Values{"known": {p}}),
				"reject":  f.submit("/console/actions/"+a.ID+"/decision", reject),
				"after":   f.get("/console/actions/" + a.ID),
				"decided": f.get("/console/decided"),
			}
			if captured.ID != "" {
				pages["captured"] = f.get("/console/actions/" + captured.ID)
				pages["captured queue"] = f.get("/console/review")
			}
			for name, page := range pages { // wellFormed has looked at each
				if page.status >= 500 {
					t.Errorf("%s: status %d", name, page.status)
				}
				if strings.Contains(page.body, "\u202e") {
					t.Errorf("%s: turns the text around", name)
				}
			}
			if got := f.get("/console/actions/" + a.ID + "/text"); got.status != 200 || got.header.Get("Content-Type") != "text/plain; charset=utf-8" {
				t.Errorf("text: %d, %q", got.status, got.header.Get("Content-Type"))
			}
		})
	}
}

// TestDisplayNameIsNotARecipient: a display name with a comma and an address in it is not
// one more recipient, and a name in brackets does not replace the address.
func TestDisplayNameIsNotARecipient(t *testing.T) {
	f := setup(t)
	f.enter()
	d := draft()
	d.To = []string{`"boss@good.example, ops@good.example" <thief@evil.example>`}
	a := f.propose(d)
	page := f.get("/console/actions/" + a.ID).body
	contains(t, "page", page, `<bdi class="addr">thief@evil.example</bdi> <bdi class="name">boss@good.example, ops@good.example</bdi>`, "3 recipients, 1 hidden")
	if strings.Contains(page, `<bdi class="addr">boss`) {
		t.Error("the name is shown as an address")
	}
}

func TestLongText(t *testing.T) {
	f := setup(t)
	f.enter()
	d := draft()
	d.Text = strings.Repeat("a line of text\n", 10_000) + "THE END\n"
	a := f.propose(d)
	page := f.get("/console/actions/" + a.ID)
	contains(t, "long text", page.body, "This is the beginning", "/text")
	if strings.Contains(page.body, "THE END") {
		t.Error("all of the long text is on the page")
	}
	contains(t, "all of it", f.get("/console/actions/"+a.ID+"/text").body, "THE END")
	d.Text = "Hello\n" + strings.Repeat("\n", 50) + "and pay\n"
	contains(t, "a gap", f.get("/console/actions/"+f.propose(d).ID).body, "50 empty lines")
}

func TestQueueHasPages(t *testing.T) {
	f := setup(t)
	f.enter()
	first := f.propose(draft())
	for range 30 {
		f.propose(draft())
	}
	page := f.get("/console/review")
	contains(t, "queue", page.body, "31 actions wait", first.ID, `href="/console/review?page=2"`)
	contains(t, "second page", f.get("/console/review?page=2").body, `href="/console/review?page=1"`)
	for _, q := range []string{"0", "-1", "x", "9999"} {
		if a := f.get("/console/review?page=" + q); a.status != http.StatusBadRequest {
			t.Errorf("page %s: %d, want 400", q, a.status)
		}
	}
	contains(t, "past the end", f.get("/console/review?page=7").body, "no longer exists")
}

func TestSandboxes(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "empty", f.get("/console/sandboxes").body, "No sandboxes yet")
	s, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{
		Template: "base", Metadata: map[string]string{"task": "totals \u202egpj"}, Options: sandbox.Options{Timeout: time.Hour}, Inbox: f.inbox.ID, Egress: policy.Egress{AllowOut: []string{"example.com"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	page := "/console/sandboxes/" + s.ID
	contains(t, "list", f.get("/console/sandboxes").body, s.ID, "running", ">analyst<", "base", "in 59 min", "1 sandbox")
	contains(t, "one", f.get(page).body, `totals \u{202e}gpj`, "base", "Kill it now", "example.com", "analyst@agents.test")
	if a := f.get(page + "/kill"); a.status != http.StatusMethodNotAllowed {
		t.Errorf("GET kill: %d, want 405", a.status)
	}
	if a := f.submit(page+"/kill", url.Values{}); a.status != http.StatusSeeOther || a.location != page {
		t.Errorf("kill: %d to %q", a.status, a.location)
	}
	if a := f.submit(page+"/kill", url.Values{}); a.status != http.StatusConflict {
		t.Errorf("the second click: %d, want 409", a.status)
	}
	contains(t, "ended", f.get("/console/sandboxes").body, "ended", "killed")
	for _, id := range []string{"i" + strings.Repeat("a", 20), "x", "..%2f..%2fx"} {
		if a := f.submit("/console/sandboxes/"+id+"/kill", url.Values{}); a.status != http.StatusNotFound {
			t.Errorf("kill %s: %d, want 404", id, a.status)
		}
	}
	if _, e := f.verbs("sandbox.killed"); e.Actor != "person:ann" {
		t.Errorf("the record says that %q did it", e.Actor)
	}
}

// TestSandboxPageSaysWhatItMayReach creates sandboxes that ask for more than the server
// opens: the page says what the wall does.
func TestSandboxPageSaysWhatItMayReach(t *testing.T) {
	f := setup(t)
	f.enter()
	page := func(e policy.Egress) (id, body string) {
		s, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{Template: "base", Options: sandbox.Options{Timeout: time.Hour}, Egress: e})
		if err != nil {
			t.Fatal(err)
		}
		return s.ID, f.get("/console/sandboxes/" + s.ID).body
	}
	_, body := page(policy.Egress{Internet: true})
	contains(t, "a server with a list", body, "It may reach: <bdi>example.com (it asked for the Internet, which the server does not open")
	_, body = page(policy.Egress{AllowOut: []string{"other.test"}})
	contains(t, "beyond the list", body, "It may reach: <bdi>nothing (it asked for more")
	id, body := page(policy.Egress{})
	contains(t, "nothing", body, "It may reach: <bdi>nothing</bdi>")
	if strings.Contains(body, "the Internet") {
		t.Error("the page of a sandbox that reaches nothing speaks of the Internet")
	}
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := f.permits.Add(t.Context(), tx, permit.Permit{
			Project: f.project.Project, Sandbox: id, Kind: permit.Network, Hosts: []string{"api.test"}, Created: time.Now(), Until: time.Now().Add(time.Hour), Action: "act_x", Decider: "person:ann",
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "a permit", f.get("/console/sandboxes/"+id).body, "by permits of people, for now, api.test")
}

func TestRecord(t *testing.T) {
	f := setup(t)
	f.enter()
	for range 30 {
		f.propose(draft())
	}
	a := f.propose(draft())
	for range 30 {
		f.submit("/console/signout", url.Values{})
		f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {password}})
	}
	page := f.get("/console/audit")
	contains(t, "record", page.body, "person.signin", "Older", "/console/audit?before=")
	contains(t, "filter", f.get("/console/audit?verb=action.").body, "action.propose")
	one := f.get("/console/audit?object=" + a.ID)
	contains(t, "object", one.body, a.Hex(), "Clear filter")
	if strings.Contains(one.body, "person.signin") {
		t.Error("the filter lets others through")
	}
	contains(t, "before", f.get("/console/audit?before=2").body, "inbox.create")
	for _, q := range []string{"before=x", "before=0", "object=%00", "verb=%ff", "verb=" + strings.Repeat("x", 400)} {
		if got := f.get("/console/audit?" + q); got.status != http.StatusBadRequest {
			t.Errorf("%s: %d, want 400", q, got.status)
		}
	}

	if got := f.get("/console/audit/verify"); got.status != http.StatusMethodNotAllowed {
		t.Errorf("GET verify: %d, want 405", got.status)
	}
	ok := f.submit("/console/audit/verify", url.Values{})
	contains(t, "verify", ok.body, "The record is intact", `id="head"`)
	_, head, _ := strings.Cut(ok.body, `id="head">`)
	head, _, _ = strings.Cut(head, "<")
	contains(t, "verify with a head", f.submit("/console/audit/verify", url.Values{"known": {head}}).body, "contains the head you entered")
	contains(t, "another head", f.submit("/console/audit/verify", url.Values{"known": {"3:" + strings.Repeat("ab", 32)}}).body, "The record was changed", "entry 3")
	if got := f.submit("/console/audit/verify", url.Values{"known": {"nonsense"}}); got.status != http.StatusBadRequest {
		t.Errorf("a bad head: %d, want 400", got.status)
	}
	f.exec(`update audit_entry set detail = '{}' where seq = 7`)
	contains(t, "broken", f.submit("/console/audit/verify", url.Values{}).body, "The record was changed", "entry 7")
}

func TestInboxes(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "inboxes", f.get("/console/inboxes").body, "cannot read incoming mail", "analyst@agents.test", "gated_send", f.inbox.ID)
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err) // a bug in the test
	}
	return v
}

func digest(s string) []byte {
	sum := sha256.Sum256([]byte(s))
	return sum[:]
}
