package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strings"

	"postern/internal/api"
)

// In this package an inbox is named by its id or by its address.

// InboxService manages inboxes.
type InboxService struct{ c *Client }

// List returns the inboxes that the caller may know: those of the project for
// its key and for people, else those that the credential opens. Deleted lists
// the ones instead that are deleted and can be restored.
func (s *InboxService) List(ctx context.Context, deleted bool) iter.Seq2[Inbox, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Inbox, string, error) {
		v := PageQuery{Cursor: cursor}.values()
		if deleted {
			v.Set("deleted", "true")
		}
		l, err := get[api.InboxList](ctx, s.c, v, "v1", "inboxes")
		return l.Inboxes, l.NextCursor, err
	})
}

// Own returns the inbox that the credential opens. It is an error if that is
// not exactly one.
func (s *InboxService) Own(ctx context.Context) (Inbox, error) {
	var list []Inbox
	var names []string
	for b, err := range s.List(ctx, false) {
		if err != nil {
			return Inbox{}, err
		}
		list, names = append(list, b), append(names, b.Address)
	}
	switch len(list) {
	case 0:
		return Inbox{}, errors.New("the credential opens no inbox: it may have ended, or the inbox was deleted")
	case 1:
		return list[0], nil
	}
	return Inbox{}, fmt.Errorf("the credential opens several inboxes: %s", strings.Join(names, ", "))
}

// Me returns who the caller is, what it may do, and what is left of its limits.
func (s *InboxService) Me(ctx context.Context) (Me, error) {
	return get[Me](ctx, s.c, nil, "v1", "me")
}

// Create makes an inbox. The answer has its key, which the server does not keep.
func (s *InboxService) Create(ctx context.Context, in NewInbox) (Inbox, error) {
	return post[Inbox](ctx, s.c, in, "v1", "inboxes")
}

// Get returns one inbox.
func (s *InboxService) Get(ctx context.Context, inbox string) (Inbox, error) {
	return get[Inbox](ctx, s.c, nil, "v1", "inboxes", inbox)
}

// Update changes an inbox.
func (s *InboxService) Update(ctx context.Context, inbox string, in InboxChange) (out Inbox, err error) {
	err = s.c.do(ctx, request{method: http.MethodPatch, path: []string{"v1", "inboxes", inbox}, in: in}, &out)
	return out, err
}

// Delete deletes an inbox. It can be restored until the PurgeAt of the answer.
func (s *InboxService) Delete(ctx context.Context, inbox string) (out Inbox, err error) {
	err = s.c.do(ctx, request{method: http.MethodDelete, path: []string{"v1", "inboxes", inbox}}, &out)
	return out, err
}

// Restore brings a deleted inbox back.
func (s *InboxService) Restore(ctx context.Context, inbox string) (Inbox, error) {
	return post[Inbox](ctx, s.c, nil, "v1", "inboxes", inbox, "undelete")
}

// Export returns all mail of an inbox as an mbox file. The caller closes it. A
// file that ends with an error is not complete.
func (s *InboxService) Export(ctx context.Context, inbox string) (io.ReadCloser, error) {
	return s.c.download(ctx, "v1", "inboxes", inbox, "export")
}

// NewModeCode makes a code that raises an inbox to a less strict mode once.
func (s *InboxService) NewModeCode(ctx context.Context, inbox string, in NewModeCode) (ModeCode, error) {
	return post[ModeCode](ctx, s.c, in, "v1", "inboxes", inbox, "mode-codes")
}

// RaiseMode raises the mode of an inbox with a code that an owner made.
func (s *InboxService) RaiseMode(ctx context.Context, inbox, code string) (Inbox, error) {
	return post[Inbox](ctx, s.c, api.ModeUpgrade{Code: code}, "v1", "inboxes", inbox, "upgrade")
}

// RequestMode asks an owner for a less strict mode.
func (s *InboxService) RequestMode(ctx context.Context, inbox string, in ModeRequest) (Action, error) {
	return post[Action](ctx, s.c, in, "v1", "inboxes", inbox, "request-upgrade")
}

// AllowList returns the allow list of an inbox.
func (s *InboxService) AllowList(ctx context.Context, inbox string) ([]AllowEntry, error) {
	l, err := get[api.AllowList](ctx, s.c, nil, "v1", "inboxes", inbox, "allowlist")
	return l.Entries, err
}

// Allow adds to the allow list of an inbox.
func (s *InboxService) Allow(ctx context.Context, inbox string, in NewAllowEntry) (AllowEntry, error) {
	return post[AllowEntry](ctx, s.c, in, "v1", "inboxes", inbox, "allowlist")
}

// Disallow removes an entry of the allow list, by its id or its pattern.
func (s *InboxService) Disallow(ctx context.Context, inbox, entry string) error {
	return s.c.remove(ctx, "v1", "inboxes", inbox, "allowlist", entry)
}

// RequestAllow asks an owner for an entry of the allow list.
func (s *InboxService) RequestAllow(ctx context.Context, inbox string, in AllowRequest) (Action, error) {
	return post[Action](ctx, s.c, in, "v1", "inboxes", inbox, "allowlist", "requests")
}

// Overseers returns who gets copies of what an inbox sends in mode monitored.
// An empty inbox means the project's.
func (s *InboxService) Overseers(ctx context.Context, inbox string) ([]string, error) {
	o, err := get[api.Overseers](ctx, s.c, nil, ofInbox(inbox, "overseers")...)
	return o.Addresses, err
}

// SetOverseers replaces them. An empty inbox means the project's.
func (s *InboxService) SetOverseers(ctx context.Context, inbox string, addresses []string) ([]string, error) {
	o, err := post[api.Overseers](ctx, s.c, api.Overseers{Addresses: append([]string{}, addresses...)}, ofInbox(inbox, "overseers")...)
	return o.Addresses, err
}

// ofInbox is the path of a noun of an inbox, or of the project if inbox is empty.
func ofInbox(inbox, noun string) []string {
	if inbox == "" {
		return []string{"v1", noun}
	}
	return []string{"v1", "inboxes", inbox, noun}
}

// KeyService manages the keys of inboxes.
type KeyService struct{ c *Client }

// List returns the keys and recovery keys of an inbox.
func (s *KeyService) List(ctx context.Context, inbox string) ([]Credential, error) {
	l, err := get[api.KeyList](ctx, s.c, nil, "v1", "inboxes", inbox, "keys")
	return l.Keys, err
}

// Create makes a key. The answer has the secret, which the server does not keep.
func (s *KeyService) Create(ctx context.Context, inbox string, in NewKey) (Credential, error) {
	return post[Credential](ctx, s.c, in, "v1", "inboxes", inbox, "keys")
}

// Rotate replaces a key by one with the same rights.
func (s *KeyService) Rotate(ctx context.Context, inbox, id string) (Credential, error) {
	return post[Credential](ctx, s.c, nil, "v1", "inboxes", inbox, "keys", id, "rotate")
}

// Revoke ends a key. EvenLast also ends the last one that manages the inbox:
// without a recovery key nobody opens its mail any more.
func (s *KeyService) Revoke(ctx context.Context, inbox, id string, evenLast bool) error {
	var v url.Values
	if evenLast {
		v = url.Values{"even_last": {"true"}}
	}
	return s.c.do(ctx, request{method: http.MethodDelete, path: []string{"v1", "inboxes", inbox, "keys", id}, query: v}, nil)
}

// CreateRecovery makes a recovery key, for a person to keep offline.
func (s *KeyService) CreateRecovery(ctx context.Context, inbox string) (Credential, error) {
	return post[Credential](ctx, s.c, nil, "v1", "inboxes", inbox, "recovery-key")
}

// Recover makes a new key of the inbox; the client shows its recovery key.
func (s *KeyService) Recover(ctx context.Context, inbox string, in Recover) (Credential, error) {
	return post[Credential](ctx, s.c, in, "v1", "inboxes", inbox, "recover")
}

// GrantService manages grants over inboxes.
type GrantService struct{ c *Client }

// List returns the grants over an inbox. An empty inbox means all of the project.
func (s *GrantService) List(ctx context.Context, inbox string) ([]Credential, error) {
	l, err := get[api.GrantList](ctx, s.c, nil, ofInbox(inbox, "grants")...)
	return l.Grants, err
}

// Create makes a grant over an inbox, or adds the inbox to one.
func (s *GrantService) Create(ctx context.Context, inbox string, in NewGrant) (Credential, error) {
	return post[Credential](ctx, s.c, in, "v1", "inboxes", inbox, "grants")
}

// Revoke ends a grant in one inbox, or everywhere if inbox is empty.
func (s *GrantService) Revoke(ctx context.Context, inbox, id string) error {
	return s.c.remove(ctx, append(ofInbox(inbox, "grants"), id)...)
}

// ForReviewers returns the grants by which reviewers see what waiting actions of an inbox
// are about.
func (s *GrantService) ForReviewers(ctx context.Context, inbox string) ([]ContextGrant, error) {
	l, err := get[api.ContextGrantList](ctx, s.c, nil, "v1", "inboxes", inbox, "context-grants")
	return l.Grants, err
}

// CreateForReviewer makes such a grant for a person. The answer has its code, which the
// server does not keep; the person redeems it in the console within 7 days.
func (s *GrantService) CreateForReviewer(ctx context.Context, inbox string, in NewContextGrant) (ContextGrant, error) {
	return post[ContextGrant](ctx, s.c, in, "v1", "inboxes", inbox, "context-grants")
}

// RevokeForReviewer ends such a grant.
func (s *GrantService) RevokeForReviewer(ctx context.Context, inbox, id string) error {
	return s.c.remove(ctx, "v1", "inboxes", inbox, "context-grants", id)
}

// AppService manages the programs that connected themselves and that an owner allowed.
type AppService struct{ c *Client }

// List returns the connected programs of the project.
func (s *AppService) List(ctx context.Context) ([]App, error) {
	l, err := get[api.AppList](ctx, s.c, nil, "v1", "apps")
	return l.Apps, err
}

// Revoke disconnects a program.
func (s *AppService) Revoke(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "apps", id)
}

// ConnectService manages connect codes: each makes one inbox, once, for an agent that
// shows it.
type ConnectService struct{ c *Client }

// List returns the codes of the project, newest first.
func (s *ConnectService) List(ctx context.Context) ([]ConnectCode, error) {
	l, err := get[api.ConnectCodeList](ctx, s.c, nil, "v1", "connect-codes")
	return l.Codes, err
}

// Create makes a code. The answer has the code itself, which the server does not keep.
func (s *ConnectService) Create(ctx context.Context, in NewConnectCode) (ConnectCode, error) {
	return post[ConnectCode](ctx, s.c, in, "v1", "connect-codes")
}

// Withdraw ends an unused code.
func (s *ConnectService) Withdraw(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "connect-codes", id)
}

// Redeem uses up a code. It needs no other credential. The answer has the key of the new
// inbox, which the server does not keep.
func (s *ConnectService) Redeem(ctx context.Context, code string) (Connected, error) {
	return post[Connected](ctx, s.c, api.Connect{Code: code}, "v1", "connect")
}

// AccountService manages accounts: grants that open the inboxes they make. End
// one with [GrantService.Revoke].
type AccountService struct{ c *Client }

// List returns the accounts of the project.
func (s *AccountService) List(ctx context.Context) ([]Account, error) {
	l, err := get[api.AccountList](ctx, s.c, nil, "v1", "accounts")
	return l.Accounts, err
}

// Create makes an account. The answer has its token, which the server does not
// keep.
func (s *AccountService) Create(ctx context.Context, name string) (Account, error) {
	return post[Account](ctx, s.c, api.NewAccount{Name: name}, "v1", "accounts")
}
