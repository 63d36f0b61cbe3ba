package outgoing

import (
	"bytes"
	"net/http"
	"reflect"
	"testing"
)

func TestEncodingsAreStable(t *testing.T) {
	r := &Request{
		Method: "POST", Scheme: "https", Host: "api.example.com", Port: 443, Path: "/v1/x", Query: "a=1",
		Header: http.Header{"Content-Type": {"text/plain"}, "Accept": {"*/*"}}, Body: []byte("line\nline"), Whole: true, Size: 9,
	}
	one, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	two, err := Decode(one)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(r, two) {
		t.Errorf("decoded %+v, want %+v", two, r)
	}
	again, err := two.Encode()
	if err != nil || !bytes.Equal(one, again) {
		t.Errorf("encoded again as %q (%v), want %q", again, err, one)
	}
	if got, want := r.URL(), "https://api.example.com/v1/x?a=1"; got != want {
		t.Errorf("URL() = %q, want %q", got, want)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"version":1,"method":"GET","scheme":"https","host":"a.example","port":443,"path":"/","body":2}` + "\nhi"))
	f.Add([]byte("{}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Decode(b)
		if err != nil {
			return
		}
		one, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		two, err := Decode(one)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := two.Encode(); err != nil || !bytes.Equal(one, again) {
			t.Fatalf("%q became %q (%v)", one, again, err)
		}
	})
}
