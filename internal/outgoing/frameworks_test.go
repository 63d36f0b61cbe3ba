package outgoing

import (
	"encoding/json"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// A posted is a POST request for the frameworks of others.
type posted struct {
	Query string            `json:"query"`
	Env   map[string]string `json:"env"` // as CGI names them
	Body  string            `json:"body"`
}

// rackScript prints, for each line of JSON, the method by which Rack serves the request.
const rackScript = `
require "rack"
require "json"
require "stringio"
app = Rack::MethodOverride.new(lambda { |env| [200, {}, [env["REQUEST_METHOD"]]] })
STDIN.each_line do |line|
  q = JSON.parse(line)
  env = {"REQUEST_METHOD" => "POST", "PATH_INFO" => "/", "QUERY_STRING" => q["query"], "rack.input" => StringIO.new(q["body"].b), "rack.errors" => StringIO.new, "CONTENT_LENGTH" => q["body"].bytesize.to_s}.merge(q["env"] || {})
  begin
    puts app.call(env)[2][0]
  rescue StandardError
    puts "POST"
  end
end
`

// phpScript does so with PHP's own parsers of a query, of a form and of JSON, of which Symfony
// and Laravel take the method.
const phpScript = `
while (($line = fgets(STDIN)) !== false) {
  $q = json_decode($line, true);
  $type = $q["env"]["CONTENT_TYPE"] ?? "";
  parse_str($q["query"], $p);
  if (str_starts_with(strtolower($type), "application/x-www-form-urlencoded")) { parse_str($q["body"], $f); $p = $f + $p; }
  if (str_contains($type, "/json") || str_contains($type, "+json")) { $p = (json_decode($q["body"], true) ?: []) + $p; }
  $m = is_array($p) ? ($p["_method"] ?? $q["env"]["HTTP_X_HTTP_METHOD_OVERRIDE"] ?? "POST") : "POST";
  echo is_string($m) && preg_match("/^[A-Za-z]+$/D", $m) ? strtoupper($m) : "POST", "\n";
}
`

// TestFrameworksReadNoOtherMethod: Rack and PHP, as they are installed here, serve no
// request by a method that is not found in it.
func TestFrameworksReadNoOtherMethod(t *testing.T) {
	var list []posted
	names := []string{"_method", "%5fmethod", "_method[]", "[_method]", " _method", "+_method", ".method", "_method%00", "_method%00x", "_METHOD", "[[_method", "_method]", "_method[a", "x[_method]", "_%6dethod", "%255fmethod"}
	for _, name := range names {
		for _, sep := range []string{"&", ";", "&&", "; ", "& ", "\n", "%26"} {
			list = append(list, posted{"a=b" + sep + name + "=delete", nil, ""})
			for _, kind := range []string{formType, "Application/X-WWW-form-urlencoded ; charset=x", formType + ",text/plain", "", "text/plain", "multipart/related", "multipart/form-data", "multipart/form-data; boundary=", `multipart/form-data; boundary=""`, "multipart/mixed; a=b, boundary=;"} {
				q := posted{"", map[string]string{"CONTENT_TYPE": kind}, "a=b" + sep + name + "=delete"}
				if kind == "" {
					delete(q.Env, "CONTENT_TYPE")
				}
				list = append(list, q)
			}
		}
	}
	for _, kind := range []string{"multipart/form-data; boundary=b", "multipart/related; boundary=b", "multipart/mixed; boundary=\"b\"", "multipart/form-data; boundary=c; boundary=b", "Multipart/Form-Data;boundary=b;charset=utf-8"} {
		for _, head := range []string{
			`Content-Disposition: form-data; name="_method"`, `content-disposition:form-data;name=_method`, `Content-Disposition: form-data; name="\_method"`, `Content-Disposition: form-data; name="a"; name="_method"`,
			`Content-Disposition: form-data; filename="\"; name="_method"`, `Content-ID: _method`, `Content-ID:_method`, "X-A: Content-Disposition: form-data; name=_method", `Content-Disposition: form-data; name="%5Fmethod"`,
			"Content-Disposition: form-data;\r\n name=\"_method\"", `Content-Disposition: form-data; name*=utf-8''_method`, `Content-Disposition: form-data; name*0="_met"; name*1="hod"`, "Content-Disposition : form-data; name=_method",
			"Content-Disposition: form-data; name=\"_method\"\r\nContent-Transfer-Encoding: base64", "Content-Disposition: form-data; name=\"_method\"\r\nContent-Type: text/plain; charset=utf-16le", `Content-Disposition: attachment; name='_method'`,
			`Content-Disposition: form-data; name="[_method]"`, `Content-Disposition: form-data; name="_method[]"`, `Content-Disposition: ;;; name="_method";`, "Content-Type: text/plain\nContent-Disposition: form-data; name=_method",
		} {
			for _, end := range []string{"\r\n", "\n", "\r"} {
				body := strings.ReplaceAll(part(head, "DELETE"), "\r\n", end)
				list = append(list, posted{"", map[string]string{"CONTENT_TYPE": kind}, body}, posted{"", map[string]string{"CONTENT_TYPE": kind}, "before" + end + body + "after"})
			}
		}
	}
	for _, body := range []string{`{"_method":"DELETE"}`, `{"a":1,"\u005fmethod":"delete"}`, `{"_method":"POST","_method":"DELETE"}`, ` {"_method" : "DELETE" } `, `{"_method":["DELETE"]}`, `{"_method":"DELETE"`, `[{"_method":"DELETE"}]`, "\ufeff" + `{"_method":"DELETE"}`} {
		for _, kind := range []string{jsonType, "application/problem+json", "text/json; charset=utf-16"} {
			list = append(list, posted{"", map[string]string{"CONTENT_TYPE": kind}, body})
		}
	}
	list = append(list, posted{"", map[string]string{"HTTP_X_HTTP_METHOD_OVERRIDE": "delete"}, ""})

	var in strings.Builder
	for i := range list {
		b, err := json.Marshal(list[i])
		if err != nil {
			t.Fatal(err)
		}
		in.Write(append(b, '\n'))
	}
	for name, args := range map[string][]string{"ruby": {"-e", rackScript}, "php": {"-r", phpScript}} {
		t.Run(name, func(t *testing.T) {
			path, err := exec.LookPath(name)
			if err != nil || name == "ruby" && exec.CommandContext(t.Context(), path, "-e", `require "rack"`).Run() != nil {
				t.Fatalf("%s is not installed: make deps-test", name)
			}
			cmd := exec.CommandContext(t.Context(), path, args...)
			cmd.Stdin = strings.NewReader(in.String())
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Fields(string(out))
			if len(got) != len(list) {
				t.Fatalf("got %d answers to %d requests", len(got), len(list))
			}
			overridden := 0
			for i, m := range got {
				if m == "POST" {
					continue
				}
				overridden++
				r := &Request{Method: "POST", Query: list[i].Query, Header: http.Header{}, Body: []byte(list[i].Body), Whole: true}
				for k, v := range list[i].Env {
					r.Header.Add(strings.ReplaceAll(strings.TrimPrefix(k, "HTTP_"), "_", "-"), v)
				}
				if methods, unknown := r.Methods(); unknown == "" && !slices.Contains(methods, m) {
					t.Errorf("%+v is served as %s; found %q", list[i], m, methods)
				}
			}
			if overridden < 30 {
				t.Errorf("only %d of %d requests were overridden", overridden, len(list))
			}
			t.Logf("%d of %d requests were overridden", overridden, len(list))
		})
	}
}
