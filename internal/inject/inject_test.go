package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"postern/internal/outgoing"
)

var (
	sentinelA   = "pst_" + strings.Repeat("a2", 20)
	sentinelB   = "pst_" + strings.Repeat("b3", 20)
	sentinelAWS = "pst_" + strings.Repeat("c4", 20)
	accessAWS   = "AKIA" + strings.Repeat("D5", 8)
	unknown     = "pst_" + strings.Repeat("z7", 20)
)

func testSecrets() []Secret {
	return []Secret{
		{ID: "sec_a", Name: "github", Sentinel: sentinelA, Hosts: []string{"api.example.com", "*.git.example"}, Kind: KindValue},
		{ID: "sec_b", Name: "rule", Sentinel: sentinelB, RuleHosts: []string{"api.example.com"}, Kind: KindValue},
		{ID: "sec_c", Name: "aws", Sentinel: sentinelAWS, AccessKey: accessAWS, Hosts: []string{"*.amazonaws.com"}, Kind: KindAWS},
	}
}

func testValues() map[string]Value {
	return map[string]Value{
		"sec_a": {Value: []byte(`va/l+u"e é`)},
		"sec_b": {Value: []byte("other")},
		"sec_c": {Value: []byte(exampleSecret), AccessKey: "AKIAREALREALREALREAL", SessionToken: []byte("session/token+=")},
	}
}

func request() *outgoing.Request {
	return &outgoing.Request{Method: "POST", Scheme: "https", Host: "api.example.com", Port: 443, Path: "/", Header: http.Header{}, Whole: true}
}

func TestSecretsGoOnlyToTheirHosts(t *testing.T) {
	cases := []struct {
		secret Secret
		host   string
		want   bool
	}{
		{Secret{Hosts: []string{"api.example.com"}}, "api.example.com", true},
		{Secret{Hosts: []string{"api.example.com"}}, "API.example.com", false},
		{Secret{Hosts: []string{"api.example.com"}}, "api.example.com.evil.example", false},
		{Secret{Hosts: []string{"api.example.com"}}, "xapi.example.com", false},
		{Secret{Hosts: []string{"*.example.com"}}, "api.example.com", true},
		{Secret{Hosts: []string{"*.example.com"}}, "a.b.example.com", true},
		{Secret{Hosts: []string{"*.example.com"}}, "example.com", false},
		{Secret{Hosts: []string{"*.example.com"}}, ".example.com", false},
		{Secret{Hosts: []string{"*.example.com"}}, "evilexample.com", false},
		{Secret{Hosts: []string{"*"}}, "example.com", false},
		{Secret{Hosts: []string{"*com"}}, "example.com", false},
		{Secret{Hosts: []string{""}}, "", false},
		{Secret{}, "example.com", false},
		{Secret{RuleHosts: []string{"example.com"}}, "example.com", true},
		{Secret{Hosts: []string{"a.example"}, RuleHosts: []string{"example.com"}}, "example.com", false},
	}
	for _, c := range cases {
		if got := c.secret.Usable(c.host); got != c.want {
			t.Errorf("Usable(%q) of %q and rules %q = %v, want %v", c.host, c.secret.Hosts, c.secret.RuleHosts, got, c.want)
		}
	}
}

// places are opened for the secret github by the tests.
func places() []Place {
	const host = "api.example.com"
	return []Place{
		{Host: host, Method: "POST", Path: "/oauth/token", In: InForm, Name: "client_secret"},
		{Host: host, Method: "POST", Path: "/oauth/token", In: InJSON, Name: "/client/secret"},
		{Host: host, Method: "POST", Path: "/oauth/token", In: InJSON, Name: "/keys/1"},
		{Host: host, Method: "POST", Path: "/v1/*", In: InQuery, Name: "key"},
		{Host: host, Method: "POST", Path: "/v1/*", In: InCookie, Name: "sid"},
		{Host: host, Method: "POST", Path: "/bot{secret}/*", In: InPath},
		{Host: host, Method: "POST", Path: "/hooks/{secret}", In: InPath},
	}
}

// openedSecrets are the secrets of the tests, with opened places.
func openedSecrets() []Secret {
	secrets := testSecrets()
	secrets[0].Headers = []string{"Authorization", "Proxy-Authorization", "X-Key"}
	secrets[0].Places = places()
	return secrets
}

func basicOf(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }

func TestValuesGoWhereTheSecretSaysInTheEncodingOfThePlace(t *testing.T) {
	plain := `va/l+u"e é`
	form := func(body string) func(r *outgoing.Request) {
		return func(r *outgoing.Request) {
			r.Path = "/oauth/token"
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			r.Body = []byte(body)
		}
	}
	jsonBody := func(body string) func(r *outgoing.Request) {
		return func(r *outgoing.Request) {
			r.Path = "/oauth/token"
			r.Header.Set("Content-Type", "application/vnd.api+json; charset=utf-8")
			r.Body = []byte(body)
		}
	}
	header := func(name string) func(r *outgoing.Request) string {
		return func(r *outgoing.Request) string { return r.Header.Get(name) }
	}
	body := func(r *outgoing.Request) string { return string(r.Body) }
	path := func(r *outgoing.Request) string { return r.Path }
	query := func(r *outgoing.Request) string { return r.Query }
	escapedSentinel := `\u0070` + sentinelA[1:]
	cases := []struct {
		name        string
		value       string
		set         func(r *outgoing.Request)
		where, want string
		get         func(r *outgoing.Request) string
	}{
		{"bearer", plain, func(r *outgoing.Request) { r.Header.Set("Authorization", "Bearer "+sentinelA) }, "header Authorization", "Bearer " + plain, header("Authorization")},
		{"twice in a field", plain, func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA+sentinelA+"x") }, "header X-Key", plain + plain + "x", header("X-Key")},
		{"password of Basic", plain, func(r *outgoing.Request) { r.Header.Set("Authorization", basicOf("me:"+sentinelA)) }, "header Authorization", basicOf("me:" + plain), header("Authorization")},
		{"user of Basic", plain, func(r *outgoing.Request) {
			r.Header.Set("Proxy-Authorization", strings.Replace(basicOf(sentinelA+":x"), "Basic", "bAsIc", 1))
		}, "header Proxy-Authorization", "bAsIc" + basicOf(plain + ":x")[5:], header("Proxy-Authorization")},
		{"cookie", "va.l-ue", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Header.Set("Cookie", "a=1; sid="+sentinelA+"; b=2") }, "cookie sid", "a=1; sid=va.l-ue; b=2", header("Cookie")},
		{"path of a bot", plain, func(r *outgoing.Request) { r.Path = "/bot" + sentinelA + "/x%20y" }, "path", "/bot" + url.PathEscape(plain) + "/x%20y", path},
		{"last segment of the path", plain, func(r *outgoing.Request) { r.Path = "/hooks/" + sentinelA }, "path", "/hooks/" + url.PathEscape(plain), path},
		{"query", plain, func(r *outgoing.Request) { r.Path = "/v1/x"; r.Query = "a=%20+&key=" + sentinelA + "&b" }, "query key", "a=%20+&key=" + url.QueryEscape(plain) + "&b", query},
		{"escaped query", plain, func(r *outgoing.Request) { r.Path = "/v1/x"; r.Query = "k%65y=%70%73t%5f" + sentinelA[4:] }, "query key", "k%65y=" + url.QueryEscape(plain), query},
		{"form of a token endpoint", plain, form("a=%7B&client_secret=" + sentinelA), "form client_secret", "a=%7B&client_secret=" + url.QueryEscape(plain), body},
		{"JSON of a token endpoint", plain, jsonBody(`{"a":"\\u0041","client":{"id":[{}, 1], "secret" : "` + escapedSentinel + `"}}`), "json /client/secret", `{"a":"\\u0041","client":{"id":[{}, 1], "secret" : "va/l+u\"e é"}}`, body},
		{"JSON in a list", plain, jsonBody(`{"keys":[null,"` + sentinelA + `"]}`), "json /keys/1", `{"keys":[null,"va/l+u\"e é"]}`, body},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := request()
			c.set(r)
			if len(r.Body) > 0 {
				r.Header.Set("Content-Length", "999")
			}
			found := Find(r, openedSecrets())
			if len(found.Uses) != 1 || found.Uses[0].Secret != "github" || found.Uses[0].Where != c.where || found.Uses[0].Sentinel != sentinelA || len(found.Foreign)+len(found.Stays) > 0 {
				t.Errorf("Find: %+v", found)
			}
			values := testValues()
			values["sec_a"] = Value{Value: []byte(c.value)}
			if err := Apply(r, openedSecrets(), values); err != nil {
				t.Fatal(err)
			}
			if got := c.get(r); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if len(r.Body) > 0 && (r.Size != int64(len(r.Body)) || r.Header.Get("Content-Length") == "999") {
				t.Errorf("size %d and Content-Length %s of %d bytes", r.Size, r.Header.Get("Content-Length"), len(r.Body))
			}
		})
	}
}

// TestPlaceholdersElsewhereStayText has what agents send without meaning a credential,
// and what attackers send to have a value said back. None of it gets a value, and none
// of it is refused.
func TestPlaceholdersElsewhereStayText(t *testing.T) {
	media := func(media, body string) func(r *outgoing.Request) {
		return func(r *outgoing.Request) {
			r.Path = "/oauth/token"
			r.Header.Set("Content-Type", media)
			r.Body = []byte(body)
		}
	}
	const formType, jsonType = "application/x-www-form-urlencoded", "application/json"
	for name, c := range map[string]struct {
		where string
		set   func(r *outgoing.Request)
	}{
		"transcript":                      {"json /messages/0/content", media(jsonType, `{"messages":[{"role":"user","content":"the environment is KEY=`+sentinelA+` and PATH=/bin"}]}`)},
		"whole message":                   {"json /messages/0/content", media(jsonType, `{"messages":[{"content":"`+sentinelA+`"}]}`)},
		"JSON beside other text":          {"json /client/secret", media(jsonType, `{"client":{"secret":"SPELL:`+sentinelA+`"}}`)},
		"key of JSON":                     {"body", media(jsonType, `{"`+sentinelA+`":1}`)},
		"opened field in another object":  {"json /x/client/secret", media(jsonType, `{"x":{"client":{"secret":"`+sentinelA+`"}}}`)},
		"malformed JSON":                  {"body", media(jsonType, `{"client":{"secret":"`+sentinelA+`"}`)},
		"JSON of curl -d":                 {"body", media(formType, `{"client":{"secret":"`+sentinelA+`"}}`)},
		"form with another name":          {"form code", media(formType, "code="+sentinelA)},
		"form beside other text":          {"form client_secret", media(formType, "client_secret=x"+sentinelA)},
		"name of a form field":            {"body", media(formType, sentinelA+"=1")},
		"form at another path":            {"form client_secret", func(r *outgoing.Request) { media(formType, "client_secret="+sentinelA)(r); r.Path = "/oauth/tokens" }},
		"form with another method":        {"form client_secret", func(r *outgoing.Request) { media(formType, "client_secret="+sentinelA)(r); r.Method = "PUT" }},
		"form that overrides its method":  {"form client_secret", media(formType, "_method=DELETE&client_secret="+sentinelA)},
		"query that overrides the method": {"query key", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Query = "_method=PUT&key=" + sentinelA }},
		"header that overrides the method": {"path", func(r *outgoing.Request) {
			r.Path = "/hooks/" + sentinelA
			r.Header.Set("X-Http-Method-Override", "DELETE")
		}},
		"two content types": {"body", func(r *outgoing.Request) {
			media(formType, "client_secret="+sentinelA)(r)
			r.Header.Add("Content-Type", "text/plain")
		}},
		"compressed form": {"body", func(r *outgoing.Request) {
			media(formType, "client_secret="+sentinelA)(r)
			r.Header.Set("Content-Encoding", "gzip")
		}},
		"form that is not whole":  {"body", func(r *outgoing.Request) { media(formType, "client_secret="+sentinelA)(r); r.Whole = false }},
		"multipart":               {"body", media("multipart/form-data; boundary=x", "--x\r\nContent-Disposition: form-data; name=client_secret\r\n\r\n"+sentinelA+"\r\n--x--")},
		"text":                    {"body", media("text/plain", sentinelA)},
		"gRPC":                    {"body", media("application/grpc+proto", "\x00\x00\x00\x00\x2c"+sentinelA)},
		"path":                    {"path", func(r *outgoing.Request) { r.Path = "/v1/" + sentinelA }},
		"path beside other text":  {"path", func(r *outgoing.Request) { r.Path = "/botx" + sentinelA + "/sendMessage" }},
		"path and more":           {"path", func(r *outgoing.Request) { r.Path = "/hooks/" + sentinelA + "/x" }},
		"query":                   {"query q", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Query = "q=" + sentinelA }},
		"query beside other text": {"query key", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Query = "key=" + sentinelA + ".x" }},
		"name in the query":       {"query", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Query = sentinelA + "=key" }},
		"another cookie":          {"cookie theme", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Header.Set("Cookie", "theme="+sentinelA) }},
		"cookie in quotes":        {"cookie sid", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Header.Set("Cookie", `sid="`+sentinelA+`"`) }},
		"another header":          {"header X-Note", func(r *outgoing.Request) { r.Header.Set("X-Note", sentinelA) }},
		"user agent":              {"header User-Agent", func(r *outgoing.Request) { r.Header.Set("User-Agent", "agent "+sentinelA) }},
		"name of a header":        {"name of a header field", func(r *outgoing.Request) { r.Header.Set("X-"+sentinelA, "1") }},
		"host":                    {"host", func(r *outgoing.Request) { r.Host = sentinelA + ".git.example" }},
		"Basic in another header": {"header X-Note", func(r *outgoing.Request) { r.Header.Set("X-Note", "Basic "+sentinelA) }},
	} {
		t.Run(name, func(t *testing.T) {
			r := request()
			c.set(r)
			before := *r
			before.Header, before.Body = r.Header.Clone(), bytes.Clone(r.Body)
			found := Find(r, openedSecrets())
			if len(found.Uses)+len(found.Foreign) > 0 || len(found.Stays) != 1 || found.Stays[0].Secret != "github" || found.Stays[0].Where != c.where {
				t.Errorf("Find: %+v, want it to stay in %q", found, c.where)
			}
			if err := Apply(r, openedSecrets(), testValues()); err != nil {
				t.Fatal(err)
			}
			if r.Path != before.Path || r.Query != before.Query || !bytes.Equal(r.Body, before.Body) || !cmp.Equal(r.Header, before.Header) {
				t.Errorf("it became %+v", r)
			}
		})
	}
}

// TestStaysNameThePlaceToOpen: what Find names, opened, has the value put in.
func TestStaysNameThePlaceToOpen(t *testing.T) {
	for name, set := range map[string]func(r *outgoing.Request){
		"form": func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			r.Body = []byte("client_secret=" + sentinelA)
		},
		"JSON": func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "application/json")
			r.Body = []byte(`{"a/b":{"~":["` + sentinelA + `"]}}`)
		},
		"query":  func(r *outgoing.Request) { r.Query = "key=" + sentinelA },
		"cookie": func(r *outgoing.Request) { r.Header.Set("Cookie", "sid="+sentinelA) },
		"path":   func(r *outgoing.Request) { r.Path = "/bot" + sentinelA + "/send" },
		"header": func(r *outgoing.Request) { r.Header.Set("x-token", sentinelA) },
	} {
		t.Run(name, func(t *testing.T) {
			secrets := testSecrets()
			r := request()
			set(r)
			found := Find(r, secrets)
			if len(found.Stays) != 1 || found.Stays[0].Open == nil && found.Stays[0].Header == "" {
				t.Fatalf("Find: %+v, want a place to open", found)
			}
			if s := found.Stays[0]; s.Open != nil {
				secrets[0].Places = []Place{*s.Open}
			} else {
				secrets[0].Headers = []string{s.Header}
			}
			if found := Find(r, secrets); len(found.Uses) != 1 || len(found.Stays) > 0 {
				t.Errorf("with the place open: %+v", found)
			}
		})
	}
}

func TestFieldsThatHostsAreKnownToUse(t *testing.T) {
	for _, c := range []struct {
		host, field string
		listed      []string
		want        bool
	}{
		{"api.anthropic.com", "Authorization", nil, true},
		{"api.anthropic.com", "x-api-key", nil, true},
		{"api.anthropic.com", "Api-Key", nil, false},
		{"api.example.com", "X-Api-Key", nil, false},
		{"generativelanguage.googleapis.com", "X-Goog-Api-Key", nil, true},
		{"googleapis.com", "X-Goog-Api-Key", nil, false},
		{"api.anthropic.com", "X-Api-Key", []string{"Authorization"}, false},
		{"api.anthropic.com", "X-Token", []string{"X-Token"}, true},
	} {
		s := Secret{ID: "sec_k", Name: "k", Sentinel: sentinelA, Hosts: []string{c.host}, Headers: c.listed}
		r := request()
		r.Host = c.host
		r.Header.Set(c.field, sentinelA)
		if got := len(Find(r, []Secret{s}).Uses) == 1; got != c.want {
			t.Errorf("%s of %s, listed %q: the value goes in: %v, want %v", c.field, c.host, c.listed, got, c.want)
		}
	}
}

func TestSentinelsThatDoNotBelongAreForeign(t *testing.T) {
	header := func(v string) func(r *outgoing.Request) {
		return func(r *outgoing.Request) { r.Header.Set("X-Key", v) }
	}
	cases := []struct {
		name, sentinel string
		set            func(r *outgoing.Request)
	}{
		{"unknown", unknown, header(unknown)},
		{"other host", sentinelA, func(r *outgoing.Request) { r.Host = "evil.example"; header(sentinelA)(r) }},
		{"other host, in a field that it lists itself", sentinelA, func(r *outgoing.Request) { r.Host = "api.anthropic.com"; r.Header.Set("X-Api-Key", sentinelA) }},
		{"apex of a wildcard", sentinelA, func(r *outgoing.Request) { r.Host = "git.example"; header(sentinelA)(r) }},
		{"clear text", sentinelA, func(r *outgoing.Request) { r.Scheme = "http"; header(sentinelA)(r) }},
		{"AWS secret key as a bearer", sentinelAWS, func(r *outgoing.Request) {
			r.Host = "b.s3.amazonaws.com"
			r.Header.Set("Authorization", "Bearer "+sentinelAWS)
		}},
		{"AWS access key ID in a signature to another host", accessAWS, func(r *outgoing.Request) {
			r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential="+accessAWS+"/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0")
		}},
		{"base64 of Basic", unknown, func(r *outgoing.Request) {
			r.Header.Set("Authorization", "Basic "+base64.RawURLEncoding.EncodeToString([]byte("x:"+unknown)))
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := request()
			c.set(r)
			found := Find(r, openedSecrets())
			if len(found.Uses) > 0 || !slices.Equal(found.Foreign, []string{c.sentinel}) {
				t.Errorf("Find: %+v, want foreign %q", found, c.sentinel)
			}
			if err := Apply(r, openedSecrets(), testValues()); err == nil {
				t.Error("Apply accepts it")
			}
		})
	}
}

func TestOwnAccessKeysOfAProgramAreNotForeign(t *testing.T) {
	r := request()
	r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential=AKIA2222222222222222/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0")
	if found := Find(r, testSecrets()); len(found.Uses)+len(found.Foreign)+len(found.Stays) > 0 {
		t.Errorf("Find: %+v", found)
	}
	want := r.Header.Get("Authorization")
	if err := Apply(r, testSecrets(), testValues()); err != nil || r.Header.Get("Authorization") != want {
		t.Errorf("Apply: %v, %q", err, r.Header)
	}
}

func TestValuesThatBreakTheirPlaceAreRefused(t *testing.T) {
	cases := []struct {
		name, value string
		set         func(r *outgoing.Request)
	}{
		{"line break in a header", "a\r\nX-Evil: 1", func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA) }},
		{"NUL in a header", "a\x00", func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA) }},
		{"colon in a user name", "a:b", func(r *outgoing.Request) { r.Header.Set("Authorization", basicOf(sentinelA+":x")) }},
		{"semicolon in a cookie", "a; admin=1", func(r *outgoing.Request) { r.Path = "/v1/x"; r.Header.Set("Cookie", "sid="+sentinelA) }},
		{"binary in JSON", "\xff\xfe", func(r *outgoing.Request) {
			r.Path = "/oauth/token"
			r.Header.Set("Content-Type", "application/json")
			r.Body = []byte(`{"client":{"secret":"` + sentinelA + `"}}`)
		}},
		{"empty", "", func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA) }},
		{"the sentinel itself", sentinelA, func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA) }},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := request()
			c.set(r)
			err := Apply(r, openedSecrets(), map[string]Value{"sec_a": {Value: []byte(c.value)}})
			if err == nil {
				t.Errorf("accepted: %+v", r)
			} else if c.value != "" && c.value != "v" && strings.Contains(err.Error(), c.value) {
				t.Errorf("error %q has the value", err)
			}
		})
	}
}

func TestValuesAreNotExpandedAgain(t *testing.T) {
	r := request()
	r.Header.Set("X-Key", sentinelA)
	if err := Apply(r, openedSecrets(), map[string]Value{"sec_a": {Value: []byte("x" + unknown)}}); err != nil {
		t.Fatal(err)
	}
	if got := r.Header.Get("X-Key"); got != "x"+unknown {
		t.Errorf("got %q", got)
	}
}

// awsRequest is a request that a client signed with the sentinels.
func awsRequest() *outgoing.Request {
	body := []byte("text")
	return &outgoing.Request{
		Method: "PUT", Scheme: "https", Host: "bucket.s3.eu-west-1.amazonaws.com", Port: 443, Path: "/a%20b", Query: "x-id=PutObject", Whole: true, Body: body, Size: int64(len(body)),
		Header: http.Header{
			amzDate: {"20260102T030405Z"}, amzContent: {hashOf(body)}, "Content-Type": {"text/plain"},
			"Authorization": {"AWS4-HMAC-SHA256 Credential=" + accessAWS + "/20260102/eu-west-1/s3/aws4_request, SignedHeaders=content-length;host;x-amz-content-sha256;x-amz-date, Signature=" + strings.Repeat("0", 64)},
		},
	}
}

func TestAWSRequestsAreSignedWithTheRealPair(t *testing.T) {
	r := awsRequest()
	found := Find(r, testSecrets())
	if len(found.Uses) != 1 || found.Uses[0].Where != whereAWS || found.Uses[0].Sentinel != accessAWS || len(found.Foreign)+len(found.Stays) > 0 {
		t.Fatalf("Find: %+v", found)
	}
	if err := Apply(r, testSecrets(), testValues()); err != nil {
		t.Fatal(err)
	}
	got := r.Header.Get("Authorization")
	if !strings.HasPrefix(got, "AWS4-HMAC-SHA256 Credential=AKIAREALREALREALREAL/20260102/eu-west-1/s3/aws4_request, SignedHeaders=content-length;host;x-amz-content-sha256;x-amz-date;x-amz-security-token, Signature=") {
		t.Errorf("Authorization = %q", got)
	}
	if r.Header.Get(amzToken) != "session/token+=" {
		t.Errorf("%s = %q", amzToken, r.Header.Get(amzToken))
	}
	// The signature is over the request as it leaves: signing again changes nothing.
	s, err := ParseSignature(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.sign(r, r.Body, testValues()["sec_c"]); err != nil || r.Header.Get("Authorization") != got {
		t.Errorf("signed again: %v, %q, want %q", err, r.Header.Get("Authorization"), got)
	}
	// Headers that the wall removed are not signed.
	r = awsRequest()
	r.Header.Set("Authorization", strings.Replace(r.Header.Get("Authorization"), "host;", "host;range;", 1))
	if err := Apply(r, testSecrets(), testValues()); err != nil || strings.Contains(r.Header.Get("Authorization"), "range") {
		t.Errorf("%v, %v", err, r.Header)
	}
	// A pair without a session token removes that of the client.
	values := testValues()
	v := values["sec_c"]
	v.SessionToken = nil
	values["sec_c"] = v
	r = awsRequest()
	r.Header.Set(amzToken, "of the client")
	r.Header.Set("Authorization", strings.Replace(r.Header.Get("Authorization"), ";x-amz-date", ";x-amz-date;x-amz-security-token", 1))
	if err := Apply(r, testSecrets(), values); err != nil || r.Header.Get(amzToken) != "" || strings.Contains(r.Header.Get("Authorization"), "security-token") {
		t.Errorf("%v, %v", err, r.Header)
	}
}

func TestPresignedURLsAreSignedAnew(t *testing.T) {
	r := awsRequest()
	r.Header = http.Header{}
	r.Query = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=" + accessAWS + "%2F20260102%2Feu-west-1%2Fs3%2Faws4_request&X-Amz-Date=20260102T030405Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Security-Token=old&X-Amz-Signature=0"
	if err := Apply(r, testSecrets(), testValues()); err != nil {
		t.Fatal(err)
	}
	q := r.Values()
	if len(q[amzSignature]) != 1 || len(q.Get(amzSignature)) != 64 || q.Get(amzToken) != "session/token+=" || !strings.HasPrefix(q.Get(amzCredential), "AKIAREAL") {
		t.Errorf("query %q", r.Query)
	}
}

func TestAWSSignaturesThatDoNotFitAreRefused(t *testing.T) {
	edit := func(old, with string) func(r *outgoing.Request) {
		return func(r *outgoing.Request) {
			r.Header.Set("Authorization", strings.Replace(r.Header.Get("Authorization"), old, with, 1))
		}
	}
	for name, change := range map[string]func(r *outgoing.Request){
		"another body":          func(r *outgoing.Request) { r.Body = []byte("evil") },
		"another region":        edit("eu-west-1", "us-east-1"),
		"another service":       edit("/s3/", "/iam/"),
		"another day":           edit("20260102", "20260103"),
		"host not signed":       edit("host;", ""),
		"another algorithm":     edit("HMAC-SHA256", "ECDSA-P256-SHA256"),
		"no date":               func(r *outgoing.Request) { r.Header.Del(amzDate) },
		"two signatures":        func(r *outgoing.Request) { r.Header.Add("Authorization", r.Header.Get("Authorization")) },
		"signed in query too":   func(r *outgoing.Request) { r.Query = "X-Amz-Credential=" + accessAWS },
		"unknown streaming":     func(r *outgoing.Request) { r.Header.Set(amzContent, "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD") },
		"chunks that are none":  func(r *outgoing.Request) { r.Header.Set(amzContent, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD") },
		"hash of no whole body": func(r *outgoing.Request) { r.Whole = false; r.Header.Del(amzContent) },
	} {
		t.Run(name, func(t *testing.T) {
			r := awsRequest()
			change(r)
			if err := Apply(r, testSecrets(), testValues()); err == nil {
				t.Errorf("accepted: %+v", r)
			} else if strings.Contains(err.Error(), exampleSecret) {
				t.Errorf("error %q has the key", err)
			}
		})
	}
}

func TestUnsignedPayloadsPass(t *testing.T) {
	for _, hash := range []string{unsignedPayload, unsignedTrailer} {
		r := awsRequest()
		r.Whole, r.Body = false, nil
		r.Header.Set(amzContent, hash)
		if err := Apply(r, testSecrets(), testValues()); err != nil {
			t.Errorf("%s: %v", hash, err)
		}
	}
}

func FuzzApply(f *testing.F) {
	f.Add("Bearer "+sentinelA, "/bot"+sentinelA+"/x", "key="+sentinelA, []byte(`{"client":{"secret":"`+sentinelA+`"}}`), "application/json", "sid="+sentinelA)
	f.Add("Basic "+base64.StdEncoding.EncodeToString([]byte("x:"+sentinelA)), "/oauth/token", unknown, []byte(`\u0070`+sentinelA[1:]), "text/json", "a=b; sid="+sentinelA)
	f.Add("", "/oauth/token", "%p"+sentinelA, []byte("client_secret="+sentinelA), "application/x-www-form-urlencoded", ";=;")
	f.Fuzz(func(t *testing.T, header, path, query string, body []byte, media, cookie string) {
		r := request()
		r.Header.Set("Content-Type", media)
		r.Header.Set("X-Key", header)
		r.Header.Set("Cookie", cookie)
		r.Path, r.Query, r.Body = path, query, bytes.Clone(body)
		found := Find(r, openedSecrets())
		const a, b = "VALUEA", "VALUEB"
		before := strings.Count(header+path+query+string(body)+cookie, a)
		if err := Apply(r, openedSecrets(), map[string]Value{"sec_a": {Value: []byte(a)}, "sec_b": {Value: []byte(b)}}); err != nil {
			return
		}
		if len(found.Foreign) > 0 {
			t.Fatalf("applied with foreign %q", found.Foreign)
		}
		if again := Find(r, openedSecrets()); len(again.Uses) > 0 || len(again.Foreign) > 0 {
			t.Fatalf("left: %+v", again)
		}
		// A value stands in no body but as the whole of an opened field.
		for _, text := range []string{`"` + a + `"`, "client_secret=" + a} {
			if bytes.Count(r.Body, []byte(a)) > bytes.Count(body, []byte(a)) && bytes.Contains(r.Body, []byte(text)) {
				before = -1
			}
		}
		if before >= 0 && bytes.Count(r.Body, []byte(a)) > bytes.Count(body, []byte(a)) {
			t.Fatalf("%q became %q", body, r.Body)
		}
		if len(found.Uses) == 0 && (r.Header.Get("X-Key") != header || r.Path != path || r.Query != query || r.Header.Get("Cookie") != cookie || !bytes.Equal(r.Body, body)) {
			t.Fatal("a request without uses changed")
		}
		if json.Valid(body) && strings.HasPrefix(media, "application/json") && !json.Valid(r.Body) {
			t.Fatalf("%q became %q", body, r.Body)
		}
	})
}

func FuzzFind(f *testing.F) {
	f.Add("X-Key", sentinelA, "/"+accessAWS, "%"+sentinelA+"%", []byte(`\\u0070`+sentinelA), "", "api.example.com")
	f.Add("X-"+sentinelA, "basic eDo=", "*", "&&=", []byte{0}, "application/grpc", "a"+sentinelA)
	f.Fuzz(func(t *testing.T, name, header, path, query string, body []byte, media, host string) {
		r := request()
		r.Header = http.Header{name: {header, header}, "Content-Type": {media}}
		r.Path, r.Query, r.Body, r.Host = path, query, body, host
		found := Find(r, openedSecrets())
		for _, u := range found.Uses {
			if host != "api.example.com" && !strings.HasSuffix(host, ".git.example") && !strings.HasSuffix(host, ".amazonaws.com") {
				t.Fatalf("%+v may go to %q", u, host)
			}
		}
		if !strings.Contains(header+path+query+string(body), sentinelA) {
			return
		}
		if len(found.Uses)+len(found.Foreign)+len(found.Stays) == 0 && !strings.Contains(header, " ") && !strings.Contains(string(body)+query+path, "%") && !strings.Contains(string(body), `\`) {
			t.Fatalf("a sentinel was not found")
		}
	})
}

func FuzzJSONFields(f *testing.F) {
	f.Add([]byte(`{"a":["x",{"b/~":"y"}],"c":"z"}`))
	f.Add([]byte(`"x" "y"`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		all, err := texts(doc)
		if err != nil {
			return
		}
		for _, v := range all {
			var s string
			if v.start < 0 || v.end > len(doc) || v.start >= v.end || json.Unmarshal(doc[v.start:v.end], &s) != nil {
				t.Fatalf("field %+v of %q is no text", v, doc)
			}
		}
	})
}

func FuzzParseSignature(f *testing.F) {
	r := awsRequest()
	f.Add(r.Header.Get("Authorization"), "20260102T030405Z", "", r.Host)
	f.Add(strings.Replace(r.Header.Get("Authorization"), "content-length", "content\x00length", 1), "20260102T030405Z", "", r.Host)
	f.Add(r.Header.Get("Authorization")+"\r\nX: y", "20260102T030405Z", "", r.Host)
	f.Add("", "", "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential="+accessAWS+"%2F20260102%2Feu-west-1%2Fs3%2Faws4_request&X-Amz-Date=20260102T030405Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=0", r.Host)
	f.Fuzz(func(t *testing.T, authorization, date, query, host string) {
		r := awsRequest()
		r.Header.Set("Authorization", authorization)
		r.Header.Set(amzDate, date)
		r.Query, r.Host = query, host
		s, err := ParseSignature(r)
		if err != nil || s == nil {
			return
		}
		if !slices.Contains(s.signed, "host") || s.Time.IsZero() {
			t.Fatalf("%+v", s)
		}
		_ = s.sign(r, r.Body, testValues()["sec_c"])
		if v := r.Header.Get("Authorization"); strings.ContainsAny(v, "\r\n\x00") && !s.Presigned {
			t.Fatalf("Authorization %q", v)
		}
	})
}

func FuzzChunks(f *testing.F) {
	zero := strings.Repeat("0", 64)
	f.Add([]byte("4;chunk-signature="+zero+"\r\ntext\r\n0;chunk-signature="+zero+"\r\n\r\n"), false)
	f.Add([]byte("0;chunk-signature="+zero+"\r\nx-amz-checksum-crc32c:AAAA\r\nx-amz-trailer-signature:"+zero+"\r\n\r\n"), true)
	f.Fuzz(func(t *testing.T, body []byte, trailer bool) {
		r := awsRequest()
		r.Body = bytes.Clone(body)
		hash := streaming + signedChunks
		if trailer {
			hash += "-TRAILER"
		}
		s, err := ParseSignature(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.chunks(r, hash, []byte("key"), zero); err == nil && len(r.Body) != len(body) {
			t.Fatalf("%d bytes became %d", len(body), len(r.Body))
		}
	})
}
