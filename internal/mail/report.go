package mail

import (
	"bytes"
	"mime"
	"slices"
	"strings"
)

// A ReportKind says what a [Report] is about.
type ReportKind string

// The kinds of reports.
const (
	DeliveryReport ReportKind = "delivery" // RFC 3464: what became of a message
	AbuseReport    ReportKind = "feedback" // RFC 5965: somebody complains about one
)

// A ReportAction is what became of a message for one recipient.
type ReportAction string

// The actions of RFC 3464 section 2.3.3.
const (
	ReportFailed    ReportAction = "failed"
	ReportDelayed   ReportAction = "delayed"
	ReportDelivered ReportAction = "delivered"
	ReportRelayed   ReportAction = "relayed"
	ReportExpanded  ReportAction = "expanded"
)

// A Report is what another server says of mail that was sent before: that it
// was not delivered, or that its reader complains.
//
// Nothing in it is proved. The attack: whoever guesses that a message was sent
// reports that it bounced, and has a recipient suppressed or a sender
// suspended. So a report counts only where Header, the header of what was
// sent, holds something that its forger could not know.
type Report struct {
	Kind       ReportKind
	Reporter   string            // who says it, as it calls itself: Reporting-MTA, or User-Agent; may be empty
	Feedback   string            // of a complaint: abuse, fraud, not-spam, virus, other …; lower case
	EnvelopeID string            // ENVID that was given with the message; may be empty
	Recipients []ReportRecipient // of a complaint with no action and no status
	// Header is the header of the message that the report is about, as it was
	// returned, with its line ends; empty if none was.
	Header    []byte
	MessageID string // of that message, with its angle brackets; may be empty
	From      string // address in its From field; may be empty
}

// A ReportRecipient is what became of the message for one recipient.
type ReportRecipient struct {
	Address    string // local@domain that was sent to: Original-Recipient if it is there, else Final-Recipient
	Final      string // where it ended, which an alias may have changed; may be empty
	Action     ReportAction
	Status     string // RFC 3463, "5.1.1"; empty where it was malformed
	Diagnostic string // what the last server said; printable, bounded
	RemoteMTA  string // which server that was; printable, may be empty
}

// The limits of what is read of a report.
const (
	maxReportRecipients = 1000
	maxReportHeader     = 64 << 10 // bytes of the header of what was sent
	maxReportText       = 500      // bytes of a text in it
)

// ParseReport reads a delivery status notification or a complaint. It returns
// false for every other message.
func ParseReport(raw []byte) (Report, bool) {
	if len(raw) > maxParseBytes {
		return Report{}, false
	}
	fields, body, _, err := splitHeader(raw)
	if err != nil {
		return Report{}, false
	}
	unfold(fields)
	mediaType, params, err := mime.ParseMediaType(first(fields, "Content-Type"))
	boundary := params["boundary"]
	if err != nil || mediaType != "multipart/report" || boundary == "" || len(boundary) > 200 {
		return Report{}, false
	}
	p := parser{m: &Message{}}
	var r Report
	parts, _, _ := splitParts(body, boundary)
	for _, part := range parts {
		head, content, _, err := splitHeader(part)
		if err != nil {
			continue
		}
		unfold(head)
		kind, _, err := mime.ParseMediaType(first(head, "Content-Type"))
		if err != nil {
			continue
		}
		read := func() []byte { return p.decode(first(head, "Content-Transfer-Encoding"), content) }
		switch kind {
		case "message/delivery-status", "message/global-delivery-status":
			if r.Kind == "" {
				r.readDelivery(read())
			}
		case "message/feedback-report":
			if r.Kind == "" {
				r.readFeedback(read())
			}
		case "message/rfc822", "text/rfc822-headers", "message/global", "message/global-headers", "message/rfc822-headers":
			if r.Header == nil {
				r.readOriginal(read())
			}
		}
	}
	return r, r.Kind != "" && len(r.Recipients) > 0 || r.Kind == AbuseReport
}

// groups reads blocks of fields with empty lines between them.
func groups(body []byte) (out [][]field) {
	for len(out) <= maxReportRecipients {
		body = bytes.TrimLeft(body, "\r\n")
		if len(body) == 0 {
			break
		}
		fields, rest, _, err := splitHeader(body)
		if err != nil || len(rest) >= len(body) || len(fields) == 0 {
			break
		}
		unfold(fields)
		out = append(out, fields)
		body = rest
	}
	return out
}

func (r *Report) readDelivery(body []byte) {
	blocks := groups(body)
	if len(blocks) == 0 {
		return
	}
	// Some servers leave the empty line after the message's own fields out.
	if count(blocks[0], "Action") > 0 {
		blocks = slices.Insert(blocks, 0, blocks[0])
	}
	r.Kind = DeliveryReport
	r.Reporter = typed(first(blocks[0], "Reporting-MTA"))
	r.EnvelopeID = Printable(first(blocks[0], "Original-Envelope-Id"), maxReportText)
	for _, b := range blocks[1:] {
		to := ReportRecipient{
			Final: reportAddress(first(b, "Final-Recipient")), Diagnostic: typed(first(b, "Diagnostic-Code")),
			RemoteMTA: typed(first(b, "Remote-MTA")), Status: reportStatus(first(b, "Status")),
		}
		to.Address = reportAddress(first(b, "Original-Recipient"))
		if to.Address == "" {
			to.Address = to.Final
		}
		action, _, _ := strings.Cut(strings.ToLower(first(b, "Action")), " ") // "failed (user unknown)"
		to.Action = ReportAction(strings.TrimSpace(action))
		switch to.Action {
		case ReportFailed, ReportDelayed, ReportDelivered, ReportRelayed, ReportExpanded:
		default:
			continue // RFC 3464 knows no other; what it could mean is not guessed
		}
		if to.Address != "" {
			r.Recipients = append(r.Recipients, to)
		}
	}
}

func (r *Report) readFeedback(body []byte) {
	blocks := groups(body)
	if len(blocks) == 0 || first(blocks[0], "Feedback-Type") == "" {
		return
	}
	r.Kind = AbuseReport
	r.Feedback = strings.ToLower(Printable(first(blocks[0], "Feedback-Type"), 50))
	r.Reporter = Printable(first(blocks[0], "User-Agent"), maxReportText)
	r.EnvelopeID = Printable(first(blocks[0], "Original-Envelope-Id"), maxReportText)
	for _, f := range blocks[0] {
		if !f.is("Original-Rcpt-To") || len(r.Recipients) == maxReportRecipients {
			continue
		}
		if a := reportAddress(f.value); a != "" {
			r.Recipients = append(r.Recipients, ReportRecipient{Address: a})
		}
	}
}

func (r *Report) readOriginal(message []byte) {
	fields, _, _, err := splitHeader(message)
	if err != nil || len(fields) == 0 {
		return
	}
	unfold(fields)
	var b bytes.Buffer
	for _, f := range fields {
		if b.Len()+len(f.raw) > maxReportHeader {
			break
		}
		b.Write(f.raw)
	}
	r.Header = b.Bytes()
	if ids := messageIDs(first(fields, "Message-ID")); len(ids) > 0 {
		r.MessageID = ids[0]
	}
	if from, _ := parseList(first(fields, "From")); len(from) > 0 {
		r.From = from[0].Addr
	}
}

// typed returns the value of a field such as "dns; mx.example.com" or
// "smtp; 550 no such user".
func typed(v string) string {
	if kind, rest, ok := strings.Cut(v, ";"); ok && !strings.ContainsAny(strings.TrimSpace(kind), " \t") {
		v = rest
	}
	return Printable(strings.TrimSpace(decodeWords(v)), maxReportText)
}

// reportAddress returns the address of a field such as "rfc822; a@b.example",
// or the empty string.
func reportAddress(v string) string {
	if kind, rest, ok := strings.Cut(v, ";"); ok && !strings.Contains(kind, "@") {
		v = rest
	}
	v = strings.TrimSpace(v)
	if i := strings.IndexByte(v, '<'); i >= 0 && strings.HasSuffix(v, ">") {
		v = v[i+1 : len(v)-1]
	}
	a, err := CheckAddr("recipient", v)
	if err != nil {
		return ""
	}
	return a
}

// reportStatus returns a code of RFC 3463, or the empty string.
func reportStatus(v string) string {
	v, _, _ = strings.Cut(strings.TrimSpace(v), " ") // "5.0.0 (permanent failure)"
	nums := strings.Split(v, ".")
	if len(nums) != 3 || nums[0] != "2" && nums[0] != "4" && nums[0] != "5" {
		return ""
	}
	for _, n := range nums {
		if n == "" || len(n) > 3 || strings.Trim(n, "0123456789") != "" {
			return ""
		}
	}
	return v
}
