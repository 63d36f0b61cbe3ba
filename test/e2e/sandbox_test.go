package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

var client = &http.Client{Timeout: 2 * time.Minute}

// A box is a sandbox that is used over the SDKs' wire protocol.
type box struct {
	s               *server
	id              string
	access, traffic string
}

// sandbox creates a sandbox. It outlives the test unless the body sets a timeout. The
// body's fields are E2B's.
func (s *server) sandbox(body map[string]any) *box {
	s.t.Helper()
	if body == nil {
		body = map[string]any{}
	}
	body["templateID"] = "base"
	if _, ok := body["timeout"]; !ok {
		body["timeout"] = 3600
	}
	status, b, err := s.create(body)
	if err != nil || status != http.StatusCreated {
		s.t.Fatalf("create sandbox: status %d, %v", status, err)
	}
	return b
}

func (s *server) create(body map[string]any) (status int, b *box, err error) {
	in, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequest("POST", "http://"+s.web+"/v2/sandboxes", bytes.NewReader(in))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("X-API-KEY", s.key)
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	var out struct{ SandboxID, EnvdAccessToken, TrafficAccessToken string }
	err = json.NewDecoder(resp.Body).Decode(&out)
	return resp.StatusCode, &box{s, out.SandboxID, out.EnvdAccessToken, out.TrafficAccessToken}, err
}

func (b *box) request(method, path string, body io.Reader) *http.Request {
	req, err := http.NewRequest(method, "http://"+b.s.web+path, body)
	if err != nil {
		b.s.t.Fatal(err)
	}
	req.Header.Set("E2b-Sandbox-Id", b.id)
	req.Header.Set("E2b-Sandbox-Port", "49983")
	req.Header.Set("X-Access-Token", b.access)
	return req
}

// A result is the output and exit code of a command.
type result struct {
	stdout, stderr string
	exit           int
	failure        string // of the process, such as "signal: killed"
}

// run runs a command as the SDKs do, within three minutes, and fails the test if
// it cannot be run.
func (b *box) run(command string) result {
	b.s.t.Helper()
	r, err := b.try(command, 3*time.Minute)
	if err != nil {
		b.s.t.Fatalf("run %q in %s: %v", command, b.id, err)
	}
	return r
}

// try speaks the streaming Connect protocol: envelopes of a flag byte, a length of four
// bytes (big endian) and JSON.
func (b *box) try(command string, timeout time.Duration) (r result, err error) {
	msg, err := json.Marshal(map[string]any{
		"process": map[string]any{"cmd": "/bin/bash", "args": []string{"-l", "-c", command}}, "stdin": false,
	})
	if err != nil {
		return r, err
	}
	var body bytes.Buffer
	body.WriteByte(0)
	_ = binary.Write(&body, binary.BigEndian, uint32(len(msg)))
	body.Write(msg)
	req := b.request("POST", "/process.Process/Start", &body)
	req.Header.Set("Content-Type", "application/connect+json")
	req.Header.Set("Connect-Protocol-Version", "1")
	req.Header.Set("Connect-Timeout-Ms", fmt.Sprint(timeout.Milliseconds()))
	c := &http.Client{Timeout: timeout + 30*time.Second}
	resp, err := c.Do(req)
	if err != nil {
		return r, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return r, fmt.Errorf("status %s: %s", resp.Status, text)
	}
	ended := false
	for {
		var head [5]byte
		if _, err := io.ReadFull(resp.Body, head[:]); err != nil {
			return r, fmt.Errorf("read event: %w", err)
		}
		data := make([]byte, binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(resp.Body, data); err != nil {
			return r, fmt.Errorf("read event: %w", err)
		}
		if head[0]&2 != 0 {
			if !ended {
				return r, fmt.Errorf("the stream ended without an end event: %s", data)
			}
			return r, nil
		}
		var m struct {
			Event struct {
				Data *struct{ Stdout, Stderr string }
				End  *struct {
					ExitCode int
					Error    string
				}
			}
		}
		if err := json.Unmarshal(data, &m); err != nil {
			return r, err
		}
		if d := m.Event.Data; d != nil {
			out, _ := base64.StdEncoding.DecodeString(d.Stdout)
			errs, _ := base64.StdEncoding.DecodeString(d.Stderr)
			r.stdout, r.stderr = r.stdout+string(out), r.stderr+string(errs)
		}
		if e := m.Event.End; e != nil {
			r.exit, r.failure, ended = e.ExitCode, e.Error, true
		}
	}
}
