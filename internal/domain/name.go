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

// profile converts a name as people write it into its ASCII form: UTS 46 with all
// checks on.
var profile = idna.New(idna.MapForLookup(), idna.Transitional(false), idna.StrictDomainName(true), idna.ValidateLabels(true),
	idna.CheckHyphens(true), idna.CheckJoiners(true), idna.BidiRule(), idna.VerifyDNSLength(true))

// ASCII returns a domain name in its canonical form: lower case, without the final
// dot, international labels as xn--. The error wraps [ErrInvalid].
func ASCII(name string) (string, error) {
	name = strings.TrimSpace(name)
	if name == "" || name == "." {
		return "", fmt.Errorf("%w: domain: is empty", ErrInvalid)
	}
	if len(strings.TrimSuffix(name, ".")) > 253 { // before the conversion, whose cost grows with the length
		return "", fmt.Errorf("%w: %s: is longer than 253 octets", ErrInvalid, mail.Printable(name, 60))
	}
	if !utf8.ValidString(name) {
		return "", fmt.Errorf("%w: the name is not valid UTF-8", ErrInvalid)
	}
	ascii, err := profile.ToASCII(name)
	if err != nil {
		return "", fmt.Errorf("%w: %s: is not a domain name: %v", ErrInvalid, mail.Printable(name, 100), mail.Printable(err.Error(), 200))
	}
	// The library accepts empty labels, and maps dots of other scripts to a dot.
	// The attack: an allow list entry *@pl.. passes as no public suffix.
	ascii = strings.TrimSuffix(strings.ToLower(ascii), ".")
	if slices.Contains(strings.Split(ascii, "."), "") {
		return "", fmt.Errorf("%w: %s: has an empty label: two dots in a row, or one at the beginning", ErrInvalid, mail.Printable(name, 100))
	}
	return ascii, nil
}

// longest bounds a name, in octets. It leaves room for labels in front of it:
// _postern and DKIM selectors.
const longest = 190

// checkName returns the ASCII form of a name that a project may claim, or an error
// that wraps [ErrInvalid].
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
		return bad("is a single label, not a registered domain")
	}
	last := ascii[strings.LastIndexByte(ascii, '.')+1:]
	if _, err := netip.ParseAddr(ascii); err == nil || strings.Trim(last, "0123456789") == "" {
		return bad("is an address, not a domain name")
	}
	// The attack: a project that holds co.uk, or a hosting provider's domain, gets
	// the mail of everybody below it.
	if suffix, _ := publicsuffix.PublicSuffix(ascii); suffix == ascii {
		return bad("is a public suffix, under which others have their domains")
	}
	for _, own := range append([]string{g.cfg.Domain, g.cfg.Host}, g.cfg.Reserved...) {
		own = strings.ToLower(strings.TrimSuffix(own, "."))
		if own != "" && (ascii == own || strings.HasSuffix(ascii, "."+own)) {
			return bad("is this server's own domain, or below it")
		}
	}
	return ascii, nil
}
