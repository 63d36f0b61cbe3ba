package leak

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"postern/internal/extract"
)

// mask returns how a secret begins, or how a number ends, and its length.
func mask(s string, f Flag) string {
	n := utf8.RuneCountInString(s)
	if f == FlagPrivateKey {
		head, _, _ := strings.Cut(s, "\n")
		return extract.Cut(strings.TrimSpace(head), 50) + fmt.Sprintf(" … [%d characters]", n)
	}
	if f == FlagCard || f == FlagIBAN || f == FlagNationalID {
		return "… " + s[len(s)-2:] + fmt.Sprintf(" [%d characters]", n)
	}
	return extract.Cut(s, min(4, len(s)/4)) + fmt.Sprintf("… [%d characters]", n)
}

// Redact returns text with its secrets masked: a reviewer can tell that one is
// there, and nobody can use it. Numbers of cards, accounts and people stay.
func Redact(text string) string {
	return redact(text, append(slices.Clip(secretSearches), keyBlocks)...)
}

// redactAll masks numbers as well.
func redactAll(text string) string {
	return redact(text, append(slices.Clip(secretSearches), keyBlocks, numbers)...)
}

// redact masks the matches of searches.
func redact(text string, searches ...search) string {
	var list []match
	for _, find := range searches {
		find(text, func(t match) { list = append(list, t) })
	}
	if len(list) == 0 {
		return text
	}
	slices.SortFunc(list, func(a, b match) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(b.to, a.to)) })
	var b strings.Builder
	at := 0
	for _, t := range list {
		if t.from < at { // overlaps one that is masked
			continue
		}
		b.WriteString(text[at:t.from])
		b.WriteString(mask(text[t.from:t.to], t.flag))
		at = t.to
	}
	b.WriteString(text[at:])
	return b.String()
}
