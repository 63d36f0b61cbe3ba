package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/preview"
)

// The limits of the previews on an action's page: their number, the bytes of their files
// together, and the time to make them. All other files are shown on pages of their own.
const (
	maxPreviews     = 12
	maxPreviewBytes = 24 << 20
	previewTime     = 3 * time.Second
)

// An attachment is a file of an action with its preview.
type attachment struct {
	oversight.File
	N       int    // index in the action's view
	Action  string // ID
	Digest  string // of the action as the page shows it
	Preview preview.File
	Looked  bool   // there is a preview
	Why     string // why there is none
}

// at returns an address below the file's, bound to the action that the page shows.
func (a *attachment) at(what string) string {
	p := "/console/actions/" + url.PathEscape(a.Action) + "/files/" + strconv.Itoa(a.N)
	if what != "" {
		p += "/" + what
	}
	return p + "?digest=" + url.QueryEscape(a.Digest)
}

// Save, View, Picture and Frame return the addresses of the file itself, its page, its
// pixels and its HTML.
func (a *attachment) Save() string    { return a.at("") }
func (a *attachment) View() string    { return a.at("view") }
func (a *attachment) Picture() string { return a.at("picture") }
func (a *attachment) Frame() string   { return a.at("frame") }

// Symbol returns the icon of the file.
func (a *attachment) Symbol() string {
	switch a.Preview.Form {
	case preview.Message:
		return "mail"
	case preview.Calendar:
		return "clock"
	case preview.Archive:
		return "box"
	case preview.Nothing, preview.Text, preview.Table, preview.Picture, preview.Page, preview.PDF:
	}
	return "file"
}

// attached returns the files of an action with their previews. It reads the files of mail
// from a, whose digest the page shows.
func (s reviews) attached(ctx context.Context, who auth.Principal, a *oversight.Action, files []oversight.File) (out []attachment, err error) {
	open := s.opener(ctx, who, a)
	left, until := maxPreviewBytes, time.Now().Add(previewTime)
	for n, f := range files {
		one := attachment{File: f, N: n, Action: a.ID, Digest: a.Hex()}
		switch {
		case !f.Open:
			one.Why = "its content is not kept here"
		case n >= maxPreviews || int64(left) < f.Size || time.Now().After(until):
			one.Why = "there is too much to show all of it here"
		default:
			data, err := open(n)
			if err != nil {
				return nil, err
			}
			left -= len(data)
			one.Preview, one.Looked = preview.Of(f.Name, f.Type, data), true
		}
		out = append(out, one)
	}
	return out, nil
}

// opener returns a function that opens the files of an action.
func (s reviews) opener(ctx context.Context, who auth.Principal, a *oversight.Action) func(n int) ([]byte, error) {
	if a.Kind != mailbox.SendKind && a.Kind != mailbox.CopyKind {
		return func(n int) ([]byte, error) {
			_, data, err := s.gate.File(ctx, who, a.ID, n)
			return data, err
		}
	}
	o, err := opened(a) // once for all files: a mail may have 25 MB of them
	return func(n int) ([]byte, error) {
		if err != nil {
			return nil, err
		}
		if n < 0 || n >= len(o.Message.Attachments) {
			return nil, fmt.Errorf("file %d of action %s: %w", n, a.ID, errNoFile)
		}
		return o.Message.Attachments[n].Data, nil
	}
}

// attachmentHandlers serve the files of proposed actions: as downloads, and as previews
// where that is safe. Nothing in a file may run in this origin: text goes through
// html/template, pictures are drawn anew, and HTML stays in the frame for mail.
type attachmentHandlers struct{ reviews }

func (s attachmentHandlers) routes() []route {
	return []route{
		{"GET", "/console/actions/{id}/files/{n}", views, s.save},
		{"GET", "/console/actions/{id}/files/{n}/view", views, s.view},
		{"GET", "/console/actions/{id}/files/{n}/picture", views, s.picture},
		{"GET", "/console/actions/{id}/files/{n}/frame", views, s.frame},
	}
}

// open returns the file that an address names, if the action is the one that its page showed.
func (s attachmentHandlers) open(r *http.Request, who auth.Principal) (a oversight.Action, f attachment, data []byte, err error) {
	id, err := pathAction(r)
	if err != nil {
		return a, f, nil, err
	}
	if a, err = s.gate.Action(r.Context(), who, id); err != nil {
		return a, f, nil, err
	}
	if !sameDigest(r, &a) {
		return a, f, nil, errOther
	}
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil || n < 0 {
		return a, f, nil, fmt.Errorf("file %q of action %s: %w", r.PathValue("n"), id, errNoFile)
	}
	v, err := s.gate.Show(a)
	if err != nil {
		return a, f, nil, err
	}
	if n >= len(v.Files) || !v.Files[n].Open {
		return a, f, nil, fmt.Errorf("file %d of action %s: %w", n, id, errNoFile)
	}
	f = attachment{File: v.Files[n], N: n, Action: a.ID, Digest: a.Hex()}
	data, err = s.opener(r.Context(), who, &a)(n)
	return a, f, data, err
}

// save answers with one file as it is, for a reviewer who opens it with another program.
func (s attachmentHandlers) save(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	_, f, data, err := s.open(r, who)
	if err != nil {
		return err
	}
	return download(w, f.Name, data)
}

// rowsPerPage limits the rows of a table on a page, and maxWholeText the text on a page, in
// bytes.
const (
	rowsPerPage  = 200
	maxWholeText = 2 << 20
)

// A filePage is a file on a page of its own.
type filePage struct {
	attachment
	Title  string // of the action
	Text   string
	Sheet  preview.Sheet
	Before string // address of the rows before these; empty if there are none
	After  string
	Cut    bool // Text is only the beginning
}

// Last returns the number of the last row.
func (p *filePage) Last() int { return p.Sheet.First + len(p.Sheet.Rows) - 1 }

// view shows all of one file, a part at a time.
func (s attachmentHandlers) view(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	a, f, data, err := s.open(r, who)
	if err != nil {
		return err
	}
	p := filePage{attachment: f}
	p.Preview, p.Looked = preview.Of(f.Name, f.Type, data), true
	v, err := s.gate.Show(a)
	if err != nil {
		return err
	}
	p.Title = v.Title
	switch p.Preview.Form {
	case preview.Table:
		first, err := strconv.Atoi(or(r.URL.Query().Get("row"), "1"))
		if err != nil || first < 1 {
			return fmt.Errorf("%w: row must be a number from 1", errForm)
		}
		if p.Sheet, err = preview.RowsOf(f.Name, f.Type, data, first, rowsPerPage); err != nil {
			return fmt.Errorf("read rows of file %d of %s: %w", f.N, a.ID, err)
		}
		at := func(row int) string { return f.View() + "&row=" + strconv.Itoa(row) }
		if first > 1 {
			p.Before = at(max(1, first-rowsPerPage))
		}
		if p.Last() < p.Sheet.Total {
			p.After = at(first + rowsPerPage)
		}
	case preview.Text, preview.Page, preview.Calendar:
		p.Text = preview.Plain(data)
		if len(p.Text) > maxWholeText {
			p.Cut, p.Text = true, strings.ToValidUTF8(p.Text[:maxWholeText], "")
		}
	case preview.Nothing, preview.Picture, preview.PDF, preview.Message, preview.Archive:
		p.Text = p.Preview.Text
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "file", Title: or(f.Name, "File"), Who: who, Here: "queue", Body: &p})
}

// picturePolicy is the Content-Security-Policy of pictures. The attack: somebody opens a
// picture's address as a page, and an old browser takes it for HTML and runs it.
const picturePolicy = "default-src 'none'; img-src 'self'; style-src 'none'; frame-ancestors 'none'; sandbox"

// drawTime bounds how long one picture is drawn.
const drawTime = 5 * time.Second

// picture answers with a file's pixels as a new PNG file: see [preview.Redraw].
func (s attachmentHandlers) picture(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	_, _, data, err := s.open(r, who)
	if err != nil {
		return err
	}
	return s.draw(w, r, data)
}

// draw answers with the pixels of a picture.
func (s *Server) draw(w http.ResponseWriter, r *http.Request, data []byte) error {
	ctx, cancel := context.WithTimeout(r.Context(), drawTime)
	defer cancel()
	// The attack: a mail with fifty pictures of 16 megapixels takes all memory at once.
	select {
	case s.drawing <- struct{}{}:
		defer func() { <-s.drawing }()
	case <-ctx.Done():
		return fmt.Errorf("draw a picture: %w", errNoFile)
	}
	out, err := preview.Redraw(ctx, data, preview.ShownSide)
	if errors.Is(err, preview.ErrPicture) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("draw a picture: %w: %w", err, errNoFile)
	}
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "image/png")
	h.Set("Content-Security-Policy", picturePolicy)
	h.Set("Content-Length", strconv.Itoa(len(out)))
	_, _ = w.Write(out) //nolint:gosec // a PNG that we drew; the browser may be gone
	return nil
}

// frame answers with a file's HTML, shown like that of a mail.
func (s attachmentHandlers) frame(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	_, _, data, err := s.open(r, who)
	return frameOf(w, preview.Plain(data), err)
}
