package build

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/template"
)

// Create adds a build that waits for its definition. It also adds the template if the
// project has none with that name.
func (s *Service) Create(ctx context.Context, who auth.Principal, r Request) (Template, Build, error) {
	if err := mayManage(who); err != nil {
		return Template{}, Build{}, err
	}
	n, err := parseName(r.Name)
	if err != nil {
		return Template{}, Build{}, err
	}
	if n.tag != "" {
		r.Tags = append([]string{n.tag}, r.Tags...)
	}
	tags, err := parseTags(r.Tags)
	if err != nil {
		return Template{}, Build{}, err
	}
	if len(tags) == 0 {
		tags = []string{defaultTag}
	}
	if err := s.checkSize(r); err != nil {
		return Template{}, Build{}, err
	}
	if err := s.checkFree(n.base); err != nil {
		return Template{}, Build{}, err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	b := Build{ID: newUUID(), State: Waiting, CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB, Tags: tags, Created: now, project: who.Project, server: s.conf.Server}
	var t Template
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		if err := ownTeam(ctx, tx, who, n.team); err != nil {
			return err
		}
		t, err = oneTemplate(ctx, tx, `where t.project_id = $1 and t.name = $2`, who.Project, n.base)
		if errors.Is(err, ErrNotFound) {
			t, err = s.insert(ctx, tx, who, n.base, now)
		}
		if err != nil {
			return err
		}
		b.Template = t.ID
		var waiting int
		if err := tx.One(ctx, `select count(*) from template_build where template_id = $1 and state = $2`, []any{t.ID, Waiting}, &waiting); err != nil {
			return err
		}
		// The attack: builds that are never started fill the database.
		if waiting >= maxWaiting {
			if _, err := tx.ExecContext(ctx, `delete from template_build where state = $1 and id in
				(select id from template_build where template_id = $2 and state = $1 order by created_at limit $3)`, Waiting, t.ID, waiting-maxWaiting+1); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, `update template set builds = builds + 1, updated_at = $1, cpus = $2, memory_mb = $3, disk_mb = $4 where id = $5`,
			store.Time(now), thousandths(r.CPUs), r.MemoryMB, r.DiskMB, t.ID)
		if err != nil {
			return err
		}
		list, err := json.Marshal(tags)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `insert into template_build (`+buildColumns+`, started_by, lines) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, '', '', '', '', '', $10, 0, 0, '', 0)`,
			b.ID, t.ID, who.Project, s.conf.Server, Waiting, thousandths(r.CPUs), r.MemoryMB, r.DiskMB, string(list), store.Time(now))
		return err
	})
	if err != nil {
		return Template{}, Build{}, fmt.Errorf("create template: %w", err)
	}
	t.CPUs, t.MemoryMB, t.DiskMB, t.Builds, t.Newest, t.State, t.Updated = r.CPUs, r.MemoryMB, r.DiskMB, t.Builds+1, b.ID, Waiting, now
	return t, b, nil
}

// maxWaiting is how many builds of a template may wait for their definition. A further
// one replaces the oldest.
const maxWaiting = 20

// insert adds a template.
func (s *Service) insert(ctx context.Context, tx *store.Tx, who auth.Principal, base string, now time.Time) (Template, error) {
	var n int
	if err := tx.One(ctx, `select count(*) from template where project_id = $1`, []any{who.Project}, &n); err != nil {
		return Template{}, err
	}
	if n >= s.conf.MaxTemplates {
		return Template{}, fmt.Errorf("%w: the project has %d templates, at most %d are allowed: delete some of them", ErrFull, n, s.conf.MaxTemplates)
	}
	t := Template{ID: newID(), Project: who.Project, Names: []string{base}, Created: now, Updated: now, CreatedBy: who.String()}
	if err := tx.One(ctx, `select name from project where id = $1`, []any{who.Project}, &t.Team); err != nil {
		return Template{}, err
	}
	if err := audit.Append(ctx, tx, who, audit.TemplateCreate, t.ID, audit.Fields{"name": base}); err != nil {
		return Template{}, err
	}
	_, err := tx.ExecContext(ctx, `insert into template (id, project_id, name, public, cpus, memory_mb, disk_mb, created_at, created_by, updated_at, spawned_at, spawns, builds)
		values ($1, $2, $3, 0, 0, 0, 0, $4, $5, $4, 0, 0, 0)`, t.ID, t.Project, base, store.Time(now), t.CreatedBy)
	return t, err
}

// checkSize validates the requested cores, memory and disk. The rules for cores and memory
// are E2B's.
func (s *Service) checkSize(r Request) error {
	switch {
	case r.CPUs < 0 || r.CPUs != float64(int64(r.CPUs)) || r.CPUs > 1 && int64(r.CPUs)%2 != 0:
		return fmt.Errorf("%w: cpuCount: %v is neither 1 nor even", ErrInvalid, r.CPUs)
	case r.CPUs > s.conf.MaxCPUs:
		return fmt.Errorf("%w: cpuCount: %v is more than the limit of %v", ErrInvalid, r.CPUs, s.conf.MaxCPUs)
	case r.MemoryMB < 0 || r.MemoryMB%2 != 0 || r.MemoryMB != 0 && r.MemoryMB < 128:
		return fmt.Errorf("%w: memoryMB: %d: want an even number, 128 or more", ErrInvalid, r.MemoryMB)
	case r.MemoryMB > s.conf.MaxMemoryMB:
		return fmt.Errorf("%w: memoryMB: %d is more than the limit of %d", ErrInvalid, r.MemoryMB, s.conf.MaxMemoryMB)
	case r.DiskMB < 0 || r.DiskMB > s.conf.MaxDiskMB:
		return fmt.Errorf("%w: minFreeDiskMb: %d is not between 0 and %d", ErrInvalid, r.DiskMB, s.conf.MaxDiskMB)
	}
	return nil
}

// checkFree returns an error if a name belongs to one of the server's own templates.
func (s *Service) checkFree(base string) error {
	_, err := s.own.Lookup(base)
	if err == nil || slices.Contains(reserved[:], base) {
		return fmt.Errorf("%w: name: %q is a template of the server; choose another name", ErrInvalid, base)
	}
	if !errors.Is(err, template.ErrNotFound) {
		return fmt.Errorf("create template: %w", err)
	}
	return nil
}

// ownTeam returns an error unless team is empty or names who's project.
func ownTeam(ctx context.Context, tx *store.Tx, who auth.Principal, team string) error {
	if team == "" || team == strings.ToLower(who.Project) {
		return nil
	}
	var own string
	if err := tx.One(ctx, `select name from project where id = $1`, []any{who.Project}, &own); err != nil {
		return err
	}
	if team != strings.ToLower(own) {
		return fmt.Errorf("%w: name: namespace %.100q is not your project %q", ErrInvalid, team, own)
	}
	return nil
}

func thousandths(cpus float64) int64 { return int64(cpus * 1000) }

const templateQuery = `select t.id, t.project_id, t.name, t.public, t.cpus, t.memory_mb, t.disk_mb, t.created_at, t.created_by, t.updated_at, t.spawned_at, t.spawns, t.builds,
	coalesce((select name from project where id = t.project_id), ''),
	coalesce((select build_id from template_tag where template_id = t.id and tag = 'default'), ''),
	coalesce((select id from template_build where template_id = t.id order by created_at desc, id desc limit 1), ''),
	coalesce((select state from template_build where template_id = t.id order by created_at desc, id desc limit 1), '')
	from template as t `

func scanTemplate(row func(...any) error) (Template, error) {
	var t Template
	var base string
	var public, cpus, created, updated, spawned int64
	err := row(&t.ID, &t.Project, &base, &public, &cpus, &t.MemoryMB, &t.DiskMB, &created, &t.CreatedBy, &updated, &spawned, &t.Spawns, &t.Builds, &t.Team, &t.Build, &t.Newest, &t.State)
	t.Names, t.Public, t.CPUs = []string{base}, public != 0, float64(cpus)/1000
	t.Created, t.Updated, t.Spawned = store.FromTime(created), store.FromTime(updated), store.FromTime(spawned)
	return t, err
}

// oneTemplate returns the first template that matches where, the end of an SQL statement.
// Its error wraps [ErrNotFound].
func oneTemplate(ctx context.Context, tx *store.Tx, where string, args ...any) (Template, error) {
	ts, err := store.List(ctx, tx, scanTemplate, templateQuery+where, args...)
	if err != nil {
		return Template{}, err
	}
	if len(ts) == 0 {
		return Template{}, ErrNotFound
	}
	return ts[0], nil
}

// find returns the template that n refers to for who: one of who's project, or a published
// one of another project.
func find(ctx context.Context, tx *store.Tx, who auth.Principal, n name) (Template, error) {
	if n.team != "" {
		// A project's own comes first: its name may be another one's ID.
		return oneTemplate(ctx, tx, `join project as p on p.id = t.project_id where t.name = $1 and (lower(p.name) = $2 or lower(p.id) = $2)
			and (t.project_id = $3 or t.public = 1) order by case when t.project_id = $3 then 0 else 1 end, t.id`, n.base, n.team, who.Project)
	}
	t, err := oneTemplate(ctx, tx, `where t.project_id = $1 and t.name = $2`, who.Project, n.base)
	if !errors.Is(err, ErrNotFound) {
		return t, err
	}
	return oneTemplate(ctx, tx, `where t.id = $1 and (t.project_id = $2 or t.public = 1)`, n.base, who.Project)
}

// findOwn is find for operations that only the template's own project may do.
func findOwn(ctx context.Context, tx *store.Tx, who auth.Principal, n name) (Template, error) {
	t, err := find(ctx, tx, who, n)
	if err == nil && t.Project != who.Project {
		return Template{}, ErrForbidden
	}
	return t, err
}

// List returns the templates of who's project, newest first.
func (s *Service) List(ctx context.Context, who auth.Principal) (out []Template, err error) {
	if err := mayRead(who); err != nil {
		return nil, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scanTemplate, templateQuery+`where t.project_id = $1 order by t.created_at desc, t.id`, who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	return out, nil
}

// Get returns a template of who's project, or a published one, by its ID or a name with or
// without a tag.
func (s *Service) Get(ctx context.Context, who auth.Principal, nameOrID string) (t Template, err error) {
	if err := mayRead(who); err != nil {
		return Template{}, err
	}
	n, err := parseName(nameOrID)
	if err != nil {
		return Template{}, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		t, err = find(ctx, tx, who, n)
		return err
	})
	if err != nil {
		return Template{}, fmt.Errorf("get template: %w", err)
	}
	return t, nil
}

// SetPublic publishes a template of who's project, or ends that. Sandboxes that other
// projects have started from it continue.
func (s *Service) SetPublic(ctx context.Context, who auth.Principal, nameOrID string, public bool) (t Template, err error) {
	if err := mayManage(who); err != nil {
		return Template{}, err
	}
	n, err := parseName(nameOrID)
	if err != nil {
		return Template{}, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		if t, err = findOwn(ctx, tx, who, n); err != nil {
			return err
		}
		if t.Public == public {
			return nil
		}
		verb, value := audit.TemplateUnpublish, 0
		if t.Public = public; public {
			verb, value = audit.TemplatePublish, 1
		}
		if err := audit.Append(ctx, tx, who, verb, t.ID, audit.Fields{"name": t.Names[0]}); err != nil {
			return err
		}
		t.Updated = time.Now().UTC().Truncate(time.Microsecond)
		_, err := tx.ExecContext(ctx, `update template set public = $1, updated_at = $2 where id = $3`, value, store.Time(t.Updated), t.ID)
		return err
	})
	if err != nil {
		return Template{}, fmt.Errorf("publish template: %w", err)
	}
	return t, nil
}

// Delete removes a template of who's project with its builds. Its error wraps [ErrBusy]
// if sandboxes, also paused ones, snapshots or a build that runs need it.
func (s *Service) Delete(ctx context.Context, who auth.Principal, nameOrID string) error {
	if err := mayManage(who); err != nil {
		return err
	}
	n, err := parseName(nameOrID)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	var gone []string
	// Sandboxes are inserted in turns of their own.
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		t, err := findOwn(ctx, tx, who, n)
		if err != nil {
			return err
		}
		builds, err := store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where template_id = $1`, t.ID)
		if err != nil {
			return err
		}
		for _, b := range builds {
			if b.State == Building {
				return fmt.Errorf("%w: build %s is running: cancel it or wait until it has ended", ErrBusy, b.ID)
			}
			if err := unused(ctx, tx, b.ID); err != nil {
				return err
			}
			gone = append(gone, b.ID)
		}
		fields := audit.Fields{"name": t.Names[0], "builds": strconv.Itoa(len(builds))}
		if err := audit.Append(ctx, tx, who, audit.TemplateDelete, t.ID, fields); err != nil {
			return err
		}
		for _, q := range []string{
			`delete from template_tag where template_id = $1`,
			`delete from template_log where build_id in (select id from template_build where template_id = $1)`,
			`delete from template_build where template_id = $1`,
			`delete from template where id = $1`,
		} {
			if _, err := tx.ExecContext(ctx, q, t.ID); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("delete template: %w", err)
	}
	for _, b := range gone {
		if err := s.machine.ForgetTemplate(ctx, SandboxID(b)); err != nil {
			s.log.WarnContext(ctx, "remove snapshot of a deleted template", "build", b, "err", err)
		}
	}
	s.sweepSoon()
	return nil
}

// unused returns an error that wraps [ErrBusy] if sandboxes or snapshots of any project
// use a build.
func unused(ctx context.Context, tx *store.Tx, build string) error {
	var sandboxes, snapshots int
	id := SandboxID(build)
	if err := tx.One(ctx, `select count(*) from sandbox where template = $1 and state not in ('killed', 'failed', 'lost')`, []any{id}, &sandboxes); err != nil {
		return err
	}
	if err := tx.One(ctx, `select count(*) from snapshot where template = $1`, []any{id}, &snapshots); err != nil {
		return err
	}
	if sandboxes > 0 {
		return fmt.Errorf("%w: %d running or paused sandboxes were started from it: kill them first", ErrBusy, sandboxes)
	}
	if snapshots > 0 {
		return fmt.Errorf("%w: %d snapshots are of sandboxes that were started from it: delete them first", ErrBusy, snapshots)
	}
	return nil
}

// Resolve returns the template that a name refers to for who: one of the server, of who's
// project, or a published one. Its error wraps [ErrNotFound] if there is none, or if the
// template has no finished build with the tag.
func (s *Service) Resolve(ctx context.Context, who auth.Principal, nameOrID string) (Resolved, error) {
	n, err := parseName(nameOrID)
	if err != nil {
		return Resolved{}, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	if n.team == "" {
		t, err := s.own.Resolve(ctx, strings.TrimSuffix(nameOrID, ":"+defaultTag))
		if err == nil {
			return Resolved{ID: t.ID, Name: n.base}, nil
		}
		if !errors.Is(err, template.ErrNotFound) {
			return Resolved{}, err
		}
	}
	var t Template
	var b Build
	err = s.db.View(ctx, func(tx *store.Tx) error {
		if t, err = find(ctx, tx, who, n); err != nil {
			return err
		}
		b, err = tagged(ctx, tx, t, n.tag)
		return err
	})
	if err != nil {
		return Resolved{}, fmt.Errorf("resolve template %.100q: %w", nameOrID, err)
	}
	return Resolved{ID: SandboxID(b.ID), Name: t.Names[0], Template: &t}, nil
}

// tagged returns the finished build of t with a tag, or with that ID. An empty tag means
// "default".
func tagged(ctx context.Context, tx *store.Tx, t Template, tag string) (Build, error) {
	tag = or(tag, defaultTag)
	bs, err := store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where template_id = $1 and state = $2
		and (id = $3 or id = (select build_id from template_tag where template_id = $1 and tag = $3))`, t.ID, Ready, tag)
	if err != nil {
		return Build{}, err
	}
	if len(bs) == 0 {
		return Build{}, fmt.Errorf("%w: template %s has no finished build with the tag %q", ErrNotFound, t.Names[0], tag)
	}
	return bs[0], nil
}

// Spawned counts a sandbox that was started from a build; id is the build's [SandboxID].
// It does nothing for the server's own templates.
func (s *Service) Spawned(ctx context.Context, id string) error {
	build, ok := ParseSandboxID(id)
	if !ok {
		return nil
	}
	var project, t string
	err := s.db.Peek(ctx, `select project_id, template_id from template_build where id = $1`, []any{build}, &project, &t)
	if err == nil {
		err = s.db.UpdateIn(ctx, store.Thing(project, t), func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update template set spawns = spawns + 1, spawned_at = $1 where id = $2`, store.Time(time.Now()), t)
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("count a start of template %s: %w", t, err)
	}
	return nil
}
