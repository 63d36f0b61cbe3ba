package main

import (
	"cmp"
	"context"
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

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/smtpserver"
)

// authenticate says whose key the password is. The name is the address or the
// id of an inbox that the key may propose for.
func (d *daemon) authenticate(ctx context.Context, user, password string, _ smtpserver.Peer) (smtpserver.Account, error) {
	who, err := auth.CheckKey(ctx, d.db, auth.Secret(password))
	if errors.Is(err, auth.ErrUnauthenticated) {
		return smtpserver.Account{}, smtpserver.ErrCredentials
	}
	if err != nil {
		return smtpserver.Account{}, err
	}
	if user == "" || who.Kind != auth.Agent && who.Kind != auth.Grant {
		return smtpserver.Account{}, smtpserver.ErrCredentials
	}
	address, err := d.post.Address(ctx, who, user)
	// Which inboxes there are besides is nobody's business.
	if errors.Is(err, auth.ErrForbidden) || errors.Is(err, mailbox.ErrNoInbox) {
		return smtpserver.Account{}, smtpserver.ErrCredentials
	}
	return smtpserver.Account{Who: who, Address: address}, err
}

// submit proposes to send a message that a program submitted: the same action
// as at every other door.
func (d *daemon) submit(ctx context.Context, a smtpserver.Account, env mail.Envelope, _ smtpserver.Peer) (string, error) {
	return overSMTP(d.post.SendRaw(ctx, a.Who, "smtp", a.Address, env.To, env.Raw))
}

// overSMTP is what a program is told of what it proposed over SMTP: what is
// denied is not taken, or it would believe that its mail waits. A limit is told
// as one, so that no loop of a program fills our log.
func overSMTP(p mailbox.Proposed, err error) (said string, _ error) {
	refuse := func(code int, enhanced ...int) error {
		return &smtpserver.RefusalError{Code: code, Enhanced: [3]int(enhanced), Reason: err.Error()}
	}
	switch {
	case errors.Is(err, mailbox.ErrLimit), errors.Is(err, oversight.ErrFull):
		return "", refuse(452, 4, 7, 1)
	case errors.Is(err, mailbox.ErrDuplicate), errors.Is(err, mailbox.ErrIdempotency), errors.Is(err, mailbox.ErrInvalid):
		return "", refuse(550, 5, 6, 0)
	case errors.Is(err, auth.ErrForbidden), errors.Is(err, mailbox.ErrNoInbox):
		return "", refuse(550, 5, 7, 1)
	case err != nil:
		return "", err
	}
	switch p.State {
	case oversight.Denied:
		return "", &smtpserver.RefusalError{Code: 550, Enhanced: [3]int{5, 7, 1}, Reason: "denied, see " + p.ID + ": " + cmp.Or(p.Reason, p.Verdict)}
	case oversight.Pending:
		return "held for approval as " + p.ID, nil
	case oversight.Scheduled, oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown, oversight.Cancelled:
	}
	return string(p.State) + " as " + p.ID, nil
}

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
	if err := writeDurably(path, b); err != nil {
		return nil, err
	}
	c, err := tls.X509KeyPair(b, b)
	return &c, err
}
