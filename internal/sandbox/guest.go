package sandbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"time"
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

// channelHash is what a guest is told of its channel's key.
func (f *Fleet) channelHash(id string) string {
	sum := sha256.Sum256([]byte(f.ChannelKey(id)))
	return hex.EncodeToString(sum[:])
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
	client := f.guestClient(s.ID)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err := f.postInit(ctx, client, f.ChannelKey(channel).Reveal(), body)
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

// guestClient speaks to a guest while the sandbox is not ready for others.
func (f *Fleet) guestClient(id string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return f.network.Dial(ctx, id, GuestPort)
		},
	}}
}

func (f *Fleet) postInit(ctx context.Context, client *http.Client, key string, body []byte) error {
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

// warmGuest has the guest of a sandbox that is nobody's run what its owner will
// run first. It is only for speed: a guest that cannot is as good.
func (f *Fleet) warmGuest(ctx context.Context, id string) {
	// One that dies meanwhile hears of nothing and says nothing; the pool must
	// not wait for it for ever.
	ctx, cancel := context.WithTimeout(ctx, f.conf.StartTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/warm", nil)
	if err == nil {
		req.Header.Set(ChannelHeader, f.ChannelKey(id).Reveal())
		var resp *http.Response
		if resp, err = f.guestClient(id).Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusNoContent {
				return
			}
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
	}
	f.log.DebugContext(ctx, "warm the guest", "sandbox", id, "err", err)
}

// guestEnv asks the guest for its environment, which is lost with memory.
func (f *Fleet) guestEnv(ctx context.Context, id string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://guest/envs", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set(ChannelHeader, f.ChannelKey(id).Reveal())
	resp, err := f.guestClient(id).Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask guest for its environment: %w", err)
	}
	defer resp.Body.Close()
	var env map[string]string
	// Hostile, and given back to nobody but the same sandbox.
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&env); err != nil || resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ask guest for its environment: status %d: %w", resp.StatusCode, err)
	}
	return env, checkMap("environment", env)
}
