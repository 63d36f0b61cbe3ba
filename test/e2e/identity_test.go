package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// cell runs python code in the sandbox's interpreter and returns what it
// prints, one value a line.
func (b *box) cell(code string) []string {
	b.s.t.Helper()
	body, err := json.Marshal(map[string]string{"code": code})
	if err != nil {
		b.s.t.Fatal(err)
	}
	r := b.run("curl -sS --max-time 170 127.0.0.1:49999/execute -d '" + strings.ReplaceAll(string(body), "'", `'\''`) + "'")
	var out strings.Builder
	for l := range strings.Lines(r.stdout) {
		var e struct{ Type, Text, Name, Value string }
		if err := json.Unmarshal([]byte(l), &e); err != nil || e.Type == "error" {
			b.s.t.Fatalf("cell: got %q, %v", r.stdout+r.stderr, err)
		}
		if e.Type == "stdout" {
			out.WriteString(e.Text)
		}
	}
	if r.exit != 0 || !strings.Contains(r.stdout, "end_of_execution") {
		b.s.t.Fatalf("cell: got %+v", r)
	}
	return strings.Split(strings.TrimSpace(out.String()), "\n")
}

// TestCopiesShareNoRandomState starts sandboxes from the same memory snapshot and
// compares every source of randomness. The attack: code in one sandbox predicts keys
// and tokens of another.
func TestCopiesShareNoRandomState(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--snapshots")
	// Until the snapshot exists, sandboxes boot cold and are not copies.
	s.await("made snapshot of template")

	// Each line: a name, and a value that must differ between two sandboxes.
	const draw = `
for name, value in {
    "random": random.random(), "numpy": np.random.rand(), "secrets": secrets.token_hex(8), "urandom": os.urandom(8).hex(),
    "uuid1": str(uuid.uuid1())[14:], "uuid4": uuid.uuid4(), "node": uuid.getnode(), "tempfile": next(tempfile._get_candidate_names()),
    "openssl": ssl.RAND_bytes(8).hex(), "openssl private": private(), "generator": np.random.default_rng().random(),
}.items(): print(name, value)`
	const load = `
import ctypes, os, random, secrets, ssl, tempfile, uuid
import numpy as np
crypto = ctypes.CDLL("libcrypto.so.3")
def private():
    b = ctypes.create_string_buffer(8)
    assert crypto.RAND_priv_bytes(b, 8) == 1
    return b.raw.hex()
`
	differ := func(t *testing.T, boxes []*box, lines [][]string) {
		t.Helper()
		for i := range boxes {
			for j := range i {
				for k := range lines[i] {
					if name, _, ok := strings.Cut(lines[i][k], " "); !ok || len(lines[i]) != len(lines[j]) {
						t.Fatalf("got %q and %q", lines[i], lines[j])
					} else if lines[i][k] == lines[j][k] {
						t.Errorf("%s of %s and %s: both have %s", name, boxes[j].id, boxes[i].id, lines[i][k])
					}
				}
			}
		}
	}

	t.Run("of a template", func(t *testing.T) {
		var boxes []*box
		var lines [][]string
		for range 3 {
			b := s.sandbox(nil)
			boxes = append(boxes, b)
			lines = append(lines, b.cell(load+draw+`
print("hash", hash("x"))
print("address", id(object()))
print("machine", open("/etc/machine-id").read().strip())
import urllib.request, json
print("context", json.load(urllib.request.urlopen("http://127.0.0.1:49999/contexts"))[0]["id"])`))
		}
		differ(t, boxes, lines)
		for _, b := range boxes {
			if got := b.cell(`import os; print(os.environ["E2B_SANDBOX_ID"], len(In), os.getcwd())`); fmt.Sprint(got) != "["+b.id+" 3 /home/user]" {
				t.Errorf("got %q", got)
			}
		}
	})

	t.Run("of a snapshot of one that has run code", func(t *testing.T) {
		first := s.sandbox(nil)
		first.cell(load + "random.seed(1); np.random.seed(1); mine = random.Random(1)" + draw)
		var snapshot struct{ SnapshotID string }
		req, err := http.NewRequest("POST", "http://"+s.web+"/sandboxes/"+first.id+"/snapshots", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-KEY", s.key)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		err = json.NewDecoder(resp.Body).Decode(&snapshot)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusCreated {
			t.Fatalf("snapshot: got %s, %v", resp.Status, err)
		}
		boxes := []*box{first}
		lines := [][]string{first.cell(draw)}
		for range 2 {
			status, b, err := s.create(map[string]any{"templateID": snapshot.SnapshotID})
			if err != nil || status != http.StatusCreated {
				t.Fatalf("create from snapshot: got %d, %v", status, err)
			}
			boxes = append(boxes, b)
			lines = append(lines, b.cell(draw))
		}
		differ(t, boxes, lines)
		// A generator in the program's memory shows that they are copies.
		if a, b := boxes[1].cell("print(mine.random())"), boxes[2].cell("print(mine.random())"); a[0] != b[0] {
			t.Errorf("got %q and %q of the same generator: these are no copies, and the test shows nothing", a, b)
		}
	})
}
