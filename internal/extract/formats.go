package extract

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"encoding/binary"
	"slices"
)

// A kind says how files of a format are treated.
type kind int

const (
	kindNone   kind = iota // unknown
	kindPacked             // unpacked and read
	kindSealed             // known, but cannot be read
	kindMedia              // pictures, sound, films and fonts: parsed, but their content is not read
)

// A format is a file format that is known by its first bytes.
type format struct {
	kind   kind
	magic  string
	at     int // where the magic is
	name   string
	reason Reason                            // of kindSealed
	read   func(*Walker, Place, []byte)      // of kindPacked
	end    func(data []byte) (int, [][]byte) // of kindMedia: where it ends and what in it is of any format; -1 if it does not
}

// recognize returns the format of data by its first bytes.
func (w *Walker) recognize(data []byte) format {
	for _, f := range w.formats {
		if len(data) >= f.at+len(f.magic) && string(data[f.at:f.at+len(f.magic)]) == f.magic {
			return f
		}
	}
	switch {
	case tarHeader(data):
		return format{kind: kindPacked, read: (*Walker).tar}
	case len(data) > 8 && data[0]&0x0f == 8 && data[0]>>4 <= 7 && binary.BigEndian.Uint16(data)%31 == 0 && data[1]&0x20 == 0 && zlibbed(data):
		return format{kind: kindPacked, read: (*Walker).zlib}
	case skippable(data):
		return format{kind: kindPacked, read: (*Walker).zstd}
	}
	if f, ok := asn1Format(data); ok {
		return f
	}
	return openPGP(data)
}

// carve returns the offset of the first archive in data, or -1.
func carve(data []byte) int {
	first := -1
	for _, magic := range []string{"PK\x03\x04", "\x1f\x8b\x08", "\xfd7zXZ\x00", "\x28\xb5\x2f\xfd", "7z\xbc\xaf\x27\x1c", "Rar!\x1a\x07", "BZh91AY&SY"} {
		if i := bytes.Index(data, []byte(magic)); i >= 0 {
			first, data = i, data[:i]
		}
	}
	return first
}

// keyDER says whether data is a private key in DER: PKCS #8, PKCS #1 or SEC 1.
func keyDER(data []byte) bool {
	if len(data) < 32 || len(data) > 64<<10 || data[0] != 0x30 {
		return false
	}
	if _, err := x509.ParsePKCS8PrivateKey(data); err == nil {
		return true
	}
	if _, err := x509.ParsePKCS1PrivateKey(data); err == nil {
		return true
	}
	_, err := x509.ParseECPrivateKey(data)
	return err == nil
}

// formatTable returns the formats with a magic number.
func formatTable() []format {
	const (
		packed = "a packed format that the scan cannot read"
		media  = kindMedia
	)
	return []format{
		{kind: kindPacked, magic: "PK\x03\x04", read: (*Walker).zip},
		{kind: kindPacked, magic: "PK\x05\x06", read: (*Walker).zip},
		{kind: kindPacked, magic: "\x1f\x8b\x08", read: (*Walker).gzip},
		{kind: kindPacked, magic: "BZh", read: (*Walker).bzip2},
		{kind: kindPacked, magic: "\xfd7zXZ\x00", read: (*Walker).xz},
		{kind: kindPacked, magic: "\x28\xb5\x2f\xfd", read: (*Walker).zstd},
		{kind: kindPacked, magic: "%PDF-", read: (*Walker).pdf},
		{kind: kindSealed, magic: "7z\xbc\xaf\x27\x1c", reason: Packed, name: "7z, " + packed},
		{kind: kindSealed, magic: "Rar!\x1a\x07", reason: Packed, name: "RAR, " + packed},
		{kind: kindSealed, magic: "\x04\x22\x4d\x18", reason: Packed, name: "LZ4, " + packed},
		{kind: kindSealed, magic: "MSCF\x00", reason: Packed, name: "CAB, " + packed},
		{kind: kindSealed, magic: "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", reason: Packed, name: "an Office file from before 2007, in which only plain text is read"},
		{kind: kindSealed, magic: "age-encryption.org/v1\n", reason: Encrypted, name: "encrypted with age"},
		{kind: kindSealed, magic: "Salted__", reason: Encrypted, name: "encrypted with openssl enc"},
		{kind: kindSealed, magic: "\x03\xd9\xa2\x9a", reason: Encrypted, name: "a KeePass file"},
		{kind: media, magic: "\x89PNG\r\n\x1a\n", name: "picture", end: endPNG},
		{kind: media, magic: "\xff\xd8\xff", name: "picture", end: endJPEG},
		{kind: media, magic: "GIF87a", name: "picture", end: endGIF},
		{kind: media, magic: "GIF89a", name: "picture", end: endGIF},
		{kind: media, magic: "RIFF", name: "picture, sound or film", end: endRIFF},
		{kind: media, magic: "ftyp", at: 4, name: "picture, sound or film", end: endBoxes},
		{kind: media, magic: "OggS", name: "sound or film", end: endOgg},
		{kind: media, magic: "wOFF", name: "font", end: endAtLength(8)},
		{kind: media, magic: "wOF2", name: "font", end: endAtLength(8)},
	}
}

// media reads the comments and extensions of a file, but not its pixels or
// samples. Data after the end of the file is read as a file of its own. The
// attack: an archive appended to a picture, which every viewer still shows.
func (w *Walker) media(p Place, f format, data []byte) {
	w.visitor.Media(p, "a "+f.name)
	end, within := f.end(data)
	if end < 0 || end > len(data) {
		w.visitor.Unread(p, Damaged, "a "+f.name+" that is incomplete or malformed")
		return
	}
	for _, part := range within {
		w.Bytes(p.in("a comment or an extension"), part)
	}
	w.behind(p, data[end:])
}

// behind reads the data after the end of a file, except padding.
func (w *Walker) behind(p Place, rest []byte) {
	if rest = bytes.TrimLeft(rest, "\x00\r\n"); len(rest) > 0 {
		w.Bytes(p.in("the data after its end"), rest)
	}
}

// endPNG walks the chunks of a PNG file (W3C PNG, section 5).
func endPNG(data []byte) (end int, within [][]byte) {
	known := []string{
		"IHDR", "PLTE", "IDAT", "IEND", "tRNS", "cHRM", "gAMA", "iCCP", "sBIT", "sRGB", "bKGD", "hIST", "pHYs", "sPLT", "tIME", "eXIf", "acTL", "fcTL", "fdAT", "cICP", "mDCV", "cLLI",
	}
	for at := 8; at+12 <= len(data); {
		n, kind := int(binary.BigEndian.Uint32(data[at:])), string(data[at+4:at+8])
		if n > len(data)-at-12 {
			return -1, nil
		}
		body := data[at+8 : at+8+n]
		at += 12 + n
		switch {
		case kind == "IEND":
			return at, within
		case kind == "tEXt" || kind == "zTXt" || kind == "iTXt":
			within = append(within, textPNG(kind, body))
		case !slices.Contains(known, kind):
			within = append(within, body)
		}
	}
	return -1, nil
}

// textPNG returns the text of a chunk, which may be compressed. It follows a
// keyword, and in iTXt two bytes, a language and a translated keyword as well.
func textPNG(kind string, body []byte) []byte {
	_, rest, _ := bytes.Cut(body, []byte{0})
	switch {
	case kind == "zTXt" && len(rest) > 1:
		return rest[1:]
	case kind == "iTXt" && len(rest) > 2:
		_, rest, _ = bytes.Cut(rest[2:], []byte{0})
		_, rest, _ = bytes.Cut(rest, []byte{0})
	}
	return rest
}

// endJPEG walks the segments of a JPEG file (ITU T.81, annex B).
func endJPEG(data []byte) (end int, within [][]byte) {
	for at := 2; at+2 <= len(data); {
		if data[at] != 0xff {
			return -1, nil
		}
		m := data[at+1]
		at += 2
		switch {
		case m == 0xff:
			at--
			continue
		case m == 0xd9:
			return at, within
		case m == 0x01 || m >= 0xd0 && m <= 0xd7:
			continue
		}
		if at+2 > len(data) {
			return -1, nil
		}
		n := int(binary.BigEndian.Uint16(data[at:]))
		if n < 2 || n > len(data)-at {
			return -1, nil
		}
		body := data[at+2 : at+n]
		at += n
		known := false
		for _, head := range []string{"JFIF\x00", "JFXX\x00", "Exif\x00", "http://ns.adobe.com/", "ICC_PROFILE\x00", "MPF\x00", "Photoshop 3.0\x00", "Adobe"} {
			known = known || bytes.HasPrefix(body, []byte(head))
		}
		if (m >= 0xe0 && m <= 0xef || m == 0xfe) && !known {
			within = append(within, body)
		}
		if m == 0xda { // entropy-coded octets, to the next marker
			for at+1 < len(data) && (data[at] != 0xff || data[at+1] == 0 || data[at+1] >= 0xd0 && data[at+1] <= 0xd7) {
				at++
			}
		}
	}
	return -1, nil
}

// endGIF walks the blocks of a GIF file (GIF89a specification).
func endGIF(data []byte) (end int, within [][]byte) {
	if len(data) < 13 {
		return -1, nil
	}
	table := func(flags byte) int {
		if flags&0x80 == 0 {
			return 0
		}
		return 3 << (flags&7 + 1)
	}
	blocks := func(at int) (to int, content []byte) {
		for at < len(data) {
			n := int(data[at])
			if n == 0 {
				return at + 1, content
			}
			if at+1+n > len(data) {
				break
			}
			content = append(content, data[at+1:at+1+n]...)
			at += 1 + n
		}
		return -1, nil
	}
	for at := 13 + table(data[10]); at >= 0 && at < len(data); {
		switch data[at] {
		case 0x3b:
			return at + 1, within
		case 0x21:
			if at+2 > len(data) {
				return -1, nil
			}
			label := data[at+1]
			to, content := blocks(at + 2)
			loop := bytes.HasPrefix(content, []byte("NETSCAPE2.0")) && len(content) <= 16
			if label != 0xf9 && !loop || label == 0xf9 && len(content) > 4 {
				within = append(within, content)
			}
			at = to
		case 0x2c:
			if at+10 >= len(data) {
				return -1, nil
			}
			at, _ = blocks(at + 10 + table(data[at+9]) + 1)
		default:
			return -1, nil
		}
	}
	return -1, nil
}

// endRIFF reads the length of a RIFF file: WebP, WAVE, AVI.
func endRIFF(data []byte) (end int, within [][]byte) {
	if len(data) < 12 || !slices.Contains([]string{"WEBP", "WAVE", "AVI "}, string(data[8:12])) {
		return -1, nil
	}
	end = 8 + int(binary.LittleEndian.Uint32(data[4:]))
	for at := 12; at+8 <= min(end, len(data)); {
		n := int(binary.LittleEndian.Uint32(data[at+4:]))
		if n > len(data)-at-8 {
			return -1, nil
		}
		switch string(data[at : at+4]) {
		case "VP8 ", "VP8L", "VP8X", "ANIM", "ANMF", "ALPH", "ICCP", "EXIF", "XMP ", "fmt ", "data", "fact", "LIST", "idx1", "cue ", "smpl":
		default:
			within = append(within, data[at+8:at+8+n])
		}
		at += 8 + n + n&1
	}
	return end, within
}

// endBoxes walks the boxes of an ISO base media file: MP4, MOV, HEIC, AVIF.
func endBoxes(data []byte) (end int, within [][]byte) {
	at := 0
	for at+8 <= len(data) {
		n, head := int(binary.BigEndian.Uint32(data[at:])), 8
		if n == 1 && at+16 <= len(data) {
			n, head = int(binary.BigEndian.Uint64(data[at+8:])), 16
		}
		kind := string(data[at+4 : at+8])
		if n < head || n > len(data)-at {
			break
		}
		switch kind {
		case "ftyp", "moov", "mdat", "meta", "moof", "mfra", "sidx", "styp", "pdin", "ssix", "emsg":
		case "free", "skip", "wide", "uuid":
			within = append(within, bytes.Trim(data[at+head:at+n], "\x00"))
		default:
			return at, within
		}
		at += n
	}
	if at == 0 {
		return -1, nil
	}
	return at, within
}

// endOgg walks the pages of an Ogg file (RFC 3533, section 6).
func endOgg(data []byte) (end int, within [][]byte) {
	at := 0
	for at+27 <= len(data) && string(data[at:at+4]) == "OggS" {
		n := int(data[at+26])
		size := 27 + n
		if at+size > len(data) {
			return -1, nil
		}
		for _, lace := range data[at+27 : at+27+n] {
			size += int(lace)
		}
		if at += size; at > len(data) {
			return -1, nil
		}
	}
	return at, nil
}

// endAtLength reads the length of a file from four bytes at an offset.
func endAtLength(place int) func([]byte) (int, [][]byte) {
	return func(data []byte) (int, [][]byte) {
		if len(data) < place+4 {
			return -1, nil
		}
		return int(binary.BigEndian.Uint32(data[place:])), nil
	}
}

// asn1Format recognizes certificates, public keys and CMS messages (RFC 5652) in
// DER.
func asn1Format(data []byte) (format, bool) {
	if len(data) < 16 || data[0] != 0x30 {
		return format{}, false
	}
	var v asn1.RawValue
	rest, err := asn1.Unmarshal(data, &v)
	if err != nil || len(rest) > 0 {
		return format{}, false
	}
	_, err = x509.ParseCertificate(data)
	if err != nil {
		_, err = x509.ParsePKIXPublicKey(data)
	}
	if err == nil {
		return format{kind: kindPacked, read: func(*Walker, Place, []byte) {}}, true
	}
	var oid asn1.ObjectIdentifier
	if _, err := asn1.Unmarshal(v.Bytes, &oid); err != nil {
		return format{}, false
	}
	switch oid.String() {
	case "1.2.840.113549.1.7.2": // signed: what is signed stands in it as it is
		return format{kind: kindPacked, read: func(*Walker, Place, []byte) {}}, true
	case "1.2.840.113549.1.7.3", "1.2.840.113549.1.9.16.1.23":
		return format{kind: kindSealed, reason: Encrypted, name: "encrypted for S/MIME"}, true
	}
	return format{}, false
}

// openPGP recognizes binary OpenPGP (RFC 9580) by its packets. Public keys and
// signatures are harmless, private keys are reported, everything else cannot be
// read.
func openPGP(data []byte) format {
	if len(data) < 8 || data[0]&0x80 == 0 {
		return format{}
	}
	public, private, closed, n := true, false, false, 0
	for at := 0; at < len(data); n++ {
		tag, body, next := pgpPacket(data, at)
		if next < 0 {
			return format{}
		}
		// Data that begins with a packet of unknown length could be anything.
		if at == 0 && next == len(data) && (data[0]&0x43 == 3 || data[0]&0x40 != 0 && data[1] >= 224 && data[1] < 255) {
			return format{}
		}
		switch tag {
		case 5, 7:
			private = true
		case 2, 6, 14, 13, 12, 17:
		case 1, 3, 8, 9, 11, 18, 20:
			public, closed = false, true
		default:
			return format{}
		}
		// Most packets begin with a version number, which must be a known one.
		if len(body) == 0 || slices.Contains([]int{2, 5, 6, 7, 14}, tag) && (body[0] < 2 || body[0] > 6) || tag == 1 && body[0] != 3 && body[0] != 6 {
			return format{}
		}
		at = next
	}
	switch {
	case private:
		return format{kind: kindPacked, read: func(w *Walker, p Place, _ []byte) {
			w.visitor.PrivateKey(p, "of OpenPGP")
		}}
	case closed:
		return format{kind: kindSealed, reason: Encrypted, name: "an OpenPGP message, encrypted or packed"}
	case public && n > 0:
		return format{kind: kindPacked, read: func(*Walker, Place, []byte) {}}
	}
	return format{}
}

// pgpPacket parses the packet at an offset (RFC 9580, section 4.2). next is -1 if
// there is none.
func pgpPacket(data []byte, at int) (tag int, body []byte, next int) {
	head := data[at]
	if head&0x80 == 0 || at+2 > len(data) {
		return 0, nil, -1
	}
	var n, size int
	if head&0x40 == 0 {
		tag = int(head >> 2 & 0x0f)
		switch head & 3 {
		case 0:
			n, size = int(data[at+1]), 2
		case 1:
			if at+3 > len(data) {
				return 0, nil, -1
			}
			n, size = int(binary.BigEndian.Uint16(data[at+1:])), 3
		case 2:
			if at+5 > len(data) {
				return 0, nil, -1
			}
			n, size = int(binary.BigEndian.Uint32(data[at+1:])), 5
		default:
			n, size = len(data)-at-1, 1
		}
	} else {
		tag = int(head & 0x3f)
		switch l := int(data[at+1]); {
		case l < 192:
			n, size = l, 2
		case l < 224:
			if at+3 > len(data) {
				return 0, nil, -1
			}
			n, size = (l-192)<<8+int(data[at+2])+192, 3
		case l == 255:
			if at+6 > len(data) {
				return 0, nil, -1
			}
			n, size = int(binary.BigEndian.Uint32(data[at+2:])), 6
		default: // in pieces: only messages are
			n, size = len(data)-at-2, 2
		}
	}
	if n > len(data)-at-size {
		return 0, nil, -1
	}
	return tag, data[at+size : at+size+n], at + size + n
}
