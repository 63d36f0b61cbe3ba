package client_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"postern/client"
)

// A shaky server answers with its statuses one after the other, and then with
// 200. It keeps what it was sent.
type shaky struct {
	mu       sync.Mutex
	statuses []int
	keys     []string
	header   http.Header // of answers that are not 200
	body     string
}

func (s *shaky) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys = append(s.keys, r.Header.Get("Idempotency-Key"))
	status := 200
	if len(s.statuses) > 0 {
		status, s.statuses = s.statuses[0], s.statuses[1:]
	}
	if status == 0 {
		return nil, errors.New("connection reset")
	}
	w := httptest.NewRecorder()
	if status == 200 {
		_, _ = io.WriteString(w, "{}")
	} else {
		maps.Copy(w.Header(), s.header)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, s.body)
	}
	return w.Result(), nil
}

func against(t *testing.T, s *shaky, retries int) *client.Client {
	t.Helper()
	c, err := client.Config{URL: "https://mail.example", Key: "pib_x", HTTP: &http.Client{Transport: s}, Retries: retries}.New()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestOnlySafeRequestsAreRetried(t *testing.T) {
	read := func(ctx context.Context, c *client.Client) error { _, err := c.Inboxes.Get(ctx, "i"); return err }
	send := func(ctx context.Context, c *client.Client) error {
		_, err := c.Messages.Send(ctx, "i", client.NewMessage{})
		return err
	}
	decide := func(ctx context.Context, c *client.Client) error {
		_, err := c.Actions.Decide(ctx, "a", client.Decision{})
		return err
	}
	remove := func(ctx context.Context, c *client.Client) error { return c.Switches.TurnOff(ctx, "s") }
	for _, tt := range []struct {
		name     string
		do       func(context.Context, *client.Client) error
		statuses []int
		retries  int
		tries    int
		ok       bool
	}{
		{"a read, after a broken connection", read, []int{0}, 0, 2, true},
		{"a read, after two restarts", read, []int{503, 502}, 0, 3, true},
		{"a read, which fails for good", read, []int{503, 503, 503}, 0, 3, false},
		{"a read, without retries", read, []int{503}, -1, 1, false},
		{"a read, five times", read, []int{504, 504, 0, 0, 0}, 5, 6, true},
		{"a read of nothing", read, []int{404}, 0, 1, false},
		{"a read over the limit", read, []int{429}, 0, 1, false},
		{"an error of the server", read, []int{500}, 0, 1, false},
		{"a send, after a broken connection", send, []int{0, 0}, 0, 3, true},
		{"a send that is refused", send, []int{403}, 0, 1, false},
		{"a decision", decide, []int{0}, 0, 1, false},
		{"a decision, after a restart", decide, []int{503}, 0, 1, false},
		{"a removal", remove, []int{0}, 0, 1, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &shaky{statuses: tt.statuses}
				err := tt.do(t.Context(), against(t, s, tt.retries))
				if (err == nil) != tt.ok || len(s.keys) != tt.tries {
					t.Errorf("err %v after %d tries, want success %v after %d", err, len(s.keys), tt.ok, tt.tries)
				}
				// One proposal has one key, whatever happens on the way.
				if keys := slices.Compact(s.keys); len(keys) != 1 {
					t.Errorf("idempotency keys %v", keys)
				}
			})
		})
	}
}

func TestSendsCarryIdempotencyKeys(t *testing.T) {
	s := &shaky{}
	c := against(t, s, 0)
	for _, key := range []string{"", "", `mine "1"`} {
		if _, err := c.Messages.Send(t.Context(), "i", client.NewMessage{IdempotencyKey: key}); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.keys[0]) < 20 || s.keys[0] == s.keys[1] || s.keys[2] != `"mine \"1\""` {
		t.Errorf("keys %q", s.keys)
	}
	if _, err := c.Actions.Decide(t.Context(), "a", client.Decision{}); err != nil || s.keys[3] != "" {
		t.Errorf("a decision carries %q, %v", s.keys[3], err)
	}
}

func TestACancelledContextEndsRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		s := &shaky{statuses: slices.Repeat([]int{503}, 100), header: http.Header{"Retry-After": {"3600"}}}
		began := time.Now()
		_, err := against(t, s, 50).Inboxes.Get(ctx, "i")
		if !errors.Is(err, context.DeadlineExceeded) || len(s.keys) != 1 || time.Since(began) > time.Second {
			t.Errorf("err %v after %d tries and %v", err, len(s.keys), time.Since(began))
		}
	})
}

func TestProblemsBecomeErrors(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		status     int
		header     http.Header
		is         error
		field      string
		text       string
		wait       time.Duration
	}{
		{"a field", `{"type":"/v1/problems/invalid_request","title":"Invalid request","status":400,"detail":"attachments[0].name: is empty","error":"invalid_request","message":"attachments[0].name: is empty","requestId":"req_1"}`, 400, nil, client.ErrInvalid, "attachments[0].name", "attachments[0].name: is empty", 0},
		{"a limit", `{"title":"Limit reached","status":429,"error":"limit_reached","message":"too many today","requestId":"req_1"}`, 429, http.Header{"Retry-After": {"30"}}, client.ErrLimit, "", "too many today", 30 * time.Second},
		{"E2B's wire", `{"code":404,"message":"sandbox not found"}`, 404, nil, client.ErrNotFound, "", "sandbox not found", 0},
		{"a proxy", "<html>Bad Gateway</html>", 502, nil, nil, "", "the server answered 502 Bad Gateway", 0},
		{"nothing", "", 500, nil, nil, "", "the server answered 500 Internal Server Error", 0},
		{"a redirect", "", 302, http.Header{"Location": {"https://evil.example"}}, nil, "", "the server answered 302 Found", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &shaky{statuses: []int{tt.status}, body: tt.body, header: tt.header}
			h := &http.Client{Transport: s, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
			c, err := client.Config{URL: "https://mail.example", HTTP: h, Retries: -1}.New()
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Inboxes.Get(t.Context(), "i")
			var e *client.Error
			if !errors.As(err, &e) || e.Status != tt.status || e.Error() != tt.text || e.Field() != tt.field || e.RetryAfter != tt.wait {
				t.Fatalf("got %#v", err)
			}
			if tt.is != nil && !errors.Is(err, tt.is) || errors.Is(err, client.ErrStale) || (e.Type == "") != (e.RequestID == "") && tt.status == 400 {
				t.Errorf("got %#v", e)
			}
		})
	}
}

// TestKeysStayWithTheirServer: a key goes neither to another machine in the
// clear nor after a redirect, and no id leads to another route.
func TestKeysStayWithTheirServer(t *testing.T) {
	for url, ok := range map[string]bool{
		"https://mail.example": true, "https://mail.example/below/": true, "http://127.0.0.1:3000": true, "http://localhost:3000": true, "http://[::1]:3000": true, "unix:/run/x.sock": true,
		"http://mail.example": false, "http://127.0.0.1.evil.example": false, "http://localhost.evil.example": false, "ftp://mail.example": false, "mail.example": false, "": false,
	} {
		if _, err := client.New(url, "pib_x"); (err == nil) != ok {
			t.Errorf("New(%q): %v", url, err)
		}
	}
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the redirect was followed") }))
	defer elsewhere.Close()
	srv := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	defer srv.Close()
	c, err := client.New(srv.URL, "pib_x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Inboxes.Get(t.Context(), "i"); err == nil {
		t.Error("a redirect is a success")
	}
	s := &shaky{}
	c = against(t, s, 0)
	for _, id := range []string{"", ".", ".."} {
		if _, err := c.Inboxes.Get(t.Context(), id); err == nil || !strings.Contains(err.Error(), "path") {
			t.Errorf("inbox %q: %v", id, err)
		}
	}
	if len(s.keys) != 0 {
		t.Error("a request was sent")
	}
}
