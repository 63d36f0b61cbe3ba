package mailapi

import (
	"fmt"
	"strings"

	"postern/internal/api"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/scan"
)

func securityOf(s *message.Security) *api.Security {
	if s == nil {
		return nil
	}
	return &api.Security{
		Score: s.Score, Categories: categoriesOf(s.Categories), Findings: []api.Finding{}, Quarantined: s.Quarantined,
		SPF: s.Auth.SPF.Result, DKIM: s.Auth.DKIM.Result, DMARC: s.Auth.DMARC.Result, ARC: s.Auth.ARC.Result,
	}
}

// categoriesOf never returns nil, so that JSON has an object.
func categoriesOf(in map[scan.Category]float64) map[string]float64 {
	out := make(map[string]float64, len(in))
	for c, score := range in {
		out[string(c)] = score
	}
	return out
}

func findingsOf(in []scan.Finding) []api.Finding {
	return each(in, func(f scan.Finding) api.Finding {
		return api.Finding{Category: string(f.Category), Rule: f.Rule, Score: f.Score, Where: f.Where, Detail: f.Detail, Excerpt: f.Excerpt}
	})
}

// maxSafe bounds the text for agents, in bytes.
const maxSafe = mail.MaxText

func safeOf(m api.Message, text, html string) api.SafeContent {
	s := scan.Read(text, html)
	out := api.SafeContent{SafeText: clip(s.Text), HTMLClean: s.HTML, LeftOut: s.Left}
	if len(out.SafeText) < len(s.Text) {
		out.LeftOut = append(out.LeftOut, fmt.Sprintf("all of the text beyond the first %d bytes", maxSafe))
	}
	if len(out.HTMLClean) > maxSafe { // half of an element would be no HTML
		out.HTMLClean = ""
		out.LeftOut = append(out.LeftOut, fmt.Sprintf("html_clean, which has more than %d bytes", maxSafe))
	}
	var b strings.Builder
	line := func(name, value string) {
		if value != "" {
			b.WriteString(name + ": " + oneLine(value) + "\n")
		}
	}
	line("From", m.From)
	line("To", strings.Join(m.To, ", "))
	line("Cc", strings.Join(m.Cc, ", "))
	line("Subject", m.Subject)
	for _, a := range m.Attachments {
		line("Attachment", a.Name)
	}
	b.WriteString("\n" + out.SafeText)
	out.Fenced = scan.Fenced(b.String())
	return out
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

func clip(s string) string {
	if len(s) <= maxSafe {
		return s
	}
	return strings.ToValidUTF8(s[:maxSafe], "")
}
