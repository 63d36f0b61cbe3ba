package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// relayTimeout bounds the guest's answer to a request for a tunnel.
const relayTimeout = 10 * time.Second

// newTransport returns a transport that dials "id:port" inside sandboxes.
func (f *Fleet) newTransport() *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			id, port, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			p, err := strconv.ParseUint(port, 10, 16)
			if err != nil {
				return nil, err
			}
			return f.dialPatiently(ctx, id, uint16(p))
		},
		DisableCompression:  true, // the proxy passes bytes as they are
		MaxIdleConnsPerHost: 32,
		IdleConnTimeout:     90 * time.Second,
		WriteBufferSize:     128 << 10,
		ReadBufferSize:      128 << 10,
	}
}

// Transport returns a transport to services inside sandboxes. The host of a
// request's URL is "id:port".
func (f *Fleet) Transport() http.RoundTripper { return f.http }

// Dial connects to a TCP port inside a running sandbox, also one that listens only
// on the sandbox's loopback. The error wraps [ErrBound] if a contract binds the sandbox and
// the port is not [GuestPort].
func (f *Fleet) Dial(ctx context.Context, id string, port uint16) (net.Conn, error) {
	f.mu.Lock()
	l := f.live[id]
	ok := l != nil && l.ready
	contract := ""
	if ok {
		contract = l.traffic.Contract
	}
	f.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("dial %s: %w", id, ErrNotFound)
	}
	if contract != "" && port != GuestPort {
		return nil, fmt.Errorf("dial port %d of %s: %w: %s", port, id, ErrBound, contract)
	}
	return f.dialInside(ctx, id, port)
}

// dialInside is Dial without the check that the sandbox is ready.
func (f *Fleet) dialInside(ctx context.Context, id string, port uint16) (net.Conn, error) {
	c, err := f.network.Dial(ctx, id, port)
	if errors.Is(err, ErrPortClosed) && port != GuestPort {
		// Packets from outside cannot reach a loopback address, but the guest can.
		return f.relay(ctx, id, port)
	}
	return c, err
}

// relay asks the guest to connect to a port of its loopback. The answer is hostile,
// like everything from inside, but all that it can forge is a connection to the
// sandbox itself.
func (f *Fleet) relay(ctx context.Context, id string, port uint16) (_ net.Conn, err error) {
	c, err := f.network.Dial(ctx, id, GuestPort)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := c.SetDeadline(time.Now().Add(relayTimeout)); err != nil {
		return nil, fmt.Errorf("ask guest of %s for a tunnel: %w", id, err)
	}
	_, err = fmt.Fprintf(c, "CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n%s: %s\r\n\r\n", port, port, ChannelHeader, f.ChannelKey(id).Reveal())
	if err != nil {
		return nil, fmt.Errorf("ask guest of %s for a tunnel: %w", id, err)
	}
	// A small buffer, so that it takes little beyond the answer from the stream.
	r := bufio.NewReaderSize(c, 4<<10)
	resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, fmt.Errorf("hear from guest of %s: %w", id, err)
	}
	resp.Body.Close() // the answer to CONNECT has no body
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("connect to port %d of %s: %w", port, id, ErrPortClosed)
	}
	if !stop() {
		return nil, fmt.Errorf("connect to port %d of %s: %w", port, id, ctx.Err())
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("connect to port %d of %s: %w", port, id, err)
	}
	if r.Buffered() > 0 {
		return &bufferedConn{Conn: c, r: r}, nil
	}
	return c, nil
}

// A bufferedConn is a connection whose first bytes have been read already.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

// Read implements [net.Conn].
func (c *bufferedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// CloseWrite ends the stream to the other side and keeps the stream from it open.
func (c *bufferedConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// dialPatiently is Dial that waits for services that are still starting.
func (f *Fleet) dialPatiently(ctx context.Context, id string, port uint16) (net.Conn, error) {
	for {
		c, err := f.Dial(ctx, id, port)
		if !errors.Is(err, ErrPortClosed) || !f.warmingUp(id, port) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// warmingUp reports whether the service at port may still be starting.
func (f *Fleet) warmingUp(id string, port uint16) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.live[id]
	return l != nil && time.Since(l.since) < f.conf.Warmup[port]
}

// Live returns the ids of the sandboxes that can be dialled.
func (f *Fleet) Live() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var ids []string
	for id, l := range f.live {
		if l.ready {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Wake returns when a sandbox can be dialled, and resumes a paused one if its
// creator set AutoResume. Call it only for requests that are allowed. Its error
// wraps [ErrPaused] if only the owner may resume the sandbox, as he must where a pause
// kept the files alone: what ran would be gone without a word. It wraps [ErrBusy] if the
// state did not settle before ctx ended, and [ErrNotFound].
func (f *Fleet) Wake(ctx context.Context, id string) error {
	f.mu.Lock()
	l := f.live[id]
	ready := l != nil && l.ready
	f.mu.Unlock()
	if ready {
		return nil
	}
	ctx, l, err := f.claim(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	if l.ready { // it was being started while we waited
		return nil
	}
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return err
	}
	if s.State != Paused {
		return fmt.Errorf("wake %s: %w", id, ErrNotFound)
	}
	if !s.Restart && (!s.Options.AutoResume || f.keptFiles(s)) {
		return fmt.Errorf("wake %s: %w", id, ErrPaused)
	}
	if err := f.failedWake(id); err != nil {
		return err
	}
	if !s.Restart {
		if s.Ends, err = s.limitEnd(time.Now().Add(max(s.Options.Timeout, wakeTimeout))); err != nil {
			return err
		}
	}
	_, err = f.resume(ctx, l, system(s), s, false, "traffic")
	if err != nil {
		f.noteFailedWake(id, err)
	}
	return err
}

// A failedWake is why traffic could not resume a sandbox. Until the time that it
// holds, further requests get the same error without a new attempt.
type failedWake struct {
	err   error
	until time.Time
}

// The pause between attempts. Anybody may send a request to a public port, so
// without it each request to a broken sandbox would cost a restore. The owner can
// connect at any time.
const (
	wakeAgainAfter     = 10 * time.Second
	wakeAgainAfterFull = time.Second
)

// failedWake returns the error of a recent failed attempt, or nil.
func (f *Fleet) failedWake(id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if w, ok := f.failedWakes[id]; ok && time.Now().Before(w.until) {
		return w.err
	}
	return nil
}

// noteFailedWake remembers a failed attempt.
func (f *Fleet) noteFailedWake(id string, err error) {
	now, wait := time.Now(), wakeAgainAfter
	if errors.Is(err, ErrFull) {
		wait = wakeAgainAfterFull
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.failedWakes, func(_ string, w failedWake) bool { return !now.Before(w.until) })
	f.failedWakes[id] = failedWake{err, now.Add(wait)}
}

// wakeTimeout is the minimum lifetime of a sandbox after traffic has resumed it, as
// in E2B.
const wakeTimeout = 5 * time.Minute
