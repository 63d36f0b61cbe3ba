package console_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/connection"
	"postern/internal/contract"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/request"
	"postern/internal/rulebook"
	"postern/internal/run"
	"postern/internal/store"
)

// hostileText is a text that an agent would like a page to run, to turn around, or to hide.
const hostileText = "<script>alert(1)</script>\u202egnp.exe\u202c\x1b[2J\u200b\u2066end"

// all registers an executor of every kind.
func (f *fixture) all() {
	f.t.Helper()
	log := slog.New(slog.NewTextHandler(f.t.Output(), nil))
	book := rulebook.New(log, f.db)
	links := connection.New(log, f.db, book, f.gate, 0)
	links.Honour(f.permits)
	f.gate.Handle(policy.KindConnect, links)
	requests := request.New(log, f.db, f.gate, links, request.Permits{Register: f.permits}, 0)
	for _, k := range []policy.Kind{policy.KindRequest, policy.KindSecret, policy.KindTool} {
		f.gate.Handle(k, requests)
	}
	commands, err := command.New(log, f.db, f.gate, links, command.Config{Dir: f.t.TempDir()})
	if err != nil {
		f.t.Fatal(err)
	}
	f.gate.Handle(policy.KindExec, commands)
	blobs, err := store.OpenBlobs(f.t.TempDir())
	if err != nil {
		f.t.Fatal(err)
	}
	runs, err := run.New(log, f.db, f.gate, run.Config{
		Key: make([]byte, 32), Blobs: blobs, Template: func(context.Context, auth.Principal, string) (string, string, error) { return "base", "", nil },
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.gate.Handle(policy.KindRun, runs)
	exports, err := run.NewExports(log, f.db, f.gate, nil, blobs, make([]byte, 32))
	if err != nil {
		f.t.Fatal(err)
	}
	f.gate.Handle(policy.KindExport, exports)
}

// of proposes an action of a kind by a sandbox.
func (f *fixture) of(kind policy.Kind, payload []byte, to ...string) (a oversight.Action) {
	f.t.Helper()
	who := auth.Principal{Kind: auth.Sandbox, ID: "i" + strings.Repeat("a", 20), Project: f.project.Project, Template: "base-2f6cef1ff299defd"}
	f.update(func(tx *store.Tx) (err error) {
		a, err = f.gate.Propose(f.t.Context(), tx, who, oversight.Proposal{
			Request: policy.Request{Kind: kind, Via: "link", To: to, Sandbox: who.ID, Template: who.Template}, Via: "link", Payload: payload,
		})
		return err
	})
	return a
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A sample is an action of a kind with hostile content.
type sample struct {
	payload []byte
	wants   []string // on the page
	json    bool     // the payload is one JSON object, to which a field can be added
}

// samples has an action of every kind. A new kind needs one here, and panels in its
// executor's Show.
func samples(t *testing.T, f *fixture) map[policy.Kind]sample {
	b64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	long := strings.Repeat("long ", 2000)
	c, err := contract.Sample("report")
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := contract.Parse(c)
	if err != nil {
		t.Fatal(err)
	}
	env := func() []byte {
		e, err := mail.Compose(mail.Draft{From: f.inbox.Address, To: []string{"bob@shop.example"}, Subject: "Totals", Text: "north <b>150</b>\n"}, time.Now(), "agents.test")
		if err != nil {
			t.Fatal(err)
		}
		b, err := e.Payload()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	made := func(kind policy.Kind) []byte {
		r := order()
		b, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if kind == policy.KindSecret {
			b = append([]byte(`{"use":{"id":"sec_1","secret":"GITHUB","sentinel":"`+sentinel+`","where":"header Authorization"},"first":true,"why":"the secret's own setting"}`+"\n"), b...)
		}
		return b
	}
	tool := func() []byte {
		body := marshal(t, map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{"name": "bank__pay", "arguments": map[string]any{"to": hostileText, "note": long, "amount": 12.5, "deep": map[string]any{"x": []int{1}}}}})
		m, err := request.ParseMessages(body)
		if err != nil {
			t.Fatal(err)
		}
		r, _, err := request.NewInside(m[0], "__")
		if err != nil {
			t.Fatal(err)
		}
		b, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return append([]byte(`{"server":"bank","tool":"pay"}`+"\n"), b...)
	}
	sum := sha256.Sum256([]byte("x"))
	digest := hex.EncodeToString(sum[:])
	return map[policy.Kind]sample{
		policy.KindSend: {env(), []string{"bob@shop.example", "&lt;b&gt;150"}, false},
		policy.KindCopy: {env(), []string{"bob@shop.example", "&lt;b&gt;150", `class="people"`}, false},
		policy.KindReceive: {
			marshal(t, map[string]any{"message": "msg_1", "inbox": f.inbox.ID, "address": f.inbox.Address, "at": time.Now(), "size": 1234, "score": .61, "categories": map[string]float64{"exfiltration": .7}, "checks": map[string]string{"spf": "fail", "dkim": hostileText}}),
			[]string{"61 of 100", "exfiltration", "70 of 100", "DKIM", "the sending server may send"},
			true,
		},
		policy.KindArchive: {marshal(t, map[string]any{"inbox": f.inbox.ID, "address": f.inbox.Address, "message": "msg_1", "from": hostileText, "subject": long, "at": time.Now()}), []string{"the archive", "Where the message goes"}, true},
		policy.KindTrash:   {marshal(t, map[string]any{"inbox": f.inbox.ID, "address": f.inbox.Address, "message": "msg_1", "from": hostileText, "subject": long, "at": time.Now()}), []string{"the trash", "after 30 days"}, true},
		policy.KindMode:    {marshal(t, map[string]any{"inbox": f.inbox.ID, "address": f.inbox.Address, "from": "gated_send", "to": "autonomous", "reason": hostileText}), []string{`<li class="looser">`, "After the approval", "nobody gets a copy", "Why, as the agent says"}, true},
		policy.KindAllow:   {marshal(t, map[string]any{"inbox": f.inbox.ID, "address": f.inbox.Address, "pattern": "*@xn--pypal-4ve.example", "reason": hostileText + long}), []string{"becomes possible without review", "every address at this domain", "really <code>", "<mark>"}, true},
		policy.KindChange: {
			marshal(t, map[string]any{"version": 2, "replaces": "00", "was": "version: 1\nrules: []\n", "text": "version: 1\nrules: []\n# " + hostileText + "\n", "reason": hostileText, "author": "person:ann"}),
			[]string{"What changes", `<div class="add">`},
			true,
		},
		policy.KindConnect: {marshal(t, map[string]any{"sandbox": "i1", "template": hostileText, "hosts": []string{"db.xn--pypal-4ve.example", "other.example"}, "port": 5432}), []string{"port 5432, usually PostgreSQL", "60 minutes after the approval", "really <code>db.xn--pypal-4ve.example</code>", "<mark>", "other.example", "this sandbox alone"}, true},
		policy.KindWebhook: {marshal(t, map[string]any{"webhook": "whk_1", "url": "https://hooks.example/x?a=%3Cscript%3E", "name": hostileText, "events": "message.received", "inbox": "", "credential": "crd_1"}), []string{"hooks.example", "port 443", "all inboxes that the key has access to", "%3Cscript%3E"}, true},
		policy.KindRequest: {made(policy.KindRequest), []string{"<b>POST</b>", "api.registry-data.example"}, false},
		policy.KindSecret:  {made(policy.KindSecret), []string{"Use of the secret GITHUB", "<b>POST</b>"}, false},
		policy.KindPermit:  {marshal(t, map[string]any{"hosts": []string{"*.xn--pypal-4ve.example"}, "why": "because <script>alert(1)</script>", "for": "2h", "scope": "project", "sandbox": "i1"}), []string{"becomes possible without review", "every name below", "2h after the approval", "every method", "because &lt;script&gt;"}, true},
		policy.KindTool:    {tool(), []string{"12.5", "number", "object", "<details class=\"fold long\">", "Arguments"}, false},
		policy.KindRun: {
			marshal(t, map[string]any{"run": "run_1", "contract": json.RawMessage(parsed.Canonical()), "digest": parsed.Digest(), "template": "base-1", "task": hostileText + long, "commands": [][]string{{"sh", "-c", "echo " + hostileText}}, "inputs": []map[string]any{{"path": "in/" + hostileText, "size": 3, "sha256": digest}}, "answers": map[string]any{}, "needs": map[string]any{}}),
			[]string{"The commands, as they will run", "What the contract allows", "1 input", digest, "The task"},
			true,
		},
		policy.KindExport: {
			marshal(t, map[string]any{"run": "run_1", "n": 1, "contract": "report@sha256:1", "sandbox": "i1", "path": "out/" + hostileText, "name": hostileText, "type": "text", "found": "html", "size": 12, "sha256": digest, "blob": "none", "review": "always", "violated": true, "flags": []string{"hidden_text"}, "findings": []string{"found " + hostileText}}),
			[]string{"The file that leaves", "the contract promised text", digest, "12 bytes", "What the scan found"},
			true,
		},
		policy.KindExec: {
			marshal(t, map[string]any{"sandbox": "i1", "template": "base-1", "contract": "report@sha256:1", "path": b64("/usr/bin/python3"), "dir": b64("/home/" + hostileText), "args": []string{b64("python3"), b64("-c"), b64("print('" + hostileText + "')\nimport os\n"), b64(long)}, "sha256": digest, "fixed": false, "uid": 0}),
			[]string{"The command line, as it will run", "Directory", "uid 0", "Environment", "/usr/bin/python3", "argument 2, 3 lines"},
			true,
		},
	}
}

// TestEveryKindHasAView: no kind falls back to bare fields, nothing of a hostile payload
// reaches the page as markup or as characters that hide something, and a value that this
// release does not know is shown.
func TestEveryKindHasAView(t *testing.T) {
	f := setup(t)
	f.enter()
	f.all()
	all := samples(t, f)
	for _, kind := range policy.Kinds() {
		t.Run(string(kind), func(t *testing.T) {
			s, ok := all[kind]
			if !ok {
				t.Fatalf("there is no sample of the kind %s: add one, and panels to its executor's Show", kind)
			}
			a := f.of(kind, s.payload)
			v, err := f.gate.Show(a)
			if err != nil {
				t.Fatal(err)
			}
			mail := kind == policy.KindSend || kind == policy.KindCopy
			if !mail && v.Request == nil && len(v.Panels) == 0 {
				t.Error("its View has no panels: pages would show bare fields")
			}
			if rest := v.Rest(); len(v.Panels) > 0 && len(rest) > 0 {
				t.Errorf("no panel shows the fields %v", rest)
			}
			page := f.get("/console/actions/" + a.ID).body
			contains(t, "page", page, s.wants...)
			contains(t, "page", page, `id="d-source"`)
			if strings.Contains(page, ">Details<") || strings.Contains(page, "cannot be shown") {
				t.Error("the page has no name for what it shows, or cannot show it")
			}
			harmlessPage(t, page)
			if got := f.bytes("/console/actions/" + a.ID + "/raw"); got.status != http.StatusOK || got.body == "" {
				t.Errorf("the raw form: status %d, %d bytes", got.status, len(got.body))
			}
			if !s.json {
				return
			}
			more := append([]byte(`{"surprise":{"evil":"`+"<script>alert(2)</script>\u202e"+`"},`), s.payload[1:]...)
			page = f.get("/console/actions/" + f.of(kind, more).ID).body
			contains(t, "page of an unknown field", page, "Also part of it", "Unknown: surprise", "&lt;script&gt;alert(2)", "It has values that this release does not know")
			harmlessPage(t, page)
			// Go reads the last of two values: a reviewer must not be shown one of them alone.
			twice := append(append(s.payload[:len(s.payload)-1:len(s.payload)-1], []byte(",")...), s.payload[1:]...)
			contains(t, "page of a field that is there twice", f.get("/console/actions/"+f.of(kind, twice).ID).body, "Unknown: ", "or that occur twice")
			huge := append([]byte(`{"surprise":"`+strings.Repeat("z", 70<<10)+`",`), s.payload[1:]...)
			contains(t, "page of a huge field", f.get("/console/actions/"+f.of(kind, huge).ID).body, "What you see is not all of it: only the beginning of the unknown value")
		})
	}
	if batch := f.get("/console/batch").body; batch != "" {
		harmlessPage(t, batch)
	}
}

// harmlessPage checks that a page has none of what [hostileText] is made of.
func harmlessPage(t *testing.T, page string) {
	t.Helper()
	for _, evil := range []string{"<script>alert", "\u202e", "\u202c", "\u200b", "\u2066", "\x1b"} {
		if strings.Contains(page, evil) {
			t.Errorf("the page has %q", evil)
		}
	}
}
