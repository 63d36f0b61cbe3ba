package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/quota"
	"postern/internal/seal"
	"postern/internal/store"
)

// A listedInbox is an inbox with what is known without opening it.
type listedInbox struct {
	directory.Inbox
	Usage mailbox.Usage
	Keys  int // credentials that may open it
}

// Full returns the used part of the inbox's room, in percent.
func (l listedInbox) Full() int64 {
	if l.MaxBytes <= 0 {
		return 0
	}
	return min(100, l.Usage.Bytes*100/l.MaxBytes)
}

// IsDeleted reports whether the inbox is deleted; it can be restored within its grace time.
func (l listedInbox) IsDeleted() bool { return !l.Deleted.IsZero() }

// An inboxesPage lists all inboxes, and has the form that makes one.
type inboxesPage struct {
	Inboxes []listedInbox
	Deleted []listedInbox
	Codes   []mailbox.ConnectCode // usable ones, and used ones that somebody tried again
	Ended   []mailbox.ConnectCode // the others
	Domains []string              // in which inboxes may be made, the server's own first
	Notice  string
	Name    string // as typed into a rejected form
	Display string
	Domain  string
	Expires string
	Invite  inviteForm
}

// inboxHandlers manages inboxes, their credentials and limits; it never reads mail.
type inboxHandlers struct{ *Server }

func (s inboxHandlers) routes() []route {
	return []route{
		{"GET", "/console/inboxes", views, s.inboxes},
		{"POST", "/console/inboxes", manages, s.createInbox},
		{"POST", "/console/inboxes/invite", manages, s.inviteAgent},
		{"POST", "/console/inboxes/codes/{id}/withdraw", manages, s.withdrawCode},
		{"GET", "/console/inboxes/{id}", views, s.inbox},
		{"POST", "/console/inboxes/{id}/settings", manages, s.changeInbox},
		{"POST", "/console/inboxes/{id}/limits", manages, s.limitInbox},
		{"POST", "/console/inboxes/{id}/delete", manages, s.deleteInbox},
		{"POST", "/console/inboxes/{id}/restore", manages, s.restoreInbox},
		{"POST", "/console/inboxes/{id}/revoke", manages, s.revokeKey},
		{"GET", "/console/recover", manages, s.recoverForm},
		{"POST", "/console/recover", manages, s.recoverInbox},
	}
}

func (s inboxHandlers) inboxes(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showInboxes(w, r, who, http.StatusOK, inboxesPage{})
}

func (s inboxHandlers) showInboxes(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, v inboxesPage) error {
	ctx := r.Context()
	v.Domains = []string{s.post.Directory.Domain()}
	live, err1 := s.post.Directory.Inboxes(ctx, who)
	gone, err2 := s.post.Deleted(ctx, who)
	usage, err3 := s.post.Usage(ctx, who)
	ds, err4 := s.domains.Domains(ctx, who)
	codes, err5 := s.post.ConnectCodes(ctx, who)
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return err
	}
	for _, b := range live {
		v.Inboxes = append(v.Inboxes, listedInbox{Inbox: b, Usage: usage[b.ID]})
	}
	for _, b := range gone {
		v.Deleted = append(v.Deleted, listedInbox{Inbox: b, Usage: usage[b.ID]})
	}
	for _, d := range ds {
		if d.Sends() {
			v.Domains = append(v.Domains, d.Name)
		}
	}
	for _, c := range codes {
		if isOpen(c) || !c.Again.IsZero() {
			v.Codes = append(v.Codes, c)
		} else {
			v.Ended = append(v.Ended, c)
		}
	}
	return s.render(r.Context(), w, status, page{Name: "inboxes", Title: "Inboxes", Who: who, Here: "inboxes", Body: v})
}

// formDate returns the end of the day in a form's field, or zero if the field is empty.
func formDate(r *http.Request, field string) (time.Time, error) {
	v := strings.TrimSpace(r.PostForm.Get(field))
	if v == "" {
		return time.Time{}, nil
	}
	t, err := time.ParseInLocation(time.DateOnly, v, time.UTC)
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: %s: must be a date such as 2027-01-31", directory.ErrInvalid, field)
	}
	return t.Add(24*time.Hour - time.Second), nil
}

// refused returns the message for an error in a form about an inbox. It returns
// the empty string for errors that the person did not cause.
func refused(err error) string {
	if taken, ok := errors.AsType[*directory.TakenError](err); ok {
		if len(taken.Suggestions) > 0 {
			return "Nothing was created: " + taken.Address + " is taken. Available: " + strings.Join(taken.Suggestions, ", ") + "."
		}
		return "Nothing was created: " + taken.Address + " is taken."
	}
	for _, known := range []error{directory.ErrInvalid, directory.ErrTaken, domain.ErrInvalid} {
		if errors.Is(err, known) {
			return "Nothing was changed: " + strings.TrimPrefix(err.Error(), known.Error()+": ") + "."
		}
	}
	return ""
}

// A keyPage shows credentials. They are shown only once.
type keyPage struct {
	Inbox    directory.Inbox
	Key      string
	Recovery string // empty if none was made
	Made     bool   // the inbox is new
	Revoked  bool   // the other keys have ended
}

func (s inboxHandlers) createInbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	n := directory.NewInbox{Address: strings.TrimSpace(r.PostForm.Get("name")), DisplayName: strings.TrimSpace(r.PostForm.Get("display"))}
	if d := strings.TrimSpace(r.PostForm.Get("domain")); n.Address != "" && d != "" && !strings.Contains(n.Address, "@") {
		n.Address += "@" + d
	}
	var b directory.Inbox
	var key auth.Secret
	expires, err := formDate(r, "expires")
	if err == nil {
		n.Expires = expires
		b, key, err = s.post.CreateInbox(ctx, who, n, "")
	}
	if why := refused(err); why != "" {
		return s.showInboxes(w, r, who, http.StatusBadRequest, inboxesPage{
			Notice: why, Name: r.PostForm.Get("name"), Display: r.PostForm.Get("display"), Domain: r.PostForm.Get("domain"), Expires: r.PostForm.Get("expires"),
		})
	}
	if err != nil {
		return err
	}
	v := keyPage{Inbox: b, Key: key.Reveal(), Made: true}
	if r.PostForm.Get("recovery") != "" {
		recovery, err := s.recoveryKey(ctx, key, b.ID)
		if err != nil {
			return err
		}
		v.Recovery = recovery.Reveal()
	}
	return s.showKey(r.Context(), w, who, v)
}

// recoveryKey creates a recovery key with the key of a new inbox. Only the
// holder of an inbox key can do so; here that is still the person who created
// the inbox.
func (s inboxHandlers) recoveryKey(ctx context.Context, key auth.Secret, inbox string) (auth.Secret, error) {
	agent, err := auth.CheckKey(ctx, s.db, key)
	if err != nil {
		return "", err
	}
	k, err := s.post.Keys.Open(ctx, agent, key, inbox)
	if err != nil {
		return "", err
	}
	_, recovery, err := s.post.Keys.AddRecovery(ctx, agent, k)
	return recovery, err
}

func (s inboxHandlers) showKey(ctx context.Context, w http.ResponseWriter, who auth.Principal, v keyPage) error {
	return s.render(ctx, w, http.StatusCreated, page{Name: "key", Title: "Key of " + v.Inbox.Address, Who: who, Here: "inboxes", Body: v})
}

var inboxID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^ibx_[A-Z2-7]{26}$`) })

// An inboxPage shows one inbox: its rights and who may open it, but no mail.
type inboxPage struct {
	listedInbox
	Parts   []keyring.Part
	Notice  string
	Grace   time.Duration
	Ends    string // the date of expiry, in the format of a form's field
	MaxMB   int64
	MostMB  int64
	Domain  string
	LastKey string // the last key that can manage the inbox, if its revocation must be confirmed

	Sending   quota.Sending
	Quotas    []quota.Quota
	Suspended *delivery.Suspension // nil while it sends

	Modes   []modeChoice
	Allowed []mailbox.AllowEntry
}

// quotaText describes what is left of a limit. The limit's own name is for programs.
func quotaText(q quota.Quota) string {
	_, what, _ := strings.Cut(q.Name, "-")
	window, unit, _ := strings.Cut(what, "-")
	switch unit {
	case "":
		unit = "emails"
	case "bytes":
		return fmt.Sprintf("%s of %s a %s left", short(q.Left), short(q.Limit), window)
	}
	return fmt.Sprintf("%d of %d %s a %s left", q.Left, q.Limit, unit, window)
}

// A limitField is one limit in a form: 0 is the server's own, -1 is none.
type limitField struct {
	Name, Label string
	Value       int64
}

// Limits returns the fields of the form that limits what the inbox sends.
func (p inboxPage) Limits() []limitField {
	l := p.Sending.Limits
	return []limitField{
		{"minute", "Emails a minute", l.PerMinute},
		{"hour", "Emails an hour", l.PerHour},
		{"day", "Emails a day", l.PerDay},
		{"recipients", "Recipients a day", l.Recipients},
		{"bytes", "Bytes a day", l.Bytes},
	}
}

const megabyte = 1 << 20

// findInbox returns an inbox of who's project, deleted or not.
func (s inboxHandlers) findInbox(r *http.Request, who auth.Principal) (directory.Inbox, error) {
	id := r.PathValue("id")
	if !inboxID().MatchString(id) {
		return directory.Inbox{}, fmt.Errorf("inbox %q: %w", id, directory.ErrNoInbox)
	}
	b, err := s.post.Directory.Find(r.Context(), who, id)
	if !errors.Is(err, directory.ErrNoInbox) {
		return b, err
	}
	gone, derr := s.post.Deleted(r.Context(), who)
	if derr != nil {
		return directory.Inbox{}, derr
	}
	if i := slices.IndexFunc(gone, func(b directory.Inbox) bool { return b.ID == id }); i >= 0 {
		return gone[i], nil
	}
	return directory.Inbox{}, err
}

func (s inboxHandlers) inbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showInbox(w, r, who, http.StatusOK, "", "")
}

func (s inboxHandlers) showInbox(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice, last string) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	usage, err := s.post.Usage(r.Context(), who)
	if err != nil {
		return err
	}
	v := inboxPage{listedInbox: listedInbox{Inbox: b, Usage: usage[b.ID]}, Notice: notice, Grace: mailbox.Grace, MaxMB: b.MaxBytes / megabyte, MostMB: directory.MaxBytes / megabyte, LastKey: last}
	if !b.Expires.IsZero() {
		v.Ends = b.Expires.UTC().Format(time.DateOnly)
	}
	if !v.IsDeleted() {
		if v.Parts, err = s.post.Keys.Parts(r.Context(), who, b.ID); err != nil {
			return err
		}
		if v.Sending, v.Quotas, err = s.post.Quotas.Sends(r.Context(), who, b.ID); err != nil {
			return err
		}
		v.Modes = modeChoices(b.Mode)
		if v.Allowed, err = s.post.AllowList.Entries(r.Context(), who, b.ID); err != nil {
			return err
		}
		ss, err := s.post.Delivery.Suspensions(r.Context(), who)
		if err != nil {
			return err
		}
		_, host, _ := strings.Cut(b.Address, "@")
		if i := slices.IndexFunc(ss, func(x delivery.Suspension) bool { return x.Scope == b.ID || x.Scope == host }); i >= 0 {
			v.Suspended = &ss[i]
		}
	}
	return s.render(r.Context(), w, status, page{Name: "inbox", Title: b.Address, Who: who, Here: "inboxes", Body: v})
}

// back redirects to the inbox's page after a form, or shows there why err
// changed nothing.
func (s inboxHandlers) back(w http.ResponseWriter, r *http.Request, who auth.Principal, err error) error {
	if why := refused(err); why != "" {
		return s.showInbox(w, r, who, http.StatusBadRequest, why, "")
	}
	if errors.Is(err, oversight.ErrByHand) || errors.Is(err, oversight.ErrNotAsked) {
		return s.showInbox(w, r, who, http.StatusForbidden, sentence(err.Error())+" Nothing was changed.", "")
	}
	if errors.Is(err, keyring.ErrNoKey) {
		return s.showInbox(w, r, who, http.StatusConflict, "Your click changed nothing: the key no longer exists.", "")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/inboxes/"+r.PathValue("id"), http.StatusSeeOther) //nolint:gosec // a path of ours: the id was found
	return nil
}

func (s inboxHandlers) changeInbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	display := strings.TrimSpace(r.PostForm.Get("display"))
	c := mailbox.Change{DisplayName: &display}
	if auto := directory.AutoSubmitted(r.PostForm.Get("auto")); auto != "" && auto != b.AutoSubmitted {
		c.AutoSubmitted = &auto
	}
	expires, err := formDate(r, "expires")
	if err == nil {
		if ends := b.Expires.UTC().Format(time.DateOnly); b.Expires.IsZero() || r.PostForm.Get("expires") != ends {
			c.Expires = &expires // an unchanged date keeps its time of day
		}
		mb, perr := strconv.ParseInt(strings.TrimSpace(r.PostForm.Get("megabytes")), 10, 64)
		if perr != nil || mb < 1 || mb > directory.MaxBytes/megabyte {
			err = fmt.Errorf("%w: room: must be 1 to %d MiB", directory.ErrInvalid, directory.MaxBytes/megabyte)
		} else if mb != b.MaxBytes/megabyte {
			bytes := mb * megabyte
			c.MaxBytes = &bytes
		}
	}
	if err == nil {
		_, err = s.post.Update(r.Context(), who, b.ID, c)
	}
	return s.back(w, r, who, err)
}

func (s inboxHandlers) limitInbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	set, _, err := s.post.Quotas.Sends(r.Context(), who, b.ID)
	if err != nil {
		return err
	}
	l := &set.Limits
	for name, v := range map[string]*int64{"minute": &l.PerMinute, "hour": &l.PerHour, "day": &l.PerDay, "recipients": &l.Recipients, "bytes": &l.Bytes} {
		n, err := strconv.ParseInt(strings.TrimSpace(r.PostForm.Get(name)), 10, 64)
		if err != nil || n < quota.Unlimited {
			return s.back(w, r, who, fmt.Errorf("%w: %s: must be a number; 0 is the server's own limit, -1 is none", directory.ErrInvalid, name))
		}
		*v = n
	}
	return s.back(w, r, who, s.post.Quotas.SetSending(r.Context(), who, b.ID, set))
}

func (s inboxHandlers) deleteInbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	_, err = s.post.Delete(r.Context(), who, b.ID)
	return s.back(w, r, who, err)
}

func (s inboxHandlers) restoreInbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	_, err = s.post.Undelete(r.Context(), who, b.ID)
	return s.back(w, r, who, err)
}

var credentialID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^crd_[A-Z2-7]{26}$`) })

func (s inboxHandlers) revokeKey(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	id := r.PostForm.Get("credential")
	if !credentialID().MatchString(id) {
		return fmt.Errorf("credential %q: %w", id, store.ErrNotFound)
	}
	err = s.post.Keys.Revoke(r.Context(), who, b.ID, id, r.PostForm.Get("last") == id)
	if errors.Is(err, keyring.ErrLastKey) {
		return s.showInbox(w, r, who, http.StatusConflict, "Nothing was changed: this is the last key that can manage the inbox. Without it, only a recovery key can open its mail again. To revoke it anyway, confirm below.", id)
	}
	return s.back(w, r, who, err)
}

// A recoverPage asks for a recovery key.
type recoverPage struct{ Notice string }

func (s inboxHandlers) recoverForm(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.render(r.Context(), w, http.StatusOK, page{Name: "recover", Title: "Recover an inbox", Who: who, Here: "inboxes", Body: recoverPage{}})
}

// recoverInbox creates a new key with a recovery key. Only inboxes of the
// signed-in person's project are recovered, so that the form cannot be used to
// test keys of other projects.
func (s inboxHandlers) recoverInbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	key := auth.Secret(strings.TrimSpace(r.PostForm.Get("recovery")))
	holder, err := auth.CheckKey(ctx, s.db, key)
	if err != nil && !errors.Is(err, auth.ErrUnauthenticated) {
		return err
	}
	if err != nil || holder.Kind != auth.Recovery || holder.Project != who.Project {
		return s.render(r.Context(), w, http.StatusBadRequest, page{Name: "recover", Title: "Recover an inbox", Who: who, Here: "inboxes", Body: recoverPage{"This is not the recovery key of an inbox in this project. Nothing was changed. Recovery keys start with prk_."}})
	}
	revoke := r.PostForm.Get("revoke") != ""
	b, _, fresh, err := s.post.Keys.Recover(ctx, holder, key, revoke)
	if err != nil {
		return err
	}
	return s.showKey(r.Context(), w, who, keyPage{Inbox: b, Key: fresh.Reveal(), Revoked: revoke})
}

// partKind returns the name of a kind of credential for people.
func partKind(p keyring.Part) string {
	if p.Kind == auth.ContextKey {
		return "context grant"
	}
	switch p.Kind {
	case auth.Agent:
		return "key"
	case auth.Grant:
		if p.Account {
			return "account"
		}
		return "grant"
	case auth.Recovery:
		return "recovery key"
	case auth.Person, auth.Project, auth.Sandbox, auth.System:
	}
	return string(p.Kind)
}

// partMay describes what a credential may do.
func partMay(p keyring.Part) string {
	if p.Kind == auth.Recovery {
		return "create a new key"
	}
	if p.Kind == auth.ContextKey {
		return "show a reviewer the threads of waiting actions"
	}
	may := strings.Join(p.Scope.List(), ", ")
	switch p.Scope {
	case seal.Propose:
		may = "read, draft, propose"
	case seal.Manage:
		may = "read, draft, propose, manage"
	case seal.Send:
		may = "propose"
	case seal.Read, seal.Draft, seal.Recover, seal.Context:
	}
	if n := len(p.Tools); n > 0 {
		may += "; only " + strings.Join(p.Tools, ", ")
	}
	return may
}
