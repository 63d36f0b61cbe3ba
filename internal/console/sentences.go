package console

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A part is a piece of a sentence. Text may be hostile.
type part struct {
	Text string
	Who  string // a principal instead of Text
	Link string // where Text leads, or empty
	Form string // "b", "q" or "code"; empty means plain
}

// A told is an entry of the record with the sentence that people read.
type told struct {
	audit.Entry
	Parts []part
	Icon  string
	Tag   string
	Tone  string
}

// Raw returns the entry as it is exported, for those who check it.
func (t told) Raw() string {
	var detail map[string]any
	_ = json.Unmarshal([]byte(t.Detail), &detail)
	b, err := json.MarshalIndent(map[string]any{
		"seq": t.Seq, "at": t.At.Format(time.RFC3339Nano), "verb": t.Verb, "actor": t.Actor, "object": t.Object, "detail": detail, "prev": fmt.Sprintf("%x", t.Prev),
	}, "", "  ")
	if err != nil {
		return t.Detail // unreachable: strings and numbers
	}
	return string(b)
}

// Plain returns the sentence as text, as a search reads it.
func (t told) Plain() string {
	var b strings.Builder
	for _, p := range t.Parts {
		b.WriteString(p.Text)
	}
	return b.String()
}

// An actionFact has what sentences need to know about an action.
type actionFact struct {
	id, kind, inbox string
	request         policy.Request
	created         time.Time
}

// actionFacts returns the facts about actions of a project, by ID.
func actionFacts(ctx context.Context, tx *store.Tx, project string, ids []string) (map[string]actionFact, error) {
	rows, err := selectIn(ctx, tx, func(row func(...any) error) (a actionFact, err error) {
		var request string
		var created int64
		if err = row(&a.id, &a.kind, &a.inbox, &request, &created); err != nil {
			return a, err
		}
		a.created = store.FromTime(created)
		_ = json.Unmarshal([]byte(request), &a.request) // without it, the sentence says less
		return a, nil
	}, `select id, kind, inbox_id, request, created_at from action where project_id = $1 and id in `, project, ids)
	if err != nil {
		return nil, fmt.Errorf("read actions of a page: %w", err)
	}
	out := map[string]actionFact{}
	for _, a := range rows {
		out[a.id] = a
	}
	return out, nil
}

// tell returns entries of a project's record as sentences.
func tell(ctx context.Context, tx *store.Tx, project string, entries []audit.Entry) ([]told, error) {
	seen := map[string]bool{}
	var ids []string
	for _, e := range entries {
		for _, id := range []string{e.Object, e.Details()["action"]} {
			if actionID().MatchString(id) && !seen[id] {
				seen[id] = true
				ids = append(ids, id)
			}
		}
	}
	facts, err := actionFacts(ctx, tx, project, ids)
	if err != nil {
		return nil, err
	}
	out := make([]told, len(entries))
	for i, e := range entries {
		out[i] = say(e, facts)
	}
	return out, nil
}

// say returns an entry as a sentence.
func say(e audit.Entry, facts map[string]actionFact) told {
	f := e.Details()
	s, ok := sayings[e.Verb]
	if p, known := proposed[oversight.State(f["state"])]; known && e.Verb == audit.ActionPropose {
		s = p
	}
	if !ok { // a verb of another version of the program
		s = saying{"list", "{who}: " + strings.Map(unbraced, e.Verb.Means()) + "[ ({object})].", "", ""}
	}
	t := told{Entry: e, Icon: s.icon, Tag: s.tag, Tone: s.tone}
	sp := speaker{e: e, f: f, facts: facts}
	t.Parts = sp.parts(s.text)
	if len(t.Parts) > 0 && t.Parts[0].Who == "" && t.Parts[0].Text != "" {
		t.Parts[0].Text = strings.ToUpper(t.Parts[0].Text[:1]) + t.Parts[0].Text[1:]
	}
	return t
}

// unbraced replaces what has a meaning in a saying: an unknown verb comes from the database.
func unbraced(r rune) rune {
	if strings.ContainsRune("{}[]", r) {
		return '.'
	}
	return r
}

// A speaker fills the places of one saying.
type speaker struct {
	e     audit.Entry
	f     audit.Fields
	facts map[string]actionFact
}

var sayingPiece = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\{[^{}]*\}|\[[^\[\]]*\]|[^{}\[\]]+`) })

// parts fills the places of a text.
func (s *speaker) parts(text string) []part {
	out, _ := s.fill(text)
	return out
}

// fill fills the places of a text, and reports whether none of them was empty.
func (s *speaker) fill(text string) (out []part, whole bool) {
	whole = true
	for _, piece := range sayingPiece().FindAllString(text, -1) {
		switch piece[0] {
		case '[':
			if ps, ok := s.fill(piece[1 : len(piece)-1]); ok {
				out = append(out, ps...)
			}
		case '{':
			ps := s.place(piece[1 : len(piece)-1])
			if len(ps) == 0 {
				whole = false
				ps = []part{{Text: "(not recorded)"}}
			}
			out = append(out, ps...)
		default:
			out = append(out, part{Text: piece})
		}
	}
	return out, whole
}

// maxSaid bounds how much of a value a sentence has, in bytes. The fold has the rest.
const maxSaid = 200

// value returns what a place names: the object, or a field.
func (s *speaker) value(name string) string {
	if name == "object" {
		return s.e.Object
	}
	return s.f[name]
}

// place returns the parts for a place, or none if its value is not recorded.
func (s *speaker) place(p string) []part {
	how, name, ok := strings.Cut(p, ":")
	if !ok {
		return s.word(p)
	}
	name, words, _ := strings.Cut(name, ":")
	v := s.value(name)
	if v == "" {
		return nil
	}
	shown := mail.Printable(strings.ReplaceAll(strings.TrimSpace(v), "\n", "; "), maxSaid)
	switch how {
	case "b", "q", "code":
		return []part{{Text: shown, Form: how}}
	case "as":
		if !strings.Contains(v, ":") {
			v = "person:" + v
		}
		return []part{{Who: v}}
	case "inbox", "sandbox", "person":
		return []part{{Who: how + ":" + v}}
	case "run":
		return []part{{Text: "the run " + beginning(mail.Printable(v, 40)), Link: "/console/runs/" + pathSafe(v)}}
	case "mode":
		return []part{{Text: shown, Form: "b"}}
	case "time":
		if v == "never" {
			return nil
		}
		t, err := time.Parse(time.RFC3339, v)
		if err != nil {
			return []part{{Text: shown}}
		}
		return []part{{Text: t.UTC().Format("15:04 on 2 Jan 2006") + " UTC"}}
	}
	return s.number(how, v, words)
}

// number returns a number as people write it.
func (s *speaker) number(how, v, words string) []part {
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return []part{{Text: mail.Printable(v, maxSaid)}}
	}
	switch how {
	case "size":
		return []part{{Text: bytesFor(n)}}
	case "ms":
		return []part{{Text: howLong(time.Duration(n) * time.Millisecond)}}
	case "n":
		one, many, _ := strings.Cut(words, ":")
		return []part{{Text: count(int(n), one, many)}}
	}
	return nil // unreachable: TestEveryVerbHasASentence fills every place
}

// word returns the parts for a place without a form.
func (s *speaker) word(p string) []part {
	switch p {
	case "who":
		return []part{{Who: s.e.Actor}}
	case "action":
		return s.action(true)
	case "action!":
		return s.action(false)
	case "ask":
		if policy.Kind(s.f["kind"]) == policy.KindSend {
			return []part{{Text: "asked to send"}}
		}
		return []part{{Text: "asked for"}}
	case "host":
		return s.host()
	case "took":
		a, ok := s.facts[s.e.Object]
		if !ok || a.created.IsZero() || s.e.At.Before(a.created) {
			return nil
		}
		return []part{{Text: howLong(s.e.At.Sub(a.created))}}
	}
	v := s.value(p)
	if p == "verdict" {
		v = strings.TrimSuffix(v, ": a person decides") // the sentence says it
	}
	if v != "" {
		return []part{{Text: strings.TrimRight(mail.Printable(v, maxSaid), ".")}}
	}
	return nil
}

// host returns the destination of a connection or a request.
func (s *speaker) host() []part {
	to := s.f["name"]
	_, port, _ := strings.Cut(s.f["dst"][strings.LastIndexByte(s.f["dst"], ']')+1:], ":")
	if to == "" {
		to, port = s.f["dst"], ""
	}
	if u := s.f["url"]; u != "" {
		to, port = u, ""
	}
	if to == "" {
		return nil
	}
	if port != "" && port != "0" {
		to += ":" + port
	}
	return []part{{Text: mail.Printable(to, maxSaid), Form: "b"}}
}

// action returns the action that the entry is about, with its agent or without.
func (s *speaker) action(agent bool) []part {
	id := s.e.Object
	if !actionID().MatchString(id) {
		id = s.f["action"]
	}
	a, ok := s.facts[id]
	if !ok { // it is not stored any more, or was never
		a = actionFact{id: id, kind: s.f["kind"], inbox: s.f["inbox"]}
		if to := s.f["to"]; to != "" {
			a.request.To = strings.Split(to, ", ")
		}
	}
	name := policy.Kind(a.kind).Subject()
	switch {
	case policy.Kind(a.kind) == policy.KindSend:
		name = "a mail"
	case policy.Kind(a.kind) == policy.KindConnect:
		name = "a connection"
	case name == "":
		name = "an action"
	default:
		name = strings.ToLower(name[:1]) + name[1:]
	}
	link := ""
	if actionID().MatchString(id) {
		link = "/console/actions/" + id
	}
	out := []part{{Text: name, Link: link}}
	if agent && a.inbox != "" {
		out = append(out, part{Text: " of "}, part{Who: "inbox:" + a.inbox})
	}
	return append(out, whereto(a.request)...)
}

// whereto returns the target of an action as parts of a sentence.
func whereto(r policy.Request) []part {
	switch n := len(r.To); {
	case n == 1:
		return []part{{Text: " to "}, {Text: mail.Printable(r.To[0], maxSaid), Form: "b"}}
	case n > 1:
		return []part{{Text: fmt.Sprintf(" to %d recipients", n)}}
	}
	d := r.Detail
	switch {
	case r.HTTP != nil:
		return []part{{Text: " to "}, {Text: mail.Printable(r.HTTP.Host, maxSaid), Form: "b"}}
	case d["host"] != "" && d["port"] != "":
		return []part{{Text: " to "}, {Text: mail.Printable(d["host"]+":"+d["port"], maxSaid), Form: "b"}}
	}
	for _, key := range []string{"command", "program", "hosts", "pattern", "url", "secret", "name", "contract", "to"} {
		if d[key] != "" {
			return []part{{Text: ": "}, {Text: mail.Printable(d[key], 120), Form: "b"}}
		}
	}
	return nil
}

// pathSafe returns v if it can stand in a path as it is.
func pathSafe(v string) string {
	for _, r := range v {
		if (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && r != '_' {
			return ""
		}
	}
	return v
}

// howLong writes a duration as people write it: "41 s", "14 min", "2 h 07 min".
func howLong(d time.Duration) string {
	switch d = max(d, 0); {
	case d < time.Second:
		return "less than a second"
	case d < 10*time.Second:
		return strconv.FormatFloat(d.Round(100*time.Millisecond).Seconds(), 'f', -1, 64) + " s"
	case d < time.Minute:
		return strconv.Itoa(int(d.Seconds())) + " s"
	case d < time.Hour:
		return strconv.Itoa(int(d.Minutes())) + " min"
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %02d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return strconv.Itoa(int(d.Hours()/24)) + " days"
}

// bytesFor writes a number of bytes as people write it: "3.1 kB", "76 GB".
func bytesFor(n int64) string {
	units := []string{"bytes", "kB", "MB", "GB", "TB"}
	v, i := float64(n), 0
	for v >= 1000 && i < len(units)-1 {
		v, i = v/1000, i+1
	}
	if i == 0 || v >= 100 {
		return strconv.FormatFloat(v, 'f', 0, 64) + " " + units[i]
	}
	return strconv.FormatFloat(v, 'f', 1, 64) + " " + units[i]
}

// thousands writes a number with separators: "48,614".
func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
