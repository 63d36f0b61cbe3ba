package main

import (
	"cmp"
	"strings"

	"postern/internal/auth"
	"postern/internal/egress"
	"postern/internal/guide"
	"postern/internal/mcpserver"
	"postern/internal/site"
)

// newSite returns where this server is reached. Without a public URL these are the names
// under which its console is.
func newSite(c Config, lis *listeners) site.Site {
	s := site.Site{Base: strings.TrimSuffix(cmp.Or(c.PublicURL, lis.pages(c)), "/"), HTTPS: c.HTTPS}
	if c.PublicURL == "" {
		s.Hosts = append(consoleHosts(c, lis.web.Addr().String(), lis.tlsPort()), egress.Name)
	}
	return s
}

// newGuide returns what the documents for agents tell of this server.
func (d *daemon) newGuide(lis *listeners) guide.Config {
	c := guide.Config{
		Site: newSite(d.conf, lis), MailDomain: d.conf.MailDomain, Signup: d.conf.Signup,
		OAuth: d.oauth != nil, Issuers: d.conf.OAuthIssuers, Sandboxes: d.conf.runsSandboxes(),
	}
	for _, name := range mcpserver.Offered(auth.Principal{Kind: auth.Agent}) {
		c.Tools = append(c.Tools, guide.Tool{Name: name, Title: mcpserver.Title(name)})
	}
	return c
}

// prompt returns the sentence by which an agent connects itself with a code.
func (d *daemon) prompt(code string) string { return guide.Prompt(d.guide.Site.Base, code) }
