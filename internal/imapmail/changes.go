package imapmail

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/emersion/go-imap/v2"
	"github.com/emersion/go-imap/v2/imapclient"

	"postern/internal/connector"
)

// A mark is what the cursor knows of a folder.
type mark struct {
	Name     string `json:"n"`
	Validity uint32 `json:"v"`
	Next     uint32 `json:"x"` // UIDNEXT
	ModSeq   uint64 `json:"m,omitempty"`
	Count    uint32 `json:"c"` // messages in it
	UIDs     string `json:"u"` // that were reported and not gone since: "1:5,9"
}

// maxCursorUIDs bounds the UIDs of a cursor of a hostile server.
const maxCursorUIDs = 600_000

// parseCursor parses a cursor. A malformed cursor counts as expired.
func parseCursor(s string) (map[string]mark, error) {
	var list []mark
	if s == "" {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(s), &list); err != nil {
		return nil, connector.ErrCursor
	}
	out := map[string]mark{}
	for _, m := range list {
		if _, err := parseUIDs(m.UIDs); err != nil {
			return nil, connector.ErrCursor
		}
		out[m.Name] = m
	}
	return out, nil
}

// formatUIDs returns sorted UIDs as a set.
func formatUIDs(uids []imap.UID) string {
	var b strings.Builder
	for i := 0; i < len(uids); {
		j := i
		for j+1 < len(uids) && uids[j+1] == uids[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatUint(uint64(uids[i]), 10))
		if j > i {
			b.WriteString(":" + strconv.FormatUint(uint64(uids[j]), 10))
		}
		i = j + 1
	}
	return b.String()
}

// parseUIDs is the inverse of formatUIDs.
func parseUIDs(s string) (out []imap.UID, err error) {
	if s == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		from, to, ranged := strings.Cut(part, ":")
		a, err := strconv.ParseUint(from, 10, 32)
		b := a
		if err == nil && ranged {
			b, err = strconv.ParseUint(to, 10, 32)
		}
		if err != nil || a == 0 || b < a || int(b-a)+len(out) > maxCursorUIDs {
			return nil, fmt.Errorf("%q is not a set of UIDs", part)
		}
		for u := a; u <= b; u++ {
			out = append(out, imap.UID(u))
		}
	}
	return out, nil
}

// A sight is a message as a folder shows it.
type sight struct {
	uid      imap.UID
	flags    []imap.Flag
	received time.Time
}

// A view is what has changed in a folder.
type view struct {
	f       folder
	mark    mark
	sights  []sight    // new or changed
	gone    []string   // ids
	present []imap.UID // known and still there
}

// Changes implements [connector.Provider].
func (p *Provider) Changes(ctx context.Context, cursor string, b connector.Bounds, each func(connector.Change) error) (string, error) {
	before, err := parseCursor(cursor)
	if err != nil {
		return "", err
	}
	boxes, err := p.folders(ctx)
	if err != nil {
		return "", err
	}
	if b.Most <= 0 {
		b.Most = connector.DefaultMost
	}
	var views []*view
	for _, f := range boxes {
		if f.place == connector.Ignored {
			continue
		}
		m, known := before[f.name]
		v, err := p.look(ctx, f, m, known, b)
		if err != nil {
			return "", err
		}
		delete(before, f.name)
		views = append(views, v)
	}
	if cursor == "" {
		newest(views, b.Most)
	}
	if err := report(views, before, each); err != nil {
		return "", err
	}
	return nextCursor(views)
}

// look compares a folder with its mark.
func (p *Provider) look(ctx context.Context, f folder, m mark, known bool, b connector.Bounds) (*view, error) {
	condstore := p.caps.Has(imap.CapCondStore)
	var st *imap.StatusData
	err := p.do(ctx, "look at folder", commandTime, answerBytes, func() (err error) {
		st, err = p.c.Status(f.name, &imap.StatusOptions{NumMessages: true, UIDNext: true, UIDValidity: true, HighestModSeq: condstore}).Wait()
		return err
	})
	if err != nil {
		return nil, err
	}
	if st.NumMessages == nil || st.UIDValidity == 0 || st.UIDNext == 0 {
		return nil, errors.New("the server does not say what is in a folder")
	}
	v := &view{f: f, mark: mark{Name: f.name, Validity: st.UIDValidity, Next: uint32(st.UIDNext), ModSeq: st.HighestModSeq, Count: *st.NumMessages}}
	if known && m.Validity != v.mark.Validity {
		// RFC 9051 2.3.1.1: all UIDs of before mean nothing any more.
		v.gone = ids(f, m)
		known = false
	}
	if known && m.Next == v.mark.Next && m.Count == v.mark.Count && m.ModSeq == v.mark.ModSeq && m.ModSeq != 0 {
		v.present, _ = parseUIDs(m.UIDs)
		return v, nil
	}
	if _, err := p.pick(ctx, f.name, true); err != nil {
		return nil, err
	}
	if p.picked.UIDValidity != v.mark.Validity {
		return nil, errors.New("the folder has just been replaced")
	}
	if !known {
		err = p.lookAtAll(ctx, v, b)
	} else {
		err = p.lookSince(ctx, v, m, condstore)
	}
	return v, err
}

// ids returns the ids of all messages of a mark.
func ids(f folder, m mark) (out []string) {
	uids, _ := parseUIDs(m.UIDs) // it was checked
	for _, u := range uids {
		out = append(out, f.idOf(m.Validity, u))
	}
	return out
}

// lookAtAll looks at a folder for the first time.
func (p *Provider) lookAtAll(ctx context.Context, v *view, b connector.Bounds) error {
	if v.mark.Count == 0 {
		return nil
	}
	found, err := p.search(ctx, &imap.SearchCriteria{Since: b.Since}, v.mark.Next)
	if err != nil || len(found) == 0 {
		return err
	}
	if len(found) > b.Most {
		found = found[len(found)-b.Most:]
	}
	v.sights, err = p.sights(ctx, found, 0)
	return err
}

// lookSince looks at what is new, changed and gone in a folder.
func (p *Provider) lookSince(ctx context.Context, v *view, m mark, condstore bool) error {
	known, _ := parseUIDs(m.UIDs)
	if len(known) > 0 {
		there, err := p.search(ctx, &imap.SearchCriteria{UID: []imap.UIDSet{setOf(known)}}, v.mark.Next)
		if err != nil {
			return err
		}
		for _, u := range known {
			if _, ok := slices.BinarySearch(there, u); ok {
				v.present = append(v.present, u)
			} else {
				v.gone = append(v.gone, v.f.idOf(m.Validity, u))
			}
		}
		since := uint64(0)
		if condstore {
			since = m.ModSeq
		}
		if len(v.present) > 0 && (since == 0 || v.mark.ModSeq != since) {
			if v.sights, err = p.sights(ctx, v.present, since); err != nil {
				return err
			}
		}
	}
	if v.mark.Next == m.Next {
		return nil
	}
	var fresh imap.UIDSet
	fresh.AddRange(imap.UID(m.Next), 0)
	found, err := p.search(ctx, &imap.SearchCriteria{UID: []imap.UIDSet{fresh}}, v.mark.Next)
	if err != nil {
		return err
	}
	// "n:*" has the last message even if its UID is below n.
	found = slices.DeleteFunc(found, func(u imap.UID) bool { return uint32(u) < m.Next })
	if len(found) == 0 {
		return nil
	}
	more, err := p.sights(ctx, found, 0)
	v.sights = append(v.sights, more...)
	return err
}

func setOf(uids []imap.UID) (s imap.UIDSet) {
	for i := 0; i < len(uids); {
		j := i
		for j+1 < len(uids) && uids[j+1] == uids[j]+1 {
			j++
		}
		s = append(s, imap.UIDRange{Start: uids[i], Stop: uids[j]})
		i = j + 1
	}
	return s
}

// search returns the UIDs below next that match, sorted. The attack: a range of all
// numbers, which fills the memory when it is written out.
func (p *Provider) search(ctx context.Context, c *imap.SearchCriteria, next uint32) (out []imap.UID, err error) {
	err = p.do(ctx, "search folder", commandTime, answerBytes, func() error {
		data, err := p.c.UIDSearch(c, nil).Wait()
		if err != nil {
			return err
		}
		set, _ := data.All.(imap.UIDSet)
		for _, r := range set {
			if r.Start == 0 || r.Stop == 0 || r.Stop < r.Start {
				continue
			}
			for u := r.Start; u <= r.Stop && uint32(u) < next; u++ {
				if out = append(out, u); len(out) > maxUIDs {
					return fmt.Errorf("a folder has more than %d messages", maxUIDs)
				}
			}
		}
		return nil
	})
	slices.Sort(out)
	return slices.Compact(out), err
}

// sights returns flags and times of messages; with since only of those that have
// changed since that modification sequence (RFC 7162).
func (p *Provider) sights(ctx context.Context, uids []imap.UID, since uint64) (out []sight, err error) {
	for part := range slices.Chunk(uids, 1000) {
		err := p.do(ctx, "read flags", commandTime, answerBytes, func() error {
			cmd := p.c.Fetch(setOf(part), &imap.FetchOptions{UID: true, Flags: true, InternalDate: true, ChangedSince: since})
			defer func() { _ = cmd.Close() }()
			for m := cmd.Next(); m != nil; m = cmd.Next() {
				s, _, err := readSight(m, 0)
				if err != nil {
					return err
				}
				if _, asked := slices.BinarySearch(part, s.uid); asked {
					out = append(out, s)
				}
				if len(out) > maxUIDs {
					return fmt.Errorf("the server answers with more than %d messages", maxUIDs)
				}
			}
			return cmd.Close()
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(out, func(a, b sight) int { return int(int64(a.uid) - int64(b.uid)) })
	return slices.CompactFunc(out, func(a, b sight) bool { return a.uid == b.uid }), nil
}

// readSight reads the items of one answer, and at most so many octets of the message if
// that is among them. Items that were not asked for are passed over.
func readSight(m *imapclient.FetchMessageData, most int64) (s sight, raw []byte, err error) {
	for item := m.Next(); item != nil; item = m.Next() {
		switch item := item.(type) {
		case imapclient.FetchItemDataUID:
			s.uid = item.UID
		case imapclient.FetchItemDataFlags:
			s.flags = item.Flags
		case imapclient.FetchItemDataInternalDate:
			s.received = item.Time
		case imapclient.FetchItemDataBodySection:
			// The attack: BODY[] NIL, which has no literal to read from.
			if item.Literal == nil {
				continue
			}
			var b bytes.Buffer
			if _, err := io.Copy(&b, io.LimitReader(item.Literal, most)); err != nil {
				return s, nil, err
			}
			raw = b.Bytes()
		}
	}
	return s, raw, nil
}

// newest leaves the newest most sights of all folders.
func newest(views []*view, most int) {
	var times []time.Time
	for _, v := range views {
		for _, s := range v.sights {
			times = append(times, s.received)
		}
	}
	if len(times) <= most {
		return
	}
	slices.SortFunc(times, func(a, b time.Time) int { return b.Compare(a) })
	oldest, room := times[most-1], most
	for _, v := range views {
		v.sights = slices.DeleteFunc(v.sights, func(s sight) bool {
			if s.received.Before(oldest) || room == 0 {
				return true
			}
			room--
			return false
		})
	}
}

// report calls each: what is new or changed first, the newest before the others, then
// what is gone. Lost are the marks of folders that are no longer there.
func report(views []*view, lost map[string]mark, each func(connector.Change) error) error {
	var list []connector.Change
	for _, v := range views {
		for _, s := range v.sights {
			list = append(list, connector.Change{ID: v.f.idOf(v.mark.Validity, s.uid), At: v.f.stateOf(s.flags), Received: s.received})
		}
	}
	slices.SortStableFunc(list, func(a, b connector.Change) int { return b.Received.Compare(a.Received) })
	for _, ch := range list {
		ch.Total = len(list)
		if err := each(ch); err != nil {
			return err
		}
	}
	var gone []string
	for _, v := range views {
		gone = append(gone, v.gone...)
	}
	for _, m := range lost {
		gone = append(gone, ids(folderNamed(m.Name), m)...)
	}
	for _, id := range gone {
		if err := each(connector.Change{ID: id, Gone: true}); err != nil {
			return err
		}
	}
	return nil
}

func nextCursor(views []*view) (string, error) {
	list := []mark{}
	for _, v := range views {
		uids := v.present
		for _, s := range v.sights {
			uids = append(uids, s.uid)
		}
		slices.Sort(uids)
		v.mark.UIDs = formatUIDs(slices.Compact(uids))
		list = append(list, v.mark)
	}
	b, err := json.Marshal(list)
	if err != nil {
		return "", fmt.Errorf("write cursor: %w", err)
	}
	return string(b), nil
}

// Fetch implements [connector.Provider].
func (p *Provider) Fetch(ctx context.Context, id string) (connector.Message, error) {
	f, uid, _, err := p.open(ctx, id)
	if err != nil {
		return connector.Message{}, err
	}
	m := connector.Message{AuthServ: p.set.Public[AuthServ]}
	// One octet more than is taken says that there is more. The attack: a literal
	// without end; the meter ends it.
	section := &imap.FetchItemBodySection{Peek: true, Partial: &imap.SectionPartial{Size: connector.MaxMessage + 1}}
	found := false
	err = p.do(ctx, "fetch message", fetchTime, connector.MaxMessage+answerBytes, func() error {
		cmd := p.c.Fetch(imap.UIDSetNum(uid), &imap.FetchOptions{UID: true, Flags: true, InternalDate: true, BodySection: []*imap.FetchItemBodySection{section}})
		defer func() { _ = cmd.Close() }()
		for d := cmd.Next(); d != nil; d = cmd.Next() {
			s, raw, err := readSight(d, connector.MaxMessage+1)
			if err != nil {
				return err
			}
			if s.uid == uid && raw != nil && !found {
				found, m.Raw, m.At, m.State = true, raw, s.received, f.stateOf(s.flags)
			}
		}
		return cmd.Close()
	})
	switch {
	case errors.Is(err, errNested):
		// The connection is gone with it. The next one passes the message over.
		return connector.Message{}, fmt.Errorf("message %s: %w", id, connector.ErrTooLarge)
	case err != nil:
		return connector.Message{}, err
	case !found:
		return connector.Message{}, fmt.Errorf("message %s: %w", id, connector.ErrGone)
	case len(m.Raw) > connector.MaxMessage:
		return connector.Message{}, fmt.Errorf("message %s: %w", id, connector.ErrTooLarge)
	}
	return m, nil
}
