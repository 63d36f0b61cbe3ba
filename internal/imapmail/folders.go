package imapmail

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/emersion/go-imap/v2"

	"postern/internal/connector"
	"postern/internal/mail"
)

// A folder is one that is synchronised.
type folder struct {
	name  string
	place connector.Place
	label string // of messages in it; empty if it has a place of its own
	hash  string // by which ids name it
	plain bool   // it has no special use
}

func folderNamed(name string) folder {
	sum := sha256.Sum256([]byte(name))
	return folder{name: name, hash: hex.EncodeToString(sum[:8])}
}

// usual are the names of folders of servers that mark none.
var usual = map[string]connector.Place{
	"inbox": connector.Inbox,
	"sent":  connector.Sent, "sent items": connector.Sent, "sent messages": connector.Sent, "sent mail": connector.Sent,
	"trash": connector.Trash, "deleted items": connector.Trash, "deleted messages": connector.Trash, "bin": connector.Trash,
	"archive": connector.Archive, "archives": connector.Archive,
	"junk": connector.Ignored, "spam": connector.Ignored, "junk e-mail": connector.Ignored, "junk email": connector.Ignored, "bulk mail": connector.Ignored,
	"drafts": connector.Ignored, "draft": connector.Ignored, "outbox": connector.Ignored, "templates": connector.Ignored,
}

// placeOf returns where messages of a listed folder lie; ok is false for folders that
// hold none, or only show messages of others.
func placeOf(d *imap.ListData) (place connector.Place, plain, ok bool) {
	if strings.EqualFold(d.Mailbox, "INBOX") {
		return connector.Inbox, false, true
	}
	for _, a := range d.Attrs {
		switch a {
		case imap.MailboxAttrNoSelect, imap.MailboxAttrNonExistent, imap.MailboxAttrFlagged, imap.MailboxAttrImportant:
			return "", false, false
		case imap.MailboxAttrSent:
			return connector.Sent, false, true
		case imap.MailboxAttrTrash:
			return connector.Trash, false, true
		case imap.MailboxAttrArchive, imap.MailboxAttrAll:
			return connector.Archive, false, true
		case imap.MailboxAttrJunk, imap.MailboxAttrDrafts:
			return connector.Ignored, false, true
		default: // it says nothing of the folder's use
		}
	}
	leaf := d.Mailbox
	if d.Delim != 0 { // "INBOX.Sent" is Sent
		leaf = leaf[strings.LastIndex(leaf, string(d.Delim))+1:]
	}
	if place, ok := usual[strings.ToLower(leaf)]; ok && place != connector.Inbox {
		return place, false, true
	}
	return connector.Archive, true, true
}

// folders lists the folders that are synchronised, the inbox first.
func (p *Provider) folders(ctx context.Context) (out []folder, err error) {
	if err := p.connect(ctx); err != nil {
		return nil, err
	}
	var listed []*imap.ListData
	err = p.do(ctx, "list folders", commandTime, answerBytes, func() error {
		var o *imap.ListOptions
		if p.caps.Has(imap.CapSpecialUse) && p.caps.Has(imap.CapListExtended) {
			o = &imap.ListOptions{ReturnSpecialUse: true}
		}
		cmd := p.c.List("", "*", o)
		// The reader of the connection waits until somebody takes each folder, and
		// Close waits for the reader.
		defer func() { _ = cmd.Close() }()
		for d := cmd.Next(); d != nil; d = cmd.Next() {
			// The attack: folders without end.
			if listed = append(listed, d); len(listed) > maxFolders {
				_ = p.conn.Close()
				return fmt.Errorf("the mailbox has more than %d folders", maxFolders)
			}
		}
		return cmd.Close()
	})
	if err != nil {
		return nil, err
	}
	for _, d := range listed {
		place, plain, ok := placeOf(d)
		if !ok || len(d.Mailbox) > 500 || d.Mailbox == "" || strings.ContainsAny(d.Mailbox, "\x00\r\n") {
			continue
		}
		f := folderNamed(d.Mailbox)
		f.place = place
		if plain {
			f.label, _ = connector.Label(d.Mailbox)
			f.plain = true
		}
		out = append(out, f)
	}
	slices.SortStableFunc(out, func(a, b folder) int {
		if (a.place == connector.Inbox) != (b.place == connector.Inbox) {
			if a.place == connector.Inbox {
				return -1
			}
			return 1
		}
		return strings.Compare(a.name, b.name)
	})
	if len(out) == 0 {
		return nil, errors.New("the server shows no folder")
	}
	p.boxes = out
	return out, nil
}

// at returns the folder for a place: the first that the server marks or names so.
func (p *Provider) at(place connector.Place) (folder, bool) {
	for _, f := range p.boxes {
		if f.place == place && !f.plain {
			return f, true
		}
	}
	return folder{}, false
}

// ensure returns the folder for a place, and makes it if there is none.
func (p *Provider) ensure(ctx context.Context, place connector.Place) (folder, error) {
	if f, ok := p.at(place); ok {
		return f, nil
	}
	var name string
	switch place {
	case connector.Archive:
		name = "Archive"
	case connector.Trash:
		name = "Trash"
	case connector.Sent:
		name = "Sent"
	default:
		return folder{}, fmt.Errorf("the mailbox has no folder for %s", place)
	}
	err := p.do(ctx, "make folder "+name, commandTime, answerBytes, func() error { return p.c.Create(name, nil).Wait() })
	if err != nil {
		return folder{}, err
	}
	if _, err := p.folders(ctx); err != nil {
		return folder{}, err
	}
	if f, ok := p.at(place); ok {
		return f, nil
	}
	return folder{}, fmt.Errorf("the server does not show the folder %s that it made", name)
}

// idOf names a message: its folder, UIDVALIDITY and UID (RFC 9051 2.3.1.1).
func (f folder) idOf(validity uint32, uid imap.UID) string {
	return f.hash + "." + strconv.FormatUint(uint64(validity), 10) + "." + strconv.FormatUint(uint64(uid), 10)
}

// parseID is the inverse of idOf, for the folders that the server listed last.
func (p *Provider) parseID(id string) (f folder, validity uint32, uid imap.UID, err error) {
	part := strings.Split(id, ".")
	if len(part) == 3 {
		v, verr := strconv.ParseUint(part[1], 10, 32)
		u, uerr := strconv.ParseUint(part[2], 10, 32)
		i := slices.IndexFunc(p.boxes, func(f folder) bool { return f.hash == part[0] })
		if verr == nil && uerr == nil && u > 0 && i >= 0 {
			return p.boxes[i], uint32(v), imap.UID(u), nil
		}
	}
	return folder{}, 0, 0, fmt.Errorf("message %s: %w", mail.Printable(id, 60), connector.ErrGone)
}

// open selects the folder of a message, if it is the one that the id is of.
func (p *Provider) open(ctx context.Context, id string) (f folder, uid imap.UID, box *imap.SelectData, err error) {
	if err := p.connect(ctx); err != nil {
		return folder{}, 0, nil, err
	}
	if p.boxes == nil {
		if _, err := p.folders(ctx); err != nil {
			return folder{}, 0, nil, err
		}
	}
	f, validity, uid, err := p.parseID(id)
	if err != nil {
		return folder{}, 0, nil, err
	}
	if box, err = p.pick(ctx, f.name, false); err != nil {
		return folder{}, 0, nil, err
	}
	if box.UIDValidity != validity {
		return folder{}, 0, nil, fmt.Errorf("message %s: %w", id, connector.ErrGone)
	}
	return f, uid, box, nil
}

// stateOf returns the state of a message in f with flags.
func (f folder) stateOf(flags []imap.Flag) connector.State {
	s := connector.State{Place: f.place}
	if f.label != "" {
		s.Labels = append(s.Labels, f.label)
	}
	for _, flag := range flags {
		switch imap.Flag(strings.ToLower(string(flag))) {
		case "\\seen":
			s.Read = true
		case "\\flagged":
			s.Starred = true
		case "\\deleted", "\\draft":
			s.Place = connector.Ignored
		case "junk", "nonjunk", "notjunk", "forwarded", "redirected":
		default:
			if l, ok := connector.Label(string(flag)); ok && !strings.HasPrefix(string(flag), "$") && !strings.HasPrefix(string(flag), "\\") && len(s.Labels) < 40 {
				s.Labels = append(s.Labels, l)
			}
		}
	}
	return s
}
