package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	slashpath "path"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/contract"
)

func contractCommand() *command {
	var conf Config
	var t contractTool
	return &command{
		use: "contract", short: "write, check, compare and store the contracts of runs",
		long: `
A contract says what a run may do: which programs it starts, which files it sees,
where it connects, what its limits are, and which files may leave. What a clause does
not name is not allowed. Start with a contract that has every field:

  postern contract init report.yaml

init, check, explain, diff, test and schema need no server. learn writes a contract from
a trial run. docs/reference/contract.md describes the format.`,
		example: `
  postern contract check report.yaml
  postern contract diff boundary.yaml report.yaml
  postern contract put report.yaml`,
		below: append([]*command{
			{
				use: "init [FILE]", at: onFiles, short: "write a contract with a comment for each field",
				long: `
Writes a valid contract with a comment for each field to FILE or standard output. FILE
must not exist. The contract is named after the file.`,
				example: "postern contract init report.yaml",
				run:     t.start,
			},
			{
				use: "check FILE...", at: onFiles, short: "check contracts for errors", lists: true,
				long: `
Prints each error with its line, and warns about clauses that allow more than they
seem to. A clause that cannot be enforced is an error. The exit status is 1 if a file
is not valid. With --boundary the files are boundaries. They may also say template "*",
secret "*", inbox "*", and "/" in files.read and files.write. - is standard input.`,
				example: "postern contract check report.yaml\npostern contract check --boundary boundary.yaml",
				flags: func(fs *pflag.FlagSet) {
					fs.BoolVar(&t.boundary, "boundary", false, "the files are boundaries")
				},
				run: t.check,
			},
			{
				use: "explain FILE", at: onFiles, short: "print what a contract allows, in sentences", facts: true,
				long: `
Prints a sentence or two for each clause, also for clauses that allow nothing. A person
who reviews a run reads the same sentences.`,
				example: "postern contract explain report.yaml", run: t.explain,
			},
			{
				use: "diff A B", at: onFiles, short: "print whether contract B is wider than A, and where", facts: true,
				long: `
Compares two contracts clause by clause. The exit status is 0 if B allows nothing that A
does not, and 1 if B is wider. A pattern of B that cannot be shown to lie within one of A
counts as wider. If A is a boundary, the answer says whether a run of B would be refused.`,
				example: "postern contract diff boundary.yaml report.yaml", run: t.diff,
			},
			{
				use: "test FILE [flags] [--] [COMMAND [ARGUMENT...]]", at: onFiles, short: "print whether a contract allows a command, a path or a host", facts: true,
				long: `
Prints for the COMMAND and each flag whether the contract allows it, and by which clause.
A COMMAND without a slash means the template's program of that name. The exit status is
1 if anything is refused.`,
				example: `
  postern contract test report.yaml -- python3 report.py --month 11
  postern contract test report.yaml --path /etc/passwd --host api.example.com --artifact /work/out.csv`,
				flags: func(fs *pflag.FlagSet) {
					fs.Var(&addressList{&t.paths}, "path", "`path` that the run would write; may be repeated")
					fs.Var(&addressList{&t.reads}, "read", "`path` that the run would read; may be repeated")
					fs.Var(&addressList{&t.hosts}, "host", "`host` or address to which it would connect; may be repeated")
					fs.Var(&addressList{&t.artifacts}, "artifact", "`path` of a file that would leave; may be repeated")
					fs.Var(&addressList{&t.inputs}, "input", "`path` of a file that would be put in; may be repeated")
				},
				run: t.test,
			},
			{
				use: "schema", at: onFiles, short: "print the JSON Schema of contracts",
				long: `
Prints the JSON Schema (draft 2020-12), for editors. It describes the form. Whether a
clause can be enforced, only "postern contract check" tells.`,
				example: "postern contract schema > contract.schema.json",
				run: func(_ context.Context, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					_, err := out.Write(contract.Schema())
					return err
				},
			},
			learnContract(),
		}, storedContracts(&conf)...),
	}
}

// A contractTool is the contract commands that need no server, with their flags.
type contractTool struct {
	boundary                               bool
	paths, reads, hosts, artifacts, inputs []string
}

// errContract is the exit status of a negative answer, which has been printed.
const errContract = exitError(1)

func (t *contractTool) start(_ context.Context, args []string, out *output) error {
	if len(args) > 1 {
		return fmt.Errorf("%w: want at most one FILE, got %d arguments", errUsage, len(args))
	}
	if len(args) == 0 {
		b, err := contract.Sample("sample")
		if err == nil {
			_, err = out.Write(b)
		}
		return err
	}
	name := strings.TrimSuffix(strings.TrimSuffix(slashpath.Base(args[0]), ".yaml"), ".yml")
	b, err := contract.Sample(name)
	if err != nil {
		return fmt.Errorf("a new contract is named after its file: %w", err)
	}
	if err := writeContract(args[0], b); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s is written; change it, then run postern contract check %s\n", args[0], args[0])
	return err
}

// writeContract writes the text of a contract to a new file.
func writeContract(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s exists already; choose another name", path)
	}
	if err != nil {
		return err
	}
	if _, err := f.Write(text); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

// A checkedContract is one file in the output of check.
type checkedContract struct {
	File     string             `json:"file"`
	Valid    bool               `json:"valid"`
	Name     string             `json:"name,omitzero"`
	Digest   string             `json:"digest,omitzero"`
	Problems []contract.Problem `json:"problems"`
	Warnings []string           `json:"warnings"`
}

func (t *contractTool) check(_ context.Context, args []string, out *output) error {
	if len(args) == 0 {
		return fmt.Errorf("%w: FILE is missing", errUsage)
	}
	list, failed := []checkedContract{}, false
	for _, name := range args {
		text, err := readContract(name)
		if err != nil {
			return err
		}
		read := contract.Parse
		if t.boundary {
			read = contract.ParseBoundary
		}
		one := checkedContract{File: name, Problems: []contract.Problem{}, Warnings: []string{}}
		if c, err := read(text); err != nil {
			failed = true
			one.Problems = contract.Problems(err)
		} else {
			one.Valid, one.Name, one.Digest = true, c.Name, c.Digest()
			one.Warnings = append(one.Warnings, c.Warnings()...)
		}
		list = append(list, one)
	}
	if out.json {
		if err := out.object(list); err != nil {
			return err
		}
	} else {
		for _, one := range list {
			for _, p := range one.Problems {
				fmt.Fprintf(out, "%s: %s\n", one.File, printable(p.String()))
			}
			for _, w := range one.Warnings {
				fmt.Fprintf(out, "%s: warning: %s\n", one.File, printable(w))
			}
			if one.Valid {
				fmt.Fprintf(out, "%s is in order; its digest is %s\n", one.File, one.Digest)
			}
		}
	}
	if failed {
		return errContract
	}
	return nil
}

// read reads a contract or a boundary.
func (t *contractTool) read(name string) (*contract.Contract, error) {
	text, err := readContract(name)
	if err != nil {
		return nil, err
	}
	c, err := contract.Parse(text)
	if err != nil {
		// Unless it is a valid boundary, report what is wrong with it as a contract.
		if b, berr := contract.ParseBoundary(text); berr == nil {
			return b, nil
		}
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return c, nil
}

func (t *contractTool) explain(_ context.Context, args []string, out *output) error {
	name, err := oneArg(args, "FILE")
	if err != nil {
		return err
	}
	c, err := t.read(name)
	if err != nil {
		return err
	}
	v := struct {
		Name     string            `json:"name"`
		Digest   string            `json:"digest"`
		Clauses  []contract.Clause `json:"clauses"`
		Warnings []string          `json:"warnings"`
	}{c.Name, c.Digest(), c.Clauses(), append([]string{}, c.Warnings()...)}
	return out.facts(v, func() error {
		for _, s := range c.Explain() {
			if _, err := fmt.Fprintln(out, printable(s)); err != nil {
				return err
			}
		}
		for _, w := range c.Warnings() {
			fmt.Fprintf(out, "warning: %s\n", printable(w))
		}
		return nil
	})
}

func (t *contractTool) diff(_ context.Context, args []string, out *output) error {
	if len(args) != 2 {
		return fmt.Errorf("%w: want two files, A and B; got %d", errUsage, len(args))
	}
	a, err := t.read(args[0])
	if err != nil {
		return err
	}
	b, err := t.read(args[1])
	if err != nil {
		return err
	}
	d := contract.Diff(a, b)
	d.Wider, d.Narrower = append([]contract.Difference{}, d.Wider...), append([]contract.Difference{}, d.Narrower...)
	err = out.facts(d, func() error {
		for _, w := range d.Wider {
			fmt.Fprintf(out, "wider     %-12s %s\n", w.Clause, printable(w.String()))
		}
		for _, n := range d.Narrower {
			fmt.Fprintf(out, "narrower  %-12s in %s: %s\n", n.Clause, args[0], printable(n.String()))
		}
		says := "allows nothing that " + args[0] + " does not"
		switch {
		case len(d.Wider) > 0:
			says = "is wider than " + args[0]
		case d.Same:
			says = "says the same as " + args[0]
		case len(d.Narrower) == 0:
			says = "allows the same as " + args[0] + ", with other patterns"
		}
		_, err := fmt.Fprintf(out, "%s %s\n", args[1], says)
		return err
	})
	if err == nil && len(d.Wider) > 0 {
		err = errContract
	}
	return err
}

// A contractAnswer is what a contract says about one thing.
type contractAnswer struct {
	What    string `json:"what"` // command, read, write, host, artifact or input
	Subject string `json:"subject"`
	Allowed bool   `json:"allowed"`
	Ask     bool   `json:"ask,omitzero"` // a person decides first
	Why     string `json:"why"`
}

func (t *contractTool) test(_ context.Context, args []string, out *output) error {
	if len(args) == 0 {
		return fmt.Errorf("%w: FILE is missing", errUsage)
	}
	c, err := t.read(args[0])
	if err != nil {
		return err
	}
	var list []contractAnswer
	if argv := args[1:]; len(argv) > 0 {
		m := c.Start(assumed(c, argv))
		list = append(list, contractAnswer{"command", strings.Join(argv, " "), m.Allowed, m.Ask, m.Why})
	}
	for _, p := range t.reads {
		a := c.Access(p)
		list = append(list, contractAnswer{What: "read", Subject: p, Allowed: a.Read, Why: a.Why})
	}
	for _, p := range t.paths {
		a := c.Access(p)
		if a.Read && !a.Write {
			a.Why += ", to read"
		}
		list = append(list, contractAnswer{What: "write", Subject: p, Allowed: a.Write, Why: a.Why})
	}
	for _, h := range t.hosts {
		ok, why := c.Reach(h)
		list = append(list, contractAnswer{What: "host", Subject: h, Allowed: ok, Why: why})
	}
	for _, p := range t.inputs {
		answer := contractAnswer{What: "input", Subject: p, Why: "files.inputs does not name it"}
		if in, ok := c.MatchInput(p); ok {
			answer.Allowed, answer.Why = true, "files.inputs has "+in.Path
		}
		list = append(list, answer)
	}
	for _, p := range t.artifacts {
		answer := contractAnswer{What: "artifact", Subject: p, Why: "artifacts does not name it"}
		if a, ok := c.MatchArtifact(p); ok {
			answer.Allowed, answer.Why = true, fmt.Sprintf("artifacts has %s (%s)", a.Path, a.Type)
		}
		list = append(list, answer)
	}
	if len(list) == 0 {
		return fmt.Errorf("%w: nothing is asked: write -- COMMAND, --path, --read, --host, --input or --artifact", errUsage)
	}
	refused := false
	err = out.facts(list, func() error {
		for _, a := range list {
			word := "refused"
			switch {
			case a.Ask:
				word = "asked"
			case a.Allowed:
				word = "allowed"
			}
			if _, err := fmt.Fprintf(out, "%-8s %-9s %s: %s\n", word, a.What, printable(a.Subject), printable(a.Why)); err != nil {
				return err
			}
		}
		return nil
	})
	for _, a := range list {
		refused = refused || !a.Allowed
	}
	if err == nil && refused {
		err = errContract
	}
	return err
}

// assumed returns the start of argv in a sandbox whose template has each program in
// /usr/bin, and where the run has put a program at each path that it can write.
func assumed(c *contract.Contract, argv []string) contract.Started {
	file := argv[0]
	switch {
	case !strings.Contains(file, "/"):
		file = "/usr/bin/" + file
	case !slashpath.IsAbs(file):
		file = slashpath.Join(c.Dir(), file)
	}
	return contract.Started{Path: file, Name: file, Dir: c.Dir(), Args: argv, Fixed: !c.Access(file).Write}
}
