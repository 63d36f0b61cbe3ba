package imapserver

import (
	"fmt"
	"strings"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/mailbox"
	"postern/internal/seal"
)

// A shown is a folder as mail programs see it.
type shown struct {
	name   string
	folder mailbox.Folder
	use    imap.MailboxAttr // RFC 6154; empty for INBOX
}

// shownFolders are all folders, in the order of LIST. There is none for quarantine:
// what waits there for a person is no mail of the inbox yet.
func shownFolders() []shown {
	return []shown{
		{"INBOX", mailbox.FolderInbox, ""},
		{"Archive", mailbox.FolderArchive, imap.MailboxAttrArchive},
		{"Drafts", mailbox.FolderDrafts, imap.MailboxAttrDrafts},
		{"Sent", mailbox.FolderSent, imap.MailboxAttrSent},
		{"Trash", mailbox.FolderTrash, imap.MailboxAttrTrash},
	}
}

var errFixed = no(imap.ResponseCodeCannot, "the folders of an inbox are fixed: INBOX, Archive, Drafts, Sent and Trash; labels are keywords")

// named returns the folder with a name.
func named(name string) (shown, error) {
	for _, f := range shownFolders() {
		if f.name == name || f.name == "INBOX" && strings.EqualFold(name, "INBOX") {
			return f, nil
		}
	}
	return shown{}, no(imap.ResponseCodeNonExistent, "there is no such folder: the folders are INBOX, Archive, Drafts, Sent and Trash")
}

// titled returns the name of a folder.
func titled(f mailbox.Folder) string {
	for _, s := range shownFolders() {
		if s.folder == f {
			return s.name
		}
	}
	return string(f)
}

// Create refuses.
func (c *session) Create(name string, _ *imap.CreateOptions) error {
	if _, err := named(name); err == nil {
		return no(imap.ResponseCodeAlreadyExists, "the folder is there")
	}
	return errFixed
}

// Delete refuses.
func (c *session) Delete(string) error { return errFixed }

// Rename refuses.
func (c *session) Rename(_, _ string, _ *imap.RenameOptions) error { return errFixed }

// Subscribe does nothing: all folders are subscribed.
func (c *session) Subscribe(name string) error {
	_, err := named(name)
	return err
}

// Unsubscribe refuses.
func (c *session) Unsubscribe(name string) error {
	if _, err := named(name); err != nil {
		return err
	}
	return no(imap.ResponseCodeCannot, "all folders are subscribed")
}

// Namespace returns the one of the inbox.
func (c *session) Namespace() (*imap.NamespaceData, error) {
	return &imap.NamespaceData{Personal: []imap.NamespaceDescriptor{{Prefix: "", Delim: '/'}}}, nil
}

// maxPattern is how many octets a pattern of LIST has at most.
const maxPattern = 200

// List lists the folders that match.
func (c *session) List(w *engine.ListWriter, ref string, patterns []string, options *imap.ListOptions) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, err := c.opened()
	if err != nil {
		return err
	}
	if len(patterns) == 0 { // asks for the delimiter
		return w.WriteList(&imap.ListData{Attrs: []imap.MailboxAttr{imap.MailboxAttrNoSelect}, Delim: '/'})
	}
	for i, p := range patterns {
		if p = ref + p; len(p) > maxPattern || i >= 10 {
			return no(imap.ResponseCodeLimit, fmt.Sprintf("LIST takes at most 10 patterns of %d octets", maxPattern))
		}
		patterns[i] = p
	}
	for _, f := range shownFolders() {
		if options.SelectSpecialUse && f.use == "" || !matchesAny(f.name, patterns) {
			continue
		}
		d := &imap.ListData{Attrs: []imap.MailboxAttr{imap.MailboxAttrHasNoChildren}, Delim: '/', Mailbox: f.name}
		if f.use != "" {
			d.Attrs = append(d.Attrs, f.use)
		}
		if options.SelectSubscribed || options.ReturnSubscribed {
			d.Attrs = append(d.Attrs, imap.MailboxAttrSubscribed)
		}
		if options.ReturnStatus != nil {
			if d.Status, err = c.status(k, f, options.ReturnStatus); err != nil {
				return err
			}
		}
		if err := w.WriteList(d); err != nil {
			return err
		}
	}
	return nil
}

func matchesAny(name string, patterns []string) bool {
	for _, p := range patterns {
		if matches(name, p) || name == "INBOX" && matches(name, strings.ToUpper(p)) {
			return true
		}
	}
	return false
}

// matches reports whether a pattern of LIST matches name, in which there is no "/".
// The attack: a pattern of many "*", over which a matcher that tries each way takes
// for ever. This one takes the product of the lengths.
func matches(name, pattern string) bool {
	at := make([]bool, len(name)+1) // at[i]: the pattern so far matches name[:i]
	at[0] = true
	for _, p := range []byte(pattern) {
		if p == '*' || p == '%' {
			for i := range name {
				at[i+1] = at[i+1] || at[i]
			}
			continue
		}
		for i := len(name); i > 0; i-- {
			at[i] = at[i-1] && name[i-1] == p
		}
		at[0] = false
	}
	return at[len(name)]
}

// Status counts what a folder holds.
func (c *session) Status(name string, options *imap.StatusOptions) (*imap.StatusData, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, err := c.opened()
	if err != nil {
		return nil, err
	}
	f, err := named(name)
	if err != nil {
		return nil, err
	}
	return c.status(k, f, options)
}

func (c *session) status(k *seal.Key, f shown, options *imap.StatusOptions) (*imap.StatusData, error) {
	l, err := c.s.cfg.Post.Filing(c.ctx, c.who, k, f.folder)
	if err != nil {
		return nil, c.fail(err)
	}
	var unseen, deleted, recent uint32
	var size, deletedSize int64
	for _, d := range l.Messages {
		n := d.Size
		if f.folder == mailbox.FolderDrafts && (options.Size || options.DeletedStorage) {
			if n, err = c.draftSize(k, d.ID, d.Version); err != nil {
				return nil, err
			}
		}
		size += n
		e := entry{labels: strings.Join(d.Labels, " ")}
		if f.folder != mailbox.FolderDrafts && !e.has(mailbox.LabelRead) {
			unseen++
		}
		if e.has(labelDeleted) {
			deleted++
			deletedSize += n
		}
	}
	messages, limit := uint32(len(l.Messages)), c.AppendLimit()
	return &imap.StatusData{
		Mailbox: f.name, NumMessages: &messages, UIDNext: imap.UID(l.Next), UIDValidity: l.Validity, NumUnseen: &unseen, NumDeleted: &deleted,
		NumRecent: &recent, Size: &size, DeletedStorage: &deletedSize, AppendLimit: &limit,
	}, nil
}

// draftSize returns how many octets a draft has as a message.
func (c *session) draftSize(k *seal.Key, id string, version int64) (int64, error) {
	name := fmt.Sprintf("%s %d", id, version)
	if n, ok := c.sizes[name]; ok {
		return n, nil
	}
	_, raw, err := c.s.cfg.Post.Drafts.Raw(c.ctx, c.who, k, id)
	if err != nil {
		return 0, c.fail(err)
	}
	if len(c.sizes) > 500 {
		clear(c.sizes)
	}
	c.sizes[name] = int64(len(raw))
	return int64(len(raw)), nil
}
