package run_test

import (
	"errors"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/store"
	"postern/internal/storetest"
)

// boundBox records a sandbox that the contract of a proposed run binds, or none if text is
// empty.
func (f *fixture) boundBox(id, text string) auth.Principal {
	f.t.Helper()
	ctx, name := f.t.Context(), ""
	if text != "" {
		c, err := contract.Parse([]byte(text))
		if err != nil {
			f.t.Fatal(err)
		}
		name = c.Name + "@" + c.Digest()
		if _, err := f.runs.Propose(ctx, f.keyed, "rest", run.Proposal{Text: text, Task: id, Commands: [][]string{{"true"}}}); err != nil && !errors.Is(err, run.ErrRefused) {
			f.t.Fatal(err)
		}
	}
	err := f.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into sandbox (id, project_id, template, asked, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, started_at, ends_at, paused_at, ended_at, restart, saved, contract, server_id)
			values ($1, $2, 'base', 'base', 'running', '', '{}', '', '{}', '{}', '', 1, 1, 1, 1, 1, 0, 0, 0, '', $3, '')`, id, f.keyed.Project, name)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return auth.Principal{Kind: auth.Sandbox, ID: id, Project: f.keyed.Project, Contract: name}
}

const hostless = "version: 1\nname: closed\ncommands:\n  allow:\n    - run: 'true'\n"

// TestBoundSandboxesProposeOnlyWhatTheContractHas: a person is not asked about what could
// have no effect in the sandbox, or would be wider than its contract. The gate refuses it,
// whichever interface it came by.
func TestBoundSandboxesProposeOnlyWhatTheContractHas(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		closed, open, free := f.boundBox("iclosed", hostless), f.boundBox("iopen", hostless+"network:\n  allow: [api.example.com]\n"), f.boundBox("ifree", "")
		lost := f.boundBox("ilost", "")
		if err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update sandbox set contract = 'closed@sha256:00' where id = 'ilost'`)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		propose := func(who auth.Principal, r policy.Request) error {
			return db.Update(ctx, func(tx *store.Tx) error {
				_, err := f.gate.Propose(ctx, tx, who, oversight.Proposal{Request: r, Payload: []byte("x")})
				return err
			})
		}
		hosts := policy.Request{Kind: policy.KindPermit, To: []string{"api.example.com"}}
		everyone := hosts
		everyone.Detail = map[string]string{"scope": string(permit.ForProject)}
		for _, tc := range []struct {
			name string
			who  auth.Principal
			r    policy.Request
			want string // part of the error; empty: taken
		}{
			{"a host, not bound", free, hosts, ""},
			{"a host for everyone, not bound", free, everyone, ""},
			{"a host that the contract does not have", closed, hosts, "the contract closed, which binds this sandbox, does not have api.example.com"},
			{"a host that it has", open, hosts, ""},
			{"a host and another", open, policy.Request{Kind: policy.KindPermit, To: []string{"api.example.com", "evil.example.org"}}, "does not have evil.example.org"},
			{"a host for everyone", open, everyone, "does not have anything for other sandboxes"},
			{"an unknown contract", lost, hosts, "the contract closed@sha256:00"},
			{"a mode", open, policy.Request{Kind: policy.KindMode}, "does not have anything of the kind inbox.mode"},
			{"an allow list", open, policy.Request{Kind: policy.KindAllow}, "anything of the kind inbox.allow"},
			{"a policy", open, policy.Request{Kind: policy.KindChange}, "anything of the kind policy.change"},
			{"a webhook", open, policy.Request{Kind: policy.KindWebhook}, "anything of the kind webhook.create"},
			{"a run", open, policy.Request{Kind: policy.KindRun}, "anything of the kind run.start"},
			{"trash", open, policy.Request{Kind: policy.KindTrash}, "anything of the kind email.trash"},
			{"an artifact, without any in the contract", open, policy.Request{Kind: policy.KindExport}, "does not have any artifact"},
			{"a start", open, policy.Request{Kind: policy.KindExec}, ""},
			{"a connection", open, policy.Request{Kind: policy.KindConnect}, ""},
			{"a request", open, policy.Request{Kind: policy.KindRequest}, ""},
			{"a mode, not bound", free, policy.Request{Kind: policy.KindMode}, ""},
		} {
			err := propose(tc.who, tc.r)
			switch {
			case tc.want == "" && err != nil, tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
			case tc.want != "" && tc.who != lost && !errors.Is(err, auth.ErrForbidden):
				t.Errorf("%s: %v is not ErrForbidden", tc.name, err)
			}
		}
	})
}

// TestFinderReadsContractsOfRuns: the contract that binds a sandbox is found by project and
// digest, and one that was changed in the database is not used.
func TestFinderReadsContractsOfRuns(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		box := f.boundBox("i1", hostless+"network:\n  allow: [api.example.com]\n")
		g := contract.Grant{Kind: policy.KindConnect, Hosts: []string{"api.example.com"}}
		allows := func(project string) bool { // without what was read before
			return contract.NewBounds(f.log, run.Finder(db)).Allows(t.Context(), project, box.Contract, g).Effect == policy.Allow
		}
		if !allows(box.Project) || allows(f.foreign.Project) {
			t.Error("the contract is not that of its project alone")
		}
		if err := db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update run set contract = replace(contract, 'api.example.com', 'any.example.com')`)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		g.Hosts = []string{"any.example.com"}
		if allows(box.Project) {
			t.Error("a contract that was changed in the database grants a host")
		}
	})
}
