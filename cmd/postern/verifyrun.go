package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/attest"
	"postern/internal/contract"
	"postern/internal/mail"
)

// A runCheck is what is compared with the statement of a run.
type runCheck struct {
	keys      string   // file or https URL
	artifacts []string // files
	contract  string   // file
}

func verifyRunCommand() *command {
	var t runCheck
	return &command{
		use:   "verify-run FILE",
		at:    onFiles,
		short: "check the signed statement of a run",
		long: `
Checks the statement of a run in FILE ("-" is standard input), as "postern runs
statement ID" prints it. A key of the run's server must have signed it. It must not
contradict itself. Files that you give must be the ones that it names. The exit status
is 1 if a check fails.

The keys come from --keys, a file or an https URL. Without --keys they are fetched from
https://DOMAIN/.well-known/postern-run-keys.json. DOMAIN is the domain that the
statement names. Keep a copy of that document: with a file in --keys the check works
offline. docs/reference/run-statement.md describes the format, how to check it with
other programs, and what it does not prove.`,
		example: `
  postern runs statement run_7QK2M4 > run.intoto.json
  postern verify-run run.intoto.json --keys keys.json --artifact report.csv`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&t.keys, "keys", "", "`file or https URL` of the keys (default: fetched from the server that the statement names)")
			fs.StringArrayVar(&t.artifacts, "artifact", nil, "`file` that must be an artifact of the run; may be repeated")
			fs.StringVar(&t.contract, "contract", "", "`file` that must be the contract of the run")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			file, err := oneArg(args, "FILE")
			if err != nil {
				return err
			}
			return verifyRun(ctx, out, file, t)
		},
	}
}

func verifyRun(ctx context.Context, out *output, file string, t runCheck) error {
	raw, err := readBounded(file, attest.MaxSize)
	if err != nil {
		return err
	}
	// What the statement says of itself chooses the server to ask, and no more.
	claimed, _, err := attest.Peek(raw)
	if err != nil {
		return err
	}
	source := t.keys
	if source == "" {
		if source, err = runKeysURL(claimed.Predicate.Server); err != nil {
			return err
		}
	}
	var doc []byte
	if strings.Contains(source, "://") {
		doc, err = fetchKeys(ctx, source)
	} else {
		doc, err = readBounded(source, attest.MaxKeys)
	}
	if err != nil {
		return fmt.Errorf("get keys: %w", err)
	}
	keys, err := attest.ParseKeys(doc)
	if err != nil {
		return err
	}
	v, err := attest.Verify(raw, keys)
	if err != nil {
		return err
	}
	r := v.Statement.Predicate
	if t.contract != "" {
		if err := sameContract(t.contract, r.Contract); err != nil {
			return err
		}
	}
	var found []string
	for _, a := range t.artifacts {
		name, err := artifactOf(a, r.Artifacts)
		if err != nil {
			return err
		}
		found = append(found, fmt.Sprintf("%s is %s", filepath.Base(a), name))
	}
	return out.facts(v.Statement, func() error { return printVerified(out, v, found, source) })
}

// printVerified prints a statement that was checked. Its texts may be hostile.
func printVerified(out io.Writer, v attest.Verified, found []string, source string) error {
	r := v.Statement.Predicate
	line := func(name, value string) { fmt.Fprintf(out, "  %-12s %s\n", name, mail.Printable(value, 1000)) }
	fmt.Fprintln(out, "The signature is valid, and the statement does not contradict itself.")
	line("run", r.Run)
	line("outcome", outcomeWords(r.Outcome))
	line("server", r.Server)
	line("contract", r.Contract.Name+" "+r.Contract.Digest)
	if r.Boundary.Digest != "" {
		line("boundary", r.Boundary.Digest)
	}
	line("proposed by", r.Proposer)
	line("ended", r.Ended.Format(time.RFC3339))
	counts := map[string]int{}
	for _, c := range r.Clauses {
		counts[c.Verdict]++
	}
	line("clauses", fmt.Sprintf("%d kept, %d violated, %d not verified", counts[attest.Kept], counts[attest.Violated], counts[attest.NotVerified]))
	for _, c := range r.Clauses {
		if c.Verdict != attest.Kept {
			line("", c.ID+" "+strings.ReplaceAll(c.Verdict, "_", " ")+": "+c.Because)
		}
	}
	gone := 0
	for _, t := range r.Teardown {
		if t.Gone {
			gone++
		}
	}
	line("teardown", fmt.Sprintf("%d of %d traces are gone", gone, len(r.Teardown)))
	for _, a := range r.Artifacts {
		line("artifact", a.Path+"  "+a.SHA256+"  "+a.State)
	}
	for _, f := range found {
		line("file", f)
	}
	line("record", fmt.Sprintf("up to entry %d, %s", r.Audit.Seq, r.Audit.Head))
	line("key", v.Key.ID)
	line("keys from", source)
	return nil
}

// runKeysURL returns where a server publishes the keys of its runs. The name is what the
// statement says: it must be a domain, and nothing that leads elsewhere.
func runKeysURL(server string) (string, error) {
	domain, ok := strings.CutSuffix(server, "/runs")
	if _, err := mail.CheckAddr("domain", "x@"+domain); !ok || err != nil || strings.ContainsAny(domain, "[]:/?#@") {
		return "", fmt.Errorf("the statement names the server %q, which is not a domain: give the keys with --keys", mail.Printable(server, 100))
	}
	return "https://" + domain + attest.KeysPath, nil
}

// sameContract returns an error unless the contract in a file is the one of the run.
func sameContract(file string, want attest.Named) error {
	text, err := readBounded(file, contract.MaxSize)
	if err != nil {
		return err
	}
	c, err := contract.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if got := c.Digest(); got != want.Digest {
		return fmt.Errorf("%s is not the contract of the run: its digest is %s, and the run's is %s", file, got, want.Digest)
	}
	return nil
}

// artifactOf returns the path of the artifact that a file is.
func artifactOf(file string, list []attest.Artifact) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read %s: %w", file, err)
	}
	sum := hex.EncodeToString(h.Sum(nil))
	i := slices.IndexFunc(list, func(a attest.Artifact) bool { return a.SHA256 == sum })
	if i < 0 {
		return "", fmt.Errorf("%s is not an artifact of the run: its SHA-256 is %s", file, sum)
	}
	return list[i].Path, nil
}
