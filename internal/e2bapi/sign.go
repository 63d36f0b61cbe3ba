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

// same compares two strings in constant time.
func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// maxSigned bounds the path and the user in a signed URL, in bytes: Linux's
// PATH_MAX.
const maxSigned = 4096

// isSigned reports whether r is a signed URL of the SDK for a file.
func isSigned(r *http.Request) bool {
	return r.URL.Path == "/files" && r.URL.Query().Has("signature")
}

// A signature holds the parts of a signed URL for /files.
type signature struct {
	sum     string // as sent by the client
	head    string // signed text before the token
	expires string // signed text after the token, or empty
}

// readSignature parses the signature of a request for /files. It returns an error
// text for the client, or the empty string.
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

// check compares the signature. It returns an error text for the client, or the
// empty string.
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

// checkSignature checks a signed URL for /files. It returns an error text for the
// client, or the empty string.
func checkSignature(r *http.Request, token string, now time.Time) string {
	sig, msg := readSignature(r.Method, r.URL.Query())
	if msg != "" {
		return msg
	}
	return sig.check(token, now)
}

// signedFor returns the sandbox whose token signed r. Under the server's own
// address the SDK's signed URLs name no sandbox, so each living one is tried. The
// cost grows with the number of sandboxes and anybody may cause it, so the caller
// limits how often a search may fail.
func (s *Server) signedFor(r *http.Request) string {
	sig, msg := readSignature(r.Method, r.URL.Query())
	if msg != "" {
		return ""
	}
	// The text before the token is the same for all sandboxes, and is hashed once.
	head := sha256.New()
	head.Write([]byte(sig.head))
	cloner, ok := head.(hash.Cloner)
	if !ok {
		return "" // the hashes of the standard library can be cloned
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
			return id // expired or not: admit checks again and says so
		}
	}
	return ""
}
