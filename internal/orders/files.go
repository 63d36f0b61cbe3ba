package orders

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
	"sync"

	"postern/internal/command"
)

// file passes on a request for files. The record has their paths as the client wrote them,
// and their sizes.
func (t *transport) file(id string, req *http.Request) (*http.Response, error) {
	q := req.URL.Query()
	o := &command.Order{Op: command.OpRead, Path: q.Get("path"), User: q.Get("username"), Size: -1}
	switch {
	case req.URL.Path == "/files/compose" && req.Method == http.MethodPost:
		return t.compose(id, req, o)
	case req.Method == http.MethodPost:
		return t.write(id, req, o)
	case req.Method != http.MethodGet:
		return t.next.RoundTrip(req)
	}
	ticket, err := t.order(id, req, o)
	if err != nil {
		return nil, err
	}
	resp, err := t.next.RoundTrip(req)
	if err == nil && resp.StatusCode < http.StatusMultipleChoices {
		resp.Body = &counted{Reader: resp.Body, Closer: resp.Body, done: func(n int64, all bool) { ticket.Ended(0, 0, n, "", all) }}
	}
	return resp, err
}

// write passes on the contents of one file or several.
func (t *transport) write(id string, req *http.Request, o *command.Order) (*http.Response, error) {
	o.Op = command.OpWrite
	ticket, err := t.order(id, req, o)
	if err != nil {
		return nil, errors.Join(err, closed(req))
	}
	if req.Body == nil {
		return t.next.RoundTrip(req)
	}
	body := &counted{Reader: req.Body, Closer: req.Body}
	names := func() string { return "" }
	if kind, params, err := mime.ParseMediaType(req.Header.Get("Content-Type")); err == nil && kind == "multipart/form-data" && o.Path == "" && req.Header.Get("Content-Encoding") == "" {
		p := newParts(params["boundary"])
		body.seen, names = p.add, p.names
	}
	body.done = func(n int64, all bool) { ticket.Ended(0, 0, n, names(), all) }
	c := *req
	c.Body = body
	return t.next.RoundTrip(&c)
}

// compose passes on a request to join files into one.
func (t *transport) compose(id string, req *http.Request, o *command.Order) (*http.Response, error) {
	req, b, _, err := peek(req)
	if err != nil {
		return nil, err
	}
	var m struct {
		Source      []string `json:"source_paths"`
		Destination string   `json:"destination"`
		Username    string   `json:"username"`
	}
	_ = json.Unmarshal(b, &m) // what cannot be read the guest refuses
	o.Op, o.User, o.To = command.OpCompose, m.Username, m.Destination
	o.Path = strings.Join(m.Source[:min(len(m.Source), maxNames)], "\n")
	if _, err := t.order(id, req, o); err != nil {
		return nil, errors.Join(err, closed(req))
	}
	return t.next.RoundTrip(req)
}

func closed(req *http.Request) error {
	if req.Body == nil {
		return nil
	}
	return req.Body.Close()
}

// maxNames bounds the paths of one order.
const maxNames = 20

// parts reads the names of the files in a form while it passes.
type parts struct {
	w    *io.PipeWriter
	done chan struct{}

	mu   sync.Mutex // guards list and more
	list []string
	more int
}

func newParts(boundary string) *parts {
	r, w := io.Pipe()
	p := &parts{w: w, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		form := multipart.NewReader(r, boundary)
		for {
			part, err := form.NextRawPart()
			if err != nil {
				break
			}
			name := part.FileName()
			if _, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition")); err == nil {
				name = params["filename"] // with its directories
			}
			p.mu.Lock()
			if len(p.list) < maxNames {
				p.list = append(p.list, name)
			} else {
				p.more++
			}
			p.mu.Unlock()
		}
		// The form has ended or cannot be read: the rest must not block the upload.
		_, _ = io.Copy(io.Discard, r)
	}()
	return p
}

func (p *parts) add(b []byte) { _, _ = p.w.Write(b) }

// names returns the paths, after the last byte.
func (p *parts) names() string {
	p.w.Close()
	<-p.done
	p.mu.Lock()
	defer p.mu.Unlock()
	out := strings.Join(p.list, "\n")
	if p.more > 0 {
		out += fmt.Sprintf("\nand %d more", p.more)
	}
	return out
}

// cell passes on code for the interpreter. The record has its length and digest, and not its
// text: cells carry data as often as code.
func (t *transport) cell(id string, req *http.Request) (*http.Response, error) {
	req, b, whole, err := peek(req)
	if err != nil {
		return nil, err
	}
	o := &command.Order{Op: command.OpCode, Size: req.ContentLength}
	// By their exact names: the interpreter takes "code" and not "Code".
	var m map[string]json.RawMessage
	var code, language, contextID string
	if whole && json.Unmarshal(b, &m) == nil && json.Unmarshal(m["code"], &code) == nil {
		sum := sha256.Sum256([]byte(code))
		o.Size, o.SHA256 = int64(len(code)), hex.EncodeToString(sum[:])
		_ = json.Unmarshal(m["language"], &language)
		_ = json.Unmarshal(m["context_id"], &contextID)
		o.Language, o.Tag = language, contextID
	} else if whole {
		sum := sha256.Sum256(b)
		o.SHA256, o.Language = hex.EncodeToString(sum[:]), "(a request that cannot be read)"
	}
	ticket, err := t.order(id, req, o)
	if err != nil {
		return nil, errors.Join(err, closed(req))
	}
	resp, err := t.next.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusOK {
		resp.Body = &counted{Reader: resp.Body, Closer: resp.Body, done: func(n int64, all bool) { ticket.Ended(n, 0, 0, "", all) }}
	}
	return resp, err
}
