package inject

import (
	"net/http"
	"strings"
	"testing"
)

// TestSpacesAreMaskedAsPlus: a server that decodes a form but for its spaces does not
// hand over a value with a space.
func TestSpacesAreMaskedAsPlus(t *testing.T) {
	m := NewMask(Value{Value: []byte(`canary "two" words+`)})
	for _, text := range []string{`canary+"two"+words+`, `canary+%22two%22+words%2B`} {
		h := http.Header{"X": {"k=" + text + "."}}
		if m.Header(h); strings.Contains(h.Get("X"), "two") {
			t.Errorf("%s is shown as %s", text, h.Get("X"))
		}
	}
}
