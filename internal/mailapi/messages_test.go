package mailapi

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"postern/internal/store"
	"postern/internal/storetest"
)

const mixed = "From: Bob <bob@example.com>\r\nTo: alice@agents.test\r\nSubject: files\r\nMIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n" +
	"--b\r\nContent-Type: text/plain\r\n\r\nsee files\r\n" +
	"--b\r\nContent-Type: text/csv\r\nContent-Disposition: attachment; filename=\"../../etc/cron.d/x.csv\"\r\n\r\n1,2\r\n" +
	"--b\r\nContent-Type: text/html\r\nContent-Disposition: attachment; filename=\".bashrc\"\r\n\r\n<script>alert(1)</script>\r\n" +
	"--b\r\nContent-Type: image/svg+xml\r\nContent-Disposition: attachment; filename*=utf-8''%E2%80%AEgnp.exe%0D%0ASet-Cookie%3A%20a=b\r\n\r\n<svg/>\r\n" +
	"--b\r\nContent-Type: application/pdf; name=CON.pdf\r\nContent-Transfer-Encoding: base64\r\n\r\nJVBERi0=\r\n--b--\r\n"

// TestEveryAttachmentIsListed: a message with more files than a list of messages
// shows has them all on its own page.
func TestEveryAttachmentIsListed(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	raw := "From: bob@example.com\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n" +
		strings.Repeat("--b\r\nContent-Type: text/csv\r\nContent-Disposition: attachment; filename=a.csv\r\n\r\n1,2\r\n", 200) + "--b--\r\n"
	got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/messages/"+f.arrive(t, f.a, "key a", raw), "")
	var m struct {
		Attachments []struct{ Name, SHA256 string }
	}
	if err := json.Unmarshal([]byte(got.body), &m); err != nil || len(m.Attachments) != 200 || m.Attachments[199].SHA256 != m.Attachments[0].SHA256 {
		t.Errorf("%d files of 200 are listed, %v", len(m.Attachments), err)
	}
}

// TestAttachments is files as hostile senders name and type them.
func TestAttachments(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	at := "/v1/inboxes/" + f.a.ID + "/messages/" + f.arrive(t, f.a, "key a", mixed) + "/attachments/"
	tests := []struct {
		index             string
		code              int
		contentType, name string
		body              string
	}{
		{"0", 200, "text/csv", `attachment; filename=x.csv`, "1,2"},
		{"1", 200, "application/octet-stream", `attachment; filename=_.bashrc`, "<script>alert(1)</script>"},
		{"2", 200, "application/octet-stream", `attachment; filename="gnp.exeSet-Cookie a=b"`, "<svg/>"},
		{"3", 200, "application/pdf", `attachment; filename=_CON.pdf`, "%PDF-"},
		{"4", 404, "", "", ""},
		{"-1", 404, "", "", ""},
		{"00", 404, "", "", ""},
		{"+1", 404, "", "", ""},
		{"x", 404, "", "", ""},
		{"99999999999999999999", 404, "", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.index, func(t *testing.T) {
			got := f.do(t, "key a", "GET", at+tt.index, "")
			if got.code != tt.code {
				t.Fatalf("got %d, want %d", got.code, tt.code)
			}
			if tt.code != 200 {
				return
			}
			if got.body != tt.body || got.header.Get("Content-Type") != tt.contentType || got.header.Get("Content-Disposition") != tt.name {
				t.Errorf("got %q as %s, %s", got.body, got.header.Get("Content-Type"), got.header.Get("Content-Disposition"))
			}
			if got.header.Get("X-Content-Type-Options") != "nosniff" || !strings.Contains(got.header.Get("Content-Security-Policy"), "sandbox") || got.header.Get("Set-Cookie") != "" {
				t.Errorf("headers = %v", got.header)
			}
		})
	}
	if got := f.do(t, "key a", "GET", at+"0", "", "Range", "bytes=2-"); got.code != 206 || got.body != "2" {
		t.Errorf("a range = %d %q", got.code, got.body)
	}
}

func (f *fixture) list(t *testing.T, query string) (subjects []string, next string) {
	t.Helper()
	var out struct {
		Messages []struct{ Subject string }
		Next     string `json:"next_cursor"`
	}
	got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/messages?"+query, "")
	if err := json.Unmarshal([]byte(got.body), &out); err != nil || got.code != 200 {
		t.Fatal(got.code, got.body, err)
	}
	for _, m := range out.Messages {
		subjects = append(subjects, m.Subject)
	}
	return subjects, out.Next
}

// TestPagesAndLabels lists by page, and by what is labelled meanwhile.
func TestPagesAndLabels(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		var ids []string
		for i := range 7 {
			ids = append(ids, f.arrive(t, f.a, "key a", fmt.Sprintf("From: bob@example.com\r\nSubject: %d\r\n\r\nx\r\n", i)))
		}
		var all []string
		for cursor, page := "", 0; ; page++ {
			subjects, next := f.list(t, "limit=3&cursor="+cursor)
			all = append(all, subjects...)
			if cursor = next; next == "" {
				if page != 2 {
					t.Errorf("%d pages", page+1)
				}
				break
			}
		}
		if got := strings.Join(all, ""); got != "6543210" {
			t.Errorf("pages = %s", got)
		}
		labels := "/v1/inboxes/" + f.a.ID + "/labels"
		change := func(want int, body string) answered {
			t.Helper()
			got := f.do(t, "key a", "POST", labels, body)
			if got.code != want {
				t.Fatalf("%s = %d %s", body, got.code, got.body)
			}
			return got
		}
		if got := change(200, fmt.Sprintf(`{"ids":[%q,%q],"add":["read","jobs/2026"]}`, ids[1], ids[5])); !strings.Contains(got.body, `"labels":["jobs/2026","read"]`) {
			t.Errorf("labelled = %s", got.body)
		}
		change(200, fmt.Sprintf(`{"ids":[%q],"add":["trash"]}`, ids[2]))
		for query, want := range map[string]string{
			"": "654310", "unread=true": "6430", "label=jobs/2026": "51", "label=trash": "2", "label=read": "51", "label=starred": "", "label=jobs/2026&limit=1": "5",
		} {
			if got, _ := f.list(t, query); strings.Join(got, "") != want {
				t.Errorf("%q lists %v, want %s", query, got, want)
			}
		}
		got := f.do(t, "key a", "GET", labels, "")
		for _, want := range []string{`{"name":"read","system":true,"message_count":2}`, `{"name":"trash","system":true,"message_count":1}`, `{"name":"jobs/2026","system":false,"message_count":2}`} {
			if !strings.Contains(got.body, want) {
				t.Errorf("labels %s lack %s", got.body, want)
			}
		}
		change(200, fmt.Sprintf(`{"ids":[%q,%q],"remove":["trash","read"]}`, ids[2], ids[1]))
		if got, _ := f.list(t, "unread=true"); strings.Join(got, "") != "643210" {
			t.Errorf("taken out of the trash: %v", got)
		}

		// What is refused changes nothing.
		for name, body := range map[string]string{
			"no ids": `{"add":["a"]}`, "nothing": fmt.Sprintf(`{"ids":[%q]}`, ids[0]), "spaces": fmt.Sprintf(`{"ids":[%q],"add":["a b"]}`, ids[0]),
			"a place": fmt.Sprintf(`{"ids":[%q],"add":["inbox"]}`, ids[0]), "both": fmt.Sprintf(`{"ids":[%q],"add":["a"],"remove":["a"]}`, ids[0]),
			"too many": fmt.Sprintf(`{"ids":[%q],"add":["%s"]}`, ids[0], strings.Join(numbered(21), `","`)),
		} {
			if got := f.do(t, "key a", "POST", labels, body); got.code != 400 {
				t.Errorf("%s = %d %s", name, got.code, got.body)
			}
		}
		foreign := f.message(t, f.b, "key b")
		for name, body := range map[string]string{
			"another inbox's": fmt.Sprintf(`{"ids":[%q,%q],"add":["evil"]}`, ids[0], foreign), "nonsense": fmt.Sprintf(`{"ids":[%q,"'"],"add":["evil"]}`, ids[0]),
		} {
			if got := f.do(t, "key a", "POST", labels, body); got.code != 404 {
				t.Errorf("%s = %d %s", name, got.code, got.body)
			}
		}
		if got, _ := f.list(t, "label=evil"); len(got) != 0 {
			t.Errorf("a change that failed left %v", got)
		}
		for _, query := range []string{"cursor=x", "cursor=1.msg_'", "label=a%20b", "unread=maybe", "limit=0", "cursor=1." + strings.Repeat("A", 100)} {
			if got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/messages?"+query, ""); got.code != 400 {
				t.Errorf("%s = %d", query, got.code)
			}
		}
	})
}

func numbered(n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("l%d", i))
	}
	return out
}

// TestThreads lists a conversation, and opens it.
func TestThreads(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.arrive(t, f.a, "key a", "From: bob@example.com\r\nSubject: one\r\nMessage-ID: <1@x>\r\n\r\nx\r\n")
	f.arrive(t, f.a, "key a", "From: bob@example.com\r\nSubject: other\r\nMessage-ID: <9@x>\r\n\r\nx\r\n")
	f.arrive(t, f.a, "key a", "From: bob@example.com\r\nSubject: Re: one\r\nMessage-ID: <2@x>\r\nIn-Reply-To: <1@x>\r\n\r\nx\r\n")
	var out struct {
		Threads []struct {
			ID       string
			Messages int `json:"message_count"`
			Newest   struct{ Subject string }
		}
	}
	got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/threads", "")
	if err := json.Unmarshal([]byte(got.body), &out); err != nil || len(out.Threads) != 2 || out.Threads[0].Messages != 2 || out.Threads[0].Newest.Subject != "Re: one" {
		t.Fatalf("threads = %s", got.body)
	}
	got = f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/threads/"+out.Threads[0].ID, "")
	if a, b := strings.Index(got.body, `"subject":"one"`), strings.Index(got.body, `"subject":"Re: one"`); got.code != 200 || a < 0 || b < a {
		t.Errorf("thread = %s", got.body)
	}
	if got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/threads/thr_AAAAAAAAAAAAAAAA", ""); got.code != 404 {
		t.Errorf("no thread = %d", got.code)
	}
}

// TestUnreadableMail lists and opens what no mail program could read.
func TestUnreadableMail(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	for name, raw := range map[string]string{
		"no header":           "words\r\n",
		"a giant header":      "From: bob@example.com\r\nSubject: giant\r\n" + strings.Repeat("X-Y: "+strings.Repeat("z", 900)+"\r\n", 500) + "\r\nx\r\n",
		"a giant subject":     "From: bob@example.com\r\nSubject: " + strings.Repeat("z", 200<<10) + "\r\n\r\nx\r\n",
		"ten thousand parts":  "From: bob@example.com\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n" + strings.Repeat("--b\r\nContent-Disposition: attachment\r\n\r\nx\r\n", 10000) + "--b--\r\n",
		"thousands of people": "From: bob@example.com\r\nTo: " + strings.Repeat("a@b.example, ", 5000) + "c@d.example\r\n\r\nx\r\n",
		"an unknown charset":  "From: bob@example.com\r\nContent-Type: text/plain; charset=klingon\r\n\r\nx\r\n",
		"NUL":                 "From: bob@example.com\r\nSubject: \x00\r\n\r\n\x00\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			at := "/v1/inboxes/" + f.a.ID + "/messages/" + f.arrive(t, f.a, "key a", raw)
			got := f.do(t, "key a", "GET", at, "")
			var m struct{ Warnings []string }
			if err := json.Unmarshal([]byte(got.body), &m); err != nil || got.code != 200 || len(m.Warnings) == 0 && name != "a giant subject" {
				t.Errorf("%d, %v, warnings %q", got.code, err, m.Warnings)
			}
			if got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/messages?limit=1", ""); got.code != 200 || len(got.body) > 64<<10 {
				t.Errorf("listed = %d, %d bytes", got.code, len(got.body))
			}
			if got := f.do(t, "key a", "GET", at+"/raw", ""); got.code != 200 || got.body != raw {
				t.Errorf("raw = %d, %d bytes of %d", got.code, len(got.body), len(raw))
			}
		})
	}
}
