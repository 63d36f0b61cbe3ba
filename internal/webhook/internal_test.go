package webhook

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
)

// TestBackoff: all attempts of a delivery are made within about a day, and no
// two failures in step.
func TestBackoff(t *testing.T) {
	h := &Hooks{conf: Config{Retry: 5 * time.Second}}
	for range 100 {
		var sum, last time.Duration
		for n := 1; n < maxAttempts; n++ {
			d := h.backoff(n)
			if want := 4 * time.Second; n == 1 && d < want {
				t.Fatalf("the first wait is %v, want at least %v", d, want)
			}
			if d > 7*time.Hour+12*time.Minute {
				t.Fatalf("wait %d is %v", n, d)
			}
			if n < 7 && d <= last {
				t.Fatalf("wait %d is %v after %v", n, d, last)
			}
			sum, last = sum+d, d
		}
		if sum < 20*time.Hour || sum > 32*time.Hour {
			t.Fatalf("all attempts take %v, want about a day", sum)
		}
	}
	if a, b := h.backoff(5), h.backoff(5); a == b {
		t.Errorf("two waits are the same: %v", a)
	}
}

// TestSignatures compares with values computed by other implementations: the
// first is the example of Standard Webhooks' own documents.
func TestSignatures(t *testing.T) {
	secret := auth.Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	if got, want := signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", []byte(`{"test": 2432232314}`)),
		"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for i := range 300 {
		body := fmt.Sprintf(`{"n":%d}`, i)
		sig, padded := e2bSignature(secret, []byte(body))
		if strings.ContainsAny(sig, "-_+/=") || len(sig) != 43 {
			t.Fatalf("signature %s is not the same in both alphabets", sig)
		}
		var v struct{ N int }
		if err := json.Unmarshal(padded, &v); err != nil || v.N != i || strings.TrimRight(string(padded), "\n") != body {
			t.Fatalf("body %q: %v", padded, err)
		}
	}
}

func TestSealer(t *testing.T) {
	s, err := newSealer([]byte(strings.Repeat("k", 32)))
	if err != nil {
		t.Fatal(err)
	}
	sealed := s.seal("whk_1", "a secret")
	if got, err := s.open("whk_1", sealed); err != nil || got.Reveal() != "a secret" {
		t.Errorf("got %q, %v", got.Reveal(), err)
	}
	if _, err := s.open("whk_2", sealed); err == nil {
		t.Error("a secret opens in another webhook's row")
	}
	for i := range sealed {
		bad := append([]byte(nil), sealed...)
		bad[i] ^= 1
		if _, err := s.open("whk_1", bad); err == nil {
			t.Errorf("opened with byte %d changed", i)
		}
	}
	if _, err := s.open("whk_1", sealed[:5]); err == nil {
		t.Error("opened what was cut off")
	}
}

// TestMultiMailBody: a body names the email by the IDs that there are, and has nothing of
// its content.
func TestMultiMailBody(t *testing.T) {
	at := time.Date(2027, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		e    event.Event
		want string
	}{
		{
			event.Event{Type: event.MessageSent, Inbox: "ibx_1", Object: "msg_1", At: at, Data: map[string]any{"message": "msg_1", "action": "act_1"}},
			`{"event":"message.sent","timestamp":"2027-01-02T03:04:05Z","data":{"action_id":"act_1","direction":"outbound","email_id":"msg_1","mailbox_id":"ibx_1"}}`,
		},
		{
			event.Event{Type: event.OversightRejected, Inbox: "ibx_1", Object: "act_1", At: at, Data: map[string]any{"action": "act_1", "reason": "no"}},
			`{"event":"oversight.rejected","timestamp":"2027-01-02T03:04:05Z","data":{"action_id":"act_1","email_id":"act_1","mailbox_id":"ibx_1"}}`,
		},
		{
			event.Event{Type: event.InboxModeChanged, Inbox: "ibx_1", At: at},
			`{"event":"inbox.mode_changed","timestamp":"2027-01-02T03:04:05Z","data":{"mailbox_id":"ibx_1"}}`,
		},
	} {
		if got, err := multimailBody(c.e); err != nil || got != c.want {
			t.Errorf("got %s, %v\nwant %s", got, err, c.want)
		}
	}
}
