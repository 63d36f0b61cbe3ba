package main

import (
	"context"
	"fmt"
	"net/url"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/store"
)

const configHelp = `
Every setting of "postern up" can be in a configuration file, by the name of its
flag, as YAML:

  # /etc/postern/postern.yaml
  data: /srv/postern
  mail-domain: agents.example.com
  deliver: mx
  egress-allow:
    - pypi.org
    - "*.pythonhosted.org"
    - db.example.com:5432
  max-timeout: 2h

The file is --config FILE, or postern.yaml in the data directory, or
/etc/postern/postern.yaml. A flag is stronger than the environment, that is
stronger than the file, and the file is stronger than a default. A key that is
no setting is an error. Relative paths are relative to the file. Other commands
read from the file which server is meant (data and database).`

func configCommand() *command {
	var c Config
	return &command{
		use: "config", short: "check and show the configuration", long: configHelp,
		below: []*command{
			{
				use: "check [FILE]", at: onFiles, short: "check a configuration file, without starting anything",
				example: "postern config check /etc/postern/postern.yaml",
				flags:   c.flags,
				early: func(flags *pflag.FlagSet, args []string) error {
					switch len(args) {
					case 0:
						return nil
					case 1:
						return flags.Set("config", args[0])
					}
					return fmt.Errorf("%w: want one FILE at most", errUsage)
				},
				run: func(_ context.Context, _ []string, out *output) error { return checkConfig(&c, out) },
			},
			{
				use: "show", at: onFiles, short: "show every setting and where its value comes from", lists: true,
				example: "postern config show\nPOSTERN_EGRESS=allow postern config show --json",
				flags:   c.flags,
				run: func(_ context.Context, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					return showConfig(out)
				},
			},
		},
	}
}

// checkConfig validates settings that have been read.
func checkConfig(c *Config, out *output) error {
	file, err := openConfig(c.ConfigFile, c.Data)
	if err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	if file == nil {
		_, err = fmt.Fprintln(out, "There is no configuration file; the settings are in order.")
		return err
	}
	_, err = fmt.Fprintf(out, "%s is in order; it has %d settings.\n", file.name, len(file.keys))
	return err
}

// A settingFacts describes one setting.
type settingFacts struct {
	Name   string `json:"name"`
	Value  string `json:"value"` // secrets are masked
	Source origin `json:"source"`
}

func showConfig(out *output) error {
	facts, rows := []settingFacts{}, [][]string{{"SETTING", "VALUE", "SOURCE"}}
	out.flags.VisitAll(func(f *pflag.Flag) {
		source, ok := out.sources[f.Name]
		if !ok || !settings()[variable(f.Name)] {
			return
		}
		s := settingFacts{Name: f.Name, Value: masked(f.Name, f.Value.String()), Source: source}
		facts = append(facts, s)
		rows = append(rows, []string{s.Name, cell(s.Value), string(s.Source)})
	})
	return out.rows(facts, rows)
}

// masked returns the value of a setting without the secrets in it.
func masked(name, value string) string {
	switch {
	case value == "":
	case strings.HasSuffix(name, "-token"):
		return "(secret)"
	case name == "database":
		return store.Redact(value)
	case strings.Contains(value, "://"):
		var urls []string
		for u := range strings.SplitSeq(value, ",") {
			if parsed, err := url.Parse(u); err == nil {
				u = parsed.Redacted()
			}
			urls = append(urls, u)
		}
		return strings.Join(urls, ",")
	}
	return value
}
