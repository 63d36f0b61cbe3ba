package mail

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// report joins the parts of a multipart/report.
func report(kind string, parts ...string) string {
	s := "From: MAILER-DAEMON@mx.example\r\nTo: a@p.example\r\nContent-Type: multipart/report; report-type=" + kind + ";\r\n\tboundary=\"B\"\r\nMIME-Version: 1.0\r\n\r\nread on\r\n"
	for _, p := range parts {
		s += "--B\r\n" + p + "\r\n"
	}
	return s + "--B--\r\n"
}

const (
	notice   = "Content-Type: text/plain\r\n\r\nIt could not be delivered.\r\n"
	returned = "Content-Type: message/rfc822\r\n\r\nFrom: \"A\" <a@p.example>\r\nTo: b@q.example\r\nMessage-ID: <id1@p.example>\r\nPostern-Statement: v=1;\r\n\tx=y\r\nSubject: s\r\n\r\nbody\r\n"
)

var reportSeeds = map[string]string{
	"postfix": report("delivery-status", notice, "Content-Type: message/delivery-status\r\n\r\n"+
		"Reporting-MTA: dns; mx.example\r\nOriginal-Envelope-Id: act_1\r\nX-Postfix-Queue-ID: 1\r\nArrival-Date: Sat, 21 Nov 2026 10:00:00 +0000\r\n\r\n"+
		"Final-Recipient: rfc822; b2@q.example\r\nOriginal-Recipient: rfc822;b@q.example\r\nAction: failed\r\nStatus: 5.1.1\r\nRemote-MTA: dns; in.q.example\r\nDiagnostic-Code: smtp; 550 5.1.1 <b2@q.example>: no such\r\n    user\r\n\r\n"+
		"Final-Recipient: rfc822; c@q.example\r\nAction: delayed\r\nStatus: 4.4.1 (later)\r\n", returned),
	"headers alone, no empty line between": report("delivery-status", notice, "Content-Type: message/delivery-status\r\n\r\n"+
		"Reporting-MTA: dns; mx.example\r\nFinal-Recipient: RFC822; <b@q.example>\r\nAction: Failed (unknown)\r\nStatus: five\r\n",
		"Content-Type: text/rfc822-headers\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\nFrom: a@p.example\r\nMessage-ID: <id=3D1@p.example>\r\n"),
	"complaint": report("feedback-report", notice, "Content-Type: message/feedback-report\r\n\r\n"+
		"Feedback-Type: Abuse\r\nUser-Agent: SomeGenerator/1.0\r\nVersion: 1\r\nOriginal-Mail-From: <a@p.example>\r\nOriginal-Rcpt-To: <b@q.example>\r\nSource-IP: 192.0.2.1\r\n", returned),
	"complaint without recipients": report("feedback-report", notice, "Content-Type: message/feedback-report\r\n\r\nFeedback-Type: abuse\r\nUser-Agent: x\r\nVersion: 1\r\n"),
	"no recipients":                report("delivery-status", notice, "Content-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; mx.example\r\n"),
	"an action that does not exist": report("delivery-status", "Content-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; x\r\n\r\n"+
		"Final-Recipient: rfc822; b@q.example\r\nAction: burned\r\nStatus: 5.0.0\r\n"),
	"an invalid address": report("delivery-status", "Content-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; x\r\n\r\n"+
		"Final-Recipient: rfc822; b\"@q.example, c@q.example\r\nAction: failed\r\nStatus: 5.0.0\r\n"),
	"plain mail": "From: a@p.example\r\nContent-Type: text/plain\r\n\r\nReporting-MTA: dns; x\r\n",
	"control characters": report("delivery-status", "Content-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; \x1b[2Jx\r\n\r\n"+
		"Final-Recipient: rfc822; b@q.example\r\nAction: failed\r\nStatus: 5.0.0\r\nDiagnostic-Code: smtp; =?utf-8?q?=E2=80=AE?=\x07"+strings.Repeat("x", 2000)+"\r\n"),
}

func TestParseReport(t *testing.T) {
	header := "From: \"A\" <a@p.example>\r\nTo: b@q.example\r\nMessage-ID: <id1@p.example>\r\nPostern-Statement: v=1;\r\n\tx=y\r\nSubject: s\r\n"
	for name, want := range map[string]*Report{
		"postfix": {
			Kind: DeliveryReport, Reporter: "mx.example", EnvelopeID: "act_1", Header: []byte(header), MessageID: "<id1@p.example>", From: "a@p.example",
			Recipients: []ReportRecipient{
				{Address: "b@q.example", Final: "b2@q.example", Action: ReportFailed, Status: "5.1.1", Diagnostic: "550 5.1.1 <b2@q.example>: no such    user", RemoteMTA: "in.q.example"},
				{Address: "c@q.example", Final: "c@q.example", Action: ReportDelayed, Status: "4.4.1"},
			},
		},
		"headers alone, no empty line between": {
			Kind: DeliveryReport, Reporter: "mx.example", Header: []byte("From: a@p.example\r\nMessage-ID: <id=1@p.example>\r\n"), MessageID: "<id=1@p.example>", From: "a@p.example",
			Recipients: []ReportRecipient{{Address: "b@q.example", Final: "b@q.example", Action: ReportFailed}},
		},
		"complaint": {
			Kind: AbuseReport, Feedback: "abuse", Reporter: "SomeGenerator/1.0", Header: []byte(header), MessageID: "<id1@p.example>", From: "a@p.example",
			Recipients: []ReportRecipient{{Address: "b@q.example"}},
		},
		"complaint without recipients": {Kind: AbuseReport, Feedback: "abuse", Reporter: "x"},
		"no recipients":                nil, "an action that does not exist": nil, "an invalid address": nil, "plain mail": nil,
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := ParseReport([]byte(reportSeeds[name]))
			if ok != (want != nil) {
				t.Fatalf("it is a report: %v, want %v (%+v)", ok, want != nil, got)
			}
			if want != nil {
				if d := cmp.Diff(*want, got); d != "" {
					t.Error(d)
				}
			}
		})
	}
}

func FuzzParseReport(f *testing.F) {
	for _, s := range reportSeeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, ok := ParseReport(raw)
		if !ok {
			return
		}
		texts := []string{r.Reporter, r.Feedback, r.EnvelopeID, r.MessageID, r.From}
		if r.Kind != DeliveryReport && r.Kind != AbuseReport || len(r.Recipients) > maxReportRecipients || len(r.Header) > maxReportHeader {
			t.Errorf("got %q with %d recipients and a header of %d", r.Kind, len(r.Recipients), len(r.Header))
		}
		for _, to := range r.Recipients {
			texts = append(texts, to.Address, to.Final, to.Status, to.Diagnostic, to.RemoteMTA)
			if _, err := CheckAddr("", to.Address); err != nil {
				t.Error(err)
			}
		}
		if i := slices.IndexFunc(texts, func(s string) bool { return controls(s) != "" || !utf8.ValidString(s) || len(s) > 1000 }); i >= 0 {
			t.Errorf("unprintable %q", texts[i])
		}
	})
}
