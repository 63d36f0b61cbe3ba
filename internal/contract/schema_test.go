package contract_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"
	"go.yaml.in/yaml/v3"

	"postern/internal/contract"
)

func schema(t *testing.T) *jsonschema.Resolved {
	t.Helper()
	var s jsonschema.Schema
	if err := json.Unmarshal(contract.Schema(), &s); err != nil {
		t.Fatal(err)
	}
	r, err := s.Resolve(&jsonschema.ResolveOptions{ValidateDefaults: true})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// valid checks a YAML text against the schema.
func valid(t *testing.T, s *jsonschema.Resolved, text string) error {
	t.Helper()
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var plain any
	if err := json.Unmarshal(b, &plain); err != nil {
		t.Fatal(err)
	}
	return s.Validate(plain)
}

func TestSchema(t *testing.T) {
	s := schema(t)
	if err := valid(t, s, full); err != nil {
		t.Error(err)
	}
	if err := valid(t, s, string(parse(t, full).Canonical())); err != nil {
		t.Errorf("canonical form: %v", err)
	}
	examples, err := filepath.Glob("../../examples/contracts/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range examples {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := valid(t, s, string(b)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for from, to := range map[string]string{
		"version: 1":            "version: 2",
		"name: monthly-report":  "name: Monthly",
		"  allow:\n    - run":   "  allowed:\n    - run",
		"max: 2\n      time":    "max: -2\n      time",
		"time: 5m":              "time: 300",
		"read: [/data]":         "read: [data]",
		"write: [/work,":        "write: ['/work*',",
		"required: true\n  dir": "required: yes please\n  dir",
		"manager: pypi":         "manager: brew",
		"approval: first":       "approval: once",
		"cpus: 0.5":             "cpus: many",
		"memory: 512MiB":        "memory: 512MB",
		"type: csv":             "type: exe",
		"review: flagged":       "review: nobody",
		"exit: continue":        "exit: maybe",
		"keep: 10m":             "keep: 10m\n  proof: none",
		"    type: csv\n":       "",
		"template: base:v2":     "template: base@sha256:12",
	} {
		text := strings.Replace(full, from, to, 1)
		if text == full {
			t.Errorf("%q is not there", from)
		}
		if valid(t, s, text) == nil {
			t.Errorf("the schema accepts %q", to)
		}
	}
}

// TestSchemaHasEveryField compares the schema's fields with those of the types.
func TestSchemaHasEveryField(t *testing.T) {
	var root map[string]any
	if err := json.Unmarshal(contract.Schema(), &root); err != nil {
		t.Fatal(err)
	}
	var compare func(typ reflect.Type, s map[string]any, field string)
	compare = func(typ reflect.Type, s map[string]any, field string) {
		if typ.Kind() == reflect.Slice {
			items, _ := s["items"].(map[string]any)
			compare(typ.Elem(), items, field+"[]")
			return
		}
		if s["description"] == nil && s["const"] == nil && s["enum"] == nil && !strings.HasSuffix(field, "[]") {
			t.Errorf("%s: no description", field)
		}
		if typ.Kind() != reflect.Struct {
			return
		}
		props, _ := s["properties"].(map[string]any)
		var want []string
		for f := range typ.Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			want = append(want, name)
			below, ok := props[name].(map[string]any)
			if !ok {
				t.Errorf("%s.%s: not in the schema", field, name)
				continue
			}
			if y, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); y != name {
				t.Errorf("%s.%s: %s in YAML", field, name, y)
			}
			compare(f.Type, below, field+"."+name)
		}
		for name := range props {
			if !slices.Contains(want, name) {
				t.Errorf("%s.%s: only in the schema", field, name)
			}
		}
		if s["additionalProperties"] != false {
			t.Errorf("%s: accepts unknown fields", field)
		}
	}
	compare(reflect.TypeFor[contract.Contract](), root, "")
}
