// Package mcpgateway implements the program mcp-gateway in sandboxes. E2B's SDK starts it
// for Sandbox.create({mcp}). It starts servers of the Model Context Protocol that use
// standard input and output, and serves their tools together over HTTP.
//
//	mcp-gateway --config JSON    start the servers in the background; $GATEWAY_ACCESS_TOKEN is the token
//	mcp-gateway pull NAME...     install the packages of servers, in the build of a template
//
// Each server has its own user, and an environment with nothing but its own variables.
// The gateway runs in the sandbox, next to the code that it serves, so it is not a
// security boundary. The wall decides what servers may reach, and Postern's proxy decides
// which outside calls reach them. The gateway must not hold credentials: it has sentinels
// in place of secrets.
package mcpgateway

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Port is the port of the gateway, which serves at [Path]. Both are E2B's.
const (
	Port = 50005
	Path = "/mcp"
)

// Variable is the environment variable with which Postern passes a [Told] in JSON to the
// gateway.
const Variable = "POSTERN_MCP"

// Separator separates the name of a server from the name of its tool.
const Separator = "__"

// The limits of a configuration.
const (
	MaxConfig  = 48 << 10 // bytes
	MaxServers = 20
)

// Told is what Postern tells a gateway in addition to the configuration.
type Told struct {
	// Catalog has the operator's entries for the servers in the configuration.
	Catalog Catalog `json:"catalog,omitempty"`
	// Secrets are the sentinels of secrets, by the name in their placeholders.
	Secrets map[string]string `json:"secrets,omitempty"`
}

// A Catalog maps names to servers.
type Catalog map[string]Entry

// An Entry says how to install and start a server. In Args and Env, ${KEY} stands for a
// key of the server's configuration and ${HOME} for its home directory. A list becomes
// several arguments. An argument or variable that names a missing key is left out.
type Entry struct {
	NPM     string   `json:"npm,omitempty"`     // npm package
	Version string   `json:"version,omitempty"` // exact version of NPM
	Debian  []string `json:"debian,omitempty"`  // Debian packages
	Command string   `json:"command"`           // a program of the package, or a path
	Args    []string `json:"args,omitempty"`
	// Env is the environment in addition to PATH, HOME, LANG and the variables for the
	// wall.
	Env map[string]string `json:"env,omitempty"`
	// Secrets are the keys of the configuration that hold credentials, each with the
	// hosts that the credential is for.
	Secrets map[string][]string `json:"secrets,omitempty"`
}

//go:embed catalog.json
var builtIn []byte

// Builtin returns the catalogue that comes with the program.
func Builtin() Catalog {
	c, err := ParseCatalog(builtIn)
	if err != nil {
		panic(err) // unreachable: a test parses it
	}
	return c
}

// Merge returns c with the entries of more, which replace entries of the same name.
func (c Catalog) Merge(more Catalog) Catalog {
	out := maps.Clone(c)
	maps.Copy(out, more)
	return out
}

// The forms of names. They are compiled at their first use, because this program is also
// the guest, which every sandbox starts.
var (
	serverName  = form(`^[A-Za-z0-9][A-Za-z0-9.-]{0,63}$`)
	npmName     = form(`^(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*$`)
	npmVersion  = form(`^[0-9][0-9A-Za-z.+-]{0,63}$`)
	debianName  = form(`^[a-z0-9][a-z0-9+.-]{1,99}$`)
	variable    = form(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	repository  = form(`^github/([A-Za-z0-9][A-Za-z0-9-]{0,38})/([A-Za-z0-9._-]{1,100})$`)
	placeholder = form(`\$\{([A-Za-z_][A-Za-z0-9_]*)\}`)
	secretPlace = form(`\$\{e2b\.secrets\.([^{}]{1,128})\}`)
)

func form(s string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(s) })
}

// ParseCatalog parses a catalogue. Its error names the entry and the field.
func ParseCatalog(b []byte) (Catalog, error) {
	var c Catalog
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return nil, fmt.Errorf("parse catalogue: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(c)) {
		if err := c[name].check(); err != nil {
			return nil, fmt.Errorf("catalogue: %q: %w", name, err)
		}
		if !serverName().MatchString(name) {
			return nil, fmt.Errorf("catalogue: %q: want a name of at most 64 letters, digits, dots and hyphens", name)
		}
	}
	return c, nil
}

func (e Entry) check() error {
	switch {
	case e.Command == "":
		return errors.New("command: is required")
	case e.NPM != "" && !npmName().MatchString(e.NPM):
		return errors.New("npm: is not the name of a package")
	case e.NPM != "" && !npmVersion().MatchString(e.Version):
		return errors.New("version: want one exact version, such as 1.2.3")
	}
	for _, d := range e.Debian {
		if !debianName().MatchString(d) {
			return fmt.Errorf("debian: %q is not the name of a package", d)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(e.Env)) {
		if !variable().MatchString(k) {
			return fmt.Errorf("env: %q is not the name of a variable", k)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(e.Secrets)) {
		hosts := e.Secrets[k]
		if len(hosts) == 0 {
			return fmt.Errorf("secrets: %q: name the hosts that it is for", k)
		}
	}
	return nil
}

// custom is the configuration of a server that is in no catalogue.
type custom struct {
	RunCmd     string            `json:"runCmd"`
	InstallCmd string            `json:"installCmd"`
	Envs       map[string]string `json:"envs"`
}

// A Server is one server of a configuration.
type Server struct {
	Name  string // in the configuration
	Slug  string // prefix of the names of its tools
	Entry Entry
	// Values are the values of its configuration, as strings.
	Values map[string][]string

	custom *custom // nil for a server of the catalogue
}

// ParseConfig parses the configuration of a gateway: an object that maps names to servers.
// Its error names the server and the field.
func ParseConfig(b []byte, c Catalog) ([]Server, error) {
	if len(b) > MaxConfig {
		return nil, fmt.Errorf("mcp: has %d bytes, the limit is %d", len(b), MaxConfig)
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, errors.New("mcp: must be an object with servers by their names")
	}
	if len(m) > MaxServers {
		return nil, fmt.Errorf("mcp: has %d servers, the limit is %d", len(m), MaxServers)
	}
	var out []Server
	slugs := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		s, err := parseServer(name, m[name], c)
		if err != nil {
			return nil, fmt.Errorf("mcp[%q]: %w", name, err)
		}
		if was, ok := slugs[s.Slug]; ok {
			return nil, fmt.Errorf("mcp[%q]: its tools would have the same names as those of %q", name, was)
		}
		slugs[s.Slug] = name
		out = append(out, s)
	}
	return out, nil
}

func parseServer(name string, b json.RawMessage, c Catalog) (Server, error) {
	s := Server{Name: name, Slug: name, Values: map[string][]string{}}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil {
		return s, errors.New("must be an object")
	}
	e, known := c[name]
	if _, ok := fields["runCmd"]; ok && !known {
		s.custom = &custom{}
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		if err := d.Decode(s.custom); err != nil {
			return s, fmt.Errorf("want runCmd, installCmd and envs: %s", strings.TrimPrefix(err.Error(), "json: "))
		}
		if strings.TrimSpace(s.custom.RunCmd) == "" {
			return s, errors.New("runCmd: is empty")
		}
		for _, k := range slices.Sorted(maps.Keys(s.custom.Envs)) {
			if !variable().MatchString(k) {
				return s, fmt.Errorf("envs: %q is not the name of a variable", k)
			}
		}
		if r := repository().FindStringSubmatch(name); r != nil {
			s.Slug = r[2]
		} else if !serverName().MatchString(name) {
			return s, errors.New("want github/OWNER/REPOSITORY, or a name of letters, digits, dots and hyphens")
		}
		// The slug must not contain Separator, nor its beginning at the end.
		s.Slug = strings.NewReplacer(".", "-", "_", "-").Replace(s.Slug)
		return s, nil
	}
	if !known {
		return s, fmt.Errorf("is not in the catalogue (%s); set runCmd for a server of your own, or ask the operator to add it with --mcp-catalog", strings.Join(slices.Sorted(maps.Keys(c)), ", "))
	}
	s.Entry = e
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		raw := fields[key]
		v, err := texts(raw)
		if err != nil {
			return s, fmt.Errorf("%s: %w", key, err)
		}
		s.Values[key] = v
	}
	return s, nil
}

// texts returns a value of a configuration as strings.
func texts(raw json.RawMessage) ([]string, error) {
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return nil, errors.New("is not JSON")
	}
	one := func(v any) (string, error) {
		switch v := v.(type) {
		case string:
			if strings.ContainsRune(v, 0) {
				return "", errors.New("contains a NUL byte")
			}
			return v, nil
		case float64, bool:
			return strings.TrimSpace(string(raw)), nil
		}
		return "", errors.New("must be a string, a number, true, false or a list of strings")
	}
	switch v := v.(type) {
	case nil:
		return nil, nil
	case []any:
		out := []string{}
		for _, e := range v {
			s, ok := e.(string)
			if !ok {
				return nil, errors.New("must be a list of strings")
			}
			t, err := one(s)
			if err != nil {
				return nil, err
			}
			out = append(out, t)
		}
		return out, nil
	}
	s, err := one(v)
	return []string{s}, err
}

// CheckSecrets returns the names of the secrets whose placeholders are in the
// configuration. It returns an error if a credential is in plain text, because then code
// in the sandbox could read it.
func CheckSecrets(servers []Server) ([]string, error) {
	var names []string
	for _, s := range servers {
		for _, key := range slices.Sorted(maps.Keys(s.Entry.Secrets)) {
			hosts := s.Entry.Secrets[key]
			for _, v := range s.Values[key] {
				if v != "" && secretPlace().FindString(v) != v {
					return nil, fmt.Errorf("mcp[%q].%s: is a credential that code in the sandbox could read: store it as a secret for %s, and use its placeholder ${e2b.secrets.NAME}", s.Name, key, strings.Join(hosts, ", "))
				}
			}
		}
		for _, v := range s.all() {
			for _, m := range secretPlace().FindAllStringSubmatch(v, -1) {
				if name := strings.ToLower(m[1]); !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	}
	slices.Sort(names)
	return names, nil
}

// all returns every string of a server's configuration that may have a placeholder.
func (s *Server) all() (out []string) {
	for _, v := range s.Values {
		out = append(out, v...)
	}
	if s.custom != nil {
		for _, v := range s.custom.Envs {
			out = append(out, v)
		}
	}
	return out
}

// fill replaces the placeholders of secrets in v by their sentinels.
func (t *Told) fill(v string) (string, error) {
	var missing error
	out := secretPlace().ReplaceAllStringFunc(v, func(p string) string {
		name := strings.ToLower(secretPlace().FindStringSubmatch(p)[1])
		s, ok := t.Secrets[name]
		if !ok {
			missing = fmt.Errorf("the secret %q was not given to this sandbox when it was created", name)
		}
		return s
	})
	return out, missing
}

// expand replaces the keys in an argument or a variable's value. It returns no strings if
// a key is missing.
func (s *Server) expand(v, home string, t *Told) ([]string, error) {
	out := []string{v}
	for _, m := range placeholder().FindAllStringSubmatch(v, -1) {
		values := s.Values[m[1]]
		if m[1] == "HOME" {
			values = []string{home}
		}
		if len(values) == 0 {
			return nil, nil
		}
		var next []string
		for _, o := range out {
			for _, value := range values {
				filled, err := t.fill(value)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", m[1], err)
				}
				next = append(next, strings.ReplaceAll(o, m[0], filled))
			}
		}
		out = next
	}
	return out, nil
}

// A command is the command line and environment of a server.
type command struct {
	path string // or a name, looked up in PATH
	args []string
	env  map[string]string
}

// command returns the command that starts s.
func (s *Server) command(home string, t *Told) (c command, err error) {
	c.env = map[string]string{}
	if s.custom != nil {
		c.path, c.args = "/bin/sh", []string{"-c", "exec " + s.custom.RunCmd}
		if strings.ContainsAny(s.custom.RunCmd, ";&|\n(") { // more than one command
			c.args[1] = s.custom.RunCmd
		}
		for _, k := range slices.Sorted(maps.Keys(s.custom.Envs)) {
			v := s.custom.Envs[k]
			if c.env[k], err = t.fill(v); err != nil {
				return c, fmt.Errorf("envs.%s: %w", k, err)
			}
		}
		return c, nil
	}
	c.path = s.Entry.Command
	for _, a := range s.Entry.Args {
		v, err := s.expand(a, home, t)
		if err != nil {
			return c, err
		}
		c.args = append(c.args, v...)
	}
	for _, k := range slices.Sorted(maps.Keys(s.Entry.Env)) {
		tmpl := s.Entry.Env[k]
		v, err := s.expand(tmpl, home, t)
		if err != nil {
			return c, err
		}
		if len(v) > 0 {
			c.env[k] = strings.Join(v, ",")
		}
	}
	return c, nil
}
