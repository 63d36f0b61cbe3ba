package mail

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestUnsent(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, d := range map[string]Draft{
		"empty":     {From: "a@agents.test"},
		"half done": {From: "a@agents.test", To: []string{"bob@", "Bob <bob@x.example>"}, Bcc: []string{"hidden@x.example"}, Subject: "é\r\nBcc: boss@x.example", InReplyTo: "no id >"},
		"whole": {
			From: "Agent <a@agents.test>", To: []string{"Bob <bob@x.example>"}, Cc: []string{"c@x.example"}, Subject: "Plan", HTML: "<p>ü</p>",
			InReplyTo: "<1@x.example>", References: []string{"<0@x.example>", "<1@x.example>"}, Attachments: []Attachment{{Name: "a.bin", Data: []byte{0, 1, 2}}, {Name: "b.txt", Data: []byte(`boundary="=_AAAAAAAAAAAAAAAAAAAAAAAAAA"`)}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := d.Unsent(at, "drf_1.2@agents.test")
			if err != nil {
				t.Fatal(err)
			}
			again, err := d.Unsent(at, "drf_1.2@agents.test")
			if err != nil || !bytes.Equal(raw, again) {
				t.Errorf("two times, two messages:\n%s\n%s", raw, again)
			}
			m, err := Parse(raw)
			if err != nil || len(m.Attachments) != len(d.Attachments) || m.MessageID != "<drf_1.2@agents.test>" || len(m.Bcc) != len(d.Bcc) {
				t.Errorf("it reads as %+v, %v", m, err)
			}
			for i, a := range m.Attachments {
				if !bytes.Equal(a.Data, d.Attachments[i].Data) {
					t.Errorf("file %d is %q", i, a.Data)
				}
			}
			if strings.Count(string(raw), "\nBcc:") != min(1, len(d.Bcc)) {
				t.Errorf("a subject became a field:\n%s", raw)
			}
		})
	}
}
