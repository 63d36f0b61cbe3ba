package main

import (
	"bytes"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spf13/cobra"
)

// ownServer serves a local socket in a new data directory, and counts the requests.
func ownServer(t *testing.T) (dir string, asked *atomic.Int64) {
	t.Helper()
	dir = t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "postern.sock"))
	if err != nil {
		t.Fatal(err)
	}
	asked = &atomic.Int64{}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte("{}")) // the command shows what it makes of it
	})}
	go func() { _ = srv.Serve(l) }() // it ends with the test
	t.Cleanup(func() { srv.Close() })
	return dir, asked
}

var argumentWord = regexp.MustCompile(`[A-Z]{2,}[A-Z,]*|\b[AN]\b`)

// TestEveryCommandUsesOrRefusesTheURL runs every command of the tree with POSTERN_URL and
// no credential, and then with one that most commands do not take. None may act on this
// machine's server or data.
func TestEveryCommandUsesOrRefusesTheURL(t *testing.T) {
	// Commands that ask no server of their user's, and those that fail before they would.
	free := []string{
		"postern contract check", "postern contract explain", "postern contract diff", "postern contract test", "postern contract init", "postern contract schema",
		"postern policy check", "postern audit check", "postern verify-message", "postern verify-run", "postern config check", "postern config show", "postern version", "postern man",
		"postern login", "postern mcp", "postern policy test", // they read the variable themselves
	}
	var leaves []*cobra.Command
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if !c.HasSubCommands() && c.HasParent() && c.Name() != "help" {
			leaves = append(leaves, c)
		}
		for _, b := range c.Commands() {
			walk(b)
		}
	}
	walk(newRoot())
	if len(leaves) < 150 {
		t.Fatalf("only %d commands were found", len(leaves))
	}
	t.Chdir(t.TempDir())
	for _, credential := range []string{"", keyVariable} {
		for _, c := range leaves {
			path := c.CommandPath()
			t.Run(strings.TrimPrefix(path, "postern ")+" with "+credential, func(t *testing.T) {
				dir, asked := ownServer(t)
				for _, v := range credentialVariables {
					t.Setenv(v, "")
				}
				t.Setenv("POSTERN_DATA", "")
				t.Setenv(urlVariable, "https://127.0.0.1:1") // where nobody listens
				if credential != "" {
					t.Setenv(credential, "pib_x")
				}
				args := strings.Fields(path)[1:]
				if c.Flags().Lookup("data") != nil || c.InheritedFlags().Lookup("data") != nil {
					args = append(args, "--data", dir)
				}
				if c.Flags().Lookup("sandboxes") != nil {
					args = append(args, "--sandboxes", "off")
				}
				for range argumentWord.FindAllString(c.Use, -1) {
					args = append(args, "x")
				}
				before := names(t, dir)
				var stdout, stderr bytes.Buffer
				status := run(t.Context(), args, &stdout, &stderr)
				if n := asked.Load(); n > 0 {
					t.Errorf("%v asked this machine's server %d times: %s%s", args, n, &stdout, &stderr)
				}
				if after := names(t, dir); !slices.Equal(before, after) {
					t.Errorf("%v changed the data directory: %v", args, after)
				}
				if slices.Contains(free, path) {
					return
				}
				if status == 0 {
					t.Errorf("%v succeeded: %s", args, &stdout)
				}
				if credential == "" && !strings.Contains(stderr.String(), urlVariable) {
					t.Errorf("%v does not say what is wrong: %s", args, &stderr)
				}
			})
		}
	}
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		out = append(out, e.Name())
	}
	return out
}
