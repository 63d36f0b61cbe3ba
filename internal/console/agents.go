package console

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// agentHandlers list agents and show timelines.
type agentHandlers struct{ *Server }

func (s agentHandlers) routes() []route {
	return []route{
		{"GET", "/console/agents", views, s.agents},
		{"GET", "/console/agents/{id}", views, s.agentDay},
		{"GET", "/console/agents/{id}/save", views, s.saveAgentDay},
		{"GET", "/console/sandboxes/{id}/day", views, s.sandboxDay},
		{"GET", "/console/sandboxes/{id}/day/save", views, s.saveSandboxDay},
	}
}

// An agentRow is an agent in the list.
type agentRow struct {
	ID, Address, Mode string
	Waits             int
	Running           int
	Last              time.Time // when it last proposed something; zero: never
}

// An agentsPage lists agents.
type agentsPage struct {
	Agents []agentRow
	Words  string
	Newer  string
	Older  string
	Apart  int // sandboxes that run for no agent
}

// perAgentPage is how many agents a page lists.
const perAgentPage = 50

func (s agentHandlers) agents(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	n, err := pageNumber(r)
	if err != nil {
		return err
	}
	v := agentsPage{Words: strings.ToLower(strings.TrimSpace(r.URL.Query().Get("q")))}
	if len(v.Words) > 200 || !utf8.ValidString(v.Words) || strings.Contains(v.Words, "\x00") {
		return fmt.Errorf("%w: q must be text of at most 200 bytes", errForm)
	}
	queue, err := s.gate.Queue(ctx, who, oversight.QueueQuery{Limit: 1})
	if err != nil {
		return err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		v.Agents, err = store.List(ctx, tx, func(row func(...any) error) (a agentRow, err error) {
			var last int64
			err = row(&a.ID, &a.Address, &a.Mode, &a.Running, &last)
			a.Last = store.FromTime(last)
			return a, err
		}, `select i.id, i.address, i.mode, (select count(*) from sandbox s where s.project_id = $1 and s.inbox_id = i.id and s.state = $2),
			(select coalesce(max(a.created_at), 0) from action a where a.inbox_id = i.id)
			from inbox i where i.project_id = $1 and i.deleted_at = 0 and ($3 = '' or i.address like $4) order by i.address limit `+strconv.Itoa(perAgentPage+1)+` offset `+strconv.Itoa((n-1)*perAgentPage),
			who.Project, sandbox.Running, v.Words, "%"+v.Words+"%")
		if err != nil {
			return fmt.Errorf("list agents: %w", err)
		}
		return tx.One(ctx, `select count(*) from sandbox where project_id = $1 and inbox_id = '' and state = $2`, []any{who.Project, sandbox.Running}, &v.Apart)
	})
	if err != nil {
		return err
	}
	at := func(n int) string {
		return "/console/agents?" + url.Values{"q": {v.Words}, "page": {strconv.Itoa(n)}}.Encode()
	}
	if len(v.Agents) > perAgentPage {
		v.Agents, v.Older = v.Agents[:perAgentPage], at(n+1)
	}
	if n > 1 {
		v.Newer = at(n - 1)
	}
	for i := range v.Agents {
		v.Agents[i].Waits = queue.Inboxes[v.Agents[i].ID]
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "agents", Title: "Agents", Who: who, Here: "agents", Body: v})
}
