// Package orders records what clients have sandboxes do: commands, cells of code, input to
// processes, and files. It reads the requests on their way to the guest and the code
// interpreter of a sandbox, before these get them, so code inside can neither forge nor
// avoid the record.
//
// The package must not decide and must not change a request, with two exceptions: it asks
// for answers without compression, so that it can count them, and for a start that the
// kernel sees with its text where somebody judges that.
package orders

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"strconv"
	"strings"

	"postern/internal/command"
	"postern/internal/sandbox"
)

// interpreterPort is the TCP port of the code interpreter in a sandbox.
const interpreterPort = 49999

// maxRead bounds what is read of a request before it is passed on, in bytes. What is longer
// is recorded without its details.
const maxRead = 1 << 20

// A transport records the requests that it passes on.
type transport struct {
	next http.RoundTripper
	to   *command.Admission
	via  command.Via
}

// Record returns a transport to sandboxes that records what the requests order, and passes
// them to next. The host of a request's URL is "id:port". A nil admission records nothing.
func Record(next http.RoundTripper, to *command.Admission, via command.Via) http.RoundTripper {
	if to == nil {
		return next
	}
	return &transport{next, to, via}
}

// RoundTrip implements [http.RoundTripper]. It records an order before the sandbox gets it:
// after a crash of the server in between, the record has more than what happened, never
// less.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	id, port, err := net.SplitHostPort(req.URL.Host)
	if err != nil {
		return t.next.RoundTrip(req)
	}
	switch {
	case port == strconv.Itoa(sandbox.GuestPort) && (req.URL.Path == "/files" || req.URL.Path == "/files/compose"):
		return t.file(id, req)
	case port == strconv.Itoa(sandbox.GuestPort) && req.Method == http.MethodPost:
		return t.call(id, req)
	case port == strconv.Itoa(interpreterPort) && req.Method == http.MethodPost && strings.Trim(req.URL.Path, "/") == "execute":
		return t.cell(id, req)
	}
	return t.next.RoundTrip(req)
}

// order records o as the order of req, which ends without a response if it cannot be recorded
// in a sandbox under a contract.
func (t *transport) order(id string, req *http.Request, o *command.Order) (*command.Ticket, error) {
	o.Via = t.via
	if user, _, ok := req.BasicAuth(); ok {
		o.User = user
	}
	return t.to.Ordered(req.Context(), id, o)
}

// peek reads the beginning of a request's body. It returns a copy of the request with the
// whole body, and whether b is all of it.
func peek(req *http.Request) (r *http.Request, b []byte, whole bool, err error) {
	if req.Body == nil || req.Body == http.NoBody {
		return req, nil, true, nil
	}
	b, err = io.ReadAll(io.LimitReader(req.Body, maxRead+1))
	if err != nil {
		return nil, nil, false, errors.Join(fmt.Errorf("read request: %w", err), req.Body.Close())
	}
	c := *req
	r = &c
	body := req.Body
	if whole = len(b) <= maxRead; whole {
		r.Body, r.ContentLength, r.TransferEncoding = &counted{Reader: bytes.NewReader(b), Closer: body}, int64(len(b)), nil
		return r, b, true, nil
	}
	r.Body = &counted{Reader: io.MultiReader(bytes.NewReader(b), body), Closer: body}
	return r, b, false, nil
}

// counted counts what is read of a body, and calls done once: when it ends or is closed.
type counted struct {
	io.Reader
	io.Closer
	n    int64
	seen func(p []byte)          // of each piece that is read; may be nil
	done func(n int64, all bool) // may be nil
}

// Read implements [io.Reader].
func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += int64(n)
	if c.seen != nil && n > 0 {
		c.seen(p[:n])
	}
	if errors.Is(err, io.EOF) {
		c.finish(true)
	}
	return n, err
}

// Close implements [io.Closer].
func (c *counted) Close() error {
	c.finish(false)
	return c.Closer.Close()
}

func (c *counted) finish(all bool) {
	if c.done != nil {
		done := c.done
		c.done = nil
		done(c.n, all)
	}
}

// mediaType returns the type of a request's body, without parameters.
func mediaType(h http.Header) string {
	m, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		return ""
	}
	return m
}
