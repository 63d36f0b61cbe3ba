package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/template"
)

// A templateFacts describes a template in the list.
type templateFacts struct {
	Name   string    `json:"name"` // empty if an older version built the template
	ID     string    `json:"id"`
	Of     string    `json:"of"`    // "server" or "project"
	State  string    `json:"state"` // of the newest build: "ready", "building", "waiting", "error"
	Public bool      `json:"public"`
	Built  time.Time `json:"built"` // or changed, for a template of a project
}

// templates holds the flags of the commands below "postern template".
type templates struct {
	c Config

	all, spdx, private bool
	file, dir, name    string
}

// own opens the cache of the server's own templates. The caller closes it.
func (t *templates) own(out *output) (*template.Cache, error) {
	if err := onThisMachine.reachable(); err != nil {
		return nil, err
	}
	g, err := guest()
	if err != nil {
		return nil, err
	}
	conf := template.Config{Dir: t.c.Cache, Guest: g}
	if out != nil {
		conf.Progress = out
	}
	return template.New(slog.New(slog.DiscardHandler), conf)
}

func templateCommand() *command {
	t := &templates{}
	return &command{
		use: "template", short: "list, inspect, build, export, import and remove templates", long: `
A template is a root file system from which sandboxes start. The server has its
own templates, such as base. A project can build more, with E2B's SDK and CLI or
with "postern template build" and "import". Only that project can use them until
it publishes them.

The server's own templates are built with mmdebstrap, which must be installed,
from Debian packages; base also needs npm. They are stored in --cache. If a
template is in the cache, "build" takes milliseconds. "postern up" builds base
when it starts, and the others at their first use. The cache also keeps the
packages, compressed, for the next version of Postern: base needs 2 GB in all.
Paused sandboxes and snapshots need the template that they were started from, so
prune only when those from older versions are gone. The server removes unused
builds of projects automatically.`,
		example: `postern template list
postern template inspect base --spdx > base.spdx.json
postern template import app.tar --name app`,
		flags: func(fs *pflag.FlagSet) {
			t.c.location(fs)
			pathVar(fs, &t.c.Cache, "cache", defaultCache, "`directory` for the server's own templates")
		},
		below: []*command{t.listCommand(), t.inspectCommand(), t.buildCommand(), t.exportCommand(), t.importCommand(), t.publishCommand(), t.deleteCommand(), t.pruneCommand()},
	}
}

func (t *templates) listCommand() *command {
	return &command{
		use: "list", short: "list the server's templates and the project's", lists: true,
		run: onServer(&t.c, func(ctx context.Context, l *local, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			all := []templateFacts{}
			if l.base == "" { // otherwise the server's templates are on another machine
				own, err := t.listOwn()
				if err != nil {
					return err
				}
				all = append(all, own...)
			}
			projects, missing := l.projectTemplates(ctx)
			all = append(all, projects...)
			if missing != nil && (len(all) == 0 || l.base != "") {
				return missing
			}
			rows := [][]string{{"NAME", "ID", "OF", "STATE", "PUBLIC", "BUILT"}}
			for _, f := range all {
				rows = append(rows, []string{printable(f.Name), f.ID, f.Of, f.State, yesNo(f.Public), ago(f.Built)})
			}
			if err := out.rows(all, rows); err != nil || missing == nil || out.json {
				return err
			}
			_, err := fmt.Fprintln(out, "\nTemplates of projects are not listed:", missing)
			return err
		}),
	}
}

func yesNo(v bool) string {
	if v {
		return "yes"
	}
	return "no"
}

// listOwn returns the server's own templates that are built.
func (t *templates) listOwn() ([]templateFacts, error) {
	if _, err := os.Stat(filepath.Join(t.c.Cache, "templates")); errors.Is(err, fs.ErrNotExist) {
		return nil, nil // the server uses another directory, or has not run yet
	}
	cache, err := t.own(nil)
	if err != nil {
		return nil, err
	}
	defer cache.Close()
	list, err := cache.List()
	if err != nil {
		return nil, err
	}
	out := []templateFacts{}
	for _, o := range list {
		f := templateFacts{ID: o.ID, Of: "server", State: "ready", Public: true, Built: o.Built}
		if id, err := cache.Lookup(o.Name); err == nil && id == o.ID {
			f.Name = o.Name
		}
		out = append(out, f)
	}
	return out, nil
}

// ownID returns the ID of the server's own template with a name or ID. It is empty if there
// is none.
func ownID(cache *template.Cache, name string) (string, error) {
	if id, err := cache.Lookup(name); err == nil {
		return id, nil
	}
	list, err := cache.List()
	if err != nil {
		return "", err
	}
	if slices.ContainsFunc(list, func(o template.Template) bool { return o.ID == name }) {
		return name, nil
	}
	return "", nil
}

func (t *templates) inspectCommand() *command {
	return &command{
		use: "inspect NAME", short: "show what a template consists of, by digest", facts: true, long: `
NAME is a name, with or without a tag, or an ID. The image's digest identifies
the content of every file. The source is the digest of the image from which the
build started. --json lists all packages, and --spdx prints them as an SPDX 2.3
document.`,
		example: `postern template inspect app:v2 --json
postern template inspect base --spdx > base.spdx.json`,
		flags: func(fs *pflag.FlagSet) {
			fs.BoolVar(&t.spdx, "spdx", false, "print an SPDX 2.3 document (JSON)")
		},
		run: onServer(&t.c, func(ctx context.Context, l *local, args []string, out *output) error {
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			if l.base == "" {
				if done, err := t.inspectOwn(name, out); done || err != nil {
					return err
				}
			}
			return l.inspectTemplate(ctx, name, t.spdx, out)
		}),
	}
}

// inspectOwn shows one of the server's own templates. It reports false if there is none
// with that name.
func (t *templates) inspectOwn(name string, out *output) (bool, error) {
	cache, err := t.own(nil)
	if err != nil {
		return false, err
	}
	defer cache.Close()
	id, err := ownID(cache, name)
	if err != nil || id == "" {
		return false, err
	}
	rec, err := cache.Record(id)
	if errors.Is(err, template.ErrNotFound) {
		return true, fmt.Errorf("template %s is not built yet: postern template build %s", name, name)
	}
	if err != nil {
		return true, err
	}
	if t.spdx {
		return true, cache.WriteSPDX(out, id)
	}
	return true, out.facts(rec, func() error {
		return out.table([][]string{
			{"template", strings.Join(rec.Names, ", ")},
			{"id", rec.ID},
			{"of", "the server"},
			{"built", ago(rec.Built)},
			{"image", rec.Digest},
			{"path", rec.Path},
			{"size", fmt.Sprintf("%d MB", rec.Bytes/1e6)},
			{"packages", strconv.Itoa(len(rec.Packages))},
		})
	})
}

func (t *templates) buildCommand() *command {
	return &command{
		use: "build [NAME...]", short: "build the server's own templates, or a project's from a definition", long: `
Without -f it builds the server's own templates: the named ones, or base.

With -f it builds a template of the project from a Dockerfile, or from a JSON
file with the fields of E2B's request: fromImage or fromTemplate, steps,
startCmd, readyCmd. COPY copies files from the directory of that file, or from
--context: at most 1 GiB at once, without those that .dockerignore excludes.
Symbolic links must lead to a place in that directory.

Of a Dockerfile it takes FROM (one stage), RUN, COPY, ADD, ENV, ARG, WORKDIR and
USER. ADD does the same as COPY. ENTRYPOINT and CMD become the start command.
Without USER and WORKDIR, sandboxes run as user in /home/user.`,
		example: `postern template build
postern template build slim
postern template build --all
postern template build -f Dockerfile --name app:v2
postern template build -f docker/app.Dockerfile --context . --name app`,
		flags: func(fs *pflag.FlagSet) {
			fs.BoolVar(&t.all, "all", false, "build all of the server's own templates")
			fs.StringVarP(&t.file, "file", "f", "", "Dockerfile, or JSON definition: its `file`")
			pathVar(fs, &t.dir, "context", "", "`directory` from which COPY takes files, instead of that of -f's file")
			fs.StringVar(&t.name, "name", "", "`name` of the template, with or without a tag; for -f")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			switch {
			case t.file != "" && (len(args) > 0 || t.all || t.name == ""):
				return fmt.Errorf("%w: -f needs --name and nothing else", errUsage)
			case t.file != "":
				return onServer(&t.c, func(ctx context.Context, l *local, _ []string, out *output) error {
					return l.buildTemplate(ctx, t.file, t.dir, t.name, out)
				})(ctx, args, out)
			case t.name != "":
				return fmt.Errorf("%w: --name is for -f", errUsage)
			case t.dir != "":
				return fmt.Errorf("%w: --context is for -f", errUsage)
			case t.all && len(args) > 0:
				return fmt.Errorf("%w: --all builds every template: give it no names", errUsage)
			}
			cache, err := t.own(out)
			if err != nil {
				return err
			}
			defer cache.Close()
			if t.all {
				args = cache.Names()
			}
			built, err := cache.Build(ctx, args...)
			for _, o := range built {
				fmt.Fprintf(out, "template %s: %d packages, %d MB, %s\n", o.ID, o.Packages, o.Bytes/1e6, o.RootImage)
			}
			return err
		},
	}
}

func (t *templates) exportCommand() *command {
	return &command{
		use: "export NAME FILE", short: "write a project's template as an OCI layout", long: `
FILE is a tar archive with one image. "postern template import", recent versions
of "docker load", skopeo and podman can read it. FILE must not exist. The image
has one layer. Exporting the same build again produces the same bytes.`,
		example: `postern template export app app.tar`,
		run: onServer(&t.c, func(ctx context.Context, l *local, args []string, out *output) error {
			if len(args) != 2 {
				return fmt.Errorf("%w: want NAME and FILE, got %d arguments", errUsage, len(args))
			}
			l.http.Timeout = 0 // the image may have gigabytes
			if err := l.download(ctx, templatePath(args[0], "image"), args[1], out); err != nil {
				return noTemplate(args[0], err)
			}
			_, err := fmt.Fprintln(out, "wrote", args[1])
			return err
		}),
	}
}

func (t *templates) importCommand() *command {
	return &command{
		use: "import FILE --name NAME", short: "build a project's template from an image in a file", long: `
FILE is a file of "docker save" or an OCI layout. An OCI layout is a directory or
a tar archive of it. Archives may be compressed with gzip or zstd. FILE must have
one image for the server's platform. Of the image's configuration, only the
environment is used.`,
		example: `docker save app:1 > app.tar && postern template import app.tar --name app`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&t.name, "name", "", "`name` of the template, with or without a tag")
		},
		run: onServer(&t.c, func(ctx context.Context, l *local, args []string, out *output) error {
			file, err := oneArg(args, "FILE")
			if err != nil {
				return err
			}
			if t.name == "" {
				return fmt.Errorf("%w: --name is missing", errUsage)
			}
			return l.importTemplate(ctx, filepath.Clean(file), t.name, out)
		}),
	}
}

func (t *templates) publishCommand() *command {
	return &command{
		use: "publish NAME", short: "let other projects start sandboxes from a template", long: `
Other projects refer to it as PROJECT/NAME. They can read every file in it.`,
		example: `postern template publish app
postern template publish app --private`,
		flags: func(fs *pflag.FlagSet) {
			fs.BoolVar(&t.private, "private", false, "make the template private again; running sandboxes continue")
		},
		run: onServer(&t.c, func(ctx context.Context, l *local, args []string, out *output) error {
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			var said struct{ Names []string }
			if err := l.call(ctx, "PATCH", "/v2"+templatePath(name, ""), map[string]bool{"public": !t.private}, &said); err != nil {
				return noTemplate(name, err)
			}
			word := "published"
			if t.private {
				word = "no longer published"
			}
			_, err = fmt.Fprintln(out, word, printable(strings.Join(said.Names, ", ")))
			return err
		}),
	}
}

func (t *templates) deleteCommand() *command {
	return &command{
		use: "delete NAME", short: "delete a project's template, unless sandboxes or snapshots need it",
		run: onServer(&t.c, func(ctx context.Context, l *local, args []string, out *output) error {
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			if err := l.call(ctx, "DELETE", templatePath(name, ""), nil, nil); err != nil {
				return noTemplate(name, err)
			}
			_, err = fmt.Fprintln(out, "deleted", name)
			return err
		}),
	}
}

func (t *templates) pruneCommand() *command {
	return &command{
		use: "prune", short: "remove the server's own templates that neither this program nor a running server uses",
		run: func(ctx context.Context, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			cache, err := t.own(out)
			if err != nil {
				return err
			}
			defer cache.Close()
			gone, err := cache.Prune(ctx)
			for _, id := range gone {
				fmt.Fprintf(out, "template %s: removed\n", id)
			}
			return err
		},
	}
}
