package outgoing

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxMethods bounds the methods of one request.
const maxMethods = 8

// Methods returns every method that a server could read from r, each once, that of the
// request line first. Unknown says why there may be more, and is empty if there are not.
//
// Servers take the method from these places, most of them for POST alone:
//
//   - X-HTTP-Method-Override: Rack, Symfony and Laravel, Yii, CakePHP, Express,
//     ASP.NET Core, Google's APIs. X-HTTP-Method: OData, SharePoint.
//     X-Method-Override: IBM. A CGI reads underscores as dashes.
//   - _method in a form, with or without files: Rack, Symfony and Laravel, Yii, CakePHP,
//     Spring. In JSON: Laravel. In the query: Symfony and Laravel, Spring, Express.
//   - X-HTTP-Method-Override in a form or in the query: ASP.NET MVC.
//   - method in a form or in the query: Facebook. $httpMethod and $httpHeaders in the
//     query: Google.
//
// So this is no list of names: each name that is made of words such as "x", "http",
// "method" and "override" counts, in each of these places, for any request method.
func (r *Request) Methods() (methods []string, unknown string) {
	f := found{methods: []string{r.Method}}
	for _, name := range slices.Sorted(maps.Keys(r.Header)) {
		for _, v := range r.Header[name] {
			f.header(name, v)
		}
	}
	if r.Query != "" {
		s := formScan{found: &f}
		s.write([]byte(r.Query))
		s.end()
	}
	if charset := r.charset(); charset != "" {
		f.doubt("its character set " + charset + " is not known here")
	}
	b := r.inBody()
	for _, m := range b.methods {
		f.add(m)
	}
	f.doubt(b.unknown)
	return f.methods, f.unknown
}

// ReadMethods has [Request.Methods] remember what the body says, so that a long one is
// read once. It must not be called concurrently with anything else.
func (r *Request) ReadMethods() { r.read = &readBody{r.Whole, r.Watched, len(r.Body), r.inBody()} }

// A readBody is what a body says about methods, and the body that said it.
type readBody struct {
	whole, watched bool
	size           int
	found          found
}

// inBody returns the methods in the body of r.
func (r *Request) inBody() found {
	if c := r.read; c != nil && c.whole == r.Whole && c.watched == r.Watched && c.size == len(r.Body) {
		return c.found
	}
	s := NewMethodScan(r)
	switch {
	case s == nil || r.Whole && len(r.Body) == 0:
		return found{}
	case s.found.unknown != "": // whatever the body has
		return *s.found
	case !r.Whole && r.Watched:
		return found{}
	case !r.Whole:
		return found{unknown: "its body has not been read to the end"}
	}
	_, _ = s.Write(r.Body)
	s.End()
	return *s.found
}

// charset returns a character set of r in which a name could look different from what it
// is, or an empty text. The attack: a form in UTF-16 or UTF-7, of which a server that
// obeys the type reads names that nobody else sees.
func (r *Request) charset() string {
	for _, v := range r.values("content-type") {
		v = strings.ToLower(v)
		for {
			_, rest, ok := strings.Cut(v, "charset")
			if !ok {
				break
			}
			v = rest
			name, _, _ := strings.Cut(strings.TrimLeft(rest, " \t*="), ";")
			name, _, _ = strings.Cut(name, ",")
			if name = strings.Trim(name, " \t\"'"); !plainCharset(name) {
				return clip(name)
			}
		}
	}
	return ""
}

// plainCharset reports whether ASCII characters are single bytes of their own in a
// character set, and nothing else looks like one.
func plainCharset(name string) bool {
	name, _, _ = strings.Cut(name, "''") // RFC 8187
	switch name = strings.NewReplacer("-", "", "_", "").Replace(strings.ToLower(strings.TrimSpace(name))); name {
	case "", "utf8", "ascii", "usascii", "latin1", "binary":
		return true
	}
	return strings.HasPrefix(name, "iso8859") || strings.HasPrefix(name, "windows125")
}

// values returns the values of a header field in every spelling of its name.
func (r *Request) values(plain string) (out []string) {
	for name, values := range r.Header {
		if strings.ReplaceAll(strings.ToLower(name), "_", "-") == plain {
			out = append(out, values...)
		}
	}
	return out
}

// A found is what was found about methods.
type found struct {
	methods []string
	unknown string // why there may be more
}

func (f *found) doubt(why string) {
	if f.unknown == "" {
		f.unknown = why
	}
}

func (f *found) add(method string) {
	switch {
	case slices.Contains(f.methods, method):
	case len(f.methods) >= maxMethods:
		f.doubt("it names too many methods")
	default:
		f.methods = append(f.methods, method)
	}
}

// header notes a field of a header.
func (f *found) header(name, value string) {
	if n := overrideName(name); n != no {
		f.value(value, n == surely)
	}
}

// value notes the value of a field that names a method. If it surely does, any word
// is one. Otherwise a known method counts: payloads have a "method", too.
func (f *found) value(v string, sure bool) {
	v = strings.ToUpper(v) // also of ı and ſ, as servers do
	if !sure {
		for m := range strings.FieldsFuncSeq(v, func(c rune) bool { return c == ',' || c == '\r' || c == '\n' }) {
			if m = strings.Trim(m, " \t\"'\x00"); knownMethod(m) {
				f.add(m)
			}
		}
		return
	}
	if strings.ContainsFunc(v, func(c rune) bool { return c > '~' || c < ' ' && c != '\t' && c != '\r' && c != '\n' }) {
		f.doubt("it names a method in characters that no method has")
		return
	}
	for m := range strings.FieldsFuncSeq(v, func(c rune) bool { return (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' }) {
		if len(m) > 32 {
			f.doubt("it names a method that is too long")
			return
		}
		f.add(m)
	}
}

func knownMethod(m string) bool {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions, http.MethodTrace, http.MethodConnect,
		"MERGE", "COPY", "MOVE", "MKCOL", "PROPFIND", "PROPPATCH", "LOCK", "UNLOCK", "PURGE":
		return true
	}
	return false
}

// A naming says whether a field names the method of its request.
type naming int

const (
	no naming = iota
	maybe
	surely
)

// overrideName says whether a field with this name, in a header, a query or a body, names
// the method of its request. Frameworks read nested names ("_method[]", "[_method]"), PHP
// reads "." as "_" and nothing after a zero byte, and ASP.NET knows no case.
func overrideName(name string) naming {
	best := no
	for range 3 { // encoded once more than the place asks for
		best = max(best, overrideOnce(name))
		d := decode(name)
		if d == name {
			break
		}
		name = d
	}
	return best
}

func overrideOnce(name string) naming {
	base := strings.TrimLeft(name, "[] +\t$\"'\\\x00")
	i := strings.IndexFunc(base, func(c rune) bool {
		return c >= utf8.RuneSelf || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
	})
	if i < 0 || base[i] < utf8.RuneSelf && !strings.ContainsRune("aefhmortvx", rune(base[i]|0x20)) {
		return no // no word begins with it: most names are done here
	}
	if j := strings.IndexAny(base, "[]\x00"); j >= 0 {
		base = base[:j]
	}
	plain := fold(base)
	rest, method := words(plain)
	switch {
	case rest != "" || !method:
		return no
	case base[0] == '_' || base[0] == '.' || strings.Contains(plain, "overrid") || plain[0] == 'x':
		return surely
	}
	return maybe
}

// fold returns the letters and digits of s in lower case.
func fold(s string) string {
	return strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			return c
		}
		return -1
	}, strings.ToLower(strings.ToUpper(s)))
}

// words cuts the words of which names for the method are made off the beginning of a folded
// name, and reports whether the method itself was among them.
func words(s string) (rest string, method bool) {
next:
	for s != "" {
		for _, w := range methodWords() {
			if after, ok := strings.CutPrefix(s, w); ok {
				s, method = after, method || w == "method" || w == "verb"
				continue next
			}
		}
		break
	}
	return s, method
}

// methodWords are words of names for the method of a request. Of two that begin alike, the
// longer one is first.
func methodWords() []string {
	return []string{
		"method", "verb", "override", "overriding", "http", "x", "requested", "request", "req", "original", "orig", "forwarded", "real", "actual", "effective", "tunneled", "tunnel",
		"rest", "form", "html",
	}
}

// decode decodes percent-encoding as lenient servers do: what is malformed stays, and %uXXXX
// is a character.
func decode(s string) string {
	if !strings.ContainsAny(s, "%+") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '+':
			b.WriteByte(' ')
		case s[i] == '%' && i+5 < len(s) && (s[i+1] == 'u' || s[i+1] == 'U'):
			n, ok := hexNumber(s[i+2 : i+6])
			if !ok {
				b.WriteByte('%')
				continue
			}
			b.WriteRune(n)
			i += 5
		case s[i] == '%' && i+2 < len(s):
			n, ok := hexNumber(s[i+1 : i+3])
			if !ok {
				b.WriteByte('%')
				continue
			}
			b.WriteByte(byte(n))
			i += 2
		default:
			b.WriteByte(s[i])
		}
	}
	return b.String()
}

func hexNumber(s string) (n rune, ok bool) {
	for i := range len(s) {
		switch c := s[i]; {
		case '0' <= c && c <= '9':
			n = n<<4 | rune(c-'0')
		case 'a' <= c && c <= 'f':
			n = n<<4 | rune(c-'a'+10)
		case 'A' <= c && c <= 'F':
			n = n<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	return n, true
}

// clip returns a short form of a text of the sandbox, for a message.
func clip(s string) string { return url.QueryEscape(s[:min(len(s), 40)]) }

// OverrideField reports whether a header field of this name could change how a server reads
// the rest of its request: the method, see [Request.Methods], or the address, see
// [RoutingField].
func OverrideField(name string) bool { return overrideName(name) != no || RoutingField(name) }

// RoutingField reports whether some servers take the path or the host of a request from a
// header field of this name: X-Original-URL and X-Rewrite-URL (IIS, Symfony, Zend),
// X-Forwarded-Host and Forwarded (almost all frameworks), X-Forwarded-Prefix (Spring),
// X-Script-Name. They are for a proxy in front of the server, and a sandbox is none.
func RoutingField(name string) bool {
	plain := fold(name)
	if plain == "forwarded" {
		return true
	}
	places := []string{"url", "uri", "path", "prefix", "host", "server", "scriptname", "pathinfo"}
	vias := []string{
		"x", "http", "original", "orig", "forwarded", "forward", "rewritten", "rewrite", "override", "real", "requested", "request", "proxy", "envoy", "ms", "waws", "unencoded", "raw", "base",
	}
	place, via := false, false
next:
	for plain != "" {
		for _, w := range places {
			if after, ok := strings.CutPrefix(plain, w); ok {
				plain, place = after, true
				continue next
			}
		}
		for _, w := range vias {
			if after, ok := strings.CutPrefix(plain, w); ok {
				plain, via = after, true
				continue next
			}
		}
		return false
	}
	return place && via
}
