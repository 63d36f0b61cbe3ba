package signing_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"math/big"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/policy"
	"postern/internal/signing"
	"postern/internal/store"
	"postern/internal/storetest"
)

func issuer(t *testing.T, r *signing.Ring) *signing.Issuer {
	t.Helper()
	i, err := signing.NewIssuer(r, "Agents.test", "https://postern.example.com:8443/")
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func box(id string) auth.Principal {
	return auth.Principal{Kind: auth.Sandbox, ID: id, Project: "prj_1", Template: "base"}
}

func decodePart(t *testing.T, s string, v any) {
	t.Helper()
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		t.Fatalf("part %q: %v", s, err)
	}
}

// verify checks a token with the published keys alone, and returns its claims.
func verify(t *testing.T, i *signing.Issuer, token []byte) (claims map[string]any, kid string, ok bool) {
	t.Helper()
	parts := strings.Split(string(token), ".")
	if len(parts) != 3 {
		t.Fatalf("token has %d parts", len(parts))
	}
	var head struct{ Alg, Typ, Kid string }
	decodePart(t, parts[0], &head)
	if head.Alg != "ES256" || head.Typ != "JWT" {
		t.Errorf("got header %+v", head)
	}
	decodePart(t, parts[1], &claims)
	doc, err := i.JWKS(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var set struct{ Keys []map[string]string }
	if err := json.Unmarshal(doc, &set); err != nil {
		t.Fatal(err)
	}
	for _, k := range set.Keys {
		if k["d"] != "" {
			t.Error("the document has a private key")
		}
		if k["kid"] != head.Kid {
			continue
		}
		if k["kty"] != "EC" || k["crv"] != "P-256" || k["alg"] != "ES256" || k["use"] != "sig" {
			t.Errorf("got key %v", k)
		}
		point := []byte{4}
		for _, s := range []string{k["x"], k["y"]} {
			b, err := base64.RawURLEncoding.DecodeString(s)
			if err != nil || len(b) != 32 {
				t.Fatalf("coordinate %q: %d bytes, %v", s, len(b), err)
			}
			point = append(point, b...)
		}
		public, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), point)
		if err != nil {
			t.Fatal(err)
		}
		sig, err := base64.RawURLEncoding.DecodeString(parts[2])
		if err != nil || len(sig) != 64 {
			t.Fatalf("signature of %d bytes, %v", len(sig), err)
		}
		sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
		return claims, head.Kid, ecdsa.Verify(public, sum[:], new(big.Int).SetBytes(sig[:32]), new(big.Int).SetBytes(sig[32:]))
	}
	return claims, head.Kid, false
}

func TestIdentityTokensAreVerifiedByThePublishedKeys(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		i := issuer(t, ring(t, db, nil))
		token, err := i.Token(t.Context(), box("i1"), "sts.amazonaws.com")
		if err != nil {
			t.Fatal(err)
		}
		c, _, ok := verify(t, i, token)
		if !ok {
			t.Fatal("the signature is not of a published key")
		}
		for name, want := range map[string]any{
			"iss": "https://postern.example.com:8443", "sub": "spiffe://postern.example.com/project/prj_1/sandbox/i1", "aud": "sts.amazonaws.com",
			"project": "prj_1", "sandbox": "i1", "template": "base",
		} {
			if c[name] != want {
				t.Errorf("claim %s is %v, want %v", name, c[name], want)
			}
		}
		exp, iat := c["exp"].(float64), c["iat"].(float64)
		if life := time.Duration(exp-iat) * time.Second; life != signing.TokenLife || life > 10*time.Minute {
			t.Errorf("valid for %s, want %s", life, signing.TokenLife)
		}
		if now := float64(time.Now().Unix()); iat > now || iat < now-60 {
			t.Errorf("issued at %v, now is %v", iat, now)
		}
		again, err := i.Token(t.Context(), box("i1"), "sts.amazonaws.com")
		if err != nil {
			t.Fatal(err)
		}
		if d, _, ok := verify(t, i, again); !ok || d["jti"] == c["jti"] || c["jti"] == "" {
			t.Errorf("two tokens have the ID %v, verified %v", c["jti"], ok)
		}
		// Another server of the same database verifies it, too.
		if _, _, ok := verify(t, issuer(t, ring(t, db, nil)), token); !ok {
			t.Error("another server does not publish the key")
		}
		for name, who := range map[string]auth.Principal{
			"a person": {Kind: auth.Person, ID: "ann", Project: "prj_1"}, "a project": {Kind: auth.Project, ID: "key", Project: "prj_1"}, "no project": {Kind: auth.Sandbox, ID: "i1"},
		} {
			if _, err := i.Token(t.Context(), who, "a"); err == nil {
				t.Errorf("a token was made for %s", name)
			}
		}
	})
}

func TestKeysOfIdentityTokensRotate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := storetest.SQLite(t)
		r := ring(t, db, nil)
		i := issuer(t, r)
		old, err := i.Token(t.Context(), box("i1"), "a")
		if err != nil {
			t.Fatal(err)
		}
		_, first, _ := verify(t, i, old)
		ann, name := person(t, db), signing.IdentityName("agents.test")
		ks, err := r.Rotate(t.Context(), ann, name)
		if err != nil || len(ks) != 2 || ks[0].Kind != signing.Identity {
			t.Fatalf("got %+v, %v", ks, err)
		}
		// The next key is published before it signs.
		token, _ := i.Token(t.Context(), box("i1"), "a")
		if _, kid, ok := verify(t, i, token); !ok || kid != first {
			t.Errorf("signed with %s, want %s", kid, first)
		}
		time.Sleep(time.Hour + time.Second)
		token, _ = i.Token(t.Context(), box("i1"), "a")
		if _, kid, ok := verify(t, i, token); !ok || kid == first {
			t.Errorf("still signed with %s", kid)
		}
		if _, _, ok := verify(t, i, old); !ok {
			t.Error("the former key is not published")
		}
		if err := r.Remove(t.Context(), ann, name, first); err != nil {
			t.Fatal(err)
		}
		if _, _, ok := verify(t, i, old); ok {
			t.Error("a removed key is published")
		}
	})
}

func TestTokensBelongToTheHostsOfTheirRules(t *testing.T) {
	db := storetest.SQLite(t)
	i := issuer(t, ring(t, db, nil))
	e := &policy.Egress{
		Tokens: map[string]policy.Token{"aws": {Audience: "sts.amazonaws.com", Type: policy.TokenType}, "unused": {Audience: "x", Type: policy.TokenType}},
		Rules: map[string][]policy.Rule{
			"api.example.com": {{Headers: map[string]string{"Authorization": "Bearer ${e2b.identity.tokens.aws}"}}}, "*.example.org": {{Headers: map[string]string{"X-Id": "${e2b.identity.tokens.aws}"}}},
		},
	}
	list, err := i.Bound(t.Context(), box("i1"), e)
	if err != nil || len(list) != 1 {
		t.Fatalf("got %+v, %v, want one", list, err)
	}
	s := list[0]
	if s.Kind != inject.KindToken || !signing.IsToken(s.ID) || !regexp.MustCompile(`^pst_[a-z2-7]{40}$`).MatchString(s.Sentinel) {
		t.Errorf("got %+v", s)
	}
	for host, want := range map[string]bool{"api.example.com": true, "a.example.org": true, "example.org": false, "evil.test": false} {
		if got := s.Usable(host); got != want {
			t.Errorf("usable for %s: %v, want %v", host, got, want)
		}
	}
	again, _ := i.Bound(t.Context(), box("i1"), e)
	other, _ := i.Bound(t.Context(), box("i2"), e)
	if again[0].Sentinel != s.Sentinel || other[0].Sentinel == s.Sentinel {
		t.Error("a sentinel is not that of one sandbox")
	}
	v, err := i.Open(t.Context(), box("i1"), s.ID)
	if err != nil {
		t.Fatal(err)
	}
	if c, _, ok := verify(t, i, v.Value); !ok || c["aud"] != "sts.amazonaws.com" || c["sandbox"] != "i1" {
		t.Errorf("got claims %v, verified %v", c, ok)
	}
	for _, id := range []string{"", "idt_", "idt_!", "sec_ABC", "idt_YQ"} {
		if _, err := i.Open(context.Background(), box("i1"), id); err == nil {
			t.Errorf("opened %q", id)
		}
	}
}

func TestIssuersNeedAnAddressThatOthersReach(t *testing.T) {
	r := ring(t, storetest.SQLite(t), nil)
	for _, u := range []string{"", "http://postern.example.com", "postern.example.com", "https://"} {
		if _, err := signing.NewIssuer(r, "agents.test", u); err == nil {
			t.Errorf("took %q", u)
		}
	}
}
