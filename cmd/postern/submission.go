package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"postern/internal/store"
)

// mailTLS returns how mail is received over TLS: with the certificate of the
// web door where it is good for the name that is asked for, and else with one
// that we made ourselves. Other mail servers take any, since without one they
// would send in the clear; who submits can be told which it is.
func (d *daemon) mailTLS(hostname string) (*tls.Config, error) {
	own, err := ownCertificate(filepath.Join(d.conf.Data, "mail.pem"), hostname, time.Now())
	if err != nil {
		return nil, fmt.Errorf("certificate for mail: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if d.web == nil || d.web.TLSConfig == nil || d.web.TLSConfig.GetCertificate == nil {
			return own, nil
		}
		hello := *h
		if hello.ServerName == "" {
			hello.ServerName = hostname
		}
		c, err := d.web.TLSConfig.GetCertificate(&hello)
		if err != nil || c == nil || c.Leaf != nil && c.Leaf.VerifyHostname(hello.ServerName) != nil {
			return own, nil //nolint:nilerr // there is none for this name
		}
		return c, nil
	}}, nil
}

// ownCertificate returns the certificate in the file at path. It makes one where
// there is none, or none for the host that is good for another month.
func ownCertificate(path, host string, now time.Time) (*tls.Certificate, error) {
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if c, err := tls.X509KeyPair(b, b); err == nil && c.Leaf.VerifyHostname(host) == nil && c.Leaf.NotAfter.After(now.AddDate(0, 1, 0)) {
		return &c, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	cert := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "Postern's own certificate for mail"}, DNSNames: []string{host},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0), KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	b = append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})...)
	if err := store.WriteFile(path, b, 0o600); err != nil {
		return nil, err
	}
	c, err := tls.X509KeyPair(b, b)
	return &c, err
}
