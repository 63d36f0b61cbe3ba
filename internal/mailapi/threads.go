package mailapi

import (
	"net/http"
	"time"

	"postern/internal/api"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/seal"
)

// A threadServer serves conversations.
type threadServer struct {
	access

	post *mailbox.PostOffice
}

func (s threadServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/threads", 0, s.listThreads},
		{"GET", "/v1/inboxes/{inbox}/threads/{id}", 0, s.getThread},
	}
}

// A lobsterThread is a thread in LobsterMail's words.
type lobsterThread struct {
	ID        string    `json:"id"`
	Inbox     string    `json:"inboxId"`
	Subject   string    `json:"subject"` // of its newest message in lists, else of its first
	Emails    int       `json:"emailCount"`
	LastAt    time.Time `json:"lastEmailAt"`
	CreatedAt time.Time `json:"createdAt"`
}

// A lobsterGlance is an email in a thread, in LobsterMail's words.
type lobsterGlance struct {
	ID        string    `json:"id"`
	From      string    `json:"from"`
	Subject   string    `json:"subject"`
	Preview   string    `json:"preview"`
	CreatedAt time.Time `json:"createdAt"`
	Risk      bool      `json:"isInjectionRisk"`
}

func (s threadServer) listThreads(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	n, err := limit(r.URL.Query(), 50, 100)
	if err != nil {
		return err
	}
	ts, next, err := s.post.Threads(r.Context(), c.Principal, k, n, r.URL.Query().Get("cursor"))
	if err != nil {
		return err
	}
	out, lobster := []api.Thread{}, []lobsterThread{}
	for _, t := range ts {
		out = append(out, threadOf(k, t))
		lobster = append(lobster, lobsterThread{t.ID, k.Inbox(), t.Newest.Subject, t.Messages, t.At, t.Begun})
	}
	answer(w, http.StatusOK, threadsAnswer{api.ThreadList{Threads: out, NextCursor: next}, lobster, next != "", orNull(next)})
	return nil
}

// orNull returns nil for nothing, as LobsterMail's client has it.
func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// A threadsAnswer is a page of threads in our words and in LobsterMail's.
type threadsAnswer struct {
	api.ThreadList

	Data    []lobsterThread `json:"data"`
	HasMore bool            `json:"hasMore"`
	Cursor  *string         `json:"cursor"`
}

// A threadAnswer is [api.FullThread], with LobsterMail's fields.
type threadAnswer struct {
	lobsterThread

	Inbox    string          `json:"inbox"`
	Messages []api.Message   `json:"messages"`
	Emails   []lobsterGlance `json:"emails"`
}

func threadOf(k *seal.Key, t message.Thread) api.Thread {
	return api.Thread{ID: t.ID, Inbox: k.Inbox(), UpdatedAt: t.At, Messages: t.Messages, Unread: t.Unread, Newest: messageOf(t.Newest)}
}

func (s threadServer) getThread(w http.ResponseWriter, r *http.Request, c caller) error {
	k, id, err := s.item(r, c)
	if err != nil {
		return err
	}
	ms, err := s.post.Thread(r.Context(), c.Principal, k, id)
	if err != nil {
		return err
	}
	emails := []lobsterGlance{}
	for _, m := range ms {
		emails = append(emails, lobsterGlance{m.ID, bare(m.From), m.Subject, m.Preview, m.At, lobsterOf(m).Security.Risk >= lobsterRisk})
	}
	answer(w, http.StatusOK, threadAnswer{lobsterThread{id, k.Inbox(), ms[0].Subject, len(ms), ms[len(ms)-1].At, ms[0].At}, k.Inbox(), messagesOf(ms), emails})
	return nil
}
