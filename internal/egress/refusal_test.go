package egress

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"postern/internal/policy"
)

// withEDNS adds an OPT record to a DNS message.
func withEDNS(b []byte, version uint8) []byte {
	out := bytes.Clone(b)
	binary.BigEndian.PutUint16(out[10:], binary.BigEndian.Uint16(out[10:])+1)
	return append(out, 0, 0, 41, 4, 208, 0, version, 0, 0, 0, 0)
}

// exchange sends one datagram to a DNS server and returns the answer.
func (b *box) exchange(server string, q []byte) dnsmessage.Message {
	b.w.tb.Helper()
	to := full(server)
	c, err := gonet.DialUDP(b.stack, nil, &to, ipv4.ProtocolNumber)
	if err != nil {
		b.w.tb.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Write(q); err != nil {
		b.w.tb.Fatal(err)
	}
	buf := make([]byte, 4096)
	n, err := c.Read(buf)
	if err != nil {
		b.w.tb.Fatal(err)
	}
	var m dnsmessage.Message
	if err := m.Unpack(buf[:n]); err != nil {
		b.w.tb.Fatal(err)
	}
	return m
}

// extended returns the extended DNS errors of an answer as "code text".
func extended(m dnsmessage.Message) string {
	var out []string
	for _, r := range m.Additionals {
		opt, ok := r.Body.(*dnsmessage.OPTResource)
		if !ok {
			continue
		}
		for _, o := range opt.Options {
			if o.Code == 15 && len(o.Data) >= 2 {
				out = append(out, fmt.Sprintf("%d %s", binary.BigEndian.Uint16(o.Data), o.Data[2:]))
			}
		}
	}
	return strings.Join(out, "\n")
}

// TestEveryRefusalIsAtOnce tries addresses and ports like a program that looks for
// a way out. Each attempt must fail at once and be recorded: a dropped packet would
// end in a time-out, which the test treats as a hang.
func TestEveryRefusalIsAtOnce(t *testing.T) {
	addrs := []string{
		"8.8.8.8", "1.1.1.1", site, // public
		"10.0.0.0", "10.0.0.3", // first and last of the link's own network
		"10.0.0.4", "10.255.255.255", "172.16.0.1", "192.168.1.255", "100.64.0.1", // private
		"169.254.169.254", "192.0.2.1", "198.18.0.0", "198.19.255.255", // special
		"0.0.0.1", "0.255.255.255", "127.255.255.255", // this machine
		"224.0.0.1", "224.0.0.251", "239.255.255.255", // multicast
		"240.0.0.1", "255.255.255.254", "255.255.255.255", // reserved, broadcast
	}
	ports := []int{22, 25, 53, 80, 443, 465, 587, 853, 2525, 65535}
	w := newWorld(t, func(c *Config) { c.Limits.Records, c.Limits.NewConnections = 10_000, 10_000 })
	b := w.box("i1", policy.Egress{})
	for _, addr := range addrs {
		for _, port := range ports {
			to := fmt.Sprintf("%s:%d", addr, port)
			c, err := b.dial(to)
			if err == nil {
				c.Close()
				t.Errorf("%s: connected", to)
				continue
			}
			if s := err.Error(); !strings.Contains(s, "refused") && !strings.Contains(s, "unreachable") {
				t.Errorf("%s: got %v, want refused or unreachable", to, err)
			}
			// 127/8 never gets as far as the link.
			if !strings.HasPrefix(addr, "127.") {
				w.wait(to, func(e Event) bool { return e.Kind == Denied && e.Proto == "tcp" && e.Dst.String() == to })
			}
		}
	}
	if dialed, asked := w.outside(); len(dialed)+len(asked) != 0 {
		t.Errorf("outside saw %v %v", dialed, asked)
	}
}

// TestDNSServersOverTCP: rules for names open no other addresses, and no DNS at the
// addresses of the names.
func TestDNSServersOverTCP(t *testing.T) {
	ask := func(b *box, to string) dnsmessage.Message {
		t.Helper()
		c := b.mustDial(to)
		q := query("example.com.", dnsmessage.TypeA)
		if _, err := c.Write(append([]byte{0, byte(len(q))}, q...)); err != nil {
			t.Fatal(err)
		}
		var l [2]byte
		if _, err := io.ReadFull(c, l[:]); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, binary.BigEndian.Uint16(l[:]))
		if _, err := io.ReadFull(c, buf); err != nil {
			t.Fatal(err)
		}
		var m dnsmessage.Message
		if err := m.Unpack(buf); err != nil {
			t.Fatal(err)
		}
		return m
	}
	w := newWorld(t, open)
	w.says("example.com", site)
	w.at(site+":53", echo)
	w.at("8.8.8.8:53", echo)
	narrow := w.box("i1", named)
	if c, err := narrow.dial("8.8.8.8:53"); err == nil {
		c.Close()
		t.Error("connected to a server that policy does not allow")
	}
	w.wait("denied", func(e Event) bool {
		return e.Kind == Denied && e.Dst.String() == "8.8.8.8:53" && strings.Contains(e.Reason, "does not name 8.8.8.8")
	})
	for _, to := range []string{"10.0.0.1:53", site + ":53"} { // the second once its name is known
		if m := ask(narrow, to); m.RCode != 0 || len(addrsOf(m)) != 1 {
			t.Errorf("%s: got %v %v", to, m.RCode, addrsOf(m))
		}
	}
	if m := ask(w.box("i2", policy.Egress{Internet: true}), "8.8.8.8:53"); m.RCode != 0 || len(addrsOf(m)) != 1 {
		t.Errorf("with the Internet open: got %v %v", m.RCode, addrsOf(m))
	}
	if dialed, _ := w.outside(); len(dialed) != 0 {
		t.Errorf("dialed %v: our resolver answers for every server", dialed)
	}
}

// TestMailPortsNeedAnInbox: mail ports are captured if the sandbox has an inbox and
// otherwise refused, whatever policy says about the address.
func TestMailPortsNeedAnInbox(t *testing.T) {
	for _, port := range []string{"25", "465", "587", "2525"} {
		w := newWorld(t, open)
		w.at(site+":"+port, echo)
		without := w.box("i1", policy.Egress{Internet: true})
		for _, host := range []string{site, "10.0.0.1", "169.254.169.254"} {
			if c, err := without.dial(host + ":" + port); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("%s:%s without an inbox: got %v, %v; want refused", host, port, c, err)
			}
			w.wait("denied", func(e Event) bool {
				return e.Kind == Denied && e.Dst.String() == host+":"+port && strings.Contains(e.Reason, "has no inbox to send mail from")
			})
		}
		w.boxFor("i2", "inb_1", policy.Egress{}).mustDial("198.51.100.9:" + port).Close()
		w.wait("captured", func(e Event) bool { return e.Kind == Captured && e.Dst.String() == "198.51.100.9:"+port })
		if dialed, _ := w.outside(); len(dialed) != 0 {
			t.Errorf("dialed %v", dialed)
		}
	}
}

// TestRefusedQuestions: a refused question is recorded, and the answer has the
// reason as an extended DNS error (RFC 8914).
func TestRefusedQuestions(t *testing.T) {
	raw := func(change func(b []byte)) []byte {
		b := query("evil.test.", dnsmessage.TypeA)
		change(b)
		return b
	}
	const https = dnsmessage.Type(65)
	for _, tc := range []struct {
		name     string
		inbox    string
		q        []byte
		code     dnsmessage.RCode
		extended string // its beginning
		reason   string // part of that of the event
		recorded string // name of the event
	}{
		{"a name", "", query("evil.test.", dnsmessage.TypeA), 3, "15 refused by Postern's policy: the project denies", "denies outbound", "evil.test."},
		{"AAAA", "", query("evil.test.", dnsmessage.TypeAAAA), 3, "15 ", "denies outbound", "evil.test."},
		{"HTTPS", "", query("evil.test.", https), 3, "15 ", "denies outbound", "evil.test."},
		{"a name, with an inbox", "inb_1", query("evil.test.", dnsmessage.TypeA), 0, "4 ", "only mail for it is accepted", "evil.test."},
		{"AAAA, with an inbox", "inb_1", query("evil.test.", dnsmessage.TypeAAAA), 0, "4 ", "only mail for it is accepted", "evil.test."},
		{"HTTPS, with an inbox", "inb_1", query("evil.test.", https), 0, "4 ", "only mail for it is accepted", "evil.test."},
		{"TXT", "inb_1", query("evil.test.", dnsmessage.TypeTXT), 5, "21 ", "type TypeTXT", "evil.test."},
		{"ANY", "", query("evil.test.", dnsmessage.TypeALL), 5, "21 ", "type TypeALL", "evil.test."},
		{"class CHAOS", "", raw(func(b []byte) { b[len(b)-1] = 3 }), 5, "21 ", "class is not IN", "evil.test."},
		{"an update", "", raw(func(b []byte) { b[2] = 5 << 3 }), 4, "", "operation code 5", ""},
		{"no question", "", query("evil.test.", dnsmessage.TypeA)[:12], 1, "", "cannot be read", ""},
		{"two questions", "", append(raw(func(b []byte) { b[5] = 2 }), query("evil.test.", dnsmessage.TypeA)[12:]...), 1, "", "2 questions", ""},
		{"zero questions", "", make([]byte, 12), 1, "", "0 questions", ""},
	} {
		for _, edns := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, EDNS %v", tc.name, edns), func(t *testing.T) {
				w := newWorld(t, nil)
				q := tc.q
				if edns {
					q = withEDNS(q, 0)
				}
				m := w.boxFor("i1", tc.inbox, policy.Egress{}).exchange("9.9.9.9:53", q)
				if m.RCode != tc.code {
					t.Errorf("got %v, want %v", m.RCode, tc.code)
				}
				got := extended(m)
				switch {
				// RFC 6891 §7: without EDNS in the question there is none in the answer.
				case !edns && len(m.Additionals) != 0:
					t.Errorf("got additional records %v", m.Additionals)
				case edns && tc.extended != "" && !strings.HasPrefix(got, tc.extended):
					t.Errorf("got extended error %q, want %q", got, tc.extended)
				}
				e := w.wait("denied", func(e Event) bool { return e.Kind == Denied })
				if e.Proto != "dns" || e.Name != tc.recorded || e.Dst.String() != "9.9.9.9:53" || !strings.Contains(e.Reason, tc.reason) {
					t.Errorf("got %+v, want %q: %s", e, tc.recorded, tc.reason)
				}
				if _, asked := w.outside(); len(asked) != 0 {
					t.Errorf("asked outside for %v", asked)
				}
			})
		}
	}
}

func TestEDNSVersion(t *testing.T) {
	w := newWorld(t, open)
	b := w.box("i1", policy.Egress{Internet: true})
	m := b.exchange("10.0.0.1:53", withEDNS(query("example.com.", dnsmessage.TypeA), 1))
	// RFC 6891 §6.1.3: BADVERS is 16, whose upper bits are the first of the OPT record's TTL.
	if len(m.Additionals) != 1 || m.RCode != 0 || m.Additionals[0].Header.TTL>>24 != 1 {
		t.Errorf("got %+v", m)
	}
	w.wait("denied", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, "EDNS version 1") })
	// What has nothing to say says nothing.
	w.says("example.com", site)
	m = b.exchange("10.0.0.1:53", withEDNS(query("example.com.", dnsmessage.TypeA), 0))
	if len(addrsOf(m)) != 1 || len(m.Additionals) != 1 || extended(m) != "" {
		t.Errorf("an allowed name: got %+v", m)
	}
}

// TestSwitchOnAnyQuestion: a switch stops questions of any type, and they are
// recorded.
func TestSwitchOnAnyQuestion(t *testing.T) {
	for _, typ := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA, 65} {
		l := &lastWord{hosts: []string{"example.com"}}
		w := newWorld(t, func(c *Config) { open(c); c.Permit = l })
		w.says("example.com", site)
		m, err := w.box("i1", policy.Egress{Internet: true}).ask("10.0.0.1:53", "example.com.", typ)
		if err != nil || m.RCode != dnsmessage.RCodeNameError {
			t.Errorf("%v: got %v, %v", typ, m.RCode, err)
		}
		w.wait("denied", func(e Event) bool { return e.Kind == Denied && e.Name == "example.com." })
	}
}
