package leak

import (
	"encoding/base64"
	"hash/crc32"
	"strings"

	"postern/internal/extract"
)

// A shape is how the tokens of one service look.
type shape struct {
	prefix  string
	rule    string
	charset string // of what follows the prefix
	min     int    // characters that follow
	max     int
	checked func(token string) (detail string, sure bool) // a checksum or the like; nil where there is none
}

const (
	alnum = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	urlen = alnum + "-_"
	lhex  = "0123456789abcdef"
	b32   = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
)

// shapes are tokens of well-known services, by how they begin. Only what is
// unlikely to be anything else: a row of hexadecimal digits is a hash, too.
var shapes = []shape{
	{"AKIA", "aws_access_key", b32 + "0189", 16, 16, nil},
	{"ASIA", "aws_access_key", b32 + "0189", 16, 16, nil},
	{"ABIA", "aws_access_key", b32 + "0189", 16, 16, nil},
	{"ACCA", "aws_access_key", b32 + "0189", 16, 16, nil},
	{"ghp_", "github_token", alnum, 36, 36, checksum62},
	{"gho_", "github_token", alnum, 36, 36, checksum62},
	{"ghu_", "github_token", alnum, 36, 36, checksum62},
	{"ghs_", "github_token", alnum, 36, 36, checksum62},
	{"ghr_", "github_token", alnum, 36, 76, nil},
	{"github_pat_", "github_token", alnum + "_", 82, 82, nil},
	{"npm_", "npm_token", alnum, 36, 36, checksum62},
	{"glpat-", "gitlab_token", urlen + ".", 20, 60, nil},
	{"gldt-", "gitlab_token", urlen, 20, 60, nil},
	{"glrt-", "gitlab_token", urlen, 20, 60, nil},
	{"glptt-", "gitlab_token", urlen, 20, 60, nil},
	{"glcbt-", "gitlab_token", urlen, 20, 80, nil},
	{"glft-", "gitlab_token", urlen, 20, 60, nil},
	{"glimt-", "gitlab_token", urlen, 20, 60, nil},
	{"glagent-", "gitlab_token", urlen, 40, 80, nil},
	{"gloas-", "gitlab_token", urlen, 40, 80, nil},
	{"glsoat-", "gitlab_token", urlen, 20, 60, nil},
	{"GR1348941", "gitlab_token", urlen, 20, 20, nil},
	{"xoxc-", "slack_token", alnum + "-", 20, 200, nil},
	{"xoxd-", "slack_token", urlen + "%", 20, 300, nil},
	{"xoxr-", "slack_token", alnum + "-", 20, 200, nil},
	{"xoxb-", "slack_token", alnum + "-", 20, 200, nil},
	{"xoxp-", "slack_token", alnum + "-", 20, 200, nil},
	{"xoxa-", "slack_token", alnum + "-", 20, 200, nil},
	{"xoxs-", "slack_token", alnum + "-", 20, 200, nil},
	{"xoxe-", "slack_token", alnum + "-", 20, 250, nil},
	{"xapp-", "slack_token", alnum + "-", 20, 200, nil},
	{"sk_live_", "stripe_key", alnum, 16, 250, nil},
	{"sk_test_", "stripe_key", alnum, 16, 250, nil},
	{"rk_live_", "stripe_key", alnum, 16, 250, nil},
	{"rk_test_", "stripe_key", alnum, 16, 250, nil},
	{"whsec_", "webhook_secret", alnum + "+/=", 24, 100, nil},
	{"AIza", "google_api_key", urlen, 35, 35, nil},
	{"GOCSPX-", "google_client_secret", urlen, 28, 28, nil},
	{"ya29.", "google_access_token", urlen + ".", 40, 2048, nil},
	{"sk-ant-", "anthropic_key", urlen, 32, 200, nil},
	{"sk-proj-", "openai_key", urlen, 32, 250, nil},
	{"sk-svcacct-", "openai_key", urlen, 32, 250, nil},
	{"sk-admin-", "openai_key", urlen, 32, 250, nil},
	{"sk-None-", "openai_key", urlen, 32, 250, nil},
	{"sk-or-v1-", "openrouter_key", lhex, 64, 64, nil},
	{"sk-", "openai_key", alnum, 48, 48, nil},
	{"xai-", "xai_key", alnum, 70, 90, nil},
	{"gsk_", "groq_key", alnum, 50, 60, nil},
	{"r8_", "replicate_token", alnum, 37, 40, nil},
	{"pplx-", "perplexity_key", alnum, 40, 56, nil},
	{"hf_", "huggingface_token", alnum, 34, 40, nil},
	{"SG.", "sendgrid_key", urlen + ".", 60, 70, nil},
	{"key-", "mailgun_key", lhex, 32, 32, nil},
	{"pypi-AgENdGVzdC5weXBpLm9yZ", "pypi_token", urlen, 50, 500, nil},
	{"pypi-AgEIcHlwaS5vcmc", "pypi_token", urlen, 50, 500, nil},
	{"dop_v1_", "digitalocean_token", lhex, 64, 64, nil},
	{"doo_v1_", "digitalocean_token", lhex, 64, 64, nil},
	{"shpat_", "shopify_token", lhex, 32, 32, nil},
	{"shpss_", "shopify_token", lhex, 32, 32, nil},
	{"hvs.", "vault_token", urlen, 24, 300, nil},
	{"dapi", "databricks_token", lhex, 32, 34, nil},
	{"lin_api_", "linear_key", alnum, 40, 40, nil},
	{"ntn_", "notion_token", alnum, 43, 50, nil},
	{"sq0atp-", "square_token", urlen, 22, 22, nil},
	{"sq0csp-", "square_token", urlen, 43, 43, nil},
	{"EAAA", "square_token", urlen, 60, 60, nil},
	{"NRAK-", "newrelic_key", alnum, 27, 27, nil},
	{"ATATT3", "atlassian_token", urlen + "=", 150, 250, nil},
	{"glsa_", "grafana_token", alnum + "_", 41, 41, nil},
	{"dp.pt.", "doppler_token", alnum, 40, 44, nil},
	{"AGE-SECRET-KEY-1", "age_key", "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58, 58, nil},
	{"tskey-", "tailscale_key", alnum + "-", 20, 80, nil},
	{"rubygems_", "rubygems_key", lhex, 48, 48, nil},
	{"dckr_pat_", "docker_token", urlen, 27, 40, nil},
	{"dckr_oat_", "docker_token", urlen, 27, 60, nil},
	{"PMAK-", "postman_key", lhex + "-", 59, 59, nil},
	{"pul-", "pulumi_token", lhex, 40, 40, nil},
	{"sbp_", "supabase_token", lhex, 40, 40, nil},
	{"sb_secret_", "supabase_token", urlen, 22, 60, nil},
	{"nfp_", "netlify_token", alnum, 36, 40, nil},
	{"HRKU-", "heroku_key", urlen, 36, 70, nil},
	{"sntrys_", "sentry_token", alnum + "+/=_", 60, 500, nil},
	{"sntryu_", "sentry_token", lhex, 64, 64, nil},
	{"figd_", "figma_token", urlen, 38, 60, nil},
	{"shpca_", "shopify_token", lhex, 32, 32, nil},
	{"shppa_", "shopify_token", lhex, 32, 32, nil},
	{"hvb.", "vault_token", urlen, 24, 300, nil},
	{"CFPAT-", "contentful_token", urlen, 43, 43, nil},
	{"fo1_", "fly_token", urlen, 43, 43, nil},
	{"FlyV1", "fly_token", urlen, 60, 2000, nil},
	{"secret_", "notion_token", alnum, 43, 43, nil},
	{"e2b_", "postern_project_key", lhex, 40, 40, nil},
	{"pib_", "postern_inbox_key", b32, 26, 26, nil},
	{"pgr_", "postern_grant", b32, 26, 26, nil},
	{"prk_", "postern_recovery_key", b32, 26, 26, nil},
	{"eyJ", "json_web_token", urlen + ".", 40, 8000, jsonWebToken},
}

// checksum62 knows tokens that end in the CRC-32 of the rest, in base 62: those
// of GitHub and npm.
func checksum62(token string) (string, bool) {
	_, body, _ := strings.Cut(token, "_")
	const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	sum, out := crc32.ChecksumIEEE([]byte(body[:len(body)-6])), make([]byte, 6)
	for i := 5; i >= 0; i-- {
		out[i] = digits[sum%62]
		sum /= 62
	}
	if string(out) == body[len(body)-6:] {
		return "its checksum is right", true
	}
	return "", false
}

// jsonWebToken knows tokens of three parts, of which the first is a JSON header.
func jsonWebToken(token string) (string, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 || len(parts[1]) < 4 || len(parts[2]) < 16 {
		return "", false
	}
	header, err := base64.RawURLEncoding.DecodeString(parts[0])
	return "signed", err == nil && strings.Contains(string(header), `"alg"`) && !strings.Contains(strings.ToLower(string(header)), `"none"`)
}

// minEntropy is how many bits each character of a token has at least. Random
// ones of these lengths have 3.5 and more; "xxxxxxxx" and "YOUR_KEY_HERE" less.
const minEntropy = 2.8

// secretSearches find secrets in the words of a text; keyBlocks, which needs the
// whole text, does so before it is decoded.
var secretSearches = []search{tokens, infixes, assignments, sentences, credentialURLs}

// tokens finds tokens by their shapes.
func tokens(text string, found func(match)) {
	for i := 0; i < len(text); {
		if !tokenByte(text[i]) {
			i++
			continue
		}
		from := i
		for i < len(text) && (tokenByte(text[i]) || text[i] == '.') {
			i++
		}
		run := strings.TrimRight(text[from:i], ".")
		if len(run) < 18 {
			continue
		}
		for _, s := range shapes {
			rest, ok := strings.CutPrefix(run, s.prefix)
			if !ok {
				continue
			}
			n := 0
			for n < len(rest) && strings.IndexByte(s.charset, rest[n]) >= 0 {
				n++
			}
			if n < s.min || n > s.max {
				continue
			}
			token := run[:len(s.prefix)+n]
			detail, sure := "", false
			if s.checked != nil {
				detail, sure = s.checked(token)
			}
			if s.rule == "json_web_token" && !sure || !sure && (extract.Entropy(rest[:n]) < minEntropy || placeholder(rest[:n])) {
				continue
			}
			found(match{from, from + len(token), FlagSecret, s.rule, detail})
			break
		}
	}
}

func tokenByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

// placeholder says whether a value stands for another, as in instructions.
func placeholder(s string) bool {
	low := strings.ToLower(s)
	for _, w := range []string{"example", "your", "xxxx", "change", "placeholder", "insert", "redacted", "dummy", "sample", "****", "....", "todo", "secret_here", "1234567890123456"} {
		if strings.Contains(low, w) {
			return true
		}
	}
	return strings.HasPrefix(s, "<") || strings.HasPrefix(s, "$") || strings.HasPrefix(s, "{") || strings.HasPrefix(s, "%")
}

// keyBlocks finds private keys in the armours that programs write them in.
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

// secretNames are ends and parts of names whose values are secrets.
var secretNames = []string{
	"password", "passwd", "passphrase", "secret", "token", "api_key", "apikey", "api-key", "access_key", "accesskey", "private_key", "privatekey",
	"client_secret", "auth_key", "accountkey", "account_key", "sharedaccesskey", "secret_key", "secretkey", "signing_key", "encryption_key", "credential", "credentials", "passwort", "kennwort", "contraseña", "mot de passe", "wachtwoord", "пароль", "密码", "パスワード",
}

// assignments finds values that are given to names of secrets: lines of .env
// files, of configurations, and of prose.
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

// secretValue says whether a value could be a secret: not a word, and not what
// stands for one. In prose, after a colon, it takes more than in a file.
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
