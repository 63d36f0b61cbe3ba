package e2bapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"postern/internal/sandbox"
)

// TestBoundSandboxServesProcessesAndFiles: a caller with all tokens of a bound sandbox reaches
// its processes and files, which the guest serves in its view, and nothing else.
func TestBoundSandboxServesProcessesAndFiles(t *testing.T) {
	echo := inside(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "inside") })
	d := serveData(t, Config{Domain: "boxes.example", PublicPorts: true}, map[uint16]string{sandbox.GuestPort: echo, 3000: echo, InterpreterPort: echo, 50005: echo})
	d.boxes.traffic = sandbox.Traffic{Public: true, MCP: true, Contract: "report@sha256:abc"}
	all := http.Header{"X-Access-Token": {"access-" + testID}, "E2b-Traffic-Access-Token": {"traffic-" + testID}}
	for _, c := range []struct {
		port         int
		method, path string
		want         int
	}{
		{sandbox.GuestPort, "POST", "/process.Process/Start", http.StatusOK},
		{sandbox.GuestPort, "POST", "/process.Process/List", http.StatusOK},
		{sandbox.GuestPort, "GET", "/health", http.StatusOK},
		{sandbox.GuestPort, "GET", "/files?path=/etc/passwd", http.StatusOK},
		{sandbox.GuestPort, "POST", "/files?path=/work/x", http.StatusOK},
		{sandbox.GuestPort, "POST", "/filesystem.Filesystem/ListDir", http.StatusOK},
		{sandbox.GuestPort, "POST", "/filesystem.Filesystem/Remove", http.StatusOK},
		{sandbox.GuestPort, "POST", "/filesystem.Filesystem/WatchDir", http.StatusForbidden},
		{sandbox.GuestPort, "POST", "/filesystem.Filesystem/CreateWatcher", http.StatusForbidden},
		{sandbox.GuestPort, "POST", "/files/compose", http.StatusForbidden},
		{sandbox.GuestPort, "GET", "/envs", http.StatusForbidden},
		{sandbox.GuestPort, "POST", "/process.Process", http.StatusForbidden},
		{sandbox.GuestPort, "POST", "/process.Process/../files", http.StatusNotFound},
		{sandbox.GuestPort, "POST", "/process.Process/%2e%2e/files", http.StatusNotFound},
		{sandbox.GuestPort, "POST", "//process.Process/Start", http.StatusNotFound},
		{sandbox.GuestPort, "POST", "/run/command", http.StatusNotFound},
		{3000, "GET", "/process.Process/Start", http.StatusForbidden},
		{3000, "GET", "/health", http.StatusForbidden},
		{InterpreterPort, "POST", "/execute", http.StatusForbidden},
		{50005, "POST", "/mcp", http.StatusForbidden},
	} {
		resp := d.do(t, d.request(t, c.method, host(c.port), c.path, all, nil))
		body := text(t, resp)
		if resp.StatusCode != c.want {
			t.Errorf("%s %d%s: %d %s, want %d", c.method, c.port, c.path, resp.StatusCode, body, c.want)
		}
		if c.want == http.StatusForbidden && !strings.Contains(body, "report@sha256:abc") {
			t.Errorf("%s %d%s: %s, want the contract's name", c.method, c.port, c.path, body)
		}
	}
	d.boxes.traffic.Closed = true
	for _, path := range []string{"/process.Process/Start", "/files?path=/x"} {
		if resp := d.do(t, d.request(t, "POST", host(sandbox.GuestPort), path, all, nil)); resp.StatusCode != http.StatusForbidden || !strings.Contains(text(t, resp), "belongs to a run") {
			t.Errorf("%s of a run's sandbox: %d", path, resp.StatusCode)
		}
	}
	for _, path := range []string{"/files?path=/x", "/process.Process/Start"} {
		if body := text(t, d.get(t, host(sandbox.GuestPort), path, nil)); strings.Contains(body, "report") {
			t.Errorf("%s names the contract to a caller without a token: %s", path, body)
		}
	}
}

// TestCreateBoundRefusesOtherFields: a request that names a contract must not set a field
// that could give the sandbox more than was reviewed.
func TestCreateBoundRefusesOtherFields(t *testing.T) {
	for body, want := range map[string]string{
		`{"templateID":"base","allow_internet_access":true,"secure":true,"network":{},"mcp":{},"envVars":{"A":"b"}}`: "",
		`{"network":{"allowOut":["evil.example"]}}`:         "network",
		`{"network":{"rules":{"x.example":[]}}}`:            "network",
		`{"network":{"packages":["npm"]}}`:                  "network",
		`{"network":{"allowPublicTraffic":true}}`:           "network",
		`{"mcp":{"exa":{}}}`:                                "mcp",
		`{"volumeMounts":[{"name":"data","path":"/data"}]}`: "volumeMounts",
		`{"autoPauseMemory":false}`:                         "autoPauseMemory",
		`{"metadata":{"postern.inbox":"a@b.example"}}`:      `metadata["postern.inbox"]`,
		`{"metadata":{"postern.packages":"npm"}}`:           `metadata["postern.packages"]`,
		`{"metadata":{"postern.secrets":"github"}}`:         `metadata["postern.secrets"]`,
		`{"envVars":{"TOKEN":"${e2b.secrets.github}"}}`:     `envVars["TOKEN"]`,
	} {
		var b newSandbox
		if err := json.Unmarshal([]byte(body), &b); err != nil {
			t.Fatal(err)
		}
		if got := b.beyondContract(httptest.NewRequest("POST", "/v2/sandboxes", http.NoBody)); got != want {
			t.Errorf("%s: refuses %q, want %q", body, got, want)
		}
	}
	r := httptest.NewRequest("POST", "/v2/sandboxes", http.NoBody)
	r.Header.Set(InboxKeyHeader, "pib_x")
	if got := (&newSandbox{}).beyondContract(r); !strings.Contains(got, InboxKeyHeader) {
		t.Errorf("an inbox key: refuses %q", got)
	}
}

func TestMetadataOfBoundSandboxNamesItsContract(t *testing.T) {
	i := sandbox.Info{Metadata: map[string]string{"a": "b", ContractMetadata: "report"}}
	if got := shownMetadata(i)[ContractMetadata]; got != "report" {
		t.Errorf("of an unbound sandbox: %q", got)
	}
	i.Contract = "report@sha256:abc"
	if got := shownMetadata(i); got[ContractMetadata] != "report@sha256:abc" || got["a"] != "b" || i.Metadata[ContractMetadata] != "report" {
		t.Errorf("of a bound sandbox: %v; stored: %v", got, i.Metadata)
	}
}
