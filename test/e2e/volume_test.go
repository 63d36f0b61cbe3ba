package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// volumeOf creates a volume and returns its ID and token.
func (s *server) volumeOf(name string) (id, token string) {
	s.t.Helper()
	status, _, b := s.project("POST", "/volumes", fmt.Sprintf(`{"name": %q}`, name))
	var v struct{ VolumeID, Token string }
	if err := json.Unmarshal(b, &v); err != nil || status != http.StatusCreated {
		s.t.Fatalf("create volume: %d %s", status, b)
	}
	return v.VolumeID, v.Token
}

// volumeFile reads a file of a volume by its token.
func (s *server) volumeFile(id, token, path string) (status int, text string) {
	s.t.Helper()
	req, err := http.NewRequest("GET", "http://"+s.web+"/volumecontent/"+id+"/file?path="+url.QueryEscape(path), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// diskOf returns the mounts and loop devices of the volumes of a data directory.
func diskOf(t testing.TB, data string) (mounts, loops int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, " "+data+"/volumes/") {
			mounts++
		}
	}
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), data+"/volumes/") {
			loops++
		}
	}
	return mounts, loops
}

// TestRefusedUploadIsAnswered: a client that sends all of a large file before it reads
// the answer gets the answer, although the server refuses the file at once. So does a
// client that connects some time before it sends a request: on a busy machine the SDK
// copies a large file for more than ten seconds in between.
func TestRefusedUploadIsAnswered(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir())
	late, err := net.Dial("tcp", s.web)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	connected := time.Now()
	id, token := s.volumeOf("data")
	c, err := net.Dial("tcp", s.web)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const size = 64 << 20
	fmt.Fprintf(c, "PUT /volumecontent/%s/file?path=/f&mode=none HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n", id, s.web, token, size)
	time.Sleep(time.Second) // the server has answered
	block := make([]byte, 1<<20)
	for range size / len(block) {
		if _, err := c.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusBadRequest || !resp.Close {
		t.Errorf("answer: %s, %q, %v; want 400, and the connection's end", resp.Status, b, err)
	}
	time.Sleep(time.Until(connected.Add(15 * time.Second)))
	fmt.Fprintf(late, "GET /volumecontent/%s/path?path=/ HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", id, s.web, token)
	resp, err = http.ReadResponse(bufio.NewReader(late), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("answer to the late request: %s", resp.Status)
	}
}

// TestVolumesSurvive: a volume, and a sandbox that mounts it, survive a kill and a
// stop of the server. In the end no mount or loop device is left.
func TestVolumesSurvive(t *testing.T) {
	data := t.TempDir()
	s := start(t, data)
	key := s.key
	id, token := s.volumeOf("data")
	mount := map[string]any{"volumeMounts": []map[string]string{{"name": "data", "path": "/mnt/data"}}}
	b := s.sandbox(mount)
	bystander := s.sandbox(nil) // started while the volume was mounted
	// The first beat is later than the kill may be: the file exists before.
	b.run("echo before >/mnt/data/f; touch /mnt/data/beats; (while sleep 0.1; do echo beat >>/mnt/data/beats; done) >/dev/null 2>&1 &")

	again := func(how string, sig syscall.Signal) {
		t.Helper()
		_ = s.kill(sig)
		if sig == syscall.SIGTERM {
			eventually(t, how+": no mount is left", func() bool { m, _ := diskOf(t, data); return m == 0 })
		}
		s = start(t, data)
		s.key = key
		b.s, bystander.s = s, s
		if r := b.run("cat /mnt/data/f; n=$(wc -l </mnt/data/beats); for i in $(seq 600); do sleep 0.1; [ $(wc -l </mnt/data/beats) -gt $n ] && echo beats && break; done; echo " + how + " >>/mnt/data/f"); !strings.HasSuffix(r.stdout, "beats\n") {
			t.Errorf("%s: the sandbox: %+v; its commands: %s", how, r, s.mustCLI("sandbox", "commands", b.id))
		}
		if status, text := s.volumeFile(id, token, "/f"); status != 200 || !strings.HasSuffix(text, how+"\n") {
			t.Errorf("%s: the file by the API: %d %q", how, status, text)
		}
		if status, _, body := s.project("DELETE", "/volumes/"+id, ""); status != http.StatusConflict {
			t.Errorf("%s: delete while it is mounted: %d %s", how, status, body)
		}
		// The old loop device is detached just after its last mount.
		eventually(t, how+": one loop device", func() bool { _, l := diskOf(t, data); return l == 1 })
	}
	again("killed", syscall.SIGKILL)
	again("stopped", syscall.SIGTERM)
	again("killed-again", syscall.SIGKILL)

	if status, _, body := s.project("DELETE", "/sandboxes/"+b.id, ""); status != http.StatusNoContent {
		t.Fatalf("kill: %d %s", status, body)
	}
	if _, text := s.volumeFile(id, token, "/f"); text != "before\nkilled\nstopped\nkilled-again\n" {
		t.Errorf("after the sandbox: %q", text)
	}
	if r := s.sandbox(mount).run("head -1 /mnt/data/f"); r.stdout != "before\n" {
		t.Errorf("another sandbox: %+v", r)
	}
	for _, line := range strings.Split(s.mustCLI("sandbox", "list"), "\n")[1:] {
		if f := strings.Fields(line); len(f) > 0 && f[0] != bystander.id {
			s.mustCLI("sandbox", "kill", f[0])
		}
	}
	if status, _, body := s.project("DELETE", "/volumes/"+id, ""); status != http.StatusNoContent {
		t.Fatalf("delete: %d %s", status, body)
	}
	if status, text := s.volumeFile(id, token, "/f"); status != http.StatusNotFound {
		t.Errorf("the token of a deleted volume: %d %q", status, text)
	}
	eventually(t, "of a deleted volume no mounts and loop devices are left", func() bool {
		m, l := diskOf(t, data)
		return m == 0 && l == 0
	})
	eventually(t, "nor files", func() bool {
		es, err := os.ReadDir(filepath.Join(data, "volumes"))
		if err != nil {
			t.Fatal(err)
		}
		return len(es) == 0
	})
	if r := bystander.run("echo alive"); r.stdout != "alive\n" {
		t.Errorf("the bystander: %+v", r)
	}
	log := s.mustCLI("audit", "list", "--object", id)
	for _, verb := range []string{"volume.create", "volume.mount", "volume.delete"} {
		if !strings.Contains(log, verb) {
			t.Errorf("%s is not on the record:\n%s", verb, log)
		}
	}
}
