package main

import (
	"fmt"
	"os"

	"postern/internal/mcpgateway"
)

// mcpCatalog returns the operator's servers of the Model Context Protocol.
func (c *Config) mcpCatalog() (mcpgateway.Catalog, error) {
	if c.MCPCatalog == "" {
		return nil, nil //nolint:nilnil // no file: no further servers
	}
	b, err := os.ReadFile(c.MCPCatalog)
	if err != nil {
		return nil, fmt.Errorf("--mcp-catalog: %w", err)
	}
	list, err := mcpgateway.ParseCatalog(b)
	if err != nil {
		return nil, fmt.Errorf("--mcp-catalog: %s: %w", c.MCPCatalog, err)
	}
	return list, nil
}
