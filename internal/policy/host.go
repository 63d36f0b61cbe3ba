package policy

import (
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

// Host returns a domain name as the DNS knows it, in lower case, without a last
// dot and in ASCII, and whether there is such a name. The attack on comparing
// names as they are written: a recipient at ｅvil.example, or at münchen.example
// where a rule or a switch says xn--mnchen-3ya.example, whose mail goes to the
// very servers that are meant.
func Host(name string) (string, bool) {
	low := strings.TrimRight(lowerASCII(name), ".")
	for i := range len(low) {
		if low[i] >= utf8.RuneSelf {
			ascii, err := idna.Lookup.ToASCII(low)
			if err != nil {
				return strings.ToLower(low), false
			}
			return strings.TrimRight(ascii, "."), true
		}
	}
	return low, low != ""
}

// Address returns an address as requests have it: in lower case, its domain as
// the DNS knows it. Letters of its local part outside ASCII stay: some become
// one of ASCII in lower case, and then it would be somebody else's.
func Address(a string) string {
	at := strings.LastIndexByte(a, '@')
	host, _ := Host(a[at+1:])
	return lowerASCII(a[:at+1]) + host
}

func lowerASCII(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}
