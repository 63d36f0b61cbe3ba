package mailapi_test

import (
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/mailapi"
	"postern/internal/mailauth/dnstest"
	"postern/internal/mailbox"
	"postern/internal/mcpserver"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/people"
	"postern/internal/rulebook"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/webhook"
)

// TestDocs runs the examples of docs/reference/api.md, as a newcomer would. It needs
// bash, curl and jq.
func TestDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/api.md")
	if err != nil {
		t.Fatal(err)
	}
	script := "set -euo pipefail\nPS4='+ '\nset -x\n"
	for _, m := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(doc), -1) {
		script += m[1]
	}
	ctx := t.Context()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	db := storetest.SQLite(t)
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	gate := oversight.NewGate(log, db, oversighttest.Rules(nil))
	post := mailbox.New(log, db, gate, mailbox.Config{Blobs: blobs, Domain: "agents.test"}) // nothing is approved, so nothing is delivered
	fleet, err := sandbox.New(log, db, nil, nil, sandboxtest.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	var project string
	var key auth.Secret
	err = db.Update(ctx, func(tx *store.Tx) (err error) {
		project, key, err = auth.NewProject(ctx, tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	domains, err := domain.New(log, db, domain.Config{Domain: "agents.test", Host: "agents.test", Resolver: dnstest.Start(t).Resolver()})
	if err != nil {
		t.Fatal(err)
	}
	hooks, err := webhook.New(log, db, gate, webhook.Config{Key: make([]byte, 32), Private: true})
	if err != nil {
		t.Fatal(err)
	}
	persons, err := people.New(db, people.Config{Key: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	api := mailapi.New(log, db, gate, post, mailapi.Config{Domains: domains, Webhooks: hooks, People: persons, Book: rulebook.New(log, db)})
	mux := http.NewServeMux()
	mux.Handle("/v1/", api.Handler())
	mux.Handle("/mcp", mcpserver.New(log, db, gate, post, fleet, mcpserver.Config{}).Handler())
	outside := httptest.NewServer(mux)
	defer outside.Close()

	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	local := &httptest.Server{Listener: l, Config: &http.Server{Handler: api.HandlerFor(func(*http.Request) (auth.Principal, error) {
		return auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: project}, nil
	})}}
	local.Start()
	defer local.Close()

	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "POSTERN="+outside.URL, "PROJECT_KEY="+key.Reveal(), "SOCKET="+filepath.Join(dir, "s"))
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "+ curl") != strings.Count(script, "curl -sS") {
		t.Errorf("the examples: %v\n%s", err, out)
	}
	t.Logf("%s", out)
}
