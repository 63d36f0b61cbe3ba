package build

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
)

// defaultTag is the tag of names without one.
const defaultTag = "default"

// The longest names and tags, in bytes.
const (
	maxName = 128
	maxTag  = 128
	maxTags = 32 // of one request
)

// reserved are names of the server's own templates, including templates that this
// version does not have: a project's template must not hide a later one.
var reserved = [...]string{"base", "base-slim", "slim", "code-interpreter", "code-interpreter-v1", "desktop", "mcp-gateway"}

// A name is a client's name for a template or for one build of it.
type name struct {
	team string // namespace; empty means none
	base string // name or ID
	tag  string // empty means none
}

// parseName parses "n", "n:tag", "team/n" and "team/n:tag". Like E2B, it converts upper
// case to lower case and allows the same characters.
func parseName(s string) (n name, err error) {
	s = strings.ToLower(strings.TrimSpace(s))
	rest := s
	if team, after, ok := strings.Cut(rest, "/"); ok {
		n.team, rest = team, after
		if team == "" || len(team) > maxName {
			return name{}, fmt.Errorf("%w: name: %.200q has no namespace of 1 to %d bytes before the slash", ErrInvalid, s, maxName)
		}
	}
	base, tag, tagged := strings.Cut(rest, ":")
	n.base, n.tag = base, tag
	if base == "" || len(base) > maxName || strings.Trim(base, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
		return name{}, fmt.Errorf("%w: name: %.200q: want 1 to %d letters, digits, - and _", ErrInvalid, s, maxName)
	}
	if tagged {
		if n.tag, err = parseTag(tag); err != nil {
			return name{}, err
		}
	}
	return n, nil
}

// parseTag validates a tag and returns it in lower case.
func parseTag(s string) (string, error) {
	s = strings.ToLower(strings.TrimSpace(s))
	if s == "" || len(s) > maxTag || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
		return "", fmt.Errorf("%w: tag: %.200q: want 1 to %d letters, digits and any of ._-", ErrInvalid, s, maxTag)
	}
	return s, nil
}

// parseTags validates tags that a caller wants to assign. A UUID is not allowed: the ID of
// a build already names that build.
func parseTags(tags []string) (out []string, err error) {
	if len(tags) > maxTags {
		return nil, fmt.Errorf("%w: tags: %d tags, at most %d are allowed", ErrInvalid, len(tags), maxTags)
	}
	seen := map[string]bool{}
	for _, t := range tags {
		if t, err = parseTag(t); err != nil {
			return nil, err
		}
		if isUUID(t) {
			return nil, fmt.Errorf("%w: tag: %q is a UUID; choose another tag", ErrInvalid, t)
		}
		if !seen[t] {
			seen[t] = true
			out = append(out, t)
		}
	}
	return out, nil
}

// newUUID returns a random UUID (RFC 9562, version 4).
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// isUUID reports whether s has the form of a UUID in lower case.
func isUUID(s string) bool {
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return false
	}
	return isHex(strings.ReplaceAll(s, "-", ""), 32)
}

// isHex reports whether s is n hexadecimal digits in lower case.
func isHex(s string, n int) bool {
	return len(s) == n && strings.Trim(s, "0123456789abcdef") == ""
}

// newID returns the ID of a new template.
func newID() string { return strings.ToLower(rand.Text()[:20]) }

// templatePrefix begins the template IDs that package sandbox uses for builds.
const templatePrefix = "b"

// SandboxID returns the template ID that package sandbox uses for a build.
func SandboxID(build string) string { return templatePrefix + strings.ReplaceAll(build, "-", "") }

// ParseSandboxID is the inverse of [SandboxID]. It reports false for any other ID, such as
// those of the server's own templates.
func ParseSandboxID(id string) (build string, ok bool) {
	h, ok := strings.CutPrefix(id, templatePrefix)
	if !ok || !isHex(h, 32) {
		return "", false
	}
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:], true
}

// clean makes text of a client or a sandbox fit for a log line: valid UTF-8 without control
// characters, with at most most bytes.
func clean(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.Map(func(r rune) rune {
		if r != '\t' && unicode.IsControl(r) || r == unicode.ReplacementChar {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
}
