package notary_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"postern/internal/notary"
	"postern/internal/statement"
)

const raw = "From: analyst@agents.test\r\nTo: bob@example.com\r\nSubject: <script>alert(1)</script>\u202e\r\nMessage-ID: <1@agents.test>\r\n\r\nhello\r\n"

type keyring map[string][]statement.Key

func (k keyring) StatementKeys(_ context.Context, domain string) ([]statement.Key, error) {
	return k[domain], nil
}

type fixture struct {
	t      *testing.T
	url    string
	signed string
}

func setup(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{t: t}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	keys := keyring{
		"agents.test": {{ID: "k1", Domain: "agents.test", Public: public, From: time.Now().Add(-time.Hour)}},
		"own.test":    {{ID: "k2", Domain: "own.test", Public: public, From: time.Now().Add(-time.Hour)}},
	}
	field, err := statement.Sign([]byte(raw), statement.Statement{
		Domain: "agents.test", Key: "k1", Inbox: "analyst@agents.test", Project: "prj_x", Mode: "gated_send", Approved: statement.ByPerson, At: time.Now(),
	}, private)
	if err != nil {
		t.Fatal(err)
	}
	f.signed = field + raw
	srv := httptest.NewServer(notary.New(log, keys, notary.Config{Domain: "agents.test", Style: []byte("p{}")}).Handler())
	t.Cleanup(srv.Close)
	f.url = srv.URL
	return f
}

func (f *fixture) do(req *http.Request) (int, string, http.Header) {
	f.t.Helper()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header
}

func (f *fixture) get(path, host string) (int, string, http.Header) {
	f.t.Helper()
	req, err := http.NewRequest("GET", f.url+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	req.Host = host
	return f.do(req)
}

func (f *fixture) check(fields map[string]string) (int, string) {
	f.t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for name, v := range fields {
		part, err := w.CreateFormFile(name, "x")
		if err != nil {
			f.t.Fatal(err)
		}
		_, _ = io.WriteString(part, v)
	}
	w.Close()
	req, err := http.NewRequest("POST", f.url+"/verify", &b)
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Content-Type", w.FormDataContentType())
	status, body, _ := f.do(req)
	return status, body
}

func TestKeys(t *testing.T) {
	f := setup(t)
	for _, tt := range []struct{ path, host, want string }{
		{statement.KeysPath, "agents.test", "k1"},
		{statement.KeysPath, "own.test:443", "k2"},
		{statement.KeysPath, "127.0.0.1:3000", "k1"}, // a name without keys: the mail domain's
		{statement.KeysPath + "?domain=own.test", "agents.test", "k2"},
		{statement.KeysPath + "?domain=nobody.test", "agents.test", ""},
	} {
		status, body, h := f.get(tt.path, tt.host)
		keys, err := statement.ParseKeys([]byte(body))
		got := ""
		if len(keys) == 1 {
			got = keys[0].ID
		}
		if status != 200 || err != nil || got != tt.want || h.Get("Content-Type") != "application/json" || h.Get("Access-Control-Allow-Origin") != "*" {
			t.Errorf("%s at %s: %d %q %v", tt.path, tt.host, status, body, err)
		}
	}
	if status, _, _ := f.get(statement.KeysPath+"?domain=a%00b", "agents.test"); status != 400 {
		t.Errorf("a NUL in the domain: %d", status)
	}
}

func TestVerifyPage(t *testing.T) {
	f := setup(t)
	foreign := strings.ReplaceAll(f.signed, "agents.test", "bank.test")
	tests := []struct {
		name   string
		fields map[string]string
		status int
		want   string
	}{
		{"a file", map[string]string{"file": f.signed}, 200, "The statement is true"},
		{"pasted", map[string]string{"text": f.signed}, 200, "The statement is true"},
		{"its recipient", map[string]string{"file": f.signed, "recipient": "Bob@example.com"}, 200, "The statement is true"},
		{"passed on", map[string]string{"file": f.signed, "recipient": "eve@example.com"}, 200, "Do not trust it"},
		{"altered", map[string]string{"file": strings.Replace(f.signed, "hello", "hullo", 1)}, 200, "Do not trust it"},
		{"without a statement", map[string]string{"file": raw}, 200, "Do not trust it"},
		{"another domain's", map[string]string{"file": foreign}, 200, "It is not known here"},
		{"nothing", map[string]string{"file": " "}, 400, "paste a message"},
		{"garbage", map[string]string{"file": "\x00\xff\xfe<script>"}, 200, "Do not trust it"},
		{"a long recipient", map[string]string{"file": f.signed, "recipient": strings.Repeat("x", 2000)}, 400, "more than 1000 bytes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			status, body := f.check(tt.fields)
			if status != tt.status || !strings.Contains(body, tt.want) {
				t.Errorf("got %d:\n%s\nwant %d and %q", status, body, tt.status, tt.want)
			}
			if strings.Contains(body, "<script>") || strings.Contains(body, "\u202e") || strings.Contains(body, "\x00") {
				t.Errorf("the message reaches the page:\n%s", body)
			}
		})
	}
	status, body, h := f.get("/verify", "x")
	if status != 200 || strings.Contains(body, "<script") || !strings.Contains(h.Get("Content-Security-Policy"), "default-src 'none'") {
		t.Errorf("the page: %d\n%s", status, body)
	}
	req, _ := http.NewRequest("POST", f.url+"/verify", strings.NewReader("text=x"))
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	if status, _, _ := f.do(req); status != 400 {
		t.Errorf("another form: %d", status)
	}
}

func FuzzVerifyPage(f *testing.F) {
	log := slog.New(slog.DiscardHandler)
	h := notary.New(log, keyring{}, notary.Config{Domain: "agents.test"}).Handler()
	f.Add("multipart/form-data; boundary=b", []byte("--b\r\nContent-Disposition: form-data; name=\"text\"\r\n\r\nFrom: x\r\n\r\n--b--\r\n"))
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		r := httptest.NewRequest("POST", "/verify", bytes.NewReader(body))
		r.Header.Set("Content-Type", contentType)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code >= 500 || bytes.Contains(w.Body.Bytes(), []byte("<script")) {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}
