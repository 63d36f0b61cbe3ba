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
	found := Find(r, []Secret{s})
	uses := found.Uses
	if len(uses) != 1 || len(found.Foreign) != 0 || uses[0].ID != "sec_1" || uses[0].Approval != ApprovalNever {
		t.Errorf("got %+v, want the ID and the setting of the secret", found)
	}
}
