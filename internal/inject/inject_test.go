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

func TestSentinelsAreReplacedInTheEncodingOfTheirPlace(t *testing.T) {
	value := string(testValues()["sec_a"].Value)
	basic := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	escapedSentinel := `\u0070` + sentinelA[1:]
	cases := []struct {
		name  string
		set   func(r *outgoing.Request)
		where string
		get   func(r *outgoing.Request) string
		want  string
	}{
		{"bearer", func(r *outgoing.Request) { r.Header.Set("Authorization", "Bearer "+sentinelA) }, "header Authorization", func(r *outgoing.Request) string { return r.Header.Get("Authorization") }, "Bearer " + value},
		{"twice", func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA+sentinelA+"x") }, "header X-Key", func(r *outgoing.Request) string { return r.Header.Get("X-Key") }, value + value + "x"},
		{"basic password", func(r *outgoing.Request) { r.Header.Set("Authorization", basic("me:"+sentinelA)) }, "header Authorization", func(r *outgoing.Request) string { return r.Header.Get("Authorization") }, basic("me:" + value)},
		{"basic user", func(r *outgoing.Request) {
			r.Header.Set("Proxy-Authorization", strings.Replace(basic(sentinelA+":x"), "Basic", "bAsIc", 1))
		}, "header Proxy-Authorization", func(r *outgoing.Request) string { return r.Header.Get("Proxy-Authorization") }, "bAsIc" + basic(value + ":x")[5:]},
		{"cookie", func(r *outgoing.Request) { r.Header.Set("Cookie", "a=1; s="+sentinelA+"; b=2") }, "header Cookie", func(r *outgoing.Request) string { return r.Header.Get("Cookie") }, "a=1; s=" + value + "; b=2"},
		{"path", func(r *outgoing.Request) { r.Path = "/bot" + sentinelA + "/x%20y" }, "path", func(r *outgoing.Request) string { return r.Path }, "/bot" + url.PathEscape(value) + "/x%20y"},
		{"query", func(r *outgoing.Request) { r.Query = "a=%20+&key=" + sentinelA + "&b" }, "query key", func(r *outgoing.Request) string { return r.Query }, "a=%20+&key=" + url.QueryEscape(value) + "&b"},
		{"escaped query", func(r *outgoing.Request) { r.Query = "key=%70%73t%5f" + sentinelA[4:] }, "query key", func(r *outgoing.Request) string { return r.Query }, "key=" + url.QueryEscape(value)},
		{"form", func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			r.Body = []byte("a=%7B&k=" + sentinelA)
		}, "body", func(r *outgoing.Request) string { return string(r.Body) }, "a=%7B&k=" + url.QueryEscape(value)},
		{"JSON", func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "application/vnd.api+json; charset=utf-8")
			r.Body = []byte(`{"a":"\\u0041","k":"` + escapedSentinel + `"}`)
		}, "body", func(r *outgoing.Request) string { return string(r.Body) }, `{"a":"\\u0041","k":"va/l+u\"e é"}`},
		{"JSON of curl -d", func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			r.Body = []byte(`{"k":"` + sentinelA + `"}`)
		}, "body", func(r *outgoing.Request) string { return string(r.Body) }, `{"k":"va/l+u\"e é"}`},
		{"multipart", func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "multipart/form-data; boundary=x")
			r.Body = []byte("--x\r\n\r\n" + sentinelA + "\r\n--x--")
		}, "body", func(r *outgoing.Request) string { return string(r.Body) }, "--x\r\n\r\n" + value + "\r\n--x--"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := request()
			c.set(r)
			if len(r.Body) > 0 {
				r.Header.Set("Content-Length", "999")
			}
			uses, foreign := Find(r, testSecrets())
			if len(uses) != 1 || uses[0].Secret != "github" || uses[0].Where != c.where || uses[0].Sentinel != sentinelA || len(foreign) > 0 {
				t.Errorf("Find: %+v, foreign %q", uses, foreign)
			}
			if err := Apply(r, testSecrets(), testValues()); err != nil {
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
		{"apex of a wildcard", sentinelA, func(r *outgoing.Request) { r.Host = "git.example"; header(sentinelA)(r) }},
		{"clear text", sentinelA, func(r *outgoing.Request) { r.Scheme = "http"; header(sentinelA)(r) }},
		{"host name", sentinelA, func(r *outgoing.Request) { r.Host = sentinelA + ".evil.example" }},
		{"header name", sentinelA, func(r *outgoing.Request) { r.Header.Set("X-"+sentinelA, "1") }},
		{"AWS secret key in a body", sentinelAWS, func(r *outgoing.Request) { r.Host = "b.s3.amazonaws.com"; r.Body = []byte(sentinelAWS) }},
		{"AWS access key ID at another host", accessAWS, header(accessAWS)},
		{"base64 of Basic", unknown, func(r *outgoing.Request) {
			r.Header.Set("Authorization", "Basic "+base64.RawURLEncoding.EncodeToString([]byte("x:"+unknown)))
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := request()
			c.set(r)
			uses, foreign := Find(r, testSecrets())
			if len(uses) > 0 || !slices.Equal(foreign, []string{c.sentinel}) {
				t.Errorf("Find: %+v, foreign %q, want foreign %q", uses, foreign, c.sentinel)
			}
			if c.name == "host name" || c.name == "header name" {
				return
			}
			if err := Apply(r, testSecrets(), testValues()); err == nil {
				t.Error("Apply accepts it")
			}
		})
	}
}

func TestOwnAccessKeysOfAProgramAreNotForeign(t *testing.T) {
	r := request()
	r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential=AKIA2222222222222222/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0")
	uses, foreign := Find(r, testSecrets())
	if len(uses)+len(foreign) > 0 {
		t.Errorf("Find: %+v, foreign %q", uses, foreign)
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
		{"colon in a user name", "a:b", func(r *outgoing.Request) {
			r.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(sentinelA+":x")))
		}},
		{"binary in JSON", "\xff\xfe", func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "application/json")
			r.Body = []byte(`"` + sentinelA + `"`)
		}},
		{"length in gRPC", "short", func(r *outgoing.Request) {
			r.Header.Set("Content-Type", "application/grpc+proto")
			r.Body = []byte(sentinelA)
		}},
		{"compressed", "v", func(r *outgoing.Request) { r.Header.Set("Content-Encoding", "gzip"); r.Body = []byte(sentinelA) }},
		{"body that is not whole", "v", func(r *outgoing.Request) { r.Whole = false; r.Body = []byte(sentinelA) }},
		{"empty", "", func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA) }},
		{"the sentinel itself", sentinelA, func(r *outgoing.Request) { r.Header.Set("X-Key", sentinelA) }},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := request()
			c.set(r)
			err := Apply(r, testSecrets(), map[string]Value{"sec_a": {Value: []byte(c.value)}})
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
	if err := Apply(r, testSecrets(), map[string]Value{"sec_a": {Value: []byte("x" + unknown)}}); err != nil {
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
	uses, foreign := Find(r, testSecrets())
	if len(uses) != 1 || uses[0].Where != whereAWS || uses[0].Sentinel != accessAWS || len(foreign) > 0 {
		t.Fatalf("Find: %+v, foreign %q", uses, foreign)
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
	f.Add("Bearer "+sentinelA, "/"+sentinelA, "a="+sentinelB, []byte(`{"a":"`+sentinelA+`"}`), "application/json")
	f.Add("Basic "+base64.StdEncoding.EncodeToString([]byte("x:"+sentinelA)), "/%70"+sentinelA[1:], unknown, []byte(`\u0070`+sentinelA[1:]), "text/json")
	f.Add("", "/%4"+accessAWS, "%p"+sentinelA, []byte("k="+sentinelA), "application/x-www-form-urlencoded")
	f.Fuzz(func(t *testing.T, header, path, query string, body []byte, media string) {
		r := request()
		r.Header.Set("Content-Type", media)
		r.Header.Set("X-Key", header)
		r.Path, r.Query, r.Body = path, query, bytes.Clone(body)
		uses, foreign := Find(r, testSecrets())
		values := map[string]Value{"sec_a": {Value: []byte("AAAA")}, "sec_b": {Value: []byte("BBBB")}}
		if err := Apply(r, testSecrets(), values); err != nil {
			return
		}
		if len(foreign) > 0 {
			t.Fatalf("applied with foreign %q", foreign)
		}
		if again, foreign := Find(r, testSecrets()); len(again)+len(foreign) > 0 {
			t.Fatalf("left: %+v, %q", again, foreign)
		}
		all := r.Header.Get("X-Key") + r.Path + r.Query + string(r.Body)
		for _, s := range []string{sentinelA, sentinelB} {
			if strings.Contains(all, s) {
				t.Fatalf("%q has a sentinel", all)
			}
		}
		if len(uses) == 0 && (r.Header.Get("X-Key") != header || r.Path != path || r.Query != query || !bytes.Equal(r.Body, body)) {
			t.Fatal("a request without sentinels changed")
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
		uses, foreign := Find(r, testSecrets())
		for _, u := range uses {
			if host != "api.example.com" && !strings.HasSuffix(host, ".git.example") && !strings.HasSuffix(host, ".amazonaws.com") {
				t.Fatalf("%+v may go to %q", u, host)
			}
		}
		if !strings.Contains(header+path+query+string(body), sentinelA) {
			return
		}
		if len(uses)+len(foreign) == 0 && !strings.Contains(header, " ") && !strings.Contains(string(body)+query+path, "%") && !strings.Contains(string(body), `\`) {
			t.Fatalf("a sentinel was not found")
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
