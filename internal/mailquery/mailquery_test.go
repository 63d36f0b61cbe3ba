package mailquery

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

var now = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func w(s string) []byte {
	out, _ := Words(nil, s, 1<<20)
	return out
}

// fielded adds the fields that stand in the text.
func fielded(text []byte) []byte {
	text = AppendMarked(text, List, "Invoices <invoices.lists.example.com>", 100)
	text = AppendMarked(text, Box, "analyst@agents.test", 100)
	text = AppendMarked(text, Bcc, "dave@example.net", 100)
	return AppendMarked(text, Importance, "high", 100)
}

// docs are the messages that the tests look for, by their names.
func docs() map[string]*Doc {
	day := 24 * time.Hour
	return map[string]*Doc{
		"bill": {
			From: w("Bob Müller <bob@example.com>"), To: w("analyst@agents.test"), Cc: w("carol@example.org"), Subject: w("Invoice #42 for October"), Files: w("invoice-42.pdf"), MessageID: []byte("<42@example.com>"),
			Attachments: 1, At: now.Add(-2 * day), Size: 6 << 20, Text: fielded(w("Please pay the invoices by 2026-12-01.\nGrüße aus der Straße")), Labels: []string{"jobs"}, HasText: true, HasLabels: true,
		},
		"lunch": {
			From: w("carol@example.org"), To: w("analyst@agents.test, bob@example.com"), Subject: w("昼食 lunch?"), At: now.Add(-40 * day), Size: 900, Text: w("今日は東京で昼食を食べます. See you at 10:30"), Labels: []string{"read", "starred"},
			HasText: true, HasLabels: true,
		},
		"sent": {
			From: w("analyst@agents.test"), To: w("bob@example.com"), Subject: w("Re: Invoice"), At: now.Add(-1 * time.Hour), Size: 2000, Sent: true, Text: w("It is paid"), Labels: []string{"read"}, HasText: true, HasLabels: true,
		},
		"gone": {
			From: w("spam@evil.example"), To: w("analyst@agents.test"), Subject: w("free m\u200boney"), At: now.AddDate(-2, 0, 0), Size: 100, Text: w("click"), Labels: []string{"archived", "trash"}, HasText: true, HasLabels: true,
		},
	}
}

func TestQueries(t *testing.T) {
	tests := []struct{ query, want string }{
		{"invoice", "bill sent"},
		{"INVOICE", "bill sent"},
		{`"invoice"`, "bill sent"},
		{`"invoices"`, "bill"},
		{`"pay the invoices"`, "bill"},
		{`"pay invoices"`, ""},
		{"pay invoices", "bill"},
		{"voice", ""},
		{"+invoic", ""},
		{"in", ""}, // two letters find only the whole word
		{"grusse", "bill"},
		{"GRÜSSE", "bill"},
		{"strasse", "bill"},
		{"東京", "lunch"},
		{"京で", "lunch"},
		{"money", "gone"},
		{"10:30", "lunch"},
		{"from:bob", "bill"},
		{"from:Müller", "bill"},
		{"from:muller", "bill"},
		{"from:bob@example.com", "bill"},
		{"from:example.com", "bill"},
		{"from:xample.com", ""},
		{"from:me", "sent"},
		{"to:me", "bill gone lunch"},
		{"to:bob", "lunch sent"},
		{"to:carol", "bill"}, // a copy is to her
		{"cc:carol", "bill"},
		{"cc:bob", ""},
		{"subject:invoice", "bill sent"},
		{"subject:(invoice october)", "bill"},
		{"subject:{lunch money}", "gone lunch"},
		{`subject:"re: invoice"`, "sent"},
		{"subject:pay", ""},
		{"-from:bob", "gone lunch sent"},
		{"-invoice", "gone lunch"},
		{"from:bob OR from:carol", "bill lunch"},
		{"invoice from:bob OR from:me", "bill sent"},
		{"{from:bob from:carol}", "bill lunch"},
		{"(from:bob invoice) OR lunch", "bill lunch"},
		{"-(from:bob OR from:carol)", "gone sent"},
		{"-{from:bob from:carol} -in:trash", "sent"},
		{"invoice AND paid", "sent"},
		{"has:attachment", "bill"},
		{"has:userlabels", "bill"},
		{"has:nouserlabels", "gone lunch sent"},
		{"filename:pdf", "bill"},
		{"filename:invoice-42.pdf", "bill"},
		{"is:unread", "bill gone"},
		{"is:read", "lunch sent"},
		{"is:starred", "lunch"},
		{"in:inbox", "bill lunch"},
		{"in:sent", "sent"},
		{"in:archive", "gone"},
		{"in:trash", "gone"},
		{"in:anywhere", "bill gone lunch sent"},
		{"label:jobs", "bill"},
		{"label:JOBS", "bill"},
		{"label:unread", "bill gone"},
		{"label:inbox", "bill lunch"},
		{"before:2026/11/01", "gone lunch"},
		{"after:2026-11-19", "bill sent"},
		{"after:2026/11/19 before:2026/11/20", "bill"},
		{"newer_than:1d", "sent"},
		{"newer_than:2h", "sent"},
		{"older_than:1m", "gone lunch"},
		{"older_than:1y", "gone"},
		{"after:1795255200", "sent"},
		{"larger:5M", "bill"},
		{"larger:5mb", "bill"},
		{"smaller:1K", "gone lunch"},
		{"size:1000", "bill sent"},
		{"rfc822msgid:42@example.com", "bill"},
		{"rfc822msgid:<42@example.com>", "bill"},
		{"https://nowhere.example", ""},
		{"FROM:Bob", "bill"},
		{"\tfrom:bob\n", "bill"},
		{`from:"bob muller"`, "bill"},
		{"is:important", "bill"},
		{"label:important", "bill"},
		{"-is:important", "gone lunch sent"},
		{"list:invoices.lists.example.com", "bill"},
		{"list:lists", "bill"},
		{"list:lis", "bill"},
		{"list:october", ""},
		{`list:"lists example"`, "bill"},
		{`list:"list"`, ""},
		{"deliveredto:me", "bill"},
		{"deliveredto:analyst@agents.test", "bill"},
		{"deliveredto:dave", ""},
		{"bcc:dave", "bill"},
		{"bcc:dav", "bill"},
		{"bcc:{eve dave}", "bill"},
		{"dave", ""},
		{"high", ""},
		{"category:primary", ""},
		{"pay AROUND 1 invoices", "bill"},
		{"invoices AROUND 1 pay", "bill"},
		{"pay AROUND invoices", "bill"},
		{"pay AROUND 2 2026", ""},
		{"pay AROUND 3 2026", "bill"},
		{"please AROUND 1 invoices", ""},
		{"pay AROUND 9 pay", ""},
		{"or", ""}, // in small letters it is a word
	}
	all := docs()
	for _, tt := range tests {
		t.Run(tt.query, func(t *testing.T) {
			q, err := Parse(tt.query, Options{Now: now, Me: "analyst@agents.test"})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for name, d := range all {
				if q.Match(d) == Yes {
					got = append(got, name)
				}
				if q.Match(d) == Maybe {
					t.Errorf("%s: maybe, though all of it is known", name)
				}
				checkParts(t, q, d)
			}
			slices.Sort(got)
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("found %q, want %q", s, tt.want)
			}
		})
	}
}

// checkParts: what is said of a message that is known in part is right whatever
// the rest is.
func checkParts(t *testing.T, q *Query, d *Doc) {
	t.Helper()
	full := q.Match(d)
	for i := range 3 {
		part := *d
		if part.HasText = i&1 != 0; !part.HasText {
			part.Text = nil
		}
		if part.HasLabels = i&2 != 0; !part.HasLabels {
			part.Labels = nil
		}
		if got := q.Match(&part); got != Maybe && got != full {
			t.Errorf("in part %d, in full %d", got, full)
		}
		if part.HasLabels && !q.NeedsText() && q.Match(&part) != full {
			t.Error("it needs the text and says that it does not")
		}
	}
}

func TestErrors(t *testing.T) {
	tests := []struct{ query, term, reason string }{
		{"", "", "empty"},
		{"  ", "", "empty"},
		{strings.Repeat("a ", 1500), "", "more than 2000"},
		{strings.Repeat("a ", 150), "", "more than 100 terms"},
		{strings.Repeat("(", 30), "", "brackets in each other"},
		{"\xff", "", "UTF-8"},
		{"form:bob", "form:bob", "no operator form"},
		{"a from:", "from:", "needs a value"},
		{`a "b c`, `"b c`, "not closed"},
		{`from:"b c`, `from:"b c`, "not closed"},
		{"(a b", "(a b", "not closed"},
		{"{a b", "{a b", "not closed"},
		{"a b)", ")", "closes nothing"},
		{"(a}", "}", "closes nothing"},
		{"()", "()", "empty"},
		{"OR a", "OR", "between two terms"},
		{"a OR", "a OR", "ends in OR"},
		{"a OR OR b", "OR", "between two terms"},
		{"a - b", "-", "directly before"},
		{"--a", "-", "directly before"},
		{"is:odd", "is:odd", "takes read, unread"},
		{"in:nowhere", "in:nowhere", "takes inbox"},
		{"has:nothing", "has:nothing", "takes attachment"},
		{"in:spam", "in:spam", "quarantine"},
		{"in:drafts", "in:drafts", "email_draft_list"},
		{"in:draft", "in:draft", "email_draft_list"},
		{"is:snoozed", "is:snoozed", "label of your own"},
		{"in:chats", "in:chats", "no chats"},
		{"has:drive", "has:drive", "drive.google.com"},
		{"has:yellow-star", "has:yellow-star", "is:starred"},
		{"in:promotions", "in:promotions", "category:promotions"},
		{"before:yesterday", "before:yesterday", "2026/11/21"},
		{"before:13/01/2026", "before:13/01/2026", "2026/11/21"},
		{"older_than:2w", "older_than:2w", "7d"},
		{"older_than:-2d", "older_than:-2d", "7d"},
		{"newer_than:99999999y", "newer_than:99999999y", "7d"},
		{"larger:big", "larger:big", "5M"},
		{"larger:99999999999999999999", "larger:99999999999999999999", "5M"},
		{"larger:(1 2)", "larger:(", "takes one value"},
		{"subject:(a from:bob)", "from:bob", "within the brackets"},
		{"!!!", "!!!", "no letter or digit"},
		{`from:"..."`, `from:"..."`, "no letter or digit"},
		{"AROUND 3 b", "AROUND", "between two words"},
		{"a AROUND 3", "AROUND 3", "between two words"},
		{"a AROUND 300 b", "AROUND 300", "between two words"},
		{"a AROUND 3 from:b", "AROUND 3 from:b", "between two words"},
		{"a AROUND 3 (b c)", "AROUND 3", "between two words"},
		{strings.Repeat("ä", 100) + ":x is:no", "is:no", "takes read"},
	}
	for _, tt := range tests {
		t.Run(tt.query, func(t *testing.T) {
			_, err := Parse(tt.query, Options{Now: now})
			var e *Error
			if !errors.As(err, &e) || !strings.Contains(e.Reason, tt.reason) || tt.term != "" && e.Term != tt.term {
				t.Errorf("error = %v, want %q: …%s…", err, tt.term, tt.reason)
			}
		})
	}
	if _, err := Parse("from:me", Options{}); err == nil {
		t.Error("from:me means nobody")
	}
	if q, err := Parse("a in:trash", Options{}); err != nil || !q.Anywhere() {
		t.Error("in:trash is not anywhere")
	}
}

func TestWords(t *testing.T) {
	for in, want := range map[string]string{
		"":                      " ",
		"Hello,  World!":        " hello world ",
		"ＦＵＬＬ ｗｉｄｔｈ":            " full width ",
		"e\u0301a\u0300":        " ea ",
		"ÀÉ":                    " ae ",
		"한국어":                   " 한국어 ",
		"漢字kana":                " 漢 字 kana ",
		"ภาษา":                  " ภ า ษ า ",
		"in\u00advis\u200dible": " invisible ",
		"\xff\xfe":              " ",
		"a\x00b":                " a b ",
		"ΟΔΟΣ οδός":             " οδοσ οδοσ ",
		"ﬁne":                   " fine ",
		"مُحَمَّد":              " محمد ",
	} {
		if got, whole := Words(nil, in, 1000); string(got) != want || !whole {
			t.Errorf("Words(%q) = %q, want %q", in, got, want)
		}
	}
	if got, whole := Words(nil, strings.Repeat("word ", 100), 50); whole || len(got) > 60 {
		t.Errorf("not cut: %q", got)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"from:bob -{a b} OR (c d)", `subject:("a b" c) is:unread`, "before:2026/1/2 larger:5M", "((((a))))", `"`, "-", "a:b", "{}", "in:trash -label:x", "ß漢字", "to:me OR +x",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		q, err := Parse(s, Options{Now: now, Me: "analyst@agents.test"})
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Reason == "" || len(e.Error()) > 1000 {
				t.Errorf("error = %v", err)
			}
			return
		}
		for _, d := range docs() {
			if q.Match(d) == Maybe {
				t.Error("maybe, though all of it is known")
			}
			checkParts(t, q, d)
		}
	})
}

func FuzzWords(f *testing.F) {
	f.Add("Grüße 東京 a\u200bb", 100)
	f.Fuzz(func(t *testing.T, s string, most int) {
		got, _ := Words(nil, s, most)
		if got[0] != ' ' || got[len(got)-1] != ' ' || strings.Contains(string(got), "  ") {
			t.Errorf("Words(%q) = %q", s, got)
		}
		again, _ := Words(nil, string(got), 1<<30)
		if string(again) != string(got) {
			t.Errorf("words of words: %q, then %q", got, again)
		}
	})
}

func TestRequired(t *testing.T) {
	for query, want := range map[string]string{
		"is:starred invoice": "starred", "invoice": "", "is:unread": "unread", "is:unread label:a": "a", "-is:unread": "", "a OR is:starred": "", "-is:starred": "",
		"(is:starred)": "starred", "{is:starred is:read}": "", "-is:read a": "unread", "in:inbox": "", "in:trash": "trash",
	} {
		q, err := Parse(query, Options{Now: now})
		if err != nil {
			t.Fatal(err)
		}
		got, unread := q.Required()
		if unread {
			got += "unread"
		}
		if got != want {
			t.Errorf("%s requires %q, want %q", query, got, want)
		}
	}
}
