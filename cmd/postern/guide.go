package main

import (
	"cmp"
	"strings"

	"postern/internal/auth"
	"postern/internal/guide"
	"postern/internal/mcpserver"
)

// newGuide returns what the documents for agents tell of this server.
func (d *daemon) newGuide(lis *listeners) guide.Config {
	c := guide.Config{
		Base: strings.TrimSuffix(cmp.Or(d.conf.PublicURL, lis.pages(d.conf)), "/"), HTTPS: d.conf.HTTPS, MailDomain: d.conf.MailDomain, Signup: d.conf.Signup,
		OAuth: d.oauth != nil, Issuers: d.conf.OAuthIssuers, Sandboxes: d.conf.runsSandboxes(),
	}
	if d.conf.PublicURL == "" {
		c.Hosts = consoleHosts(d.conf, lis.web.Addr().String(), lis.tlsPort())
	}
	for _, name := range mcpserver.Offered(auth.Principal{Kind: auth.Agent}) {
		c.Tools = append(c.Tools, guide.Tool{Name: name, Title: mcpserver.Title(name)})
	}
	return c
}

// prompt returns the sentence by which an agent connects itself with a code.
func (d *daemon) prompt(code string) string { return guide.Prompt(d.guide.Base, code) }
