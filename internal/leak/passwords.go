package leak

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// passwordNames are the words for a password. Unlike a token, its value may be
// short and has no fixed form.
var passwordNames = []string{
	"password", "passwd", "passphrase", "passcode", "pwd", "pass phrase",
	"passwort", "kennwort", "contraseña", "mot de passe", "senha", "wachtwoord", "hasło", "parola",
	"lösenord", "adgangskode", "passord", "salasana", "heslo", "jelszó", "şifre", "пароль", "密码", "密碼", "パスワード", "비밀번호",
}

// englishNames is the number of English names, which come first.
const englishNames = 6

// linkWords may stand between the word for a password and its value.
var linkWords = []string{
	"is", "was", "are", "be", "to", "as", "now", "still", "currently", "set", "changed", "reset", "just", "simply", "of", "for", "the", "this", "that", "our", "your", "my", "their", "his", "her", "new", "old", "current",
	"ist", "lautet", "jetzt", "nun", "für", "den", "das", "die", "der", "auf", "neue", "es", "ahora", "para", "el", "la", "est", "pour", "le", "maintenant", "è", "per", "il", "é", "o", "het", "voor", "de", "to", "jest", "это", "для", "är", "er", "on",
	"user", "account", "login", "root", "admin", "database", "server", "wifi", "wi-fi", "router", "staging", "production", "test", "site", "vpn", "portal", "db", "email", "mail", "a", "an", "in", "at", "and", "there", "here", "network", "box", "host", "machine", "guest",
}

// sayWords announce the value.
var sayWords = []string{"is", "was", "be", "to", "now", "are", "ist", "lautet", "es", "est", "è", "é", "jest", "это", "är", "er", "on", "="}

// termWords look like a password and stand where one would, but are names of
// algorithms, formats and versions.
var termWords = []string{
	"oauth", "sha", "md5", "base64", "base32", "utf", "http", "win32", "x509", "pkcs", "aes", "rsa", "argon2", "bcrypt", "scrypt", "pbkdf2", "ed25519", "h264", "ipv4", "ipv6", "tls1", "ssl3",
	"2fa", "mfa", "fido2", "u2f", "str0", "varchar", "int32", "int64", "uint8", "string", "none", "null", "true", "false", "required", "optional", "step", "version", "type", "field", "level", "python3", "latin1", "iso8859", "ntlmv", "wpa2", "wpa3", "wep", "k8s",
}

// sentences finds passwords in prose: "the password for the staging server is
// hunter2". It looks for a word for passwords, link words, a word or sign that
// announces the value, and a value that is not an ordinary word.
func sentences(text string, found func(match)) {
	low := lowerASCII(text)
	for _, name := range passwordNames {
		for i := 0; ; {
			j := strings.Index(low[i:], name)
			if j < 0 {
				break
			}
			j += i
			i = j + len(name)
			if before, _ := utf8.DecodeLastRuneInString(low[:j]); letterOrDigit(before) && name[0] < utf8.RuneSelf {
				continue
			}
			if from, to := said(low, text, i, slices.Contains(passwordNames[:englishNames], name)); to > 0 {
				found(match{from, to, FlagSecret, "password_in_words", ""})
				i = to
			}
		}
	}
}

func letterOrDigit(r rune) bool {
	return r != utf8.RuneError && (unicode.IsLetter(r) || unicode.IsDigit(r))
}

// said returns the span of the password that is announced from i on, or 0, 0.
func said(low, text string, i int, english bool) (from, to int) {
	if r, _ := utf8.DecodeRuneInString(low[i:]); letterOrDigit(r) && r < 0x2e80 {
		return 0, 0
	}
	var w saying
	for range 9 { // words
		i = w.skip(low, i)
		end := wordEnd(low, i)
		word := strings.TrimRight(low[i:end], ".,;:!?)]}'*_")
		if word == "" {
			return 0, 0
		}
		to = i + len(word)
		if w.says && passwordValue(text[i:to]) { // a mark at its end may be its own
			return i, to
		}
		if !w.lines && plainPassword(word) && clauseEnds(low[to:]) && (w.colon || w.quoted && w.says || english && w.says && !describes(word)) {
			return i, to
		}
		if !slices.Contains(linkWords, word) && !slices.Contains(sayWords, word) {
			return 0, 0
		}
		w.says = w.says || slices.Contains(sayWords, word)
		w.linked = true
		if end < len(low) && strings.IndexByte(",;|", low[end]) >= 0 || strings.HasSuffix(low[i:end], ".") {
			return 0, 0
		}
		i = end
	}
	return 0, 0
}

// saying is the state between the word for a password and its value.
type saying struct {
	says   bool // a sign or a verb that announces the value
	linked bool // a word
	colon  bool // the sign follows the name at once: "password: "
	quoted bool // a quotation mark is the last thing before the word
	lines  bool // a line end
}

// skip returns where the next word begins.
func (w *saying) skip(low string, i int) int {
	w.quoted = false
	for i < len(low) {
		r, n := utf8.DecodeRuneInString(low[i:])
		switch r {
		case ':', '=', '：', '→':
			w.says = true
			w.colon = w.colon || !w.linked
		case '\n':
			w.lines = true
		case '"', '\'', '`', '“', '„', '«', '‘':
			w.quoted = true
		case ' ', '\t', '\r', '*', '_', '”', '»', '’', '(', '[', '>', '|', '\u00a0':
			w.quoted = false
		default:
			return i
		}
		i += n
	}
	return i
}

// wordEnd returns where the word at i ends.
func wordEnd(low string, i int) int {
	end := i
	for end < len(low) && strings.IndexByte(" \t\r\n\"`<,;|", low[end]) < 0 && end-i < 200 {
		r, n := utf8.DecodeRuneInString(low[end:])
		if r == '”' || r == '»' || r == '“' || r == '’' || r == '\u00a0' {
			break
		}
		end += n
	}
	return min(end, len(low))
}

// clauseEnds says whether rest begins with the end of a quotation, a line or a
// clause, so that the word before it is the whole value.
func clauseEnds(rest string) bool {
	inner := strings.TrimLeft(rest, "\"'`”“»’*_")
	return inner == "" || len(inner) < len(rest) || strings.IndexByte("\r\n.,;!)", inner[0]) >= 0 || strings.HasPrefix(inner, " (")
}

// plainPassword says whether a word without digits and signs could be a
// password: letters alone, or six digits and more, and no word that stands where
// a password would in forms, programs and instructions.
func plainPassword(word string) bool {
	if strings.Trim(word, digits) == "" {
		return len(word) >= 6 && len(word) <= 20
	}
	if len(word) < 5 || len(word) > 40 || strings.Trim(word, lower) != "" || placeholder(word) {
		return false
	}
	for _, part := range []string{"pass", "pwd", "secret", "login", "user", "test"} {
		if strings.Contains(word, part) {
			return false
		}
	}
	return !slices.Contains(fieldWords, word) && !slices.Contains(termWords, word) && !slices.Contains(passwordNames, word) &&
		!slices.Contains(linkWords, word)
}

// describes says whether an English word describes a password ("expired",
// "correct") instead of being one. Most such words are known by their ending.
func describes(word string) bool {
	for _, end := range []string{"ed", "en", "ing", "able", "ible", "ive", "ly", "al", "ous", "ful", "less", "ic", "ent", "ant", "ary", "er", "ure", "id", "ct", "st", "ex", "que", "ble", "ate", "ete", "ient", "ory"} {
		if strings.HasSuffix(word, end) {
			return true
		}
	}
	return slices.Contains(stateWords, word)
}

// fieldWords follow "password:" in forms, schemas, programs and instructions.
var fieldWords = []string{
	"string", "number", "boolean", "integer", "object", "array", "bytes", "varchar", "char", "field", "input", "value", "label", "event", "param", "params", "option", "options", "config", "settings", "props", "state", "hash", "hashed", "plain",
	"plaintext", "cleartext", "encrypted", "hidden", "masked", "required", "optional", "mandatory", "empty", "blank", "missing", "invalid", "valid", "incorrect", "correct", "wrong", "expired", "unknown", "unset", "undefined", "false", "nothing", "forgotten",
	"forgot", "reset", "change", "changed", "confirm", "confirmation", "repeat", "again", "email", "username", "account", "continue", "cancel", "submit", "below", "above", "attached", "enclosed", "separate", "separately", "later", "same", "yes",
	"strength", "strong", "weak", "policy", "length", "manager", "vault", "keychain", "prompt", "stdin", "environment", "variable", "token", "bearer", "basic", "digest", "oauth", "ldap", "kerberos", "authentication", "credentials", "credential",
	"first", "second", "third", "other", "another", "every", "please", "enter", "type", "choose", "follow", "follows", "following", "always", "never", "unchanged", "disabled", "enabled", "locked", "available", "protected", "removed", "deleted", "redacted",
	"falsch", "richtig", "leer", "keine", "keines", "unbekannt", "abgelaufen", "vergessen", "siehe", "pflichtfeld", "erforderlich", "geheim", "obligatoire", "requis", "oublié", "requerido", "obligatorio", "verplicht", "wymagane", "telefonisch", "separat", "brief",
}

// stateWords describe a password, and have no telling ending.
var stateWords = []string{
	"correct", "wrong", "right", "fine", "okay", "gone", "lost", "known", "unknown", "public", "private", "secure", "insecure", "simple", "easy", "hard", "weak", "strong", "short", "long", "random", "unique", "ready", "needed", "there", "below", "above", "inside",
	"missing", "empty", "blank", "blind", "alright", "enough", "mine", "yours", "theirs", "ours", "everything", "nothing", "something", "anything", "useless", "trivial", "obvious", "safe", "unsafe", "stale", "fresh", "online", "offline", "alive", "important",
	"broken", "essential", "paramount", "crucial", "forever", "everywhere", "nowhere", "somewhere", "here", "elsewhere", "absent", "present", "mandatory", "necessary", "worthless", "legacy", "outdated", "yesterday", "today", "tomorrow", "bogus", "garbage", "history", "sticky", "tricky", "messy", "silly", "funny", "crazy", "lousy", "pending", "awful", "good", "great", "nice", "cool", "terrible",
}

func passwordName(name string) bool {
	for _, w := range passwordNames {
		if strings.HasSuffix(name, w) {
			return true
		}
	}
	return false
}

// passwordValue says whether a word has the form of a password: letters with
// digits, or with symbols in the middle. Dates, addresses, counts ("8-digit") and
// names in programs do not count.
func passwordValue(v string) bool {
	v = strings.TrimRight(v, ".,;:)]}")
	if len(v) < 5 || len(v) > 200 || placeholder(v) || strings.Contains(v, "://") || strings.HasPrefix(v, "/") || strings.HasPrefix(v, ".") || strings.HasPrefix(v, "-") {
		return false
	}
	if strings.ContainsAny(v, "(){}[]<>\\") || strings.Contains(v, "@") && strings.Contains(v[strings.IndexByte(v, '@'):], ".") {
		return false
	}
	low := strings.ToLower(v)
	for _, t := range termWords {
		if strings.HasPrefix(low, t) {
			return false
		}
	}
	letters, digits, signs, other := 0, 0, 0, 0
	lead := true // of digits
	count := 0
	for _, r := range v {
		switch {
		case digit(byte(min(r, 0x7f))) && r < 0x80:
			digits++
			if lead {
				count++
			}
			continue
		case unicode.IsLetter(r):
			letters++
		case r == '-' || r == '_' || r == '.' || r == '/' || r == '\'' || r == '’' || r == '+':
			other++
		default:
			signs++
		}
		lead = false
	}
	switch {
	case letters == 0:
		return false
	case count > 0 && digits == count && other > 0 && signs == 0: // 8-digit, 90-day, 12-character
		return false
	case count > 0 && digits == count && signs == 0 && letters <= 3: // 500ms, 1024px
		return false
	case strings.Contains(v, ".") && signs == 0 && strings.Trim(low, "abcdefghijklmnopqrstuvwxyz_.") == "": // a name in a program
		return false
	}
	inner := strings.Trim(v, "!?#*&%$~^+=\"'`")
	signed := strings.ContainsAny(inner, "!@#$%^&*~?") // in its middle
	return digits > 0 && letters > 0 || signed && letters >= 3
}
