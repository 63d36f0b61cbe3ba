package request_test

import (
	"testing"
	"time"

	"postern/internal/policy"
	"postern/internal/storetest"
)

// BenchmarkJudge is what policy adds to an allowed request with a secret.
func BenchmarkJudge(b *testing.B) {
	f := setup(b, storetest.SQLite(b))
	f.holds(rules)
	s := f.start(time.Second)
	go func() { _ = s.rules.Run(b.Context()) }()
	r := get("GET", "/v1/orders?a=b", "", secret("k", "never"))
	for b.Loop() {
		if v := s.Judge(b.Context(), f.box(), r); v.Effect != policy.Allow {
			b.Fatal(v)
		}
	}
}
