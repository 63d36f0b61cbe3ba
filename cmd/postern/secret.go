package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/api"
	"postern/internal/secret"
)

//nolint:gosec // it has no value
const secretHelp = `
A secret is a credential that programs in sandboxes use and never have. A
program has a sentinel instead, such as pst_4xk…, in an environment variable or
not at all. The server replaces it by the value in HTTPS requests to the hosts
that the secret belongs to, in the header fields that the secret lists:
Authorization and the field that the host is known to use, unless --header says
otherwise. Everywhere else in a request the sentinel is text: a model that reads
it cannot tell the value, because its host never gets the value there. In such a
field to another host it is refused and on the record.

A secret without --host is only put where the rules of a sandbox name it:
network.rules with ${e2b.secrets.NAME}. Attach one to a sandbox with metadata
postern.secrets: NAME, or with envs: {TOKEN: "${e2b.secrets.NAME}"}.

Values are read from standard input or a file, never from an argument, which
others on the machine see. Nothing prints them again. See
docs/reference/secrets.md.`

// A secretFlags is what the commands on secrets take.
type secretFlags struct {
	file     string
	hosts    []string
	env      string
	approval string
	headers  []string
	aws      string // access key ID
	token    string // file of the session token
}

// value reads the value for a kind of secret.
func (f *secretFlags) value(kind string) (api.SecretValue, error) {
	text, err := secretText(f.file, "Value: ")
	if err != nil {
		return api.SecretValue{}, err
	}
	if kind != api.SecretAWS {
		if f.aws != "" || f.token != "" {
			return api.SecretValue{}, fmt.Errorf("%w: --aws and --session-token-file are for a secret that was created with --aws", errUsage)
		}
		return api.SecretValue{Value: text}, nil
	}
	v := api.SecretValue{AccessKeyID: f.aws, SecretAccessKey: text}
	if f.token != "" {
		v.SessionToken, err = secretText(f.token, "")
	}
	return v, err
}

// secretText reads a value from a file, or from standard input if file is empty or
// "-". One end of line at the end is not part of it.
func secretText(file, prompt string) (string, error) {
	if file == "" && isTerminal(os.Stdin) {
		return secretLine(bufio.NewReader(os.Stdin), prompt)
	}
	from := os.Stdin
	if file != "" && file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return "", err
		}
		defer f.Close()
		from = f
	}
	b, err := io.ReadAll(io.LimitReader(from, secret.MaxValue+3))
	if err != nil {
		return "", fmt.Errorf("read the value: %w", err)
	}
	text := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	clear(b)
	if text == "" {
		return "", fmt.Errorf("%w: no value: pipe it in, or give --file", errUsage)
	}
	return text, nil
}

func secretCommand() *command {
	var c Config
	var f secretFlags
	source := func(fs *pflag.FlagSet) {
		fs.StringVar(&f.file, "file", "", "read the value from this `file` (default: standard input)")
		fs.StringVar(&f.aws, "aws", "", "the `access key ID` of an AWS key pair; the value is then its secret access key")
		fs.StringVar(&f.token, "session-token-file", "", "`file` of the session token of temporary AWS credentials")
	}
	settings := func(fs *pflag.FlagSet) {
		fs.Var(&list{values: &f.hosts}, "host", "`host` or *.host that may get the value; may be repeated, at most 10")
		fs.StringVar(&f.env, "env", "", "environment `variable` of sandboxes to which it is attached (default: the name in capitals)")
		fs.Var(&list{values: &f.headers}, "header", "header `field` that may have the value; may be repeated, at most 10 (default: Authorization, and the field that the hosts are known to use)")
		fs.StringVar(&f.approval, "approval", "", "`when` a person is asked: always, for the first use of each sandbox (first), or never (default: never)")
	}
	named := func(do func(ctx context.Context, l *local, name string, out *output) error) runner {
		return onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			if err := do(ctx, l, name, out); errors.Is(err, errNotFound) {
				return fmt.Errorf("there is no secret %q; postern secret list shows them", name)
			} else if err != nil {
				return err
			}
			return nil
		})
	}
	return &command{
		use: "secret", short: "keep credentials that sandboxes use and never have", long: secretHelp,
		flags: c.location,
		below: []*command{
			{ //nolint:gosec // the access key ID is that of AWS's documentation
				use: "create NAME", short: "store a value under a name", facts: true,
				example: "printf %s \"$GITHUB_TOKEN\" | postern secret create github --host api.github.com\npostern secret create s3 --aws AKIAIOSFODNN7EXAMPLE --host '*.amazonaws.com' --file key",
				flags:   func(fs *pflag.FlagSet) { source(fs); settings(fs) },
				run: named(func(ctx context.Context, l *local, name string, out *output) error {
					n := api.NewSecret{Name: name, Kind: api.SecretPlain, Hosts: f.hosts, Env: f.env, Approval: f.approval, Headers: f.headers}
					if f.aws != "" {
						n.Kind = api.SecretAWS
					}
					v, err := f.value(n.Kind)
					if err != nil {
						return err
					}
					n.SecretValue = v
					s, err := l.api.Secrets.Create(ctx, n)
					if err != nil {
						return err
					}
					return printSecret(out, s)
				}),
			},
			{
				use: "list", short: "list the secrets", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					all, err := l.api.Secrets.List(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"NAME", "KIND", "HOSTS", "ENV", "APPROVAL", "VERSION", "CHANGED", "LAST USED"}}
					for _, s := range all {
						rows = append(rows, []string{s.Name, s.Kind, hostsOf(s), envOf(s), s.Approval, strconv.FormatInt(s.Version, 10), ago(s.UpdatedAt), usedAgo(s.LastUsedAt, secret.UseResolution)})
					}
					return out.rows(all, rows)
				}),
			},
			{
				use: "show NAME", short: "show a secret, without its value", facts: true,
				run: named(func(ctx context.Context, l *local, name string, out *output) error {
					s, err := l.api.Secrets.Get(ctx, name)
					if err != nil {
						return err
					}
					return printSecret(out, s)
				}),
			},
			{
				use: "rotate NAME", short: "replace the value; sandboxes use the new one at once", facts: true,
				example: "printf %s \"$NEW_TOKEN\" | postern secret rotate github",
				flags:   source,
				run: named(func(ctx context.Context, l *local, name string, out *output) error {
					was, err := l.api.Secrets.Get(ctx, name)
					if err != nil {
						return err
					}
					if was.Kind == api.SecretAWS && f.aws == "" {
						return fmt.Errorf("%w: %s is an AWS key pair: give the new access key ID with --aws", errUsage, name)
					}
					v, err := f.value(was.Kind)
					if err != nil {
						return err
					}
					s, err := l.api.Secrets.Rotate(ctx, was.ID, v)
					if err != nil {
						return err
					}
					return printSecret(out, s)
				}),
			},
			{
				use: "update NAME", short: "change hosts, header fields, environment variable or approval", facts: true,
				flags: settings,
				run: named(func(ctx context.Context, l *local, name string, out *output) error {
					var ch api.SecretChange
					if len(f.hosts) > 0 {
						ch.Hosts = &f.hosts
					}
					if f.env != "" {
						ch.Env = &f.env
					}
					if len(f.headers) > 0 {
						ch.Headers = &f.headers
					}
					if f.approval != "" {
						ch.Approval = &f.approval
					}
					s, err := l.api.Secrets.Update(ctx, name, ch)
					if err != nil {
						return err
					}
					return printSecret(out, s)
				}),
			},
			openPlaceCommand(&c),
			closePlaceCommand(&c),
			{
				use: "delete NAME", short: "delete a secret; what stands for it in sandboxes is worth nothing then",
				run: named(func(ctx context.Context, l *local, name string, out *output) error {
					s, err := l.api.Secrets.Get(ctx, name)
					if err == nil {
						err = l.api.Secrets.Delete(ctx, s.ID)
					} else if !errors.Is(err, errNotFound) {
						err = l.api.Secrets.Delete(ctx, name) // one whose row was changed can be deleted
					}
					return err
				}),
			},
		},
	}
}

// hostsOf returns the hosts of s for a person.
func hostsOf(s api.Secret) string {
	if len(s.Hosts) == 0 {
		return "(rules of sandboxes)"
	}
	return strings.Join(s.Hosts, ",")
}

// envOf returns the environment variables of s in a sandbox to which it is attached.
func envOf(s api.Secret) string {
	if s.Kind == api.SecretAWS {
		return "AWS_ACCESS_KEY_ID,AWS_SECRET_ACCESS_KEY"
	}
	return s.Env
}

func printSecret(out *output, s api.Secret) error {
	if out.json {
		return out.object(s)
	}
	metadata := ""
	if len(s.Metadata) > 0 {
		b, err := json.Marshal(s.Metadata)
		if err != nil {
			return err
		}
		metadata = "\nmetadata   " + printable(string(b))
	}
	_, err := fmt.Fprintf(out, `name       %s
id         %s
kind       %s
hosts      %s
headers    %s%s
env        %s
approval   %s
version    %d, %s
last used  %s%s
`, s.Name, s.ID, s.Kind, hostsOf(s), strings.Join(s.Headers, ", "), placeLines(s), envOf(s), s.Approval, s.Version, ago(s.UpdatedAt), usedAgo(s.LastUsedAt, secret.UseResolution), metadata)
	return err
}
