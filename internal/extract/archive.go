package extract

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"cmp"
	"compress/bzip2"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz/lzma"
)

// member counts one more file of an archive. If there are too many it reports p
// as unread and returns false.
func (w *Walker) member(p Place) bool {
	if w.members++; w.members > MaxMembers {
		w.visitor.Unread(p, TooLarge, fmt.Sprintf("more than %d files in archives", MaxMembers))
		return false
	}
	return true
}

// unpack reads all of r, a decompressor. The attack: a few kilobytes that become
// gigabytes. Data beyond the budget of the walk is reported as unread, and so is
// a damaged stream, whose beginning is returned.
func (w *Walker) unpack(p Place, r io.Reader) (data []byte, whole bool) {
	data, err := io.ReadAll(io.LimitReader(r, int64(w.unpacked)+1))
	if len(data) > w.unpacked {
		w.visitor.Unread(p, TooLarge, fmt.Sprintf("more than %d MiB unpacked", MaxUnpacked>>20))
		data, err = data[:w.unpacked], io.ErrShortBuffer
	} else if err != nil {
		w.visitor.Unread(p, Damaged, "cannot be unpacked to its end")
	}
	w.unpacked -= len(data)
	return data, err == nil
}

// zipEnd returns the offset of the end-of-central-directory record of a ZIP
// archive, which is in the last 65,557 bytes, or -1.
func zipEnd(data []byte) int {
	from := max(0, len(data)-22-0xffff)
	if i := bytes.LastIndex(data[from:], []byte("PK\x05\x06")); i >= 0 && from+i+22 <= len(data) {
		return from + i
	}
	return -1
}

// A byteRange is a part of some data.
type byteRange struct{ from, to int }

// zip reads a ZIP archive: the files of its directory, and the data before,
// between and after them. The attack: two directories, a file that no directory
// lists, or different names in the directory and in the local header.
func (w *Walker) zip(p Place, data []byte) {
	z, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) {
		w.visitor.Unread(p, Damaged, "a ZIP archive that cannot be read")
		return
	}
	var taken []byteRange
	for _, f := range z.File {
		if !w.member(p) {
			return
		}
		q := p.in(f.Name)
		w.fileName(q, f.Name)
		at, err := f.DataOffset()
		if err != nil || at < 0 || at > int64(len(data)) || f.CompressedSize64 > uint64(len(data))-uint64(at) {
			w.visitor.Unread(q, Damaged, "a file that is not where its archive says")
			continue
		}
		taken = append(taken, byteRange{int(at), int(at) + int(f.CompressedSize64)})
		packed := data[at : at+int64(f.CompressedSize64)]
		switch {
		case f.Flags&1 != 0:
			w.visitor.Unread(q, Encrypted, "encrypted in its archive")
		case f.Method == zip.Store:
			w.Bytes(q, packed)
		case f.Method == zip.Deflate:
			if !w.spend(q, 64<<10) {
				return
			}
			// Without package zip's reader, which fails on a wrong checksum: a damaged file
			// is read as far as possible, and reported.
			r := bytes.NewReader(packed)
			text, whole := w.unpack(q, flate.NewReader(r))
			if whole && (uint64(len(text)) != f.UncompressedSize64 || r.Len() > 0) {
				w.visitor.Unread(q, Damaged, "a file of another size than its archive says")
			}
			if r.Len() > 0 {
				w.Bytes(q.in("the data after it"), packed[len(packed)-r.Len():])
			}
			w.Bytes(q, text)
		default:
			w.visitor.Unread(q, Packed, fmt.Sprintf("packed by method %d, which the scan cannot read", f.Method))
		}
	}
	w.between(p, data, taken, len(z.File))
}

// between reads the data of a ZIP archive that belongs to no file. Headers and
// the directory account for a known number of bytes; anything beyond is surplus.
func (w *Walker) between(p Place, data []byte, taken []byteRange, files int) {
	slices.SortFunc(taken, func(a, b byteRange) int { return cmp.Compare(a.from, b.from) })
	at, outside := 0, 0
	gap := func(to int) {
		if to <= at {
			return
		}
		g := data[at:to]
		outside += len(g)
		// Nothing precedes the first local header, except a self-extracting program.
		if at == 0 {
			if i := bytes.Index(g, []byte("PK")); i > 0 {
				w.Bytes(p.in("the data before the archive"), g[:i])
				outside -= i
			}
		}
	}
	for _, t := range taken {
		if t.from < at {
			w.visitor.Unread(p, Damaged, "a ZIP archive whose files overlap")
		}
		gap(t.from)
		at = max(at, t.to)
	}
	gap(len(data))
	names := 0
	end := zipEnd(data)
	if end >= 0 {
		comment := data[end+22:]
		if len(comment) > 0 {
			w.Bytes(p.in("the archive's comment"), comment)
		}
		names = 22 + len(comment)
	}
	// 30 bytes of local header, 46 in the directory, up to 24 of sizes, 76 for the end
	// of a ZIP64 archive; and the names, twice, with times and owners.
	if z, err := zip.NewReader(bytes.NewReader(data), int64(len(data))); err == nil || errors.Is(err, zip.ErrInsecurePath) {
		for _, f := range z.File {
			names += 2*len(f.Name) + 2*len(f.Extra) + len(f.Comment) + 40
			if len(f.Extra) > 100 {
				w.Bytes(p.in("the extra field of "+f.Name), f.Extra)
			}
			if f.Comment != "" {
				w.Bytes(p.in("the comment of "+f.Name), []byte(f.Comment))
			}
		}
	}
	if outside > names+100*files+76 {
		w.visitor.Unread(p, Surplus, fmt.Sprintf("%d bytes that belong to no file of the archive", outside-names-100*files))
	}
}

// gzip reads gzip streams, one behind the other (RFC 1952).
func (w *Walker) gzip(p Place, data []byte) {
	r := bytes.NewReader(data)
	z, err := gzip.NewReader(r)
	for n := 0; ; n++ {
		switch {
		case err != nil && n == 0:
			w.visitor.Unread(p, Damaged, "a gzip file that cannot be read")
			return
		case err != nil: // behind the last one
			w.behind(p, data[len(data)-r.Len():])
			return
		case !w.member(p) || !w.spend(p, 64<<10):
			return
		}
		z.Multistream(false)
		w.Bytes(p.in("its name"), []byte(z.Name))
		w.Bytes(p.in("its comment"), []byte(z.Comment))
		w.Bytes(p.in("its extra field"), z.Extra)
		q := p
		q.Depth++
		out, whole := w.unpack(q, z)
		w.Bytes(q, out)
		if !whole {
			return
		}
		before := r.Len()
		if before == 0 {
			return
		}
		if err = z.Reset(r); err != nil { // it has read some of what it did not know
			_, _ = r.Seek(int64(len(data)-before), io.SeekStart)
		}
	}
}

// zlibbed says whether data begins with a zlib stream that unpacks to something.
func zlibbed(data []byte) bool {
	z, err := zlib.NewReader(bytes.NewReader(data))
	if err != nil {
		return false
	}
	n, err := io.CopyN(io.Discard, z, 64)
	return n == 64 || n > 0 && errors.Is(err, io.EOF)
}

// zlib reads a zlib stream (RFC 1950).
func (w *Walker) zlib(p Place, data []byte) {
	r := bytes.NewReader(data)
	z, err := zlib.NewReader(r)
	if err != nil || !w.spend(p, 64<<10) {
		w.visitor.Unread(p, Damaged, "a zlib stream that cannot be read")
		return
	}
	q := p
	q.Depth++
	out, whole := w.unpack(q, z)
	w.Bytes(q, out)
	if whole {
		w.behind(p, data[len(data)-r.Len():])
	}
}

// bzip2 reads bzip2 streams.
func (w *Walker) bzip2(p Place, data []byte) {
	if !w.member(p) || !w.spend(p, 1<<20) { // what its blocks take
		return
	}
	q := p
	q.Depth++
	out, _ := w.unpack(q, bzip2.NewReader(bytes.NewReader(data)))
	w.Bytes(q, out)
}

// xz reads XZ streams block by block (the .xz file format 1.2.1). The attack: a
// block header that declares a dictionary of 4 GiB, which readers allocate at
// once. Here the dictionary is limited to the budget that is left.
func (w *Walker) xz(p Place, data []byte) {
	bad := func() { w.visitor.Unread(p, Damaged, "an XZ file that cannot be read to its end") }
	checks := []int{0, 4, 4, 4, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64}
	for at := 0; at < len(data); {
		if len(data) < 12 { // less than one stream header
			bad()
			return
		}
		if len(data)-at < 12 || string(data[at:at+6]) != "\xfd7zXZ\x00" {
			w.behind(p, data[at:])
			return
		}
		check := checks[data[at+7]&0x0f]
		at += 12
		for at < len(data) && data[at] != 0 {
			size := (int(data[at]) + 1) * 4
			// One filter, LZMA2, with or without the two sizes.
			if size < 8 || size > len(data)-at {
				bad()
				return
			}
			head := data[at : at+size-4]
			i := 2
			for _, bit := range []byte{0x40, 0x80} {
				if head[1]&bit != 0 {
					_, n := binary.Uvarint(head[min(i, len(head)):])
					i += max(n, 1)
				}
			}
			if head[1]&0x03 != 0 || i+3 > len(head) || head[i] != 0x21 || head[i+1] != 1 || head[i+2] > 40 {
				w.visitor.Unread(p, Packed, "an XZ file with a filter that the scan cannot read")
				return
			}
			dict, err := lzma.DecodeDictCap(head[i+2])
			dict = min(dict, int64(max(w.unpacked, lzma.MinDictCap)))
			if err != nil || !w.member(p) || !w.spend(p, int(dict/8)) {
				bad()
				return
			}
			r := bytes.NewReader(data[at+size:])
			z, err := lzma.Reader2Config{DictCap: int(dict)}.NewReader2(r)
			if err != nil {
				bad()
				return
			}
			q := p
			q.Depth++
			out, whole := w.unpack(q, z)
			w.Bytes(q, out)
			if !whole {
				return
			}
			used := len(data) - at - size - r.Len()
			at += size + (used+3)&^3 + check
		}
		// The index and the footer, which hold numbers only.
		end := bytes.Index(data[min(at, len(data)):], []byte("YZ"))
		for end >= 0 && (at+end+2)%4 != 0 {
			next := bytes.Index(data[at+end+1:], []byte("YZ"))
			if next < 0 {
				end = -1
				break
			}
			end += 1 + next
		}
		if end < 0 || end > 64+w.members*20 {
			bad()
			return
		}
		at += end + 2
		for at+4 <= len(data) && binary.LittleEndian.Uint32(data[at:]) == 0 {
			at += 4
		}
	}
}

// skippable says whether data begins with a skippable frame (RFC 8878, section
// 3.1.2), which Zstandard decoders ignore.
func skippable(data []byte) bool {
	return len(data) >= 8 && binary.LittleEndian.Uint32(data)&^0x0f == 0x184d2a50
}

// zstd reads Zstandard frames (RFC 8878), skippable ones included.
func (w *Walker) zstd(p Place, data []byte) {
	for len(data) > 0 {
		if skippable(data) {
			n := int(binary.LittleEndian.Uint32(data[4:]))
			if n > len(data)-8 {
				w.visitor.Unread(p, Damaged, "a Zstandard frame that is incomplete")
				return
			}
			w.Bytes(p.in("a frame that programs skip"), data[8:8+n])
			data = data[8+n:]
			continue
		}
		if len(data) < 4 || binary.LittleEndian.Uint32(data) != 0xfd2fb528 {
			w.behind(p, data)
			return
		}
		n := zstdFrame(data)
		var h zstd.Header
		if n < 0 || h.Decode(data) != nil || h.WindowSize > MaxUnpacked {
			w.visitor.Unread(p, Damaged, "a Zstandard frame that is incomplete, or takes too much to unpack")
			return
		}
		if !w.member(p) || !w.spend(p, 256<<10+int(h.WindowSize/8)) {
			return
		}
		z, err := zstd.NewReader(bytes.NewReader(data[:n]), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(MaxUnpacked))
		if err != nil {
			w.visitor.Unread(p, Damaged, "a Zstandard frame that cannot be read")
			return
		}
		q := p
		q.Depth++
		out, _ := w.unpack(q, z)
		z.Close()
		w.Bytes(q, out)
		data = data[n:]
	}
}

// zstdFrame returns the length of the frame at the beginning of data, or -1.
func zstdFrame(data []byte) int {
	if len(data) < 6 {
		return -1
	}
	d := data[4]
	at := 5 + []int{0, 1, 2, 4}[d&3]
	single := d&0x20 != 0
	if !single {
		at++
	}
	if size := d >> 6; size > 0 || single {
		at += 1 << size
	}
	for at+3 <= len(data) {
		h := int(data[at]) | int(data[at+1])<<8 | int(data[at+2])<<16
		at += 3
		if n := h >> 3; h>>1&3 == 1 {
			at++
		} else {
			at += n
		}
		if h&1 != 0 {
			if d&4 != 0 {
				at += 4
			}
			if at > len(data) {
				return -1
			}
			return at
		}
	}
	return -1
}

// tarHeader says whether data begins with a tar header. All variants of tar have
// its checksum.
func tarHeader(data []byte) bool {
	if len(data) < 512 {
		return false
	}
	sum := 8 * int(' ')
	for i, c := range data[:512] {
		if i < 148 || i >= 156 {
			sum += int(c)
		}
	}
	got, digits := 0, 0
	for _, c := range data[148:156] {
		if c >= '0' && c <= '7' {
			got, digits = got*8+int(c-'0'), digits+1
		}
	}
	return digits > 0 && got == sum && data[0] != 0
}

// tar reads a tar archive: its files, their PAX records, their padding, and the
// data after the end.
func (w *Walker) tar(p Place, data []byte) {
	r := bytes.NewReader(data)
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			if err != io.EOF {
				w.visitor.Unread(p, Damaged, "a tar archive that is incomplete")
			}
			break
		}
		if !w.member(p) {
			return
		}
		w.fileName(p.in(h.Name), h.Name)
		for _, k := range slices.Sorted(maps.Keys(h.PAXRecords)) {
			w.Bytes(p.in("the record "+k+" of "+h.Name), []byte(h.PAXRecords[k]))
		}
		out, whole := w.unpack(p.in(h.Name), t)
		w.Bytes(p.in(h.Name), out)
		if !whole {
			return
		}
		at := len(data) - r.Len()
		if fill := bytes.Trim(data[at:min(len(data), (at+511)&^511)], "\x00"); len(fill) > 0 {
			w.Bytes(p.in("the padding of "+h.Name), fill)
		}
	}
	w.behind(p, data[len(data)-r.Len():])
}

// fileName reports the name of a file, and reads it.
func (w *Walker) fileName(p Place, name string) {
	w.visitor.FileName(p, name)
	// The attack: empty files whose names are the message.
	p.Where, p.IDs = "the name of "+p.Where, true
	w.Text(p, strings.ToValidUTF8(name, "\ufffd"))
}
