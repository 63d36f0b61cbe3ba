package e2bapi

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/template"
)

// noMachine is a machine without room for a bench.
type noMachine struct{}

func (noMachine) OpenBench(context.Context, auth.Principal, sandbox.BenchRequest) (build.Bench, error) {
	return nil, sandbox.ErrFull
}

func (noMachine) MakeTemplateSnapshot(context.Context, string, func(string)) error {
	return sandbox.ErrFull
}
func (noMachine) ForgetTemplate(context.Context, string) error { return nil }

// ownBase has one template, "base".
type ownBase struct{}

func (ownBase) Resolve(ctx context.Context, name string) (template.Template, error) {
	if name != "base" {
		return template.Template{}, fmt.Errorf("%w: %q", template.ErrNotFound, name)
	}
	return ownBase{}.Base(ctx)
}

func (ownBase) Lookup(name string) (string, error) {
	t, err := ownBase{}.Resolve(context.Background(), name)
	return t.ID, err
}

func (ownBase) Build(ctx context.Context, names ...string) ([]template.Template, error) {
	t, err := ownBase{}.Resolve(ctx, names[0])
	return []template.Template{t}, err
}

func (ownBase) Base(context.Context) (template.Template, error) {
	return template.Template{ID: "base-0123456789abcdef", Name: "base"}, nil
}
func (ownBase) GuestDigest() string { return "g" }

// A templateServer is a control API over the templates of two projects, without
// sandboxes.
type templateServer struct {
	*Server
	db   *store.DB
	keys [2]auth.Secret
	ids  [2]string
	http *httptest.Server
}

func serveTemplates(t *testing.T) *templateServer {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	db := storetest.SQLite(t)
	bs, err := build.New(log, db, noMachine{}, ownBase{}, nil, build.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	fleet, err := sandbox.New(log, db, nil, nil, sandboxtest.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	s := &templateServer{Server: &Server{log: log, db: db, fleet: fleet, conf: Config{Builds: bs, UploadKey: []byte("key of the server")}}, db: db}
	s.openData(&fakeSandboxes{}, http.DefaultTransport)
	err = db.Update(t.Context(), func(tx *store.Tx) (err error) {
		for i, name := range []string{"mine", "theirs"} {
			if s.ids[i], s.keys[i], err = auth.NewProject(t.Context(), tx, name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	s.http = httptest.NewServer(s.Handler())
	t.Cleanup(s.http.Close)
	return s
}

// call makes a request with the key of project i and returns the status and the body.
func (s *templateServer) call(t *testing.T, i int, method, path string, body any) (int, []byte) {
	t.Helper()
	text, ok := body.(string)
	if !ok && body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		text = string(b)
	}
	r, err := http.NewRequestWithContext(t.Context(), method, s.http.URL+path, strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Api-Key", s.keys[i].Reveal())
	return answer(t, r)
}

func answer(t *testing.T, r *http.Request) (int, []byte) {
	t.Helper()
	resp, err := newClient(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.StatusCode, []byte(text(t, resp))
}

// requested is the answer to a request for a build.
type requested struct {
	TemplateID, BuildID string
	Names, Aliases      []string
	Tags                []string
	Public              bool
	URL                 string
	Present             bool
}

func (s *templateServer) request(t *testing.T, i int, name string) (out requested) {
	t.Helper()
	status, b := s.call(t, i, "POST", "/v3/templates", map[string]any{"name": name})
	if err := json.Unmarshal(b, &out); err != nil || status != 202 {
		t.Fatalf("request %s: %d %s", name, status, b)
	}
	return out
}

// TestTemplatesOfAnotherProject: with the key of one project the templates, builds, logs
// and files of another are not to be read, changed or used.
func TestTemplatesOfAnotherProject(t *testing.T) {
	s := serveTemplates(t)
	mine := s.request(t, 0, "secret-work:v1")
	hash := strings.Repeat("ab", 32)
	for _, name := range []string{mine.TemplateID, "secret-work", "mine%2Fsecret-work", s.ids[0] + "%2Fsecret-work"} {
		for _, target := range []string{
			"GET /templates/" + name, "GET /templates/" + name + "/tags", "GET /templates/aliases/" + name,
			"GET /templates/" + name + "/files/" + hash, "PATCH /templates/" + name, "PATCH /v2/templates/" + name, "DELETE /templates/" + name,
			"GET /templates/" + name + "/record", "GET /templates/" + name + "/spdx", "GET /templates/" + name + "/image",
			"GET /templates/" + name + "/builds/" + mine.BuildID + "/status", "GET /templates/" + name + "/builds/" + mine.BuildID + "/logs",
			"POST /v2/templates/" + name + "/builds/" + mine.BuildID,
		} {
			method, path, _ := strings.Cut(target, " ")
			var body any
			switch method {
			case "PATCH":
				body = map[string]any{"public": true}
			case "POST":
				body = map[string]any{"fromTemplate": "base"}
			}
			status, b := s.call(t, 1, method, path, body)
			var e struct{ Code int }
			if json.Unmarshal(b, &e) != nil || status != 404 && status != 403 || e.Code != status {
				t.Errorf("%s: %d %s, want 404 or 403", target, status, b)
			}
		}
	}
	for _, body := range []map[string]any{{"target": "mine/secret-work:v1", "tags": []string{"x"}}, {"target": mine.TemplateID, "tags": []string{"x"}}} {
		if status, b := s.call(t, 1, "POST", "/templates/tags", body); status != 404 && status != 403 && status != 400 {
			t.Errorf("assign %v: %d %s", body, status, b)
		}
	}
	if status, b := s.call(t, 1, "DELETE", "/templates/tags", map[string]any{"name": mine.TemplateID, "tags": []string{"v1"}}); status != 404 {
		t.Errorf("remove tag: %d %s", status, b)
	}
	for _, list := range []string{"/templates", "/v2/templates"} {
		if status, b := s.call(t, 1, "GET", list, nil); status != 200 || string(b) != "[]" {
			t.Errorf("%s: %d %s, want []", list, status, b)
		}
	}
	if status, b := s.call(t, 1, "GET", "/templates?teamID="+s.ids[0], nil); status != 403 {
		t.Errorf("list of another team: %d %s, want 403", status, b)
	}
	if status, b := s.call(t, 1, "POST", "/v3/templates", map[string]any{"name": "mine/secret-work"}); status != 400 {
		t.Errorf("build in the namespace of another: %d %s, want 400", status, b)
	}
	// The same name is another template.
	theirs := s.request(t, 1, "secret-work")
	if theirs.TemplateID == mine.TemplateID || theirs.Names[0] == mine.Names[0] {
		t.Errorf("got %+v, want another template than %+v", theirs, mine)
	}
	if status, b := s.call(t, 1, "POST", "/v2/templates/"+theirs.TemplateID+"/builds/"+mine.BuildID, map[string]any{"fromTemplate": "base"}); status != 400 {
		t.Errorf("start a build of another by an own template: %d %s", status, b)
	}
}

// TestUploadsNeedTheirSignature: an upload takes what its URL was signed for, in its
// time, and nothing else.
func TestUploadsNeedTheirSignature(t *testing.T) {
	s := serveTemplates(t)
	mine, theirs := s.request(t, 0, "mine"), s.request(t, 1, "theirs")
	hash := strings.Repeat("ab", 32)
	files := func(i int, id, hash string) (out requested) {
		status, b := s.call(t, i, "GET", "/templates/"+id+"/files/"+hash, nil)
		if err := json.Unmarshal(b, &out); err != nil || status != 201 {
			t.Fatalf("files: %d %s", status, b)
		}
		return out
	}
	link := files(0, mine.TemplateID, hash)
	u, err := url.Parse(link.URL)
	if err != nil || link.Present || u.Host != strings.TrimPrefix(s.http.URL, "http://") {
		t.Fatalf("got %+v", link)
	}
	archive := archiveOf(t, "a.txt", "a")
	put := func(at string, body []byte, size int64) (int, []byte) {
		r, err := http.NewRequestWithContext(t.Context(), "PUT", at, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.ContentLength = size
		return answer(t, r)
	}
	with := func(key, value string) string {
		v, q := *u, u.Query()
		q.Set(key, value)
		v.RawQuery = q.Encode()
		return v.String()
	}
	later := time.Now().Add(time.Hour).Unix()
	expired := time.Now().Add(-time.Second).Unix()
	for name, at := range map[string]string{
		"no signature":             strings.Split(link.URL, "?")[0],
		"another project":          with("project", s.ids[1]),
		"another expiry":           with("expires", strconv.FormatInt(later+1000, 10)),
		"an empty signature":       with("signature", ""),
		"another hash":             strings.Replace(link.URL, hash, strings.Repeat("cd", 32), 1),
		"another template":         strings.Replace(link.URL, mine.TemplateID, theirs.TemplateID, 1),
		"signed with no key":       s.http.URL + uploadPath + mine.TemplateID + "/" + hash + signedWith(newUploader([]byte("guessed")), s.ids[0], mine.TemplateID, hash, later),
		"signed, and expired":      s.http.URL + uploadPath + mine.TemplateID + "/" + hash + signedWith(s.uploads, s.ids[0], mine.TemplateID, hash, expired),
		"parts moved between them": s.http.URL + uploadPath + mine.TemplateID + "/" + hash + signedWith(s.uploads, s.ids[0]+mine.TemplateID[:3], mine.TemplateID[3:], hash, later),
	} {
		if status, b := put(at, archive, int64(len(archive))); status != 403 {
			t.Errorf("%s: %d %s, want 403", name, status, b)
		}
	}
	if status, b := put(link.URL, archive, -1); status != http.StatusLengthRequired {
		t.Errorf("without a length: %d %s, want 411", status, b)
	}
	// To try again later does not help: 413, not 429. The answer comes before the body.
	large, said := httptest.NewRequest("PUT", link.URL, nil), httptest.NewRecorder()
	large.ContentLength = 1<<30 + 1
	if s.Handler().ServeHTTP(said, large); said.Code != http.StatusRequestEntityTooLarge || !strings.Contains(said.Body.String(), "at most 1024 MiB") {
		t.Errorf("an archive of more than 1 GiB: %d %s, want 413", said.Code, said.Body)
	}
	if files(0, mine.TemplateID, hash).Present {
		t.Fatal("a refused upload is present")
	}
	for range 2 { // the second one is of a client with forceUpload
		if status, b := put(link.URL, archive, int64(len(archive))); status != 200 {
			t.Fatalf("upload: %d %s", status, b)
		}
	}
	if !files(0, mine.TemplateID, hash).Present || files(1, theirs.TemplateID, hash).Present {
		t.Error("want the files of one project, and not of the other")
	}
	for _, bad := range []string{"x", strings.Repeat("zz", 32), strings.Repeat("ab", 33), "..%2F..%2Fetc"} {
		if status, b := s.call(t, 0, "GET", "/templates/"+mine.TemplateID+"/files/"+bad, nil); status != 400 || !strings.Contains(string(b), "Invalid files hash") {
			t.Errorf("hash %s: %d %s", bad, status, b)
		}
	}
}

// signedWith returns the query of an upload URL.
func signedWith(u *uploader, project, template, hash string, expires int64) string {
	return "?" + url.Values{"project": {project}, "expires": {strconv.FormatInt(expires, 10)}, "signature": {u.sign(project, template, hash, expires)}}.Encode()
}

// TestStartedBuild: what the SDKs send is taken, their own notes in steps are ignored,
// and what else is unknown or wrong is refused, without repeating credentials.
func TestStartedBuild(t *testing.T) {
	read := func(body string) (build.Definition, error) {
		var b startedBuild
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		if err := decode(r, &b); err != nil {
			return build.Definition{}, err
		}
		return b.definition()
	}
	d, err := read(`{"fromImage":"debian:12","fromImageRegistry":{"type":"aws","awsAccessKeyId":"k","awsSecretAccessKey":"s","awsRegion":"r"},"startCmd":"x","readyCmd":"y","force":true,
		"steps":[{"type":"COPY","args":["a","b","",""],"filesHash":"` + strings.Repeat("0", 64) + `","force":true,"forceUpload":true,"resolveSymlinks":false,"gzip":true},{"type":"RUN","args":["true",null]}]}`)
	if err != nil || d.FromImage != "debian:12" || d.Credentials.AWSSecret != "s" || d.StartCmd != "x" || d.ReadyCmd != "y" || !d.Force || len(d.Steps) != 2 || !d.Steps[0].Force || !slices.Equal(d.Steps[1].Args, []string{"true", ""}) {
		t.Errorf("got %+v, %v", d, err)
	}
	for _, image := range []string{"e2bdev/base", "e2bdev/base:latest", "docker.io/e2bdev/base"} {
		if d, err := read(`{"fromImage":"` + image + `"}`); err != nil || d.FromImage != "" || d.FromTemplate != "base" {
			t.Errorf("%s: got %+v, %v, want the server's base", image, d, err)
		}
	}
	const password = "a-password-that-nobody-reads"
	for _, bad := range []string{
		`{"fromImage":"x","surprise":1}`, `{"steps":{}}`, `{"steps":[{"type":7}]}`, `[]`,
		`{"fromImageRegistry":{"type":"registry","username":"u"}}`, `{"fromImageRegistry":{"type":"ftp","username":"u","password":"` + password + `"}}`,
		`{"fromImageRegistry":{"type":"registry","username":7,"password":"` + password + `"}}`, `{"fromImageRegistry":"` + password + `"}`,
		`{"fromImageRegistry":{"type":"gcp","serviceAccountJson":{"private_key":"` + password + `"}}}`,
		`{"steps":[{"type":"RUN","args":[` + strings.Repeat(`"x",`, maxArguments) + `"x"]}]}`,
	} {
		if _, err := read(bad); !errors.Is(err, errRequest) || strings.Contains(err.Error(), password) {
			t.Errorf("%.200s: %v", bad, err)
		}
	}
}

// TestBuildLogsFromATime: from a time on or backwards from it, entries are neither lost
// nor repeated, over more lines than a request reads at once.
func TestBuildLogsFromATime(t *testing.T) {
	start := time.UnixMilli(1_800_000_000_000)
	var all []build.Entry
	for i := range 250 {
		all = append(all, build.Entry{Time: start.Add(time.Duration(i) * time.Millisecond), Message: strconv.Itoa(i)})
	}
	read := func(l build.Logs) ([]build.Entry, error) {
		return all[min(l.Offset, len(all)):min(l.Offset+l.Limit, len(all))], nil
	}
	at := func(i int64) int64 { return start.UnixMilli() + i }
	for _, tt := range []struct {
		since             int64
		bounded, backward bool
		limit             int
		first, last, n    int
	}{
		{0, false, false, 100, 0, 99, 100},
		{at(120), true, false, 10, 120, 129, 10},
		{at(245), true, false, 100, 245, 249, 5},
		{at(120), true, true, 10, 120, 111, 10},
		{at(3), true, true, 100, 3, 0, 4},
		{0, false, true, 5, 249, 245, 5},
	} {
		got, err := selectLogs(tt.since, tt.bounded, tt.backward, build.Logs{Limit: tt.limit}, read)
		if err != nil || len(got) != tt.n || got[0].Message != strconv.Itoa(tt.first) || got[len(got)-1].Message != strconv.Itoa(tt.last) {
			t.Errorf("%+v: got %d entries, %v", tt, len(got), err)
		}
	}
}

// archiveOf returns a tar archive with one file.
func archiveOf(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
