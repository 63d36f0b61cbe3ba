package secret

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"postern/internal/policy"
)

// The limits of secrets.
const (
	maxSecrets  = 1000     // of a project
	maxHosts    = 10       // of a secret
	MinValue    = 8        // bytes of a value; a shorter one is found by chance in answers, and guessed
	MaxValue    = 16 << 10 // bytes of a value; more than the servers of the Internet take in one header
	maxEntries  = 32       // of metadata, as in E2B
	maxKey      = 128      // bytes of a key of metadata
	maxEntry    = 1024     // bytes of a value of metadata
	maxMetadata = 8192     // bytes of a secret's metadata
)

// idPrefix begins IDs. Names cannot begin with it, as in E2B.
const idPrefix = "sec_"

var (
	namePattern      = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9_-]{1,64}$`) })
	envPattern       = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`) })
	accessKeyPattern = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Z0-9]{16,128}$`) })
)

// checkName checks a name in lower case.
func checkName(name string) error {
	if !namePattern().MatchString(name) {
		return fmt.Errorf("%w: name: want 1 to 64 letters, digits, _ and -", ErrInvalid)
	}
	if strings.HasPrefix(name, idPrefix) {
		return fmt.Errorf("%w: name: %s begins the IDs of secrets; choose another", ErrInvalid, idPrefix)
	}
	return nil
}

// EnvOf returns the environment variable of a secret that names none: its name in
// capitals, with _ for -.
func EnvOf(name string) string {
	env := strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
	if env[0] >= '0' && env[0] <= '9' {
		env = "_" + env
	}
	return env
}

func checkEnv(env string) error {
	if !envPattern().MatchString(env) {
		return fmt.Errorf("%w: env: want 1 to 128 letters, digits and _, and no digit first", ErrInvalid)
	}
	return nil
}

// checkHosts returns hosts in lower case, sorted, each once.
func checkHosts(hosts []string) ([]string, error) {
	var out []string
	for i, h := range hosts {
		below, wild := strings.CutPrefix(strings.TrimSpace(h), "*.")
		n, err := policy.Name(below)
		if err != nil {
			return nil, fmt.Errorf(`%w: hosts[%d]: want a host name or "*." and a host name, without scheme, port and path: %w`, ErrInvalid, i, err)
		}
		if wild {
			// The attack, or the mistake: a value for every host of a top-level domain.
			if !strings.Contains(n, ".") {
				return nil, fmt.Errorf("%w: hosts[%d]: *.%s is a whole top-level domain; name hosts below it", ErrInvalid, i, n)
			}
			n = "*." + n
		}
		out = append(out, n)
	}
	slices.Sort(out)
	out = slices.Compact(out)
	if len(out) > maxHosts {
		return nil, fmt.Errorf("%w: hosts: %d hosts; at most %d are allowed", ErrInvalid, len(out), maxHosts)
	}
	return out, nil
}

func checkMetadata(m map[string]string) error {
	size := 0
	for _, k := range slices.Sorted(maps.Keys(m)) {
		v := m[k]
		if k == "" || len(k) > maxKey || len(v) > maxEntry {
			return fmt.Errorf("%w: metadata: keys have 1 to %d bytes and values at most %d", ErrInvalid, maxKey, maxEntry)
		}
		if !utf8.ValidString(k) || !utf8.ValidString(v) || strings.ContainsRune(k+v, 0) {
			return fmt.Errorf("%w: metadata: want UTF-8 without NUL", ErrInvalid)
		}
		size += len(k) + len(v)
	}
	if len(m) > maxEntries || size > maxMetadata {
		return fmt.Errorf("%w: metadata: %d entries and %d bytes; at most %d entries and %d bytes are allowed", ErrInvalid, len(m), size, maxEntries, maxMetadata)
	}
	return nil
}

// check checks a value for a kind. The errors have no part of it.
func (v Value) check(kind Kind) error {
	switch kind {
	case Plain:
		if v.AccessKey != "" || v.SessionToken != "" {
			return fmt.Errorf("%w: value: an access key ID and a session token are for secrets of kind aws", ErrInvalid)
		}
		return checkText("value", v.Text.Reveal(), MinValue)
	case AWS:
		if !accessKeyPattern().MatchString(v.AccessKey) {
			return fmt.Errorf("%w: access_key_id: want 16 to 128 capitals and digits, such as AKIAIOSFODNN7EXAMPLE", ErrInvalid)
		}
		if v.SessionToken != "" {
			if err := checkText("session_token", v.SessionToken.Reveal(), MinValue); err != nil {
				return err
			}
		}
		return checkText("secret_access_key", v.Text.Reveal(), 16)
	}
	return fmt.Errorf("%w: kind: %.40q is not value or aws", ErrInvalid, kind)
}

// checkText checks a value that goes into a header, a URL or a body. The attack:
// CR and LF in a header begin another header or another request.
func checkText(field, s string, least int) error {
	switch {
	case len(s) < least || len(s) > MaxValue:
		return fmt.Errorf("%w: %s: has %d bytes; want %d to %d", ErrInvalid, field, len(s), least, MaxValue)
	case !utf8.ValidString(s):
		return fmt.Errorf("%w: %s: is not UTF-8; encode it, for example as base64", ErrInvalid, field)
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Errorf("%w: %s: has a control character, such as an end of line, which no header can hold; encode it, for example as base64", ErrInvalid, field)
	case strings.TrimSpace(s) != s:
		return fmt.Errorf("%w: %s: begins or ends with white space, which a header loses", ErrInvalid, field)
	case strings.Contains(s, sentinelPrefix) && sentinelForm().MatchString(s):
		return fmt.Errorf("%w: %s: contains a sentinel, which stands for a secret; give the value itself", ErrInvalid, field)
	}
	return nil
}

// sentinelForm matches sentinels of values.
var sentinelForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(sentinelPrefix + `[a-z2-7]{40}`) })
