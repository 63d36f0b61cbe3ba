package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
)

// listeners are opened before anything is built: a taken port is told at once,
// and the parts learn the real addresses.
type listeners struct {
	web, smtp, local net.Listener

	submission, submissions net.Listener // nil unless wanted
	imap, imaps             net.Listener // likewise

	tls, dnsConns net.Listener   // nil unless wanted
	dnsPackets    net.PacketConn // likewise
}

func (l *listeners) close() {
	for _, x := range []net.Listener{l.web, l.smtp, l.submission, l.submissions, l.imap, l.imaps, l.local, l.tls, l.dnsConns} {
		if x != nil {
			x.Close()
		}
	}
	if l.dnsPackets != nil {
		l.dnsPackets.Close()
	}
}

func listen(ctx context.Context, c Config) (_ *listeners, err error) {
	var lc net.ListenConfig
	l := &listeners{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.web, err = lc.Listen(ctx, "tcp", c.Listen); err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	if l.smtp, err = lc.Listen(ctx, "tcp", c.SMTP); err != nil {
		return nil, fmt.Errorf("--smtp: %w", err)
	}
	if c.Submission != "" {
		if l.submission, err = lc.Listen(ctx, "tcp", c.Submission); err != nil {
			return nil, fmt.Errorf("--submission: %w", err)
		}
	}
	if c.Submissions != "" {
		if l.submissions, err = lc.Listen(ctx, "tcp", c.Submissions); err != nil {
			return nil, fmt.Errorf("--submissions: %w", err)
		}
	}
	if c.IMAP != "" {
		if l.imap, err = lc.Listen(ctx, "tcp", c.IMAP); err != nil {
			return nil, fmt.Errorf("--imap: %w", err)
		}
	}
	if c.IMAPS != "" {
		if l.imaps, err = lc.Listen(ctx, "tcp", c.IMAPS); err != nil {
			return nil, fmt.Errorf("--imaps: %w", err)
		}
	}
	if c.ListenTLS != "" {
		if l.tls, err = lc.Listen(ctx, "tcp", c.ListenTLS); err != nil {
			return nil, fmt.Errorf("--listen-tls: %w", err)
		}
	}
	if c.ListenDNS != "" {
		if l.dnsPackets, err = lc.ListenPacket(ctx, "udp", c.ListenDNS); err != nil {
			return nil, fmt.Errorf("--listen-dns: %w", err)
		}
		if l.dnsConns, err = lc.Listen(ctx, "tcp", l.dnsPackets.LocalAddr().String()); err != nil {
			return nil, fmt.Errorf("--listen-dns: %w", err)
		}
	}
	// The data directory is locked: a socket there was left by a dead server.
	if err := os.Remove(c.socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove old socket: %w", err)
	}
	if l.local, err = lc.Listen(ctx, "unix", c.socket()); err != nil {
		return nil, fmt.Errorf("listen on local socket: %w", err)
	}
	if err := os.Chmod(c.socket(), 0o600); err != nil {
		return nil, fmt.Errorf("close local socket to others: %w", err)
	}
	return l, nil
}

// consoleHosts returns the names under which people may open the console.
func consoleHosts(c Config, listen, tls string) []string {
	_, port, err := net.SplitHostPort(listen)
	hosts := append([]string{listen}, c.Hosts...)
	if err == nil {
		hosts = append(hosts, "localhost:"+port, "127.0.0.1:"+port)
		// DNS cannot move an address to another host, as it can a name.
		if a, err := netip.ParseAddrPort(listen); err == nil && a.Addr().Unmap().IsUnspecified() {
			for _, own := range ownAddresses() {
				hosts = append(hosts, net.JoinHostPort(own.String(), port))
			}
		}
	}
	if tls != "" && c.Domain != "" {
		hosts = append(hosts, tlsName(c.Domain, tls), tlsName("api."+c.Domain, tls))
	}
	return hosts
}

// pages returns the URL under which people reach this server.
func (l *listeners) pages(c Config) string {
	if port := l.tlsPort(); port != "" && c.Domain != "" {
		return "https://" + tlsName("api."+c.Domain, port)
	}
	return "http://" + reachable(l.web.Addr(), c.Hosts)
}
