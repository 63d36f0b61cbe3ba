package guest

import (
	"bytes"
	"crypto/sha1" //nolint:gosec // the format's checksum
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf16"
)

// JKS is Java's own format of key stores: a header, entries, and a checksum that is
// keyed with a password. For the store of trusted certificates the password is
// "changeit" everywhere, and Java does not even check it there.

// jksAlias is the name of our entry.
const jksAlias = "postern"

const (
	jksMagic      = 0xfeedfeed
	jksVersion    = 2
	jksTrusted    = 2 // tag of an entry that is a trusted certificate
	jksPassword   = "changeit"
	maxJKSEntries = 10_000
)

// A jksEntry is a trusted certificate of a store.
type jksEntry struct {
	alias string // in Java's modified UTF-8
	raw   []byte // the whole entry, from its tag
}

var errNotJKS = errors.New("it is not a key store in JKS")

// parseJKS parses a store of trusted certificates. The bytes are hostile.
func parseJKS(b []byte) ([]jksEntry, error) {
	if len(b) < 12+sha1.Size || binary.BigEndian.Uint32(b) != jksMagic {
		return nil, errNotJKS
	}
	body, sum := b[:len(b)-sha1.Size], b[len(b)-sha1.Size:]
	if !bytes.Equal(jksSum(body), sum) {
		return nil, errors.New("the checksum does not match: the key store is broken, or its password is not " + jksPassword)
	}
	count := binary.BigEndian.Uint32(body[8:])
	if v := binary.BigEndian.Uint32(body[4:]); v != jksVersion || count > maxJKSEntries {
		return nil, fmt.Errorf("key store of version %d with %d entries", v, count)
	}
	var list []jksEntry
	r := jksReader{rest: body[12:]}
	for range count {
		begin := r.rest
		tag := r.number(4)
		alias := r.take(r.number(2))
		r.take(8) // when it was made
		if tag != jksTrusted {
			return nil, fmt.Errorf("the key store has an entry of kind %d, not only certificates", tag)
		}
		r.take(r.number(2)) // the certificate's type
		r.take(r.number(4))
		if r.short {
			return nil, errors.New("the key store is cut off")
		}
		list = append(list, jksEntry{string(alias), begin[:len(begin)-len(r.rest)]})
	}
	if len(r.rest) > 0 {
		return nil, errors.New("the key store has more than its entries")
	}
	return list, nil
}

// A jksReader reads the fields of a store. After the end it returns nothing.
type jksReader struct {
	rest  []byte
	short bool // more was read than there is
}

func (r *jksReader) take(n uint64) []byte {
	if n > uint64(len(r.rest)) {
		r.rest, r.short = nil, true
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *jksReader) number(size uint64) uint64 {
	var n uint64
	for _, b := range r.take(size) {
		n = n<<8 | uint64(b)
	}
	return n
}

// certificateEntry returns the entry of a certificate in DER. The time is fixed, so
// that the same certificates make the same store.
func certificateEntry(alias string, der []byte) jksEntry {
	var b []byte
	b = binary.BigEndian.AppendUint32(b, jksTrusted)
	b = append(binary.BigEndian.AppendUint16(b, uint16(len(alias))), alias...)
	b = binary.BigEndian.AppendUint64(b, 1577836800_000) // 2020, in milliseconds
	b = append(binary.BigEndian.AppendUint16(b, uint16(len("X.509"))), "X.509"...)
	b = append(binary.BigEndian.AppendUint32(b, uint32(len(der))), der...)
	return jksEntry{alias, b}
}

// formatJKS returns the store of these entries.
func formatJKS(entries []jksEntry) []byte {
	var b []byte
	b = binary.BigEndian.AppendUint32(b, jksMagic)
	b = binary.BigEndian.AppendUint32(b, jksVersion)
	b = binary.BigEndian.AppendUint32(b, uint32(len(entries)))
	for _, e := range entries {
		b = append(b, e.raw...)
	}
	return append(b, jksSum(b)...)
}

// jksSum returns the checksum of a store.
func jksSum(b []byte) []byte {
	h := sha1.New() //nolint:gosec // the format's
	for _, c := range utf16.Encode([]rune(jksPassword)) {
		_, _ = h.Write([]byte{byte(c >> 8), byte(c)}) // never fails
	}
	_, _ = h.Write([]byte("Mighty Aphrodite"))
	_, _ = h.Write(b)
	return h.Sum(nil)
}
