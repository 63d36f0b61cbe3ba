// Package extract gets the text out of anything: archives, documents, pictures,
// encodings, the source of a mail message, HTML. Package scan reads mail that
// arrives through it, package leak what leaves.
//
// All input may be hostile. A [Walker] reads every byte it is given, and reports
// what it cannot read instead of passing over it: an attacker who knows the
// formats hides data between them. Time and memory are linear in the input, and
// bounded.
//
// It is pure: no I/O, no state. It must not judge what a text says.
package extract

import (
	"cmp"
	"crypto/sha256"
	"fmt"
)

// The limits of one walk. Whatever lies beyond a limit is reported to
// [Visitor.Unread].
const (
	MaxUnpacked  = 64 << 20 // bytes, of all archives and compressed streams together
	baseReads    = 64 << 20 // bytes of text, counted once for each form in which it is read
	readsPerByte = 8        // further bytes of text for each byte of input
	MaxMembers   = 5000     // members of archives and streams of PDF files
	MaxLayers    = 8        // archives and encodings within each other
)

// A Reason says why something could not be read, for programs.
type Reason string

// The reasons.
const (
	UnknownFormat Reason = "unknown_format" // neither text nor a known format
	Packed        Reason = "packed"         // a known compression that this package does not implement
	Encrypted     Reason = "encrypted"
	HighEntropy   Reason = "high_entropy" // looks encrypted or compressed
	Damaged       Reason = "damaged"      // ends too early, or contradicts itself
	Surplus       Reason = "surplus"      // bytes that belong to no member of their archive
	TooLarge      Reason = "too_large"    // beyond maxUnpacked, maxMembers or the reads of this walk
	TooDeep       Reason = "too_deep"     // beyond maxLayers
	Glyphs        Reason = "glyphs"       // a PDF file whose glyph numbers have no table
)

// A Visitor receives what a [Walker] finds. The walker calls it from one
// goroutine, in the order of the input; the same bytes at the same place are
// reported once.
type Visitor interface {
	// Characters receives a text as it was written, if it has characters beyond
	// ASCII, before those without width are dropped from it.
	Characters(at Place, text string)
	// Text receives a whole text and returns what of it the walker decodes
	// further. A visitor cuts out what it has recognized, such as an armored key,
	// which would otherwise be reported again as unreadable data.
	Text(at Place, text string) string
	// Words receives the same text without the runs that were decoded: in base64,
	// chance produces the most curious words.
	Words(at Place, text string)
	// FileName receives the name of a file or of a member of an archive. The walker
	// then reads the name as a text, too.
	FileName(at Place, name string)
	// Unread receives what could not be read; why is for people.
	Unread(at Place, reason Reason, why string)
	// Media receives pictures, sound, films and fonts, whose content is not read.
	Media(at Place, what string)
	// PrivateKey receives a private key in a binary format; form is for people.
	PrivateKey(at Place, form string)
}

// A Place says where a text stands and how the walker got there.
type Place struct {
	Where  string // for reviewers: "the file a.zip, in it b.txt"
	How    string // encodings, the outermost first: "base64, then percent encoding"
	Depth  int    // archives and encodings around it
	Source bool   // the source of a message, whose parts are read separately as well
	IDs    bool   // identifiers, such as a Message-ID, whose digits mean nothing
	Binary bool   // printable runs in binary data: most of what they spell is chance
	final  bool   // decoded from such a run, so no further encoding is undone: its signs are chance, too
}

// in returns the place of the member name of p.
func (p Place) in(name string) Place {
	p.Where += ", in it " + name
	p.Depth++
	return p
}

// written returns the place of what p decodes to.
func (p Place) written(how string) Place {
	if p.How != "" {
		how = p.How + ", then " + how
	}
	p.How = how
	p.Depth++
	return p
}

// A Walker reads data in whatever format and encoding it is, and reports to its
// visitor each text that it comes to. One walker serves one message or one
// file: its limits and its memory of what it has read hold for all that it is
// given. It is not safe for concurrent use.
type Walker struct {
	visitor   Visitor
	formats   []format
	encodings []encoding

	read     map[string]bool // digests of what was read
	members  int             // of archives, so far
	left     int             // bytes of text that may still be read
	unpacked int             // bytes that may still be unpacked
}

// NewWalker returns a walker for an input of size bytes in all.
func NewWalker(size int, v Visitor) *Walker {
	return &Walker{
		visitor: v, formats: formatTable(), encodings: encodings(),
		read: map[string]bool{}, left: baseReads + readsPerByte*size, unpacked: MaxUnpacked,
	}
}

// File reads a file: its name, and what is in it.
func (w *Walker) File(name string, data []byte) {
	p := Place{Where: "the file " + cmp.Or(name, "without a name")}
	w.fileName(p, name)
	w.Bytes(p, data)
}

// spend takes n bytes from the budget of this walk. If less is left it reports p
// as unread and returns false.
func (w *Walker) spend(p Place, n int) bool {
	if w.left < n {
		w.left = 0
		w.visitor.Unread(p, TooLarge, "more than the scan reads of one message")
		return false
	}
	w.left -= n
	return true
}

// fresh says whether data was not read before. Each file of a message comes
// twice: as a part, and in the source.
func (w *Walker) fresh(kind string, data []byte) bool {
	h := sha256.New()
	h.Write([]byte(kind))
	h.Write(data)
	key := string(h.Sum(nil))
	if w.read[key] {
		return false
	}
	w.read[key] = true
	return true
}

// Bytes reads data in whatever format it is. Each byte is read at least as the
// text that it may be. Data that is neither text nor, to its last byte, in a known
// format is reported as unread: a list of dangerous formats would have gaps.
func (w *Walker) Bytes(p Place, data []byte) {
	if len(data) == 0 || !w.fresh("", data) {
		return
	}
	p.Binary, p.final = false, false
	if p.Depth > MaxLayers {
		w.visitor.Unread(p, TooDeep, fmt.Sprintf("more than %d archives and encodings within each other", MaxLayers))
		return
	}
	if !w.spend(p, len(data)) {
		return
	}
	switch format := w.recognize(data); format.kind {
	case kindPacked:
		w.strings(p, data)
		format.read(w, p, data)
	case kindSealed:
		w.strings(p, data)
		w.visitor.Unread(p, format.reason, format.name)
	case kindMedia:
		w.strings(p, data)
		w.media(p, format, data)
	default:
		w.unknown(p, data)
	}
}

// unknown reads data without a known magic number: text in some charset, text
// with an archive behind it, or an unknown format.
func (w *Walker) unknown(p Place, data []byte) {
	if i := zipEnd(data); i >= 0 {
		// The attack: an archive appended to a text or a picture. Unpackers look for the
		// directory of a ZIP file at its end.
		w.strings(p, data)
		w.zip(p, data)
		return
	}
	if text, ok := wide(data); ok {
		w.Text(p, text)
		return
	}
	odd := binaryBlock(data)
	if odd < 0 {
		w.legacy(p, data)
		w.Text(p, string(data))
		return
	}
	w.strings(p, data)
	if keyDER(data) {
		w.visitor.PrivateKey(p, "in DER, without armor")
		return
	}
	// A text with an archive behind it, such as a self-extracting script.
	if i := carve(data); i > 0 && i <= odd+noiseBlock {
		w.Bytes(p, data[:i])
		q := p.in(fmt.Sprintf("the data at byte %d", i))
		w.Bytes(q, data[i:])
		return
	}
	w.visitor.Unread(p, UnknownFormat, "neither text nor a known format")
}
