package signing

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base32"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/policy"
)

// IdentityName returns the name of the identity tokens of the server with this mail
// domain, which is also the domain of the keys that sign them. It contains a slash,
// which no domain does, so that these keys cannot sign mail.
func IdentityName(domain string) string { return strings.ToLower(domain) + identitySuffix }

const identitySuffix = "/identity"

// The paths of an issuer's documents (OpenID Connect Discovery 1.0, section 4).
const (
	DiscoveryPath = "/.well-known/openid-configuration"
	JWKSPath      = "/.well-known/jwks.json"
)

// TokenLife is how long an identity token is valid. It is made for one request, so
// it only has to outlast that request's way and the difference of two clocks.
const TokenLife = 5 * time.Minute

// tokenPrefix begins the IDs of identity tokens among a sandbox's secrets.
const tokenPrefix = "idt_"

// An Issuer makes identity tokens of sandboxes: signed JWTs (RFC 7519, ES256) that
// anybody can verify with the documents at [DiscoveryPath] and [JWKSPath]. It is safe
// for concurrent use.
type Issuer struct {
	ring     *Ring
	name     string // of the keys
	url      string // the claim "iss"
	host     string // trust domain of the subjects
	sentinel []byte
}

// NewIssuer returns an issuer whose keys are in r. Url is under which everybody
// reaches this server, https; domain is the server's mail domain.
func NewIssuer(r *Ring, domain, issuer string) (*Issuer, error) {
	u, err := url.Parse(issuer)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" {
		return nil, fmt.Errorf("issue identity tokens: %q is not an https URL", issuer)
	}
	key, err := hkdf.Key(sha256.New, r.conf.Key, nil, "postern token sentinel v1", 32)
	if err != nil {
		return nil, fmt.Errorf("derive key for sentinels of tokens: %w", err)
	}
	return &Issuer{ring: r, name: IdentityName(domain), url: strings.TrimRight(issuer, "/"), host: strings.ToLower(u.Hostname()), sentinel: key}, nil
}

// Bound returns the identity tokens that the rules of the sandbox who name, as
// secrets. Each belongs to the hosts of these rules and to no other.
func (i *Issuer) Bound(_ context.Context, who auth.Principal, e *policy.Egress) ([]inject.Secret, error) {
	hosts := e.RuleTokens()
	var out []inject.Secret
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		t, ok := e.Tokens[name]
		if !ok {
			continue
		}
		out = append(out, inject.Secret{
			ID: tokenID(name, t.Audience), Name: name, Kind: inject.KindToken, Sentinel: i.sentinelOf(who, name), RuleHosts: hosts[name], Approval: inject.ApprovalNever,
		})
	}
	return out, nil
}

// tokenID returns an ID from which [Issuer.Open] knows what to make.
func tokenID(name, audience string) string {
	return tokenPrefix + base64.RawURLEncoding.EncodeToString([]byte(name+"\x00"+audience))
}

// IsToken reports whether id is of an identity token, and not of a stored secret.
func IsToken(id string) bool { return strings.HasPrefix(id, tokenPrefix) }

// Open makes a new token for the sandbox who. Id is one that [Issuer.Bound] returned.
func (i *Issuer) Open(ctx context.Context, who auth.Principal, id string) (inject.Value, error) {
	b, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(id, tokenPrefix))
	_, audience, ok := strings.Cut(string(b), "\x00")
	if err != nil || !ok || !IsToken(id) {
		return inject.Value{}, fmt.Errorf("make identity token: %q is no ID of one", id)
	}
	token, err := i.Token(ctx, who, audience)
	return inject.Value{Value: token}, err
}

// sentinelOf returns the text that stands for the token name in the requests of the
// sandbox who. It has the form of other sentinels, and a key of its own.
func (i *Issuer) sentinelOf(who auth.Principal, name string) string {
	m := hmac.New(sha256.New, i.sentinel)
	for _, part := range []string{who.Project, who.ID, name} {
		m.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		m.Write([]byte(part))
	}
	return "pst_" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(m.Sum(nil))[:40])
}

// claims are those of a token. The subject is a SPIFFE ID, as a JWT-SVID has it.
type claims struct {
	Issuer   string `json:"iss"`
	Subject  string `json:"sub"`
	Audience string `json:"aud"`
	Expires  int64  `json:"exp"` // Unix seconds
	Issued   int64  `json:"iat"`
	ID       string `json:"jti"`
	Project  string `json:"project"`
	Sandbox  string `json:"sandbox"`
	Template string `json:"template,omitempty"`
}

// Subject returns the claim "sub" of a sandbox's tokens.
func (i *Issuer) Subject(who auth.Principal) string {
	return "spiffe://" + i.host + "/project/" + who.Project + "/sandbox/" + who.ID
}

// Token returns a new token of the sandbox who for an audience. It is valid for
// [TokenLife].
func (i *Issuer) Token(ctx context.Context, who auth.Principal, audience string) ([]byte, error) {
	if who.Kind != auth.Sandbox || who.ID == "" || who.Project == "" || audience == "" {
		return nil, fmt.Errorf("make identity token: %s for %q: %w", who, audience, auth.ErrForbidden)
	}
	now := time.Now()
	k, key, err := i.signer(ctx, now)
	if err != nil {
		return nil, err
	}
	head, err1 := json.Marshal(map[string]string{"alg": "ES256", "typ": "JWT", "kid": k.ID})
	body, err2 := json.Marshal(claims{
		Issuer: i.url, Subject: i.Subject(who), Audience: audience, Issued: now.Unix(), Expires: now.Add(TokenLife).Unix(), ID: rand.Text(),
		Project: who.Project, Sandbox: who.ID, Template: who.Template,
	})
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("make identity token: %w", err)
	}
	e := base64.RawURLEncoding
	out := e.AppendEncode(nil, head)
	out = e.AppendEncode(append(out, '.'), body)
	sum := sha256.Sum256(out)
	der, err := key.Sign(rand.Reader, sum[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign identity token: %w", err)
	}
	// JWS has the two numbers side by side, not as ASN.1 (RFC 7518, section 3.4).
	var s struct{ R, S *big.Int }
	if _, err := asn1.Unmarshal(der, &s); err != nil {
		return nil, fmt.Errorf("sign identity token: %w", err)
	}
	var signature [64]byte
	s.R.FillBytes(signature[:32])
	s.S.FillBytes(signature[32:])
	return e.AppendEncode(append(out, '.'), signature[:]), nil
}

// signer returns the key in use. It creates the first one. Several servers may call
// it at the same time.
func (i *Issuer) signer(ctx context.Context, now time.Time) (*Key, crypto.Signer, error) {
	for range 2 {
		ks, err := i.ring.Keys(ctx, i.name)
		if err != nil {
			return nil, nil, err
		}
		for n := range ks {
			if ks[n].Kind == Identity && ks[n].InUse(now) {
				key, err := i.ring.open(&ks[n])
				return &ks[n], key, err
			}
		}
		if err := i.ring.add(ctx, auth.Principal{Kind: auth.System, ID: "signing"}, i.name, Identity, now, 0); err != nil {
			return nil, nil, fmt.Errorf("make key of identity tokens: %w", err)
		}
		now = time.Now()
	}
	return nil, nil, fmt.Errorf("sign identity token: %s has no key in use: %w", i.name, ErrNotFound)
}

// Prepare creates the first key, so that it is published before it signs.
func (i *Issuer) Prepare(ctx context.Context) error {
	_, _, err := i.signer(ctx, time.Now())
	return err
}

// A jwk is a public key (RFC 7517, RFC 7518 section 6.2.1).
type jwk struct {
	Type      string `json:"kty"`
	Curve     string `json:"crv"`
	X         string `json:"x"`
	Y         string `json:"y"`
	ID        string `json:"kid"`
	Use       string `json:"use"`
	Algorithm string `json:"alg"`
}

// JWKS returns the document at [JWKSPath]: the keys that sign, signed or will sign.
func (i *Issuer) JWKS(ctx context.Context) ([]byte, error) {
	ks, err := i.ring.Keys(ctx, i.name)
	if err != nil {
		return nil, err
	}
	keys := []jwk{}
	for _, k := range ks {
		if k.Kind != Identity {
			continue
		}
		public, err := x509.ParsePKIXPublicKey(k.public)
		if err != nil {
			return nil, fmt.Errorf("key %s of %s: %w", k.ID, k.Domain, err)
		}
		key, ok := public.(*ecdsa.PublicKey)
		if !ok {
			return nil, fmt.Errorf("key %s of %s is a %T", k.ID, k.Domain, public)
		}
		point, err := key.Bytes() // 4, X, Y
		if err == nil && len(point) != 65 {
			err = fmt.Errorf("its point has %d bytes", len(point))
		}
		if err != nil {
			return nil, fmt.Errorf("key %s of %s: %w", k.ID, k.Domain, err)
		}
		e := base64.RawURLEncoding
		keys = append(keys, jwk{Type: "EC", Curve: "P-256", X: e.EncodeToString(point[1:33]), Y: e.EncodeToString(point[33:]), ID: k.ID, Use: "sig", Algorithm: "ES256"})
	}
	b, err := json.Marshal(map[string]any{"keys": keys})
	if err != nil {
		return nil, fmt.Errorf("encode keys of identity tokens: %w", err)
	}
	return b, nil
}

// Discovery returns the document at [DiscoveryPath]. Nobody can log in here, so it
// names no endpoint for that.
func (i *Issuer) Discovery() ([]byte, error) {
	b, err := json.Marshal(map[string]any{
		"issuer": i.url, "jwks_uri": i.url + JWKSPath,
		"response_types_supported": []string{"id_token"}, "subject_types_supported": []string{"public"}, "id_token_signing_alg_values_supported": []string{"ES256"},
		"claims_supported": []string{"iss", "sub", "aud", "exp", "iat", "jti", "project", "sandbox", "template"},
	})
	if err != nil {
		return nil, fmt.Errorf("encode discovery document: %w", err)
	}
	return b, nil
}
