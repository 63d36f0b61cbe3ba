package inspect

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"postern/internal/inject"
)

// websocket reports whether a request asks for an upgrade to WebSocket and to
// nothing else (RFC 6455 §4.1). Other upgrades are not passed on: in h2c, for
// example, each request has a host of its own.
func websocket(in *http.Request) bool {
	up := in.Header["Upgrade"]
	return in.ProtoMajor == 1 && in.ProtoMinor == 1 && in.Method == http.MethodGet && in.ContentLength == 0 && len(up) == 1 && strings.EqualFold(up[0], "websocket") &&
		httpguts.HeaderValuesContainsToken(in.Header["Connection"], "upgrade")
}

// switched passes the bytes of a WebSocket in both directions.
func (x *exchange) switched(ctx context.Context, resp *http.Response, mask *inject.Mask, masked int) *refusal {
	up, ok := resp.Body.(io.ReadWriteCloser)
	if !ok || !x.upgrade || !strings.EqualFold(resp.Header.Get("Upgrade"), "websocket") {
		return refuse(http.StatusBadGateway, x.s.conn.Host+" has switched to a protocol that was not asked for")
	}
	if mask != nil && resp.Header.Get("Sec-Websocket-Extensions") != "" {
		// The attack: messages that are compressed although that was not asked for
		// (RFC 6455 §9.1) hide the value from the mask.
		return refuse(http.StatusBadGateway, x.s.conn.Host+" uses a WebSocket extension that was not asked for")
	}
	defer up.Close()
	c, rw, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		return refuse(http.StatusBadGateway, "the connection cannot switch protocols")
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close(); up.Close() })()
	resp.Header.Del("Alt-Svc")
	resp.Body, resp.Trailer = nil, nil
	resp.Status = "" // the standard text: the server's could have the value of a secret
	if err := resp.Write(rw); err != nil || rw.Flush() != nil {
		return nil
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var out io.Reader = rw.Reader
		if len(x.secrets) > 0 {
			out = &frameScan{r: out, scan: &sentinelScan{secrets: x.secrets, found: func(s *inject.Secret) { x.stayed(s, "WebSocket") }}}
		}
		_, _ = io.Copy(up, out)
		up.Close()
	}()
	var down io.Reader = up
	var hidden *inject.MaskedReader
	if mask != nil {
		hidden = mask.Reader(up)
		down = hidden
	}
	n, err := io.Copy(c, down)
	x.bytes = n
	if err != nil && !errors.Is(err, io.EOF) {
		x.s.l.log.DebugContext(ctx, "WebSocket ended", "err", kindOf(err))
	}
	c.Close()
	<-done
	if hidden != nil {
		masked += hidden.Hits()
		mask.Wipe()
	}
	x.made(ctx, masked)
	return nil
}
