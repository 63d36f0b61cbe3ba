package preview

import (
	"encoding/csv"
	"errors"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The limits of a table.
const (
	// MaxColumns is the most columns of a [Sheet].
	MaxColumns = 60
	maxCell    = 500     // bytes of a cell that are shown
	maxRows    = 400_000 // rows that are counted
)

// A Sheet is a part of a table.
type Sheet struct {
	Head    []Cell   // the first row if it names the columns; else nil
	Rows    [][]Cell // further rows
	First   int      // number of the first of Rows in the file, from 1, without the head
	Total   int      // rows of the file, without the head
	Columns int      // of the widest row
}

// A Cell is one value of a table.
type Cell struct {
	Text    string // hostile
	Number  bool   // it is a number or an amount, which pages align to the right
	Formula bool   // a spreadsheet would evaluate it
	Cut     bool   // Text is only the beginning
}

// table shows the first rows of a table. It does not change f.Form if the text is not a table.
func (f *File) table(claimed, text string, rows int) {
	comma := separator(claimed, text)
	s, formulas, cut, err := readSheet(text, comma, 0, rows)
	if err != nil {
		f.note("it is not a well-formed table, so it is shown as text: %s", plain(err))
		return
	}
	f.Form, f.Rows = Table, s
	f.Facts = plural(s.Total, "row", "rows") + ", " + plural(s.Columns, "column", "columns")
	if formulas > 0 {
		// The attack: "=WEBSERVICE(...)" sends other cells away when the file is opened.
		f.note("a spreadsheet would evaluate %s as %s", plural(formulas, "cell", "cells"), strings.TrimPrefix(plural(formulas, "formula", "formulas"), strconv.Itoa(formulas)+" "))
	}
	if comma != ',' && claimed == "csv" {
		f.note("its columns are separated by %s", separatorName(comma))
	}
	if len(s.Rows) < s.Total {
		f.missing("rows 1 to %d of %d", len(s.Rows), s.Total)
	}
	if s.Columns > MaxColumns {
		f.missing("columns 1 to %d of %d", MaxColumns, s.Columns)
	}
	if cut {
		f.missing("long cells are cut after %d bytes", maxCell)
	}
}

// RowsOf returns at most most rows of a table, beginning with number first, counted from 1
// without the head. It returns an error if data is not a table.
func RowsOf(name, mediaType string, data []byte, first, most int) (Sheet, error) {
	if len(data) > maxRead {
		return Sheet{}, errors.New("the file is too large")
	}
	text := Plain(data)
	s, _, _, err := readSheet(text, separator(claim(name, mediaType), text), first-1, most)
	return s, err
}

// separator returns the separator of the columns: the candidate that is most frequent in
// the first line.
func separator(claimed, text string) rune {
	head, _, _ := strings.Cut(text, "\n")
	best := ','
	if claimed == "tsv" {
		best = '\t'
	}
	for _, c := range ",;\t|" {
		if strings.Count(head, string(c)) > strings.Count(head, string(best)) {
			best = c
		}
	}
	return best
}

func separatorName(c rune) string {
	switch c {
	case '\t':
		return "tabs"
	case ';':
		return "semicolons"
	case '|':
		return "bars"
	}
	return "commas"
}

// readSheet reads the table in text. It skips rows, and then keeps at most most of them. It
// counts the formulas of all rows, and reports whether it cut a kept cell.
func readSheet(text string, comma rune, skip, most int) (s Sheet, formulas int, cut bool, err error) {
	r := csv.NewReader(strings.NewReader(text))
	r.Comma, r.FieldsPerRecord, r.ReuseRecord = comma, -1, true
	var first []Cell
	for n := 0; ; n++ {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return s, 0, false, err
		}
		if n > maxRows {
			return s, 0, false, errors.New("it has too many rows")
		}
		s.Columns = max(s.Columns, len(row))
		for _, text := range row {
			if formula(text) {
				formulas++
			}
		}
		switch {
		case n == 0:
			first, cut = cells(row)
		case n > skip && len(s.Rows) < most:
			one, c := cells(row)
			s.Rows, cut = append(s.Rows, one), cut || c
		}
		s.Total++
	}
	if s.Total == 0 {
		return s, 0, false, errors.New("it has no rows")
	}
	s.First = skip + 1
	if s.Head = first; names(first) {
		s.Total--
		return s, formulas, cut, nil
	}
	// Without a head, the first row counts, and stands with the others.
	s.Head = nil
	if skip == 0 {
		s.Rows = append([][]Cell{first}, s.Rows...)
		s.Rows = s.Rows[:min(len(s.Rows), max(most, 1))]
		return s, formulas, cut, nil
	}
	return readWithoutHead(text, comma, skip, most)
}

// readWithoutHead reads a later part of a table whose first row is no head.
func readWithoutHead(text string, comma rune, skip, most int) (s Sheet, formulas int, cut bool, err error) {
	// One empty line in front would be skipped by the reader: a row that names the columns
	// makes the numbers fit.
	s, formulas, cut, err = readSheet("a\n"+text, comma, skip, most)
	s.Head = nil
	return s, formulas, cut, err
}

// cells returns a row as it is shown, and whether any of it was cut.
func cells(row []string) (out []Cell, cut bool) {
	out = make([]Cell, 0, min(len(row), MaxColumns))
	for _, text := range row[:min(len(row), MaxColumns)] {
		c := Cell{Number: numeric(text), Formula: formula(text)}
		if c.Text = strings.Clone(text); len(text) > maxCell {
			c.Text, c.Cut, cut = strings.ToValidUTF8(strings.Clone(text[:maxCell]), ""), true, true
		}
		out = append(out, c)
	}
	return out, cut
}

// names reports whether a row names columns: no cell is empty, a number or a formula.
func names(row []Cell) bool {
	for _, c := range row {
		if c.Number || c.Formula || c.Text == "" || len(c.Text) > 80 {
			return false
		}
	}
	return len(row) > 0
}

// numeric reports whether text is a number in a form for people: "-4,180.00", "12 %",
// "1 200". Empty text is not.
func numeric(text string) bool {
	text = strings.TrimSpace(text)
	digits := 0
	for i, r := range text {
		switch {
		case r >= '0' && r <= '9':
			digits++
		case strings.ContainsRune(".,'\u00a0\u202f ", r) && i > 0, (r == '-' || r == '+' || r == '\u2212') && i == 0, r == '%' && i == len(text)-1, (r == '€' || r == '$' || r == '£'):
		default:
			return false
		}
	}
	return digits > 0 && digits <= 24
}

// formula reports whether a spreadsheet evaluates text. The signs are those of OWASP's
// list. A number with a sign is not a formula.
func formula(text string) bool {
	t := strings.TrimLeft(text, " \"\u00a0")
	if t == "" || !strings.ContainsRune("=+-@\t\r\uff1d\uff0b\uff0d\uff20", firstRune(t)) {
		return false
	}
	return !numeric(t) && strings.Trim(t, "-+ \t\r\n") != ""
}

func firstRune(s string) rune {
	r, _ := utf8.DecodeRuneInString(s)
	return r
}

// plain returns an error of the CSV reader in words for people.
func plain(err error) string {
	if p, ok := errors.AsType[*csv.ParseError](err); ok {
		return "line " + strconv.Itoa(p.Line) + " has a misplaced quotation mark"
	}
	return err.Error()
}
