package scan

import (
	"html"
	"slices"
	"strings"
	"unicode/utf8"

	"postern/internal/extract"
)

// A part is where a text stands, and how it is seen there.
type part struct {
	where   string
	hidden  string // how people do not see it, or empty
	aside   bool   // an attribute or a comment: not in the page, but not hidden on purpose
	derived string // how it was made from what stands there, or empty
	depth   int    // encodings around it
}

// opinion is what rules say about a text.
type opinion struct {
	rules map[string]float64 // rule → score
	cats  map[Category]float64
}

func (o opinion) most() float64 {
	m := 0.0
	for _, v := range o.cats {
		m = max(m, v)
	}
	return m
}

// survey notes what the message as a whole is about.
func (s *scanner) survey(folded string) {
	words := map[string]bool{}
	var urges, asks bool
	for _, h := range s.lex.find(folded) {
		switch h.c {
		case meta:
			words[folded[h.at:h.end]] = true
		case urgent:
			urges = true
		case login:
			asks = true
		default:
		}
	}
	s.talk = len(words)
	s.pressure = urges && asks
}

// look applies the rules to one text and to what it could be read as.
func (s *scanner) look(p part, raw string) opinion {
	if strings.TrimSpace(raw) == "" {
		return opinion{}
	}
	f := fold(raw)
	o := s.judge(p, f.text)
	s.letters(p, f, o)
	if p.depth >= maxNested {
		return o
	}
	again := func(how, text string, least float64) {
		if strings.TrimSpace(text) == "" {
			return
		}
		sub := scanner{lex: s.lex, rules: s.rules, best: map[string]int{}}
		q := p
		q.derived, q.depth = how, p.depth+1
		if p.derived != "" {
			q.derived = p.derived + ", " + how
		}
		got := sub.look(q, text)
		if got.most() < least {
			return
		}
		// What the text says anyway is no news.
		news := false
		for r, v := range got.rules {
			news = news || v > o.rules[r]+0.05
		}
		if !news {
			return
		}
		for _, f := range sub.findings {
			s.add(f)
		}
		for r, v := range got.rules {
			o.rules[r] = max(o.rules[r], v)
		}
		for c, v := range got.cats {
			o.cats[c] = max(o.cats[c], v)
		}
		s.add(Finding{Category: Obfuscation, Rule: "written_as_" + strings.ReplaceAll(how, " ", "_"), Score: min(0.95, got.most()+0.15), Where: p.where, Detail: how, Excerpt: text})
	}
	if f.tags != "" {
		again("tag characters", f.tags, 0.15)
	}
	if f.selectors != "" {
		again("variation selectors", f.selectors, 0.15)
	}
	again("single letters", joined(f.text, raw), 0.45)
	again("digits for letters", unleet(f.text), 0.45)
	if strings.Contains(raw, "&#") {
		again("HTML entities", html.UnescapeString(raw), 0.3)
	}
	for _, d := range extract.Payloads(raw) {
		again(d.How, d.Text, 0.3)
	}
	if p.depth == 0 {
		again("rot13", rot13(f.text), 0.5)
		again("reversed text", reversed(f.text), 0.5)
		if f.flipped >= 6 { // some letters upside down are others
			again("upside-down text", reversed(strings.NewReplacer("n", "u", "u", "n", "d", "p", "p", "d", "b", "q", "q", "b").Replace(f.text)), 0.5)
		}
	}
	return o
}

// letters judges how a text is written.
func (s *scanner) letters(p part, f folding, o opinion) {
	say := func(rule string, score float64, detail, excerpt string) {
		s.add(Finding{Category: Obfuscation, Rule: rule, Score: score, Where: p.where, Detail: detail, Excerpt: excerpt})
	}
	if n := len(f.tags); n >= 4 {
		say("tag_characters", 0.8, "text in invisible characters", f.tags)
		s.add(Finding{Category: HiddenText, Rule: "tag_characters", Score: 0.8, Where: p.where, Detail: "text in invisible characters", Excerpt: f.tags})
	}
	if n := len(strings.TrimSpace(f.selectors)); n >= 4 {
		say("variation_selectors", 0.8, "data in invisible characters", f.selectors)
		s.add(Finding{Category: HiddenText, Rule: "variation_selectors", Score: 0.8, Where: p.where, Detail: "data in invisible characters", Excerpt: f.selectors})
	}
	worse := 0.0
	if o.most() >= 0.3 {
		worse = 0.3 // it hides what is worth hiding
	}
	if f.unseen >= 3 && p.hidden == "" {
		say("unseen_within_words", min(0.35+worse+0.01*float64(f.unseen), 0.8), "zero-width characters within words", f.text)
	}
	if f.overrides > 0 && p.hidden == "" {
		say("reading_direction", 0.4+worse, "characters that reverse the reading direction", f.text)
	}
	if f.mixed >= 2 || f.mixed == 1 && (worse > 0 || p.where == "from" || p.where == "subject") {
		say("lookalike_letters", min(0.35+worse+0.03*float64(f.mixed), 0.85), "words with letters of several scripts", f.text)
	}
	if f.styled >= 8 {
		say("styled_letters", 0.2+worse, "letters of mathematical or enclosed alphabets", f.text)
	}
	if f.stacked >= 12 {
		say("stacked_marks", 0.35+worse, "marks stacked on letters", f.text)
	}
	if f.flipped >= 6 {
		say("upside_down", 0.3+worse, "letters upside down", f.text)
	}
}

// A sight is a text with its hits, for the rules.
type sight struct {
	text   string
	hits   []hit
	scale  float64 // bytes of a letter, nearly
	quoted []span
	rules  map[concept]conceptRule
	open   bool // it stands there for people to read, neither hidden nor encoded
}

type span struct{ from, to int }

// judge applies the rules to a folded text.
func (s *scanner) judge(p part, text string) opinion {
	v := sight{text: text, rules: s.rules, hits: s.lex.find(text), scale: 1, open: p.hidden == "" && p.derived == ""}
	if len(v.hits) >= maxHits {
		s.add(Finding{Category: Obfuscation, Rule: "too_dense", Score: 0.75, Where: p.where, Detail: "too many suspicious words: not all were read"})
	}
	v.hits = append(v.hits, destinations(text)...)
	slices.SortStableFunc(v.hits, func(a, b hit) int { return a.at - b.at })
	if n := utf8.RuneCountInString(text); n > 0 {
		v.scale = min(3, float64(len(text))/float64(n))
	}
	v.quoted = quotes(text)
	o := opinion{map[string]float64{}, map[Category]float64{}}
	say := func(c Category, rule string, score float64, from, to int) {
		score *= s.discount(p, &v, from, to)
		if old, ok := o.rules[rule]; ok && old >= score {
			return
		}
		o.rules[rule] = score
		o.cats[c] = max(o.cats[c], score)
		s.add(Finding{Category: c, Rule: rule, Score: score, Where: p.where, Detail: p.detail(), Excerpt: v.around(from, to)})
	}
	for i, h := range v.hits {
		switch h.c {
		case override:
			if o.rules["override_instructions"] < 0.8 {
				v.override(i, say)
			}
		case marker:
			v.marker(i, say)
		case sendv:
			v.give(i, say)
		default:
			v.grade(i, say)
		}
	}
	v.roles(say)
	return o
}

type sayer func(c Category, rule string, score float64, from, to int)

// override looks for "ignore the previous instructions" and its like, in either
// order of words.
func (v *sight) override(i int, say sayer) {
	o := v.hits[i]
	best, from, to, tried := 0.0, 0, 0, 0
	v.each(i, 110, func(j int, x hit) bool {
		if x.c != instr || x.at < o.end && x.end > o.at {
			return false
		}
		a, b := o, x
		if x.at < o.at {
			a, b = x, o
		}
		if v.sentenceEnds(a.end, b.at) {
			return false
		}
		tried++
		gap := float64(b.at-a.end) / v.scale
		qualified := false
		v.each(j, 60, func(_ int, y hit) bool {
			if y.c == prior && y.at >= min(a.at, x.at-int(25*v.scale)) && y.end <= b.end+int(25*v.scale) && (y.at < o.at || y.end > o.end) {
				qualified = true
			}
			return qualified
		})
		w := 0.0
		switch {
		case qualified && gap <= 45:
			w = 0.8
		case qualified && gap <= 90:
			w = 0.6
		case gap <= 25:
			w = 0.5
		}
		// People in business set rules aside too: "all prior orders", "the old
		// rules cease to apply", "we ignore", "the instructions for model B".
		// Then a model must be spoken of nearby.
		if w > 0 && v.open && !v.any(i, 250, set(address, persona, closer, toolcall)) &&
			(v.told(o) || (weak(v.text[x.at:x.end]) || v.narrowed(x)) && !v.any(i, 250, set(secrecy, tool)) && !v.any(i, 120, set(ai))) {
			w -= 0.45
		}
		if w > best {
			best, from, to = w, a.at, b.end
		}
		return best >= 0.8 || tried > 10
	})
	if best > 0 {
		say(InstructionOverride, "override_instructions", best, from, to)
		return
	}
	if v.any(i, 60, set(ai, address)) {
		say(InstructionOverride, "override_perhaps", 0.2, o.at, o.end)
	}
}

// weak are words for instructions that people in business use of other things.
func weak(w string) bool {
	switch w {
	case "the above", "rules", "regeln", "regles", "reglas", "regole", "regras", "zasady", "guidelines", "directives", "orders", "command", "commands", "policies", "training", "rule", "restriction", "restrictions", "constraint", "constraints", "instruction", "protocols", "briefing",
		"safeguard", "safeguards", "guideline":
		return true
	}
	return false
}

// told reports whether the verb of h is descriptive ("models ignored it") and not
// an imperative.
func (v *sight) told(h hit) bool {
	w := v.text[h.at:h.end]
	if slices.Contains([]string{"ignores", "ignored", "ignoring", "overrides", "overridden", "overriding", "supersedes", "superseded", "cease to apply", "no longer apply", "no longer applies", "no longer valid", "forgets", "bypasses", "bypassed", "regardless of"}, w) {
		return true
	}
	before := strings.TrimRight(v.text[max(0, h.at-24):h.at], " \n")
	before = before[strings.LastIndexAny(before, " \n\"'>")+1:]
	switch before {
	case "we", "i", "they", "he", "she", "it", "who", "which", "models", "researchers", "assistants", "agents", "attackers", "users", "people", "nobody", "values", "model", "agent", "scanner", "cannot", "can't":
		return true
	}
	return false
}

// narrowed reports whether the rules of h have a subject of their own, as in "the
// instructions for model B", and so are not those of the reading model.
func (v *sight) narrowed(h hit) bool {
	after := strings.TrimLeft(v.text[h.end:min(len(v.text), h.end+20)], " \n")
	for _, w := range []string{"for ", "regarding ", "concerning ", "about ", "on ", "of the ", "in the ticket", "from the manual"} {
		if strings.HasPrefix(after, w) {
			return !strings.HasPrefix(after, "for you") && !strings.HasPrefix(after, "for the assistant") && !strings.HasPrefix(after, "about conf")
		}
	}
	return false
}

// marker weighs the marks of a conversation with a model.
func (v *sight) marker(i int, say sayer) {
	h := v.hits[i]
	m := v.text[h.at:h.end]
	strong := strings.HasPrefix(m, "<|") || strings.HasPrefix(m, "[inst") || strings.HasPrefix(m, "[/inst") || strings.HasPrefix(m, "<<") || strings.Contains(m, `"role"`) || strings.Contains(m, "_of_turn") || strings.Contains(m, "system-reminder") || strings.Contains(m, "_result")
	switch {
	case strong:
		say(RoleImpersonation, "conversation_marks", 0.78, h.at, h.end)
	case v.any(i, 200, cues|set(instr, sendv, private, secret)):
		say(RoleImpersonation, "conversation_marks", 0.6, h.at, h.end)
	default:
		say(RoleImpersonation, "conversation_marks_perhaps", 0.25, h.at, h.end)
	}
}

// give looks for secrets or mail that are to be sent somewhere.
func (v *sight) give(i int, say sayer) {
	s := v.hits[i]
	if v.negated(i) {
		return
	}
	what := none
	var object hit
	v.each(i, 90, func(_ int, x hit) bool {
		if x.c != secret && x.c != private || x.at < s.end && x.end > s.at {
			return false
		}
		a, b := s, x
		if x.at < s.at {
			a, b = x, s
		}
		// Verbs stand last in some languages; in the others what comes before
		// belongs to something else.
		if v.sentenceEnds(a.end, b.at) || x.at < s.at && v.scale < 1.3 && b.at-a.end > 25 && (b.at-a.end >= 70 || !v.within(a.end, b.at, set(dest))) {
			return false
		}
		what, object = x.c, x
		return what == private
	})
	if what == none {
		return
	}
	from, to := min(s.at, object.at), max(s.end, object.end)
	led := v.any(i, 260, set(address, override, secrecy, tool, toolcall, newtask, authority)) || v.any(i, 120, set(ai, persona))
	sent := v.any(i, 160, set(dest))
	rule := "sends_secrets"
	if what == private {
		rule = "sends_mail_or_data"
	}
	switch {
	case led && sent:
		say(Exfiltration, rule, 0.8, from, to)
	case led:
		say(Exfiltration, rule+"_on_command", 0.7, from, to)
	case sent && what == private:
		say(Exfiltration, rule+"_to_address", 0.55, from, to)
	case sent:
		say(Exfiltration, rule+"_to_address", 0.4, from, to)
	default:
		say(Exfiltration, rule+"_perhaps", 0.1, from, to)
	}
}

// roles looks for lines that begin as those of a conversation's transcript.
func (v *sight) roles(say sayer) {
	at := 0
	for n := 0; at < len(v.text) && n < 10000; n++ {
		line := v.text[at:]
		end := strings.IndexByte(line, '\n')
		if end < 0 {
			end = len(line)
		}
		head := strings.TrimLeft(line[:min(end, 60)], "#*->[( \"")
		for _, r := range []string{"system:", "system message:", "system prompt:", "system note:", "system notice:", "assistant:", "developer:", "developer message:", "system override", "system alert:", "systemnachricht:", "system]:", "human:", "ai:"} {
			if !strings.HasPrefix(head, r) {
				continue
			}
			from := at
			if v.within(from, from+int(300*v.scale), cues|set(instr, private, authority)) {
				say(RoleImpersonation, "speaks_as_role", 0.65, from, from+end)
			} else {
				say(RoleImpersonation, "speaks_as_role_perhaps", 0.15, from, from+end)
			}
		}
		at += end + 1
	}
}

// within says whether one of set begins between from and to.
func (v *sight) within(from, to int, of uint32) bool {
	i, _ := slices.BinarySearchFunc(v.hits, from, func(h hit, at int) int { return h.at - at })
	for ; i < len(v.hits) && v.hits[i].at < to; i++ {
		if of&(1<<v.hits[i].c) != 0 {
			return true
		}
	}
	return false
}

// maxSteps bounds how many neighbours of a hit are looked at.
const maxSteps = 80

// each calls f for the hits around hit i, at most so many letters away, until f
// has seen enough.
func (v *sight) each(i int, letters float64, f func(int, hit) (enough bool)) {
	reach := int(letters * v.scale)
	for j, n := i-1, 0; j >= 0 && n < maxSteps && v.hits[j].at >= v.hits[i].at-reach-60; j, n = j-1, n+1 {
		if v.hits[i].at-v.hits[j].end <= reach && f(j, v.hits[j]) {
			return
		}
	}
	for j, n := i+1, 0; j < len(v.hits) && n < maxSteps && v.hits[j].at-v.hits[i].end <= reach; j, n = j+1, n+1 {
		if f(j, v.hits[j]) {
			return
		}
	}
}

func (v *sight) any(i int, letters float64, of uint32) (found bool) {
	v.each(i, letters, func(_ int, h hit) bool {
		// One word is no witness for itself.
		found = of&(1<<h.c) != 0 && (h.at >= v.hits[i].end || h.end <= v.hits[i].at)
		return found
	})
	return found
}

func (v *sight) count(i int, letters float64, of uint32) (n int) {
	v.each(i, letters, func(_ int, h hit) bool {
		if of&(1<<h.c) != 0 && (h.at >= v.hits[i].end || h.end <= v.hits[i].at) {
			n++
		}
		return false
	})
	return n
}

func (v *sight) negated(i int) (found bool) {
	h := v.hits[i]
	v.each(i, 30, func(_ int, x hit) bool {
		if x.c == neg && x.end <= h.at && !v.sentenceEnds(x.end, h.at) {
			found = true
		}
		// In Japanese and Korean the verb's end says it.
		if x.c == neg && x.at >= h.end && v.scale > 2 && x.at-h.end <= 12 {
			found = true
		}
		return found
	})
	return found
}

func (v *sight) sentenceEnds(from, to int) bool {
	if from >= to {
		return false
	}
	s := v.text[from:min(to, len(v.text))]
	for i, r := range s {
		switch r {
		case '。', '！', '？', '।', '؟', '|':
			return true
		case '.', '!', '?', ';':
			if i+1 >= len(s) || s[i+1] == ' ' || s[i+1] == '\n' {
				return true
			}
		}
	}
	return false
}

// around is an excerpt of the text.
func (v *sight) around(from, to int) string {
	from = max(0, from-20)
	for from > 0 && !utf8.RuneStart(v.text[from]) {
		from--
	}
	return extract.Cut(v.text[from:], min(max(to-from, 0)+60, extract.MaxExcerpt))
}

func (p part) detail() string {
	var d []string
	if p.hidden != "" {
		d = append(d, "hidden: "+p.hidden)
	}
	if p.derived != "" {
		d = append(d, "written as "+p.derived)
	}
	return strings.Join(d, ", ")
}

// quotes returns what stands between quotation marks, in code or in quoted
// lines of a folded text.
func quotes(text string) []span {
	var out []span
	openAt, line := -1, true
	for i := 0; i < len(text) && len(out) < 5000; i++ {
		switch c := text[i]; {
		case line && c == '>':
			end := strings.IndexByte(text[i:], '\n')
			if end < 0 {
				end = len(text) - i
			}
			out = append(out, span{i, i + end})
		case c == '"':
			if openAt >= 0 && i-openAt < 700 {
				out = append(out, span{openAt, i})
				openAt = -1
			} else {
				openAt = i
			}
		case c == '\'' && (i == 0 || !extract.Letter(rune(text[i-1]))) && i+1 < len(text) && extract.Letter(rune(text[i+1])):
			if end := strings.IndexByte(text[i+1:min(len(text), i+400)], '\''); end > 0 {
				if j := i + 1 + end; j+1 >= len(text) || !extract.Letter(rune(text[j+1])) {
					out = append(out, span{i, j})
				}
			}
		}
		line = text[i] == '\n'
	}
	return out
}

// discount returns the factor by which a finding counts less in a mail about
// attacks: an advisory, a training, a code review. What is hidden or encoded is
// not talk. It is also the way to talk oneself past the scan, so it never makes
// a finding vanish.
func (s *scanner) discount(p part, v *sight, from, to int) float64 {
	if p.hidden != "" || p.derived != "" || s.talk < 2 {
		return 1
	}
	for _, q := range v.quoted {
		if q.from <= from+1 && to-1 <= q.to+20 || q.from < to && from < q.to {
			return 0.4
		}
	}
	switch {
	case s.talk >= 6:
		return 0.5
	case s.talk >= 4:
		return 0.65
	}
	return 0.85
}

// hidden judges what an HTML body does not show.
func (s *scanner) hidden(r extract.Page) {
	left := maxText
	for _, h := range r.Hidden {
		if left <= 0 {
			s.add(Finding{Category: HiddenText, Rule: "too_much_hidden", Score: 0.75, Where: "html", Detail: "not all of it was read"})
			return
		}
		text := extract.Cut(h.Text(), left)
		left -= len(text)
		if h.How == "comment" && (strings.HasPrefix(text, "[if ") || strings.HasPrefix(text, "<![endif")) {
			continue // for one mail program, which shows it
		}
		o := s.look(part{where: "html", hidden: h.How, aside: h.Aside}, text)
		score := 0.0
		switch m := o.most(); {
		case m >= 0.3 && h.Aside:
			score = m + 0.1
		case m >= 0.15 && !h.Aside:
			score = 0.75 + 0.2*m
		case h.Aside || h.How == "comment" || h.Preview:
		case len(text) > 300:
			score = 0.25
		default:
			score = 0.1
		}
		if score > 0 {
			s.add(Finding{Category: HiddenText, Rule: "hidden_in_html", Score: min(score, 0.95), Where: "html", Detail: h.How, Excerpt: fold(extract.Cut(text, 1000)).text})
		}
	}
}

// diverge judges a plain text that says what the HTML does not: the person sees
// the one, the model reads the other.
func (s *scanner) diverge(text, seen opinion) {
	m := 0.0
	for r, v := range text.rules {
		if v > seen.rules[r]+0.1 {
			m = max(m, v)
		}
	}
	if m >= 0.3 {
		s.add(Finding{Category: HiddenText, Rule: "text_differs_from_html", Score: min(0.9, m+0.15), Where: "text", Detail: "the plain text says what the HTML does not"})
	}
	m = 0
	for r, v := range seen.rules {
		if v > text.rules[r]+0.1 {
			m = max(m, v)
		}
	}
	if m >= 0.5 && len(text.rules) > 0 {
		s.add(Finding{Category: HiddenText, Rule: "html_differs_from_text", Score: 0.3, Where: "html", Detail: "the HTML says what the plain text does not"})
	}
}

// links judges where links lead.
func (s *scanner) links(in Input, page extract.Page, all []extract.Link) {
	_, fromDomain, _ := strings.Cut(strings.ToLower(in.From), "@")
	say := func(rule string, score float64, detail string, l extract.Link) {
		where := "html"
		if l.Plain {
			where = "text"
		}
		s.add(Finding{Category: PhishingLink, Rule: rule, Score: score, Where: where, Detail: detail, Excerpt: strings.TrimSpace(l.Text) + " (" + l.Href + ")"})
	}
	press := 0.0
	if s.pressure {
		press = 0.3
	}
	brand, domains := brandOf(in.FromName + " " + in.Subject)
	borrowed := brand != "" && fromDomain != "" && !owns(domains, fromDomain)
	for _, l := range all {
		t, ok := extract.ParseTarget(l.Href)
		if !ok {
			continue
		}
		switch t.Scheme {
		case "http", "https":
		case "javascript", "data", "vbscript", "file":
			say("link_scheme", 0.78, t.Scheme+" link", l)
			continue
		default:
			continue
		}
		if t.Userinfo {
			say("name_before_host", 0.78, "leads to "+t.Host, l)
		}
		if t.IP && !local(t.Host) {
			say("address_as_host", 0.45+press, "leads to an IP address", l)
		}
		if b := lookalike(t.Host); b != "" {
			say("lookalike_host", 0.78, "looks like "+b, l)
		} else if strings.Contains(t.Host, "xn--") {
			say("international_host", 0.15+press, unpuny(t.Host), l)
		}
		if b, own := brandOf(strings.TrimSuffix(t.Host, extract.RegisteredDomain(t.Host)) + " " + extract.RegisteredDomain(t.Host)); b != "" && len(b) >= 4 && !owns(own, t.Host) && extract.RegisteredDomain(t.Host) != extract.RegisteredDomain(fromDomain) {
			say("borrowed_name", 0.4+press, "the host bears the name of "+b, l)
		}
		if shown := extract.HostIn(l.Text); shown != "" && extract.RegisteredDomain(shown) != extract.RegisteredDomain(t.Host) && !l.Plain {
			// Newsletters count clicks that way, with links of their own domain.
			if score := 0.45 + press; extract.RegisteredDomain(shown) != extract.RegisteredDomain(fromDomain) || s.pressure {
				say("text_names_other_host", score, "says "+shown+", leads to "+t.Host, l)
			} else {
				say("text_names_other_host_of_sender", 0.15, "says "+shown+", leads to "+t.Host, l)
			}
		}
		if borrowed && s.pressure && !owns(domains, t.Host) {
			say("borrowed_sender", 0.78, "speaks as "+brand+", leads to "+t.Host, l)
		}
		if s.pressure && fromDomain != "" && extract.RegisteredDomain(t.Host) != extract.RegisteredDomain(fromDomain) {
			say("presses_to_sign_in", 0.45, "urges to sign in at "+t.Host, l)
		} else if s.pressure {
			say("presses_to_sign_in_perhaps", 0.25, "urges to sign in at "+t.Host, l)
		}
		if cheap(t.Host) && s.pressure {
			say("cheap_host", 0.3, "a host that anybody gets", l)
		}
		if leaks(t) {
			s.add(Finding{Category: Exfiltration, Rule: "link_with_placeholder", Score: 0.6, Where: "html", Detail: "a link that waits for data to be put in", Excerpt: l.Href})
		}
	}
	if page.SecretFields > 0 {
		s.add(Finding{Category: PhishingLink, Rule: "asks_in_form", Score: 0.8, Where: "html", Detail: "a form that asks for a password or the like"})
	} else if page.Forms > 0 {
		s.add(Finding{Category: PhishingLink, Rule: "form", Score: 0.2 + press, Where: "html", Detail: "a form"})
	}
	if page.Scripts > 0 {
		s.add(Finding{Category: Obfuscation, Rule: "script", Score: 0.3, Where: "html", Detail: "a script"})
	}
	if _, reply, ok := strings.Cut(strings.ToLower(in.ReplyTo), "@"); ok && borrowed && extract.RegisteredDomain(reply) != extract.RegisteredDomain(fromDomain) {
		s.add(Finding{Category: PhishingLink, Rule: "answers_elsewhere", Score: 0.4, Where: "from", Detail: "speaks as " + brand + ", answers go to " + reply})
	}
}

func local(host string) bool {
	return strings.HasPrefix(host, "127.") || strings.HasPrefix(host, "10.") || strings.HasPrefix(host, "192.168.") || host == "[::1]"
}

// cheap are hosts under which anybody gets a name for nothing.
func cheap(host string) bool {
	for _, d := range []string{"bit.ly", "tinyurl.com", "t.ly", "is.gd", "cutt.ly", "rb.gy", "weebly.com", "wixsite.com", "web.app", "firebaseapp.com", "pages.dev", "workers.dev", "netlify.app", "vercel.app", "github.io", "glitch.me", "duckdns.org", "ngrok.io", "ngrok-free.app", "blogspot.com", "000webhostapp.com", "herokuapp.com", "r2.dev", "trycloudflare.com"} {
		if host == d || strings.HasSuffix(host, "."+d) {
			return true
		}
	}
	i := strings.LastIndexByte(host, '.')
	switch host[i+1:] {
	case "top", "xyz", "tk", "ml", "ga", "cf", "gq", "icu", "click", "buzz", "rest", "zip", "cam", "sbs", "cfd", "shop", "live", "online", "site", "info":
		return true
	}
	return false
}

// leaks says whether a link has a gap for what a model should put in.
func leaks(t extract.Target) bool {
	u := strings.ToLower(t.Path)
	for _, gap := range []string{"{{", "%7b%7b", "[data]", "%5bdata%5d", "<data>", "%3cdata", "{data}", "[insert", "%5binsert", "{secret", "[secret", "{summary", "[summary", "{conversation", "[conversation", "[password", "{password", "[api", "{api", "your_data", "your_secrets", "base64_of", "[base64", "{base64", "[token", "{token", "[email", "[contents", "{contents", "[content]", "{content}", "{history", "[history", "{inbox", "[inbox"} {
		if strings.Contains(u, gap) {
			return true
		}
	}
	return false
}
