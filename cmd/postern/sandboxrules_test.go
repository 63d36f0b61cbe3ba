package main

import (
	"encoding/json"
	"errors"
	"testing"
)

func TestRulesOfTheCommandLineAreE2Bs(t *testing.T) {
	got, err := headerRules([]string{"api.test Authorization: Bearer ${e2b.secrets.a}", "api.test X-Time: 12:30", "*.b.test  X-B:"})
	b, _ := json.Marshal(got)
	const want = `{"*.b.test":[{"transform":{"headers":{"X-B":""}}}],"api.test":[{"transform":{"headers":{"Authorization":"Bearer ${e2b.secrets.a}","X-Time":"12:30"}}}]}`
	if err != nil || string(b) != want {
		t.Errorf("got %s, %v, want %s", b, err, want)
	}
	for _, s := range []string{"", "api.test", "api.test Authorization", "api.test : x"} {
		if _, err := headerRules([]string{s}); !errors.Is(err, errUsage) {
			t.Errorf("%q: got error %v, want errUsage", s, err)
		}
	}
}
