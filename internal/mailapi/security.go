package mailapi

import (
	"fmt"
	"strings"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/scan"
)

// A securityJSON says who a message that arrived was proved to be from and what
// the scan found. Details and excerpts are what the sender wrote.
type securityJSON struct {
	Score       float64                   `json:"score"` // 0 to 1
	Categories  map[scan.Category]float64 `json:"categories"`
	Findings    []scan.Finding            `json:"findings"` // empty in lists
	SPF         string                    `json:"spf"`      // a word of RFC 8601, or empty: not tried
	DKIM        string                    `json:"dkim"`
	DMARC       string                    `json:"dmarc"`
	ARC         string                    `json:"arc"`
	Quarantined bool                      `json:"quarantined"` // it was held for a person
}

func securityOf(s *mailbox.Security) *securityJSON {
	if s == nil {
		return nil
	}
	out := &securityJSON{
		Score: s.Score, Categories: s.Categories, Findings: []scan.Finding{}, Quarantined: s.Quarantined,
		SPF: s.Auth.SPF.Result, DKIM: s.Auth.DKIM.Result, DMARC: s.Auth.DMARC.Result, ARC: s.Auth.ARC.Result,
	}
	if out.Categories == nil {
		out.Categories = map[scan.Category]float64{}
	}
	return out
}

// maxSafe bounds the text for agents, in bytes.
const maxSafe = mail.MaxText

// A safeJSON is a message as an agent should read it.
type safeJSON struct {
	SafeText  string   `json:"safe_text"`  // without what is hidden from people
	HTMLClean string   `json:"html_clean"` // without scripts, styles, links, pictures and what is hidden
	Fenced    string   `json:"fenced"`     // sender, subject, file names and safe_text between marks that no mail can hold
	LeftOut   []string `json:"left_out"`   // what is in text and html and not here, in words
}

func safeOf(m messageJSON, text, html string) safeJSON {
	s := scan.Read(text, html)
	out := safeJSON{SafeText: clip(s.Text), HTMLClean: s.HTML, LeftOut: s.Left}
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
