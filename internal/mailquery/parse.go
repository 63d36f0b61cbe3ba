package mailquery

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Operators says in one line what [Parse] takes, for an error or a help text.
const Operators = `words, "exact phrases", -not, OR, ( ), { }, from: to: cc: bcc: deliveredto: list: subject: filename: label: category: in: is: has: before: after: older_than: newer_than: larger: smaller: rfc822msgid:, a AROUND 5 b`

// Parse reads a query. What is wrong with it is told by an [Error].
//
// Terms that stand side by side must all be found; OR stands between two of
// which one is enough, and binds closer; so does { } around several.
func Parse(s string, o Options) (*Query, error) {
	if len(s) > MaxQuery {
		return nil, &Error{Reason: fmt.Sprintf("it has %d bytes, more than %d", len(s), MaxQuery)}
	}
	if !utf8.ValidString(s) {
		return nil, &Error{Reason: "it is not valid UTF-8"}
	}
	p := &parser{s: s, o: o, q: &Query{}}
	root, err := p.terms(0, 0, anyField)
	if err != nil {
		return nil, err
	}
	if p.count == 0 {
		return nil, &Error{Reason: "it is empty"}
	}
	p.q.root = root
	return p.q, nil
}

type parser struct {
	s     string
	pos   int
	count int
	o     Options
	q     *Query
}

func (p *parser) fail(from int, format string, args ...any) error {
	term := p.s[from:min(p.pos, len(p.s))]
	if cut := 60; len(term) > cut {
		for !utf8.RuneStart(term[cut]) {
			cut--
		}
		term = term[:cut] + "…"
	}
	return &Error{Term: strings.TrimSpace(term), Reason: fmt.Sprintf(format, args...)}
}

func (p *parser) space() {
	for p.pos < len(p.s) && strings.IndexByte(" \t\r\n", p.s[p.pos]) >= 0 {
		p.pos++
	}
}

// word says whether the bare word w is next, and passes it.
func (p *parser) word(w string) bool {
	rest, ok := strings.CutPrefix(p.s[p.pos:], w)
	if !ok || rest != "" && strings.IndexByte(" \t\r\n(){}\"", rest[0]) < 0 {
		return false
	}
	p.pos += len(w)
	return true
}

// terms reads terms up to the bracket closing, or to the end if that is 0.
func (p *parser) terms(closing byte, depth int, f field) (node, error) {
	from := p.pos
	if depth > maxDepth {
		return nil, p.fail(from, "there are more than %d brackets in each other", maxDepth)
	}
	var list []node
	or := false // an OR waits for its second term
	for {
		p.space()
		if p.pos == len(p.s) || strings.IndexByte(")}", p.s[p.pos]) >= 0 {
			break
		}
		at := p.pos
		switch {
		case p.word("OR") || p.word("|"):
			if len(list) == 0 || or {
				return nil, p.fail(at, "stands between two terms; to look for the word write it in quotes")
			}
			or = true
			continue
		case p.word("AND"):
			if len(list) == 0 || or {
				return nil, p.fail(at, "stands between two terms; to look for the word write it in quotes")
			}
			continue
		case p.word("AROUND"):
			n, err := p.around(at, list, or, depth, f)
			if err != nil {
				return nil, err
			}
			list[len(list)-1] = n
			continue
		}
		n, err := p.term(depth, f)
		if err != nil {
			return nil, err
		}
		if last := len(list) - 1; or {
			if o, ok := list[last].(some); ok {
				list[last] = append(o, n)
			} else {
				list[last] = some{list[last], n}
			}
			or = false
			continue
		}
		list = append(list, n)
	}
	if or {
		return nil, p.fail(from, "ends in OR")
	}
	if p.pos < len(p.s) {
		if c := p.s[p.pos]; c != closing {
			p.pos++
			return nil, p.fail(p.pos-1, "closes nothing")
		}
		p.pos++
	} else if closing != 0 {
		return nil, p.fail(max(0, from-1), "is not closed: %c is missing", closing)
	}
	if len(list) == 0 && closing != 0 {
		return nil, p.fail(max(0, from-1), "is empty")
	}
	if closing == '}' {
		return some(list), nil
	}
	// What OR has made of two is a group of its own even if it stands alone.
	return all(list), nil
}

// maxApart bounds AROUND, in words.
const maxApart = 100

// around reads what follows AROUND: how many words there may be between the word
// before it, which is the last of list, and the word that comes next.
func (p *parser) around(from int, list []node, or bool, depth int, f field) (node, error) {
	bad := func() (node, error) {
		return nil, p.fail(from, "stands between two words with a number of up to %d after it, as in holiday AROUND 10 vacation; to look for the word write it in quotes", maxApart)
	}
	if len(list) == 0 || or || f != anyField {
		return bad()
	}
	apart := 5
	p.space()
	at := p.pos
	if n, err := strconv.Atoi(p.bare()); err == nil && (n < 1 || n > maxApart) {
		return bad()
	} else if err == nil {
		apart = n
	} else {
		p.pos = at
	}
	p.space()
	if p.pos == len(p.s) || strings.IndexByte("(){}-", p.s[p.pos]) >= 0 {
		return bad()
	}
	next, err := p.term(depth, f)
	if err != nil {
		return nil, err
	}
	a, ok := list[len(list)-1].(words)
	b, also := next.(words)
	if !ok || !also || a.field != anyField || b.field != anyField {
		return bad()
	}
	return around{a, b, apart}, nil
}

// term reads one term, with its minus sign if it has one.
func (p *parser) term(depth int, f field) (node, error) {
	from := p.pos
	if p.count++; p.count > maxTerms {
		return nil, &Error{Reason: fmt.Sprintf("it has more than %d terms", maxTerms)}
	}
	if p.s[p.pos] == '-' {
		p.pos++
		if p.pos == len(p.s) || strings.IndexByte(" \t\r\n)}-", p.s[p.pos]) >= 0 {
			return nil, p.fail(from, "a minus sign stands directly before a term")
		}
		n, err := p.positive(depth, f, from)
		return not{n}, err
	}
	return p.positive(depth, f, from)
}

func (p *parser) positive(depth int, f field, from int) (node, error) {
	switch p.s[p.pos] {
	case '(':
		p.pos++
		return p.terms(')', depth+1, f)
	case '{':
		p.pos++
		return p.terms('}', depth+1, f)
	case '"':
		value, err := p.quoted(from)
		if err != nil {
			return nil, err
		}
		return p.find(from, f, value, true)
	}
	name, ok := p.operator()
	if !ok {
		value := p.bare()
		if v, plus := strings.CutPrefix(value, "+"); plus && v != "" { // exactly this word
			return p.find(from, f, v, true)
		}
		return p.find(from, f, value, false)
	}
	if f != anyField {
		p.bare()
		return nil, p.fail(from, "an operator cannot stand within the brackets of another")
	}
	if p.pos < len(p.s) && strings.IndexByte("({", p.s[p.pos]) >= 0 {
		g, ok := wordFields[name]
		if !ok {
			p.pos++
			return nil, p.fail(from, "%s takes one value, not several in brackets", name)
		}
		closing := byte(')')
		if p.s[p.pos] == '{' {
			closing = '}'
		}
		p.pos++
		return p.terms(closing, depth+1, g)
	}
	var value string
	var err error
	quoted := p.pos < len(p.s) && p.s[p.pos] == '"'
	if quoted {
		value, err = p.quoted(from)
	} else {
		value = p.bare()
	}
	if err != nil {
		return nil, err
	}
	if value == "" {
		return nil, p.fail(from, "needs a value right after the colon")
	}
	return p.apply(from, name, value, quoted)
}

// maxOperator bounds an operator's name, which an error repeats, in bytes. What
// is longer is a word with a colon in it.
const maxOperator = 40

// operator reads the name of an operator with its colon, if that is next. A
// colon further in a word belongs to it: 10:30, https://example.com.
func (p *parser) operator() (string, bool) {
	for i := p.pos; i < min(len(p.s), p.pos+maxOperator); i++ {
		c := p.s[i]
		switch {
		case c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= '0' && c <= '9' && i > p.pos:
		case c == ':' && i > p.pos && !strings.HasPrefix(p.s[i:], "://"):
			name := strings.ToLower(p.s[p.pos:i])
			p.pos = i + 1
			return name, true
		default:
			return "", false
		}
	}
	return "", false
}

func (p *parser) quoted(from int) (string, error) {
	p.pos++
	i := strings.IndexByte(p.s[p.pos:], '"')
	if i < 0 {
		p.pos = len(p.s)
		return "", p.fail(from, "its quotation marks are not closed")
	}
	value := p.s[p.pos : p.pos+i]
	p.pos += i + 1
	return value, nil
}

func (p *parser) bare() string {
	from := p.pos
	for p.pos < len(p.s) && strings.IndexByte(" \t\r\n(){}\"", p.s[p.pos]) < 0 {
		p.pos++
	}
	return p.s[from:p.pos]
}

// wordFields are the operators that look for words.
var wordFields = map[string]field{
	"from": fromField, "to": toField, "cc": ccField, "subject": subjectField, "filename": filesField,
	"list": listField, "deliveredto": boxField, "bcc": bccField,
}

// marks are those of the fields that stand in the text.
//
//exhaustive:ignore
var marks = map[field]Mark{listField: List, boxField: Box, bccField: Bcc, importance: Importance}

// find returns the node that looks for words.
func (p *parser) find(from int, f field, value string, exact bool) (node, error) {
	if strings.EqualFold(value, "me") && !exact && (f == fromField || f == toField || f == ccField || f == bccField || f == boxField) {
		if p.o.Me == "" {
			return nil, p.fail(from, "there is no me here: write the address")
		}
		value, exact = p.o.Me, true
	}
	needle, _ := Words(nil, value, MaxQuery*4)
	if len(needle) <= 1 {
		return nil, p.fail(from, "has no letter or digit to look for")
	}
	// A word of three letters or more finds those that begin with it; with
	// fewer that would be too many.
	if last := needle[bytes.LastIndexByte(needle[:len(needle)-1], ' ')+1 : len(needle)-1]; !exact && (utf8.RuneCount(last) >= 3) {
		needle = needle[:len(needle)-1]
	}
	if m, ok := marks[f]; ok {
		p.q.text = true
		whole := needle[len(needle)-1] == ' '
		if needle = marked(m, append(needle, ' ')); whole {
			needle = append(bytes.TrimSuffix(needle, []byte{' ', byte(m)}), ' ')
		}
		return words{f, needle}, nil
	}
	p.q.text = p.q.text || f == anyField
	return words{f, needle}, nil
}

// apply returns the node of an operator with its value.
func (p *parser) apply(from int, name, value string, quoted bool) (node, error) {
	if f, ok := wordFields[name]; ok {
		return p.find(from, f, value, quoted)
	}
	switch name {
	case "is":
		return p.is(from, strings.ToLower(value))
	case "in":
		return p.in(from, strings.ToLower(value))
	case "has":
		return p.has(from, strings.ToLower(value))
	case "label":
		return p.label(value), nil
	case "category":
		// As the Gmail connector labels them; the main one is personal there.
		if value = strings.ToLower(value); value == "primary" {
			value = "personal"
		}
		return labelled("category/" + value), nil
	case "before", "older", "after", "newer":
		t, err := p.date(from, value)
		if err != nil {
			return nil, err
		}
		if name == "before" || name == "older" {
			return fact(func(d *Doc) bool { return d.At.Before(t) }), nil
		}
		return fact(func(d *Doc) bool { return !d.At.Before(t) }), nil
	case "older_than", "newer_than":
		t, err := p.ago(from, strings.ToLower(value))
		if err != nil {
			return nil, err
		}
		if name == "older_than" {
			return fact(func(d *Doc) bool { return d.At.Before(t) }), nil
		}
		return fact(func(d *Doc) bool { return !d.At.Before(t) }), nil
	case "larger", "larger_than", "size", "smaller", "smaller_than":
		n, err := p.size(from, strings.ToLower(value))
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(name, "smaller") {
			return fact(func(d *Doc) bool { return d.Size < n }), nil
		}
		return fact(func(d *Doc) bool { return d.Size > n }), nil
	case "rfc822msgid":
		id := []byte("<" + strings.Trim(value, "<>") + ">")
		return fact(func(d *Doc) bool { return bytes.Equal(d.MessageID, id) }), nil
	}
	return nil, p.fail(from, "there is no operator %s: to look for the text write it in quotes. There are %s", name, Operators)
}

func (p *parser) is(from int, value string) (node, error) {
	switch value {
	case "read":
		return labelled("read"), nil
	case "unread":
		return not{labelled("read")}, nil
	case "starred":
		return labelled("starred"), nil
	case "unstarred":
		return not{labelled("starred")}, nil
	case "archived":
		return labelled("archived"), nil
	case "sent":
		return fact(func(d *Doc) bool { return d.Sent }), nil
	}
	if value == "important" { // as its sender says: nothing here judges that
		return p.find(from, importance, "high", true)
	}
	if s := instead("is", value); s != "" {
		return nil, p.fail(from, "%s", s)
	}
	return nil, p.fail(from, "is: takes read, unread, starred, unstarred, important, archived or sent")
}

func (p *parser) in(from int, value string) (node, error) {
	switch value {
	case "inbox":
		return all{fact(func(d *Doc) bool { return !d.Sent }), not{labelled("archived")}, not{labelled("trash")}}, nil
	case "sent":
		return fact(func(d *Doc) bool { return d.Sent }), nil
	case "archive", "archived":
		return labelled("archived"), nil
	case "starred":
		return labelled("starred"), nil
	case "trash":
		p.q.anywhere = true
		return labelled("trash"), nil
	case "anywhere":
		p.q.anywhere = true
		return fact(func(*Doc) bool { return true }), nil
	}
	if s := instead("in", value); s != "" {
		return nil, p.fail(from, "%s", s)
	}
	return nil, p.fail(from, "in: takes inbox, sent, archive, starred, trash or anywhere")
}

func (p *parser) has(from int, value string) (node, error) {
	switch value {
	case "attachment":
		return fact(func(d *Doc) bool { return d.Attachments > 0 }), nil
	case "userlabels":
		return labels(ownLabel), nil
	case "nouserlabels":
		return not{labels(ownLabel)}, nil
	}
	if s := instead("has", value); s != "" {
		return nil, p.fail(from, "%s", s)
	}
	return nil, p.fail(from, "has: takes attachment, userlabels or nouserlabels")
}

func ownLabel(d *Doc) bool {
	return slices.ContainsFunc(d.Labels, func(l string) bool { return !slices.Contains([]string{"read", "starred", "archived", "trash"}, l) })
}

// label returns the node of a label. Gmail writes those with spaces with hyphens.
func (p *parser) label(value string) node {
	name := strings.ReplaceAll(strings.ToLower(value), " ", "-")
	switch name {
	case "inbox", "sent":
		n, _ := p.in(0, name)
		return n
	case "important":
		n, _ := p.is(0, name)
		return n
	case "unread":
		return not{labelled("read")}
	case "trash":
		p.q.anywhere = true
	}
	return labelled(name)
}

func (p *parser) date(from int, value string) (time.Time, error) {
	for _, layout := range []string{"2006/1/2", "2006-1-2"} {
		if t, err := time.Parse(layout, value); err == nil {
			return t, nil
		}
	}
	if n, err := strconv.ParseInt(value, 10, 64); err == nil && n >= 1e8 && n < 1e11 {
		return time.Unix(n, 0), nil
	}
	return time.Time{}, p.fail(from, "takes a day as 2026/11/21, in UTC, or seconds since 1970")
}

func (p *parser) ago(from int, value string) (time.Time, error) {
	if n := len(value) - 1; n > 0 && n < 6 {
		if count, err := strconv.Atoi(value[:n]); err == nil && count > 0 {
			switch value[n] {
			case 'h':
				return p.o.Now.Add(-time.Duration(count) * time.Hour), nil
			case 'd':
				return p.o.Now.AddDate(0, 0, -count), nil
			case 'm':
				return p.o.Now.AddDate(0, -count, 0), nil
			case 'y':
				return p.o.Now.AddDate(-count, 0, 0), nil
			}
		}
	}
	return time.Time{}, p.fail(from, "takes a number with h, d, m (months) or y, as 7d")
}

func (p *parser) size(from int, value string) (int64, error) {
	value = strings.TrimSuffix(value, "b")
	unit := int64(1)
	if value != "" {
		switch value[len(value)-1] {
		case 'k':
			unit = 1 << 10
		case 'm':
			unit = 1 << 20
		case 'g':
			unit = 1 << 30
		}
		if unit > 1 {
			value = value[:len(value)-1]
		}
	}
	if n, err := strconv.ParseInt(value, 10, 64); err == nil && n >= 0 && n < 1<<32 {
		return n * unit, nil
	}
	return 0, p.fail(from, "takes bytes, or a number with K, M or G, as 5M")
}
