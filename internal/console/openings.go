package console

import (
	"net/http"

	"postern/internal/auth"
	"postern/internal/oversight"
)

// open records that who has opened a on its own page. A batch takes an action with
// warnings only after that. A browser that fetches a page ahead shows it to nobody, so
// that does not count.
func (s actionHandlers) open(r *http.Request, who auth.Principal, a *oversight.Action) {
	if r.Method != http.MethodGet || r.Header.Get("Sec-Purpose") != "" || r.Header.Get("Purpose") != "" {
		return
	}
	if err := s.gate.Opened(r.Context(), who, a); err != nil && r.Context().Err() == nil {
		// The page is shown all the same: without the row a batch asks to open it again.
		s.log.WarnContext(r.Context(), "record that an action was opened", "action", a.ID, "err", err)
	}
}
