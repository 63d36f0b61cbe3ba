package console

import (
	"fmt"
	"strings"
	"unicode"

	"golang.org/x/net/idna"

	"postern/internal/mail"
)

// A spelled is an address or a host, for a person who compares it with one that they know.
// The attack: a domain with a Cyrillic letter looks the same as the one that is meant. If a
// name has letters outside ASCII, each of them is marked, and the name as DNS has it is
// shown beside it.
type spelled struct {
	Parts []letters
	Real  string // as DNS has it, with xn--; empty if the name is ASCII alone
	Odd   string // the marked letters in words: "Cyrillic о"
}

// A letters is a piece of a spelled name.
type letters struct {
	Text string
	Odd  bool // outside ASCII
}

// maxOdd bounds how many letters are named in a sentence.
const maxOdd = 4

// spell returns name as it is shown in full. If it is not a valid DNS name, it is shown as
// it is.
func spell(name string) spelled {
	local, host := "", name
	if i := strings.LastIndexByte(name, '@'); i >= 0 {
		local, host = name[:i+1], name[i+1:]
	}
	read, dns := host, host
	if u, err := idna.Punycode.ToUnicode(host); err == nil {
		read = u
	}
	if a, err := idna.Punycode.ToASCII(host); err == nil {
		dns = a
	}
	read = mail.Printable(local+read, 1000)
	s := spelled{}
	var named []string
	for _, r := range read {
		odd := r > unicode.MaxASCII
		if n := len(s.Parts); n > 0 && s.Parts[n-1].Odd == odd {
			s.Parts[n-1].Text += string(r)
		} else {
			s.Parts = append(s.Parts, letters{string(r), odd})
		}
		if odd && len(named) < maxOdd {
			named = append(named, strings.TrimSpace(script(r)+" "+string(r)))
		}
	}
	if read != name || len(named) > 0 {
		s.Real, s.Odd = mail.Printable(escape(local)+dns, 1000), strings.Join(named, ", ")
	}
	return s
}

// escape writes the letters outside ASCII as numbers: a local part has no other form.
func escape(s string) string {
	var b strings.Builder
	for _, r := range s {
		if r > unicode.MaxASCII {
			fmt.Fprintf(&b, "\\u{%x}", r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// script names the script of a letter, or returns an empty string if the letter belongs to
// none of these scripts.
func script(r rune) string {
	for _, name := range []string{"Latin", "Cyrillic", "Greek", "Armenian", "Cherokee", "Georgian", "Hebrew", "Arabic", "Han", "Hiragana", "Katakana", "Hangul", "Thai", "Devanagari"} {
		if unicode.Is(unicode.Scripts[name], r) {
			return name
		}
	}
	return ""
}

// asciiName returns an address or host in ASCII, for lists, where there is no room to
// mark letters.
func asciiName(name string) string {
	local, host := "", name
	if i := strings.LastIndexByte(name, '@'); i >= 0 {
		local, host = name[:i+1], name[i+1:]
	}
	if a, err := idna.Punycode.ToASCII(host); err == nil {
		host = a
	}
	return mail.Printable(local+host, 320)
}
