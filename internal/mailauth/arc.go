package mailauth

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"strconv"
	"strings"

	"postern/internal/mail"
)

// An arcResult is the result of verifying a message's ARC chain (RFC 8617).
type arcResult struct {
	result  string   // none, pass, fail, or temperror if a key lookup failed
	detail  string   // why it failed
	sealers []string // domains in the order of sealing; unverified claims unless result is pass
}

// Check returns r as agents see it. A chain that passes proves that the sealers handled
// this message. It does not prove that their claims about it are true.
func (r arcResult) Check() mail.Check {
	c := mail.Check{Result: r.result, Detail: printable(r.detail, 200)}
	if n := len(r.sealers); n > 0 {
		c.Domain = r.sealers[n-1]
	}
	if r.result == "pass" {
		c.Detail = printable("sealed by "+strings.Join(r.sealers, ", then "), 200)
	}
	return c
}

// An arcSet holds the three ARC fields of one handler, as indexes of header fields.
type arcSet struct {
	results, signature, seal int // AAR, AMS, AS; -1 if it is missing
	sigTags, sealTags        tags
}

// verifyARC verifies a chain, RFC 8617 section 5.2.
func (v *Verifier) verifyARC(ctx context.Context, ask *asker, h header, sums *bodyHashes) arcResult {
	sets, err := arcSets(h)
	if err != nil {
		return arcResult{result: "fail", detail: err.Error()}
	}
	if len(sets) == 0 {
		return arcResult{result: "none"}
	}
	r := arcResult{}
	for _, s := range sets {
		d, ok := domainName(s.sealTags["d"])
		if !ok {
			return arcResult{result: "fail", detail: "a seal has no domain"}
		}
		r.sealers = append(r.sealers, d)
	}
	var wg group
	errs := make([]error, len(sets)+1)
	wg.Go(func() {
		last := sets[len(sets)-1]
		s := signature{domain: strings.ToLower(last.sigTags["d"]), selector: last.sigTags["s"]}
		t := make(tags, len(last.sigTags))
		for k, v := range last.sigTags {
			if k != "i" { // in ARC the set's number, in DKIM the signer's identity
				t[k] = v
			}
		}
		errs[len(sets)] = v.verifySignature(ctx, ask, h, last.signature, t, sums, &s)
	})
	for i, digest := range sealDigests(h, sets) {
		wg.Go(func() { errs[i] = verifySeal(ctx, ask, sets[i].sealTags, digest) })
	}
	wg.Wait()
	r.result = "pass"
	for i, err := range errs {
		if err == nil {
			continue
		}
		var s signature
		s.settle(err)
		what := "the signature of the last set"
		if i < len(sets) {
			what = fmt.Sprintf("seal %d", i+1)
		}
		r.detail = what + ": " + s.detail
		if r.result = "fail"; s.result == "temperror" {
			r.result = "temperror"
			continue // a definite failure of a later seal takes precedence
		}
		break
	}
	return r
}

// arcSets collects the sets of a chain in order and checks that each is complete.
func arcSets(h header) ([]arcSet, error) {
	var sets []arcSet
	for i, f := range h.fields {
		var kind int
		switch f.name {
		case "arc-authentication-results":
			kind = 0
		case "arc-message-signature":
			kind = 1
		case "arc-seal":
			kind = 2
		default:
			continue
		}
		n, t, err := arcInstance(f, kind)
		if err != nil {
			return nil, err
		}
		for len(sets) < n {
			sets = append(sets, arcSet{-1, -1, -1, nil, nil})
		}
		s := &sets[n-1]
		at := [...]*int{&s.results, &s.signature, &s.seal}[kind]
		if *at >= 0 {
			return nil, fmt.Errorf("set %d has a field twice", n)
		}
		*at = i
		switch kind {
		case 1:
			s.sigTags = t
		case 2:
			s.sealTags = t
		}
	}
	for i, s := range sets {
		if s.results < 0 || s.signature < 0 || s.seal < 0 {
			return nil, fmt.Errorf("set %d of %d is not complete", i+1, len(sets))
		}
		want := "pass"
		if i == 0 {
			want = "none"
		}
		if cv := strings.ToLower(s.sealTags["cv"]); cv != want {
			return nil, fmt.Errorf("seal %d says cv=%s", i+1, printable(cv, 20))
		}
	}
	return sets, nil
}

// arcInstance returns the number of f's set, and f's tags. kind is the field's place in an
// [arcSet].
func arcInstance(f headerField, kind int) (int, tags, error) {
	var i string
	var t tags
	if len(f.raw) > maxSignField {
		return 0, nil, fmt.Errorf("a field has more than %d octets", maxSignField)
	}
	if kind == 0 {
		// In "i=1; mx.example; spf=pass …" only the first element is a tag.
		first, _, _ := strings.Cut(f.value(), ";")
		name, value, _ := strings.Cut(first, "=")
		if strings.TrimSpace(name) == "i" {
			i = strings.TrimSpace(value)
		}
	} else {
		var err error
		if t, err = parseTags(f); err != nil {
			return 0, nil, err
		}
		i = t["i"]
	}
	n, err := strconv.Atoi(i)
	if err != nil || n < 1 || n > maxARCSets {
		return 0, nil, fmt.Errorf("a field has no number of its set from 1 to %d", maxARCSets)
	}
	return n, t, nil
}

// sealDigests returns the digest that each seal signs. It covers all sets up to the
// seal's own (RFC 8617, section 5.1.1). Each field is hashed once, so that 50 sets do not
// cost 50 times the header.
func sealDigests(h header, sets []arcSet) (out [][]byte) {
	all := sha256.New().(hash.Cloner) //nolint:forcetypeassert // all hashes of the standard library are cloners
	for _, s := range sets {
		all.Write(relaxedField(h.fields[s.results].raw))
		all.Write(relaxedField(h.fields[s.signature].raw))
		one, err := all.Clone()
		if err != nil {
			panic(err) // unreachable: SHA-256 can be cloned
		}
		one.Write(withoutSignature(h.fields[s.seal].raw, true))
		out = append(out, one.Sum(nil))
		all.Write(relaxedField(h.fields[s.seal].raw))
	}
	return out
}

// verifySeal verifies one ARC-Seal over a digest of [sealDigests], RFC 8617 section 5.2.
func verifySeal(ctx context.Context, ask *asker, t tags, digest []byte) error {
	for _, name := range []string{"a", "b", "d", "s"} {
		if t[name] == "" {
			return failf("permerror", "the tag %s= is missing", name)
		}
	}
	if _, ok := t["h"]; ok {
		return failf("permerror", "it has a tag h=") // section 4.1.3
	}
	if t["a"] != "rsa-sha256" && t["a"] != "ed25519-sha256" {
		return failf("permerror", "its algorithm is not known or too weak")
	}
	domain, ok := domainName(t["d"])
	if !ok || !isHost(t["s"]) {
		return failf("permerror", "its domain or selector is not one")
	}
	sig, err := decode64(t, "b")
	if err != nil {
		return err
	}
	k, err := ask.key(ctx, domain, t["s"], tags{"a": t["a"]})
	if err != nil {
		return err
	}
	return k.verify(digest, sig)
}
