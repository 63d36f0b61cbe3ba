package scan

import (
	"slices"
	"strings"

	"golang.org/x/net/publicsuffix"
)

const (
	minName   = 4   // letters of a name from which it is compared with names under other endings
	minEdited = 5   // letters of a name from which it is compared with names one edit away
	maxDomain = 253 // octets
)

// reserved are the domains of documentation, RFC 2606 section 3: nobody owns them.
var reserved = []string{"example.com", "example.net", "example.org"}

// split returns the name and the ending of a domain's registered part: "globex" and
// "co.uk" of "mail.globex.co.uk". Ending is empty for a domain of one label.
func split(domain string) (name, ending string) {
	ending, _ = publicsuffix.PublicSuffix(domain)
	rest, ok := strings.CutSuffix(domain, "."+ending)
	if !ok {
		return domain, ""
	}
	return rest[strings.LastIndexByte(rest, '.')+1:], ending
}

// Registered returns the part of a domain that somebody registered: "globex.co.uk" of
// "mail.globex.co.uk". Domain is in ASCII and lower case.
func Registered(domain string) string {
	name, ending := split(domain)
	if ending == "" {
		return name
	}
	return name + "." + ending
}

// skeleton returns how a name looks: letters of other scripts as the Latin ones that
// they look like, digits and pairs of letters as the letters that a reader takes them for.
func skeleton(name string) string {
	s := fold(unpuny(name)).text
	s = strings.NewReplacer("rn", "m", "vv", "w", "cl", "d", "0", "o", "1", "l", "i", "l", "5", "s", "-", "").Replace(s)
	if s == "" {
		return name
	}
	return s
}

// Looks returns the keys under which a domain is found by others that look like it. If
// [Alike] holds for two domains, they share a key. Domain is in ASCII and lower case.
func Looks(domain string) []string {
	if len(domain) > maxDomain {
		return nil
	}
	name, ending := split(domain)
	registered := Registered(domain)
	keys := []string{"=" + registered}
	if len(name) >= minName {
		keys = append(keys, "~"+skeleton(name))
	}
	if len(name) >= minEdited {
		keys = append(keys, "-"+name+"."+ending)
		for i := range name {
			if k := "-" + name[:i] + name[i+1:] + "." + ending; !slices.Contains(keys, k) {
				keys = append(keys, k)
			}
		}
	}
	// What stands in a longer name as a whole: globex.com.evil.example, globex-com.example.
	labels := strings.Split(strings.ReplaceAll(domain, "-", "."), ".")
	for from := range labels {
		for to := from + 2; to <= len(labels) && to <= from+4; to++ {
			part := strings.Join(labels[from:to], ".")
			if k := "=" + part; part != registered && len(keys) < 100 && !slices.Contains(keys, k) {
				keys = append(keys, k)
			}
		}
	}
	return keys
}

// Alike returns how a domain looks like a known one that it is not, for a person; it is
// empty if it does not. Both are in ASCII and lower case. The attack: mail to
// accounts@g1obex.example, which a reviewer reads as the customer's.
func Alike(domain, known string) string {
	if len(domain) > maxDomain || len(known) > maxDomain {
		return ""
	}
	name, ending := split(domain)
	other, otherEnding := split(known)
	if Registered(domain) == Registered(known) || slices.Contains(reserved, Registered(domain)) && slices.Contains(reserved, Registered(known)) {
		return ""
	}
	switch {
	case name == other && len(name) >= minName:
		return "it has the same name under another ending"
	case len(name) >= minName && len(other) >= minName && skeleton(name) == skeleton(other):
		return "its letters look the same"
	case ending == otherEnding && len(name) >= minEdited && len(other) >= minEdited && oneEdit(name, other):
		return "it differs in one letter"
	case Contains(domain, known):
		return "it contains that name, and belongs to somebody else"
	}
	return ""
}

// Contains reports whether a domain has the registered part of another one in it, as
// globex.com.evil.example has that of globex.com. Both are in ASCII and lower case.
func Contains(domain, known string) bool {
	name := Registered(known)
	return Registered(domain) != name && strings.Contains(name, ".") && strings.Contains("."+strings.ReplaceAll(domain, "-", ".")+".", "."+name+".")
}

// Foreign returns a domain as mail programs show it, if that has letters outside of
// ASCII, and else an empty text.
func Foreign(domain string) string {
	if !strings.Contains(domain, "xn--") || len(domain) > maxDomain {
		return ""
	}
	shown := unpuny(domain)
	if shown == domain {
		return ""
	}
	return shown
}
