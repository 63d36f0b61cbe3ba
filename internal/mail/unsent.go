package mail

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"
	"time"
)

// Unsent returns a draft as a message that mail programs read, with its Bcc
// field. It is not what would be sent, and fields that are not finished, such as
// half an address, are written as they are. The same draft, time and name give
// the same bytes: programs fetch a message in pieces. The name goes into the
// Message-ID, such as "drf_1.2@agents.example".
func (d Draft) Unsent(at time.Time, name string) ([]byte, error) {
	var h bytes.Buffer
	fmt.Fprintf(&h, "Date: %s\r\n", at.UTC().Format(time.RFC1123Z))
	for _, l := range []struct {
		name string
		list []string
	}{{"From", []string{d.From}}, {"To", d.To}, {"Cc", d.Cc}, {"Bcc", d.Bcc}} {
		writeUnfinished(&h, l.name, l.list)
	}
	h.WriteString("Subject:" + unstructured(inLine(d.Subject), len("Subject:")) + "\r\n")
	fmt.Fprintf(&h, "Message-ID: <%s>\r\n", name)
	if id, err := checkID("in_reply_to", d.InReplyTo); err == nil {
		h.WriteString("In-Reply-To: " + id + "\r\n")
	}
	sep := "References: "
	for _, r := range d.References {
		if id, err := checkID("references", r); err == nil {
			h.WriteString(sep + id)
			sep = "\r\n "
		}
	}
	if sep != "References: " {
		h.WriteString("\r\n")
	}
	h.WriteString("MIME-Version: 1.0\r\n")
	body, err := composeBody(d)
	if err != nil {
		return nil, err
	}
	return append(h.Bytes(), steady(body, name)...), nil
}

// writeUnfinished writes a field of addresses: as such if all of them are, and
// else as text.
func writeUnfinished(h *bytes.Buffer, name string, list []string) {
	var as []Address
	for _, s := range list {
		a, err := ParseAddress(name, s)
		if err != nil {
			h.WriteString(name + ":" + unstructured(inLine(strings.Join(list, ", ")), len(name)+1) + "\r\n")
			return
		}
		as = append(as, a)
	}
	writeAddresses(h, name, as)
}

func inLine(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s))
}

// steady replaces the random boundaries of a composed body by ones that follow
// from name.
func steady(body []byte, name string) []byte {
	begin := []byte(`boundary="=_`)
	length := len(rand.Text())
	for i, from := 0, 0; ; i++ {
		at := bytes.Index(body[from:], begin)
		if at < 0 || from+at+len(begin)+length > len(body) {
			return body
		}
		from += at + len(begin)
		was := bytes.Clone(body[from : from+length])
		sum := sha256.Sum256(fmt.Appendf(nil, "%s %d", name, i))
		is := base32.StdEncoding.EncodeToString(sum[:])[:length]
		body = bytes.ReplaceAll(body, append([]byte("=_"), was...), []byte("=_"+is))
	}
}
