package preview

import (
	"bytes"
	"encoding/binary"
)

// beside returns how many bytes of a picture are neither pixels nor needed to draw them:
// comments, metadata, colour profiles, chunks that no decoder reads, and data after the
// picture's end. The attack: a list of customers behind a logo.
func beside(data []byte) int {
	switch {
	case bytes.HasPrefix(data, []byte("\x89PNG")):
		return besidePNG(data)
	case bytes.HasPrefix(data, []byte("\xff\xd8\xff")):
		return besideJPEG(data)
	case bytes.HasPrefix(data, []byte("GIF8")):
		return besideGIF(data)
	case isWebP(data):
		return besideWebP(data)
	}
	return 0
}

// pngFixed are the chunks of a PNG file that hold a few numbers, with their largest size in
// bytes. IDAT and fdAT are pixels.
func pngFixed() map[string]int {
	return map[string]int{"IHDR": 13, "PLTE": 768, "IEND": 0, "tRNS": 256, "gAMA": 4, "cHRM": 32, "sRGB": 1, "pHYs": 9, "bKGD": 6, "sBIT": 4, "tIME": 7, "acTL": 8, "fcTL": 26}
}

func besidePNG(data []byte) (n int) {
	at, fixed := 8, pngFixed()
	for kind, body := range pngChunks(data) {
		at += 12 + len(body)
		if kind == "IDAT" || kind == "fdAT" {
			continue
		}
		if most, ok := fixed[kind]; !ok || len(body) > most {
			n += len(body)
		}
		if kind == "IEND" {
			break
		}
	}
	return n + max(0, len(data)-at)
}

func besideJPEG(data []byte) (n int) {
	at := 2
	for at+1 < len(data) {
		if data[at] != 0xff { // of the compressed pixels
			at++
			continue
		}
		switch marker := data[at+1]; {
		case marker == 0xff: // padding
			at++
		case marker == 0xd9:
			return n + len(data) - at - 2
		case marker == 0, marker == 1, marker >= 0xd0 && marker <= 0xd8: // nothing follows
			at += 2
		default:
			if at+4 > len(data) {
				return n
			}
			size := int(binary.BigEndian.Uint16(data[at+2:]))
			switch extra := size - 2; {
			case marker == 0xe0 && extra == 14 && bytes.HasPrefix(data[at+4:], []byte("JFIF\x00")):
			case marker == 0xee && extra == 12 && bytes.HasPrefix(data[at+4:], []byte("Adobe")):
			case marker >= 0xe0 && marker <= 0xef, marker == 0xfe:
				n += max(extra, 0)
			}
			at += 2 + max(size, 2)
		}
	}
	return n
}

func besideGIF(data []byte) (n int) {
	if len(data) < 13 {
		return 0
	}
	table := func(flags byte) int {
		if flags&0x80 == 0 {
			return 0
		}
		return 3 << (flags&7 + 1)
	}
	at := 13 + table(data[10])
	blocks := func() (size int) { // sub-blocks, the last of which is empty
		for at < len(data) && data[at] != 0 {
			size += int(data[at])
			at += 1 + int(data[at])
		}
		at++
		return size
	}
	for at < len(data) {
		switch data[at] {
		case 0x21:
			loop := at+14 <= len(data) && data[at+1] == 0xff && string(data[at+3:at+14]) == "NETSCAPE2.0"
			control := at+1 < len(data) && data[at+1] == 0xf9
			at += 2
			size := blocks()
			if (!loop || size > 14) && (!control || size > 4) {
				n += size
			}
		case 0x2c:
			if at+10 > len(data) {
				return n
			}
			at += 11 + table(data[at+9])
			blocks()
		case 0x3b:
			return n + len(data) - at - 1
		default: // decoders stop here
			return n + len(data) - at
		}
	}
	return n
}

// webpChunks are the chunks of a WebP file in turn, as far as they are whole.
func webpChunks(data []byte) func(yield func(kind string, body []byte) bool) {
	return func(yield func(string, []byte) bool) {
		for at := 12; at+8 <= len(data); {
			n := int(binary.LittleEndian.Uint32(data[at+4:]))
			if n > len(data)-at-8 || !yield(string(data[at:at+4]), data[at+8:at+8+n]) {
				return
			}
			at += 8 + n + n&1
		}
	}
}

func besideWebP(data []byte) (n int) {
	at := 12
	for kind, body := range webpChunks(data) {
		at += 8 + len(body) + len(body)&1
		switch kind {
		case "VP8 ", "VP8L", "ALPH", "ANMF":
		case "VP8X", "ANIM":
			if len(body) > 10 {
				n += len(body)
			}
		default:
			n += len(body)
		}
	}
	return n + max(0, len(data)-at)
}
