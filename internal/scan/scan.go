// Package scan reads mail for an agent's sake: it looks for text that tries to
// command a model, to pass for somebody whom a model obeys, to hide from
// people, or to lead a person astray. It gives a score between 0 and 1 for each
// of seven categories, with the reasons. It also holds what protects a model
// when the scan is wrong: [Fence], which marks where mail begins and ends, and
// [Clean], which makes HTML harmless.
//
// It is a smoke detector and not a wall. Somebody who has this source can write
// a mail that it lets through; docs/reference/scan.md says how well it does on what it was
// not tuned on. So nothing may become allowed because a scan found nothing.
//
// It is pure: no I/O, no state, no imports of ours. It reads what attackers
// wrote: time and memory are linear in the input, the input is bounded, and what
// is beyond the bound is itself a finding. It must not decide what happens to a
// message.
package scan

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"postern/internal/extract"
)

// Category is what a message may try to do.
type Category string

// The categories.
const (
	InstructionOverride Category = "instruction_override" // give a model other instructions
	RoleImpersonation   Category = "role_impersonation"   // pass for system, developer, operator or the model
	HiddenText          Category = "hidden_text"          // say to a model what people do not see
	Exfiltration        Category = "exfiltration"         // have secrets or mail sent somewhere
	ToolAbuse           Category = "tool_abuse"           // have tools or commands used
	Obfuscation         Category = "obfuscation"          // write so that filters do not read it
	PhishingLink        Category = "phishing_link"        // lead elsewhere than it seems
)

// Categories returns all categories, in the order in which they are listed.
func Categories() []Category {
	return []Category{InstructionOverride, RoleImpersonation, HiddenText, Exfiltration, ToolAbuse, Obfuscation, PhishingLink}
}

// Flagged is the score from which a category, or [Report.Score], counts as
// found: below it a finding is a remark.
const Flagged = 0.5

// The limits of what is scanned of one message; docs/reference/scan.md names them.
const (
	maxText        = 512 << 10 // bytes of text, and of what HTML shows
	maxHTML        = 2 << 20   // bytes of HTML
	maxSubject     = 4 << 10   // bytes
	maxAttachments = 50
	maxAttached    = 256 << 10 // bytes of text of all attachments
	maxFindings    = 40
)

// Input is a message, taken apart. All of it may be hostile.
type Input struct {
	From        string // address of the From field
	FromName    string // display name of the From field
	ReplyTo     string // address of the Reply-To field, or empty
	Subject     string
	Text        string // all plain text
	HTML        string // all HTML, as it came
	Attachments []Attachment
}

// An Attachment is a file of a message.
type Attachment struct {
	Name string
	Text string // its content if it is text, else empty
}

// A Finding is one reason for a score.
type Finding struct {
	Category Category `json:"category"`
	Rule     string   `json:"rule"`    // a name for programs, "override_previous"
	Score    float64  `json:"score"`   // 0 to 1
	Where    string   `json:"where"`   // subject, from, text, html, attachment name or attachment
	Detail   string   `json:"detail"`  // in what way: "decoded from base64", "display:none"; may be empty
	Excerpt  string   `json:"excerpt"` // what was found, as it reads; printable, at most 160 bytes
}

// A Report is what a scan found.
type Report struct {
	Score      float64              `json:"score"`      // 0 to 1, of the message
	Categories map[Category]float64 `json:"categories"` // those above 0
	Findings   []Finding            `json:"findings"`   // the weightiest first, at most 40
}

// Scan reads a message. It never fails and never panics: what cannot be read is
// a finding, or nothing.
func Scan(in Input) Report {
	s := scanner{lex: lexicon(), rules: conceptRules(), best: map[string]int{}}
	in.Subject = s.bound(in.Subject, maxSubject, "subject")
	in.Text = s.bound(in.Text, maxText, "text")
	in.HTML = s.bound(in.HTML, maxHTML, "html")
	s.message(in)
	return s.report()
}

// scanner is the state of one scan.
type scanner struct {
	lex      *trie
	rules    map[concept]conceptRule
	findings []Finding
	best     map[string]int // by category, rule and where: the finding's place
	talk     int            // different words by which the message talks about attacks
	pressure bool           // it urges, and asks to sign in or to pay
}

// bound cuts what is too long. The attack: a megabyte of nothing before the
// words that matter; so it does not pass unnoticed.
func (s *scanner) bound(text string, most int, where string) string {
	if len(text) <= most {
		return text
	}
	s.add(Finding{Category: Obfuscation, Rule: "too_long", Score: 0.75, Where: where, Detail: "only its beginning and its end were read"})
	// The end counts: it is what a model read last.
	return extract.Cut(text, most-most/8) + "\n" + strings.ToValidUTF8(text[len(text)-most/8:], "")
}

func (s *scanner) add(f Finding) {
	if f.Score <= 0 {
		return
	}
	f.Score = math.Round(min(f.Score, 1)*100) / 100
	f.Excerpt = extract.Excerpt(f.Excerpt)
	key := string(f.Category) + "\x00" + f.Rule + "\x00" + f.Where
	if i, ok := s.best[key]; ok {
		if f.Score > s.findings[i].Score {
			s.findings[i] = f
		}
		return
	}
	s.best[key] = len(s.findings)
	s.findings = append(s.findings, f)
}

// message looks at each part of a message.
func (s *scanner) message(in Input) {
	var html extract.Page
	if in.HTML != "" {
		html = extract.HTML(in.HTML)
		html.Visible = s.bound(html.Visible, maxText, "html")
	}
	folded := fold(in.Subject + "\n" + in.Text + "\n" + html.Visible)
	s.survey(folded.text)

	s.look(part{where: "subject"}, in.Subject)
	s.look(part{where: "from"}, in.FromName)
	seen := s.look(part{where: "html"}, html.Visible)
	text := s.look(part{where: "text"}, in.Text)
	if len(html.Visible) > 40 {
		s.diverge(text, seen)
	}
	s.hidden(html)
	attached := 0
	for i, a := range in.Attachments {
		if i >= maxAttachments {
			s.add(Finding{Category: Obfuscation, Rule: "too_many_files", Score: 0.3, Where: "attachment name"})
			break
		}
		s.look(part{where: "attachment name"}, strings.NewReplacer("_", " ", "-", " ", ".", " ").Replace(extract.Cut(a.Name, maxSubject)))
		content := extract.Cut(a.Text, maxAttached-attached)
		attached += len(content)
		if strings.HasPrefix(strings.TrimSpace(content), "<") {
			r := extract.HTML(content)
			s.look(part{where: "attachment"}, r.Visible)
			s.hidden(r)
			s.links(in, r, r.Links)
			continue
		}
		s.look(part{where: "attachment"}, content)
	}
	s.links(in, html, append(html.Links, urlsIn(in.Text)...))
}

func (s *scanner) report() Report {
	r := Report{Categories: map[Category]float64{}}
	for _, c := range Categories() {
		var scores []float64
		rules := map[string]float64{}
		for _, f := range s.findings {
			if f.Category == c {
				rules[f.Rule] = max(rules[f.Rule], f.Score)
			}
		}
		for _, v := range rules {
			scores = append(scores, v)
		}
		if v := together(scores); v > 0 {
			r.Categories[c] = v
		}
	}
	var all []float64
	for _, v := range r.Categories {
		all = append(all, v)
	}
	r.Score = together(all)
	slices.SortStableFunc(s.findings, func(a, b Finding) int { return cmp.Compare(b.Score, a.Score) })
	r.Findings = s.findings[:min(len(s.findings), maxFindings)]
	return r
}

// together is the weight of several reasons: that of the strongest, raised by
// the others, which count less since they often have the same cause.
func together(scores []float64) float64 {
	slices.Sort(scores)
	doubt := 1.0
	for i, v := range scores {
		if i == len(scores)-1 {
			doubt *= 1 - v
		} else {
			doubt *= 1 - 0.4*v
		}
	}
	return math.Round((1-doubt)*100) / 100
}
