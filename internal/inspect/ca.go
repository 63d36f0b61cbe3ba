package inspect

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The validity of certificates.
const (
	// leafLife is how long a server certificate is valid. The clocks of sandboxes
	// are the host's.
	leafLife = 6 * 24 * time.Hour
	// leafEarly is how far back it begins, for a clock that was just set.
	leafEarly = time.Hour
	// leafRenew is the least time for which a certificate in the cache must still
	// be valid: a client may keep a connection, and check again, for that long.
	leafRenew = 24 * time.Hour
)

// The limits of the cache. They bound memory: names are chosen by sandboxes. A
// certificate that was dropped is made again, which takes a fraction of a millisecond.
const (
	maxAuthorities = 256 // sandboxes
	maxLeaves      = 128 // hosts of one sandbox
)

// An Authority is the certificate authority of every sandbox: each has one of its
// own. Code in a sandbox trusts its authority, so the wall can read the requests
// for some hosts.
//
// The private key of a sandbox's authority is derived from the server's key and the
// ID of the sandbox. Nothing is stored, and the certificate is the same, byte by
// byte, after a pause, a resume and a restart of the server. A fork, or a sandbox
// from a snapshot, has another ID and so another authority. The key never enters a
// sandbox: code that has it could read only what that sandbox sends itself, but it
// could also hide from the record whom it talks to.
//
// An Authority is safe for concurrent use.
type Authority struct {
	key []byte // derived from the server's; for this purpose only

	mu  sync.Mutex
	all map[string]*ownAuthority // by sandbox; guarded by mu
	use uint64                   // counts uses; guarded by mu
}

// An ownAuthority is the certificate authority of one sandbox.
type ownAuthority struct {
	used uint64 // guarded by Authority.mu

	key     *ecdsa.PrivateKey
	cert    *x509.Certificate
	leafKey *ecdsa.PrivateKey // of all its server certificates, in this process

	mu     sync.Mutex
	leaves map[string]*tls.Certificate // by host; guarded by mu
}

// NewAuthority returns the authorities of the sandboxes of a server with this key,
// which must have at least 32 bytes.
func NewAuthority(server []byte) (*Authority, error) {
	if len(server) < 32 {
		return nil, errors.New("inspect: the server's key has fewer than 32 bytes")
	}
	key, err := hkdf.Key(sha256.New, server, nil, "postern sandbox authority v1", 32)
	if err != nil {
		return nil, fmt.Errorf("derive key of the sandboxes' authorities: %w", err)
	}
	return &Authority{key: key, all: map[string]*ownAuthority{}}, nil
}

// CertificatePEM returns the certificate of a sandbox's authority in PEM. It is no
// secret. It is always the same for one sandbox, and nil for an ID that cannot be
// in a certificate: an empty one, or one of more than 40 bytes.
func (a *Authority) CertificatePEM(sandbox string) []byte {
	o, err := a.of(sandbox)
	if err != nil {
		return nil
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: o.cert.Raw})
}

// Leaf returns a server certificate for a host, which is a DNS name without
// wildcards or an IP address, signed by the authority of a sandbox. It is valid
// from an hour ago for less than seven days. Callers may keep it for a handshake
// and must not keep it for longer.
func (a *Authority) Leaf(sandbox, host string) (*tls.Certificate, error) {
	host, err := leafName(host)
	if err != nil {
		return nil, err
	}
	o, err := a.of(sandbox)
	if err != nil {
		return nil, err
	}
	return o.leaf(host, time.Now())
}

// of returns the authority of a sandbox.
func (a *Authority) of(sandbox string) (*ownAuthority, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.use++
	o := a.all[sandbox]
	if o == nil {
		var err error
		if o, err = a.derive(sandbox); err != nil {
			return nil, fmt.Errorf("derive authority of sandbox %.64q: %w", sandbox, err)
		}
		if len(a.all) >= maxAuthorities {
			oldest := ""
			for id, other := range a.all {
				if oldest == "" || other.used < a.all[oldest].used {
					oldest = id
				}
			}
			delete(a.all, oldest)
		}
		a.all[sandbox] = o
	}
	o.used = a.use
	return o, nil
}

// derive makes the authority of a sandbox from the server's key. The certificate
// must not depend on anything else: not on the clock, not on random numbers, not on
// defaults of the library that may change.
func (a *Authority) derive(sandbox string) (*ownAuthority, error) {
	if sandbox == "" || len(sandbox) > 40 {
		return nil, errors.New("the ID is empty or longer than 40 bytes")
	}
	key, err := a.privateKey(sandbox)
	if err != nil {
		return nil, err
	}
	point, err := key.PublicKey.Bytes()
	if err != nil {
		return nil, err
	}
	id := sha256.Sum256(point)
	serial := new(big.Int).SetBytes(append([]byte{1}, id[:15]...)) // positive and not zero, RFC 5280 section 4.1.2.2
	template := &x509.Certificate{
		SerialNumber: serial,
		// All have one subject, since the guest links the certificate by the hash of
		// its subject. Clients tell them apart by the key's ID.
		Subject: pkix.Name{Organization: []string{"Postern"}, CommonName: "Postern sandbox authority"},
		URIs:    []*url.URL{{Scheme: "urn", Opaque: "postern:sandbox:" + sandbox}},
		// Clients that keep time in 32 bits end in 2038.
		NotBefore:             time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC),
		NotAfter:              time.Date(2037, 12, 31, 0, 0, 0, 0, time.UTC),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true, // it signs servers and no other authority
		KeyUsage:              x509.KeyUsageCertSign,
		SubjectKeyId:          id[:20],
		SignatureAlgorithm:    x509.ECDSAWithSHA256,
	}
	// The signature is the same each time too, RFC 6979.
	der, err := x509.CreateCertificate(nil, template, template, key.Public(), deterministic{key})
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	// Server certificates have another key than the authority: it is in use at each
	// handshake, and it is not the one that can sign.
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	return &ownAuthority{key: key, cert: cert, leafKey: leafKey, leaves: map[string]*tls.Certificate{}}, nil
}

// privateKey derives the private key of a sandbox's authority: the first of a row
// of candidates that is a scalar of the curve, FIPS 186-5 section A.2.2. One in 2^32
// is not, so the second candidate has never been needed.
func (a *Authority) privateKey(sandbox string) (*ecdsa.PrivateKey, error) {
	const size = 32
	row, err := hkdf.Key(sha256.New, a.key, []byte(sandbox), "postern sandbox authority key v1", 4*size)
	if err != nil {
		return nil, err
	}
	defer clear(row)
	for ; len(row) > 0; row = row[size:] {
		if key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), row[:size]); err == nil {
			return key, nil
		}
	}
	return nil, errors.New("no candidate is a private key") // unreachable
}

// A deterministic signer signs the same message with the same signature, RFC 6979.
type deterministic struct{ key *ecdsa.PrivateKey }

// Public implements crypto.Signer.
func (d deterministic) Public() crypto.PublicKey { return d.key.Public() }

// Sign implements crypto.Signer.
func (d deterministic) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return d.key.Sign(nil, digest, opts)
}

// leaf returns the server certificate for a host that leafName returned.
func (o *ownAuthority) leaf(host string, now time.Time) (*tls.Certificate, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if c := o.leaves[host]; c != nil && c.Leaf.NotAfter.Sub(now) > leafRenew && !now.Before(c.Leaf.NotBefore) {
		return c, nil
	}
	template := &x509.Certificate{
		NotBefore: now.Add(-leafEarly), NotAfter: now.Add(leafLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		SignatureAlgorithm:    x509.ECDSAWithSHA256,
	}
	if len(host) <= 64 { // ub-common-name; some clients show it
		template.Subject.CommonName = host
	}
	if ip := net.ParseIP(host); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{host}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, o.cert, o.leafKey.Public(), o.key)
	if err != nil {
		return nil, fmt.Errorf("sign certificate for %s: %w", host, err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("sign certificate for %s: %w", host, err)
	}
	// Clients know the authority, so it is not sent.
	c := &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: o.leafKey, Leaf: parsed}
	if o.leaves[host] == nil && len(o.leaves) >= maxLeaves {
		for other := range o.leaves { // any: a program that asks for many names gains nothing
			delete(o.leaves, other)
			break
		}
	}
	o.leaves[host] = c
	return c, nil
}

// leafName returns the canonical form of a host, or an error for one that no
// certificate should have. A wildcard would speak for more names than were checked.
func leafName(host string) (string, error) {
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() == "" {
		return ip.Unmap().String(), nil
	}
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	bad := func(why string) (string, error) {
		return "", fmt.Errorf("no certificate for host %.300q: %s", host, why)
	}
	if name == "" || len(name) > 253 {
		return bad("it is empty or longer than 253 bytes")
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 {
			return bad("a label is empty or longer than 63 bytes")
		}
		for _, c := range []byte(label) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return bad("only letters, digits, hyphens and underscores are allowed")
			}
		}
	}
	return name, nil
}

// ClientRefusal returns why a client gave up a handshake with a server certificate
// of [Authority.Leaf], for the record: a client with a pinned certificate, or with
// a trust store of its own, refuses it. It returns "" for an error with another
// cause. What it returns is one of few fixed texts, since clients choose the alert.
func ClientRefusal(err error) string {
	if err == nil {
		return ""
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "remote error" { // a TLS alert that the client sent
		alert := op.Err.Error()
		// RFC 8446 section 6.2.
		for _, name := range []string{
			"bad certificate", "unsupported certificate", "revoked certificate", "expired certificate", "unknown certificate authority", "unknown certificate",
		} {
			if strings.Contains(alert, name) {
				return "the client refused the sandbox's certificate: " + name
			}
		}
		// Some libraries end the handshake with a general alert.
		for _, name := range []string{"handshake failure", "access denied", "internal error", "close notify", "user canceled"} {
			if strings.Contains(alert, name) {
				return "the client ended the handshake, probably because it pins certificates: " + name
			}
		}
		return ""
	}
	if op != nil && op.Op == "local error" && strings.Contains(op.Err.Error(), "bad record MAC") {
		// OpenSSL refuses a certificate in TLS 1.3 before it has taken the keys for its
		// own messages into use, so its alert comes in clear text.
		return "the client refused the sandbox's certificate: its alert was not encrypted"
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
		return "the client ended the handshake, probably because it pins certificates: connection closed"
	}
	return ""
}
