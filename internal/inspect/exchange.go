package inspect

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/inject"
	"postern/internal/mailservice"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

const (
	// maxLook is how many bytes a body can have in which an owner has opened a place. In
	// a longer one nothing is replaced.
	maxLook = 1 << 20
	// maxNote is up to how many bytes a body is read before it is forwarded, so that the
	// record can name the field in which a placeholder stayed. Longer ones are forwarded
	// while they arrive.
	maxNote = 64 << 10
)

// An exchange is one request and its answer.
type exchange struct {
	s  *session
	w  http.ResponseWriter
	in *http.Request

	r       *outgoing.Request // as it is judged, with sentinels; not changed once the exchange is in Link.running
	secrets []inject.Secret   // of the sandbox; shared, unless a rule has listed a field
	prefix  []byte            // what was read of a body that is not whole
	read    bool              // the body has been read to its end, or there is none
	held    int64             // bytes of Link.buffered
	only    *policy.Only      // the bounds of the rule for the host; nil: none
	upgrade bool              // it asks for a WebSocket
	guarded []inject.Guarded  // whose values are masked in the answer besides those of secrets
	asked   bool              // a person, or the mode of the inbox, let exactly this request go, once

	mu        sync.Mutex
	stays     []inject.Stay // placeholders that leave as text; guarded by mu
	broken    error         // why the program's body could not be read to its end; guarded by mu
	method    string        // why the body ended at a field that names another method; guarded by mu
	begun     bool          // no more interim answers are sent; guarded by mu
	continued sync.Once

	cancel context.CancelCauseFunc
	status int
	bytes  int64
}

// ServeHTTP implements [http.Handler].
func (s *session) ServeHTTP(w http.ResponseWriter, in *http.Request) {
	s.requests.Add(1)
	defer s.requests.Done()
	ctx, cancel := context.WithCancelCause(in.Context())
	defer cancel(nil)
	x := &exchange{s: s, w: w, in: in.WithContext(ctx), cancel: cancel, read: in.ContentLength == 0}
	select {
	case s.l.slots <- struct{}{}:
		defer func() { <-s.l.slots }()
	default:
		x.refuse(ctx, unavailable(fmt.Sprintf("the sandbox has %d requests open, which is the limit", cap(s.l.slots))))
		return
	}
	defer func() {
		s.l.buffered.Add(-x.held)
		s.l.in.buffered.Add(-x.held)
	}()
	if in.ProtoMajor == 1 {
		// Answers may begin before the body has ended, as in HTTP/2.
		_ = http.NewResponseController(w).EnableFullDuplex()
	}
	if r := x.run(ctx); r != nil {
		x.refuse(ctx, r)
	}
}

// run does everything with a request, and returns its refusal if it was not
// forwarded.
func (x *exchange) run(ctx context.Context) *refusal {
	var bad *refusal
	x.upgrade = websocket(x.in)
	if x.r, bad = x.s.read(x.in); bad != nil {
		return bad
	}
	if x.upgrade {
		x.r.Header["Upgrade"] = []string{"websocket"} // a person sees what is asked for
	}
	l := x.s.l
	e := l.egress.Load()
	var err error
	if x.secrets, err = l.secrets(ctx, e); err != nil {
		l.log.ErrorContext(ctx, "secrets of a sandbox cannot be read", "err", err)
		return unavailable("the secrets of the sandbox cannot be read at the moment")
	}
	if rule, ok := e.RuleFor(x.s.conn.Host); ok {
		if bad := x.applyRule(rule); bad != nil {
			return bad
		}
	}
	if limit := x.look(); limit > 0 {
		if bad := x.fill(ctx, limit); bad != nil {
			return bad
		}
	}
	if bad := x.readMethods(ctx); bad != nil {
		return bad
	}
	if bad := x.find(ctx); bad != nil {
		return bad
	}
	if bad := x.judge(ctx); bad != nil {
		return bad
	}
	// Rules may have changed since, or a switch may have been turned on. Either that
	// finds this request registered, or this check finds it.
	x.register()
	defer x.unregister()
	if v := x.mayContinue(ctx); v.Effect != policy.Allow {
		return ruled(v)
	}
	bad = x.forward(ctx)
	if j := l.in.cfg.Judge; bad != nil && j != nil {
		j.Made(context.WithoutCancel(ctx), l.who, x.r, "no answer: "+bad.verdict.Reason)
	}
	return bad
}

// dropCredentials removes what the program itself has put on the request as a
// credential: its own account at the host would be another way out, and a server that
// reads two credentials chooses one.
func (x *exchange) dropCredentials() {
	for name := range x.r.Header {
		if inject.IsCredential(name) {
			delete(x.r.Header, name)
		}
	}
	if x.r.Query == "" {
		return
	}
	kept := slices.DeleteFunc(strings.Split(x.r.Query, "&"), func(pair string) bool {
		name, _, _ := strings.Cut(pair, "=")
		plain, err := url.QueryUnescape(name)
		return err != nil || inject.IsCredential(plain)
	})
	x.r.Query = strings.Join(kept, "&")
}

// within decides on a request by the bounds of its rule, whichever of its methods the
// server reads.
func (x *exchange) within() policy.Verdict {
	if x.only == nil {
		return policy.Verdict{Effect: policy.Allow}
	}
	methods, unknown := x.r.Methods()
	if !slices.ContainsFunc(methods, func(m string) bool { return !x.only.Allows(m, x.r.Path) }) && (unknown == "" || len(x.only.Methods) == 0) {
		return policy.Verdict{Effect: policy.Allow}
	}
	reason := fmt.Sprintf("the rule for %s allows %s of %s only", x.s.conn.Host, cmp.Or(strings.Join(x.only.Methods, ", "), "any method"), cmp.Or(strings.Join(x.only.Paths, ", "), "any path"))
	if unknown != "" {
		reason += ", and a server could read another method from the request, since " + unknown
	}
	return policy.Verdict{Effect: policy.Deny, Reason: reason}
}

// applyRule sets the headers of a rule. Placeholders become sentinels.
func (x *exchange) applyRule(r policy.Rule) *refusal {
	if r.Only != nil {
		x.only = r.Only
		x.dropCredentials()
	}
	for _, name := range slices.Sorted(maps.Keys(r.Headers)) {
		template := r.Headers[name]
		value, missing := x.placeholders(template)
		if missing != "" {
			return denied(fmt.Sprintf("the rule for %s puts %s into the header %s, and this sandbox does not have it", x.s.conn.Host, missing, name))
		}
		set(x.r.Header, name, value)
		x.list(name, template)
		// The attack: a trailer of that name, which some servers merge into the header
		// (RFC 9110 §6.5.1).
		for _, t := range slices.Sorted(maps.Keys(x.in.Trailer)) {
			if plainName(t) == plainName(name) {
				return malformed("the trailer " + clip(t) + " has the name of a header that the sandbox's rules set")
			}
		}
	}
	return nil
}

// list adds a header field that a rule sets to the fields of the secrets that it names:
// whoever wrote the rule has said that this host reads a credential there.
func (x *exchange) list(name, template string) {
	parts, _ := policy.ParseTemplate(template) // it was parsed before
	x.secrets = slices.Clone(x.secrets)
	for i := range x.secrets {
		s := &x.secrets[i]
		if slices.ContainsFunc(parts, func(p policy.Part) bool {
			return s.Name == cmp.Or(p.Secret, p.Token) && (s.Kind == inject.KindToken) == (p.Token != "")
		}) {
			s.RuleHeaders = append(slices.Clone(s.RuleHeaders), http.CanonicalHeaderKey(name))
		}
	}
}

// placeholders replaces the placeholders in a rule's header by sentinels. Missing
// names the first one that stands for nothing.
func (x *exchange) placeholders(template string) (value, missing string) {
	parts, err := policy.ParseTemplate(template)
	if err != nil {
		return "", "a malformed placeholder"
	}
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(p.Text)
		if p.Text != "" {
			continue
		}
		name := cmp.Or(p.Secret, p.Token)
		i := slices.IndexFunc(x.secrets, func(s inject.Secret) bool {
			return s.Name == name && (s.Kind == inject.KindToken) == (p.Token != "") && s.Sentinel != ""
		})
		if i < 0 {
			return "", fmt.Sprintf("the secret or token %q", clip(name))
		}
		b.WriteString(x.secrets[i].Sentinel)
	}
	return b.String(), ""
}

// look returns up to how many bytes of the body are read before the request is
// forwarded; 0 if it is forwarded while it arrives. A program that streams waits for
// answers before it sends more, and a transcript may have any length.
func (x *exchange) look() int {
	switch size := x.r.Size; {
	case x.r.Whole || len(x.secrets) == 0 || strings.HasPrefix(strings.ToLower(x.r.Header.Get("Content-Type")), "application/grpc"):
		return 0
	case inject.InBody(x.r, x.secrets) && (size == outgoing.UnknownSize || size <= maxLook):
		return maxLook
	case size <= maxNote:
		return maxNote
	}
	return 0
}

// fill reads up to limit bytes of the body. If that is all of it, the request is
// whole. A program that sends slower than Limits.Body allows is refused.
func (x *exchange) fill(ctx context.Context, limit int) *refusal {
	if x.r.Whole {
		return nil
	}
	rc := http.NewResponseController(x.w)
	_ = rc.SetReadDeadline(time.Now().Add(x.s.l.in.cfg.Limits.Body))
	defer func() { _ = rc.SetReadDeadline(time.Time{}) }()
	b := x.prefix
	for len(b) <= limit {
		if len(b) == cap(b) {
			size := min(max(4<<10, 2*cap(b)), limit+1)
			if x.r.Size < int64(limit) {
				size = int(x.r.Size) + 1
			}
			size = max(size, len(b)+1)
			if !x.reserve(int64(size - cap(b))) {
				return unavailable("the bodies of the sandbox's open requests need too much memory")
			}
			b = append(make([]byte, 0, size), b...)
		}
		n, err := x.in.Body.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) {
			x.r.Body, x.r.Whole, x.r.Size, x.prefix, x.read = b, true, int64(len(b)), nil, true
			return nil
		}
		if err != nil {
			return malformed("the body of the request did not arrive: " + bodyError(ctx, err))
		}
	}
	x.prefix = b
	return nil
}

func bodyError(ctx context.Context, err error) string {
	if ctx.Err() != nil {
		return "the program has closed the connection"
	}
	return err.Error()
}

// reserve counts bytes in memory. It returns false if the sandbox has too many.
func (x *exchange) reserve(n int64) bool {
	l := x.s.l
	own, all := l.buffered.Add(n), l.in.buffered.Add(n)
	if own > l.in.cfg.Limits.Buffered || all > l.in.cfg.Limits.All {
		l.buffered.Add(-n)
		l.in.buffered.Add(-n)
		return false
	}
	x.held += n
	return true
}

// find finds the secrets of the request, and whose values its answer could have.
func (x *exchange) find(ctx context.Context) *refusal {
	found := inject.Find(x.r, x.secrets)
	if len(found.Foreign) > 0 {
		return x.foreign(found.Foreign)
	}
	x.mu.Lock()
	x.stays = found.Stays
	x.mu.Unlock()
	uses := found.Uses
	x.r.Uses = uses
	if signature, err := inject.ParseSignature(x.r); err == nil && signature != nil && slices.ContainsFunc(uses, func(u outgoing.Use) bool { return u.Sentinel == signature.AccessKey }) {
		// The attack: a program signs now for an hour in which nobody looks.
		if err := signature.CheckTime(time.Now()); err != nil {
			return denied("the AWS signature cannot be made anew: " + err.Error())
		}
	}
	if bad := x.guard(ctx); bad != nil {
		return bad
	}
	if len(x.echoes()) > 0 || len(x.guarded) > 0 {
		x.askPlain(x.r.Header) // before a person sees the request: what he approves is what leaves
	}
	return nil
}

// foreign is the refusal of a request that has a placeholder where a credential stands,
// and where its value must not go.
func (x *exchange) foreign(sentinels []string) *refusal {
	reason := fmt.Sprintf("the request to %s has a placeholder of a secret that does not belong there: %s", x.s.conn.Host, clip(strings.Join(sentinels, ", ")))
	next := "Send the placeholder only to the hosts of its secret. Do not retry."
	if !x.s.conn.TLS && slices.ContainsFunc(x.secrets, func(s inject.Secret) bool {
		return slices.Contains(sentinels, s.Sentinel) && s.Usable(x.s.conn.Host)
	}) {
		reason = fmt.Sprintf("the request to %s is not encrypted, and secrets go over HTTPS only", x.s.conn.Host)
		next = "Use https://" + x.s.conn.Host + " instead."
	}
	return &refusal{kind: Misdirected, status: http.StatusForbidden, verdict: policy.Verdict{Effect: policy.Deny, Reason: reason}, next: next}
}

// echoes returns the secrets whose values the answer could have: those that are put
// into this request, and those that could have been put into an earlier one. The
// attack: one request stores a value at the server, and another, without a secret,
// reads it. An AWS signature does not show the key that made it, and an identity
// token is another one each time.
func (x *exchange) echoes() (out []*inject.Secret) {
	for i := range x.secrets {
		s := &x.secrets[i]
		used := slices.ContainsFunc(x.r.Uses, func(u outgoing.Use) bool { return u.Sentinel == s.Sentinel })
		if s.Kind != inject.KindAWS && (used || s.Kind != inject.KindToken && s.Usable(x.s.conn.Host)) {
			out = append(out, s)
		}
	}
	return out
}

// judge decides on the request, and has people asked.
func (x *exchange) judge(ctx context.Context) *refusal {
	c, who := &x.s.l.in.cfg, x.s.l.who
	if v := x.restricted(); v.Effect != policy.Allow {
		return ruled(v)
	}
	if j, ok := c.Judge.(Reader); ok && !x.upgrade && j.Reads(ctx, who, x.r) {
		if bad := x.whole(ctx); bad != nil {
			return bad
		}
	}
	v := policy.Verdict{Effect: policy.Allow}
	if c.Judge != nil {
		v = c.Judge.Judge(ctx, who, x.r)
	}
	mail := false
	if c.Mail != nil {
		_, mail = mailservice.Match(x.r)
	}
	switch {
	case v.Effect == policy.Allow && !mail:
		return nil
	case v.Effect != policy.Allow && v.Effect != policy.Ask:
		return ruled(v)
	}
	if bad := x.whole(ctx); bad != nil {
		return bad
	}
	if v.Effect == policy.Allow && c.Judge != nil { // the whole body can have more secrets than its beginning
		if v = c.Judge.Judge(ctx, who, x.r); v.Effect != policy.Allow && v.Effect != policy.Ask {
			return ruled(v)
		}
	}
	if v.Effect == policy.Ask {
		if v = c.Judge.Hold(ctx, who, x.r, v); v.Effect != policy.Allow {
			return ruled(v)
		}
		x.asked = true
	}
	if mail {
		if v = c.Mail.Propose(ctx, who, x.r); v.Effect != policy.Allow {
			return ruled(v)
		}
		x.asked = true
	}
	return nil
}

// whole reads the body of a request that a person sees.
func (x *exchange) whole(ctx context.Context) *refusal {
	if len(x.in.Trailer) > 0 {
		return malformed("a request that a person decides on cannot have trailers")
	}
	if x.r.Whole {
		return nil
	}
	if x.r.Size != outgoing.UnknownSize && x.r.Size > outgoing.MaxBody {
		return refuse(http.StatusRequestEntityTooLarge, fmt.Sprintf("a person decides on this request, and its body is longer than %d bytes", outgoing.MaxBody))
	}
	if bad := x.fill(ctx, outgoing.MaxBody); bad != nil {
		return bad
	}
	if !x.r.Whole {
		return refuse(http.StatusRequestEntityTooLarge, fmt.Sprintf("a person decides on this request, and its body is longer than %d bytes", outgoing.MaxBody))
	}
	x.r.ReadMethods()
	// The whole body can have sentinels that its beginning has not.
	return x.find(ctx)
}

// restricted asks the bounds of the rule, and the connection's own permit.
func (x *exchange) restricted() policy.Verdict {
	if v := x.within(); v.Effect != policy.Allow {
		return v
	}
	if f := x.s.conn.Restrict; f != nil {
		return f(x.r)
	}
	return policy.Verdict{Effect: policy.Allow}
}

// mayContinue decides on a request under way.
func (x *exchange) mayContinue(ctx context.Context) policy.Verdict {
	if v := x.restricted(); v.Effect != policy.Allow {
		return v
	}
	if j := x.s.l.in.cfg.Judge; j != nil {
		return j.MayContinue(ctx, x.s.l.who, x.r)
	}
	return policy.Verdict{Effect: policy.Allow}
}

// register makes the request known to Recheck and Update.
func (x *exchange) register() {
	l := x.s.l
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running[x] = struct{}{}
}

func (x *exchange) unregister() {
	l := x.s.l
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.running, x)
}

// rest returns what is forwarded as the body.
func (x *exchange) rest(whole []byte) (io.Reader, int64) {
	switch {
	case x.r.Whole:
		if len(whole) == 0 {
			return http.NoBody, 0
		}
		return bytes.NewReader(whole), int64(len(whole))
	case len(x.secrets) > 0:
		return &sentinelScan{r: io.MultiReader(bytes.NewReader(x.prefix), programBody{x}), secrets: x.secrets, found: func(s *inject.Secret) { x.stayed(s, "body") }}, x.in.ContentLength
	case len(x.prefix) > 0:
		return io.MultiReader(bytes.NewReader(x.prefix), programBody{x}), x.in.ContentLength
	default:
		return programBody{x}, x.in.ContentLength
	}
}

// A programBody is the body that a program sends. It notes why it broke off.
type programBody struct{ x *exchange }

// Read implements [io.Reader].
func (b programBody) Read(p []byte) (int, error) {
	if b.x.in.ProtoMajor == 1 && b.x.in.Header.Get("Expect") != "" {
		// The server outside wants the body. net/http would write this answer itself, and
		// not notice that another interim answer is being written.
		b.x.continued.Do(func() { b.x.interim(http.StatusContinue, nil) })
	}
	n, err := b.x.in.Body.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.x.mu.Lock()
		b.x.broken = err
		b.x.mu.Unlock()
	}
	return n, err
}
