package scan

import (
	"strings"
	"unicode/utf8"

	"postern/internal/extract"
)

// maxNested is how many encodings within each other are undone.
const maxNested = 3

// rot13 turns Latin letters by half the alphabet.
func rot13(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return 'a' + (r-'a'+13)%26
		case r >= 'A' && r <= 'Z':
			return 'A' + (r-'A'+13)%26
		}
		return r
	}, s)
}

// reversed returns s read from its end.
func reversed(s string) string {
	b := make([]byte, len(s))
	at := len(s)
	for _, r := range s {
		n := utf8.RuneLen(r)
		if n < 0 || n > at {
			break
		}
		at -= n
		utf8.EncodeRune(b[at:], r)
	}
	return string(b[at:])
}

// joined puts words together that are written letter by letter, "i g n o r e"
// or "i-g-n-o-r-e"; two spaces, or a sign, part the words. It returns empty if
// there are none.
func joined(folded, original string) string {
	if !strings.Contains(folded, " ") && !strings.ContainsAny(folded, ".-_*") {
		return ""
	}
	var out strings.Builder
	found := false
	for line := range strings.Lines(original) {
		if spelledOut(line, &out) {
			found = true
		}
		out.WriteByte('\n')
	}
	if !found {
		return ""
	}
	return out.String()
}

// spelledOut writes the runs of single letters of a line as words.
func spelledOut(line string, out *strings.Builder) bool {
	rs := []rune(line)
	found := false
	for i := 0; i < len(rs); {
		// A run: letter, the same separators, letter, …
		j, n := i, 0
		var sep rune
		var run strings.Builder
		for j < len(rs) && extract.Letter(rs[j]) && (j+1 >= len(rs) || !extract.Letter(rs[j+1])) {
			run.WriteRune(rs[j])
			n++
			if j+2 >= len(rs) {
				j++
				break
			}
			s := rs[j+1]
			if sep == 0 && (s == ' ' || s == '.' || s == '-' || s == '_' || s == '*' || s == '/' || s == '|' || s == ',' || s == '~') {
				sep = s
			}
			if s != sep || sep == 0 {
				j++
				break
			}
			j += 2
			gap := false
			for j < len(rs) && (rs[j] == ' ' || rs[j] == '/' || rs[j] == '|') && rs[j] != 0 {
				gap = true
				j++
			}
			if gap {
				run.WriteByte(' ')
			}
		}
		if n >= 5 {
			found = true
			out.WriteString(" " + run.String() + " ")
			i = j
			continue
		}
		// Copy this word as it is.
		for i < len(rs) && extract.Letter(rs[i]) {
			out.WriteRune(rs[i])
			i++
		}
		if i < len(rs) {
			out.WriteRune(rs[i])
			i++
		}
	}
	return found
}

// unleet reads digits and signs within words as the letters that they stand
// for. It returns empty if there are no such words.
func unleet(folded string) string {
	var out strings.Builder
	found := false
	for w := range strings.FieldsSeq(folded) {
		letters, signs := 0, 0
		core := strings.Trim(w, `.,;:?()"'`)
		for _, r := range core {
			switch {
			case r >= 'a' && r <= 'z':
				letters++
			case strings.ContainsRune("0134578@$!|+€69", r):
				signs++
			default:
				letters = -1000
			}
		}
		if letters >= 1 && signs >= 1 && len(core) >= 3 && !strings.HasSuffix(core, "!") {
			found = true
			w = leet().Replace(w)
		}
		out.WriteString(w)
		out.WriteByte(' ')
	}
	if !found {
		return ""
	}
	return out.String()
}
