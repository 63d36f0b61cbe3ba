package multimail

import (
	"fmt"
	"net/http"
)

// absences are what MultiMail has and this server does not have, with what to do
// instead. They need no key: the answer is the same for everybody.
var absences = []struct{ method, path, why string }{
	{"POST", "/v1/account/challenge", signUp},
	{"POST", "/v1/account", signUp},
	{"POST", "/v1/account/resend-confirmation", signUp},
	{"GET", "/v1/confirm", signUp},
	{"POST", "/v1/confirm", signUp},
	{"GET", "/v1/slug-check/{slug}", signUp},
	{"POST", "/v1/billing/portal", billing},
	{"POST", "/v1/billing/checkout", billing},
	{"POST", "/v1/billing/cancel", billing},
	{"GET", "/v1/export", "a mailbox is exported with its own key: GET /v1/inboxes/{inbox}/export of this server, or postern inbox export"},
}

const (
	signUp  = "nobody signs up with a proof of work: an owner makes the key with postern account create --multimail"
	billing = "this server is the operator's own: there are no plans and nothing is billed"
)

func (s *Server) absentRoutes() (out []route) {
	for _, a := range absences {
		out = append(out, route{method: a.method, path: a.path, open: true, serve: func(http.ResponseWriter, *http.Request, caller) error {
			return fmt.Errorf("%s: %w", a.why, errAbsent)
		}})
	}
	return out
}
