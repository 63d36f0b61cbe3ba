package erofs

import (
	"encoding/binary"
	"hash/crc32"
	"os"
)

// ReadHead returns the parts of an image.
func ReadHead(f *os.File) ([]Digest, error) {
	h, err := readHead(f)
	return h.parts, err
}

// Checksum makes the checksum of an image right, so that the fuzzer gets past it.
func Checksum(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b[superAt+4:], 0)
	le.PutUint32(b[superAt+4:], ^crc32.Checksum(b[superAt:blockSize], crc32.MakeTable(crc32.Castagnoli)))
}
