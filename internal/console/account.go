package console

import (
	"context"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"strings"
	"time"

	"github.com/boombuler/barcode/qr"

	"postern/internal/auth"
	"postern/internal/people"
)

// roleMeans describes to people what each role may do.
var roleMeans = map[auth.Role]string{
	auth.Owner:    "can do everything a reviewer can, and manages people, modes, policy, domains and keys",
	auth.Reviewer: "can decide on actions, turn on kill switches and release mail from quarantine",
	auth.Viewer:   "can view everything and change nothing",
}

// factorNames names the second factors.
var factorNames = map[string]string{"totp": "authenticator code", "recovery code": "recovery code", "passkey": "passkey", "": "password only"}

// An accountPage is a person's own account.
type accountPage struct {
	people.Person
	Keys     []people.Passkey
	List     []auth.Session
	Current  string // ID of the session of this request
	Proved   bool   // a second factor was confirmed recently
	MinBytes int    // of a password
	Usable   bool   // passkeys work under the host name of this request
	Telegram bool   // a chat can be linked
	Chat     string // Telegram account of the linked chat; empty if none
	Linked   time.Time
	KeysOff  bool      // the person has turned the console's keys off
	Link     auth.Link // of the operator at the machine to this account; zero if there is none
	Notice   string
}

// Asks reports whether forms require the password. An account with a second
// factor must confirm that instead.
func (a accountPage) Asks() bool { return !a.Strong() }

// Claimed reports whether somebody has said that the viewer is the operator, and that claim
// does not count yet.
func (a accountPage) Claimed() bool { return a.Link.From.After(time.Now()) }

// accountHandlers lets people manage their own password, second factors, sessions and notifications.
type accountHandlers struct{ *Server }

func (s accountHandlers) routes() []route {
	return []route{
		{"GET", "/console/account", views, s.account},
		{"POST", "/console/account/password", views, s.setPassword},
		{"POST", "/console/account/reach", views, s.setReach},
		{"POST", "/console/account/keys", views, s.setKeys},
		{"POST", "/console/account/app", views, s.beginApp},
		{"POST", "/console/account/app/confirm", views, s.confirmApp},
		{"POST", "/console/account/app/remove", views, s.removeApp},
		{"POST", "/console/account/codes", views, s.newCodes},
		{"POST", "/console/account/passkeys/ask", views, s.askPasskey},
		{"POST", "/console/account/passkeys", views, s.addPasskey},
		{"POST", "/console/account/passkeys/{id}/remove", views, s.removePasskey},
		{"POST", "/console/account/sessions/{id}/end", views, s.endSession},
		{"POST", "/console/account/operator", views, s.confirmOperator},
		{"POST", "/console/account/operator/unlink", views, s.denyOperator},
		{"POST", "/console/account/telegram", views, s.linkChat},
		{"POST", "/console/account/telegram/unlink", views, s.unlinkChat},
	}
}

func (s accountHandlers) account(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showAccount(w, r, who, http.StatusOK, "")
}

func (s accountHandlers) showAccount(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	ctx := r.Context()
	v := accountPage{Notice: notice, MinBytes: auth.MinPassword, Proved: who.Proved(), Usable: s.site(r).Usable() == nil, KeysOff: who.KeysOff}
	var err1, err2, err3, err4, err5 error
	v.Person, err1 = s.conf.People.Me(ctx, who)
	v.Keys, err2 = s.conf.People.Passkeys(ctx, who)
	v.List, err3 = s.conf.People.Sessions(ctx, who)
	v.Current, err4 = s.conf.People.Current(ctx, s.token(r), auth.Browser)
	if v.Telegram = s.telegram(); v.Telegram {
		v.Chat, v.Linked, err5 = s.chatOf(ctx, who)
	}
	link, err6 := s.conf.People.Operator(ctx, who)
	if err := errors.Join(err1, err2, err3, err4, err5, err6); err != nil {
		return err
	}
	if link.Person == who.String() {
		v.Link = link
	}
	return s.render(r.Context(), w, status, page{Name: "account", Title: "Your account", Who: who, Here: "account", Body: v})
}

// changed redirects to the account page after a form, or shows err there.
func (s accountHandlers) changed(w http.ResponseWriter, r *http.Request, who auth.Principal, err error) error {
	if why := declined(err); why != "" {
		return s.showAccount(w, r, who, http.StatusBadRequest, why)
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/account", http.StatusSeeOther)
	return nil
}

// declined returns the message for an error in a form about people. It returns
// the empty string for errors that the person did not cause.
func declined(err error) string {
	switch {
	case errors.Is(err, auth.ErrInvalid):
		return "Nothing was changed: " + strings.TrimPrefix(err.Error(), auth.ErrInvalid.Error()+" ") + "."
	case errors.Is(err, people.ErrLastOwner), errors.Is(err, people.ErrOperatorLinked), errors.Is(err, people.ErrNoFactor), errors.Is(err, people.ErrSite), errors.Is(err, auth.ErrTooMany):
		return "Nothing was changed: " + err.Error() + "."
	case errors.Is(err, people.ErrChallenge):
		return "Nothing was changed: the request is unknown, already used, or expired. Start again."
	}
	return ""
}

func (s accountHandlers) confirmOperator(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.changed(w, r, who, s.conf.People.LinkOperator(r.Context(), who, who.ID))
}

func (s accountHandlers) denyOperator(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.changed(w, r, who, s.conf.People.UnlinkOperator(r.Context(), who, who.ID))
}

func (s accountHandlers) setPassword(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	form := r.PostForm
	if form.Get("new") != form.Get("again") {
		return s.showAccount(w, r, who, http.StatusBadRequest, "Nothing was changed: the passwords do not match.")
	}
	return s.changed(w, r, who, s.conf.People.SetPassword(r.Context(), s.token(r), form.Get("password"), form.Get("new"), s.visit(r)))
}

func (s accountHandlers) setReach(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.changed(w, r, who, s.conf.People.SetEmail(r.Context(), who, who.ID, strings.TrimSpace(r.PostForm.Get("email"))))
}

// setKeys turns the console's keys on or off for the person. Any other value is rejected: a
// form that was cut short must not change how the page reacts to a keyboard.
func (s accountHandlers) setKeys(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	keys := r.PostForm.Get("keys")
	if keys != "on" && keys != "off" {
		return s.showAccount(w, r, who, http.StatusBadRequest, "Nothing was changed: choose on or off.")
	}
	return s.changed(w, r, who, s.conf.People.SetKeys(r.Context(), who, keys == "on"))
}

// An appPage shows the secret of an authenticator app that is being set up.
type appPage struct {
	Token   string
	Secret  string // in groups of four
	QR      qrCode
	Problem string
}

// A qrCode is the drawing of a QR code. It is drawn in this process: a service
// that rendered it would learn the TOTP secret.
type qrCode struct {
	Side int
	D    template.HTMLAttr
}

// draw draws a QR code, with the quiet zone of four modules that it needs.
func draw(text string) (c qrCode, err error) {
	code, err := qr.Encode(text, qr.M, qr.Auto)
	if err != nil {
		return c, fmt.Errorf("draw qr code: %w", err)
	}
	var d strings.Builder
	side := code.Bounds().Dx()
	for y := range side {
		for x := range side {
			if black, _, _, _ := code.At(x, y).RGBA(); black == 0 {
				fmt.Fprintf(&d, "M%d %dh1v1h-1z", x+4, y+4)
			}
		}
	}
	return qrCode{Side: side + 8, D: template.HTMLAttr(`d="` + d.String() + `"`)}, nil //nolint:gosec // numbers and letters of ours
}

func (s accountHandlers) showApp(ctx context.Context, w http.ResponseWriter, status int, who auth.Principal, e people.Enrolment, problem string) error {
	v := appPage{Token: e.Token.Reveal(), Problem: problem}
	var groups []string
	for i, secret := 0, e.Secret.Reveal(); i < len(secret); i += 4 {
		groups = append(groups, secret[i:min(i+4, len(secret))])
	}
	v.Secret = strings.Join(groups, " ")
	var err error
	if v.QR, err = draw(e.URL.Reveal()); err != nil {
		return err
	}
	return s.render(ctx, w, status, page{Name: "app", Title: "Set up an authenticator app", Who: who, Here: "account", Body: v})
}

func (s accountHandlers) beginApp(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	e, err := s.conf.People.BeginTOTP(r.Context(), s.token(r), r.PostForm.Get("password"), r.Host, s.visit(r))
	if err != nil {
		return s.changed(w, r, who, err)
	}
	return s.showApp(r.Context(), w, http.StatusOK, who, e, "")
}

func (s accountHandlers) confirmApp(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	token := auth.Secret(r.PostForm.Get("token"))
	codes, err := s.conf.People.ConfirmTOTP(r.Context(), s.token(r), token, r.PostForm.Get("code"), s.visit(r))
	if errors.Is(err, people.ErrCode) {
		e, err := s.conf.People.Enrolling(r.Context(), s.token(r), token, r.Host)
		if err != nil {
			return s.changed(w, r, who, err)
		}
		return s.showApp(r.Context(), w, http.StatusBadRequest, who, e, "The code is wrong. Check the clock of your device and enter the current code.")
	}
	if err != nil {
		return s.changed(w, r, who, err)
	}
	return s.showCodes(w, r, who, codes)
}

// showCodes shows new recovery codes. Without new codes it redirects to the
// account. The codes are stored only as hashes, so they cannot be shown again.
func (s accountHandlers) showCodes(w http.ResponseWriter, r *http.Request, who auth.Principal, codes []string) error {
	if len(codes) == 0 {
		return s.changed(w, r, who, nil)
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "codes", Title: "Recovery codes", Who: who, Here: "account", Body: codes})
}

func (s accountHandlers) removeApp(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.changed(w, r, who, s.conf.People.RemoveTOTP(r.Context(), who))
}

func (s accountHandlers) newCodes(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	codes, err := s.conf.People.NewCodes(r.Context(), who)
	if err != nil {
		return s.changed(w, r, who, err)
	}
	return s.showCodes(w, r, who, codes)
}

func (s accountHandlers) askPasskey(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q, err := s.conf.People.BeginPasskey(r.Context(), s.token(r), r.PostForm.Get("password"), s.site(r), s.visit(r))
	if err != nil {
		return s.changed(w, r, who, err)
	}
	return s.showAsk(r.Context(), w, who, askPage{
		Title: "Create a passkey", Text: "Your browser creates it on this device, a phone or a security key. It works only with this host name of the console.",
		Action: "/console/account/passkeys", Kind: "create", Label: r.PostForm.Get("name"), Button: "Create a passkey",
	}, q)
}

func (s accountHandlers) addPasskey(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	form := r.PostForm
	codes, err := s.conf.People.FinishPasskey(r.Context(), s.token(r), auth.Secret(form.Get("token")), form.Get("name"), []byte(form.Get("response")), s.site(r), s.visit(r))
	if err != nil {
		s.log.DebugContext(r.Context(), "add passkey", "err", err)
		return s.changed(w, r, who, err)
	}
	return s.showCodes(w, r, who, codes)
}

func (s accountHandlers) removePasskey(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.changed(w, r, who, s.conf.People.RemovePasskey(r.Context(), who, r.PathValue("id")))
}

func (s accountHandlers) endSession(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.changed(w, r, who, s.conf.People.EndSession(r.Context(), who, r.PathValue("id")))
}

// A stepUpPage asks a signed-in person to confirm a second factor.
type stepUpPage struct {
	people.Person
	Next    string
	Usable  bool // passkeys work under the host name of this request
	Problem string
}

// stepUpHandlers asks a signed-in person for a second factor again.
type stepUpHandlers struct{ *Server }

func (s stepUpHandlers) routes() []route {
	return []route{
		{"GET", "/console/stepup", views, s.stepUpPage},
		{"POST", "/console/stepup", views, s.stepUp},
		{"POST", "/console/stepup/passkey/ask", views, s.askStepUp},
		{"POST", "/console/stepup/passkey", views, s.stepUpPasskey},
	}
}

func (s stepUpHandlers) stepUpPage(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showStepUp(w, r, who, http.StatusOK, localPath(r.URL.Query().Get("next")), "")
}

func (s stepUpHandlers) showStepUp(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, next, problem string) error {
	me, err := s.conf.People.Me(r.Context(), who)
	if err != nil {
		return err
	}
	v := stepUpPage{Person: me, Next: next, Usable: me.Passkeys > 0 && s.site(r).Usable() == nil, Problem: problem}
	return s.render(r.Context(), w, status, page{Name: "stepup", Title: "Confirm it’s you", Who: who, Body: v})
}

// steppedUp redirects to the page that required the second factor, or shows the
// form again.
func (s stepUpHandlers) steppedUp(w http.ResponseWriter, r *http.Request, who auth.Principal, err error) error {
	next := localPath(r.PostForm.Get("next"))
	switch {
	case err == nil:
		http.Redirect(w, r, next, http.StatusSeeOther) //nolint:gosec // next is checked to be a path of ours
		return nil
	case errors.Is(err, people.ErrCode):
		return s.showStepUp(w, r, who, http.StatusForbidden, next, "The code is wrong, already used, or expired.")
	case errors.Is(err, people.ErrChallenge):
		s.log.DebugContext(r.Context(), "step up", "err", err)
		return s.showStepUp(w, r, who, http.StatusForbidden, next, "The request expired, was already used, or the passkey belongs to another account. Try again.")
	case errors.Is(err, auth.ErrTooMany):
		return s.showStepUp(w, r, who, http.StatusTooManyRequests, next, sentence(err.Error()))
	case errors.Is(err, people.ErrNoFactor), errors.Is(err, people.ErrSite):
		return s.showStepUp(w, r, who, http.StatusBadRequest, next, sentence(err.Error()))
	}
	return err
}

func (s stepUpHandlers) stepUp(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.steppedUp(w, r, who, s.conf.People.StepUp(r.Context(), s.token(r), auth.Browser, r.PostForm.Get("code"), remote(r)))
}

func (s stepUpHandlers) askStepUp(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q, err := s.conf.People.AskStepUp(r.Context(), s.token(r), auth.Browser, s.site(r))
	if err != nil {
		return s.steppedUp(w, r, who, err)
	}
	return s.showAsk(r.Context(), w, who, askPage{
		Title: "Confirm it’s you", Text: "Your browser will ask for your passkey.",
		Action: "/console/stepup/passkey", Kind: "get", Next: localPath(r.PostForm.Get("next")), Button: "Use a passkey",
	}, q)
}

func (s stepUpHandlers) stepUpPasskey(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	form := r.PostForm
	return s.steppedUp(w, r, who, s.conf.People.StepUpPasskey(r.Context(), s.token(r), auth.Browser, auth.Secret(form.Get("token")), []byte(form.Get("response")), s.site(r)))
}
