package main

import (
	"cmp"
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/delivery"
	"postern/internal/domain"
	"postern/internal/signing"
	"postern/internal/smtpclient"
)

// DeliverTo is how mail leaves. The last three are for labs and tests.
type DeliverTo struct {
	Deliver string // "mx": to the servers that DNS names; or "relay": through Relay and Routes alone

	RetryFor    time.Duration // after the first attempt, when a recipient is given up
	Connections int           // conversations at the same time with one destination
	PerMinute   int           // messages a minute to one destination
	WarmUp      bool          // a domain that begins to send directly sends little at first

	MXPrivate bool   // mail servers at private addresses are taken
	MXPort    string // of all mail servers
	MXRoots   string // file of the certificates by which servers of domains with an MTA-STS policy are known
}

func (c *DeliverTo) flags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Deliver, "deliver", "relay", "relay or mx: mail leaves through --relay and --route alone, or goes to the servers that DNS names for its recipients' domains (port 25 must be open to the outside, and the address of this machine have a name that leads back to it)")
	fs.DurationVar(&c.RetryFor, "retry-for", 4*24*time.Hour, "how long after the first attempt a recipient who could not be reached is given up")
	fs.IntVar(&c.Connections, "destination-connections", 4, "with --deliver=mx: conversations at the same time with the servers of one domain")
	fs.IntVar(&c.PerMinute, "destination-rate", 100, "with --deliver=mx: recipients a minute in one domain")
	fs.BoolVar(&c.WarmUp, "warm-up", true, "with --deliver=mx: a domain that begins to send writes to at most 50 recipients a day in its first week, then 500, then 5000; others take a sudden flood for spam")
	fs.BoolVar(&c.MXPrivate, "mx-private", false, "for labs: mail servers may have private addresses, so that whoever has a domain can make this server speak SMTP to its neighbours")
	fs.StringVar(&c.MXPort, "mx-port", "25", "for labs: `port` of all mail servers")
	pathVar(fs, &c.MXRoots, "mx-roots", "", "for labs: `file` of the certificates by which servers of domains with an MTA-STS policy are known (default: the system's)")
}

func (c *DeliverTo) validate(relay string, bad func(flag, format string, args ...any)) {
	if c.Deliver != "relay" && c.Deliver != "mx" {
		bad("deliver", "%q: want relay or mx", c.Deliver)
	}
	if c.Deliver == "mx" && relay != "" {
		bad("deliver", "mx and --relay exclude each other; --route is possible with both")
	}
	if c.RetryFor <= 0 || c.Connections <= 0 || c.PerMinute <= 0 {
		bad("retry-for", "neither it nor --destination-connections nor --destination-rate may be 0 or less")
	}
	if n, err := strconv.Atoi(c.MXPort); err != nil || n < 1 || n > 65535 {
		bad("mx-port", "%q is no port", c.MXPort)
	}
}

// buildSigning opens the keys that sign what leaves, and makes those of the
// mail domain at the first start: before anything can leave.
func (d *daemon) buildSigning(ctx context.Context, key []byte) (err error) {
	d.ring, err = signing.New(d.db, signing.Config{Key: key, Resolver: d.resolver})
	if err != nil {
		return err
	}
	if d.conf.PublicURL != "" {
		if d.issuer, err = signing.NewIssuer(d.ring, d.conf.MailDomain, d.conf.PublicURL); err != nil {
			return err
		}
		if err := d.issuer.Prepare(ctx); err != nil {
			return err
		}
	}
	return d.ring.Prepare(ctx, d.conf.MailDomain)
}

// dkimKeys are the records that a domain's owner publishes.
func (d *daemon) dkimKeys(ctx context.Context, _, name string) (out []domain.Key, err error) {
	if err := d.ring.Prepare(ctx, name); err != nil {
		return nil, err
	}
	ks, err := d.ring.Keys(ctx, name)
	for _, k := range ks {
		if k.Name() != "" {
			out = append(out, domain.Key{Selector: k.ID, Value: k.Record()})
		}
	}
	return out, err
}

// delivery says how mail leaves.
func (d *daemon) delivery() delivery.Config {
	host, err := os.Hostname()
	if err != nil {
		host = "?"
	}
	return delivery.Config{
		Instance: fmt.Sprintf("%s:%s", host, d.conf.Data),
		Lifetime: d.conf.RetryFor, Connections: d.conf.Connections, PerMinute: d.conf.PerMinute, WarmUp: d.conf.WarmUp,
	}
}

// serves says whether mail for a domain stays here.
func (d *daemon) serves(ctx context.Context, domain string) (bool, error) {
	return d.post.Directory.Serves(ctx, domain)
}

func (d *daemon) smtpClient(own string) (*smtpclient.Client, error) {
	routes := map[string]string{d.conf.MailDomain: own}
	for _, r := range d.conf.Routes {
		domain, addr, _ := strings.Cut(r, "=")
		routes[strings.ToLower(domain)] = addr
	}
	name := cmp.Or(d.conf.MailHost, d.conf.MailDomain)
	conf := smtpclient.Config{
		Hostname: name, Own: own, Serves: d.serves, Routes: routes, Relay: d.conf.Relay,
		Dial:    (&net.Dialer{Resolver: d.resolver}).DialContext,
		NoRoute: "start the server with --deliver=mx, with --relay for all domains, or with --route for this one",
	}
	if d.conf.Deliver == "mx" {
		conf.Direct = &smtpclient.Direct{
			Resolver: d.resolver, Names: []string{name, d.conf.MailDomain}, DB: d.db, Private: d.conf.MXPrivate, Port: d.conf.MXPort,
		}
		if d.conf.MXRoots != "" {
			pem, err := os.ReadFile(d.conf.MXRoots)
			if err != nil {
				return nil, fmt.Errorf("--mx-roots: %w", err)
			}
			conf.Direct.Roots = x509.NewCertPool()
			if !conf.Direct.Roots.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("--mx-roots: %s holds no certificate", d.conf.MXRoots)
			}
		}
	}
	return smtpclient.New(conf)
}
