package mailapi

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// An auditServer serves the audit log and its proofs.
type auditServer struct {
	db     *store.DB
	record *audit.Keeper // nil: this server makes no checkpoints
}

func (s auditServer) routes() []route {
	return []route{
		{"GET", "/v1/audit", 0, s.listAudit},
		{"GET", "/v1/audit/checkpoint", 0, s.getCheckpoint},
		{"POST", "/v1/audit/checkpoint", 0, s.makeCheckpoint},
		{"GET", "/v1/audit/proof", 0, s.getProof},
	}
}

var (
	auditFilter = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9_.-]{0,64}$`) })
	actorFilter = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[^\x00-\x20\x7f]{0,300}$`) })
)

// readsAudit returns an error unless c may read the audit log. Every person of
// the project may. Keys may not: an agent would read what reviewers say about it.
func readsAudit(c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("no key reads the record: only a person who is signed in, or the operator at the machine: %w", auth.ErrForbidden)
	}
	return nil
}

func (s auditServer) listAudit(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := readsAudit(c); err != nil {
		return err
	}
	v := r.URL.Query()
	if err := onlyParameters(v, "object", "verb", "actor", "before", "since", "until", "limit"); err != nil {
		return err
	}
	n, err := limit(v, 100, 1000)
	if err != nil {
		return err
	}
	q := audit.Query{Project: c.Project, Object: v.Get("object"), Verb: v.Get("verb"), Actor: v.Get("actor"), Limit: n + 1}
	if !auditFilter().MatchString(q.Object) || !auditFilter().MatchString(q.Verb) {
		return fmt.Errorf("%w: object, verb: must be at most 64 of A-Z a-z 0-9 _ . -", errRequest)
	}
	if !utf8.ValidString(q.Actor) || !actorFilter().MatchString(q.Actor) { // PostgreSQL refuses what is no UTF-8
		return fmt.Errorf("%w: actor: must be a principal such as person:ann, or person: for all of a kind", errRequest)
	}
	if q.Before, err = number(v, "before"); err != nil {
		return err
	}
	for name, to := range map[string]*time.Time{"since": &q.Since, "until": &q.Until} {
		if v.Has(name) {
			if *to, err = time.Parse(time.RFC3339Nano, v.Get(name)); err != nil {
				return fmt.Errorf("%w: %s: must be a time such as 2026-11-21T15:04:05Z", errRequest, name)
			}
		}
	}
	var list []audit.Entry
	err = audit.View(r.Context(), s.db, func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
		list, err = audit.List(r.Context(), tx, q)
		return err
	})
	if err != nil {
		return err
	}
	var next *int64 // before which the following page begins
	if len(list) > n {
		list = list[:n]
		next = &list[n-1].Seq
	}
	out := []api.AuditEntry{}
	for _, e := range list {
		h := e.Hash()
		detail := json.RawMessage(e.Detail)
		if !json.Valid(detail) { // the database was tampered with: show what it holds
			if detail, err = json.Marshal(e.Detail); err != nil {
				return err
			}
		}
		out = append(out, api.AuditEntry{Seq: e.Seq, At: e.At, Actor: e.Actor, Verb: string(e.Verb), Object: e.Object, Detail: detail, Prev: hex.EncodeToString(e.Prev[:]), Hash: hex.EncodeToString(h[:])})
	}
	answer(w, http.StatusOK, api.AuditList{Entries: out, Next: next})
	return nil
}

// number parses a parameter that is the seq of an entry; 0 if it is not set.
func number(v url.Values, name string) (int64, error) {
	if !v.Has(name) {
		return 0, nil
	}
	n, err := strconv.ParseInt(v.Get(name), 10, 64)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%w: %s: must be the seq of an entry, 1 or more", errRequest, name)
	}
	return n, nil
}

func checkpointOf(s audit.Signed) api.Checkpoint {
	return api.Checkpoint{Size: s.Size, Root: base64.StdEncoding.EncodeToString(s.Root[:]), At: s.At, Checkpoint: string(s.Note)}
}

func (s auditServer) getCheckpoint(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := readsAudit(c); err != nil {
		return err
	}
	seq, err := number(r.URL.Query(), "seq")
	if err != nil {
		return err
	}
	var found audit.Signed
	err = audit.View(r.Context(), s.db, func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
		if seq > 0 {
			found, err = audit.Covering(r.Context(), tx, seq)
		} else {
			found, err = audit.Latest(r.Context(), tx)
		}
		return err
	})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, checkpointOf(found))
	return nil
}

func (s auditServer) makeCheckpoint(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.Kind != auth.Person || !c.Decides() {
		return fmt.Errorf("only a person who decides has a checkpoint made: %w", auth.ErrForbidden)
	}
	if s.record == nil {
		return fmt.Errorf("this server makes no checkpoints: %w", errNotOffered)
	}
	made, err := s.record.Make(r.Context())
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, checkpointOf(made))
	return nil
}

func encoded(hashes []tlog.Hash) []string {
	out := []string{}
	for _, h := range hashes {
		out = append(out, base64.StdEncoding.EncodeToString(h[:]))
	}
	return out
}

func (s auditServer) getProof(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := readsAudit(c); err != nil {
		return err
	}
	v := r.URL.Query()
	if err := onlyParameters(v, "seq", "from", "to"); err != nil {
		return err
	}
	at := map[string]int64{}
	for _, name := range []string{"seq", "from", "to"} {
		n, err := number(v, name)
		if err != nil {
			return err
		}
		at[name] = n
	}
	if (at["seq"] > 0) == (at["from"] > 0) || at["to"] > 0 && at["from"] == 0 {
		return fmt.Errorf("%w: want seq, for an entry, or from and to, for the record of two sizes", errRequest)
	}
	var out api.Proof
	err := audit.View(r.Context(), s.db, func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
		ctx := r.Context()
		if seq := at["seq"]; seq > 0 {
			p, err := audit.ProveEntry(ctx, tx, c.Project, seq)
			if err != nil {
				return err
			}
			point, err := audit.Covering(ctx, tx, seq)
			if err != nil {
				return err
			}
			file, err := p.Marshal()
			out = api.Proof{Seq: seq, Size: point.Size, Hashes: encoded(p.Hashes), Checkpoint: string(p.Checkpoint), Proof: string(file)}
			return err
		}
		size := at["to"]
		if size == 0 {
			newest, err := audit.Latest(ctx, tx)
			if err != nil {
				return err
			}
			size, out.Checkpoint = newest.Size, string(newest.Note)
		}
		p, err := audit.ProveConsistency(ctx, tx, at["from"], size)
		out.From, out.Size, out.Hashes = at["from"], size, encoded(p)
		return err
	})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, out)
	return nil
}
