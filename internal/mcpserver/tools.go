package mcpserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/quota"
	"postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/scan"
	"postern/internal/store"
)

// A reply is what a tool answers: Text for a model, Data for a program.
type reply[Out any] struct {
	Text  string
	Data  Out
	Extra []mcp.Content // pictures; usually none
}

// errArgument means that an argument cannot be taken; the text names it.
var errArgument = errors.New("invalid argument")

// A tool is one tool as it is offered, and how it is explained.
type tool struct {
	mcp.Tool
	set   Set
	guide guide
	add   func(s *Server, srv *mcp.Server, c caller)
	call  func(s *Server, ctx context.Context, c caller, arguments json.RawMessage) (data any, err error) // for a [Wire]
}

// offer makes a tool of f. Arguments that do not fit and errors of f become the
// tool's own error, which the model reads and can act upon.
func offer[In, Out any](set Set, t mcp.Tool, g guide, f func(*Server, context.Context, caller, In) (reply[Out], error)) *tool {
	t.OutputSchema = answerOf[Out]()
	out := &tool{Tool: t, set: set, guide: g}
	out.call = func(s *Server, ctx context.Context, c caller, arguments json.RawMessage) (any, error) {
		var in In
		if err := decode(arguments, &in); err != nil {
			return nil, err
		}
		r, err := f(s, ctx, c, in)
		if err != nil {
			return nil, err
		}
		return r.Data, nil
	}
	out.add = func(s *Server, srv *mcp.Server, c caller) {
		srv.AddTool(&out.Tool, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			// Who closes its connection waits no longer, in each revision.
			defer context.AfterFunc(c.gone, cancel)() //nolint:contextcheck // of the connection, which is another
			c := c
			c.progress = progressOf(req)
			var in In
			err := decode(req.Params.Arguments, &in)
			var r reply[Out]
			if err == nil {
				r, err = f(s, ctx, c, in)
			}
			if err != nil {
				return &mcp.CallToolResult{IsError: true, Content: []mcp.Content{&mcp.TextContent{Text: s.tell(ctx, t.Name, err)}}}, nil
			}
			return &mcp.CallToolResult{StructuredContent: r.Data, Content: append([]mcp.Content{&mcp.TextContent{Text: r.Text}}, r.Extra...)}, nil
		})
	}
	return out
}

// tell is the one table from errors to what an agent reads.
func (s *Server) tell(ctx context.Context, tool string, err error) string {
	var field *mail.FieldError
	switch {
	case errors.As(err, &field):
		return field.Error()
	case errors.Is(err, errArgument), errors.Is(err, auth.ErrForbidden), errors.Is(err, directory.ErrInvalid), errors.Is(err, directory.ErrNoInbox),
		errors.Is(err, mailbox.ErrIdempotency), errors.Is(err, quota.ErrLimit), errors.Is(err, mailbox.ErrDraft),
		errors.Is(err, oversight.ErrTooLate), errors.Is(err, oversight.ErrStale),
		errors.Is(err, errBusy), errors.Is(err, errCrowded), errors.Is(err, oversight.ErrFull), errors.Is(err, permit.ErrInvalid), errors.Is(err, permit.ErrMany), errors.Is(err, store.ErrNotFound),
		errors.Is(err, domain.ErrInvalid), errors.Is(err, domain.ErrTaken), errors.Is(err, domain.ErrHeld), errors.Is(err, domain.ErrFull), errors.Is(err, domain.ErrTooSoon),
		errors.Is(err, run.ErrInvalid), errors.Is(err, run.ErrState), errors.Is(err, run.ErrFull), errors.Is(err, contract.ErrInvalid):
		return strings.TrimPrefix(strings.TrimPrefix(strings.TrimPrefix(err.Error(), errArgument.Error()+": "), directory.ErrInvalid.Error()+": "), permit.ErrInvalid.Error()+": ")
	case errors.Is(err, mailbox.ErrDuplicate):
		return err.Error() + " (allowDuplicate: true)"
	case errors.Is(err, sandbox.ErrNotFound):
		return "sandboxId: you have no such sandbox; it may have ended: sandbox_create makes a new one"
	case errors.Is(err, sandbox.ErrNoTemplate), errors.Is(err, sandbox.ErrFull), errors.Is(err, sandbox.ErrInvalid), errors.Is(err, sandbox.ErrPaused), errors.Is(err, sandbox.ErrBusy):
		return short(err.Error())
	case ctx.Err() != nil:
		s.log.DebugContext(ctx, "caller left", "tool", tool)
		return "the call was given up"
	}
	s.log.ErrorContext(ctx, "call tool", "tool", tool, "err", err)
	if store.DiskFull(err) {
		return store.DiskFullText
	}
	return internalError
}

// internalError is what a caller reads of an error of this server.
const internalError = "internal error; nothing was stored or sent, try again later"

// decode reads a tool's arguments. Unknown ones are refused: an agent that
// misspells bcc must hear of it.
func decode(arguments json.RawMessage, v any) error {
	if len(bytes.TrimSpace(arguments)) == 0 || string(bytes.TrimSpace(arguments)) == "null" {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(arguments))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		if _, more := d.Token(); errors.Is(more, io.EOF) {
			return nil
		}
		err = errors.New("something follows the object")
	}
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%w: %s: must be %s", errArgument, short(or(wrong.Field, "arguments")), kindName(wrong.Type.String()))
	}
	if errors.Is(err, errArgument) {
		return err
	}
	return fmt.Errorf("%w: arguments: %s", errArgument, short(strings.TrimPrefix(err.Error(), "json: ")))
}

func kindName(goType string) string {
	switch strings.TrimLeft(goType, "*") {
	case "string":
		return "a string"
	case "int":
		return "a whole number"
	case "bool":
		return "true or false"
	}
	if strings.HasPrefix(goType, "[]") {
		return "an array"
	}
	return "an object"
}

func or(s, empty string) string {
	if s == "" {
		return empty
	}
	return s
}

// short keeps an error text to one line of bounded length.
func short(s string) string {
	if r := []rune(clean(s)); len(r) > 200 {
		return string(r[:200]) + "…"
	}
	return clean(s)
}

var idForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z]{3}_[A-Z0-9]{10,40}$`) })

// checkID refuses what cannot be an id before a database sees it.
func checkID(field, prefix, id string) error {
	switch {
	case id == "":
		return fmt.Errorf("%w: %s: is required", errArgument, field)
	case !idForm().MatchString(id) || !strings.HasPrefix(id, prefix):
		return fmt.Errorf("%w: %s: is not an id of the form %s…", errArgument, field, prefix)
	}
	return nil
}

// clean shows what is not seen. The attack: characters that a person does not
// see (tags, variation selectors, zero width, text direction) and a model reads.
func clean(s string) string { return scan.Visible(s) }
