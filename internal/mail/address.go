package mail

import (
	"fmt"
	netmail "net/mail"
	"strings"
	"unicode"
	"unicode/utf8"

	"postern/internal/extract"
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
		if r != '\t' && extract.Hidden(before, r) {
			return fmt.Sprintf("U+%04X", r)
		}
		before = r
	}
	return ""
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
