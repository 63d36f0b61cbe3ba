package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"postern/internal/auth"
	"postern/internal/notify"
)

// telegram reports whether people can get notices in Telegram.
func (s accountHandlers) telegram() bool {
	return s.conf.Notify != nil && s.conf.Notify.On(notify.Telegram)
}

// errNoTelegram means that the server has no bot.
var errNoTelegram = fmt.Errorf("%w: the server has no Telegram bot; start it with --telegram-token", errForm)

// chatOf returns the Telegram account that is linked to who, and since when.
func (s accountHandlers) chatOf(ctx context.Context, who auth.Principal) (name string, since time.Time, err error) {
	list, err := s.conf.Notify.Channels(ctx, who)
	for _, r := range list {
		if r.Name == who.ID {
			return r.Telegram, r.Linked, nil
		}
	}
	return "", time.Time{}, err
}

// A chatPage shows a code that links a chat. The code is shown only once.
type chatPage struct {
	Code    string
	Bot     string // name of the bot; empty if it is not known
	Minutes int    // for which the code is valid
}

// linkChat creates a code for the signed-in person only. A code for somebody
// else would let one person vote as two.
func (s accountHandlers) linkChat(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if !s.telegram() {
		return errNoTelegram
	}
	code, bot, err := s.conf.Notify.Code(r.Context(), who, who.ID)
	if errors.Is(err, auth.ErrStepUp) {
		return stepUpHandlers(s).showStepUp(w, r, who, http.StatusForbidden, "/console/account", "A linked chat can decide as you. Confirm your second factor to link one.")
	}
	if err != nil {
		return err
	}
	v := chatPage{Code: code.Reveal(), Bot: bot, Minutes: int(notify.CodeTime.Minutes())}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "chat", Title: "Link a Telegram chat", Who: who, Here: "account", Body: v})
}

func (s accountHandlers) unlinkChat(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if !s.telegram() {
		return errNoTelegram
	}
	return s.changed(w, r, who, s.conf.Notify.Unlink(r.Context(), who, who.ID))
}
