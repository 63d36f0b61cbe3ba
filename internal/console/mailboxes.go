package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/gmail"
	"postern/internal/imapmail"
	"postern/internal/mail"
	"postern/internal/store"
)

// A mailboxForm is what a person typed about a mailbox, without the credential.
type mailboxForm struct {
	Address string
	Public  map[string]string // by the keys of [imapmail]
	Bad     string            // name of the field that the notice is about; may be empty
}

// A shownMailbox is a connection as the pages show it.
type shownMailbox struct{ connector.Connection }

// IsGmail reports whether its credential comes from a sign-in at Google.
func (m shownMailbox) IsGmail() bool { return m.Kind == gmail.Kind }

// Provider says where the mailbox is.
func (m shownMailbox) Provider() string {
	if m.IsGmail() {
		return "Gmail"
	}
	host, _, _ := strings.Cut(m.Public[imapmail.IMAP], ":")
	return "IMAP and SMTP, " + host
}

// State returns the phase in words.
func (m shownMailbox) State() string {
	switch m.Phase {
	case connector.SignIn:
		return "needs sign-in"
	case connector.Revoked:
		return "disconnected"
	case connector.Syncing, connector.Connected, connector.Paused:
	}
	return string(m.Phase)
}

// Progress says how many messages are imported.
func (m shownMailbox) Progress() string {
	switch {
	case m.Total > 0 && m.Done < m.Total:
		return fmt.Sprintf("%d of %d messages", m.Done, m.Total)
	case m.Synced.IsZero() && m.Done == 0:
		return "nothing yet"
	}
	return count(int(m.Done), "message", "messages")
}

// SignInAt returns the address of the form for a new credential.
func (m shownMailbox) SignInAt() string {
	if m.IsGmail() {
		return "/console/mailboxes/gmail?" + url.Values{"connection": {m.Address}}.Encode()
	}
	return "/console/mailboxes/" + m.ID + "#s-signin"
}

// A mailboxesPage lists all connections, and has the form that makes one.
type mailboxesPage struct {
	Mailboxes []shownMailbox
	Notice    string
	Form      mailboxForm
	Gmail     bool // mailboxes at Gmail can be connected
}

// A mailboxPage is one connection.
type mailboxPage struct {
	shownMailbox
	Notice string
	Form   mailboxForm // for a new credential
}

// mailboxHandlers connects mailboxes that exist at other providers, and ends connections.
type mailboxHandlers struct{ *Server }

func (s mailboxHandlers) routes() []route {
	return []route{
		{"GET", "/console/mailboxes", views, s.mailboxes},
		{"POST", "/console/mailboxes", manages, s.connect},
		{"GET", "/console/mailboxes/{id}", views, s.mailbox},
		{"POST", "/console/mailboxes/{id}", manages, s.change},
	}
}

// connections returns the connections, or an error if the server has none.
func (s mailboxHandlers) connections() (*connector.Connections, error) {
	if s.conf.Mailboxes == nil {
		return nil, fmt.Errorf("this server connects no mailboxes: %w", store.ErrNotFound)
	}
	return s.conf.Mailboxes, nil
}

func (s mailboxHandlers) mailboxes(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showMailboxes(w, r, who, http.StatusOK, mailboxesPage{})
}

func (s mailboxHandlers) showMailboxes(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p mailboxesPage) error {
	cs, err := s.connections()
	if err != nil {
		return err
	}
	list, err := cs.List(r.Context(), who)
	if err != nil {
		return err
	}
	for _, c := range list {
		p.Mailboxes = append(p.Mailboxes, shownMailbox{c})
	}
	p.Gmail = s.conf.Gmail != nil
	return s.render(r.Context(), w, status, page{Name: "mailboxes", Title: "Mailboxes", Who: who, Here: "inboxes", Body: p})
}

// mailboxSettings reads the form about a mailbox over IMAP and SMTP.
func mailboxSettings(r *http.Request) (mailboxForm, connector.Settings) {
	f := mailboxForm{Address: strings.TrimSpace(r.PostForm.Get("address")), Public: map[string]string{}}
	for _, k := range []string{imapmail.IMAP, imapmail.SMTP, imapmail.User, imapmail.Auth} {
		f.Public[k] = strings.TrimSpace(r.PostForm.Get(k))
	}
	return f, connector.Settings{Address: f.Address, Public: f.Public, Credential: strings.TrimRight(r.PostForm.Get("credential"), "\r\n")}
}

// mailboxFields are the labels of the form's fields, by the names that errors have.
var mailboxFields = map[string]string{
	"address": "Address", "credential": "Password or access token",
	imapmail.IMAP: "IMAP server", imapmail.SMTP: "SMTP server", imapmail.User: "User name", imapmail.Auth: "Sign in with",
}

// unconnected returns why a provider or this server does not connect a mailbox, and the
// field to blame. Both are empty for errors that the person cannot correct.
func unconnected(err error) (why, field string) {
	switch {
	case errors.Is(err, directory.ErrTaken):
		return "Address: this server has an inbox with this address. If the mailbox is in the list below, sign in again there.", "address"
	case !errors.Is(err, directory.ErrInvalid) && !errors.Is(err, connector.ErrSignIn):
		return "", ""
	}
	why = because(err)
	name, rest, _ := strings.Cut(why, ": ")
	label, known := mailboxFields[name]
	switch {
	case !known:
		return sentence(why), ""
	case errors.Is(err, connector.ErrSignIn):
		return label + ": it refuses the user name or the credential. An account with a second factor needs an app password.", "credential"
	}
	return label + ": " + rest + ".", name
}

// because returns the text of an error without its category.
func because(err error) string {
	text := err.Error()
	if _, after, ok := strings.Cut(text, directory.ErrInvalid.Error()+": "); ok {
		text = after
	}
	return mail.Printable(text, 600)
}

func (s mailboxHandlers) connect(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	cs, err := s.connections()
	if err != nil {
		return err
	}
	f, set := mailboxSettings(r)
	set.Kind = imapmail.Kind
	c, key, err := cs.Connect(r.Context(), who, connector.NewConnection{Settings: set})
	if why, field := unconnected(err); why != "" {
		f.Bad = field
		return s.showMailboxes(w, r, who, http.StatusBadRequest, mailboxesPage{Notice: "Nothing was connected. " + why, Form: f})
	}
	if err != nil {
		return err
	}
	return s.showKey(r.Context(), w, who, c, key)
}

// showKey shows the key of a new connection's inbox. The key is shown only once.
func (s mailboxHandlers) showKey(ctx context.Context, w http.ResponseWriter, who auth.Principal, c connector.Connection, key auth.Secret) error {
	return inboxHandlers(s).showKey(ctx, w, who, keyPage{Inbox: directory.Inbox{ID: c.Inbox, Address: c.Address, Project: c.Project}, Key: key.Reveal(), Made: true})
}

func (s mailboxHandlers) mailbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showMailbox(w, r, who, http.StatusOK, mailboxPage{})
}

func (s mailboxHandlers) showMailbox(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p mailboxPage) error {
	cs, err := s.connections()
	if err != nil {
		return err
	}
	if p.Connection, err = cs.Get(r.Context(), who, r.PathValue("id")); err != nil {
		return err
	}
	if p.Form.Public == nil {
		p.Form.Public = p.Public
	}
	return s.render(r.Context(), w, status, page{Name: "mailbox", Title: p.Address, Who: who, Here: "inboxes", Body: p})
}

// change handles the forms on a connection's page.
func (s mailboxHandlers) change(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	cs, err := s.connections()
	if err != nil {
		return err
	}
	ctx, id := r.Context(), r.PathValue("id")
	p := mailboxPage{}
	switch r.PostForm.Get("do") {
	case "pause":
		_, err = cs.Pause(ctx, who, id)
	case "resume":
		_, err = cs.Resume(ctx, who, id)
	case "resync":
		_, err = cs.Resync(ctx, who, id)
	case "sign-in":
		f, set := mailboxSettings(r)
		p.Form = f
		_, err = cs.SignIn(ctx, who, id, set)
	case "disconnect":
		return s.disconnect(w, r, who, cs)
	default:
		return fmt.Errorf("%w: do must be pause, resume, resync, sign-in or disconnect", errForm)
	}
	return s.after(w, r, who, p, err)
}

// disconnect ends a connection if the person has ticked the box: it cannot be undone without
// the credential.
func (s mailboxHandlers) disconnect(w http.ResponseWriter, r *http.Request, who auth.Principal, cs *connector.Connections) error {
	if sure, _ := strconv.ParseBool(r.PostForm.Get("sure")); !sure {
		return s.showMailbox(w, r, who, http.StatusBadRequest, mailboxPage{Notice: "Nothing was changed. Tick the box to disconnect the mailbox."})
	}
	_, problem, err := cs.Disconnect(r.Context(), who, r.PathValue("id"))
	if problem != "" {
		return s.showMailbox(w, r, who, http.StatusOK, mailboxPage{Notice: "The credential is deleted here, but the provider did not withdraw it: " + problem + ". Remove Postern in the settings of your account there."})
	}
	return s.after(w, r, who, mailboxPage{}, err)
}

// after shows a connection after a form, or why err changed nothing.
func (s mailboxHandlers) after(w http.ResponseWriter, r *http.Request, who auth.Principal, p mailboxPage, err error) error {
	if why, field := unconnected(err); why != "" {
		p.Notice, p.Form.Bad = "Nothing was changed. "+why, field
		return s.showMailbox(w, r, who, http.StatusBadRequest, p)
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/mailboxes/"+url.PathEscape(r.PathValue("id")), http.StatusSeeOther)
	return nil
}
