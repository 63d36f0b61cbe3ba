package dnstest

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"
)

func TestServer(t *testing.T) {
	long := strings.Repeat("x", 3000) // more than UDP carries
	s := Start(t, `a.example. TXT "v=spf1 -all"`, `a.example. MX 10 mx.a.example.`, `mx.a.example. A 192.0.2.1`, `b.example. CNAME a.example.`)
	s.TXT("long.example", long, `with "quotes" and \`)
	s.Fail("broken.example", true)
	s.Drop("silent.example", true)
	r, ctx := s.Resolver(), context.Background()

	for name, want := range map[string]string{"a.example.": "v=spf1 -all", "b.example.": "v=spf1 -all", "long.example.": long + `|with "quotes" and \`} {
		got, err := r.LookupTXT(ctx, name)
		if err != nil || strings.Join(got, "|") != want {
			t.Errorf("TXT %s: got %q, %v; want %q", name, got, err, want)
		}
	}
	if got, err := r.LookupMX(ctx, "a.example."); err != nil || len(got) != 1 || got[0].Host != "mx.a.example." {
		t.Errorf("MX: got %v, %v", got, err)
	}
	if got, err := r.LookupHost(ctx, "mx.a.example."); err != nil || len(got) != 1 || got[0] != "192.0.2.1" {
		t.Errorf("A: got %v, %v", got, err)
	}
	var de *net.DNSError
	if _, err := r.LookupTXT(ctx, "none.example."); !errors.As(err, &de) || !de.IsNotFound {
		t.Errorf("a name that is not there: %v", err)
	}
	if _, err := r.LookupTXT(ctx, "x.broken.example."); !errors.As(err, &de) || de.IsNotFound || !de.IsTemporary {
		t.Errorf("SERVFAIL: %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := r.LookupTXT(short, "silent.example."); !errors.As(err, &de) || !de.IsTimeout {
		t.Errorf("no answer: %v", err)
	}
	if got := s.Asked(); len(got) == 0 {
		t.Errorf("asked: %q", got)
	}
}
