// Package inject puts the values of secrets into requests of sandboxes, and
// hides them in the answers.
//
// A program in a sandbox has sentinels: random texts that stand for values.
// [Find] lists those of a request, [Apply] replaces them, last of all, and
// [Mask] overwrites values that a server sends back. The package is pure: it
// asks nobody whether a secret may be used, and stores nothing.
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
	Kind      string // KindValue if empty
	Approval  string // ApprovalAlways, ApprovalFirst or ApprovalNever
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
type known map[string]*Secret

func index(secrets []Secret) known {
	k := known{}
	for i := range secrets {
		s := &secrets[i]
		if s.Sentinel != "" {
			k[s.Sentinel] = s
		}
		if s.AccessKey != "" {
			k[s.AccessKey] = s
		}
	}
	return k
}

// usable returns the secret of a sentinel in r, or nil if the sentinel must not
// leave in r.
func (k known) usable(r *outgoing.Request, sentinel string) *Secret {
	s := k[sentinel]
	switch {
	case s == nil || !s.Usable(r.Host):
		return nil
	case r.Scheme != "https":
		return nil // everybody on the way would read it
	case s.Kind == KindAWS && sentinel == s.Sentinel:
		// A client signs with this key and never sends it. In a body it would be
		// stored where the sandbox can read it.
		return nil
	}
	return s
}

// Find lists the secrets whose sentinels r has. Uses are the ones that may leave
// in r. Foreign are sentinels that may not: they belong to another host or
// another sandbox, or are in a place where no value goes. Access key IDs that
// are not known are not foreign, because a program may have its own.
//
// A body is searched as far as it was read, in its media type's encoding. A
// sentinel in a compressed body is not found and leaves as it is.
func Find(r *outgoing.Request, secrets []Secret) (uses []outgoing.Use, foreign []string) {
	k := index(secrets)
	f := newFinder(secrets)
	note := func(p *place) {
		for _, h := range f.scan(p.text, p.syntax) {
			s := k.usable(r, h.sentinel)
			if s == nil || p.fixed {
				foreign = append(foreign, h.sentinel)
				continue
			}
			uses = append(uses, outgoing.Use{ID: s.ID, Secret: s.Name, Sentinel: h.sentinel, Where: p.where, Approval: s.Approval})
		}
	}
	for _, p := range places(r) {
		note(&p)
	}
	slices.SortFunc(uses, func(a, b outgoing.Use) int {
		return cmp.Or(cmp.Compare(a.Secret, b.Secret), cmp.Compare(a.Where, b.Where), cmp.Compare(a.Sentinel, b.Sentinel))
	})
	slices.Sort(foreign)
	return slices.Compact(uses), slices.Compact(foreign)
}
