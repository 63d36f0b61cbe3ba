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
	"postern/internal/tracing"
)

// GuestPort is the TCP port of the guest inside every sandbox.
const GuestPort = 49983

// ChannelHeader carries [Fleet.ChannelKey] on each request to a guest.
const ChannelHeader = "X-Postern-Channel"

// An initBody is the body of POST /init, which tells a guest its identity before
// anybody else may talk to it.
type initBody struct {
	// EnvVars replaces the environment of commands that the guest will start. Nil
	// keeps the one of the snapshot.
	EnvVars map[string]string `json:"envVars,omitzero"`
	// bench says that the guest is of a bench, so that it gets no identity.
	bench bool
	// still says that the template's start command does not run after a boot.
	still bool
	// Restored says that the guest was restored from memory, so it must replace
	// what it knows about itself.
	Restored bool `json:"restored,omitempty"`

	// Authority is the certificate of the sandbox's authority, in PEM.
	Authority string `json:"authority,omitempty"`

	ChannelSHA256 string    `json:"channelSHA256"`
	DefaultUser   string    `json:"defaultUser"`
	DefaultDir    string    `json:"defaultWorkdir"`
	SandboxID     string    `json:"sandboxID"`
	TemplateID    string    `json:"templateID"`
	Timestamp     time.Time `json:"timestamp"`
}

// initGuest tells the guest its identity as soon as it listens. Until then the
// guest accepts the channel key of the sandbox named channel.
func (f *Fleet) initGuest(ctx context.Context, s Info, base Base, channel string, b initBody) (err error) {
	ctx, end := tracing.Begin(ctx, "initialise guest")
	defer func() { end(err) }()
	b.ChannelSHA256, b.DefaultUser, b.DefaultDir = f.channelHash(s.ID), or(base.User, "user"), base.Dir
	b.Timestamp = time.Now().UTC()
	if !b.bench { // else it would get into the template
		b.SandboxID, b.TemplateID = s.ID, or(s.Asked, s.Template)
	}
	if f.conf.Authority != nil {
		b.Authority = string(f.conf.Authority(s.ID))
	}
	if b.EnvVars != nil {
		b.EnvVars = maps.Clone(b.EnvVars)
		b.EnvVars["E2B_SANDBOX"], b.EnvVars["E2B_SANDBOX_ID"], b.EnvVars["E2B_TEMPLATE_ID"] = "true", s.ID, or(s.Asked, s.Template)
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

// maxGuestAnswer bounds how much of a guest's answer the host reads, in bytes.
const maxGuestAnswer = 1 << 20

// askGuest sends a request of the host to a guest, also while others may not dial
// it yet. It returns the body, which is hostile, if the status is want.
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

// warmGuest runs the warm-up shell in a pooled guest, so that its owner's first
// command is fast. A failure is harmless.
func (f *Fleet) warmGuest(ctx context.Context, id string) {
	// If the sandbox dies now its connection neither answers nor breaks. The pool
	// must not wait for it forever.
	ctx, cancel := context.WithTimeout(ctx, f.conf.WarmTimeout)
	defer cancel()
	if _, err := f.askGuest(ctx, id, f.ChannelKey(id), http.MethodPost, "/warm", nil, http.StatusNoContent); err != nil {
		f.log.DebugContext(ctx, "warm the guest", "sandbox", id, "err", err)
	}
}

// guestEnv returns the environment of a guest. It is saved beside a snapshot of
// files, since it is lost with the memory.
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
	// The values are hostile, but they go back to the same sandbox only.
	return env, checkMap("environment", env)
}
