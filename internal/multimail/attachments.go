package multimail

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"net/http"
	"slices"
	"time"

	"postern/internal/door"
	"postern/internal/mail"
	"postern/internal/seal"
	"postern/internal/store"
)

// file returns the attachment that the request names. Call done once it is answered.
func (s *Server) file(w http.ResponseWriter, r *http.Request, c caller) (f mail.Attachment, name string, done func(), err error) {
	_, sum, p, done, err := s.content(w, r, c)
	if err != nil {
		return f, "", nil, err
	}
	name = r.PathValue("name")
	i := slices.Index(names(p.Attachments), name)
	if i < 0 {
		done()
		return f, "", nil, fmt.Errorf("attachment in the path: email %s has none with that name: %w", sum.ID, store.ErrNotFound)
	}
	return p.Attachments[i], name, done, nil
}

// getAttachment answers with the file itself. No browser shows it as a page of this
// server's or runs it.
func (s *Server) getAttachment(w http.ResponseWriter, r *http.Request, c caller) error {
	f, name, done, err := s.file(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	door.Download(w, door.FileType(f.ContentType), door.FileName(name))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.Data))
	return nil
}

// getAttachmentURL answers with an address that is fetched without a key. What is in
// a mailbox is sealed, and an address that opened it would be a key: so the address
// is the file itself (RFC 2397), without a type that the sender chose.
func (s *Server) getAttachmentURL(w http.ResponseWriter, r *http.Request, c caller) error {
	f, name, done, err := s.file(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	answer(w, http.StatusOK, map[string]any{
		"filename": name, "content_type": door.FileType(f.ContentType), "size_bytes": len(f.Data), "expires_in": 3600,
		"url": "data:application/octet-stream;base64," + base64.StdEncoding.EncodeToString(f.Data),
	})
	return nil
}

func (s *Server) getTags(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c, seal.Read)
	if err != nil {
		return err
	}
	id, err := tagged(r)
	if err != nil {
		return err
	}
	tags, err := s.post.Tags(r.Context(), c.Principal, k, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"tags": tags})
	return nil
}

// tagged returns the id of the message whose tags are meant. An email that has not
// left has none: its copy in the mailbox has another id.
func tagged(r *http.Request) (string, error) {
	id, err := email(r)
	if err == nil && actionForm().MatchString(id) {
		err = fmt.Errorf("%w: the email has not left; tag its copy in the mailbox (msg_…) once it has", errConflict)
	}
	return id, err
}

// setTags adds tags to those that there are, as MultiMail's MCP server documents it.
func (s *Server) setTags(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c, readAndSend)
	if err != nil {
		return err
	}
	id, err := tagged(r)
	if err != nil {
		return err
	}
	var in struct {
		Tags map[string]string `json:"tags"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if len(in.Tags) == 0 {
		return fmt.Errorf("%w: tags: is missing", errRequest)
	}
	tags, err := s.post.ChangeTags(r.Context(), c.Principal, k, id, in.Tags)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"tags": tags})
	return nil
}

func (s *Server) deleteTag(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c, readAndSend)
	if err != nil {
		return err
	}
	id, err := tagged(r)
	if err != nil {
		return err
	}
	tags, err := s.post.ChangeTags(r.Context(), c.Principal, k, id, nil, r.PathValue("key"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"deleted": true, "tags": tags})
	return nil
}
