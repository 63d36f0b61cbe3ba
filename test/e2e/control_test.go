package e2e

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

// project makes one request with the project's key as E2B's clients do.
func (s *server) project(method, path, body string) (status int, header http.Header, answer []byte) {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://"+s.web+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("X-API-KEY", s.key)
	resp, err := client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	if answer, err = io.ReadAll(resp.Body); err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, answer
}

// TestControlPlane covers what today's SDKs or the story do not use: version 1 of
// create, paged lists, and routes that must refuse.
func TestControlPlane(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--domain", "sandboxes.test")

	status, _, b := s.project("POST", "/sandboxes", `{"templateID": "base", "timeout": 600, "envVars": {"X": "1"}, "metadata": {"n": "0"}}`)
	var v1 struct{ SandboxID, EnvdAccessToken string }
	if err := json.Unmarshal(b, &v1); err != nil || status != http.StatusCreated {
		t.Fatalf("create, v1: %d %s", status, b)
	}
	first := &box{s: s, id: v1.SandboxID, access: v1.EnvdAccessToken}
	if r := first.run("hostname >/home/user/own; echo $X"); r.stdout != "1\n" {
		t.Errorf("its environment: %+v", r)
	}
	ids := []string{first.id}
	for i := range 2 {
		ids = append(ids, s.sandbox(map[string]any{"metadata": map[string]string{"n": fmt.Sprint(i + 1)}}).id)
	}

	list := func(query string) (got []string, next string) {
		t.Helper()
		status, h, b := s.project("GET", "/v2/sandboxes?"+query, "")
		var page []struct{ SandboxID string }
		if err := json.Unmarshal(b, &page); err != nil || status != http.StatusOK {
			t.Fatalf("list %s: %d %s", query, status, b)
		}
		for _, e := range page {
			got = append(got, e.SandboxID)
		}
		return got, h.Get("X-Next-Token")
	}
	newest := slices.Clone(ids)
	slices.Reverse(newest)
	for query, want := range map[string][]string{
		"": newest, "order=asc": ids, "state=paused": nil, "state=running": newest, "metadata=n%3D1": ids[1:2], "metadata=n%3D7": nil, "template=nope": nil,
		"template=base": newest, "template=code-interpreter-v1&limit=2": newest[:2],
	} {
		if got, _ := list(query); !slices.Equal(got, want) {
			t.Errorf("list %q: %v, want %v", query, got, want)
		}
	}
	var paged []string
	next := "x"
	for query := "limit=1"; next != "" && len(paged) < 9; query = "limit=1&nextToken=" + url.QueryEscape(next) {
		var page []string
		page, next = list(query)
		paged = append(paged, page...)
	}
	if !slices.Equal(paged, newest) {
		t.Errorf("page by page: %v, want %v", paged, newest)
	}

	if status, _, b := s.project("POST", "/v2/sandboxes", `{"templateID": "base", "network": {"allowPublicTraffic": true}}`); status != http.StatusBadRequest || !strings.Contains(string(b), "allowPublicTraffic") {
		t.Errorf("public traffic: %d %s", status, b)
	}

	// Signed URLs, as the SDKs make them, and by the host's name.
	signed := func(access string, expires time.Time) string {
		sum := sha256.Sum256(fmt.Appendf(nil, "/home/user/own:read:user:%s:%d", access, expires.Unix()))
		return "/files?" + url.Values{
			"path": {"/home/user/own"}, "username": {"user"}, "signature": {"v1_" + base64.RawStdEncoding.EncodeToString(sum[:])},
			"signature_expiration": {fmt.Sprint(expires.Unix())},
		}.Encode()
	}
	for _, tt := range []struct {
		name, target string
		want         int
	}{
		{"valid", signed(first.access, time.Now().Add(10*time.Minute)), 200},
		{"expired", signed(first.access, time.Now().Add(-time.Minute)), 401},
		{"by another token", signed("x", time.Now().Add(10*time.Minute)), 401},
	} {
		req := first.request("GET", tt.target, nil)
		req.Header = http.Header{}
		req.Host = "49983-" + first.id + ".sandboxes.test"
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != tt.want || tt.want == 200 && strings.TrimSpace(string(got)) != first.id {
			t.Errorf("signed URL, %s: %s %q, want %d", tt.name, resp.Status, got, tt.want)
		}
	}
}
