// Package preview reads a file that would leave, for a page that shows it to a
// reviewer: text, tables, pictures, calendars, PDF files, emails and archives.
//
// All input is hostile. A preview is plain data: text, numbers and pixels, never
// markup, and nothing in it runs or loads anything. The limits of bytes, rows, depth
// and time hold whatever the file claims. [File.Missing] lists what the preview
// leaves out, so that a reviewer never takes a part for the whole.
//
// It is pure: no I/O, no state. It must not judge the content of a file.
package preview

import (
	"fmt"
	"mime"
	"path/filepath"
	"strings"

	"postern/internal/extract"
)

// A Form is how a page shows a file.
type Form string

// The forms.
const (
	Nothing  Form = ""         // it cannot be shown
	Text     Form = "text"     // as text: source, logs, JSON, SVG
	Table    Form = "table"    // CSV and TSV
	Picture  Form = "picture"  // PNG, JPEG, GIF and WebP, through [Redraw]
	Page     Form = "page"     // HTML, for a frame without scripts, and as text
	Calendar Form = "calendar" // iCalendar
	PDF      Form = "pdf"      // its text
	Message  Form = "message"  // an email
	Archive  Form = "archive"  // the names of its files
)

// The limits of a preview on a page with others.
const (
	maxRead = 16 << 20 // bytes of a file; larger files are not read
	// MaxText is the most text of a preview, in bytes.
	MaxText = 16 << 10
	// MaxRows is the most rows of a table in a preview, including the head.
	MaxRows = 9
)

// A File is what a page shows of a file.
type File struct {
	Form Form
	// Facts is the size in terms of the form: "42 rows, 6 columns".
	Facts string
	// Notes are warnings for the reviewer, each a sentence without a full stop.
	Notes []string
	// Missing lists what is not shown, each a sentence without a full stop. It is empty if
	// the file is shown in full.
	Missing []string

	Text     string // of a text, a page, a PDF file or a message; the beginning if Missing says so
	Rows     Sheet
	Drawing  Image
	Events   Dates
	Document Document
	Mail     Letter
	Members  Listing
}

// Whole reports whether the preview shows all of the file.
func (f *File) Whole() bool { return f.Form != Nothing && len(f.Missing) == 0 }

func (f *File) note(format string, a ...any) { f.Notes = append(f.Notes, fmt.Sprintf(format, a...)) }

func (f *File) missing(format string, a ...any) {
	f.Missing = append(f.Missing, fmt.Sprintf(format, a...))
}

// Of returns the preview of a file. Its sender chose the name and the media type. They
// select the form only if the content fits. If name, type and content disagree, the preview
// has a note, because the recipient's programs may follow any of them.
func Of(name, mediaType string, data []byte) (f File) {
	if len(data) > maxRead {
		f.missing("the file is larger than %d MiB, so nothing of it is shown", maxRead>>20)
		return f
	}
	kind := extract.Sniff(data)
	claimed := claim(name, mediaType)
	disguise(&f, name, claimed, kind)
	switch kind {
	case extract.TypeEmpty:
		f.Form = Text
		f.note("the file is empty")
	case extract.TypePNG, extract.TypeJPEG, extract.TypeGIF:
		f.picture(data)
	case extract.TypeText, extract.TypeHTML, extract.TypeJSON, extract.TypeScript:
		f.written(kind, claimed, data)
	default:
		f.other(kind, claimed, data)
	}
	return f
}

// written shows UTF-8 text.
func (f *File) written(kind, claimed string, data []byte) {
	text := strings.TrimPrefix(string(data), "\ufeff")
	if claimed == "csv" || claimed == "tsv" {
		if f.table(claimed, text, MaxRows); f.Form == Table {
			return
		}
	}
	switch {
	case claimed == "ics", claimed == "" && strings.HasPrefix(text, "BEGIN:VCALENDAR"):
		f.calendar(text)
		return
	case claimed == "eml":
		if f.message([]byte(text)); f.Form == Message {
			return
		}
	}
	f.text(text)
	if kind == extract.TypeHTML && claimed != "svg" {
		f.Form = Page
	}
}

// other shows what is neither UTF-8 text nor a picture.
func (f *File) other(kind, claimed string, data []byte) {
	if claimed == "eml" { // not converted: an email names the charset of each of its parts
		if f.message(data); f.Form == Message {
			return
		}
	}
	if text, charset, ok := decoded(data); ok && kind == extract.TypeBinary {
		f.note("the text is not in UTF-8: it is shown as %s", charset)
		f.written(extract.TypeText, claimed, []byte(text))
		return
	}
	if isWebP(data) {
		f.picture(data)
		return
	}
	if kind == extract.TypePDF {
		f.pdf(data)
		return
	}
	if f.archive(data); f.Form == Archive {
		return
	}
	f.missing("nothing of it is shown: %s", kindNames(kind))
}

// kindNames describes data of a kind for people.
func kindNames(kind string) string {
	switch kind {
	case extract.TypeProgram:
		return "it is a program"
	case extract.TypePacked, extract.TypeZIP:
		return "it is an archive or compressed"
	case extract.TypeMedia:
		return "it is an image, audio, video or font of a format that the console cannot show"
	case extract.TypeParquet:
		return "it is a table in the format Parquet"
	}
	return "its format is not known"
}

// claim returns the format that a file's name or media type claims, as a short word, or "".
func claim(name, mediaType string) string {
	ext := strings.ToLower(strings.TrimPrefix(filepath.Ext(strings.TrimRight(name, " .")), "."))
	if word, ok := extensions(ext); ok {
		return word
	}
	media, _, err := mime.ParseMediaType(mediaType)
	if err != nil {
		media, _, _ = strings.Cut(strings.ToLower(mediaType), ";")
	}
	switch media = strings.TrimSpace(media); media {
	case "text/csv", "application/csv":
		return "csv"
	case "text/tab-separated-values":
		return "tsv"
	case "text/calendar", "application/ics":
		return "ics"
	case "image/svg+xml":
		return "svg"
	case "message/rfc822":
		return "eml"
	case "text/html", "application/xhtml+xml":
		return "html"
	case "application/pdf":
		return "pdf"
	case "image/png", "image/jpeg", "image/gif", "image/webp":
		return "picture"
	}
	return ""
}

// extensions returns the word for the extension of a file's name. The recipient's programs
// follow the extension before the media type.
func extensions(ext string) (string, bool) {
	switch ext {
	case "csv", "tsv", "svg", "eml", "pdf":
		return ext, true
	case "tab":
		return "tsv", true
	case "ics", "ifb", "ical", "vcs":
		return "ics", true
	case "htm", "html", "xhtml", "shtml":
		return "html", true
	case "png", "jpg", "jpeg", "gif", "webp":
		return "picture", true
	}
	return "", false
}

// programs are the extensions of files that a double click runs.
const programs = " exe com scr pif bat cmd msi msix ps1 vbs vbe js jse wsf wsh hta cpl jar lnk url reg app command sh bash desktop apk deb rpm dmg pkg iso img vhd chm scf inf "

// disguise notes where a file's name and its content disagree.
func disguise(f *File, name, claimed, kind string) {
	ext := strings.ToLower(strings.TrimPrefix(filepath.Ext(strings.TrimRight(name, " .")), "."))
	runs := ext != "" && strings.Contains(programs, " "+ext+" ")
	switch {
	case runs && strings.Count(strings.Trim(name, "."), ".") > 1:
		// The attack: "invoice.pdf.exe" reads as "invoice.pdf" where extensions are hidden.
		f.note("its name has two extensions, and a double click runs it as a program because of .%s", ext)
	case runs:
		f.note("a double click runs it as a program, because its name ends in .%s", ext)
	case kind == extract.TypeProgram:
		f.note("its content is a program, whatever its name says")
	case claimed == "picture" && kind != extract.TypePNG && kind != extract.TypeJPEG && kind != extract.TypeGIF && kind != extract.TypeMedia,
		claimed == "pdf" && kind != extract.TypePDF,
		(claimed == "csv" || claimed == "tsv" || claimed == "ics" || claimed == "svg") && (kind == extract.TypeZIP || kind == extract.TypePDF || kind == extract.TypePacked):
		f.note("its content is not what its name or type says")
	}
}
