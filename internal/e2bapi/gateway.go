package e2bapi

import (
	"encoding/json"
	"fmt"
	"strings"

	"postern/internal/mcpgateway"
)

// gateway checks the servers of the Model Context Protocol that a new sandbox is asked to
// have, and adds to its environment what its gateway needs to know. The SDK starts the
// gateway itself, with the same configuration; so a credential in it would be in the
// sandbox. Where the configuration names a secret, the gateway finds a sentinel.
func (s *Server) gateway(b *newSandbox) error {
	if !given(b.MCP) {
		return nil
	}
	servers, err := mcpgateway.ParseConfig(b.MCP, mcpgateway.Builtin().Merge(s.conf.Catalog))
	if err != nil {
		return fmt.Errorf("%w: %w", errRequest, err)
	}
	names, err := mcpgateway.CheckSecrets(servers)
	if err != nil {
		return fmt.Errorf("%w: %w", errRequest, err)
	}
	told := mcpgateway.Told{Catalog: mcpgateway.Catalog{}, Secrets: map[string]string{}}
	for _, n := range names {
		// Anything else is no secret's name, and could end the text that it stands in.
		if strings.Trim(n, "abcdefghijklmnopqrstuvwxyz0123456789_-") != "" {
			return fmt.Errorf("%w: mcp: the project has no secret %.100q", errRequest, n)
		}
		told.Secrets[n] = "${e2b.secrets." + n + "}"
	}
	for _, m := range servers {
		if e, ok := s.conf.Catalog[m.Name]; ok {
			told.Catalog[m.Name] = e
		}
	}
	if len(told.Catalog)+len(told.Secrets) == 0 {
		return nil
	}
	text, err := json.Marshal(told)
	if err != nil { // unreachable: texts
		return err
	}
	if b.EnvVars == nil {
		b.EnvVars = map[string]string{}
	}
	b.EnvVars[mcpgateway.Variable] = string(text)
	return nil
}
