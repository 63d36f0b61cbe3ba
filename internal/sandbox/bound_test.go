package sandbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/storetest"
)

// TestContractOutlivesWhatHappensToTheSandbox: the wall knows a sandbox by its contract from
// its start, through pauses and restarts of the server. Its owner can neither widen it nor
// make a copy that is not bound.
func TestContractOutlivesWhatHappensToTheSandbox(t *testing.T) {
	const job = "job@sha256:1"
	k := &keeper{kept: map[string]bool{}}
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Keeper, c.Snapshots = k, true
		c.Mount = func(context.Context, string, string, sandbox.VolumeMount) (sandbox.Mount, error) {
			return sandbox.Mount{}, nil
		}
	})
	f.link.binds = job
	ctx := t.Context()
	bound := sandbox.Request{
		Contract: job, Prepare: func(context.Context, sandbox.Info) error { return nil },
		Options: sandbox.Options{Timeout: time.Hour, Most: time.Hour},
	}
	s := f.create(bound)
	known := func(when string) {
		t.Helper()
		i, err := f.fleet.Get(ctx, f.who, s.ID)
		if err != nil || i.Contract != job || f.link.owner(s.ID).Contract != job {
			t.Errorf("%s: the wall knows the contract %q, the fleet %q, %v", when, f.link.owner(s.ID).Contract, i.Contract, err)
		}
	}
	known("created")
	refused := func(when string) {
		t.Helper()
		_, snapshot := f.fleet.Snapshot(ctx, f.who, s.ID, "")
		_, fork := f.fleet.Fork(ctx, f.who, s.ID, time.Minute, 1)
		_, _, reboot := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, Reboot: true})
		_, _, loan := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, InboxKey: "pib_x"})
		for what, err := range map[string]error{
			"snapshot": snapshot, "fork": fork, "reboot": reboot, "loan of an inbox": loan,
			"the Internet":  f.fleet.SetEgress(ctx, f.who, s.ID, policy.Egress{Internet: true}),
			"a host":        f.fleet.SetEgress(ctx, f.who, s.ID, policy.Egress{AllowOut: []string{"api.example.com"}}),
			"a rule":        f.fleet.SetEgress(ctx, f.who, s.ID, policy.Egress{Rules: map[string][]policy.Rule{"api.example.com": {{Headers: map[string]string{"X": "${e2b.secrets.tok}"}}}}}),
			"a proxy":       f.fleet.SetEgress(ctx, f.who, s.ID, policy.Egress{Proxy: &policy.Proxy{Address: "proxy.example.com:1080"}}),
			"less":          f.fleet.SetEgress(ctx, f.who, s.ID, policy.Egress{}),
			"files without": f.fleet.Pause(ctx, f.who, s.ID, true),
		} {
			busy := when == "paused" && errors.Is(err, sandbox.ErrPaused)
			if !busy && (!errors.Is(err, sandbox.ErrBound) || !errors.Is(err, auth.ErrForbidden)) {
				t.Errorf("%s, %s: got %v, want ErrBound", when, what, err)
			}
		}
	}
	refused("running")
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	refused("paused")
	if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	known("resumed")
	refused("resumed")
	f.open() // the server is started again
	if err := f.fleet.Recover(ctx); err != nil {
		t.Fatal(err)
	}
	known("recovered")
	refused("recovered")
	for what, change := range map[string]func(*sandbox.Request){
		"volumes":      func(r *sandbox.Request) { r.Options.Volumes = []sandbox.VolumeMount{{Name: "v", Path: "/v"}} },
		"a snapshot":   func(r *sandbox.Request) { r.Snapshot = "snp_1" },
		"an inbox key": func(r *sandbox.Request) { r.Inbox, r.InboxKey = "ibx_1", "pib_x" },
		"pauses of files": func(r *sandbox.Request) {
			r.Options.AutoPause, r.Options.FilesOnly = true, true
		},
	} {
		r := bound
		change(&r)
		if _, err := f.fleet.Create(ctx, f.who, r); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("created with %s: %v", what, err)
		}
	}
	// A guest that is not confined any more is not resumed.
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	f.link.binds = ""
	if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err == nil {
		t.Error("resumed without its contract")
	}
}
