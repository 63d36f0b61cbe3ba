package build

import (
	"context"
	"fmt"
	"slices"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// AssignTags gives tags to the build that target names: "n:tag", or "n" for the tag
// "default".
func (s *Service) AssignTags(ctx context.Context, who auth.Principal, target string, tags []string) (b Build, err error) {
	if err := mayManage(who); err != nil {
		return Build{}, err
	}
	n, err := parseName(target)
	if err != nil {
		return Build{}, err
	}
	if tags, err = parseTags(tags); err != nil {
		return Build{}, err
	}
	if len(tags) == 0 {
		return Build{}, fmt.Errorf("%w: tags: want at least one", ErrInvalid)
	}
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		t, err := findOwn(ctx, tx, who, n)
		if err != nil {
			return err
		}
		if b, err = tagged(ctx, tx, t, n.tag); err != nil {
			return err
		}
		return s.tag(ctx, tx, who, t.ID, b.ID, tags)
	})
	if err != nil {
		return Build{}, fmt.Errorf("assign tags: %w", err)
	}
	b.Tags = tags
	return b, nil
}

// maxTagsPerTemplate is the largest number of tags of a template.
const maxTagsPerTemplate = 200

// tag moves tags of a template to a build. The caller's transaction holds the
// project's turn, see [store.Project].
func (s *Service) tag(ctx context.Context, tx *store.Tx, who auth.Principal, t, build string, tags []string) error {
	for _, tag := range tags {
		if _, err := tx.ExecContext(ctx, `insert into template_tag (template_id, tag, build_id, created_at) values ($1, $2, $3, $4)
			on conflict (template_id, tag) do update set build_id = excluded.build_id, created_at = excluded.created_at`, t, tag, build, store.Time(time.Now())); err != nil {
			return err
		}
		if err := audit.Append(ctx, tx, who, audit.TemplateTag, t, audit.Fields{"tag": tag, "build": build}); err != nil {
			return err
		}
	}
	var n int
	if err := tx.One(ctx, `select count(*) from template_tag where template_id = $1`, []any{t}, &n); err != nil {
		return err
	}
	if n > maxTagsPerTemplate {
		return fmt.Errorf("%w: the template would have %d tags, at most %d are allowed: remove some", ErrFull, n, maxTagsPerTemplate)
	}
	return nil
}

// RemoveTags removes all of the given tags of a template, or none. The builds stay until
// the sweep removes them.
func (s *Service) RemoveTags(ctx context.Context, who auth.Principal, nameOrID string, tags []string) error {
	if err := mayManage(who); err != nil {
		return err
	}
	n, err := parseName(nameOrID)
	if err != nil {
		return err
	}
	if tags, err = parseTags(tags); err != nil {
		return err
	}
	switch {
	case len(tags) == 0:
		return fmt.Errorf("%w: tags: want at least one", ErrInvalid)
	case slices.Contains(tags, defaultTag):
		return fmt.Errorf("%w: tags: %q cannot be removed; move it to another build", ErrInvalid, defaultTag)
	}
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		t, err := findOwn(ctx, tx, who, n)
		if err != nil {
			return err
		}
		for _, tag := range tags {
			had, err := tx.Changed(ctx, `delete from template_tag where template_id = $1 and tag = $2`, t.ID, tag)
			if err != nil {
				return err
			}
			if !had {
				return fmt.Errorf("%w: template %s has no tag %q", ErrNotFound, t.Names[0], tag)
			}
			if err := audit.Append(ctx, tx, who, audit.TemplateUntag, t.ID, audit.Fields{"tag": tag}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("remove tags: %w", err)
	}
	return nil
}

func scanTag(row func(...any) error) (t Tag, err error) {
	var at int64
	err = row(&t.Tag, &t.Build, &at)
	t.Created = store.FromTime(at)
	return t, err
}

// Tags returns the tags of a template of who's project, newest first.
func (s *Service) Tags(ctx context.Context, who auth.Principal, nameOrID string) (out []Tag, err error) {
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
		out, err = store.List(ctx, tx, scanTag, `select tag, build_id, created_at from template_tag where template_id = $1 order by created_at desc, tag`, t.ID)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list tags: %w", err)
	}
	return out, nil
}
