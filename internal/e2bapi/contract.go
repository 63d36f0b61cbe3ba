package e2bapi

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"strings"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/secret"
	"postern/internal/store"
)

// ContractMetadata is the metadata key whose value names a stored contract, which then
// binds the sandbox, whoever calls it.
const ContractMetadata = "postern.contract"

// createBound creates a sandbox that a stored contract binds. The request may not ask for
// what the contract decides: to ignore it could mean less than the caller relies on, to
// grant it would be past the review.
func (s *Server) createBound(r *http.Request, who auth.Principal, b *newSandbox) (sandbox.Info, error) {
	if s.conf.Runs == nil {
		return sandbox.Info{}, fmt.Errorf("metadata[%q]: contracts are %w", ContractMetadata, errNotYet)
	}
	if field := b.beyondContract(r); field != "" {
		return sandbox.Info{}, fmt.Errorf("%w: %s: cannot be set beside metadata[%q]: the contract decides on it", errRequest, field, ContractMetadata)
	}
	timeout := timeoutOf(b.Timeout, unsetTimeout(r))
	options, err := b.options(timeout, false)
	if err != nil {
		return sandbox.Info{}, err
	}
	info, err := s.conf.Runs.Sandbox(r.Context(), who, b.Metadata[ContractMetadata], sandbox.Request{
		Asked: b.TemplateID, Metadata: b.Metadata, EnvVars: b.EnvVars, Options: options,
		Egress: policy.Egress{Internet: b.InternetAccess == nil || *b.InternetAccess}, // false closes what the contract opens
	})
	if errors.Is(err, store.ErrNotFound) { // a field of the request is wrong, not its path
		return info, fmt.Errorf("%w: metadata[%q]: there is no contract %.100q; postern contract put stores one", errRequest, ContractMetadata, b.Metadata[ContractMetadata])
	}
	return info, err
}

// beyondContract returns the name of a field of the request that a contract decides on,
// or "". The SDKs send templateID and allow_internet_access of their own accord; the
// contract's values hold.
func (b *newSandbox) beyondContract(r *http.Request) string {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"network", b.Network != nil && !reflect.ValueOf(*b.Network).IsZero()},
		{"mcp", given(b.MCP)},
		{"iam", b.IAM != nil && len(b.IAM.Tokens) > 0},
		{"volumeMounts", len(b.VolumeMounts) > 0},
		{"autoPauseMemory", b.AutoPauseMemory != nil && !*b.AutoPauseMemory}, // a boot would start without its confinement
		{fmt.Sprintf("metadata[%q]", InboxMetadata), b.Metadata[InboxMetadata] != ""},
		{fmt.Sprintf("metadata[%q]", PackagesMetadata), b.Metadata[PackagesMetadata] != ""},
		{fmt.Sprintf("metadata[%q]", secret.Metadata), b.Metadata[secret.Metadata] != ""},
		{"header " + InboxKeyHeader, r.Header.Get(InboxKeyHeader) != ""},
	} {
		if f.set {
			return f.name
		}
	}
	for name, value := range b.EnvVars {
		if strings.Contains(value, "${e2b.") { // a secret, which would be past the review
			return fmt.Sprintf("envVars[%q]", name)
		}
	}
	return ""
}

// contractStatus returns the status of an error of contracts, or 0 for other errors.
func contractStatus(err error) int {
	for _, c := range []struct {
		err    error
		status int
	}{
		{run.ErrReview, http.StatusForbidden},
		{run.ErrRefused, http.StatusForbidden},
		{contract.ErrWider, http.StatusForbidden},
		{contract.ErrInvalid, http.StatusBadRequest},
		{run.ErrFull, http.StatusTooManyRequests},
	} {
		if errors.Is(err, c.err) {
			return c.status
		}
	}
	return 0
}

// shownMetadata returns the metadata of a sandbox as callers see it. Of a bound one they
// see which version of the contract binds it.
func shownMetadata(i sandbox.Info) map[string]string {
	if i.Contract == "" {
		return i.Metadata
	}
	m := map[string]string{}
	maps.Copy(m, i.Metadata)
	m[ContractMetadata] = i.Contract
	return m
}

// boundRefusal refuses a request that a contract does not allow: everything but the
// processes of the sandbox. The attack: a caller with the sandbox's tokens writes a
// program past the view of files, reads a file that was not released, or reaches a
// service that a program of the contract has opened.
func boundRefusal(r *http.Request, t target) *refusal {
	switch {
	case t.traffic.Closed:
		// The attack: an agent of the same project starts more programs beside those that
		// were reviewed, within the contract, and the run is blamed for them.
		return &refusal{http.StatusForbidden, "the sandbox is a run's: its commands are those that were reviewed"}
	case t.traffic.Contract == "":
		return nil
	}
	if t.port == sandbox.GuestPort && (strings.HasPrefix(r.URL.Path, "/process.Process/") || r.URL.Path == "/health") {
		return nil
	}
	what := "its files are not: they leave as artifacts of a run"
	if t.port != sandbox.GuestPort {
		what = fmt.Sprintf("port %d is not", t.port)
	}
	return &refusal{http.StatusForbidden, fmt.Sprintf("the sandbox is bound by contract %s: its processes may be reached, %s", t.traffic.Contract, what)}
}

// unbound refuses to lend the inbox key in a header to a bound sandbox: to read mail is
// in no contract.
func (s *Server) unbound(r *http.Request, who auth.Principal, id string) error {
	if r.Header.Get(InboxKeyHeader) == "" {
		return nil
	}
	i, err := s.fleet.Get(r.Context(), who, id)
	if err == nil && i.Contract != "" {
		return fmt.Errorf("header %s: %w: %s", InboxKeyHeader, sandbox.ErrBound, i.Contract)
	}
	return err
}
