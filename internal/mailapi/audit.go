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

type entryJSON struct {
	Seq    int64           `json:"seq"`
	At     time.Time       `json:"at"`
	Actor  string          `json:"actor"`
	Verb   string          `json:"verb"`
	Object string          `json:"object"`
	Detail json.RawMessage `json:"detail"`
	Prev   string          `json:"prev"` // hexadecimal
	Hash   string          `json:"hash"` // hexadecimal; of the entry as it reads now
}

var (
	auditFilter = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9_.-]{0,64}$`) })
	actorFilter = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[^\x00-\x20\x7f]{0,300}$`) })
)

// readsAudit returns an error unless c may read the record: each person of the project may, and
// nobody else. A key that could would see what reviewers say about its owner.
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
	err = s.db.View(r.Context(), func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
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
	out := []entryJSON{}
	for _, e := range list {
		h := e.Hash()
		detail := json.RawMessage(e.Detail)
		if !json.Valid(detail) { // somebody wrote into the database: show it all the same
			if detail, err = json.Marshal(e.Detail); err != nil {
				return err
			}
		}
		out = append(out, entryJSON{e.Seq, e.At, e.Actor, string(e.Verb), e.Object, detail, hex.EncodeToString(e.Prev[:]), hex.EncodeToString(h[:])})
	}
	answer(w, http.StatusOK, map[string]any{"entries": out, "next": next})
	return nil
}

// number returns a parameter that is the number of an entry; 0 if it is not there.
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

// A checkpointJSON is a checkpoint: the note is what is signed, the rest of it
// is for reading.
type checkpointJSON struct {
	Size       int64     `json:"size"`
	Root       string    `json:"root"` // base64
	At         time.Time `json:"at"`
	Checkpoint string    `json:"checkpoint"`
}

func checkpointOf(s audit.Signed) checkpointJSON {
	return checkpointJSON{Size: s.Size, Root: base64.StdEncoding.EncodeToString(s.Root[:]), At: s.At, Checkpoint: string(s.Note)}
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
	err = s.db.View(r.Context(), func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
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

// A proofJSON shows that an entry is in the record of a size, or that the
// record of a size goes on from that of a smaller one.
type proofJSON struct {
	Seq        int64    `json:"seq,omitempty"`
	From       int64    `json:"from,omitempty"`
	Size       int64    `json:"size"`
	Hashes     []string `json:"hashes"`               // base64
	Checkpoint string   `json:"checkpoint,omitempty"` // of that size
	Proof      string   `json:"proof,omitempty"`      // all of it as c2sp.org/tlog-proof
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
	var out proofJSON
	err := s.db.View(r.Context(), func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
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
			out = proofJSON{Seq: seq, Size: point.Size, Hashes: encoded(p.Hashes), Checkpoint: string(p.Checkpoint), Proof: string(file)}
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
