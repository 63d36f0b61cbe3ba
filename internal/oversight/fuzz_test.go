package oversight

import (
	"slices"
	"testing"
)

// FuzzStands reads what an entry, or a row, says of how an action and its parts
// stand: whoever writes the database has written it.
func FuzzStands(f *testing.F) {
	f.Add("approved 2", "1:0 1:1", "2:0 1:1")
	f.Add("", "", "")
	f.Add("approved  9223372036854775808", ":", "-1:1 0:2")
	f.Fuzz(func(t *testing.T, s, then, now string) {
		if state, version, ok := parseStands(s); ok && stands(state, version) != s {
			if _, again, ok := parseStands(stands(state, version)); !ok || again != version {
				t.Errorf("%q is read as %q %d", s, state, version)
			}
		}
		// What was shut stays shut, however it is written.
		if then == "1:0" && goOn(then, now) && (now == "1:1" || now == "0:0" || now == "") {
			t.Errorf("%q goes on as %q", then, now)
		}
	})
}

// FuzzReadPayload reads payloads of which agents write parts: each member is in a field of
// the type, or is listed as unknown.
func FuzzReadPayload(f *testing.F) {
	for _, s := range []string{`{"a":"x","b":{"c":1},"d":[{"k":1}]}`, `{"a":"x","a":"y","A":"z"}`, `{"b":{"c":1,"c":2,"e":null}}`, `{"":1,".":2}`, `[]`, `null`, "{\"a\":\"\\ud800\"}", `{"b":null,"d":[null]} `} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var v struct {
			A string `json:"a"`
			B *struct {
				C int `json:"c"`
			} `json:"b"`
			D []map[string]int `json:"d"`
		}
		unknown, err := ReadPayload(payload, &v)
		if err != nil {
			return
		}
		members, err := Members(payload)
		if err != nil {
			t.Fatalf("%q was read, and has no members: %v", payload, err)
		}
		seen := map[string]bool{}
		for _, m := range members {
			known := !seen[m.Name] && slices.Contains([]string{"a", "b", "d"}, m.Name)
			seen[m.Name] = true
			if !known && !slices.Contains(unknown, m) {
				t.Errorf("%q: %q is in no field and not listed: %q", payload, m, unknown)
			}
		}
	})
}
