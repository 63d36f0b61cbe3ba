package policy_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"unicode/utf8"

	"postern/internal/policy"
)

// FuzzParse: whatever is given as a document, it is taken whole or refused with
// a short reason, and what is taken can be asked.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		policy.Default().Text(), "", "rules: []", "rules:\n  - {id: a, then: ask, who: [anna], within: 3d, approvers: 2, step_up: true, kind: email.send}\n",
		"zone: Europe/Berlin\nrules:\n  - id: a\n    when: |\n      to.all(a,\n        a.under('x'))\n    then: deny\n", "rules:\n  - id: a\n    when: >\n      1 ==\n      2\n    then: deny\n",
		"rules: &a [*a]", "{rules: [{id: a, then: deny, when: \"'\\u0000' == 'x'\"}]}", "? rules\n: []", "rules:\n- when: 'a.matches(\"(\")'\n  id: a\n  then: allow", "%YAML 1.1\n---\nrules: []\n...\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := policy.Parse(text)
		if err != nil {
			if !errors.Is(err, policy.ErrDocument) || len(err.Error()) > 600 || !utf8.ValidString(err.Error()) {
				t.Errorf("got error %q", err)
			}
			return
		}
		if d.Text() != string(text) {
			t.Error("the text is not what was parsed")
		}
		for _, mode := range policy.Modes() {
			if v := policy.Decide(d, policy.Request{Kind: policy.KindSend, Mode: mode, To: []string{"bob@example.com"}}); v.Reason == "" {
				t.Errorf("got %+v, want a reason", v)
			}
		}
	})
}

// FuzzParseTrials: likewise for tests.
func FuzzParseTrials(f *testing.F) {
	for _, s := range []string{
		"tests:\n  - {name: a, request: {kind: email.send}, want: ask}\n",
		"tests:\n  - name: a\n    request:\n      kind: email.send\n      mode: autonomous\n      to: [a@b.test]\n      files: [{name: a, type: b, size: 1}]\n      flags: [secret]\n      history: {sent: 1, known: 1, replies: true}\n      time: 2026-01-01T00:00:00Z\n      detail: {a: b}\n      listed: true\n      size: 12\n    want: deny\n    rule: ''\n    approvers: 2\n    who: [a]\n    within: 1h\n    step_up: false\n",
		"tests:\n  - name: a\n    request: {kind: net.request, host: API.example, method: GET, path: /a, query: {q: [x, y]}, headers: {Accept: '*/*'}, secrets: [github], size: 3}\n    want: allow\n",
		"tests:\n- {name: a, request: {kind: net.request, query: [1]}, want: ask}", "tests:\n- {name: a, request: {kind: net.request, query: {a: b}, headers: {a: [b]}}, want: ask}",
		"tests: []", "", "tests: [1]", "tests:\n- {name: a, request: {kind: net.connect, detail: [1]}}",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		trials, err := policy.ParseTrials(text)
		if err != nil {
			if !errors.Is(err, policy.ErrDocument) || len(err.Error()) > 600 || !utf8.ValidString(err.Error()) {
				t.Errorf("got error %q", err)
			}
			return
		}
		for _, tr := range trials {
			if v, _ := tr.Check(policy.Default()); v.Reason == "" {
				t.Errorf("got %+v, want a reason", v)
			}
		}
	})
}

// FuzzDecide: any condition on any request is judged alike twice, and none lets
// out what its mode does not.
func FuzzDecide(f *testing.F) {
	for _, when := range []string{
		"true", "'secret' in flags", "to.all(a, to.all(b, a == b))", "files.exists(f, f.ext == '.exe')", "detail['x'] == 'y'", "10 / size > 1", "time.getHours('Europe/Berlin') == 1",
		"inbox.matches('(a+)+$')", "policy.fileFacts{name: 'x'}.ext == ''", "[to].map(x, x.map(y, y + y)).size() > 0", "duration('1h') > time - timestamp(0)", "dyn(1) == dyn('x')", "string(history) == ''", "b'\\xff' == bytes(from)",
		"{'a': to}.a.size() > 9223372036854775807", "-9223372036854775808 == size - 9223372036854775807", "type(files[0]) == type(history)", "has(history.sent) && has(detail.x)",
		"host.under('example.com') && method == 'POST' && path.startsWith('/v1/')", "query.exists(k, 'x' in query[k])", "headers['content-type'] == 'text/plain' || size(secrets) > 0", "query['a'][1] == secrets[0]",
	} {
		f.Add(when, []byte(`{"kind":"net.request","to":["api.example.com"],"size":9,"http":{"host":"api.example.com","method":"POST","path":"/v1/x","query":{"a":["b"]},"headers":{"content-type":"text/plain"},"secrets":["github"]}}`))
		f.Add(when, []byte(`{"kind":"email.send","mode":"autonomous","to":["a@b.test"],"files":[{"name":"a.exe"}],"flags":["secret"],"detail":{"x":"y"}}`))
	}
	f.Fuzz(func(t *testing.T, when string, request []byte) {
		var r policy.Request
		if len(when) > 2000 || json.Unmarshal(request, &r) != nil {
			return
		}
		quoted, err := json.Marshal(when) // which YAML reads as it is
		if err != nil {
			return
		}
		d, err := policy.Parse([]byte("rules:\n  - id: a\n    then: allow\n    when: " + string(quoted) + "\n"))
		if err != nil {
			return
		}
		d.Concerns(policy.KindRequest, "example.com") // must not panic
		v, steps := policy.Explain(d, r)
		if w := policy.Decide(d, r); !reflect.DeepEqual(v, w) {
			t.Errorf("got %+v and %+v for the same", v, w)
		}
		if v.Effect == policy.Allow && (r.Mode == policy.GatedAll || r.Mode == policy.ReadOnly && r.Kind != policy.KindReceive) {
			t.Errorf("got %+v in mode %s", v, r.Mode)
		}
		if v.Effect == policy.Allow && len(steps) == 1 && steps[0].Error != "" {
			t.Errorf("got %+v although %s", v, steps[0].Error)
		}
	})
}
