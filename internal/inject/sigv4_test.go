package inject

import (
	"bytes"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/internal/outgoing"
)

// The pair of AWS's published test suite (aws-sig-v4-test-suite).
const (
	exampleKey    = "AKIDEXAMPLE"
	exampleSecret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
)

func TestSignaturesAreThoseOfAWSTestSuite(t *testing.T) {
	const date = "20150830T123600Z"
	cases := []struct {
		name, method, path, query, signed, body string
		header                                  http.Header
		want                                    string
	}{
		{name: "get-vanilla", want: "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
		{name: "get-vanilla-empty-query-key", query: "Param1=value1", want: "a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb"},
		{name: "get-vanilla-query-order-key-case", query: "Param2=value2&Param1=value1", want: "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
		{name: "get-utf8", path: "/ሴ", want: "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"},
		{name: "get-space", path: "/example space/", want: "652487583200325589f1fba4c7e578f72c47cb61beeca81406b39ddec1366741"},
		{name: "get-relative", path: "/example/..", want: "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
		{name: "get-slashes", path: "//example//", want: "9a624bd73a37c9a373b5312afbebe7a714a789de108f0bdfe846570885f57e84"},
		{name: "post-vanilla", method: "POST", want: "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
		{name: "post-header-key-case", method: "POST", want: "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
		{
			name: "post-x-www-form-urlencoded", method: "POST", signed: "content-type;host;x-amz-date", body: "Param1=value1",
			header: http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}, want: "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
		},
		{
			name: "get-header-key-duplicate", signed: "host;my-header1;x-amz-date", header: http.Header{"My-Header1": {"value2", "value2", "value1"}},
			want: "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea",
		},
		{
			name: "get-header-value-trim", signed: "host;my-header1;my-header2;x-amz-date", header: http.Header{"My-Header1": {" value1"}, "My-Header2": {` "a   b   c"`}},
			want: "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := &outgoing.Request{
				Method: c.method, Scheme: "https", Host: "example.amazonaws.com", Port: 443, Path: c.path, Query: c.query,
				Header: http.Header{amzDate: {date}}, Body: []byte(c.body), Whole: true, Size: int64(len(c.body)),
			}
			if r.Method == "" {
				r.Method = "GET"
			}
			if r.Path == "" {
				r.Path = "/"
			}
			if c.signed == "" {
				c.signed = "host;x-amz-date"
			}
			maps.Copy(r.Header, c.header)
			r.Header.Set("Authorization", algorithm+" Credential="+exampleKey+"/20150830/us-east-1/service/aws4_request, SignedHeaders="+c.signed+", Signature=0")
			s, err := ParseSignature(r)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.sign(r, r.Body, Value{AccessKey: exampleKey, Value: []byte(exampleSecret)}); err != nil {
				t.Fatal(err)
			}
			if got := r.Header.Get("Authorization"); !strings.HasSuffix(got, ", Signature="+c.want) {
				t.Errorf("Authorization = %q, want signature %s", got, c.want)
			}
		})
	}
}

// The examples of "Authenticating Requests: Using the Authorization Header",
// "Using Query Parameters" and "Transferring payload in multiple chunks" of S3.
const (
	s3Key    = "AKIAIOSFODNN7EXAMPLE"
	s3Secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
)

func TestPresignedURLIsThatOfS3Documentation(t *testing.T) {
	r := &outgoing.Request{
		Method: "GET", Scheme: "https", Host: "examplebucket.s3.amazonaws.com", Port: 443, Path: "/test.txt",
		Query:  "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=" + s3Key + "%2F20130524%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature=0",
		Header: http.Header{}, Whole: true,
	}
	s, err := ParseSignature(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.sign(r, nil, Value{AccessKey: s3Key, Value: []byte(s3Secret)}); err != nil {
		t.Fatal(err)
	}
	if got, want := r.Values().Get(amzSignature), "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"; got != want {
		t.Errorf("signature %s, want %s", got, want)
	}
}

func TestChunksAreThoseOfS3Documentation(t *testing.T) {
	var body bytes.Buffer
	for _, n := range []int{65536, 1024, 0} {
		body.WriteString(map[int]string{65536: "10000", 1024: "400", 0: "0"}[n] + ";chunk-signature=" + strings.Repeat("0", 64) + "\r\n" + strings.Repeat("a", n) + "\r\n")
	}
	r := &outgoing.Request{
		Method: "PUT", Scheme: "https", Host: "s3.amazonaws.com", Port: 443, Path: "/examplebucket/chunkObject.txt", Whole: true,
		Header: http.Header{
			amzDate: {"20130524T000000Z"}, "X-Amz-Storage-Class": {"REDUCED_REDUNDANCY"}, amzContent: {"STREAMING-AWS4-HMAC-SHA256-PAYLOAD"},
			"Content-Encoding": {"aws-chunked"}, "X-Amz-Decoded-Content-Length": {"66560"}, "Content-Length": {"66824"},
			"Authorization": {"AWS4-HMAC-SHA256 Credential=" + s3Key + "/20130524/us-east-1/s3/aws4_request,SignedHeaders=content-encoding;content-length;host;x-amz-content-sha256;x-amz-date;x-amz-decoded-content-length;x-amz-storage-class,Signature=0"},
		},
		Body: body.Bytes(), Size: 66824,
	}
	if len(r.Body) != 66824 {
		t.Fatalf("body of %d bytes", len(r.Body))
	}
	s, err := ParseSignature(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.sign(r, r.Body, Value{AccessKey: s3Key, Value: []byte(s3Secret)}); err != nil {
		t.Fatal(err)
	}
	if len(r.Body) != 66824 {
		t.Errorf("body of %d bytes, want its own length", len(r.Body))
	}
	all := r.Header.Get("Authorization") + string(r.Body)
	for _, want := range []string{
		"4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9", "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
		"0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497", "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no signature %s", want)
		}
	}
}

func TestOldSignaturesAreRefused(t *testing.T) {
	s := &Signature{Time: time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)}
	for _, c := range []struct {
		after time.Duration
		ok    bool
	}{{0, true}, {15 * time.Minute, true}, {15*time.Minute + 1, false}, {-15*time.Minute - 1, false}} {
		if err := s.CheckTime(s.Time.Add(c.after)); (err == nil) != c.ok {
			t.Errorf("after %s: %v, want ok %v", c.after, err, c.ok)
		}
	}
	s.Presigned, s.Expires = true, time.Minute
	if s.CheckTime(s.Time.Add(61*time.Second)) == nil {
		t.Error("an expired URL passes")
	}
}
