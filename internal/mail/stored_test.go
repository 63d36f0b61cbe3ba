package mail_test

import (
	"slices"
	"strings"
	"testing"

	"postern/internal/mail"
)

// TestDescribeStored: what is said of a message in an inbox speaks of the message, and
// not of an envelope that nobody has any more.
func TestDescribeStored(t *testing.T) {
	for _, tt := range []struct{ name, header, want string }{
		{"plain", "From: bob@example.com\r\nTo: a@agents.test\r\n", ""},
		{"no author", "To: a@agents.test\r\n", "there is no From address"},
		{"two authors", "From: bob@example.com, eve@example.com\r\n", "there are 2 From addresses"},
		{"an invalid recipient", "From: bob@example.com\r\nTo: \"x\r\n", "the header To is not a proper list of addresses"},
		{"answers go elsewhere", "From: bob@example.com\r\nReply-To: eve@example.com\r\n", "answers would go to eve@example.com"},
	} {
		got := mail.DescribeStored([]byte(tt.header + "Subject: s\r\n\r\nx\r\n"))
		if notes := strings.Join(got.Notes, "; "); notes != tt.want {
			t.Errorf("%s: notes %q, want %q", tt.name, notes, tt.want)
		}
	}
	if got := mail.DescribeStored([]byte("\x00")); len(got.Notes) == 0 {
		t.Errorf("bytes that are no message: %+v", got)
	}
}

// TestBrought: only what this server wrote on top is passed over.
func TestBrought(t *testing.T) {
	const ours = "Authentication-Results: mx.agents.test;\r\n\tspf=pass\r\nReturn-Path: <b@x.example>\r\nReceived: from x ([192.0.2.1])\r\n\tby mx.agents.test with ESMTP id y;\r\n\tMon, 23 Nov 2026 18:00:00 +0000\r\n"
	for _, tt := range []struct {
		name, raw string
		want      []string
	}{
		{"ours", ours, nil},
		{"ours twice", ours + ours, []string{"authentication results", "Return-Path", "Received field in the name of this server"}},
		{"relayed", ours + "Received: from a by b.example; x\r\n", nil},
		{"relayed by a name that ends like ours", ours + "Received: from a by not.mx.agents.test; x\r\n", nil},
		{"from a provider, whose fields we do not know", "Delivered-To: a@b.example\r\nReturn-Path: <x@y.example>\r\nAuthentication-Results: mx.b.example; spf=pass\r\n", nil},
		{"in another order", "Return-Path: <x@y.example>\r\n" + ours, nil},
		{"no name", "Authentication-Results:\r\nReturn-Path: <>\r\nReceived: by\r\nReturn-Path: <>\r\n", nil},
	} {
		m, err := mail.Parse([]byte(tt.raw + "From: b@x.example\r\n\r\nx\r\n"))
		if err != nil {
			t.Fatal(err)
		}
		got := m.Brought()
		if !slices.EqualFunc(got, tt.want, strings.Contains) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}
