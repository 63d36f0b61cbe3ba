package mcpserver

import (
	"context"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/storetest"
)

func TestAgentsInSandboxesAskForHosts(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.srv.conf.Permits = permit.New(f.srv.log, f.db, f.gate, permit.Config{})
	f.gate.Handle(policy.KindPermit, f.srv.conf.Permits)
	f.srv.conf.Denials = func(id string) []api.Denial {
		return []api.Denial{{Time: time.Now(), Kind: "request", Method: "POST", Host: "api.example.com", Path: "/v1", Reason: "no rule of " + id + " allows it"}}
	}
	box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.person.Project}
	cs := connect(t, f.srv.HandlerFor(box), "", "")
	if r := call(t, cs, "network_denials", nil); r.isErr || !strings.Contains(r.text, "POST api.example.com/v1: no rule of i1") || !strings.Contains(r.text, "network_request") {
		t.Errorf("got %+v", r)
	}
	if r := call(t, cs, "network_request", args{"hosts": []string{"169.254.169.254"}, "why": "w"}); !r.isErr || !strings.Contains(r.text, "hosts[0]") {
		t.Errorf("got %+v", r)
	}
	ask := args{"hosts": []string{"api.example.com"}, "why": "to read the orders", "methods": []string{"GET"}, "for": "2h"}
	r := call(t, cs, "network_request", ask)
	if r.isErr || r.field("status") != "pending_approval" {
		t.Fatalf("got %+v", r)
	}
	a, err := f.gate.Action(t.Context(), f.person, r.field("actionId"))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.gate.RunOne(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v := f.srv.conf.Permits.Find(t.Context(), box, &outgoing.Request{Method: "GET", Scheme: "https", Host: "api.example.com", Port: 443, Path: "/v1", Whole: true}); v.Effect != policy.Allow {
		t.Errorf("got %+v", v)
	}
	ask["waitSeconds"], ask["why"] = 1, "once more"
	if r := call(t, cs, "network_request", ask); r.field("status") != "pending_approval" {
		t.Errorf("got %+v", r)
	}
}

// TestBoundAgentsAreToldThatTheContractLacksAHost: in a sandbox that a contract binds nobody
// is asked for a host that the contract does not have.
func TestBoundAgentsAreToldThatTheContractLacksAHost(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	c, err := contract.Parse([]byte("version: 1\nname: closed\ncommands: {allow: [{run: ls}]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	bounds := contract.NewBounds(f.srv.log, func(context.Context, string, string) (*contract.Contract, error) { return c, nil })
	f.srv.conf.Permits = permit.New(f.srv.log, f.db, f.gate, permit.Config{Bounds: bounds})
	f.srv.conf.Denials = func(string) []api.Denial {
		return []api.Denial{{Time: time.Now(), Kind: "dns", Host: "api.example.com", Reason: "no"}}
	}
	box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.person.Project, Contract: "closed@" + c.Digest()}
	cs := connect(t, f.srv.HandlerFor(box), "", "")
	if r := call(t, cs, "network_request", args{"hosts": []string{"api.example.com"}, "why": "w"}); !r.isErr || !strings.Contains(r.text, "the contract closed, which binds this sandbox, does not have api.example.com") {
		t.Errorf("got %+v", r)
	}
	if r := call(t, cs, "network_denials", nil); r.isErr || !strings.Contains(r.text, "the job needs another contract") {
		t.Errorf("got %+v", r)
	}
	if list, err := f.gate.Actions(t.Context(), f.person, oversight.Query{}); err != nil || len(list) != 0 {
		t.Errorf("a person is asked about %+v, %v", list, err)
	}
}
