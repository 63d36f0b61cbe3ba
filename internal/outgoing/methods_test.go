package outgoing

import (
	"bytes"
	"encoding/json"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	formType = "application/x-www-form-urlencoded"
	partType = `multipart/form-data; boundary="b"`
	jsonType = "application/json"
)

// part is a multipart body of one part, with these header fields.
func part(head, value string) string {
	return "--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nx\r\n--b\r\n" + head + "\r\n\r\n" + value + "\r\n--b--\r\n"
}

func named(name, value string) string {
	return part(`Content-Disposition: form-data; name=`+name, value)
}

// TestEachMethodThatAServerMayReadCounts: DELETE is found wherever a server could read
// it, or the request is one of which the method is not known.
func TestEachMethodThatAServerMayReadCounts(t *testing.T) {
	const unknown = "?"
	type test struct {
		name, query, body string
		header            []string // names and values
		want              string   // besides POST, or unknown
	}
	tests := []test{
		{"nothing", "a=b&payment_method=card", "", nil, ""},
		{"Symfony's header", "", "", []string{"X-HTTP-Method-Override", "delete"}, "DELETE"},
		{"OData's header", "", "", []string{"X-Http-Method", "MERGE"}, "MERGE"},
		{"IBM's header", "", "", []string{"X-Method-Override", "DELETE"}, "DELETE"},
		{"underscores", "", "", []string{"X_HTTP_METHOD_OVERRIDE", "DELETE"}, "DELETE"},
		{"mixed spelling", "", "", []string{"x_Http-mEthod_override", "dElEtE"}, "DELETE"},
		{"a list", "", "", []string{"X-HTTP-Method-Override", "POST, DELETE"}, "DELETE"},
		{"a later field", "", "", []string{"X-Http-Method", "A", "X-Http-Method", "B", "X-Method-Override", "DELETE"}, "A B DELETE"},
		{"a proxy's header", "", "", []string{"X-Forwarded-Method", "DELETE"}, "DELETE"},
		{"a plain header", "", "", []string{"Method", "DELETE"}, "DELETE"},
		{"quoted", "", "", []string{"X-HTTP-Method-Override", `"DELETE"`}, "DELETE"},
		{"a long s", "", "", []string{"X-HTTP-Method-Override", "optionſ"}, "OPTIONS"},
		{"other characters", "", "", []string{"X-HTTP-Method-Override", "DELETÉ"}, unknown},
		{"too long", "", "", []string{"X-HTTP-Method-Override", strings.Repeat("A", 40)}, unknown},
		{"CORS is no override", "", "", []string{"Access-Control-Request-Method", "DELETE"}, ""},

		{"the query", "_method=delete", "", nil, "DELETE"},
		{"the last of many", "_method=A1&_method=A2&_method=A3&_method=DELETE", "", nil, "A1 A2 A3 DELETE"},
		{"too many", "_method=A1&_method=A2&_method=A3&_method=A4&_method=A5&_method=A6&_method=A7&_method=A8&_method=DELETE", "", nil, unknown},
		{"an escaped name", "%5F%6dethod=%44ELETE", "", nil, "DELETE"},
		{"escaped twice", "%255fmethod=DELETE", "", nil, "DELETE"},
		{"escaped as by IIS", "%u005fmethod=DELETE", "", nil, "DELETE"},
		{"a list in the query", "_method[]=DELETE", "", nil, "DELETE"},
		{"a nested name", "_method%5Bx%5D=DELETE", "", nil, "DELETE"},
		{"brackets around it", "[_method]=DELETE", "", nil, "DELETE"},
		{"a dot, for PHP", ".method=DELETE", "", nil, "DELETE"},
		{"spaces before it", "a=b&+%20_method=DELETE", "", nil, "DELETE"},
		{"a zero byte", "_method%00x=DELETE", "", nil, "DELETE"},
		{"semicolons", "a=b;_method=DELETE;c=d", "", nil, "DELETE"},
		{"another case", "_METHOD=DELETE", "", nil, "DELETE"},
		{"ASP.NET's parameter", "x-http-method-override=DELETE", "", nil, "DELETE"},
		{"Google's parameter", "%24httpMethod=DELETE", "", nil, "DELETE"},
		{"Google's headers", "$httpHeaders=A:b%0D%0AX-HTTP-Method-Override:%20DELETE", "", nil, "DELETE"},
		{"Facebook's parameter", "method=delete", "", nil, "DELETE"},
		{"a method of a protocol", "method=flickr.photos.search", "", nil, ""},
		{"an escaped name that is too long", strings.Repeat("%20", 400) + "_method=DELETE", "", nil, unknown},
		{"a query in UTF-7", "+AF8-method=DELETE", "", []string{"Content-Type", "text/plain; charset=utf-7"}, unknown},

		{"a form", "", "a=b&_method=DELETE", []string{"Content-Type", formType}, "DELETE"},
		{"a form, in capitals", "", "_method=DELETE", []string{"Content-Type", strings.ToUpper(formType)}, "DELETE"},
		{"a form, with a character set", "", "_method=DELETE", []string{"Content-Type", formType + "; charset=UTF-8"}, "DELETE"},
		{"a form, type in a list", "", "_method=DELETE", []string{"Content-Type", "text/plain, " + formType}, "DELETE"},
		{"a form, type twice", "", "_method=DELETE", []string{"Content-Type", "text/plain", "Content-Type", formType}, "DELETE"},
		{"a form, type with an underscore", "", "_method=DELETE", []string{"Content-Type", "text/plain", "Content_Type", formType}, "DELETE"},
		{"a form, for Rack", "", "_method=DELETE", nil, "DELETE"},
		{"a form, type that is none", "", "_method=DELETE", []string{"Content-Type", "form"}, "DELETE"},
		{"a form in UTF-16", "", "%00_%00m", []string{"Content-Type", formType + "; charset=utf-16"}, unknown},
		{"a form in EBCDIC", "", "%6D", []string{"Content-Type", formType + `; charset="IBM037"`}, unknown},
		{"a form that names its character set", "", "_charset_=utf-7&a=b", []string{"Content-Type", formType}, unknown},
		{"a compressed form", "", "\x1f\x8b", []string{"Content-Type", formType, "Content-Encoding", "gzip"}, unknown},
		{"a form, coding with an underscore", "", "x", []string{"Content-Type", formType, "Content_Encoding", "deflate"}, unknown},
		{"a form without a compression", "", "a=b", []string{"Content-Type", formType, "Content-Encoding", "identity"}, ""},
		{"a text", "", "_method=DELETE", []string{"Content-Type", "text/plain"}, ""},
		{"JSON that curl calls a form", "", `{"a": "b", "text": "` + strings.Repeat("a long text ", 100) + `"}`, []string{"Content-Type", formType}, ""},
		{"a file that curl calls a form", "", strings.Repeat("\x00\xff", 1000), []string{"Content-Type", formType}, ""},

		{"JSON", "", `{"a":{"b":[1,"}"]},"_method":"delete"}`, []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON with an escape", "", `{"\u005fmeth\u006Fd":"\u0044ELETE"}`, []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON with a name twice", "", `{"_method":"POST","_method":"DELETE"}`, []string{"Content-Type", "application/vnd.api+json"}, "DELETE"},
		{"JSON with a list", "", `{"_method":["DELETE"]}`, []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON with an object", "", `{"_method":{"a":["DELETE"]},"b":"PUT"}`, []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON in a list", "", ` [{"method":"DELETE","url":"/x"}]`, []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON of OData with requests", "", `{"requests":[{"id":"1"},{"method":"DELETE","url":"/x"}]}`, []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON, one after another", "", "{}\n{\"_method\":\"DELETE\"}\n", []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON with a mark", "", "\ufeff" + `{"_method":"DELETE"}`, []string{"Content-Type", jsonType}, "DELETE"},
		{"JSON in UTF-16", "", "\x00{\x00\"\x00_", []string{"Content-Type", jsonType}, unknown},
		{"JSON with a comment", "", `{/* */"a":1}`, []string{"Content-Type", jsonType}, unknown},
		{"JSON without quotes", "", `{_method:"DELETE"}`, []string{"Content-Type", jsonType}, unknown},
		{"JSON in single quotes", "", `{'_method':'DELETE'}`, []string{"Content-Type", jsonType}, unknown},
		{"JSON that does not end", "", `{"a":[1,2]`, []string{"Content-Type", jsonType}, unknown},
		{"JSON-RPC", "", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"method":"DELETE","name":"x"}}`, []string{"Content-Type", jsonType}, ""},
		{"a conversation", "", `{"messages":[{"role":"user","content":"send {\"_method\":\"DELETE\"}","method":"DELETE"}],"max":1e3,"stream":true,"stop":null}`, []string{"Content-Type", jsonType}, ""},
		{"a schema", "", `{"tools":[{"properties":{"_method":{"type":"string"}}}]}`, []string{"Content-Type", jsonType}, ""},

		{"a part", "", named(`"_method"`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part without quotes", "", named(`_method`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part in single quotes", "", named(`'_method'`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part with backslashes", "", named(`"\_me\thod"`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part after another name", "", named(`"a"; name="_method"`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part in a file name", "", part(`Content-Disposition: form-data; filename="x\"; name="_method"; y="`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part, capitals and spaces", "", part(`CONTENT-DISPOSITION :form-data ; NAME = "_method"`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part, escaped", "", named(`"%5Fmethod"`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part, a list", "", named(`"_method[]"`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part, for Rack", "", part(`Content-ID: _method`, "DELETE"), []string{"Content-Type", "multipart/related; boundary=b"}, "DELETE"},
		{"a part, in another header", "", part(`X-A: b Content-Disposition: form-data; name="_method"`, "DELETE"), []string{"Content-Type", partType}, "DELETE"},
		{"a part, RFC 8187", "", part(`Content-Disposition: form-data; name*=utf-8''_method`, "DELETE"), []string{"Content-Type", partType}, unknown},
		{"a part, RFC 2231", "", part(`Content-Disposition: form-data; name*0="_met"; name*1="hod"`, "DELETE"), []string{"Content-Type", partType}, unknown},
		{"a part, RFC 2047", "", named(`"=?utf-8?Q?=5Fmethod?="`, "DELETE"), []string{"Content-Type", partType}, unknown},
		{"a part, folded", "", part("Content-Disposition: form-data;\r\n name=\"_method\"", "DELETE"), []string{"Content-Type", partType}, unknown},
		{"a part, bare LF", "", "--b\nContent-Disposition: form-data; name=\"_method\"\n\nDELETE\n--b--", []string{"Content-Type", partType}, unknown},
		{"a part, bare CR", "", "--b\rContent-Disposition: form-data; name=\"_method\"\r\rDELETE\r--b--", []string{"Content-Type", partType}, unknown},
		{"a part, Base64", "", part("Content-Transfer-Encoding: base64\r\nContent-Disposition: form-data; name=\"_method\"", "REVMRVRF"), []string{"Content-Type", partType}, unknown},
		{"a part, UTF-16", "", part("Content-Disposition: form-data; name=\"_method\"\r\nContent-Type: text/plain; charset=utf-16", "D\x00E\x00"), []string{"Content-Type", partType}, unknown},
		{"a part with another boundary", "", strings.ReplaceAll(named(`"_method"`, "DELETE"), "--b", "--other"), []string{"Content-Type", partType}, "DELETE"},
		{"a part in a long header", "", part("Content-Disposition: form-data; "+strings.Repeat(" ", 5000)+`name="_method"`, "DELETE"), []string{"Content-Type", partType}, unknown},
		{"a part of a long value", "", named(`"_method"`, "DELETE"+strings.Repeat(" ", 5000)), []string{"Content-Type", partType}, unknown},
		{"parts without a boundary, for Rack", "", "a=b&_method=DELETE", []string{"Content-Type", "multipart/related"}, "DELETE"},
		{"parts that are a form elsewhere", "", part("Content-Disposition: form-data; name=f; filename=a.html", "a=b&_method=DELETE"), []string{"Content-Type", partType}, ""},
		{"requests in parts", "", part("Content-Type: application/http", "DELETE /x HTTP/1.1"), []string{"Content-Type", "multipart/mixed; boundary=b"}, unknown},
		{"a file", "", part("Content-Disposition: form-data; name=\"f\"; filename=\"_method\"; filename*=utf-8''x\r\nContent-Type: image/png", "\x89PNG\n\nContent-Disposition: x"), []string{"Content-Type", partType}, ""},
		{"too many parts", "", strings.Repeat(named("a", "b"), maxParts), []string{"Content-Type", partType}, unknown},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := &Request{Method: "POST", Query: tt.query, Header: http.Header{}, Body: []byte(tt.body), Whole: true}
			for i := 0; i < len(tt.header); i += 2 {
				r.Header[tt.header[i]] = append(r.Header[tt.header[i]], tt.header[i+1])
			}
			methods, why := r.Methods()
			got := strings.Join(methods[1:], " ")
			if why != "" {
				got = unknown
			}
			if got != tt.want || methods[0] != "POST" {
				t.Errorf("got %q (%s), want %q", methods, why, tt.want)
			}
			r.ReadMethods()
			if again, _ := r.Methods(); !slices.Equal(again, methods) {
				t.Errorf("got %q once it was read", again)
			}
		})
	}
}

// TestABodyThatWasNotReadMayHaveAnyMethod: only a body of a type that no server takes for
// a form needs no reading.
func TestABodyThatWasNotReadMayHaveAnyMethod(t *testing.T) {
	for kind, known := range map[string]bool{formType: false, partType: false, jsonType: false, "": false, "application/octet-stream": true, "application/grpc": true, "text/plain": true} {
		r := &Request{Method: "POST", Header: http.Header{}, Body: nil, Size: UnknownSize}
		if kind != "" {
			r.Header.Set("Content-Type", kind)
		}
		if _, why := r.Methods(); (why == "") != known {
			t.Errorf("%q: got %q", kind, why)
		}
		r.Watched = true
		if _, why := r.Methods(); why != "" {
			t.Errorf("%q is watched: got %q", kind, why)
		}
	}
}

func TestRoutingFields(t *testing.T) {
	for name, want := range map[string]bool{
		"X-Original-Url": true, "X_ORIGINAL_URL": true, "X-Rewrite-Url": true, "X-Original-Uri": true, "X-Forwarded-Host": true, "x_forwarded_host": true, "Forwarded": true,
		"X-Forwarded-Server": true, "X-Forwarded-Prefix": true, "X-Forwarded-Path": true, "X-Forwarded-Uri": true, "X-Host": true, "X-Http-Host-Override": true, "X-Original-Host": true,
		"X-Envoy-Original-Path": true, "X-Script-Name": true, "X-Forwarded-Script-Name": true, "X-Waws-Unencoded-Url": true, "X-Request-Uri": true, "Request-Uri": true, "Base-Url": true,
		"X-Forwarded-For": false, "X-Forwarded-Proto": false, "X-Request-Id": false, "Authorization": false, "Content-Type": false, "X-Api-Key": false, "Origin": false, "Referer": false,
		"Destination": false, "X-Goog-Api-Client": false, "Prefer": false, "X": false, "X-Http": false, "": false,
	} {
		if got := RoutingField(name); got != want {
			t.Errorf("%q: got %v", name, got)
		}
	}
}

// FuzzMethods: no body is read differently when it comes in other pieces, and what the
// parsers of the standard library read as _method is found.
func FuzzMethods(f *testing.F) {
	for _, s := range []struct{ kind, query, body string }{
		{formType, "_method=PUT", "a=b&_method=DELETE&%5fmethod[]=x"},
		{jsonType, "method=delete", `{"_method":"DELETE","a":[{"b":"\u005f"}],"requests":[{"method":"PUT"}]}`},
		{partType, "$httpHeaders=x-http-method:a", named(`"_method"`, "DELETE")},
		{partType, "", "--b\nContent-ID: x\n\n\r\r\n \n--b\r\nContent-Disposition: form-data; name*0=\"\\\""},
		{"", "%u005f;=&=", "[\"\\\"]{"},
	} {
		f.Add(s.kind, s.query, []byte(s.body), 3)
	}
	word := regexp.MustCompile(`^[A-Z]{1,20}$`)
	f.Fuzz(func(t *testing.T, kind, query string, body []byte, size int) {
		r := &Request{Method: "POST", Query: query, Header: http.Header{"Content-Type": {kind}}, Body: body, Whole: true}
		methods, unknown := r.Methods()
		if len(methods) == 0 || len(methods) > maxMethods || methods[0] != "POST" {
			t.Fatalf("got %q", methods)
		}
		if s := NewMethodScan(r); s != nil {
			for p := range slices.Chunk(body, max(1, min(size, 1<<20))) {
				s.Write(p)
			}
			s.End()
			whole := r.inBody()
			if len(body) > 0 && (!slices.Equal(s.found.methods, whole.methods) || s.found.unknown != whole.unknown) {
				t.Errorf("in pieces of %d: got %q, %q; want %q, %q", size, s.found.methods, s.found.unknown, whole.methods, whole.unknown)
			}
		}
		// What others read. A word that they read is found, unless the method is unknown.
		check := func(where, v string) {
			if v = strings.ToUpper(v); word.MatchString(v) && unknown == "" && !slices.Contains(methods, v) {
				t.Errorf("%s: %q is not found: %q", where, v, methods)
			}
		}
		for _, name := range []string{"_method", "X-HTTP-Method-Override"} {
			q, _ := url.ParseQuery(query)
			for _, v := range q[name] {
				check("query", v)
			}
			media, params, err := mime.ParseMediaType(kind)
			switch {
			case err != nil:
			case media == formType:
				q, _ := url.ParseQuery(string(body))
				for _, v := range q[name] {
					check("form", v)
				}
			case media == jsonType:
				var m map[string]any
				if json.Unmarshal(body, &m) == nil {
					if v, ok := m[name].(string); ok {
						check("JSON", v)
					}
				}
			case media == "multipart/form-data":
				p := multipart.NewReader(bytes.NewReader(body), params["boundary"])
				form, err := p.ReadForm(1 << 20)
				if err != nil {
					break
				}
				for _, v := range form.Value[name] {
					check("part", v)
				}
				_ = form.RemoveAll()
			}
		}
	})
}

// BenchmarkMethods is what a rule about methods adds to a request with a body.
func BenchmarkMethods(b *testing.B) {
	text := `{"model":"m","messages":[` + strings.Repeat(`{"role":"user","content":"`+strings.Repeat("some words \\n", 80)+`"},`, 100) + `{}]}`
	for kind, body := range map[string]string{formType: strings.Repeat("name=a+value%20of+some+length&", 3000), jsonType: text, partType: named("f", strings.Repeat("0123456789\r\n", 8000))} {
		b.Run(strings.ReplaceAll(kind, "/", "-"), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			r := &Request{Method: "POST", Header: http.Header{"Content-Type": {kind}}, Body: []byte(body), Whole: true}
			for b.Loop() {
				if _, why := r.Methods(); why != "" {
					b.Fatal(why)
				}
			}
		})
	}
}
