package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
)

// A difference has the changes that a revision of an action made to the one before it.
type difference struct {
	Revision oversight.Revision
	Changes  []mail.Change
	Unkept   bool // one of the two revisions is not kept any more, or cannot be read
	Cut      bool // there are more changes
}

// maxChanges bounds the changes that are shown of one revision.
const maxChanges = 400

// differences returns what each revision of an action changed, the newest
// first. It is empty for one that was never revised.
func differences(revisions []oversight.Revision) (out []difference) {
	for i := len(revisions) - 1; i > 0; i-- {
		d := difference{Revision: revisions[i]}
		var err error
		if d.Changes, err = narrowed(revisions[i-1], revisions[i]); err != nil { // it is an email
			d.Changes, err = mailbox.Difference(revisions[i-1], revisions[i])
		}
		if err != nil {
			d.Unkept = true
		}
		if d.Cut = len(d.Changes) > maxChanges; d.Cut {
			d.Changes = d.Changes[:maxChanges]
		}
		out = append(out, d)
	}
	return out
}

// An editPage is the form in which a reviewer edits an email that waits.
type editPage struct {
	ID, Digest    string
	Version       int64
	Notice        string
	To, Cc, Bcc   string // one address a line
	Subject, Text string
	Filter        filter
	HTML          bool // the email has HTML, which an edited text replaces too
	Files         []oversight.File
	Drop          []int // of Files
}

// Drops reports whether the file with index n is to be removed.
func (p editPage) Drops(n int) bool { return slices.Contains(p.Drop, n) }

// editHandlers lets a reviewer change an email before deciding on it.
type editHandlers struct{ actionHandlers }

func (s editHandlers) routes() []route {
	return []route{
		{"GET", "/console/actions/{id}/edit", decides, s.editForm},
		{"POST", "/console/actions/{id}/edit", decides, s.edit},
	}
}

// editable reads an action as its edit form shows it.
func (s editHandlers) editable(r *http.Request, who auth.Principal, id string) (editPage, error) {
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return editPage{}, err
	}
	o, err := opened(&a)
	if err != nil {
		return editPage{}, err
	}
	if o.ByRequest {
		return editPage{}, fmt.Errorf("edit action %s: it is a request that the sandbox makes itself: %w", id, oversight.ErrTooLate)
	}
	m := o.Message
	sum, err := mail.Describe(o.Envelopes[0])
	if err != nil {
		return editPage{}, err
	}
	if a.State != oversight.Pending {
		return editPage{}, fmt.Errorf("edit action %s, which is %s: %w", id, a.State, oversight.ErrTooLate)
	}
	join := func(list []string) string { return strings.Join(list, "\n") }
	p := editPage{
		ID: id, Digest: a.Hex(), Version: a.Version, To: join(sum.To), Cc: join(sum.Cc), Bcc: join(sum.Bcc), Subject: sum.Subject, Text: lines(strings.TrimRight(m.Text, "\n")), // as the form shows it: a field that is not touched must come back the same
		HTML: m.HTML != "",
	}
	if p.Filter, err = filterOf(r); err != nil {
		return editPage{}, err
	}
	if strings.TrimSpace(p.Text) == "" {
		p.Text = sum.Text // made from the HTML
	}
	for _, f := range sum.Attachments {
		p.Files = append(p.Files, oversight.File{Name: f.Name, Type: f.ContentType, Size: int64(f.Size)})
	}
	return p, nil
}

func (s editHandlers) editForm(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	p, err := s.editable(r, who, id)
	if errors.Is(err, oversight.ErrTooLate) {
		return s.after(w, r, who, id, err)
	}
	if err != nil {
		return err
	}
	return s.showEdit(r.Context(), w, http.StatusOK, who, p)
}

func (s editHandlers) showEdit(ctx context.Context, w http.ResponseWriter, status int, who auth.Principal, p editPage) error {
	return s.render(ctx, w, status, page{Name: "edit", Title: "Edit " + or(p.Subject, "(no subject)"), Who: who, Here: "queue", Body: p})
}

// edit replaces the waiting revision with the reviewer's. Only changed fields
// are taken from the form; all others stay byte for byte the same.
func (s editHandlers) edit(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	version, err := shownVersion(r)
	if err != nil {
		return err
	}
	shown, err := s.editable(r, who, id)
	if errors.Is(err, oversight.ErrTooLate) || err == nil && (shown.Version != version || shown.Digest != r.PostForm.Get("digest")) {
		return s.after(w, r, who, id, oversight.ErrStale)
	}
	if err != nil {
		return err
	}
	p := shown
	p.To, p.Cc, p.Bcc, p.Text = typed(r, "to"), typed(r, "cc"), typed(r, "bcc"), typed(r, "text")
	p.Subject = strings.TrimSpace(typed(r, "subject"))
	var e mail.Edit
	for _, f := range []struct {
		was, is string
		to      **[]string
	}{{shown.To, p.To, &e.To}, {shown.Cc, p.Cc, &e.Cc}, {shown.Bcc, p.Bcc, &e.Bcc}} {
		if was, is := linesOf(f.was), linesOf(f.is); !slices.Equal(was, is) {
			*f.to = &is
		}
	}
	if p.Subject != shown.Subject {
		e.Subject = &p.Subject
	}
	if strings.TrimRight(p.Text, "\n ") != strings.TrimRight(shown.Text, "\n ") {
		e.Text = &p.Text
	}
	for _, v := range r.PostForm["drop"] {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 || n >= len(shown.Files) {
			return fmt.Errorf("%w: drop must be the place of a file", errForm)
		}
		p.Drop = append(p.Drop, n)
	}
	e.Drop = p.Drop
	if e.Empty() {
		p.Notice = "You have not changed anything."
		return s.showEdit(r.Context(), w, http.StatusBadRequest, who, p)
	}
	_, err = s.post.ReviseByPerson(r.Context(), who, id, version, e)
	if field, ok := errors.AsType[*mail.FieldError](err); ok {
		p.Notice = "Nothing was changed: " + field.Error() + "."
		return s.showEdit(r.Context(), w, http.StatusBadRequest, who, p)
	}
	if why := refused(err); why != "" {
		p.Notice = why
		return s.showEdit(r.Context(), w, http.StatusBadRequest, who, p)
	}
	if err != nil {
		return s.after(w, r, who, id, err)
	}
	return s.back(w, r, id, "#s-changes")
}

// linesOf returns the lines of a text area that are not empty.
func linesOf(s string) []string {
	out := []string{}
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" {
			out = append(out, line)
		}
	}
	return out
}
