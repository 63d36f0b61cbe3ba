package domain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
	"golang.org/x/net/publicsuffix"

	"postern/internal/mail"
)

// profile is how a name that a person wrote becomes the one that the DNS knows:
// UTS 46 with everything checked.
var profile = idna.New(idna.MapForLookup(), idna.Transitional(false), idna.StrictDomainName(true), idna.ValidateLabels(true),
	idna.CheckHyphens(true), idna.CheckJoiners(true), idna.BidiRule(), idna.VerifyDNSLength(true))

// ASCII returns a domain name as the DNS knows it: in lower case, without the
// last dot, an international one in its xn-- form. It returns an error that
// wraps [ErrInvalid] for what is no name.
func ASCII(name string) (string, error) {
	name = strings.TrimSpace(name)
	if name == "" || name == "." {
		return "", fmt.Errorf("%w: domain: is empty, and so not a domain name", ErrInvalid)
	}
	if len(strings.TrimSuffix(name, ".")) > 253 { // before the work that it would make
		return "", fmt.Errorf("%w: %s: is longer than 253 octets", ErrInvalid, mail.Printable(name, 60))
	}
	if !utf8.ValidString(name) {
		return "", fmt.Errorf("%w: the name is not valid UTF-8", ErrInvalid)
	}
	ascii, err := profile.ToASCII(name)
	if err != nil {
		return "", fmt.Errorf("%w: %s: is not a domain name: %v", ErrInvalid, mail.Printable(name, 100), mail.Printable(err.Error(), 200))
	}
	// The library lets empty labels through, and dots of other scripts become one.
	// The attack: *@pl.. for *@pl. is not a public suffix, and no name either.
	ascii = strings.TrimSuffix(strings.ToLower(ascii), ".")
	if slices.Contains(strings.Split(ascii, "."), "") {
		return "", fmt.Errorf("%w: %s: has an empty label, between two dots or beside one", ErrInvalid, mail.Printable(name, 100))
	}
	return ascii, nil
}

// longest leaves room for what is put before a name, _postern and selectors.
const longest = 190

// checkName returns the name as the DNS knows it, or why no project may bring it.
func (g *Registry) checkName(name string) (string, error) {
	ascii, err := ASCII(name)
	if err != nil {
		return "", err
	}
	bad := func(why string) (string, error) {
		return "", fmt.Errorf("%w: %s: %s", ErrInvalid, ascii, why)
	}
	if len(ascii) > longest {
		return "", fmt.Errorf("%w: %s: is longer than %d octets", ErrInvalid, mail.Printable(ascii, 60), longest)
	}
	if !strings.Contains(ascii, ".") {
		return bad("is a single label, no domain of anybody's")
	}
	last := ascii[strings.LastIndexByte(ascii, '.')+1:]
	if _, err := netip.ParseAddr(ascii); err == nil || strings.Trim(last, "0123456789") == "" {
		return bad("is an address, not a domain name")
	}
	// The attack: whoever gets co.uk, or a host for everybody's names, gets the
	// mail of all below it.
	if suffix, _ := publicsuffix.PublicSuffix(ascii); suffix == ascii {
		return bad("is a public suffix, under which others have their domains")
	}
	for _, own := range append([]string{g.cfg.Domain, g.cfg.Host}, g.cfg.Reserved...) {
		own = strings.ToLower(strings.TrimSuffix(own, "."))
		if own != "" && (ascii == own || strings.HasSuffix(ascii, "."+own)) {
			return bad("is this server's own, or below it")
		}
	}
	return ascii, nil
}
