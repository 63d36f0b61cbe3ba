package mailapi

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"sync"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/seal"
	"postern/internal/store"
)

// An access finds what a request names in the inboxes that its caller may use.
type access struct{ post *mailbox.PostOffice }

// known returns the inbox that the request names, which the caller manages or
// has a part in.
func (s access) known(r *http.Request, c caller) (directory.Inbox, error) {
	if c.Kind != auth.Project && c.Kind != auth.Person {
		return s.own(r, c)
	}
	return s.post.Directory.Find(r.Context(), c.Principal, r.PathValue("inbox"))
}

// open returns the key of the inbox that the request names, if the caller's
// credential opens it. Everybody else gets the same answer whether the inbox
// exists or not. The attack: finding out which addresses exist.
func (s access) open(r *http.Request, c caller) (*seal.Key, error) {
	b, err := s.own(r, c)
	if err != nil {
		return nil, err
	}
	if c.Kind == auth.Sandbox { // own has compared the inbox with the sandbox's
		return s.post.Keys.Lent(r.Context(), c.Principal)
	}
	return s.post.Keys.Open(r.Context(), c.Principal, c.key, b.ID)
}

// item is open for a request that names something in the inbox, whose id it
// returns too.
func (s access) item(r *http.Request, c caller) (*seal.Key, string, error) {
	k, err := s.open(r, c)
	if err != nil {
		return nil, "", err
	}
	name, err := id(r)
	return k, name, err
}

// own returns the inbox that the request names if the caller's credential has a
// part in it, or if it is attached to the sandbox that calls.
func (s access) own(r *http.Request, c caller) (directory.Inbox, error) {
	if c.Kind == auth.Sandbox && c.Inbox == "" {
		return directory.Inbox{}, errNoInbox
	}
	if c.key == "" && c.Kind != auth.Sandbox {
		return directory.Inbox{}, fmt.Errorf("a %s manages inboxes but cannot open them: only an inbox's own key (pib_…) can: %w", c.Kind, auth.ErrForbidden)
	}
	b, _, err := s.post.Keys.Reach(r.Context(), c.Principal, r.PathValue("inbox"))
	return b, err
}

// watched returns the inbox that the request names if the caller's credential may be
// told what happens to it, which is what reading takes: events say when mail arrives.
func (s access) watched(r *http.Request, c caller) (directory.Inbox, error) {
	b, err := s.own(r, c)
	if err != nil {
		return b, err
	}
	return b, s.mayWatch(r.Context(), c.Principal, b.ID)
}

func (s access) mayWatch(ctx context.Context, who auth.Principal, inbox string) error {
	if who.Kind == auth.Sandbox { // it needs the lent key, as for its mail
		_, err := s.post.Keys.Lent(ctx, who)
		return err
	}
	b, scope, err := s.post.Keys.Reach(ctx, who, inbox)
	if err == nil && !scope.Includes(seal.Read) {
		err = keyring.Lacks(b.ID, scope, seal.Read)
	}
	return err
}

// read waits until a message of the inbox that the request names may be read as
// a whole; call done after it.
func (s access) read(w http.ResponseWriter, r *http.Request, c caller) (done func(), err error) {
	b, err := s.own(r, c)
	if err != nil {
		return nil, err
	}
	leave, err := s.post.Reading(r.Context(), b.ID)
	if err != nil {
		return nil, err
	}
	// The attack: a client that requests a large message and never reads the
	// answer, to keep others from reading theirs.
	free := door.Patient(w, answerTime)
	return func() { free(); leave() }, nil
}

// message reads the message that the request names, as a whole. Call done once
// it is answered.
func (s access) message(w http.ResponseWriter, r *http.Request, c caller) (m message.Message, raw []byte, done func(), err error) {
	done, err = s.read(w, r, c)
	if err != nil {
		return m, nil, nil, err
	}
	k, id, err := s.item(r, c)
	if err == nil {
		m, raw, err = s.post.Message(r.Context(), c.Principal, k, id)
	}
	if err != nil {
		done()
	}
	return m, raw, done, err
}

// attachment is [Server.message] for the file of it that the request names.
func (s access) attachment(w http.ResponseWriter, r *http.Request, c caller) (f mail.Attachment, done func(), err error) {
	m, raw, done, err := s.message(w, r, c)
	if err != nil {
		return f, nil, err
	}
	list := mail.Read(raw).Attachments
	i, err := strconv.Atoi(r.PathValue("index"))
	if err != nil || i < 0 || i >= len(list) || strconv.Itoa(i) != r.PathValue("index") {
		done()
		return f, nil, fmt.Errorf("attachment in the path: message %s has %d, counted from 0: %w", m.ID, len(list), store.ErrNotFound)
	}
	return list[i], done, nil
}

// idForm is compiled when it is first needed: each part of a sandbox is this
// program, and would otherwise compile it as it starts.
var idForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z]{3}_[A-Z0-9]{10,40}$`) })

// id returns the id in the request's path. What has not the form of one is not
// found.
func id(r *http.Request) (string, error) {
	if v := r.PathValue("id"); idForm().MatchString(v) {
		return v, nil
	}
	return "", fmt.Errorf("id in the path: %w", store.ErrNotFound)
}
