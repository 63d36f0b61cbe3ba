package mail

import (
	"bytes"
	"encoding/base64"
	"io"
	"mime/quotedprintable"
	"strings"
)

// decode undoes a transfer encoding. It always copies.
func (p *parser) decode(encoding string, body []byte) []byte {
	switch strings.ToLower(strings.TrimSpace(encoding)) {
	case "base64":
		clean := make([]byte, 0, len(body))
		padded, after, odd := false, false, false
		for _, c := range body {
			switch {
			case c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '+' || c == '/':
				if padded {
					after = true
					continue
				}
				clean = append(clean, c)
			case c == '=':
				padded = true
			case c != '\r' && c != '\n' && c != ' ' && c != '\t':
				odd = true
			}
		}
		if after {
			p.m.warn("base64 goes on after its end; what follows was not read")
		}
		if odd || len(clean)%4 == 1 {
			p.m.warn("base64 has characters that do not belong")
		}
		if len(clean)%4 == 1 { // a lone last character carries no whole byte
			clean = clean[:len(clean)-1]
		}
		out, err := base64.RawStdEncoding.AppendDecode(nil, clean)
		if err != nil {
			p.m.warn("base64 cannot be read to its end")
		}
		return out
	case "quoted-printable":
		out, err := io.ReadAll(quotedprintable.NewReader(bytes.NewReader(body)))
		if err != nil {
			// The library stops at the first error; programs show the rest.
			p.m.warn("quoted-printable is malformed; the part is shown undecoded from there")
			out = lenientQP(body)
		}
		return out
	case "", "7bit", "8bit", "binary":
	default:
		p.m.warn("a transfer encoding is unknown: %s", quote(encoding))
	}
	return bytes.Clone(body)
}

func lenientQP(body []byte) []byte {
	out := make([]byte, 0, len(body))
	hex := func(c byte) int {
		i := strings.IndexByte("0123456789ABCDEFabcdef", c)
		if i > 15 {
			i -= 6
		}
		return i
	}
	for i := 0; i < len(body); i++ {
		c := body[i]
		if c == '=' {
			if i+2 < len(body) && hex(body[i+1]) >= 0 && hex(body[i+2]) >= 0 {
				out = append(out, byte(hex(body[i+1])<<4|hex(body[i+2])))
				i += 2
				continue
			}
			if rest := bytes.TrimLeft(body[i+1:], " \t\r"); len(rest) > 0 && rest[0] == '\n' {
				i = len(body) - len(rest)
				continue
			}
		}
		out = append(out, c)
	}
	return out
}

// text appends a text part that is in the given charset to what was read before.
func (p *parser) text(before, label string, data []byte) string {
	if len(data) > maxBody {
		data = data[:maxBody]
		p.m.warn("a text is longer than %d octets; the rest is not shown", maxBody)
	}
	s, odd := readCharset(label, data)
	if odd != "" {
		p.m.warn("%s", odd)
	}
	s = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(s)
	if strings.IndexByte(s, 0) >= 0 {
		p.m.warn("a text contains NUL characters")
		s = strings.ReplaceAll(s, "\x00", "\ufffd")
	}
	if len(before)+len(s) > maxBody {
		p.m.warn("a text is longer than %d octets; the rest is not shown", maxBody)
		s = strings.ToValidUTF8(s[:max(0, maxBody-len(before))], "")
	}
	if before != "" && !strings.HasSuffix(before, "\n") {
		before += "\n"
	}
	return before + s
}
