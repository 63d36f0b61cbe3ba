package mailauth

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/mail"
)

// A signature is the result of verifying one DKIM-Signature or ARC-Message-Signature.
type signature struct {
	result   string // RFC 8601, section 2.7.1
	detail   string // the reason, unless result is pass
	domain   string // d=, lower case; empty if there is none
	selector string // s=
	begin    string // first 8 characters of b=, which distinguish signatures of one domain (RFC 6008)
	testing  bool   // the key record has the flag t=y
}

// Check returns s as agents see it.
func (s *signature) Check() mail.Check {
	return mail.Check{Result: s.result, Domain: s.domain, Detail: printable(s.detail, 200)}
}

// A fail is the reason why a signature is not valid, with its result (RFC 8601).
type fail struct{ result, why string }

// Error returns the reason.
func (f *fail) Error() string { return f.why }

func failf(result, format string, args ...any) error {
	return &fail{result, fmt.Sprintf(format, args...)}
}

// settle stores the outcome of a verification in s: pass, unless err is a [fail].
func (s *signature) settle(err error) {
	if f, ok := errors.AsType[*fail](err); ok {
		s.result, s.detail = f.result, f.why
		return
	}
	s.result = "pass"
}

// verifyDKIM verifies the first [maxSignatures] signatures of a message concurrently.
func (v *Verifier) verifyDKIM(ctx context.Context, ask *asker, h header, sums *bodyHashes) []signature {
	var out []signature
	var wg group
	var found []int
	for i, f := range h.fields {
		if f.name == "dkim-signature" && len(found) < maxSignatures {
			found = append(found, i)
		}
	}
	out = make([]signature, len(found))
	for n, i := range found {
		wg.Go(func() {
			t, err := parseTags(h.fields[i])
			if err == nil && t["v"] != "1" {
				err = failf("permerror", "the version of the signature is not 1")
			}
			out[n] = signature{domain: strings.ToLower(t["d"]), selector: t["s"]}
			if err == nil {
				err = v.verifySignature(ctx, ask, h, i, t, sums, &out[n])
			}
			out[n].settle(err)
		})
	}
	wg.Wait()
	return out
}

// tags are the tags of a signature, a seal or a key record, RFC 6376 section 3.2.
type tags map[string]string

// parseTags reads the tags of a header field.
func parseTags(f headerField) (tags, error) {
	if len(f.raw) > maxSignField {
		return nil, failf("permerror", "the signature has more than %d octets", maxSignField)
	}
	return parseTagList(f.value())
}

// parseTagList parses a tag list, RFC 6376 section 3.2. On an error it returns the
// tags before the malformed one.
func parseTagList(s string) (tags, error) {
	t := tags{}
	for tag := range strings.SplitSeq(s, ";") {
		name, value, ok := strings.Cut(tag, "=")
		name = strings.Trim(name, " \t\r\n")
		if !ok {
			if name == "" {
				continue // after the last ;
			}
			return t, failf("permerror", "a tag has no value")
		}
		if _, twice := t[name]; twice {
			// The attack: with two d= tags, verifiers disagree on the signing domain.
			return t, failf("permerror", "a tag stands twice")
		}
		if name == "" || strings.IndexFunc(name, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_'
		}) >= 0 {
			return t, failf("permerror", "a tag has no proper name")
		}
		t[name] = strings.Trim(value, " \t\r\n")
	}
	return t, nil
}

// list returns the colon-separated elements of a tag.
func (t tags) list(name string) []string {
	all := strings.Split(t[name], ":")
	for i := range all {
		all[i] = strings.Trim(all[i], " \t\r\n")
	}
	return all
}

// noSpace removes white space: base64 and other values may be folded.
func noSpace(s string) string {
	return strings.Map(func(r rune) rune {
		if r == ' ' || r == '\t' || r == '\r' || r == '\n' {
			return -1
		}
		return r
	}, s)
}

// decode64 decodes the base64 value of a tag.
func decode64(t tags, name string) ([]byte, error) {
	b, err := base64.StdEncoding.DecodeString(noSpace(t[name]))
	if err != nil || len(b) == 0 || len(b) > 4096 {
		return nil, failf("permerror", "%s= is not base64", name)
	}
	return b, nil
}

// verifySignature verifies the signature in h.fields[at] over the header and the body.
// It sets the fields of s that it learns on the way, even if the verification fails.
func (v *Verifier) verifySignature(ctx context.Context, ask *asker, h header, at int, t tags, sums *bodyHashes, s *signature) error {
	relaxedHeader, relaxedBody, limit, err := v.checkTags(t, s)
	if err != nil {
		return err
	}
	bh, err := decode64(t, "bh")
	if err != nil {
		return err
	}
	sig, err := decode64(t, "b")
	if err != nil {
		return err
	}
	s.begin = noSpace(t["b"])
	s.begin = s.begin[:min(8, len(s.begin))]
	// Check the body first: hashing is cheaper than the DNS lookup for the key.
	sum, total, ok := sums.get(relaxedBody, limit)
	if !ok {
		return failf("policy", "the message is signed in more than %d ways", maxBodyHashes)
	}
	if subtle.ConstantTimeCompare(sum, bh) != 1 || limit > total {
		return failf("fail", "the body is not the one that was signed")
	}
	key, err := ask.key(ctx, s.domain, s.selector, t)
	if err != nil {
		return err
	}
	s.testing = key.testing
	if err := key.verify(headerHash(h, at, t.list("h"), relaxedHeader), sig); err != nil {
		return err
	}
	if limit >= 0 && limit < total {
		// The attack: somebody who has a signed message appends text to its body.
		return failf("policy", "the signature covers only the first %d of %d octets of the body", limit, total)
	}
	return nil
}

// checkTags validates the tags of a signature, RFC 6376 section 6.1.1, as far as this is
// possible without the key. limit is the value of l=, or -1.
func (v *Verifier) checkTags(t tags, s *signature) (relaxedHeader, relaxedBody bool, limit int64, err error) {
	for _, name := range []string{"a", "b", "bh", "d", "h", "s"} {
		if t[name] == "" {
			return false, false, 0, failf("permerror", "the tag %s= is missing", name)
		}
	}
	switch t["a"] {
	case "rsa-sha256", "ed25519-sha256":
	case "rsa-sha1":
		return false, false, 0, failf("permerror", "it is made with SHA-1, which proves nothing (RFC 8301)")
	default:
		return false, false, 0, failf("permerror", "its algorithm is not known")
	}
	domain, ok := domainName(t["d"])
	if !ok {
		s.domain = ""
		return false, false, 0, failf("permerror", "d= is not a domain")
	}
	s.domain = domain
	if !isHost(t["s"]) && isASCII(t["s"]) {
		return false, false, 0, failf("permerror", "s= is not a selector")
	}
	if i, ok := t["i"]; ok {
		d, ok := domainName(mail.Domain(noSpace(i)))
		if !ok || d != domain && !strings.HasSuffix(d, "."+domain) {
			return false, false, 0, failf("permerror", "i= is not within d=")
		}
	}
	names := t.list("h")
	if len(names) > maxSignedKeys {
		return false, false, 0, failf("permerror", "h= names more than %d fields", maxSignedKeys)
	}
	if !slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(n, "from") }) {
		return false, false, 0, failf("permerror", "the From field is not signed")
	}
	if q, ok := t["q"]; ok && !slices.Contains(t.list("q"), "dns/txt") {
		return false, false, 0, failf("permerror", "q=%s is not known", printable(q, 20))
	}
	if relaxedHeader, relaxedBody, ok = canonicalization(t["c"]); !ok {
		return false, false, 0, failf("permerror", "c= is not known")
	}
	limit = -1
	if l, ok := t["l"]; ok {
		if limit, err = strconv.ParseInt(l, 10, 64); err != nil || limit < 0 {
			return false, false, 0, failf("permerror", "l= is not a number")
		}
	}
	if err := v.checkTimes(t); err != nil {
		return false, false, 0, err
	}
	return relaxedHeader, relaxedBody, limit, nil
}

// checkTimes checks that a signature has not expired, by its tags t= and x=.
func (v *Verifier) checkTimes(t tags) error {
	var times [2]int64
	for i, name := range []string{"t", "x"} {
		if t[name] == "" {
			continue
		}
		n, err := strconv.ParseInt(t[name], 10, 64)
		if err != nil || n < 0 {
			return failf("permerror", "%s= is not a time", name)
		}
		times[i] = n
	}
	switch now := v.now(); {
	case t["x"] != "" && times[1] < times[0]:
		return failf("permerror", "it expired before it was made")
	case t["x"] != "" && now.After(time.Unix(times[1], 0)):
		return failf("fail", "it expired at %s", time.Unix(min(times[1], 1<<40), 0).UTC().Format(time.RFC3339))
	}
	return nil
}

// canonicalization parses the tag c=. The default is simple, for the header and for the
// body.
func canonicalization(c string) (relaxedHeader, relaxedBody, ok bool) {
	header, body, both := strings.Cut(noSpace(c), "/")
	kinds := map[string]bool{"relaxed": true, "simple": false}
	if header == "" {
		header = "simple"
	}
	if !both {
		body = "simple"
	}
	relaxedHeader, ok1 := kinds[header]
	relaxedBody, ok2 := kinds[body]
	return relaxedHeader, relaxedBody, ok1 && ok2
}

// headerHash hashes the header fields in names, and the signature's own field at
// h.fields[at]. If a name occurs several times, the fields are taken from the bottom up
// (RFC 6376, section 5.4.2).
func headerHash(h header, at int, names []string, relaxed bool) []byte {
	left := map[string][]int{}
	for i, f := range h.fields {
		left[f.name] = append(left[f.name], i)
	}
	sum := sha256.New()
	for _, name := range names {
		name = strings.ToLower(name)
		if list := left[name]; len(list) > 0 {
			sum.Write(canonicalField(h.fields[list[len(list)-1]].raw, relaxed))
			left[name] = list[:len(list)-1]
		}
	}
	sum.Write(withoutSignature(h.fields[at].raw, relaxed))
	return sum.Sum(nil)
}

// A key is a public key that a domain publishes for verification.
type key struct {
	public  crypto.PublicKey
	testing bool
}

// key looks up the key of a selector and checks that it may be used for a signature with
// the tags t.
func (a *asker) key(ctx context.Context, domain, selector string, t tags) (key, error) {
	texts, err := a.LookupTXT(ctx, selector+"._domainkey."+domain)
	switch {
	case temporary(err):
		return key{}, failf("temperror", "the key could not be asked for")
	case err != nil:
		return key{}, failf("permerror", "there is no key %s in the domain", printable(selector, 60))
	}
	// A DNS wildcard may add other TXT records of the domain.
	texts = slices.DeleteFunc(slices.Clone(texts), func(s string) bool {
		t, err := parseTagList(s)
		_, has := t["p"]
		return err != nil || !has
	})
	if len(texts) != 1 {
		return key{}, failf("permerror", "there are %d keys %s in the domain", len(texts), printable(selector, 60))
	}
	return parseKey(texts[0], domain, t)
}

const (
	minRSA = 1024 // bits, RFC 8301 section 3.2
	maxRSA = 8192 // bits; the attack: a huge key makes every verification slow
)

// parseKey parses a key record and checks that it fits a signature with the tags sig, RFC
// 6376 section 3.6.1.
func parseKey(record, domain string, sig tags) (key, error) {
	t, err := parseTagList(record)
	if err != nil {
		return key{}, failf("permerror", "the key record is malformed")
	}
	if v, ok := t["v"]; ok && v != "DKIM1" {
		return key{}, failf("permerror", "the key record has another version")
	}
	if noSpace(t["p"]) == "" {
		return key{}, failf("permerror", "the key was revoked")
	}
	if h, ok := t["h"]; ok && h != "" && !slices.Contains(t.list("h"), "sha256") {
		return key{}, failf("permerror", "the key is not for SHA-256")
	}
	if s, ok := t["s"]; ok && !slices.Contains(t.list("s"), "*") && !slices.Contains(t.list("s"), "email") {
		return key{}, failf("permerror", "the key is not for mail, but for %s", printable(s, 20))
	}
	flags := t.list("t")
	if i, ok := sig["i"]; ok && slices.Contains(flags, "s") {
		if d, _ := domainName(mail.Domain(noSpace(i))); d != domain {
			return key{}, failf("permerror", "the key is not for domains below its own")
		}
	}
	k := key{testing: slices.Contains(flags, "y")}
	kind := t["k"]
	if kind == "" {
		kind = "rsa"
	}
	if want, _, _ := strings.Cut(sig["a"], "-"); kind != want {
		return key{}, failf("permerror", "the key is of another kind")
	}
	b, err := base64.StdEncoding.DecodeString(noSpace(t["p"]))
	if err != nil {
		return key{}, failf("permerror", "the key is not base64")
	}
	if kind == "ed25519" {
		if len(b) != ed25519.PublicKeySize {
			return key{}, failf("permerror", "the Ed25519 key has %d octets", len(b))
		}
		k.public = ed25519.PublicKey(b)
		return k, nil
	}
	public, err := x509.ParsePKIXPublicKey(b)
	if err != nil { // erratum 3017 of RFC 6376: some domains publish a PKCS #1 key
		public, err = x509.ParsePKCS1PublicKey(b)
	}
	r, ok := public.(*rsa.PublicKey)
	if err != nil || !ok {
		return key{}, failf("permerror", "the key is not an RSA key")
	}
	if n := r.N.BitLen(); n < minRSA || n > maxRSA {
		return key{}, failf("policy", "the RSA key has %d bits; %d to %d are accepted (RFC 8301)", n, minRSA, maxRSA)
	}
	k.public = r
	return k, nil
}

// verify verifies sig over a SHA-256 digest.
func (k key) verify(digest, sig []byte) error {
	switch p := k.public.(type) {
	case ed25519.PublicKey:
		if ed25519.Verify(p, digest, sig) { // RFC 8463: the digest is signed, not the text
			return nil
		}
	case *rsa.PublicKey:
		if rsa.VerifyPKCS1v15(p, crypto.SHA256, digest, sig) == nil {
			return nil
		}
	}
	return failf("fail", "the signature is not one of these header fields")
}
