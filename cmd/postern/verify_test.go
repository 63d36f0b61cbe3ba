package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestVerifyMessage runs the command on the test vectors of the format.
func TestVerifyMessage(t *testing.T) {
	const vectors = "../../internal/statement/testdata/"
	raw, err := os.ReadFile(vectors + "person.eml")
	if err != nil {
		t.Fatal(err)
	}
	file := func(name string, data []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	keys := vectors + "keys.json"
	tests := []struct {
		name   string
		args   []string
		status int
		want   string
	}{
		{"true", []string{vectors + "person.eml", "--keys", keys}, 0, "approved by  a person"},
		{"by policy", []string{vectors + "policy.eml", "--keys", keys}, 0, "without a person"},
		{"for its recipient", []string{vectors + "person.eml", "--keys", keys, "--recipient", "bob@example.com"}, 0, "analyst@agents.example"},
		{"for another", []string{vectors + "person.eml", "--keys", keys, "--recipient", "eve@example.com"}, 1, "sent to others"},
		{"a hidden copy", []string{vectors + "hidden.eml", "--keys", keys, "--recipient", "eve@example.org"}, 0, "alone, whom its header"},
		{"altered", []string{file("x.eml", bytes.Replace(raw, []byte("42"), []byte("43"), 1)), "--keys", keys}, 1, "altered"},
		{"without keys of the domain", []string{vectors + "person.eml", "--keys", file("k.json", []byte(`{"version":1,"keys":[]}`))}, 1, "no key"},
		{"keys in the clear", []string{vectors + "person.eml", "--keys", "http://agents.example/keys"}, 1, "no https URL"},
		{"no statement", []string{file("y.eml", []byte("From: a@b\r\n\r\n"))}, 1, "no statement"},
		{"a domain that leads elsewhere", []string{file("z.eml", bytes.ReplaceAll(raw, []byte("d=agents.example"), []byte("d=evil.example/x?")))}, 1, "no domain"},
		{"no file", []string{"/nonexistent"}, 1, "no such file"},
		{"no argument", nil, 2, "FILE is missing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out, errs bytes.Buffer
			status := run(t.Context(), append([]string{"verify-message"}, tt.args...), &out, &errs)
			if text := out.String() + errs.String(); status != tt.status || !strings.Contains(text, tt.want) || (status == 0) != strings.Contains(text, "The statement is true") {
				t.Errorf("status %d, want %d and %q:\n%s", status, tt.status, tt.want, text)
			}
		})
	}
}
