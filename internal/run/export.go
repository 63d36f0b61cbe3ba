package run

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// Files gives access to the files of bound sandboxes. [sandbox.Fleet] implements it.
// Implementations are safe for concurrent use. Everything that they return is hostile.
type Files interface {
	// ListFiles returns the regular files that match one of patterns. Its error wraps
	// [sandbox.ErrFull] if there are more than most.
	ListFiles(ctx context.Context, id string, patterns []string, most int) ([]sandbox.FileInfo, error)
	// OpenFile reads one of them, without following links. A read beyond most bytes
	// returns an error that wraps [sandbox.ErrFull].
	OpenFile(ctx context.Context, id, path string, most int64) (io.ReadCloser, error)
}

var _ Files = (*sandbox.Fleet)(nil)

const (
	// KeepReleased is how long a released artifact can be downloaded.
	KeepReleased = 30 * 24 * time.Hour
	// maxProjectBytes bounds the artifacts of one project that this server keeps.
	maxProjectBytes = 4 << 30
	// copyTime bounds the listing and copying of one run's files. The attack: a guest
	// that answers slowly, so that the run never ends.
	copyTime = 3 * time.Minute
	// waitOutcome is the time between two looks whether the run of an approved release
	// has ended.
	waitOutcome = time.Second
)

// Exports collects, holds and releases the artifacts of runs. It is safe for
// concurrent use.
//
//	Collect ──┬─ refused
//	          └─ waiting ──┬─ rejected, expired
//	                       └─ released ── removed
//
// The bytes are copied to this server before anybody is asked, and the approved payload
// has their digest. So nothing that happens in the sandbox between listing, decision
// and download can change what leaves.
type Exports struct {
	log   *slog.Logger
	db    *store.DB
	gate  *oversight.Gate
	files Files
	blobs *vault
}

// NewExports returns the artifacts of the runs in db, whose bytes are in blobs,
// encrypted under a key derived from key, the server's. No other part of the program
// uses these blobs.
func NewExports(log *slog.Logger, db *store.DB, gate *oversight.Gate, files Files, blobs *store.Blobs, key []byte) (*Exports, error) {
	if len(key) < 32 {
		return nil, errors.New("exports: the server's key has fewer than 32 bytes")
	}
	v, err := newVault(blobs, key, "postern artifact v1")
	if err != nil {
		return nil, fmt.Errorf("vault of artifacts: %w", err)
	}
	return &Exports{log: log, db: db, gate: gate, files: files, blobs: v}, nil
}

// An artifact is a row of run_artifact.
type artifact struct {
	Run, Project string
	N            int64
	Contract     string // as in [export]
	Sandbox      string
	Path         string // escaped
	Name         string
	Type, Found  string
	Size         int64
	SHA256       string
	Review       string
	Violated     bool // the run violated its contract, as far as was known then
	Flags        []string
	Findings     []string
	State        string
	Reason       string
	Action, Blob string
	Created      time.Time
	Decided      time.Time
	Decider      string
}

// payload returns the payload of a's action.
func (a *artifact) payload() ([]byte, error) {
	return export{
		Run: a.Run, N: a.N, Contract: a.Contract, Sandbox: a.Sandbox, Path: a.Path, Name: a.Name, Type: a.Type, Found: a.Found,
		Size: a.Size, SHA256: a.SHA256, Blob: a.Blob, Review: a.Review, Violated: a.Violated, Flags: listOf(a.Flags), Findings: listOf(a.Findings),
	}.bytes()
}

const artifactColumns = `run_id, n, project_id, contract, sandbox_id, path, name, type, found, size, sha256, review, violated, flags, findings, state, reason, action_id, blob_id, created_at, decided_at, decider`

func scanArtifact(row func(...any) error) (a artifact, err error) {
	var flags, findings string
	var violated, created, decided int64
	err = row(&a.Run, &a.N, &a.Project, &a.Contract, &a.Sandbox, &a.Path, &a.Name, &a.Type, &a.Found, &a.Size, &a.SHA256, &a.Review, &violated,
		&flags, &findings, &a.State, &a.Reason, &a.Action, &a.Blob, &created, &decided, &a.Decider)
	if err != nil {
		return a, store.NotFound(err)
	}
	a.Violated, a.Created, a.Decided = violated != 0, store.FromTime(created), store.FromTime(decided)
	if err := errors.Join(json.Unmarshal([]byte(flags), &a.Flags), json.Unmarshal([]byte(findings), &a.Findings)); err != nil {
		return a, fmt.Errorf("read artifact %d of %s: %w", a.N, a.Run, err)
	}
	return a, nil
}

// wire returns a as the API shows it.
func (a *artifact) wire() api.RunArtifact {
	out := api.RunArtifact{
		N: int(a.N), Path: a.Path, Name: a.Name, Type: a.Type, Found: a.Found, Size: a.Size, SHA256: a.SHA256, State: a.State, Reason: a.Reason,
		Review: a.Review, Flags: listOf(a.Flags), Findings: listOf(a.Findings), Action: a.Action, Decider: a.Decider, CreatedAt: a.Created,
	}
	if !a.Decided.IsZero() {
		out.DecidedAt = &a.Decided
	}
	return out
}

// listOf returns l, or an empty list: lists in answers are never null.
func listOf[T any](l []T) []T {
	if l == nil {
		return []T{}
	}
	return l
}

// jsonOf returns a list as JSON.
func jsonOf(l []string) string {
	b, _ := json.Marshal(listOf(l)) // a list of strings cannot fail
	return string(b)
}

// A collection is the row of run_collection.
type collection struct {
	missing    []string // required patterns without a file
	incomplete string   // why the list is not complete; else empty
}

// err returns an error that wraps [ErrRunFailed] if a required artifact is missing.
func (c collection) err() error {
	switch {
	case c.incomplete != "" && len(c.missing) > 0:
		return fmt.Errorf("%w: the artifacts could not be collected: %s", ErrRunFailed, c.incomplete)
	case len(c.missing) > 0:
		return fmt.Errorf("%w: %s missing or not of the promised type and size: %s", ErrRunFailed, number(int64(len(c.missing)), "required artifact is", "required artifacts are"), strings.Join(c.missing, ", "))
	}
	return nil
}

// Collect copies the files that match the contract of r, as they are now, and proposes
// their release. Call it when the processes of the run have been killed and the sandbox
// is alive. If e has a violation, rules release nothing: a person decides on each file.
// It is idempotent. Its error wraps [ErrRunFailed] if a required artifact is missing or
// not as promised.
func (x *Exports) Collect(ctx context.Context, r Run, e Evidence) error {
	if c, err := x.collected(ctx, r.ID); err == nil || !errors.Is(err, store.ErrNotFound) {
		if err != nil {
			return err
		}
		return c.err()
	}
	// After a crash there may be artifacts without a collection. record keeps them as
	// they are.
	ctx, cancel := context.WithTimeout(ctx, copyTime)
	defer cancel()
	c := collection{}
	files, err := x.list(ctx, r)
	if err != nil {
		c.incomplete = whyIncomplete(err)
	}
	total, n := int64(0), int64(0)
	have := map[string]bool{}
	for _, f := range files {
		n++
		a, err := x.take(ctx, r, e, n, f, maxArtifactBytes-total)
		if err != nil {
			return fmt.Errorf("collect artifacts of %s: %w", r.ID, err)
		}
		if a.State == api.ArtifactRefused {
			continue
		}
		total += a.Size
		if w, ok := r.Contract.MatchArtifact(f.Path); ok {
			have[w.Path] = true
		}
	}
	for _, w := range r.Contract.Artifacts {
		if w.Required && !have[w.Path] {
			c.missing = append(c.missing, w.Path)
		}
	}
	if err := x.finish(context.WithoutCancel(ctx), r, c, n, total); err != nil {
		return err
	}
	return c.err()
}

// whyIncomplete returns the reason, for people, why a listing failed.
func whyIncomplete(err error) string {
	if errors.Is(err, sandbox.ErrFull) {
		return fmt.Sprintf("more than %d files match", maxArtifacts)
	}
	return "the files could not be listed: " + err.Error()
}

// list returns the files that match the contract. It checks the guest's answer: it
// drops duplicates and files that do not match, and fails if there are too many.
func (x *Exports) list(ctx context.Context, r Run) ([]sandbox.FileInfo, error) {
	if len(r.Contract.Artifacts) == 0 {
		return nil, nil
	}
	if r.Sandbox == "" {
		return nil, errors.New("there was no sandbox")
	}
	var patterns []string
	for _, a := range r.Contract.Artifacts {
		patterns = append(patterns, a.Path)
	}
	files, err := x.files.ListFiles(ctx, r.Sandbox, patterns, maxArtifacts)
	switch {
	case err != nil:
		return nil, err
	case len(files) > maxArtifacts:
		return nil, fmt.Errorf("%w: %d files", sandbox.ErrFull, len(files))
	}
	slices.SortFunc(files, func(a, b sandbox.FileInfo) int { return strings.Compare(a.Path, b.Path) })
	files = slices.CompactFunc(files, func(a, b sandbox.FileInfo) bool { return a.Path == b.Path })
	return slices.DeleteFunc(files, func(f sandbox.FileInfo) bool {
		_, ok := r.Contract.MatchArtifact(f.Path)
		return !ok
	}), nil
}

// take copies and scans one file, and records it: as refused, or as waiting for its
// action.
func (x *Exports) take(ctx context.Context, r Run, e Evidence, n int64, f sandbox.FileInfo, room int64) (artifact, error) {
	want, _ := r.Contract.MatchArtifact(f.Path)
	a := artifact{
		Run: r.ID, Project: r.Project, N: n, Contract: r.Contract.Name + "@" + r.ContractDigest, Sandbox: r.Sandbox,
		Path: shownPath(f.Path), Name: downloadName(f.Path, int(n)), Type: want.Type, Size: f.Size, Review: want.Review,
		Violated: len(e.Violations) > 0, State: api.ArtifactWaiting, Created: time.Now(),
	}
	if a.Review == "" {
		a.Review = reviewPerson
	}
	most := int64(want.Size)
	if most <= 0 {
		most = defaultArtifact
	}
	most = min(most, maxArtifact)
	refuse := func(found, format string, args ...any) {
		a.State, a.Found, a.Reason = api.ArtifactRefused, found, fmt.Sprintf(format, args...)
	}
	var data []byte
	switch {
	case len(f.Path) > maxArtifactPath:
		sum := sha256.Sum256([]byte(f.Path))
		a.Path = shownPath(f.Path[:100]) + "…#" + hex.EncodeToString(sum[:8])
		refuse("", "its path has %d bytes, at most %d are allowed", len(f.Path), maxArtifactPath)
	case room <= 0:
		refuse("", "the files of this run have more than %d bytes", int64(maxArtifactBytes))
	default:
		limit := min(most, room)
		r, err := x.files.OpenFile(ctx, r.Sandbox, f.Path, limit+1)
		if err != nil {
			refuse("", "it could not be read: %v", err)
			break
		}
		data, a.SHA256, err = readAll(r, limit)
		err = errors.Join(err, r.Close())
		switch {
		case errors.Is(err, errTooLarge) || errors.Is(err, sandbox.ErrFull):
			a.SHA256 = ""
			refuse("", "it has more than %d bytes", limit)
		case err != nil:
			a.SHA256 = ""
			refuse("", "it could not be read: %v", err)
		default:
			a.Size = int64(len(data))
			s := scan(want, f.Path, data)
			if a.Found, a.Flags, a.Findings = s.found, s.flags, s.findings; s.refused != "" {
				refuse(s.found, "%s", s.refused)
			}
		}
	}
	a.Reason = shortened(a.Reason, 500)
	put := ""
	if a.State == api.ArtifactWaiting {
		put = "art_" + rand.Text()
		if err := x.blobs.seal(put, data, a.associatedData()); err != nil {
			return a, err
		}
		a.Blob = put
	}
	// Record the file even if the time of the collection is over.
	err := x.record(context.WithoutCancel(ctx), r, &a)
	if put != "" && err == nil && a.Blob != put { // it was refused, or recorded before
		x.forget(put)
	}
	// After an error it is unknown whether the row was written. If it was not, the sweep
	// removes the bytes.
	return a, err
}

// reviewPerson is the default review of an artifact.
const reviewPerson = "person"

// associatedData returns the associated data of the encryption of a's bytes, so that
// they cannot stand for the bytes of another artifact.
func (a *artifact) associatedData() []byte { return []byte(a.Run + "\x00" + a.SHA256) }

// shortened returns the first most bytes of s, escaped as by [shownPath].
func shortened(s string, most int) string {
	if s = shownPath(s); len(s) > most {
		s = bounded(s, most)
	}
	return s
}

// record inserts the row of an artifact, and proposes its release.
func (x *Exports) record(ctx context.Context, r Run, a *artifact) error {
	box := auth.Principal{Kind: auth.Sandbox, ID: r.Sandbox, Project: r.Project}
	return x.db.UpdateIn(ctx, store.Project(r.Project), func(tx *store.Tx) error {
		// Another server, or this one before a crash, has recorded it.
		old, err := scanArtifact(tx.QueryRowContext(ctx, `select `+artifactColumns+` from run_artifact where run_id = $1 and n = $2`, a.Run, a.N).Scan)
		if err == nil {
			*a = old
			return nil
		}
		if !errors.Is(err, store.ErrNotFound) {
			return err
		}
		var held int64
		if err := tx.One(ctx, `select coalesce(sum(size), 0) from run_artifact where project_id = $1 and blob_id <> ''`, []any{r.Project}, &held); err != nil {
			return err
		}
		if a.State == api.ArtifactWaiting && held+a.Size > maxProjectBytes {
			a.State, a.Reason = api.ArtifactRefused, fmt.Sprintf("the project's artifacts have more than %d bytes: wait until older ones are removed", int64(maxProjectBytes))
		}
		if a.State == api.ArtifactWaiting {
			if err := x.propose(ctx, tx, box, r, a); err != nil {
				return err
			}
		}
		if a.State != api.ArtifactWaiting {
			a.Blob = ""
		}
		_, err = tx.ExecContext(ctx, `insert into run_artifact (`+artifactColumns+`)
			values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22)`,
			a.Run, a.N, a.Project, a.Contract, a.Sandbox, a.Path, a.Name, a.Type, a.Found, a.Size, a.SHA256, a.Review, store.Flag(a.Violated), jsonOf(a.Flags), jsonOf(a.Findings),
			a.State, a.Reason, a.Action, a.Blob, store.Time(a.Created), store.Time(a.Decided), a.Decider)
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, box, audit.RunArtifact, r.ID, audit.Fields{
			"n": strconv.FormatInt(a.N, 10), "sha256": a.SHA256, "size": strconv.FormatInt(a.Size, 10), "type": a.Type, "found": a.Found,
			"state": a.State, "action": a.Action, "flags": strings.Join(a.Flags, " "),
		})
	})
}

// propose proposes the release of an artifact to policy and people.
func (x *Exports) propose(ctx context.Context, tx *store.Tx, box auth.Principal, r Run, a *artifact) error {
	body, err := a.payload()
	if err != nil {
		return err
	}
	p := oversight.Proposal{
		Via: "run", Payload: body,
		Request: policy.Request{
			Kind: policy.KindExport, Via: "run", Sandbox: r.Sandbox, Template: r.Contract.Template, Flags: a.Flags, Size: a.Size, Time: time.Now(),
			Files: []policy.Attachment{{Name: a.Name, Type: mediaType(a.Type), Size: a.Size}},
			Detail: map[string]string{
				"run": r.ID, "contract": r.Contract.Name, "name": a.Name, "type": a.Type, "size": strconv.FormatInt(a.Size, 10), "review": a.Review,
			},
		},
		// A rule can release a file only if the contract leaves that to rules and the run
		// has not violated it. For the review "flagged" the scan must have found nothing
		// either.
		Ask:  a.Violated || a.Review == reviewPerson || a.Review == reviewFlagged && len(a.Flags) > 0,
		Note: strings.Join(a.Findings[:min(len(a.Findings), 10)], "\n"),
	}
	act, err := x.gate.Propose(ctx, tx, box, p)
	if err != nil {
		return err
	}
	a.Action = act.ID
	if act.State == oversight.Denied {
		a.State, a.Reason, a.Decided = api.ArtifactRejected, shortened(act.Verdict, 500), time.Now()
	}
	return nil
}

// reviewFlagged is the review in which people are asked only if the scan found
// something.
const reviewFlagged = "flagged"

// finish records the result of the collection.
func (x *Exports) finish(ctx context.Context, r Run, c collection, n, total int64) error {
	err := x.db.UpdateIn(ctx, store.Project(r.Project), func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `insert into run_collection (run_id, project_id, created_at, missing, incomplete) values ($1, $2, $3, $4, $5) on conflict do nothing`,
			r.ID, r.Project, store.Time(time.Now()), jsonOf(c.missing), shortened(c.incomplete, 500))
		if err != nil || !ok {
			return err
		}
		who := auth.Principal{Kind: auth.System, ID: "runs", Project: r.Project}
		return audit.Append(ctx, tx, who, audit.RunFiles, r.ID, audit.Fields{
			"files": strconv.FormatInt(n, 10), "bytes": strconv.FormatInt(total, 10), "missing": strconv.Itoa(len(c.missing)), "complete": strconv.FormatBool(c.incomplete == ""),
		})
	})
	if err != nil {
		return fmt.Errorf("record the artifacts of %s: %w", r.ID, err)
	}
	return nil
}

// collected returns the collection of a run.
func (x *Exports) collected(ctx context.Context, run string) (c collection, err error) {
	var missing string
	err = x.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select missing, incomplete from run_collection where run_id = $1`, []any{run}, &missing, &c.incomplete)
	})
	if err != nil {
		return c, err
	}
	return c, json.Unmarshal([]byte(missing), &c.missing)
}

// rows returns the artifacts of a run, in order.
func (x *Exports) rows(ctx context.Context, tx *store.Tx, project, run string) ([]artifact, error) {
	return store.List(ctx, tx, scanArtifact, `select `+artifactColumns+` from run_artifact where run_id = $1 and project_id = $2 order by n`, run, project)
}

// List returns the artifacts of a run of who's project. The caller checks that who may
// see the run.
func (x *Exports) List(ctx context.Context, who auth.Principal, run string) (out api.RunArtifactList, err error) {
	var rows []artifact
	err = x.db.View(ctx, func(tx *store.Tx) error {
		rows, err = x.rows(ctx, tx, who.Project, run)
		return err
	})
	if err != nil {
		return out, fmt.Errorf("list artifacts of %s: %w", run, err)
	}
	out.Artifacts = []api.RunArtifact{}
	for i := range rows {
		out.Artifacts = append(out.Artifacts, rows[i].wire())
	}
	c, err := x.collected(ctx, run)
	switch {
	case errors.Is(err, store.ErrNotFound):
	case err != nil:
		return out, fmt.Errorf("list artifacts of %s: %w", run, err)
	default:
		out.Collected, out.Why = true, c.incomplete
	}
	out.Missing = listOf(c.missing)
	return out, nil
}

// ErrNotReleased means that an artifact may not be downloaded: nobody has released it,
// or its time is over. The text says which.
var ErrNotReleased = fmt.Errorf("the artifact is not released (%w)", auth.ErrForbidden)

// Open returns a released artifact of a run of who's project, and its bytes. It
// compares them with the action that approved the release, not only with the row. The
// attack: somebody who can write the database marks a row as released, or points it at
// other bytes.
func (x *Exports) Open(ctx context.Context, who auth.Principal, run string, n int) (out api.RunArtifact, data []byte, err error) {
	var a artifact
	err = x.db.View(ctx, func(tx *store.Tx) error {
		a, err = scanArtifact(tx.QueryRowContext(ctx, `select `+artifactColumns+` from run_artifact where run_id = $1 and n = $2 and project_id = $3`, run, n, who.Project).Scan)
		if err != nil {
			return err
		}
		if a.State != api.ArtifactReleased {
			return fmt.Errorf("artifact %d of %s is %s: %w", n, run, a.State, ErrNotReleased)
		}
		act, err := oversight.ActionUnchecked(ctx, tx, a.Action)
		if err != nil {
			return err
		}
		if err := x.gate.Trusted(ctx, tx, &act); err != nil {
			return err
		}
		body, err := a.payload()
		if err != nil {
			return err
		}
		sum := sha256.Sum256(body)
		if act.Kind != policy.KindExport || act.Project != a.Project || act.State != oversight.Done && act.State != oversight.Executing || hex.EncodeToString(sum[:]) != act.Hex() {
			return fmt.Errorf("artifact %d of %s is not what action %s released: %w", n, run, a.Action, ErrNotReleased)
		}
		return nil
	})
	if err != nil {
		return out, nil, fmt.Errorf("open artifact: %w", err)
	}
	if data, err = x.read(&a); err != nil {
		return out, nil, fmt.Errorf("open artifact: %w", err)
	}
	return a.wire(), data, nil
}

// MediaType returns the Content-Type of a download.
func MediaType(a api.RunArtifact) string { return mediaType(a.Type) }

// read returns the bytes of an artifact, or an error if they do not match its digest.
func (x *Exports) read(a *artifact) ([]byte, error) {
	if a.Blob == "" {
		return nil, fmt.Errorf("the bytes of artifact %d of %s are no longer kept: %w", a.N, a.Run, store.ErrNotFound)
	}
	data, err := x.blobs.open(a.Blob, a.associatedData())
	if err != nil {
		return nil, fmt.Errorf("artifact %d of %s: %w", a.N, a.Run, err)
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != a.SHA256 {
		return nil, fmt.Errorf("the bytes of artifact %d of %s are not those of its digest", a.N, a.Run)
	}
	return data, nil
}

// forget removes bytes that no row names any more. If it fails, the sweep removes them
// later.
func (x *Exports) forget(blob string) {
	if err := x.blobs.Delete(blob); err != nil {
		x.log.Warn("remove artifact", "blob", blob, "err", err)
	}
}
