package preview

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"
	"strings"

	"postern/internal/extract"
)

// A Document describes a PDF file.
type Document struct {
	Pages int // 0 if it is not known
}

const (
	maxPDF    = 8 << 20 // bytes of a PDF file that is read, and of what is unpacked from it
	maxPieces = 200     // of the text that pages show
)

// pdfActs are the names in a PDF file that make it do something, each with a description.
// Programs that open the file may do it without asking.
func pdfActs() []struct{ name, does string } {
	return []struct{ name, does string }{
		{"JavaScript", "it has a script"},
		{"JS", "it has a script"},
		{"Launch", "it may start a program"},
		{"OpenAction", "it does something when it is opened"},
		{"AA", "it does something when it is viewed"},
		{"EmbeddedFile", "it has files within it"},
		{"EmbeddedFiles", "it has files within it"},
		{"AcroForm", "it has a form"},
		{"XFA", "it has a form"},
		{"SubmitForm", "it has a form that sends what is filled in"},
		{"ImportData", "it takes in another file"},
		{"GoToR", "it leads to another file"},
		{"RichMedia", "it has audio or video"},
	}
}

// A finder collects the text that a walk through a file finds.
type finder struct {
	pages   []string // what pages show
	inside  []string // the unpacked streams
	reasons []string
	media   int
	size    int
	more    bool // there was more than is looked through
}

var _ extract.Visitor = (*finder)(nil)

func (f *finder) Characters(extract.Place, string) {}
func (f *finder) Words(extract.Place, string)      {}

// Text keeps the text of a page. It returns "", so that base64 in the text is not decoded:
// people do not read that.
func (f *finder) Text(at extract.Place, text string) string {
	switch f.size += len(text); {
	case f.size > maxPDF:
		f.more = true
	case at.How == "pieces of text":
		f.pages = append(f.pages, text)
	case at.How == "" && at.Depth == 1:
		f.inside = append(f.inside, text)
	}
	return ""
}
func (f *finder) FileName(extract.Place, string) {}
func (f *finder) Media(extract.Place, string)    { f.media++ }
func (f *finder) PrivateKey(_ extract.Place, form string) {
	f.reasons = append(f.reasons, "a private key "+form)
}

func (f *finder) Unread(_ extract.Place, _ extract.Reason, why string) {
	if !slices.Contains(f.reasons, why) && len(f.reasons) < 5 {
		f.reasons = append(f.reasons, why)
	}
}

// pdf shows the text of a PDF file, and what it would do.
func (f *File) pdf(data []byte) {
	if len(data) > maxPDF {
		f.missing("the PDF file is larger than %d MiB, so nothing of it is shown", maxPDF>>20)
		return
	}
	f.Form = PDF
	var found finder
	extract.NewWalker(len(data), &found).Bytes(extract.Place{}, data)
	names := pdfNames(data)
	for _, s := range found.inside { // objects may be packed in streams
		for name, n := range pdfNames([]byte(s)) {
			names[name] += n
		}
	}
	f.Document.Pages = names["Type/Page"]
	if f.Facts = "PDF"; f.Document.Pages > 0 {
		f.Facts += ", " + plural(f.Document.Pages, "page", "pages")
	}
	for _, a := range pdfActs() {
		if names[a.name] > 0 && !slices.Contains(f.Notes, a.does) {
			f.note("%s", a.does)
		}
	}
	if n := names["URI"]; n > 0 {
		f.note("it has %s", plural((n+1)/2, "link", "links"))
	}
	f.Text = strings.TrimSpace(best(found.pages[:min(len(found.pages), maxPieces)]))
	f.missing("only the text is shown, neither its layout nor its pictures, which may contain text")
	if found.more {
		// The attack: a script behind eight megabytes of nothing.
		f.missing("only %d MiB of what is packed in it were looked through, so it may do more than is said here", maxPDF>>20)
	}
	if len(found.pages) > maxPieces {
		f.missing("only the first %d pieces of its text are shown", maxPieces)
	}
	if f.Text == "" {
		f.missing("no text was found in it: its pages may be pictures")
	}
	if len(f.Text) > MaxText {
		f.Text = strings.ToValidUTF8(f.Text[:MaxText], "")
		f.missing("only the beginning of the text is shown")
	}
	for _, why := range found.reasons {
		f.missing("not read: %s", why)
	}
}

// best returns the text of pages. The walker reads a page once for each font that it may
// use. Of several readings, the one with the most letters is right.
func best(pages []string) string {
	letters := func(s string) (n int) {
		for _, r := range s {
			if extract.Letter(r) || r >= '0' && r <= '9' { // a page may be an account's number alone
				n++
			}
		}
		return n
	}
	var kept []string
	for _, p := range pages {
		p = strings.TrimSpace(extract.DropUnseen(p))
		if n := letters(p); n > 0 && n*3 >= len([]rune(p)) {
			kept = append(kept, p)
		}
	}
	if len(kept) == 0 && len(pages) > 0 {
		return slices.MaxFunc(pages, func(a, b string) int { return cmp.Compare(letters(a), letters(b)) })
	}
	return strings.Join(kept, "\n\n")
}

// pdfNames counts those names of a PDF file that somebody asks for, with what is written in
// escapes (ISO 32000-1, section 7.3.5). The attacks: "/J#61vaScript" is a script all the
// same; a hundred thousand other names before it. "Type/Page" counts the pages.
func pdfNames(data []byte) map[string]int {
	out := map[string]int{"URI": 0}
	for _, a := range pdfActs() {
		out[a.name] = 0
	}
	last := ""
	for at := 0; ; {
		i := bytes.IndexByte(data[at:], '/')
		if i < 0 {
			break
		}
		between := data[at : at+i]
		at += i + 1
		end := at
		for end < len(data) && end-at < 200 && !bytes.ContainsRune([]byte("\x00\t\n\f\r ()<>[]{}/%"), rune(data[end])) {
			end++
		}
		name := unescapeName(string(data[at:end]))
		at = end
		if _, ok := out[name]; ok {
			out[name]++
		}
		if last == "Type" && name == "Page" && len(bytes.TrimSpace(between)) == 0 {
			out["Type/Page"]++
		}
		last = name
	}
	return out
}

func unescapeName(s string) string {
	if !strings.Contains(s, "#") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '#' && i+2 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(n))
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
