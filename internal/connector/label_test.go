package connector

import "testing"

func TestLabelsOfProviders(t *testing.T) {
	for name, want := range map[string]string{
		"Work": "work", "My Projects/2026": "my-projects/2026", "$Forwarded": "forwarded", "Übung  macht": "ubung-macht",
		"INBOX": "", "read": "", "日本": "", "": "", "..": "", "Trash": "", "a/": "a",
	} {
		got, ok := Label(name)
		if !ok {
			got = ""
		}
		if got != want {
			t.Errorf("label of %q: got %q, want %q", name, got, want)
		}
	}
}
