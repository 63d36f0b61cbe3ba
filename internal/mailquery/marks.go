package mailquery

import (
	"bytes"
	"strings"
)

// A Mark tells words of a field apart that stand in the text of a [Doc], behind its
// own words: fields that few messages have. [Words] never returns one.
type Mark byte

// The marks.
const (
	List       Mark = 1 + iota // words of List-Id
	Box                        // of Delivered-To and X-Original-To
	Bcc                        // of Bcc
	Importance                 // one word, high or low, as the sender says
)

// AppendMarked appends the words of a field to a text, each behind a mark. Most bounds
// the words, in bytes.
func AppendMarked(text []byte, m Mark, field string, most int) []byte {
	words, _ := Words(nil, field, most)
	if len(text) == 0 || text[len(text)-1] != ' ' {
		text = append(text, ' ')
	}
	for w := range bytes.FieldsSeq(words) {
		text = append(append(append(text, byte(m)), w...), ' ')
	}
	return text
}

// marked returns what finds the words of needle behind a mark.
func marked(m Mark, needle []byte) []byte {
	return bytes.ReplaceAll(needle[:len(needle)-1], []byte(" "), []byte{' ', byte(m)})
}

// around is found where words of two terms stand near each other in one field.
type around struct {
	a, b  words
	apart int // words at most between them
}

func (n around) match(d *Doc) Truth {
	near := func(field []byte) bool {
		for from := 0; ; {
			i := bytes.Index(field[from:], n.a.needle)
			if i < 0 {
				return false
			}
			i += from
			begin, end := i, i+len(n.a.needle)
			for range n.apart + 1 {
				if begin = bytes.LastIndexByte(field[:begin], ' '); begin < 0 {
					begin = 0
					break
				}
			}
			// One more, to see the beginning of the word and not the needle's own space.
			for range n.apart + 2 {
				next := bytes.IndexByte(field[min(end, len(field)):], ' ')
				if next < 0 {
					end = len(field)
					break
				}
				end += next + 1
			}
			if bytes.Contains(field[begin:min(i+1, len(field))], n.b.needle) || bytes.Contains(field[min(i+len(n.a.needle)-1, len(field)):min(end, len(field))], n.b.needle) {
				return true
			}
			from = i + 1
		}
	}
	if near(d.Subject) {
		return Yes
	}
	if !d.HasText {
		return Maybe
	}
	return truth(near(d.Text))
}

// elsewhere are terms of Gmail that mean nothing here, and what to use instead.
var elsewhere = map[string]string{
	"in:spam":          "held mail is in no inbox: a person releases it from quarantine. List what is held with GET /v1/inboxes/{inbox}/quarantine",
	"in:draft":         "drafts are not searched: list them with email_draft_list or GET /v1/inboxes/{inbox}/drafts",
	"is:draft":         "drafts are not searched: list them with email_draft_list or GET /v1/inboxes/{inbox}/drafts",
	"in:scheduled":     "what waits to be sent is an action: list it with GET /v1/actions",
	"in:outbox":        "what waits to be sent is an action: list it with GET /v1/actions",
	"in:snoozed":       "nothing is snoozed here: use a label of your own, label:later",
	"is:snoozed":       "nothing is snoozed here: use a label of your own, label:later",
	"is:muted":         "no thread is muted here: use in:archive, or a label of your own",
	"in:chats":         "there are no chats here",
	"is:chat":          "there are no chats here",
	"in:updates":       "write category:updates",
	"in:promotions":    "write category:promotions",
	"in:social":        "write category:social",
	"has:drive":        "links are not told apart: look for the text \"drive.google.com\"",
	"has:document":     "links are not told apart: look for the text \"docs.google.com\"",
	"has:spreadsheet":  "links are not told apart: look for the text \"docs.google.com\"",
	"has:presentation": "links are not told apart: look for the text \"docs.google.com\"",
	"has:youtube":      "links are not told apart: look for the text youtube.com",
}

// instead returns what to use instead of a term of Gmail, or nothing.
func instead(name, value string) string {
	if s, ok := elsewhere[name+":"+value]; ok {
		return s
	}
	switch {
	case strings.HasSuffix(value, "s") && elsewhere[name+":"+value[:len(value)-1]] != "":
		return elsewhere[name+":"+value[:len(value)-1]]
	case name == "has" && (strings.HasSuffix(value, "-star") || strings.HasSuffix(value, "-bang") || strings.HasSuffix(value, "-guillemet") || strings.HasSuffix(value, "-check") || strings.HasSuffix(value, "-info") || value == "purple-question"):
		return "there is one kind of star: write is:starred"
	}
	return ""
}
