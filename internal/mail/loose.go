package mail

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/encoding/charmap"
)

// readLoosely reads a Content-Type or a Content-Disposition as mail programs do
// where [parseStructured] refuses it, and says what is wrong with it. It never fails.
// What programs read differently it reads as most of npm's mailparser and postal-mime,
// Python's email and Thunderbird do: a value without quotes goes on to the semicolon,
// the first of two parameters counts, pieces go by their numbers.
func readLoosely(v string) (s structured, odd []string) {
	s = structured{params: map[string]string{}, other: map[string]string{}}
	value, rest, _ := strings.Cut(v, ";")
	value = strings.TrimSpace(value)
	if main, more, ok := strings.Cut(value, " "); ok && strings.Contains(more, "=") { // text/html charset=utf-8
		value, rest = main, more+";"+rest
		odd = append(odd, "there is no semicolon before "+quote(more))
	}
	s.value = strings.ToLower(value)
	raw := map[string]string{}
	var order []string
	for range maxParameters {
		rest = strings.TrimLeft(rest, "; \t")
		if rest == "" {
			break
		}
		end := strings.IndexAny(rest, "=;")
		if end < 0 || rest[end] == ';' {
			word := rest[:max(end, 0)]
			if rest = rest[max(end, 0):]; end < 0 {
				word, rest = rest, ""
			}
			odd = append(odd, quote(word)+" is not a parameter")
			continue
		}
		name := strings.ToLower(strings.TrimSpace(rest[:end]))
		var text string
		text, rest = looseValue(strings.TrimLeft(rest[end+1:], " \t"))
		if _, twice := raw[name]; twice {
			odd = append(odd, "the parameter "+name+" appears twice")
			continue
		}
		raw[name] = text
		order = append(order, name)
	}
	if rest != "" {
		odd = append(odd, "there are more than "+strconv.Itoa(maxParameters)+" parameters")
	}
	return s, append(odd, s.assembleLoosely(raw, order)...)
}

// maxParameters is how many parameters of a field are read. The attack: thousands of
// pieces of one name.
const maxParameters = 200

// looseValue returns a parameter's value and what follows it. Quotation marks
// begin and end anywhere in it; one that is not closed goes to the end.
func looseValue(s string) (value, rest string) {
	var b strings.Builder
	quoted := false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == ';' && !quoted:
			return strings.TrimSpace(b.String()), s[i:]
		case c == '"':
			quoted = !quoted
		case c == '\\' && quoted && i+1 < len(s) && (s[i+1] == '"' || s[i+1] == '\\'):
			i++
			b.WriteByte(s[i])
		default:
			// A backslash before another letter is that of a path: C:\report.pdf.
			b.WriteByte(c)
		}
	}
	return strings.TrimSpace(b.String()), ""
}

// assembleLoosely is [structured.assemble] for what that refuses.
func (s *structured) assembleLoosely(raw map[string]string, order []string) (odd []string) {
	pieces := map[string][]piece{}
	var bases []string
	for _, name := range order {
		base, after, extended := strings.Cut(name, "*")
		if !extended {
			s.params[name] = raw[name]
			continue
		}
		p := piece{value: raw[name], encoded: after == "" || strings.HasSuffix(after, "*")}
		number, err := strconv.Atoi(strings.TrimSuffix(cmp.Or(after, "0"), "*"))
		if err != nil || number < 0 {
			odd = append(odd, quote(name)+" is not a parameter")
			continue
		}
		p.number = number
		if pieces[base] == nil {
			bases = append(bases, base)
		}
		pieces[base] = append(pieces[base], p)
	}
	for _, base := range bases {
		value, said := joinPieces(pieces[base])
		for _, o := range said {
			odd = append(odd, "the parameter "+base+" "+o)
		}
		if plain, both := s.params[base]; both && decodeWords(plain) != value {
			s.other[base] = plain
		}
		s.params[base] = value
	}
	return odd
}

// A piece is a part of a parameter, RFC 2231 section 3.
type piece struct {
	number  int
	encoded bool // its name ends in a star
	value   string
}

func joinPieces(list []piece) (value string, odd []string) {
	slices.SortStableFunc(list, func(a, b piece) int { return cmp.Compare(a.number, b.number) })
	label, octets := "", []byte(nil)
	for i, p := range list {
		if p.number != i {
			odd = append(odd, "is in pieces that programs assemble differently")
		}
		if !p.encoded {
			octets = append(octets, p.value...)
			continue
		}
		text := p.value
		if i == 0 {
			if parts := strings.SplitN(text, "'", 3); len(parts) == 3 {
				label, text = parts[0], parts[2]
			} else {
				odd = append(odd, "is not of the form charset'language'text")
			}
		}
		octets = append(octets, loosePercent(text)...)
	}
	if decode, rare := charsetDecoder(label); decode != nil && rare {
		odd = append(odd, "is in the charset "+quote(label)+", which not all mail programs know")
		return decode(octets), odd
	} else if decode != nil && (label != "" || utf8.Valid(octets)) {
		if value = decode(octets); strings.Contains(value, "\ufffd") {
			odd = append(odd, "is not in the charset that it names")
		}
		return value, odd
	}
	odd = append(odd, "has no charset that mail programs know")
	if utf8.Valid(octets) {
		return string(octets), odd
	}
	return fromEncoding(charmap.Windows1252)(octets), odd
}

// loosePercent decodes what of s is encoded, and leaves the rest as it is.
func loosePercent(s string) []byte {
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				out = append(out, byte(n))
				i += 2
				continue
			}
		}
		out = append(out, s[i])
	}
	return out
}
