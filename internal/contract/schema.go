package contract

import (
	_ "embed" // for the schema
	"slices"
)

//go:embed schema.json
var schema []byte

// Schema returns the JSON Schema (draft 2020-12) of contracts and boundaries. It
// describes their form: fields, types and simple limits. [Parse] may refuse what the
// schema accepts.
func Schema() []byte { return slices.Clone(schema) }
