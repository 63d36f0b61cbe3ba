package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// GuestPort is the TCP port of the guest inside every sandbox.
const GuestPort = 49983

// ChannelHeader carries [Fleet.ChannelKey] on each request to a guest.
const ChannelHeader = "X-Postern-Channel"

// initGuest tells the guest who it is, as soon as it listens.
func (f *Fleet) initGuest(ctx context.Context, id string, env map[string]string) error {
	body, err := json.Marshal(map[string]any{
		"envVars": env, "defaultUser": "user", "timestamp": time.Now().UTC().Format(time.RFC3339Nano),
	})
	if err != nil {
		return err
	}
	// The sandbox is not ready for others yet, so not f.http.
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return f.network.Dial(ctx, id, GuestPort)
		},
	}}
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err := postInit(ctx, client, f.ChannelKey(id).Reveal(), body)
		if err == nil || !errors.Is(err, ErrPortClosed) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the guest did not answer within %s: %w", f.conf.StartTimeout, ctx.Err())
		case <-time.After(wait):
		}
	}
}

func postInit(ctx context.Context, client *http.Client, key string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/init", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set(ChannelHeader, key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("initialise guest: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1024)) // hostile: only logged
		return fmt.Errorf("initialise guest: status %d: %q", resp.StatusCode, text)
	}
	return nil
}
