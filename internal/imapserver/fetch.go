package imapserver

import (
	"errors"
	"io"
	"mime"
	"slices"
	"strings"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
)

// maxSections bounds what one FETCH asks of each message.
const maxSections = 100

// Fetch sends what is asked of messages, one message at a time.
func (c *session) Fetch(w *engine.FetchWriter, set imap.NumSet, options *imap.FetchOptions) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, err := c.opened()
	if err != nil {
		return err
	}
	if len(options.BodySection)+len(options.BinarySection)+len(options.BinarySectionSize) > maxSections {
		return no(imap.ResponseCodeLimit, "FETCH takes at most 100 sections")
	}
	list := c.chosen(set)
	seen, err := c.markSeen(k, list, options)
	if err != nil {
		return err
	}
	opened := &ahead{c: c, k: k, list: list, slots: map[int]chan opening{}}
	defer opened.end()
	missed := false
	for _, i := range list {
		if c.ctx.Err() != nil {
			return c.fail(c.ctx.Err())
		}
		err := c.fetchOne(w, opened, i, options, seen)
		if errors.Is(err, store.ErrNotFound) {
			missed = true
			continue
		}
		if err != nil {
			return c.fail(err)
		}
	}
	if _, bySeq := set.(imap.SeqSet); bySeq && missed {
		return no("EXPUNGEISSUED", "some of the messages are there no more")
	}
	return nil
}

// markSeen sets \Seen on messages whose bodies are asked for without PEEK, and returns
// the UIDs of those that had it not. Who only reads sets nothing.
func (c *session) markSeen(k *seal.Key, list []int, options *imap.FetchOptions) (map[uint32]bool, error) {
	v := c.view
	peek := !slices.ContainsFunc(options.BodySection, func(s *imap.FetchItemBodySection) bool {
		return !s.Peek
	}) && !slices.ContainsFunc(options.BinarySection, func(s *imap.FetchItemBinarySection) bool { return !s.Peek })
	if peek || v.readOnly || v.folder == mailbox.FolderDrafts || keyring.May(k, seal.Send) != nil {
		return nil, nil
	}
	var ids []string
	marked := map[uint32]bool{}
	for _, i := range list {
		if e := &v.entries[i]; !e.gone && !e.has(mailbox.LabelRead) {
			ids = append(ids, e.id)
			marked[e.uid] = true
		}
	}
	for part := range slices.Chunk(ids, mailbox.MaxLabelChange) {
		out, err := c.s.cfg.Post.Label(c.ctx, c.who, k, part, []string{mailbox.LabelRead}, nil)
		if errors.Is(err, store.ErrNotFound) {
			return nil, nil // one of them went just now; nothing was changed
		}
		if err != nil {
			return nil, c.fail(err)
		}
		c.relabelled(out)
	}
	return marked, nil
}

// relabelled notes labels that this session has changed.
func (c *session) relabelled(list []mailbox.Labelled) {
	now := make(map[string]string, len(list))
	for _, l := range list {
		now[l.ID] = strings.Join(l.Labels, " ")
	}
	for i := range c.view.entries {
		if l, ok := now[c.view.entries[i].id]; ok {
			c.view.entries[i].labels = l
		}
	}
}

// fetchOne sends what is asked of one message.
func (c *session) fetchOne(w *engine.FetchWriter, opened *ahead, i int, options *imap.FetchOptions, seen map[uint32]bool) error {
	v := c.view
	e := &v.entries[i]
	sections := len(options.BodySection)+len(options.BinarySection)+len(options.BinarySectionSize) > 0
	var p *part
	size := e.size
	if sections || options.Envelope || options.BodyStructure != nil {
		raw, done, err := opened.raw(i)
		if err != nil {
			return err
		}
		defer done()
		defer clear(raw)
		p, size = parse(raw), int64(len(raw))
	} else if options.RFC822Size && v.folder == mailbox.FolderDrafts {
		var err error
		if size, err = c.draftSize(opened.k, e.id, e.version); err != nil {
			return err
		}
	}
	binaries, err := readBinaries(p, options)
	if err != nil {
		return err
	}
	// From here on the answer is begun.
	r := w.CreateMessage(uint32(i) + 1)
	if options.UID {
		r.WriteUID(imap.UID(e.uid))
	}
	if options.Flags || seen[e.uid] {
		r.WriteFlags(v.flags(e))
	}
	if options.InternalDate {
		r.WriteInternalDate(e.at)
	}
	if options.RFC822Size {
		r.WriteRFC822Size(size)
	}
	if options.Envelope {
		r.WriteEnvelope(p.envelope())
	}
	if options.BodyStructure != nil {
		r.WriteBodyStructure(p.structure())
	}
	var errs []error
	for _, s := range options.BodySection {
		b := p.section(s)
		errs = append(errs, put(r.WriteBodySection(s, int64(len(b))), b))
	}
	for n, s := range options.BinarySection {
		errs = append(errs, put(r.WriteBinarySection(s, int64(len(binaries[n]))), binaries[n]))
	}
	for n, s := range options.BinarySectionSize {
		r.WriteBinarySectionSize(s, uint32(len(binaries[len(options.BinarySection)+n])))
	}
	return errors.Join(append(errs, r.Close())...)
}

// readBinaries decodes the parts of BINARY and BINARY.SIZE, before anything is sent.
func readBinaries(p *part, options *imap.FetchOptions) (out [][]byte, err error) {
	add := func(path []int, partial *imap.SectionPartial) {
		b, known := p.binary(path, partial)
		if !known {
			err = no(imap.ResponseCodeUnknownCTE, "the transfer encoding of the part is not known, or broken")
		}
		out = append(out, b)
	}
	for _, s := range options.BinarySection {
		add(s.Part, s.Partial)
	}
	for _, s := range options.BinarySectionSize {
		add(s.Part, nil)
	}
	return out, err
}

func put(w io.WriteCloser, b []byte) error {
	_, err := w.Write(b)
	return errors.Join(err, w.Close())
}

// raw opens one message. Large ones wait for their turn, which done gives back.
func (c *session) raw(k *seal.Key, e *entry) (raw []byte, done func(), err error) {
	c.s.cfg.Scrub.Touch()
	done = func() {}
	if e.size > largeMessage {
		if done, err = c.s.bulk.Acquire(c.ctx, c.inbox); err != nil {
			return nil, nil, err
		}
	}
	if strings.HasPrefix(e.id, "drf_") {
		d, b, err := c.s.cfg.Post.Drafts.Raw(c.ctx, c.who, k, e.id)
		if err == nil && d.Version != e.version {
			err = store.ErrNotFound // it was changed: that is another message
		}
		if err != nil {
			done()
			return nil, nil, err
		}
		return b, done, nil
	}
	_, raw, err = c.s.cfg.Post.Message(c.ctx, c.who, k, e.id)
	if err != nil {
		done()
		return nil, nil, err
	}
	return raw, done, nil
}

// disposed reads a Content-Disposition.
func disposed(v string) (value string, params map[string]string, ok bool) {
	value, params, err := mime.ParseMediaType(v)
	if err != nil && !errors.Is(err, mime.ErrInvalidMediaParameter) || value == "" {
		return "", nil, false
	}
	return line(value), params, true
}
