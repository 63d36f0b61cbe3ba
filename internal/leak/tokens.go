package leak

import (
	_ "embed"
	"encoding/base64"
	"fmt"
	"hash/crc32"
	"strings"
	"sync"

	"postern/internal/extract"
)

// The alphabets of tokens.
const (
	digits = "0123456789"
	lowHex = digits + "abcdef"
	upper  = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	lower  = "abcdefghijklmnopqrstuvwxyz"
	alnum  = upper + lower + digits
)

// charsets are the names of alphabets in patterns.
var charsets = map[string]string{
	"digit": digits, "hex": lowHex, "HEX": lowHex + "ABCDEF", "upper": upper + digits, "lower": lower + digits,
	"alnum": alnum, "alnum-": alnum + "-", "alnum/": alnum + "/", "word": alnum + "_", "dotted": alnum + "-_.",
	"url": alnum + "-_", "url=": alnum + "-_=", "url%": alnum + "-_%", "url/": alnum + "-_/", "url/@": alnum + "-_/@",
	"base32": upper + "234567", "low32": lower + "234567", "bech32": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
	"base64": alnum + "+/", "base64=": alnum + "+/=", "base64_": alnum + "+/=_",
	"azure": alnum + "-_~.", "query": alnum + "-_%=&:.", "sig": alnum + "-_%=+/",
}

// tokenText is the table of tokens. Its head says how a rule is written.
//
//go:embed tokens.txt
var tokenText string

// A tokenRule describes the tokens of one service, so that they are found
// whatever stands around them.
type tokenRule struct {
	id       string // the name of the finding, for programs
	what     string // what the token is, for people
	patterns []string
	near     []string                   // words of which one must stand shortly before the token; none if the pattern is distinctive
	check    func(token string) verdict // nil if the token has neither checksum nor structure

	match []string // texts in which the rule must find a token
	not   []string // texts in which it must not
}

// checks are the functions that a rule may name.
var checks = map[string]func(string) verdict{"checksum62": checksum62, "jsonWebToken": jsonWebToken, "mixed": mixed}

// readTokenRules parses the table. A malformed line is an error that names it.
func readTokenRules(text string) (rules []tokenRule, err error) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimRight(line, "\n")
		if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#") {
			continue
		}
		field, indented := strings.CutPrefix(line, "\t")
		if !indented {
			id, what, ok := strings.Cut(line, ": ")
			if !ok {
				return nil, fmt.Errorf("line %d: %q is not an ID and a description", n, line)
			}
			rules = append(rules, tokenRule{id: id, what: what})
			continue
		}
		name, value, ok := strings.Cut(field, "\t")
		if !ok || value == "" || len(rules) == 0 {
			return nil, fmt.Errorf("line %d: %q is not a name, a tab and a value", n, line)
		}
		r := &rules[len(rules)-1]
		switch name {
		case "pattern":
			r.patterns = append(r.patterns, value)
		case "near":
			r.near = strings.Split(value, " | ")
		case "check":
			if r.check = checks[value]; r.check == nil {
				return nil, fmt.Errorf("line %d: no check is named %q", n, value)
			}
		case "match":
			r.match = append(r.match, value)
		case "not":
			r.not = append(r.not, value)
		default:
			return nil, fmt.Errorf("line %d: %q is not pattern, near, check, match or not", n, name)
		}
	}
	return rules, nil
}

// A verdict is what a check says of a token.
type verdict int

const (
	likely  verdict = iota // it depends on the randomness of the token
	certain                // a checksum is right
	refuted                // it is something else
)

// checksum62 checks tokens of GitHub and npm, which end in the CRC-32 of the
// rest in base 62. A wrong checksum refutes nothing: older tokens have none.
func checksum62(token string) verdict {
	_, body, _ := strings.Cut(token, "_")
	const base62 = digits + upper + lower
	sum, out := crc32.ChecksumIEEE([]byte(body[:len(body)-6])), make([]byte, 6)
	for i := 5; i >= 0; i-- {
		out[i] = base62[sum%62]
		sum /= 62
	}
	if string(out) == body[len(body)-6:] {
		return certain
	}
	return likely
}

// jsonWebToken accepts three parts of which the first is a JSON header with a
// signature algorithm (RFC 7519). Unsigned tokens open nothing.
func jsonWebToken(token string) verdict {
	parts := strings.Split(token, ".")
	if len(parts) != 3 || len(parts[1]) < 4 || len(parts[2]) < 16 {
		return refuted
	}
	header, err := base64.RawURLEncoding.DecodeString(parts[0])
	if err != nil || !strings.Contains(string(header), `"alg"`) || strings.Contains(strings.ToLower(string(header)), `"none"`) {
		return refuted
	}
	return certain
}

// mixed refutes what has letters of one case only, such as a hash.
func mixed(token string) verdict {
	if strings.ContainsAny(token, upper) && strings.ContainsAny(token, lower) {
		return likely
	}
	return refuted
}

const (
	minEntropy = 2.8 // bits in each character; random tokens have 3.5 and more, "xxxxxxxx" and "YOUR_KEY_HERE" less
	nearby     = 80  // bytes between a word of near and the token
	minToken   = 18  // bytes of the shortest token that begins with a literal
)

// A segment is a part of a pattern: a literal, or characters of a set.
type segment struct {
	literal  string
	set      string
	min, max int
}

// A pattern is a sequence of segments.
type pattern struct {
	rule     *tokenRule
	segments []segment
	mark     int // the longest literal, by which it is found; -1 if there is none
}

// tokenIndex is the table, ready for use.
type tokenIndex struct {
	byPrefix map[string][]pattern // patterns that begin with a literal of token characters, by its first two bytes
	byMark   []pattern            // patterns with another literal
	byWord   []named              // patterns that need a word nearby
}

// named are the patterns that need one word nearby.
type named struct {
	word     string
	patterns []pattern
}

// tokenPatterns reads the table at its first use: each process of a sandbox is
// this program, and most never scan.
var tokenPatterns = sync.OnceValue(func() *tokenIndex {
	rules, err := readTokenRules(tokenText)
	if err != nil {
		panic(err) // unreachable: a test reads it
	}
	x := &tokenIndex{byPrefix: map[string][]pattern{}}
	for i := range rules {
		if err := x.add(&rules[i]); err != nil {
			panic(err) // unreachable: a test reads it
		}
	}
	return x
})

// add compiles the patterns of a rule into the index.
func (x *tokenIndex) add(r *tokenRule) error {
	var all []pattern
	for _, text := range r.patterns {
		p, err := compile(r, text)
		if err != nil {
			return err
		}
		all = append(all, p)
	}
	if len(r.near) > 0 {
		for _, w := range r.near {
			x.byWord = append(x.byWord, named{w, all})
		}
		return nil
	}
	for _, p := range all {
		first := p.segments[0].literal
		if len(first) > 1 && strings.Trim(first, alnum+"-_.~") == "" {
			x.byPrefix[first[:2]] = append(x.byPrefix[first[:2]], p)
		} else {
			x.byMark = append(x.byMark, p)
		}
	}
	return nil
}

// compile parses a pattern of the table.
func compile(r *tokenRule, text string) (pattern, error) {
	p := pattern{rule: r, mark: -1}
	for text != "" {
		literal, rest, found := strings.Cut(text, "{")
		if literal != "" {
			if p.mark < 0 || len(literal) > len(p.segments[p.mark].literal) {
				p.mark = len(p.segments)
			}
			p.segments = append(p.segments, segment{literal: literal})
		}
		if !found {
			break
		}
		class, after, closed := strings.Cut(rest, "}")
		name, length, _ := strings.Cut(class, ":")
		low, high, ranged := strings.Cut(length, "-")
		if !ranged {
			high = low
		}
		s := segment{set: charsets[name], min: int(number(low)), max: int(number(high))}
		if !closed || s.set == "" || s.max < s.min || s.max == 0 {
			return p, fmt.Errorf("%s: malformed pattern at %q", r.id, "{"+rest)
		}
		p.segments = append(p.segments, s)
		text = after
	}
	if len(p.segments) == 0 || p.mark < 0 && len(r.near) == 0 {
		return p, fmt.Errorf("%s: a pattern needs a literal, or a word nearby", r.id)
	}
	return p, nil
}

// at returns where a token of p begins and ends whose segment number mark begins
// at i of text, or to 0. The token is not part of a longer run of its characters.
func (p pattern) at(text string, mark, i int) (from, to int) {
	from, to = i, i
	for k := mark - 1; k >= 0; k-- {
		s := p.segments[k]
		if s.literal != "" {
			if !strings.HasSuffix(text[:from], s.literal) {
				return 0, 0
			}
			from -= len(s.literal)
			continue
		}
		n := 0
		for from > 0 && (n < s.max || k == 0 && n == s.max) && strings.IndexByte(s.set, text[from-1]) >= 0 {
			from--
			n++
		}
		if n < s.min || n > s.max {
			return 0, 0
		}
	}
	for k := mark; k < len(p.segments); k++ {
		s := p.segments[k]
		if s.literal != "" {
			if !strings.HasPrefix(text[to:], s.literal) {
				return 0, 0
			}
			to += len(s.literal)
			continue
		}
		n, last := 0, k == len(p.segments)-1
		for to < len(text) && (n < s.max || last && n == s.max) && strings.IndexByte(s.set, text[to]) >= 0 {
			to++
			n++
		}
		for last && n > 0 && text[to-1] == '.' { // the end of a sentence
			to--
			n--
		}
		if n < s.min || n > s.max {
			return 0, 0
		}
	}
	return from, to
}

// judge reports text[from:to] unless it is a placeholder or refuted.
func (p pattern) judge(text string, from, to int, found func(match)) bool {
	token, detail := text[from:to], p.rule.what
	v := likely
	if p.rule.check != nil {
		v = p.rule.check(token)
	}
	switch v {
	case refuted:
		return false
	case certain:
		detail += ", valid"
	case likely:
		random := token
		for _, s := range p.segments {
			random = strings.Replace(random, s.literal, "", 1)
		}
		if extract.Entropy(random) < minEntropy || placeholder(random) {
			return false
		}
	}
	found(match{from, to, FlagSecret, p.rule.id, detail})
	return true
}

// tokens finds tokens by what they begin with.
func tokens(text string, found func(match)) {
	x := tokenPatterns()
	for i := 0; i < len(text); {
		if !tokenByte(text[i]) {
			i++
			continue
		}
		from := i
		for i < len(text) && (tokenByte(text[i]) || text[i] == '.') {
			i++
		}
		if i-from < 2 || len(text)-from < minToken {
			continue
		}
		for _, p := range x.byPrefix[text[from:from+2]] {
			if _, to := p.at(text, 0, from); to > 0 && p.judge(text, from, to, found) {
				break
			}
		}
	}
}

// markedTokens finds tokens that do not begin with what they are known by.
func markedTokens(text string, found func(match)) {
	for _, p := range tokenPatterns().byMark {
		mark := p.segments[p.mark].literal
		for i := 0; ; {
			j := strings.Index(text[i:], mark)
			if j < 0 {
				break
			}
			i += j
			if from, to := p.at(text, p.mark, i); to > 0 {
				p.judge(text, from, to, found)
			}
			i += len(mark)
		}
	}
}

// credentialWords say that a key follows. A name of a service alone does not:
// hashes and identifiers follow those, too.
var credentialWords = []string{"key", "token", "secret", "auth", "credential", "password", "="}

// namedTokens finds tokens that only the name of their service tells from a hash
// or an identifier.
func namedTokens(text string, found func(match)) {
	low := lowerASCII(text)
	for _, n := range tokenPatterns().byWord {
		for i := 0; ; {
			j := strings.Index(low[i:], n.word)
			if j < 0 {
				break
			}
			start := i + j
			i = start + len(n.word)
			if start > 0 && tokenByte(low[start-1]) && low[start-1] != '_' && low[start-1] != '-' { // "laws" is not "aws"
				continue
			}
			end := min(len(text), i+nearby)
			for at := announced(low, max(0, i-nearby/2), end); at < end; at++ {
				if at < i || tokenByte(text[at-1]) {
					continue
				}
				for _, p := range n.patterns {
					if strings.IndexByte(p.segments[0].set, text[at-1]) >= 0 {
						continue
					}
					if _, to := p.at(text, 0, at); to > 0 && (to == len(text) || !tokenByte(text[to])) && p.judge(text, at, to, found) {
						break
					}
				}
			}
		}
	}
}

// announced returns where the first credential word of low[from:to] ends, or to.
func announced(low string, from, to int) int {
	first := to
	for _, w := range credentialWords {
		if i := strings.Index(low[from:first], w); i >= 0 {
			first = from + i + len(w)
		}
	}
	return first
}
