package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"postern/internal/auth"
	"postern/internal/store"
)

// The files that a first start without a terminal writes to the data directory.
const (
	keyFile  = "project.key" // the project's key, and nothing else
	linkFile = "setup.link"  // the link to create the first account

	pagesFile = "console.url" // where the server's pages were reached when it last started
)

// announce tells the operator where everything is. Secrets are printed only on a
// terminal. Any other reader keeps the output: a journal, a supervisor's file, a
// container's log. Then secrets go to files that only this user can read.
func announce(out io.Writer, c Config, lis *listeners, f firstStart) error {
	base, pages := "http://"+reachable(lis.web.Addr(), c.Hosts), lis.pages(c)
	link := fmt.Sprintf("%s/console/setup?token=%s", pages, f.setup.Reveal())
	// For postern setup, which works while no server runs.
	if err := store.WriteFile(filepath.Join(c.Data, pagesFile), []byte(c.pages(lis)+"\n"), 0o600); err != nil {
		return err
	}
	secret := isTerminal(out)
	if !secret {
		if err := writeSecrets(c.Data, f, link); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "Postern is running.\n  API, proxy, MCP  %s\n", base)
	if port := lis.tlsPort(); port != "" && c.Domain != "" {
		fmt.Fprintf(out, "  over TLS         %s, https://%s (E2B_DOMAIN=%s)\n", pages, tlsName("<port>-<id>."+c.Domain, port), tlsName(c.Domain, port))
	}
	fmt.Fprintf(out, "  console          %s/console/\n  SMTP             %s, for addresses in %s and in domains of projects\n",
		pages, lis.smtp.Addr(), c.MailDomain)
	if lis.submission != nil {
		fmt.Fprintf(out, "  submission       %s with STARTTLS: user is an inbox's address, password its key\n", lis.submission.Addr())
	}
	if lis.submissions != nil {
		fmt.Fprintf(out, "  the same, in TLS %s\n", lis.submissions.Addr())
	}
	if lis.imap != nil {
		fmt.Fprintf(out, "  IMAP             %s with STARTTLS: user and password as for submission\n", lis.imap.Addr())
	}
	if lis.imaps != nil {
		fmt.Fprintf(out, "  the same, in TLS %s\n", lis.imaps.Addr())
	}
	fmt.Fprintf(out, "  mail leaves      %s\n", c.wayOut())
	if !c.runsSandboxes() {
		fmt.Fprintf(out, "  sandboxes        off: another server of this database may run them\n")
	}
	fmt.Fprintf(out, "  data             %s\n", c.Data)
	for _, w := range c.warnings(lis.web.Addr()) {
		fmt.Fprintf(out, "WARNING: %s\n", w)
	}
	switch {
	case f.key == "":
	case secret:
		fmt.Fprintf(out, "This is the project's key. It is shown this once:\n  %s\n", f.key.Reveal())
	default:
		fmt.Fprintf(out, "The project's key, for programs, is in this file, which only this user can read. Keep it elsewhere and remove the file:\n  %s\n", filepath.Join(c.Data, keyFile))
	}
	switch {
	case f.setup == "":
	case secret:
		fmt.Fprintf(out, "Make the console's first account with this one-time link, within %d hours:\n  %s\n", int(auth.SetupTime.Hours()), link)
	default:
		fmt.Fprintf(out, "A one-time link to create the console's first account, valid for %d hours, is in this file; postern setup makes another:\n  %s\n",
			int(auth.SetupTime.Hours()), filepath.Join(c.Data, linkFile))
	}
	return nil
}

// writeSecrets writes the secrets of a first start to files, each completely or
// not at all. It removes an old link once there is an account.
func writeSecrets(dir string, f firstStart, link string) error {
	if f.key != "" {
		if err := store.WriteFile(filepath.Join(dir, keyFile), []byte(f.key.Reveal()+"\n"), 0o600); err != nil {
			return fmt.Errorf("write the project's key: %w", err)
		}
	}
	path := filepath.Join(dir, linkFile)
	if f.setup == "" {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("remove the link of the first account: %w", err)
		}
		return nil
	}
	if err := store.WriteFile(path, []byte(link+"\n"), 0o600); err != nil {
		return fmt.Errorf("write the link for the first account: %w", err)
	}
	return nil
}

// wayOut describes where approved mail goes.
func (c *Config) wayOut() string {
	switch {
	case c.Deliver == "mx":
		return "to the servers that DNS names (--deliver=mx)"
	case c.Relay != "":
		return "through " + c.Relay
	}
	var domains []string
	for _, r := range c.Routes {
		domain, _, _ := strings.Cut(r, "=")
		domains = append(domains, domain)
	}
	own := c.MailDomain + " and domains of projects"
	if len(domains) > 0 {
		own += ", and through --route for " + strings.Join(domains, ", ")
	}
	return "only for " + own + "; for others with --deliver=mx, --relay or --route"
}

// warnings returns what the operator should change or know.
func (c *Config) warnings(web net.Addr) (out []string) {
	if c.ListenTLS == "" && !c.HTTPS && !onLoopback(web) {
		out = append(out, fmt.Sprintf("--listen %s: keys, passwords and mail cross the network in clear text, and anybody on the way can read them. "+
			"Serve TLS (--listen-tls :443 with --tls-cert and --tls-key, or with --acme), or listen on 127.0.0.1 and let a proxy do it (--https)", c.Listen))
	}
	if c.Notices.From != "" && c.Deliver != "mx" && c.Relay == "" {
		out = append(out, "--notify-from: notices reach only addresses in the domains of --route. Set --deliver=mx or --relay to reach everybody")
	}
	return out
}

func onLoopback(a net.Addr) bool {
	addr, err := netip.ParseAddrPort(a.String())
	return err == nil && addr.Addr().Unmap().IsLoopback()
}

// reachable returns the host:port under which others reach a listener on a. A
// listener on all addresses has no address of its own. The attack: a person types
// a password into whatever answers http://0.0.0.0 on their machine.
func reachable(a net.Addr, hosts []string) string {
	addr, err := netip.ParseAddrPort(a.String())
	if err != nil || !addr.Addr().Unmap().IsUnspecified() {
		return a.String()
	}
	_, port, _ := net.SplitHostPort(a.String())
	if len(hosts) > 0 {
		if _, _, err := net.SplitHostPort(hosts[0]); err == nil {
			return hosts[0]
		}
		return net.JoinHostPort(hosts[0], port)
	}
	if own := ownAddresses(); len(own) > 0 {
		return net.JoinHostPort(own[0].String(), port)
	}
	return net.JoinHostPort("localhost", port)
}

// ownAddresses returns the addresses of this machine that others may reach, IPv4
// first.
func ownAddresses() (out []netip.Addr) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var six []netip.Addr
	for _, ia := range list {
		p, err := netip.ParsePrefix(ia.String())
		if err != nil {
			continue
		}
		switch a := p.Addr().Unmap(); {
		case !a.IsGlobalUnicast():
		case a.Is4():
			out = append(out, a)
		default:
			six = append(six, a)
		}
	}
	return append(out, six...)
}
