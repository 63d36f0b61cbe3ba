package mail

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"mime"
	"strconv"
	"strings"
)

// wordDecoder decodes the words of addresses, each for itself.
var wordDecoder = &mime.WordDecoder{CharsetReader: func(label string, r io.Reader) (io.Reader, error) {
	decode, _ := charsetDecoder(label)
	if decode == nil {
		return nil, fmt.Errorf("unknown charset %q", label)
	}
	octets, err := io.ReadAll(r)
	return strings.NewReader(decode(octets)), err
}}

// A word is an encoded word of RFC 2047.
type word struct {
	label  string // the charset
	octets []byte
	length int // octets of the word as it is written
}

// maxWord is how many octets of an encoded word are read: RFC 2047 allows 75, and
// programs write whole subjects as one. The attack: a header of words that never end,
// each of which is looked for up to the end.
const maxWord = 16 << 10

// readWord returns the encoded word that s begins with, as leniently as mail programs
// read it, or a word of no length.
func readWord(s string) word {
	s = s[:min(len(s), maxWord)]
	label, rest, ok := strings.Cut(s[len("=?"):], "?")
	if !ok || len(rest) < 2 || rest[1] != '?' || label == "" || strings.ContainsAny(label, " \t") {
		return word{}
	}
	encoded, _, ok := strings.Cut(rest[2:], "?=")
	if !ok {
		return word{}
	}
	w := word{length: len("=?") + len(label) + len("?q?") + len(encoded) + len("?=")}
	w.label, _, _ = strings.Cut(strings.ToLower(label), "*") // a language may follow, RFC 2231 section 5
	switch rest[0] {
	case 'b', 'B':
		w.octets = looseBase64(encoded)
	case 'q', 'Q':
		w.octets = lenientQP([]byte(strings.ReplaceAll(encoded, "_", " ")))
	default:
		return word{}
	}
	return w
}

// looseBase64 decodes what of s is base64.
func looseBase64(s string) []byte {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '+' || r == '/' {
			return r
		}
		return -1
	}, s)
	if len(s)%4 == 1 { // a lone last character carries no whole octet
		s = s[:len(s)-1]
	}
	out, _ := base64.RawStdEncoding.DecodeString(s)
	return out
}

// decodeWords decodes RFC 2047 words; what cannot be decoded stays as it is.
// Neighbours in one charset are decoded together: many programs cut a letter in two.
func decodeWords(s string) string {
	if !strings.Contains(s, "=?") {
		return fromUTF8([]byte(s))
	}
	var b strings.Builder
	eachWord(s, func(between string, words []word) {
		b.WriteString(between)
		for i := 0; i < len(words); {
			decode, _ := charsetDecoder(words[i].label)
			octets := words[i].octets
			for i++; i < len(words) && words[i].label == words[i-1].label && !strings.Contains(words[i].label, "utf-7"); i++ {
				octets = append(octets, words[i].octets...)
			}
			b.WriteString(decode(octets))
		}
	})
	return fromUTF8([]byte(b.String()))
}

// rareWord returns the charset of an encoded word in s that not all mail programs
// know, or nothing. A word in a charset that is unknown here stays as it is written.
func rareWord(s string) string {
	for i := strings.Index(s, "=?"); i >= 0; {
		if w := readWord(s[i:]); w.length > 0 {
			if _, rare := charsetDecoder(w.label); rare {
				return w.label
			}
		}
		next := strings.Index(s[i+2:], "=?")
		if next < 0 {
			break
		}
		i += 2 + next
	}
	return ""
}

// eachWord calls f with each run of encoded words in known charsets between which
// there is nothing but white space, and with the text before it; at last with the
// text after them all.
func eachWord(s string, f func(between string, words []word)) {
	for from := 0; ; {
		i := strings.Index(s[from:], "=?")
		if i < 0 {
			f(s, nil)
			return
		}
		from += i
		at := from
		var run []word
		for next := at; strings.HasPrefix(s[next:], "=?"); {
			w := readWord(s[next:])
			if decode, _ := charsetDecoder(w.label); w.length == 0 || decode == nil {
				break
			}
			run = append(run, w)
			at = next + w.length
			next = len(s) - len(strings.TrimLeft(s[at:], " \t\r\n"))
		}
		if run == nil {
			from += len("=?")
			continue
		}
		f(s[:from], run)
		s, from = s[at:], 0
	}
}

// joinWords writes each run of several encoded words as one in UTF-8, for a parser
// that decodes each for itself.
func joinWords(s string) string {
	if !strings.Contains(s, "=?") {
		return s
	}
	var b strings.Builder
	eachWord(s, func(between string, words []word) {
		b.WriteString(between)
		at := s[len(between):]
		s = at
		end := 0
		for _, w := range words {
			end += len(at[end:]) - len(strings.TrimLeft(at[end:], " \t\r\n")) + w.length
		}
		run := at[:end]
		if s = at[end:]; len(words) > 1 {
			run = "=?utf-8?B?" + base64.StdEncoding.EncodeToString([]byte(decodeWords(run))) + "?="
		}
		b.WriteString(run)
	})
	return b.String()
}

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
	ascii := strings.HasSuffix(strings.ToLower(label), "ascii")
	if seen, err := wordDecoder.Decode(v[:n]); err != nil || seen != text || decodeWords(v[:n]) != text || ascii && !isASCII(text) {
		return 0, fmt.Errorf("it is not in the charset %s that it names", quote(label))
	}
	if bytes.ContainsAny(octets, "\r\n\x00") {
		return 0, errors.New("it decodes to a line break or a NUL")
	}
	return n, nil
}
