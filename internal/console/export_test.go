package console

import (
	"regexp"
	"strings"
	"time"

	"postern/internal/audit"
)

// SafeName is the name under which a file is saved.
func SafeName(name string) string { return safeName(name) }

// Rendered is a mail's HTML as the frame shows it.
func Rendered(doc string) (string, int, int, error) {
	r, err := rendered(doc)
	return string(r.Document), r.Remote, r.Left, err
}

// ClosedRoutes returns the method and path of each route that needs a person.
func ClosedRoutes() (out [][2]string) {
	for _, rt := range (&Server{}).table() {
		if rt.needs != open {
			out = append(out, [2]string{rt.method, rt.path})
		}
	}
	return out
}

// ChangingForms returns the path of each form that a viewer has not.
func ChangingForms() (out []string) {
	for _, rt := range (&Server{}).table() {
		if rt.method == "POST" && (rt.needs == decides || rt.needs == manages) {
			out = append(out, rt.path)
		}
	}
	return out
}

// Forms returns the path of each form.
func Forms() (out []string) {
	for _, rt := range (&Server{}).table() {
		if rt.method == "POST" {
			out = append(out, rt.path)
		}
	}
	return out
}

// Exported for the tests of sentences.
var (
	HowLong   = howLong
	Thousands = thousands
	BytesFor  = bytesFor
	TopicOf   = topicOf
	OutcomeOf = outcomeOf
	Cell      = cell
)

// ToneOf returns the tone of the sentence of a verb.
func ToneOf(v audit.Verb) string { return sayings[v].tone }

// Sentence returns an entry as text, with principals in angle brackets.
func Sentence(e audit.Entry) string {
	var b strings.Builder
	for _, p := range say(e, nil).Parts {
		if p.Who != "" {
			b.WriteString("<" + p.Who + ">")
		}
		b.WriteString(p.Text)
	}
	return b.String()
}

// SayingOf returns the fields that the sentence of a verb names.
func SayingOf(v audit.Verb) (fields []string, ok bool) {
	s, ok := sayings[v]
	for _, m := range regexp.MustCompile(`\{([^{}]+)\}`).FindAllStringSubmatch(s.text, -1) {
		parts := strings.Split(m[1], ":")
		name := parts[len(parts)-1]
		if len(parts) > 1 {
			name = parts[1]
		}
		switch name {
		case "who", "action", "action!", "ask", "took", "object":
		case "host":
			fields = append(fields, "name")
		default:
			fields = append(fields, name)
		}
	}
	return fields, ok
}

// UntilFull estimates from two samples.
func UntilFull(grown, free int64, over time.Duration) (full, since time.Duration) {
	now := time.Now()
	return untilFull([]diskSample{{now, 1000}, {now.Add(over), 1000 + grown}}, free)
}

// ForgetBriefs empties the cache of what lists show.
func (s *Server) ForgetBriefs() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.briefs)
}
