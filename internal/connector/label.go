package connector

import (
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"

	"postern/internal/mailbox"
)

// Label returns the label for what a provider calls a label, a keyword or a folder:
// in lower case, with a hyphen for everything that labels cannot have. It is not ok
// for names of which nothing is left, and for those that mean something else here.
// Two names of a provider can have the same label.
func Label(name string) (label string, ok bool) {
	if len(name) > 1000 { // a hostile name costs no more than this
		return "", false
	}
	var b strings.Builder
	for _, r := range norm.NFKD.String(strings.ToLower(name)) {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || strings.ContainsRune("._/", r):
			b.WriteRune(r)
		case unicode.Is(unicode.Mn, r): // a mark of the letter before it
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
	}
	label = strings.Trim(b.String(), "-._/")
	label = strings.TrimRight(label[:min(len(label), 64)], "-._/")
	return label, mailbox.OwnLabel(label)
}
