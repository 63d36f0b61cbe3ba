package imapserver

import (
	"slices"
	"strings"
	"time"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/seal"
)

// A view is a folder as its client knows it: the n-th entry has the sequence number n.
// A message that has gone keeps its entry until the client gets its EXPUNGE response.
type view struct {
	folder   mailbox.Folder
	readOnly bool // by EXAMINE
	changes  int64
	entries  []entry         // by UID
	keywords map[string]bool // that the program was told of
}

// An entry is a message in a view. There may be a hundred thousand.
type entry struct {
	uid       uint32
	id        string
	version   int64 // of a draft
	at        time.Time
	size      int64
	labels    string // separated by spaces
	direction message.Direction
	deleted   bool // of a draft: the program has set \Deleted
	gone      bool // it is not in the folder any more
}

// The labels that are flags of IMAP, beside those that this program knows.
const (
	labelAnswered = "answered"
	labelDeleted  = "deleted"
)

// flagLabels maps flags to labels.
//
//exhaustive:ignore
var flagLabels = map[imap.Flag]string{
	imap.FlagSeen: mailbox.LabelRead, imap.FlagFlagged: mailbox.LabelStarred, imap.FlagAnswered: labelAnswered, imap.FlagDeleted: labelDeleted,
}

func (e *entry) has(label string) bool {
	for l := range strings.FieldsSeq(e.labels) {
		if l == label {
			return true
		}
	}
	return false
}

// flags returns the flags of an entry. Labels that say in which folder it is are none.
func (v *view) flags(e *entry) []imap.Flag {
	if v.folder == mailbox.FolderDrafts {
		out := []imap.Flag{imap.FlagSeen, imap.FlagDraft}
		if e.deleted {
			out = append(out, imap.FlagDeleted)
		}
		return out
	}
	out := []imap.Flag{}
	for l := range strings.FieldsSeq(e.labels) {
		switch l {
		case mailbox.LabelArchived, mailbox.LabelTrash:
		case mailbox.LabelRead:
			out = append(out, imap.FlagSeen)
		case mailbox.LabelStarred:
			out = append(out, imap.FlagFlagged)
		case labelAnswered:
			out = append(out, imap.FlagAnswered)
		case labelDeleted:
			out = append(out, imap.FlagDeleted)
		default:
			out = append(out, imap.Flag(l))
		}
	}
	return out
}

// defined returns the flags of a folder, and notes the keywords among them.
func (v *view) defined() []imap.Flag {
	if v.folder == mailbox.FolderDrafts {
		return []imap.Flag{imap.FlagSeen, imap.FlagDraft, imap.FlagDeleted}
	}
	v.noteKeywords()
	out := []imap.Flag{imap.FlagSeen, imap.FlagFlagged, imap.FlagAnswered, imap.FlagDeleted}
	var words []string
	for k := range v.keywords {
		words = append(words, k)
	}
	slices.Sort(words)
	for _, k := range words {
		out = append(out, imap.Flag(k))
	}
	return out
}

// noteKeywords reports whether an entry has a keyword that was not there before.
func (v *view) noteKeywords() (fresh bool) {
	if v.keywords == nil {
		v.keywords = map[string]bool{}
	}
	last := ""
	for i := range v.entries {
		if v.entries[i].labels == last {
			continue
		}
		last = v.entries[i].labels
		for _, f := range v.flags(&v.entries[i]) {
			if !strings.HasPrefix(string(f), `\`) && !v.keywords[string(f)] {
				v.keywords[string(f)], fresh = true, true
			}
		}
	}
	return fresh
}

func newEntry(d mailbox.Filed, share map[string]string) entry {
	labels := strings.Join(d.Labels, " ")
	if s, ok := share[labels]; ok {
		labels = s
	} else {
		share[labels] = labels
	}
	return entry{uid: d.UID, id: d.ID, version: d.Version, at: d.At, size: d.Size, labels: labels, direction: d.Direction}
}

// Select opens a folder.
func (c *session) Select(name string, options *imap.SelectOptions) (*imap.SelectData, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.view, c.saved = nil, nil
	k, err := c.opened()
	if err != nil {
		return nil, err
	}
	f, err := named(name)
	if err != nil {
		return nil, err
	}
	l, err := c.s.cfg.Post.Filing(c.ctx, c.who, k, f.folder)
	if err != nil {
		return nil, c.fail(err)
	}
	v := &view{folder: f.folder, readOnly: options.ReadOnly, changes: l.Changes}
	share, unseen := map[string]string{}, uint32(0)
	for i, d := range l.Messages {
		e := newEntry(d, share)
		v.entries = append(v.entries, e)
		if unseen == 0 && f.folder != mailbox.FolderDrafts && !e.has(mailbox.LabelRead) {
			unseen = uint32(i) + 1
		}
	}
	c.view = v
	out := &imap.SelectData{
		Flags: v.defined(), PermanentFlags: []imap.Flag{}, NumMessages: uint32(len(v.entries)), FirstUnseenSeqNum: unseen,
		UIDNext: imap.UID(l.Next), UIDValidity: l.Validity,
	}
	looks := !k.Allows(changing(f.folder))
	c.g.looks.Store(looks)
	if !options.ReadOnly && !looks {
		out.PermanentFlags = append(slices.Clone(out.Flags), imap.FlagWildcard)
		if f.folder == mailbox.FolderDrafts {
			// It lasts until the folder is closed. Programs that do not find it here
			// delete nothing.
			out.PermanentFlags = []imap.Flag{imap.FlagDeleted}
		}
	}
	if c.conn.EnabledCaps().Has(imap.CapIMAP4rev2) {
		out.List = &imap.ListData{Attrs: []imap.MailboxAttr{}, Delim: '/', Mailbox: f.name}
	}
	return out, nil
}

// Unselect closes the folder.
func (c *session) Unselect() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.view, c.saved = nil, nil
	return nil
}

// look compares the view with the folder: it marks what is gone, adds what is new,
// and returns the UIDs whose flags have changed. It tells the program nothing.
func (c *session) look(k *seal.Key) (changed []uint32, err error) {
	v := c.view
	if n, err := c.s.cfg.Post.Changes(c.ctx, c.who, c.inbox); err != nil || n == v.changes {
		return nil, c.fail(err)
	}
	l, err := c.s.cfg.Post.Filing(c.ctx, c.who, k, v.folder)
	if err != nil {
		return nil, c.fail(err)
	}
	v.changes = l.Changes
	share, rest := map[string]string{}, l.Messages
	for i := range v.entries {
		e := &v.entries[i]
		for len(rest) > 0 && rest[0].UID < e.uid {
			rest = rest[1:] // unreachable: a new message has a larger UID than all before it
		}
		if len(rest) == 0 || rest[0].UID != e.uid {
			e.gone = true
			continue
		}
		if is := newEntry(rest[0], share); is.labels != e.labels {
			e.labels = is.labels
			changed = append(changed, e.uid)
		}
		rest = rest[1:]
	}
	for _, d := range rest {
		v.entries = append(v.entries, newEntry(d, share))
	}
	return changed, nil
}

// tell compares the view with the folder and tells the program what has changed.
func (c *session) tell(w *engine.UpdateWriter, k *seal.Key, expunge bool) error {
	v := c.view
	told := len(v.entries)
	if c.g.current() == "COPY" || c.g.current() == "UID COPY" {
		// What was copied to the archive or the trash has left. A program that sets
		// \Deleted next, by the numbers that it knows, must not meet other messages.
		expunge = false
	}
	changed, err := c.look(k)
	if err != nil {
		return err
	}
	if expunge {
		gone := v.expunge()
		for _, n := range gone {
			if err := w.WriteExpunge(n); err != nil {
				return err
			}
		}
		told -= len(gone)
	}
	if len(v.entries) != told {
		if err := w.WriteNumMessages(uint32(len(v.entries))); err != nil {
			return err
		}
	}
	if len(changed) > 0 && v.noteKeywords() {
		if err := w.WriteMailboxFlags(v.defined()); err != nil {
			return err
		}
	}
	for _, uid := range changed {
		i, ok := v.find(uid)
		if !ok {
			continue
		}
		if err := w.WriteMessageFlags(uint32(i)+1, imap.UID(uid), v.flags(&v.entries[i])); err != nil {
			return err
		}
	}
	return nil
}

// expunge removes the entries that are gone, and returns their sequence numbers in
// the order in which they are sent to the client: from the last.
func (v *view) expunge() (gone []uint32) {
	for i, e := range slices.Backward(v.entries) {
		if e.gone {
			gone = append(gone, uint32(i)+1)
		}
	}
	v.entries = slices.DeleteFunc(v.entries, func(e entry) bool { return e.gone })
	return gone
}

// find returns the index of a UID.
func (v *view) find(uid uint32) (int, bool) {
	return slices.BinarySearchFunc(v.entries, uid, func(e entry, uid uint32) int { return int(int64(e.uid) - int64(uid)) })
}

// Poll tells the program what has changed.
func (c *session) Poll(w *engine.UpdateWriter, allowExpunge bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, err := c.opened()
	if err != nil || c.view == nil {
		return err
	}
	return c.tell(w, k, allowExpunge)
}

// Idle tells the program what changes, as it changes, until stop.
func (c *session) Idle(w *engine.UpdateWriter, stop <-chan struct{}) error {
	rung, leave := c.s.cfg.Post.Events().Wait(c.inbox)
	defer leave()
	// Changes that another server makes are no wake-ups here, unless they are events.
	again := time.NewTicker(c.s.cfg.CheckTime)
	defer again.Stop()
	for {
		if err := c.Poll(w, true); err != nil {
			return err
		}
		select {
		case <-stop:
			return nil
		case <-c.ctx.Done():
			return nil
		case <-again.C:
		case <-rung:
			// Many changes at once are sent in batches.
			select {
			case <-stop:
				return nil
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}
