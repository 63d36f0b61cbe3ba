package build

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/registry"
	"postern/internal/sandbox"
	"postern/internal/store"
)

const buildColumns = `id, template_id, project_id, server_id, state, cpus, memory_mb, disk_mb, tags, definition, failure, result, image, parent, created_at, started_at, ended_at`

// scanBuild reads a row with the columns above.
func scanBuild(row func(...any) error) (b Build, err error) {
	var cpus, created, started, ended int64
	var tags, definition, failure, result string
	err = row(&b.ID, &b.Template, &b.project, &b.server, &b.State, &cpus, &b.MemoryMB, &b.DiskMB, &tags, &definition, &failure, &result, &b.Image, &b.Parent, &created, &started, &ended)
	if err != nil {
		return Build{}, err
	}
	b.CPUs, b.Created, b.Started, b.Ended = float64(cpus)/1000, store.FromTime(created), store.FromTime(started), store.FromTime(ended)
	return b, errors.Join(json.Unmarshal([]byte(tags), &b.Tags), parseJSON(definition, &b.Definition), parseJSON(failure, &b.Failure), parseJSON(result, &b.Result))
}

// parseJSON reads text into v, unless it is empty.
func parseJSON(text string, v any) error {
	if text == "" {
		return nil
	}
	return json.Unmarshal([]byte(text), v)
}

// oneBuild returns a build by its ID. Its error wraps [ErrNoBuild].
func oneBuild(ctx context.Context, tx *store.Tx, id string) (Build, error) {
	bs, err := store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where id = $1`, id)
	if err != nil {
		return Build{}, err
	}
	if len(bs) == 0 {
		return Build{}, ErrNoBuild
	}
	return bs[0], nil
}

// ownBuild returns a build of a template of who's project.
func ownBuild(ctx context.Context, tx *store.Tx, who auth.Principal, nameOrID, build string) (Template, Build, error) {
	n, err := parseName(nameOrID)
	if err != nil {
		return Template{}, Build{}, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	t, err := findOwn(ctx, tx, who, n)
	if err != nil {
		return Template{}, Build{}, err
	}
	b, err := oneBuild(ctx, tx, build)
	if err == nil && b.Template != t.ID {
		err = ErrNoBuild
	}
	if err != nil {
		return Template{}, Build{}, fmt.Errorf("%w: '%.50s'", err, build)
	}
	return t, b, nil
}

// Builds returns the builds of a template of who's project, newest first.
func (s *Service) Builds(ctx context.Context, who auth.Principal, nameOrID string) (out []Build, err error) {
	if err := mayRead(who); err != nil {
		return nil, err
	}
	n, err := parseName(nameOrID)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		t, err := findOwn(ctx, tx, who, n)
		if err != nil {
			return err
		}
		out, err = store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where template_id = $1 order by created_at desc, id desc`, t.ID)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list builds: %w", err)
	}
	return out, nil
}

// Start gives a waiting build its definition and puts it in the queue. It cancels the
// template's other build, if one runs. Its error wraps [ErrNotWaiting] if the build was
// started before.
func (s *Service) Start(ctx context.Context, who auth.Principal, nameOrID, build string, d Definition) error {
	if err := mayManage(who); err != nil {
		return err
	}
	if err := s.checkDefinition(&d); err != nil {
		return err
	}
	definition, err := json.Marshal(d) // without credentials
	if err != nil {
		return fmt.Errorf("start build: %w", err)
	}
	if err := s.mayQueue(who); err != nil {
		return err
	}
	var t Template
	var b Build
	var others []string
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		if t, b, err = ownBuild(ctx, tx, who, nameOrID, build); err != nil {
			return err
		}
		if others, err = tx.Strings(ctx, `select id from template_build where template_id = $1 and state = $2 and id <> $3`, t.ID, Building, b.ID); err != nil {
			return err
		}
		if b.server != s.conf.Server {
			return fmt.Errorf("%w: the build was created on another server", ErrInvalid)
		}
		b.State, b.Started, b.Definition = Building, time.Now().UTC().Truncate(time.Microsecond), d
		ok, err := tx.Changed(ctx, `update template_build set state = $1, definition = $2, started_by = $3, started_at = $4 where id = $5 and state = $6`,
			Building, string(definition), who.String(), store.Time(b.Started), b.ID, Waiting)
		if err == nil && !ok {
			err = ErrNotWaiting
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("start build: %w", err)
	}
	for _, o := range others {
		s.cancel(o, errReplaced)
	}
	return s.enqueue(ctx, newJob(s, who, t, b))
}

// checkDefinition validates a definition, and changes the types of its steps to upper
// case.
func (s *Service) checkDefinition(d *Definition) error {
	switch {
	case (d.FromImage == "") == (d.FromTemplate == ""):
		return fmt.Errorf("%w: want one of fromImage and fromTemplate", ErrInvalid)
	case d.Credentials != (registry.Credentials{}) && d.FromImage == "":
		return fmt.Errorf("%w: fromImageRegistry: fromImage is missing", ErrInvalid)
	case len(d.Steps) > s.conf.MaxSteps:
		return fmt.Errorf("%w: steps: %d steps, at most %d are allowed", ErrInvalid, len(d.Steps), s.conf.MaxSteps)
	}
	total := len(d.FromImage) + len(d.FromTemplate) + len(d.StartCmd) + len(d.ReadyCmd)
	for i := range d.Steps {
		st := &d.Steps[i]
		st.Type = strings.ToUpper(strings.TrimSpace(clean(st.Type, 32)))
		for _, a := range st.Args {
			total += len(a)
		}
		if st.FilesHash = strings.ToLower(st.FilesHash); st.FilesHash != "" && !isHex(st.FilesHash, 64) {
			return fmt.Errorf("%w: steps[%d]: Invalid files hash", ErrInvalid, i)
		}
	}
	if total > maxDefinition {
		return fmt.Errorf("%w: steps: the definition has %d bytes of text, at most %d are allowed", ErrInvalid, total, maxDefinition)
	}
	return nil
}

// maxDefinition is the limit for all texts of a definition together, in bytes.
const maxDefinition = 1 << 20

// fail records that a build has failed, if it is in the state from.
func fail(ctx context.Context, tx *store.Tx, build string, from State, f Failure) error {
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `update template_build set state = $1, failure = $2, ended_at = $3, image = '', result = '' where id = $4 and state = $5`,
		Failed, string(text), store.Time(time.Now()), build, from)
	return err
}

// levels are the levels of entries. The database stores the index.
var levels = [...]string{"debug", "info", "warn", "error"}

// level returns the index of a level.
func level(name string) (int, error) {
	for i, l := range levels {
		if l == name {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%w: level: %.20q: want debug, info, warn or error", ErrInvalid, name)
}

// Status returns the state of a build of who's project, and entries of its log.
func (s *Service) Status(ctx context.Context, who auth.Principal, nameOrID, build string, l Logs) (out Status, err error) {
	if err := mayRead(who); err != nil {
		return Status{}, err
	}
	least, err := level(or(l.Level, "debug"))
	if err != nil {
		return Status{}, err
	}
	if l.Limit = or(l.Limit, 100); l.Limit < 0 || l.Limit > 100 || l.Offset < 0 {
		return Status{}, fmt.Errorf("%w: limit: want 1 to 100, and logsOffset 0 or more", ErrInvalid)
	}
	// Include everything that was logged so far: a client stops polling once the build has
	// ended and there are no more entries.
	if err := s.flush(ctx, build); err != nil {
		return Status{}, fmt.Errorf("status of build: %w", err)
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		t, b, err := ownBuild(ctx, tx, who, nameOrID, build)
		if err != nil {
			return err
		}
		out = Status{Template: t.ID, Build: b.ID, State: b.State, Failure: b.Failure}
		out.Entries, err = store.List(ctx, tx, scanEntry, `select at, level, step, message from template_log where build_id = $1 and level >= $2 order by n limit $3 offset $4`,
			b.ID, least, l.Limit, l.Offset)
		return err
	})
	if err != nil {
		return Status{}, fmt.Errorf("status of build: %w", err)
	}
	return out, nil
}

func scanEntry(row func(...any) error) (e Entry, err error) {
	var at int64
	var l int
	if err := row(&at, &l, &e.Step, &e.Message); err != nil {
		return Entry{}, err
	}
	e.Time, e.Level = store.FromTime(at), levels[min(max(l, 0), len(levels)-1)]
	return e, nil
}

// Base returns what sandboxes of a build start from; id is the build's [SandboxID]. Its
// error wraps [sandbox.ErrNoTemplate]. Base checks no permission: only [Service.Resolve]
// hands out these IDs.
func (s *Service) Base(ctx context.Context, id string) (sandbox.Base, error) {
	build, ok := ParseSandboxID(id)
	if !ok {
		return sandbox.Base{}, fmt.Errorf("template %.64q: %w", id, sandbox.ErrNoTemplate)
	}
	var b Build
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		b, err = oneBuild(ctx, tx, build)
		return err
	})
	if err == nil && (b.Image == "" || b.server != s.conf.Server) {
		err = ErrNoBuild
	}
	if errors.Is(err, ErrNoBuild) {
		return sandbox.Base{}, fmt.Errorf("template %s: %w", id, sandbox.ErrNoTemplate)
	}
	if err != nil {
		return sandbox.Base{}, fmt.Errorf("template %s: %w", id, err)
	}
	return s.base(ctx, b)
}

// CheckTemplate returns an error that wraps [sandbox.ErrNoTemplate] if id is the
// [SandboxID] of a build that does not exist any more. It is called in the transaction
// that records a sandbox of the build. Delete and the sweep look for such records in
// transactions that exclude this one.
func (s *Service) CheckTemplate(ctx context.Context, tx *store.Tx, id string) error {
	build, ok := ParseSandboxID(id)
	if !ok {
		return nil // of the server
	}
	var n int
	err := tx.One(ctx, `select count(*) from template_build where id = $1 and server_id = $2 and image <> ''`, []any{build, s.conf.Server}, &n)
	if err == nil && n == 0 {
		err = fmt.Errorf("template %s: %w", id, sandbox.ErrNoTemplate)
	}
	return err
}

// base returns what sandboxes of a build start from. The build has an image.
func (s *Service) base(ctx context.Context, b Build) (sandbox.Base, error) {
	guest, err := s.own.Base(ctx)
	if err != nil {
		return sandbox.Base{}, err
	}
	r := b.Result
	return sandbox.Base{
		Rootfs: filepath.Join(s.conf.Dir, emptyDir), Image: sandbox.Image{Root: s.imagePath(b.Image), Guest: guest.GuestImage},
		// The image's digest does not cover environment, user and commands.
		Key:  b.ID + " " + s.own.GuestDigest() + " " + b.Image,
		CPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: b.DiskMB,
		Env: r.Env, User: r.User, Dir: r.Dir, StartCmd: r.StartCmd, ReadyCmd: r.ReadyCmd,
		Probes: r.Probes, Project: b.project,
	}, nil
}

func (s *Service) imagePath(digest string) string {
	return filepath.Join(s.conf.Dir, imagesDir, digest+".erofs")
}

// stepName returns the name of step i, counted from 0, in log entries.
func stepName(i int) string { return strconv.Itoa(i + 1) }
