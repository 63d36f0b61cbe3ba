// Package zone answers DNS questions about the domain under which sandboxes are
// reached: the address, which is the same for every name, and the records with
// which a certificate authority checks who holds the domain.
//
// A certificate for all sandboxes is one for "*.domain", and an authority gives
// that only to who can change the domain's DNS. Answering here spares the
// operator a DNS provider with an interface of its own, and this machine the
// credential to it: the domain is delegated once, by hand.
//
// It is not a resolver: it must answer for nothing but its domain, and with
// nothing much larger than the question, so that it is no use for attacking
// others.
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

// Challenge is the label, before the domain, of the records that a certificate
// authority reads (RFC 8555 section 8.4).
const Challenge = "_acme-challenge"

// ttl is how long, in seconds, others may keep an answer. It is short: a
// challenge lives for seconds, and an address may move.
const ttl = 60

// maxTexts bounds the challenge records, as each answer holds all.
const maxTexts = 8

// maxConns bounds the TCP connections at the same time.
const maxConns = 64

// connTime bounds how long a TCP connection may stay.
const connTime = 10 * time.Second

// A Server answers for one domain. It is safe for concurrent use.
type Server struct {
	log    *slog.Logger
	domain string // in lower case, without the root's dot
	addrs  []netip.Addr

	mu    sync.Mutex // guards texts
	texts []string
}

// New returns a server for domain, all of whose names have the given
// addresses. With none it answers for challenges alone.
func New(log *slog.Logger, domain string, addrs []netip.Addr) (*Server, error) {
	domain = strings.ToLower(strings.TrimSuffix(domain, "."))
	// "65535-" and a sandbox's id stand before it, as do "ns." and
	// "hostmaster." in what is answered; a name of DNS has 255 bytes (RFC 1035,
	// section 2.3.4).
	const most = 200
	if _, err := dnsmessage.NewName("ns." + domain + "."); err != nil || domain == "" || len(domain) > most {
		return nil, errors.New("zone: the domain is no name that DNS can carry")
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
			continue // such as a refusal of an earlier answer
		}
		if answer := s.Answer(buf[:n]); answer != nil {
			_, _ = c.WriteTo(answer, from) // who asked will ask again
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
			time.Sleep(10 * time.Millisecond) // out of descriptors, say
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

// serveConn answers questions that each come after their length.
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

// Answer returns the answer to one question, or nil if it deserves none.
func (s *Server) Answer(question []byte) []byte {
	var p dnsmessage.Parser
	head, err := p.Start(question)
	if err != nil || head.Response { // an answer to an answer would go on for ever
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
	// The name is there and has no such record. The authority says for how
	// long that may be believed.
	zone := s.domain
	if len(s.addrs) == 0 {
		zone = name // only this name was delegated
	}
	soa := s.soa(zone)
	return build(h, &q, nil, &soa)
}

// records returns what answers q.
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
