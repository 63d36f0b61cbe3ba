package signing

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/emersion/go-msgauth/dkim"

	"postern/internal/statement"
)

// signed lists the fields that DKIM covers. Each is listed once more than it occurs
// (oversigning). The attack: a second From or Subject is put in front of the true
// one, and displayed, while the signature stays valid.
var signed = []string{
	"From", "Sender", "Reply-To", "To", "Cc", "Subject", "Date", "Message-ID", "In-Reply-To", "References",
	"MIME-Version", "Content-Type", "Content-Transfer-Encoding", "Auto-Submitted", "List-Unsubscribe", "List-Unsubscribe-Post", statement.FieldName,
}

// Sign returns the fields to put in front of the message raw: DKIM signatures of
// s.Domain and the signed statement s, whose Key it sets. It does not change the
// message. The error wraps [ErrNotFound] if the domain has no keys.
func (r *Ring) Sign(ctx context.Context, raw []byte, s statement.Statement) (prefix []byte, err error) {
	ks, err := r.Keys(ctx, s.Domain)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	use := map[Kind]*Key{}
	for i := range ks {
		if ks[i].InUse(now) {
			use[ks[i].Kind] = &ks[i]
		}
	}
	for _, kind := range kinds {
		if use[kind] == nil {
			return nil, fmt.Errorf("sign message: %s has no key of kind %s: %w", s.Domain, kind, ErrNotFound)
		}
	}
	key, err := r.open(use[Statement])
	if err != nil {
		return nil, err
	}
	s.Key = use[Statement].ID
	private, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("sign message: key %s of %s is a %T", s.Key, s.Domain, key)
	}
	field, err := statement.Sign(raw, s, private)
	if err != nil {
		return nil, err
	}
	prefix = []byte(field)
	for _, kind := range []Kind{DKIMRSA, DKIMEd25519} {
		field, err := r.dkim(use[kind], []byte(field), raw)
		if err != nil {
			return nil, err
		}
		prefix = append(field, prefix...)
	}
	return prefix, nil
}

// SignOwn returns the DKIM signatures of a domain for a message that this program
// wrote, such as a notice to a reviewer. There is no statement, since no agent
// wrote it.
func (r *Ring) SignOwn(ctx context.Context, domain string, raw []byte) (prefix []byte, err error) {
	ks, err := r.Keys(ctx, domain)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	for _, kind := range []Kind{DKIMRSA, DKIMEd25519} {
		i := slices.IndexFunc(ks, func(k Key) bool { return k.Kind == kind && k.InUse(now) })
		if i < 0 {
			return nil, fmt.Errorf("sign message: %s has no key of kind %s: %w", domain, kind, ErrNotFound)
		}
		field, err := r.dkim(&ks[i], nil, raw)
		if err != nil {
			return nil, err
		}
		prefix = append(field, prefix...)
	}
	return prefix, nil
}

// dkim returns one DKIM-Signature field that covers the fields before and the
// message raw.
func (r *Ring) dkim(k *Key, before, raw []byte) ([]byte, error) {
	key, err := r.open(k)
	if err != nil {
		return nil, err
	}
	header, _, _ := bytes.Cut(raw, []byte("\r\n\r\n"))
	var names []string
	for _, name := range signed {
		for range count(before, name) + count(header, name) + 1 {
			names = append(names, name)
		}
	}
	s, err := dkim.NewSigner(&dkim.SignOptions{
		Domain: k.Domain, Selector: k.ID, Signer: key, Hash: crypto.SHA256,
		HeaderCanonicalization: dkim.CanonicalizationRelaxed, BodyCanonicalization: dkim.CanonicalizationRelaxed, HeaderKeys: names,
	})
	if err != nil {
		return nil, fmt.Errorf("sign with dkim: %w", err)
	}
	_, werr := s.Write(before)
	if werr == nil {
		_, werr = s.Write(raw)
	}
	if err := s.Close(); err != nil {
		return nil, fmt.Errorf("sign with dkim: %w", err)
	}
	if werr != nil {
		return nil, fmt.Errorf("sign with dkim: %w", werr)
	}
	return []byte(s.Signature()), nil
}

// count returns how often a field occurs in a header.
func count(header []byte, name string) (n int) {
	for line := range bytes.SplitSeq(header, []byte("\r\n")) {
		before, _, ok := bytes.Cut(line, []byte(":"))
		if ok && strings.EqualFold(string(bytes.TrimRight(before, " \t")), name) {
			n++
		}
	}
	return n
}

// open decrypts the private half of k. The domain and ID are authenticated with it,
// so that a key that was moved to another row does not open.
func (r *Ring) open(k *Key) (crypto.Signer, error) {
	name := k.Domain + "\x00" + k.ID
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.opened[name]; s != nil {
		return s, nil
	}
	der, err := r.aead.Open(nil, nil, k.private, []byte(name))
	if err != nil {
		return nil, fmt.Errorf("open signing key %s of %s: not sealed with this server's key: %w", k.ID, k.Domain, err)
	}
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("open signing key %s of %s: %w", k.ID, k.Domain, err)
	}
	s, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("open signing key %s of %s: it is a %T", k.ID, k.Domain, key)
	}
	r.opened[name] = s
	return s, nil
}
