package mailbox_test

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/base64"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// documented judges by one document.
type documented struct{ doc *policy.Document }

func (d documented) Judge(_ context.Context, _ *store.Tx, _ string, r policy.Request) (policy.Verdict, error) {
	return policy.Decide(d.doc, r), nil
}

// TestNothingLeavesUnread: a mail with a secret anywhere in its octets, or with a
// part that cannot be read, waits for a person. That holds in mode autonomous and
// for a recipient on the allow list. The policy is the default one, with a rule
// that allows mail to known recipients.
func TestNothingLeavesUnread(t *testing.T) {
	const token = "pib_ABCDEFGHIJKLMNOPQRSTUVWX23"
	packed := func(text string) string {
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		w, err := z.Create("notes.txt")
		if err == nil {
			_, err = w.Write([]byte(text))
		}
		if err == nil {
			err = z.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		s := base64.StdEncoding.EncodeToString(b.Bytes())
		var lines strings.Builder
		for chunk := range slices.Chunk([]byte(s), 76) {
			lines.Write(append(chunk, '\r', '\n'))
		}
		return lines.String()
	}
	far := strings.Repeat("The quarterly report has twelve pages.\n", 8000)
	raw := func(header, preamble, part, body string) string {
		return "From: box@agents.test\r\nTo: bob@example.com\r\nSubject: hello\r\n" + header + "MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b1\r\n\r\n" +
			preamble + "--b1\r\nContent-Type: text/plain\r\n" + part + "\r\nhello\r\n--b1\r\nContent-Type: application/zip\r\nContent-Disposition: attachment; filename=a.zip\r\n" +
			"Content-Transfer-Encoding: base64\r\n\r\n" + body + "--b1--\r\n"
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		blobs, err := store.OpenBlobs(f.blobs)
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.NewTextHandler(t.Output(), nil))
		doc, err := policy.Parse([]byte(policy.Default().Text() + "\n  - id: known\n    kind: email.send\n    when: listed\n    then: allow\n"))
		if err != nil {
			t.Fatal(err)
		}
		f.gate = oversight.NewGate(log, db, documented{doc})
		f.post = mailbox.New(log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test", QuarantineScore: 0.75})
		b, key, err := f.post.CreateInbox(t.Context(), f.person, directory.NewInbox{Address: "box", Mode: policy.Autonomous}, "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.AllowList.Add(t.Context(), f.person, b.Address, "bob@example.com", time.Time{}); err != nil {
			t.Fatal(err)
		}
		who, err := auth.CheckKey(t.Context(), db, key)
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			name, raw string
			flag      string // empty: it leaves
		}{
			{"nothing to find", raw("X-Mailer: Mutt\r\n", "This is a message in MIME format.\r\n", "", packed("hello")), ""},
			{"a token in X-Mailer", raw("X-Mailer: "+token+"\r\n", "", "", packed("hello")), "secret"},
			{"a token in Content-Description", raw("", "", "Content-Description: "+token+"\r\n", packed("hello")), "secret"},
			{"a token in a preamble", raw("", token+"\r\n", "", packed("hello")), "secret"},
			{"a token in a zip, behind 300 KB", raw("", "", "", packed(far+token)), "secret"},
			{"an archive that the scan cannot read", raw("", "", "", base64.StdEncoding.EncodeToString([]byte("7z\xbc\xaf\x27\x1c\x00\x04"))+"\r\n"), "unread"},
		} {
			for _, mode := range []policy.Mode{policy.Autonomous, policy.GatedSend} {
				if _, err := f.post.SetMode(t.Context(), f.person, b.ID, mode, "to try it"); err != nil {
					t.Fatal(err)
				}
				p, err := f.post.SendRaw(t.Context(), who, "smtp", "box@agents.test", []string{"bob@example.com"}, []byte(strings.Replace(tt.raw, "hello", tt.name+" "+string(mode), 1))) // the same again would be asked about
				if err != nil {
					t.Fatalf("%s: %v", tt.name, err)
				}
				want := oversight.Approved
				if tt.flag != "" {
					want = oversight.Pending
				}
				if p.State != want || tt.flag != "" && !slices.Contains(p.Request.Flags, tt.flag) {
					t.Errorf("%s, in mode %s: %s with flags %v, want %s with %s", tt.name, mode, p.State, p.Request.Flags, want, tt.flag)
				}
				if v, err := f.gate.Show(p.Action); err != nil || strings.Contains(strings.Join(v.Notes, "\n"), token) {
					t.Errorf("%s: the reasons tell the token: %v, %v", tt.name, v.Notes, err)
				}
			}
		}
	})
}
