package inspect

import (
	"encoding/binary"
	"io"
)

// A frameScan passes on what a program sends on a WebSocket, as it is, and has scan look
// at the payloads, which the program masks (RFC 6455 §5.3). A sentinel that is cut by a
// control frame, or compressed, is not noticed; it is text all the same.
type frameScan struct {
	r    io.Reader
	scan *sentinelScan

	head []byte  // the beginning of a frame's header
	left uint64  // bytes of the payload that have not come yet
	mask [4]byte // zero if the frame is not masked
	at   int     // position in mask
}

// Read implements [io.Reader].
func (f *frameScan) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	f.look(p[:n])
	return n, err
}

// look follows the frames in b.
func (f *frameScan) look(b []byte) {
	var plain [4096]byte
	for len(b) > 0 {
		if f.left == 0 {
			f.head = append(f.head, b[0])
			b = b[1:]
			f.begin()
			continue
		}
		n := int(min(f.left, uint64(len(b)), uint64(len(plain))))
		for i, c := range b[:n] {
			plain[i] = c ^ f.mask[(f.at+i)%4]
		}
		f.at, f.left, b = (f.at+n)%4, f.left-uint64(n), b[n:]
		f.scan.look(plain[:n])
	}
}

// begin begins a payload once the header is complete (RFC 6455 §5.2).
func (f *frameScan) begin() {
	h := f.head
	if len(h) < 2 {
		return
	}
	size, need := uint64(h[1]&0x7f), 2
	switch size {
	case 126:
		need += 2
	case 127:
		need += 8
	}
	masked := h[1]&0x80 != 0
	if masked {
		need += 4
	}
	if len(h) < need {
		return
	}
	switch size {
	case 126:
		size = uint64(binary.BigEndian.Uint16(h[2:]))
	case 127:
		size = binary.BigEndian.Uint64(h[2:])
	}
	f.mask, f.at, f.left = [4]byte{}, 0, size
	if masked {
		copy(f.mask[:], h[need-4:])
	}
	f.head = f.head[:0]
}
