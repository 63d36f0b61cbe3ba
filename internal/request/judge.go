package request

import (
	"context"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/mailservice"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// judge returns what the switches and the rules of f say about r, or about putting
// the secret u on it, and what policy was asked. Of several readings of an ambiguous
// request the strictest verdict counts.
func judge(f connection.InForce, who auth.Principal, r *outgoing.Request, kind policy.Kind, u *outgoing.Use) (facts policy.Request, v policy.Verdict) {
	methods, unknown := []string{r.Method}, ""
	// Where no rule looks at the method, a body need not be read for it.
	if f.Policy != nil && (r.Whole && len(r.Body) == 0 || f.Policy.ByMethod(kind, r.Host)) {
		methods, unknown = r.Methods()
	}
	for i, h := range readings(r, methods) {
		q := asked(who, r, kind, u, h)
		if i == 0 {
			if v := f.Stopped(q); v.Effect != policy.Allow {
				return q, v
			}
			if unknown != "" && f.Policy.ByMethod(kind, r.Host) {
				return q, refused(unknownMethod + unknown)
			}
		}
		w := byRules(f.Policy, q, u)
		if i == 0 || rank(w.Effect) > rank(v.Effect) {
			facts, v = q, w
		}
	}
	if why := unreadableMail(r); kind == policy.KindRequest && v.Effect == policy.Allow && why != "" {
		// The attack: a rule that allows requests to a mail service lets mail out that its
		// reviewers cannot be shown.
		v = policy.Verdict{Effect: policy.Ask, Reason: why}
	}
	return facts, v
}

// unknownMethod begins the reason of a refusal by [byMethod].
const unknownMethod = "a rule is about the method, and a server could read another one from the request, since "

// ByMethod reports whether Judge may decide on r by its method: a rule looks at it, or
// one asks and a permit, which is for a method, may answer.
func (a *Admission) ByMethod(ctx context.Context, who auth.Principal, r *outgoing.Request) bool {
	f, err := a.rules.InForce(ctx, who.Project)
	return err == nil && f.Policy != nil && (f.Policy.Asks(policy.KindRequest, r.Host) || slices.ContainsFunc([]policy.Kind{policy.KindRequest, policy.KindTool, policy.KindSecret}, func(k policy.Kind) bool {
		return f.Policy.ByMethod(k, r.Host)
	}))
}

// unreadableMail returns why r, if it is whole and may make a service send mail, cannot
// be read as that mail. Whatever can be is an action of kind email.send besides.
func unreadableMail(r *outgoing.Request) string {
	if !r.Whole {
		return ""
	}
	if _, ok := mailservice.Match(r); !ok {
		return ""
	}
	if _, err := mailservice.Parse(r); err != nil {
		return err.Error()
	}
	return ""
}

func rank(e policy.Effect) int {
	return slices.Index([]policy.Effect{policy.Allow, policy.Ask, policy.Deny}, e)
}

// byRules returns the verdict of the rules on q. Where none matches, a request is
// allowed, since its host is; and the setting of a secret decides about its use.
func byRules(d *policy.Document, q policy.Request, u *outgoing.Use) policy.Verdict {
	v, matched := d.Match(q)
	if u == nil {
		if !matched {
			v = policy.Verdict{Effect: policy.Allow}
		}
		return v
	}
	// The attack: a rule without a kind, written about mail, allows what the owner of
	// a secret wants to be asked about.
	if matched && (v.Effect != policy.Allow || d.Names(v.Rule, policy.KindSecret)) {
		return v
	}
	return bySetting(u)
}

// bySetting returns the verdict of the approval of u.
func bySetting(u *outgoing.Use) policy.Verdict {
	switch u.Approval {
	case never:
		return policy.Verdict{Effect: policy.Allow}
	case first:
		return policy.Verdict{Effect: policy.Ask, Reason: "a person is asked when a sandbox uses the secret " + u.Secret + " for the first time"}
	}
	return policy.Verdict{Effect: policy.Ask, Reason: "a person is asked about each request with the secret " + u.Secret}
}

// asked is what policy is asked about one reading of r.
func asked(who auth.Principal, r *outgoing.Request, kind policy.Kind, u *outgoing.Use, h policy.HTTP) policy.Request {
	q := policy.Request{
		Kind: kind, Via: "link", To: []string{r.Host}, Size: r.Size, Sandbox: who.ID, Template: who.Template, Time: time.Now(), HTTP: &h,
		Detail: map[string]string{"url": clip(r.Scheme+"://"+r.Host+r.Path, 500)},
	}
	if u != nil {
		q.Detail = map[string]string{"secret": u.Secret}
		h.Secrets = []string{u.Secret}
		return q
	}
	for _, u := range secrets(r) {
		h.Secrets = append(h.Secrets, u.Secret)
	}
	return q
}

// readings returns r as policy sees it, with these methods, in each way in which a server
// may read it.
// The attacks: a rule denies /admin/ and the program asks for /x/../admin/, //admin/
// or /%61dmin%2F; a rule denies DELETE and the program sends POST with
// X-HTTP-Method-Override, or with _method in a form.
func readings(r *outgoing.Request, methods []string) (list []policy.HTTP) {
	paths := []string{normalPath(r.Path)}
	if p := plainPath(r.Path); p != paths[0] {
		paths = append(paths, p)
	}
	query := parameters(r.Query)
	headers := lowerHeaders(r.Header)
	for _, m := range methods {
		for _, p := range paths {
			list = append(list, policy.HTTP{Host: r.Host, Method: m, Path: p, Query: query, Headers: headers})
		}
	}
	return list
}

// ambiguous reports whether servers may read r in different ways.
func ambiguous(r *outgoing.Request) bool {
	methods, unknown := r.Methods()
	return unknown != "" || len(readings(r, methods)) > 1
}

func lowerHeaders(h http.Header) map[string]string {
	out := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(h)) {
		key, value := strings.ToLower(name), strings.Join(h[name], ", ")
		if was, ok := out[key]; ok {
			value = was + ", " + value
		}
		out[key] = value
	}
	return out
}

const upperHex = "0123456789ABCDEF"

// normalPath returns an escaped path with unreserved characters plain and escapes in
// upper case: RFC 3986 section 6.2.2.
func normalPath(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' || i+2 >= len(s) {
			b.WriteByte(s[i])
			continue
		}
		high, low := hexDigit(s[i+1]), hexDigit(s[i+2])
		if high < 0 || low < 0 {
			b.WriteByte(s[i])
			continue
		}
		c := byte(high<<4 | low)
		switch {
		case 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0:
			b.WriteByte(c)
		default:
			b.Write([]byte{'%', upperHex[high], upperHex[low]})
		}
		i += 2
	}
	return b.String()
}

func hexDigit(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// plainPath returns the path that a lenient server takes an escaped one for: decoded
// as often as it can be, with backslashes as slashes, without path parameters, dot
// segments and empty segments. Escapes that a path always needs are written again, so
// that a clean path is its own [normalPath].
func plainPath(s string) string {
	if s == "*" || s == "" {
		return s
	}
	for range 4 {
		p, err := url.PathUnescape(s)
		if err != nil || p == s {
			break
		}
		s = p
	}
	s = strings.ReplaceAll(s, `\`, "/")
	parts := strings.Split(s, "/")
	for i, p := range parts {
		if cut, _, ok := strings.Cut(p, ";"); ok && (cut == "" || cut == "." || cut == "..") {
			parts[i] = cut // as servers that know path parameters do: /..;/
		}
	}
	s = strings.Join(parts, "/")
	clean := path.Clean("/" + strings.TrimLeft(s, "/"))
	if strings.HasSuffix(s, "/") && clean != "/" {
		clean += "/"
	}
	return escape(clean)
}

// escape escapes what may not be plain in a path.
func escape(s string) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~!$&'()*+,;=:@/", c) >= 0 {
			b.WriteByte(c)
			continue
		}
		b.Write([]byte{'%', upperHex[c>>4], upperHex[c&15]})
	}
	return b.String()
}

// parameters returns the parameters of a query, so that each one that some server
// could read is there: url.ParseQuery leaves out what it cannot parse.
func parameters(query string) map[string][]string {
	out := map[string][]string{}
	add := func(pair string) {
		if pair == "" {
			return
		}
		k, v, _ := strings.Cut(pair, "=")
		k, v = decoded(k), decoded(v)
		if !slices.Contains(out[k], v) || !strings.Contains(pair, ";") {
			out[k] = append(out[k], v)
		}
	}
	for pair := range strings.SplitSeq(query, "&") {
		add(pair)
		if strings.Contains(pair, ";") { // a separator for some servers
			for p := range strings.SplitSeq(pair, ";") {
				add(p)
			}
		}
	}
	return out
}

func decoded(s string) string {
	if d, err := url.QueryUnescape(s); err == nil {
		return d
	}
	return s
}

// clip returns at most most bytes of s, as valid text.
func clip(s string, most int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
