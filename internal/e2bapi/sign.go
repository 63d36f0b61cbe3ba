package e2bapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"hash"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// maxSigned bounds the path and the user in a signed URL, in bytes: Linux knows
// no longer path.
const maxSigned = 4096

// isSigned reports whether r is one of the SDK's signed URLs for files.
func isSigned(r *http.Request) bool {
	return r.URL.Path == "/files" && r.URL.Query().Has("signature")
}

// A signature is what a signed URL for /files says.
type signature struct {
	sum     string // as sent
	head    string // what is signed before the token
	expires string // what is signed after it, or empty
}

// readSignature reads the signature of a request for /files and returns what
// is wrong with its form, or the empty string.
func readSignature(method string, q url.Values) (sig signature, msg string) {
	op := "read"
	if method == http.MethodPost {
		op = "write"
	}
	sig = signature{q.Get("signature"), q.Get("path") + ":" + op + ":" + q.Get("username") + ":", q.Get("signature_expiration")}
	switch {
	case sig.sum == "":
		return sig, "missing signature query parameter"
	case len(sig.head) > maxSigned || len(sig.expires) > 20:
		return sig, "invalid signature"
	}
	return sig, ""
}

// check returns what is wrong with the signature, or the empty string.
func (sig *signature) check(token string, now time.Time) string {
	text := sig.head + token
	if sig.expires != "" {
		text += ":" + sig.expires
	}
	sum := sha256.Sum256([]byte(text))
	if !same(sig.sum, "v1_"+base64.RawStdEncoding.EncodeToString(sum[:])) {
		return "invalid signature"
	}
	if sig.expires != "" {
		if at, err := strconv.ParseInt(sig.expires, 10, 64); err != nil || at < now.Unix() {
			return signatureExpired
		}
	}
	return ""
}

const signatureExpired = "signature is already expired"

// checkSignature checks a signed URL for /files and returns what is wrong with
// it, or the empty string.
func checkSignature(r *http.Request, token string, now time.Time) string {
	sig, msg := readSignature(r.Method, r.URL.Query())
	if msg != "" {
		return msg
	}
	return sig.check(token, now)
}

// signedFor finds the sandbox whose token signed r: behind one address the
// SDK's signed URLs carry nothing else that tells. The cost grows with the
// number of sandboxes and anyone may cause it, so the caller bounds how often a
// search finds nothing.
func (s *Server) signedFor(r *http.Request) string {
	sig, msg := readSignature(r.Method, r.URL.Query())
	if msg != "" {
		return ""
	}
	// What comes before the token is the same for all and is hashed once.
	head := sha256.New()
	head.Write([]byte(sig.head))
	cloner, ok := head.(hash.Cloner)
	if !ok {
		return "" // unreachable: the standard library's can be cloned
	}
	now := time.Now()
	want, err := base64.RawStdEncoding.DecodeString(strings.TrimPrefix(sig.sum, "v1_"))
	if err != nil || len(want) != sha256.Size {
		return ""
	}
	var tail []byte
	if sig.expires != "" {
		tail = []byte(":" + sig.expires)
	}
	for _, id := range s.boxes.Live() {
		token := s.boxes.AccessToken(id).Reveal()
		h, err := cloner.Clone()
		if err != nil {
			return ""
		}
		h.Write([]byte(token))
		h.Write(tail)
		if subtle.ConstantTimeCompare(h.Sum(nil), want) != 1 {
			continue
		}
		if msg := sig.check(token, now); msg == "" || msg == signatureExpired {
			return id // admit checks again, and says that it has expired
		}
	}
	return ""
}
