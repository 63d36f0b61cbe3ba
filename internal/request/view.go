package request

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/url"
	"slices"
	"sort"
	"strings"
	"unicode"
	"unicode/utf8"

	"postern/internal/extract"
	"postern/internal/leak"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
)

const (
	maxShown = 256 << 10 // bytes of a rendered body
	maxHex   = 4 << 10   // bytes of a body that are shown as hex
	maxParts = 100       // of a multipart body
)

// Show implements [oversight.Executor].
func (a *Admission) Show(act oversight.Action) (oversight.View, error) {
	if act.Kind == policy.KindTool {
		return showTool(act)
	}
	r, s, err := decodePayload(act.Kind, act.Payload)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", act.ID, err)
	}
	marks := marker(r)
	v := oversight.View{Title: r.Method + " to " + r.Host, Raw: raw(r)}
	if s != nil {
		v.Title = "Use of the secret " + s.Use.Secret + ": " + v.Title
	}
	b := render(r)
	p := parts{marks: marks}
	q := &oversight.RequestView{
		Method: r.Method, Scheme: r.Scheme, Host: r.Host, Type: r.Header.Get("Content-Type"), Size: int64(len(r.Body)), Shown: b.how,
		Port: strings.TrimPrefix(base(r), r.Scheme+"://"+r.Host), Path: p.split(target(r)), Body: p.split(b.text),
	}
	for _, u := range secrets(r) {
		q.Secrets = append(q.Secrets, u.Secret)
	}
	if s != nil && s.First {
		q.Grant, q.GrantOf = GrantTime, s.Use.Secret
	}
	add := func(name, value string) { v.Fields = append(v.Fields, oversight.Field{Name: name, Value: value}) }
	add("Request", r.Method+" "+base(r)+flat(q.Path))
	if len(r.Body) > 0 {
		add("Body", strings.TrimPrefix(fmt.Sprintf("%s, %d bytes, shown as %s", q.Type, len(r.Body), b.how), ", "))
	}
	add("Sandbox", act.Request.Sandbox)
	add("Template", act.Request.Template)
	for _, name := range names(r) {
		for _, value := range r.Header[name] {
			h := oversight.Header{Name: strings.ToLower(name), Value: p.split(value)}
			q.Headers = append(q.Headers, h)
			add("Header "+h.Name, flat(h.Value))
		}
	}
	v.Text, v.Request = flat(q.Body), q
	v.Notes, v.Partial = notes(r, s, b), b.partial
	if n := len(p.hidden); n > 0 {
		v.Notes = append(v.Notes, "it has characters that nobody sees or that look like a space, and they are shown as \\u{…}: "+strings.Join(p.hidden[:min(n, maxFindings)], ", ")+map[bool]string{true: fmt.Sprintf(" and %d more", n-maxFindings)}[n > maxFindings])
	}
	if p.masked {
		v.Notes = append(v.Notes, "texts that look like secrets are masked in this view; if approved, the request leaves with them unmasked")
		if v.Partial == "" {
			v.Partial = "texts that look like secrets are masked"
		}
	}
	return v, nil
}

// notes returns what a person should know before deciding about r.
func notes(r *outgoing.Request, s *SecretUse, b body) (out []string) {
	for _, u := range secrets(r) {
		var where []string
		for _, o := range r.Uses {
			if o.Secret == u.Secret && !slices.Contains(where, o.Where) {
				where = append(where, o.Where)
			}
		}
		out = append(out, fmt.Sprintf("Postern puts in the secret %s (%s); the code in the sandbox has never seen its value", u.Secret, strings.Join(where, ", ")))
	}
	if s != nil && s.First {
		out = append(out, fmt.Sprintf("if you approve it, this sandbox may use the secret %s for an hour, in any request to its hosts; you can end that at any time", s.Use.Secret))
	}
	if r.Scheme == "http" {
		out = append(out, "it leaves without encryption: everybody on the way can read and change it")
	}
	if strings.Contains(r.URL(), "‹secret ") || bytes.Contains(r.Body, []byte("‹secret ")) || slices.ContainsFunc(names(r), func(n string) bool {
		return strings.Contains(strings.Join(r.Header[n], "\n"), "‹secret ")
	}) {
		// The attack: code writes the mark itself, so that a key which it has stolen
		// elsewhere looks like one that Postern puts in.
		out = append(out, "it contains the text “‹secret” itself; only the secrets named above are put in by Postern")
	}
	if ambiguous(r) {
		out = append(out, "servers may read its path or its method in different ways; policy has judged each")
	}
	if _, unknown := r.Methods(); unknown != "" {
		out = append(out, "a server could read another method from it, since "+unknown)
	}
	if b.partial != "" {
		out = append(out, b.partial)
	}
	return out
}

// base returns scheme, host and port of r's URL.
func base(r *outgoing.Request) string {
	bare := *r
	bare.Path, bare.Query = "", ""
	return bare.URL()
}

// target returns path and query.
func target(r *outgoing.Request) string {
	if r.Query == "" {
		return r.Path
	}
	return r.Path + "?" + r.Query
}

func names(r *outgoing.Request) []string {
	out := make([]string, 0, len(r.Header))
	for n := range r.Header {
		out = append(out, n)
	}
	sort.Strings(out)
	return out
}

// raw returns r as HTTP/1.1 writes it, with sentinels in the places of secrets.
func raw(r *outgoing.Request) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\n", r.Method, target(r), strings.TrimPrefix(base(r), r.Scheme+"://"))
	for _, n := range names(r) {
		for _, v := range r.Header[n] {
			fmt.Fprintf(&b, "%s: %s\r\n", n, v)
		}
	}
	b.WriteString("\r\n")
	b.Write(r.Body)
	return b.Bytes()
}

// A mark is a text of a request that stands for a secret.
type mark struct{ text, secret string }

// marker returns the sentinels of r, also as they are in a URL.
func marker(r *outgoing.Request) (out []mark) {
	for _, u := range r.Uses {
		for _, t := range []string{u.Sentinel, url.QueryEscape(u.Sentinel), url.PathEscape(u.Sentinel)} {
			if t != "" && !slices.ContainsFunc(out, func(m mark) bool { return m.text == t }) {
				out = append(out, mark{t, u.Secret})
			}
		}
	}
	return out
}

// parts splits texts at the places of secrets, and masks what looks like one.
type parts struct {
	marks  []mark
	masked bool
	hidden []string // the characters that were escaped, such as "U+00AD"
}

func (p *parts) split(s string) (out []oversight.Span) {
	text := func(t string) {
		if t == "" {
			return
		}
		r := leak.Redact(t)
		p.masked = p.masked || r != t
		p.note(r)
		out = append(out, oversight.Span{Text: extract.Escape(r)})
	}
	for s != "" {
		at, found := len(s), mark{}
		for _, m := range p.marks {
			if i := strings.Index(s, m.text); i >= 0 && i < at {
				at, found = i, m
			}
		}
		text(s[:at])
		if at == len(s) {
			break
		}
		out = append(out, oversight.Span{Secret: found.secret})
		s = s[at+len(found.text):]
	}
	return out
}

// note notes which characters of s are escaped.
func (p *parts) note(s string) {
	before := rune(0)
	for _, r := range s {
		if c := fmt.Sprintf("U+%04X", r); r != '\n' && r != '\t' && (extract.Hidden(before, r) || extract.OddSpace(r)) && !slices.Contains(p.hidden, c) {
			p.hidden = append(p.hidden, c)
		}
		before = r
	}
}

// flat returns spans as one text.
func flat(list []oversight.Span) string {
	var b strings.Builder
	for _, s := range list {
		if s.Secret != "" {
			b.WriteString("‹secret " + s.Secret + "›")
			continue
		}
		b.WriteString(s.Text)
	}
	return b.String()
}

// A body is the body of a request as a person reads it.
type body struct {
	how     string // "JSON", "form", "multipart form", "text", "hex"; empty without a body
	text    string
	partial string // why text is not all of it
}

// render returns the body of r as a person reads it. The type that a request says is
// a hint only: what is not of that type is shown as text or as hex.
func render(r *outgoing.Request) body {
	b := r.Body
	if len(b) == 0 {
		return body{}
	}
	kind, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	var out body
	switch coding := strings.ToLower(strings.Join(r.Header.Values("Content-Encoding"), ", ")); {
	case coding != "" && coding != "identity":
		out = asHex(b)
		out.partial = "its body is compressed (" + clip(coding, 40) + ") and cannot be shown"
		return out
	case (kind == "application/json" || strings.HasSuffix(kind, "+json") || kind == "") && readable(b) && json.Valid(b):
		var buf bytes.Buffer
		if json.Indent(&buf, b, "", "  ") == nil { // keeps names that are there twice
			out = body{how: "JSON", text: buf.String()}
		}
	case kind == "application/x-www-form-urlencoded" && readable(b):
		if text, ok := asForm(string(b)); ok {
			out = body{how: "form", text: text}
		}
	case strings.HasPrefix(kind, "multipart/"):
		out = asMultipart(b, params["boundary"])
	}
	switch {
	case out.how != "":
	case readable(b):
		out = body{how: "text", text: strings.ReplaceAll(string(b), "\r\n", "\n")}
	default:
		return asHex(b)
	}
	if len(out.text) > maxShown {
		out.text = strings.ToValidUTF8(out.text[:maxShown], "")
		out.partial = fmt.Sprintf("only the beginning of its body of %d bytes is shown", len(b))
	}
	return out
}

// readable reports whether a person sees b as it is, as text.
func readable(b []byte) bool {
	return utf8.Valid(b) && bytes.IndexFunc(b, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\r' && r != '\t' }) < 0
}

func asHex(b []byte) body {
	out := body{how: "hex", text: hex.Dump(b[:min(len(b), maxHex)]), partial: "its body is not text and is shown as hex"}
	for magic, name := range map[string]string{"PK\x03\x04": "a ZIP archive", "\x1f\x8b": "compressed with gzip", "%PDF-": "a PDF document", "\x28\xb5\x2f\xfd": "compressed with zstd"} {
		if bytes.HasPrefix(b, []byte(magic)) {
			out.partial = "its body is " + name + " and cannot be shown"
		}
	}
	if len(b) > maxHex {
		out.partial += fmt.Sprintf(", the first %d of %d bytes", maxHex, len(b))
	}
	return out
}

// asForm returns the pairs of a form, one a line.
func asForm(s string) (string, bool) {
	var out strings.Builder
	for pair := range strings.SplitSeq(s, "&") {
		k, v, eq := strings.Cut(pair, "=")
		key, err := url.QueryUnescape(k)
		if err != nil || !readable([]byte(key)) {
			return "", false
		}
		value, err := url.QueryUnescape(v)
		if err != nil || !readable([]byte(value)) {
			return "", false
		}
		out.WriteString(indented(key))
		if eq {
			out.WriteString(" = " + indented(value))
		}
		out.WriteByte('\n')
	}
	return out.String(), true
}

// indented indents further lines. The attack: a value with a line break that reads
// like another pair.
func indented(s string) string {
	return strings.ReplaceAll(strings.ReplaceAll(s, "\r", ""), "\n", "\n    │ ")
}

// asMultipart returns the parts of a form with files. It returns the zero body if b
// cannot be parsed to its end.
func asMultipart(b []byte, boundary string) (out body) {
	if boundary == "" {
		return body{}
	}
	var text strings.Builder
	m := multipart.NewReader(bytes.NewReader(b), boundary)
	for i := range maxParts + 1 {
		p, err := m.NextRawPart()
		if errors.Is(err, io.EOF) && i > 0 {
			break
		}
		if err != nil || i == maxParts {
			return body{}
		}
		data, err := io.ReadAll(p)
		if err != nil {
			return body{}
		}
		for _, name := range sortedKeys(p.Header) {
			for _, v := range p.Header[name] {
				fmt.Fprintf(&text, "%s: %s\n", name, indented(v))
			}
		}
		if readable(data) && len(p.Header["Content-Transfer-Encoding"]) == 0 {
			fmt.Fprintf(&text, "    │ %s\n\n", indented(string(data)))
			continue
		}
		text.WriteString(hex.Dump(data[:min(len(data), 512)]))
		fmt.Fprintf(&text, "(%d bytes)\n\n", len(data))
		out.partial = "a part of its body is not text"
	}
	out.how, out.text = "multipart form", text.String()
	// What stands before the first boundary and after the last one.
	if !bytes.HasPrefix(b, []byte("--"+boundary)) || !bytes.HasSuffix(bytes.TrimRight(b, "\r\n"), []byte("--"+boundary+"--")) {
		out.partial = "its body has more than its parts"
	}
	return out
}

func sortedKeys(h map[string][]string) []string {
	out := make([]string, 0, len(h))
	for k := range h {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}

// maxFindings is how many findings of the content checks are told in words.
const maxFindings = 6

// findings runs the content checks over the request of a payload. Sentinels are left
// out: they look like secrets.
func findings(kind policy.Kind, payload []byte) (flags, notes []string) {
	r, _, err := decodePayload(kind, payload)
	if err != nil {
		return []string{string(leak.FlagUnread)}, nil
	}
	head := []string{target(r)}
	for _, n := range names(r) {
		head = append(head, n+": "+strings.Join(r.Header[n], ", "))
	}
	text, data := strings.Join(head, "\n"), r.Body
	for _, m := range marker(r) {
		text = strings.ReplaceAll(text, m.text, "")
		data = bytes.ReplaceAll(data, []byte(m.text), nil)
	}
	msg := leak.Message{Subject: text}
	switch {
	case len(data) == 0:
	case readable(data):
		msg.Text = string(data)
	default:
		msg.Files = []leak.File{{Name: "body", Data: data}}
	}
	found := leak.Find(msg)
	for _, f := range found.Flags {
		flags = append(flags, string(f))
	}
	for i, f := range found.Findings {
		if i == maxFindings {
			notes = append(notes, fmt.Sprintf("found: %d more", len(found.Findings)-i))
			break
		}
		f.Where = where(f.Where)
		notes = append(notes, "found: "+strings.ReplaceAll(f.String(), "\n", " "))
	}
	return flags, notes
}

// where translates the place of a finding in a mail to that in a request.
func where(s string) string {
	switch {
	case strings.HasPrefix(s, "subject"):
		return "URL or header" + strings.TrimPrefix(s, "subject")
	case strings.HasPrefix(s, "text"):
		return "body" + strings.TrimPrefix(s, "text")
	}
	return s
}
