package mail

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// checkWords returns an error unless all programs read the encoded words of a
// header's value in the same way: each is complete, has a charset that is the same
// everywhere, and decodes without a rest. Text that begins like an encoded word but
// is none is refused too: some program takes it for one.
func checkWords(v string) error {
	for i := strings.Index(v, "=?"); i >= 0 && i < len(v); {
		n, err := checkWord(v[i:])
		if err != nil {
			return fmt.Errorf("has the encoded word %s, which mail programs read differently: %w", quote(v[i:]), err)
		}
		if !spaced(v, i, i+n) {
			return fmt.Errorf("has the encoded word %s, which mail programs read differently: there is no space around it", quote(v[i:]))
		}
		next := strings.Index(v[i+n:], "=?")
		if next < 0 {
			break
		}
		i += n + next
	}
	if strings.Contains(v, "=?") && !isASCII(v) {
		return errors.New("mixes encoded words with non-ASCII letters, and some mail programs then decode none; encode all of them")
	}
	// The attack: encoded words that decode to encoded words, which a program that
	// decodes twice shows as something else.
	if strings.Contains(decodeWords(v), "=?") {
		return errors.New("decodes to what looks like an encoded word")
	}
	return nil
}

// spaced reports whether the encoded word v[from:to] stands where RFC 2047
// section 5 lets it: between spaces, the marks of a comment or a quoted string,
// or before an address.
func spaced(v string, from, to int) bool {
	return (from == 0 || strings.IndexByte(" \t(\",:", v[from-1]) >= 0) && (to == len(v) || strings.IndexByte(" \t)\",;<", v[to]) >= 0)
}

// checkWord returns the length of the encoded word that v begins with.
func checkWord(v string) (int, error) {
	parts := strings.SplitN(v[len("=?"):], "?", 4)
	if len(parts) < 4 || !strings.HasPrefix(parts[3], "=") {
		return 0, errors.New("it is incomplete")
	}
	label, kind, encoded := parts[0], strings.ToLower(parts[1]), parts[2]
	n := len("=?") + len(label) + len("?q?") + len(encoded) + len("?=")
	var octets []byte
	switch kind {
	case "b":
		var err error
		if octets, err = base64.StdEncoding.Strict().DecodeString(encoded); err != nil {
			return 0, errors.New("it is not proper base64")
		}
	case "q":
		for i := 0; i < len(encoded); i++ {
			switch c := encoded[i]; {
			case c == '_':
				octets = append(octets, ' ')
			case c <= ' ' || c >= 0x7f:
				return 0, errors.New("it has a character that is not encoded")
			case c != '=':
				octets = append(octets, c)
			case i+2 >= len(encoded):
				return 0, errors.New("it is cut off")
			default:
				x, err := strconv.ParseUint(encoded[i+1:i+3], 16, 8)
				if err != nil {
					return 0, errors.New("it has a = without two hexadecimal digits after it")
				}
				octets = append(octets, byte(x))
				i += 2
			}
		}
	default:
		return 0, errors.New("its encoding is neither B nor Q")
	}
	text, err := decodeCharset(label, octets)
	if err != nil {
		return 0, err
	}
	// The attack: UTF-8 under the name of ASCII, of which a reviewer is shown that
	// something cannot be read, and some recipient what it says.
	if seen, err := wordDecoder.Decode(v[:n]); err != nil || seen != text {
		return 0, fmt.Errorf("it is not in the charset %s that it names", quote(label))
	}
	if bytes.ContainsAny(octets, "\r\n\x00") {
		return 0, errors.New("it decodes to a line break or a NUL")
	}
	return n, nil
}
