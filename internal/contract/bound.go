package contract

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"postern/internal/policy"
)

// A Grant is something that a sandbox would be let do after the contract that binds it
// was approved: by a permit, a rule, a setting of a secret or inbox, or a proposal of its
// own.
type Grant struct {
	Kind policy.Kind
	// Hosts are names, or "*.name" for every name below it. For [policy.KindConnect] there
	// may be none: then it is about Addr alone or, without Addr, about any destination.
	Hosts  []string
	Ports  []uint16       // for [policy.KindPermit]: the ports of the hosts; empty means any port
	Addr   netip.AddrPort // for [policy.KindConnect]: where the hosts lead; zero if not known
	Secret string         // for [policy.KindSecret]: its name
	// Everyone means that it is for every sandbox of the project.
	Everyone bool
}

// Bounds answers what the contracts that bind sandboxes allow. An approved contract is the
// most that its sandbox may do: whatever is granted later counts there only as far as the
// contract has it. Whoever puts a grant into effect asks [Bounds.Allows]. It is safe for
// concurrent use. A nil Bounds knows no contract, and refuses every grant to a sandbox
// that has one.
type Bounds struct {
	log  *slog.Logger
	find func(ctx context.Context, project, digest string) (*Contract, error)

	mu    sync.Mutex
	known map[boundKey]*bound // contracts never change: the key has the digest
}

type boundKey struct{ project, digest string }

// maxBounds is how many contracts are kept in memory.
const maxBounds = 1000

// A bound is a contract with its network as decisions.
type bound struct {
	*Contract
	out *policy.Outbound
}

// NewBounds returns Bounds that read contracts with find, by project and digest.
func NewBounds(log *slog.Logger, find func(ctx context.Context, project, digest string) (*Contract, error)) *Bounds {
	return &Bounds{log: log, find: find, known: map[boundKey]*bound{}}
}

// errNoBounds means that a program was built without what knows contracts.
var errNoBounds = errors.New("contracts cannot be read here")

// of returns the contract of a project with a name of the form "name@digest".
func (b *Bounds) of(ctx context.Context, project, name string) (*bound, error) {
	if b == nil {
		return nil, errNoBounds
	}
	_, digest, _ := strings.Cut(name, "@")
	key := boundKey{project, digest}
	b.mu.Lock()
	known := b.known[key]
	b.mu.Unlock()
	if known != nil {
		return known, nil
	}
	c, err := b.find(ctx, project, digest)
	if err == nil && (c == nil || c.Digest() != digest) {
		// The attack: somebody who can write the database replaces the contract by a wider
		// one.
		err = errors.New("the contract in the database was changed")
	}
	if err == nil {
		known, err = c.bound()
	}
	if err != nil {
		b.log.ErrorContext(ctx, "read the contract that binds a sandbox; it is granted nothing", "contract", name, "err", err)
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.known) >= maxBounds {
		clear(b.known)
	}
	b.known[key] = known
	return known, nil
}

// Allows decides whether a sandbox may have g. Contract is the one that binds it, of the
// form "name@digest"; if it is empty, none does, and g is allowed. What is not known is
// refused: a contract that cannot be read, and a kind that no clause is about.
func (b *Bounds) Allows(ctx context.Context, project, contract string, g Grant) policy.Verdict {
	if contract == "" {
		return policy.Verdict{Effect: policy.Allow}
	}
	c, err := b.of(ctx, project, contract)
	if err != nil {
		return unreadable()
	}
	return c.allows(g)
}

// unreadable is the verdict where the contract is not known.
func unreadable() policy.Verdict {
	return policy.Verdict{Effect: policy.Deny, Rule: policy.RuleContract, Reason: "the contract that binds this sandbox cannot be read: nothing is granted to it"}
}

// Allows is [Bounds.Allows] for a sandbox that c binds.
func (c *Contract) Allows(g Grant) policy.Verdict {
	b, err := c.bound()
	if err != nil {
		return unreadable()
	}
	return b.allows(g)
}

func (c *Contract) bound() (*bound, error) {
	out, err := c.outbound()
	if err != nil {
		return nil, err
	}
	return &bound{c, out}, nil
}

func (c *bound) allows(g Grant) policy.Verdict {
	if lacks := c.lacks(g); lacks != "" {
		if i := slices.IndexFunc(g.Hosts, c.out.Packages().Host); i >= 0 {
			return policy.Verdict{Effect: policy.Deny, Rule: policy.RulePackages, Reason: "the contract " + c.Name + ", which binds this sandbox, lets it read packages at " + g.Hosts[i] + " and nothing else"}
		}
		return policy.Verdict{
			Effect: policy.Deny, Rule: policy.RuleContract,
			Reason: fmt.Sprintf("the contract %s, which binds this sandbox, does not have %s; nothing that is granted later adds to it: propose a new contract", c.Name, lacks),
		}
	}
	return policy.Verdict{Effect: policy.Allow, Rule: policy.RuleContract, Reason: "the contract " + c.Name + " has it"}
}

// lacks returns what c would need to have for g, or "".
func (c *bound) lacks(g Grant) string {
	if g.Everyone { // its contract says nothing about other sandboxes
		return "anything for other sandboxes"
	}
	switch g.Kind { //nolint:exhaustive // no clause is about the other kinds: no contract has them
	case policy.KindConnect:
		return c.lacksConnection(g)
	case policy.KindRequest, policy.KindPermit, policy.KindTool:
		return c.lacksHosts(g.Hosts, g.Ports)
	case policy.KindSecret:
		return c.lacksSecret(g)
	case policy.KindSend:
		if c.Mail.Inbox == "" {
			return "an inbox"
		}
		return ""
	case policy.KindExec:
		if len(c.Commands.Allow) == 0 {
			return "any program"
		}
		return ""
	case policy.KindExport:
		if len(c.Artifacts) == 0 {
			return "any artifact"
		}
		return ""
	}
	return "anything of the kind " + string(g.Kind)
}

// lacksConnection judges each host with the address, as the wall and the report of a run
// do: network.deny names addresses. A registry does not count, since a contract lets it
// only be read.
func (c *bound) lacksConnection(g Grant) string {
	if !g.Addr.IsValid() {
		if len(g.Hosts) == 0 {
			if n := c.Network.parse(); !n.internet && len(n.names)+len(n.prefixes) == 0 {
				return "any host"
			}
			return ""
		}
		return c.lacksHosts(g.Hosts, nil)
	}
	hosts := g.Hosts
	if len(hosts) == 0 {
		hosts = []string{""}
	}
	for _, h := range hosts {
		to := policy.Connection{Addr: g.Addr}
		if h != "" {
			to.Names = []string{h}
		}
		if v := c.out.Connect(to); v.Effect != policy.Allow || v.Rule == policy.RulePackages {
			return cmp.Or(h, g.Addr.Addr().String())
		}
	}
	return ""
}

func (c *bound) lacksHosts(hosts []string, ports []uint16) string {
	if len(hosts) == 0 {
		return "any host"
	}
	n := c.Network.parse()
	for _, h := range hosts {
		name, err := parseHost(h)
		if err != nil || !n.name(name, ports...) {
			if len(ports) > 0 && err == nil && n.name(name) {
				return fmt.Sprintf("%s at port %d", h, ports[0])
			}
			return h
		}
		for _, p := range c.out.Packages().Hosts() {
			if hostWithin(p, name) { // all requests to a registry are bounded by packages
				return h
			}
		}
	}
	return ""
}

func (c *bound) lacksSecret(g Grant) string {
	cred, ok := c.credential(g.Secret)
	if !ok {
		return "the secret " + g.Secret
	}
	if len(g.Hosts) == 0 {
		return "the secret " + g.Secret + " for every host"
	}
	for _, h := range g.Hosts {
		name, err := parseHost(h)
		if err != nil || !slices.ContainsFunc(cred.Hosts, func(of string) bool { of, err := parseHost(of); return err == nil && hostWithin(name, of) }) {
			return "the secret " + g.Secret + " for " + h
		}
	}
	return ""
}

// credential returns what c says of a secret, in all of its credentials: their hosts, and
// the strictest of their approvals.
func (c *bound) credential(secret string) (out Credential, ok bool) {
	for _, cred := range c.Credentials {
		if cred.Secret != secret {
			continue
		}
		if !ok || approvals(cred.Approval) < approvals(out.Approval) {
			out.Approval = cmp.Or(cred.Approval, "always")
		}
		out.Secret, ok = secret, true
		out.Hosts = append(out.Hosts, cred.Hosts...)
	}
	return out, ok
}

// Credential returns what the contract that binds a sandbox says of a secret: the hosts
// that may get it, and when a person is asked. A contract that does not name the secret
// gives it no host. Contract must not be empty.
func (b *Bounds) Credential(ctx context.Context, project, contract, secret string) (Credential, error) {
	c, err := b.of(ctx, project, contract)
	if err != nil {
		return Credential{}, fmt.Errorf("contract %s: %w", contract, err)
	}
	cred, ok := c.credential(secret)
	if !ok {
		cred.Approval = "always"
	}
	return cred, nil
}

// Hosts returns those of hosts that the contract which binds a sandbox has, as [Narrow]
// does. Contract must not be empty; if it cannot be read, there are none.
func (b *Bounds) Hosts(ctx context.Context, project, contract string, hosts []string) []string {
	c, err := b.of(ctx, project, contract)
	if err != nil {
		return nil
	}
	n := c.Network.parse()
	if n.internet {
		return hosts
	}
	names := make([]string, 0, len(n.names))
	for _, p := range n.names {
		names = append(names, policy.HostPattern{Name: p.Name}.String()) // without its port
	}
	return Narrow(hosts, names)
}

// Narrow returns those hosts of a that are hosts of b as well. Both have names and
// "*.name"; of two patterns that overlap the narrower one is returned.
func Narrow(a, b []string) (out []string) {
	for _, x := range a {
		nx, err := parseHost(x)
		if err != nil {
			continue
		}
		for _, y := range b {
			ny, err := parseHost(y)
			both := ""
			switch {
			case err != nil:
			case hostWithin(nx, ny):
				both = nx
			case hostWithin(ny, nx):
				both = ny
			}
			if strings.HasPrefix(both, ".") {
				both = "*" + both
			}
			if both != "" && !slices.Contains(out, both) {
				out = append(out, both)
			}
		}
	}
	return out
}
