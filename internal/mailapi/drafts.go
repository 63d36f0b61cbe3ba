package mailapi

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
)

// A draftServer serves drafts.
type draftServer struct {
	access
	sendSlots

	post *mailbox.PostOffice
}

func (s draftServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/drafts", 0, s.listDrafts},
		{"POST", "/v1/inboxes/{inbox}/drafts", maxSend, s.createDraft},
		{"GET", "/v1/inboxes/{inbox}/drafts/{id}", 0, s.getDraft},
		{"POST", "/v1/inboxes/{inbox}/drafts/{id}", maxSend, s.updateDraft},
		{"DELETE", "/v1/inboxes/{inbox}/drafts/{id}", 0, s.deleteDraft},
		{"GET", "/v1/inboxes/{inbox}/drafts/{id}/attachments/{index}", 0, s.getDraftAttachment},
		{"POST", "/v1/inboxes/{inbox}/drafts/{id}/send", maxBody, s.sendDraft},
	}
}

// draftJSON is what a draft may say; when and how it leaves is said when it is sent.
type draftJSON struct {
	To          []string `json:"to"`
	Cc          []string `json:"cc"`
	Bcc         []string `json:"bcc"`
	Subject     string   `json:"subject"`
	Text        string   `json:"text"`
	HTML        string   `json:"html"`
	Markdown    string   `json:"markdown"`
	InReplyTo   string   `json:"in_reply_to"` // a Message-ID
	ReplyTo     string   `json:"reply_to"`    // the id of a message of the inbox
	ReplyAll    bool     `json:"reply_all"`
	Quote       bool     `json:"quote"`
	Forward     string   `json:"forward"` // the id of a message of the inbox
	Attachments []struct {
		Name        string `json:"name"`
		Content     string `json:"content_base64"`
		ContentType string `json:"content_type"`
	} `json:"attachments"`
}

func (in *draftJSON) outgoing(r *http.Request) (mailbox.Outgoing, error) {
	for name, id := range map[string]string{"reply_to": in.ReplyTo, "forward": in.Forward} {
		if id != "" && !idForm().MatchString(id) {
			return mailbox.Outgoing{}, fmt.Errorf("%w: %s: must be the id of a message", errRequest, name)
		}
	}
	common := sendJSON{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Text: in.Text, HTML: in.HTML, Markdown: in.Markdown, InReplyTo: in.InReplyTo, Attachments: in.Attachments}
	o, err := common.outgoing(r)
	o.ReplyTo, o.ReplyAll, o.Quote, o.Forward = in.ReplyTo, in.ReplyAll, in.Quote, in.Forward
	return o, err
}

// A savedJSON is a draft as it is answered: its files without their content.
type savedJSON struct {
	ID          string     `json:"id"`
	Inbox       string     `json:"inbox"`
	Version     int64      `json:"version"`
	CreatedAt   time.Time  `json:"created_at"`
	UpdatedAt   time.Time  `json:"updated_at"`
	Size        int64      `json:"size"`
	To          []string   `json:"to"`
	Cc          []string   `json:"cc"`
	Bcc         []string   `json:"bcc"`
	Subject     string     `json:"subject"`
	Preview     string     `json:"preview"`
	ReplyTo     string     `json:"reply_to"`
	Forward     string     `json:"forward"`
	Attachments []fileJSON `json:"attachments"`

	*wholeJSON // of one draft, not in a list
}

type wholeJSON struct {
	Text      string `json:"text"`
	HTML      string `json:"html"`
	Markdown  string `json:"markdown"`
	InReplyTo string `json:"in_reply_to"`
	ReplyAll  bool   `json:"reply_all"`
	Quote     bool   `json:"quote"`
}

func draftOf(d mailbox.Draft) savedJSON {
	return savedJSON{
		ID: d.ID, Inbox: d.Inbox, Version: d.Version, CreatedAt: d.Created, UpdatedAt: d.Updated, Size: d.Size,
		To: append([]string{}, d.To...), Cc: append([]string{}, d.Cc...), Bcc: append([]string{}, d.Bcc...), Subject: d.Subject, Preview: d.Preview,
		ReplyTo: d.ReplyTo, Forward: d.Forward, Attachments: each(d.Attachments, fileOf),
	}
}

func (s draftServer) listDrafts(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	n, err := limit(r.URL.Query(), 50, 100)
	if err != nil {
		return err
	}
	list, next, err := s.post.Drafts(r.Context(), c.Principal, k, n, r.URL.Query().Get("cursor"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"drafts": each(list, draftOf), "next_cursor": next})
	return nil
}

func (s draftServer) createDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	if err := mailbox.May(k, seal.Propose); err != nil {
		return err
	}
	done, err := s.begin(w, r, k.Inbox())
	if err != nil {
		return err
	}
	defer done()
	var in draftJSON
	if err := decode(r, &in); err != nil {
		return err
	}
	o, err := in.outgoing(r)
	if err != nil {
		return err
	}
	o.Inbox = k.Inbox()
	d, err := s.post.SaveDraft(r.Context(), c.Principal, o)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/inboxes/"+k.Inbox()+"/drafts/"+d.ID)
	answer(w, http.StatusCreated, map[string]any{"id": d.ID, "version": d.Version})
	return nil
}

func (s draftServer) updateDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	if err := mailbox.May(k, seal.Propose); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	done, err := s.begin(w, r, k.Inbox())
	if err != nil {
		return err
	}
	defer done()
	var in struct {
		draftJSON
		Version int64 `json:"version"`
		Keep    []int `json:"keep_attachments"` // places of files of the version before
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	o, err := in.outgoing(r)
	if err != nil {
		return err
	}
	if len(in.Keep) > 0 {
		d, before, err := s.post.Draft(r.Context(), c.Principal, k, id)
		if err != nil {
			return err
		}
		if d.Version != in.Version {
			return mailbox.ErrDraft
		}
		var kept []mail.Attachment
		for i, n := range in.Keep {
			if n < 0 || n >= len(before.Attachments) || i > len(before.Attachments) {
				return fmt.Errorf("%w: keep_attachments[%d]: the draft has %d files, counted from 0", errRequest, i, len(before.Attachments))
			}
			kept = append(kept, before.Attachments[n])
		}
		o.Attachments = append(kept, o.Attachments...)
	}
	o.Inbox = k.Inbox()
	d, err := s.post.UpdateDraft(r.Context(), c.Principal, id, in.Version, o)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"id": d.ID, "version": d.Version})
	return nil
}

// draft opens the draft that the request names.
func (s draftServer) draft(r *http.Request, c caller) (d mailbox.Draft, o mailbox.Outgoing, err error) {
	k, err := s.open(r, c)
	if err != nil {
		return d, o, err
	}
	id, err := id(r)
	if err != nil {
		return d, o, err
	}
	return s.post.Draft(r.Context(), c.Principal, k, id)
}

func (s draftServer) getDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	done, err := s.read(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	d, o, err := s.draft(r, c)
	if err != nil {
		return err
	}
	out := draftOf(d)
	out.wholeJSON = &wholeJSON{Text: o.Text, HTML: o.HTML, Markdown: o.Markdown, InReplyTo: o.InReplyTo, ReplyAll: o.ReplyAll, Quote: o.Quote}
	answer(w, http.StatusOK, out)
	return nil
}

func (s draftServer) getDraftAttachment(w http.ResponseWriter, r *http.Request, c caller) error {
	done, err := s.read(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	d, o, err := s.draft(r, c)
	if err != nil {
		return err
	}
	i, err := strconv.Atoi(r.PathValue("index"))
	if err != nil || i < 0 || i >= len(o.Attachments) || strconv.Itoa(i) != r.PathValue("index") {
		return fmt.Errorf("attachment in the path: draft %s has %d, counted from 0: %w", d.ID, len(o.Attachments), store.ErrNotFound)
	}
	download(w, fileType(o.Attachments[i].ContentType), fileName(o.Attachments[i].Name))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(o.Attachments[i].Data))
	return nil
}

func (s draftServer) deleteDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	k, id, err := s.item(r, c)
	if err != nil {
		return err
	}
	if err := s.post.DeleteDraft(r.Context(), c.Principal, k, id, 0); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s draftServer) sendDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	k, id, err := s.item(r, c)
	if err != nil {
		return err
	}
	done, err := s.begin(w, r, k.Inbox())
	if err != nil {
		return err
	}
	defer done()
	var in struct {
		Version        int64          `json:"version"`
		SendAt         time.Time      `json:"send_at"`
		GateTiming     mailbox.Timing `json:"gate_timing"`
		UndoSeconds    *int64         `json:"undo_seconds"`
		Bulk           bool           `json:"bulk"`
		AllowDuplicate bool           `json:"allow_duplicate"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	how := sendJSON{SendAt: in.SendAt, GateTiming: in.GateTiming, UndoSeconds: in.UndoSeconds, Bulk: in.Bulk, AllowDuplicate: in.AllowDuplicate}
	o, err := how.outgoing(r)
	if err != nil {
		return err
	}
	p, err := s.post.SendDraft(r.Context(), c.Principal, "rest", k, id, in.Version, o)
	if err != nil {
		return err
	}
	return answerSend(w, p)
}
