package mail

import (
	"bytes"
	"fmt"
)

// Read reads a message as [Parse] does and never fails: of what Parse refuses
// it returns what can be read of it, and the warnings say what cannot. For mail
// that has arrived: whatever it is, its inbox lists and opens it.
func Read(raw []byte) Message {
	m, err := Parse(raw)
	if err == nil {
		return m
	}
	reason := err
	// A header that is too long: its beginning says who and what.
	if head := beginning(raw); head != nil {
		if m, err := Parse(head); err == nil {
			m.warn("%s; only the beginning of its header was read, and nothing of what follows", reason)
			return m
		}
	}
	m = Message{}
	m.warn("%s", reason)
	// No header at all: it may still be words.
	p := parser{m: &m}
	m.Text = p.text("", "", raw[:min(len(raw), maxBody)])
	if len(raw) > maxBody {
		m.warn("a text is longer than %d octets; the rest is not shown", maxBody)
	}
	m.warn("there is no From address")
	return m
}

// beginning returns as many whole lines of raw's header as Parse takes, ended
// as a header, or nil where there is none.
func beginning(raw []byte) []byte {
	const most, lines = maxHeaderBytes / 2, maxHeaderFields / 2
	end := 0
	for range lines {
		i := bytes.IndexByte(raw[end:], '\n')
		if i < 0 || end+i+1 > most {
			break
		}
		end += i + 1
	}
	if end == 0 {
		// One line that never ends.
		if end = min(len(raw), most); bytes.IndexByte(raw[:end], ':') <= 0 {
			return nil
		}
	}
	return fmt.Appendf(bytes.Clone(raw[:end]), "\r\n\r\n")
}

// HTMLText returns the words of an HTML document, each link's target behind its
// words, also those that a mail program would hide.
func HTMLText(doc string) string {
	if doc == "" {
		return ""
	}
	return htmlText(doc, true).text
}
