// Package guide serves the documents from which an agent learns, without any key, what
// this server is and how it connects itself: /llms.txt, /llms-full.txt, /skill.md and
// /auth.md, and the catalog and the card by which MCP clients find the tools.
//
// The documents are made from the running configuration. They must have nothing secret
// in them, and nothing that a caller sends: the attack is a Host header by which an agent
// behind a shared cache is told to send its code to another server.
package guide

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"text/template"
	"time"

	"postern/internal/site"
)

//go:embed templates
var files embed.FS

// Config is what the documents tell.
type Config struct {
	Site       site.Site // where this server is reached; it has a Base
	MailDomain string    // of the inboxes; required
	Signup     bool      // anybody may make an account
	OAuth      bool      // programs connect themselves by OAuth 2.1 here
	Issuers    []string  // URLs of other authorization servers that give out keys; may be empty
	Sandboxes  bool      // this server runs sandboxes
	Tools      []Tool    // of an inbox's key over the Model Context Protocol
}

// A Tool is one of those that are offered.
type Tool struct{ Name, Title string }

// A document is one path.
type document struct {
	path, kind string // kind is the media type
	text       func(view) ([]byte, error)
}

// The paths of the documents. The card's follows the address of the tools, as the draft
// of MCP server cards reserves it.
const (
	llmsPath    = "/llms.txt"
	fullPath    = "/llms-full.txt"
	skillPath   = "/skill.md"
	authPath    = "/auth.md"
	catalogPath = "/.well-known/mcp/catalog.json"
	cardPath    = "/mcp/server-card"
)

var documents = []document{
	{llmsPath, "text/plain; charset=utf-8", page("llms.tmpl")},
	{fullPath, "text/plain; charset=utf-8", page("full.tmpl")},
	{skillPath, "text/markdown; charset=utf-8", page("skill.tmpl")},
	{authPath, "text/markdown; charset=utf-8", page("auth.tmpl")},
	{catalogPath, "application/json", catalog},
	{cardPath, "application/mcp-server-card+json", card},
}

// Paths returns the paths that [Handler] serves.
func Paths() (out []string) {
	for _, d := range documents {
		out = append(out, d.path)
	}
	return out
}

// Prompt returns the sentence by which an agent that has a shell connects itself to the
// server at base with a connect code. The sentence is no secret but for the code.
func Prompt(base, code string) string {
	return fmt.Sprintf("Read %s%s and follow its section \"Connect yourself\". Your code is %s. Stop after step 4, and tell me your address and what waits for my approval.", base, llmsPath, code)
}

// A view is what the templates see.
type view struct {
	Config

	Base string // for this caller
}

// Handler returns the routes. Anybody may read them, pages of other servers too.
func Handler(c Config) http.Handler {
	mux := http.NewServeMux()
	for _, d := range documents {
		mux.HandleFunc("GET "+d.path, func(w http.ResponseWriter, r *http.Request) {
			b, err := d.text(view{c, c.Site.URL(r)})
			if err != nil { // unreachable: our own templates and types
				http.Error(w, "internal error", http.StatusInternalServerError)
				return
			}
			sum := sha256.Sum256(b)
			h := w.Header()
			h.Set("Content-Type", d.kind)
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
			h.Set("Access-Control-Allow-Origin", "*")
			h.Set("Access-Control-Allow-Methods", "GET")
			h.Set("Access-Control-Allow-Headers", "Content-Type")
			h.Set("Cache-Control", "public, max-age=300")
			h.Set("ETag", `"`+hex.EncodeToString(sum[:8])+`"`)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
		})
	}
	return mux
}

// pages are parsed when the first one is asked for, to keep the program's start fast.
var pages = sync.OnceValue(func() *template.Template {
	return template.Must(template.ParseFS(files, "templates/*"))
})

func page(name string) func(view) ([]byte, error) {
	return func(v view) ([]byte, error) {
		var b bytes.Buffer
		err := pages().ExecuteTemplate(&b, name, v)
		return b.Bytes(), err
	}
}

// name returns the name of the tools in reverse DNS form, as a card has it.
func (v view) name() string {
	parts := strings.Split(v.MailDomain, ".")
	slices.Reverse(parts)
	return strings.Join(parts, ".") + "/postern"
}

// catalog is the draft of the MCP catalog, from which clients find the card.
func catalog(v view) ([]byte, error) {
	return indented(map[string]any{
		"specVersion": "draft",
		"entries": []map[string]string{{
			"identifier": "urn:air:" + v.MailDomain + ":postern", "displayName": "Postern: email with oversight", "type": "application/mcp-server-card+json", "url": v.Base + cardPath,
		}},
	})
}

// card is the draft of the MCP server card (SEP-2127). It lists no tools: the protocol
// itself does, and by key.
func card(v view) ([]byte, error) {
	remote := map[string]any{"type": "streamable-http", "url": v.Base + "/mcp"}
	if !v.OAuth && len(v.Issuers) == 0 {
		remote["headers"] = []map[string]any{{"name": "Authorization", "description": "Bearer and a key of the inbox; " + v.Base + authPath + " says how to get one", "isRequired": true, "isSecret": true}}
	}
	return indented(map[string]any{
		"$schema": "https://static.modelcontextprotocol.io/schemas/v1/server-card.schema.json",
		"name":    v.name(), "title": "Postern: email with oversight, and sandboxes", "version": "1",
		"description": "An inbox of the agent's own. What it sends waits until a person has approved it.",
		"remotes":     []any{remote},
	})
}

func indented(doc any) ([]byte, error) {
	b, err := json.MarshalIndent(doc, "", "  ")
	return append(b, '\n'), err
}
