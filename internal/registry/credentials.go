package registry

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"time"
)

const maxCredential = 16 << 10 // bytes; a service account's key has about 2400

// A credential authenticates a pull. The zero value is no credential.
type credential struct {
	user, password string
	aws            *awsKey
	own            bool // of a cloud: sent to the registry's own host only
}

func (c credential) set() bool { return c.user != "" || c.password != "" || c.aws != nil }

// An awsKey is an access key that gets a password from Amazon ECR.
type awsKey struct {
	id, secret, region, suffix string
	fips                       bool
}

var (
	ecrHost   = regexp.MustCompile(`^[0-9]{12}\.dkr\.ecr(-fips)?\.([a-z]{2}(?:-[a-z]+)+-[0-9]{1,2})\.(amazonaws\.com(?:\.cn)?)$`)
	gcpHost   = regexp.MustCompile(`^(?:(?:[a-z]+\.)?gcr\.io|[a-z0-9-]+-docker\.pkg\.dev)$`)
	awsRegion = regexp.MustCompile(`^[a-z]{2}(?:-[a-z]+)+-[0-9]{1,2}$`)
	awsID     = regexp.MustCompile(`^[A-Za-z0-9]{16,128}$`)
)

// newCredential validates credentials for the registry at e. A cloud's credentials are
// accepted for the cloud's registries only. The attack: an image's name sends a key to
// another host.
func newCredential(c Credentials, e endpoint) (credential, error) {
	aws := c.AWSKeyID != "" || c.AWSSecret != "" || c.AWSRegion != ""
	basic := c.Username != "" || c.Password != ""
	kinds := 0
	for _, set := range []bool{aws, basic, c.GCPKey != ""} {
		if set {
			kinds++
		}
	}
	for _, v := range []string{c.Username, c.Password, c.AWSKeyID, c.AWSSecret, c.AWSRegion, c.GCPKey} {
		if len(v) > maxCredential {
			return credential{}, fmt.Errorf("a value is longer than %d bytes", maxCredential)
		}
	}
	switch {
	case kinds == 0:
		return credential{}, nil
	case kinds > 1:
		return credential{}, errors.New("give one kind: user name and password, AWS or GCP")
	case basic:
		if strings.Contains(c.Username, ":") || strings.ContainsFunc(c.Username+c.Password, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return credential{}, errors.New("the user name must not have a colon, and neither it nor the password may have control characters")
		}
		return credential{user: c.Username, password: c.Password}, nil
	case aws:
		return newAWSKey(c, e)
	}
	// "Authenticate with a service account key" of Artifact Registry: the key itself is
	// the password.
	var k struct {
		Type string `json:"type"`
	}
	if json.Unmarshal([]byte(c.GCPKey), &k) != nil || k.Type != "service_account" {
		return credential{}, errors.New("the GCP key must be the JSON of a service account's key")
	}
	if e.scheme != "https" || !gcpHost.MatchString(e.host) {
		return credential{}, fmt.Errorf("%s is not a registry of Google Cloud: HOST-docker.pkg.dev or gcr.io", e.host)
	}
	return credential{user: "_json_key", password: c.GCPKey, own: true}, nil
}

func newAWSKey(c Credentials, e endpoint) (credential, error) {
	if !awsID.MatchString(c.AWSKeyID) || c.AWSSecret == "" || !awsRegion.MatchString(c.AWSRegion) {
		return credential{}, errors.New("AWS: give the access key's ID, its secret and a region, such as eu-central-1")
	}
	m := ecrHost.FindStringSubmatch(e.host)
	if e.scheme != "https" || m == nil {
		return credential{}, fmt.Errorf("%s is not a registry of Amazon ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com", e.host)
	}
	if m[2] != c.AWSRegion {
		return credential{}, fmt.Errorf("AWS: the region is %s, but the registry is in %s", c.AWSRegion, m[2])
	}
	return credential{aws: &awsKey{id: c.AWSKeyID, secret: c.AWSSecret, region: c.AWSRegion, suffix: m[3], fips: m[1] != ""}, own: true}, nil
}

// basic returns the user name and password for the registry. Both are empty if there are
// no credentials.
func (c credential) basic(ctx context.Context, s *session) (user, password string, err error) {
	if c.aws == nil {
		return c.user, c.password, nil
	}
	return c.aws.login(ctx, s)
}

func basicAuth(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// ecrURL returns the URL of Amazon ECR's API, from its list of endpoints.
func ecrURL(region, suffix string, fips bool) string {
	if fips {
		return "https://ecr-fips." + region + "." + suffix + "/"
	}
	return "https://api.ecr." + region + "." + suffix + "/"
}

// login gets a password from Amazon ECR (GetAuthorizationToken). It is valid for 12 hours.
func (k *awsKey) login(ctx context.Context, s *session) (user, password string, err error) {
	ctx, cancel := context.WithTimeout(ctx, stall)
	defer cancel()
	payload := []byte("{}")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.p.ecr(k.region, k.suffix, k.fips), strings.NewReader(string(payload)))
	if err != nil {
		return "", "", fmt.Errorf("amazon ecr: %w", err)
	}
	req.Header.Set("Content-Type", "application/x-amz-json-1.1")
	req.Header.Set("X-Amz-Target", "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken")
	signV4(req, payload, k.id, k.secret, k.region, "ecr", time.Now())
	res, err := s.p.public.Do(req)
	if err != nil {
		return "", "", s.unreachable(endpoint{host: req.URL.Hostname(), port: "443"}, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxToken))
	if err != nil {
		return "", "", fmt.Errorf("amazon ecr: %w", err)
	}
	if res.StatusCode != http.StatusOK {
		return "", "", fmt.Errorf("%w: amazon ecr in %s answered %d %s to GetAuthorizationToken: check the access key and its permissions", ErrDenied, k.region, res.StatusCode, http.StatusText(res.StatusCode))
	}
	var out struct {
		Data []struct {
			Token string `json:"authorizationToken"`
		} `json:"authorizationData"`
	}
	if json.Unmarshal(b, &out) != nil || len(out.Data) == 0 {
		return "", "", fmt.Errorf("%w: amazon ecr in %s returned no token", ErrInvalid, k.region)
	}
	pair, err := base64.StdEncoding.DecodeString(out.Data[0].Token)
	user, password, ok := strings.Cut(string(pair), ":")
	if err != nil || !ok { // the error would quote the token
		return "", "", fmt.Errorf("%w: amazon ecr in %s returned a malformed token", ErrInvalid, k.region)
	}
	return user, password, nil
}

// signV4 signs a request without a query: AWS Signature Version 4, "Create a signed AWS API
// request". It signs the content type, the host and the X-Amz fields that are set.
func signV4(req *http.Request, payload []byte, id, secret, region, service string, now time.Time) {
	date := now.UTC().Format("20060102T150405Z")
	req.Header.Set("X-Amz-Date", date)
	var names, fields []string
	for _, n := range []string{"content-type", "host", "x-amz-date", "x-amz-target"} { // in order
		v := req.Header.Get(n)
		if n == "host" {
			v = req.URL.Host
		}
		if v != "" {
			names, fields = append(names, n), append(fields, n+":"+strings.TrimSpace(v)+"\n")
		}
	}
	path := req.URL.EscapedPath()
	if path == "" {
		path = "/"
	}
	signed := strings.Join(names, ";")
	canonical := strings.Join([]string{req.Method, path, "", strings.Join(fields, ""), signed, hexHash(payload)}, "\n")
	scope := strings.Join([]string{date[:8], region, service, "aws4_request"}, "/")
	toSign := strings.Join([]string{"AWS4-HMAC-SHA256", date, scope, hexHash([]byte(canonical))}, "\n")
	key := []byte("AWS4" + secret)
	for part := range strings.SplitSeq(scope, "/") {
		key = mac(key, part)
	}
	req.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential="+id+"/"+scope+", SignedHeaders="+signed+", Signature="+hex.EncodeToString(mac(key, toSign)))
}

func hexHash(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

func mac(key []byte, s string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(s))
	return h.Sum(nil)
}

// A challenge is one challenge of a WWW-Authenticate field: RFC 9110, section 11.6.1.
type challenge struct {
	scheme string            // lower case
	params map[string]string // by name in lower case
}

// parseChallenges parses WWW-Authenticate fields, each of which may have several
// challenges. It skips malformed ones.
func parseChallenges(fields []string) (out []challenge) {
	for _, f := range fields {
		if len(f) > 8<<10 || len(out) >= 8 {
			break
		}
		for f = skip(f); f != ""; {
			word, rest := token(f)
			if word == "" {
				break
			}
			f = skip(rest)
			if value, after, ok := value(f); ok { // a parameter of the last challenge
				f = skip(after)
				if len(out) > 0 {
					out[len(out)-1].params[strings.ToLower(word)] = value
				}
				continue
			}
			out = append(out, challenge{scheme: strings.ToLower(word), params: map[string]string{}})
		}
	}
	return out
}

// skip removes white space and commas from the beginning.
func skip(s string) string { return strings.TrimLeft(s, " \t,") }

// token splits s after its first word.
func token(s string) (word, rest string) {
	i := strings.IndexAny(s, " \t,=\"")
	if i < 0 {
		return s, ""
	}
	return s[:i], s[i:]
}

// value reads "=" and a word or a quoted string.
func value(s string) (v, rest string, ok bool) {
	s, ok = strings.CutPrefix(s, "=")
	if !ok {
		return "", s, false
	}
	s = strings.TrimLeft(s, " \t")
	if !strings.HasPrefix(s, `"`) {
		v, rest = token(s)
		return v, rest, true
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '"':
			return b.String(), s[i+1:], true
		case '\\':
			if i++; i < len(s) {
				b.WriteByte(s[i])
			}
		default:
			b.WriteByte(s[i])
		}
	}
	return "", "", true // the closing quote is missing
}
