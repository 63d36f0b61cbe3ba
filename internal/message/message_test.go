package message

import (
	"fmt"
	"strings"
	"testing"

	"postern/internal/mail"
)

// TestAllFilesAreListed: a summary names all files of usual mail, has a bounded size
// whatever their names are, and says how many more there are.
func TestAllFilesAreListed(t *testing.T) {
	for _, tt := range []struct{ files, name, listed int }{{0, 10, 0}, {200, 20, 200}, {280, 20, 280}, {400, 200, 120}} {
		var m mail.Message
		for i := range tt.files {
			m.Attachments = append(m.Attachments, mail.Attachment{Name: fmt.Sprintf("%0*d.txt", tt.name-4, i), ContentType: "application/octet-stream"})
		}
		s := Summarise(m)
		if s.MoreFiles != tt.files-len(s.Attachments) || len(s.Attachments) < tt.listed || tt.listed == tt.files && s.MoreFiles != 0 {
			t.Errorf("of %d files with names of %d octets %d are listed, and %d more", tt.files, tt.name, len(s.Attachments), s.MoreFiles)
		}
		if told := strings.Contains(strings.Join(s.Warnings, "\n"), fmt.Sprintf("there are %d files", tt.files)); told != (s.MoreFiles > 0) {
			t.Errorf("%d files: %q", tt.files, s.Warnings)
		}
	}
}
