package oversight

import "testing"

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
