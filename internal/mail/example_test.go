package mail_test

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/mail"
)

// Compose fixes every byte of a message before anybody approves it.
func ExampleCompose() {
	now := time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)
	e, err := mail.Compose(mail.Draft{
		From: "Analyst <analyst@agents.example>", To: []string{"bob@example.com"}, Bcc: []string{"carol@example.com"},
		Subject: "Numbers of November", Text: "Hello Bob,\n\nrevenue is up.\n",
	}, now, "agents.example")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("to:", e.To)
	fmt.Println("names Carol:", strings.Contains(string(e.Raw), "carol"))
	m, err := mail.Parse(e.Raw)
	fmt.Println(m.Subject, err)
	// Output:
	// to: [bob@example.com carol@example.com]
	// names Carol: false
	// Numbers of November <nil>
}

// A draft with a line end in a field is refused: the rest of the line would
// become a header field of its own.
func ExampleCompose_injection() {
	_, err := mail.Compose(mail.Draft{
		From: "analyst@agents.example", To: []string{"bob@example.com"}, Subject: "Hello\r\nBcc: eve@evil.example", Text: "Hi",
	}, time.Now(), "agents.example")
	var field *mail.FieldError
	fmt.Println(errors.As(err, &field))
	fmt.Println(err)
	// Output:
	// true
	// subject: contains a line break
}

// Parse never trusts a message: what is ambiguous is named in its warnings.
func ExampleParse() {
	m, err := mail.Parse([]byte("From: Bob <bob@example.com>\r\nFrom: eve@evil.example\r\nTo: analyst@agents.example\r\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\r\n\r\nHello\r\n"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(m.Subject)
	fmt.Println(strings.TrimSpace(m.Text))
	for _, w := range m.Warnings {
		fmt.Println("warning:", w)
	}
	// Output:
	// Grüße
	// Hello
	// warning: the header From stands 2 times
	// warning: there are 2 From addresses
}
