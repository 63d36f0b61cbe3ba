package inject

import (
	"net/http"
	"testing"

	"postern/internal/outgoing"
)

// The attack: a use that lost its secret's setting is judged by another one.
func TestUsesHaveTheIDAndTheSettingOfTheirSecret(t *testing.T) {
	s := Secret{ID: "sec_1", Name: "github", Sentinel: "pst_" + "abcdefghijklmnopqrstuvwxyz234567abcdefgh", Hosts: []string{"api.example.com"}, Approval: ApprovalNever}
	r := &outgoing.Request{Method: "GET", Scheme: "https", Host: "api.example.com", Port: 443, Path: "/", Header: http.Header{"Authorization": {"Bearer " + s.Sentinel}}, Whole: true}
	uses, foreign := Find(r, []Secret{s})
	if len(uses) != 1 || len(foreign) != 0 || uses[0].ID != "sec_1" || uses[0].Approval != ApprovalNever {
		t.Errorf("got %+v and %q, want the ID and the setting of the secret", uses, foreign)
	}
}
