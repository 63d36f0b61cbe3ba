package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"postern/internal/extract"
)

// An output is where a command prints, and how. What is written to it is text for people
// and terminals: [output.Write] escapes what these may take amiss. The Writer is for bytes
// that must stay as they are, see [output.bytes].
type output struct {
	io.Writer

	json  bool // facts are printed as JSON
	wide  bool // cells of tables are never cut
	width int  // columns of the terminal; 0 if it is none: then nothing is cut

	flags   *pflag.FlagSet    // of the command, with its values
	sources map[string]origin // of the flags' values, by name
}

// newOutput returns an output to w.
func newOutput(w io.Writer, asJSON, wide bool) *output {
	o := &output{Writer: w, json: asJSON, wide: wide}
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		o.width = columns(f)
	}
	return o
}

// facts prints v: as JSON if the caller wants that, and by text otherwise.
func (o *output) facts(v any, text func() error) error {
	if !o.json {
		return text()
	}
	return o.object(v)
}

// object prints v as indented JSON. What agents and strangers wrote stays
// escaped, so that a terminal does not obey it.
func (o *output) object(v any) error {
	var text strings.Builder
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false) // it is for programs and terminals
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(o, visibleJSON(text.String()))
	return err
}

// line prints v as JSON on one line.
func (o *output) line(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = io.WriteString(o, visibleJSON(string(b))+"\n")
	return err
}

// visibleJSON returns JSON with hidden characters in its texts as \uXXXX. It means the
// same.
func visibleJSON(text string) string {
	var b strings.Builder
	before := rune(0)
	for _, r := range text {
		if r != '\n' && (extract.Hidden(before, r) || extract.OddSpace(r)) {
			for _, u := range utf16.Encode([]rune{r}) {
				fmt.Fprintf(&b, `\u%04x`, u)
			}
			r = 0 // nothing joins it
		} else {
			b.WriteRune(r)
		}
		before = r
	}
	return b.String()
}

// Write prints text. The attack: what agents and strangers wrote has controls that a
// terminal obeys, or characters that show it in another order or not at all.
func (o *output) Write(p []byte) (int, error) {
	if _, err := io.WriteString(o.Writer, extract.Escape(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// bytes returns where bytes are written that are no text for people, such as a file. On a
// terminal there is no such place.
func (o *output) bytes() io.Writer {
	if isTerminal(o) {
		return o
	}
	return o.Writer
}

// rows prints a list: v, whose elements the rows describe, as JSON, or a table
// whose first row is the heading.
func (o *output) rows(v any, rows [][]string) error {
	if o.json {
		return o.object(v)
	}
	return o.table(rows)
}

const (
	gap     = 2  // spaces between columns
	minCell = 12 // columns that a cell keeps however narrow the terminal is
)

// table prints rows in columns. On a terminal the widest cells are cut until a
// row fits into a line; identifiers, which stand in the first column, are not.
func (o *output) table(rows [][]string) error {
	var widths []int
	for _, r := range rows {
		for i := range r {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			r[i] = cell(r[i])
			widths[i] = max(widths[i], utf8.RuneCountInString(r[i]))
		}
	}
	if o.width > 0 && !o.wide {
		shrink(widths, o.width)
	}
	var b strings.Builder
	for _, r := range rows {
		var line strings.Builder
		for i, cell := range r {
			if utf8.RuneCountInString(cell) > widths[i] {
				cell = string([]rune(cell)[:widths[i]-1]) + "…"
			}
			line.WriteString(cell + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+gap))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(o, b.String())
	return err
}

// shrink narrows columns, the widest first, until all fit into width or none
// can be narrower. The first one stays.
func shrink(widths []int, width int) {
	for {
		total, widest := -gap, 0
		for i, w := range widths {
			total += w + gap
			if i > 0 && w > minCell && (widest == 0 || w > widths[widest]) {
				widest = i
			}
		}
		if total <= width || widest == 0 {
			return
		}
		widths[widest]--
	}
}

// isTerminal reports whether out is a terminal, so that only a person sees it.
func isTerminal(out io.Writer) bool {
	if o, ok := out.(*output); ok {
		out = o.Writer
	}
	f, ok := out.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// columns returns the width of the terminal that out is, and 80 for anything
// else. A width that nothing fits into counts as 40.
func columns(out io.Writer) int {
	if f, ok := out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return max(int(size.Col), 40)
		}
	}
	return 80
}

const clock = "2006-01-02 15:04" // how a moment is shown, in the machine's time zone

// ago returns how long before now t was, for a list.
func ago(t time.Time) string {
	switch d := time.Since(t); {
	case d < time.Minute:
		return fmt.Sprintf("%d s ago", max(int(d.Seconds()), 0))
	case d < time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	case d < 30*24*time.Hour:
		return fmt.Sprintf("%d d ago", int(d.Hours()/24))
	}
	return t.Local().Format(clock)
}

// agoOrNever is [ago] for a time that may be missing.
func agoOrNever(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "never"
	}
	return ago(*t)
}

// usedAgo is [agoOrNever] for a last use, which is known to a resolution: a later one
// within it was not recorded.
func usedAgo(t *time.Time, resolution time.Duration) string {
	if t != nil && !t.IsZero() && time.Since(*t) < resolution {
		if resolution == time.Minute {
			return "in the last minute"
		}
		return fmt.Sprintf("in the last %d min", int(resolution.Minutes()))
	}
	return agoOrNever(t)
}

// in returns how long after now t is, for a list, or "never".
func in(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "never"
	}
	switch d := time.Until(*t); {
	case d < 0:
		return ago(*t)
	case d < time.Minute:
		return fmt.Sprintf("in %d s", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("in %d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("in %d h", int(d.Hours()))
	case d < 30*24*time.Hour:
		return fmt.Sprintf("in %d d", int(d.Hours()/24))
	}
	return t.Local().Format(clock)
}

// orNever returns a moment, or "never" for a missing one.
func orNever(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "never"
	}
	return t.Local().Format(clock)
}

// megabytes returns a number of bytes in a unit that fits it.
func megabytes(n int64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

// printable escapes what a terminal obeys, or a reader does not see, in what others wrote.
// It makes one line of it.
func printable(s string) string {
	return strings.ReplaceAll(extract.Escape(s), "\n", `\u{a}`)
}

// prose is printable for the text of a mail, in which no-break spaces are frequent: they
// become the spaces that they look like.
func prose(s string) string {
	return printable(strings.Map(func(r rune) rune {
		if extract.OddSpace(r) {
			return ' '
		}
		return r
	}, s))
}

// cell makes text that others wrote fit for a cell of a table.
func cell(s string) string {
	return strings.ReplaceAll(printable(s), "\t", " ")
}

// cut returns the first most characters of what others wrote, for a cell.
func cut(s string, most int) string {
	rs := []rune(cell(s))
	if len(rs) > most {
		return string(rs[:most-1]) + "…"
	}
	return string(rs)
}
