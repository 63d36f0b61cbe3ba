package mailauth

import (
	"bytes"
	"strings"

	"postern/internal/mail"
)

// field returns the Authentication-Results field with its line end, RFC 8601.
func (v *Verifier) field(m Message, from, helo spfResult, sigs []signature, chain arcResult, a author, r mail.Results) []byte {
	var b bytes.Buffer
	b.WriteString("Authentication-Results: " + strings.ToLower(v.cfg.Hostname))
	add := func(method, result, reason string, properties ...string) {
		b.WriteString(";\r\n\t" + method + "=" + result)
		if reason != "" && result != "pass" {
			b.WriteString("\r\n\t reason=" + quoted(reason))
		}
		for i := 0; i < len(properties); i += 2 {
			if properties[i+1] != "" {
				b.WriteString("\r\n\t " + properties[i] + "=" + pvalue(properties[i+1]))
			}
		}
	}
	if m.From != "" {
		add("spf", from.result, from.detail, "smtp.mailfrom", m.From)
	}
	if helo.domain != "" {
		add("spf", helo.result, helo.detail, "smtp.helo", helo.domain)
	} else if m.From == "" {
		add("spf", "none", helo.detail)
	}
	if len(sigs) == 0 {
		add("dkim", "none", "")
	}
	for _, s := range sigs {
		add("dkim", s.result, s.detail, "header.d", s.domain, "header.s", printable(s.selector, 63), "header.b", s.begin)
	}
	if chain.result != "none" {
		add("arc", chain.result, chain.detail)
	}
	policy := ""
	if rec := a.tree.policy(); a.domain != "" && rec != nil {
		policy = rec.asks(a)
	}
	add("dmarc", r.DMARC.Result, r.DMARC.Detail, "header.from", a.domain, "policy.dmarc", policy)
	b.WriteString("\r\n")
	return b.Bytes()
}

// pvalue encodes a property's value: unquoted if RFC 8601 section 2.2 allows it, otherwise
// quoted.
func pvalue(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("!#$%&'*+-/=?^_`{|}~.@", r)
	}
	local, domain, ok := strings.Cut(s, "@")
	if strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 && (!ok || local != "" && domain != "" && !strings.Contains(domain, "@")) && (ok || !strings.ContainsAny(s, "/=?")) {
		return s
	}
	return quoted(s)
}

// quoted returns s as a quoted-string, printable and bounded.
func quoted(s string) string {
	s = printable(s, 300)
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// Strip removes the Authentication-Results fields in this server's name from a message,
// RFC 8601 section 5. The attack: a message carries a forged result of this server. If
// there is none, Strip returns raw itself.
func (v *Verifier) Strip(raw []byte) []byte {
	var out []byte
	kept := 0
	for pos := 0; pos < len(raw); {
		end := fieldEnd(raw, pos)
		line := raw[pos:end]
		if len(bytes.TrimRight(line, "\r\n")) == 0 {
			break
		}
		if v.claims(line) {
			out = append(out, raw[kept:pos]...)
			kept = end
		}
		pos = end
	}
	if kept == 0 {
		return raw
	}
	return append(out, raw[kept:]...)
}

// fieldEnd returns the end of the field that begins at pos, including folded lines.
func fieldEnd(raw []byte, pos int) int {
	for {
		i := bytes.IndexByte(raw[pos:], '\n')
		if i < 0 {
			return len(raw)
		}
		pos += i + 1
		if pos >= len(raw) || raw[pos] != ' ' && raw[pos] != '\t' {
			return pos
		}
	}
}

// claims reports whether a field could be read as a result of this server. It is strict
// on purpose: any text before the first semicolon that contains the server's name counts,
// also in quotes, between comments, and in any case.
func (v *Verifier) claims(field []byte) bool {
	name, value, ok := bytes.Cut(field, []byte(":"))
	if !ok || !bytes.EqualFold(bytes.TrimRight(name, " \t"), []byte("authentication-results")) {
		return false
	}
	id, depth, inQuotes := make([]byte, 0, 100), 0, false
	for i := 0; i < len(value); i++ {
		switch c := value[i]; {
		case c == '\\' && i+1 < len(value) && (inQuotes || depth > 0):
			if i++; depth == 0 {
				id = append(id, value[i])
			}
		case c == '"' && depth == 0:
			inQuotes = !inQuotes
		case c == '(' && !inQuotes:
			depth++
		case c == ')' && !inQuotes && depth > 0:
			depth--
		case c == ';' && !inQuotes && depth == 0:
			i = len(value)
		case depth == 0 && c != '\r' && c != '\n' && c != '\t' && c != ' ':
			id = append(id, c)
		}
		if len(id) > 2000 {
			break
		}
	}
	return bytes.Contains(bytes.ToLower(id), []byte(strings.ToLower(v.cfg.Hostname)))
}
