package mailapi

import (
	"fmt"
	"io"
	"net/http"

	"postern/internal/mailbox"
)

// A unsubscribeServer serves the links in List-Unsubscribe.
type unsubscribeServer struct {
	post *mailbox.PostOffice
}

// unsubscribeRoutes are for the readers of bulk mail, and for the programs that
// they read it with (RFC 8058). What they show is the token in their link.
func (s unsubscribeServer) routes() []route {
	return []route{
		{"GET", "/v1/unsubscribe/{token}", 0, s.askUnsubscribe},
		{"POST", "/v1/unsubscribe/{token}", 0, s.unsubscribe},
	}
}

// askUnsubscribe asks whether it is meant. Programs that look behind every link
// come here too: nothing happens before the button.
func (s unsubscribeServer) askUnsubscribe(w http.ResponseWriter, r *http.Request, _ caller) error {
	if err := s.post.Suppression.CheckToken(r.PathValue("token")); err != nil {
		return err
	}
	return answerPage(w, "Unsubscribe", `<p>Get no more mail of this kind from here?</p><form method="post"><button>Unsubscribe</button></form>`)
}

func (s unsubscribeServer) unsubscribe(w http.ResponseWriter, r *http.Request, _ caller) error {
	if err := s.post.Suppression.Unsubscribe(r.Context(), r.PathValue("token")); err != nil {
		return err
	}
	return answerPage(w, "Unsubscribed", `<p>Done. Nothing more is sent to you from here.</p>`)
}

// answerPage answers with a page that holds nothing of anybody's.
func answerPage(w http.ResponseWriter, title, body string) error {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer") // the token is in the address
	_, err := io.WriteString(w, fmt.Sprintf("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>%s</title></head><body><h1>%s</h1>%s</body></html>\n", title, title, body))
	return err
}
