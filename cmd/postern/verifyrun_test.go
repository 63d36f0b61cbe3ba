package main

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/attest"
	"postern/internal/contract"
)

func TestVerifyRun(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	text := []byte("version: 1\nname: report\ncommands: {allow: [{run: \"python3 **\"}]}\nfiles: {write: [/work]}\n")
	c, err := contract.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	table := []byte("a,b\n1,2\n")
	sum := sha256.Sum256(table)
	at := time.Date(2026, 11, 20, 11, 0, 0, 0, time.UTC)
	r := attest.Run{
		Run: "run_1", Server: "agents.example/runs", Outcome: "failed", Reasons: []string{}, Proposer: "agent:crd_1\x1b[2J", Contract: attest.Named{Name: "report", Digest: c.Digest()},
		Created: at, Started: at, Ended: at, Issued: at, Commands: attest.Commands{Complete: true}, Teardown: []attest.Trace{{What: "processes", Gone: true}},
		Artifacts: []attest.Artifact{{Path: "/work/a.csv", SHA256: hex.EncodeToString(sum[:]), State: "waiting"}},
		Audit:     attest.Audit{Genesis: strings.Repeat("a", 64), Head: strings.Repeat("b", 64), Seq: 7},
	}
	for _, id := range attest.ClauseIDs() {
		r.Clauses = append(r.Clauses, attest.Clause{ID: id, Verdict: attest.NotVerified, Rank: attest.RankNone, Evidence: "none", Because: "a\x1b]0;x\a"})
	}
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	id := attest.KeyID(public)
	signed, err := attest.Sign(attest.New(r), id, private)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := attest.KeysDocument([]attest.Key{{ID: id, Server: r.Server, Public: public, From: at}})
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	strange, err := attest.KeysDocument([]attest.Key{{ID: attest.KeyID(other), Server: r.Server, Public: other, From: at}})
	if err != nil {
		t.Fatal(err)
	}
	file, keys, contractFile, artifact := write("run.json", signed), write("keys.json", doc), write("contract.yaml", text), write("a.csv", table)
	for _, tt := range []struct {
		name  string
		file  string
		check runCheck
		want  string // in the error; empty: it is true
	}{
		{"as it is", file, runCheck{keys: keys, artifacts: []string{artifact}, contract: contractFile}, ""},
		{"with another's keys", file, runCheck{keys: write("other.json", strange)}, "no known key"},
		{"changed", write("changed.json", bytes.Replace(signed, []byte(`"payload": "`), []byte(`"payload": "e30="," x": "`), 1)), runCheck{keys: keys}, "malformed"},
		{"with another file", file, runCheck{keys: keys, artifacts: []string{artifact, contractFile}}, "is not an artifact of the run"},
		{"with another contract", file, runCheck{keys: keys, contract: write("wider.yaml", append(text, "limits: {time: 9m}\n"...))}, "is not the contract of the run"},
		{"nothing", write("empty.json", nil), runCheck{keys: keys}, "malformed"},
		{"keys in the clear", file, runCheck{keys: "http://agents.example/keys"}, "https"},
	} {
		var out bytes.Buffer
		err := verifyRun(t.Context(), newOutput(&out, false, false), tt.file, tt.check)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		if strings.ContainsAny(out.String(), "\x1b\a") || err == nil && !strings.Contains(out.String(), "a.csv is /work/a.csv") {
			t.Errorf("%s: printed %q", tt.name, out.String())
		}
	}
	for _, server := range []string{"agents.example", "127.0.0.1:1/x/runs", "a@b/runs", "", "evil.example/path/runs"} {
		if u, err := runKeysURL(server); err == nil {
			t.Errorf("keys of %q would be fetched from %s", server, u)
		}
	}
}
