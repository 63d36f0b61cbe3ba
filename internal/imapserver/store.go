package imapserver

import (
	"fmt"
	"slices"
	"strings"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/mailbox"
	"postern/internal/seal"
)

// labelsOf returns the labels that flags stand for.
func labelsOf(flags []imap.Flag) ([]string, error) {
	var out []string
	for _, f := range flags {
		label, ok := "", false
		for known, l := range flagLabels {
			if strings.EqualFold(string(known), string(f)) {
				label, ok = l, true
			}
		}
		switch lower := strings.ToLower(string(f)); {
		case ok:
		case lower == `\draft` || lower == `\recent`:
			continue // the folder says whether it is one
		case strings.HasPrefix(lower, `\`):
			return nil, no(imap.ResponseCodeCannot, "there is no flag "+string(f))
		case lower == mailbox.LabelRead || lower == mailbox.LabelStarred || lower == labelAnswered || lower == labelDeleted:
			return nil, no(imap.ResponseCodeCannot, lower+" is a flag here: \\Seen, \\Flagged, \\Answered or \\Deleted")
		case lower == mailbox.LabelArchived || lower == mailbox.LabelTrash:
			// The attack: a label puts into the trash what the gate would hold.
			return nil, no(imap.ResponseCodeCannot, "MOVE the message to Archive or Trash instead")
		default:
			label = lower
		}
		if !slices.Contains(out, label) {
			out = append(out, label)
		}
	}
	return out, nil
}

// Store changes flags: labels of messages, and \Deleted of drafts.
func (c *session) Store(w *engine.FetchWriter, set imap.NumSet, flags *imap.StoreFlags, _ *imap.StoreOptions) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, err := c.writable()
	if err != nil {
		return err
	}
	labels, err := labelsOf(flags.Flags)
	if err != nil {
		return err
	}
	if _, err := c.look(k); err != nil { // what is gone is not changed in the folder that it went to
		return err
	}
	v := c.view
	list := slices.DeleteFunc(c.chosen(set), func(i int) bool { return v.entries[i].gone })
	if v.folder == mailbox.FolderDrafts {
		c.storeDrafts(list, flags.Op, slices.Contains(labels, labelDeleted))
	} else if err := c.storeLabels(k, list, flags.Op, labels); err != nil {
		return c.fail(err)
	}
	if flags.Silent {
		return nil
	}
	_, byUID := set.(imap.UIDSet)
	for _, i := range list {
		r := w.CreateMessage(uint32(i) + 1)
		if byUID {
			r.WriteUID(imap.UID(v.entries[i].uid))
		}
		r.WriteFlags(v.flags(&v.entries[i]))
		if err := r.Close(); err != nil {
			return err
		}
	}
	return nil
}

// storeDrafts sets \Deleted of drafts, which lasts as long as the folder is open.
func (c *session) storeDrafts(list []int, op imap.StoreFlagsOp, deleted bool) {
	for _, i := range list {
		e := &c.view.entries[i]
		switch op {
		case imap.StoreFlagsAdd:
			e.deleted = e.deleted || deleted
		case imap.StoreFlagsDel:
			e.deleted = e.deleted && !deleted
		case imap.StoreFlagsSet:
			e.deleted = deleted
		}
	}
}

// storeLabels changes labels. Messages that change alike change together.
func (c *session) storeLabels(k *seal.Key, list []int, op imap.StoreFlagsOp, labels []string) error {
	type change struct{ add, remove string }
	groups := map[change][]string{}
	for _, i := range list {
		e := &c.view.entries[i]
		var add, remove []string
		for _, l := range labels {
			if op != imap.StoreFlagsDel && !e.has(l) {
				add = append(add, l)
			}
			if op == imap.StoreFlagsDel && e.has(l) {
				remove = append(remove, l)
			}
		}
		if op == imap.StoreFlagsSet {
			for l := range strings.FieldsSeq(e.labels) {
				if l != mailbox.LabelArchived && l != mailbox.LabelTrash && !slices.Contains(labels, l) {
					remove = append(remove, l)
				}
			}
		}
		if len(add)+len(remove) > 0 {
			g := change{strings.Join(add, " "), strings.Join(remove, " ")}
			groups[g] = append(groups[g], e.id)
		}
	}
	for g, ids := range groups {
		for part := range slices.Chunk(ids, mailbox.MaxLabelChange) {
			out, err := c.s.cfg.Post.Label(c.ctx, c.who, k, part, strings.Fields(g.add), strings.Fields(g.remove))
			if err != nil {
				return err
			}
			c.relabelled(out)
		}
	}
	return nil
}

// Expunge puts messages with \Deleted into the trash, and removes drafts with it for
// good. Nil uids means all.
func (c *session) Expunge(w *engine.ExpungeWriter, uids *imap.UIDSet) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	closing := c.g.current() == "CLOSE"
	v := c.view
	if closing && v.readOnly {
		return nil // RFC 9051, section 6.4.1
	}
	k, err := c.opened()
	if err != nil {
		return err
	}
	if _, err := c.look(k); err != nil {
		return err
	}
	list := c.marked(uids)
	if len(list) == 0 {
		return c.told(w)
	}
	if k, err = c.writable(); err != nil {
		if closing {
			return nil
		}
		return err
	}
	err = c.remove(k, list)
	if closing {
		return nil // what waits for approval stays marked
	}
	if told := c.told(w); told != nil {
		return told
	}
	return err
}

// marked returns the entries with \Deleted that are in uids.
func (c *session) marked(uids *imap.UIDSet) (list []int) {
	var ss spans
	if uids != nil {
		ss = c.uidSpans(*uids)
	}
	for i := range c.view.entries {
		e := &c.view.entries[i]
		if !e.gone && (e.deleted || c.view.folder != mailbox.FolderDrafts && e.has(labelDeleted)) && (uids == nil || ss.has(e.uid)) {
			list = append(list, i)
		}
	}
	return list
}

// told tells the program what is gone.
func (c *session) told(w *engine.ExpungeWriter) error {
	for _, n := range c.view.expunge() {
		if err := w.WriteExpunge(n); err != nil {
			return err
		}
	}
	return nil
}

// remove takes entries out of their folder.
func (c *session) remove(k *seal.Key, list []int) error {
	v := c.view
	switch v.folder {
	case mailbox.FolderDrafts:
		for _, i := range list {
			e := &v.entries[i]
			if err := c.s.cfg.Post.Drafts.Delete(c.ctx, c.who, c.inbox, e.id, e.version); err != nil {
				return c.fail(err)
			}
			e.gone = true
		}
		return nil
	case mailbox.FolderTrash:
		return no(imap.ResponseCodeCannot, "what is in the trash is deleted for good 30 days after it came there, and not before")
	default:
	}
	moved, err := c.move(k, list, mailbox.FolderTrash)
	// In the trash it is not marked any more.
	var ids []string
	for _, i := range moved {
		if v.entries[i].has(labelDeleted) {
			ids = append(ids, v.entries[i].id)
		}
	}
	for part := range slices.Chunk(ids, mailbox.MaxLabelChange) {
		if _, lerr := c.s.cfg.Post.Label(c.ctx, c.who, k, part, nil, []string{labelDeleted}); lerr != nil {
			c.s.log.Debug("unmark message", "err", lerr)
		}
	}
	return err
}

// shownIDs writes the IDs of actions for a refusal.
func shownIDs(ids []string) string {
	const most = 5
	if len(ids) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(ids[:most], ", "), len(ids)-most)
	}
	return strings.Join(ids, ", ")
}
