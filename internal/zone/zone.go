// Package zone is an authoritative DNS server for the domain under which sandboxes
// are reached. It serves the address, which is the same for every name, and the
// records with which a certificate authority validates the domain (DNS-01).
//
// One certificate for all sandboxes is for "*.domain", which an authority issues only
// after a change in the domain's DNS. With this server the operator needs no DNS
// provider with an API, and this machine no credential for one: the domain is
// delegated once, by hand.
//
// It is not a resolver. It must answer for no other domain, and its answers must not
// be much larger than the questions, so that it is useless for amplification attacks.
package zone

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Challenge is the label in front of the domain for challenge records (RFC 8555
// section 8.4).
const Challenge = "_acme-challenge"

// ttl is how long, in seconds, resolvers may cache an answer. It is short: a challenge
// lives for seconds, and the address may change.
const ttl = 60

// maxTexts bounds the challenge records, since each answer contains all of them.
const maxTexts = 8

// maxConns bounds the concurrent TCP connections.
const maxConns = 64

// connTime bounds the life of a TCP connection.
const connTime = 10 * time.Second

// A Server serves one domain. It is safe for concurrent use.
type Server struct {
	log    *slog.Logger
	domain string // in lower case, without the root's dot
	addrs  []netip.Addr

	mu    sync.Mutex // guards texts
	texts []string
}

// New returns a server for domain, in which all names have the given addresses.
// Without addresses it serves only the challenge records.
func New(log *slog.Logger, domain string, addrs []netip.Addr) (*Server, error) {
	domain = strings.ToLower(strings.TrimSuffix(domain, "."))
	// This leaves room for labels in front of the domain: "65535-" and a sandbox's ID,
	// "ns." and "hostmaster.". A DNS name has at most 255 bytes (RFC 1035, section
	// 2.3.4).
	const most = 200
	if _, err := dnsmessage.NewName("ns." + domain + "."); err != nil || domain == "" || len(domain) > most {
		return nil, errors.New("zone: the domain is empty, too long or not a DNS name")
	}
	return &Server{log: log, domain: domain, addrs: addrs}, nil
}

// SetText adds a challenge record.
func (s *Server) SetText(text string) error {
	if len(text) > 255 {
		return errors.New("zone: a challenge record is longer than 255 bytes")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.texts) >= maxTexts {
		return errors.New("zone: too many challenge records at the same time")
	}
	s.texts = append(s.texts, text)
	return nil
}

// RemoveText removes one that [Server.SetText] added.
func (s *Server) RemoveText(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, t := range s.texts {
		if t == text {
			s.texts = append(s.texts[:i:i], s.texts[i+1:]...)
			return
		}
	}
}

// challenges returns a copy of the challenge records.
func (s *Server) challenges() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.texts...)
}

// ServePackets answers over UDP until ctx is done, and closes c.
func (s *Server) ServePackets(ctx context.Context, c net.PacketConn) error {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	buf := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(buf)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			continue // such as an ICMP error for an earlier answer
		}
		if answer := s.Answer(buf[:n]); answer != nil {
			_, _ = c.WriteTo(answer, from) // the resolver will retry
		}
	}
}

// Serve answers over TCP until ctx is done, and closes l.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	slots := make(chan struct{}, maxConns)
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			s.log.DebugContext(ctx, "accept DNS connection", "err", err)
			time.Sleep(10 * time.Millisecond) // such as out of file descriptors
			continue
		}
		select {
		case slots <- struct{}{}:
			go func() {
				defer func() { <-slots }()
				defer c.Close()
				s.serveConn(c)
			}()
		default:
			c.Close()
		}
	}
}

// serveConn answers questions over TCP, where each message has its length in front
// (RFC 1035, section 4.2.2).
func (s *Server) serveConn(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(connTime))
	var size [2]byte
	for {
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		q := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(c, q); err != nil {
			return
		}
		answer := s.Answer(q)
		if answer == nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
			return
		}
	}
}

// Answer returns the answer to one question, or nil if there should be none.
func (s *Server) Answer(question []byte) []byte {
	var p dnsmessage.Parser
	head, err := p.Start(question)
	if err != nil || head.Response { // answering a response could loop for ever between two servers
		return nil
	}
	h := dnsmessage.Header{ID: head.ID, Response: true, OpCode: head.OpCode, RecursionDesired: head.RecursionDesired}
	q, err := p.Question()
	switch {
	case err != nil:
		h.RCode = dnsmessage.RCodeFormatError
		return build(h, nil, nil, nil)
	case head.OpCode != 0:
		h.RCode = dnsmessage.RCodeNotImplemented
		return build(h, &q, nil, nil)
	}
	name := strings.ToLower(strings.TrimSuffix(q.Name.String(), "."))
	challenge := name == Challenge+"."+s.domain
	inside := name == s.domain || strings.HasSuffix(name, "."+s.domain)
	if q.Class != dnsmessage.ClassINET || !inside || len(s.addrs) == 0 && !challenge {
		h.RCode = dnsmessage.RCodeRefused
		return build(h, &q, nil, nil)
	}
	h.Authoritative = true
	answers := s.records(q, name, challenge)
	if len(answers) > 0 {
		return build(h, &q, answers, nil)
	}
	// The name exists without such a record. The SOA record in the authority section
	// says how long that may be cached (RFC 2308).
	zone := s.domain
	if len(s.addrs) == 0 {
		zone = name // only this name was delegated
	}
	soa := s.soa(zone)
	return build(h, &q, nil, &soa)
}

// records returns the records that answer q.
func (s *Server) records(q dnsmessage.Question, name string, challenge bool) []dnsmessage.Resource {
	var rs []dnsmessage.Resource
	add := func(kind dnsmessage.Type, body dnsmessage.ResourceBody) {
		rs = append(rs, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Type: kind, Class: dnsmessage.ClassINET, TTL: ttl}, Body: body})
	}
	switch q.Type {
	case dnsmessage.TypeTXT:
		if challenge {
			for _, t := range s.challenges() {
				add(dnsmessage.TypeTXT, &dnsmessage.TXTResource{TXT: []string{t}})
			}
		}
	case dnsmessage.TypeA, dnsmessage.TypeAAAA:
		for _, a := range s.addrs {
			switch {
			case challenge:
			case a.Is4() && q.Type == dnsmessage.TypeA:
				add(dnsmessage.TypeA, &dnsmessage.AResource{A: a.As4()})
			case a.Is6() && q.Type == dnsmessage.TypeAAAA:
				add(dnsmessage.TypeAAAA, &dnsmessage.AAAAResource{AAAA: a.As16()})
			}
		}
	case dnsmessage.TypeNS:
		if name == s.domain {
			add(dnsmessage.TypeNS, &dnsmessage.NSResource{NS: dnsmessage.MustNewName("ns." + s.domain + ".")})
		}
	case dnsmessage.TypeSOA:
		if name == s.domain {
			rs = append(rs, s.soa(name))
		}
	default: // no such records
	}
	return rs
}

// soa returns the SOA record of zone. Its minimum TTL of 1 s keeps resolvers from
// caching that a challenge does not exist yet.
func (s *Server) soa(zone string) dnsmessage.Resource {
	return dnsmessage.Resource{
		Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(zone + "."), Type: dnsmessage.TypeSOA, Class: dnsmessage.ClassINET, TTL: ttl},
		Body: &dnsmessage.SOAResource{
			NS: dnsmessage.MustNewName("ns." + s.domain + "."), MBox: dnsmessage.MustNewName("hostmaster." + s.domain + "."),
			Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, MinTTL: 1,
		},
	}
}

// build packs an answer, or returns nil if it cannot be packed.
func build(h dnsmessage.Header, q *dnsmessage.Question, answers []dnsmessage.Resource, authority *dnsmessage.Resource) []byte {
	m := dnsmessage.Message{Header: h, Answers: answers}
	if q != nil {
		m.Questions = []dnsmessage.Question{*q}
	}
	if authority != nil {
		m.Authorities = []dnsmessage.Resource{*authority}
	}
	b, err := m.Pack()
	if err != nil {
		return nil
	}
	return b
}
