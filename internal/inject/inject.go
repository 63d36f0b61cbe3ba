// Package inject puts the values of secrets into requests of sandboxes, and
// hides them in the answers.
//
// A program in a sandbox has sentinels: random texts that stand for values.
// [Find] lists those of a request, [Apply] replaces them, last of all, and
// [Mask] overwrites values that a server sends back. The package is pure: it
// asks nobody whether a secret may be used, and stores nothing.
//
// A value enters only the header fields that its secret lists, and the places that an
// owner has opened ([Place]). Everywhere else a sentinel is text like any other. The
// attack that this stops: a model is a server that gets what a program writes and
// answers in its own words. A value in the body of a request to it comes back spelled,
// and no mask sees that.
package inject

import (
	"cmp"
	"slices"
	"strings"

	"postern/internal/outgoing"
)

// Kinds of secrets.
const (
	KindValue = "value" // a text
	KindAWS   = "aws"   // an access key pair that signs requests (SigV4)
	KindToken = "token" // an identity token of the sandbox
)

// When a person is asked about a use of a secret.
const (
	ApprovalAlways = "always"
	ApprovalFirst  = "first"
	ApprovalNever  = "never"
)

// A Secret is a secret as one sandbox may use it, without its value.
type Secret struct {
	ID   string
	Name string
	// Sentinel stands for the value in this sandbox: pst_ and 40 of a-z and 2-7.
	Sentinel string
	// AccessKey stands for the access key ID of an AWS pair: AKIA and 16 of A-Z
	// and 2-7. It is empty for other kinds.
	AccessKey string
	// Hosts are the hosts that may have the value: a name, or *. and a name for
	// each host below it, in lower case. If it is empty, RuleHosts decides alone.
	Hosts []string
	// RuleHosts are the hosts whose rules in the sandbox's network name the
	// secret. They give a secret without Hosts a place; they never add to Hosts.
	RuleHosts []string
	// Headers are the header fields that may have the value, canonical. If it is empty,
	// [Fields] of the request's host says which.
	Headers []string
	// RuleHeaders are further header fields, if Headers is empty: those that the sandbox's
	// rule for the request's host sets with this secret.
	RuleHeaders []string
	// Places are other places that an owner has opened.
	Places   []Place
	Kind     string // KindValue if empty
	Approval string // ApprovalAlways, ApprovalFirst or ApprovalNever
}

// A Value is what a secret stands for. Whoever opened it wipes it.
type Value struct {
	Value        []byte // of an AWS pair, the secret access key
	AccessKey    string // of an AWS pair, the access key ID
	SessionToken []byte // of a temporary AWS pair; else empty
}

// Usable reports whether host may have the secret's value. Everything is refused
// that is not in lower case.
func (s *Secret) Usable(host string) bool {
	patterns := s.Hosts
	if len(patterns) == 0 {
		patterns = s.RuleHosts
	}
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, host) })
}

// matches reports whether pattern has host. "*.x" has every host below x, not x.
func matches(pattern, host string) bool {
	if host == "" {
		return false
	}
	if suffix, ok := strings.CutPrefix(pattern, "*"); ok {
		// A bare "*" has no host: its suffix does not begin with a dot.
		return len(suffix) > 1 && suffix[0] == '.' && len(host) > len(suffix) && strings.HasSuffix(host, suffix)
	}
	return pattern == host
}

// A known finds the secret of a sentinel.
type known struct {
	secrets []Secret
	find    map[string]*Secret
}

func index(secrets []Secret) known {
	k := known{secrets, map[string]*Secret{}}
	for i := range secrets {
		s := &secrets[i]
		if s.Sentinel != "" {
			k.find[s.Sentinel] = s
		}
		if s.AccessKey != "" {
			k.find[s.AccessKey] = s
		}
	}
	return k
}

// Found is what a request has of sentinels.
type Found struct {
	// Uses are those that are replaced.
	Uses []outgoing.Use
	// Foreign are those that stand where a credential stands and are of no use there:
	// they belong to another host or another sandbox, or the request is not encrypted.
	// Such a request must be refused.
	Foreign []string
	// Stays are those of the sandbox that leave as they are, each place once. A request
	// is never refused because of them: an agent's transcript has the placeholder that
	// the agent has seen, for as long as the session lives.
	Stays []Stay
}

// A Stay is a sentinel that leaves as it is.
type Stay struct {
	Secret string // its name
	Where  string // for a person
	Open   *Place // by which it would be replaced, if an owner opened it; nil: there is none
	Header string // the field that the secret would have to list; empty: there is none
}

// Find lists the secrets whose sentinels r has. Access key IDs that are not known are
// left out, because a program may have its own. So are unknown sentinels in places
// where no value goes.
//
// A body that is not whole is searched as far as it was read, and nothing in it is
// replaced.
func Find(r *outgoing.Request, secrets []Secret) Found {
	k := index(secrets)
	f := newFinder(secrets)
	var out Found
	for _, p := range parts(r, secrets) {
		for _, h := range f.scan(p.text, p.syntax) {
			fate := p.resolve(h)
			switch s := k.find[h.sentinel]; {
			case fate.secret != nil:
				out.Uses = append(out.Uses, outgoing.Use{ID: s.ID, Secret: s.Name, Sentinel: h.sentinel, Where: fate.where, Approval: s.Approval})
			case fate.refused:
				out.Foreign = append(out.Foreign, h.sentinel)
			case s != nil && !slices.ContainsFunc(out.Stays, func(o Stay) bool { return o.Secret == s.Name && o.Where == fate.where }):
				out.Stays = append(out.Stays, Stay{Secret: s.Name, Where: fate.where, Open: fate.open, Header: fate.header})
			}
		}
	}
	slices.SortFunc(out.Uses, func(a, b outgoing.Use) int {
		return cmp.Or(cmp.Compare(a.Secret, b.Secret), cmp.Compare(a.Where, b.Where), cmp.Compare(a.Sentinel, b.Sentinel))
	})
	out.Uses = slices.Compact(out.Uses)
	slices.Sort(out.Foreign)
	out.Foreign = slices.Compact(out.Foreign)
	return out
}
