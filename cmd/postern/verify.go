package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/mail"
	"postern/internal/statement"
)

const maxVerified = 80 << 20 // bytes of a message

func verifyMessageCommand() *command {
	var keys, recipient string
	return &command{
		use:   "verify-message FILE",
		at:    onFiles,
		short: "check who let a message go",
		long: `
Checks the signed statement (header Postern-Statement) of a message in FILE, or
"-" for standard input: which inbox it is from, that an AI wrote it, whether a
person approved it, and that it is the message that left. Needs no server of
yours, and trusts the sender's only for its keys.

The keys come from --keys, a file or an https URL; without it they are fetched
once from https://DOMAIN/.well-known/postern-keys.json, where DOMAIN is the one
of the sender's address. Keep that document: with --keys it checks later mail
without asking anybody. Exits with status 1 if any of it is not true. The format
is described in docs/reference/statement.md.`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&keys, "keys", "", "`file or https URL` of the keys (default: fetched from the sender's domain)")
			fs.StringVar(&recipient, "recipient", "", "`address` at which the message arrived: a message that was sent to somebody else is refused")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			file, err := oneArg(args, "FILE")
			if err != nil {
				return err
			}
			return verifyMessage(ctx, out, file, keys, recipient)
		},
	}
}

func verifyMessage(ctx context.Context, out *output, file, keys, recipient string) error {
	raw, err := readBounded(file, maxVerified)
	if err != nil {
		return err
	}
	// What the statement says of itself chooses the domain to ask, and no more.
	claimed, err := statement.Verify(raw, nil, statement.Options{})
	if errors.Is(err, statement.ErrNone) || errors.Is(err, statement.ErrMalformed) {
		return err
	}
	source := keys
	if source == "" {
		if source, err = keysURL(claimed.Domain); err != nil {
			return err
		}
	}
	var doc []byte
	if strings.Contains(source, "://") {
		doc, err = fetchKeys(ctx, source)
	} else {
		doc, err = readBounded(source, statement.MaxKeys)
	}
	if err != nil {
		return fmt.Errorf("get keys: %w", err)
	}
	known, err := statement.ParseKeys(doc)
	if err != nil {
		return err
	}
	r, err := statement.Verify(raw, known, statement.Options{Recipient: recipient})
	if err != nil {
		return err
	}
	line := func(name, value string) { fmt.Fprintf(out, "  %-12s %s\n", name, mail.Printable(value, 1000)) }
	fmt.Fprintln(out, "The statement is true: this message left as it is.")
	line("domain", r.Domain)
	line("inbox", r.Inbox)
	line("project", r.Project)
	line("written by", "an AI")
	if r.Approved == statement.ByPerson {
		line("approved by", "a person, who saw it (mode "+r.Mode+")")
	} else {
		line("approved by", "a rule, without a person (mode "+r.Mode+")")
	}
	line("at", r.At.Format(time.RFC3339))
	line("subject", r.Subject)
	line("message id", r.ID)
	switch {
	case r.Hidden != "" && recipient != "":
		line("to", recipient+" alone, whom its header does not name")
	case r.Hidden != "":
		line("to", "one recipient whom its header does not name; give --recipient to check that it is you")
	default:
		line("to", strings.Join(r.To[:min(len(r.To), 100)], ", "))
	}
	line("key", r.Key)
	line("keys from", source)
	return nil
}

// keysURL returns where a domain publishes its keys. The domain is what the
// message says: it must be a name, and nothing that leads elsewhere.
func keysURL(domain string) (string, error) {
	if _, err := mail.CheckAddr("domain", "x@"+domain); err != nil || strings.ContainsAny(domain, "[]:/?#@") {
		return "", fmt.Errorf("the statement is of %q, which is no domain", mail.Printable(domain, 100))
	}
	return "https://" + domain + statement.KeysPath, nil
}

func fetchKeys(ctx context.Context, from string) ([]byte, error) {
	u, err := url.Parse(from)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("%q is no https URL: keys that came in the clear could be anybody's", from)
	}
	client := &http.Client{
		Timeout: 20 * time.Second,
		CheckRedirect: func(req *http.Request, via []*http.Request) error {
			// www.example for example is common; another name is another's word.
			if req.URL.Scheme != "https" || len(via) > 3 || !strings.HasSuffix("."+req.URL.Hostname(), "."+u.Hostname()) {
				return fmt.Errorf("it leads to %s, which is not the same domain", req.URL.Redacted())
			}
			return nil
		},
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answered %s", from, resp.Status)
	}
	return io.ReadAll(io.LimitReader(resp.Body, statement.MaxKeys+1))
}

// readBounded reads a file, or standard input for "-", of at most most bytes.
func readBounded(name string, most int64) ([]byte, error) {
	in := io.Reader(os.Stdin)
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, most+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if int64(len(b)) > most {
		return nil, fmt.Errorf("read %s: it has more than %d bytes", name, most)
	}
	return b, nil
}
