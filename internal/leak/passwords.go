package leak

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// passwordNames are what people call a password. Its value may be short, and
// have a form of no kind.
var passwordNames = []string{
	"password", "passwd", "passphrase", "passcode", "pwd", "passwort", "kennwort", "contraseña", "mot de passe", "senha", "wachtwoord", "hasło", "parola",
	"lösenord", "adgangskode", "passord", "salasana", "heslo", "jelszó", "şifre", "пароль", "密码", "密碼", "パスワード", "비밀번호",
}

// linkWords stand between a password's name and the password.
var linkWords = []string{
	"is", "was", "are", "be", "to", "as", "now", "still", "currently", "set", "changed", "reset", "just", "simply", "of", "for", "the", "this", "that", "our", "your", "my", "their", "his", "her", "new", "old", "current",
	"ist", "lautet", "jetzt", "nun", "für", "den", "das", "die", "der", "auf", "neue", "es", "ahora", "para", "el", "la", "est", "pour", "le", "maintenant", "è", "per", "il", "é", "o", "het", "voor", "de", "to", "jest", "это", "для", "är", "er", "on",
	"user", "account", "login", "root", "admin", "database", "server", "wifi", "wi-fi", "router", "staging", "production", "test", "site", "vpn", "portal", "db", "email", "mail", "a", "an", "in", "at", "and", "there", "here", "network", "box", "host", "machine", "guest",
}

// sayWords say that what follows is the password.
var sayWords = []string{"is", "was", "be", "to", "now", "are", "ist", "lautet", "es", "est", "è", "é", "jest", "это", "är", "er", "on", "="}

// termWords are words with letters and digits, in the shape of a password, that
// stand where one would: names of algorithms, formats and versions.
var termWords = []string{
	"oauth", "sha", "md5", "base64", "base32", "utf", "http", "win32", "x509", "pkcs", "aes", "rsa", "argon2", "bcrypt", "scrypt", "pbkdf2", "ed25519", "h264", "ipv4", "ipv6", "tls1", "ssl3",
	"2fa", "mfa", "fido2", "u2f", "str0", "varchar", "int32", "int64", "uint8", "string", "none", "null", "true", "false", "required", "optional", "step", "version", "type", "field", "level", "python3", "latin1", "iso8859", "ntlmv", "wpa2", "wpa3", "wep", "k8s",
}

// sentences finds passwords that are said in a sentence: "the password for the
// staging server is hunter2". That takes a name of passwords, then words that
// link, one that says so, and a value that no sentence has by itself.
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
			if from, to := said(low, text, i); to > 0 {
				found(match{from, to, FlagSecret, "password_in_words", ""})
				i = to
			}
		}
	}
}

func letterOrDigit(r rune) bool {
	return r != utf8.RuneError && (unicode.IsLetter(r) || unicode.IsDigit(r))
}

// said returns where the password is that the words from i on tell.
func said(low, text string, i int) (from, to int) {
	says := false
	if r, _ := utf8.DecodeRuneInString(low[i:]); letterOrDigit(r) && r < 0x2e80 {
		return 0, 0
	}
	for range 9 { // words
		for i < len(low) {
			r, n := utf8.DecodeRuneInString(low[i:])
			switch r {
			case ':', '=', '：', '→':
				says = true
			case ' ', '\t', '\r', '\n', '"', '\'', '`', '*', '_', '“', '”', '„', '«', '»', '‘', '’', '(', '[', '>', '|', '\u00a0':
			default:
				n = 0
			}
			if n == 0 {
				break
			}
			i += n
		}
		end := i
		for end < len(low) && strings.IndexByte(" \t\r\n\"`<,;|", low[end]) < 0 && end-i < 200 {
			if r, n := utf8.DecodeRuneInString(low[end:]); r == '”' || r == '»' || r == '“' || r == '’' || r == '\u00a0' {
				break
			} else if n > 1 {
				end += n - 1
			}
			end++
		}
		word := strings.TrimRight(low[i:min(end, len(low))], ".,;:!?)]}'*_")
		if word == "" {
			return 0, 0
		}
		if says && passwordValue(text[i:i+len(word)]) {
			// A mark at its end may be its own.
			return i, i + len(word)
		}
		if !among(linkWords, word) && !among(sayWords, word) {
			return 0, 0
		}
		says = says || among(sayWords, word)
		if end < len(low) && strings.IndexByte(",;|", low[end]) >= 0 || strings.HasSuffix(low[i:end], ".") {
			return 0, 0
		}
		i = end
	}
	return 0, 0
}

func among(list []string, word string) bool { return slices.Contains(list, word) }

func passwordName(name string) bool {
	for _, w := range passwordNames {
		if strings.HasSuffix(name, w) {
			return true
		}
	}
	return false
}

// passwordValue says whether a word could be a password: letters with digits, or
// with signs in their middle, and neither a date, an address, a count ("8-digit")
// nor a name in a program.
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
