package main

import (
	"cmp"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/connector"
	"postern/internal/gmail"
	"postern/internal/imapmail"
	"postern/internal/mailauth"
	"postern/internal/publicnet"
)

// MailboxSettings is how mailboxes at other providers are reached.
type MailboxSettings struct {
	GmailURL string // a server that stands for Google's; empty means Google

	MailboxPrivate bool   // other providers may be on this machine and in private networks
	MailboxRoots   string // file of the certificates by which their servers are known
}

func (c *MailboxSettings) flags(fs *pflag.FlagSet) {
	fs.StringVar(&c.GmailURL, "gmail-url", "", "`URL` of a server that stands for Gmail and Google's sign-in, for tests (default: Google's own)")
	fs.BoolVar(&c.MailboxPrivate, "mailbox-private", false, "let connected mailboxes be at servers on this machine and in private networks: an owner of any project can then make this server connect there. Metadata services stay unreachable")
	pathVar(fs, &c.MailboxRoots, "mailbox-roots", "", "`file` of the certificate authorities that are trusted for the mail servers of connected mailboxes (default: the system's)")
}

func (c *MailboxSettings) validate(bad func(flag, format string, args ...any)) {
	if u, err := url.Parse(c.GmailURL); c.GmailURL != "" && (err != nil || u.Host == "" || u.Scheme != "https" && (u.Scheme != "http" || !loopback(u.Hostname()))) {
		bad("gmail-url", "%q is not an https URL, nor an http one of this machine", c.GmailURL)
	}
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// buildMailboxes makes the connections to mailboxes at other providers. It comes after
// the secrets and the post office.
func (d *daemon) buildMailboxes() error {
	public, err := publicnet.NewGuard(false)
	if err != nil {
		return err
	}
	dial := public.Dial(d.resolver, 30*time.Second)
	hostname := cmp.Or(d.conf.MailHost, d.conf.MailDomain)
	// The server that the operator named may be on this machine.
	if d.conf.GmailURL != "" {
		dial = (&net.Dialer{Timeout: 30 * time.Second, Resolver: d.resolver}).DialContext
	}
	google, err := gmail.New(gmail.Config{
		Base: d.conf.GmailURL, PollEvery: d.gmailPoll(),
		Transport: &http.Transport{DialContext: dial, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 30 * time.Second, IdleConnTimeout: 90 * time.Second, MaxIdleConnsPerHost: 8},
	})
	if err != nil {
		return err
	}
	imap, err := d.imapMailboxes(hostname)
	if err != nil {
		return err
	}
	verifier, err := mailauth.New(mailauth.Config{Resolver: d.resolver, Hostname: hostname})
	if err != nil {
		return err
	}
	d.mailboxes, err = connector.New(d.log, d.db, d.post, d.secrets, connector.Config{
		Instance: d.delivery().Instance, Openers: map[connector.Kind]connector.Opener{gmail.Kind: google, imapmail.Kind: imap},
		Strip: verifier.Strip, Results: mailauth.Given,
	})
	if err != nil {
		return err
	}
	d.gmailSignIns, err = gmail.NewSignIns(d.db, google, d.mailboxes, d.secrets)
	return err
}

// imapMailboxes makes what opens mailboxes over IMAP.
func (d *daemon) imapMailboxes(hostname string) (*imapmail.Opener, error) {
	guard, err := publicnet.NewGuard(d.conf.MailboxPrivate)
	if err != nil {
		return nil, err
	}
	conf := imapmail.Config{Hostname: hostname, Dial: guard.Dial(d.resolver, 30*time.Second)}
	if d.conf.MailboxRoots != "" {
		pem, err := os.ReadFile(d.conf.MailboxRoots)
		if err != nil {
			return nil, fmt.Errorf("--mailbox-roots: %w", err)
		}
		conf.Roots = x509.NewCertPool()
		if !conf.Roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--mailbox-roots: %s holds no certificate", d.conf.MailboxRoots)
		}
	}
	return imapmail.New(conf)
}

// gmailPoll is how often Gmail's history is asked for. A stand-in is asked more often.
func (d *daemon) gmailPoll() time.Duration {
	if d.conf.GmailURL != "" {
		return 200 * time.Millisecond
	}
	return 0
}
