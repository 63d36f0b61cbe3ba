package imapserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

const (
	// maxMoved bounds the messages of one command that the gate is asked about: each
	// is an action.
	maxMoved = 200
	// moveTime is how long a command waits for what needs no approval.
	moveTime = 20 * time.Second
	via      = "imap"
)

// errPending means that a person has to approve.
var errPending = errors.New("waits for approval")

// Move moves messages to another folder.
func (c *session) Move(w *engine.MoveWriter, set imap.NumSet, dest string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	data, err := c.transfer(set, dest)
	if data != nil {
		if err := w.WriteCopyData(data); err != nil {
			return err
		}
	}
	// Those that moved are told, also if others did not.
	for _, n := range c.view.expunge() {
		if werr := w.WriteExpunge(n); werr != nil {
			return werr
		}
	}
	return err
}

// Copy moves messages too: a message is in one folder. Programs without MOVE copy, set
// \Deleted and expunge; for these the message has gone already.
func (c *session) Copy(set imap.NumSet, dest string) (*imap.CopyData, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.transfer(set, dest)
}

// transfer moves the messages of a set, and returns their new UIDs, or nil if none
// moved.
func (c *session) transfer(set imap.NumSet, dest string) (*imap.CopyData, error) {
	k, err := c.writable()
	if err != nil {
		return nil, err
	}
	to, err := named(dest)
	if err != nil {
		// RFC 9051 section 6.4.7: TRYCREATE would be an invitation to what is refused.
		return nil, err
	}
	v := c.view
	if to.folder == v.folder {
		return nil, no(imap.ResponseCodeCannot, "the messages are in this folder already")
	}
	if _, err := c.look(k); err != nil {
		return nil, err
	}
	list := slices.DeleteFunc(c.chosen(set), func(i int) bool { return v.entries[i].gone })
	if len(list) == 0 {
		return nil, nil
	}
	if v.folder == mailbox.FolderDrafts || to.folder == mailbox.FolderDrafts {
		return nil, no(imap.ResponseCodeCannot, "drafts stay in Drafts: to delete one, set \\Deleted and EXPUNGE; to make one, APPEND it")
	}
	moved, err := c.move(k, list, to.folder)
	data, uerr := c.numbers(k, moved, to.folder)
	return data, cmp.Or(err, uerr)
}

// move moves entries to a folder that is not Drafts, and returns those that moved,
// which it marks as gone.
func (c *session) move(k *seal.Key, list []int, to mailbox.Folder) (moved []int, err error) {
	if len(list) > maxMoved && (to == mailbox.FolderArchive || to == mailbox.FolderTrash) {
		return nil, no(imap.ResponseCodeLimit, fmt.Sprintf("one command can move at most %d messages to the archive or the trash", maxMoved))
	}
	v := c.view
	switch to {
	case mailbox.FolderArchive, mailbox.FolderTrash:
		moved, err = c.arrange(k, list, to)
	default:
		moved, err = c.putBack(k, list, to)
	}
	for _, i := range moved {
		v.entries[i].gone = true
	}
	return moved, err
}

// putBack takes messages out of the archive or the trash: that needs no approval.
func (c *session) putBack(k *seal.Key, list []int, to mailbox.Folder) ([]int, error) {
	want := message.In
	if to == mailbox.FolderSent {
		want = message.Out
	}
	var ids []string
	for _, i := range list {
		e := &c.view.entries[i]
		if e.direction != want {
			return nil, no(imap.ResponseCodeCannot, "INBOX has what arrived, and Sent what was sent through this server: a message is never in the other's place")
		}
		ids = append(ids, e.id)
	}
	moved := []int{}
	for part := range slices.Chunk(ids, mailbox.MaxLabelChange) {
		if _, err := c.s.cfg.Post.Label(c.ctx, c.who, k, part, nil, []string{mailbox.LabelArchived, mailbox.LabelTrash}); err != nil {
			return moved, c.fail(err)
		}
		moved = list[:len(moved)+len(part)]
	}
	return moved, nil
}

// arrange proposes to move messages to the archive or the trash, and waits for those
// that need no approval.
func (c *session) arrange(k *seal.Key, list []int, to mailbox.Folder) (moved []int, err error) {
	kind := policy.KindArchive
	if to == mailbox.FolderTrash {
		kind = policy.KindTrash
	}
	actions := make([]oversight.Action, 0, len(list))
	for _, i := range list {
		a, err := c.s.cfg.Post.Arrange(c.ctx, c.who, via, k, kind, c.view.entries[i].id)
		if errors.Is(err, store.ErrNotFound) {
			c.view.entries[i].gone = true
			continue
		}
		if err != nil {
			return nil, c.fail(err)
		}
		actions = append(actions, a)
	}
	ctx, cancel := context.WithTimeout(c.ctx, moveTime)
	defer cancel()
	var waits []string
	var refused error
	n := 0
	for _, i := range list {
		e := &c.view.entries[i]
		if e.gone {
			continue
		}
		a, err := c.settled(ctx, actions[n])
		n++
		switch {
		case errors.Is(err, errPending):
			waits = append(waits, a.ID)
		case err != nil:
			refused = err
		default:
			if to == mailbox.FolderArchive && c.view.folder == mailbox.FolderTrash {
				// It has the label now, and leaves the trash only without the other.
				if _, err := c.s.cfg.Post.Label(c.ctx, c.who, k, []string{e.id}, nil, []string{mailbox.LabelTrash}); err != nil {
					return moved, c.fail(err)
				}
			}
			moved = append(moved, i)
		}
	}
	if len(waits) > 0 {
		return moved, no(imap.ResponseCodeNoPerm, "waits for approval as "+shownIDs(waits)+": it is done when a person approves; nothing else is needed")
	}
	return moved, refused
}

// settled waits until an action that needs no approval is done. The error is
// [errPending] if a person has to approve.
func (c *session) settled(ctx context.Context, a oversight.Action) (oversight.Action, error) {
	rung, leave := c.s.cfg.Post.Events().Wait(c.inbox)
	defer leave()
	again := time.NewTicker(200 * time.Millisecond)
	defer again.Stop()
	for {
		switch a.State {
		case oversight.Done:
			return a, nil
		case oversight.Pending:
			return a, errPending
		case oversight.Denied, oversight.Cancelled, oversight.Failed:
			return a, no(imap.ResponseCodeNoPerm, a.ID+" was not done: "+cmp.Or(a.Reason, a.Verdict, a.ResultForProposer()))
		case oversight.Approved, oversight.Executing, oversight.Scheduled, oversight.Unknown:
		}
		select {
		case <-ctx.Done():
			return a, errPending // it is approved, and done later
		case <-rung:
		case <-again.C:
		}
		now, err := c.s.cfg.Gate.Action(ctx, c.as(), a.ID)
		if err != nil && ctx.Err() == nil {
			return a, c.fail(err)
		}
		if err == nil {
			a = now
		}
	}
}

// numbers returns the UIDs that moved messages have where they are now.
func (c *session) numbers(k *seal.Key, moved []int, to mailbox.Folder) (*imap.CopyData, error) {
	if len(moved) == 0 {
		return nil, nil
	}
	l, err := c.s.cfg.Post.Filing(c.ctx, c.who, k, to)
	if err != nil {
		return nil, c.fail(err)
	}
	now := make(map[string]uint32, len(l.Messages))
	for _, d := range l.Messages {
		now[d.ID] = d.UID
	}
	type pair struct{ from, to uint32 }
	var pairs []pair
	for _, i := range moved {
		if e := &c.view.entries[i]; now[e.id] != 0 {
			pairs = append(pairs, pair{e.uid, now[e.id]})
		}
	}
	// COPYUID pairs the two sets by their order (RFC 9051, section 7.1), and a set is
	// ascending: where the messages have another order there, there is none.
	if !slices.IsSortedFunc(pairs, func(a, b pair) int { return cmp.Compare(a.to, b.to) }) || len(pairs) != len(moved) {
		return nil, nil
	}
	data := &imap.CopyData{UIDValidity: l.Validity}
	for _, p := range pairs {
		data.SourceUIDs.AddNum(imap.UID(p.from))
		data.DestUIDs.AddNum(imap.UID(p.to))
	}
	return data, nil
}
