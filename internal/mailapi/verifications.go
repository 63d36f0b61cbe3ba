package mailapi

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"strconv"
	"sync"
	"unicode/utf8"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/store"
)

// A verificationServer records verifications of this server: that one began, and
// what it came to. One that has no end in the audit was broken off.
type verificationServer struct {
	log   *slog.Logger
	db    *store.DB
	opens api.OpenSettings
}

func (s verificationServer) routes() []route {
	return []route{
		{"POST", "/v1/verifications", maxBody, s.begin},
		{"POST", "/v1/verifications/{id}", maxBody, s.end},
	}
}

var (
	verificationID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^ver_[A-Z2-7]{26}$`) })
	digestForm     = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^sha256:[0-9a-f]{64}$`) })
)

// mayVerify refuses keys: an agent's word that a server is safe is worth nothing.
func mayVerify(c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("only a person who is signed in, or the operator at the machine, records verifications: %w", auth.ErrForbidden)
	}
	return nil
}

func (s verificationServer) begin(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayVerify(c); err != nil {
		return err
	}
	var n api.NewVerification
	if err := door.Decode(r, &n); err != nil {
		return err
	}
	if len(n.Template) > 300 || !utf8.ValidString(n.Template) {
		return fmt.Errorf("%w: template: must have at most 300 bytes of UTF-8", errRequest)
	}
	if n.Checks < 1 || n.Checks > 1000 {
		return fmt.Errorf("%w: checks: must be 1 to 1000", errRequest)
	}
	id := "ver_" + rand.Text()
	err := s.record(r.Context(), c, audit.VerificationBegin, id, audit.Fields{"template": n.Template, "checks": strconv.Itoa(n.Checks)})
	if err != nil {
		return err
	}
	// Who looks for secrets in a log must know that it is this server's.
	s.log.InfoContext(r.Context(), "verification begins", "verification", id)
	opens := s.opens // a list without entries is [], not null
	opens.Egress, opens.EgressAllow, opens.OwnPorts = cmp.Or(opens.Egress, "deny"), append([]string{}, opens.EgressAllow...), append([]int{}, opens.OwnPorts...)
	answer(w, http.StatusCreated, api.Verification{ID: id, Opens: opens})
	return nil
}

func (s verificationServer) end(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayVerify(c); err != nil {
		return err
	}
	id := r.PathValue("id")
	if !verificationID().MatchString(id) {
		return fmt.Errorf("id: must be that of a verification: %w", store.ErrNotFound)
	}
	var v api.VerificationResult
	if err := door.Decode(r, &v); err != nil {
		return err
	}
	if min(v.Passed, v.Failed, v.Open) < 0 || v.Passed+v.Failed+v.Open < 1 || max(v.Passed, v.Failed, v.Open) > 1000 {
		return fmt.Errorf("%w: passed, failed, open: must be 0 to 1000, and not all 0", errRequest)
	}
	if !digestForm().MatchString(v.Digest) {
		return fmt.Errorf("%w: digest: must be sha256: and 64 hexadecimal digits", errRequest)
	}
	f := audit.Fields{"passed": strconv.Itoa(v.Passed), "failed": strconv.Itoa(v.Failed), "digest": v.Digest}
	if v.Open > 0 {
		f["open"] = strconv.Itoa(v.Open)
	}
	if err := s.record(r.Context(), c, audit.VerificationEnd, id, f); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s verificationServer) record(ctx context.Context, c caller, verb audit.Verb, id string, f audit.Fields) error {
	return s.db.UpdateIn(ctx, store.Project(c.Project), func(tx *store.Tx) error { return audit.Append(ctx, tx, c.Principal, verb, id, f) })
}
