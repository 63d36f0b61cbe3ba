package preview

import (
	"bytes"
	"encoding/binary"
)

// The two tags of the first directory of Exif that matter to a reviewer.
const (
	tagOrientation = 0x0112
	tagGPS         = 0x8825
)

// jpegSegments are the segments of a JPEG file before its pixels.
func jpegSegments(data []byte) func(yield func(marker byte, body []byte) bool) {
	return func(yield func(byte, []byte) bool) {
		for at := 2; at+4 <= len(data) && data[at] == 0xff; {
			marker := data[at+1]
			if marker == 0xff { // padding
				at++
				continue
			}
			n := int(binary.BigEndian.Uint16(data[at+2:]))
			if marker == 0xda || n < 2 || at+2+n > len(data) || !yield(marker, data[at+4:at+2+n]) {
				return
			}
			at += 2 + n
		}
	}
}

// exif returns the TIFF structure of a picture's Exif data, or nil.
func exif(data []byte) []byte {
	switch {
	case bytes.HasPrefix(data, []byte("\xff\xd8\xff")):
		for marker, body := range jpegSegments(data) {
			if marker == 0xe1 && bytes.HasPrefix(body, []byte("Exif\x00\x00")) {
				return body[6:]
			}
		}
	case bytes.HasPrefix(data, []byte("\x89PNG")):
		for kind, body := range pngChunks(data) {
			if kind == "eXIf" {
				return body
			}
		}
	case isWebP(data):
		for kind, body := range webpChunks(data) {
			if kind == "EXIF" {
				return bytes.TrimPrefix(body, []byte("Exif\x00\x00"))
			}
		}
	}
	return nil
}

// exifTag returns a tag of the first directory as a short number.
func exifTag(data []byte, tag uint16) (value int, ok bool) {
	t := exif(data)
	if len(t) < 8 {
		return 0, false
	}
	var order binary.ByteOrder = binary.BigEndian
	if string(t[:2]) == "II" {
		order = binary.LittleEndian
	}
	at := int(order.Uint32(t[4:]))
	if at < 8 || at+2 > len(t) {
		return 0, false
	}
	n := int(order.Uint16(t[at:]))
	for i := range n {
		e := at + 2 + 12*i
		if e+12 > len(t) {
			break
		}
		if order.Uint16(t[e:]) == tag {
			return int(order.Uint16(t[e+8:])), true
		}
	}
	return 0, false
}

// orientation returns the Exif orientation of a picture, 1 to 8.
func orientation(data []byte) int {
	if v, ok := exifTag(data, tagOrientation); ok && v >= 1 && v <= 8 && bytes.HasPrefix(data, []byte("\xff\xd8")) {
		return v // programs turn JPEG alone
	}
	return 1
}

// gps reports whether a picture says where it was taken.
func gps(data []byte) bool {
	_, ok := exifTag(data, tagGPS)
	return ok
}
