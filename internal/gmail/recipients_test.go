package gmail_test

import (
	netmail "net/mail"
	"slices"
	"strings"
	"testing"

	"postern/internal/gmail"
	"postern/internal/mail"
)

// TestRecipientsMustEqualTheHeader is the attack on a service without an envelope: the
// message names more than were approved.
func TestRecipientsMustEqualTheHeader(t *testing.T) {
	t.Parallel()
	var s gmail.Service
	const to = "bob@partner.example"
	for _, tt := range []struct {
		name, header, wants string // part of the reason; empty means that it may leave
	}{
		{"one", "To: " + to, ""},
		{"with a name", "To: Bob <" + to + ">", ""},
		{"with a quoted name", "To: \"Roe, Bob\" <" + to + ">", ""},
		{"with an encoded name", "To: =?utf-8?q?B=C3=B6b?= <" + to + ">", ""},
		{"folded", "To: Bob\r\n <" + to + ">", ""},
		{"hidden alone", "To: undisclosed-recipients:;", ""},
		{"no To at all", "Subject: x", ""},
		{"in capitals", "TO: bob@PARTNER.example", ""},
		{"another one", "To: " + to + ", thief@evil.example", "thief@evil.example"},
		{"another one in Cc", "To: " + to + "\r\nCc: thief@evil.example", "thief@evil.example"},
		{"a Bcc field", "To: " + to + "\r\nBcc: thief@evil.example", "Bcc"},
		{"a resent field", "To: " + to + "\r\nResent-Bcc: thief@evil.example", "Resent-Bcc"},
		{"a second To", "To: " + to + "\r\nto: thief@evil.example", "more than once"},
		{"a group", "To: team: thief@evil.example;", "not every program"},
		{"a comment", "To: " + to + " (, thief@evil.example)", "not every program"},
		{"a backslash", `To: "x\" <thief@evil.example>, \"" <` + to + ">", "not every program"},
		{"an address in quotes", `To: "thief@evil.example" <` + to + ">", "not every program"},
		{"an encoded address", "To: =?utf-8?q?=3Cthief=40evil.example=3E?= <" + to + ">", "looks like"},
		{"a route", "To: <@evil.example:" + to + ">", "not every program"},
		{"two brackets", "To: <thief@evil.example> <" + to + ">", "not every program"},
		{"a semicolon", "To: " + to + "; thief@evil.example", "not every program"},
		{"a line that is not a field", "To: " + to + "\r\nCc thief@evil.example", "not a field"},
		{"a space before the colon", "To: " + to + "\r\nCc : thief@evil.example", "not a field"},
		{"another local part", "To: BOB@partner.example", "BOB@"},
		{"another sender", "To: " + to + "\r\nFrom: boss@gmail.example", "more than once"},
		{"sent for another", "To: " + to + "\r\nSender: boss@gmail.example", "Sender"},
	} {
		e := mail.Envelope{From: ann, To: []string{to}, Raw: []byte("From: " + ann + "\r\n" + tt.header + "\r\n\r\nHello\r\n")}
		err := s.Check(e)
		if tt.wants == "" && err != nil || tt.wants != "" && (err == nil || !strings.Contains(err.Error(), tt.wants)) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.wants)
		}
	}
	e := mail.Envelope{From: ann, To: []string{to}, Raw: []byte("From: boss@gmail.example\r\nTo: " + to + "\r\n\r\nHello\r\n")}
	if err := s.Check(e); err == nil || !strings.Contains(err.Error(), "From") {
		t.Errorf("another From: got %v", err)
	}
	if err := s.Check(mail.Envelope{From: ann, To: []string{to}, Raw: []byte("To: " + to + "\r\n\r\nx\r\n")}); err == nil {
		t.Error("without From: it may leave")
	}
	// Everything that is composed here can be expressed.
	for _, d := range []mail.Draft{
		{From: ann, To: []string{"Bob <" + to + ">", "\"Roe, Zoë\" <zoe@partner.example>"}, Bcc: []string{"x@partner.example"}, Subject: "ä", Text: "x"},
		{From: "Ann <" + ann + ">", Bcc: []string{to}, Subject: "x", Text: "x"},
	} {
		e, err := mail.Compose(d, testTime, "agents.example")
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Check(e); err != nil {
			t.Errorf("a composed message: %v\n%s", err, e.Raw)
		}
	}
}

// FuzzHandOver: what may leave names, as another parser reads it, exactly the recipients.
func FuzzHandOver(f *testing.F) {
	for _, s := range []string{
		"To: bob@partner.example", "To: \"a\" <bob@partner.example>, cy@x.example", "Cc: team: a@x.example;", "To: bob@partner.example (x)", "To: =?utf-8?q?x?= <bob@partner.example>", "To:bob@partner.example\r\n ,\tcy@x.example", "Subject: x",
	} {
		f.Add(s, "bob@partner.example")
	}
	f.Fuzz(func(t *testing.T, header, to string) {
		e := mail.Envelope{From: ann, To: []string{to, "cy@x.example"}, Raw: []byte("From: " + ann + "\r\n" + header + "\r\n\r\nHello\r\n")}
		if _, err := e.Payload(); err != nil {
			return
		}
		raw, err := gmail.HandOver(e)
		if err != nil {
			return
		}
		if !strings.HasSuffix(string(raw), string(e.Raw)) {
			t.Fatal("the approved bytes have changed")
		}
		m, err := netmail.ReadMessage(strings.NewReader(string(raw)))
		if err != nil {
			return // Gmail refuses it, too
		}
		for _, name := range []string{"To", "Cc", "Bcc"} {
			for _, v := range m.Header[name] {
				list, err := netmail.ParseAddressList(v)
				if err != nil {
					continue
				}
				for _, a := range list {
					if !slices.ContainsFunc(e.To, func(to string) bool { return strings.EqualFold(to, a.Address) }) {
						t.Fatalf("%s %q reaches %q, approved were %q", name, v, a.Address, e.To)
					}
				}
			}
		}
	})
}
