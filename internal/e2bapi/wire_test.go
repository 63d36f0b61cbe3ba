package e2bapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
)

func TestSandboxesTellTheNameThatWasAskedFor(t *testing.T) {
	for asked, want := range map[string]string{
		"base": "base", "my-app:v1": "my-app", "default/my-app:v2": "my-app", "default/snap:default": "snap",
		"abcdefghij234567abcd": "", "abcdefghij234567abcd:v1": "", "sabcdefghij0123456789:default": "",
	} {
		m := listed(sandbox.Info{Asked: asked, Template: "b0123"})
		got, _ := m["alias"].(string)
		if m["templateID"] != asked || got != want {
			t.Errorf("asked for %s: templateID %v, alias %q, want %q", asked, m["templateID"], got, want)
		}
	}
}

func TestBodiesHoldOneObject(t *testing.T) {
	for body, ok := range map[string]bool{
		"": true, `{"name":"x"}`: true, " {\"name\":\"x\"} \n": true,
		`{"name":"x"}{"name":"y"}`: false, `{"name":"x"} x`: false, `{"name":"x"}]`: false, `{"name":"x"}null`: false, `[]`: false, `{"other":1}`: false,
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		var v struct{ Name string }
		if err := decode(r, &v); (err == nil) != ok {
			t.Errorf("%s: %v, want it accepted: %v", body, err, ok)
		}
	}
}

func TestMetricsWantARange(t *testing.T) {
	later := fmt.Sprint(time.Now().Add(time.Hour).Unix())
	for q, ok := range map[string]bool{"": true, "start=5": true, "start=5&end=5": true, "end=5": true, "start=6&end=5": false, "start=" + later: false, "start=x": false} {
		v, _ := url.ParseQuery(q)
		if _, _, err := interval(v); (err == nil) != ok {
			t.Errorf("%q: %v, want it accepted: %v", q, err, ok)
		}
	}
}

func TestCreateRefusesAsE2BDoes(t *testing.T) {
	s := serveTemplates(t)
	for _, c := range []struct {
		path, body string
		status     int
		text       string
	}{
		{"/sandboxes", `{"templateID":"base","secure":false,"network":{"allowPublicTraffic":false}}`, 400, "'secure' flag"},
		{"/sandboxes", `{"templateID":"base","network":{"allowPublicTraffic":false}}`, 400, "'secure' flag"},
		{"/v2/sandboxes", `{"templateID":"no-such-template"}`, 404, "no-such-template"},
		{"/sandboxes", `{"templateID":"no-such-template"}`, 404, "no-such-template"},
		{"/v2/sandboxes", `{"templateID":"` + strings.Repeat("a", 300) + `"}`, 400, "256 bytes"},
		{"/v2/sandboxes", `{"templateID":"base"} {"secure":true}`, 400, "behind"},
	} {
		status, b := s.call(t, 0, http.MethodPost, c.path, c.body)
		if status != c.status || !strings.Contains(string(b), c.text) {
			t.Errorf("%s %s: %d %s, want %d and %q", c.path, c.body, status, b, c.status, c.text)
		}
	}
}

// TestImportsNeedAKeyAndAnImage: the body of an import has gigabytes, so it is read by
// nobody before its caller is known.
func TestImportsNeedAKeyAndAnImage(t *testing.T) {
	s := serveTemplates(t)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.http.URL+"/templates/x/import", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	if status, b := answer(t, r); status != 401 {
		t.Errorf("without a key: %d %s, want 401", status, b)
	}
	if status, b := s.call(t, 0, http.MethodPost, "/templates/x/import", "text"); status != 400 {
		t.Errorf("without an image: %d %s, want 400", status, b)
	}
	if status, b := s.call(t, 0, http.MethodGet, "/templates", nil); status != 200 || string(b) != "[]" {
		t.Errorf("afterwards there are %d %s, want none", status, b)
	}
}

// TestSnapshotsHaveOneRowForEachName: as in E2B a name has one row, whatever its tags,
// and names come without tag.
func TestSnapshotsHaveOneRowForEachName(t *testing.T) {
	s := serveTemplates(t)
	err := s.db.Update(t.Context(), func(tx *store.Tx) error {
		for i, name := range []string{"app:default", "app:v2", "", "other:v1", ""} {
			_, err := tx.ExecContext(t.Context(), `insert into snapshot (id, project_id, sandbox_id, template, name, cpus, memory_mb, disk_mb, created_at, server_id)
				values ($1, $2, $3, 'base', $4, 1000, 512, 512, $5, '')`, fmt.Sprintf("s%020d", i), s.ids[0], fmt.Sprintf("i%020d", i%2), name, store.Time(time.Unix(int64(1000+i), 0)))
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	id := func(i int) string { return fmt.Sprintf("s%020d:default", i) }
	for q, want := range map[string][]string{
		"":                                {id(4), "default/other:v1", id(2), "default/app:v2"},
		"name=app":                        {"default/app:v2"},
		"name=app:default":                {"default/app:default"},
		"name=default/other":              {"default/other:v1"},
		"name=none":                       {},
		"sandboxID=i00000000000000000000": {id(4), id(2), "default/app:default"},
	} {
		var got []string
		next := ""
		for range 10 { // pages of two
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.http.URL+"/snapshots?limit=2&nextToken="+next+"&"+q, http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("X-Api-Key", s.keys[0].Reveal())
			res, err := http.DefaultTransport.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			var page []struct {
				SnapshotID string
				Names      []string
			}
			err = json.NewDecoder(res.Body).Decode(&page)
			res.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range page {
				got = append(got, p.SnapshotID)
				for _, n := range p.Names {
					if strings.Contains(n, ":") || !strings.HasPrefix(p.SnapshotID, n+":") {
						t.Errorf("%s has the name %q", p.SnapshotID, n)
					}
				}
			}
			if next = res.Header.Get("X-Next-Token"); next == "" {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", q, got, want)
		}
	}
}
