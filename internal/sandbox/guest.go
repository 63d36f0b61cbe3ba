package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"time"

	"postern/internal/auth"
)

// GuestPort is the TCP port of the guest inside every sandbox.
const GuestPort = 49983

// ChannelHeader carries [Fleet.ChannelKey] on each request to a guest.
const ChannelHeader = "X-Postern-Channel"

// An initBody is what the host tells a guest, before anybody else may speak to
// it.
type initBody struct {
	// EnvVars replaces the environment of what the guest will start. Nil
	// leaves the one that came with the snapshot.
	EnvVars map[string]string `json:"envVars,omitzero"`
	// Restored says that the guest was in a snapshot, so that what it knows of
	// itself is no longer true.
	Restored bool `json:"restored,omitempty"`

	ChannelSHA256 string    `json:"channelSHA256"`
	DefaultUser   string    `json:"defaultUser"`
	SandboxID     string    `json:"sandboxID"`
	TemplateID    string    `json:"templateID"`
	Timestamp     time.Time `json:"timestamp"`
}

// initGuest tells the guest who it is, as soon as it listens. Until then it
// has the channel key of the sandbox channel.
func (f *Fleet) initGuest(ctx context.Context, s Info, channel string, b initBody) error {
	b.ChannelSHA256, b.DefaultUser = f.channelHash(s.ID), "user"
	b.SandboxID, b.TemplateID, b.Timestamp = s.ID, s.Template, time.Now().UTC()
	if b.EnvVars != nil {
		b.EnvVars = maps.Clone(b.EnvVars)
		b.EnvVars["E2B_SANDBOX"], b.EnvVars["E2B_SANDBOX_ID"], b.EnvVars["E2B_TEMPLATE_ID"] = "true", s.ID, s.Template
	}
	body, err := json.Marshal(b)
	if err != nil {
		return err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		_, err := f.askGuest(ctx, s.ID, f.ChannelKey(channel), http.MethodPost, "/init", body, http.StatusNoContent)
		if err != nil {
			err = fmt.Errorf("initialise guest: %w", err)
		}
		if err == nil || !errors.Is(err, ErrPortClosed) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the guest does not listen: %w", ctx.Err())
		case <-time.After(wait):
		}
	}
}

// maxGuestAnswer bounds what is read of a guest's answer to the host, in bytes.
const maxGuestAnswer = 1 << 20

// askGuest speaks to a guest for the host, also while the sandbox is not ready
// for others. It returns the answer, which is hostile, if its status is want.
func (f *Fleet) askGuest(ctx context.Context, id string, key auth.Secret, method, path string, body []byte, want int) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set(ChannelHeader, key.Reveal())
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return f.network.Dial(ctx, id, GuestPort)
		},
	}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxGuestAnswer))
	if resp.StatusCode != want {
		return nil, fmt.Errorf("status %d: %.1024q", resp.StatusCode, answer)
	}
	return answer, err
}

// warmGuest has the guest of a sandbox that is nobody's run what its owner will
// run first. It is only for speed: a guest that cannot is as good.
func (f *Fleet) warmGuest(ctx context.Context, id string) {
	// One that dies meanwhile hears of nothing and says nothing; the pool must
	// not wait for it for ever.
	ctx, cancel := context.WithTimeout(ctx, f.conf.WarmTimeout)
	defer cancel()
	if _, err := f.askGuest(ctx, id, f.ChannelKey(id), http.MethodPost, "/warm", nil, http.StatusNoContent); err != nil {
		f.log.DebugContext(ctx, "warm the guest", "sandbox", id, "err", err)
	}
}

// guestEnv asks the guest for its environment, which is lost with memory.
func (f *Fleet) guestEnv(ctx context.Context, id string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	b, err := f.askGuest(ctx, id, f.ChannelKey(id), http.MethodGet, "/envs", nil, http.StatusOK)
	var env map[string]string
	if err == nil {
		err = json.Unmarshal(b, &env)
	}
	if err != nil {
		return nil, fmt.Errorf("ask guest for its environment: %w", err)
	}
	// It is given back to nobody but the same sandbox.
	return env, checkMap("environment", env)
}
