package main

import (
	"crypto/x509"
	"fmt"
	"os"

	"postern/internal/inspect"
	"postern/internal/mailbox"
	"postern/internal/request"
)

var _ inspect.Guards = credentials{}

// newInspector returns what handles the requests inside connections of sandboxes.
func (d *daemon) newInspector() (*inspect.Inspector, error) {
	roots, err := egressRoots(d.conf.EgressCA)
	if err != nil {
		return nil, err
	}
	return inspect.New(d.log, inspect.Config{
		Roots: roots, Leaf: d.authority.Leaf, Judge: d.requests, Secrets: credentials{d.secrets, d.issuer},
		Mail: mailbox.NewRequests(d.post, d.requests, request.HoldTime),
	}), nil
}

// egressRoots returns the authorities that servers outside are verified by: the
// system's and those in file. Without a file it returns nil, for the system's.
func egressRoots(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("read the system's certificate authorities: %w", err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--egress-ca: %w", err)
	}
	if !roots.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("--egress-ca: %s has no certificate in PEM", file)
	}
	return roots, nil
}
