package leak

import (
	"slices"
	"strings"
	"time"
)

// An identityNumber describes the numbers by which one state identifies people.
type identityNumber struct {
	rule  string
	forms []string // 9 is a digit, A a capital, X either; everything else stands for itself
	near  []string // words of which one must stand before the number, in lower case, if its checksum is too weak alone
	valid func(v string) bool
}

// identityNumbers are looked for in this order. A number without a checksum or a
// distinctive form is not listed: any mail has some.
var identityNumbers = []identityNumber{
	{rule: "us_social_security", forms: []string{"999-99-9999"}, valid: socialSecurity},
	{rule: "br_cpf", forms: []string{"999.999.999-99"}, valid: cpf},
	{rule: "es_dni", forms: []string{"99999999A"}, valid: dni},
	{rule: "es_nie", forms: []string{"A9999999A"}, valid: nie},
	{rule: "it_codice_fiscale", forms: []string{"AAAAAAXXAXXAXXXA"}, valid: codiceFiscale},
	{rule: "fr_social_security", forms: []string{"9 99 99 99 999 999 99", "999999999999999"}, valid: nir},
	{rule: "cn_resident_id", forms: []string{"99999999999999999X"}, valid: residentID},
	{rule: "fi_personal_id", forms: []string{"999999-999X", "999999+999X", "999999A999X"}, valid: henkilotunnus},
	{rule: "se_personal_number", forms: []string{"999999-9999"}, valid: personnummer},
	{rule: "pl_pesel", forms: []string{"99999999999"}, near: []string{"pesel"}, valid: func(v string) bool { return weighted(v, 1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)%10 == 0 }},
	{rule: "de_tax_id", forms: []string{"99999999999"}, near: []string{"steuer", "tax id", "tin", "identifikationsnummer"}, valid: steuerID},
	{rule: "nl_bsn", forms: []string{"999999999"}, near: []string{"bsn", "burgerservice"}, valid: func(v string) bool { return weighted(v, 9, 8, 7, 6, 5, 4, 3, 2, -1)%11 == 0 }},
	{rule: "uk_national_insurance", forms: []string{"AA999999A"}, near: []string{"national insurance", "nino", " ni ", "ni number"}, valid: nino},
}

// identity returns the length and the rule of the number at the beginning of s;
// before is what stands in front of it.
func identity(s, before string) (n int, rule string) {
	low := strings.ToLower(before)
	for _, id := range identityNumbers {
		for _, pattern := range id.forms {
			v, ok := form(s, pattern)
			if !ok || !id.valid(v) {
				continue
			}
			if len(id.near) == 0 || slices.ContainsFunc(id.near, func(w string) bool { return strings.Contains(low, w) }) {
				return len(v), id.rule
			}
		}
	}
	return 0, ""
}

// form returns the beginning of s if it has the form of pattern and no word goes
// on behind it.
func form(s, pattern string) (v string, ok bool) {
	if len(s) < len(pattern) || len(s) > len(pattern) && wordByte(s[len(pattern)]) {
		return "", false
	}
	for i := range len(pattern) {
		c := s[i]
		capital := c >= 'A' && c <= 'Z'
		switch pattern[i] {
		case '9':
			ok = digit(c)
		case 'A':
			ok = capital
		case 'X':
			ok = digit(c) || capital
		default:
			ok = c == pattern[i]
		}
		if !ok {
			return "", false
		}
	}
	return s[:len(pattern)], true
}

// number returns the value of the digits of s, without what parts them.
func number(s string) (v int64) {
	for i := range len(s) {
		if digit(s[i]) {
			v = v*10 + int64(s[i]-'0')
		}
	}
	return v
}

// weighted returns the sum of digits times weights.
func weighted(digits string, weights ...int) (sum int) {
	for i, w := range weights {
		sum += w * int(digits[i]-'0')
	}
	return sum
}

// date says whether there is such a day.
func date(yyyymmdd string) bool {
	t, err := time.Parse("20060102", yyyymmdd)
	return err == nil && t.Year() >= 1900 && t.Year() <= 2100
}

// socialSecurity knows the area, group and serial numbers that the United States
// never issue, and the numbers of two well-known advertisements. There is no
// checksum.
func socialSecurity(v string) bool {
	area, group, serial := v[:3], v[4:6], v[7:]
	return area != "000" && area != "666" && area < "900" && group != "00" && serial != "0000" && v != "078-05-1120" && v != "123-45-6789"
}

// cpf checks the two check digits of Brazil, modulo 11.
func cpf(v string) bool {
	d := v[:3] + v[4:7] + v[8:11] + v[12:]
	check := func(k int) bool {
		sum := 0
		for i := range k {
			sum += int(d[i]-'0') * (k + 1 - i)
		}
		return sum*10%11%10 == int(d[k]-'0')
	}
	return check(9) && check(10) && strings.Count(d, d[:1]) < 11
}

const dniLetters = "TRWAGMYFPDXBNJZSQVHLCKE" // by the number modulo 23

// dni checks the letter of Spain's citizens.
func dni(v string) bool { return dniLetters[number(v[:8])%23] == v[8] }

// nie checks the letter of Spain's foreigners, whose X, Y or Z counts as 0 to 2.
func nie(v string) bool {
	return v[0] >= 'X' && v[0] <= 'Z' && dniLetters[(int64(v[0]-'X')*10000000+number(v[1:8]))%23] == v[8]
}

// nir checks the key of France, 97 less the number modulo 97, the sex and the
// month.
func nir(v string) bool {
	d := strings.ReplaceAll(v, " ", "")
	return (d[0] == '1' || d[0] == '2') && 97-number(d[:13])%97 == number(d[13:]) && d[3:5] >= "01" && d[3:5] <= "12"
}

// residentID checks the date of birth and the check character of China (GB
// 11643, ISO 7064 MOD 11-2).
func residentID(v string) bool {
	return date(v[6:14]) && "10X98765432"[weighted(v, 7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)%11] == v[17]
}

// henkilotunnus checks the date of birth and the check character of Finland. The
// sign between the date and the number says the century.
func henkilotunnus(v string) bool {
	return date("19"+v[4:6]+v[2:4]+v[:2]) && "0123456789ABCDEFHJKLMNPRSTUVWXY"[number(v[:6]+v[7:10])%31] == v[10]
}

// personnummer checks the date of birth and the Luhn digit of Sweden.
func personnummer(v string) bool { return date("19"+v[:6]) && luhn(v[:6]+v[7:]) }

// nino checks the letters that Britain never issues.
func nino(v string) bool {
	return strings.IndexByte("ABCD", v[8]) >= 0 && strings.IndexByte("DFIQUV", v[0]) < 0
}

// codiceFiscale checks the last letter of Italy: the sum of the characters, of
// which those in odd places have values of their own, modulo 26.
func codiceFiscale(v string) bool {
	const odd = "BAKPLCQDREVOSFTGUHMINJWZYX" // letter whose place is the value, in odd places
	sum := 0
	for i := range 15 {
		k := int(v[i] - 'A')
		if digit(v[i]) {
			k = int(v[i] - '0')
		}
		if i%2 == 1 {
			sum += k
			continue
		}
		sum += strings.IndexByte(odd, byte('A'+k))
	}
	return byte('A'+sum%26) == v[15]
}

// steuerID checks the last digit of Germany (ISO 7064 MOD 11, 10).
func steuerID(d string) bool {
	if d[0] == '0' {
		return false
	}
	p := 10
	for i := range 10 {
		s := (int(d[i]-'0') + p) % 10
		if s == 0 {
			s = 10
		}
		p = s * 2 % 11
	}
	check := 11 - p
	if check == 10 {
		check = 0
	}
	return check == int(d[10]-'0')
}
