package console_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/request"
	"postern/internal/rulebook"
	"postern/internal/store"
)

const sentinel = "pst_abcdefghijklmnopqrstuvwxyz234567abcdefgh"

// requested proposes a request of a sandbox.
func (f *fixture) requested(kind policy.Kind, r *outgoing.Request) (a oversight.Action) {
	f.t.Helper()
	log := slog.New(slog.NewTextHandler(f.t.Output(), nil))
	requests := request.New(log, f.db, f.gate, connection.New(log, f.db, rulebook.New(log, f.db), f.gate, 0), nil, 0)
	f.gate.Handle(policy.KindRequest, requests)
	f.gate.Handle(policy.KindSecret, requests)
	f.gate.Handle(policy.KindTool, requests)
	payload, err := r.Encode()
	if err != nil {
		f.t.Fatal(err)
	}
	if kind == policy.KindSecret {
		payload = append([]byte(`{"use":{"id":"sec_1","secret":"GITHUB","sentinel":"`+sentinel+`","where":"header Authorization"},"first":true,"why":"the secret's own setting"}`+"\n"), payload...)
	}
	if kind == policy.KindTool {
		payload = append([]byte(`{"server":"bank","tool":"pay"}`+"\n"), payload...)
	}
	f.update(func(tx *store.Tx) (err error) {
		who := auth.Principal{Kind: auth.Sandbox, ID: "i" + strings.Repeat("a", 20), Project: f.project.Project, Template: "base-2f6cef1ff299defd"}
		a, err = f.gate.Propose(f.t.Context(), tx, who, oversight.Proposal{
			Request: policy.Request{Kind: kind, Via: "link", To: []string{r.Host}, Sandbox: who.ID, Template: who.Template}, Via: "link", Payload: payload,
			Note: "no request to " + r.Host + " was approved in this project before",
		})
		return err
	})
	return a
}

// order is a request with a secret, and with what code in a sandbox would like people
// to misread.
func order() *outgoing.Request {
	body := `{"query":{"vat":["SE556012345601","SE556077881201"],"fields":["name","status"]},"token":"` + sentinel + `","note":"<script>alert(1)</script>"}`
	return &outgoing.Request{
		Method: "POST", Scheme: "https", Host: "api.registry-data.example", Port: 443, Path: "/v2/companies/search", Query: "country=SE&limit=40",
		Header: http.Header{
			"Authorization": {"Bearer " + sentinel}, "Content-Type": {"application/json"}, "Accept": {"application/json"}, "User-Agent": {"python-httpx/0.28.1"},
			"X-Note": {"‹secret OTHER›\u202egnp"}, "Idempotency-Key": {"6b0e6a0e-2f6c-4f1f-9b1d-70c1f1ce9a52"},
		},
		Body: []byte(body), Whole: true, Size: int64(len(body)),
		Uses: []outgoing.Use{{ID: "sec_1", Secret: "GITHUB", Sentinel: sentinel, Where: "header Authorization"}, {ID: "sec_1", Secret: "GITHUB", Sentinel: sentinel, Where: "body"}},
	}
}

// TestToolCallIsShown: a person sees server, tool and arguments of a call, and nothing that
// looks like something else.
func TestToolCallIsShown(t *testing.T) {
	f := setup(t)
	f.enter()
	m, err := request.ParseMessages([]byte(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bank__pay","arguments":{"amount":2500.50,"to":"<b>Bob</b>","note":"a\u202e` + "\u202e" + `b"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	r, _, err := request.NewInside(m[0], "__")
	if err != nil {
		t.Fatal(err)
	}
	a := f.requested(policy.KindTool, r)
	page := f.get("/console/actions/" + a.ID).body
	for _, want := range []string{"pay of bank", ">bank</bdi>", ">pay</bdi>", "in the sandbox iaaaa", "<h3", "Arguments", "&#34;amount&#34;: 2500.50", "&lt;b&gt;Bob&lt;/b&gt;", `\u202e`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	for _, evil := range []string{"<b>Bob", "\u202e"} {
		if strings.Contains(page, evil) {
			t.Errorf("the page has %q", evil)
		}
	}
	if source := f.get("/console/actions/" + a.ID + "/raw").body; !strings.Contains(source, "2500.50") {
		t.Errorf("source: %s", source)
	}
}

func TestRequestIsShownAsItWillBeMade(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.requested(policy.KindRequest, order())
	page := f.get("/console/actions/" + a.ID).body
	for _, want := range []string{
		"POST to api.registry-data.example", "<b>POST</b>", "https://<strong class=\"host\">api.registry-data.example</strong>/v2/companies/search?country=SE&amp;limit=40",
		`Bearer <span class="masked">`, `</svg> GITHUB</span>`, "SE556012345601", "Approve and make this request", "with the secret GITHUB, once",
		"the code in the sandbox has never seen its value", "header Authorization, body", "It contains the text", "No request to api.registry-data.example was approved", "shown as JSON",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	for _, evil := range []string{"<script>alert", "\u202e"} {
		if strings.Contains(page, evil) {
			t.Errorf("the page has %q", evil)
		}
	}
	if shown := page[strings.Index(page, `id="s-what"`):strings.Index(page, `id="d-source"`)]; strings.Contains(shown, "pst_") {
		t.Error("a sentinel is shown instead of the secret's name")
	}
	if got := f.get("/console/actions/" + a.ID + "/raw").body; !strings.HasPrefix(got, "POST /v2/companies/search?country=SE&limit=40 HTTP/1.1\r\nHost: api.registry-data.example\r\n") || !strings.HasSuffix(got, string(order().Body)) {
		t.Errorf("got the source %q", got)
	}
	if list := f.get("/console/review").body; !strings.Contains(list, "POST https://api.registry-data.example/v2/companies/search") {
		t.Error("the queue does not name the request")
	}
	first := f.get("/console/actions/" + f.requested(policy.KindSecret, order()).ID).body
	for _, want := range []string{"Use of the secret GITHUB: POST to api.registry-data.example", "for an hour this sandbox may use the secret GITHUB", "Approve the use of GITHUB"} {
		if !strings.Contains(first, want) {
			t.Errorf("the page of a first use does not have %q", want)
		}
	}
	binary := order()
	binary.Body = append([]byte("PK\x03\x04"), bytes.Repeat([]byte{0, 1}, 4000)...)
	binary.Size = int64(len(binary.Body))
	binary.Header.Set("Content-Type", "application/octet-stream")
	if page := f.get("/console/actions/" + f.requested(policy.KindRequest, binary).ID).body; !strings.Contains(page, "a ZIP archive and cannot be shown") || !strings.Contains(page, "What you see is not all of the request") {
		t.Error("the page does not say that a ZIP archive cannot be shown")
	}
}
