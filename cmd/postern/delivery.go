package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"postern/internal/domain"
	"postern/internal/mailbox"
	"postern/internal/signing"
	"postern/internal/smtpclient"
)

// buildSigning opens the keys that sign what leaves, and makes those of the
// mail domain at the first start: before anything can leave.
func (d *daemon) buildSigning(ctx context.Context, key []byte) (err error) {
	d.ring, err = signing.New(d.db, signing.Config{Key: key, Resolver: d.resolver})
	if err != nil {
		return err
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
func (d *daemon) delivery() mailbox.DeliveryConfig {
	data, err := filepath.Abs(d.conf.Data)
	if err != nil {
		data = d.conf.Data
	}
	host, err := os.Hostname()
	if err != nil {
		host = "?"
	}
	return mailbox.DeliveryConfig{Instance: fmt.Sprintf("%s:%s", host, data)}
}

// serves says whether mail for a domain stays here.
func (d *daemon) serves(ctx context.Context, domain string) (bool, error) {
	return d.post.Serves(ctx, domain)
}

func (d *daemon) smtpClient(own string) (*smtpclient.Client, error) {
	routes := map[string]string{d.conf.MailDomain: own}
	for _, r := range d.conf.Routes {
		domain, addr, _ := strings.Cut(r, "=")
		routes[strings.ToLower(domain)] = addr
	}
	return smtpclient.New(smtpclient.Config{
		Hostname: d.conf.MailDomain, Own: own, Serves: d.serves, Routes: routes, Relay: d.conf.Relay,
		NoRoute: "start the server with --relay for all domains, or with --route for this one",
	})
}
