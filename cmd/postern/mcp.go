package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/bridge"
	"postern/internal/mcpserver"
)

// The variables that the bridge reads: ours, and those of email-sandbox, so that
// its users change nothing but the program.
const (
	mcpKeyVariable = "POSTERN_KEY"
	theirURL       = "EMAIL_SANDBOX_API_URL"
	theirKey       = "EMAIL_SANDBOX_API_KEY"
)

func mcpCommand() *command {
	var root, tools string
	var config bool
	return &command{
		use:   "mcp",
		at:    byItself,
		short: "give a desktop program the tools of a server, over standard input and output",
		long: `
Speaks the Model Context Protocol over standard input and output to a program
on this machine, such as a desktop assistant or an editor, and passes the tools
of a Postern server on to it. The program starts this command itself; what it
needs to know to do so is printed by

  postern mcp --print-config

The server and the key come from the environment, which that program sets:

  POSTERN_URL   the server, https://api.example.com (default: http://127.0.0.1:3000)
  POSTERN_KEY   a key of the inbox (pib_...), a grant over several (pgr_...), or a
                project's key (e2b_...), which has the tools that run code alone

With --tools code the model has a sandbox to run code in, which reaches neither
this machine nor, unless it asks and the operator allows it, the network:

  postern mcp --print-config --tools code

EMAIL_SANDBOX_API_URL and EMAIL_SANDBOX_API_KEY mean the same.

With --root, and only then, the model may attach files by their paths: those in
that folder and below, and no others, whatever links are in it. Choose one that
holds only what may be sent. Name, size and SHA-256 of each file are said back,
and the person who approves the email sees them, too.

If the server cannot be reached it is tried again. A proposal whose answer was
lost is made once all the same. What happens is told on standard error.`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&root, "root", "", "`folder` whose files may be attached by their paths (default: none may)")
			fs.StringVar(&tools, "tools", "", "`sets or names` of the tools that are shown, between commas: core, drafts, oversight, domains, code, runs, all (default: core; with a project's key: code)")
			fs.BoolVar(&config, "print-config", false, "print what to write into the settings of usual programs, and end")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			names := strings.FieldsFunc(tools, func(r rune) bool { return r == ',' || r == ' ' })
			if err := mcpserver.CheckTools(names); err != nil {
				return fmt.Errorf("%w: --tools: %w", errUsage, err)
			}
			folder, err := openFolder(root)
			if err != nil {
				return err
			}
			if folder != nil {
				defer folder.Close()
			}
			if config {
				return printHosts(out, folder, names)
			}
			return serveBridge(ctx, out, folder, names)
		},
	}
}

// openFolder opens the folder that files may be attached from, if there is one.
func openFolder(name string) (*os.Root, error) {
	if name == "" {
		return nil, nil //nolint:nilnil // there is none, which is no error
	}
	whole, err := filepath.Abs(name)
	if err == nil {
		whole, err = filepath.EvalSymlinks(whole)
	}
	if err != nil {
		return nil, fmt.Errorf("--root: %w", err)
	}
	if home, err := os.UserHomeDir(); err == nil && filepath.Clean(home) == whole || whole == "/" {
		return nil, fmt.Errorf("%w: --root: %s holds keys and more that must not be attached: choose a folder with only what may be sent", errUsage, whole)
	}
	f, err := os.OpenRoot(whole)
	if err != nil {
		return nil, fmt.Errorf("--root: %w", err)
	}
	return f, nil
}

// environment returns the first of the variables that is set, and its name.
func environment(names ...string) (value, name string) {
	for _, n := range names {
		if v := strings.TrimSpace(os.Getenv(n)); v != "" {
			return v, n
		}
	}
	return "", names[0]
}

// toolsURL returns where the server's tools are.
func toolsURL() (string, error) {
	base, name := environment(urlVariable, theirURL)
	if base == "" {
		base = "http://127.0.0.1:3000"
	}
	u, err := serverURL(name, base)
	if err != nil {
		return "", err
	}
	u.Path = strings.TrimSuffix(strings.TrimSuffix(u.Path, "/"), mcpserver.Path) + mcpserver.Path
	return u.String(), nil
}

func serveBridge(ctx context.Context, out *output, folder *os.Root, tools []string) error {
	endpoint, err := toolsURL()
	if err != nil {
		return err
	}
	key, name := environment(mcpKeyVariable, keyVariable, theirKey)
	if key == "" {
		return fmt.Errorf("the environment has no %s: a key of the inbox is needed; postern mcp --print-config shows where it is set", name)
	}
	// Standard output is the protocol's: one line of ours would end it.
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	b, err := bridge.New(log, bridge.Config{Endpoint: endpoint, Key: key, Tools: tools, Root: folder, Instructions: mcpserver.Instructions})
	if err != nil {
		return err
	}
	return b.Run(ctx, os.Stdin, openOutput{out.Writer})
}

// openOutput is standard output, which the bridge ends with and does not close.
type openOutput struct{ io.Writer }

// Close implements [io.Closer].
func (openOutput) Close() error { return nil }

// printHosts shows how usual programs are told of the bridge. The key is not
// printed: it would stay in the terminal's history.
func printHosts(out *output, folder *os.Root, tools []string) error {
	program, err := os.Executable()
	if err != nil {
		program = "postern"
	}
	base, _ := environment(urlVariable, theirURL)
	base = cmp.Or(base, "https://api.example.com")
	if _, err := url.Parse(base); err != nil {
		return errors.New("POSTERN_URL is not a URL such as https://api.example.com")
	}
	args := []string{"mcp"}
	if folder != nil {
		args = append(args, "--root", folder.Name())
	}
	if len(tools) > 0 {
		args = append(args, "--tools", strings.Join(tools, ","))
	}
	type entry struct {
		Type    string            `json:"type,omitempty"`
		Command string            `json:"command"`
		Args    []string          `json:"args"`
		Env     map[string]string `json:"env"`
	}
	key, how := "pib_...", "a key of the inbox: postern inbox key add"
	if len(tools) == 1 && tools[0] == string(mcpserver.Code) {
		key, how = "e2b_...", "the project's key (postern up prints where it is), or pib_... of an inbox"
	}
	one := entry{Command: program, Args: args, Env: map[string]string{urlVariable: base, mcpKeyVariable: key}}
	show := func(title string, v any) error {
		b, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "# %s\n%s\n\n", title, b)
		return nil
	}
	typed := one
	typed.Type = "stdio"
	err = errors.Join(
		show("Claude Desktop: claude_desktop_config.json (Settings, Developer, Edit Config); Cursor: ~/.cursor/mcp.json; Windsurf: mcp_config.json", map[string]any{"mcpServers": map[string]entry{"postern": one}}),
		show("VS Code: .vscode/mcp.json", map[string]any{"servers": map[string]entry{"postern": typed}}),
	)
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = shellQuote(a)
	}
	line := strings.Join(slices.Concat([]string{shellQuote(program)}, quoted), " ")
	fmt.Fprintf(out, "# Claude Code\nclaude mcp add postern --env %s=%s --env %s=%s -- %s\n\n", urlVariable, shellQuote(base), mcpKeyVariable, key, line)
	toml, jerr := json.Marshal(args) // a TOML array of strings is written like JSON's
	fmt.Fprintf(out, "# Codex: ~/.codex/config.toml\n[mcp_servers.postern]\ncommand = %q\nargs = %s\nenv = { %s = %q, %s = %q }\n\n", program, toml, urlVariable, base, mcpKeyVariable, key)
	query := ""
	if len(tools) > 0 {
		query = "?tools=" + strings.Join(tools, ",")
	}
	fmt.Fprintf(out, "# Programs that speak Streamable HTTP themselves need no bridge: %s, with the header Authorization: Bearer %s\n", strings.TrimSuffix(base, "/")+mcpserver.Path+query, key)
	fmt.Fprintf(out, "# Replace %s by %s\n", key, how)
	return errors.Join(err, jerr)
}

// shellQuote returns s as one word of a shell.
func shellQuote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:,@=") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
