// Package sdktest drives a guest with the unmodified SDK of E2B.
package sdktest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"testing"
	"time"

	"postern/internal/guest"
)

// TestSDK plays the checks of sdk.mjs against a guest on loopback. Between the
// two stands what the host's proxy is in a real sandbox: it answers "create"
// and shows the channel's token.
func TestSDK(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Fatal("node is not installed, and the SDK needs it: ", err)
	}
	if _, err := os.Stat("node_modules/e2b"); err != nil {
		npm := exec.CommandContext(t.Context(), "npm", "ci", "--no-audit", "--no-fund")
		if out, err := npm.CombinedOutput(); err != nil {
			t.Fatalf("install the SDK: %v\n%s", err, out)
		}
	}
	token := hex.EncodeToString([]byte(rand.Text() + rand.Text())[:32])
	home := nobodysDir(t)
	proxy := hostProxy(t, startGuest(t, token, home), token)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, node, "sdk.mjs")
	cmd.Env = append(os.Environ(), "E2B_API_KEY=e2b_"+token[:40], "E2B_API_URL="+proxy, "E2B_SANDBOX_URL="+proxy, "GUEST_HOME="+home)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil || !bytes.Contains(out, []byte("ok kill")) {
		t.Errorf("got %v", err)
	}
}

func nobodysDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "guest-sdk-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	return dir
}

// startGuest returns the URL of a guest that the host has told who it is.
func startGuest(t *testing.T, token, home string) *url.URL {
	t.Helper()
	sum := sha256.Sum256([]byte(token))
	s, err := guest.New(slog.New(slog.NewTextHandler(t.Output(), nil)), guest.Config{ChannelSHA256: hex.EncodeToString(sum[:]), DefaultUser: "nobody"})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	to := &url.URL{Scheme: "http", Host: l.Addr().String()}
	body, _ := json.Marshal(map[string]any{"envVars": map[string]string{"E2B_SANDBOX": "true"}, "defaultWorkdir": home, "timestamp": time.Now()})
	r, _ := http.NewRequest("POST", to.String()+"/init", bytes.NewReader(body))
	r.Header.Set(guest.ChannelHeader, token)
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if got, want := res.StatusCode, http.StatusNoContent; got != want {
		t.Fatalf("init: got %d, want %d", got, want)
	}
	return to
}

func hostProxy(t *testing.T, to *url.URL, token string) string {
	t.Helper()
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 16} // a body must pass as it is
	t.Cleanup(tr.CloseIdleConnections)
	data := &httputil.ReverseProxy{
		Transport:     tr,
		FlushInterval: -1,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Header.Set(guest.ChannelHeader, token)
		},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v2/sandboxes", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write([]byte(`{"sandboxID":"iaaaaaaaaaaaaaaaaaaaa","templateID":"base","clientID":"x","envdVersion":"0.6.13","envdAccessToken":"t"}`))
	})
	mux.HandleFunc("DELETE /sandboxes/{id}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		// The guest may answer a stream before the end of the request has come.
		// Without this the server then closes the body, and the proxy takes that
		// for a failure of the request.
		_ = http.NewResponseController(w).EnableFullDuplex()
		data.ServeHTTP(w, r)
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return srv.URL
}
