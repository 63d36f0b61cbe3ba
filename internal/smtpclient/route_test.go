package smtpclient_test

import (
	"context"
	"slices"
	"testing"

	"postern/internal/smtpclient"
)

// TestNoWayOut: to which domains nothing leaves is known before anything is sent.
func TestNoWayOut(t *testing.T) {
	serves := func(_ context.Context, domain string) (bool, error) { return domain == "here.example", nil }
	to := []string{"a@here.example", "b@Routed.example", "c@far.example", "d@far.example", "e@xn--bcher-kva.example"}
	for name, tt := range map[string]struct {
		conf smtpclient.Config
		want []string
	}{
		"routes alone": {smtpclient.Config{}, []string{"far.example", "xn--bcher-kva.example"}},
		"a relay":      {smtpclient.Config{Relay: "127.0.0.1:25"}, nil},
		"direct":       {smtpclient.Config{Direct: &smtpclient.Direct{Names: []string{"mx.here.example"}}}, nil},
	} {
		tt.conf.Hostname, tt.conf.Own, tt.conf.Serves = "mx.here.example", "127.0.0.1:2525", serves
		tt.conf.Routes = map[string]string{"routed.example": "127.0.0.1:26"}
		c, err := smtpclient.New(tt.conf)
		if err != nil {
			t.Fatal(err)
		}
		if got, hint := c.Unroutable(t.Context(), to); !slices.Equal(got, tt.want) || hint == "" {
			t.Errorf("%s: got %v, %q, want %v", name, got, hint, tt.want)
		}
	}
}
