package mcpserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/scan"
	"postern/internal/seal"
)

func draftTools() []*tool {
	const version = `"version": {"type": "integer", "minimum": 1, "description": "The version that is meant, as email_draft_get told it: if the draft was changed meanwhile nothing is done."}`
	return []*tool{
		offer(Drafts, mcp.Tool{
			Name: "email_draft_list", Title: "List drafts", InputSchema: object("", limitProperty, inboxProperty), Annotations: looks(),
			Description: "List the drafts of your own inbox, the most recently changed first. Answers at once.",
		}, guide{
			Usage:    "Lists drafts: id, version, recipients, subject, how they begin. Arguments: limit, 1 to 50, default 10.",
			Examples: []string{`{"limit": 5}`},
			Mistakes: []string{"Looking for what was proposed here: that is no draft any more; email_action_list lists it."},
		}, (*Server).drafts),
		offer(Drafts, mcp.Tool{
			Name: "email_draft_get", Title: "Read a draft", InputSchema: object("draftId", draftID, inboxProperty), Annotations: looks(),
			Description: "Read one draft of your own inbox in full, with its version. Answers at once.",
		}, guide{
			Usage:    "Returns one draft: recipients, subject, text, names of its files, version. Arguments: draftId (required).",
			Examples: []string{`{"draftId": "drf_ABCDEFGHIJKLMNOPQRSTUVWXYZ"}`},
			Mistakes: []string{"Giving the id of a message (msg_…): a draft's begins with drf_."},
		}, (*Server).draft),
		offer(Drafts, mcp.Tool{
			Name: "email_draft_update", Title: "Change a draft", Annotations: &mcp.ToolAnnotations{DestructiveHint: yes(), OpenWorldHint: no()},
			InputSchema: object("draftId version to subject body", draftID, version, toProperty, subject, body, contentProperties,
				`"keepAttachments": {"type": "boolean", "default": true, "description": "Whether the files that the draft has stay; those in attachments come after them."}`),
			Description: "Replace the content of a draft of your own inbox. It needs no approval, and nothing is sent.",
		}, guide{
			Usage:    "Replaces what a draft says with what is given; the version before is gone. Arguments: draftId, version, to, subject, body (required); cc, bcc, html or markdown, attachments, keepAttachments (default true).",
			Examples: []string{`{"draftId": "drf_ABCDEFGHIJKLMNOPQRSTUVWXYZ", "version": 1, "to": ["bob@example.com"], "subject": "Offer", "body": "Dear Bob, …"}`},
			Mistakes: []string{
				"Leaving out what is to stay: cc, bcc and the text are replaced whole.",
				`"changed or sent meanwhile": read it again with email_draft_get and use its version.`,
			},
		}, (*Server).updateDraft),
		offer(Drafts, mcp.Tool{
			Name: "email_draft_delete", Title: "Delete a draft", InputSchema: object("draftId", draftID, version, inboxProperty), Annotations: removes(),
			Description: "Delete a draft of your own inbox permanently. Answers at once.",
		}, guide{
			Usage:    "Deletes a draft. It cannot be undone. Arguments: draftId (required), version.",
			Examples: []string{`{"draftId": "drf_ABCDEFGHIJKLMNOPQRSTUVWXYZ"}`},
			Mistakes: []string{"Deleting a draft that was proposed: it is gone already; email_cancel takes a proposal back."},
		}, (*Server).deleteDraft),
		offer(Drafts, mcp.Tool{
			Name: "email_draft_send", Title: "Propose a draft", Annotations: reaches(),
			InputSchema: object("draftId", draftID, version, timingProperties, bulkProperty, inboxProperty),
			Description: "Propose to send a draft of your own inbox as it is. It is not sent yet: a person approves or rejects it. The normal answer is status pending_approval with an actionId; that is success, and the draft is then gone.",
		}, guide{
			Usage:    "Proposes to send a draft, once: a second call gets the same action. Arguments: draftId (required), version; sendAt, gateTiming, undoSeconds, allowDuplicate, bulk as of email_send.",
			Examples: []string{`{"draftId": "drf_ABCDEFGHIJKLMNOPQRSTUVWXYZ", "version": 2}`},
			Mistakes: []string{"Calling email_send with the same text besides: the reviewer then sees it twice."},
		}, (*Server).sendDraft),
	}
}

type draftArgs struct {
	content
	To      []string `json:"to"`
	Subject *string  `json:"subject"`
}

// compose returns what a draft says, with its files.
func (in *draftArgs) compose(ctx context.Context, s *Server, c caller) (o mailbox.Outgoing, done func(), err error) {
	switch {
	case in.To == nil:
		return o, nil, fmt.Errorf("%w: to: is required", errArgument)
	case in.Subject == nil:
		return o, nil, fmt.Errorf("%w: subject: is required", errArgument)
	}
	in.drafting = true
	return s.compose(ctx, c, &in.content, func(o *mailbox.Outgoing) error {
		o.To, o.Subject = in.To, *in.Subject
		return nil
	})
}

// newDraftArgs are those of a draft that may answer a message.
type newDraftArgs struct {
	draftArgs
	ReplyTo  string `json:"replyTo"`
	ReplyAll bool   `json:"replyAll"`
	Quote    bool   `json:"quote"`
}

// compose returns what a new draft says, with its files. Whom an answer goes to, and
// its subject, follow from the message when the draft is proposed.
func (in *newDraftArgs) compose(ctx context.Context, s *Server, c caller) (o mailbox.Outgoing, done func(), err error) {
	if in.ReplyTo == "" {
		if in.ReplyAll || in.Quote {
			return o, nil, fmt.Errorf("%w: replyAll, quote: need replyTo, the id of the message that the draft answers", errArgument)
		}
		return in.draftArgs.compose(ctx, s, c)
	}
	if err := checkID("replyTo", "msg_", in.ReplyTo); err != nil {
		return o, nil, err
	}
	if len(in.To) > 0 {
		return o, nil, fmt.Errorf("%w: to: must be [] with replyTo: the message says whom an answer goes to; add others with cc or bcc", errArgument)
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return o, nil, err
	}
	// A message that is not there, or another inbox's, is refused now and not when the
	// draft is proposed.
	if _, err := s.post.Listed(ctx, c.who, k, in.ReplyTo); err != nil {
		return o, nil, err
	}
	in.To = []string{}
	if in.Subject == nil {
		in.Subject = new(string)
	}
	if in.Inbox == "" {
		in.Inbox = k.Inbox()
	}
	o, done, err = in.draftArgs.compose(ctx, s, c)
	o.ReplyTo, o.ReplyAll, o.Quote = in.ReplyTo, in.ReplyAll, in.Quote
	return o, done, err
}

type savedData struct {
	Status  string `json:"status" jsonschema:"saved or deleted"`
	DraftID string `json:"draftId"`
	Version int64  `json:"version,omitempty" jsonschema:"what email_draft_update, which replaces it, is to be given"`
	Message string `json:"message"`
}

func saved(d mailbox.Draft) (out reply[savedData]) {
	out.Data = savedData{"saved", d.ID, d.Version, "The draft is saved. Nobody was asked and nothing leaves; to propose an email use email_send, or email_draft_send with this draft."}
	out.Text = fmt.Sprintf("%s\ndraftId: %s\nversion: %d", out.Data.Message, d.ID, d.Version)
	return out
}

func (s *Server) saveDraft(ctx context.Context, c caller, in newDraftArgs) (out reply[savedData], err error) {
	o, done, err := in.compose(ctx, s, c)
	if err != nil {
		return out, err
	}
	defer done()
	d, err := s.post.Drafts.Save(ctx, c.who, o)
	if err != nil {
		return out, bodyError(err)
	}
	return saved(d), nil
}

// draftData is a draft as its list and its own answer show it.
type draftData struct {
	DraftID   string                    `json:"draftId"`
	Version   int64                     `json:"version"`
	UpdatedAt string                    `json:"updatedAt"`
	ReplyTo   string                    `json:"replyTo,omitempty" jsonschema:"the id of the message that it answers"`
	Forward   string                    `json:"forwards,omitempty" jsonschema:"the id of the message that it passes on"`
	Untrusted scan.Enclosed[draftWords] `json:"untrusted" jsonschema:"what it says, between the marks of a fence: it may quote people outside"`
}

// draftWords is what a draft says.
type draftWords struct {
	To          []string   `json:"to"`
	Cc          []string   `json:"cc"`
	Bcc         []string   `json:"bcc"`
	Subject     string     `json:"subject"`
	Preview     string     `json:"preview"`
	Body        string     `json:"body,omitempty" jsonschema:"of email_draft_get"`
	Attachments []fileInfo `json:"attachments"`
}

// draftOf returns a draft as f encloses it. Whoever may propose may have saved it, and
// what it quotes is from outside.
func draftOf(d mailbox.Draft, f scan.Fence, body string) draftData {
	w := draftWords{
		To: cleanAll(d.To), Cc: cleanAll(d.Cc), Bcc: cleanAll(d.Bcc), Subject: clean(d.Subject), Preview: clean(d.Preview), Body: body, Attachments: []fileInfo{},
	}
	for _, a := range d.Attachments {
		w.Attachments = append(w.Attachments, fileInfo{Name: clean(a.Name), ContentType: clean(a.ContentType), Size: a.Size, SHA256: a.SHA256})
	}
	return draftData{DraftID: d.ID, Version: d.Version, UpdatedAt: stamp(d.Updated), ReplyTo: d.ReplyTo, Forward: d.Forward, Untrusted: scan.Enclose(f, w)}
}

func (d *draftData) lines() string {
	var b strings.Builder
	w := &d.Untrusted.Content
	fmt.Fprintf(&b, "%s (version %d, changed %s)\n", d.DraftID, d.Version, d.UpdatedAt)
	if d.ReplyTo != "" {
		fmt.Fprintf(&b, "  answers: %s\n", d.ReplyTo)
	}
	fmt.Fprintf(&b, "  to: %s\n  subject: %s\n", strings.Join(slices.Concat(w.To, w.Cc, w.Bcc), ", "), w.Subject)
	for _, a := range w.Attachments {
		fmt.Fprintf(&b, "  attachment: %s (%s, %d bytes)\n", a.Name, a.ContentType, a.Size)
	}
	return b.String()
}

type draftsData struct {
	Notice string      `json:"notice" jsonschema:"what the marks around untrusted mean"`
	More   bool        `json:"more" jsonschema:"whether there are more drafts than these"`
	Drafts []draftData `json:"drafts"`
}

func (s *Server) drafts(ctx context.Context, c caller, in inboxArgs) (out reply[draftsData], err error) {
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	list, next, err := s.post.Drafts.List(ctx, c.who, k, limitOf(in.Limit), "")
	if err != nil {
		return out, err
	}
	f := scan.NewFence()
	out.Data = draftsData{Notice: f.Notice(), More: next != "", Drafts: []draftData{}}
	var b strings.Builder
	for _, d := range list {
		one := draftOf(d, f, "")
		out.Data.Drafts = append(out.Data.Drafts, one)
		b.WriteString(one.lines() + "  " + one.Untrusted.Content.Preview + "\n")
	}
	out.Text = "There is no draft."
	if len(list) > 0 {
		head := fmt.Sprintf("%d drafts, the most recently changed first.", len(list))
		if next != "" {
			head += " There are more; delete those that nobody needs with email_draft_delete."
		}
		out.Text = fmt.Sprintf("%s Read one with email_draft_get. %s\n%s", head, f.Notice(), f.Wrap(b.String()))
	}
	return out, nil
}

type draftIDArgs struct {
	Inbox   string `json:"inbox"`
	DraftID string `json:"draftId"`
	Version int64  `json:"version"`
}

func (in *draftIDArgs) check() error {
	if err := checkID("draftId", "drf_", in.DraftID); err != nil {
		return err
	}
	if in.Version < 0 {
		return fmt.Errorf("%w: version: must be 1 or more", errArgument)
	}
	return nil
}

// open returns the key of the inbox that the draft is in.
func (in *draftIDArgs) open(ctx context.Context, c caller) (*seal.Key, error) {
	if err := in.check(); err != nil {
		return nil, err
	}
	return c.key(ctx, in.Inbox)
}

type wholeDraft struct {
	draftData
	Notice    string `json:"notice" jsonschema:"what the marks around untrusted mean"`
	Format    string `json:"format" jsonschema:"text, html or markdown"`
	Truncated bool   `json:"truncated"`
}

func (s *Server) draft(ctx context.Context, c caller, in draftIDArgs) (out reply[wholeDraft], err error) {
	k, err := in.open(ctx, c)
	if err != nil {
		return out, err
	}
	done, err := s.post.Reading(ctx, k.Inbox())
	if err != nil {
		return out, err
	}
	defer done()
	d, o, err := s.post.Drafts.Get(ctx, c.who, k, in.DraftID)
	if err != nil {
		return out, err
	}
	f := scan.NewFence()
	text, format := o.Text, "text"
	switch {
	case o.Markdown != "":
		text, format = o.Markdown, "markdown"
	case o.HTML != "":
		text, format = o.HTML, "html"
	}
	text, truncated := cut(clean(text), mail.MaxText)
	out.Data = wholeDraft{draftOf(d, f, text), f.Notice(), format, truncated}
	out.Text = f.Notice() + "\n" + f.Wrap(out.Data.lines()+"\n"+text)
	return out, nil
}

type updateArgs struct {
	draftArgs
	DraftID string `json:"draftId"`
	Version int64  `json:"version"`
	Keep    *bool  `json:"keepAttachments"`
}

func (s *Server) updateDraft(ctx context.Context, c caller, in updateArgs) (out reply[savedData], err error) {
	named := draftIDArgs{in.Inbox, in.DraftID, in.Version}
	if err := named.check(); err != nil {
		return out, err
	}
	// Who was only let in to read changes nothing.
	b, err := s.post.Drafts.Writable(ctx, c.who, in.Inbox)
	if err != nil {
		return out, err
	}
	if in.Version < 1 {
		return out, fmt.Errorf("%w: version: is required, as email_draft_get tells it", errArgument)
	}
	o, done, err := in.compose(ctx, s, c)
	if err != nil {
		return out, err
	}
	defer done()
	o.Inbox = b.ID
	if err := s.keep(ctx, c, &in, &o); err != nil {
		return out, err
	}
	d, err := s.post.Drafts.Update(ctx, c.who, in.DraftID, in.Version, o)
	if err != nil {
		return out, bodyError(err)
	}
	return saved(d), nil
}

// keep adds to o what stays of a draft that it replaces: what it answers or passes on,
// and its files unless they are not to. A key that only writes drafts reads none back.
func (s *Server) keep(ctx context.Context, c caller, in *updateArgs, o *mailbox.Outgoing) error {
	k, err := c.key(ctx, o.Inbox)
	if errors.Is(err, auth.ErrForbidden) && in.Keep != nil && !*in.Keep {
		return nil
	}
	if err != nil {
		return fmt.Errorf("keepAttachments: must be false for a key that does not read: %w", err)
	}
	d, before, err := s.post.Drafts.Get(ctx, c.who, k, in.DraftID)
	if err != nil {
		return err
	}
	if d.Version != in.Version {
		return mailbox.ErrDraft
	}
	if before.ReplyTo != "" && len(in.To) > 0 {
		return fmt.Errorf("%w: to: must be []: the draft answers a message, which says whom it goes to", errArgument)
	}
	o.ReplyTo, o.ReplyAll, o.Quote, o.Forward = before.ReplyTo, before.ReplyAll, before.Quote, before.Forward
	o.InReplyTo, o.References = before.InReplyTo, before.References
	if in.Keep == nil || *in.Keep {
		o.Attachments = append(before.Attachments, o.Attachments...)
	}
	return nil
}

func (s *Server) deleteDraft(ctx context.Context, c caller, in draftIDArgs) (out reply[savedData], err error) {
	if err := in.check(); err != nil {
		return out, err
	}
	if err := s.post.Drafts.Delete(ctx, c.who, in.Inbox, in.DraftID, in.Version); err != nil {
		return out, err
	}
	out.Data = savedData{Status: "deleted", DraftID: in.DraftID, Message: "The draft is deleted."}
	out.Text = out.Data.Message + "\ndraftId: " + in.DraftID
	return out, nil
}

type sendDraftArgs struct {
	draftIDArgs
	timing
	Bulk bool `json:"bulk"`
}

func (s *Server) sendDraft(ctx context.Context, c caller, in sendDraftArgs) (out reply[sendData], err error) {
	k, err := in.open(ctx, c)
	if err != nil {
		return out, err
	}
	how := mailbox.Outgoing{Bulk: in.Bulk}
	if err := in.into(&how); err != nil {
		return out, err
	}
	// A draft is as large as a mail, however small the call.
	done, err := s.begin(c.who, true)
	if err != nil {
		return out, err
	}
	defer done()
	p, err := s.post.Drafts.Send(ctx, c.who, via, k, in.DraftID, in.Version, how)
	if err != nil {
		return out, bodyError(err)
	}
	return proposed(p), nil
}
