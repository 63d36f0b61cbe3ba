package mail

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/html/charset"
)

// A structured value is a parsed Content-Type or Content-Disposition field (RFC
// 2045 5.1), with its RFC 2231 parameters assembled.
type structured struct {
	value  string // "text/plain", "attachment"; in lower case
	params map[string]string
	// other has what a parameter says in its plain form where that is not what
	// its extended form says: filename="a.txt"; filename*=utf-8''b.txt. Programs
	// show the one or the other.
	other map[string]string
	// language says that an extended parameter names a language.
	language bool
	// loose is how many octets are spelled as no program does: capitals within a
	// word, and semicolons between which nothing stands.
	loose int
}

// parseStructured parses v strictly by the grammar: no comments, no parameter
// twice, no value without the quotes that it needs. Two programs would read these
// as two different messages.
func parseStructured(v string) (structured, error) {
	s := structured{params: map[string]string{}, other: map[string]string{}}
	rest := strings.TrimLeft(v, " \t")
	s.value, rest = cutToken(rest, "/")
	if s.value == "" {
		return s, errors.New("it does not begin with a word")
	}
	if oddCase(s.value) > 0 {
		// Some types have capitals within: application/vnd.ms-excel.sheet.macroEnabled.12.
		s.loose += len(strings.Map(func(r rune) rune {
			if r < 'A' || r > 'Z' {
				return -1
			}
			return r
		}, s.value))
	}
	s.value = strings.ToLower(s.value)
	raw := map[string]string{}
	for {
		rest = strings.TrimLeft(rest, " \t")
		if rest == "" {
			break
		}
		if rest[0] != ';' {
			return s, fmt.Errorf("there is no semicolon before %s; quote a value that has spaces", quote(rest))
		}
		after := strings.TrimLeft(rest[1:], " \t;")
		s.loose += strings.Count(rest[1:len(rest)-len(after)], ";")
		if rest = after; rest == "" { // a last semicolon says nothing
			break
		}
		var name, value string
		var err error
		if name, rest = cutToken(rest, ""); name == "" || !strings.HasPrefix(rest, "=") {
			return s, fmt.Errorf("%s is not a parameter", quote(name+rest))
		}
		if value, rest, err = cutValue(rest[1:]); err != nil {
			return s, err
		}
		s.loose += oddCase(name)
		name = strings.ToLower(name)
		if _, twice := raw[name]; twice {
			return s, fmt.Errorf("the parameter %s appears twice", name)
		}
		raw[name] = value
	}
	err := s.assemble(raw) // it changes s
	return s, err
}

// cutToken returns the token that s begins with. Also has characters that may
// be in it besides those of RFC 2045.
func cutToken(s, also string) (token, rest string) {
	i := 0
	for i < len(s) && s[i] > ' ' && s[i] < 0x7f && (!strings.ContainsRune(`()<>@,;:\"/[]?=`, rune(s[i])) || strings.IndexByte(also, s[i]) >= 0) {
		i++
	}
	return s[:i], s[i:]
}

func cutValue(s string) (value, rest string, err error) {
	if !strings.HasPrefix(s, `"`) {
		// Many programs write boundaries and media types without the quotes that
		// they need, and all programs read these in the same way.
		value, rest = cutToken(s, "/:?=")
		if value == "" {
			return "", "", errors.New("a parameter has no value")
		}
		return value, rest, nil
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == '"':
			return b.String(), s[i+1:], nil
		case s[i] == '\\' && i+1 < len(s) && (s[i+1] == '\\' || s[i+1] == '"'):
			i++
			b.WriteByte(s[i])
		case s[i] == '\\':
			// The attack: a\b is "ab" to some programs and "a\b" to others.
			return "", "", errors.New("a quoted value has a needless backslash")
		default:
			b.WriteByte(s[i])
		}
	}
	return "", "", errors.New("a quoted value does not end")
}

// maxPieces is how many pieces a parameter may come in.
const maxPieces = 50

// assemble puts the parameters of RFC 2231 together.
func (s *structured) assemble(raw map[string]string) error {
	extended := map[string][]string{} // names of the pieces, by the parameter
	for _, name := range slices.Sorted(maps.Keys(raw)) {
		base, _, ext := strings.Cut(name, "*")
		if !ext {
			s.params[name] = raw[name]
			continue
		}
		if base != "filename" && base != "name" && base != "title" {
			// The attack: two boundaries or two charsets. Some programs use the one,
			// some the other.
			return fmt.Errorf("the parameter %s is written so that programs read it differently", base)
		}
		extended[base] = append(extended[base], name)
	}
	for base, names := range extended {
		value, err := s.join(base, names, raw)
		if err != nil {
			return err
		}
		if plain, both := s.params[base]; both && decodeWords(plain) != value {
			s.other[base] = plain
		}
		s.params[base] = value
	}
	return nil
}

func (s *structured) join(base string, names []string, raw map[string]string) (string, error) {
	odd := fmt.Errorf("the parameter %s is in pieces that programs assemble differently", base)
	if len(names) == 1 && names[0] == base+"*" {
		label, octets, err := s.extended(raw[names[0]])
		if err != nil {
			return "", fmt.Errorf("the parameter %s %w", base, err)
		}
		return decodeCharset(label, octets)
	}
	if len(names) > maxPieces {
		return "", odd
	}
	label, all := "utf-8", []byte(nil)
	for i := range names {
		name := base + "*" + strconv.Itoa(i)
		if v, ok := raw[name]; ok && i > 0 {
			all = append(all, v...)
			continue
		} else if ok {
			all = append(all, v...)
			label = "utf-8" // the plain pieces are what they are
			continue
		}
		v, ok := raw[name+"*"]
		if !ok {
			return "", odd
		}
		var octets []byte
		var err error
		if i == 0 {
			label, octets, err = s.extended(v)
		} else {
			octets, err = percent(v)
		}
		if err != nil {
			return "", fmt.Errorf("the parameter %s %w", base, err)
		}
		all = append(all, octets...)
	}
	return decodeCharset(label, all)
}

// extended reads charset'language'octets.
func (s *structured) extended(v string) (label string, octets []byte, err error) {
	parts := strings.Split(v, "'")
	if len(parts) != 3 {
		return "", nil, errors.New("is not of the form charset'language'text")
	}
	s.language = s.language || parts[1] != ""
	octets, err = percent(parts[2])
	return parts[0], octets, err
}

func percent(v string) ([]byte, error) {
	var b []byte
	for i := 0; i < len(v); i++ {
		if v[i] != '%' {
			b = append(b, v[i])
			continue
		}
		if i+2 >= len(v) {
			return nil, errors.New("has a % without two hexadecimal digits after it")
		}
		n, err := strconv.ParseUint(v[i+1:i+3], 16, 8)
		if err != nil {
			return nil, errors.New("has a % without two hexadecimal digits after it")
		}
		b = append(b, byte(n))
		i += 2
	}
	return b, nil
}

// sameEverywhere are the charsets that all mail programs know under these names
// and decode in the same way. The attack: a charset that the recipient's program
// knows and this one does not, such as utf-7 and cp850, or takes for another.
var sameEverywhere = []string{
	"utf-8", "utf8", "us-ascii", "ascii", "ansi_x3.4-1968",
	"iso-8859-1", "iso-8859-2", "iso-8859-3", "iso-8859-4", "iso-8859-5", "iso-8859-6", "iso-8859-7", "iso-8859-8", "iso-8859-9", "iso-8859-10", "iso-8859-13", "iso-8859-14", "iso-8859-15", "iso-8859-16",
	"windows-1250", "windows-1251", "windows-1252", "windows-1253", "windows-1254", "windows-1255", "windows-1256", "windows-1257", "windows-1258",
	"koi8-r", "koi8-u", "big5", "gb2312", "gbk", "gb18030", "shift_jis", "euc-jp", "iso-2022-jp", "euc-kr", "ks_c_5601-1987",
}

// decodeCharset returns octets in UTF-8 if every program that knows the charset
// reads them so: they are valid, and are what the text is written as.
func decodeCharset(label string, octets []byte) (string, error) {
	label = strings.ToLower(label)
	if !slices.Contains(sameEverywhere, label) {
		return "", fmt.Errorf("the charset %s is not one that all mail programs know; write utf-8", quote(label))
	}
	bad := fmt.Errorf("text is not in the charset %s that it names", label)
	switch label {
	case "ansi_x3.4-1968": // what cron writes for ASCII
		if !isASCII(string(octets)) {
			return "", bad
		}
		return string(octets), nil
	case "utf-8", "utf8", "us-ascii", "ascii":
		// Programs write UTF-8 under the name of ASCII, and read it so.
		if !utf8.Valid(octets) {
			return "", bad
		}
		return string(octets), nil
	}
	if strings.HasPrefix(label, "iso-8859-") && slices.ContainsFunc(octets, func(c byte) bool { return c >= 0x80 && c < 0xa0 }) {
		return "", bad // letters to programs that take it for a Windows charset, controls to others
	}
	e, _ := charset.Lookup(label)
	if e == nil {
		return "", bad // unreachable
	}
	out, err := e.NewDecoder().Bytes(octets)
	if err != nil || bytes.ContainsRune(out, utf8.RuneError) {
		return "", bad
	}
	back, err := e.NewEncoder().Bytes(out)
	if err != nil || !bytes.Equal(back, octets) {
		return "", bad
	}
	return string(out), nil
}
