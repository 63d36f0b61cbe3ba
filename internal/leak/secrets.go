package leak

import (
	"strings"

	"postern/internal/extract"
)

// secretSearches find secrets in the words of a text; keyBlocks, which needs the
// whole text, does so before it is decoded.
var secretSearches = []search{tokens, markedTokens, namedTokens, assignments, sentences, credentialURLs}

func tokenByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

// placeholder says whether a value stands for one to be filled in, as in
// instructions.
func placeholder(s string) bool {
	low := strings.ToLower(s)
	for _, w := range []string{"example", "your", "xxxx", "change", "placeholder", "insert", "redacted", "dummy", "sample", "****", "....", "todo", "secret_here", "1234567890123456"} {
		if strings.Contains(low, w) {
			return true
		}
	}
	return strings.HasPrefix(s, "<") || strings.HasPrefix(s, "$") || strings.HasPrefix(s, "{") || strings.HasPrefix(s, "%")
}

// keyBlocks finds private keys in PEM (RFC 7468) and in PuTTY's format.
func keyBlocks(text string, found func(match)) {
	for i := 0; i < len(text); {
		j := strings.Index(text[i:], "-----BEGIN ")
		if j < 0 {
			break
		}
		j += i
		head, _, ok := strings.Cut(extract.Cut(text[j+len("-----BEGIN "):], 60), "-----")
		i = j + 11
		if !ok || !strings.Contains(head, "PRIVATE KEY") {
			continue
		}
		to := min(len(text), i+4096)
		if end := strings.Index(text[i:], "-----END "); end >= 0 {
			to = i + end
		}
		if to-i < 60+len(head) { // the words alone, as in instructions
			continue
		}
		found(match{j, to, FlagPrivateKey, "private_key", strings.ToLower(head)})
		i = to
	}
	if j := strings.Index(text, "PuTTY-User-Key-File-"); j >= 0 && strings.Contains(text[j:], "Private-Lines:") {
		found(match{j, min(len(text), j+4096), FlagPrivateKey, "private_key", "putty"})
	}
}

// secretNames are the ends of names whose values are secrets.
var secretNames = []string{
	"password", "passwd", "passphrase", "secret", "token", "api_key", "apikey", "api-key", "access_key", "accesskey", "private_key", "privatekey",
	"client_secret", "auth_key", "accountkey", "account_key", "sharedaccesskey", "secret_key", "secretkey", "signing_key", "encryption_key", "credential", "credentials", "passwort", "kennwort", "contraseña", "mot de passe", "wachtwoord", "пароль", "密码", "パスワード",
}

// assignments finds the values of names that end like a secret's, in .env files,
// in configuration and in prose.
func assignments(text string, found func(match)) {
	at := 0
	for line := range strings.Lines(text) {
		from := at
		at += len(line)
		if len(line) > 4000 {
			line = extract.Cut(line, 4000)
		}
		i := strings.IndexAny(line, "=:")
		for i >= 0 && i < len(line) {
			name := strings.ToLower(strings.Trim(lastWords(line[:i], 40), " \t\"'`,{*"))
			rest := extract.Cut(line[i+1:], 700) // no value that is a secret is longer
			value := strings.TrimLeft(rest, " \t\"'`=>")
			start := i + 1 + len(rest) - len(value)
			if end := strings.IndexAny(value, " \t\r\n\"'`,;<"); end >= 0 {
				value = value[:end]
			}
			if secretName(name) && secretValue(value, line[i] == '=') || passwordName(name) && passwordValue(value) {
				found(match{from + start, from + start + len(value), FlagSecret, "assigned_secret", "a value of " + extract.Excerpt(extract.Cut(name, 40))})
			}
			next := strings.IndexAny(line[i+1:], "=:")
			if next < 0 {
				break
			}
			i += 1 + next
		}
	}
}

func lastWords(s string, n int) string { return strings.ToValidUTF8(s[max(0, len(s)-n):], "") }

func secretName(name string) bool {
	for _, w := range secretNames {
		if strings.HasSuffix(name, w) {
			return true
		}
	}
	return false
}

// secretValue says whether a value is random enough for a secret. After a colon,
// as in prose, it must have digits; after an equals sign length is enough.
func secretValue(v string, assigned bool) bool {
	if name, _, call := strings.Cut(v, "("); call && strings.Trim(name, alnum+"_.") == "" { // a program that asks for it
		return false
	}
	v = strings.TrimRight(v, ".)]}")
	if len(v) < 8 || len(v) > 500 || placeholder(v) || strings.Contains(v, "://") {
		return false
	}
	digits, upper, other := 0, 0, 0
	for i := range len(v) {
		switch c := v[i]; {
		case c >= '0' && c <= '9':
			digits++
		case c >= 'A' && c <= 'Z':
			upper++
		case c < 'a' || c > 'z':
			other++
		}
	}
	kinds := 0
	for _, n := range []int{digits, upper, other, len(v) - digits - upper - other} {
		if n > 0 {
			kinds++
		}
	}
	return extract.Entropy(v) >= 2.5 && (kinds >= 2 && digits > 0 || kinds >= 3 || assigned && len(v) >= 16 && digits+upper > 0)
}

// credentialURLs finds passwords in URLs: postgres://app:hunter2@db.example.
func credentialURLs(text string, found func(match)) {
	for i := 0; ; {
		j := strings.Index(text[i:], "://")
		if j < 0 {
			return
		}
		j += i + 3
		i = j
		end := strings.IndexAny(text[j:], "/ \t\r\n\"'<>")
		if end < 0 {
			end = len(text) - j
		}
		authority := text[j : j+min(end, 500)]
		at := strings.LastIndexByte(authority, '@')
		if at < 0 {
			continue
		}
		user, password, ok := strings.Cut(authority[:at], ":")
		if !ok || len(password) < 4 || placeholder(password) || strings.EqualFold(password, "password") || strings.EqualFold(password, "pass") {
			continue
		}
		from := j + len(user) + 1
		found(match{from, from + len(password), FlagSecret, "url_password", "in a URL"})
	}
}
