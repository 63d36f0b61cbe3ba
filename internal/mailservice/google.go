package mailservice

import (
	"encoding/base64"
	"maps"
	"mime"
	"slices"
	"strings"
)

// gmailSend reads users.messages.send of the Gmail API: {"raw": …, "threadId": …}.
func gmailSend(c content) ([]Mail, error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	o := r.object("", v)
	// Gmail takes base64url, with and without padding.
	raw, err := base64.RawURLEncoding.Strict().DecodeString(strings.TrimRight(o.text("raw"), "="))
	if err != nil || strings.ContainsAny(o.text("raw"), "\r\n") || len(raw) == 0 {
		r.fail("raw: is not a message as base64url")
	}
	return gmailMessage(o, raw)
}

func gmailMessage(o object, raw []byte) ([]Mail, error) {
	thread := Mail{}
	o.note(&thread, "threadId")
	o.end()
	if o.r.err != nil {
		return nil, o.r.err
	}
	m, err := message(raw, nil)
	m.Fields = thread.Fields
	return []Mail{m}, err
}

// gmailUpload reads the same of an upload: the message alone, or after a part of JSON.
func gmailUpload(c content) ([]Mail, error) {
	switch c.kind {
	case "message/rfc822":
		m, err := message(c.body, nil)
		return []Mail{m}, err
	case "multipart/related":
		parts, err := c.parts()
		if err != nil {
			return nil, err
		}
		if len(parts) != 2 {
			return nil, unknown("multipart: has %d parts instead of two", len(parts))
		}
		for i, want := range []string{"application/json", "message/rfc822"} {
			for _, name := range slices.Sorted(maps.Keys(parts[i].header)) {
				v := parts[i].header[name]
				kind, params, err := mime.ParseMediaType(v)
				if name != "content-type" || err != nil || kind != want || len(params) > 1 || len(params) == 1 && !strings.EqualFold(params["charset"], "utf-8") {
					return nil, unknown("multipart: header %s of part %d: its meaning is not known", name, i+1)
				}
			}
			if len(parts[i].header) != 1 {
				return nil, unknown("multipart: part %d has no Content-Type", i+1)
			}
		}
		r, v, err := parseJSON(parts[0].body)
		if err != nil {
			return nil, err
		}
		return gmailMessage(r.object("", v), parts[1].body)
	}
	return nil, unknown("Content-Type: %s is not a message", c.kind)
}
