package door_test

import (
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/door"
)

// TestFileName is names that are a trap in some folder.
func TestFileName(t *testing.T) {
	for name, want := range map[string]string{
		"report.pdf": "report.pdf", "..": "_", "": "_", ".ssh": "_.ssh", "-rf": "_-rf", "~": "_~", "a/../b": "a_.._b", `a\b`: "a_b", "nul": "_nul", "COM1.txt": "_COM1.txt", "com¹": "_com¹", "conin$": "_conin$", "comet": "comet",
		"x.exe. . ": "x.exe", "a:b": "a_b", "über.txt": "über.txt", "con .txt": "_con .txt", "a\x00b": "a_b",
	} {
		if got := door.FileName(name); got != want {
			t.Errorf("FileName(%q) = %q, want %q", name, got, want)
		}
	}
}

func FuzzFileName(f *testing.F) {
	for _, name := range []string{"a/b.txt", "con. .x", ".. .", "CON .", "a\r\nSet-Cookie: x=1", "\xff"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		got := door.FileName(name)
		if got == "" || strings.ContainsAny(got, "/\\:\"\r\n\x00") || strings.ContainsRune(".-~ ", rune(got[0])) || door.FileName(got) != got {
			t.Errorf("%q became %q", name, got)
		}
	})
}

// TestFileType: a file has no type that a browser or a mail program runs.
func TestFileType(t *testing.T) {
	const none = "application/octet-stream"
	for claimed, want := range map[string]string{
		"text/plain; charset=utf-8": "text/plain", "image/PNG": "image/png", "application/pdf": "application/pdf",
		"": none, "text": none, "text/html": none, "image/svg+xml": none, "application/javascript": none, "text/css": none, "application/wasm": none, "multipart/mixed": none, "application/x-multipart": none, "message/rfc822": none, "model/x3d": none, "x/y": none,
	} {
		if got := door.FileType(claimed); got != want {
			t.Errorf("FileType(%q) = %q, want %q", claimed, got, want)
		}
	}
}

// TestCredential: two credentials that differ are none, and the token of a session is
// taken from one header alone.
func TestCredential(t *testing.T) {
	const session = "pse_x"
	for _, tt := range []struct{ authorization, key, want string }{
		{"", "", ""},
		{"Bearer a", "", "a"},
		{"bearer  a ", "", "a"},
		{"", "a", "a"},
		{"Bearer a", "a", "a"},
		{"Bearer a", "b", "refused"},
		{"Bearer " + session, "", session},
		{"", session, "refused"},
		{"Bearer " + session, session, "refused"},
		{"Basic a", "", "refused"},
		{"Basic a", "a", "refused"},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
		r.Header.Set("Authorization", tt.authorization)
		r.Header.Set("X-Api-Key", tt.key)
		got, err := door.Credential(r)
		if tt.want == "refused" {
			if !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("%+v: %q, %v", tt, got.Reveal(), err)
			}
		} else if err != nil || got.Reveal() != tt.want {
			t.Errorf("%+v: %q, %v", tt, got.Reveal(), err)
		}
	}
}

// TestRoutes: what has no route, no such method, another origin, a path that no
// database takes, or another type of body reaches no route.
func TestRoutes(t *testing.T) {
	all := door.Routes[int64]{}
	all.Add("POST", "/a/{id}", 4)
	all.Add("GET", "/a/{id}", 0)
	var method string
	h := all.Handler(func(w http.ResponseWriter, r *http.Request, m string, body int64) error {
		method = m
		if err := door.Admit(w, r, "/a/{id}", body, ""); err != nil {
			return err
		}
		var in struct{}
		if body == 0 {
			return nil
		}
		return door.Decode(r, &in)
	}, func(_ http.ResponseWriter, _ *http.Request, err error) { panic(err) })
	ask := func(m, path, mediaType, body string, header ...string) (w *httptest.ResponseRecorder, err error) {
		r := httptest.NewRequestWithContext(t.Context(), m, "http://postern.example"+path, strings.NewReader(body))
		r.Header.Set("Content-Type", mediaType)
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w, method = httptest.NewRecorder(), ""
		defer func() { err, _ = recover().(error) }()
		h.ServeHTTP(w, r)
		return w, nil
	}
	const isJSON = "application/json; charset=utf-8"
	var tooBig *http.MaxBytesError
	if w, err := ask("HEAD", "/a/1", "", ""); err != nil || method != "GET" || w.Header().Get("Cache-Control") != "no-store" {
		t.Errorf("HEAD: %q, %v", method, err)
	}
	if _, err := ask("POST", "/a/1", isJSON, "{}"); err != nil {
		t.Error(err)
	}
	if w, err := ask("PUT", "/a/1", "", ""); !errors.Is(err, door.ErrMethod) || w.Header().Get("Allow") != "GET, POST" {
		t.Errorf("PUT: %v, %v", err, w.Header())
	}
	for _, path := range []string{"/", "/b", "/a/%00", "/a/%ff"} {
		if _, err := ask("GET", path, "", ""); !errors.Is(err, door.ErrPath) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := ask("POST", "/a/1", "text/plain", "{}"); !errors.Is(err, door.ErrMediaType) {
		t.Error(err)
	}
	if _, err := ask("POST", "/a/1", isJSON, "{     }"); !errors.As(err, &tooBig) {
		t.Error(err)
	}
	if _, err := ask("POST", "/a/1", isJSON, "{}", "Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site"); !errors.Is(err, door.ErrOrigin) || !errors.Is(err, auth.ErrForbidden) || method != "" {
		t.Error(method, err)
	}
}

type embedded struct {
	Text string     `json:"text"`
	At   *time.Time `json:"at"`
}

type body struct {
	embedded

	To     []string          `json:"to"`
	Tags   map[string]string `json:"tags"`
	Number int               `json:"number"`
	Flag   *bool             `json:"flag"`
	Inner  struct {
		Until time.Time `json:"until"`
	} `json:"inner"`
}

// FuzzDecode: a body is refused with a short text that can be sent, or it is one object
// whose values are what was sent.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		``, ` `, `{}`, `null`, `[]`, `{} {}`, `{`, `{"text":"a\u0000"}`, "{\"text\":\"\xff\"}", `{"text":"\ud800"}`, `{"text":1}`, `{"at":"tomorrow"}`, `{"at":1}`, `{"inner":{"until":"x"}}`,
		`{"to":"a"}`, `{"to":[1]}`, `{"tags":{"k":1}}`, `{"number":1e999}`, `{"number":` + strings.Repeat("9", 400) + `}`, `{"flag":"x"}`, `{"` + strings.Repeat("ä", 300) + `":1}`, `{"TEXT":"a","text":"b"}`,
		strings.Repeat("[", 20000), `{"text":"` + strings.Repeat("a", 5000) + `"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		const most = 4096
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/", strings.NewReader(string(b)))
		r.Header.Set("Content-Type", "application/json")
		if err := door.Admit(w, r, "/", most, ""); err != nil {
			t.Fatal(err)
		}
		var in body
		err := door.Decode(r, &in)
		var tooBig *http.MaxBytesError
		switch {
		case errors.As(err, &tooBig):
			if len(b) <= most {
				t.Errorf("%d bytes are too many", len(b))
			}
		case errors.Is(err, door.ErrRequest):
			if s := err.Error(); len(s) > 400 || !utf8.ValidString(s) {
				t.Errorf("%q", s)
			}
		case err != nil:
			t.Errorf("%v is no error of the request", err)
		case !json.Valid(b) || !utf8.Valid(b):
			t.Errorf("%q was taken", b)
		}
	})
}

// TestDownloadName: a name that cannot be written in a header is left out.
func TestDownloadName(t *testing.T) {
	for _, name := range []string{"a.txt", "über.txt", "\xff", "a\nb"} {
		w := httptest.NewRecorder()
		door.Download(w, "text/plain", name)
		if d, _, err := mime.ParseMediaType(w.Header().Get("Content-Disposition")); err != nil || d != "attachment" {
			t.Errorf("%q: %v", name, w.Header())
		}
	}
}
