package mcpserver

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/seal"
	"postern/internal/site"
)

// Config says how the tools are reached from outside.
type Config struct {
	// Inside is the transport to the guests of sandboxes; nil means that of the fleet.
	Inside http.RoundTripper
	// Hosts are the names, some with ports, under which browsers reach this
	// server. The names of this machine itself always are.
	Hosts []string
	// Site says where everybody reaches this server.
	Site site.Site
	// Issuers are the URLs of the authorization servers (OAuth 2.1) that give
	// out keys of inboxes as access tokens; empty means that keys are made here.
	Issuers []string
	// OAuth says that this server is an authorization server, if there are no Issuers.
	OAuth bool
	// Domains has the domains of projects. Nil: there are none here.
	Domains *domain.Registry
	// Permits takes what agents in sandboxes ask to reach. Nil: they cannot ask.
	Permits *permit.Register
	// Denials returns the last refusals by the wall of a sandbox, newest first. Nil: none
	// are known.
	Denials func(sandbox string) []api.Denial
	// Runs performs runs, and Artifacts has their files. Nil means that this server has
	// none.
	Runs      *run.Service
	Artifacts *run.Exports
	// Template returns the ID of the template that who calls name, and the ID of a
	// snapshot of it to start from, if name is one's. Nil: there are no sandboxes here.
	Template func(ctx context.Context, who auth.Principal, name string) (id, snapshot string, err error)
	// Ceiling is what sandboxes may reach at most. It is not enforced here: answers tell
	// what an agent really gets.
	Ceiling policy.Ceiling
}

// The paths of the protected-resource metadata (RFC 9728): how a client gets a key.
const (
	metadataPath = "/.well-known/oauth-protected-resource"
	metadataMCP  = metadataPath + Path
)

// MetadataPaths are those of the document that [Server.Metadata] serves.
var MetadataPaths = []string{metadataPath, metadataMCP}

// How often one caller may call, and how often one address without a key.
const (
	callsPerSecond   = 50
	callsAtOnce      = 500
	strangersPerMin  = 60
	strangersAtOnce  = 30
	maxRateLimitings = 10_000 // callers that are remembered
)

var errTooOften = fmt.Errorf("too many calls: at most %d a second; wait a little", callsPerSecond)

// ownOrigin reports whether r comes from a program or from a page of ours. The
// attack: a page elsewhere whose name is made to lead to this machine, so that a
// browser here sends its requests to us as if they were that page's own. A
// browser says on each POST whose page sends it.
func (s *Server) ownOrigin(r *http.Request) bool {
	origins := r.Header.Values("Origin")
	if len(origins) == 0 {
		return true
	}
	u, err := url.Parse(origins[0])
	if err != nil || len(origins) > 1 || u.Host == "" {
		return false
	}
	if u.Hostname() == "localhost" || u.Host == innerHost {
		return true
	}
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil && ip.IsLoopback() {
		return true
	}
	return slices.ContainsFunc(s.conf.Hosts, func(h string) bool {
		_, _, err := net.SplitHostPort(h) // a name without a port is meant with any
		return strings.EqualFold(h, u.Host) || err != nil && strings.EqualFold(h, u.Hostname())
	})
}

// innerHost is the name of this server inside sandboxes.
const innerHost = "postern.internal"

// often counts one call of who and returns [errTooOften] if it is one too many.
func (s *Server) often(who string, each time.Duration, atOnce int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rates[who] == nil && len(s.rates) >= maxRateLimitings {
		// Who may call as often as ever needs no memory.
		for name, l := range s.rates {
			if l.Tokens() >= float64(l.Burst()) {
				delete(s.rates, name)
			}
		}
		if len(s.rates) >= maxRateLimitings {
			who = "everybody else" // the attack: addresses without number
		}
	}
	l := s.rates[who]
	if l == nil {
		l = rate.NewLimiter(rate.Every(each), atOnce)
		s.rates[who] = l
	}
	if !l.Allow() {
		return errTooOften
	}
	return nil
}

// remote returns the address that r came from, without its port; of IPv6 the
// part that one machine has.
func remote(r *http.Request) string {
	addr, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return "nobody knows"
	}
	ip := addr.Addr().Unmap()
	if ip.Is6() {
		if p, err := ip.Prefix(64); err == nil {
			return p.String()
		}
	}
	return ip.String()
}

// base returns the URL of this server, as the caller of r knows it.
func (s *Server) base(r *http.Request) string { return s.conf.Site.URL(r) }

// Metadata serves the document that tells clients how to come by a key (RFC
// 9728). It holds nothing secret, and pages anywhere may read it.
func (s *Server) Metadata() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "*")
		switch r.Method {
		case http.MethodGet, http.MethodHead:
		default:
			w.Header().Set("Allow", "GET, HEAD")
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		if !slices.Contains(MetadataPaths, r.URL.Path) {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		issuers := s.conf.Issuers
		if len(issuers) == 0 && s.conf.OAuth {
			issuers = []string{s.base(r)}
		}
		b, err := json.Marshal(metadata{
			Resource: s.base(r) + Path, Issuers: issuers, Methods: []string{"header"}, Scopes: []string{string(seal.Read), string(seal.Draft), string(seal.Send)},
			Name: "Postern: email with oversight",
		})
		if err != nil { // unreachable: strings
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "max-age=3600")
		_, _ = w.Write(b)
	})
}

// metadata is the document of RFC 9728, section 2.
type metadata struct {
	Resource string   `json:"resource"`
	Issuers  []string `json:"authorization_servers,omitempty"`
	Methods  []string `json:"bearer_methods_supported"`
	Scopes   []string `json:"scopes_supported"`
	Name     string   `json:"resource_name"`
}

// challenge tells a caller without a valid key how to come by one. A caller that
// showed no key is told of no error (RFC 6750, section 3.1).
func (s *Server) challenge(r *http.Request, code string) string {
	c := `Bearer realm="postern"`
	if r.Header.Get("Authorization") != "" {
		c += `, error="` + code + `"`
	}
	if at := s.base(r); !strings.ContainsAny(at, "\"\\") {
		c += `, resource_metadata="` + at + metadataMCP + `"`
	}
	return c
}
