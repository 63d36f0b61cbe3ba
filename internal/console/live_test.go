package console_test

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/console"
	"postern/internal/oversight"
)

// A stream is what a page is told, an event at a time.
type stream struct {
	t     testing.TB
	lines *bufio.Scanner
}

type told struct {
	Waiting int
	Mark    string
}

func (f *fixture) listen(watch string) *stream {
	f.t.Helper()
	ctx, stop := context.WithTimeout(f.t.Context(), 5*time.Minute)
	f.t.Cleanup(stop)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+"/console/events?"+url.Values{"watch": {watch}}.Encode(), nil)
	if err != nil {
		f.t.Fatal(err)
	}
	client := *f.client
	client.Timeout = 0
	resp, err := client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		f.t.Fatalf("events: %d, %q", resp.StatusCode, resp.Header.Get("Content-Type"))
	}
	return &stream{f.t, bufio.NewScanner(resp.Body)}
}

// next returns the next event, or false where the stream ends.
func (s *stream) next() (told, bool) {
	s.t.Helper()
	for s.lines.Scan() {
		if data, ok := strings.CutPrefix(s.lines.Text(), "data: "); ok {
			var e told
			if err := json.Unmarshal([]byte(data), &e); err != nil {
				s.t.Fatalf("event %q: %v", data, err)
			}
			return e, true
		}
	}
	return told{}, false
}

// TestOpenPagesLearnOfChanges: a page learns that something came, and one action's page that it moved.
func TestOpenPagesLearnOfChanges(t *testing.T) {
	f := setup(t)
	f.enter()
	s := f.listen("queue")
	first, _ := s.next()
	if first.Waiting != 0 {
		t.Errorf("at first %d wait, want none", first.Waiting)
	}
	a := f.propose(draft())
	second, ok := s.next()
	if !ok || second.Waiting != 1 || second.Mark == first.Mark {
		t.Errorf("after a proposal the page was told %+v, %v", second, ok)
	}
	contains(t, "queue", f.get("/console/review").body, `data-watch="queue" data-mark="`+second.Mark+`"`, "<title>(1) Waiting")
	one := f.listen(a.ID)
	before, _ := one.next()
	contains(t, "action", f.get("/console/actions/"+a.ID).body, `data-watch="`+a.ID+`" data-mark="`+before.Mark+`"`)
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Reason: "no"}); err != nil {
		t.Fatal(err)
	}
	if after, ok := one.next(); !ok || after.Mark == before.Mark {
		t.Errorf("after the decision the action's page was told %+v, %v; before %+v", after, ok, before)
	}
	if third, ok := s.next(); !ok || third.Waiting != 0 {
		t.Errorf("after the decision the queue was told %+v, %v", third, ok)
	}
}

// TestStreamsAreBoundedAndPrivate: what is watched is one's own, and nobody watches with more
// pages than a person has.
func TestStreamsAreBoundedAndPrivate(t *testing.T) {
	f := setup(t)
	f.enter()
	for watch, want := range map[string]int{
		"act_" + strings.Repeat("A", 26): http.StatusNotFound,
		"act_../audit":                   http.StatusBadRequest,
	} {
		if a := f.get("/console/events?watch=" + url.QueryEscape(watch)); a.status != want {
			t.Errorf("watching %s: status %d, want %d", watch, a.status, want)
		}
	}
	streams := make([]*stream, 0, 24)
	for range 24 {
		streams = append(streams, f.listen(""))
	}
	if a := f.get("/console/events"); a.status != http.StatusTooManyRequests {
		t.Errorf("one stream more than there may be: %d", a.status)
	}
	f.console.Close()
	for _, s := range streams {
		for _, ok := s.next(); ok; _, ok = s.next() {
		}
	}
}

// TestViewerHasNoForms: who only looks has every page that shows and no form that does.
func TestViewerHasNoForms(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	f.exec(`update person set role = $1`, auth.Viewer)
	for _, path := range []string{"/console/", "/console/actions/" + a.ID, "/console/decided", "/console/sandboxes", "/console/inboxes", "/console/inboxes/" + f.inbox.ID, "/console/quarantine", "/console/sending", "/console/domains", "/console/audit"} {
		page := f.get(path)
		if page.status != http.StatusOK {
			t.Errorf("%s: status %d", path, page.status)
		}
		for _, form := range strings.Split(page.body, `<form `)[1:] {
			if tag, _, _ := strings.Cut(form, ">"); strings.Contains(tag, `method="post"`) && !strings.Contains(tag, "/console/signout") && !strings.Contains(tag, "/console/audit/verify") {
				t.Errorf("%s: a viewer is shown <form %s>", path, tag)
			}
		}
	}
	for _, rt := range console.ChangingForms() {
		p := strings.NewReplacer("{id}", a.ID, "{name}", "x", "{version}", "1").Replace(rt)
		if got := f.submit(p, url.Values{"version": {"1"}, "digest": {a.Hex()}, "decision": {"approve"}}); got.status != http.StatusForbidden {
			t.Errorf("POST %s by a viewer: status %d, want 403", p, got.status)
		}
	}
	if got := f.state(a.ID); got.State != oversight.Pending {
		t.Errorf("the action is %s", got.State)
	}
}
