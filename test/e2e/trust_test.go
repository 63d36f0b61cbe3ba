package e2e

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// authority returns the name of the sandbox in the certificate of its authority, and
// how many certificates of sandboxes its bundle has.
func (b *box) authority() (sandbox string, count int) {
	b.s.t.Helper()
	bundle := b.run("cat /etc/ssl/certs/ca-certificates.crt").stdout
	all := 0
	for rest := []byte(bundle); ; all++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			b.s.t.Fatal(err)
		}
		for _, u := range c.URIs {
			if id, ok := strings.CutPrefix(u.String(), "urn:postern:sandbox:"); ok {
				sandbox = id
				count++
			}
		}
	}
	if all < 50 {
		b.s.t.Errorf("the bundle has %d certificates", all)
	}
	if local := b.run("cat /usr/local/share/ca-certificates/postern.crt").stdout; !strings.HasSuffix(bundle, local) || local == "" {
		b.s.t.Errorf("the local certificate is not the bundle's last: %q", local)
	}
	return sandbox, count
}

// TestSandboxTrustsItsOwnAuthorityAlone: the authority stays over a pause, and a
// sandbox from a snapshot trusts another one, not its origin's.
func TestSandboxTrustsItsOwnAuthorityAlone(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--snapshots")
	b := s.sandbox(map[string]any{"envVars": map[string]string{"PIP_CERT": "/mine"}})
	check := func(when string, b *box) {
		t.Helper()
		if id, n := b.authority(); id != b.id || n != 1 {
			t.Errorf("%s: it trusts the authority of %q, %d in all; want that of %s", when, id, n, b.id)
		}
		// OpenSSL finds it by its hash, without any variable.
		if r := b.run("env -i openssl verify -CApath /etc/ssl/certs /usr/local/share/ca-certificates/postern.crt && tail -c 2048 /etc/ssl/certs/ca-certificates.crt | openssl x509 -noout -subject_hash"); !strings.Contains(r.stdout, ": OK") || !strings.Contains(r.stdout, "65ab4b79") {
			t.Errorf("%s: openssl: %s %s", when, r.stdout, r.stderr)
		}
	}
	check("after the start", b)
	env := b.run("env").stdout
	for _, want := range []string{"PIP_CERT=/mine", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt", "NODE_EXTRA_CA_CERTS=/usr/local/share/ca-certificates/postern.crt"} {
		if !strings.Contains(env, want+"\n") {
			t.Errorf("the environment lacks %s:\n%s", want, env)
		}
	}
	// The interpreter started before the sandbox had an identity.
	if got := b.cell(`import os; print(os.environ["SSL_CERT_FILE"], os.environ["PIP_CERT"])`); fmt.Sprint(got) != "[/etc/ssl/certs/ca-certificates.crt /mine]" {
		t.Errorf("the interpreter's environment: %q", got)
	}
	if r := b.run(`python3 -c "import ssl; c = ssl.create_default_context(); print([x['subject'] for x in c.get_ca_certs() if 'Postern' in str(x)])"; node -e 'console.log("node")'`); !strings.Contains(r.stdout, "Postern sandbox authority") || !strings.Contains(r.stdout, "node") || r.stderr != "" {
		t.Errorf("python and node: %q %q", r.stdout, r.stderr)
	}
	// Debian's own tool makes the bundle anew.
	if r := b.run("echo | sudo tee -a /etc/ca-certificates.conf; sudo update-ca-certificates --fresh"); r.exit != 0 {
		t.Errorf("update-ca-certificates: %s %s", r.stdout, r.stderr)
	}
	check("after update-ca-certificates", b)

	if status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/pause", ""); status != http.StatusNoContent {
		t.Fatalf("pause: %d %s", status, answer)
	}
	if status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/resume", `{"timeout": 600}`); status != http.StatusCreated {
		t.Fatalf("resume: %d %s", status, answer)
	}
	check("after a pause", b)
	status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/snapshots", "{}")
	var snapshot struct{ SnapshotID string }
	if err := json.Unmarshal(answer, &snapshot); err != nil || status != http.StatusCreated {
		t.Fatalf("snapshot: %d %s %v", status, answer, err)
	}
	status, from, err := s.create(map[string]any{"templateID": snapshot.SnapshotID})
	if err != nil || status != http.StatusCreated {
		t.Fatalf("create from snapshot: %d, %v", status, err)
	}
	check("from a snapshot", from)
	check("the origin of a snapshot", b)
}
