package mailapi

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"postern/internal/api"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/mail"
	"postern/internal/mailbox"
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

// outgoingDraft returns the mail that a draft describes.
func outgoingDraft(r *http.Request, in *api.NewDraft) (mailbox.Outgoing, error) {
	for name, id := range map[string]string{"reply_to": in.ReplyTo, "forward": in.Forward} {
		if id != "" && !idForm().MatchString(id) {
			return mailbox.Outgoing{}, fmt.Errorf("%w: %s: must be the id of a message", errRequest, name)
		}
	}
	common := api.NewMessage{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Text: in.Text, HTML: in.HTML, Markdown: in.Markdown, InReplyTo: in.InReplyTo, Attachments: in.Attachments}
	o, err := outgoing(r, &common)
	o.ReplyTo, o.ReplyAll, o.Quote, o.Forward = in.ReplyTo, in.ReplyAll, in.Quote, in.Forward
	return o, err
}

func draftOf(d mailbox.Draft) api.Draft {
	return api.Draft{
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
	list, next, err := s.post.Drafts.List(r.Context(), c.Principal, k, n, r.URL.Query().Get("cursor"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.DraftList{Drafts: each(list, draftOf), NextCursor: next})
	return nil
}

// writable returns the inbox that the request names, if the caller may write drafts
// there. It needs no key that opens the inbox.
func (s draftServer) writable(r *http.Request, c caller) (directory.Inbox, error) {
	b, err := s.own(r, c)
	if err != nil {
		return b, err
	}
	return s.post.Drafts.Writable(r.Context(), c.Principal, b.ID)
}

func (s draftServer) createDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.writable(r, c)
	if err != nil {
		return err
	}
	done, err := s.begin(w, r, b.ID)
	if err != nil {
		return err
	}
	defer done()
	var in api.NewDraft
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	o, err := outgoingDraft(r, &in)
	if err != nil {
		return err
	}
	o.Inbox = b.ID
	d, err := s.post.Drafts.Save(r.Context(), c.Principal, o)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/inboxes/"+b.ID+"/drafts/"+d.ID)
	answer(w, http.StatusCreated, api.DraftVersion{ID: d.ID, Version: d.Version})
	return nil
}

func (s draftServer) updateDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.writable(r, c)
	if err == nil {
		err = mailbox.MayReplace(c.Principal)
	}
	if err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	done, err := s.begin(w, r, b.ID)
	if err != nil {
		return err
	}
	defer done()
	var in api.DraftUpdate
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	o, err := outgoingDraft(r, &in.NewDraft)
	if err != nil {
		return err
	}
	if len(in.KeepAttachments) > 0 {
		k, err := s.open(r, c) // they are read out of the draft
		if err != nil {
			return err
		}
		d, before, err := s.post.Drafts.Get(r.Context(), c.Principal, k, id)
		if err != nil {
			return err
		}
		if d.Version != in.Version {
			return mailbox.ErrDraft
		}
		var kept []mail.Attachment
		for i, n := range in.KeepAttachments {
			if n < 0 || n >= len(before.Attachments) || i > len(before.Attachments) {
				return fmt.Errorf("%w: keep_attachments[%d]: the draft has %d files, counted from 0", errRequest, i, len(before.Attachments))
			}
			kept = append(kept, before.Attachments[n])
		}
		o.Attachments = append(kept, o.Attachments...)
	}
	o.Inbox = b.ID
	d, err := s.post.Drafts.Update(r.Context(), c.Principal, id, in.Version, o)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.DraftVersion{ID: d.ID, Version: d.Version})
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
	return s.post.Drafts.Get(r.Context(), c.Principal, k, id)
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
	out.DraftContent = &api.DraftContent{Text: o.Text, HTML: o.HTML, Markdown: o.Markdown, InReplyTo: o.InReplyTo, ReplyAll: o.ReplyAll, Quote: o.Quote}
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
	door.Download(w, door.FileType(o.Attachments[i].ContentType), door.FileName(o.Attachments[i].Name))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(o.Attachments[i].Data))
	return nil
}

func (s draftServer) deleteDraft(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.writable(r, c)
	if err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.post.Drafts.Delete(r.Context(), c.Principal, b.ID, id, 0); err != nil {
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
	var in api.SendDraft
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	how := api.NewMessage{SendAt: in.SendAt, GateTiming: in.GateTiming, UndoSeconds: in.UndoSeconds, Bulk: in.Bulk, AllowDuplicate: in.AllowDuplicate}
	o, err := outgoing(r, &how)
	if err != nil {
		return err
	}
	p, err := s.post.Drafts.Send(r.Context(), c.Principal, "rest", k, id, in.Version, o)
	if err != nil {
		return err
	}
	return answerSend(w, p)
}
