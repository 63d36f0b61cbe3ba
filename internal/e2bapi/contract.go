package e2bapi

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"reflect"
	"slices"
	"strings"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
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

// boundRefusal refuses all requests to a bound sandbox except those about processes and
// files. It returns nil for requests that are allowed.
//
// The attack: a caller with the sandbox's tokens writes a program outside of the view of
// files, or connects to a service that a program in the sandbox has opened.
func boundRefusal(r *http.Request, t target) *refusal {
	switch {
	case t.traffic.Closed:
		// The attack: an agent of the same project starts programs that the contract
		// allows but nobody has reviewed, and the run is blamed for them.
		return &refusal{http.StatusForbidden, "the sandbox belongs to a run, and starts only the commands that were reviewed"}
	case t.traffic.Contract == "":
		return nil
	}
	if t.port == sandbox.GuestPort && (strings.HasPrefix(r.URL.Path, "/process.Process/") || r.URL.Path == "/health" || filesCall(r.URL.Path)) {
		return nil
	}
	what := "this"
	if t.port != sandbox.GuestPort {
		what = fmt.Sprintf("port %d", t.port)
	}
	return &refusal{http.StatusForbidden, fmt.Sprintf("the sandbox is bound by contract %s: its processes and the files that the contract names may be reached, but not %s", t.traffic.Contract, what)}
}

// filesCall reports whether a path is one of the files API that a bound guest serves. The
// guest does what is asked in the sandbox's view of files, with the rights of its user, so
// that its kernel applies the contract.
func filesCall(path string) bool {
	return slices.Contains([]string{
		"/files", filesystempb.FilesystemStatProcedure, filesystempb.FilesystemMakeDirProcedure, filesystempb.FilesystemMoveProcedure,
		filesystempb.FilesystemListDirProcedure, filesystempb.FilesystemRemoveProcedure,
	}, path)
}

// maxUpload bounds the body of a request that may have inputs, in bytes. It is held in
// memory: the server says which bytes it has put in.
const maxUpload = 64<<20 + 1<<20

// An upload is a file that a caller writes.
type upload struct {
	path    string // as the caller wrote it
	content []byte
}

// beforeBound does what a contract demands before a request reaches the guest of a bound
// sandbox: files that are inputs are put in by the server, and no command starts before the
// required ones are there. Done means that the request was answered.
func (s *Server) beforeBound(w http.ResponseWriter, r *http.Request, t target) (done bool) {
	if t.traffic.Contract == "" || t.port != sandbox.GuestPort || s.conf.Runs == nil || r.Method != http.MethodPost {
		return false
	}
	switch r.URL.Path {
	case processpb.ProcessStartProcedure:
		if err := s.conf.Runs.BeginCommand(t.sandbox); err != nil {
			refuse(w, r, t, &refusal{http.StatusConflict, err.Error()})
			return true
		}
	case "/files":
		written, err := s.takeInputs(r, t)
		switch {
		case err != nil:
			status := http.StatusBadRequest
			if errors.Is(err, run.ErrState) {
				status = http.StatusConflict
			} else if !errors.Is(err, errRequest) && !errors.Is(err, run.ErrInvalid) && !errors.Is(err, sandbox.ErrInvalid) {
				s.log.ErrorContext(r.Context(), "put an input into a sandbox", "sandbox", t.sandbox, "err", err)
				refuse(w, r, t, &refusal{http.StatusInternalServerError, "internal error"})
				return true
			}
			refuse(w, r, t, &refusal{status, err.Error()})
			return true
		case written != nil:
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(written) // an error means that the caller has gone
			return true
		}
	}
	return false
}

// A writtenFile is a file in the answer to POST /files, as the guest writes it.
type writtenFile struct {
	Name string `json:"name"`
	Type string `json:"type"`
	Path string `json:"path"`
}

// takeInputs puts the files of a request in, if they are inputs. Otherwise it returns nil,
// and r can be forwarded.
func (s *Server) takeInputs(r *http.Request, t target) ([]writtenFile, error) {
	named := r.URL.Query().Get("path")
	if named != "" && !s.conf.Runs.TakesInput(t.sandbox, named) {
		return nil, nil
	}
	b, err := io.ReadAll(io.LimitReader(r.Body, maxUpload+1))
	if err != nil {
		return nil, fmt.Errorf("%w: read body: %w", errRequest, err)
	}
	if len(b) > maxUpload {
		return nil, fmt.Errorf("%w: the body has more than %d bytes, which is the most of a request with inputs; write other files one by one, each with its path", errRequest, maxUpload)
	}
	list, err := uploads(r.Header, b, named)
	if err != nil {
		return nil, err
	}
	inputs := 0
	for _, u := range list {
		if s.conf.Runs.TakesInput(t.sandbox, u.path) {
			inputs++
		}
	}
	if inputs == 0 {
		r.Body = io.NopCloser(bytes.NewReader(b))
		return nil, nil
	}
	if inputs < len(list) {
		return nil, fmt.Errorf("%w: some of these files are inputs of the contract and some are not: write them in separate calls", errRequest)
	}
	out := []writtenFile{}
	for _, u := range list {
		at, err := s.conf.Runs.BoxInput(r.Context(), t.sandbox, u.path, u.content)
		if err != nil {
			return nil, err
		}
		out = append(out, writtenFile{path.Base(at), "file", at})
	}
	return out, nil
}

// uploads returns the files of the body of POST /files: one that is named, or the parts of
// a form.
func uploads(h http.Header, body []byte, named string) (list []upload, err error) {
	kind, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		return nil, fmt.Errorf("%w: the Content-Type does not parse: %w", errRequest, err)
	}
	var in io.Reader = bytes.NewReader(body)
	if h.Get("Content-Encoding") == "gzip" {
		if in, err = gzip.NewReader(in); err != nil {
			return nil, fmt.Errorf("%w: the body is not gzip: %w", errRequest, err)
		}
	}
	in = io.LimitReader(in, maxUpload) // the attack: a small body that becomes very large
	if kind != "multipart/form-data" {
		b, err := io.ReadAll(in)
		if err != nil {
			return nil, fmt.Errorf("%w: read body: %w", errRequest, err)
		}
		return []upload{{named, b}}, nil
	}
	form := multipart.NewReader(in, params["boundary"])
	for {
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: read form: %w", errRequest, err)
		}
		if part.FormName() != "file" {
			continue
		}
		b, err := io.ReadAll(part)
		if err != nil {
			return nil, fmt.Errorf("%w: read form: %w", errRequest, err)
		}
		to := named
		if to == "" {
			// Not FileName, which drops directories.
			_, disposition, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil {
				return nil, fmt.Errorf("%w: read form: %w", errRequest, err)
			}
			to = disposition["filename"]
		}
		list = append(list, upload{to, b})
	}
}

// A countedBody counts what it reads.
type countedBody struct {
	io.ReadCloser
	count func(n int64)
}

// Read implements [io.Reader].
func (c *countedBody) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.count(int64(n))
	return n, err
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
