// Package docs holds those documents of this directory that the server serves.
package docs

import _ "embed" // for the documents

// OpenAPI is the description of the REST door, OpenAPI 3.1 in YAML.
//
//go:embed openapi.yaml
var OpenAPI []byte
