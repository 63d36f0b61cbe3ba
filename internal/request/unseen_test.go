package request_test

import (
	"net/http"
	"strings"
	"testing"

	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/request"
)

// TestUnseenCharactersOfARequestAreShownAndNamed: the reviewer sees them in each part, also
// decoded from a form.
func TestUnseenCharactersOfARequestAreShownAndNamed(t *testing.T) {
	a := request.New(nil, nil, nil, nil, nil, 0)
	for _, tt := range []struct{ name, kind, path, header, body, want, code string }{
		{"soft hyphen in JSON", "application/json", "/", "", "{\"a\": \"pay\u00adpal\"}", `pay\u{ad}pal`, "U+00AD"},
		{"selector in text", "text/plain", "/", "", "x\ufe0fy", `x\u{fe0f}y`, "U+FE0F"},
		{"separator in text", "text/plain", "/", "", "x\u2028y", `x\u{2028}y`, "U+2028"},
		{"space in a form", "application/x-www-form-urlencoded", "/", "", "a=x%C2%A0y", `x\u{a0}y`, "U+00A0"},
		{"tags in a part", "multipart/form-data; boundary=b", "/", "", "--b\r\n\r\nx\U000e0041y\r\n--b--", `x\u{e0041}y`, "U+E0041"},
		{"in a header", "", "/", "x\u202ey", "", `x\u{202e}y`, "U+202E"},
		{"in the path", "", "/x\u200by", "", "", `x\u{200b}y`, "U+200B"},
		{"none", "text/plain", "/", "", "two\r\nlines ❤️", "two\nlines ❤️", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &outgoing.Request{
				Method: "POST", Scheme: "https", Host: "api.example.com", Port: 443, Path: tt.path, Whole: true, Body: []byte(tt.body), Size: int64(len(tt.body)),
				Header: http.Header{"Content-Type": {tt.kind}, "X-A": {tt.header}},
			}
			payload, err := r.Encode()
			if err != nil {
				t.Fatal(err)
			}
			v, err := a.Show(oversight.Action{ID: "act_1", Kind: policy.KindRequest, Payload: payload})
			if err != nil {
				t.Fatal(err)
			}
			all := v.Text
			for _, f := range v.Fields {
				all += "\n" + f.Value
			}
			notes := strings.Join(v.Notes, "\n")
			if !strings.Contains(all, tt.want) || tt.code != "" && !strings.Contains(notes, tt.code) || tt.code == "" && strings.Contains(notes, "nobody sees") {
				t.Errorf("the reviewer is shown %q with %q", all, notes)
			}
		})
	}
}
