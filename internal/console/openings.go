package console

import (
	"net/http"

	"postern/internal/auth"
	"postern/internal/oversight"
)

// open records that who has opened a on its own page. A batch takes an action with
// warnings only after that. A page that a browser fetches ahead is shown to nobody, so it
// does not count.
func (s actionHandlers) open(r *http.Request, who auth.Principal, a *oversight.Action) {
	if r.Method != http.MethodGet || r.Header.Get("Sec-Purpose") != "" || r.Header.Get("Purpose") != "" {
		return
	}
	if err := s.gate.Opened(r.Context(), who, a); err != nil && r.Context().Err() == nil {
		// Show the page all the same: without the row, a batch asks to open it again.
		s.log.WarnContext(r.Context(), "record that an action was opened", "action", a.ID, "err", err)
	}
}
