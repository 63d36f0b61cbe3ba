package console

import (
	"net/url"
	"strings"

	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// A shownPanel is a panel of an action's view, as its page shows it.
type shownPanel struct {
	Name, Says string
	Form       oversight.Form
	Rows       []shownRow
}

// A shownRow is one row of a panel.
type shownRow struct {
	Name, Value, Note string
	Warn              bool
	Alike             bool // a finding says that the host looks like another
	Foreign           bool // the host has letters outside of ASCII

	Text  string // Value, with invisible characters made visible
	Start string // its beginning, if Long
	Long  bool   // Text is folded
	Cut   bool   // Text is only the beginning of Value
	Size  int64  // bytes of Value
	Link  string // address of the whole value
	Run   string // the page of the run that Value names; empty if it names none
	Lines []diffLine
}

// A diffLine is a line of a difference. Sign is +, - or a space.
type diffLine struct{ Sign, Text, Class string }

// The bytes of a value that a page shows without a fold, before a fold, and in all.
const (
	maxUnfolded = 480
	foldedStart = 160
	maxFolded   = 256 << 10
)

// Panels returns the panels of the action's view. Fields that no panel shows are in the
// last one: a person approves all of them.
func (r *review) Panels() (out []shownPanel) {
	if r.View.Panels == nil {
		return nil
	}
	for _, p := range r.View.Panels {
		s := shownPanel{Name: p.Name, Says: p.Says, Form: p.Form}
		for _, row := range p.Rows {
			s.Rows = append(s.Rows, r.shownRow(p.Form, row))
		}
		out = append(out, s)
	}
	rest := shownPanel{Name: "Also part of it", Form: oversight.FormTable}
	for _, f := range r.View.Rest() {
		rest.Rows = append(rest.Rows, r.shownRow(rest.Form, oversight.PanelRow{Name: f.Name, Value: f.Value, Warn: strings.HasPrefix(f.Name, "Unknown: ")}))
	}
	if len(rest.Rows) > 0 {
		out = append(out, rest)
	}
	return out
}

func (r *review) shownRow(form oversight.Form, row oversight.PanelRow) shownRow {
	s := shownRow{Name: row.Name, Value: row.Value, Note: row.Note, Warn: row.Warn, Size: int64(len(row.Value)), Link: "/console/actions/" + url.PathEscape(r.ID) + "/raw"}
	v := row.Value
	if s.Cut = len(v) > maxFolded; s.Cut {
		v = strings.ToValidUTF8(v[:maxFolded], "")
	}
	s.Text = mail.PrintableLines(v, maxFolded)
	switch form {
	case oversight.FormHosts:
		s.Alike = r.alike(v)
		s.Foreign = spell(v).Odd != ""
	case oversight.FormDiff:
		for l := range strings.SplitSeq(strings.TrimSuffix(s.Text, "\n"), "\n") {
			sign := l[:min(1, len(l))]
			d := diffLine{sign, l[len(sign):], map[string]string{"+": "add", "-": "del"}[sign]}
			if strings.Trim(sign, "+- ") != "" { // a line about the difference
				d = diffLine{Text: l}
			}
			s.Lines = append(s.Lines, d)
		}
	case oversight.FormFacts:
		s.Run = runOf(oversight.Field{Name: row.Name, Value: v})
	case oversight.FormLine, oversight.FormChange, oversight.FormTable, oversight.FormList, oversight.FormWords:
	}
	if s.Long = len(v) > maxUnfolded || strings.Count(v, "\n") > 12; s.Long {
		s.Start = strings.ToValidUTF8(v[:min(len(v), foldedStart)], "")
	}
	return s
}

// alike reports whether a finding says that the host of a name looks like another.
func (r *review) alike(name string) bool {
	host := asciiName(strings.TrimPrefix(name[strings.LastIndexByte(name, '@')+1:], "*."))
	for _, f := range r.View.Findings {
		if f.Kind == policy.FindLookalike && host != "" && host == asciiName(f.Subject[strings.LastIndexByte(f.Subject, '@')+1:]) {
			return true
		}
	}
	return false
}

// AlikeHost reports whether a finding says that the host of a request looks like another.
func (r *review) AlikeHost() bool {
	return r.View.Request != nil && r.alike(r.View.Request.Host)
}
