package imapmail

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/emersion/go-imap/v2"

	"postern/internal/connector"
)

// Apply implements [connector.Provider]. Labels are keywords where the folder takes
// them; that a folder's own label cannot be taken off, the next Changes says.
func (p *Provider) Apply(ctx context.Context, id string, m connector.Modification) (string, error) {
	f, uid, box, err := p.open(ctx, id)
	if err != nil {
		return "", err
	}
	// A message that is gone is no error of STORE (RFC 9051 6.4.9).
	there, err := p.search(ctx, &imap.SearchCriteria{UID: []imap.UIDSet{imap.UIDSetNum(uid)}}, uint32(uid)+1)
	if err != nil {
		return "", err
	}
	if len(there) == 0 {
		return "", fmt.Errorf("message %s: %w", id, connector.ErrGone)
	}
	add, remove := flagsOf(m, box.PermanentFlags)
	for _, change := range []imap.StoreFlags{{Op: imap.StoreFlagsAdd, Silent: true, Flags: add}, {Op: imap.StoreFlagsDel, Silent: true, Flags: remove}} {
		if len(change.Flags) == 0 {
			continue
		}
		err := p.do(ctx, "change flags", commandTime, answerBytes, func() error {
			return p.c.Store(imap.UIDSetNum(uid), &change, nil).Close()
		})
		if err != nil {
			return "", err
		}
	}
	if m.Move == "" || m.Move == f.place && !f.plain {
		return id, nil
	}
	to, err := p.ensure(ctx, m.Move)
	if err != nil {
		return "", err
	}
	return p.move(ctx, uid, to)
}

// flagsOf returns the flags to add and to remove, of those that the folder keeps.
func flagsOf(m connector.Modification, permanent []imap.Flag) (add, remove []imap.Flag) {
	set := func(on bool, f imap.Flag) {
		if on {
			add = append(add, f)
		} else {
			remove = append(remove, f)
		}
	}
	if m.Read != nil {
		set(*m.Read, imap.FlagSeen)
	}
	if m.Starred != nil {
		set(*m.Starred, imap.FlagFlagged)
	}
	keeps := func(l string) bool {
		return slices.ContainsFunc(permanent, func(f imap.Flag) bool { return f == imap.FlagWildcard || strings.EqualFold(string(f), l) })
	}
	for _, l := range m.Add {
		if keeps(l) {
			add = append(add, imap.Flag(l))
		}
	}
	for _, l := range m.Remove {
		// The server's keyword may be spelled in another way.
		for _, f := range permanent {
			if name, ok := connector.Label(string(f)); ok && name == l && !strings.HasPrefix(string(f), "\\") {
				remove = append(remove, f)
			}
		}
		if !slices.Contains(remove, imap.Flag(l)) {
			remove = append(remove, imap.Flag(l))
		}
	}
	return add, remove
}

// move moves a message of the selected folder and returns its new id, or nothing if the server does not say.
//
// imapclient sends COPY, STORE and EXPUNGE without waiting where a server has no MOVE.
// If then the copy fails, for want of room, the message is lost. So each step waits for
// the one before it here, and nothing is expunged but this message.
func (p *Provider) move(ctx context.Context, uid imap.UID, to folder) (string, error) {
	one := imap.UIDSetNum(uid)
	if p.caps.Has(imap.CapMove) || p.caps.Has(imap.CapIMAP4rev2) && !p.caps.Has(imap.CapIMAP4rev1) {
		id := ""
		err := p.do(ctx, "move message", commandTime, answerBytes, func() error {
			d, err := p.c.Move(one, to.name).Wait()
			if err == nil {
				id = movedID(to, d.UIDValidity, d.DestUIDs)
			}
			return err
		})
		return id, err
	}
	id := ""
	err := p.do(ctx, "copy message", commandTime, answerBytes, func() error {
		d, err := p.c.Copy(one, to.name).Wait()
		if err == nil {
			id = movedID(to, d.UIDValidity, d.DestUIDs)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	err = p.do(ctx, "mark message as moved", commandTime, answerBytes, func() error {
		return p.c.Store(one, &imap.StoreFlags{Op: imap.StoreFlagsAdd, Silent: true, Flags: []imap.Flag{imap.FlagDeleted}}, nil).Close()
	})
	if err != nil || !p.caps.Has(imap.CapUIDPlus) {
		// A plain EXPUNGE would remove what the person has marked elsewhere. The mark hides
		// it, and the person's program expunges it.
		return id, err
	}
	err = p.do(ctx, "remove moved message", commandTime, answerBytes, func() error { return p.c.UIDExpunge(one).Close() })
	return id, err
}

// movedID returns the id of the one message that was moved.
func movedID(to folder, validity uint32, set imap.NumSet) string {
	uids, ok := set.(imap.UIDSet)
	if !ok || len(uids) != 1 || uids[0].Start != uids[0].Stop || uids[0].Start == 0 || validity == 0 {
		return ""
	}
	return to.idOf(validity, uids[0].Start)
}

// Wait implements [connector.Provider].
func (p *Provider) Wait(ctx context.Context, _ string) error {
	if err := p.connect(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, p.o.conf.Poll)
	defer cancel()
	if !p.caps.Has(imap.CapIdle) && !p.caps.Has(imap.CapIMAP4rev2) {
		<-ctx.Done()
		return nil
	}
	// An interrupted command costs the connection, so that these may end first.
	commands, end := graceful(ctx)
	defer end()
	inbox, ok := p.at(connector.Inbox)
	if !ok {
		<-ctx.Done()
		return nil
	}
	if _, err := p.pick(commands, inbox.name, false); err != nil {
		return err
	}
	select { // what was announced before counts for what was looked at since
	case <-p.news:
	default:
	}
	var idle interface {
		Close() error
		Wait() error
	}
	err := p.do(commands, "wait for news", commandTime, answerBytes, func() (err error) {
		idle, err = p.c.Idle()
		return err
	})
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-p.news:
	case <-p.c.Closed():
		return errors.New("the server has closed the connection")
	}
	return p.do(commands, "end waiting", commandTime, answerBytes, func() error { return errors.Join(idle.Close(), idle.Wait()) })
}

// graceful returns a context that ends graceTime after ctx. The attack: a server that
// leaves a command unanswered while this one wants to shut down.
func graceful(ctx context.Context) (context.Context, context.CancelFunc) {
	later, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-time.After(graceTime):
			cancel()
		case <-later.Done():
		}
	})
	return later, func() {
		stop()
		cancel()
	}
}
