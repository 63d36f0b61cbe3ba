package mailauth

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/idna"
)

// An asker does the DNS lookups of one message. It looks up each name once and limits the
// total number. It is safe for concurrent use.
type asker struct {
	cfg Config

	mu    sync.Mutex         // guards the fields below
	left  int                // lookups left
	known map[string]*answer // by "TYPE NAME"
}

// An answer is the answer to a lookup, finished or in progress.
type answer struct {
	done  chan struct{} // closed when value and err are set
	value any
	err   error
}

func newAsker(cfg Config) *asker {
	return &asker{cfg: cfg, left: maxLookups, known: map[string]*answer{}}
}

// errManyLookups is the error of lookups beyond the limit.
var errManyLookups = &net.DNSError{Err: "more DNS lookups than one message may cause", IsNotFound: false}

// errName returns the error for a string that is not a domain name. It counts as not
// found.
func errName(name string) error {
	return &net.DNSError{Err: "not a domain name", Name: printable(name, 100), IsNotFound: true}
}

// once does a lookup, or waits for the same lookup by another goroutine.
func once[T any](ctx context.Context, a *asker, kind, name string, ask func(ctx context.Context, name string) (T, error)) (T, error) {
	var none T
	a.mu.Lock()
	r, ok := a.known[kind+" "+name]
	if !ok {
		if a.left == 0 {
			a.mu.Unlock()
			return none, errManyLookups
		}
		a.left--
		r = &answer{done: make(chan struct{})}
		a.known[kind+" "+name] = r
	}
	a.mu.Unlock()
	if !ok {
		func() {
			defer close(r.done) // also when the library panics: others wait for it
			r.value, r.err = ask(ctx, name)
		}()
	}
	<-r.done // the other goroutine has the same deadline
	v, _ := r.value.(T)
	return v, r.err
}

// LookupTXT returns the TXT records of a name, at most [maxTexts].
func (a *asker) LookupTXT(ctx context.Context, name string) ([]string, error) {
	name, ok := dnsName(name)
	if !ok {
		return nil, errName(name)
	}
	return once(ctx, a, "TXT", name, func(ctx context.Context, name string) ([]string, error) {
		if a.cfg.Own != nil {
			if texts, known := a.cfg.Own(ctx, strings.TrimSuffix(name, ".")); known {
				if len(texts) == 0 {
					return nil, &net.DNSError{Err: "no such record", Name: name, IsNotFound: true}
				}
				return texts, nil
			}
		}
		texts, err := a.cfg.Resolver.LookupTXT(ctx, name)
		return texts[:min(len(texts), maxTexts)], err
	})
}

// LookupMX returns the mail exchangers of a name.
func (a *asker) LookupMX(ctx context.Context, name string) ([]*net.MX, error) {
	name, ok := dnsName(name)
	if !ok {
		return nil, errName(name)
	}
	return once(ctx, a, "MX", name, a.cfg.Resolver.LookupMX)
}

// LookupIPAddr returns the addresses of a name.
func (a *asker) LookupIPAddr(ctx context.Context, name string) ([]net.IPAddr, error) {
	name, ok := dnsName(name)
	if !ok {
		return nil, errName(name)
	}
	return once(ctx, a, "IP", name, a.cfg.Resolver.LookupIPAddr)
}

// LookupAddr returns the names of an address.
func (a *asker) LookupAddr(ctx context.Context, addr string) ([]string, error) {
	return once(ctx, a, "PTR", addr, a.cfg.Resolver.LookupAddr)
}

// A budget is an asker with a part of its lookups. The attack: an SPF record causes so
// many lookups that none are left for DKIM and DMARC.
type budget struct {
	*asker
	mu   sync.Mutex // guards left
	left int        // lookups left
}

// take counts one lookup against the budget.
func (b *budget) take() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 {
		return errManyLookups
	}
	b.left--
	return nil
}

// LookupTXT is [asker.LookupTXT] within the budget.
func (b *budget) LookupTXT(ctx context.Context, name string) ([]string, error) {
	if err := b.take(); err != nil {
		return nil, err
	}
	return b.asker.LookupTXT(ctx, name)
}

// LookupMX is [asker.LookupMX] within the budget.
func (b *budget) LookupMX(ctx context.Context, name string) ([]*net.MX, error) {
	if err := b.take(); err != nil {
		return nil, err
	}
	return b.asker.LookupMX(ctx, name)
}

// LookupIPAddr is [asker.LookupIPAddr] within the budget.
func (b *budget) LookupIPAddr(ctx context.Context, name string) ([]net.IPAddr, error) {
	if err := b.take(); err != nil {
		return nil, err
	}
	return b.asker.LookupIPAddr(ctx, name)
}

// LookupAddr is [asker.LookupAddr] within the budget.
func (b *budget) LookupAddr(ctx context.Context, addr string) ([]string, error) {
	if err := b.take(); err != nil {
		return nil, err
	}
	return b.asker.LookupAddr(ctx, addr)
}

// notFound reports whether err means that the record certainly does not exist.
func notFound(err error) bool {
	de, ok := errors.AsType[*net.DNSError](err)
	return ok && de.IsNotFound
}

// temporary reports whether a later lookup may succeed. Errors of unknown kind count as
// temporary: mail must not be treated as forged because of them.
func temporary(err error) bool {
	return err != nil && !notFound(err) && !errors.Is(err, errManyLookups)
}

var toASCII = idna.New(idna.MapForLookup(), idna.StrictDomainName(false))

// dnsName returns a name in the form for lookups: ASCII, lower case, with a final dot.
// Without the dot the resolver would also try the machine's search domains.
func dnsName(name string) (string, bool) {
	name = strings.TrimSuffix(name, ".")
	if !isASCII(name) {
		var err error
		if name, err = toASCII.ToASCII(name); err != nil {
			return name, false
		}
	}
	name = strings.ToLower(name)
	if name == "" || len(name) > 253 {
		return name, false
	}
	for label := range strings.SplitSeq(name, ".") {
		// SPF macros can produce nearly any string. The lookup must be for exactly this
		// name, so characters that the resolver could interpret are refused.
		if label == "" || len(label) > 63 || strings.IndexFunc(label, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '\\' || r == '"' }) >= 0 {
			return name, false
		}
	}
	return name + ".", true
}

// domainName normalizes a domain of a message: ASCII, lower case, without a final dot. ok
// is false if it does not have the form of a host name.
func domainName(name string) (string, bool) {
	n, ok := dnsName(strings.TrimSpace(name))
	n = strings.TrimSuffix(n, ".")
	return n, ok && isHost(n)
}

// isHost reports whether name has the form of a host name. Underscores are
// allowed, since domains in use have them.
func isHost(name string) bool {
	if name == "" || len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.IndexFunc(label, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
		}) >= 0 {
			return false
		}
	}
	return true
}

func isASCII(s string) bool {
	return !slices.ContainsFunc([]byte(s), func(c byte) bool { return c >= 0x80 })
}
