package e2bapi

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/secret"
	"postern/internal/store"
)

// ContractMetadata is the metadata key that names a stored contract. The contract binds the
// sandbox for all callers.
const ContractMetadata = "postern.contract"

// createBound creates a sandbox that a stored contract binds. The request must not set what
// the contract decides on. To ignore such a field could break what the caller relies on, and
// to grant it would bypass the review.
func (s *Server) createBound(r *http.Request, who auth.Principal, b *newSandbox) (sandbox.Info, error) {
	if s.conf.Runs == nil {
		return sandbox.Info{}, fmt.Errorf("metadata[%q]: contracts are %w", ContractMetadata, errNotYet)
	}
	if field := b.beyondContract(r); field != "" {
		return sandbox.Info{}, fmt.Errorf("%w: %s: cannot be set together with metadata[%q]: the contract decides on it", errRequest, field, ContractMetadata)
	}
	timeout := timeoutOf(b.Timeout, unsetTimeout(r))
	options, err := b.options(timeout, false)
	if err != nil {
		return sandbox.Info{}, err
	}
	info, err := s.conf.Runs.Sandbox(r.Context(), who, b.Metadata[ContractMetadata], sandbox.Request{
		Asked: b.TemplateID, Metadata: b.Metadata, EnvVars: b.EnvVars, Options: options,
		Egress: policy.Egress{Internet: b.InternetAccess == nil || *b.InternetAccess}, // false withdraws the network that the contract allows
	})
	if errors.Is(err, store.ErrNotFound) { // 400 and not 404: a field is wrong, not the path
		return info, fmt.Errorf("%w: metadata[%q]: there is no contract %.100q; postern contract put stores one", errRequest, ContractMetadata, b.Metadata[ContractMetadata])
	}
	return info, err
}

// beyondContract returns the name of a field that the request sets although a contract
// decides on it, or "". templateID and allow_internet_access are not among them: the SDKs
// always send these, and the contract's values apply.
func (b *newSandbox) beyondContract(r *http.Request) string {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"network", b.Network != nil && !reflect.ValueOf(*b.Network).IsZero()},
		{"mcp", given(b.MCP)},
		{"iam", b.IAM != nil && len(b.IAM.Tokens) > 0},
		{"volumeMounts", len(b.VolumeMounts) > 0},
		{"autoPauseMemory", b.AutoPauseMemory != nil && !*b.AutoPauseMemory}, // a boot loses the confinement
		{fmt.Sprintf("metadata[%q]", InboxMetadata), b.Metadata[InboxMetadata] != ""},
		{fmt.Sprintf("metadata[%q]", PackagesMetadata), b.Metadata[PackagesMetadata] != ""},
		{fmt.Sprintf("metadata[%q]", secret.Metadata), b.Metadata[secret.Metadata] != ""},
		{"header " + InboxKeyHeader, r.Header.Get(InboxKeyHeader) != ""},
	} {
		if f.set {
			return f.name
		}
	}
	for _, name := range slices.Sorted(maps.Keys(b.EnvVars)) {
		value := b.EnvVars[name]
		if strings.Contains(value, "${e2b.") { // a secret that nobody has reviewed
			return fmt.Sprintf("envVars[%q]", name)
		}
	}
	return ""
}

// contractStatus returns the HTTP status of an error about contracts, or 0 for other errors.
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

// shownMetadata returns the metadata of a sandbox as callers see it. For a bound sandbox it
// names the version of the contract that binds it.
func shownMetadata(i sandbox.Info) map[string]string {
	if i.Contract == "" {
		return i.Metadata
	}
	m := map[string]string{}
	maps.Copy(m, i.Metadata)
	m[ContractMetadata] = i.Contract
	return m
}

// boundRefusal refuses all requests to a bound sandbox except those about processes. It
// returns nil for requests that are allowed.
//
// The attack: a caller with the sandbox's tokens writes a program outside of the view of
// files, reads a file that was not released, or connects to a service that a program in the
// sandbox has opened.
func boundRefusal(r *http.Request, t target) *refusal {
	switch {
	case t.traffic.Closed:
		// The attack: an agent of the same project starts programs that the contract
		// allows but nobody has reviewed, and the run is blamed for them.
		return &refusal{http.StatusForbidden, "the sandbox belongs to a run, and starts only the commands that were reviewed"}
	case t.traffic.Contract == "":
		return nil
	}
	if t.port == sandbox.GuestPort && (strings.HasPrefix(r.URL.Path, "/process.Process/") || r.URL.Path == "/health") {
		return nil
	}
	what := "its files, which leave as artifacts of a run"
	if t.port != sandbox.GuestPort {
		what = fmt.Sprintf("port %d", t.port)
	}
	return &refusal{http.StatusForbidden, fmt.Sprintf("the sandbox is bound by contract %s: its processes may be reached, but not %s", t.traffic.Contract, what)}
}

// refuseLoan returns an error if the request has an inbox key in its header and a contract
// binds the sandbox. No contract can allow a sandbox to read mail.
func (s *Server) refuseLoan(r *http.Request, who auth.Principal, id string) error {
	if r.Header.Get(InboxKeyHeader) == "" {
		return nil
	}
	i, err := s.fleet.Get(r.Context(), who, id)
	if err == nil && i.Contract != "" {
		return fmt.Errorf("header %s: %w: %s", InboxKeyHeader, sandbox.ErrBound, i.Contract)
	}
	return err
}
