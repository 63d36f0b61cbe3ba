package mailapi

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/notify"
)

// A notifyServer serves how people are notified.
type notifyServer struct {
	notify *notify.Notifier // nil: this server notifies nobody
}

func (s notifyServer) routes() []route {
	out := slices.Concat(s.settingRoutes(), []route{
		{"GET", "/v1/notify", 0, s.listReaches},
		{"POST", "/v1/notify/test", maxBody, s.testNotify},
		{"POST", "/v1/notify/telegram", maxBody, s.telegramCode},
		{"DELETE", "/v1/notify/telegram/{person}", 0, s.telegramUnlink},
	})
	for i := range out {
		out[i].serve = s.forPeople(out[i].serve)
	}
	return out
}

// forPeople serves only people, and only if this server sends notices.
func (s notifyServer) forPeople(serve handler) handler {
	return func(w http.ResponseWriter, r *http.Request, c caller) error {
		if c.Kind != auth.Person {
			return fmt.Errorf("only a person manages how people are notified: %w", auth.ErrForbidden)
		}
		if s.notify == nil {
			return fmt.Errorf("%w: the server sends no notices: start it with --notify-from or --telegram-token", errNotOffered)
		}
		return serve(w, r, c)
	}
}

func (s notifyServer) listReaches(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.notify.Channels(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	people := []api.NotifyChannels{}
	for _, p := range list {
		people = append(people, api.NotifyChannels{Person: p.Name, Role: api.Role(p.Role), Email: p.Email, Telegram: p.Telegram, LinkedAt: moment(p.Linked), Failed: p.Failed})
	}
	answer(w, http.StatusOK, api.NotifyStatus{Mail: s.notify.On(notify.Mail), Telegram: s.notify.On(notify.Telegram), People: people})
	return nil
}

// aPerson reads the name of a person from a request's body.
func aPerson(r *http.Request) (string, error) {
	var in api.NamedPerson
	if err := door.Decode(r, &in); err != nil {
		return "", err
	}
	return in.Person, checkPerson(in.Person)
}

// personInPath reads the name of a person from a request's path.
func personInPath(r *http.Request) (string, error) {
	name := r.PathValue("person")
	return name, checkPerson(name)
}

// checkPerson checks the length of a name. The attack: a NUL or bytes that are not
// UTF-8, which PostgreSQL refuses with an error that looks like ours.
func checkPerson(name string) error {
	if name == "" || len(name) > 63 || strings.IndexByte(name, 0) >= 0 || !utf8.ValidString(name) {
		return fmt.Errorf("%w: person: must be the name of a person, 1 to 63 characters", errRequest)
	}
	return nil
}

func (s notifyServer) testNotify(w http.ResponseWriter, r *http.Request, c caller) error {
	name, err := aPerson(r)
	if err != nil {
		return err
	}
	list, err := s.notify.SendTest(r.Context(), c.Principal, name)
	if err != nil {
		return err
	}
	out := []api.NotifyTest{}
	for _, t := range list {
		out = append(out, api.NotifyTest{Channel: string(t.Channel), Sent: t.Sent, Detail: t.Detail})
	}
	answer(w, http.StatusOK, api.NotifyTestList{Channels: out})
	return nil
}

func (s notifyServer) telegramCode(w http.ResponseWriter, r *http.Request, c caller) error {
	name, err := aPerson(r)
	if err != nil {
		return err
	}
	code, bot, err := s.notify.Code(r.Context(), c.Principal, name)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, api.TelegramCode{Code: code.Reveal(), Bot: bot, ExpiresAt: time.Now().Add(notify.CodeTime).UTC()})
	return nil
}

func (s notifyServer) telegramUnlink(w http.ResponseWriter, r *http.Request, c caller) error {
	name, err := personInPath(r)
	if err != nil {
		return err
	}
	if err := s.notify.Unlink(r.Context(), c.Principal, name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
