package mail

import (
	"fmt"
	netmail "net/mail"
	"strings"
	"unicode"
	"unicode/utf8"
)

// An Address is a mailbox with the name shown for it.
type Address struct {
	Name string
	Addr string // local@domain, the domain in lower case; empty if it could not be read
}

// String returns the address as people write it, Name <local@domain>. It is
// for reading, not for a header.
func (a Address) String() string {
	switch {
	case a.Name == "":
		return a.Addr
	case a.Addr == "":
		return a.Name
	}
	return a.Name + " <" + a.Addr + ">"
}

// Domain returns the part after the last @ in lower case.
func Domain(addr string) string {
	return strings.ToLower(addr[strings.LastIndexByte(addr, '@')+1:])
}

// ParseAddress reads one address, with or without a display name, strictly.
// The error is a [FieldError] with the given field.
func ParseAddress(field, s string) (Address, error) {
	if err := checkLine(field, s); err != nil {
		return Address{}, err
	}
	p := netmail.AddressParser{WordDecoder: wordDecoder}
	a, err := p.Parse(s)
	if err != nil {
		return Address{}, fieldErr(field, "%s is not an address", quote(s))
	}
	if outside := unquoted(s); strings.ContainsAny(outside, "():;,") {
		// Groups and comments are where two parsers see two addresses.
		return Address{}, fieldErr(field, "%s has a comment or a group, write only Name <local@domain>", quote(s))
	}
	addr, err := CheckAddr(field, a.Address)
	if err != nil {
		return Address{}, err
	}
	if bad := controls(a.Name); bad != "" || strings.Contains(a.Name, "=?") || len(a.Name) > 255 {
		return Address{}, fieldErr(field, "%s has a display name that is too long or has control characters or =?", quote(s))
	}
	return Address{Name: a.Name, Addr: addr}, nil
}

// ParseAddresses reads a list of addresses that are separated by commas, each as
// strictly as [ParseAddress]. The error is a [FieldError] with the given field.
func ParseAddresses(field, s string) ([]Address, error) {
	if err := checkLine(field, s); err != nil {
		return nil, err
	}
	if outside := unquoted(s); strings.ContainsAny(outside, "():;") {
		return nil, fieldErr(field, "%s has a comment or a group, write only Name <local@domain>, …", quote(s))
	}
	p := netmail.AddressParser{WordDecoder: wordDecoder}
	read, err := p.ParseList(s)
	if err != nil {
		return nil, fieldErr(field, "%s is not a list of addresses", quote(s))
	}
	out := make([]Address, 0, len(read))
	for _, a := range read {
		addr, err := CheckAddr(field, a.Address)
		if err != nil {
			return nil, err
		}
		if bad := controls(a.Name); bad != "" || strings.Contains(a.Name, "=?") || len(a.Name) > 255 {
			return nil, fieldErr(field, "%s has a display name that is too long or has control characters or =?", quote(s))
		}
		out = append(out, Address{Name: a.Name, Addr: addr})
	}
	return out, nil
}

// CheckAddr checks a bare local@domain and returns it with its domain in lower
// case. Quoted local parts, domain literals and addresses for numeric hosts
// are refused: nobody's mailbox needs them and parsers disagree about them.
func CheckAddr(field, addr string) (string, error) {
	bad := func(why string) (string, error) {
		return "", fieldErr(field, "%s %s", quote(addr), why)
	}
	if !utf8.ValidString(addr) {
		return bad("is not valid UTF-8")
	}
	at := strings.LastIndexByte(addr, '@')
	if at < 1 || at == len(addr)-1 {
		return bad("is not of the form local@domain")
	}
	local, domain := addr[:at], strings.ToLower(addr[at+1:])
	if len(addr) > 254 || len(local) > 64 {
		return bad("is longer than 254 octets, or 64 before the @")
	}
	for atom := range strings.SplitSeq(local, ".") {
		if atom == "" || strings.IndexFunc(atom, notAtext) >= 0 {
			return bad("has a local part with characters or dots that are not allowed")
		}
	}
	label := ""
	for label = range strings.SplitSeq(domain, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' || strings.IndexFunc(label, notLabel) >= 0 {
			return bad("has a domain that is not a host name")
		}
	}
	if strings.Trim(label, "0123456789") == "" {
		return bad("has a number for a domain")
	}
	return local + "@" + domain, nil
}

func notAtext(r rune) bool {
	if r < utf8.RuneSelf {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("!#$%&'*+-/=?^_`{|}~", r)
	}
	return !unicode.IsGraphic(r) || unicode.IsSpace(r)
}

func notLabel(r rune) bool {
	if r < utf8.RuneSelf {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_'
	}
	return !unicode.IsLetter(r) && !unicode.IsMark(r) && !unicode.IsDigit(r)
}

// plainPath refuses what would break out of a line <path>.
func plainPath(field, s string) error {
	if s == "" || len(s) > 1000 {
		return fieldErr(field, "address is empty or longer than 1000 octets")
	}
	if strings.IndexFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f || r == '<' || r == '>' }) >= 0 {
		return fieldErr(field, "address %s has a space, a control character, < or >", quote(s))
	}
	return nil
}

// checkLine refuses what ends a header field early or is not text.
func checkLine(field, s string) error {
	switch {
	case strings.ContainsAny(s, "\r\n"):
		return fieldErr(field, "contains a line break")
	case strings.IndexByte(s, 0) >= 0:
		return fieldErr(field, "contains a NUL character")
	case !utf8.ValidString(s):
		return fieldErr(field, "is not valid UTF-8")
	}
	if bad := controls(s); bad != "" {
		return fieldErr(field, "contains the control character %s", bad)
	}
	return nil
}

// controls names the first control or text-direction character of s but tab.
func controls(s string) string {
	var before rune
	for _, r := range s {
		if r != '\t' && hiddenAfter(before, r) {
			return fmt.Sprintf("U+%04X", r)
		}
		before = r
	}
	return ""
}

// hiddenAfter says whether r is hidden where it follows the rune before. The attack:
// joiners and selectors of variants, which are a part of names and emoji, in rows
// that say something to a program.
func hiddenAfter(before, r rune) bool {
	switch {
	case r == 0x200c || r == 0x200d: // in letters of scripts that join, and in emoji
		return before != 0xfe0f && !unicode.IsSymbol(before) && (before < 0x600 || !unicode.IsLetter(before) && !unicode.IsMark(before) || hiddenAfter(0, before))
	case r == 0xfe0e || r == 0xfe0f: // ❤️, 1️⃣, ‼️, ℹ️
		return !unicode.IsSymbol(before) && !unicode.IsDigit(before) && before != '#' && before != '*' && (before < 0x2000 || !unicode.IsPunct(before) && !unicode.IsLetter(before))
	case r >= 0x180b && r <= 0x180d || r == 0x180f:
		return !unicode.Is(unicode.Mongolian, before) || !unicode.IsLetter(before)
	}
	return hidden(r)
}

// hidden says whether r changes how a line or a terminal shows the text around
// it while it is itself unseen.
func hidden(r rune) bool {
	switch {
	case r < ' ' || r >= 0x7f && r <= 0x9f: // C0, DEL, C1: terminal escapes
	case r == 0x061c || r == 0x200e || r == 0x200f || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069: // bidi
	case r == 0x2028 || r == 0x2029: // line and paragraph separators
	case r == 0x200b || r == 0x2060 || r == 0xfeff || r == 0xad: // zero width; the joiners 200c and 200d are in names and emoji
	case r >= 0xe0000 && r <= 0xe007f: // tags: text to a model, nothing to a person
	case r == 0x200c || r == 0x200d:
		return false
	case r == 0x34f || r == 0x115f || r == 0x1160 || r == 0x17b4 || r == 0x17b5 || r == 0x3164 || r == 0xffa0: // fillers: letters and marks that take no ink
	case r >= 0xfe00 && r <= 0xfe0d || r >= 0xe0100 && r <= 0xe01ef: // selectors of variants: any octet, as one of them
	default: // what else formats is unseen too, but for the signs that stand under digits
		return unicode.Is(unicode.Cf, r) && !unicode.Is(unicode.Prepended_Concatenation_Mark, r)
	}
	return true
}

// quote returns s for an error message: short, printable, in quotes.
func quote(s string) string {
	if len(s) > 100 {
		cut := 100
		for cut > 0 && !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut] + "…"
	}
	return fmt.Sprintf("%q", s)
}

// unquoted returns what of s stands outside quoted strings.
func unquoted(s string) string {
	var b strings.Builder
	in := false
	for i := 0; i < len(s); i++ {
		switch {
		case in && s[i] == '\\':
			i++
		case s[i] == '"':
			in = !in
		case !in:
			b.WriteByte(s[i])
		}
	}
	return b.String()
}

// parseList reads the addresses of a header as well as it can. ok is false if
// any of it is not what RFC 5322 allows.
func parseList(v string) (list []Address, ok bool) {
	const most = 1000
	if strings.TrimSpace(v) == "" {
		return nil, false
	}
	p := netmail.AddressParser{WordDecoder: wordDecoder}
	if as, err := p.ParseList(v); err == nil && len(as) <= most {
		ok = true
		for _, a := range as {
			addr, err := CheckAddr("", a.Address)
			if err != nil {
				addr, ok = shown(a.Address), false
			}
			list = append(list, Address{Name: shown(a.Name), Addr: addr})
		}
		return list, ok
	}
	for piece := range splitCommas(v) {
		if len(list) == most {
			break
		}
		piece = strings.TrimSpace(piece)
		if a, err := p.Parse(piece); err == nil {
			if addr, err := CheckAddr("", a.Address); err == nil {
				list = append(list, Address{Name: shown(a.Name), Addr: addr})
				continue
			}
		}
		if i := strings.LastIndexByte(piece, '<'); i >= 0 {
			inner, _, _ := strings.Cut(piece[i+1:], ">")
			if addr, err := CheckAddr("", strings.TrimSpace(inner)); err == nil {
				list = append(list, Address{Name: shown(decodeWords(strings.TrimSpace(piece[:i]))), Addr: addr})
				continue
			}
		}
		if piece != "" {
			list = append(list, Address{Name: shown(piece)})
		}
	}
	return list, false
}

func splitCommas(v string) func(func(string) bool) {
	return func(yield func(string) bool) {
		in, start := false, 0
		for i := 0; i < len(v); i++ {
			switch {
			case in && v[i] == '\\':
				i++
			case v[i] == '"':
				in = !in
			case v[i] == ',' && !in:
				if !yield(v[start:i]) {
					return
				}
				start = i + 1
			}
		}
		yield(v[start:])
	}
}
