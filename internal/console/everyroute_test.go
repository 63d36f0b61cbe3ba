package console_test

import (
	"html"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"postern/internal/console"
	"postern/internal/mail"
	"postern/internal/policy"
)

// everything fills the project with at least one thing of each kind that has a page.
func (f *fixture) everything() {
	t := f.t
	t.Helper()
	d := draft()
	d.Subject = "Their plans"
	d.HTML = "<p>Their plans</p>"
	d.Attachments = append(d.Attachments, mail.Attachment{Name: "plan.html", ContentType: "text/html", Data: []byte("<script>alert(1)</script>")})
	f.propose(d)
	decided := f.propose(d)
	v := f.form(f.get("/console/actions/"+decided.ID).body, "reject-form")
	v.Set("reason", "Their plans")
	f.must(f.submit("/console/actions/"+decided.ID+"/decision", v))
	f.requested(policy.KindRequest, order())
	f.requested(policy.KindTool, order())
	f.settings()
	f.work()
}

var address = regexp.MustCompile(`(?:href|src|action)="(/console/[^"#]*)`)

// routeOf returns the route that answers a path, or "".
func routeOf(method, path string) string {
	best := ""
	for _, rt := range console.ClosedRoutes() {
		pattern := regexp.MustCompile("^" + regexp.MustCompile(`\\\{[^}]*\\\}`).ReplaceAllString(regexp.QuoteMeta(strings.TrimSuffix(rt[1], "{$}")), "[^/]+") + "$")
		// As http.ServeMux has it, words come before wildcards.
		if rt[0] == method && pattern.MatchString(path) && (best == "" || strings.Count(rt[1], "{") < strings.Count(best, "{")) {
			best = rt[1]
		}
	}
	return best
}

// crawl follows every link of the console as the person who is signed in, and returns the
// addresses that answer, at most three of each route.
func (f *fixture) crawl() (pages, forms []string) {
	count, seen := map[string]int{}, map[string]bool{}
	queue := []string{"/console/"}
	for len(queue) > 0 && len(seen) < 600 {
		at := queue[0]
		queue = queue[1:]
		path, query, _ := strings.Cut(at, "?")
		route := routeOf(http.MethodGet, path)
		// The stream of changes never ends.
		if seen[at] || route == "" || strings.Contains(path, "/events") || strings.HasSuffix(path, "/stream") {
			continue
		}
		seen[at] = true
		key := route
		if query == "" {
			key += " alone"
		}
		if count[key]++; count[key] > 3 {
			continue
		}
		got := f.bytes(at)
		if got.status != http.StatusOK {
			continue
		}
		pages = append(pages, at)
		for _, m := range address.FindAllStringSubmatch(got.body, -1) {
			to := html.UnescapeString(m[1])
			if path, _, _ := strings.Cut(to, "?"); routeOf(http.MethodGet, path) == "" && routeOf(http.MethodPost, path) != "" && !slices.Contains(forms, path) {
				forms = append(forms, path)
				continue
			}
			queue = append(queue, to)
		}
	}
	return pages, forms
}

// TestAttackersOnEveryRoute walks through all of the console as its owner. Then it tries
// the same addresses as an attacker would: in a frame, from a cache, after signing out,
// and as the owner of another project. No route is exempt because nobody thought of it.
func TestAttackersOnEveryRoute(t *testing.T) {
	f := setup(t)
	f.enter()
	f.everything()
	pages, forms := f.crawl()
	reached := map[string]bool{}
	for _, at := range pages {
		path, _, _ := strings.Cut(at, "?")
		reached[routeOf(http.MethodGet, path)] = true
		h := f.bytes(at).header
		// The attack: a page of the attacker's has the console in a frame, under a button of its
		// own. What is shown in a frame of ours runs nothing, and only our pages may have it.
		csp := h.Get("Content-Security-Policy")
		if inert := strings.Contains(csp, "frame-ancestors 'self'") && strings.Contains(csp, "sandbox"); !strings.Contains(csp, "frame-ancestors 'none'") && !inert {
			t.Errorf("%s may be framed: %q", at, csp)
		}
		if strings.Contains(csp, "unsafe-inline") && !strings.Contains(csp, "sandbox") || strings.Contains(csp, "unsafe-eval") {
			t.Errorf("%s may run scripts: %q", at, csp)
		}
		// The attack: the next person at this computer presses Back, or a proxy keeps the page.
		if got := h.Get("Cache-Control"); got != "no-store" {
			t.Errorf("%s may be kept: Cache-Control is %q", at, got)
		}
		if h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Referrer-Policy") != "no-referrer" {
			t.Errorf("%s: %v", at, h)
		}
	}
	// What needs a guest that answers, or a picture, has its own tests; strangers try it here too.
	inside := []string{"/console/sandboxes/{id}/files", "/console/sandboxes/{id}/file", "/console/sandboxes/{id}/picture", "/console/sandboxes/{id}/socket", "/console/sandboxes/{id}/recordings/{name}", "/console/actions/{id}/files/{n}/picture"}
	for _, rt := range console.ClosedRoutes() {
		if rt[0] != http.MethodGet || reached[rt[1]] {
			continue
		}
		known := slices.Contains(inside, rt[1])
		if !known && !slices.Contains(noPage, rt[1]) && rt[1] != "/console/stepup" { // one is sent there
			t.Errorf("no link leads to %s", rt[1])
		}
		if parent, _, ok := strings.Cut(rt[1], "{id}"); known && ok {
			i := slices.IndexFunc(pages, func(at string) bool { return routeOf(http.MethodGet, at) == parent+"{id}" })
			if i < 0 {
				t.Fatalf("no link leads to %s{id}", parent)
			}
			pages = append(pages, strings.NewReplacer("{n}", "0", "{name}", "x").Replace(pages[i]+strings.TrimPrefix(rt[1], parent+"{id}")))
		}
	}
	t.Logf("%d pages of %d routes, %d forms", len(pages), len(reached), len(forms))

	owner := f.client
	f.stranger()
	for _, at := range pages {
		got := f.bytes(at)
		for _, theirs := range []string{"Their plans", "analyst", f.inbox.ID, "shop.example", "b.example.com", "hooks.example", "xn--bcher-kva"} {
			// What is asked for may be in the page: "Nothing matches …".
			if strings.Contains(got.body, theirs) && !strings.Contains(at, theirs) {
				t.Errorf("%s says %q to a person of another project (%d)", at, theirs, got.status)
			}
		}
		path, _, _ := strings.Cut(at, "?")
		route := routeOf(http.MethodGet, path)
		// Each project numbers its own versions; a socket is refused to all but our own pages.
		own := route == "/console/policy/versions/{n}" || strings.HasSuffix(route, "/socket") && got.status == http.StatusForbidden
		if strings.Contains(strings.TrimSuffix(route, "{$}"), "{") && got.status != http.StatusNotFound && !own {
			t.Errorf("%s answers %d to a person of another project, want 404", at, got.status)
		}
	}
	for _, to := range forms {
		if route := routeOf(http.MethodPost, to); !strings.Contains(route, "{") {
			continue
		}
		if got := f.submit(to, url.Values{}); got.status < http.StatusBadRequest {
			t.Errorf("POST %s answers %d, %s, to a person of another project", to, got.status, got.location)
		}
	}

	f.client = owner
	out := f.submit("/console/signout", url.Values{})
	if got := out.header.Get("Clear-Site-Data"); got != `"cache", "storage"` {
		t.Errorf("signing out: Clear-Site-Data is %q", got)
	}
	for _, at := range pages {
		if got := f.bytes(at); got.status != http.StatusSeeOther || !strings.HasPrefix(got.location, "/console/signin") || got.header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s after signing out: %d to %q, Cache-Control %q", at, got.status, got.location, got.header.Get("Cache-Control"))
		}
	}
}
