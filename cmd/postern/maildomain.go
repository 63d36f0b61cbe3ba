package main

import (
	"cmp"
	"net/netip"

	"postern/internal/directory"
	"postern/internal/domain"
)

// domains returns the registry of the domains that projects bring.
func (d *daemon) domains() (*domain.Registry, error) {
	conf := domain.Config{
		Domain: d.conf.MailDomain, Host: cmp.Or(d.conf.MailHost, d.conf.MailDomain), SPF: d.conf.MailSPF, Resolver: d.resolver,
		Keys:  d.dkimKeys,
		InUse: directory.InboxesIn, OnHeld: directory.FreeAddresses,
	}
	if d.conf.Domain != "" {
		conf.Reserved = []string{d.conf.Domain}
	}
	for _, a := range d.conf.PublicAddresses {
		if addr, err := netip.ParseAddr(a); err == nil { // they were checked with the flags
			conf.Addrs = append(conf.Addrs, addr)
		}
	}
	return domain.New(d.log, d.db, conf)
}
