package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/pflag"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A keyTool is the key command with its flags.
type keyTool struct {
	conf          Config
	project, name string
}

func keyCommand() *command {
	k := &keyTool{}
	in := func(f func(ctx context.Context, tx *store.Tx, who auth.Principal, args []string, out *output) error) runner {
		return func(ctx context.Context, args []string, out *output) error {
			return inDatabase(ctx, k.conf, func(tx *store.Tx, who auth.Principal) error {
				if k.project != "" {
					if _, err := auth.ProjectName(ctx, tx, k.project); err != nil {
						return fmt.Errorf("there is no project %q; postern project list shows them", k.project)
					}
					who.Project = k.project
				}
				return f(ctx, tx, who, args, out)
			})
		}
	}
	return &command{
		use: "key", short: "make, list and end project keys", long: `
A project key manages sandboxes and inboxes. It opens no mail and decides
nothing. Only its hash is stored: a lost key is replaced, not recovered.

The commands work on the database, whether the server runs or not.`,
		flags: func(fs *pflag.FlagSet) {
			k.conf.location(fs)
			fs.StringVar(&k.project, "project", "", "`id` of the project (default: the oldest)")
		},
		below: []*command{
			{
				use: "create", short: "print a new key of the project, once", facts: true,
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&k.name, "name", "", "`name` of the key, for people")
				},
				run: in(k.create),
			},
			{use: "list", short: "list the keys of the project, never the keys themselves", lists: true, run: in(listProjectKeys)},
			{use: "end ID", short: "end a key at once", run: in(endProjectKey)},
		},
	}
}

// A keyFacts describes a key.
type keyFacts struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	CreatedAt *time.Time `json:"created_at,omitempty"`
	CreatedBy string     `json:"created_by,omitempty"` // a principal
	UsedAt    *time.Time `json:"used_at,omitempty"`    // accurate to ten minutes; missing: never
	Key       string     `json:"key,omitempty"`        // only when it was just made
}

func (k *keyTool) create(ctx context.Context, tx *store.Tx, who auth.Principal, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	if err := checkName(k.name); err != nil {
		return fmt.Errorf("%w: --name: %w", errUsage, err)
	}
	id, key, err := auth.NewKeyOf(ctx, tx, who.Project, k.name, who.String())
	if err != nil {
		return err
	}
	if err := audit.Append(ctx, tx, who, audit.KeyCreate, id, audit.Fields{"name": k.name}); err != nil {
		return err
	}
	return out.facts(keyFacts{ID: id, Name: k.name, Key: key.Reveal()}, func() error {
		_, err := fmt.Fprintln(out, key.Reveal())
		return err
	})
}

// checkName checks a name that people give to a key or a project.
func checkName(name string) error {
	if len(name) > 100 || strings.ContainsFunc(name, unicode.IsControl) {
		return errors.New("want at most 100 bytes without control characters")
	}
	return nil
}

// projectKeys returns the keys of who's project, without grants.
func projectKeys(ctx context.Context, tx *store.Tx, who auth.Principal) ([]auth.Credential, error) {
	keys, err := auth.KeysOf(ctx, tx, who.Project)
	return slices.DeleteFunc(keys, func(c auth.Credential) bool { return c.Kind != auth.Project }), err
}

func listProjectKeys(ctx context.Context, tx *store.Tx, who auth.Principal, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	keys, err := projectKeys(ctx, tx, who)
	if err != nil {
		return err
	}
	facts, rows := []keyFacts{}, [][]string{{"ID", "NAME", "MADE", "BY", "LAST USED"}}
	for _, c := range keys {
		f := keyFacts{ID: c.ID, Name: c.Name, CreatedAt: &c.Created, CreatedBy: c.CreatedBy}
		if !c.Used.IsZero() {
			f.UsedAt = &c.Used
		}
		facts = append(facts, f)
		rows = append(rows, []string{c.ID, cell(c.Name), ago(c.Created), cell(c.CreatedBy), usedAgo(f.UsedAt, auth.UseResolution)})
	}
	return out.rows(facts, rows)
}

func endProjectKey(ctx context.Context, tx *store.Tx, who auth.Principal, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	keys, err := projectKeys(ctx, tx, who)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(keys, func(c auth.Credential) bool { return c.ID == id })
	if i < 0 {
		return fmt.Errorf("the project has no key %q; postern key list shows them", id)
	}
	if err := auth.Revoke(ctx, tx, id); err != nil {
		return err
	}
	if err := audit.Append(ctx, tx, who, audit.KeyRevoke, id, audit.Fields{"kind": string(keys[i].Kind), "name": keys[i].Name}); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "ended", id)
	return err
}

func projectCommand() *command {
	var c Config
	return &command{
		use: "project", short: "make and list projects", long: `
Everything belongs to one project: sandboxes, inboxes, people, policy and keys.
Projects do not see each other. The first start of the server makes one; people
of other projects are invited with the link that "postern setup --project"
prints.

The commands work on the database, whether the server runs or not.`,
		flags: c.location,
		below: []*command{
			{
				use: "create NAME", short: "make a project and print its key, once", facts: true,
				run: func(ctx context.Context, args []string, out *output) error {
					name, err := oneArg(args, "NAME")
					if err != nil {
						return err
					}
					if err := checkName(name); err != nil || strings.TrimSpace(name) == "" {
						return fmt.Errorf("%w: NAME: %w", errUsage, errors.Join(err, errors.New("want a name")))
					}
					return inDatabase(ctx, c, func(tx *store.Tx, who auth.Principal) error {
						return createProject(ctx, tx, who, name, out)
					})
				},
			},
			{
				use: "list", short: "list the projects of the server", lists: true,
				run: func(ctx context.Context, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					return inDatabase(ctx, c, func(tx *store.Tx, _ auth.Principal) error { return listProjects(ctx, tx, out) })
				},
			},
		},
	}
}

// A projectFacts describes a project.
type projectFacts struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	CreatedAt *time.Time `json:"created_at,omitempty"`
	Key       string     `json:"key,omitempty"` // only when the project was just made
}

func createProject(ctx context.Context, tx *store.Tx, who auth.Principal, name string, out *output) error {
	id, key, err := auth.NewProject(ctx, tx, name)
	if err != nil {
		return err
	}
	who.Project = id // the entry belongs to the new project's record
	if err := audit.Append(ctx, tx, who, audit.ProjectCreate, id, audit.Fields{"name": name}); err != nil {
		return err
	}
	return out.facts(projectFacts{ID: id, Name: name, Key: key.Reveal()}, func() error {
		_, err := fmt.Fprintf(out, "%s\nThis is its key. It is shown this once:\n  %s\n", id, key.Reveal())
		return err
	})
}

func listProjects(ctx context.Context, tx *store.Tx, out *output) error {
	projects, err := auth.Projects(ctx, tx)
	if err != nil {
		return err
	}
	facts, rows := []projectFacts{}, [][]string{{"ID", "NAME", "MADE"}}
	for _, p := range projects {
		facts = append(facts, projectFacts{ID: p.ID, Name: p.Name, CreatedAt: &p.Created})
		rows = append(rows, []string{p.ID, cell(p.Name), ago(p.Created)})
	}
	return out.rows(facts, rows)
}
