package console

import (
	"fmt"
	"net/http"
	"sync"

	"postern/internal/auth"
	"postern/internal/oversight"
)

// Openings remembers which versions of actions a person has opened on their own pages.
// A batch takes an action with warnings only after that. It is kept in memory: a GET
// writes nothing to the database, and after a restart a person opens an action again,
// which costs a look and never allows more.
type openings struct {
	mu   sync.Mutex
	seen map[string]bool
	last map[string]bool // the generation before: what is in neither has to be opened again
}

// maxOpenings bounds each of the two generations.
const maxOpenings = 20_000

func openingKey(who auth.Principal, a *oversight.Action) string {
	return fmt.Sprintf("%s %s %s %d %s", who.Project, who, a.ID, a.Version, a.Hex())
}

// add records that who has opened a. A browser that fetches a page ahead shows it to
// nobody, so that does not count.
func (o *openings) add(r *http.Request, who auth.Principal, a *oversight.Action) {
	if r.Method != http.MethodGet || r.Header.Get("Sec-Purpose") != "" || r.Header.Get("Purpose") != "" {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.seen) >= maxOpenings {
		o.last, o.seen = o.seen, nil
	}
	if o.seen == nil {
		o.seen = map[string]bool{}
	}
	o.seen[openingKey(who, a)] = true
}

// has reports whether who has opened exactly this version of a.
func (o *openings) has(who auth.Principal, a *oversight.Action) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := openingKey(who, a)
	return o.seen[key] || o.last[key]
}
