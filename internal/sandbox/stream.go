package sandbox

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The frames of the guest's answer to a command, see package guest.
const (
	frameStdout, frameStderr, frameEnd = 'o', 'e', 'x'
	maxFrame                           = 64 << 10 // bytes
)

// errMalformed means that a guest's answer is not what the guest's program sends.
var errMalformed = errors.New("the guest's answer is malformed")

// A guestError is a guest's refusal of a request. Its message is hostile, but printable.
type guestError struct {
	status  int
	message string // empty if the answer is malformed
}

// Error implements error.
func (e *guestError) Error() string {
	if e.message == "" {
		return fmt.Sprintf("the guest answers %d", e.status)
	}
	return fmt.Sprintf("the guest answers %d: %s", e.status, e.message)
}

// guestClient returns an HTTP client without a time limit for requests to a guest.
func (f *Fleet) guestClient(id string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableCompression: true, DisableKeepAlives: true, // each step is one request
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return f.network.Dial(ctx, id, GuestPort) },
	}}
}

// stream sends a request to a guest and returns its response, whose body is hostile. The
// caller closes the body. The error is a *[guestError] if the status is not 2xx.
func (f *Fleet) stream(ctx context.Context, client *http.Client, id, method, path string, query url.Values, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path+"?"+query.Encode(), body)
	if err != nil {
		return nil, err
	}
	req.Header.Set(ChannelHeader, f.ChannelKey(id).Reveal())
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	var said struct {
		Message string `json:"message"`
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if err != nil || json.Unmarshal(text, &said) != nil {
		said.Message = ""
	}
	return nil, &guestError{resp.StatusCode, printable(said.Message)}
}

// printable replaces control characters in a hostile text by question marks.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == utf8.RuneError {
			return '?'
		}
		return r
	}, s)
}

// eachFrame calls f for each frame of the guest's response to a command, and returns the
// content of the last frame. f must not retain p.
func eachFrame(r io.Reader, f func(kind byte, p []byte) error) (last []byte, err error) {
	in := bufio.NewReaderSize(r, 32<<10)
	buf := make([]byte, maxFrame)
	for {
		var head [5]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return nil, fmt.Errorf("the guest has ended before the command: %w", err)
		}
		n := binary.BigEndian.Uint32(head[1:])
		if n > maxFrame {
			return nil, errMalformed
		}
		if _, err := io.ReadFull(in, buf[:n]); err != nil {
			return nil, fmt.Errorf("the guest has ended before the command: %w", err)
		}
		if head[0] == frameEnd {
			return buf[:n], nil
		}
		if err := f(head[0], buf[:n]); err != nil {
			return nil, err
		}
	}
}
