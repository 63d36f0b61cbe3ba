// Package preview reads a file that would leave, for a page that shows it to a
// reviewer: as text, as rows, as a picture, as what a calendar, a PDF file, a
// message or an archive says.
//
// All input is hostile. A preview is plain data: text, numbers and pixels, never
// markup, and nothing in it runs or fetches. The limits of bytes, rows, depth and
// time hold whatever the file claims of itself. What the preview leaves out, it
// names in [File.Missing]: a reviewer must never take a part for the whole.
//
// It is pure: no I/O, no state. It must not judge what a file says.
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
	Message  Form = "message"  // a mail
	Archive  Form = "archive"  // the names of its files
)

// The limits of a preview that stands on a page with others.
const (
	maxRead = 16 << 20 // bytes of a file that is read at all; larger ones are not shown
	// MaxText is how much text a preview has, in bytes.
	MaxText = 16 << 10
	// MaxRows is how many rows of a table a preview has, the head among them.
	MaxRows = 9
)

// A File is what a page shows of a file.
type File struct {
	Form Form
	// Facts say how large it is, in the words of its form: "42 rows, 6 columns".
	Facts string
	// Notes are what a reviewer should know of it, each a sentence without a stop.
	Notes []string
	// Missing are what is not shown, each a sentence without a stop. The file is shown in
	// full if there are none.
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

// Of returns the preview of a file with a name and a media type that its sender chose.
// They select the form only where the content fits: a browser or a mail program goes by
// either of them, so where they disagree the preview says so.
func Of(name, mediaType string, data []byte) (f File) {
	if len(data) > maxRead {
		f.missing("the file has more than %d MiB, so nothing of it is shown", maxRead>>20)
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

// written shows what is text in UTF-8.
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

// other shows what is neither text in UTF-8 nor a picture.
func (f *File) other(kind, claimed string, data []byte) {
	if claimed == "eml" { // as it is: a mail names the charset of each of its parts
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

// kindNames says what data of a kind is.
func kindNames(kind string) string {
	switch kind {
	case extract.TypeProgram:
		return "it is a program"
	case extract.TypePacked, extract.TypeZIP:
		return "it is an archive or compressed"
	case extract.TypeMedia:
		return "it is a picture, a sound, a film or a font of a kind that is not drawn here"
	case extract.TypeParquet:
		return "it is a table in the format Parquet"
	}
	return "it is data of no kind that is known here"
}

// claim returns what a file's name or type says that it is, as a short word, or "".
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

// extensions returns the word for the ending of a file's name. Programs on the
// recipient's side go by that ending before they go by the media type.
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

// programs are endings with which a double click runs a file.
const programs = " exe com scr pif bat cmd msi msix ps1 vbs vbe js jse wsf wsh hta cpl jar lnk url reg app command sh bash desktop apk deb rpm dmg pkg iso img vhd chm scf inf "

// disguise notes where a file's name and its content disagree.
func disguise(f *File, name, claimed, kind string) {
	ext := strings.ToLower(strings.TrimPrefix(filepath.Ext(strings.TrimRight(name, " .")), "."))
	runs := ext != "" && strings.Contains(programs, " "+ext+" ")
	switch {
	case runs && strings.Count(strings.Trim(name, "."), ".") > 1:
		// The attack: "invoice.pdf.exe" reads as "invoice.pdf" where endings are hidden.
		f.note("its last ending, .%s, makes it a program where the name is double-clicked", ext)
	case runs:
		f.note("a double click on a file that ends in .%s runs it", ext)
	case kind == extract.TypeProgram:
		f.note("its content is a program, whatever its name says")
	case claimed == "picture" && kind != extract.TypePNG && kind != extract.TypeJPEG && kind != extract.TypeGIF && kind != extract.TypeMedia,
		claimed == "pdf" && kind != extract.TypePDF,
		(claimed == "csv" || claimed == "tsv" || claimed == "ics" || claimed == "svg") && (kind == extract.TypeZIP || kind == extract.TypePDF || kind == extract.TypePacked):
		f.note("its content is not what its name or type says")
	}
}
