package client

import (
	"context"

	"postern/internal/api"
)

// DomainService manages the domains that a project brought. A domain is named
// by its id or its name.
type DomainService struct{ c *Client }

// List returns the domains of the project, by name.
func (s *DomainService) List(ctx context.Context) ([]Domain, error) {
	l, err := get[api.DomainList](ctx, s.c, nil, "v1", "domains")
	return l.Domains, err
}

// Add claims a domain. It is the project's once its records are in DNS.
func (s *DomainService) Add(ctx context.Context, name string) (Domain, error) {
	return post[Domain](ctx, s.c, api.NewDomain{Domain: name}, "v1", "domains")
}

// Get returns one domain.
func (s *DomainService) Get(ctx context.Context, domain string) (Domain, error) {
	return get[Domain](ctx, s.c, nil, "v1", "domains", domain)
}

// Remove gives up a domain in which no inbox has its address.
func (s *DomainService) Remove(ctx context.Context, domain string) error {
	return s.c.remove(ctx, "v1", "domains", domain)
}

// Records returns the DNS records to publish, and what the last check found.
func (s *DomainService) Records(ctx context.Context, domain string) (DomainRecords, error) {
	return get[DomainRecords](ctx, s.c, nil, "v1", "domains", domain, "records")
}

// Verify checks the records in DNS now.
func (s *DomainService) Verify(ctx context.Context, domain string) (Domain, error) {
	return post[Domain](ctx, s.c, nil, "v1", "domains", domain, "verify")
}

// SigningService manages the keys that sign outgoing mail (DKIM) and statements.
type SigningService struct{ c *Client }

// Domains returns the domains that have signing keys.
func (s *SigningService) Domains(ctx context.Context) ([]string, error) {
	l, err := get[api.SigningDomainList](ctx, s.c, nil, "v1", "signing")
	return l.Domains, err
}

// Keys returns the keys of a domain.
func (s *SigningService) Keys(ctx context.Context, domain string) ([]SigningKey, error) {
	l, err := get[api.SigningKeyList](ctx, s.c, nil, "v1", "signing", domain)
	return l.Keys, err
}

// Rotate makes successors of the keys of a domain.
func (s *SigningService) Rotate(ctx context.Context, domain string) ([]SigningKey, error) {
	l, err := post[api.SigningKeyList](ctx, s.c, nil, "v1", "signing", domain, "rotation")
	return l.Keys, err
}

// Check compares the keys of a domain with DNS.
func (s *SigningService) Check(ctx context.Context, domain string) ([]SigningKey, error) {
	l, err := post[api.SigningKeyList](ctx, s.c, nil, "v1", "signing", domain, "check")
	return l.Keys, err
}

// Remove removes a key that does not sign any more.
func (s *SigningService) Remove(ctx context.Context, domain, key string) error {
	return s.c.remove(ctx, "v1", "signing", domain, "keys", key)
}
