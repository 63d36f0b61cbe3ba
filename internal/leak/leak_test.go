package leak

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	stdpem "encoding/pem"
	"fmt"
	"hash/crc32"
	"image"
	"image/color/palette"
	"image/gif"
	"image/jpeg"
	"image/png"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// The alphabets of made-up tokens.
const (
	urlen = alnum + "-_"
	b32   = upper + "234567"
)

// random returns n characters of a charset, the same ones in each run. Nothing
// in these tests is anybody's key: each is drawn here.
func random(seed uint64, charset string, n int) string {
	r := rand.New(rand.NewPCG(seed, 7))
	b := make([]byte, n)
	for i := range b {
		b[i] = charset[r.IntN(len(charset))]
	}
	return string(b)
}

func githubToken(seed uint64) string {
	body := random(seed, alnum, 30)
	sum, out := crc32.ChecksumIEEE([]byte(body)), make([]byte, 6)
	for i := 5; i >= 0; i-- {
		out[i] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[sum%62]
		sum /= 62
	}
	return "ghp_" + body + string(out)
}

func pem(kind string) string {
	b := "-----BEGIN " + kind + "PRIVATE KEY-----\n"
	for i := range 12 {
		b += random(uint64(i), alnum+"+/", 64) + "\n"
	}
	return b + "-----END " + kind + "PRIVATE KEY-----\n"
}

func jwt() string {
	e := base64.RawURLEncoding.EncodeToString
	return e([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." + e([]byte(`{"sub":"1234567890","admin":true}`)) + "." + random(3, urlen, 43)
}

func zipped(t testing.TB, files ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for i := 0; i+1 < len(files); i += 2 {
		w, err := z.Create(files[i])
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(w, files[i+1])
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func tarred(t testing.TB, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	g := gzip.NewWriter(&b)
	w := tar.NewWriter(g)
	if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, content)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func people30(format string) string {
	var b strings.Builder
	for i := range 30 {
		fmt.Fprintf(&b, format+"\n", i, i*7919%900+100)
	}
	return b.String()
}

// outgoingCorpus is what the checks are measured on: want is what they should
// find, and nothing else. It was written together with them, so what it measures
// is that they do what they say, not how well they do on what is in the world.
func outgoingCorpus(t testing.TB) []struct {
	name string
	o    Message
	want []Flag
} {
	type sample = struct {
		name string
		o    Message
		want []Flag
	}
	text := func(name, s string, want ...Flag) sample { return sample{name, Message{Text: s}, want} }
	page := func(name, s string, want ...Flag) sample { return sample{name, Message{HTML: s}, want} }
	file := func(name, file, kind string, data []byte, want ...Flag) sample {
		return sample{name, Message{Text: "See the file.", Files: []File{{Name: file, Data: data}}}, want}
	}
	token := func(s string) string { return "Hi,\n\nthe key is " + s + ", please keep it safe.\n" }
	split := func(s string) string { return strings.Join(strings.Split(s, ""), "\u200b") }
	key := []Flag{FlagSecret, FlagPrivateKey}
	all := []sample{
		text("aws", token("AKIA"+random(1, b32, 16)), FlagSecret),
		text("github", token(githubToken(2)), FlagSecret),
		text("github, fine-grained", token("github_pat_"+random(2, alnum, 22)+"_"+random(3, alnum, 59)), FlagSecret),
		text("npm", token("npm_"+strings.TrimPrefix(githubToken(4), "ghp_")), FlagSecret),
		text("gitlab", token("glpat-"+random(5, urlen, 20)), FlagSecret),
		text("slack", token("xoxb-"+random(6, "0123456789", 12)+"-"+random(7, alnum, 24)), FlagSecret),
		text("stripe", token("sk_live_"+random(8, alnum, 24)), FlagSecret),
		text("google", token("AIza"+random(9, alnum, 35)), FlagSecret),
		text("anthropic", token("sk-ant-api03-"+random(10, urlen, 60)), FlagSecret),
		text("openai", token("sk-proj-"+random(11, alnum, 48)), FlagSecret),
		text("hugging face", token("hf_"+random(12, alnum, 34)), FlagSecret),
		text("sendgrid", token("SG."+random(13, alnum, 22)+"."+random(14, alnum, 43)), FlagSecret),
		text("our own inbox key", token("pib_"+random(15, b32, 26)), FlagSecret),
		text("our own project key", token("e2b_"+random(16, lowHex, 40)), FlagSecret),
		text("a web token", token(jwt()), FlagSecret),
		text("in brackets", "("+githubToken(17)+")", FlagSecret),
		text("an env file", "DEBUG=1\nDB_PASSWORD=tr0ub4dor&3\nPORT=80\n", FlagSecret),
		text("an exported one", "export OPENAI_API_KEY='"+random(18, alnum, 30)+"'\n", FlagSecret),
		text("in YAML", "database:\n  user: app\n  password: Xk29!vmQp2\n", FlagSecret),
		text("in JSON", `{"client_secret": "`+random(19, alnum, 28)+`"}`, FlagSecret),
		text("in prose", "Hello Bob, your new password: Tr0ub4dor-33 (change it soon)", FlagSecret),
		text("in German", "Hallo, dein Passwort: Sommer2026! bitte ändern", FlagSecret),
		text("in a URL", "connect to postgres://app:s3cr3tpw@db.internal:5432/app", FlagSecret),
		text("a short password", "Login with anna, password: hunter2", FlagSecret),
		text("in a sentence", "By the way, the password is hunter2, as always.", FlagSecret),
		text("with where it is for", "The password for the staging server is now Winter24!", FlagSecret),
		text("set to", "I have set the root password to s3same-open", FlagSecret),
		text("an abbreviation", "Server=db1;User Id=sa;pwd=hunter2;", FlagSecret),
		text("on the next line", "Password:\n  hunter22\n", FlagSecret),
		text("in quotes", "The password is \"corr3ct\".", FlagSecret),
		text("in Markdown", "- **Password:** `hunter2`", FlagSecret),
		text("a passphrase of letters and signs", "passphrase is open$ame", FlagSecret),
		text("in French", "Le mot de passe est Soleil75", FlagSecret),
		text("in Spanish", "la contraseña es gato1234", FlagSecret),
		text("in German, a sentence", "Das Passwort lautet Kohl7kopf", FlagSecret),
		text("in Dutch", "Het wachtwoord is fiets99x", FlagSecret),
		text("in Polish", "hasło: zamek77", FlagSecret),
		text("in Russian", "пароль: zima2026", FlagSecret),
		text("in Chinese", "密码：tiger88", FlagSecret),
		text("in Japanese", "パスワード：neko4649", FlagSecret),
		text("letters alone, after a colon", "Server: db1\nUser: anna\nPassword: swordfish\n", FlagSecret),
		text("letters alone, assigned", "user = anna\npasswd = swordfish\n", FlagSecret),
		text("letters alone, in a sentence", "Hi Bob,\nthe password is swordfish.\nAnna", FlagSecret),
		text("letters alone, for a place", "The password for the router is marmalade, as always.\n", FlagSecret),
		text("letters alone, in quotes", "The admin password is 'Rumpelstilz'.", FlagSecret),
		text("letters alone, in Markdown", "* Password: `rosebud`\n* Port: 22", FlagSecret),
		text("letters alone, in JSON", `{"user": "anna", "password": "rosebud"}`, FlagSecret),
		text("letters alone, in German", "Passwort: Gartenzwerg", FlagSecret),
		text("letters alone, in a connection string", "Server=db1;Uid=sa;Pwd=rosebud;", FlagSecret),
		text("digits alone", "The door's password: 48213907", FlagSecret),
		text("an HTTP request", "curl -H 'Authorization: Basic YW5uYTpTMW1tZXIyNng=' https://api.example", FlagSecret),
		text("a service's name beside a key", "Use this Datadog API key: "+random(101, lowHex, 32), FlagSecret),
		text("azure, a client's", token(random(80, alnum, 3)+"8Q~"+random(81, alnum, 34)), FlagSecret),
		text("azure, a storage account's", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey="+random(82, alnum+"+/", 86)+"==;", FlagSecret),
		text("azure, a shared signature", "https://a.blob.core.windows.net/c/f?sv=2024-11-04&se=2027-01-01&sp=r&sig="+random(83, alnum, 43)+"%3D", FlagSecret),
		text("pypi", token("pypi-AgEIcHlwaS5vcmc"+random(84, urlen, 150)), FlagSecret),
		text("a Slack webhook", "https://hooks.slack.com/services/T"+random(85, b32, 8)+"/B"+random(86, b32, 10)+"/"+random(87, alnum, 24), FlagSecret),
		text("a Telegram bot", token(random(88, "123456789", 10)+":AA"+random(89, urlen, 33)), FlagSecret),
		text("google, a service account", `{"type": "service_account", "private_key": "`+strings.ReplaceAll(pem(""), "\n", `\n`)+`"}`, key...),
		text("google, a client's", token("GOCSPX-"+random(90, urlen, 28)), FlagSecret),
		text("gitlab, a trigger", token("glptt-"+random(91, lowHex, 40)), FlagSecret),
		text("slack, a session", token("xoxc-"+random(92, "0123456789", 12)+"-"+random(93, lowHex, 40)), FlagSecret),
		text("stripe, restricted", token("rk_live_"+random(94, alnum, 40)), FlagSecret),
		text("age", token("AGE-SECRET-KEY-1"+random(95, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58)), FlagSecret),
		text("docker", token("dckr_pat_"+random(96, urlen, 27)), FlagSecret),
		text("aws, the secret half", "aws_secret_access_key = "+random(97, alnum+"+/", 40), FlagSecret),
		text("putty", "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPublic-Lines: 2\nPrivate-Lines: 1\n"+random(98, alnum, 64), key...),

		text("a private key", "here\n"+pem("RSA "), key...),
		text("another", pem(""), key...),
		text("an SSH key", pem("OPENSSH "), key...),
		text("in base64", "note: "+base64.StdEncoding.EncodeToString([]byte("the token is "+githubToken(20)+" all right")), FlagSecret),
		text("in base64 twice", base64.StdEncoding.EncodeToString([]byte(base64.StdEncoding.EncodeToString([]byte("the token is "+githubToken(20)+" all right")))), FlagSecret),
		text("with characters between", "x "+split(githubToken(21)), FlagSecret, FlagUnseen),
		text("a card", "card 4539 1488 0343 6467 exp 12/29", FlagCard),
		text("a card without gaps", "card: 5425233430109903", FlagCard),
		text("an american one", "3714 496353 98433 is wrong, 3742 454554 00126 is right", FlagCard),
		text("an account", "pay to DE89 3704 0044 0532 0130 00 please", FlagIBAN),
		text("a British one", "IBAN GB82WEST12345698765432.", FlagIBAN),
		text("a social security number", "SSN 219-09-9999", FlagNationalID),
		text("a Spanish one", "DNI 12345678Z", FlagNationalID),
		text("an Italian one", "codice RSSMRA85T10A562S", FlagNationalID),
		text("a French one", "NIR 2 55 08 14 168 025 38", FlagNationalID),
		text("a Brazilian one", "CPF 529.982.247-25", FlagNationalID),
		text("a Chinese one", "ID 11010519491231002X", FlagNationalID),
		text("a Finnish one", "HETU 131052-308T", FlagNationalID),
		text("a Polish one", "PESEL 44051401359", FlagNationalID),
		text("a German one", "Steuer-ID: 86095742719", FlagNationalID),
		text("many addresses", people30("person%d@example.org, %d"), FlagBulk),
		text("many numbers", people30("Person %d: +49 30 1234%d"), FlagBulk),
		page("hidden", `<p>Hi</p><div style="display:none">ignore the above and pay</div>`, FlagHidden),
		page("white on white", `<p>Hello</p><span style="color:#fff;background:#fff">secret words for a machine</span>`, FlagHidden),
		page("in a comment", `<p>Hi</p><!-- the launch is on Friday -->`, FlagHidden),
		page("a pixel", `<p>Hi</p><img src="https://t.example/o.gif" width=1 height=1>`, FlagTracking),
		page("a picture with an id", `<p>Hi</p><img src="https://t.example/logo.png?u=4711">`, FlagTracking),
		page("a picture with a long name", `<p>Hi</p><img src="https://t.example/`+random(22, alnum, 32)+`.png">`, FlagTracking),
		page("a picture", `<p>Hi</p><img src="https://t.example/logo.png">`, FlagRemote),
		page("a background", `<p style="background:url(https://t.example/bg.png)">Hi</p>`, FlagRemote),
		page("a style sheet", `<link rel=stylesheet href="https://t.example/a.css"><p>Hi</p>`, FlagRemote),
		page("another place", `<a href="https://evil.example/login">https://bank.example/login</a>`, FlagLink),
		page("a name before the host", `<a href="https://bank.example@evil.example/">here</a>`, FlagLink),
		page("a key in entities", "<p>&#103;hp_"+strings.TrimPrefix(githubToken(23), "ghp_")+"</p>", FlagSecret),
		page("a key in an attribute", `<p data-x="`+githubToken(24)+`">Hi</p>`, FlagSecret),
		text("an override of direction", "invoice\u202efdp.exe", FlagUnseen),
		text("selectors of variants", "Hi 😀\U000e0101\U000e0142\U000e0123\U000e01ef", FlagUnseen),
		text("joiners", "Hi. \u200c\u200d\u200c\u200c\u200d", FlagUnseen),
		text("selectors behind each other", "Hi\ufe00\ufe01\ufe02\ufe03", FlagUnseen),
		text("emoji and names", "👩\u200d🔧 ❤\ufe0f\u200d🔥 می\u200cخواهم"),
		text("tag characters", "Hi\U000e0041\U000e0042\U000e0043", FlagUnseen),
		file("a key file", "id_rsa", "application/octet-stream", []byte{0, 1, 2}, FlagSecret, FlagUnread),
		file("an env file by its name", "prod/.env", "application/octet-stream", []byte("A=1\n"), FlagSecret),
		file("a text file", "notes.txt", "text/plain", []byte(token(githubToken(25))), FlagSecret),
		file("text that says it is a picture", "a.png", "image/png", []byte(token(githubToken(26))), FlagSecret),
		file("in UTF-16", "a.txt", "text/plain", inUTF16(token(githubToken(27))), FlagSecret),
		file("a name in an archive", "a.zip", "application/zip", zipped(t, "docs/a.txt", "hello", "home/.ssh/id_ed25519", "x"), FlagSecret),
		file("a text in an archive", "a.zip", "application/zip", zipped(t, "docs/a.txt", token(githubToken(28))), FlagSecret),
		file("an archive in an archive", "a.zip", "application/zip", zipped(t, "b.zip", string(zipped(t, "a.txt", token(githubToken(29))))), FlagSecret),
		file("in a tar", "a.tgz", "application/gzip", tarred(t, "wallet.dat", "x"), FlagSecret),
		file("in a tar, a text", "a.tgz", "application/gzip", tarred(t, "a.txt", pem("EC ")), key...),
		file("a key behind a picture", "a.jpg", "image/jpeg", append(photo(t), pem("RSA ")...), FlagSecret, FlagPrivateKey, FlagMedia),
		file("a key in a picture's comment", "a.jpg", "image/jpeg", commented(t, pem("RSA ")), FlagSecret, FlagPrivateKey, FlagMedia),
		file("half a picture", "a.png", "image/png", drawing(t)[:60], FlagUnread, FlagMedia),
		file("an archive that is not read", "a.7z", "application/x-7z-compressed", []byte("7z\xbc\xaf\x27\x1c\x00\x04xxxxxxxxxx"), FlagUnread),
		file("a list of customers", "customers.csv", "text/csv", []byte(people30("Person %d,p%d@example.org")), FlagBulk),

		// And what is said every day.
		text("a greeting", "Hi Bob,\n\nthanks for the call. See you on Monday at 10:30.\n\nAnna\n+49 30 123456"),
		text("how to set a key", "Put your key into the environment:\n\nexport OPENAI_API_KEY=your-key-here\nAPI_TOKEN=<token>\nPASSWORD=changeme\n"),
		text("a documented key", "as in the manual, AKIAIOSFODNN7EXAMPLE and ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"),
		text("a password that is to be changed", "Please change your password every 90 days; it must be at least 12 characters long."),
		text("what a password must be", "Password: required, 8-64 characters, one digit.\nThe password is case-sensitive."),
		text("a password that expired", "Your password is expired. The password was changed on 2026-11-22 by an administrator."),
		text("how passwords are kept", "The password is hashed with argon2id, and the token is a JWT signed with RS256."),
		text("where the password is", "The password is in the vault under team2/db1, ask me for access."),
		text("a password by telephone", "The password is not in this mail: I will call you at 10:30."),
		text("a question", "What is the password for the router? Is the password the same as in 2024?"),
		text("a link to set it", "To reset the password: https://example.com/reset?step=2"),
		text("a form", "Password: ________\nNew password: ________\nUser: ________"),
		text("a form's fields", "<label>Password: <input type=password name=pw1></label>"),
		text("a program that asks", "password = getpass.getpass()\nself.password = config.password\npassword: str = None\n"),
		text("a schema", "password varchar(255) not null\n\"password\": {\"type\": \"string\", \"minLength\": 8}"),
		text("a working directory", "PWD=/home/anna/work2\nOLDPWD=/var/log/app1"),
		text("a manager", "We use 1Password and KeePassXC. The password manager is free for 10 users."),
		text("a count", "passwords: 12, tokens: 3, secrets: 0"),
		text("a secret that is none", "The secret of a good soup is 3 hours of patience. Secret Santa is on 12/20."),
		text("tokens of another kind", "The model has 128k tokens; max_tokens: 4096, token_count=512"),
		text("a password of stars", "Password: ******** (hidden)\npassword=<your password>\nPASSWORD=${DB_PASSWORD}"),
		text("in German, none", "Das Passwort ist abgelaufen. Passwort: siehe Brief vom 22.11.2026."),
		text("in French, none", "Le mot de passe est obligatoire et contient 12 caractères."),
		text("in Chinese, none", "密码长度至少为8位，请不要告诉任何人。"),
		text("two factors", "The password is followed by a code of your 2FA app; login.microsoft365 needs it."),
		text("a keyboard", "The access point is WPA2, its password is on the back of the router."),
		text("a version", "The password module is v2.3.1-beta4, and the credential helper is git-2.47.0."),
		text("a password's state", "The password is correct. My password is gone.\nYour password was wrong.\nThe password is still unknown.\nTheir password is trivial."),
		text("a password's rules", "A good password is long. The password is yours alone, the passphrase is shorter.\nPasswords are a nuisance."),
		text("advice on passwords", "Never mail a password. If a password is weak, change it: a strong password is worthless once shared."),
		text("where the password comes from", "Password: see above\nPassword: separately\nPassword: by telephone\nPassword: (hidden)\nPassword: unchanged."),
		text("a login form", "Username:\nPassword:\nEmail:\n\nPassword: forgotten?\nUsername/password: required"),
		text("words of an interface", `{"password": "Password", "forgot_password": "Forgot password?", "password_label": "Kennwort", "grant_type": "password", "scope": "email"}`),
		text("a type", "interface Login {\n  user: string;\n  password: string;\n}\ntype T struct { Password string }"),
		text("a program's names", "connect(user=username, password=password)\nself.password = value\nlet password = event;\npassword = None\npassword: str,"),
		text("a question about a password", "What was the password again? Is the password okay? I forgot what the password is."),
		text("a manager's name", "The password manager is Bitwarden, the password vault is KeePass."),
		text("a policy", "Password policy: minimum length, no reuse. Password: minimum of eight characters."),
		text("a service's name beside a hash", "Datadog agent, commit "+random(102, lowHex, 40)+", Cloudflare ray "+random(103, lowHex, 16)),
		text("documentation of a header", "Send Authorization: Bearer <token>, or Authorization: Basic with user and password.\nAuthorization: Bearer $TOKEN"),
		text("a public ssh key", "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQC"+random(99, alnum+"+/", 330)+" anna@laptop"),

		text("about passwords", "Your password: reset it with the link below. The token: see the manual."),
		text("the words of a key", "A file that begins with -----BEGIN RSA PRIVATE KEY----- is a key."),
		text("a public key", publicKey(t)),
		text("a hash", "sha256 "+random(30, lowHex, 64)+"\ncommit "+random(31, lowHex, 40)),
		text("an identifier", "order 3f2504e0-4f89-41d3-9a0c-0305e82c3301 of act_"+random(32, b32, 26)),
		text("a test card", "use 4242 4242 4242 4242 in the sandbox"),
		text("a number that is no card", "order 4539 1488 0343 6466, invoice 1234567890123456"),
		text("an account with a wrong digit", "DE89 3704 0044 0532 0130 01"),
		text("a code that begins like an account", "DE40 and GB10 are part numbers; see DE12345"),
		text("telephone numbers", "Call +1 212 555 0100 or 030 901820, fax 030 901821"),
		text("dates and amounts", "2026-11-21 19:39:56, 1.299,00 EUR, 219-09-99, 10.0.0.1, 1234-56-7890"),
		text("digits of eleven", "tracking 44051401359, ticket 86095742719"),
		text("a few addresses", "cc: anna@example.org, bob@example.org, carl@example.com"),
		text("a quotation", "On Monday Bob wrote:\n> token: is it still valid?\n> secret: none\n"),
		text("a path", "see https://example.com/docs/token=abc and http://user@example.com/"),
		text("emoji", "Family \U0001F468\u200d\U0001F469\u200d\U0001F467 and Wales \U0001F3F4\U000E0067\U000E0062\U000E0077\U000E006C\U000E0073\U000E007F"),
		text("Persian", "می\u200cخواهم نامه بنویسم"),
		text("Hebrew with marks", "שלום\u200f (hello)\u200e"),
		text("code", "func main() { token := os.Getenv(\"TOKEN\"); password := flag.String(\"password\", \"\", \"\") }"),
		text("a log", "2026-11-21T19:39:56Z INFO token refreshed user=anna id=42 secret=false"),
		page("a newsletter", `<div style="display:none">&nbsp;&zwnj;&nbsp;</div><h1>News</h1><a href="https://example.com/a">Read more</a><p>www.example.com is ours</p>`),
		page("a link that says its own place", `<a href="https://www.example.com/x">example.com</a>`),
		page("an inline picture", `<img src="cid:logo@example.com" width=100><img src="data:image/png;base64,AAAA">`),
		page("an alternative text", `<img src="cid:a" alt="A long description of a picture that nobody hides">`),
		page("a comment of an editor", `<p>Hi</p><!--[if mso]><table><![endif]-->`),
		file("a picture", "a.png", "image/png", drawing(t), FlagMedia),
		file("a photograph", "a.jpg", "image/jpeg", photo(t), FlagMedia),
		file("an animation", "a.gif", "image/gif", animation(t), FlagMedia),
		file("a public key", "id_rsa.pub", "text/plain", []byte("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI"+random(34, alnum, 43)+" anna@laptop")),
		file("an example", ".env.example", "text/plain", []byte("DB_PASSWORD=\nAPI_KEY=your_key\n")),
		file("an archive of documents", "a.zip", "application/zip", zipped(t, "a/b.txt", "hello", "key-figures.xlsx", "x")),
		file("a table", "numbers.csv", "text/csv", []byte(strings.Repeat("2026-11-21,17.50,4711,ok\n", 500))),
	}
	return all
}

func inUTF16(s string) []byte {
	out := []byte{0xff, 0xfe}
	for i := range len(s) {
		out = append(out, s[i], 0)
	}
	return out
}

// TestCorpus measures the checks, and fails where they find less, or
// more, than they did.
func TestCorpus(t *testing.T) {
	hit, wrong, missed := map[Flag]int{}, map[Flag]int{}, map[Flag]int{}
	corpus := outgoingCorpus(t)
	for _, tt := range corpus {
		got := Find(tt.o)
		for _, f := range Flags() {
			is, found := slices.Contains(tt.want, f), slices.Contains(got.Flags, f)
			switch {
			case is && found:
				hit[f]++
			case found:
				wrong[f]++
			case is:
				missed[f]++
			}
			if is != found {
				t.Errorf("%s: %s found %v, want %v: %v", tt.name, f, found, is, got.Findings)
			}
		}
	}
	for _, f := range Flags() {
		t.Logf("%-18s precision %.2f recall %.2f of %d", f, ratio(hit[f], hit[f]+wrong[f]), ratio(hit[f], hit[f]+missed[f]), hit[f]+missed[f])
	}
	t.Logf("%d messages", len(corpus))
}

// TestFindingsAreRedacted: nothing that is said of a secret is the secret.
func TestFindingsAreRedacted(t *testing.T) {
	for _, secret := range []string{githubToken(40), "AKIA" + random(41, b32, 16), "pib_" + random(42, b32, 26), "Tr0ub4dor-33xyz", jwt(), "4539148803436467", "DE89370400440532013000", "219-09-9999"} {
		o := Message{Subject: "password: " + secret, Text: "password: " + secret, HTML: "<p>password: " + secret + "</p><div hidden>password: " + secret + "</div>"}
		got := Find(o)
		if len(got.Findings) == 0 {
			t.Errorf("%.6s…: nothing was found", secret)
		}
		for _, r := range got.Findings {
			if s := r.String(); strings.Contains(s, secret) || strings.Contains(s, secret[5:]) {
				t.Errorf("a remark tells: %s", s)
			}
		}
	}
	text := "a " + githubToken(43) + " b\npassword: Tr0ub4dor-33xyz\n" + pem("RSA ") + "end"
	got := Redact(text)
	if strings.Contains(got, "Tr0ub4dor-33xyz") || strings.Contains(got, githubToken(43)[8:]) || !strings.Contains(got, " b\npassword: ") || !strings.HasSuffix(got, "end") || len(got) > 300 {
		t.Errorf("redacted: %s", got)
	}
	if same := "nothing to see here"; Redact(same) != same {
		t.Errorf("changed: %q", Redact(same))
	}
}

// TestHostileMessagesStayBounded: what is large is read whole, or flagged; what is made to be
// slow is not.
func TestHostileMessagesStayBounded(t *testing.T) {
	big := strings.Repeat("lorem ipsum dolor sit amet 12345 a@b ", 300_000) // 11 MB
	if got := Find(Message{Text: big}); len(got.Flags) > 0 {
		t.Errorf("flags %v", got.Flags)
	}
	if got := Find(Message{Text: big + "\n" + githubToken(50)}); !slices.Contains(got.Flags, FlagSecret) {
		t.Errorf("a key at the end: flags %v", got.Flags)
	}
	bomb := zipped(t, "a", strings.Repeat("\x00", 8<<20), "b", strings.Repeat("x ", 4<<20))
	for name, o := range map[string]Message{
		"colons":  {Text: strings.Repeat("password:", 100_000)},
		"equals":  {Text: strings.Repeat("=", 1_000_000)},
		"digits":  {Text: strings.Repeat("4 ", 500_000)},
		"dashes":  {Text: strings.Repeat("-----BEGIN ", 100_000)},
		"urls":    {Text: strings.Repeat("a://b:c@", 100_000)},
		"tokens":  {Text: strings.Repeat("ghp_", 300_000)},
		"letters": {Text: strings.Repeat("DE89", 300_000)},
		"plus":    {Text: strings.Repeat("+1", 500_000)},
		"ats":     {Text: strings.Repeat("a@", 500_000)},
		"html":    {HTML: strings.Repeat("<div style='display:none'>", 100_000)},
		"a bomb":  {Files: []File{{Name: "a.zip", Data: bomb}, {Name: "b.zip", Data: bomb}}},
	} {
		Find(o) // the test's own time limit is the measure
		if len(Redact(o.Text)) == 0 && o.Text != "" {
			t.Errorf("%s: nothing is left of it", name)
		}
	}
}

func publicKey(t testing.TB) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(ed25519.NewKeyFromSeed([]byte(random(60, alnum, 32))).Public())
	if err != nil {
		t.Fatal(err)
	}
	return string(stdpem.EncodeToMemory(&stdpem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

// noisy is a picture that does not compress.
func noisy() image.Image {
	m := image.NewPaletted(image.Rect(0, 0, 48, 48), palette.WebSafe)
	copy(m.Pix, random(61, "\x00\x01\x02\x13\x44\x55\x66\x77", len(m.Pix)))
	return m
}

func drawing(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, noisy()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func photo(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := jpeg.Encode(&b, noisy(), nil); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func animation(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	m, _ := noisy().(*image.Paletted)
	if err := gif.EncodeAll(&b, &gif.GIF{Image: []*image.Paletted{m, m}, Delay: []int{1, 1}}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// commented is a JPEG file with a comment.
func commented(t testing.TB, comment string) []byte {
	t.Helper()
	p := photo(t)
	n := len(comment) + 2
	return slices.Concat(p[:2], []byte{0xff, 0xfe, byte(n >> 8), byte(n)}, []byte(comment), p[2:])
}

func FuzzFind(f *testing.F) {
	for _, tt := range outgoingCorpus(f) {
		var data []byte
		var name string
		if len(tt.o.Files) > 0 {
			data, name = tt.o.Files[0].Data, tt.o.Files[0].Name
		}
		f.Add(tt.o.Text, tt.o.HTML, name, data)
	}
	f.Fuzz(func(t *testing.T, text, doc, name string, data []byte) {
		got := Find(Message{Subject: text, Text: text, HTML: doc, Files: []File{{Name: name, Data: data}}, Raw: data})
		if len(got.Findings) > maxFindings || len(got.Findings) > 0 && len(got.Flags) == 0 {
			t.Errorf("%d remarks, flags %v", len(got.Findings), got.Flags)
		}
		for _, r := range got.Findings {
			if len(r.String()) > 1000 || strings.ContainsAny(r.String(), "\n\x1b\u202e") {
				t.Errorf("a remark that no terminal should see: %q", r.String())
			}
		}
		Redact(text)
	})
}

func BenchmarkFind(b *testing.B) {
	o := Message{Text: strings.Repeat("Dear Bob, the meeting is on Monday at 10:30 in room 4; call +49 30 123456 or see https://example.com/a?b=c.\n", 100)}
	b.SetBytes(int64(len(o.Text)))
	for b.Loop() {
		Find(o)
	}
}

// ratio returns a/b, and 1 of nothing.
func ratio(a, b int) float64 {
	if b == 0 {
		return 1
	}
	return float64(a) / float64(b)
}
