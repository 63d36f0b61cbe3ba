package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestAttackers has holders of one credential try what needs another.
func TestAttackers(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir())
	alice, aliceKey := s.inbox("alice")
	bob, bobKey := s.inbox("bob")
	base := "http://" + s.web
	var a struct{ ID, Digest string }
	if status, err := call(client, "POST", base+"/v1/inboxes/"+alice+"/messages", aliceKey,
		map[string]any{"to": []string{bob}, "subject": "s", "text": "x"}, &a); err != nil || status != 202 {
		t.Fatalf("propose: %d, %v", status, err)
	}
	approve := map[string]any{"version": 1, "digest": a.Digest, "approve": true}
	tests := []struct {
		name, method, path, key string
		in                      any
		want                    int
	}{
		{"an inbox's key approves its own action", "POST", "/v1/actions/" + a.ID + "/decision", aliceKey, approve, 403},
		{"another inbox's key approves", "POST", "/v1/actions/" + a.ID + "/decision", bobKey, approve, 403},
		{"the project's key approves", "POST", "/v1/actions/" + a.ID + "/decision", s.key, approve, 403},
		{"nobody approves", "POST", "/v1/actions/" + a.ID + "/decision", "", approve, 401},
		{"an inbox's key resolves", "POST", "/v1/actions/" + a.ID + "/resolution", aliceKey, map[string]any{"version": 1, "state": "done", "reason": "x"}, 403},
		{"another inbox reads the action", "GET", "/v1/actions/" + a.ID, bobKey, nil, 404},
		{"another inbox reads the mail", "GET", "/v1/inboxes/" + alice + "/messages", bobKey, nil, 403},
		{"the project reads the mail", "GET", "/v1/inboxes/" + alice + "/messages", s.key, nil, 403},
		{"another inbox sends from it", "POST", "/v1/inboxes/" + alice + "/messages", bobKey, map[string]any{"to": []string{bob}, "text": "x"}, 403},
		{"an agent reads the audit", "GET", "/v1/audit", aliceKey, nil, 403},
		{"an agent makes an inbox", "POST", "/v1/inboxes", aliceKey, map[string]any{"address": "carol"}, 403},
		{"an agent lists sandboxes", "GET", "/v2/sandboxes", aliceKey, nil, 401},
		{"a wrong key", "GET", "/v1/inboxes", "pib_" + strings.Repeat("A", 26), nil, 401},
	}
	for _, f := range []string{"subject", "in_reply_to"} {
		in := map[string]any{"to": []string{bob}, "text": "x", f: "<a@b>\r\nBcc: eve@example.com"}
		tests = append(tests, struct {
			name, method, path, key string
			in                      any
			want                    int
		}{"CR LF in " + f, "POST", "/v1/inboxes/" + alice + "/messages", aliceKey, in, 400})
	}
	for _, f := range []string{"to", "cc", "bcc"} {
		in := map[string]any{"to": []string{bob}, "text": "x"}
		in[f] = []string{"x@example.com\r\nBcc: eve@example.com"}
		tests = append(tests, struct {
			name, method, path, key string
			in                      any
			want                    int
		}{"CR LF in " + f, "POST", "/v1/inboxes/" + alice + "/messages", aliceKey, in, 400})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := call(client, tt.method, base+tt.path, tt.key, tt.in, nil); err != nil || got != tt.want {
				t.Errorf("status %d, %v; want %d", got, err, tt.want)
			}
		})
	}
	if out := s.mustCLI("pending"); strings.Count(out, "\nact_")+strings.Count(out[:4], "act_") != 1 {
		t.Errorf("pending afterwards:\n%s", out)
	}

	t.Run("the SMTP port relays nothing", func(t *testing.T) {
		err := s.bring("x@example.com", "someone@elsewhere.example", "Subject: x\r\n\r\nx\r\n")
		if err == nil || !strings.HasPrefix(err.Error(), "55") {
			t.Errorf("relaying: %v, want a 55x", err)
		}
	})
	t.Run("a forged Host", func(t *testing.T) {
		req, _ := http.NewRequest("GET", base+"/console/signin", nil)
		req.Host = "attacker.example"
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusMisdirectedRequest {
			t.Errorf("status %s, want 421", resp.Status)
		}
	})
	t.Run("a link that is only fetched", func(t *testing.T) {
		for range 3 {
			resp, err := client.Get(s.link)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("fetching the set-up link: %s", resp.Status)
			}
		}
	})
	t.Run("no key is in the log", func(t *testing.T) {
		log := strings.ReplaceAll(s.log.String(), s.key, "") // shown once, on stdout
		for _, k := range []string{"e2b_", aliceKey, bobKey, strings.Repeat("A", 26)} {
			if strings.Contains(log, k) {
				t.Errorf("the log holds %q", k)
			}
		}
	})
}

// TestSandboxAttackers runs hostile code in a sandbox: fork bombs, full disks and
// floods. The server and a neighbour must go on answering.
func TestSandboxAttackers(t *testing.T) {
	s := start(t, t.TempDir(), "--memory", "512", "--disk", "256", "--processes", "200")
	b := s.sandbox(nil)
	neighbour := s.sandbox(nil)
	refused := func(name, command string) {
		t.Run(name, func(t *testing.T) {
			if r := b.run(command); r.exit == 0 {
				t.Errorf("%s succeeded: %s", command, r.stdout)
			}
		})
	}
	refused("is not root", `[ "$(id -u)" = 0 ]`)
	refused("does not read root's files", `cat /etc/shadow`)
	refused("does not use the guest as the host does", `curl -sf -m 5 -X POST http://127.0.0.1:49983/init -d '{}'`)
	refused("does not read files through the guest", `curl -sf -m 5 'http://127.0.0.1:49983/files?path=/etc/shadow&username=root'`)
	refused("nor at its address", `curl -sf -m 5 -H 'X-Postern-Channel: x' 'http://10.0.0.2:49983/files?path=/etc/shadow&username=root'`)
	refused("does not kill the guest", `kill -9 1 2`)
	refused("has no raw sockets", `sudo python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'`)
	refused("mounts nothing", `sudo mount -t tmpfs none /mnt`)
	refused("makes no device", `sudo mknod /tmp/sda b 8 0 && sudo cat /tmp/sda`)

	for name, req := range map[string]*http.Request{
		"another sandbox's token":      b.request("GET", "/files?path=/etc/hostname", nil),
		"no token":                     b.request("GET", "/files?path=/etc/hostname", nil),
		"the host's path":              b.request("POST", "/init", strings.NewReader("{}")),
		"the host's path, disguised":   b.request("POST", "//init", strings.NewReader("{}")),
		"a channel key from outside":   b.request("POST", "/filesystem.Filesystem/Stat", strings.NewReader("{}")),
		"a port without its own token": b.request("GET", "/", nil),
	} {
		t.Run(name, func(t *testing.T) {
			switch name {
			case "another sandbox's token":
				req.Header.Set("X-Access-Token", neighbour.access)
			case "no token", "a channel key from outside":
				req.Header.Del("X-Access-Token")
				req.Header.Set("X-Postern-Channel", strings.Repeat("0", 64))
			case "a port without its own token":
				req.Header.Set("E2b-Sandbox-Port", "8000")
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != 401 && resp.StatusCode != 403 && resp.StatusCode != 404 {
				t.Errorf("status %s", resp.Status)
			}
		})
	}

	for name, command := range map[string]string{
		"fork bomb":        `b() { b | b & }; b; sleep 60`,
		"root's fork bomb": `sudo sh -c 'b() { b | b & }; b; sleep 60'`,
		"memory bomb": `python3 -c 'x=[]
while True: x.append(bytearray(10**7))'`,
		"disk filler": `cat /dev/zero > /home/user/full; cat /dev/zero > /tmp/full; cat /dev/zero > /dev/shm/full`,
	} {
		t.Run(name, func(t *testing.T) {
			victim := s.sandbox(nil)
			before := s.memoryMB(victim.id)
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = victim.try(command, 8*time.Second) })
			wg.Go(func() {
				// The guest survives the attack in its own sandbox and still answers.
				time.Sleep(4 * time.Second)
				resp, err := client.Do(victim.request(http.MethodGet, "/health", nil))
				if err != nil {
					t.Errorf("the victim's guest: %v", err)
					return
				}
				resp.Body.Close()
				if resp.StatusCode != http.StatusNoContent {
					t.Errorf("the victim's guest: %s", resp.Status)
				}
			})
			// The neighbour answers throughout, and the host's memory for the attacked
			// sandbox stays within the limit of one sandbox.
			slowest, lost, answers := time.Duration(0), 0, 0
			for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
				begin := time.Now()
				if r := neighbour.run("echo alive"); r.stdout != "alive\n" {
					t.Errorf("the neighbour said %q", r.stdout)
				}
				slowest, lost, answers = max(slowest, time.Since(begin)), max(lost, s.memoryMB(victim.id)-before), answers+1
			}
			wg.Wait()
			t.Logf("the neighbour answered %d times, the slowest took %v; the host gave %d MiB at most", answers, slowest, lost)
			if answers < 2 { // that it waited to the end of the bomb
				t.Errorf("the neighbour noticed: %d answers", answers)
			}
			if lost > 1500 {
				t.Errorf("the host noticed: %d MiB", lost)
			}
			s.mustCLI("sandbox", "kill", victim.id)
		})
	}
}

// memoryMB returns the host's memory for a sandbox, in MiB: that of its cgroup,
// which includes kernel memory, and that of the server. The machine's free memory
// would not do: other processes use it too.
func (s *server) memoryMB(id string) int {
	s.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "RssAnon:")
	kb, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		s.t.Fatal(err)
	}
	found := false
	// A sandbox that was prepared before it was asked for has the name that it had then.
	place := id
	if at, err := os.Readlink(filepath.Join(s.data, "sandboxes", id)); err == nil {
		place = at
	}
	for _, dir := range leftovers(s.t, place) {
		for _, file := range []string{"memory.usage_in_bytes", "memory.current"} { // of the first and the second version
			if b, err := os.ReadFile(filepath.Join(dir, file)); err == nil {
				n, err := strconv.Atoi(strings.TrimSpace(string(b)))
				if err != nil {
					s.t.Fatal(err)
				}
				kb, found = kb+n>>10, true
			}
		}
	}
	if !found {
		s.t.Errorf("no cgroup counts the memory of %s", id)
	}
	return kb / 1024
}

// TestLimits: malformed, oversized and late requests get the right status and
// an error text, and leave nothing behind.
func TestLimits(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--max-sandboxes", "1", "--max-timeout", "1h")
	tests := []struct {
		name string
		body map[string]any
		want int
	}{
		{"unknown template", map[string]any{"templateID": "nope"}, 404},
		{"unknown field", map[string]any{"templateID": "base", "gpu": true}, 400},
		{"a malformed identity token", map[string]any{"templateID": "base", "iam": map[string]any{"tokens": map[string]any{"x": 1}}}, 400},
		{"timeout too long", map[string]any{"templateID": "base", "timeout": 3601}, 400},
		{"timeout zero", map[string]any{"templateID": "base", "timeout": 0}, 400},
		{"timeout beyond numbers", map[string]any{"templateID": "base", "timeout": int64(1) << 62}, 400},
		{"denyOut with a name", map[string]any{"templateID": "base", "network": map[string]any{"denyOut": []string{"example.com"}}}, 400},
		{"an inbox that is not there", map[string]any{"templateID": "base", "metadata": map[string]string{"postern.inbox": "nobody@agents.internal"}}, 400},
		{"a body that is too large", map[string]any{"templateID": "base", "metadata": map[string]string{"x": strings.Repeat("x", 2<<20)}}, 413},
		{"metadata that is too large", map[string]any{"templateID": "base", "metadata": map[string]string{"x": strings.Repeat("x", 70<<10)}}, 400},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got, _, _ := s.create(tt.body); got != tt.want {
				t.Errorf("status %d, want %d", got, tt.want)
			}
		})
	}
	b := s.sandbox(map[string]any{"timeout": 600})
	if got, _, _ := s.create(map[string]any{"templateID": "base"}); got != http.StatusTooManyRequests {
		t.Errorf("one too many: status %d, want 429", got)
	}
	// It times out after a second, which makes room again.
	if status, _, body := s.project("POST", "/sandboxes/"+b.id+"/timeout", `{"timeout": 1}`); status != http.StatusNoContent {
		t.Fatalf("timeout: %d %s", status, body)
	}
	eventually(t, "its end", func() bool {
		status, _, _ := s.project("GET", "/sandboxes/"+b.id, "")
		return status == http.StatusNotFound && len(leftovers(t, b.id)) == 0
	})
	if _, err := b.try("true", 5*time.Second); err == nil {
		t.Error("a sandbox answers after its time")
	}
	s.sandbox(nil)
}
