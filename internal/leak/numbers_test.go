package leak

import (
	"slices"
	"strings"
	"testing"
)

// numbersIn returns the rules that find a number in text.
func numbersIn(text string) (rules []string) {
	numbers(text, func(m match) { rules = append(rules, m.rule) })
	return rules
}

// TestIdentityNumbersNeedTheirChecksum: for each state a valid number, as its
// authorities publish for tests, and the same with another last character.
func TestIdentityNumbersNeedTheirChecksum(t *testing.T) {
	for _, tt := range []struct{ rule, text, wrong string }{
		{"us_social_security", "219-09-9999", "000-09-9999"},
		{"us_social_security", "219-09-9999", "219-00-9999"},
		{"us_social_security", "219-09-9999", "666-09-9999"},
		{"us_social_security", "219-09-9999", "078-05-1120"},
		{"br_cpf", "529.982.247-25", "529.982.247-26"},
		{"br_cpf", "111.444.777-35", "111.111.111-11"},
		{"es_dni", "12345678Z", "12345678A"},
		{"es_nie", "X1234567L", "X1234567M"},
		{"es_nie", "Z1234567R", "W1234567R"},
		{"it_codice_fiscale", "RSSMRA85T10A562S", "RSSMRA85T10A562T"},
		{"fr_social_security", "2 55 08 14 168 025 38", "2 55 08 14 168 025 39"},
		{"fr_social_security", "255081416802538", "955081416802538"},
		{"cn_resident_id", "11010519491231002X", "110105194912310021"},
		{"cn_resident_id", "11010519491231002X", "11010519491331002X"},
		{"fi_personal_id", "131052-308T", "131052-308U"},
		{"fi_personal_id", "131052-308T", "321052-308T"},
		{"se_personal_number", "811218-9876", "811218-9877"},
		{"pl_pesel", "PESEL 44051401359", "PESEL 44051401358"},
		{"pl_pesel", "PESEL 44051401359", "number 44051401359"},
		{"de_tax_id", "Steuer-ID 86095742719", "Steuer-ID 86095742718"},
		{"de_tax_id", "Steuer-ID 86095742719", "ticket 86095742719"},
		{"nl_bsn", "BSN 111222333", "BSN 111222334"},
		{"uk_national_insurance", "NINO AB123456C", "NINO DB123456C"},
		{"uk_national_insurance", "NINO AB123456C", "part AB123456C"},
	} {
		if got := numbersIn("It is " + tt.text + "."); !slices.Contains(got, tt.rule) {
			t.Errorf("%s: %q is found as %v", tt.rule, tt.text, got)
		}
		if got := numbersIn("It is " + tt.wrong + "."); slices.Contains(got, tt.rule) {
			t.Errorf("%s: %q is found", tt.rule, tt.wrong)
		}
		if got := numbersIn(tt.text + "7"); slices.Contains(got, tt.rule) {
			t.Errorf("%s: %q within a longer word is found", tt.rule, tt.text)
		}
	}
}

// TestAccountNumbersNeedTheirCountrysLength: examples of the IBAN registry (ISO
// 13616).
func TestAccountNumbersNeedTheirCountrysLength(t *testing.T) {
	for _, iban := range []string{
		"AT611904300234573201", "BE68539007547034", "CH9300762011623852957", "CZ6508000000192000145399", "DE89370400440532013000", "DK5000400440116243",
		"ES9121000418450200051332", "FI2112345600000785", "FR1420041010050500013M02606", "GB29NWBK60161331926819", "IE29AIBK93115212345678",
		"IT60X0542811101000000123456", "NL91ABNA0417164300", "NO9386011117947", "PL61109010140000071219812874", "PT50000201231234567890154", "SE4550000000058398257466",
	} {
		spaced := ""
		for i := 0; i < len(iban); i += 4 {
			spaced += iban[i:min(len(iban), i+4)] + " "
		}
		for _, text := range []string{iban, spaced, "IBAN:" + iban + ".", strings.ReplaceAll(strings.TrimSpace(spaced), " ", "-")} {
			if got := numbersIn(text); !slices.Contains(got, "iban") {
				t.Errorf("%q is not found", text)
			}
		}
		last := iban[len(iban)-1]
		wrong := iban[:len(iban)-1] + string('0'+(last-'0'+1)%10)
		for _, text := range []string{wrong, iban[:len(iban)-1], iban + "0", strings.ToLower(iban), "x" + iban} {
			if got := numbersIn(text); slices.Contains(got, "iban") {
				t.Errorf("%q is found", text)
			}
		}
	}
}

// TestCardsNeedTheirCheckDigit: ISO/IEC 7812; every change of one digit is
// noticed.
func TestCardsNeedTheirCheckDigit(t *testing.T) {
	for _, card := range []string{"4539148803436467", "5425233430109903", "374245455400126", "2720992593319364", "6011000180331112", "36227206271667"} {
		for _, text := range []string{card, card[:4] + " " + card[4:8] + " " + card[8:], card[:4] + "-" + card[4:], "(" + card + ")"} {
			if got := numbersIn(text); !slices.Contains(got, "payment_card") {
				t.Errorf("%q is not found", text)
			}
		}
		for i := range card {
			wrong := card[:i] + string('0'+(card[i]-'0'+1)%10) + card[i+1:]
			if got := numbersIn(wrong); slices.Contains(got, "payment_card") {
				t.Errorf("%q is found", wrong)
			}
		}
	}
	for _, text := range []string{"4242 4242 4242 4242", "4444444444444444", "4539148803436467890", "1.4539148803436467", "a4539148803436467", "4539  1488 0343 6467"} {
		if got := numbersIn(text); slices.Contains(got, "payment_card") {
			t.Errorf("%q is found", text)
		}
	}
}

// TestRedactionKeepsTheRestOfTheText: what stands around a secret is unchanged,
// and redacting twice changes nothing more.
func TestRedactionKeepsTheRestOfTheText(t *testing.T) {
	token := githubToken(60)
	for _, tt := range []struct{ name, text, want string }{
		{"nothing", "hello there", "hello there"},
		{"a token", "before " + token + " after", "before ghp_… [40 characters] after"},
		{"two", token + "," + token, "ghp_… [40 characters],ghp_… [40 characters]"},
		{"a short password", "password: hunter2, ok", "password: h… [7 characters], ok"},
		{"a password of letters", "password: swordfish\nok", "password: sw… [9 characters]\nok"},
		{"in a URL", "postgres://app:hunter2@db", "postgres://app:h… [7 characters]@db"},
		{"a card stays", "card 4539 1488 0343 6467", "card 4539 1488 0343 6467"},
		{"letters of another script", "пароль: zima2026, да", "пароль: zi… [8 characters], да"},
	} {
		if got := Redact(tt.text); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
		if got := Redact(Redact(tt.text)); got != Redact(tt.text) {
			t.Errorf("%s: redacted again, it is %q", tt.name, got)
		}
	}
}

// TestFilesOfSecretsAreKnownByName, wherever they are, and examples are not.
func TestFilesOfSecretsAreKnownByName(t *testing.T) {
	for name, want := range map[string]bool{
		".env": true, "app/.env": true, `C:\app\.ENV`: true, ".env.production": true, ".env.example": false, ".env.sample": false, "id_rsa": true, "id_rsa.pub": false,
		"server.key": true, "public.key": false, "a.pem": true, "a-public.pem": false, "a.kdbx": true, "credentials": true, "credentials.md": false, "terraform.tfstate": true, "report.pdf": false, "": false,
	} {
		if got := secretFile(name); got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
}
