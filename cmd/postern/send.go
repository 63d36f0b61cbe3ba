package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

const sendHelp = `
Proposes an email from the inbox whose key is in $POSTERN_INBOX_KEY. It is held
until a person has approved exactly these bytes; the answer names the action that
waits (postern pending, on the server). The text is read from standard input, or
from --body.

Examples:

  export POSTERN_INBOX_KEY=pib_...
  echo 'See attachment.' | postern send --to bob@example.com --subject Result --attach result.csv
  postern send --reply msg_... --reply-all --body answer.md --markdown
  postern send --forward msg_... --to carol@example.com </dev/null
  postern send --to bob@example.com --subject Later --at 36h --body note.txt
` + keyedHelp

// A proposal is what is asked for on the command line.
type proposal struct {
	to, cc, bcc, attach     []string
	subject, body           string
	html, markdown          bool
	reply, forward          string
	replyAll, again         bool
	at, idempotency, timing string
	undo                    int64
}

func sendCommand() *command {
	var k keyed
	var p proposal
	return &command{
		use: "send", short: "propose an email with an inbox's key", long: sendHelp, facts: true,
		flags: func(fs *pflag.FlagSet) {
			k.flags(fs)
			p.contentFlags(fs)
			p.leavingFlags(fs)
		},
		run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			return p.send(ctx, l, path, os.Stdin, out)
		}),
	}
}

// contentFlags declares what an email may say.
func (p *proposal) contentFlags(fs *pflag.FlagSet) {
	fs.Var(&addressList{&p.to}, "to", "recipient, `\"Name <local@domain>\"`; may be repeated")
	fs.Var(&addressList{&p.cc}, "cc", "`recipient` of a copy; may be repeated")
	fs.Var(&addressList{&p.bcc}, "bcc", "`recipient` whom the others do not see; may be repeated")
	fs.StringVar(&p.subject, "subject", "", "the subject")
	fs.StringVar(&p.body, "body", "-", "`file` with the text; - is standard input")
	fs.BoolVar(&p.html, "html", false, "the text is a fragment of HTML")
	fs.BoolVar(&p.markdown, "markdown", false, "the text is Markdown")
	fs.Var(&addressList{&p.attach}, "attach", "`file` to attach; may be repeated, 25 MB together")
	fs.StringVar(&p.reply, "reply", "", "`id` of the message that this answers")
	fs.BoolVar(&p.replyAll, "reply-all", false, "answer all who got it")
	fs.StringVar(&p.forward, "forward", "", "`id` of a message to send on, with its files")
}

// leavingFlags declares when and how an email leaves.
func (p *proposal) leavingFlags(fs *pflag.FlagSet) {
	fs.StringVar(&p.at, "at", "", "not before this `time`: 36h, 30d or 2027-01-31T12:00:00Z")
	fs.StringVar(&p.timing, "gate-timing", "", "with --at: gate_first (decided before) or schedule_first (asked for when it is due)")
	fs.Int64Var(&p.undo, "undo", -1, "`seconds` in which it can be cancelled after its approval")
	fs.StringVar(&p.idempotency, "idempotency-key", "", "`text` that makes a repetition of this command answer the first action")
	fs.BoolVar(&p.again, "allow-duplicate", false, "the same email was sent a moment ago, and is meant twice")
}

// An addressList is a flag that may be repeated; a comma is part of a value.
type addressList struct{ values *[]string }

// String implements [pflag.Value].
func (l *addressList) String() string {
	if l.values == nil {
		return ""
	}
	return strings.Join(*l.values, ", ")
}

// Type implements [pflag.Value].
func (*addressList) Type() string { return "list" }

// Set implements [pflag.Value].
func (l *addressList) Set(s string) error {
	*l.values = append(*l.values, s)
	return nil
}

func (p *proposal) send(ctx context.Context, l *local, path string, in io.Reader, out *output) error {
	if p.reply != "" && p.forward != "" || p.html && p.markdown {
		return fmt.Errorf("%w: --reply and --forward, and --html and --markdown, exclude each other", errUsage)
	}
	body, err := p.content(in)
	if err != nil {
		return err
	}
	how, err := p.leaving()
	if err != nil {
		return err
	}
	maps.Copy(body, how)
	path += "/messages"
	switch {
	case p.reply != "":
		path += "/" + pathSegment(p.reply) + "/reply"
	case p.forward != "":
		path += "/" + pathSegment(p.forward) + "/forward"
	case len(p.to)+len(p.cc)+len(p.bcc) == 0:
		return fmt.Errorf("%w: want a recipient: --to", errUsage)
	}
	l.http.Timeout = 5 * time.Minute // files take their time
	var a api.Proposed
	if err := l.call(ctx, http.MethodPost, path, body, &a); err != nil {
		return notFoundAs(err, "the inbox has no message %q; postern message list shows them", p.reply+p.forward)
	}
	return out.facts(a, func() error {
		_, err := fmt.Fprintf(out, "%s  %s\ndigest %s\n", a.ID, a.Status, a.Digest)
		return err
	})
}

// draft is what is saved of an email, which may be unfinished.
func (p *proposal) draft(in io.Reader) (map[string]any, error) {
	body, err := p.content(in)
	if err == nil && p.reply != "" {
		body["reply_to"] = p.reply
	}
	if err == nil && p.forward != "" {
		body["forward"] = p.forward
	}
	return body, err
}

// leaving is when and how an email leaves. What was not set is left out.
func (p *proposal) leaving() (map[string]any, error) {
	body := map[string]any{}
	for name, v := range map[string]string{"idempotency_key": p.idempotency, "gate_timing": p.timing} {
		if v != "" {
			body[name] = v
		}
	}
	if p.again {
		body["allow_duplicate"] = true
	}
	if p.undo >= 0 {
		body["undo_seconds"] = p.undo
	}
	at, err := moment("at", p.at)
	if at != nil {
		body["send_at"] = at
	}
	return body, err
}

// content is what an email says. What was not set is left out.
func (p *proposal) content(in io.Reader) (map[string]any, error) {
	text, err := p.text(in)
	if err != nil {
		return nil, err
	}
	body := map[string]any{}
	switch {
	case text == "":
	case p.html:
		body["html"] = text
	case p.markdown:
		body["markdown"] = text
	default:
		body["text"] = text
	}
	for name, list := range map[string][]string{"to": p.to, "cc": p.cc, "bcc": p.bcc} {
		if len(list) > 0 {
			body[name] = list
		}
	}
	if p.subject != "" {
		body["subject"] = p.subject
	}
	if p.replyAll {
		body["reply_all"] = true
	}
	var files []map[string]string
	for _, name := range p.attach {
		b, err := readAttachment(name)
		if err != nil {
			return nil, err
		}
		file := map[string]string{"name": filepath.Base(name), "content_base64": base64.StdEncoding.EncodeToString(b)}
		if t := mime.TypeByExtension(filepath.Ext(name)); t != "" {
			file["content_type"] = t
		}
		files = append(files, file)
	}
	if len(files) > 0 {
		body["attachments"] = files
	}
	return body, nil
}

// maxText and maxFile are what the server takes, in bytes; more is not read.
const (
	maxText = 262144
	maxFile = 25 << 20
)

func (p *proposal) text(in io.Reader) (string, error) {
	if p.body != "-" {
		f, err := os.Open(p.body)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxText+1))
	if err != nil {
		return "", fmt.Errorf("read the text: %w", err)
	}
	if len(b) > maxText {
		return "", fmt.Errorf("the text is longer than %d bytes: attach it as a file", maxText)
	}
	return string(b), nil
}

func readAttachment(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if i, err := f.Stat(); err != nil || !i.Mode().IsRegular() {
		return nil, errors.Join(fmt.Errorf("attach %s: is not a file", name), err)
	} else if i.Size() > maxFile {
		return nil, fmt.Errorf("attach %s: %w: more than 25 MB", name, fs.ErrInvalid)
	}
	return io.ReadAll(io.LimitReader(f, maxFile+1))
}
