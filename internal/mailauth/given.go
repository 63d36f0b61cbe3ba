package mailauth

import (
	"bytes"
	"slices"
	"strings"

	"postern/internal/mail"
)

// Given returns what another server says about the sender of a message, in the first
// Authentication-Results field (RFC 8601) in its name. It is for messages that were
// fetched from a mailbox there: the server has put its field on top, and removed those
// that came in its name (section 5). Without such a field, or an empty name, nothing is
// said.
//
// The attack: a sender writes results in the name of another server, or puts a further
// field below the real one. Names must be equal, and only the first field counts.
func Given(raw []byte, name string) mail.Results {
	if name == "" {
		return mail.Results{}
	}
	for pos := 0; pos < min(len(raw), maxHeader); {
		end := fieldEnd(raw, pos)
		field := raw[pos:end]
		pos = end
		if len(bytes.TrimRight(field, "\r\n")) == 0 {
			break
		}
		key, value, ok := bytes.Cut(field, []byte(":"))
		if !ok || !bytes.EqualFold(bytes.TrimRight(key, " \t"), []byte("authentication-results")) {
			continue
		}
		parts := resultParts(string(value[:min(len(value), maxSignField)]))
		id := ""
		if len(parts) > 0 && len(parts[0]) > 0 { // a version may follow
			id = parts[0][0]
		}
		if strings.EqualFold(id, name) {
			return resultsOf(parts[1:], raw)
		}
	}
	return mail.Results{}
}

// resultParts splits the value of a field at semicolons, and each part into words.
// Comments are left out, but for what a result's policy is read from: see readWord.
func resultParts(s string) (parts [][]string) {
	var words []string
	for i := 0; i < len(s) && len(parts) < 100; {
		switch c := s[i]; {
		case c == ';':
			parts, words = append(parts, words), nil
			i++
		case strings.IndexByte(" \t\r\n", c) >= 0:
			i++
		default:
			var w string
			w, i = readWord(s, i)
			if w != "" && len(words) < 100 {
				words = append(words, w)
			}
		}
	}
	return append(parts, words)
}

// readWord reads a word, without quotation marks, or a comment, which it returns with
// its parenthesis. It returns where the next one begins.
func readWord(s string, i int) (string, int) {
	var b strings.Builder
	if s[i] == '(' {
		depth := 0
		for ; i < len(s); i++ {
			switch s[i] {
			case '\\':
				i++
				continue
			case '(':
				depth++
			case ')':
				depth--
			}
			if depth == 0 {
				return b.String(), i + 1
			}
			if b.Len() < 200 {
				b.WriteByte(s[i])
			}
		}
		return "", i // without its end
	}
	quoted := false
	for ; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '\\' && quoted && i+1 < len(s):
			i++
			c = s[i]
		case c == '"':
			quoted = !quoted
			continue
		case !quoted && strings.IndexByte(" \t\r\n;(", c) >= 0:
			return b.String(), i
		}
		if b.Len() < 1000 {
			b.WriteByte(c)
		}
	}
	if quoted {
		return "", i
	}
	return b.String(), i
}

// known are the results of RFC 8601 section 2.7.
var known = []string{"none", "pass", "fail", "softfail", "neutral", "policy", "temperror", "permerror"}

// resultsOf reads the parts behind the name. Of several results of a method the first
// that passed counts, else the first.
func resultsOf(parts [][]string, raw []byte) (r mail.Results) {
	for _, words := range parts {
		if len(words) == 0 {
			continue
		}
		method, result, ok := strings.Cut(words[0], "=")
		method, _, _ = strings.Cut(strings.ToLower(method), "/") // a version
		result = strings.ToLower(result)
		if !ok || !slices.Contains(known, result) {
			continue
		}
		c := mail.Check{Result: result, Domain: domainOf(words, method)}
		switch method {
		case "spf":
			better(&r.SPF, c)
		case "dkim":
			better(&r.DKIM, c)
		case "arc":
			better(&r.ARC, c)
		case "dmarc":
			if r.DMARC.Result == "" {
				r.DMARC, r.Policy = c, policyOf(words)
			}
		}
	}
	// The attack: a message with two authors, or a field that the provider reads and this
	// program shows in another way. What is proved must be proved about what is shown.
	authors, n, proper := mail.Authors(raw)
	if r.DMARC.Result == "pass" && (n != 1 || !proper || len(authors) != 1 || r.DMARC.Domain == "" || !strings.EqualFold(mail.Domain(authors[0].Addr), r.DMARC.Domain)) {
		r.DMARC.Result, r.DMARC.Detail = "permerror", "the provider's result is not about the author that the message shows"
	}
	return r
}

func better(old *mail.Check, c mail.Check) {
	if old.Result == "" || old.Result != "pass" && c.Result == "pass" {
		*old = c
	}
}

// domainOf returns the domain that a result is about.
func domainOf(words []string, method string) string {
	want := map[string][]string{"spf": {"smtp.mailfrom", "smtp.helo"}, "dkim": {"header.d", "header.i"}, "dmarc": {"header.from"}}[method]
	for _, property := range want {
		for _, w := range words[1:] {
			if k, v, ok := strings.Cut(w, "="); ok && strings.EqualFold(k, property) && len(v) <= 320 {
				return printable(strings.ToLower(v[strings.LastIndex(v, "@")+1:]), 253)
			}
		}
	}
	return ""
}

// policyOf returns what the author's domain asks for: the property policy.dmarc, or the
// comment that many servers write, "(p=REJECT sp=…)".
func policyOf(words []string) string {
	for _, w := range words[1:] {
		w = strings.ToLower(w)
		for _, prefix := range []string{"policy.dmarc=", "(p="} {
			if v, ok := strings.CutPrefix(w, prefix); ok {
				v, _, _ = strings.Cut(strings.TrimRight(v, ")"), " ")
				if v == "none" || v == "quarantine" || v == "reject" {
					return v
				}
			}
		}
	}
	return ""
}
