package inject

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"postern/internal/outgoing"
)

// AWS Signature Version 4, as its documentation describes it: "Create a signed
// AWS API request", and for chunks "Signature calculations for the Authorization
// header: transferring payload in multiple chunks".
const (
	algorithm     = "AWS4-HMAC-SHA256"
	amzTime       = "20060102T150405Z"
	amzAlgorithm  = "X-Amz-Algorithm"
	amzCredential = "X-Amz-Credential" //nolint:gosec // a name
	amzDate       = "X-Amz-Date"
	amzExpires    = "X-Amz-Expires"
	amzSigned     = "X-Amz-SignedHeaders"
	amzSignature  = "X-Amz-Signature"
	amzToken      = "X-Amz-Security-Token" //nolint:gosec // a name
	amzContent    = "X-Amz-Content-Sha256"

	unsignedPayload = "UNSIGNED-PAYLOAD"
	unsignedTrailer = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
	signedChunks    = algorithm + "-PAYLOAD"
	signedTrailer   = algorithm + "-TRAILER"
	streaming       = "STREAMING-"

	whereAWS = "AWS signature"

	// maxSkew is how far a signature's time may be from now. AWS refuses later
	// ones too.
	maxSkew = 15 * time.Minute
)

// A Signature is what an AWS request says about its signature.
type Signature struct {
	AccessKey string        // as the client has it, a sentinel
	Time      time.Time     // of the signing, UTC
	Region    string        // of the credential's scope
	Service   string        // of the credential's scope
	Presigned bool          // in the query, not in Authorization
	Expires   time.Duration // of a presigned URL, after Time

	date   string   // Time as it was sent
	signed []string // names of the signed headers, lower case, sorted
}

// ParseSignature returns the AWS signature of r, or nil if r has none. An error
// means that there is one, and that it cannot be made anew.
func ParseSignature(r *outgoing.Request) (*Signature, error) {
	var s *Signature
	for name, values := range r.Header {
		for _, v := range values {
			if !isAuthorization(name) || !strings.HasPrefix(v, "AWS4-") {
				continue
			}
			if len(values) > 1 || s != nil {
				return nil, errors.New("more than one Authorization header; send one")
			}
			var err error
			if s, err = parseAuthorization(v); err != nil {
				return nil, err
			}
		}
	}
	q, err := url.ParseQuery(r.Query)
	if !q.Has(amzCredential) && !q.Has(amzSignature) {
		if s == nil {
			return nil, nil
		}
		s.date = r.Header.Get(amzDate)
		return s, s.finish(r)
	}
	if err != nil || s != nil {
		return nil, errors.New("a signature in the query and a broken query, or one in the header too; send one")
	}
	for _, name := range []string{amzAlgorithm, amzCredential, amzDate, amzExpires, amzSigned, amzSignature} {
		if len(q[name]) != 1 {
			return nil, fmt.Errorf("%d parameters %s in the query; a presigned URL has one", len(q[name]), name)
		}
	}
	if len(q[amzToken]) > 1 {
		return nil, errors.New("more than one " + amzToken + " in the query; send one")
	}
	seconds, err := strconv.Atoi(q.Get(amzExpires))
	if err != nil || seconds < 1 || seconds > 7*24*3600 {
		return nil, fmt.Errorf("%s is %q; a presigned URL holds for 1 to 604800 seconds", amzExpires, short(q.Get(amzExpires)))
	}
	if q.Get(amzAlgorithm) != algorithm {
		return nil, fmt.Errorf("algorithm %q; only %s can be signed anew", short(q.Get(amzAlgorithm)), algorithm)
	}
	s = &Signature{Presigned: true, Expires: time.Duration(seconds) * time.Second, date: q.Get(amzDate)}
	if err := s.credential(q.Get(amzCredential)); err != nil {
		return nil, err
	}
	s.signed = strings.Split(q.Get(amzSigned), ";")
	return s, s.finish(r)
}

// parseAuthorization parses the header's value. The attack: bytes that only one of
// the proxies and servers on the way reads as the end of the line.
func parseAuthorization(v string) (*Signature, error) {
	if strings.ContainsFunc(v, func(c rune) bool { return c < ' ' || c > '~' }) {
		return nil, errors.New("header Authorization has a character that is not printable ASCII")
	}
	name, rest, _ := strings.Cut(v, " ")
	if name != algorithm {
		return nil, fmt.Errorf("algorithm %q; only %s can be signed anew", short(name), algorithm)
	}
	fields := map[string]string{}
	for part := range strings.SplitSeq(rest, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if _, twice := fields[key]; !ok || twice {
			return nil, errors.New("header Authorization has a field without a value, or one twice")
		}
		fields[key] = value
	}
	if len(fields) != 3 || fields["Signature"] == "" {
		return nil, errors.New("header Authorization needs the fields Credential, SignedHeaders and Signature, and no other")
	}
	s := &Signature{signed: strings.Split(fields["SignedHeaders"], ";")}
	return s, s.credential(fields["Credential"])
}

// credential parses ACCESSKEY/DATE/REGION/SERVICE/aws4_request.
func (s *Signature) credential(v string) error {
	part := strings.Split(v, "/")
	if len(part) != 5 || part[4] != "aws4_request" || slices.Contains(part, "") {
		return errors.New("credential scope is not KEY/DATE/REGION/SERVICE/aws4_request")
	}
	for _, c := range v {
		if c <= ' ' || c > '~' || c == ',' || c == '&' {
			return errors.New("credential scope has a character that no scope has")
		}
	}
	s.AccessKey, s.Region, s.Service = part[0], part[2], part[3]
	// The date is compared with that of the time in finish.
	s.Time, _ = time.Parse("20060102", part[1])
	if s.Time.IsZero() {
		return errors.New("credential scope has no date")
	}
	return nil
}

// regionLabel is the shape of a region in a host name.
var regionLabel = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(?:s3-)?([a-z]{2,3}(?:-[a-z]+)+-[0-9])$`) })

// finish checks what both forms have: time, signed headers, and a scope that
// fits the host.
func (s *Signature) finish(r *outgoing.Request) error {
	t, err := time.Parse(amzTime, s.date)
	if err != nil {
		return fmt.Errorf("%s is missing or not of the form %s; send it", amzDate, amzTime)
	}
	if t.Format("20060102") != s.Time.Format("20060102") {
		return errors.New("credential scope is of another day than " + amzDate)
	}
	s.Time = t
	for i, name := range s.signed {
		if !httpguts.ValidHeaderFieldName(name) || name != strings.ToLower(name) || i > 0 && s.signed[i-1] >= name {
			return errors.New("names of signed headers are not header names in lower case and in order, each once")
		}
	}
	// Without the host anybody who has the request could send it to another one.
	if !slices.Contains(s.signed, "host") {
		return errors.New("the host is not among the signed headers; sign it")
	}
	return s.fits(r.Host)
}

// fits refuses a scope for another region or service than the host's, as far as
// the host tells.
func (s *Signature) fits(host string) error {
	name, ok := strings.CutSuffix(strings.TrimSuffix(host, ".cn"), ".amazonaws.com")
	if !ok {
		return nil
	}
	labels := strings.Split(name, ".")
	for _, label := range slices.Backward(labels) {
		if m := regionLabel().FindStringSubmatch(label); m != nil {
			if m[1] != s.Region {
				return fmt.Errorf("signed for region %q, and the host is in %s", short(s.Region), m[1])
			}
			break
		}
	}
	if slices.Contains(labels, "s3") && !s.s3() {
		return fmt.Errorf("signed for service %q, and the host is s3's", short(s.Service))
	}
	return nil
}

// CheckTime refuses a signature that was made further than 15 minutes from now,
// or whose URL has expired. A program could otherwise store signed requests for
// a later time, when nobody looks.
func (s *Signature) CheckTime(now time.Time) error {
	until := s.Time.Add(maxSkew)
	if s.Presigned {
		until = s.Time.Add(min(s.Expires, maxSkew))
	}
	if now.Before(s.Time.Add(-maxSkew)) || now.After(until) {
		return fmt.Errorf("signed at %s, which is too far from now (15 minutes at most, and not longer than the URL holds); set the clock or sign again", s.Time.Format(time.RFC3339))
	}
	return nil
}

func (s *Signature) s3() bool {
	return s.Service == "s3" || strings.HasPrefix(s.Service, "s3-") || s.Service == "s3express"
}

// sign puts a signature by the real pair into r, over the same headers. The
// access key in r has been replaced. Before is the body as the client sent it.
func (s *Signature) sign(r *outgoing.Request, before []byte, v Value) error {
	if v.AccessKey == "" || len(v.Value) == 0 {
		return errors.New("the secret has no access key pair")
	}
	if _, err := encodeHeader(v.SessionToken); err != nil {
		return err
	}
	s.token(r, v.SessionToken)
	hash, err := s.payload(r, before)
	if err != nil {
		return err
	}
	canonical, err := s.canonical(r, hash)
	if err != nil {
		return err
	}
	key := s.key(v.Value)
	defer clear(key)
	digest := sha256.Sum256([]byte(canonical))
	signature := mac(key, s.toSign(algorithm, hex.EncodeToString(digest[:])))
	switch {
	case s.Presigned:
		r.Query += "&" + amzSignature + "=" + signature
	default:
		r.Header.Set("Authorization", algorithm+" Credential="+v.AccessKey+"/"+s.scope()+", SignedHeaders="+strings.Join(s.signed, ";")+", Signature="+signature)
	}
	if strings.HasPrefix(hash, streaming+algorithm) {
		return s.chunks(r, hash, key, signature)
	}
	return nil
}

// token sets or removes the session token of the client, which has none, or one
// of its own making. A presigned URL loses its old signature here.
func (s *Signature) token(r *outgoing.Request, token []byte) {
	if s.Presigned {
		pairs := slices.DeleteFunc(strings.Split(r.Query, "&"), func(pair string) bool {
			name, _, _ := strings.Cut(pair, "=")
			name, err := url.QueryUnescape(name)
			return err == nil && (name == amzToken || name == amzSignature)
		})
		if len(token) > 0 {
			pairs = append(pairs, amzToken+"="+escapeAWS(string(token), false))
		}
		r.Query = strings.Join(pairs, "&")
		return
	}
	name := strings.ToLower(amzToken)
	s.signed = slices.DeleteFunc(s.signed, func(h string) bool { return h == name })
	for have := range r.Header {
		if strings.EqualFold(have, amzToken) {
			delete(r.Header, have)
		}
	}
	if len(token) > 0 {
		r.Header.Set(amzToken, string(token))
		s.signed = append(s.signed, name)
		slices.Sort(s.signed)
	}
}

// payload returns the hash of the body, or the word that stands for it.
func (s *Signature) payload(r *outgoing.Request, before []byte) (string, error) {
	sent := r.Header.Get(amzContent)
	if s.Presigned && sent == "" {
		if sent = r.Values().Get(amzContent); sent == "" && s.s3() {
			sent = unsignedPayload
		}
	}
	changed := !bytes.Equal(before, r.Body)
	switch {
	case sent == unsignedPayload || sent == unsignedTrailer && !changed:
		return sent, nil
	case sent == streaming+signedChunks || sent == streaming+signedChunks+"-TRAILER":
		if !r.Whole || changed {
			return "", errors.New("signed chunks cannot be signed anew in a body that is too long, or that has a sentinel; send it with UNSIGNED-PAYLOAD")
		}
		return sent, nil
	case strings.HasPrefix(sent, streaming):
		return "", fmt.Errorf("%s %q cannot be signed anew; send UNSIGNED-PAYLOAD", amzContent, short(sent))
	case !r.Whole && sent != "":
		// The receiver compares it with the body.
		return sent, nil
	case !r.Whole:
		return "", fmt.Errorf("the body is too long to be signed; send its hash in %s", amzContent)
	case sent != "" && sent != hashOf(before):
		return "", fmt.Errorf("%s is not the hash of the body", amzContent)
	case sent != "" && changed:
		r.Header.Set(amzContent, hashOf(r.Body))
	}
	return hashOf(r.Body), nil
}

func hashOf(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// canonical returns the canonical request.
func (s *Signature) canonical(r *outgoing.Request, hash string) (string, error) {
	var b strings.Builder
	b.WriteString(r.Method + "\n" + s.path(r.Path) + "\n")
	query, err := canonicalQuery(r.Query)
	if err != nil {
		return "", err
	}
	b.WriteString(query + "\n")
	// Headers that the wall removed, such as Range, are no longer signed.
	s.signed = slices.DeleteFunc(s.signed, func(name string) bool {
		return name != "host" && name != "content-length" && !hasHeader(r.Header, name)
	})
	for _, name := range s.signed {
		value, err := signedHeader(r, name)
		if err != nil {
			return "", err
		}
		b.WriteString(name + ":" + value + "\n")
	}
	b.WriteString("\n" + strings.Join(s.signed, ";") + "\n" + hash)
	return b.String(), nil
}

// path returns the canonical path. S3 signs the path as it is, escaped once; all
// other services sign the escaped path, cleaned and escaped again.
func (s *Signature) path(p string) string {
	if s.s3() {
		if decoded, err := url.PathUnescape(p); err == nil {
			return escapeAWS(decoded, true)
		}
		return p
	}
	clean := path.Clean("/" + p)
	if clean != "/" && strings.HasSuffix(p, "/") {
		clean += "/"
	}
	return escapeAWS(clean, true)
}

// canonicalQuery sorts the parameters by their escaped names and values. The
// signature is not among them: token has removed it.
func canonicalQuery(q string) (string, error) {
	if q == "" {
		return "", nil
	}
	type pair struct{ name, value string }
	var all []pair
	for part := range strings.SplitSeq(q, "&") {
		if part == "" {
			continue
		}
		name, value, _ := strings.Cut(part, "=")
		n, err1 := url.QueryUnescape(name)
		v, err2 := url.QueryUnescape(value)
		if err := errors.Join(err1, err2); err != nil {
			return "", fmt.Errorf("query: %w", err)
		}
		all = append(all, pair{escapeAWS(n, false), escapeAWS(v, false)})
	}
	slices.SortFunc(all, func(a, b pair) int {
		if c := strings.Compare(a.name, b.name); c != 0 {
			return c
		}
		return strings.Compare(a.value, b.value)
	})
	out := make([]string, len(all))
	for i, p := range all {
		out[i] = p.name + "=" + p.value
	}
	return strings.Join(out, "&"), nil
}

func hasHeader(h http.Header, name string) bool {
	for have, values := range h {
		if strings.EqualFold(have, name) && len(values) > 0 {
			return true
		}
	}
	return false
}

// signedHeader returns the canonical value of a signed header.
func signedHeader(r *outgoing.Request, name string) (string, error) {
	switch name {
	case "host":
		host := strings.TrimPrefix((&outgoing.Request{Scheme: r.Scheme, Host: r.Host, Port: r.Port}).URL(), r.Scheme+"://")
		return host, nil
	case "content-length":
		if r.Header.Get("Content-Length") == "" {
			if r.Size >= outgoing.UnknownSize {
				return "", errors.New("content-length is signed, and the length is unknown")
			}
			return strconv.FormatInt(r.Size, 10), nil
		}
	}
	var values []string
	for have, v := range r.Header {
		if strings.EqualFold(have, name) {
			values = append(values, v...)
		}
	}
	for i, v := range values {
		v = strings.TrimSpace(v)
		for strings.Contains(v, "  ") {
			v = strings.ReplaceAll(v, "  ", " ")
		}
		values[i] = v
	}
	return strings.Join(values, ","), nil
}

func (s *Signature) scope() string {
	return s.Time.Format("20060102") + "/" + s.Region + "/" + s.Service + "/aws4_request"
}

func (s *Signature) toSign(algorithm string, rest ...string) []byte {
	return []byte(strings.Join(append([]string{algorithm, s.date, s.scope()}, rest...), "\n"))
}

// key derives the signing key of the scope.
func (s *Signature) key(secret []byte) []byte {
	key := append([]byte("AWS4"), secret...)
	for _, part := range []string{s.Time.Format("20060102"), s.Region, s.Service, "aws4_request"} {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(part))
		clear(key)
		key = h.Sum(nil)
	}
	return key
}

func mac(key, b []byte) string {
	h := hmac.New(sha256.New, key)
	h.Write(b)
	return hex.EncodeToString(h.Sum(nil))
}

// escapeAWS escapes all but unreserved characters, and slashes if slash is
// false.
func escapeAWS(v string, slash bool) string {
	const digits = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(v) {
		c := v[i]
		switch {
		case 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '.' || c == '_' || c == '~' || slash && c == '/':
			b.WriteByte(c)
		default:
			b.WriteByte('%')
			b.WriteByte(digits[c>>4])
			b.WriteByte(digits[c&15])
		}
	}
	return b.String()
}
