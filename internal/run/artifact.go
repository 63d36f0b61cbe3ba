package run

import (
	"bytes"
	"crypto/sha256"
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"postern/internal/contract"
	"postern/internal/extract"
	"postern/internal/leak"
)

const (
	maxArtifacts     = 100       // files of one run
	maxArtifact      = 64 << 20  // bytes of one file, whatever the contract says, because it is read into memory
	maxArtifactBytes = 256 << 20 // bytes of all files of one run
	defaultArtifact  = 16 << 20  // bytes, where the contract has no size
	maxArtifactPath  = 512       // bytes of a path; the attack: names of 4 KiB, which no page can show
	maxFindings      = 40        // that are kept for one file
)

// The types of artifacts in contracts; see [contract.Artifact].
const (
	typeAny      = "any"
	typeCSV      = "csv"
	typeMarkdown = "markdown"
)

// The flags of this package, in addition to those of package leak.
const (
	flagProgram = "program" // machine code or a script, where any type is allowed
	flagType    = "type"    // the content is not of the promised type; never released
)

// shownPath returns a path for people, for records and for the statement: unchanged if
// all its characters are visible, else escaped as in Go. Different paths stay
// different. The attacks: line breaks, invalid UTF-8 and bidirectional controls in
// names that a person approves.
func shownPath(p string) string {
	plain := utf8.ValidString(p) && !strings.ContainsFunc(p, func(r rune) bool {
		return r == '\\' || r == utf8.RuneError || !unicode.IsGraphic(r) || extract.Unseen(r) || unicode.Is(unicode.Zs, r) && r != ' '
	})
	if plain {
		return p
	}
	q := strconv.QuoteToASCII(p)
	return q[1 : len(q)-1]
}

// downloadName returns a file name that is safe on every system: the base name of p,
// with only letters, digits, dots, dashes and underscores.
func downloadName(p string, n int) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '-', r == '_':
			return r
		}
		return '_'
	}, path.Base(strings.ToValidUTF8(p, "_")))
	// A name that begins with a dot is hidden, and one that begins with a dash is taken
	// for an option.
	if name = strings.TrimLeft(name, ".-"); strings.Trim(name, "._-") == "" {
		return "artifact-" + strconv.Itoa(n)
	}
	if most := 100; len(name) > most {
		ext := path.Ext(name)
		if len(ext) > 12 {
			ext = ""
		}
		name = name[:most-len(ext)] + ext
	}
	// Windows opens devices under these names, with any extension.
	stem, _, _ := strings.Cut(strings.ToLower(name), ".")
	if slices.Contains([]string{"con", "prn", "aux", "nul"}, stem) || len(stem) == 4 && (strings.HasPrefix(stem, "com") || strings.HasPrefix(stem, "lpt")) && stem[3] >= '0' && stem[3] <= '9' {
		name = "_" + name
	}
	return name
}

// mediaType returns the media type of a download for a promised type. It is never one
// that a browser would execute.
func mediaType(promised string) string {
	switch promised {
	case typeCSV:
		return "text/csv; charset=utf-8"
	case extract.TypeJSON:
		return "application/json"
	case extract.TypePNG:
		return "image/png"
	case extract.TypeJPEG:
		return "image/jpeg"
	case extract.TypePDF:
		return "application/pdf"
	case extract.TypeText, typeMarkdown, extract.TypeHTML:
		return "text/plain; charset=utf-8"
	}
	return "application/octet-stream"
}

// fits compares data with the type that a contract promises. It returns the type of the
// content and, if the two differ, why.
func fits(promised string, data []byte) (found, why string) {
	found = extract.Sniff(data)
	no := func() (string, string) {
		return found, fmt.Sprintf("the contract promises %s, but the content is %s", promised, article(found))
	}
	isText := found == extract.TypeText || found == extract.TypeHTML || found == extract.TypeJSON
	switch promised {
	case typeAny:
		return found, ""
	case extract.TypeText, typeMarkdown:
		if !isText && found != extract.TypeEmpty {
			return no()
		}
	case typeCSV:
		// A lenient parser reads a JSON value, or an HTML page, as a table of one column.
		if found != extract.TypeText {
			return no()
		}
		if err := table(data); err != nil {
			return found, "the contract promises csv, but the content is not a table: " + err.Error()
		}
		return typeCSV, ""
	default:
		if found != promised {
			return no()
		}
	}
	return found, ""
}

// article returns the name of a type for use in a sentence.
func article(found string) string {
	switch found {
	case extract.TypeEmpty:
		return "empty"
	case extract.TypeProgram:
		return "a program"
	case extract.TypeScript:
		return "a script"
	case extract.TypePacked:
		return "a packed file"
	case extract.TypeBinary:
		return "binary data of an unknown type, or followed by other data"
	}
	return found
}

// table returns an error unless data is a table whose rows have the same number of
// fields, separated by comma, semicolon or tab.
func table(data []byte) error {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	head, _, _ := bytes.Cut(data, []byte("\n"))
	comma, most := ',', 0
	for _, c := range ",;\t" {
		if n := bytes.Count(head, []byte(string(c))); n > most {
			comma, most = c, n
		}
	}
	r := csv.NewReader(bytes.NewReader(data))
	r.Comma, r.ReuseRecord = comma, true
	for rows := 0; ; rows++ {
		_, err := r.Read()
		switch {
		case errors.Is(err, io.EOF) && rows == 0:
			return errors.New("it has no row")
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// A scanned is the result of scanning a file that may leave.
type scanned struct {
	found    string // its type by content
	refused  string // why it never leaves; else empty
	flags    []string
	findings []string // for people, bounded, secrets masked
}

// sentinel matches the placeholders of secrets in sandboxes.
var sentinel = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`pst_[a-z2-7]{40}`) })

// scan checks a file as an attachment is checked before mail leaves.
func scan(a contract.Artifact, name string, data []byte) scanned {
	var s scanned
	found, why := fits(a.Type, data)
	if s.found = found; why != "" {
		s.refused, s.flags, s.findings = why, []string{flagType}, []string{why}
		return s
	}
	report := leak.Find(leak.Message{Files: []leak.File{{Name: name, Data: data}}})
	for _, f := range report.Flags {
		s.flags = append(s.flags, string(f))
	}
	for _, f := range report.Findings {
		s.findings = append(s.findings, f.String())
	}
	if found == extract.TypeProgram || found == extract.TypeScript {
		s.flags = append(s.flags, flagProgram)
		s.findings = append(s.findings, "it is "+article(found))
	}
	// Package leak finds placeholders in texts. Look for them in all other files as
	// well.
	if sentinel().Match(data) && !slices.Contains(s.flags, string(leak.FlagSecret)) {
		s.flags = append(s.flags, string(leak.FlagSecret))
		s.findings = append(s.findings, "it contains the placeholder of a secret")
	}
	s.findings = s.findings[:min(len(s.findings), maxFindings)]
	return s
}

// readAll reads a file of at most most bytes, and returns its digest. It returns an
// error that wraps [errTooLarge] if the file is larger. The size in a listing is no
// bound: the sandbox claims it, and can change the file afterwards.
func readAll(r io.Reader, most int64) (data []byte, sum string, err error) {
	data, err = io.ReadAll(io.LimitReader(r, most+1))
	switch {
	case err != nil:
		return nil, "", err
	case int64(len(data)) > most:
		return nil, "", errTooLarge
	}
	d := sha256.Sum256(data)
	return data, hex.EncodeToString(d[:]), nil
}

var errTooLarge = errors.New("larger than the contract allows")

// export is the payload of an action of kind [policy.KindExport], which people approve.
// It is made from the artifact's row alone, so that each download can compare the row
// with what was approved.
type export struct {
	Run      string   `json:"run"`
	N        int64    `json:"n"`
	Contract string   `json:"contract"` // name and digest: "report@sha256:…"
	Sandbox  string   `json:"sandbox"`
	Path     string   `json:"path"` // escaped
	Name     string   `json:"name"`
	Type     string   `json:"type"`
	Found    string   `json:"found"`
	Size     int64    `json:"size"`
	SHA256   string   `json:"sha256"`
	Blob     string   `json:"blob"` // where this server keeps the bytes
	Review   string   `json:"review"`
	Violated bool     `json:"violated"`
	Flags    []string `json:"flags"`
	Findings []string `json:"findings"`
}

func (e export) bytes() ([]byte, error) {
	b, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("write artifact: %w", err)
	}
	return b, nil
}

const (
	shownText = 64 << 10 // bytes of a text that a reviewer sees without opening the file
	shownRows = 200      // of a table
)

// preview returns the beginning of a file as text for a reviewer, and whether that is
// the whole file. The text is empty if the file is not text.
func preview(promised, found string, data []byte) (text string, whole bool) {
	switch found {
	case typeCSV, extract.TypeText, extract.TypeHTML, extract.TypeJSON:
	default:
		return "", false
	}
	if found == typeCSV {
		if t, all, ok := aligned(data); ok {
			return t, all
		}
	}
	if found == extract.TypeJSON && promised == extract.TypeJSON && len(data) <= shownText {
		var b bytes.Buffer
		if json.Indent(&b, data, "", "  ") == nil && b.Len() <= 4*shownText {
			return extract.Visible(b.String()), true
		}
	}
	if len(data) > shownText {
		return extract.Visible(strings.ToValidUTF8(extract.Cut(string(data), shownText), "")), false
	}
	return extract.Visible(string(data)), true
}

// aligned returns a table with aligned columns. If it cannot be shown so, ok is false.
func aligned(data []byte) (text string, whole, ok bool) {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	head, _, _ := bytes.Cut(data, []byte("\n"))
	r := csv.NewReader(bytes.NewReader(data))
	for _, c := range ";\t" {
		if bytes.Count(head, []byte(string(c))) > bytes.Count(head, []byte(string(r.Comma))) {
			r.Comma = c
		}
	}
	var rows [][]string
	var widths []int
	size := 0
	whole = true
	for {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || len(row) > 100 {
			return "", false, false
		}
		if len(rows) >= shownRows || size > shownText {
			whole = false
			break
		}
		for i, cell := range row {
			c := extract.Visible(strings.ReplaceAll(cell, "\n", "↵"))
			if size += len(c); len(c) > 200 { // a longer cell would hide those beside it
				return "", false, false
			}
			if i >= len(widths) {
				widths = append(widths, 0)
			}
			row[i], widths[i] = c, max(widths[i], utf8.RuneCountInString(c))
		}
		rows = append(rows, row)
	}
	var b strings.Builder
	for _, row := range rows {
		for i, c := range row {
			if i > 0 {
				b.WriteString("  ")
			}
			b.WriteString(c)
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c)))
			}
		}
		b.WriteString("\n")
	}
	return b.String(), whole, true
}
