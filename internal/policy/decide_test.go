package policy_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/policy"
)

func TestDecideByMode(t *testing.T) {
	allow := parse(t, "rules:\n  - {id: all, then: allow}\n")
	denies := parse(t, "rules:\n  - {id: none, then: deny}\n")
	asks := parse(t, "rules:\n  - {id: two, then: ask, approvers: 2, who: [anna, 'role:reviewer'], within: 4h, step_up: true}\n")
	bob := []string{"bob@example.com"}
	tests := []struct {
		name string
		doc  *policy.Document
		req  policy.Request
		want policy.Effect
		rule string
	}{
		{"read_only", nil, policy.Request{Kind: policy.KindSend, Mode: policy.ReadOnly, To: bob, Listed: true}, policy.Deny, "read_only"},
		{"read_only, a rule that allows", allow, policy.Request{Kind: policy.KindSend, Mode: policy.ReadOnly, To: bob}, policy.Deny, "read_only"},
		{"read_only, another kind", allow, policy.Request{Kind: policy.KindConnect, Mode: policy.ReadOnly}, policy.Ask, "read_only"},
		{"read_only, mail arrives", nil, policy.Request{Kind: policy.KindReceive, Mode: policy.ReadOnly}, policy.Allow, "read_only"},
		{"gated_all", nil, policy.Request{Kind: policy.KindSend, Mode: policy.GatedAll, To: bob, Listed: true}, policy.Ask, "gated_all"},
		{"gated_all, a rule that allows", allow, policy.Request{Kind: policy.KindSend, Mode: policy.GatedAll, To: bob}, policy.Ask, "gated_all"},
		{"gated_all, a rule that denies", denies, policy.Request{Kind: policy.KindSend, Mode: policy.GatedAll, To: bob}, policy.Deny, "none"},
		{"gated_all, mail arrives", nil, policy.Request{Kind: policy.KindReceive, Mode: policy.GatedAll}, policy.Ask, "gated_all"},
		{"gated_all, mail arrives, a rule that allows", allow, policy.Request{Kind: policy.KindReceive, Mode: policy.GatedAll}, policy.Ask, "gated_all"},
		{"gated_send", nil, policy.Request{Kind: policy.KindSend, Mode: policy.GatedSend, To: bob}, policy.Ask, "gated_send"},
		{"gated_send, listed", nil, policy.Request{Kind: policy.KindSend, Mode: policy.GatedSend, To: bob, Listed: true}, policy.Allow, "gated_send"},
		{"gated_send, nobody is listed", nil, policy.Request{Kind: policy.KindSend, Mode: policy.GatedSend, Listed: true}, policy.Ask, "gated_send"},
		{"gated_send, listed, a rule that asks", asks, policy.Request{Kind: policy.KindSend, Mode: policy.GatedSend, To: bob, Listed: true}, policy.Ask, "two"},
		{"gated_send, a rule that allows", allow, policy.Request{Kind: policy.KindSend, Mode: policy.GatedSend, To: bob}, policy.Allow, "all"},
		{"gated_send, mail arrives", nil, policy.Request{Kind: policy.KindReceive, Mode: policy.GatedSend}, policy.Allow, "gated_send"},
		{"monitored", nil, policy.Request{Kind: policy.KindSend, Mode: policy.Monitored, To: bob}, policy.Allow, "monitored"},
		{"autonomous", nil, policy.Request{Kind: policy.KindSend, Mode: policy.Autonomous, To: bob}, policy.Allow, "autonomous"},
		{"autonomous, a rule that denies", denies, policy.Request{Kind: policy.KindSend, Mode: policy.Autonomous, To: bob}, policy.Deny, "none"},
		{"no mode", nil, policy.Request{Kind: policy.KindSend, To: bob, Listed: true}, policy.Ask, "gated_send"},
		{"a mode that is none", nil, policy.Request{Kind: policy.KindSend, Mode: "free", To: bob, Listed: true}, policy.Ask, "gated_send"},
		{"mail arrives for no mode", nil, policy.Request{Kind: policy.KindReceive}, policy.Ask, "gated_all"},
		{"another kind", nil, policy.Request{Kind: policy.KindConnect, Mode: policy.Autonomous}, policy.Ask, ""},
		{"a mode is a person's", allow, policy.Request{Kind: policy.KindMode, Mode: policy.Autonomous}, policy.Ask, "all"},
		{"a mode may be denied", denies, policy.Request{Kind: policy.KindMode}, policy.Deny, "none"},
		{"the policy is a person's", allow, policy.Request{Kind: policy.KindChange}, policy.Ask, "all"},
		{"the policy is not locked", denies, policy.Request{Kind: policy.KindChange}, policy.Ask, "none"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := policy.Decide(tt.doc, tt.req)
			if got.Effect != tt.want || got.Rule != tt.rule || got.Reason == "" {
				t.Errorf("got %+v, want %s by %q", got, tt.want, tt.rule)
			}
		})
	}
	v := policy.Decide(asks, policy.Request{Kind: policy.KindSend, Mode: policy.Autonomous, To: bob})
	if v.Approvers != 2 || !slices.Equal(v.Who, []string{"anna", "role:reviewer"}) || v.Within != 4*time.Hour || !v.StepUp {
		t.Errorf("got %+v, want what the rule asks", v)
	}
	v = policy.Decide(asks, policy.Request{Kind: policy.KindChange})
	if v.Approvers != 2 || !slices.Equal(v.Who, []string{"anna"}) || !v.StepUp {
		t.Errorf("got %+v for a change of policy, want that no reviewer is enough", v)
	}
	if v = policy.Decide(nil, policy.Request{Kind: policy.KindChange}); !slices.Equal(v.Who, []string{"role:owner"}) {
		t.Errorf("got %+v for a change of policy, want that an owner is asked", v)
	}
}

func TestConditions(t *testing.T) {
	base := func(f func(*policy.Request)) policy.Request {
		r := policy.Request{
			Kind: policy.KindSend, Mode: policy.Autonomous, Inbox: "analyst@agents.test", Via: "mcp", To: []string{"Bob@Example.com", "eve@mail.example.com"}, Size: 2000,
			Files: []policy.Attachment{{Name: "Report.PDF", Type: "Application/PDF", Size: 1000}}, Flags: []string{"personal_data"}, Sandbox: "i1", Template: "python",
			History: policy.History{Sent: 3, Known: 1, Replies: true}, Time: time.Date(2026, 11, 21, 23, 30, 0, 0, time.UTC), // a Saturday
			Detail: map[string]string{"host": "api.example.com", "port": "443"},
		}
		if f != nil {
			f(&r)
		}
		return r
	}
	tests := []struct {
		when string
		with func(*policy.Request)
		want bool
	}{
		{`kind == 'email.send' && mode == 'autonomous' && inbox == 'analyst@agents.test' && via == 'mcp'`, nil, true},
		{`'bob@example.com' in to`, nil, true},
		{`to.exists(a, a.endsWith('@mail.example.com'))`, nil, true},
		{`domains == ['example.com', 'mail.example.com']`, nil, true},
		{`domains.all(d, d.under('example.com'))`, nil, true},
		{`domains.all(d, d.under('example.com'))`, func(r *policy.Request) { r.To = []string{"x@notexample.com"} }, false},
		{`domains.all(d, d.under('example.com'))`, func(r *policy.Request) { r.To = []string{"x@example.com.evil.test"} }, false},
		{`to.all(a, a.under('example.com'))`, nil, true},
		{`to.all(a, a.under('example.com'))`, func(r *policy.Request) { r.To = []string{`"a@example.com"@evil.test`} }, false},
		{`to.all(a, a.under(''))`, nil, false},
		{`size(to) > 1 && size > 1999`, nil, true},
		{`listed`, nil, false},
		{`from == ''`, nil, true},
		{`files.exists(f, f.ext == '.pdf' && f.type == 'application/pdf' && f.size <= 1000 && f.name == 'Report.PDF')`, nil, true},
		{`files.exists(f, f.ext in ['.exe', '.scr'])`, func(r *policy.Request) { r.Files[0].Name = "invoice.pdf.EXE. " }, true},
		{`files.exists(f, f.ext in ['.exe', '.scr'])`, func(r *policy.Request) { r.Files[0].Name = `C:\x\invoice.exe` }, true},
		{`files.size() == 0`, func(r *policy.Request) { r.Files = nil }, true},
		{`flags.exists(f, f in ['secret', 'personal_data'])`, nil, true},
		{`sandbox != '' && template == 'python'`, nil, true},
		{`history.sent == 3 && history.known < size(to) && history.replies`, nil, true},
		{`hour == 23 && weekday == 'sat'`, nil, true},
		{`time > timestamp('2026-11-21T00:00:00Z') && time.getHours() == 23 && time.getDayOfWeek() == 6`, nil, true},
		{`time.getHours('Europe/Berlin') == 0`, nil, true},
		{`detail['host'] == 'api.example.com' && int(detail['port']) == 443`, nil, true},
		{`'user' in detail`, nil, false},
		{`'user' in detail && detail['user'] == 'x'`, nil, false},
		{`!('user' in detail) || detail['user'] == 'x'`, func(r *policy.Request) { r.Detail = nil }, true},
		{`inbox.matches('^analyst@')`, nil, true},
	}
	for _, tt := range tests {
		t.Run(tt.when, func(t *testing.T) {
			d := parse(t, "rules:\n  - id: a\n    then: deny\n    when: >-\n      "+tt.when+"\n")
			v, steps := policy.Explain(d, base(tt.with))
			if got := v.Effect == policy.Deny; got != tt.want || len(steps) != 1 || steps[0].Error != "" || steps[0].Matched != tt.want {
				t.Errorf("got %+v, %+v, want matched: %v", v, steps, tt.want)
			}
		})
	}
	zoned := parse(t, "zone: Europe/Berlin\nrules:\n  - id: a\n    then: deny\n    when: hour == 0 && weekday == 'sun'\n")
	if v := policy.Decide(zoned, base(nil)); v.Effect != policy.Deny {
		t.Errorf("got %+v, want that hour and weekday are in the document's zone", v)
	}
}

// TestInDoubt is the attacker's: a condition that fails on what an agent chose
// lets nothing through, and takes nothing from what the rules below ask.
func TestInDoubt(t *testing.T) {
	const fails = "detail['x'] == 'y'"
	rule := func(id, when, rest string) string {
		return "  - id: " + id + "\n    when: " + when + "\n    " + rest + "\n"
	}
	send := policy.Request{Kind: policy.KindSend, Mode: policy.Autonomous, To: []string{"bob@example.com"}}
	tests := []struct {
		name, rules string
		want        policy.Verdict // without its reason
	}{
		{"allows", rule("a", fails, "then: allow"), policy.Verdict{Effect: policy.Ask, Rule: "a"}},
		{"denies", rule("a", fails, "then: deny"), policy.Verdict{Effect: policy.Ask, Rule: "a"}},
		{"allows, then all are", rule("a", fails, "then: deny") + rule("b", "true", "then: allow"), policy.Verdict{Effect: policy.Ask, Rule: "a"}},
		{"allows, then all are denied", rule("a", fails, "then: allow") + rule("b", "true", "then: deny"), policy.Verdict{Effect: policy.Deny, Rule: "b"}},
		{"one is asked, then two", rule("a", fails, "then: allow") + rule("b", "true", "then: ask\n    approvers: 2\n    who: [anna]\n    within: 1h"), policy.Verdict{Effect: policy.Ask, Rule: "a", Approvers: 2, Who: []string{"anna"}, Within: time.Hour}},
		{"two are asked, then one", rule("a", fails, "then: ask\n    approvers: 2\n    step_up: true") + rule("b", "true", "then: ask"), policy.Verdict{Effect: policy.Ask, Rule: "a", Approvers: 2, StepUp: true}},
		{"a short time, then a long one", rule("a", fails, "then: ask\n    within: 1h") + rule("b", "true", "then: ask\n    within: 2h"), policy.Verdict{Effect: policy.Ask, Rule: "a", Within: time.Hour}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := policy.Decide(parse(t, "rules:\n"+tt.rules), send)
			if got.Reason == "" {
				t.Error("there is no reason")
			}
			got.Reason = ""
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
	readOnly := send
	readOnly.Mode = policy.ReadOnly
	if v := policy.Decide(parse(t, "rules:\n"+rule("a", fails, "then: allow")), readOnly); v.Effect != policy.Deny {
		t.Errorf("got %+v from an inbox that is read_only, want deny", v)
	}
}

// TestCost is the attacker's: neither a silly expression nor a huge mail costs
// more than its share, and what costs more is asked about.
func TestCost(t *testing.T) {
	huge := policy.Request{Kind: policy.KindSend, Mode: policy.Autonomous}
	for i := range 1000 {
		huge.To = append(huge.To, fmt.Sprintf("%s%d@example.com", strings.Repeat("a", 200), i))
		huge.Files = append(huge.Files, policy.Attachment{Name: strings.Repeat("a", 255), Type: "text/plain", Size: 1})
		huge.Flags = append(huge.Flags, "x")
	}
	for _, when := range []string{
		"to.all(a, to.all(b, a != b + 'x'))",
		"to.map(a, to.map(b, a + b)).size() == 0",
		"files.exists(f, files.exists(g, (f.name + g.name + f.name + g.name).matches('(a|aa)+b$')))",
		"[1,2,3,4,5,6,7,8].map(a, to.map(b, b + b + b + b + b + b + b + b)).size() == 3",
	} {
		d := parse(t, "rules:\n  - id: a\n    then: allow\n    when: |-\n      "+when+"\n")
		v, steps := policy.Explain(d, huge)
		if v.Effect != policy.Ask || len(steps) != 1 || steps[0].Error == "" {
			t.Errorf("%s: got %+v, %+v, want that it is asked", when, v, steps)
		}
	}
	var many strings.Builder
	many.WriteString("rules:\n")
	for i := range policy.MaxClauses - 1 {
		fmt.Fprintf(&many, "  - id: r%d\n    then: allow\n    when: to.exists(a, to.exists(b, a == b + 'x'))\n", i)
	}
	many.WriteString("  - id: last\n    then: ask\n    approvers: 3\n    step_up: true\n")
	v, steps := policy.Explain(parse(t, many.String()), huge)
	if v.Effect != policy.Ask || v.Approvers != 3 || !v.StepUp || len(steps) > 10 {
		t.Errorf("got %+v after %d rules, want that it gives up soon and asks for as much as any rule", v, len(steps))
	}
	// A mail as large as one may be is no trouble for a rule as people write them.
	d := parse(t, "rules:\n  - id: a\n    then: deny\n    when: to.all(a, a.under('example.com')) && files.all(f, f.ext != '.exe') && domains.size() == 1\n")
	if v := policy.Decide(d, huge); v.Effect != policy.Deny {
		t.Errorf("got %+v, want that the rule matches", v)
	}
}

// A dice makes documents and requests for the properties below.
type dice struct{ *rand.Rand }

func (d dice) pick(list ...string) string { return list[d.IntN(len(list))] }

func (d dice) rule(id string, then ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  - id: %s\n", id)
	switch d.IntN(3) {
	case 0:
		fmt.Fprintf(&b, "    kind: %s\n", d.pick("email.send", "email.receive", "net.connect"))
	case 1:
		fmt.Fprintf(&b, "    kind: [%s, %s]\n", d.pick("email.send", "email.trash"), d.pick("email.receive", "net.connect"))
	}
	if d.IntN(4) > 0 {
		fmt.Fprintf(&b, "    when: |-\n      %s\n", d.pick(
			"'secret' in flags", "size > 100", "to.exists(a, a.under('example.com'))", "listed", "history.sent > 1", "hour < 12", "mode == 'monitored'",
			"detail['x'] == 'y'", "int(inbox) == 1", "10 / size(files) > 1", "files.exists(f, f.ext == '.exe')", "sandbox == ''", "to.all(a, to.all(b, a == b))"))
	}
	effect := d.pick(then...)
	fmt.Fprintf(&b, "    then: %s\n", effect)
	if effect == "ask" && d.IntN(2) == 0 {
		fmt.Fprintf(&b, "    approvers: %d\n", 1+d.IntN(3))
	}
	return b.String()
}

func (d dice) document(first string, n int) string {
	var b strings.Builder
	b.WriteString("rules:\n" + first)
	for i := range n {
		b.WriteString(d.rule(fmt.Sprintf("r%d", i), "allow", "ask", "deny"))
	}
	return b.String()
}

func (d dice) request() policy.Request {
	r := policy.Request{
		Kind: policy.Kind(d.pick("email.send", "email.send", "email.receive", "net.connect", "inbox.mode", "inbox.allow", "policy.change", "x.y", "email.trash")),
		Mode: policy.Mode(d.pick("read_only", "gated_all", "gated_send", "monitored", "autonomous", "", "other")), Inbox: d.pick("a@b.test", "1", ""),
		Listed: d.IntN(2) == 0, Size: d.Int64N(200), Sandbox: d.pick("", "i1"), History: policy.History{Sent: d.Int64N(4)}, Time: time.Unix(d.Int64N(1<<31), 0),
	}
	for range d.IntN(4) {
		r.To = append(r.To, d.pick("bob@example.com", "eve@evil.test", "nobody"))
	}
	for range d.IntN(3) {
		r.Files = append(r.Files, policy.Attachment{Name: d.pick("a.exe", "b.pdf")})
	}
	if d.IntN(2) == 0 {
		r.Flags = []string{d.pick("secret", "tracking")}
	}
	if d.IntN(2) == 0 {
		r.Detail = map[string]string{"x": d.pick("y", "z")}
	}
	return r
}

// TestProperties says what holds of all documents and requests.
func TestProperties(t *testing.T) {
	for seed := range uint64(600) {
		d := dice{rand.New(rand.NewPCG(seed, 1))}
		n := d.IntN(5)
		text := d.document("", n)
		if n == 0 {
			text = "rules: []\n"
		}
		doc, again := parse(t, text), parse(t, text)
		rest := strings.TrimPrefix(strings.TrimPrefix(text, "rules: []\n"), "rules:\n")
		denied := parse(t, "rules:\n"+d.rule("first", "deny")+rest)
		asked := parse(t, "rules:\n"+d.rule("first", "ask")+rest)
		for range 20 {
			r := d.request()
			v := policy.Decide(doc, r)
			report := func(what string, other policy.Verdict) {
				t.Helper()
				b, _ := json.Marshal(r)
				t.Fatalf("%s: seed %d:\n%s\nrequest %s\ngot %+v\nand %+v", what, seed, text, b, v, other)
			}
			for _, other := range []*policy.Document{doc, again} {
				if w := policy.Decide(other, r); !reflect.DeepEqual(v, w) {
					report("the same is judged in two ways", w)
				}
			}
			if v.Reason == "" || !slices.Contains([]policy.Effect{policy.Allow, policy.Ask, policy.Deny}, v.Effect) {
				report("no verdict", v)
			}
			if v.Effect != policy.Ask && (v.Approvers != 0 || v.Who != nil || v.StepUp || v.Within != 0) {
				report("who is not asked is named", v)
			}
			if v.Effect == policy.Allow {
				switch {
				case r.Kind == policy.KindSend && r.Mode == policy.ReadOnly, r.Kind != policy.KindReceive && r.Mode == policy.ReadOnly:
					report("read_only allows", v)
				case r.Mode == policy.GatedAll:
					report("gated_all allows", v)
				case slices.Contains([]policy.Kind{policy.KindMode, policy.KindAllow, policy.KindChange}, r.Kind):
					report("what a person decides is allowed", v)
				}
				_, steps := policy.Explain(doc, r)
				if slices.ContainsFunc(steps, func(s policy.Step) bool { return s.Error != "" }) {
					report("what could not be evaluated allows", v)
				}
			}
			if r.Kind == policy.KindChange && v.Effect != policy.Ask {
				report("the policy is locked", v)
			}
			// A rule put first that denies allows nothing that was not allowed
			// before, and asks about nothing that was denied but where it could
			// not be evaluated, when it is denied still.
			if w := policy.Decide(denied, r); w.Effect == policy.Allow && v.Effect != policy.Allow || v.Effect == policy.Deny && w.Effect != policy.Deny {
				report("a denial put first loosens", w)
			}
			if w := policy.Decide(asked, r); w.Effect == policy.Allow && v.Effect != policy.Allow {
				report("an ask put first allows", w)
			}
		}
	}
}
